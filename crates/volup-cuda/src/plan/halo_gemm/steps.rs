//! What plans of `halo_gemm` launch.

use super::super::{
    Argument, Buffer, Context, Step, Workspace, activation_code, direct, epilogue, int, push, size, strides,
};
use super::{Halo, has_gaps, kind};
use crate::plan::classes::{Classes, Short};
use crate::plan::pack::{self, Operand};
use volup::{MemoryFormat, Result};

/// Where the split's 2^-ex lies among the control words, in bytes.
const SCALE: u64 = 16;
/// Products of a row and a column that are summed before the split's go to registers.
const PROMOTED: usize = 192;
/// The time, in seconds, below which a launch that starts early gains by it in any case.
const SHORT: f64 = 3e-4;
/// Threads of the packs.
const THREADS: usize = 256;
/// Blocks of a multiprocessor that the weight's pack is cut into at least, as far as pieces of the weight that a block
/// brings to shared memory are no fewer than these, and no more.
const PACK_BLOCKS: usize = 2;
const PACK_PIECES: [usize; 2] = [256, 2304];
/// Channels of a block where a kernel has more pieces: what they write together is whole sectors.
const PACK_CHANNELS: usize = 4;

/// What blocks of the weight's pack take: the kernel's arguments of these names.
struct WeightCut {
    run: usize,
    runs: usize,
    lines: usize,
    line_runs: usize,
    pitch: usize,
    each: usize,
}

impl Halo<'_> {
    /// What is launched.
    pub(in crate::plan) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let control = pack::control(workspace, steps);
        if self.operand == Operand::Split {
            pack::largest(context, control, steps)?;
        }
        let (weight, scale) = self.pack_weight(context, control, workspace, steps)?;
        if context.packed {
            let at = |at| Argument::Pointer(Buffer::Workspace, at);
            let operands = [Argument::Pointer(Buffer::Input, 0), at(weight), at(control + SCALE), at(scale)];
            return self.multiply(context, operands, self.batch, 0, steps);
        }
        let panels = self.slices * self.panels() * self.operand.parts();
        let input = workspace.take(self.packed_rows(self.batch) * panels * 16);
        let [batch, channels, ..] = request.geometry.input_shape();
        let in_sample = channels * self.axes.iter().map(|axis| axis.axis.input).product::<usize>();
        let out_sample = request.geometry.conv().out_channels() * request.geometry.output_voxels();
        for start in (0..batch).step_by(self.batch) {
            let count = self.batch.min(batch - start);
            let at = |sample: usize| (start * sample * request.dtype.size()) as u64;
            self.pack_input(context, control, input, count, at(in_sample), steps)?;
            if start == 0 && has_gaps(&self.lattices) {
                self.fill(context, steps)?;
            }
            let operands = [input, weight, control + SCALE, scale];
            let operands = operands.map(|at| Argument::Pointer(Buffer::Workspace, at));
            self.multiply(context, operands, count, at(out_sample), steps)?;
        }
        // Where the input or the weight holds what the fast path cannot compute with, the definition.
        steps.push(direct::step(context, Some(control))?);
        Ok(())
    }

    /// What outputs are that no tap reaches, everywhere.
    fn fill(&self, context: Context<'_>, steps: &mut Vec<Step>) -> Result<()> {
        let request = context.request;
        let (conv, volume) = (request.geometry.conv(), request.geometry.output_voxels());
        let count: usize = request.geometry.output_shape().iter().product();
        let inner = if request.output_format == MemoryFormat::Contiguous { volume } else { 1 };
        let mut arguments = [Buffer::Bias, Buffer::Output].map(|of| Argument::Pointer(of, 0)).to_vec();
        push(&mut arguments, [conv.out_channels(), inner])?;
        let (code, slope) = activation_code(epilogue(&request.block)[0]);
        arguments.extend([Argument::I64(count as i64), i32::from(conv.has_bias()).into(), code.into()]);
        arguments.push(Argument::F64(slope));
        let kind = i64::from(self.operand != Operand::Half);
        let variant = *context.kernel("fill_output", &self.operand.types(context), &[("KIND", kind)])?;
        let vectors = (count * request.dtype.size()).div_ceil(16);
        let blocks = vectors.div_ceil(THREADS).min(8 * context.device.multiprocessors);
        // Nothing here needs the packs.
        steps.push(Step::Launch {
            variant,
            grid: [blocks as u32, 1, 1],
            shared: 0,
            arguments,
            overlap: true,
        });
        Ok(())
    }

    fn pack_weight(
        &self,
        context: Context<'_>,
        control: u64,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<(u64, u64)> {
        let request = context.request;
        let conv = request.geometry.conv();
        let split = self.operand == Operand::Split;
        let [d_kernel, h_kernel, w_kernel] = conv.kernel_size();
        let n = size(self.kernel, "BN");
        let columns = self.slices * self.blocks * n;
        let items = columns * d_kernel * h_kernel * self.w_steps * self.panels();
        let at = workspace.take(items * 16 * self.operand.parts());
        let first = usize::from(request.output_format == MemoryFormat::Contiguous);
        // What has a scale: columns, or channels whose taps are columns; how many of these lie together.
        let (scaled, [together, apart]) = match self.fold {
            Some(fold) => (self.blocks * fold.channels, [1, self.blocks * fold.channels]),
            None => (self.blocks * n, [self.outputs(), self.slice_out]),
        };
        let inner = if first == 1 { together } else { apart };
        let scale = workspace.take(if split { self.slices * scaled * 4 } else { 0 });
        if split {
            pack::weight_scale(context, self.slices, scaled, inner, scale, control, steps)?;
        }
        let pointer = |at| Argument::Pointer(Buffer::Workspace, at);
        let mut arguments = vec![Argument::Pointer(Buffer::Weight, 0), pointer(at)];
        arguments.push(pointer(if split { scale } else { control }));
        let cut = self.weight_cut(context);
        push(&mut arguments, [cut.run, cut.lines, cut.line_runs, cut.pitch, cut.each])?;
        let (cin, cout, groups) = (conv.in_channels(), conv.out_channels(), conv.groups());
        let width = &self.axes[2];
        push(&mut arguments, [self.chunk_panels, self.chunks, n, self.blocks])?;
        push(&mut arguments, [self.slice_out, self.slice_in, cin / groups, cout / groups])?;
        push(&mut arguments, [self.outputs(), first, self.block, self.channel_panels])?;
        push(&mut arguments, [width.first, width.axis.stride, width.axis.dilation])?;
        push(&mut arguments, [d_kernel, h_kernel, w_kernel])?;
        arguments.push((self.w_low as i32).into());
        push(&mut arguments, [self.w_steps, self.w_step, self.fold.map_or(1, |fold| fold.taps)])?;
        let params = [("KIND", kind(self.operand))];
        let variant = *context.kernel("halo_pack_weight", &self.operand.types(context), &params)?;
        let grid = [cut.runs * cut.line_runs, self.panels(), self.slices].map(|blocks| blocks as u32);
        let shared = (cut.run * cut.pitch * 16 * self.operand.parts()) as u32;
        steps.push(Step::Launch { variant, grid, shared, arguments, overlap: false });
        Ok((at, scale))
    }

    /// How the weight's pack is cut into blocks.
    fn weight_cut(&self, context: Context<'_>) -> WeightCut {
        let request = context.request;
        let [d_kernel, h_kernel, w_kernel] = request.geometry.conv().kernel_size();
        let columns = self.blocks * size(self.kernel, "BN");
        let first = request.output_format == MemoryFormat::Contiguous;
        let (channels, each) = match self.fold {
            Some(fold) => (self.blocks * fold.channels, fold.taps),
            None if first => (columns.div_ceil(self.outputs()), self.outputs()),
            None => (self.slice_out, columns.div_ceil(self.slice_out)),
        };
        let (kernel_lines, panels) = (d_kernel * h_kernel, self.slices * self.panels());
        let pieces = panels * channels * kernel_lines * w_kernel;
        let [least, most] = PACK_PIECES;
        let pieces = (pieces / (PACK_BLOCKS * context.device.multiprocessors))
            .clamp(least, most / self.operand.parts());
        // Neighbouring threads read pieces of neighbouring banks: those of a channel's columns, then the next channel's.
        let apart = if first && self.fold.is_none() { each % 8 } else { 1 };
        let pitch = |lines: usize| lines * w_kernel + (apart + 8 - lines * w_kernel % 8) % 8;
        // Whole kernels of pairs of channels, unless these are large.
        let few = (pieces / pitch(1)).clamp(1, PACK_CHANNELS);
        let run = (pieces / pitch(kernel_lines) / 2 * 2).max(few).min(channels);
        let run = channels.div_ceil(channels.div_ceil(run)).next_multiple_of(2).min(run);
        let lines = (1..=kernel_lines).rev().find(|&lines| run * pitch(lines) <= pieces).unwrap_or(1);
        let pitch = pitch(lines);
        let [runs, line_runs] = [channels.div_ceil(run), kernel_lines.div_ceil(lines)];
        WeightCut { run, runs, lines, line_runs, pitch, each }
    }

    fn pack_input(
        &self,
        context: Context<'_>,
        control: u64,
        input: u64,
        count: usize,
        at: u64,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let [_, _, depth, height, width] = request.geometry.input_shape();
        let pointer = |at| Argument::Pointer(Buffer::Workspace, at);
        let mut arguments = vec![Argument::Pointer(Buffer::Input, at), pointer(input), pointer(control)];
        let rows = self.packed_rows(count);
        let [pd, ph, _] = self.axes.map(|axis| axis.pitch);
        push(&mut arguments, [rows, self.lead, pd, ph, self.pw, self.block, count, depth, height, width])?;
        push(&mut arguments, [self.slices, self.slice_in, self.panels(), self.channel_panels])?;
        push(&mut arguments, strides(request.geometry.input_shape(), request.input_format))?;
        // One thread for each row, so that finding it is paid for once, unless there are few rows.
        let most = 1 << (self.slices * self.channel_panels).min(8).ilog2();
        let busy = context.device.multiprocessors * 4096;
        let lanes = (busy / rows).max(1).next_power_of_two().min(most);
        push(&mut arguments, [lanes])?;
        let params = [("KIND", kind(self.operand))];
        let variant = *context.kernel("halo_pack_input", &self.operand.types(context), &params)?;
        let grid = [rows.div_ceil(THREADS / lanes) as u32, 1, 1];
        // The first goes along with the weight's; later ones write what the product before them reads.
        steps.push(Step::Launch { variant, grid, shared: 0, arguments, overlap: at == 0 });
        Ok(())
    }

    fn multiply(
        &self,
        context: Context<'_>,
        [input, weight, scale_x, scale_w]: [Argument; 4],
        count: usize,
        at: u64,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let conv = request.geometry.conv();
        let split = self.operand == Operand::Split;
        let mut arguments = vec![input, weight];
        if split {
            arguments.extend([scale_x, scale_w]);
        }
        let [y_n, y_c, y @ ..] = strides(request.geometry.output_shape(), request.output_format);
        let first: usize = y.iter().zip(self.lattices).map(|(stride, lattice)| stride * lattice.first).sum();
        let at = at + (first * request.dtype.size()) as u64;
        let [y_d, y_h, y_w] = [0, 1, 2].map(|axis| y[axis] * self.lattices[axis].step);
        arguments.extend([Argument::Pointer(Buffer::Bias, 0), Argument::Pointer(Buffer::Output, at)]);
        let [depth, height, width] = &self.axes;
        let rows = self.rows(count);
        push(&mut arguments, [rows, self.packed_rows(count), self.lead, depth.pitch, height.pitch, self.pw])?;
        depth.push(&mut arguments)?;
        height.push(&mut arguments)?;
        push(&mut arguments, [depth.axis.input, self.outputs()])?;
        arguments.push((width.shift() as i32).into());
        arguments.push(int(width.axis.output)?.into());
        arguments.push((self.w_low as i32).into());
        push(&mut arguments, [self.w_steps, self.w_step, self.chunk_panels, self.chunks, self.slices])?;
        push(&mut arguments, [self.blocks, self.slice_out])?;
        push(&mut arguments, [y_n, y_c, y_d, y_h, y_w])?;
        let first = i32::from(request.output_format == MemoryFormat::Contiguous);
        let (code, slope) = activation_code(epilogue(&request.block)[0]);
        arguments.extend([first, i32::from(conv.has_bias()), code].map(Argument::from));
        arguments.push(Argument::F64(slope));
        let [whole_h, resident] = [self.whole_h, self.resident].map(usize::from);
        push(&mut arguments, [self.a_stages, self.stage_rows, whole_h, self.b_stages])?;
        push(&mut arguments, [self.unit_steps, resident, usize::from(self.by_work)])?;
        if self.operand.parts() == 2 {
            // To the nearest whole number.
            let unit = self.unit_steps * self.chunk_panels * 16 / self.operand.bytes();
            arguments.push(int(((PROMOTED + unit / 2) / unit).max(1))?.into());
        }
        if let Some(Short { panels, classes: Classes { counts, full, .. } }) = self.short {
            push(&mut arguments, [panels, counts[1], counts[2]].into_iter().chain(full))?;
        }
        if let Some(fold) = self.fold {
            push(&mut arguments, [fold.advance, width.axis.dilation, fold.reach])?;
        }
        let all = self.slices * self.blocks;
        let phases = depth.axis.stride * height.axis.stride;
        let tiles = rows.div_ceil(self.advance()) * phases * all;
        let side_by_side = context.device.multiprocessors * size(self.kernel, "CTAS");
        // Each block keeps to its columns, or to pairs of phases.
        let multiple = if self.by_work {
            all * phases
        } else if self.resident {
            all
        } else {
            1
        };
        let blocks = (tiles.min(side_by_side) / multiple).max(1) * multiple;
        let (grid, shared) = ([blocks as u32, 1, 1], self.shared as u32);
        // Short ones gain by starting early. Long ones that write parts of sectors, which meet in the cache, were
        // seen to lose more than that.
        let overlap = self.seconds < SHORT || self.outputs() == 1;
        steps.push(Step::Launch { variant: *self.kernel, grid, shared, arguments, overlap });
        Ok(())
    }
}

//! What plans of `halo_gemm` launch.

use super::super::{
    Argument, Buffer, Context, Step, Workspace, bias_and_activation, direct, int, push, size, strides,
};
use super::{Halo, has_gaps};
use crate::plan::classes::{Classes, Short};
use crate::plan::norm::Way;
use crate::plan::norm_behind;
use crate::plan::pack::Operand;
use crate::plan::panels::{WeightPanels, most_teams};
use crate::plan::phases::{Lattice, strides_of_lattices};
use volup::{MemoryFormat, Result};

/// Products of a row and a column that are summed before the split's go to registers.
const PROMOTED: usize = 192;
/// The time, in seconds, below which a launch that starts early gains by it in any case.
const SHORT: f64 = 3e-4;
/// Threads of the packs.
const THREADS: usize = 256;
impl Halo<'_> {
    /// What is launched.
    pub(in crate::plan) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let more = if self.along { self.input(context, self.batch).words() } else { 0 };
        let (control, words) = norm_behind::control(context, more, self.behind, workspace, steps);
        let [weight, scale] = self.pack_weight(context, control, workspace, steps)?;
        if context.packed {
            let at = |at| Argument::Pointer(Buffer::Workspace, at);
            let operands = [Argument::Pointer(Buffer::Input, 0), at(weight), at(control), at(scale)];
            return self.multiply(context, operands, control, (self.batch, 0), Vec::new(), steps);
        }
        let panels = self.slices * self.panels() * self.operand.parts();
        let input = workspace.take(self.packed_rows(self.batch) * panels * 16);
        let [batch, channels, ..] = request.geometry.input_shape();
        let in_sample = channels * self.axes.iter().map(|axis| axis.axis.input).product::<usize>();
        let out_sample = request.geometry.conv().out_channels() * request.geometry.output_voxels();
        let (parts, statistics) = self.of_samples.tell_with_norm(context, self.way, words, workspace)?;
        for start in (0..batch).step_by(self.batch) {
            let count = self.batch.min(batch - start);
            let at = |sample: usize| (start * sample * request.dtype.size()) as u64;
            if !self.along {
                // The first goes along with the weight's; later ones write what the product before them reads.
                let panels = self.input(context, count);
                panels.pack(context, at(in_sample), input, Some(control), start == 0, steps)?;
            }
            if start == 0 && has_gaps(&self.lattices) && self.between.is_none() {
                fill(context, self.operand, &self.lattices, steps)?;
            }
            let operands = [input, weight, control, scale];
            let operands = operands.map(|at| Argument::Pointer(Buffer::Workspace, at));
            let part = (count, at(out_sample));
            self.multiply(context, operands, control, part, statistics.clone(), steps)?;
        }
        // Where the input or the weight holds what the fast path cannot compute with, the definition.
        if !self.knows_early(context) {
            steps.push(direct::guard(context, self.operand, control)?);
        }
        self.of_samples.finish(context, parts, self.behind > 0, control, workspace, steps)
    }

    /// Whether both operands are packed when the product starts, which then sees itself whether it can stand; `WITHIN` of the
    /// kernel's file says which has no registers for that.
    fn knows_early(&self, context: Context<'_>) -> bool {
        let has_registers = ["BN", "MI", "WGS"].map(|name| size(self.kernel, name)) != [64, 2, 4];
        let at_once = self.batch == context.request.geometry.batch();
        has_registers
            && self.between.is_none()
            && at_once
            && !self.along
            && !context.packed
            && self.way == Way::Plain
    }

    fn pack_weight(
        &self,
        context: Context<'_>,
        control: u64,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<[u64; 2]> {
        let request = context.request;
        let n = size(self.kernel, "BN");
        let width = &self.axes[2];
        let panels = WeightPanels {
            operand: self.operand,
            slices: self.slices,
            blocks: self.blocks,
            columns: n,
            chunks: self.chunks,
            chunk_panels: self.chunk_panels,
            channel_panels: self.channel_panels,
            block: self.block,
            outputs: self.outputs(),
            width: [width.first, width.axis.stride, width.axis.dilation],
            low: self.w_low,
            steps: self.w_steps,
            step: self.w_step as i64,
            taps: self.fold.map_or(1, |fold| fold.taps),
            sweeps: false,
        };
        let first = usize::from(request.output_format == MemoryFormat::Contiguous);
        // What has a scale: columns, or channels whose taps are columns; how many of these lie together.
        let (scaled, [together, apart]) = match self.fold {
            Some(fold) => (self.blocks * fold.channels, [1, self.blocks * fold.channels]),
            None => (self.blocks * n, [self.outputs(), self.slice_out]),
        };
        panels.steps(context, [scaled, if first == 1 { together } else { apart }], control, workspace, steps)
    }

    fn multiply(
        &self,
        context: Context<'_>,
        [input, weight, control, scale]: [Argument; 4],
        control_at: u64,
        (count, at): (usize, u64),
        statistics: Vec<Argument>,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let mut arguments = vec![input, weight, control];
        if self.operand.has_scale() {
            arguments.push(scale);
        }
        let [y_n, y_c, y @ ..] = strides(request.geometry.output_shape(), request.output_format);
        let (first, [y_d, y_h, y_w]) = strides_of_lattices(&self.lattices, y);
        let at = at + (first * request.dtype.size()) as u64;
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
        arguments.push(first.into());
        arguments.extend(bias_and_activation(request));
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
        if let Some(between) = self.between {
            between.push(&mut arguments)?;
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
        let blocks = if self.team > 1 {
            tiles.min(most_teams(context, self.kernel)) * self.team
        } else {
            (tiles.min(side_by_side) / multiple).max(1) * multiple
        };
        let panels = self.input(context, count);
        let [_, height, width] = panels.voxels;
        arguments.push(Argument::Pointer(Buffer::Input, 0));
        push(&mut arguments, [count, height, width, self.block, panels.panels])?;
        panels.along(context, self.along.then_some(blocks * self.advance()), &mut arguments)?;
        let within = self.knows_early(context).then_some(control_at);
        arguments.extend(direct::within(context, within)?);
        arguments.extend(self.operand.unless());
        arguments.extend(statistics);
        let (grid, shared) = ([blocks as u32, 1, 1], self.shared as u32);
        // Short ones gain by starting early. Long ones that write parts of sectors, which meet in the cache, were
        // seen to lose more than that.
        let overlap = self.seconds < SHORT || self.outputs() == 1;
        steps.push(Step::Launch { variant: *self.kernel, grid, shared, arguments, overlap });
        Ok(())
    }
}

/// What outputs are that no tap reaches: everywhere, or where those on lattices are whole vectors, of their channels, but for these.
pub(in crate::plan) fn fill(
    context: Context<'_>,
    operand: Operand,
    lattices: &[Lattice; 3],
    steps: &mut Vec<Step>,
) -> Result<()> {
    let request = context.request;
    let (conv, volume) = (request.geometry.conv(), request.geometry.output_voxels());
    let count: usize = request.geometry.output_shape().iter().product();
    let inner = if request.output_format == MemoryFormat::Contiguous { volume } else { 1 };
    let mut arguments = [Buffer::Bias, Buffer::Output].map(|of| Argument::Pointer(of, 0)).to_vec();
    push(&mut arguments, [conv.out_channels(), inner])?;
    arguments.push(Argument::I64(count as i64));
    arguments.extend(bias_and_activation(request));
    let whole = (conv.out_channels() * request.dtype.size()).is_multiple_of(16);
    let leaves = inner == 1 && whole && count < 1 << 31;
    let [.., d_out, h_out, w_out] = request.geometry.output_shape();
    push(&mut arguments, [usize::from(leaves), d_out, h_out, w_out])?;
    push(&mut arguments, lattices.iter().flat_map(|lattice| [lattice.first, lattice.step]))?;
    let params = [("KIND", operand.tensor_kind())];
    let variant = *context.kernel("fill_output", &operand.types(context), &params)?;
    let vectors = (count * request.dtype.size()).div_ceil(16);
    let blocks = vectors.div_ceil(THREADS).min(8 * context.device.multiprocessors);
    // Nothing here needs the packs.
    steps.push(Step::Launch { variant, grid: [blocks as u32, 1, 1], shared: 0, arguments, overlap: true });
    Ok(())
}

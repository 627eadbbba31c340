//! Planning `linear_gemm`: pitches, windows, slices of channels, tiles. The kernels' file says what
//! the numbers mean.

use super::pack::{self, Operand, PackedWeight, WeightLayout};
use super::phases::PhaseAxis;
use super::{
    Argument, Buffer, Context, Step, Workspace, bias_and_activation, direct, int, push, size, strides,
};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Where the split's 2^-ex lies among the control words, in bytes.
const SCALE: u64 = 16;
/// The packed input takes at most this much of the input's own memory, or the batch is cut.
const MOST_PACKED: f64 = 2.0;
/// The most rows that a tile of the packed input has.
const MOST_ROWS: usize = 256;
/// What a launch costs beside its work, in seconds.
const LAUNCH: f64 = 3e-6;
/// Bytes a second that the pack and the output's rows move at.
const BANDWIDTH: f64 = 3e12;

/// Executed flops a second of one multiprocessor: the measured rates of an H200, shared out.
fn rate(operand: Operand) -> f64 {
    let all = match operand {
        Operand::Half => 500e12,
        Operand::Tf32 | Operand::Scaled => 260e12,
        Operand::Split | Operand::Parts => 150e12,
    };
    all / 132.0
}

/// Whether a kernel's way to store y fits: by single elements always, by vectors where they are whole.
fn stores(kernel: &Variant, context: Context<'_>, axes: &[PhaseAxis; 3], slices: usize) -> bool {
    let conv = context.request.geometry.conv();
    let vectors = |size: usize| size.is_multiple_of(8);
    match kernel.param("STORE") {
        Some(2) => {
            let slice = conv.out_channels() / slices;
            vectors(slice) && vectors(conv.out_channels()) && (slices == 1 || axes[2].axis.stride == 1)
        }
        Some(3) => {
            let is_output = |axis: &PhaseAxis| {
                axis.axis.stride == 1 && axis.axis.padding == 0 && axis.pitch == axis.axis.output
            };
            axes.iter().all(is_output) && vectors(context.request.geometry.output_voxels())
        }
        _ => true,
    }
}

/// A plan of this family.
pub(super) struct Linear<'a> {
    operand: Operand,
    kernel: &'a Variant,
    tile: [usize; 3],
    axes: [PhaseAxis; 3],
    /// Samples that are packed and computed at a time.
    batch: usize,
    slices: usize,
    slice_in: usize,
    slice_out: usize,
    /// Elements of a packed position, and how many of them belong to a slice.
    pitch: usize,
    slice_pitch: usize,
    /// Elements of a run of the reduction, and how many runs along width there are, how far apart.
    window: usize,
    w_steps: usize,
    w_step: usize,
    chunks: usize,
    blocks: usize,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for Linear<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [m, n, k] = self.tile;
        let operand = self.operand.name();
        write!(f, "linear_gemm {operand} {m}x{n}x{k}, {} slices, batches of {}", self.slices, self.batch)
    }
}

impl<'a> Linear<'a> {
    /// The best plan, if the family applies: not for float64, not past its 32-bit counts.
    pub(super) fn new(context: Context<'a>) -> Result<Option<Linear<'a>>> {
        let request = context.request;
        let Some(operand) = Operand::of(context).filter(|&operand| operand != Operand::Parts) else {
            return Ok(None);
        };
        let first = i64::from(request.output_format == MemoryFormat::Contiguous);
        let kernels: Vec<&Variant> = context
            .kernels(&format!("linear_gemm_{}", operand.name()), &operand.types(context))
            .filter(|kernel| kernel.param("CHANNELS_FIRST") == Some(first))
            .collect();
        let groups = request.geometry.conv().groups();
        let mut best: Option<Linear<'a>> = None;
        for merged in (1..=groups).filter(|merged| groups.is_multiple_of(*merged)) {
            for &kernel in &kernels {
                for windowed in [false, true] {
                    let linear = Linear::with(context, operand, kernel, groups / merged, windowed);
                    if let Some(linear) = linear
                        && best.as_ref().is_none_or(|best| linear.seconds < best.seconds)
                    {
                        best = Some(linear);
                    }
                }
            }
        }
        Ok(best)
    }

    fn with(
        context: Context<'a>,
        operand: Operand,
        kernel: &'a Variant,
        slices: usize,
        windowed: bool,
    ) -> Option<Linear<'a>> {
        let geometry = &context.request.geometry;
        let conv = geometry.conv();
        let size = |name| kernel.param(name).and_then(|size| usize::try_from(size).ok());
        let tile = [size("BM")?, size("BN")?, size("BK")?];
        let [m, n, k] = tile;
        let axes = geometry.axes().map(PhaseAxis::new);
        if !stores(kernel, context, &axes, slices) {
            return None;
        }
        let [depth, height, width] = &axes;
        let (slice_in, slice_out) = (conv.in_channels() / slices, conv.out_channels() / slices);
        // Taps along width: in one run of the reduction, or one after another.
        let far = width.reach;
        let apart = width.apart;
        if windowed && slices > 1 {
            return None;
        }
        let slice_pitch =
            if slices > 1 { slice_in.next_multiple_of(k) } else { slice_in.next_multiple_of(8) };
        let pitch = slices * slice_pitch;
        let (window, w_steps, w_step) =
            if windowed { ((far + 1) * pitch, 1, 0) } else { (pitch, far / apart + 1, apart) };
        let chunks = if slices > 1 { slice_pitch / k } else { window.div_ceil(k) };
        let columns = slice_out.checked_mul(width.axis.stride)?;
        let blocks = columns.div_ceil(n);

        let positions = depth.pitch.checked_mul(height.pitch)?.checked_mul(width.pitch)?;
        // The batch is cut where the packed input would take too much memory.
        let input = conv.in_channels() * geometry.axes().iter().map(|axis| axis.input).product::<usize>();
        let packed = positions.checked_mul(pitch)?.checked_mul(operand.bytes() * operand.parts())?;
        let inflation = packed as f64 / (input * context.request.dtype.size()) as f64;
        let parts = ((inflation / MOST_PACKED).ceil() as usize).clamp(1, geometry.batch());
        let batch = geometry.batch().div_ceil(parts);
        let parts = geometry.batch().div_ceil(batch);

        let rows = batch.checked_mul(positions)?;
        let tail = window.div_ceil(pitch);
        let most = i32::MAX as usize;
        let [_, y_channels, ..] = geometry.output_shape();
        let sample = y_channels * geometry.output_voxels();
        // A tile, of the output or of the packed input, may span several samples, and one more at each end.
        let spanned = (m.max(MOST_ROWS) / positions + 2).min(geometry.batch());
        let phases = depth.axis.stride.checked_mul(height.axis.stride)?;
        let tiles = rows.div_ceil(m).checked_mul(phases)?.checked_mul(slices * blocks)?;
        let weights = (depth.axis.kernel * height.axis.kernel * w_steps)
            .checked_mul(slices * blocks * n)?
            .checked_mul(chunks * k)?;
        let back = (depth.reach + 1).checked_mul(height.pitch * width.pitch)?;
        if 2 * (rows + back + far + tail) > most
            || sample.max(input).checked_mul(spanned)? > most
            || tiles > most
            || weights > most
            || conv.weight_shape().iter().product::<usize>() > most
        {
            return None;
        }

        // Cost: the products that are executed, over all phases; what is packed and written.
        let taps: usize = depth.axis.kernel * height.axis.kernel;
        let steps = taps * w_steps * chunks;
        let work = (parts * rows.div_ceil(m) * m) as f64 * (slices * blocks * n) as f64 * (steps * k) as f64;
        let waves = (tiles as f64 / context.device.multiprocessors as f64).ceil();
        let full = tiles as f64 / (waves * context.device.multiprocessors as f64);
        // Narrow tiles read more for each product; seen on an H200.
        let efficiency = match n {
            0..=32 => 0.5,
            33..=64 => 0.77,
            _ => 1.0,
        };
        let compute =
            2.0 * work / (efficiency * rate(operand) * context.device.multiprocessors as f64 * full);
        let element = context.request.dtype.size() as f64;
        let output = (geometry.batch() * sample) as f64 * element;
        let per_element = if matches!(kernel.param("STORE"), Some(2 | 3)) { 0.1e-9 } else { 0.4e-9 };
        // A tile's fixed cost, which short reductions add up to.
        let fixed = (tiles * parts) as f64 * (1.5e-6 + (m * n) as f64 * per_element)
            / context.device.multiprocessors as f64;
        let moved = output + (geometry.batch() * (input * context.request.dtype.size() + 2 * packed)) as f64;
        let launches = (parts * if operand == Operand::Split { 3 } else { 2 } + 4) as f64 * LAUNCH;
        let bandwidth = context.device.memory(BANDWIDTH);
        let seconds = compute.max(output / bandwidth) + fixed / 2.0 + (moved - output) / bandwidth + launches;
        Some(Linear {
            operand,
            kernel,
            tile,
            axes,
            batch,
            slices,
            slice_in,
            slice_out,
            pitch,
            slice_pitch,
            window,
            w_steps,
            w_step,
            chunks,
            blocks,
            seconds,
        })
    }

    /// Rows of the packed input's view for a number of samples: what lies before the first position,
    /// and the positions.
    fn view_rows(&self, batch: usize) -> usize {
        batch * self.positions() + self.axes[2].reach
    }

    /// Positions of a sample, gaps included.
    fn positions(&self) -> usize {
        self.axes.iter().map(|axis| axis.pitch).product()
    }

    /// Rows that are packed: the view's, and zeros up to the end of the last window. A second part
    /// follows after as many zeros as its taps reach back over.
    fn packed_rows(&self, batch: usize) -> usize {
        let rows = self.view_rows(batch) + self.window.div_ceil(self.pitch) - 1;
        // The second part starts at a multiple of 256 bytes; a row has a multiple of 16.
        if self.operand == Operand::Split { (rows + self.back()).next_multiple_of(16) } else { rows }
    }

    /// How many rows before a position its taps reach.
    fn back(&self) -> usize {
        let [depth, height, width] = &self.axes;
        (depth.reach * height.pitch + height.reach) * width.pitch + width.reach
    }

    /// What is launched.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let [_, n, k] = self.tile;
        let control = pack::control(workspace, 0, steps);
        let row = self.chunks * k;
        let layout = WeightLayout {
            slices: self.slices,
            columns_per_slice: self.blocks * n,
            row,
            w_steps: self.w_steps,
            w_step: self.w_step,
            w_far: self.axes[2].reach,
            // A row of one step holds all offsets.
            span: if self.w_steps == 1 && self.window > self.pitch { self.pitch } else { row },
        };
        let weight = pack::weight(context, self.operand, &layout, control, workspace, steps)?;
        let input_bytes = self.packed_rows(self.batch) * self.pitch * self.operand.bytes();
        let input = workspace.take(input_bytes * self.operand.parts());
        if self.operand == Operand::Split {
            pack::largest(context, control, steps)?;
        }
        let [batch, channels, ..] = request.geometry.input_shape();
        let in_sample = channels * self.axes.iter().map(|axis| axis.axis.input).product::<usize>();
        let out_sample = request.geometry.conv().out_channels() * request.geometry.output_voxels();
        for start in (0..batch).step_by(self.batch) {
            let count = self.batch.min(batch - start);
            let at = |sample: usize| (start * sample * request.dtype.size()) as u64;
            self.pack_input(context, control, input, count, at(in_sample), steps)?;
            self.multiply(context, control, input, weight, count, at(out_sample), steps)?;
        }
        // Where the input or the weight holds what the fast path cannot compute with, the definition.
        steps.push(direct::step(context, Some(control))?);
        Ok(())
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
        let workspace = |at| Argument::Pointer(Buffer::Workspace, at);
        let [_, channels, depth, height, width] = request.geometry.input_shape();
        let last = match request.input_format {
            MemoryFormat::Contiguous => 0,
            MemoryFormat::ChannelsLast3d if self.slices == 1 && channels.is_multiple_of(8) => 2,
            MemoryFormat::ChannelsLast3d => 1,
        };
        let name = format!("pack_input_{}", self.operand.name());
        let params = [("CHANNELS_LAST", last)];
        let types = self.operand.types(context);
        let variant = *context.narrowest(&name, &types, &params, "BC", self.pitch)?;
        let rows = self.packed_rows(count);
        let mut arguments = vec![Argument::Pointer(Buffer::Input, at)];
        let bytes = rows * self.pitch * self.operand.bytes();
        arguments.extend((0..self.operand.parts()).map(|part| workspace(input + (part * bytes) as u64)));
        arguments.push(workspace(control));
        let [pd, ph, pw] = self.axes.map(|axis| axis.pitch);
        let numbers = [rows, self.axes[2].reach, self.pitch, pd, ph, pw, count, depth, height, width];
        push(&mut arguments, numbers.into_iter().chain([channels, self.slice_in, self.slice_pitch]))?;
        let strides = strides(request.geometry.input_shape(), request.input_format);
        push(&mut arguments, strides)?;
        let grid = [rows.div_ceil(size(&variant, "BR")), self.pitch.div_ceil(size(&variant, "BC")), 1]
            .map(|n| n as u32);
        steps.push(Step::launch(variant, grid, arguments));
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "where the operands are")]
    fn multiply(
        &self,
        context: Context<'_>,
        control: u64,
        input: u64,
        weight: PackedWeight,
        count: usize,
        at: u64,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let workspace = |at| Argument::Pointer(Buffer::Workspace, at);
        let mut arguments = vec![workspace(input), workspace(weight.at)];
        if self.operand == Operand::Split {
            arguments.extend([workspace(control + SCALE), workspace(weight.scale)]);
        }
        arguments.extend([Argument::Pointer(Buffer::Bias, 0), Argument::Pointer(Buffer::Output, at)]);
        let [depth, height, width] = &self.axes;
        let rows = count * self.positions();
        let numbers = [rows, self.view_rows(count), self.pitch, self.window];
        push(&mut arguments, numbers.into_iter().chain(self.axes.map(|axis| axis.pitch)))?;
        for axis in [depth, height] {
            axis.push(&mut arguments)?;
        }
        arguments.push(int(width.axis.stride)?.into());
        arguments.push((width.shift() as i32).into());
        let numbers = [width.axis.output, width.first, self.w_steps, self.w_step, self.chunks];
        push(&mut arguments, numbers.into_iter().chain([self.slices, self.blocks, self.slice_out]))?;
        push(&mut arguments, strides(request.geometry.output_shape(), request.output_format))?;
        arguments.extend(bias_and_activation(request));
        if self.operand == Operand::Split {
            arguments.push(int(self.packed_rows(count))?.into());
        }
        let phases = depth.axis.stride * height.axis.stride;
        let blocks = rows.div_ceil(self.tile[0]) * phases * self.slices * self.blocks;
        steps.push(Step::launch(*self.kernel, [blocks as u32, 1, 1], arguments));
        Ok(())
    }
}

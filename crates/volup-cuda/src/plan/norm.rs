//! Planning `norm`: partial statistics of the output, merged in a fixed order, then applied in place.

use super::epilogue::element;
use super::{Argument, Buffer, Context, Step, Workspace, activation_code, gcd, grid, int, push, size};
use crate::Variant;
use volup::{DType, MemoryFormat, NormSpec, Result};

/// Blocks a multiprocessor that tasks are dealt out to.
const BLOCKS: usize = 8;
/// Past what `group_scale` counts to.
const MOST_VOXELS: usize = 1 << 30;
/// A multiple that rows of a channels-last sample are best taken in.
const LANES: usize = 32;

/// Seconds that partial statistics take to be merged.
pub(super) const MERGE: f64 = 10e-6;
/// Bytes a second that the output is read, and scaled, at; what the launches cost.
const READ: f64 = 3.6e12;
const SCALE: f64 = 3.9e12;
const LAUNCHES: f64 = 8e-6;

/// The time that [`steps`] is expected to take, in seconds.
pub(super) fn seconds(context: Context<'_>) -> f64 {
    let voxels: f64 = context.request.geometry.output_shape().iter().map(|&size| size as f64).product();
    let bytes = voxels * context.request.dtype.size() as f64;
    bytes / READ + 2.0 * bytes / SCALE + LAUNCHES
}

/// Partial statistics in the workspace: mean, squared deviations and count of each, those of a sample and group
/// `chunks * repeats * columns` of them, and how far each is from the next.
pub(super) struct Partials {
    /// The three arrays.
    pub(super) arrays: [Argument; 3],
    pub(super) chunks: usize,
    pub(super) repeats: usize,
    pub(super) columns: usize,
    /// From a sample, a group, a chunk and a repeat to the next.
    pub(super) steps: [usize; 4],
}

impl Partials {
    /// Room for so many partials of so many bytes.
    pub(super) fn take(workspace: &mut Workspace, count: usize, element: usize) -> [Argument; 3] {
        [(); 3].map(|()| Argument::Pointer(Buffer::Workspace, workspace.take(count * element)))
    }

    /// Launches their merge. Returns where the mean and 1/sigma of every sample and group will be.
    pub(super) fn merge(
        &self,
        context: Context<'_>,
        norm: NormSpec,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<[Argument; 2]> {
        let count = context.request.geometry.batch() * norm.groups();
        let element = context.request.dtype.accumulator().size();
        let statistics = [(); 2].map(|()| workspace.take(count * element));
        let statistics = statistics.map(|at| Argument::Pointer(Buffer::Workspace, at));
        self.merge_to(context, norm, statistics, steps)?;
        Ok(statistics)
    }

    /// Launches their merge to two arrays, of the mean and of 1/sigma of every sample and group.
    pub(super) fn merge_to(
        &self,
        context: Context<'_>,
        norm: NormSpec,
        statistics: [Argument; 2],
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let (samples, groups) = (context.request.geometry.batch(), norm.groups());
        let mut arguments = self.arrays.to_vec();
        arguments.extend(statistics);
        push(&mut arguments, [samples, groups, self.chunks, self.repeats, self.columns])?;
        arguments.extend(self.steps.map(|stride| Argument::I64(stride as i64)));
        arguments.push(Argument::F64(norm.eps()));
        let variant = *context.kernel("norm_merge", &[context.accumulator_name()], &[])?;
        steps.push(Step::launch(variant, blocks(context, samples * groups), arguments));
        Ok(())
    }
}

/// What a launch that knows the modes does with what it computes.
#[derive(Clone, Copy)]
pub(super) enum Pass {
    /// Writes it.
    Written,
    /// Writes partial statistics, to three arrays.
    Statistics([Argument; 3]),
    /// Writes it normalized, by means and 1/sigmas.
    Normalized([Argument; 2], NormSpec),
}

impl Pass {
    /// The mode of kernels that does it.
    pub(super) fn mode(self) -> i32 {
        match self {
            Pass::Written => 0,
            Pass::Statistics(_) => 1,
            Pass::Normalized(..) => 2,
        }
    }

    /// Adds what kernels are told of it beside the mode.
    pub(super) fn push(self, context: Context<'_>, arguments: &mut Vec<Argument>) -> Result<()> {
        let block = &context.request.block;
        let null = Argument::I64(0);
        let (parts, statistics, groups) = match self {
            Pass::Written => ([null; 3], [null; 2], 1),
            Pass::Statistics(parts) => (parts, [null; 2], 1),
            Pass::Normalized(statistics, norm) => ([null; 3], statistics, norm.groups()),
        };
        arguments.extend(parts.into_iter().chain(statistics));
        arguments.extend([Buffer::NormWeight, Buffer::NormBias].map(|buffer| Argument::Pointer(buffer, 0)));
        push(arguments, [groups, block.conv().out_channels() / groups])?;
        let (code, slope) = activation_code(block.post_activation().filter(|_| self.mode() == 2));
        arguments.extend([code.into(), Argument::F64(slope)]);
        Ok(())
    }
}

/// The most bytes that partial statistics may take where the output takes so many.
pub(super) fn room(output: f64) -> f64 {
    0.25 * output + (1 << 20) as f64
}

/// What a kernel that knows the modes launches: its output, or, for a block whose normalization it computes as well,
/// everything twice: for `chunks` partial statistics of each of a sample's `rows`, those of a channel side by side, then to
/// be written normalized. `launch` is the launch of a pass.
pub(super) fn passes<T: IntoIterator<Item = Step>>(
    context: Context<'_>,
    twice: bool,
    [chunks, rows]: [usize; 2],
    workspace: &mut Workspace,
    steps: &mut Vec<Step>,
    launch: impl Fn(Pass) -> Result<T>,
) -> Result<()> {
    let (Some(norm), true) = (context.request.block.norm(), twice) else {
        steps.extend(launch(Pass::Written)?);
        return Ok(());
    };
    let arrays = Partials::take(workspace, context.request.geometry.batch() * chunks * rows, 4);
    steps.extend(launch(Pass::Statistics(arrays))?);
    let columns = rows / norm.groups();
    let partials = Partials { arrays, chunks, repeats: 1, columns, steps: [chunks * rows, columns, rows, 0] };
    let statistics = partials.merge(context, norm, workspace, steps)?;
    steps.extend(launch(Pass::Normalized(statistics, norm))?);
    Ok(())
}

/// Blocks for so many tasks.
fn blocks(context: Context<'_>, tasks: usize) -> [u32; 3] {
    [tasks.clamp(1, BLOCKS * context.device.multiprocessors) as u32, 1, 1]
}

/// Threads of `group_statistics` and `group_scale`; vectors of 16 bytes that a thread of each takes, of NCDHW and of NDHWC.
const THREADS: usize = 256;
const COUNTED: [usize; 2] = [8, 64];
const SCALED: [usize; 2] = [4, 32];

/// What is launched after the convolution.
pub(super) fn steps(
    context: Context<'_>,
    norm: NormSpec,
    workspace: &mut Workspace,
    steps: &mut Vec<Step>,
) -> Result<()> {
    if let Some(kernels) = vectors(context) {
        return vector_steps(context, norm, kernels, workspace, steps);
    }
    let request = context.request;
    let [samples, channels, ..] = request.geometry.output_shape();
    let (groups, voxels) = (norm.groups(), request.geometry.output_voxels());
    let group_channels = channels / groups;
    let (storage, accumulator) = (context.type_name(), context.accumulator_name());
    let types = [storage, accumulator];
    let element = if accumulator == "f64" { 8 } else { 4 };
    let rows = request.output_format == MemoryFormat::Contiguous;
    let launch = |steps: &mut Vec<Step>, kernel, tasks, arguments| -> Result<()> {
        let variant = *context.kernel(kernel, &types, &[])?;
        steps.push(Step::launch(variant, blocks(context, tasks), arguments));
        Ok(())
    };
    let tile = |kernel, name| -> Result<usize> { Ok(size(context.kernel(kernel, &types, &[])?, name)) };
    let output = Argument::Pointer(Buffer::Output, 0);
    let width = channels * (LANES / gcd(channels, LANES));

    // Partial statistics: how many, and how they lie.
    let partials = if rows {
        let length = group_channels * voxels;
        let chunks = (length + 15).div_ceil(tile("norm_stats_rows", "B")?);
        let count = samples * groups * chunks;
        let arrays = Partials::take(workspace, count, element);
        let mut arguments = vec![output];
        arguments.extend(arrays);
        arguments.extend([int(samples * groups)?.into(), Argument::I64(length as i64), int(chunks)?.into()]);
        launch(steps, "norm_stats_rows", count, arguments)?;
        Partials { arrays, chunks, repeats: 1, columns: 1, steps: [groups * chunks, chunks, 1, 0] }
    } else {
        let length = voxels * channels;
        let (high, wide) = (tile("norm_stats_columns", "R")?, tile("norm_stats_columns", "B")?);
        let chunks = length.div_ceil(high * width);
        let arrays = Partials::take(workspace, samples * chunks * width, element);
        let mut arguments = vec![output];
        arguments.extend(arrays);
        arguments.extend([int(samples)?.into(), Argument::I64(length as i64)]);
        push(&mut arguments, [width, chunks])?;
        launch(steps, "norm_stats_columns", samples * chunks * width.div_ceil(wide), arguments)?;
        let steps = [chunks * width, group_channels, width, channels];
        Partials { arrays, chunks, repeats: width / channels, columns: group_channels, steps }
    };
    let statistics = partials.merge(context, norm, workspace, steps)?;

    // In place.
    let mut arguments = vec![output];
    arguments.extend(statistics);
    arguments.extend([Buffer::NormWeight, Buffer::NormBias].map(|buffer| Argument::Pointer(buffer, 0)));
    arguments.push(i32::from(norm.affine()).into());
    push(&mut arguments, [samples, channels, group_channels])?;
    arguments.push(Argument::I64(voxels as i64));
    let (kernel, tasks) = if rows {
        let kernel = "norm_apply_rows";
        (kernel, (samples * channels * voxels).div_ceil(tile(kernel, "B")?))
    } else {
        arguments.push(int(width)?.into());
        let kernel = "norm_apply_columns";
        let (high, wide) = (tile(kernel, "R")?, tile(kernel, "B")?);
        (kernel, samples * (voxels * channels).div_ceil(high * width) * width.div_ceil(wide))
    };
    let (code, slope) = activation_code(request.block.post_activation());
    arguments.extend([code.into(), Argument::F64(slope)]);
    launch(steps, kernel, tasks, arguments)
}

/// The kernels that move vectors, statistics and scaling, where they are there and apply.
fn vectors<'a>(context: Context<'a>) -> Option<[&'a Variant; 2]> {
    let request = context.request;
    if request.dtype == DType::F64 {
        return None;
    }
    let (types, kind) = element(context);
    let last = request.output_format == MemoryFormat::ChannelsLast3d;
    let vector = 16 / request.dtype.size();
    let [samples, channels, ..] = request.geometry.output_shape();
    let whole = channels.is_multiple_of(vector) && channels <= THREADS * vector;
    let voxels = request.geometry.output_voxels();
    if last && !whole || voxels >= MOST_VOXELS || samples.checked_mul(channels)? > MOST_VOXELS {
        return None;
    }
    // Of many channels a block has few positions, but three numbers of each group.
    let params = [("KIND", kind), ("LAST", i64::from(last))];
    let kernel = |name| context.kernel(name, &types, &params).ok();
    Some([kernel("group_statistics")?, kernel("group_scale")?])
}

/// What is launched with those.
fn vector_steps(
    context: Context<'_>,
    norm: NormSpec,
    [statistics_kernel, scale]: [&Variant; 2],
    workspace: &mut Workspace,
    steps: &mut Vec<Step>,
) -> Result<()> {
    let request = context.request;
    let [samples, channels, ..] = request.geometry.output_shape();
    let (groups, voxels) = (norm.groups(), request.geometry.output_voxels());
    let group_channels = channels / groups;
    let vector = 16 / request.dtype.size();
    let last = request.output_format == MemoryFormat::ChannelsLast3d;
    let output = Argument::Pointer(Buffer::Output, 0);
    // Positions that a block has side by side, of NDHWC.
    let high = if last { THREADS / (channels / vector) } else { 0 };

    let (rows, length, chunks) = if last {
        (samples, voxels, voxels.div_ceil(COUNTED[1] * high))
    } else {
        let length = group_channels * voxels;
        (samples * groups, length, (length + vector - 1).div_ceil(THREADS * COUNTED[0] * vector))
    };
    let of_chunk = if last { groups } else { 1 };
    let arrays = Partials::take(workspace, rows * chunks * of_chunk, 4);
    let mut arguments = vec![output];
    arguments.extend(arrays);
    arguments.push(Argument::I64(length as i64));
    push(&mut arguments, [rows, chunks, channels, groups, group_channels])?;
    steps.push(Step::launch(*statistics_kernel, grid(rows * chunks)?, arguments));
    let between = if last { [chunks * groups, 1, groups, 0] } else { [groups * chunks, chunks, 1, 0] };
    let partials = Partials { arrays, chunks, repeats: 1, columns: 1, steps: between };
    let statistics = partials.merge(context, norm, workspace, steps)?;

    // In place.
    let count = samples * channels * voxels;
    let parts =
        if last { voxels.div_ceil(SCALED[1] * high) } else { count.div_ceil(THREADS * SCALED[0] * vector) };
    let mut arguments = vec![output];
    arguments.extend(statistics);
    arguments.extend([Buffer::NormWeight, Buffer::NormBias].map(|buffer| Argument::Pointer(buffer, 0)));
    arguments.push(Argument::I64(count as i64));
    push(&mut arguments, [voxels, channels, group_channels, parts])?;
    let (code, slope) = activation_code(request.block.post_activation());
    arguments.extend([code.into(), Argument::F64(slope)]);
    let blocks = if last { samples * parts } else { parts };
    steps.push(Step::launch(*scale, grid(blocks)?, arguments));
    Ok(())
}

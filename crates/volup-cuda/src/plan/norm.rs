//! Planning `norm`: partial statistics of the output, merged in a fixed order, then applied in place.

use super::epilogue::{SAVED, element};
use super::{Argument, Buffer, Context, Step, Workspace, activation_code, gcd, grid, int, push, size};
use crate::Variant;
use std::fmt;
use volup::{Activation, BlockSpec, DType, MemoryFormat, NormSpec, Result};

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
/// Outputs a second that go through an activation before they are counted: through a comparison, or a curve.
const ACTIVATED: [f64; 2] = [1.45e12, 1e12];

/// The time that [`steps`] is expected to take, in seconds.
pub(super) fn seconds(context: Context<'_>) -> f64 {
    bytes(context) / context.device.memory(READ) + scaling(context) + LAUNCHES
}

/// The time that a block's statistics of the output of its convolution are expected to take where it is read for them.
pub(super) fn counting(context: Context<'_>, block: &BlockSpec) -> f64 {
    let curved = activation_code(block.activation()).0 > 2;
    let outputs = bytes(context) / context.request.dtype.size() as f64;
    (bytes(context) / context.device.memory(READ)).max(outputs / ACTIVATED[usize::from(curved)])
        + LAUNCHES / 2.0
        + MERGE
}

/// The time that the output is expected to take to be scaled.
pub(super) fn scaling(context: Context<'_>) -> f64 {
    2.0 * bytes(context) / context.device.memory(SCALE)
}

/// Bytes of the output.
pub(super) fn bytes(context: Context<'_>) -> f64 {
    let voxels: f64 = context.request.geometry.output_shape().iter().map(|&size| size as f64).product();
    voxels * context.request.dtype.size() as f64
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
        let statistics = merged(context, norm, workspace);
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
        let grid = blocks(context, samples * groups);
        // One that starts while kernels of its kind still run, where there is one.
        let before = steps.last().is_some_and(Step::is_exact);
        match context.kernel("partial_merge", &[], &[("KIND", 1)]) {
            Ok(&variant) if context.accumulator_name() == "f32" => {
                steps.push(Step::Launch { variant, grid, shared: 0, arguments, overlap: before });
            }
            _ => {
                let variant = *context.kernel("norm_merge", &[context.accumulator_name()], &[])?;
                steps.push(Step::launch(variant, grid, arguments));
            }
        }
        Ok(())
    }
}

/// Weight and bias of each channel; nothing is there of a normalization without.
pub(super) fn affine() -> [Argument; 2] {
    [Buffer::NormWeight, Buffer::NormBias].map(|buffer| Argument::Pointer(buffer, 0))
}

/// Room for the mean and 1/sigma of every sample and group.
pub(super) fn merged(context: Context<'_>, norm: NormSpec, workspace: &mut Workspace) -> [Argument; 2] {
    let count = context.request.geometry.batch() * norm.groups();
    let element = context.request.dtype.accumulator().size();
    [(); 2].map(|()| Argument::Pointer(Buffer::Workspace, workspace.take(count * element)))
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
    /// Writes it, and partial statistics to three arrays: for training of its activation.
    Counted([Argument; 3]),
}

impl Pass {
    /// The mode of kernels that does it.
    pub(super) fn mode(self) -> i32 {
        match self {
            Pass::Written => 0,
            Pass::Statistics(_) => 1,
            Pass::Normalized(..) => 2,
            Pass::Counted(_) => 3,
        }
    }

    /// Adds what kernels are told of it beside the mode.
    pub(super) fn push(self, context: Context<'_>, arguments: &mut Vec<Argument>) -> Result<()> {
        let block = &context.request.block;
        let null = Argument::I64(0);
        let (parts, statistics, groups) = match self {
            Pass::Written => ([null; 3], [null; 2], 1),
            Pass::Statistics(parts) | Pass::Counted(parts) => (parts, [null; 2], 1),
            Pass::Normalized(statistics, norm) => ([null; 3], statistics, norm.groups()),
        };
        arguments.extend(parts.into_iter().chain(statistics));
        arguments.extend(affine());
        push(arguments, [groups, block.conv().out_channels() / groups])?;
        let post = match self {
            Pass::Written | Pass::Statistics(_) => None,
            Pass::Normalized(..) => block.post_activation(),
            Pass::Counted(_) => context.counted.and_then(|block| block.activation()),
        };
        let (code, slope) = activation_code(post);
        arguments.extend([code.into(), Argument::F64(slope)]);
        Ok(())
    }
}

/// The most bytes that partial statistics may take where the output takes so many.
pub(super) fn room(output: f64) -> f64 {
    0.25 * output + (1 << 20) as f64
}

/// What a plan of a kernel that knows the modes does about a normalization.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Nothing: the output is written.
    Plain,
    /// Everything is computed twice: for statistics, then to be written normalized.
    Twice,
    /// Statistics are taken of what is written, at once: for training, or to be scaled where it lies.
    Counted,
}

impl Way {
    /// Those that there are, where a kernel computes activations of that kind before statistics.
    pub(super) fn all(context: Context<'_>, computes: impl Fn(Option<Activation>) -> bool) -> &'static [Way] {
        let block = &context.request.block;
        match context.counted {
            Some(block) if computes(block.activation()) => &[Way::Plain, Way::Counted],
            None if block.norm().is_some() && computes(block.activation()) => {
                &[Way::Plain, Way::Twice, Way::Counted]
            }
            _ => &[Way::Plain],
        }
    }
}

/// The normalization that statistics of the output are for.
pub(super) fn counted(context: Context<'_>) -> Option<NormSpec> {
    context.counted.as_ref().unwrap_or(&context.request.block).norm()
}

impl fmt::Display for Way {
    /// What is added to a plan's text.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::Plain => "",
            Way::Twice => "; recomputed for the norm",
            Way::Counted => " with statistics",
        })
    }
}

/// What a kernel that knows the modes launches: its output, or, where it takes statistics as well, with `chunks` partial ones
/// of each of a sample's `rows`, those of a channel side by side, which are merged. `launch` is the launch of a pass.
pub(super) fn passes<T: IntoIterator<Item = Step>>(
    context: Context<'_>,
    way: Way,
    [chunks, rows]: [usize; 2],
    workspace: &mut Workspace,
    steps: &mut Vec<Step>,
    launch: impl Fn(Pass) -> Result<T>,
) -> Result<()> {
    let (Some(norm), Way::Twice | Way::Counted) = (counted(context), way) else {
        steps.extend(launch(Pass::Written)?);
        return Ok(());
    };
    let arrays = Partials::take(workspace, context.request.geometry.batch() * chunks * rows, 4);
    let columns = rows / norm.groups();
    let partials = Partials { arrays, chunks, repeats: 1, columns, steps: [chunks * rows, columns, rows, 0] };
    let counts = if way == Way::Twice { Pass::Statistics(arrays) } else { Pass::Counted(arrays) };
    steps.extend(launch(counts)?);
    if context.counted.is_some() {
        return partials.merge_to(context, norm, SAVED, steps);
    }
    let statistics = partials.merge(context, norm, workspace, steps)?;
    if way == Way::Counted {
        return scale(context, norm, statistics, true, steps);
    }
    // It waits for the statistics itself.
    let merged = steps.last().is_some_and(Step::is_exact);
    steps
        .extend(launch(Pass::Normalized(statistics, norm))?.into_iter().map(|step| step.overlapping(merged)));
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
    let partials = match vectors(context) {
        Some([kernel, _]) => count_vectors(context, norm, kernel, workspace, steps)?,
        None => count_tiles(context, norm, workspace, steps)?,
    };
    let statistics = partials.merge(context, norm, workspace, steps)?;
    scale(context, norm, statistics, false, steps)
}

/// Launches what scales the output where it lies; from its end on where that was written last and nobody has read it since.
pub(super) fn scale(
    context: Context<'_>,
    norm: NormSpec,
    statistics: [Argument; 2],
    from_end: bool,
    steps: &mut Vec<Step>,
) -> Result<()> {
    match vectors(context) {
        Some([_, kernel]) => scale_vectors(context, norm, kernel, statistics, from_end, steps),
        None => scale_tiles(context, norm, statistics, steps),
    }
}

/// Adds a launch of a tile kernel.
fn launch_tiles(
    context: Context<'_>,
    kernel: &str,
    tasks: usize,
    arguments: Vec<Argument>,
    steps: &mut Vec<Step>,
) -> Result<()> {
    steps.push(Step::launch(*tile_kernel(context, kernel)?, blocks(context, tasks), arguments));
    Ok(())
}

fn tile_kernel<'a>(context: Context<'a>, name: &str) -> Result<&'a Variant> {
    context.kernel(name, &[context.type_name(), context.accumulator_name()], &[])
}

/// Columns that the tile kernels take a sample of NDHWC in.
fn tile_width(channels: usize) -> usize {
    channels * (LANES / gcd(channels, LANES))
}

/// Launches partial statistics by tile kernels: how many, and how they lie.
fn count_tiles(
    context: Context<'_>,
    norm: NormSpec,
    workspace: &mut Workspace,
    steps: &mut Vec<Step>,
) -> Result<Partials> {
    let request = context.request;
    let [samples, channels, ..] = request.geometry.output_shape();
    let (groups, voxels) = (norm.groups(), request.geometry.output_voxels());
    let group_channels = channels / groups;
    let element = request.dtype.accumulator().size();
    let tile = |kernel, name| -> Result<usize> { Ok(size(tile_kernel(context, kernel)?, name)) };
    let mut arguments = vec![Argument::Pointer(Buffer::Output, 0)];
    if request.output_format == MemoryFormat::Contiguous {
        let length = group_channels * voxels;
        let chunks = (length + 15).div_ceil(tile("norm_stats_rows", "B")?);
        let count = samples * groups * chunks;
        let arrays = Partials::take(workspace, count, element);
        arguments.extend(arrays);
        arguments.extend([int(samples * groups)?.into(), Argument::I64(length as i64), int(chunks)?.into()]);
        launch_tiles(context, "norm_stats_rows", count, arguments, steps)?;
        return Ok(Partials {
            arrays,
            chunks,
            repeats: 1,
            columns: 1,
            steps: [groups * chunks, chunks, 1, 0],
        });
    }
    let (length, width) = (voxels * channels, tile_width(channels));
    let (high, wide) = (tile("norm_stats_columns", "R")?, tile("norm_stats_columns", "B")?);
    let chunks = length.div_ceil(high * width);
    let arrays = Partials::take(workspace, samples * chunks * width, element);
    arguments.extend(arrays);
    arguments.extend([int(samples)?.into(), Argument::I64(length as i64)]);
    push(&mut arguments, [width, chunks])?;
    let tasks = samples * chunks * width.div_ceil(wide);
    launch_tiles(context, "norm_stats_columns", tasks, arguments, steps)?;
    let between = [chunks * width, group_channels, width, channels];
    Ok(Partials { arrays, chunks, repeats: width / channels, columns: group_channels, steps: between })
}

/// Launches the tile kernels that scale.
fn scale_tiles(
    context: Context<'_>,
    norm: NormSpec,
    statistics: [Argument; 2],
    steps: &mut Vec<Step>,
) -> Result<()> {
    let request = context.request;
    let [samples, channels, ..] = request.geometry.output_shape();
    let voxels = request.geometry.output_voxels();
    let tile = |kernel, name| -> Result<usize> { Ok(size(tile_kernel(context, kernel)?, name)) };
    let mut arguments = vec![Argument::Pointer(Buffer::Output, 0)];
    arguments.extend(statistics);
    arguments.extend(affine());
    arguments.push(i32::from(norm.affine()).into());
    push(&mut arguments, [samples, channels, channels / norm.groups()])?;
    arguments.push(Argument::I64(voxels as i64));
    let (kernel, tasks) = if request.output_format == MemoryFormat::Contiguous {
        let kernel = "norm_apply_rows";
        (kernel, (samples * channels * voxels).div_ceil(tile(kernel, "B")?))
    } else {
        let width = tile_width(channels);
        arguments.push(int(width)?.into());
        let kernel = "norm_apply_columns";
        let (high, wide) = (tile(kernel, "R")?, tile(kernel, "B")?);
        (kernel, samples * (voxels * channels).div_ceil(high * width) * width.div_ceil(wide))
    };
    let (code, slope) = activation_code(request.block.post_activation());
    arguments.extend([code.into(), Argument::F64(slope)]);
    launch_tiles(context, kernel, tasks, arguments, steps)
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

/// Positions that a block of those has side by side, of NDHWC.
fn side_by_side(channels: usize, vector: usize) -> usize {
    THREADS / (channels / vector)
}

/// Launches partial statistics by the first of those.
fn count_vectors(
    context: Context<'_>,
    norm: NormSpec,
    kernel: &Variant,
    workspace: &mut Workspace,
    steps: &mut Vec<Step>,
) -> Result<Partials> {
    let request = context.request;
    let [samples, channels, ..] = request.geometry.output_shape();
    let (groups, voxels) = (norm.groups(), request.geometry.output_voxels());
    let group_channels = channels / groups;
    let vector = 16 / request.dtype.size();
    let last = request.output_format == MemoryFormat::ChannelsLast3d;
    let (rows, length, chunks) = if last {
        (samples, voxels, voxels.div_ceil(COUNTED[1] * side_by_side(channels, vector)))
    } else {
        let length = group_channels * voxels;
        (samples * groups, length, (length + vector - 1).div_ceil(THREADS * COUNTED[0] * vector))
    };
    let of_chunk = if last { groups } else { 1 };
    let arrays = Partials::take(workspace, rows * chunks * of_chunk, 4);
    let mut arguments = vec![Argument::Pointer(Buffer::Output, 0)];
    arguments.extend(arrays);
    arguments.push(Argument::I64(length as i64));
    push(&mut arguments, [rows, chunks, channels, groups, group_channels])?;
    steps.push(Step::launch(*kernel, grid(rows * chunks)?, arguments));
    let between = if last { [chunks * groups, 1, groups, 0] } else { [groups * chunks, chunks, 1, 0] };
    Ok(Partials { arrays, chunks, repeats: 1, columns: 1, steps: between })
}

/// Launches scaling by the second of those.
fn scale_vectors(
    context: Context<'_>,
    norm: NormSpec,
    kernel: &Variant,
    statistics: [Argument; 2],
    from_end: bool,
    steps: &mut Vec<Step>,
) -> Result<()> {
    let request = context.request;
    let [samples, channels, ..] = request.geometry.output_shape();
    let voxels = request.geometry.output_voxels();
    let vector = 16 / request.dtype.size();
    let last = request.output_format == MemoryFormat::ChannelsLast3d;
    let count = samples * channels * voxels;
    let parts = if last {
        voxels.div_ceil(SCALED[1] * side_by_side(channels, vector))
    } else {
        count.div_ceil(THREADS * SCALED[0] * vector)
    };
    let mut arguments = vec![Argument::Pointer(Buffer::Output, 0)];
    arguments.extend(statistics);
    arguments.extend(affine());
    arguments.push(Argument::I64(count as i64));
    push(&mut arguments, [voxels, channels, channels / norm.groups(), parts, usize::from(from_end)])?;
    let (code, slope) = activation_code(request.block.post_activation());
    arguments.extend([code.into(), Argument::F64(slope)]);
    let blocks = if last { samples * parts } else { parts };
    steps.push(Step::launch(*kernel, grid(blocks)?, arguments));
    Ok(())
}

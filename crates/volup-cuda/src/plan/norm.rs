//! Planning `norm`: partial statistics of the output, merged in a fixed order, then applied in place.

use super::{Argument, Buffer, Context, Step, Workspace, activation_code, gcd, int, push, size};
use volup::{MemoryFormat, NormSpec, Result};

/// Blocks a multiprocessor that tasks are dealt out to.
const BLOCKS: usize = 8;
/// A multiple that rows of a channels-last sample are best taken in.
const LANES: usize = 32;

/// Bytes a second that the output is read, and scaled, at; what the launches cost.
const READ: f64 = 3.9e12;
const SCALE: f64 = 3.6e12;
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
        let [samples, ..] = context.request.geometry.output_shape();
        let groups = norm.groups();
        let accumulator = context.accumulator_name();
        let element = if accumulator == "f64" { 8 } else { 4 };
        let statistics = [(); 2].map(|()| workspace.take(samples * groups * element));
        let statistics = statistics.map(|at| Argument::Pointer(Buffer::Workspace, at));
        let mut arguments = self.arrays.to_vec();
        arguments.extend(statistics);
        push(&mut arguments, [samples, groups, self.chunks, self.repeats, self.columns])?;
        arguments.extend(self.steps.map(|stride| Argument::I64(stride as i64)));
        arguments.push(Argument::F64(norm.eps()));
        let variant = *context.kernel("norm_merge", &[accumulator], &[])?;
        steps.push(Step::launch(variant, blocks(context, samples * groups), arguments));
        Ok(statistics)
    }
}

/// Blocks for so many tasks.
fn blocks(context: Context<'_>, tasks: usize) -> [u32; 3] {
    [tasks.clamp(1, BLOCKS * context.device.multiprocessors) as u32, 1, 1]
}

/// What is launched after the convolution.
pub(super) fn steps(
    context: Context<'_>,
    norm: NormSpec,
    workspace: &mut Workspace,
    steps: &mut Vec<Step>,
) -> Result<()> {
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

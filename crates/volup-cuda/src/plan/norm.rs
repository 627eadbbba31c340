//! Planning `norm`: partial statistics of the output, merged in a fixed order, then applied in place.

use super::{Argument, Buffer, Context, Step, Workspace, activation_code, gcd, int, push, size};
use volup::{MemoryFormat, NormSpec, Result};

/// Blocks a multiprocessor that tasks are dealt out to.
const BLOCKS: usize = 8;
/// A multiple that rows of a channels-last sample are best taken in.
const LANES: usize = 32;

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
    let blocks = |tasks: usize| {
        let most = BLOCKS * context.device.multiprocessors;
        [tasks.clamp(1, most) as u32, 1, 1]
    };
    let launch = |steps: &mut Vec<Step>, kernel, types: &[&str], tasks, arguments| -> Result<()> {
        let variant = *context.kernel(kernel, types, &[])?;
        steps.push(Step::launch(variant, blocks(tasks), arguments));
        Ok(())
    };
    let tile = |kernel, name| -> Result<usize> { Ok(size(context.kernel(kernel, &types, &[])?, name)) };
    let output = Argument::Pointer(Buffer::Output, 0);
    let width = channels * (LANES / gcd(channels, LANES));

    // Partial statistics: how many, and how they lie.
    let (partials, merge);
    let mut arguments = vec![output];
    if rows {
        let length = group_channels * voxels;
        let chunks = (length + 15).div_ceil(tile("norm_stats_rows", "B")?);
        partials = samples * groups * chunks;
        merge = [chunks, 1, 1, groups * chunks, chunks, 1, 0];
        push_parts(&mut arguments, workspace, partials * element);
        arguments.extend([int(samples * groups)?.into(), Argument::I64(length as i64), int(chunks)?.into()]);
        let parts = arguments[1..4].to_vec();
        launch(steps, "norm_stats_rows", &types, partials, arguments)?;
        arguments = parts;
    } else {
        let length = voxels * channels;
        let (high, wide) = (tile("norm_stats_columns", "R")?, tile("norm_stats_columns", "B")?);
        let chunks = length.div_ceil(high * width);
        partials = samples * chunks * width;
        merge = [chunks, width / channels, group_channels, chunks * width, group_channels, width, channels];
        push_parts(&mut arguments, workspace, partials * element);
        arguments.extend([int(samples)?.into(), Argument::I64(length as i64)]);
        push(&mut arguments, [width, chunks])?;
        let parts = arguments[1..4].to_vec();
        launch(steps, "norm_stats_columns", &types, samples * chunks * width.div_ceil(wide), arguments)?;
        arguments = parts;
    }

    // The mean and 1/sigma of every sample and group.
    let statistics = [(); 2].map(|()| workspace.take(samples * groups * element));
    let statistics = statistics.map(|at| Argument::Pointer(Buffer::Workspace, at));
    arguments.extend(statistics);
    let [chunks, repeats, columns, strides @ ..] = merge;
    push(&mut arguments, [samples, groups, chunks, repeats, columns])?;
    arguments.extend(strides.map(|stride| Argument::I64(stride as i64)));
    arguments.push(Argument::F64(norm.eps()));
    launch(steps, "norm_merge", &[accumulator], samples * groups, arguments)?;

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
    launch(steps, kernel, &types, tasks, arguments)
}

/// The three arrays of partial statistics.
fn push_parts(arguments: &mut Vec<Argument>, workspace: &mut Workspace, bytes: usize) {
    arguments.extend([(); 3].map(|()| Argument::Pointer(Buffer::Workspace, workspace.take(bytes))));
}

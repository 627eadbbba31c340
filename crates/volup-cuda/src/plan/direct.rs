//! Planning `direct`: every output by its definition.

use super::pack::Operand;
use super::{Argument, Buffer, Context, Step, activation_code, epilogue, push, size, strides};
use volup::{DType, Result};

/// Multiply-adds a second of one multiprocessor, seen on an H200.
const RATE: f64 = 5e9;
/// Outputs a second, and taps of them that are looked at, of an H200.
const OUTPUTS: f64 = 7e10;
const TAPS: f64 = 8e11;
/// Blocks a multiprocessor that the tiles are dealt out to; fewer for a launch that seldom has work to do.
const BLOCKS: usize = 16;
const IDLE_BLOCKS: usize = 2;

/// The time that a launch is expected to take.
pub(super) fn seconds(context: Context<'_>) -> f64 {
    let geometry = &context.request.geometry;
    let rate = if context.request.dtype == DType::F64 { RATE / 2.0 } else { RATE };
    let compute = geometry.flops() / 2.0 / (rate * context.device.multiprocessors as f64);
    let output = geometry.output_shape().iter().map(|&size| size as f64).product::<f64>();
    let taps = geometry.conv().kernel_size().iter().product::<usize>() as f64;
    compute + output / OUTPUTS + output * taps / TAPS + 4e-6
}

/// The launch. With the address of control words in the workspace it does its work only where those
/// ask for it.
pub(super) fn step(context: Context<'_>, control: Option<u64>) -> Result<Step> {
    let (geometry, conv) = (&context.request.geometry, context.request.geometry.conv());
    let types = [context.type_name(), context.accumulator_name()];
    let out_per_group = conv.out_channels() / conv.groups();
    let variant = *context.narrowest("direct", &types, &[], "BC", out_per_group)?;
    let tiles = (geometry.batch() * conv.groups())
        .saturating_mul(out_per_group.div_ceil(size(&variant, "BC")))
        .saturating_mul(geometry.output_voxels().div_ceil(size(&variant, "BP")));
    let most = if control.is_some() { IDLE_BLOCKS } else { BLOCKS };
    let blocks = tiles.min(most * context.device.multiprocessors).max(1);
    Ok(Step::launch(variant, [blocks as u32, 1, 1], arguments(context, control)?))
}

/// The launch that does its work where control words ask for it, after kernels that are compiled by CUDA C++'s compiler, on the
/// architecture that these are for: it starts while the one before it runs.
pub(super) fn guard(context: Context<'_>, operand: Operand, control: u64) -> Result<Step> {
    let params = [("KIND", operand.tensor_kind())];
    let variant = *context.kernel("direct_output", &operand.types(context), &params)?;
    let outputs =
        context.request.geometry.output_shape().iter().fold(1, |all: usize, &size| all.saturating_mul(size));
    let blocks = outputs.div_ceil(variant.threads as usize).min(IDLE_BLOCKS * context.device.multiprocessors);
    let (grid, arguments) = ([blocks.max(1) as u32, 1, 1], arguments(context, Some(control))?);
    Ok(Step::Launch { variant, grid, shared: 0, arguments, overlap: true })
}

/// What a kernel is told that sees itself that its output cannot stand, and then computes the definition; or, without control
/// words, that it does not.
pub(super) fn within(context: Context<'_>, control: Option<u64>) -> Result<Vec<Argument>> {
    let all = arguments(context, control)?;
    let nothing = |argument: Argument| match argument {
        Argument::Pointer(..) => epilogue::NULL,
        Argument::I32(_) => Argument::I32(0),
        Argument::I64(_) => Argument::I64(0),
        Argument::F32(_) => Argument::F32(0.0),
        Argument::F64(_) => Argument::F64(0.0),
    };
    Ok(if control.is_some() { all } else { all.into_iter().map(nothing).collect() })
}

/// What each of these kernels takes, in the order in which `direct` lists it.
fn arguments(context: Context<'_>, control: Option<u64>) -> Result<Vec<Argument>> {
    let request = context.request;
    let (geometry, conv) = (&request.geometry, request.geometry.conv());
    let words = match control {
        Some(at) => [Argument::Pointer(Buffer::Workspace, at), 0.into(), 1.into()],
        // Not read: any address will do.
        None => [Argument::Pointer(Buffer::Input, 0), 0.into(), 0.into()],
    };
    let [words, small_limit, guarded] = words;
    let mut arguments: Vec<Argument> = [Buffer::Input, Buffer::Weight, Buffer::Bias, Buffer::Output]
        .map(|buffer| Argument::Pointer(buffer, 0))
        .into();
    arguments.extend([words, i32::from(conv.has_bias()).into(), guarded, small_limit]);
    let groups = conv.groups();
    push(
        &mut arguments,
        [geometry.batch(), groups, conv.in_channels() / groups, conv.out_channels() / groups],
    )?;
    for axis in geometry.axes() {
        let sizes = [axis.input, axis.output, axis.kernel, axis.stride, axis.padding, axis.dilation];
        push(&mut arguments, sizes)?;
    }
    let input = strides(geometry.input_shape(), request.input_format);
    let output = strides(geometry.output_shape(), request.output_format);
    arguments.extend(input.into_iter().chain(output).map(|stride| Argument::I64(stride as i64)));
    for activation in epilogue(&request.block) {
        let (code, slope) = activation_code(activation);
        arguments.extend([code.into(), Argument::F64(slope)]);
    }
    Ok(arguments)
}

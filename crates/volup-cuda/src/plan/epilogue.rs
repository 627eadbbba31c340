//! Planning what follows a convolution in the passes of training: statistics and output forward, sums backward. The kernels'
//! files say what the numbers mean.

use super::norm::Partials;
use super::{Argument, Buffer, Context, Step, Workspace, activation_code, grid, push};
use crate::Variant;
use volup::{DType, MemoryFormat, NormSpec, Result};

/// Threads of a block, vectors that one holds, and how often it does.
const THREADS: usize = 256;
const VECTORS: usize = 4;
const TURNS: usize = 8;
/// Sums of a channel of a sample, and largest magnitudes where its gradient may become fp16.
const SUMS: usize = 5;
const BOUNDED: usize = 2;
/// Channels of a block that makes gradients of vectors, of no group.
const APIECE: usize = 8;
/// What no slope of an activation is past, but that of leaky ReLU.
const STEEPEST: f64 = 1.5;

/// An address that nothing is at.
pub(super) const NULL: Argument = Argument::I64(0);

/// Where statistics are saved.
pub(super) const SAVED: [Argument; 2] =
    [Argument::Pointer(Buffer::Mean, 0), Argument::Pointer(Buffer::Rstd, 0)];

/// The types and the `KIND` of a kernel.
pub(super) type Element = (Vec<&'static str>, i64);

/// Those of kernels that are compiled for each type of tensors.
pub(super) fn element(context: Context<'_>) -> Element {
    match context.request.dtype {
        DType::F32 => (vec![], [1, 5, 2][context.halves]),
        DType::F16 | DType::Bf16 => (vec![context.type_name()], 0),
        DType::F64 => (vec![], 4),
    }
}

/// A kernel that is compiled for each type of tensors.
pub(super) fn kernel(context: Context<'_>, name: &str) -> Result<Variant> {
    let (types, kind) = element(context);
    context.kernel(name, &types, &[("KIND", kind)]).copied()
}

/// Bytes of a sum.
pub(super) fn sum_bytes(context: Context<'_>) -> usize {
    context.request.dtype.accumulator().size()
}

/// How tensors of the output's size are dealt out.
struct Chunks {
    last: bool,
    vector: usize,
    voxels: usize,
    channels: usize,
    chunks: usize,
    channel_blocks: usize,
    blocks: usize,
}

impl Chunks {
    fn of(context: Context<'_>) -> Chunks {
        let request = context.request;
        let [samples, channels, ..] = request.geometry.output_shape();
        let voxels = request.geometry.output_voxels();
        let last = request.output_format == MemoryFormat::ChannelsLast3d;
        let whole = 16 / request.dtype.size();
        // Of more channels a thread would have more sums than registers.
        let whole = if last { whole.min(4) } else { whole };
        let vector = if last && !channels.is_multiple_of(whole) { 1 } else { whole };
        let (chunks, channel_blocks, rows) = if last {
            let across = channels / vector;
            let high = THREADS / across.min(THREADS);
            (voxels.div_ceil(TURNS * VECTORS * high), across.div_ceil(THREADS), samples)
        } else {
            ((voxels + vector - 1).div_ceil(TURNS * VECTORS * THREADS * vector), 1, samples * channels)
        };
        Chunks {
            last,
            vector,
            voxels,
            channels,
            chunks,
            channel_blocks,
            blocks: rows * chunks * channel_blocks,
        }
    }

    fn kernel(&self, context: Context<'_>, name: &str, (types, kind): Element) -> Result<Variant> {
        let params = [("KIND", kind), ("LAST", i64::from(self.last)), ("VECTOR", self.vector as i64)];
        context.kernel(name, &types, &params).copied()
    }
}

/// What kernels are told of the normalization: its statistics and its parameters.
pub(super) fn norm_arguments(context: Context<'_>) -> [Argument; 4] {
    let buffers = [Buffer::Mean, Buffer::Rstd, Buffer::NormWeight, Buffer::NormBias];
    let there = context.request.block.norm().is_some();
    buffers.map(|buffer| if there { Argument::Pointer(buffer, 0) } else { NULL })
}

/// Adds what kernels are told of the activations: their codes, then their slopes.
pub(super) fn push_activations(context: Context<'_>, arguments: &mut Vec<Argument>) {
    let block = &context.request.block;
    let codes = [block.activation(), block.post_activation()].map(activation_code);
    arguments.extend(codes.map(|(code, _)| Argument::I32(code)));
    arguments.extend(codes.map(|(_, slope)| Argument::F64(slope)));
}

/// Channels of a group of the normalization; of none, all.
pub(super) fn group_channels(context: Context<'_>) -> usize {
    context.request.block.conv().out_channels() / context.request.block.norm().map_or(1, |norm| norm.groups())
}

/// Launches the statistics of a convolution's output.
pub(super) fn statistics(
    context: Context<'_>,
    norm: NormSpec,
    workspace: &mut Workspace,
    steps: &mut Vec<Step>,
) -> Result<()> {
    let of = Chunks::of(context);
    let samples = context.request.geometry.batch();
    let arrays = Partials::take(workspace, samples * of.channels * of.chunks, sum_bytes(context));
    let mut arguments = vec![Argument::Pointer(Buffer::Convolution, 0)];
    arguments.extend(arrays);
    push(&mut arguments, [of.voxels, of.channels, of.chunks, of.channel_blocks])?;
    let (code, slope) = activation_code(context.request.block.activation());
    arguments.extend([code.into(), Argument::F64(slope)]);
    steps.push(Step::launch(
        of.kernel(context, "channel_statistics", element(context))?,
        grid(of.blocks)?,
        arguments,
    ));
    // Of a group and sample the channels are what others call chunks, and theirs lie side by side.
    let per_group = of.channels / norm.groups();
    let between = [of.channels * of.chunks, per_group * of.chunks, of.chunks, 0];
    let partials = Partials { arrays, chunks: per_group, repeats: 1, columns: of.chunks, steps: between };
    partials.merge_to(context, norm, SAVED, steps)
}

/// Launches what makes the output of a convolution's.
pub(super) fn output(context: Context<'_>, steps: &mut Vec<Step>) -> Result<()> {
    let of = Chunks::of(context);
    let mut arguments =
        [Buffer::Convolution, Buffer::Output].map(|buffer| Argument::Pointer(buffer, 0)).to_vec();
    arguments.extend(norm_arguments(context));
    push(&mut arguments, [of.voxels, of.channels, group_channels(context), of.chunks, of.channel_blocks])?;
    push_activations(context, &mut arguments);
    steps.push(Step::launch(
        of.kernel(context, "block_output", element(context))?,
        grid(of.blocks)?,
        arguments,
    ));
    Ok(())
}

/// Where the sums over each channel of each sample go that the backward pass takes through what follows the convolution, and
/// the terms that the gradient of the convolution's output takes from each sample and group.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    merged: u64,
    terms: u64,
    /// Of gradients that become fp16 what no magnitude of a channel is past.
    pub(super) bounds: u64,
}

impl Sums {
    /// Takes the memory for them.
    pub(super) fn take(context: Context<'_>, workspace: &mut Workspace) -> Sums {
        let [samples, channels, ..] = context.request.geometry.output_shape();
        let merged = workspace.take(samples * channels * sums(context) * 8);
        let terms = workspace.take(samples * term_bytes(context));
        // Of each part of the batch, at most as many as there are samples.
        let bounds = workspace.take(if context.bounds_gradients() { samples * channels * 4 } else { 0 });
        Sums { merged, terms, bounds }
    }

    /// Those of the samples from one on.
    pub(super) fn from(self, context: Context<'_>, sample: usize) -> Sums {
        let channels = context.request.block.conv().out_channels();
        Sums {
            merged: self.merged + (sample * channels * sums(context) * 8) as u64,
            terms: self.terms + (sample * term_bytes(context)) as u64,
            bounds: self.bounds + (sample * channels * 4) as u64,
        }
    }

    /// Where the terms are; nowhere without a normalization.
    pub(super) fn terms(self, context: Context<'_>) -> Argument {
        if context.request.block.norm().is_some() {
            Argument::Pointer(Buffer::Workspace, self.terms)
        } else {
            NULL
        }
    }

    /// Launches what takes the sums.
    pub(super) fn launch(
        self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let of = Chunks::of(context);
        let rows = context.request.geometry.batch() * of.channels;
        let sums = workspace.take(rows * of.chunks * sums(context) * sum_bytes(context));
        let sums = Argument::Pointer(Buffer::Workspace, sums);
        let block = &context.request.block;
        let convolution = if block.is_bare() { NULL } else { Argument::Pointer(Buffer::Convolution, 0) };
        let mut arguments = vec![convolution, Argument::Pointer(Buffer::GradOutput, 0), sums];
        arguments.extend(norm_arguments(context));
        push(
            &mut arguments,
            [of.voxels, of.channels, group_channels(context), of.chunks, of.channel_blocks],
        )?;
        push_activations(context, &mut arguments);
        steps.push(Step::launch(
            of.kernel(context, "gradient_sums", summed(context))?,
            grid(of.blocks)?,
            arguments,
        ));

        let mut arguments = vec![sums, Argument::Pointer(Buffer::Workspace, self.merged)];
        push(&mut arguments, [rows, of.chunks])?;
        let kind = match summed(context) {
            (_, 0) => 1,
            (_, kind) => kind,
        };
        let merge = *context.kernel("gradient_merge", &[], &[("KIND", kind)])?;
        steps.push(Step::launch(merge, grid(rows.div_ceil(THREADS / 32))?, arguments));
        Ok(())
    }

    /// Launches what makes the terms of the sums, the bounds of gradients that become fp16 if `bounded`, and the gradients of the
    /// parameters that are vectors, those that are wanted.
    pub(super) fn vectors(
        self,
        context: Context<'_>,
        wanted: [bool; 3],
        bounded: bool,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let [samples, channels, ..] = context.request.geometry.output_shape();
        // Where nothing is normalized any channels are a block's.
        let group_channels = match context.request.block.norm() {
            Some(_) => group_channels(context),
            None => (1..=APIECE).rev().find(|&few| channels.is_multiple_of(few)).unwrap_or(1),
        };
        let [_, rstd, gamma, _] = norm_arguments(context);
        let [merged, terms] = [self.merged, self.terms].map(|at| Argument::Pointer(Buffer::Workspace, at));
        let mut arguments = vec![merged, rstd, gamma, terms];
        let buffers = [Buffer::GradBias, Buffer::GradNormWeight, Buffer::GradNormBias];
        arguments.extend(
            buffers.into_iter().zip(wanted).map(
                |(buffer, wanted)| {
                    if wanted { Argument::Pointer(buffer, 0) } else { NULL }
                },
            ),
        );
        let (types, kind) = summed(context);
        if kind == 5 {
            let (_, slope) = activation_code(context.request.block.activation());
            let bounded = bounded && context.halves > 0;
            arguments.push(if bounded { Argument::Pointer(Buffer::Workspace, self.bounds) } else { NULL });
            arguments.push(Argument::F64(STEEPEST * slope.abs().max(1.0)));
        }
        push(&mut arguments, [samples, channels, group_channels])?;
        let values = group_channels * context.request.geometry.output_voxels();
        arguments.push(Argument::F64(1.0 / values as f64));
        let groups = grid(channels / group_channels)?;
        let kernel = *context.kernel("gradient_vectors", &types, &[("KIND", kind)])?;
        steps.push(Step::launch(kernel, groups, arguments));
        Ok(())
    }
}

/// The types and the `KIND` of kernels that deal with sums.
fn summed(context: Context<'_>) -> Element {
    let (types, kind) = element(context);
    (types, if context.bounds_gradients() { 5 } else { kind })
}

/// Sums of a channel of a sample, and what else is found of it.
fn sums(context: Context<'_>) -> usize {
    if context.bounds_gradients() { SUMS + BOUNDED } else { SUMS }
}

/// Bytes of the terms of a sample.
fn term_bytes(context: Context<'_>) -> usize {
    context.request.block.norm().map_or(1, |norm| norm.groups()) * 2 * sum_bytes(context)
}

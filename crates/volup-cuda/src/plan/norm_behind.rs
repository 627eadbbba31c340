//! Planning a group norm of what a product has written already, beside what is left of the product. `norm_behind.cuh` says what the
//! numbers mean.

use super::epilogue::{NULL, kernel};
use super::norm::{self, Way};
use super::pack;
use super::{Argument, Buffer, Context, Step, Workspace, activation_code, grid, push};
use std::fmt;
use volup::{MemoryFormat, NormSpec, Result};

/// Words before those of samples, and of each.
const FIRST_WORDS: usize = 4;
const SAMPLE_WORDS: usize = 4;
/// Bytes of shared memory of a warp that does it.
pub(super) const RING: usize = 16384;
/// Partial statistics that a warp merges, more or less, and the most such segments of a group, and of all: who merges the last one merges what
/// they come to, of so many bytes each.
const SEGMENT: usize = 256;
const MOST_SEGMENTS: [usize; 2] = [16, 512];
const SUMS: usize = 32;
/// Bytes of vectors.
const VECTOR: usize = 16;
/// Bytes a second of the output that one such warp of each multiprocessor scales beside the product, through shared memory and by registers,
/// and that all warps do when that ends.
const BESIDE: [f64; 2] = [0.3e12, 0.22e12];
const AFTER: f64 = 1.8e12;
/// Elements a second that a warp packs of an input in NCDHW, and in NDHWC of 16 bits and of 32.
const PACKED: f64 = 1e11;
const PACKED_LAST: [f64; 2] = [7e10, 5.5e10];
/// The share of the product's time that it takes longer for each such warp, instead of one that packs or beside them; what the last sample takes
/// to be merged, in seconds.
const SLOWED: [f64; 2] = [0.03, 0.008];
const LAST: f64 = 12e-6;

/// Whether it may be: of outputs in NCDHW, whole vectors of a channel, and with a comparison after it at most.
pub(super) fn may(context: Context<'_>) -> bool {
    let request = context.request;
    let [samples, channels, ..] = request.geometry.output_shape();
    let voxels = request.geometry.output_voxels();
    context.counted.is_none()
        && request.block.norm().is_some()
        && request.output_format == MemoryFormat::Contiguous
        && (voxels * request.dtype.size()).is_multiple_of(VECTOR)
        && voxels.saturating_mul(channels).saturating_add(samples) <= i32::MAX as usize
        && activation_code(request.block.post_activation()).0 <= 2
        && kernel(context, "direct_norm").is_ok()
}

/// The time that so many warps are expected to take for packing the input, where others normalize.
pub(super) fn packing(context: Context<'_>, packers: usize) -> f64 {
    let request = context.request;
    let input = request.geometry.input_shape().iter().product::<usize>() as f64;
    let rate = match request.input_format {
        MemoryFormat::Contiguous => PACKED,
        MemoryFormat::ChannelsLast3d => PACKED_LAST[usize::from(request.dtype.size() > 2)],
    };
    input / (rate * packers as f64)
}

/// The time that a product's normalization is expected to take that is not part of it, where so many such warps are beside packing that
/// takes so long, or, if nothing is packed there, beside the product alone.
pub(super) fn rest(context: Context<'_>, way: Way, product: f64, warps: usize, packing: Option<f64>) -> f64 {
    match way {
        Way::Counted if warps > 0 => seconds(context, product, warps, packing),
        Way::Counted if context.counted.is_some() => norm::MERGE,
        Way::Counted => norm::MERGE + norm::scaling(context),
        _ => 0.0,
    }
}

/// The time that a product that takes so long by itself is expected to take longer with so many such warps.
fn seconds(context: Context<'_>, product: f64, warps: usize, packing: Option<f64>) -> f64 {
    let samples = context.request.geometry.batch() as f64;
    let (bytes, others) = (norm::bytes(context), (samples - 1.0) / samples);
    let (warps, means) = (warps as f64, usize::from(packing.is_none()));
    let with_packs = product.max(packing.unwrap_or(0.0)) + SLOWED[means] * product * warps;
    let beside = (BESIDE[means] * warps * with_packs).min(bytes) * others;
    with_packs - product + (bytes - beside) / AFTER + LAST
}

/// Control words of a plan with so many words of its packs, and behind them those of so many such warps, if there are any: where both are.
pub(super) fn control(
    context: Context<'_>,
    packed: usize,
    warps: usize,
    workspace: &mut Workspace,
    steps: &mut Vec<Step>,
) -> (u64, Option<(u64, usize)>) {
    // Zeros at first.
    let words = if warps > 0 { FIRST_WORDS + SAMPLE_WORDS * context.request.geometry.batch() } else { 0 };
    let control = pack::control(workspace, packed + words, steps);
    (control, (warps > 0).then_some((control + 4 * (pack::CONTROL_WORDS + packed) as u64, warps)))
}

/// What the product is told of it, with those words at an address of the workspace and so many warps of a block that do it, where there are
/// so many partial statistics of a group; without, that there is none.
pub(super) fn arguments(
    context: Context<'_>,
    words: Option<(u64, usize)>,
    partials: usize,
    workspace: &mut Workspace,
) -> Result<Vec<Argument>> {
    let request = context.request;
    let Some((words, warps)) = words else {
        let zero = Argument::from(0);
        let slopes = [Argument::F64(0.0); 2];
        let none = [NULL, zero, NULL, NULL, NULL, NULL, zero, zero, zero, zero];
        return Ok(none.into_iter().chain(slopes).collect());
    };
    let spec = request.block.norm().expect("a normalization");
    let groups = request.geometry.batch() * spec.groups();
    let [of_group, of_all] = MOST_SEGMENTS;
    let segments = partials.div_ceil(SEGMENT).min(of_group).min(of_all / spec.groups()).max(1);
    let sums = workspace.take(SUMS * groups * segments);
    let merged = workspace.take(8 * groups);
    let mut arguments = vec![Argument::Pointer(Buffer::Workspace, words)];
    push(&mut arguments, [warps])?;
    arguments.extend([sums, merged].map(|at| Argument::Pointer(Buffer::Workspace, at)));
    arguments.extend(norm::affine());
    push(&mut arguments, [spec.groups(), segments, request.geometry.output_voxels()])?;
    arguments.extend(after(context, spec));
    Ok(arguments)
}

/// The activation, and what is added to variances.
fn after(context: Context<'_>, spec: NormSpec) -> [Argument; 3] {
    let (code, slope) = activation_code(context.request.block.post_activation());
    [code.into(), Argument::F64(slope), Argument::F64(spec.eps())]
}

/// Adds to a plan's text how many such warps there are.
pub(super) fn describe(f: &mut fmt::Formatter<'_>, warps: usize) -> fmt::Result {
    if warps > 0 { write!(f, ", {warps} normalize behind") } else { Ok(()) }
}

/// The launch that normalizes what the definition has written where the product does not stand.
pub(super) fn guard(context: Context<'_>, control: u64) -> Result<Step> {
    let request = context.request;
    let spec = request.block.norm().expect("a normalization");
    let [samples, channels, ..] = request.geometry.output_shape();
    let mut arguments =
        vec![Argument::Pointer(Buffer::Output, 0), Argument::Pointer(Buffer::Workspace, control)];
    arguments.extend(norm::affine());
    let groups = spec.groups();
    push(&mut arguments, [groups, channels / groups, request.geometry.output_voxels()])?;
    arguments.extend(after(context, spec));
    let variant = kernel(context, "direct_norm")?;
    Ok(Step::Launch { variant, grid: grid(samples * groups)?, shared: 0, arguments, overlap: true })
}

//! Planning `plane_gradient`: both gradients where the input has few channels, in one launch. The kernel's file says what the
//! numbers mean.

use super::epilogue::{self, NULL, norm_arguments, push_activations};
use super::rows::sample_bytes;
use super::{
    Algorithm, Argument, Buffer, Context, RESERVED, SHARED, Step, int, product, push, size, strides,
};
use crate::Variant;
use std::fmt;
use volup::{Result, Wanted};

/// Channels of the input, at most; voxels of a step of the products.
const CHANNELS: usize = 8;
const STEP: usize = 16;
/// Channels of 16 bytes of what the products read, and elements after each channel of x.
const VECTOR: usize = 8;
const PAD: usize = 8;
/// Warps, tasks that each has copies for, and bytes of a tensor's: 16 of eight channels' positions, wherever in 16 they start.
const WARPS: usize = 8;
const SLOTS: usize = 2;
const OF_TENSOR: usize = 8 * 9 * 16;
/// Segments of a sample's planes, at most.
const MOST_SEGMENTS: usize = 16;

/// Bytes a second of the memory.
const MEMORY: f64 = 3.6e12;
/// Seconds of a multiprocessor for eight channels of a position, of a convolution alone and with what follows it, of 16 bits and of 32; for
/// a step of the products of a tap and 16 channels; what a plane takes beside, and all.
const FILL: [[f64; 2]; 2] = [[1.1e-9, 2.3e-9], [1.7e-9, 3.2e-9]];
const PRODUCT: f64 = 6e-9;
const PLANE: f64 = 6e-7;
const START: f64 = 1e-5;
/// How much longer a block takes alone on a multiprocessor, as nobody computes while it waits.
const ALONE: f64 = 1.6;

/// A plan of this kernel.
#[derive(Clone)]
pub(super) struct PlaneGradient<'a> {
    kernel: &'a Variant,
    /// Lines and planes of an item, and items.
    lines: usize,
    planes: usize,
    items: usize,
    /// Blocks, each with a share of the gradient of the weight.
    pub(super) blocks: usize,
    shared: usize,
    pub(super) seconds: f64,
}

impl fmt::Display for PlaneGradient<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlaneGradient { lines, planes, blocks, .. } = self;
        write!(f, "both by plane_gradient, {lines} lines of {planes} planes, {blocks} blocks")
    }
}

impl<'a> PlaneGradient<'a> {
    /// The plan for so many samples that is expected to be the fastest, of few channels of one group.
    pub(super) fn new(context: Context<'a>, batch: usize) -> Option<PlaneGradient<'a>> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let asked = request.algorithm.is_none_or(|wanted| wanted == Algorithm::ImplicitGemm);
        let fits = [geometry.input_shape(), geometry.output_shape()]
            .iter()
            .all(|[_, sizes @ ..]| product(sizes).is_some_and(|sample| int(sample).is_ok()));
        if !asked || !fits || conv.groups() > 1 || conv.in_channels() > CHANNELS {
            return None;
        }
        let (types, kind) = epilogue::element(context);
        let taps: usize = conv.kernel_size().into_iter().product();
        let kernels = context.kernels("plane_gradient", &types).filter(|kernel| {
            kernel.param("KIND") == Some(kind)
                && conv.out_channels() <= size(kernel, "CHANNELS")
                && taps <= size(kernel, "TAPS")
        });
        let [depth, height, _] = geometry.axes().map(|axis| axis.input);
        let all = kernels.flat_map(|kernel| {
            (1..=height).flat_map(move |lines| {
                let planes = (1..=MOST_SEGMENTS.min(depth)).map(move |segments| depth.div_ceil(segments));
                planes.filter_map(move |planes| {
                    PlaneGradient::with(context, (kernel, kind), batch, [lines, planes])
                })
            })
        });
        all.min_by(|one, other| one.seconds.total_cmp(&other.seconds))
    }

    fn with(
        context: Context<'a>,
        (kernel, kind): (&'a Variant, i64),
        batch: usize,
        [lines, planes]: [usize; 2],
    ) -> Option<PlaneGradient<'a>> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let &[d, h, w] = geometry.axes();
        let reach = |axis: volup::Axis| (axis.kernel - 1) * axis.dilation + 1;
        let (columns, rows) = ((w.input - 1) * w.stride + reach(w), (lines - 1) * h.stride + reach(h));
        let (channels, taps) = (size(kernel, "CHANNELS"), conv.kernel_size().into_iter().product::<usize>());
        let steps = (lines * w.input).div_ceil(STEP);
        let ring = reach(d) * rows * w.stride * columns.div_ceil(w.stride) * channels * 2;
        let of_taps = taps * conv.in_channels() * channels * 2;
        let of_voxels = conv.in_channels() * (steps * STEP + PAD) * request.dtype.size();
        let bare = request.block.is_bare();
        let tensors = if bare { 1 } else { 2 };
        let shared = (ring + of_taps + of_voxels).next_multiple_of(16) + WARPS * SLOTS * tensors * OF_TENSOR;
        let ctas = size(kernel, "CTAS").min(SHARED / (shared + kernel.shared_bytes as usize + RESERVED));
        if ctas == 0 {
            return None;
        }
        let items = product(&[batch, h.input.div_ceil(lines), d.input.div_ceil(planes)])
            .filter(|&items| int(items).is_ok())?;
        let blocks = items.min(ctas * context.device.multiprocessors);

        // Planes that an item makes, and what it takes of a multiprocessor.
        let made = (planes - 1) * d.stride + reach(d);
        let vectors = rows * columns * conv.out_channels().div_ceil(VECTOR);
        let products = 2 * steps * taps * (channels / STEP);
        let item = made as f64 * vectors as f64 * FILL[usize::from(kind != 0)][usize::from(!bare)]
            + planes as f64 * (PLANE + products as f64 * PRODUCT);
        let at_once = blocks.div_ceil(context.device.multiprocessors);
        let hidden = if at_once == 1 { ALONE } else { 1.0 };
        let compute = (items.div_ceil(blocks) * at_once) as f64 * item * hidden;
        let bytes = batch
            * (tensors * sample_bytes(context, geometry.output_shape())
                + 2 * sample_bytes(context, geometry.input_shape()));
        let seconds = START + compute.max(bytes as f64 / context.device.memory(MEMORY));
        Some(PlaneGradient { kernel, lines, planes, items, blocks, shared, seconds })
    }

    /// The launch, to the gradients that are wanted: of the weight its shares.
    pub(super) fn step(
        &self,
        context: Context<'_>,
        wanted: Wanted,
        terms: Argument,
        partial: u64,
        bounds: u64,
    ) -> Result<Step> {
        let request = context.request;
        let (geometry, block) = (&request.geometry, &request.block);
        // Each factor is read for the gradient of the other, and may not be there without it.
        let where_wanted = |wanted, buffer| if wanted { Argument::Pointer(buffer, 0) } else { NULL };
        let mut arguments = vec![
            where_wanted(wanted.weight, Buffer::Input),
            where_wanted(wanted.input, Buffer::Weight),
            Argument::Pointer(Buffer::GradOutput, 0),
            where_wanted(!block.is_bare(), Buffer::Convolution),
            where_wanted(wanted.input, Buffer::GradInput),
            if wanted.weight { Argument::Pointer(Buffer::Workspace, partial) } else { NULL },
        ];
        arguments.extend((context.halves > 0).then_some(Argument::Pointer(Buffer::Workspace, bounds)));
        let [mean, rstd, gamma, beta] = norm_arguments(context);
        arguments.extend([mean, rstd, terms, gamma, beta]);
        let (in_channels, out_channels) = (block.conv().in_channels(), block.conv().out_channels());
        push(&mut arguments, [in_channels, out_channels, epilogue::group_channels(context)])?;
        for axis in geometry.axes() {
            push(
                &mut arguments,
                [axis.input, axis.output, axis.kernel, axis.stride, axis.padding, axis.dilation],
            )?;
        }
        push(&mut arguments, [self.lines, self.planes, self.items])?;
        push_activations(context, &mut arguments);
        for (shape, format) in
            [(geometry.input_shape(), request.input_format), (geometry.output_shape(), request.output_format)]
        {
            arguments.extend(strides(shape, format).map(|stride| Argument::I64(stride as i64)));
        }
        Ok(Step::Launch {
            variant: *self.kernel,
            grid: [self.blocks as u32, 1, 1],
            shared: self.shared as u32,
            arguments,
            overlap: false,
        })
    }
}

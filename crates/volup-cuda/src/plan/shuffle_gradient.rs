//! Planning `shuffle_gradient`: both gradients of a convolution whose kernel is its stride, in one launch. The kernel's file
//! says what the numbers mean.

use super::epilogue::{self, NULL, norm_arguments, push_activations};
use super::rows::sample_bytes;
use super::weight_gradient::{of_kind, operands};
use super::{Algorithm, Argument, Buffer, Context, RESERVED, SHARED, Step, one_tap, product, push, size};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result, Wanted};

/// Channels of the input of a tile, and bytes of a tile of one tensor.
const CHANNELS: usize = 64;
const TILE: usize = 32 << 10;
/// Bytes of a row's channel and start.
const OF_ROW: usize = 20;
/// Sizes are counted in 32 bits, with room for a tile past the end.
const MOST: usize = i32::MAX as usize - (1 << 20);

/// Bytes a second of the memory.
const MEMORY: f64 = 3.6e12;
/// Seconds that a block computes for a tile, of 16 bits, of tf32, of two of them, and of two fp16, and for what follows the
/// convolution; what all takes beside.
const COMPUTE: [f64; 4] = [2.9e-6, 2.9e-6, 8.9e-6, 4.0e-6];
const EPILOGUE: f64 = 1.1e-6;
const START: f64 = 1e-5;

/// A plan of this kernel.
#[derive(Clone)]
pub(super) struct ShuffleGradient<'a> {
    kernel: &'a Variant,
    /// Tiles of a sample, and of all.
    tiles: usize,
    items: usize,
    blocks: usize,
    /// Shares of the gradient of the weight, of which each block has as many.
    pub(super) shares: usize,
    shared: usize,
    pub(super) seconds: f64,
    /// For what two fp16 are too coarse for, two tf32 in as many blocks.
    wide: Option<Box<ShuffleGradient<'a>>>,
}

/// Where what two fp16 take is: what bounds the gradient, and the words that say whether they are too coarse.
#[derive(Clone, Copy)]
pub(super) struct Bounded {
    pub(super) bounds: u64,
    pub(super) control: u64,
}

impl fmt::Display for ShuffleGradient<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "both by shuffle_gradient {}x{CHANNELS}, {} blocks", size(self.kernel, "ROWS"), self.blocks)
    }
}

/// Bytes of shared memory of a block.
fn shared_bytes(kernel: &Variant, kind: i64) -> usize {
    let rows = size(kernel, "ROWS");
    let pos = positions(kernel, 4);
    let products = match kind {
        0 => positions(kernel, 2) / 8 * (32 * (rows + 1) + 2080) + 128 * rows,
        1 => pos / 4 * (16 * (rows + 1) + 2080) + TILE + 256 * rows,
        2 => pos * (8 * rows + 658) + 320 * rows - 7680,
        _ => 4 * ((rows + 128) * (pos + 8) + 64 * (rows + 4)),
    };
    2 * TILE + products + OF_ROW * rows
}

/// Positions of a tile.
fn positions(kernel: &Variant, element: usize) -> usize {
    TILE / (element * size(kernel, "ROWS"))
}

impl<'a> ShuffleGradient<'a> {
    /// The plan for so many samples that is expected to be the fastest, where each output has one tap, two of them along width,
    /// in one group, all channels and taps are a tile's, and channels come first.
    pub(super) fn new(context: Context<'a>, batch: usize) -> Option<ShuffleGradient<'a>> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let first = [request.input_format, request.output_format] == [MemoryFormat::Contiguous; 2];
        let asked = request.algorithm.is_none_or(|wanted| wanted == Algorithm::ShuffleGemm);
        let applies = asked && first && one_tap(geometry) && conv.groups() == 1 && conv.stride()[2] == 2;
        // Elements of a sample of y: where a channel's lines begin.
        let far = product(&[conv.out_channels(), geometry.output_voxels()]).is_none_or(|far| far > MOST);
        // There is none of one fp16.
        if !applies || far || context.halves == 1 {
            return None;
        }
        let (types, kind) = operands(context)?;
        let rows = conv.out_channels() * conv.stride().into_iter().product::<usize>();
        let kernels = context.kernels("shuffle_gradient", &types).filter(|kernel| {
            kernel.param("KIND") == Some(kind)
                && rows <= size(kernel, "ROWS")
                && conv.in_channels() <= CHANNELS
        });
        let all = kernels.filter_map(|kernel| {
            ShuffleGradient::with(context, kernel, kind, batch)?.with_wide(context, kind, batch)
        });
        all.min_by(|one, other| one.seconds.total_cmp(&other.seconds))
    }

    /// The same with what it needs for numbers that two fp16 are too coarse for; nothing if there is no such thing.
    fn with_wide(self, context: Context<'a>, kind: i64, batch: usize) -> Option<ShuffleGradient<'a>> {
        if kind != 2 {
            return Some(self);
        }
        let params = [("KIND", 3), ("ROWS", size(self.kernel, "ROWS") as i64)];
        let kernel = context.kernel("shuffle_gradient", &[], &params).ok()?;
        let wide = ShuffleGradient::with(context, kernel, 3, batch)?;
        Some(ShuffleGradient { wide: Some(Box::new(wide)), ..self })
    }

    fn with(
        context: Context<'a>,
        kernel: &'a Variant,
        kind: i64,
        batch: usize,
    ) -> Option<ShuffleGradient<'a>> {
        let request = context.request;
        let geometry = &request.geometry;
        let [_, _, sizes @ ..] = geometry.input_shape();
        let tiles = sizes.iter().product::<usize>().div_ceil(positions(kernel, request.dtype.size()));
        let items = product(&[tiles, batch]).filter(|&items| items < MOST)?;
        let blocks = items.min(context.device.multiprocessors);
        let shared = shared_bytes(kernel, kind);
        if shared > SHARED - RESERVED {
            return None;
        }
        let tensors = if request.block.is_bare() { 1 } else { 2 };
        let bytes = batch
            * (tensors * sample_bytes(context, geometry.output_shape())
                + 2 * sample_bytes(context, geometry.input_shape()));
        let compute = of_kind(kind, &COMPUTE) + if request.block.is_bare() { 0.0 } else { EPILOGUE };
        let share = blocks as f64 / context.device.multiprocessors as f64;
        let seconds = START
            + (items.div_ceil(blocks) as f64 * compute)
                .max(bytes as f64 / (context.device.memory(MEMORY) * share));
        let shares = if kind == 3 { blocks } else { blocks * (256 / size(kernel, "ROWS")) };
        Some(ShuffleGradient { kernel, tiles, items, blocks, shares, shared, seconds, wide: None })
    }

    /// The launches, to the gradients that are wanted: of the weight its shares.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        wanted: Wanted,
        terms: Argument,
        partial: u64,
        bounded: Bounded,
    ) -> Result<Vec<Step>> {
        let control = Argument::Pointer(Buffer::Workspace, bounded.control);
        let Some(wide) = &self.wide else {
            let own = match self.kernel.param("KIND") {
                Some(3) => vec![NULL, 1.into()],
                _ => vec![],
            };
            return Ok(vec![self.step(context, wanted, terms, partial, own)?]);
        };
        let own = vec![Argument::Pointer(Buffer::Workspace, bounded.bounds), control];
        let step = self.step(context, wanted, terms, partial, own)?;
        let mut unless = vec![control];
        push(&mut unless, [self.shares / self.blocks])?;
        Ok(vec![step, wide.step(context, wanted, terms, partial, unless)?])
    }

    /// A launch, with arguments of its own.
    fn step(
        &self,
        context: Context<'_>,
        wanted: Wanted,
        terms: Argument,
        partial: u64,
        own: Vec<Argument>,
    ) -> Result<Step> {
        let request = context.request;
        let (geometry, block) = (&request.geometry, &request.block);
        let [_, in_channels, depth, height, width] = geometry.input_shape();
        let pointer = |buffer| Argument::Pointer(buffer, 0);
        // Each factor is read for the gradient of the other, and may not be there without it.
        let where_wanted = |wanted, buffer| if wanted { pointer(buffer) } else { NULL };
        let mut arguments = vec![
            where_wanted(wanted.weight, Buffer::Input),
            where_wanted(wanted.input, Buffer::Weight),
            pointer(Buffer::GradOutput),
            where_wanted(!block.is_bare(), Buffer::Convolution),
            where_wanted(wanted.input, Buffer::GradInput),
            if wanted.weight { Argument::Pointer(Buffer::Workspace, partial) } else { NULL },
        ];
        arguments.extend(own);
        let [mean, rstd, gamma, beta] = norm_arguments(context);
        arguments.extend([mean, rstd, terms, gamma, beta]);
        let out_channels = block.conv().out_channels();
        push(&mut arguments, [in_channels, out_channels, epilogue::group_channels(context)])?;
        push(&mut arguments, [depth * height * width, height * width, width])?;
        let [d_stride, h_stride, w_stride] = block.conv().stride();
        push(&mut arguments, [d_stride, h_stride, self.tiles, self.items])?;
        let whole = |elements: usize| usize::from((elements * request.dtype.size()).is_multiple_of(16));
        push(&mut arguments, [whole(w_stride * width), whole(depth * height * width)])?;
        push_activations(context, &mut arguments);
        Ok(Step::Launch {
            variant: *self.kernel,
            grid: [self.blocks as u32, 1, 1],
            shared: self.shared as u32,
            arguments,
            overlap: false,
        })
    }
}

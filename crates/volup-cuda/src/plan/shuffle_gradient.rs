//! Planning `shuffle_gradient`: both gradients of a convolution whose kernel is its stride, in one launch. The kernel's file
//! says what the numbers mean.

use super::epilogue::{self, NULL, norm_arguments, push_activations};
use super::rows::sample_bytes;
use super::weight_gradient::operands;
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
/// Seconds that a block computes for a tile, of 16 bits, of tf32, and of two of them, and for what follows the convolution;
/// what all takes beside.
const COMPUTE: [f64; 3] = [2.9e-6, 2.9e-6, 8.9e-6];
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
    /// Shares of the gradient of the weight.
    pub(super) shares: usize,
    shared: usize,
    pub(super) seconds: f64,
}

impl fmt::Display for ShuffleGradient<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "both by shuffle_gradient {}x{CHANNELS}, {} blocks", size(self.kernel, "ROWS"), self.blocks)
    }
}

/// Bytes of shared memory of a block.
fn shared_bytes(kernel: &Variant, kind: i64) -> usize {
    let rows = size(kernel, "ROWS");
    let products = match kind {
        0 => positions(kernel, 2) / 8 * (32 * (rows + 1) + 2080) + 128 * rows,
        1 => positions(kernel, 4) / 4 * (16 * (rows + 1) + 2080) + TILE + 256 * rows,
        _ => 4 * ((rows + 128) * (positions(kernel, 4) + 8) + 64 * (rows + 4)),
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
        if !applies || far {
            return None;
        }
        let (types, kind) = operands(context)?;
        let rows = conv.out_channels() * conv.stride().into_iter().product::<usize>();
        let kernels = context.kernels("shuffle_gradient", &types).filter(|kernel| {
            kernel.param("KIND") == Some(kind)
                && rows <= size(kernel, "ROWS")
                && conv.in_channels() <= CHANNELS
        });
        let all = kernels.filter_map(|kernel| ShuffleGradient::with(context, kernel, kind, batch));
        all.min_by(|one, other| one.seconds.total_cmp(&other.seconds))
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
        let compute = match kind {
            0 => COMPUTE[0],
            1 => COMPUTE[1],
            _ => COMPUTE[2],
        };
        let compute = compute + if request.block.is_bare() { 0.0 } else { EPILOGUE };
        let share = blocks as f64 / context.device.multiprocessors as f64;
        let seconds = START + (items.div_ceil(blocks) as f64 * compute).max(bytes as f64 / (MEMORY * share));
        let shares = if kind == 3 { blocks } else { blocks * (256 / size(kernel, "ROWS")) };
        Some(ShuffleGradient { kernel, tiles, items, blocks, shares, shared, seconds })
    }

    /// The launch, to the gradients that are wanted: of the weight its shares.
    pub(super) fn step(
        &self,
        context: Context<'_>,
        wanted: Wanted,
        terms: Argument,
        partial: u64,
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

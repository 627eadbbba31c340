//! Planning `shuffle_ring` and, for NDHWC, `shuffle_ring_last`: kernels that are their stride, of many channels in float32; and
//! `shuffle_ring_half`, the same of 16 bits. The kernels' files say what the numbers mean.

use super::pack::Operand;
use super::shuffle_gemm::{CACHE, CLOCK, MEMORY, MOST, SEEN, START, alike, applies, unit};
use super::{Argument, Buffer, Context, RESERVED, SHARED, Step, bias_and_activation, push, size, strides};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Channels of a stage, and of one of 16 bits; bytes that stand between its lines, and of NDHWC between positions of float32.
const CHUNK: usize = 32;
const CHUNK_OF_HALF: usize = 64;
const PAD: usize = 16;
const POSITION_PAD: usize = 32;
/// The most stages, and the fewest beside weights that stay.
const STAGES: usize = 16;
const FEWEST: usize = 4;

/// Clocks of a block for a stage and for what it writes, and more for each 64 rows by 64 positions; of a stage of two parts, and of
/// 16 bits, where it matters which format is written.
const STAGE: [f64; 2] = [400.0, 245.0];
const STAGE_OF_PARTS: [f64; 2] = [295.0, 940.0];
const STAGE_OF_HALF: [f64; 2] = [320.0, 220.0];
const WRITE: [f64; 2] = [850.0, 425.0];
const WRITE_OF_HALF: [f64; 2] = [1000.0, 500.0];
const WRITE_OF_HALF_LAST: [f64; 2] = [575.0, 390.0];
/// What blocks of NDHWC in float32 that take several items were seen to take of that.
const SEVERAL_LAST: f64 = 1.085;
/// Seconds that blocks have what they start with sooner than those of `shuffle_gemm`.
const SOONER: f64 = 1.2e-6;

/// A plan of this family.
#[derive(Clone, Copy)]
pub(super) struct ShuffleRing<'a> {
    operand: Operand,
    kernel: &'a Variant,
    /// Whether it is of NDHWC.
    last: bool,
    row_blocks: usize,
    /// Blocks of positions of a sample.
    pos_blocks: usize,
    /// Blocks side by side of each row block.
    groups: usize,
    chunks: usize,
    stages: usize,
    /// Whether weights stay.
    kept: bool,
    shared: usize,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for ShuffleRing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rows, positions] = tile(self.kernel);
        write!(f, "{} {} {rows}x{positions}, ", self.kernel.entry, self.operand.name())?;
        write!(f, "{} row blocks, {} groups, {} stages", self.row_blocks, self.groups, self.stages)?;
        f.write_str(if self.kept { ", weights kept" } else { "" })
    }
}

/// Rows and positions of a block.
fn tile(kernel: &Variant) -> [usize; 2] {
    [["WARP_ROWS", "ROW_WARPS"], ["WARP_POS", "POS_WARPS"]]
        .map(|of| of.map(|name| size(kernel, name)).iter().product())
}

impl<'a> ShuffleRing<'a> {
    /// Every plan, where `shuffle_gemm` applies, of whole stages (of 16 bits any) and copies of 16 bytes: for NCDHW with a stride of 2 along width,
    /// for NDHWC with as many taps as a kernel has (of 16 bits 8), and whole warps of rows.
    pub(super) fn all(context: Context<'a>) -> Vec<ShuffleRing<'a>> {
        let Some((operand, _)) = applies(context).filter(|_| alike(context)) else { return Vec::new() };
        let (geometry, conv) = (&context.request.geometry, context.request.geometry.conv());
        let last = context.request.output_format == MemoryFormat::ChannelsLast3d;
        let volume: usize = geometry.input_shape()[2..].iter().product();
        let taps = conv.stride().iter().product::<usize>();
        let rows = conv.out_channels() * taps;
        let bytes = context.request.dtype.size();
        let half = operand == Operand::Half;
        let run = if last { conv.in_channels() } else { volume };
        let vectors = [rows, run].into_iter().all(|run| unit(bytes * run) == 16);
        let chunks = half || conv.in_channels().is_multiple_of(CHUNK);
        if !vectors || !chunks || !last && conv.stride()[2] != 2 {
            return Vec::new();
        }
        let is_it = |kernel: &&Variant| {
            let is_taps = kernel.param("TAPS").unwrap_or(8) == taps as i64;
            kernel.param("KIND") == Some(operand.kind())
                && kernel.param("LAST").is_none_or(|of_last| of_last == i64::from(last))
                && (!last || is_taps && rows.is_multiple_of(size(kernel, "WARP_ROWS")))
        };
        let name = match (half, last) {
            (true, _) => "shuffle_ring_half",
            (false, true) => "shuffle_ring_last",
            (false, false) => "shuffle_ring",
        };
        let types = operand.types(context);
        let kernels = context.kernels(name, &types).filter(is_it);
        kernels.filter_map(|kernel| ShuffleRing::new(context, operand, kernel, last)).collect()
    }

    fn new(
        context: Context<'a>,
        operand: Operand,
        kernel: &'a Variant,
        last: bool,
    ) -> Option<ShuffleRing<'a>> {
        let (geometry, conv) = (&context.request.geometry, context.request.geometry.conv());
        let rows = conv.out_channels() * conv.stride().iter().product::<usize>();
        let volume: usize = geometry.input_shape()[2..].iter().product();
        let [tile_rows, positions] = tile(kernel);
        let half = operand == Operand::Half;
        let chunk = if half { CHUNK_OF_HALF } else { CHUNK };
        let (chunks, row_blocks) = (conv.in_channels().div_ceil(chunk), rows.div_ceil(tile_rows));
        let pos_blocks = volume.div_ceil(positions);
        let items = geometry.batch().checked_mul(pos_blocks)?;
        if items.checked_mul(chunks)? > MOST || row_blocks > MOST / 1024 {
            return None;
        }
        let processors = context.device.multiprocessors;
        let groups = (processors / row_blocks).clamp(1, items);
        let turns = items.div_ceil(groups);

        // Weights stay where blocks take several items and enough stages of X fit beside them.
        let bytes = context.request.dtype.size();
        let [of_lines, of_w] = [positions, tile_rows].map(|length| chunk * (bytes * length + PAD));
        let position_pad = if half { PAD } else { POSITION_PAD };
        let of_x = if last { positions * (bytes * chunk + position_pad) } else { of_lines };
        let fixed = (16 * STAGES).next_multiple_of(128) + 8 * tile_rows + kernel.shared_bytes as usize;
        let room = (SHARED - RESERVED).checked_sub(fixed)?;
        let beside = room.saturating_sub(chunks * of_w) / of_x;
        let kept = turns > 1 && beside >= FEWEST;
        let most = if kept { beside } else { room / (of_x + of_w) };
        let stages = most.min(STAGES).min(turns * chunks);
        if stages == 0 {
            return None;
        }
        let w_stages = if kept { chunks } else { stages };
        let shared = (16 * stages).next_multiple_of(128) + stages * of_x + w_stages * of_w + 8 * tile_rows;

        let count = |shape: [usize; 5]| bytes as f64 * shape.iter().map(|&size| size as f64).product::<f64>();
        let (x, y) = (count(geometry.input_shape()), count(geometry.output_shape()));
        let w = (bytes * conv.in_channels() * rows) as f64;
        let read = x * row_blocks as f64 + w * if kept { groups } else { items } as f64;
        let moved = ((x + y + w) / context.device.memory(MEMORY)).max((read + y) / CACHE);
        let squares = (tile_rows * positions) as f64 / 4096.0;
        let clocks = match (operand, last) {
            (Operand::Half, false) => [STAGE_OF_HALF, WRITE_OF_HALF],
            (Operand::Half, true) => [STAGE_OF_HALF, WRITE_OF_HALF_LAST],
            (Operand::Tf32, _) => [STAGE, WRITE],
            _ => [STAGE_OF_PARTS, WRITE],
        };
        let [stage, write] = clocks.map(|[all, square]| all + square * squares);
        let slower = if last && !half && turns > 1 { SEVERAL_LAST } else { 1.0 };
        let turns = (turns * (row_blocks * groups).div_ceil(processors)) as f64;
        let compute = slower * turns * (chunks as f64 * stage + write) / CLOCK;
        let seconds = START - SOONER + moved.max(compute) + SEEN * moved.min(compute);
        Some(ShuffleRing {
            operand,
            kernel,
            last,
            row_blocks,
            pos_blocks,
            groups,
            chunks,
            stages,
            kept,
            shared,
            seconds,
        })
    }

    /// What is launched: the convolution.
    pub(super) fn steps(&self, context: Context<'_>, steps: &mut Vec<Step>) -> Result<()> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let [batch, _, depth, height, width] = geometry.input_shape();
        let [d, h, w] = conv.stride();
        let buffers = [Buffer::Input, Buffer::Weight, Buffer::Bias, Buffer::Output];
        let mut arguments: Vec<Argument> = buffers.map(|buffer| Argument::Pointer(buffer, 0)).into();
        // What only some need to be told, kernels of 16 bits are told.
        let half = self.operand == Operand::Half;
        push(&mut arguments, half.then_some(conv.in_channels()))?;
        push(&mut arguments, [conv.out_channels(), depth * height * width, height * width, width, d, h])?;
        push(&mut arguments, (self.last || half).then_some(w))?;
        let [x_n, ..] = strides(geometry.input_shape(), request.input_format);
        let [y_n, y_c, y_d, y_h, y_w] = strides(geometry.output_shape(), request.output_format);
        arguments.extend([x_n, y_n].map(|stride| Argument::I64(stride as i64)));
        push(&mut arguments, [y_c, y_d, y_h].into_iter().chain((self.last || half).then_some(y_w)))?;
        push(&mut arguments, [self.chunks, self.pos_blocks, batch * self.pos_blocks])?;
        push(&mut arguments, [self.row_blocks, self.stages, usize::from(self.kept)])?;
        let whole = i32::from(width.is_multiple_of(2));
        arguments.extend((!self.last || half).then_some(Argument::from(whole)));
        arguments.extend(bias_and_activation(request));
        let grid = [(self.row_blocks * self.groups) as u32, 1, 1];
        let (variant, shared) = (*self.kernel, self.shared as u32);
        steps.push(Step::Launch { variant, grid, shared, arguments, overlap: false });
        Ok(())
    }
}

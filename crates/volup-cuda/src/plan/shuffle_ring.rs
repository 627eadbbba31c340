//! Planning `shuffle_ring` and, for NDHWC, `shuffle_ring_last`: kernels that are their stride, of many channels in float32. The
//! kernels' files say what the numbers mean.

use super::pack::Operand;
use super::shuffle_gemm::{CACHE, CLOCK, MEMORY, MOST, SEEN, START, alike, applies, run, unit};
use super::{Argument, Buffer, Context, RESERVED, SHARED, Step, bias_and_activation, push, size, strides};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Channels of a stage; elements that stand between its lines, of NDHWC between positions.
const CHUNK: usize = 32;
const PAD: usize = 4;
const POSITION_PAD: usize = 8;
/// The most stages, and the fewest beside weights that stay.
const STAGES: usize = 16;
const FEWEST: usize = 4;

/// Clocks of a block for a stage and for what it writes, and more for each 64 rows by 64 positions; of a stage of two parts.
const STAGE: [f64; 2] = [400.0, 245.0];
const STAGE_OF_PARTS: [f64; 2] = [295.0, 940.0];
const WRITE: [f64; 2] = [850.0, 425.0];
/// What blocks of NDHWC that take several items were seen to take of that.
const SEVERAL_LAST: f64 = 1.085;
/// Seconds that blocks have what they start with sooner than those of `shuffle_gemm`.
const SOONER: f64 = 1.2e-6;

/// A plan of this family.
#[derive(Clone, Copy)]
pub(super) struct ShuffleRing<'a> {
    operand: Operand,
    kernel: &'a Variant,
    /// Whether it is that of NDHWC.
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
    /// Every plan, where `shuffle_gemm` applies, of whole stages and copies of 16 bytes: for NCDHW with a stride of 2 along width,
    /// for NDHWC with as many taps as a kernel has, and whole warps of rows.
    pub(super) fn all(context: Context<'a>) -> Vec<ShuffleRing<'a>> {
        let Some((operand, _)) = applies(context).filter(|_| alike(context)) else { return Vec::new() };
        let (geometry, conv) = (&context.request.geometry, context.request.geometry.conv());
        let last = context.request.output_format == MemoryFormat::ChannelsLast3d;
        let volume: usize = geometry.input_shape()[2..].iter().product();
        let taps = conv.stride().iter().product::<usize>();
        let rows = conv.out_channels() * taps;
        let whole = conv.in_channels().is_multiple_of(CHUNK)
            && unit(4 * rows) == 16
            && (last || conv.stride()[2] == 2 && unit(4 * volume) == 16);
        if !whole {
            return Vec::new();
        }
        let types = operand.types(context);
        let is_it = |kernel: &&Variant| {
            kernel.param("KIND") == Some(operand.kind())
                && (!last || size(kernel, "TAPS") == taps && rows.is_multiple_of(size(kernel, "WARP_ROWS")))
        };
        let name = if last { "shuffle_ring_last" } else { "shuffle_ring" };
        let kernels = context.kernels(name, &types).filter(is_it);
        kernels.filter_map(|kernel| ShuffleRing::new(context, operand, kernel)).collect()
    }

    fn new(context: Context<'a>, operand: Operand, kernel: &'a Variant) -> Option<ShuffleRing<'a>> {
        let (geometry, conv) = (&context.request.geometry, context.request.geometry.conv());
        let rows = conv.out_channels() * conv.stride().iter().product::<usize>();
        let volume: usize = geometry.input_shape()[2..].iter().product();
        let [tile_rows, positions] = tile(kernel);
        let (chunks, row_blocks) = (conv.in_channels() / CHUNK, rows.div_ceil(tile_rows));
        let pos_blocks = volume.div_ceil(positions);
        let items = geometry.batch().checked_mul(pos_blocks)?;
        if items.checked_mul(chunks)? > MOST || row_blocks > MOST / 1024 {
            return None;
        }
        let processors = context.device.multiprocessors;
        let groups = (processors / row_blocks).clamp(1, items);
        let turns = items.div_ceil(groups);

        // Weights stay where blocks take several items and enough stages of X fit beside them.
        let last = kernel.param("TAPS").is_some();
        let [of_lines, of_w] = [positions, tile_rows].map(|length| 4 * CHUNK * (length + PAD));
        let of_x = if last { 4 * positions * (CHUNK + POSITION_PAD) } else { of_lines };
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

        let count = |shape: [usize; 5]| 4.0 * shape.iter().map(|&size| size as f64).product::<f64>();
        let (x, y) = (count(geometry.input_shape()), count(geometry.output_shape()));
        let w = 4.0 * (conv.in_channels() * rows) as f64;
        let read = x * row_blocks as f64 + w * if kept { groups } else { items } as f64;
        let moved = ((x + y + w) / context.device.memory(MEMORY)).max((read + y) / CACHE);
        let squares = (tile_rows * positions) as f64 / 4096.0;
        let stage = if operand == Operand::Tf32 { STAGE } else { STAGE_OF_PARTS };
        let [stage, write] = [stage, WRITE].map(|[all, square]| all + square * squares);
        let slower = if last && turns > 1 { SEVERAL_LAST } else { 1.0 };
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
        push(&mut arguments, [conv.out_channels(), depth * height * width, height * width, width, d, h])?;
        push(&mut arguments, self.last.then_some(w))?;
        let [x_n, ..] = strides(geometry.input_shape(), request.input_format);
        let [y_n, y_c, y_d, y_h, y_w] = strides(geometry.output_shape(), request.output_format);
        arguments.extend([x_n, y_n].map(|stride| Argument::I64(stride as i64)));
        push(&mut arguments, [y_c, y_d, y_h].into_iter().chain(self.last.then_some(y_w)))?;
        push(&mut arguments, [self.chunks, self.pos_blocks, batch * self.pos_blocks])?;
        push(&mut arguments, [self.row_blocks, self.stages, usize::from(self.kept)])?;
        let whole = i32::from(run(geometry, false).is_multiple_of(4));
        arguments.extend((!self.last).then_some(Argument::from(whole)));
        arguments.extend(bias_and_activation(request));
        let grid = [(self.row_blocks * self.groups) as u32, 1, 1];
        let (variant, shared) = (*self.kernel, self.shared as u32);
        steps.push(Step::Launch { variant, grid, shared, arguments, overlap: false });
        Ok(())
    }
}

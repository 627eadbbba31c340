//! Planning `shuffle_gemm`: kernels that are their stride, in one launch. The kernels' file says what the numbers mean.

use super::norm::{self, Pass, Way};
use super::pack::Operand;
use super::{
    Argument, Buffer, Context, RESERVED, SHARED, Step, Workspace, activation_code, bias_and_activation,
    epilogue, gcd, one_tap, product, push, size, strides,
};
use crate::Variant;
use std::fmt;
use volup::{Geometry, MemoryFormat, Result};

/// Channels of a stage.
const CHUNK: usize = 32;
/// Channels of the columns that a lane has neighbours of.
const UNIT: usize = 16;
/// Sizes are counted in 32 bits, with room for a block past the end.
pub(super) const MOST: usize = i32::MAX as usize - (1 << 20);

/// Clocks a second.
pub(super) const CLOCK: f64 = 1.7e9;
/// Bytes a second of the memory, and of the second-level cache.
pub(super) const MEMORY: f64 = 3.6e12;
pub(super) const CACHE: f64 = 5e12;
/// Of what other row blocks read again from there, the part that does not hide.
const AGAIN: f64 = 0.6;
/// Instructions of a warp for 32 rows by 32 positions, by kind of operand: for a step, for a stage beside its steps, for
/// what is written.
const INSTRUCTIONS: [[f64; 3]; 3] = [[35.0, 40.0, 220.0], [47.0, 60.0, 110.0], [123.0, 62.0, 210.0]];
/// How much more copies of less than 16 bytes take, and outputs that are written one by one.
const SCATTERED: f64 = 12.0;
const APART: f64 = 2.0;
/// The share of its issue slots that a multiprocessor fills: with no warp, and more with each; at most; how much of that
/// where one block waits for itself.
const ISSUE: [f64; 4] = [0.26, 0.015, 0.75, 0.88];
/// Clocks that a block waits for a stage, and for what it writes, whatever there is to compute.
const WAIT: f64 = 700.0;
const WRITE: f64 = 1500.0;
/// Sectors of memory, in bytes; how much more the output takes whose channels start within one.
pub(super) const SECTOR: usize = 32;
const WITHIN: f64 = 1.35;
/// Of what takes less, computing or moving, the part that does not hide behind the other.
pub(super) const SEEN: f64 = 0.15;
/// Seconds until blocks have what they start with; for each byte of weights that those of a multiprocessor bring in
/// another order, or round where they lie.
pub(super) const START: f64 = 6.5e-6;
const REORDER: f64 = 3.8e-11;
const ROUND: f64 = 2e-11;

/// A plan of this family.
#[derive(Clone, Copy)]
pub(super) struct ShuffleGemm<'a> {
    operand: Operand,
    kernel: &'a Variant,
    /// Channels of a row block of NDHWC.
    channels: usize,
    row_blocks: usize,
    /// Blocks of positions of a sample.
    pos_blocks: usize,
    /// Blocks of positions that are computed side by side.
    groups: usize,
    chunks: usize,
    w_pitch: usize,
    shared: usize,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for ShuffleGemm<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tile { rows, positions, warps, ctas } = Tile::of(self.kernel);
        write!(f, "shuffle_gemm {} {rows}x{positions}, {warps} warps x{ctas}, ", self.operand.name())?;
        write!(f, "{} row blocks, {} groups{}", self.row_blocks, self.groups, self.way())
    }
}

/// What a block computes at a time, and its warps; blocks of a multiprocessor.
struct Tile {
    rows: usize,
    positions: usize,
    warps: usize,
    ctas: usize,
}

impl Tile {
    fn of(kernel: &Variant) -> Tile {
        let of = |name| size(kernel, name);
        Tile {
            rows: of("WARP_ROWS") * of("ROW_WARPS"),
            positions: of("WARP_POS") * of("POS_WARPS"),
            warps: of("ROW_WARPS") * of("POS_WARPS"),
            ctas: of("CTAS"),
        }
    }
}

/// The largest of 16, 8, 4 and 2 that divides a number of bytes; else 1.
pub(super) fn unit(bytes: usize) -> usize {
    gcd(bytes, 16)
}

/// Of what neighbours that a lane has the number in a line of y: channels, positions and residues along width, or
/// positions.
pub(super) fn run(geometry: &Geometry, last: bool) -> usize {
    let [_, _, depth, height, width] = geometry.input_shape();
    match (last, geometry.conv().stride()) {
        (true, _) => geometry.conv().out_channels(),
        (false, [_, _, 2]) => 2 * width,
        (false, [1, 1, _]) => depth * height * width,
        _ => width,
    }
}

/// Whether each output has one tap, in one group, the activation is a comparison, and input and output lie the same way;
/// not for float64, not past 32-bit counts. The kind of operands, and whether a norm is computed as well.
pub(super) fn applies(context: Context<'_>) -> Option<(Operand, bool)> {
    let request = context.request;
    let (geometry, conv) = (&request.geometry, request.geometry.conv());
    let operand = Operand::of(context)?;
    let last = request.output_format == MemoryFormat::ChannelsLast3d;
    let counted = |sizes: &[usize]| product(sizes).is_some_and(|size| size <= MOST);
    let fits = counted(&geometry.input_shape()[1..])
        && counted(&geometry.output_shape()[1..])
        && counted(&conv.weight_shape());
    let straight = activation_code(epilogue(&request.block)[0]).0 <= 2;
    let volume: usize = geometry.input_shape()[2..].iter().product();
    let apart = conv.stride()[2] <= 2 || last;
    let bytes = request.dtype.size();
    let rows = conv.out_channels() * conv.stride().iter().product::<usize>();
    let of_last = request.input_format == MemoryFormat::ChannelsLast3d;
    let x_run = if of_last { conv.in_channels() } else { volume };
    // Copies are of 4 bytes at least.
    let aligned = unit(x_run * bytes) >= 4 && (last || unit(rows * bytes) >= 4);
    let applies = one_tap(geometry)
        && fits
        && straight
        && apart
        && aligned
        && volume > 0
        && conv.groups() == 1
        && (of_last || !last);
    let post = activation_code(request.block.post_activation()).0;
    applies.then_some((operand, request.block.norm().is_some() && post <= 2))
}

/// Whether input and output have one format.
pub(super) fn alike(context: Context<'_>) -> bool {
    context.request.input_format == context.request.output_format
}

impl<'a> ShuffleGemm<'a> {
    /// Every plan where the family applies.
    pub(super) fn all(context: Context<'a>) -> Vec<ShuffleGemm<'a>> {
        let Some((operand, may_twice)) = applies(context).filter(|_| alike(context)) else {
            return Vec::new();
        };
        let last = context.request.output_format == MemoryFormat::ChannelsLast3d;
        // Kernels that know the modes of a normalization compute it; the others are faster.
        let is_it = |kernel: &&Variant| {
            kernel.param("KIND") == Some(operand.kind())
                && kernel.param("LAST") == Some(i64::from(last))
                && (may_twice || kernel.param("NORM") == Some(0))
        };
        let types = operand.types(context);
        let kernels = context.kernels("shuffle_gemm", &types).filter(is_it);
        kernels.filter_map(|kernel| ShuffleGemm::new(context, operand, kernel, last)).collect()
    }

    fn new(
        context: Context<'a>,
        operand: Operand,
        kernel: &'a Variant,
        last: bool,
    ) -> Option<ShuffleGemm<'a>> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let (cin, cout) = (conv.in_channels(), conv.out_channels());
        let taps: usize = conv.stride().iter().product();
        let volume: usize = geometry.input_shape()[2..].iter().product();
        let Tile { rows, positions, warps, ctas } = Tile::of(kernel);
        let bytes = request.dtype.size();
        let (channels, row_blocks) = if last {
            let most = rows / taps / UNIT * UNIT;
            if most == 0 {
                return None;
            }
            let blocks = cout.div_ceil(most);
            (cout.div_ceil(blocks).next_multiple_of(UNIT), blocks)
        } else {
            (0, (cout * taps).div_ceil(rows))
        };
        let chunks = cin.div_ceil(CHUNK);
        // Elements of 16 bytes, and those that stand between lines of NCDHW.
        let vector = 16 / bytes;
        let pad = if !last && bytes == 4 { 2 * vector } else { vector };
        let w_pitch = if last {
            // So that the lines that a warp reads at once lie in different banks.
            let past = if bytes == 4 { 8 } else { 4 };
            let words = (taps * (channels + vector) * bytes / 4).saturating_sub(past);
            (words.next_multiple_of(32) + past) * 4 / bytes
        } else {
            rows + pad
        };
        let (lines, length) = if last { (positions, CHUNK) } else { (CHUNK, positions) };
        let stages = size(kernel, "STAGES") * operand.parts() * lines * (length + pad);
        let weights = bytes * chunks * CHUNK * w_pitch;
        let shared = bytes * stages + weights + 20 * rows + 8 * rows * size(kernel, "POS_WARPS");
        let fixed = kernel.shared_bytes as usize;
        let ctas = ctas.min(SHARED / (shared + fixed + RESERVED));
        if ctas == 0 {
            return None;
        }
        let pos_blocks = volume.div_ceil(positions);
        let items = geometry.batch().checked_mul(pos_blocks)?;
        let stages_of_all = items.checked_mul(chunks)?;
        if stages_of_all > MOST || row_blocks > MOST / 1024 {
            return None;
        }
        let processors = context.device.multiprocessors;
        let groups = (processors * ctas / row_blocks).clamp(1, items);

        let count = |shape: [usize; 5]| shape.iter().map(|&size| size as f64).product::<f64>() * bytes as f64;
        let (x, y, w) = (
            count(geometry.input_shape()),
            count(geometry.output_shape()),
            (cin * cout * taps * bytes) as f64,
        );
        let y = if last || (volume * bytes).is_multiple_of(SECTOR) { y } else { WITHIN * y };
        let blocks = row_blocks * groups;
        let twice = kernel.param("NORM") == Some(1);
        if twice {
            // Three numbers each, also of groups without a block of positions in a sample.
            let of_sample = (12 * groups * size(kernel, "POS_WARPS") * cout * taps) as f64;
            let norm_groups = request.block.norm().map_or(1, |norm| norm.groups());
            let counted = product(&[geometry.batch(), groups.max(norm_groups)]).is_some_and(|n| n <= MOST);
            if !counted || geometry.batch() as f64 * of_sample > norm::room(count(geometry.output_shape())) {
                return None;
            }
        }
        let weights = weights as f64;
        let cached = (x * row_blocks as f64 + blocks as f64 * weights + y) / CACHE;
        let again = AGAIN * x * (row_blocks - 1) as f64 / CACHE;
        let moved = ((x + y + w) / context.device.memory(MEMORY)).max(cached) + again;
        let moved_unwritten = ((x + w) / context.device.memory(MEMORY)).max(cached - y / CACHE) + again;
        // Blocks one after the other where there are more than fit, each item after item.
        let side_by_side = blocks.div_ceil(processors).min(ctas) as f64;
        let warps = side_by_side * warps as f64;
        let turns = (blocks.div_ceil(processors * ctas) * items.div_ceil(groups)) as f64;
        let [step, stage, write] = INSTRUCTIONS[match operand {
            Operand::Half => 0,
            Operand::Tf32 | Operand::Scaled => 1,
            Operand::Split | Operand::Parts => 2,
        }];
        let scattered = |run: usize| !(run * bytes).is_multiple_of(16);
        let stage = if scattered(if last { cin } else { volume }) { stage * SCATTERED } else { stage };
        let write = if run(geometry, last).is_multiple_of(4) { write } else { write * APART };
        let tiles = (rows * positions / (1024 * kernel.threads as usize / 32)) as f64;
        let steps = (CHUNK * bytes / 32) as f64;
        let instructions = chunks as f64 * (tiles * steps * step + stage) + tiles * write;
        let together = if ctas == 1 { ISSUE[3] } else { 1.0 };
        let issued = 4.0 * together * (ISSUE[0] + ISSUE[1] * warps).min(ISSUE[2]);
        let alone = chunks as f64 * WAIT + WRITE;
        let compute = turns * (warps * instructions / issued).max(alone) / CLOCK;
        let brought = weights
            * match (last, operand) {
                (true, _) => REORDER,
                (false, Operand::Half) => 0.0,
                (false, _) => ROUND * side_by_side,
            };
        let expected = |moved: f64| START + brought + moved.max(compute) + SEEN * moved.min(compute);
        let seconds = expected(moved) + if twice { expected(moved_unwritten) + norm::MERGE } else { 0.0 };
        Some(ShuffleGemm {
            operand,
            kernel,
            channels,
            row_blocks,
            pos_blocks,
            groups,
            chunks,
            w_pitch,
            shared,
            seconds,
        })
    }

    /// What it does about a normalization.
    pub(super) fn way(&self) -> Way {
        if self.kernel.param("NORM") == Some(1) { Way::Twice } else { Way::Plain }
    }

    /// What is launched: the convolution, or with its normalization.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let conv = context.request.geometry.conv();
        let rows = conv.out_channels() * conv.stride().iter().product::<usize>();
        let chunks = self.groups * size(self.kernel, "POS_WARPS");
        norm::passes(context, self.way(), [chunks, rows], workspace, steps, |pass| {
            self.step(context, pass).map(Some)
        })
    }

    /// One launch.
    fn step(&self, context: Context<'_>, pass: Pass) -> Result<Step> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let last = request.output_format == MemoryFormat::ChannelsLast3d;
        let [batch, cin, depth, height, width] = geometry.input_shape();
        let [d, h, w] = conv.stride();
        let (rows, volume) = (conv.out_channels() * d * h * w, depth * height * width);
        let bytes = request.dtype.size();
        let buffers = [Buffer::Input, Buffer::Weight, Buffer::Bias, Buffer::Output];
        let mut arguments: Vec<Argument> = buffers.map(|buffer| Argument::Pointer(buffer, 0)).into();
        push(&mut arguments, [cin, conv.out_channels(), volume, height * width, width, d, h, w])?;
        let [x_n, ..] = strides(geometry.input_shape(), request.input_format);
        let [y_n, rest @ ..] = strides(geometry.output_shape(), request.output_format);
        arguments.extend([x_n, y_n].map(|stride| Argument::I64(stride as i64)));
        push(&mut arguments, rest)?;
        push(&mut arguments, [self.chunks, self.pos_blocks, batch * self.pos_blocks, self.row_blocks])?;
        push(&mut arguments, [self.w_pitch, self.channels])?;
        let x_unit = unit(bytes * if last { cin } else { volume });
        push(&mut arguments, [x_unit, unit(bytes * rows)])?;
        arguments.push(i32::from(run(geometry, last).is_multiple_of(4)).into());
        arguments.extend(bias_and_activation(request));
        arguments.push(pass.mode().into());
        pass.push(context, &mut arguments)?;
        let grid = [(self.row_blocks * self.groups) as u32, 1, 1];
        let (variant, shared) = (*self.kernel, self.shared as u32);
        Ok(Step::Launch { variant, grid, shared, arguments, overlap: false })
    }
}

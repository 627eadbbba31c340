//! Planning `implicit_gemm`: few channels, and exactly the products that an output has. The kernel's file says what the numbers mean.

use super::norm::{self, Pass, Way};
use super::pack::Operand;
use super::phases::taps_of_residues;
use super::{
    Argument, Buffer, Context, RESERVED, SHARED, Step, Workspace, activation_code, epilogue, grid, product,
    push, size, strides,
};
use crate::Variant;
use std::fmt;
use volup::{Axis, MemoryFormat, Result};

/// As the kernel has them: warps of a block; positions of a line, words around them, words from a line to the next, and of
/// a staged one.
const WARPS: usize = 8;
const LANES: usize = 32;
const MARGIN: usize = 4;
const PITCH: usize = LANES + 2 * MARGIN;
const STAGED: usize = 2 * LANES + 8;
const MOST_CLASSES: usize = 64;
const MOST_WIDTH: usize = 9;
/// Sizes of a sample are counted in 32 bits, with room for a box past the end.
const MOST: usize = i32::MAX as usize - (1 << 24);

/// Clocks a second, and the share of issue slots that are filled: by none, and by each warp of a multiprocessor.
const CLOCK: f64 = 1.7e9;
const ISSUED: [f64; 2] = [0.16, 0.0185];
/// Bytes a second of the memory.
const MEMORY: f64 = 3.4e12;
/// Of what takes less, computing or moving, the part that does not hide behind the other; of a block's first box, which all
/// blocks compute at the same time.
const SEEN: f64 = 0.3;
const FIRST: f64 = 0.3;
/// Seconds until a block's tables are there; until a thread has brought two vectors of weights.
const START: f64 = 10e-6;
const WEIGHTS: f64 = 1e-6;
/// Instructions of a warp: for a step beside its products, for a tile of a step by kind of operand, for a unit of work
/// beside its steps and outputs; for 32 outputs, written or counted; for a box's partial statistics; for a thread's vector of
/// the input.
const STEP: f64 = 25.0;
const TILE: [f64; 3] = [2.0, 2.0, 4.0];
const PRODUCT: [f64; 3] = [1.0, 1.0, 7.5];
const UNIT: f64 = 280.0;
const WRITTEN: f64 = 9.0;
const COUNTED: f64 = 4.0;
const PARTIAL: f64 = 500.0;
/// The part of what is counted, and of the activations before it, that does not hide among lines that are written.
const AMONG: f64 = 0.35;
const VECTOR: f64 = 60.0;
/// What plans take of all that added up, by kind of operand: of 290 plans for 200 random shapes, a little more than the mean.
const TAKEN: [f64; 3] = [1.0, 0.82, 0.8];

/// A plan of this family.
#[derive(Clone, Copy)]
pub(super) struct ImplicitGemm<'a> {
    operand: Operand,
    kernel: &'a Variant,
    box_d: usize,
    row_blocks: usize,
    /// Boxes along each axis.
    boxes: [usize; 3],
    planes: usize,
    lines: usize,
    /// Words of a channel of a box's input, or two.
    words: usize,
    units: usize,
    column_bits: usize,
    shared: usize,
    /// Blocks that the device holds at once.
    resident: usize,
    /// What it does about a normalization.
    pub(super) way: Way,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for ImplicitGemm<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [tiles, rows] = ["MT", "ROWS"].map(|name| size(self.kernel, name));
        write!(f, "implicit_gemm {} {} channels, {rows} lines, ", self.operand.name(), 8 * tiles)?;
        write!(f, "boxes of {}x{}{}", self.box_d, self.row_blocks, self.way)
    }
}

/// Inputs along an axis that outputs take, `count` of them from a multiple of the stride on.
pub(super) fn reached(axis: Axis, count: usize) -> usize {
    let Axis { kernel, stride, padding, dilation, .. } = axis;
    let reach = (kernel - 1) * dilation;
    // Counted from `reach` inputs before the first.
    (count - 1 + padding + stride * reach) / stride - (padding + stride * reach - reach).div_ceil(stride) + 1
}

/// How many inputs the taps of two neighbouring outputs along width are at.
pub(super) fn offsets(axis: Axis) -> usize {
    let mut at: Vec<i64> = (0..axis.kernel)
        .map(|k| {
            (axis.padding as i64 - (k * axis.dilation) as i64).div_euclid(2)
                + (axis.padding + k * axis.dilation) as i64 % 2
        })
        .collect();
    at.sort_unstable();
    at.dedup();
    at.len()
}

/// What activations take of instructions for 32 outputs.
fn bent(code: i32) -> f64 {
    match code {
        0 => 0.0,
        1 | 2 => 1.5,
        6 => 2.5,
        4 | 8 => 30.0,
        _ => 5.0,
    }
}

impl<'a> ImplicitGemm<'a> {
    /// Every plan, where the stride along width is 2, taps reach no further along it than a box's margin, and input and
    /// output are NCDHW; not for float64, not past its 32-bit counts.
    pub(super) fn all(context: Context<'a>) -> Vec<ImplicitGemm<'a>> {
        let request = context.request;
        let geometry = &request.geometry;
        let [depth, height, width] = *geometry.axes();
        let Some(operand) = Operand::of(context) else { return Vec::new() };
        let counted = |sizes: &[usize]| product(sizes).is_some_and(|size| size <= MOST);
        let fits = counted(&geometry.input_shape()[1..])
            && counted(&geometry.output_shape()[1..])
            && counted(&geometry.conv().weight_shape());
        // What inputs of an output are found by: numbers up to a stride times the way from its first tap to its last.
        let found = |axis: &Axis| {
            let reach = product(&[axis.kernel - 1, axis.dilation])?;
            let ahead = product(&[axis.stride, reach])?.checked_add(axis.padding)?;
            let most = ahead.checked_add(axis.input.max(axis.output))?.max(axis.dilation);
            (most <= MOST).then_some(reach)
        };
        let [Some(_), Some(_), Some(reach)] = geometry.axes().map(|axis| found(&axis)) else {
            return Vec::new();
        };
        let near = width.padding <= 2 * MARGIN && reach <= 2 * MARGIN + 1 + width.padding;
        let ncdhw = [request.input_format, request.output_format] == [MemoryFormat::Contiguous; 2];
        let classes = product(&[depth.stride, height.stride]).is_some_and(|classes| classes <= MOST_CLASSES);
        if width.stride != 2 || width.kernel > MOST_WIDTH || !near || !fits || !ncdhw || !classes {
            return Vec::new();
        }
        let types = operand.types(context);
        let is_it = |kernel: &&Variant| kernel.param("KIND") == Some(operand.kind());
        let kernels = context.kernels("implicit_gemm", &types).filter(is_it);
        // Those that count what they write do nothing else.
        let does = |kernel: &Variant, way| kernel.param("COUNTS").is_some() == (way == Way::Counted);
        // Statistics are of activations that a few instructions compute.
        let ways = Way::all(context, |activation| !matches!(activation_code(activation).0, 4 | 8));
        let mut all = Vec::new();
        for kernel in kernels {
            for planes in [1, 2, 4] {
                for row_blocks in [1, 2, 4, 8] {
                    let cut = [planes * depth.stride, row_blocks];
                    let of = |&way| ImplicitGemm::new(context, operand, kernel, cut, way);
                    all.extend(ways.iter().filter(|&&way| does(kernel, way)).filter_map(of));
                }
            }
        }
        all
    }

    fn new(
        context: Context<'a>,
        operand: Operand,
        kernel: &'a Variant,
        [box_d, row_blocks]: [usize; 2],
        way: Way,
    ) -> Option<ImplicitGemm<'a>> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let [depth, height, width] = *geometry.axes();
        let [tiles, rows, ctas] = ["MT", "ROWS", "CTAS"].map(|name| size(kernel, name));
        let (cin, cout) = (conv.in_channels() / conv.groups(), conv.out_channels() / conv.groups());
        let boxes = [
            depth.output.div_ceil(box_d),
            height.output.div_ceil(row_blocks * rows * height.stride),
            width.output.div_ceil(2 * LANES),
        ];
        let (planes, lines) = (reached(depth, box_d), reached(height, row_blocks * rows * height.stride));
        let half = operand == Operand::Half;
        let chunks = if half { cin.div_ceil(2) } else { cin };
        // Channels in banks of their own.
        let words = product(&[planes, lines, PITCH])?.next_multiple_of(16);
        let words = if words.is_multiple_of(32) { words + 16 } else { words };
        let of_pair = product(&[offsets(width), chunks])?;
        let of_residues: Vec<usize> = taps_of_residues(depth)
            .into_iter()
            .flat_map(|d| taps_of_residues(height).into_iter().map(move |h| d * h))
            .map(|pairs| (pairs * of_pair).next_multiple_of(8))
            .collect();
        let units: usize = of_residues.iter().sum();
        let channel_blocks = cout.div_ceil(8);
        let padded = channel_blocks.next_multiple_of(tiles) * 8;
        let blocks_of_warp = channel_blocks.div_ceil(tiles);
        let column_bits = blocks_of_warp.min(WARPS).ilog2() as usize;
        let warp_rows = WARPS >> column_bits;
        let taps = product(&[depth.kernel, height.kernel, width.kernel])?;
        let parts = operand.parts();
        let box_units = box_d * height.stride * row_blocks;
        let shared = 16 * (units + taps + box_units)
            + 4 * product(&[parts, chunks, words])?
            + 64 * parts * (product(&[channel_blocks, units])? + padded - 8 * channel_blocks)
            + 16 * padded
            + 4 * WARPS * 8 * tiles * STAGED;
        let fixed = kernel.shared_bytes as usize;
        if shared > SHARED - RESERVED - fixed {
            return None;
        }
        let ctas = ctas.min(SHARED / (shared + fixed + RESERVED));
        let samples = geometry.batch();
        let of_sample: usize = product(&boxes)?;
        let blocks = product(&[samples, of_sample, conv.groups()])?;
        let partials = product(&[samples, of_sample, warp_rows, conv.out_channels()])?;
        if ctas == 0 || blocks > MOST || partials > MOST {
            return None;
        }

        let bytes = request.dtype.size() as f64;
        let count = |shape: [usize; 5]| shape.iter().map(|&size| size as f64).product::<f64>() * bytes;
        let (x, y) = (count(geometry.input_shape()), count(geometry.output_shape()));
        if way != Way::Plain && 12.0 * partials as f64 > norm::room(y) {
            return None;
        }
        let each = |count: usize| count as f64;
        let kind = match operand {
            Operand::Half => 0,
            Operand::Tf32 => 1,
            Operand::Split | Operand::Parts => 2,
        };
        let steps = each(units) / 8.0 / each(of_residues.len());
        let of_tile = TILE[kind] + PRODUCT[kind] * each(tiles);
        let outputs = each(rows * tiles * 16);
        let of = |activation| outputs * bent(activation_code(activation).0);
        let unit = steps * (each(rows * 4) * of_tile + STEP) + UNIT;
        let units_of_warp = each(box_units.div_ceil(warp_rows) * blocks_of_warp.div_ceil(1 << column_bits));
        let vectors = each(chunks * planes * lines * PITCH / 4);
        let scattered = if width.input.is_multiple_of(4) { 1.0 } else { 3.0 };
        let brought = vectors * VECTOR * scattered / each(32 * WARPS);
        let resident = context.device.multiprocessors * ctas;
        let turns_of_block = blocks.div_ceil(resident);
        let issued = ISSUED[0] + ISSUED[1] * each(ctas * WARPS);
        let turns = (each(turns_of_block) + FIRST) * each(ctas * WARPS) / (4.0 * issued * CLOCK);
        let weights =
            each(units * channel_blocks) / 64.0 / 2.0 * WEIGHTS * each(turns_of_block.min(conv.groups()));
        let pass = |unit: f64, of_box: f64, moved: f64| {
            let (compute, moved) = (turns * (units_of_warp * unit + of_box + brought), moved / MEMORY);
            START + weights + compute.max(moved) + SEEN * compute.min(moved)
        };
        let (written, counted) = (outputs * WRITTEN, outputs * COUNTED);
        let handed_over = PARTIAL * each(blocks_of_warp.div_ceil(1 << column_bits));
        let merged = norm::MERGE + 24.0 * each(partials) / MEMORY;
        let activated = of(epilogue(&request.block)[0]);
        let seconds = match way {
            Way::Plain => pass(unit + activated + written, 0.0, x + y),
            Way::Twice => {
                let normalized = outputs * 2.0 + of(request.block.post_activation());
                let first = pass(unit + activated + counted, handed_over, x);
                first + merged + pass(unit + activated + normalized + written, 0.0, x + y)
            }
            Way::Counted => {
                let behind = of(context.counted.and_then(|block| block.activation()));
                let among = AMONG * (activated + behind + counted);
                let rest = if context.counted.is_some() { 0.0 } else { norm::scaling(context) };
                pass(unit + among + written, handed_over, x + y) + merged + rest
            }
        };
        let seconds = TAKEN[kind] * seconds;
        Some(ImplicitGemm {
            operand,
            kernel,
            box_d,
            row_blocks,
            boxes,
            planes,
            lines,
            words,
            units,
            column_bits,
            shared,
            resident,
            way,
            seconds,
        })
    }

    /// What is launched: the convolution, or with its normalization.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let chunks = self.boxes.iter().product::<usize>() * (WARPS >> self.column_bits);
        let channels = context.request.geometry.conv().out_channels();
        norm::passes(context, self.way, [chunks, channels], workspace, steps, |pass| {
            self.step(context, pass).map(Some)
        })
    }

    /// One launch.
    fn step(&self, context: Context<'_>, pass: Pass) -> Result<Step> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let groups = conv.groups();
        let buffers = [Buffer::Input, Buffer::Weight, Buffer::Bias, Buffer::Output];
        let mut arguments: Vec<Argument> = buffers.map(|buffer| Argument::Pointer(buffer, 0)).into();
        push(&mut arguments, [conv.in_channels() / groups, conv.out_channels() / groups, groups])?;
        for &axis in geometry.axes() {
            let Axis { input, output, kernel, stride, padding, dilation, .. } = axis;
            push(&mut arguments, [input, output, kernel, stride, padding, dilation])?;
        }
        push(&mut arguments, [self.box_d, self.row_blocks])?;
        push(&mut arguments, self.boxes)?;
        push(
            &mut arguments,
            [geometry.batch(), self.planes, self.lines, self.words, self.units, self.column_bits],
        )?;
        let [x_n, ..] = strides(geometry.input_shape(), request.input_format);
        let [y_n, ..] = strides(geometry.output_shape(), request.output_format);
        arguments.extend([x_n, y_n].map(|stride| Argument::I64(stride as i64)));
        let (code, slope) = activation_code(epilogue(&request.block)[0]);
        arguments.extend([i32::from(conv.has_bias()), code].map(Argument::from));
        arguments.push(Argument::F64(slope));
        arguments.push(pass.mode().into());
        pass.push(context, &mut arguments)?;
        let work = geometry.batch() * groups * self.boxes.iter().product::<usize>();
        let grid = grid(work.min(self.resident))?;
        let (variant, shared) = (*self.kernel, self.shared as u32);
        Ok(Step::Launch { variant, grid, shared, arguments, overlap: false })
    }
}

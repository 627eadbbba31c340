//! Planning `implicit_gemm`: few channels, and exactly the products that an output has. The kernel's file says what the numbers mean.

use super::norm::{self, Pass, Way};
use super::pack::Operand;
use super::phases::taps_of_residues;
use super::{
    Argument, Buffer, Context, RESERVED, SHARED, Step, Workspace, activation_code, bias_and_activation,
    epilogue, gcd, grid, product, push, size, strides,
};
use crate::Variant;
use std::fmt;
use volup::{Axis, MemoryFormat, Result};

/// As the kernel has them: positions of a segment, words around a line's; the most pairs of residues, taps along width and
/// stages; threads that bring boxes.
const LANES: usize = 32;
const MARGIN: usize = 4;
const MOST_CLASSES: usize = 64;
const MOST_WIDTH: usize = 9;
const STAGES: [usize; 3] = [4, 3, 2];
const PRODUCERS: usize = 128;
/// Bytes that the copy engine stores at least.
const SECTOR: usize = 32;
/// Bytes that are left free behind four voxels that a warp collects.
const VOXEL_PAD: usize = 32;
/// Units of work of a plane of a box that are tried, and row blocks of one.
const UNITS: [usize; 5] = [1, 2, 3, 4, 8];
const BLOCKS: [usize; 6] = [1, 2, 3, 4, 8, 16];
/// Sizes of a sample are counted in 32 bits, with room for a box past the end.
const MOST: usize = i32::MAX as usize - (1 << 24);

/// Instructions a second of a multiprocessor's warps: of 8, 12 and 16 that multiply.
const ISSUED: [f64; 3] = [4.0 * 1.7e9 * 0.459, 4.0 * 1.7e9 * 0.54, 4.0 * 1.7e9 * 0.585];
/// Bytes a second of the memory, and how many more could be moved in the time that a box's run of a channel takes beside its own, and
/// one of a line that is stored by itself. By kind of operand, and of NDHWC, the shares of time that it takes longer: where warps store further from
/// one another than runs that follow each other, where blocks do, boxes being as high as y, and where 16 warps store instead of 12. The share
/// that blocks which have a box less than others wait for these.
const MEMORY: f64 = 4.94e12;
const RUN: [f64; 2] = [140.0, 204.0];
const APART: [f64; 4] = [0.29, 0.27, 0.12, 0.08];
const FAR: [f64; 4] = [0.0, 0.25, 0.1, 0.15];
const CROWD: [f64; 4] = [0.35, 0.05, 0.0, 0.0];
const UNEVEN: f64 = 2.8;
/// Of what takes less, the part that does not hide behind the other.
const SEEN: f64 = 0.174;
// What stands twice is of `ieee` in NCDHW the second time: of two fp16, whose boxes are gone through twice before they are there.

/// The share of these instructions that there are a second.
const SHARE: [f64; 2] = [1.0, 0.81];
/// The parts of a box's way to shared memory, at the start, and of a unit of work, at the end, that hide behind nothing.
const ENDS: [[f64; 2]; 2] = [[0.86, 0.31], [1.9, 0.0]];
/// How much longer it takes with two stages, and with three: what brings a box waits for what uses one.
const WAITS: [[f64; 2]; 2] = [[1.05, 1.02], [1.07, 1.07]];
/// Seconds until a block's tables are there; until a thread has brought two vectors of weights, or one of a channel of the input;
/// and a box beside its vectors.
const START: f64 = 5e-6;
const WEIGHTS: f64 = 1e-6;
const VECTOR: f64 = 0.088e-6;
const BOX: [f64; 2] = [1.45e-6, 2.36e-6];
/// How much longer vectors take whose elements are asked for one by one; of NDHWC by kind of operand.
const SCATTERED: f64 = 3.0;
const SCATTERED_LAST: [f64; 3] = [3.0, 3.0, 8.0];
/// Instructions of a warp: for a step beside its products, for a tile of a step by kind of operand; for a unit of work, a row block and a
/// residue of it, and a run, beside its steps and outputs; for 32 outputs, written, counted or normalized, or counted as 16 bits hold
/// them.
const STEP: f64 = 11.0;
const TILE: [f64; 3] = [5.6, 5.5, 8.0];
const UNIT: [f64; 2] = [336.0, 80.0];
const BLOCK: f64 = 56.0;
const RESIDUE: f64 = 32.0;
const STORED: f64 = 22.6;
const WRITTEN: f64 = 3.2;
/// The same of NDHWC, where outputs pass through shared memory one by one, of 32 bits and of 16.
const WRITTEN_LAST: [f64; 2] = [2.2, 2.0];
/// How much longer the memory takes to write a voxel of NDHWC whose groups different blocks write.
const PARTED: f64 = 2.1;
const COUNTED: f64 = 3.3;
const NORMALIZED: f64 = 1.44;
const ROUNDED: f64 = 2.5;

/// A plan of this family.
#[derive(Clone, Copy)]
pub(super) struct ImplicitGemm<'a> {
    operand: Operand,
    cut: Cut<'a>,
    /// Of a product that is computed twice, how it is for its statistics.
    counting: Cut<'a>,
    /// What it does about a normalization.
    pub(super) way: Way,
}

/// How a launch cuts its work.
#[derive(Clone, Copy)]
struct Cut<'a> {
    kernel: &'a Variant,
    box_d: usize,
    /// Units of work of a plane, and row blocks of one.
    units_h: usize,
    blocks_h: usize,
    /// Boxes along each axis.
    boxes: [usize; 3],
    planes: usize,
    lines: usize,
    /// From a channel of a box's input, or two, to the next.
    words: usize,
    entries: usize,
    stages: usize,
    joined: bool,
    linked: bool,
    run_pitch: usize,
    shared: usize,
    blocks_of_group: usize,
    /// The time that it is expected to take, with what merges its statistics.
    seconds: f64,
}

impl fmt::Display for ImplicitGemm<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "implicit_gemm {} {}{}", self.operand.name(), self.cut, self.way)?;
        if self.way == Way::Twice {
            write!(f, ", counted by {}", self.counting)?;
        }
        match self.cut.kernel.param("VOXEL") {
            Some(0) => f.write_str(", channels last to first"),
            Some(bytes) => write!(f, ", {bytes} bytes of a voxel"),
            None => f.write_str(if self.cut.joined { ", joined" } else { "" }),
        }
    }
}

impl fmt::Display for Cut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [segments, lines] = ["SEGMENTS", "LINES"].map(|name| size(self.kernel, name));
        let Self { box_d, units_h, blocks_h, stages, .. } = self;
        write!(
            f,
            "{lines} lines of {segments} segments, boxes of {box_d}x{units_h}x{blocks_h}, {stages} stages"
        )
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

/// The `KIND` of numbers: two parts are two fp16 here, scaled box by box.
fn kind(operand: Operand) -> usize {
    match operand {
        Operand::Half => 0,
        Operand::Tf32 | Operand::Scaled => 1,
        Operand::Split | Operand::Parts => 2,
    }
}

/// What activations take of instructions for 32 outputs.
fn bent(code: i32) -> f64 {
    match code {
        0 => 0.0,
        1 | 2 => 1.5,
        6 => 0.76,
        4 | 8 => 30.0,
        _ => 3.5,
    }
}

impl<'a> ImplicitGemm<'a> {
    /// Every plan, where the stride along width is 2, taps reach no further along it than a box's margin, and input and
    /// output are alike, of NDHWC with whole pieces of a voxel in each group, or the output alone is NCDHW; not for float64, not past
    /// its 32-bit counts.
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
        let [of_last, last] = [request.input_format, request.output_format]
            .map(|format| format == MemoryFormat::ChannelsLast3d);
        let classes = product(&[depth.stride, height.stride]).is_some_and(|classes| classes <= MOST_CLASSES);
        if width.stride != 2 || width.kernel > MOST_WIDTH || !near || !fits || !of_last && last || !classes {
            return Vec::new();
        }
        let types = operand.types(context);
        let bytes = geometry.conv().out_channels() / geometry.conv().groups() * request.dtype.size();
        let formats = |voxel: Option<i64>| match voxel {
            None => !of_last,
            Some(0) => of_last && !last,
            Some(voxel) => last && bytes.is_multiple_of(voxel as usize),
        };
        let is_it = |kernel: &&Variant| {
            kernel.param("KIND") == Some(kind(operand) as i64) && formats(kernel.param("VOXEL"))
        };
        let kernels = context.kernels("implicit_gemm", &types).filter(is_it);
        // Those that count what they write do nothing else.
        let does = |kernel: &Variant, way| kernel.param("COUNTS").is_some() == (way == Way::Counted);
        // Activations are those that a few instructions compute.
        let plain = |activation| !matches!(activation_code(activation).0, 4 | 8);
        let counted = context.counted.and_then(|block| block.activation());
        if ![epilogue(&request.block)[0], request.block.post_activation(), counted].into_iter().all(plain) {
            return Vec::new();
        }
        let ways = Way::all(context, plain);
        let mut all = Vec::new();
        for kernel in kernels {
            for &way in ways.iter().filter(|&&way| does(kernel, way)) {
                let cuts = UNITS.into_iter().flat_map(|units| BLOCKS.map(|blocks| [units, blocks]));
                for (planes, [units_h, blocks_h]) in cuts.flat_map(|cut| [(1, cut), (2, cut)]) {
                    // Runs as long and stages as many as shared memory holds.
                    let mut rooms =
                        [true, false].into_iter().flat_map(|joined| STAGES.map(|stages| (joined, stages)));
                    all.extend(rooms.find_map(|(joined, stages)| {
                        let cut = [planes * depth.stride, units_h, blocks_h, stages];
                        ImplicitGemm::new(context, operand, kernel, cut, joined, way)
                    }));
                }
            }
        }
        // What is computed twice is counted as is expected to be the fastest.
        let twice = all.iter().filter(|plan| plan.way == Way::Twice).map(|plan| plan.counting);
        let Some(counting) = twice.min_by(|one, other| one.seconds.total_cmp(&other.seconds)) else {
            return all;
        };
        for plan in all.iter_mut().filter(|plan| plan.way == Way::Twice) {
            plan.counting = counting;
        }
        all
    }

    fn new(
        context: Context<'a>,
        operand: Operand,
        kernel: &'a Variant,
        [box_d, units_h, blocks_h, stages]: [usize; 4],
        joined: bool,
        way: Way,
    ) -> Option<ImplicitGemm<'a>> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let [depth, height, width] = *geometry.axes();
        let [segments, lines_of_block, warpgroups] =
            ["SEGMENTS", "LINES", "WARPGROUPS"].map(|name| size(kernel, name));
        let (cin, cout) = (conv.in_channels() / conv.groups(), conv.out_channels() / conv.groups());
        let span = LANES * segments;
        let block_h = product(&[lines_of_block, height.stride])?;
        let box_h = product(&[units_h, blocks_h, block_h])?;
        let boxes =
            [depth.output.div_ceil(box_d), height.output.div_ceil(box_h), width.output.div_ceil(2 * span)];
        // Bytes of a voxel that are written at once, of NDHWC, where lines are stored one by one.
        let of_last = kernel.param("VOXEL").is_some();
        let voxel = kernel.param("VOXEL").map(|bytes| bytes as usize).filter(|&bytes| bytes > 0);
        if joined && (boxes[2] > 1 || voxel.is_some()) || !joined && lines_of_block > 1 && voxel.is_none() {
            return None;
        }
        // Row blocks that no unit has.
        if (blocks_h - 1) * block_h >= height.output {
            return None;
        }
        let (planes, lines) = (reached(depth, box_d), reached(height, box_h));
        let half = operand == Operand::Half;
        let chunks = if half { cin.div_ceil(2) } else { cin };
        // Channels in banks of their own.
        let words = product(&[planes, lines, span + 2 * MARGIN])?.next_multiple_of(16);
        let words = if words.is_multiple_of(32) { words + 16 } else { words };
        let of_pair = product(&[offsets(width), chunks])?;
        let of_residues: Vec<usize> = taps_of_residues(depth)
            .into_iter()
            .flat_map(|d| taps_of_residues(height).into_iter().map(move |h| d * h))
            .map(|pairs| (pairs * of_pair).next_multiple_of(8))
            .collect();
        let entries: usize = of_residues.iter().sum();
        let tiles = cout.div_ceil(8);
        let parts = operand.parts();
        let element = request.dtype.size();
        // Neighbouring channels' runs in banks of their own.
        let run = product(&[block_h, width.output])?;
        let run = if joined { run } else { width.output.min(2 * span) };
        let sector = SECTOR / element;
        let runs = if joined { blocks_h } else { blocks_h * height.stride };
        let linked = boxes[2] == 1 && run >= sector && voxel.is_none();
        let run_words = product(&[run + sector - 1, element])?.div_ceil(4);
        // Where all lines start at whole vectors, four sums of a lane are collected at once.
        let plane = product(&[depth.output, height.output, width.output])?;
        let at_once = element == 4 && plane.is_multiple_of(4) && width.output.is_multiple_of(4);
        let apart = if at_once { 16 } else { 8 };
        let run_pitch = match voxel {
            // A warp has its lines whole, with room behind every four voxels.
            Some(bytes) => lines_of_block * span * (2 * bytes + VOXEL_PAD / 2) / 8 / element,
            None => (run_words.saturating_sub(apart).next_multiple_of(32) + apart) * 4 / element,
        };
        let warps = 4 * warpgroups;
        let shared = 16 * entries
            + 4 * product(&[stages, chunks, words])?
            + 64 * product(&[parts, tiles, entries])?
            + 96 * tiles
            + if parts == 2 { 64 * product(&[tiles, depth.stride, height.stride])? } else { 0 }
            + product(&[warps, 8, run_pitch, element])?;
        if shared > SHARED - RESERVED - (kernel.shared_bytes as usize).next_multiple_of(SECTOR) {
            return None;
        }
        let (samples, groups) = (geometry.batch(), conv.groups());
        let of_sample: usize = product(&boxes)?;
        let blocks_of_group = (context.device.multiprocessors / groups).clamp(1, samples * of_sample);
        let items = product(&[samples, of_sample])?;
        let of_unit = voxel.map_or(1, |bytes| bytes / (8 * element));
        let units = box_d * units_h * tiles / of_unit;
        if (stages - 1) * units < warps - 1 {
            return None;
        }
        let partials = product(&[items, box_d, units_h, conv.out_channels()])?;
        if [product(&[items, units])?, partials].into_iter().any(|count| count > MOST) {
            return None;
        }

        let bytes = element as f64;
        let count = |shape: [usize; 5]| shape.iter().map(|&size| size as f64).product::<f64>() * bytes;
        let (x, y) = (count(geometry.input_shape()), count(geometry.output_shape()));
        if way != Way::Plain && 12.0 * partials as f64 > norm::room(y) {
            return None;
        }
        let each = |count: usize| count as f64;
        let twice = usize::from(parts == 2 && !of_last);
        let steps = each(entries) / 8.0 / each(depth.stride);
        let outputs = each(blocks_h * lines_of_block * segments * 16 * height.stride);
        let products = steps * (each(lines_of_block * segments * 4) * TILE[kind(operand)] + STEP);
        let unit =
            (products + BLOCK + RESIDUE * each(height.stride)) * each(blocks_h * of_unit) + UNIT[twice];
        let unit = unit + STORED * each(runs);
        let outputs = outputs * each(of_unit);
        let of = |activation| outputs * bent(activation_code(activation).0);
        let vectors = each(chunks * planes * lines * (span / 4 + 2));
        let scattered = match of_last {
            true => SCATTERED_LAST[kind(operand)],
            false if width.input.is_multiple_of(4) => 1.0,
            false => SCATTERED,
        };
        let rounds = groups.div_ceil(context.device.multiprocessors);
        let turns = each(items.div_ceil(blocks_of_group) * rounds);
        let of_word = if half { 2.0 } else { 1.0 };
        let brought =
            turns * ((vectors / each(PRODUCERS)).ceil() * VECTOR * of_word * scattered + BOX[twice]);
        let stored = if joined { run * runs * units_h } else { run * voxel.map_or(1, |_| 8 * of_unit) };
        let of_kind = voxel.map_or(kind(operand), |_| 3);
        let apart = APART[of_kind] * (1.0 - 1.0 / each(blocks_h))
            + FAR[of_kind] * (box_h as f64 / height.output as f64).min(1.0)
            + CROWD[of_kind] * each(warpgroups.saturating_sub(3));
        let memory = context.device.memory(MEMORY)
            / (1.0 + RUN[usize::from(!joined)] / (stored * element) as f64 + apart);
        // Blocks that have a box less than others wait for these at the end.
        let uneven = 1.0 + UNEVEN * (turns * each(blocks_of_group) / (each(items) * rounds as f64) - 1.0);
        // The last boxes along height are not whole. Some blocks may meet none of these: their boxes are as far apart as there are blocks.
        let whole = height.output as f64 / (boxes[1] * box_h) as f64;
        let alike = boxes[1] == 1 || gcd(blocks_of_group, boxes[1] * boxes[2]) > boxes[2];
        let (whole, uneven) = if alike { (1.0, uneven / whole) } else { (whole, uneven) };
        let weights =
            each(4 * entries * tiles).div_euclid(each(32 * warps + PRODUCERS)).max(1.0) * WEIGHTS / 2.0;
        // The last units of a block are not as many as its warps.
        let all_units = turns * each(units);
        let all_units = (all_units / each(warps)).ceil() * each(warps);
        let issued = ISSUED[(warpgroups - 2).min(2)] * SHARE[twice];
        let pass = |unit: f64, moved: f64| {
            let parts = [all_units * unit / issued * whole, brought, moved / memory * uneven];
            let ends = ENDS[twice][0] * brought / turns + ENDS[twice][1] * each(warps) * unit / issued;
            let most = parts.into_iter().fold(0.0, f64::max);
            let waits = WAITS[twice].get(stages - 2).copied().unwrap_or(1.0);
            START + weights + ends + (most + SEEN * (parts.iter().sum::<f64>() - most)) * waits
        };
        let written = voxel.map_or(WRITTEN, |_| WRITTEN_LAST[usize::from(half)]);
        let (written, counted) = (outputs * written, outputs * COUNTED);
        let y = if voxel.is_some() && groups > 1 { y * PARTED } else { y };
        let merged = norm::MERGE + 24.0 * each(partials) / context.device.memory(MEMORY);
        let activated = of(epilogue(&request.block)[0]);
        let first = pass(unit + activated + counted, x) + merged;
        let seconds = match way {
            Way::Plain => pass(unit + activated + written, x + y),
            Way::Twice => {
                let normalized = outputs * NORMALIZED + of(request.block.post_activation());
                pass(unit + activated + normalized + written, x + y)
            }
            Way::Counted => {
                let behind = of(context.counted.and_then(|block| block.activation()));
                let rest = if context.counted.is_some() { 0.0 } else { norm::scaling(context) };
                let rounded = if half { outputs * ROUNDED } else { 0.0 };
                pass(unit + activated + behind + counted + rounded + written, x + y) + merged + rest
            }
        };
        let cut = Cut {
            kernel,
            box_d,
            units_h,
            blocks_h,
            boxes,
            planes,
            lines,
            words,
            entries,
            stages,
            joined,
            linked,
            run_pitch,
            shared,
            blocks_of_group,
            seconds,
        };
        Some(ImplicitGemm { operand, cut, counting: Cut { seconds: first, ..cut }, way })
    }

    /// The time that this is expected to take.
    pub(super) fn seconds(&self) -> f64 {
        self.cut.seconds + if self.way == Way::Twice { self.counting.seconds } else { 0.0 }
    }

    /// What is launched: the convolution, or with its normalization.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let Cut { boxes, box_d, units_h, .. } = self.counting;
        let chunks = boxes.iter().product::<usize>() * box_d * units_h;
        let channels = context.request.geometry.conv().out_channels();
        norm::passes(context, self.way, [chunks, channels], workspace, steps, |pass| {
            let cut = if matches!(pass, Pass::Statistics(_)) { &self.counting } else { &self.cut };
            cut.step(context, pass).map(Some)
        })
    }
}

impl Cut<'_> {
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
        push(&mut arguments, [self.box_d, self.units_h, self.blocks_h])?;
        push(&mut arguments, self.boxes)?;
        let ring = [self.words, self.entries, self.stages];
        let how = [self.joined, self.linked].map(usize::from);
        push(&mut arguments, [geometry.batch(), self.planes, self.lines])?;
        push(&mut arguments, ring)?;
        push(&mut arguments, how)?;
        push(&mut arguments, [self.run_pitch, self.blocks_of_group])?;
        let [x_n, ..] = strides(geometry.input_shape(), request.input_format);
        let [y_n, ..] = strides(geometry.output_shape(), request.output_format);
        arguments.extend([x_n, y_n].map(|stride| Argument::I64(stride as i64)));
        arguments.extend(bias_and_activation(request));
        arguments.push(pass.mode().into());
        pass.push(context, &mut arguments)?;
        let grid = grid(groups * self.blocks_of_group)?;
        let (variant, shared) = (*self.kernel, self.shared as u32);
        Ok(Step::Launch { variant, grid, shared, arguments, overlap: false })
    }
}

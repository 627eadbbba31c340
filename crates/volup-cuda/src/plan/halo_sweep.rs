//! Planning `halo_sweep`: pieces of planes, and what of shared memory goes to which operand. The kernel's file says what the numbers mean.

use super::epilogue::NULL;
use super::epilogue_statistics::Rows;
use super::halo_gemm::{fill, has_gaps};
use super::norm::Way;
use super::norm_behind;
use super::pack::{self, Operand};
use super::panels::{
    InputPanels, MOST_STAGES, PACK_ROUNDS, Source, WeightPanels, packer_bytes, packs, table_bytes, tile_rows,
};
use super::phases::{Lattice, PhaseAxis, strides_of_lattices};
use super::{
    Argument, Buffer, Context, RESERVED, SHARED, Step, Workspace, bias_and_activation, direct, int, push,
    size, strides,
};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// What comes before tables of columns in shared memory.
const FIXED: usize = 4096;
/// And after those, where statistics are taken: bytes of each column of a warpgroup, means of two samples for each warp.
const MEANS: usize = 4 * 2 * 4;
/// The packed input takes at most this much of the input's own memory.
const MOST_PACKED: f64 = 2.0;
/// The most chunks that channels are divided into, and stages of the input.
const MOST_CHUNKS: usize = 8;
const MOST_A: usize = 6;
/// And panels and rows of one whose rows come from the input.
const MOST_IN_PLACE: [usize; 2] = [8, 704];
/// Rounds of what packs beside the products, more if there is room for them, and the part of the products that hides what packing so takes.
const ROUNDS: [(usize, f64); 2] = [(3, 0.95), (PACK_ROUNDS, 0.9)];
/// Bytes a second of rows from the input that a block brings, of two, four and eight panels; the share of a plane's products, or of what it
/// takes to bring its rows, that does not hide behind the longer of both; what a chunk takes besides, in seconds.
const BROUGHT: [f64; 3] = [11.5e9, 13.5e9, 16.5e9];
const BESIDE: f64 = 0.1;
const CHUNK: f64 = 2e-7;

/// The most products of a row and a column that the matrix instructions sum up in the split, whose sums go to registers then.
const MOST_PROMOTED: usize = 256;

/// What a launch costs beside its work, in seconds.
const LAUNCH: f64 = 3.6e-6;
/// Clocks a second.
const CLOCK: f64 = 1.8e9;
/// Bytes a second of the memory, and from the second-level cache to shared memory.
const MEMORY: f64 = 3.2e12;
const CACHE: f64 = 4.5e12;
/// Pieces of 16 bytes of the weight that are packed in a second.
const PIECES: f64 = 8e10;
/// Clocks that a warpgroup takes to get hold of a stage of A, and of a unit of B.
const STAGE: f64 = 60.0;
const UNIT: f64 = 120.0;
/// Clocks that sums of the split take to registers. How much longer its products take, which the GPU's power limits.
const TO_REGISTERS: f64 = 400.0;
const POWER: f64 = 1.07;
/// What a stage takes more where no other one is on its way, unless it is a whole plane.
const SHALLOW: f64 = 900.0;
/// How much longer blocks are busy for each column block more: they read the same.
const COLUMNS: f64 = 0.01;
/// What the output of a plane of a piece costs beside its products, and what one of its elements does, in seconds, of which other
/// warpgroups' products hide a part.
const TILE: f64 = 0.2e-6;
const ELEMENT: f64 = 0.02e-9;
/// And what statistics of an element do; what they take besides, where channels do not lie together.
const COUNTED: f64 = 0.035e-9;
const COUNTING: f64 = 8e-6;

/// What of the weight is a unit: a line of taps, all of a kernel's lines, or these of chunks that all stay in shared memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Units {
    Lines,
    Kernels,
    Resident,
}

impl Units {
    const ALL: [Units; 3] = [Units::Lines, Units::Kernels, Units::Resident];
}

/// A plan of this kernel.
#[derive(Clone)]
pub(super) struct Sweep<'a> {
    operand: Operand,
    kernel: &'a Variant,
    /// The outputs that are computed, all others being filled, and how they see the axes.
    lattices: [Lattice; 3],
    axes: [PhaseAxis; 3],
    /// Rows of a plane of all samples, and before the first position's.
    rows: usize,
    lead: usize,
    tail: usize,
    chunk_panels: usize,
    chunks: usize,
    /// Column blocks, and the blocks of the grid that share each.
    blocks: usize,
    workers: usize,
    resident: bool,
    /// Lines of taps along height that are a unit of the weight; whether sums of two units go to registers together.
    unit_lines: usize,
    alternates: bool,
    stage_rows: usize,
    a_stages: usize,
    b_stages: usize,
    shared: usize,
    /// Where rows come from, and in how many rounds they are packed beside the products.
    source: Source,
    rounds: usize,
    /// What it does about a normalization, and how its rows are dealt out.
    pub(super) way: Way,
    of_samples: Rows,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for Sweep<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (operand, rows) = (self.operand.name(), tile_rows(self.kernel));
        let [columns, planes] = ["BN", "PLANES"].map(|param| size(self.kernel, param));
        write!(
            f,
            "halo_gemm sweep {operand} {rows}x{planes}x{columns}, {}x{} panels, ",
            self.chunks, self.chunk_panels
        )?;
        let units = if self.resident { "resident" } else { "passing" };
        write!(f, "{} stages, {} {units} units of {}, ", self.a_stages, self.b_stages, self.unit_lines)?;
        write!(f, "{} blocks", self.workers * self.blocks)?;
        write!(f, "{}{}", self.source, self.way)
    }
}

impl<'a> Sweep<'a> {
    /// All plans that differ: not of groups, where the outputs that taps reach lie as if the stride were 1, and the dilation along
    /// depth, too.
    pub(super) fn all(context: Context<'a>) -> Vec<Sweep<'a>> {
        let conv = context.request.geometry.conv();
        let Some(lattices) = lattices(context) else { return Vec::new() };
        if conv.groups() > 1 || context.packed {
            return Vec::new();
        }
        let mut all = Vec::new();
        for operand in Operand::of_panels(context) {
            let params = [("KIND", operand.panel_kind())];
            let types = operand.types(context);
            let kernels = context.kernels("halo_sweep", &types);
            let fits = |kernel: &&Variant| {
                kernel.param("KIND") == Some(operand.panel_kind())
                    && size(kernel, "PLANES") == conv.kernel_size()[0]
            };
            let packs = ["halo_pack_input", "halo_pack_weight"];
            if packs.iter().any(|pack| context.kernel(pack, &types, &params).is_err()) {
                continue;
            }
            for kernel in kernels.filter(fits) {
                for source in [Source::Packed, Source::Along, Source::InPlace] {
                    for (units, chunks) in Units::ALL
                        .into_iter()
                        .flat_map(|units| (1..=MOST_CHUNKS).map(move |chunks| (units, chunks)))
                    {
                        all.extend(Sweep::with(context, operand, kernel, lattices, chunks, units, source));
                    }
                }
            }
        }
        all
    }

    fn with(
        context: Context<'a>,
        operand: Operand,
        kernel: &'a Variant,
        lattices: [Lattice; 3],
        chunks: usize,
        units: Units,
        source: Source,
    ) -> Option<Sweep<'a>> {
        let parts = operand.parts();
        if !source.is_possible(context, kernel, operand) || parts == 1 && units == Units::Kernels {
            return None;
        }
        let (along, packs_input) = (source == Source::Along, source != Source::InPlace);
        let way = if kernel.param("COUNTS").is_some() { Way::Counted } else { Way::Plain };
        let geometry = &context.request.geometry;
        let conv = geometry.conv();
        let (bm, n, taps) = (tile_rows(kernel), size(kernel, "BN"), size(kernel, "PLANES"));
        let axes = lattices.map(|lattice| PhaseAxis::new(lattice.axis));
        let [depth, height, width] = &axes;
        let (pw, planes) = (width.pitch, depth.axis.input);
        let [_, h_kernel, w_kernel] = conv.kernel_size();
        let counts = way == Way::Counted;
        let warpgroups = size(kernel, "WGS");
        let means = if counts { MEANS * warpgroups * n } else { 0 };
        let halo = (h_kernel - 1) * height.back().checked_mul(pw)? + (w_kernel - 1) * width.back();
        let stage_rows = (bm + halo).next_multiple_of(8);

        // Shared memory: the units of the weight, and as many stages as there is room for.
        let limit = SHARED - RESERVED;
        let panels = conv.in_channels().div_ceil(16 / operand.bytes()).next_multiple_of(2);
        let chunk_panels = panels / chunks;
        if chunk_panels * chunks != panels || !chunk_panels.is_multiple_of(2) {
            return None;
        }
        let is_row = chunk_panels.is_power_of_two() && chunk_panels <= MOST_IN_PLACE[0];
        if !(packs_input || is_row && stage_rows <= MOST_IN_PLACE[1]) {
            return None;
        }
        let resident = units == Units::Resident;
        let unit_lines = if units == Units::Lines { 1 } else { h_kernel };
        let stage = parts * chunk_panels * stage_rows * 16;
        let unit = parts * unit_lines * w_kernel * chunk_panels * taps * n * 16;
        // Products of a row and a column that a unit has.
        let in_unit = unit_lines * w_kernel * chunk_panels * 16 / operand.bytes();
        if parts > 1 && in_unit > MOST_PROMOTED {
            return None;
        }
        let b_least = match units {
            Units::Lines => 3,
            Units::Kernels => 2,
            Units::Resident => chunks,
        };
        let fitting = |(rounds, hides): (usize, f64)| {
            let packers = if along { packer_bytes(context, together(context), rounds) } else { 0 };
            let room = limit.checked_sub(FIXED + table_bytes(kernel) + means + packers)?;
            let left = room.checked_sub(b_least * unit)?;
            let more = if resident { 0 } else { (left.saturating_sub(3 * stage) / unit).min(3) };
            let (b_stages, left) = (b_least + more, left - more * unit);
            let a_stages = (left / stage).min(MOST_A).min(MOST_STAGES.checked_sub(b_stages)?);
            (a_stages >= 2).then_some((rounds, hides, room, a_stages, b_stages))
        };
        let (rounds, hides, room, a_stages, b_stages) = ROUNDS.into_iter().find_map(fitting)?;
        let shared = limit - room + a_stages * stage + b_stages * unit;

        // Rows that taps reach before the first position, and after the last piece.
        let offset = height.first as i64 * pw as i64 + width.first as i64;
        let lead = usize::try_from((halo as i64 - offset).max(0)).ok()?;
        let tail = usize::try_from(offset.max(0)).ok()? + 8;
        let rows = geometry.batch().checked_mul(height.pitch)?.checked_mul(pw)?;
        let pieces = rows.div_ceil(bm);
        let blocks = conv.out_channels().div_ceil(n);
        let workers = (context.device.multiprocessors / blocks).clamp(1, pieces.checked_mul(planes)?);
        let a_rows = lead.checked_add(rows.checked_mul(planes - 1)?)?.checked_add(pieces * bm + tail)?;
        let [output, input] =
            [geometry.output_shape(), geometry.input_shape()].map(|shape| shape.iter().product::<usize>());
        let largest = i32::MAX as usize;
        let row_bytes = parts * chunks * chunk_panels * 16;
        let input_bytes = input * context.request.dtype.size();
        let items = blocks.checked_mul(h_kernel * w_kernel * chunks * chunk_panels * taps * n)?;
        if !packs(context, operand, 1, chunks * chunk_panels)
            || a_rows.checked_mul(row_bytes / 16)? > largest
            || output.max(input) > largest
            || items > largest
            || workers * planes.checked_mul(pieces)? > largest
            || packs_input
                && (a_rows * row_bytes) as f64
                    > MOST_PACKED * input_bytes.max(context.device.l2_bytes / 8) as f64
        {
            return None;
        }

        // Of what is filled there are no statistics; a piece may have rows of two samples. Shares of a piece's planes are phases.
        let of_sample = height.pitch.checked_mul(pw)?;
        let left = pieces % workers;
        let phases = most_shares(left, planes, workers);
        let of_samples = Rows { of_sample, of_tile: bm, warpgroups, phases, of_channel: 1 };
        if counts && (has_gaps(&lattices) || of_sample < bm || !of_samples.count_for(context)) {
            return None;
        }

        // Cost: planes that the busiest block multiplies.
        let most = pieces / workers * planes
            + if left > 0 { (left * planes).div_ceil(workers) + taps - 1 } else { 0 };
        let columns = (taps * n) as f64;
        let alternates = parts > 1 && 2 * in_unit <= MOST_PROMOTED;
        let promotions = match (parts, alternates) {
            (1, _) => 0.0,
            (_, true) => 1.0,
            (_, false) => 1.5,
        };
        let power = if parts > 1 { POWER } else { 1.0 };
        let of_unit = if resident { 0.0 } else { UNIT } + promotions * TO_REGISTERS;
        let shallow = if a_stages == 2 && chunks > 1 && parts == 1 { SHALLOW } else { 0.0 };
        let products = if parts > 1 { 3 } else { 1 };
        let instructions = (products * bm / 64 * h_kernel * w_kernel * chunks * chunk_panels / 2) as f64;
        let clocks = instructions * (0.5 * columns * power).max(18.0 + columns / 4.0)
            + chunks as f64 * (STAGE + (h_kernel / unit_lines) as f64 * of_unit + shallow);
        let copied = (chunks * (stage + if resident { 0 } else { h_kernel / unit_lines * unit })) as f64;
        let plane = (clocks / CLOCK).max(copied * context.device.multiprocessors as f64 / CACHE);
        let plane = if packs_input {
            plane
        } else {
            let rate = BROUGHT[(chunk_panels.ilog2() as usize - 1).min(2)];
            let brought = (chunks * chunk_panels * 16 * (bm + halo)) as f64 / rate;
            plane.max(brought) + BESIDE * plane.min(brought) + chunks as f64 * CHUNK
        };
        let again = 1.0 + COLUMNS * (blocks - 1) as f64;
        let element = ELEMENT + if counts { COUNTED } else { 0.0 };
        let busy = most as f64 * again * (plane + TILE + element * (bm * n) as f64);
        let output = (output * context.request.dtype.size()) as f64 / context.device.memory(MEMORY);
        // What a pack that is done before has written is read beside the products.
        let passes = if parts > 1 { 1 } else { 2 };
        let moved = if packs_input { input_bytes + passes * a_rows * row_bytes } else { 0 };
        let passed = (moved as f64 / context.device.memory(MEMORY)).max(items as f64 / PIECES);
        // Without a pack of the input another one hides behind the product's start.
        let launches = if packs_input { 3 } else { 1 } + usize::from(operand.has_scale());
        let launches = launches as f64 * LAUNCH;
        let fill = if has_gaps(&lattices) { output + LAUNCH } else { 0.0 };
        let output = output / (lattices[0].step * lattices[1].step) as f64;
        let product = busy.max(output) + 0.2 * busy.min(output);
        let counting = counts && context.request.output_format == MemoryFormat::Contiguous;
        let rest = norm_behind::rest(context, way, product, 0, None) + if counting { COUNTING } else { 0.0 };
        let seconds = product + passed + launches + fill + rest;
        let plan = Sweep {
            operand,
            kernel,
            lattices,
            axes,
            rows,
            lead,
            tail,
            chunk_panels,
            chunks,
            blocks,
            workers,
            resident,
            unit_lines,
            alternates,
            stage_rows,
            a_stages,
            b_stages,
            shared,
            source,
            rounds,
            way,
            of_samples,
            seconds,
        };
        if !along {
            return Some(plan);
        }
        let input = plan.input(context);
        // What takes the longer is not all of it.
        let seconds = seconds + input.beside(context, hides * product, passed) - passed;
        // Blocks go through the planes together, and packs before them, unless each has a part of a piece.
        let in_step = pieces >= workers;
        (in_step && input.may_go_along()).then_some(Sweep { seconds, ..plan })
    }

    /// Rows of a panel.
    fn packed_rows(&self) -> usize {
        let pieces = self.rows.div_ceil(tile_rows(self.kernel));
        self.lead + self.rows * (self.axes[0].axis.input - 1) + pieces * tile_rows(self.kernel) + self.tail
    }

    /// How the input is packed: a plane of all samples after the other, so that depth is what samples are elsewhere.
    fn input(&self, context: Context<'_>) -> InputPanels {
        let shape @ [samples, _, depth, height, width] = context.request.geometry.input_shape();
        let [x_n, x_c, x_d, x_h, x_w] = strides(shape, context.request.input_format);
        let panels = self.chunks * self.chunk_panels;
        InputPanels {
            operand: self.operand,
            rows: self.packed_rows(),
            lead: self.lead,
            pitches: [samples, self.axes[1].pitch, self.axes[2].pitch],
            voxels: [samples, height, width],
            strides: [x_d, x_c, x_n, x_h, x_w],
            block: 1,
            count: depth,
            slices: 1,
            panels,
            channel_panels: shape[1].div_ceil(16 / self.operand.bytes()),
            unit: together(context),
        }
    }

    /// What is launched.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let conv = request.geometry.conv();
        let input = self.input(context);
        let more = if self.source == Source::Along { input.words() } else { 0 };
        let control = pack::control(workspace, more, steps);
        let [depth, height, width] = &self.axes;
        let n = size(self.kernel, "BN");
        let weight = WeightPanels {
            operand: self.operand,
            slices: 1,
            blocks: self.blocks,
            columns: n,
            chunks: self.chunks,
            chunk_panels: self.chunk_panels,
            channel_panels: input.channel_panels,
            block: 1,
            outputs: 1,
            width: [width.first, 1, width.axis.dilation],
            low: width.first as i64 - width.reach as i64,
            steps: width.axis.kernel,
            step: width.back() as i64,
            taps: 1,
            sweeps: true,
        };
        let has_scale = self.operand.has_scale();
        let first = request.output_format == MemoryFormat::Contiguous;
        let inner = if first { 1 } else { conv.out_channels() };
        let [weight_at, scale] =
            weight.steps(context, [self.blocks * n, inner], control, workspace, steps)?;
        let in_place = self.source == Source::InPlace;
        let row_bytes = self.operand.parts() * input.panels * 16;
        let input_at = workspace.take(if in_place { 0 } else { self.packed_rows() * row_bytes });
        if self.source == Source::Packed {
            input.pack(context, 0, input_at, Some(control), true, steps)?;
        }
        // An input's numbers that are none come where they should: what has no taps there is not written.
        if let Some(places) = &mut workspace.weight {
            places.alone = in_place;
        }
        if has_gaps(&self.lattices) {
            fill(context, self.operand, &self.lattices, steps)?;
        }

        let at = |at| Argument::Pointer(Buffer::Workspace, at);
        let mut arguments = vec![if in_place { NULL } else { at(input_at) }, at(weight_at), at(control)];
        if has_scale {
            arguments.push(at(scale));
        }
        let [y_n, y_c, y @ ..] = strides(request.geometry.output_shape(), request.output_format);
        let (y_first, [y_d, y_h, y_w]) = strides_of_lattices(&self.lattices, y);
        let y_at = (y_first * request.dtype.size()) as u64;
        arguments.extend([Argument::Pointer(Buffer::Bias, 0), Argument::Pointer(Buffer::Output, y_at)]);
        push(&mut arguments, [self.rows, self.packed_rows(), self.lead, request.geometry.batch()])?;
        push(&mut arguments, [height.pitch, width.pitch, depth.axis.input])?;
        arguments.push((-(depth.axis.padding as i32)).into());
        push(&mut arguments, [depth.axis.output, height.axis.kernel, height.back() * width.pitch])?;
        arguments.push((height.shift() as i32).into());
        push(&mut arguments, [height.axis.output, width.axis.kernel, width.back()])?;
        arguments.push((width.shift() as i32).into());
        arguments.push(int(width.axis.output)?.into());
        let offset = (height.first * width.pitch + width.first) as i64 - width.reach as i64;
        arguments.push((offset as i32).into());
        push(&mut arguments, [self.chunk_panels, self.chunks, self.blocks, conv.out_channels()])?;
        push(&mut arguments, [y_n, y_c, y_d, y_h, y_w])?;
        arguments.push(i32::from(first).into());
        arguments.extend(bias_and_activation(request));
        push(&mut arguments, [self.a_stages, self.stage_rows, self.b_stages, self.unit_lines])?;
        push(&mut arguments, [usize::from(self.resident)])?;
        let pieces = self.rows.div_ceil(tile_rows(self.kernel));
        push(&mut arguments, [pieces / self.workers])?;
        arguments.push(Argument::Pointer(Buffer::Input, 0));
        let [_, rows @ ..] = input.voxels;
        push(&mut arguments, rows.into_iter().chain([input.panels]))?;
        // Blocks go through the planes together: what the next ones need is there before they get to them.
        let at_once =
            (self.source == Source::Along).then_some(self.workers * self.blocks * tile_rows(self.kernel));
        input.along(context, at_once, &mut arguments)?;
        push(&mut arguments, [self.rounds, if in_place { conv.in_channels() } else { 0 }])?;
        if self.operand.parts() > 1 {
            push(&mut arguments, [usize::from(self.alternates)])?;
        }
        let (parts, statistics) = self.of_samples.tell(context, self.way, workspace)?;
        arguments.extend(statistics);
        let grid = [(self.workers * self.blocks) as u32, 1, 1];
        let shared = self.shared as u32;
        steps.push(Step::Launch { variant: *self.kernel, grid, shared, arguments, overlap: true });
        // Where the input or the weight holds what the fast path cannot compute with, the definition.
        steps.push(direct::guard(context, self.operand, control)?);
        self.of_samples.finish(context, parts, false, control, workspace, steps)
    }
}

/// The most workers of one of so many pieces, whose planes are divided evenly among all workers.
fn most_shares(pieces: usize, planes: usize, workers: usize) -> usize {
    let all = pieces * planes;
    let worker_of = |plane: usize| ((plane + 1) * workers).div_ceil(all);
    (0..pieces)
        .map(|piece| worker_of((piece + 1) * planes - 1) - worker_of(piece * planes) + 1)
        .max()
        .unwrap_or(1)
}

/// The outputs that taps reach, if they lie as if the stride were 1, and the dilation along depth, too; in NCDHW side by side.
fn lattices(context: Context<'_>) -> Option<[Lattice; 3]> {
    let [Some(d), Some(h), Some(w)] = context.request.geometry.axes().map(Lattice::new) else { return None };
    let all = [d, h, w];
    let apart = context.request.output_format == MemoryFormat::Contiguous && w.step > 1;
    (all.iter().all(|lattice| lattice.axis.stride == 1) && d.axis.dilation == 1 && !apart).then_some(all)
}

/// Positions of a unit of what packs beside the products: 16 bytes.
fn together(context: Context<'_>) -> usize {
    16 / context.request.dtype.size()
}

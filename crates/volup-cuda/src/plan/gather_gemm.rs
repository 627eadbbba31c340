//! Planning `gather_gemm`: positions without gaps, and what of shared memory goes to which operand. The kernels' file
//! says what the numbers mean.

use super::epilogue::NULL;
use super::epilogue_statistics::Rows;
use super::norm::Way;
use super::norm_behind;
use super::pack::Operand;
use super::panels::{
    InputPanels, MOST_STAGES, PACK_ROUNDS, PACKED_TOGETHER, Source, WeightPanels, brought_bytes, most_teams,
    packer_bytes, packs, table_bytes, tile_rows,
};
use super::phases::{Lattice, PhaseAxis, taps_of_residues};
use super::{
    Algorithm, Argument, Buffer, Context, RESERVED, SHARED, Step, Workspace, activation_code,
    bias_and_activation, direct, grid, push, size, strides,
};
use crate::Variant;
use std::fmt;
use volup::{Axis, DType, MemoryFormat, Result};

/// Panels of 16 bytes of a chunk of channels.
const PANELS: usize = 8;
/// Warps of a block that pack, if it packs along.
const PACKERS: usize = 3;
/// What comes before tables of columns in shared memory.
const FIXED: usize = 4608;
/// Phases that there is a table for, and taps of one along an axis.
const MOST_PHASES: usize = 64;
const MOST_TAPS: usize = 10;
/// The packed input takes at most this much of the input's own memory, or this part of the second-level cache.
const MOST_PACKED: usize = 2;
const CACHED: usize = 4;
/// The most tiles of a block for which they are dealt out by their work.
const FEW: usize = 4;
/// What launches cost beside the product's work, and the product's own, in seconds.
const LAUNCHES: f64 = 7e-6;
/// What of that is the input's pack, and waiting for it; what rows from the input itself make of the product.
const PACK: f64 = 4.5e-6;
const IN_PLACE: f64 = 1.04;
const START: f64 = 7.2e-6;
/// What it takes to find what operands are scaled by, in seconds.
const SCALE: f64 = 4e-6;
/// Clocks a second.
const CLOCK: f64 = 1.815e9;
/// Bytes a second of the memory, and from the second-level cache to shared memory.
const MEMORY: f64 = 3.2e12;
const CACHE: f64 = 6.4e12;
/// Pieces of 16 bytes of the weight that are packed in a second.
const PIECES: f64 = 8e10;
/// Clocks that a block takes to get hold of a stage of A, and of a unit of B by how many residues of an axis, one or two, are
/// columns; where those of two axes are, instructions of few columns wait for what they read as well.
const STAGE: f64 = 695.0;
const UNIT: [f64; 2] = [0.0, 134.0];
const UNIT_OF_FOUR: f64 = 446.0;
/// What a tile costs beside its products, and what one of its elements does, in seconds: of 16 bits, of 32, where lines are
/// written in whole vectors (NCDHW, NDHWC), and where they are not.
const TILE: f64 = 1.2e-6;
const VECTORS: [[f64; 2]; 2] = [[0.02e-9, 0.0115e-9], [0.016e-9, 0.051e-9]];
const ELEMENT: [f64; 2] = [0.16e-9, 0.2e-9];
/// What a tile in parts costs beside, in seconds, and again each time that their number doubles: sums are brought from block to block.
const PARTS: f64 = 1.5e-6;
/// What statistics of one of its elements take, in seconds: of 16 bits, of 32.
const COUNTED: [f64; 2] = [0.04e-9, 0.06e-9];
/// How much longer products of two parts take than three of one at full rate, by how many residues are columns: one, two, four. Sums are added
/// to registers meanwhile, and instructions have fewer columns.
const PARTED: [f64; 3] = [1.235, 1.28, 1.31];
/// The share of a round of tiles that is lost at the end, where there are many.
const LAST_ROUND: f64 = 0.48;

/// A plan of this family.
#[derive(Clone)]
pub(super) struct GatherGemm<'a> {
    operand: Operand,
    kernel: &'a Variant,
    axes: [PhaseAxis; 3],
    /// Positions along each axis.
    positions: [usize; 3],
    /// Chunks of channels, and column blocks, of a group.
    chunks: usize,
    blocks: usize,
    stage_rows: usize,
    a_stages: usize,
    b_stages: usize,
    shared: usize,
    /// Blocks that are launched, and whether tiles of phases with most taps come first.
    launched: usize,
    by_work: bool,
    /// Blocks of a cluster, which do a tile in as many parts.
    parts: usize,
    /// Where rows come from.
    source: Source,
    /// What it does about a normalization, and how its rows are dealt out.
    pub(super) way: Way,
    of_samples: Rows,
    /// Warps of a block that normalize what is written beside what is left of it, instead of packing.
    behind: usize,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

/// A phase: its taps, stages of A, and the clocks that a tile of it takes but for what every tile does.
#[derive(Clone, Copy)]
struct OfPhase {
    taps: usize,
    stages: usize,
    clocks: f64,
}

impl OfPhase {
    /// The clocks of the longest of so many parts.
    fn of_part(&self, parts: usize) -> f64 {
        self.clocks * self.stages.div_ceil(parts) as f64 / self.stages.max(1) as f64
    }
}

impl fmt::Display for GatherGemm<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [columns, lines, outputs] = ["BN", "RH", "RW"].map(|name| size(self.kernel, name));
        let (rows, residues) = (tile_rows(self.kernel), lines * outputs);
        write!(f, "gather_gemm {} {rows}x{}/{residues}, ", self.operand.name(), columns * lines)?;
        write!(f, "{} chunks, {} stages, {} units", self.chunks, self.a_stages, self.b_stages)?;
        f.write_str(if self.by_work { ", by work" } else { "" })?;
        if self.parts > 1 {
            write!(f, ", in {} parts", self.parts)?;
        }
        write!(f, "{}{}", self.source, self.way)?;
        norm_behind::describe(f, self.behind)
    }
}

impl<'a> GatherGemm<'a> {
    /// All plans that differ, where taps reach every output, not past its 32-bit counts: of 16 bits, tf32, and float32 as two fp16.
    pub(super) fn all(context: Context<'a>) -> Vec<GatherGemm<'a>> {
        if context.classes.is_some() || context.packed {
            return Vec::new();
        }
        let operands = Operand::of_panels(context).into_iter().filter(|&operand| operand != Operand::Parts);
        let mut all = Vec::new();
        for operand in operands {
            let is_it = |kernel: &&Variant| kernel.param("KIND") == Some(operand.panel_kind());
            let types = operand.types(context);
            let kernels = context.kernels("gather_gemm", &types).filter(is_it);
            for kernel in kernels {
                // Where rows come from, and warps that normalize what is written: those that do not pack.
                let ways: &[(Source, usize)] = if operand.parts() == 2 {
                    &[(Source::Packed, 0), (Source::Packed, 2), (Source::Packed, 3)]
                } else {
                    &[
                        (Source::Packed, 0),
                        (Source::InPlace, 0),
                        (Source::Along, 0),
                        (Source::Along, 1),
                        (Source::Along, 2),
                    ]
                };
                for &(source, behind) in ways {
                    all.extend(GatherGemm::new(context, operand, kernel, source, behind));
                }
            }
        }
        all
    }

    fn new(
        context: Context<'a>,
        operand: Operand,
        kernel: &'a Variant,
        source: Source,
        behind: usize,
    ) -> Option<GatherGemm<'a>> {
        if !source.is_possible(context, kernel, operand) {
            return None;
        }
        let along = source == Source::Along;
        let parts = size(kernel, "SPLIT");
        if parts > 1 && along {
            return None;
        }
        if behind > 0 && (kernel.param("COUNTS").is_none() || !norm_behind::may(context)) {
            return None;
        }
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let (bm, n) = (tile_rows(kernel), size(kernel, "BN"));
        let dense = |&axis| Lattice::new(axis).is_some_and(|lattice| lattice.step == 1);
        if !geometry.axes().iter().all(dense) {
            return None;
        }
        let axes = geometry.axes().map(PhaseAxis::new);
        // Lines and planes of positions are no shorter than those of voxels: rows pass over no voxel.
        let positions = axes.map(|axis| axis.axis.output.div_ceil(axis.axis.stride).max(axis.axis.input));
        // Residues along width, and height, that are columns: those of a stride of 2 see the same voxels.
        let [lines, outputs] = ["RH", "RW"].map(|name| size(kernel, name));
        let ncdhw = request.output_format == MemoryFormat::Contiguous;
        // In NDHWC where whole vectors of channels are written.
        let vector = 16 / request.dtype.size();
        let cout = conv.out_channels() / conv.groups();
        let straight = activation_code(request.block.activation()).0 <= 2;
        let in_pairs = ncdhw || cout.is_multiple_of(vector) && straight;
        let paired = |axis: Axis| in_pairs && axis.stride == 2 && axis.dilation == 1;
        if outputs == 2 && !paired(axes[2].axis) || lines == 2 && !paired(axes[1].axis) {
            return None;
        }
        let taps = axes.map(|axis| taps_of_residues(axis.axis));
        // Pairs of taps of two residues at the same voxels; the first and the last may be one's alone.
        let pairs = |axis: Axis| (axis.kernel + axis.padding % 2).div_ceil(2);
        let mut most = [0, 1, 2].map(|axis| taps[axis].iter().copied().max().unwrap_or(0));
        for (axis, residues) in [(1, lines), (2, outputs)] {
            if residues == 2 {
                most[axis] = pairs(axes[axis].axis);
            }
        }
        let phases = axes.iter().try_fold(1, |all: usize, axis| all.checked_mul(axis.axis.stride))?
            / (lines * outputs);
        if phases > MOST_PHASES || most.iter().any(|&taps| taps > MOST_TAPS) {
            return None;
        }
        let voxels = axes.map(|axis| axis.axis.input);
        let reach = (most[1] - 1).checked_mul(axes[1].back())?.checked_mul(voxels[2])?;
        let reach = reach.checked_add((most[2] - 1).checked_mul(axes[2].back())?)?;
        let stage_rows = bm.checked_add(reach)?.next_multiple_of(8);
        let groups = conv.groups();
        let cin = conv.in_channels() / groups;
        // Few channels leave most of a chunk empty: what the model says of them was not held against measurements, nor is what it says of
        // groups in two parts.
        let of_chunk = PANELS * 16 / operand.bytes();
        let is_known = 2 * cin >= of_chunk && (operand.parts() == 1 || groups == 1);
        if !is_known && request.algorithm != Some(Algorithm::GatherGemm) {
            return None;
        }
        let chunks = cin.div_ceil(of_chunk);
        let channels = n / outputs;
        let blocks = cout.div_ceil(channels);

        let of_parts = operand.parts();
        let [stage, unit] = [stage_rows, n * lines].map(|rows| of_parts * PANELS * 16 * rows);
        let fixed = FIXED
            + table_bytes(kernel)
            + brought_bytes(kernel)
            + if along {
                packer_bytes(context, PACKED_TOGETHER, PACK_ROUNDS) / PACKERS * (PACKERS - behind)
            } else {
                0
            }
            + if of_parts == 1 { norm_behind::RING * behind } else { 0 };
        let room = (SHARED - RESERVED).checked_sub(fixed)?;
        // Of units of two parts, which are multiplied for three times as long, two will do.
        let least = 4 - of_parts;
        if 2 * stage + least * unit > room {
            return None;
        }
        // Two stages of several units each are enough: what is left lets warpgroups run further ahead of one another.
        let of_stage = most[1] * most[2];
        let a_stages = ((room - least * unit) / stage).min(if of_stage > 1 { 2 } else { 4 });
        let b_stages = ((room - a_stages * stage) / unit).min(8).min(MOST_STAGES - a_stages);

        let batch = geometry.batch();
        let in_rows = voxels.iter().try_fold(batch, |all, &size| all.checked_mul(size))?;
        let rows = positions.iter().try_fold(batch, |all, &size| all.checked_mul(size))?;
        let (row_tiles, all) = (rows.div_ceil(bm), groups * blocks);
        let row_bytes = groups * chunks * PANELS * 16 * of_parts;
        let a_rows = in_rows.checked_add(stage_rows)?;
        let input = conv.in_channels() * in_rows * request.dtype.size();
        let packed = a_rows.checked_mul(row_bytes)?;
        let packs_input = source != Source::InPlace;
        if packs_input && packed > (MOST_PACKED * input).max(context.device.l2_bytes / CACHED) {
            return None;
        }
        let kernel_taps: usize = axes.iter().map(|axis| axis.axis.kernel).product();
        let items = all.checked_mul(kernel_taps * chunks * PANELS * channels)?;
        let tiles = row_tiles.checked_mul(phases)?.checked_mul(all)?;
        let [_, y_channels, ..] = geometry.output_shape();
        let sample = y_channels * geometry.output_voxels();
        let spanned = (bm / positions.iter().product::<usize>() + 2).min(batch);
        let largest = i32::MAX as usize;
        if !packs(context, operand, groups, chunks * PANELS)
            || packs_input && packed / 16 > largest
            || a_rows > largest
            || rows.checked_mul(2)? > largest
            || sample.checked_mul(spanned)? > largest
            || conv.in_channels() * voxels.iter().product::<usize>() > largest
            || 2 * tiles > largest
            || items.checked_mul(of_parts)? > largest
            || conv.weight_shape().iter().product::<usize>() > largest
        {
            return None;
        }

        let way = if kernel.param("COUNTS").is_some() { Way::Counted } else { Way::Plain };
        let of_samples = Rows {
            of_sample: positions.iter().product(),
            of_tile: bm,
            warpgroups: size(kernel, "WGS"),
            phases,
            of_channel: 1,
        };
        if way == Way::Counted && !of_samples.count_for(context) {
            return None;
        }
        // Cost: what each phase's tile takes in clocks, and how blocks share them.
        let products = if of_parts == 2 { 3.0 * PARTED[lines + outputs - 2] } else { 1.0 };
        let clocks = products * (n * lines * (bm / 64) * PANELS / 2) as f64 / 2.0;
        let [.., w_out] = geometry.output_shape();
        let in_vectors = if !ncdhw {
            cout % vector == 0
        } else if axes.iter().all(|axis| axis.axis.stride == 1) {
            geometry.output_voxels() % vector == 0
        } else {
            outputs == 2 && w_out == 2 * positions[2] && w_out % vector == 0
        };
        let of_type = if in_vectors { VECTORS[usize::from(!ncdhw)] } else { ELEMENT };
        let wide = usize::from(request.dtype == DType::F32);
        let element = of_type[wide] + if way == Way::Counted { COUNTED[wide] } else { 0.0 };
        let tile = CLOCK * (TILE + element * (bm * n * lines) as f64);
        let of_unit = if lines == 2 { UNIT_OF_FOUR } else { UNIT[outputs - 1] };
        let mut of_phases = Vec::new();
        let (mut units, mut stages) = (0.0, 0);
        // Of each axis the units of a phase, and how many of them were there if all were whole.
        let of_axis = |axis: usize, residues: usize| -> Vec<(usize, f64)> {
            let turns = |taps: &[usize]| if residues == 2 { pairs(axes[axis].axis) } else { taps[0] };
            let whole = |taps: &[usize]| taps.iter().sum::<usize>() as f64 / residues as f64;
            taps[axis].chunks(residues).map(|taps| (turns(taps), whole(taps))).collect()
        };
        for d in &taps[0] {
            for (h_turns, h_whole) in of_axis(1, lines) {
                for (w_turns, w_whole) in of_axis(2, outputs) {
                    let turns = d * h_turns * w_turns * chunks;
                    let staged = if turns > 0 { d * chunks } else { 0 };
                    let whole = (d * chunks) as f64 * h_whole * w_whole;
                    units += whole;
                    stages += staged;
                    let clocks = whole * clocks + turns as f64 * of_unit + staged as f64 * STAGE;
                    of_phases.push(OfPhase { taps: turns / chunks, stages: staged, clocks });
                }
            }
        }
        of_phases.sort_by_key(|phase| std::cmp::Reverse(phase.taps));
        let device = context.device.multiprocessors;
        let of_phase = row_tiles * all;
        let by_work = parts > 1 || phases > 1 && tiles <= FEW * device;
        let teams = tiles.min(most_teams(context, kernel));
        if parts > 1 && (tiles * parts > FEW * device || teams == 0) {
            return None;
        }
        // Tiles by their work are not in the order of rows.
        if behind > 0 && by_work {
            return None;
        }
        let busy = if by_work {
            let tile = if parts > 1 {
                CLOCK * (TILE + PARTS * f64::from(1 + parts.ilog2())) + (tile - CLOCK * TILE) / parts as f64
            } else {
                tile
            };
            let kinds: Vec<_> =
                of_phases.iter().map(|phase| (phase.of_part(parts) + tile, of_phase)).collect();
            longest(&kinds, teams)
        } else {
            let of_tile = of_phases.iter().map(|phase| phase.clocks + tile).sum::<f64>() / phases as f64;
            of_tile * (tiles as f64 / device as f64 + LAST_ROUND).max(1.0)
        };
        let traffic = (units * unit as f64 + (stages * stage) as f64) * (row_tiles * all) as f64 / CACHE;
        let output = (batch * sample * request.dtype.size()) as f64 / context.device.memory(MEMORY);
        let busy = (busy / CLOCK).max(traffic);
        let pack = if packs_input { (input + packed) as f64 / context.device.memory(MEMORY) } else { 0.0 };
        // Residues along width that are written apart: the cache brings sectors together.
        let apart = ncdhw && axes[2].axis.stride > outputs;
        let (output, seen) = if apart { (2.0 * output, 0.6) } else { (output, 0.2) };
        let product = busy.max(output) + seen * busy.min(output);
        let (launches, product) =
            if packs_input { (LAUNCHES, product) } else { (LAUNCHES - PACK, IN_PLACE * product) };
        let passed = pack.max(items as f64 / PIECES);
        let scale = if operand.has_scale() { SCALE } else { 0.0 };
        let packing = along.then(|| norm_behind::packing(context, PACKERS - behind));
        let rest = norm_behind::rest(context, way, product, behind, packing);
        let plan = GatherGemm {
            operand,
            kernel,
            axes,
            positions,
            chunks,
            blocks,
            stage_rows,
            a_stages,
            b_stages,
            shared: fixed + a_stages * stage + b_stages * unit,
            launched: teams * parts,
            by_work,
            parts,
            source,
            way,
            of_samples,
            behind,
            seconds: product + START + passed + launches + scale + rest,
        };
        if !along {
            return Some(plan);
        }
        let panels = input_panels(context, operand, chunks, a_rows);
        let beside = panels.beside(context, product, pack).max(items as f64 / PIECES);
        let goes = !by_work && panels.may_go_along();
        let seconds = plan.seconds + beside - passed;
        goes.then_some(GatherGemm { seconds, ..plan })
    }

    /// What is launched.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let groups = request.geometry.conv().groups();
        let input = input_panels(context, self.operand, self.chunks, self.a_rows(context));
        let more = if self.source == Source::Along { input.words() } else { 0 };
        let (control, words) = norm_behind::control(context, more, self.behind, workspace, steps);
        // Each tap along width is a step of its own: as if the stride were 1, from the first on.
        let panels = WeightPanels {
            operand: self.operand,
            slices: groups,
            blocks: self.blocks,
            columns: size(self.kernel, "BN") / size(self.kernel, "RW"),
            chunks: self.chunks,
            chunk_panels: PANELS,
            channel_panels: input.channel_panels,
            block: 1,
            outputs: 1,
            width: [0, 1, 1],
            low: 0,
            steps: request.geometry.conv().kernel_size()[2],
            step: -1,
            taps: 1,
            sweeps: false,
        };
        let columns = self.blocks * panels.columns;
        // Of a column in NDHWC, too: one channel after the other.
        let inner = if request.output_format == MemoryFormat::Contiguous { 1 } else { columns };
        let [weight, scale] = panels.steps(context, [columns, inner], control, workspace, steps)?;
        let packed = if self.source == Source::InPlace {
            0
        } else {
            input.rows * groups * input.panels * self.operand.parts() * 16
        };
        let at = workspace.take(packed);
        // Rows have no gaps: numbers of 16 bits that are none come where they should.
        let asks = self.operand != Operand::Half || self.source == Source::Along;
        if let Some(places) = &mut workspace.weight {
            places.alone = !asks;
        }
        if self.source == Source::Packed {
            input.pack(context, 0, at, asks.then_some(control), true, steps)?;
        }
        let (parts, statistics) = self.of_samples.tell_with_norm(context, self.way, words, workspace)?;
        steps.push(self.multiply(context, [at, weight, scale, control], &input, statistics)?);
        // Where the input or the weight holds what the fast path cannot compute with, the definition.
        if !self.knows_early() {
            steps.push(direct::guard(context, self.operand, control)?);
        }
        self.of_samples.finish(context, parts, self.behind > 0, control, workspace, steps)
    }

    fn multiply(
        &self,
        context: Context<'_>,
        [at, weight, scale, control]: [u64; 4],
        input: &InputPanels,
        more: Vec<Argument>,
    ) -> Result<Step> {
        let request = context.request;
        let conv = request.geometry.conv();
        let operands = [at, weight, scale].into_iter().take(if self.operand.has_scale() { 3 } else { 2 });
        let mut arguments: Vec<_> = operands.map(|at| Argument::Pointer(Buffer::Workspace, at)).collect();
        let in_place = self.source == Source::InPlace;
        if in_place {
            arguments[0] = NULL;
        }
        arguments.extend([Buffer::Bias, Buffer::Output].map(|buffer| Argument::Pointer(buffer, 0)));
        let rows = request.geometry.batch() * self.positions.iter().product::<usize>();
        let all = self.a_rows(context);
        push(&mut arguments, [rows, all - self.stage_rows, all])?;
        push(&mut arguments, self.positions)?;
        push(&mut arguments, self.axes.map(|axis| axis.axis.input))?;
        push(&mut arguments, self.axes.map(|axis| axis.back()))?;
        for axis in &self.axes {
            let (step, inverse) = axis.step_and_inverse();
            let Axis { kernel, stride, dilation, padding, output, .. } = axis.axis;
            push(&mut arguments, [kernel, stride, dilation, step, inverse, padding, output])?;
        }
        push(&mut arguments, [self.chunks, conv.groups(), self.blocks, conv.out_channels() / conv.groups()])?;
        push(&mut arguments, strides(request.geometry.output_shape(), request.output_format))?;
        let first = i32::from(request.output_format == MemoryFormat::Contiguous);
        arguments.push(first.into());
        arguments.extend(bias_and_activation(request));
        push(&mut arguments, [self.a_stages, self.stage_rows, self.b_stages, usize::from(self.by_work)])?;
        push(&mut arguments, [if in_place { conv.in_channels() / conv.groups() } else { 0 }])?;
        arguments
            .extend([Argument::Pointer(Buffer::Input, 0), Argument::Pointer(Buffer::Workspace, control)]);
        push(&mut arguments, [input.count])?;
        push(&mut arguments, input.voxels)?;
        push(&mut arguments, [input.panels])?;
        let turn = self.launched * tile_rows(self.kernel);
        input.along(context, (self.source == Source::Along).then_some(turn), &mut arguments)?;
        // Where both operands are packed before, the product sees itself whether it can stand.
        arguments.extend(direct::within(context, self.knows_early().then_some(control))?);
        arguments.extend(more);
        let (variant, shared) = (*self.kernel, self.shared as u32);
        Ok(Step::Launch { variant, grid: grid(self.launched)?, shared, arguments, overlap: true })
    }

    /// Whether both operands are packed when the product starts, which then sees itself whether it can stand.
    fn knows_early(&self) -> bool {
        self.source != Source::Along && self.way != Way::Counted
    }

    /// Rows of a panel of the packed input.
    fn a_rows(&self, context: Context<'_>) -> usize {
        let [batch, _, depth, height, width] = context.request.geometry.input_shape();
        batch * depth * height * width + self.stage_rows
    }
}

/// How the input is packed, with so many rows a panel: what has no gaps as a single line of a sample's voxels.
fn input_panels(context: Context<'_>, operand: Operand, chunks: usize, rows: usize) -> InputPanels {
    let request = context.request;
    let shape @ [count, channels, voxels @ ..] = request.geometry.input_shape();
    let groups = request.geometry.conv().groups();
    let [x_n, x_c, .., x_w] = strides(shape, request.input_format);
    let line = [1, 1, voxels.iter().product()];
    InputPanels {
        operand,
        rows,
        lead: 0,
        pitches: line,
        voxels: line,
        strides: [x_n, x_c, 0, 0, x_w],
        block: 1,
        count,
        slices: groups,
        panels: chunks * PANELS,
        channel_panels: (channels / groups).div_ceil(16 / operand.bytes()),
        unit: PACKED_TOGETHER,
    }
}

/// The longest that any of so many blocks takes for tiles in turn, of each kind so many, as the kernel deals them out.
fn longest(kinds: &[(f64, usize)], blocks: usize) -> f64 {
    let mut busy = vec![0.0; blocks];
    let tiles = kinds.iter().flat_map(|&(clocks, count)| std::iter::repeat_n(clocks, count));
    for (tile, clocks) in tiles.enumerate() {
        let (round, at) = (tile / blocks, tile % blocks);
        let block = if round % 2 == 1 { blocks - 1 - at } else { at };
        busy[block] += clocks;
    }
    busy.into_iter().fold(0.0, f64::max)
}

//! What plans of `halo_gemm` are expected to take.

use super::{Halo, has_gaps};
use crate::plan::norm::Way;
use crate::plan::pack::Operand;
use crate::plan::panels::{most_teams, tile_rows};
use crate::plan::phases::PhaseAxis;
use crate::plan::{Context, norm_behind, size};
use volup::{DType, MemoryFormat};

/// What a launch costs beside its work, in seconds.
const LAUNCH: f64 = 3.6e-6;
/// Clocks a second, and the share of the matrix instructions' rate that is reached.
const CLOCK: f64 = 1.65e9;
const EFFICIENCY: f64 = 0.95;
/// The most columns of which two fp16's parts are columns of one instruction, where a block is alone and where two share a multiprocessor.
const BOTH: [usize; 2] = [48, 32];
/// Bytes a second of the memory, and from the second-level cache to shared memory.
const MEMORY: f64 = 3.2e12;
const CACHE: f64 = 4.5e12;
/// How much longer it takes to write sectors in two parts, and how much more for each line.
const PARTLY: [f64; 2] = [1.35, 32.0];
/// Pieces of 16 bytes of the weight that are packed in a second.
const PIECES: f64 = 8e10;
/// Clocks that a block takes to get hold of a stage of A, and of a unit of B.
const STAGE: f64 = 450.0;
/// What a stage of one step of K takes more where each chunk has taps of its own: too few products hide what it waits for.
const ONE_STEP: f64 = 580.0;
const UNIT: f64 = 120.0;
/// The share that products of two fp16, without groups, were seen to take of all this: three products hide more of the waits.
const SPLIT: f64 = 0.83;
/// What a tile costs beside its products, and what one of its elements does, in seconds.
const TILE: f64 = 1.6e-6;
const ELEMENT: f64 = 0.09e-9;
/// The same where lines are written in whole vectors: of 16 bits, of 32.
const VECTORS: [f64; 2] = [0.04e-9, 0.07e-9];
/// How much longer a block is busy for each slice and for each chunk of channels more.
const SLICE: f64 = 0.004;
const CHUNK: f64 = 0.01;
/// Where what is between outputs is written with them: what a tile costs, and so many of its channels; the share of the time of writing
/// all of it that products do not hide; and what it takes in any case.
const BETWEEN: [f64; 2] = [1.5e-6, 0.6e-6];
const TOGETHER: usize = 8;
const WRITTEN: f64 = 0.7;
const BETWEEN_ALL: f64 = 5e-6;
/// What bringing together the taps along width takes of a product's element, in seconds.
const FOLDED: f64 = 0.04e-9;
/// The most tiles of a block for which they are dealt out by their work.
const FEW: usize = 4;
/// What a tile in parts costs beside, in seconds: sums are brought from block to block, and none of it is hidden by other tiles.
const PARTS: f64 = 2.2e-6;
/// What statistics of one of its elements take, in seconds.
const COUNTED: f64 = 0.12e-9;

/// How tiles are dealt out to blocks.
struct Dealt {
    by_work: bool,
    /// The share of time that blocks are busy, and what tiles in parts take beside, in seconds.
    full: f64,
    of_parts: f64,
}

impl<'a> Halo<'a> {
    /// The plan with the time that it is expected to take, and how tiles are dealt out for that; none where there are too many tiles for what
    /// is done with them.
    pub(super) fn timed(self, context: Context<'_>) -> Option<Halo<'a>> {
        let dealt = self.dealt(context)?;
        if self.behind > 0 && dealt.by_work {
            return None;
        }
        let busy = self.busy(context, &dealt);
        let output = context.request.geometry.output_shape().iter().product::<usize>();
        let output = (output * context.request.dtype.size()) as f64 / context.device.memory(MEMORY);
        // The rest of the output is written first, and then what of it is computed once more.
        let fill = if has_gaps(&self.lattices) && self.between.is_none() { output + LAUNCH } else { 0.0 };
        let written = self.written(context, output);
        let product = match self.between {
            // Loads from the second-level cache wait for what is written meanwhile.
            Some(_) => busy + WRITTEN * written + BETWEEN_ALL,
            None => busy.max(written) + 0.2 * busy.min(written),
        };
        let passed = self.passed(context);
        let rest = norm_behind::rest(context, self.way, product, self.behind, None);
        let seconds = product + passed + self.launches(context) + fill + rest;
        let plan = Halo { by_work: dealt.by_work, seconds, ..self };
        if !plan.along {
            return Some(plan);
        }
        let input = plan.input(context, plan.batch);
        let goes = plan.batch == context.request.geometry.batch() && input.may_go_along();
        let seconds = plan.seconds + input.beside(context, product, passed) - passed;
        goes.then_some(Halo { seconds, ..plan })
    }

    /// Tiles of rows, and column blocks of all slices.
    fn tiles(&self) -> [usize; 2] {
        [self.rows(self.batch).div_ceil(self.advance()), self.slices * self.blocks]
    }

    /// Pairs of residues along depth and height.
    fn phases(&self) -> usize {
        self.axes[0].axis.stride * self.axes[1].axis.stride
    }

    /// Taps along depth and height.
    fn taps(&self) -> usize {
        self.axes[0].axis.kernel * self.axes[1].axis.kernel
    }

    /// Units of B of a tile of all phases.
    fn units(&self) -> usize {
        self.taps() * self.chunks * (self.w_steps / self.unit_steps)
    }

    /// Blocks that run side by side.
    fn side_by_side(&self, context: Context<'_>) -> f64 {
        context.device.multiprocessors as f64 * size(self.kernel, "CTAS") as f64
    }

    /// How often everything is done: for each part of the batch.
    fn parts_of_batch(&self, context: Context<'_>) -> usize {
        context.request.geometry.batch().div_ceil(self.batch)
    }

    /// The shares of the taps along each axis that are there where chunks lack some.
    fn there(&self, context: Context<'_>) -> [f64; 3] {
        let kernel_size = context.request.geometry.conv().kernel_size();
        self.short.map_or([1.0; 3], |short| short.shares(kernel_size))
    }

    fn dealt(&self, context: Context<'_>) -> Option<Dealt> {
        let ([row_tiles, all], phases) = (self.tiles(), self.phases());
        let tiles = row_tiles * phases * all;
        let side_by_side = self.side_by_side(context);
        let few = |blocks: usize| blocks <= FEW * side_by_side as usize;
        let taps_of = [&self.axes[0], &self.axes[1]].map(PhaseAxis::taps_of_residues);
        let busy = |blocks, by_work| busy_share(&taps_of, row_tiles, all, blocks, by_work);
        if self.team > 1 {
            // Tiles in parts, each of a share of the chunks; where no number divides them one has more.
            let (team, chunks) = (self.team, self.chunks);
            let teams = most_teams(context, self.kernel);
            if self.parts_of_batch(context) > 1 || !few(tiles * team) || teams == 0 || chunks < team {
                return None;
            }
            let share = busy(teams, false) * (teams * team) as f64 / side_by_side;
            let full = share * chunks as f64 / (chunks.div_ceil(team) * team) as f64;
            return Some(Dealt { by_work: false, full, of_parts: PARTS * tiles.div_ceil(teams) as f64 });
        }
        let mut full = tiles as f64 / ((tiles as f64 / side_by_side).ceil() * side_by_side);
        let mut by_work = false;
        if phases > 1 && self.between.is_none() && few(tiles) {
            let evenly = side_by_side as usize / (all * phases) * (all * phases);
            full = busy(side_by_side as usize, false);
            if evenly > 0 {
                let even = busy(evenly, true) * evenly as f64 / side_by_side;
                by_work = even >= full;
                full = full.max(even);
            }
        }
        Some(Dealt { by_work, full, of_parts: 0.0 })
    }

    /// Clocks of a step of 64 rows.
    fn step_clocks(&self) -> f64 {
        let [n, ctas] = ["BN", "CTAS"].map(|name| size(self.kernel, name));
        let clocks = |n: usize| (0.5 * n as f64).max(14.0 + n as f64 / 4.0);
        // Of the split's three products, two are one of twice the columns, where these are few.
        match self.operand {
            Operand::Split if n <= BOTH[ctas - 1] => clocks(2 * n) + clocks(n),
            operand if operand.parts() == 2 => 3.0 * clocks(n),
            _ => clocks(n),
        }
    }

    /// The time that blocks are busy.
    fn busy(&self, context: Context<'_>, dealt: &Dealt) -> f64 {
        let device = context.device.multiprocessors as f64;
        let [bm, n, ctas] = [tile_rows(self.kernel), size(self.kernel, "BN"), size(self.kernel, "CTAS")];
        let ([row_tiles, all], parts) = (self.tiles(), self.operand.parts());
        let (chunks, chunk_panels) = (self.chunks, self.chunk_panels);
        let [depth, height, width] = &self.axes;
        // Products: 64 rows by 32 bytes an instruction.
        let steps = (self.taps() * self.w_steps * chunks * chunk_panels / 2) as f64;
        let instructions = (row_tiles * bm / 64 * all) as f64 * steps;
        // Where taps lack along height and width alone a stage is none the less needed.
        let [of_d, of_h, of_w] = self.there(context);
        let there = of_d * of_h * of_w;
        let stages_there = of_d * if self.whole_h { 1.0 } else { of_h };
        let instructions = instructions * there;
        // What goes to shared memory: stages and, unless they stay, units.
        let (h_step, _) = height.step_and_inverse();
        let stages = depth.axis.kernel
            * chunks
            * if self.whole_h { h_step.min(height.axis.kernel) } else { height.axis.kernel };
        let stage_clocks = if self.short.is_some() && chunk_panels == 2 { STAGE + ONE_STEP } else { STAGE };
        let units = self.units();
        let waits = stages as f64 * stage_clocks * stages_there + units as f64 * UNIT * parts as f64 * there;
        let waits = (row_tiles * all) as f64 * waits;
        let alone = (instructions * self.step_clocks() / EFFICIENCY + waits) / (device * CLOCK);
        let compute = alone / dealt.full;
        let stage = parts * chunk_panels * self.stage_rows * 16;
        let unit = self.unit_steps * parts * chunk_panels * n * 16;
        let copied = (row_tiles * all) as f64 * (stages * stage) as f64 * stages_there;
        let brought = if self.resident { self.side_by_side(context) } else { (row_tiles * all) as f64 };
        let weights = there * units as f64 * unit as f64 * brought;
        let repeated = self.parts_of_batch(context) as f64;
        let busy = compute.max((copied + weights) / CACHE) * repeated;
        // A block computes nothing while it stores; two of them hardly make up for it.
        let tile = match self.between {
            Some(_) => BETWEEN[0] + BETWEEN[1] * n.min(self.slice_out).div_ceil(TOGETHER) as f64,
            None => {
                let (outputs, folded) = match self.fold {
                    Some(fold) => (fold.channels * width.axis.stride, FOLDED * (bm * n) as f64),
                    None => (n, 0.0),
                };
                TILE + self.element(context) * (bm * outputs) as f64 + folded
            }
        };
        let tiles = row_tiles * self.phases() * all;
        let tile = repeated * tiles as f64 * tile / (device * dealt.full * if ctas == 1 { 1.0 } else { 1.3 });
        // Tiles of few channels write short runs of neighbours.
        let busy = dealt.of_parts
            + (busy + tile) * (1.0 + SLICE * (self.slices - 1) as f64 + CHUNK * (chunks - 1) as f64);
        let groups = context.request.geometry.conv().groups();
        if self.operand == Operand::Split && groups == 1 { SPLIT * busy } else { busy }
    }

    /// What one of a tile's elements costs.
    fn element(&self, context: Context<'_>) -> f64 {
        // Residues along width that are no small power of two are stored apart.
        let together = context.request.output_format == MemoryFormat::ChannelsLast3d
            || [1, 2, 4, 8].contains(&self.outputs());
        let element = match (in_vectors(context, self.block), together) {
            (true, _) => VECTORS[usize::from(context.request.dtype == DType::F32)],
            (false, true) => ELEMENT,
            (false, false) => 3.0 * ELEMENT,
        };
        element + if self.way == Way::Counted { COUNTED } else { 0.0 }
    }

    /// The time that the memory takes for what is written, of which all takes so long.
    fn written(&self, context: Context<'_>, output: f64) -> f64 {
        let width = self.axes[2].axis.output;
        // Interleaved lines of float32 that start anywhere: each sector is written in two parts.
        let element_bytes = context.request.dtype.size();
        let anywhere = context.request.output_format == MemoryFormat::Contiguous
            && self.outputs() > 1
            && !(width * element_bytes).is_multiple_of(32);
        let output = if anywhere && element_bytes == 4 {
            (PARTLY[0] + PARTLY[1] / width as f64) * output
        } else {
            output
        };
        let lines = if self.between.is_some() { 1 } else { self.lattices[0].step * self.lattices[1].step };
        output / lines as f64
    }

    /// The time that packing takes by itself.
    fn passed(&self, context: Context<'_>) -> f64 {
        let [_, all] = self.tiles();
        let n = size(self.kernel, "BN");
        let items = all * (self.taps() * self.w_steps * self.chunks * self.chunk_panels * n);
        let row_bytes = self.slices * self.panels() * self.operand.parts() * 16;
        let input = context.request.geometry.input_shape().iter().product::<usize>();
        let packed = self.parts_of_batch(context) as f64 * 2.0 * (self.panel_rows() * row_bytes) as f64;
        let passed = (input * context.request.dtype.size()) as f64 + packed;
        if context.packed { 0.0 } else { passed / context.device.memory(MEMORY) }.max(items as f64 / PIECES)
    }

    fn launches(&self, context: Context<'_>) -> f64 {
        // The first two packs overlap.
        let of_part = if self.operand == Operand::Split { 3 } else { 2 };
        let launches = if context.packed {
            2
        } else {
            self.parts_of_batch(context) * of_part + 2 + usize::from(self.operand.has_scale())
        };
        launches as f64 * LAUNCH
    }
}

/// Whether the kernel writes whole vectors of what lies side by side in y, from matrices that it turns over or pairs.
fn in_vectors(context: Context<'_>, block: usize) -> bool {
    let (request, conv) = (context.request, context.request.geometry.conv());
    let vector = 16 / request.dtype.size();
    if request.output_format == MemoryFormat::ChannelsLast3d {
        return (conv.out_channels() / conv.groups()).is_multiple_of(vector);
    }
    let gapless = conv.padding() == [0; 3] && conv.stride() == [1; 3];
    let [.., width] = request.geometry.output_shape();
    let most = if request.dtype == DType::F32 { 2..=2 } else { 1..=2 };
    gapless
        && most.contains(&block)
        && width.is_multiple_of(block)
        && request.geometry.output_voxels().is_multiple_of(vector)
}

/// The share of time that so many blocks are busy with tiles of phases along depth and height, each of so many rows and column
/// blocks, as the kernel deals them out.
fn busy_share(taps: &[Vec<usize>; 2], row_tiles: usize, all: usize, blocks: usize, by_work: bool) -> f64 {
    let mut work: Vec<usize> = taps[0].iter().flat_map(|d| taps[1].iter().map(move |h| d * h)).collect();
    if by_work {
        work.sort_unstable_by(|one, other| other.cmp(one));
    }
    let phases = work.len();
    let turn = (blocks / (all * phases)).max(1);
    let mut busy = vec![0; blocks];
    for tile in 0..row_tiles * phases * all {
        let (row_tile, at) = (tile / all / phases, tile / all % phases);
        let phase = match (by_work, row_tile / turn % 2) {
            (true, 1) => phases - 1 - at,
            (true, _) => at,
            _ => (at + row_tile / turn) % phases,
        };
        busy[tile % blocks] += work[phase];
    }
    let most = busy.iter().copied().max().unwrap_or(0).max(1);
    busy.iter().sum::<usize>().max(1) as f64 / (most * blocks) as f64
}

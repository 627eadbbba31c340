//! Planning `halo_gemm`: rows and panels, what of shared memory goes to which operand. The kernels' file
//! says what the numbers mean.

mod between;
mod cost;
mod steps;

use super::classes::Short;
use super::epilogue_statistics::Rows;
use super::norm::Way;
use super::norm_behind;
use super::pack::Operand;
use super::panels::{
    InputPanels, MOST_STAGES, PACK_ROUNDS, PACKED_TOGETHER, brought_bytes, may_pack_along, packer_bytes,
    packs, table_bytes, tile_rows,
};
use super::phases::{Lattice, PhaseAxis};
use super::{Context, RESERVED, SHARED, size, strides};
use crate::Variant;
use between::Between;
use std::fmt;
pub(super) use steps::fill;
use volup::MemoryFormat;

/// The packed input takes at most this much of the input's own memory, or the batch is cut; where that is seldom needed, less.
const MOST_PACKED: f64 = 2.0;
const MOST_PACKED_WITHIN: f64 = 1.0;
/// The part of the second-level cache that a packed input may take none the less.
const CACHED: usize = 4;
/// The most blocks that share a multiprocessor.
const MOST_BLOCKS: usize = 2;
/// What comes before tables of columns in shared memory.
const FIXED: usize = 4096;
/// The most chunks of channels that lack taps.
const MOST_SHORT: usize = 512;

/// The most pairs of residues along depth and height that the kernels have a table for.
const MOST_PHASES: usize = 64;
/// The most rows that a tap along width is ahead of another, where taps are columns.
const MOST_AHEAD: usize = 8;

/// A plan of this family.
#[derive(Clone)]
pub(super) struct Halo<'a> {
    operand: Operand,
    kernel: &'a Variant,
    /// The outputs that are computed, all others being filled, and how they see the axes.
    lattices: [Lattice; 3],
    axes: [PhaseAxis; 3],
    /// Positions along width that make one row, and rows of a line.
    block: usize,
    pw: usize,
    /// Samples that are packed and computed at a time.
    batch: usize,
    slices: usize,
    slice_out: usize,
    /// Panels of a slice's channels, of a chunk, and chunks of a slice.
    channel_panels: usize,
    chunk_panels: usize,
    chunks: usize,
    /// Column blocks of a slice.
    blocks: usize,
    /// Rows from one step along width to the next, from the first one on.
    w_low: i64,
    w_steps: usize,
    w_step: usize,
    /// Rows before the first position's, and after the last tile's.
    lead: usize,
    tail: usize,
    whole_h: bool,
    unit_steps: usize,
    resident: bool,
    /// Tiles of phases with most taps first.
    by_work: bool,
    /// Blocks of a cluster, which do a tile in as many parts.
    team: usize,
    stage_rows: usize,
    a_stages: usize,
    b_stages: usize,
    shared: usize,
    /// Of channels that lack taps what is passed over.
    short: Option<Short>,
    /// Where each tap along width has columns of its own.
    fold: Option<Fold>,
    /// Whether what is between outputs is written with them.
    between: Option<Between>,
    /// Whether the input is packed beside the products.
    along: bool,
    /// What it does about a normalization, and how its rows are dealt out.
    pub(super) way: Way,
    of_samples: Rows,
    /// Warps of a block that normalize what is written beside what is left of it.
    behind: usize,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for Halo<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (operand, rows, columns) = (self.operand.name(), tile_rows(self.kernel), size(self.kernel, "BN"));
        write!(f, "halo_gemm {operand} {rows}x{columns}, {} positions a row, ", self.block)?;
        write!(f, "{}x{} panels, {} slices, ", self.chunks, self.chunk_panels, self.slices)?;
        let lines = if self.whole_h { "all lines" } else { "a line" };
        write!(f, "{} stages of {lines}, {} ", self.a_stages, self.b_stages)?;
        write!(f, "{} units of {}, ", if self.resident { "resident" } else { "passing" }, self.unit_steps)?;
        write!(f, "batches of {}", self.batch)?;
        f.write_str(if self.short.is_some() { ", taps that are there" } else { "" })?;
        f.write_str(if self.fold.is_some() { ", taps as columns" } else { "" })?;
        f.write_str(if self.between.is_some() { ", with what is between" } else { "" })?;
        if self.team > 1 {
            write!(f, ", tiles in {} parts", self.team)?;
        }
        write!(f, "{}{}", if self.along { ", packs along" } else { "" }, self.way)?;
        norm_behind::describe(f, self.behind)
    }
}

/// How a plan may differ for the same kernel.
#[derive(Clone, Copy)]
struct Choice {
    slices: usize,
    block: usize,
    whole_h: bool,
    whole_w: bool,
    resident: bool,
}

/// How a kernel whose columns are the taps along width takes them.
#[derive(Clone, Copy)]
struct Fold {
    /// Taps, and channels of a tile.
    taps: usize,
    channels: usize,
    /// Rows that the first tap is ahead of the last, and rows from a tile to the next.
    reach: usize,
    advance: usize,
}

impl Fold {
    /// Of a kernel that is for it, if it is for that axis.
    fn of(context: Context<'_>, kernel: &Variant, width: &PhaseAxis) -> Option<Fold> {
        let (taps, stride) = (kernel.param("TAPS")? as usize, size(kernel, "W_STRIDE"));
        let axis = &width.axis;
        let request = context.request;
        let last = request.output_format == MemoryFormat::ChannelsLast3d;
        let fits = axis.stride == stride && (stride + 1..=taps).contains(&axis.kernel);
        if !fits || width.reach > MOST_AHEAD || context.packed || last && stride > 1 {
            return None;
        }
        // Tiles start where whole sectors do.
        let ahead = width.reach.next_multiple_of(32 / request.dtype.size());
        let channels = size(kernel, "BN") / taps;
        Some(Fold { taps, channels, reach: width.reach, advance: tile_rows(kernel) - ahead })
    }

    /// Bytes of shared memory of the products that warps leave to one another.
    fn bytes(&self, kernel: &Variant) -> usize {
        32 * size(kernel, "WGS") * size(kernel, "BN") * self.reach
    }
}

impl<'a> Halo<'a> {
    /// All plans that differ, if the family applies and its kernels are there: not for float64, not past
    /// its 32-bit counts.
    pub(super) fn all(context: Context<'a>) -> Vec<Halo<'a>> {
        let all = Operand::of_panels(context).into_iter();
        all.filter_map(|operand| Halo::search(context, operand)).flatten().collect()
    }

    /// The one that is expected to be the fastest.
    pub(super) fn best(context: Context<'a>) -> Option<Halo<'a>> {
        Halo::all(context).into_iter().min_by(|one, other| one.seconds.total_cmp(&other.seconds))
    }

    fn search(context: Context<'a>, operand: Operand) -> Option<Vec<Halo<'a>>> {
        let request = context.request;
        let params = [("KIND", operand.panel_kind())];
        for pack in ["halo_pack_input", "halo_pack_weight"] {
            context.kernel(pack, &operand.types(context), &params).ok()?;
        }
        let kernels: Vec<&Variant> = context
            .kernels("halo_gemm", &operand.types(context))
            .filter(|kernel| kernel.param("KIND") == Some(operand.panel_kind()))
            .collect();
        let groups = request.geometry.conv().groups();
        let mut all = Vec::new();
        for merged in (1..=groups).filter(|merged| groups.is_multiple_of(*merged)) {
            for block in [1, 2, 4] {
                for at in (0..8).rev() {
                    let [whole_h, whole_w, resident] = [1, 2, 4].map(|bit| at & bit > 0);
                    let choice = Choice { slices: groups / merged, block, whole_h, whole_w, resident };
                    for kernel in &kernels {
                        // Whether the input is packed along, and warps that normalize what is written.
                        let beside = if kernel.param("COUNTS").is_some() {
                            [(false, 0), (false, 2), (false, 3)].iter()
                        } else {
                            [(false, 0), (true, 0)].iter()
                        };
                        all.extend(
                            beside.filter_map(|&beside| Halo::with(context, operand, kernel, choice, beside)),
                        );
                    }
                }
            }
        }
        Some(all)
    }

    fn with(
        context: Context<'a>,
        operand: Operand,
        kernel: &'a Variant,
        choice: Choice,
        (along, behind): (bool, usize),
    ) -> Option<Halo<'a>> {
        if along && !may_pack_along(context, kernel, operand) || behind > 0 && !norm_behind::may(context) {
            return None;
        }
        let Choice { slices, block, whole_h, whole_w, resident } = choice;
        let team = size(kernel, "SPLIT");
        if team > 1 && (resident || along || context.packed) {
            return None;
        }
        let geometry = &context.request.geometry;
        let conv = geometry.conv();
        let (bm, n, ctas) = (tile_rows(kernel), size(kernel, "BN"), size(kernel, "CTAS"));
        let short = Short::of(context, kernel, operand);
        if kernel.param("SHORT").is_some() && (short.is_none() || block > 1) {
            return None;
        }
        let [Some(d), Some(h), Some(w)] = geometry.axes().map(Lattice::new) else { return None };
        let packed = context.packed;
        let lattices = [d, h, w];
        let axes = lattices.map(|lattice| PhaseAxis::new(lattice.axis));
        let [depth, height, width] = &axes;
        let (slice_in, slice_out) = (conv.in_channels() / slices, conv.out_channels() / slices);
        let fold = Fold::of(context, kernel, width);
        if kernel.param("TAPS").is_some() && (fold.is_none() || block > 1) {
            return None;
        }
        let writes_between = kernel.param("BETWEEN").is_some();
        let between = writes_between.then(|| Between::of(context, kernel, &lattices, &axes)).flatten();
        if writes_between && (between.is_none() || block > 1 || along) {
            return None;
        }

        // Steps along width: e = jj + first - m is step floor(e / block), parity e mod block.
        let w_step = width.apart;
        if block > 1 && w_step > 1 {
            return None;
        }
        let wide = block as i64;
        let w_low = (width.first as i64 - width.reach as i64).div_euclid(wide);
        let w_high = (width.first as i64 + wide - 1).div_euclid(wide);
        let w_steps = if fold.is_some() { 1 } else { (w_high - w_low) as usize / w_step + 1 };
        let unit_steps = if whole_w { w_steps } else { 1 };
        let pw = width.pitch.div_ceil(block);

        // Taps of a phase along height: in one stage, or in one each.
        let back_h = height.back().checked_mul(pw)?;
        let (h_step, _) = height.step_and_inverse();
        let h_taps = height.axis.kernel.div_ceil(h_step);
        let (halo_h, halo_w) = (if whole_h { (h_taps - 1) * back_h } else { 0 }, (w_steps - 1) * w_step);
        // What makes no difference is tried once.
        if (h_taps == 1 && !whole_h) || (w_steps == 1 && !whole_w) {
            return None;
        }
        let stage_rows = (bm + halo_h + halo_w).next_multiple_of(8);

        // Shared memory: what is always there, then as long chunks as both rings have room for.
        let parts = operand.parts();
        let limit = (1..=MOST_BLOCKS).contains(&ctas).then(|| SHARED / ctas - RESERVED)?;
        let tables = between.map_or_else(
            || table_bytes(kernel),
            |between| between.bytes(kernel, context.request.dtype.size()),
        );
        let fixed = FIXED + tables + brought_bytes(kernel) + fold.map_or(0, |fold| fold.bytes(kernel));
        let room = limit.checked_sub(
            fixed + if along { packer_bytes(context, PACKED_TOGETHER, PACK_ROUNDS) } else { 0 },
        )?;
        let channel_panels = slice_in.div_ceil(16 / operand.bytes());
        let panels = block * channel_panels;
        let mut fitting = None;
        for wanted in 1..=panels.div_ceil(2) {
            let chunk_panels = panels.div_ceil(wanted).next_multiple_of(2);
            let chunks = panels.div_ceil(chunk_panels);
            if short.is_some_and(|short| !short.panels.is_multiple_of(chunk_panels) || chunks > MOST_SHORT) {
                continue;
            }
            let stage = parts * chunk_panels * stage_rows * 16;
            let unit = unit_steps * parts * chunk_panels * n * 16;
            let units = depth.axis.kernel * chunks * height.axis.kernel * (w_steps / unit_steps);
            let b_least = if resident { units.max(2) } else { 3 };
            if b_least + 2 <= MOST_STAGES && 2 * stage + b_least * unit <= room {
                // A third stage of A before more of B than is needed to keep it coming.
                let left = room - b_least * unit;
                let a_stages = (left / stage).min(3).min(MOST_STAGES - b_least);
                let more = if resident { 0 } else { ((left - a_stages * stage) / unit).min(3) };
                fitting = Some((chunk_panels, chunks, a_stages, b_least + more, stage, unit));
                break;
            }
        }
        let (chunk_panels, chunks, a_stages, b_stages, stage, unit) = fitting?;
        // What is packed has every panel, and neither gaps nor parts of 32 bits.
        let dense =
            axes.iter().all(|axis| axis.pitch == axis.axis.input) && block == 1 && operand != Operand::Parts;
        let filled =
            channel_panels * (16 / operand.bytes()) == slice_in && chunks * chunk_panels == channel_panels;
        if packed && !(dense && filled) {
            return None;
        }
        let shared = limit - room + a_stages * stage + b_stages * unit;

        // Rows that taps reach before the first position, and after the last tile.
        let line = |d: i64, h: i64| (d * height.pitch as i64 + h) * pw as i64;
        let low =
            line(depth.first as i64 - depth.reach as i64, height.first as i64 - height.reach as i64) + w_low;
        let high = line(depth.first as i64, height.first as i64) + w_low + halo_w as i64;
        let lead = usize::try_from((-low).max(0)).ok()?;
        if packed && lead > 0 {
            return None;
        }
        let tail = usize::try_from(high.max(0)).ok()? + 8;

        let columns = slice_out.checked_mul(block * width.axis.stride)?;
        let blocks = fold.map_or(columns.div_ceil(n), |fold| slice_out.div_ceil(fold.channels));
        let all = slices * blocks;
        let positions = depth.pitch.checked_mul(height.pitch)?.checked_mul(pw)?;
        // The batch is cut where the packed input would take too much memory.
        let input = conv.in_channels() * geometry.axes().iter().map(|axis| axis.input).product::<usize>();
        let row_bytes = slices * chunks * chunk_panels * parts * 16;
        let input_bytes = input * context.request.dtype.size();
        let most_packed = if context.within { MOST_PACKED_WITHIN } else { MOST_PACKED };
        let budget = (most_packed * (geometry.batch() * input_bytes) as f64) as usize;
        let fixed = row_bytes.checked_mul(lead + tail + bm)?;
        let most = budget.max(context.device.l2_bytes / CACHED).saturating_sub(fixed)
            / row_bytes.checked_mul(positions)?;
        let most = if packed { geometry.batch() } else { most };
        let parts_of_batch = geometry.batch().div_ceil(most.clamp(1, geometry.batch()));
        let batch = geometry.batch().div_ceil(parts_of_batch);

        let rows = batch.checked_mul(positions)?;
        let advance = advance(kernel, fold, between);
        let row_tiles = rows.div_ceil(advance);
        let a_rows = lead + row_tiles * advance + bm - advance + tail;
        let [_, y_channels, ..] = geometry.output_shape();
        let sample = y_channels * geometry.output_voxels();
        // A tile may span several samples, and one more at each end.
        let spanned = (bm / positions + 2).min(geometry.batch());
        let phases =
            depth.axis.stride.checked_mul(height.axis.stride).filter(|&phases| phases <= MOST_PHASES)?;
        let tiles = row_tiles.checked_mul(phases)?.checked_mul(all)?;
        let taps = depth.axis.kernel * height.axis.kernel;
        let items = all.checked_mul(taps * w_steps * chunks * chunk_panels * n)?;
        let largest = i32::MAX as usize;
        if !packs(context, operand, slices, chunks * chunk_panels)
            || a_rows.checked_mul(row_bytes / 16)? > largest
            || sample.max(input).checked_mul(spanned)? > largest
            || 2 * tiles > largest
            || items.checked_mul(parts)? > largest
            || conv.weight_shape().iter().product::<usize>() > largest
        {
            return None;
        }

        let way = if kernel.param("COUNTS").is_some() { Way::Counted } else { Way::Plain };
        let of_samples = Rows {
            of_sample: positions,
            of_tile: bm,
            warpgroups: size(kernel, "WGS"),
            phases,
            of_channel: block * width.axis.stride,
        };
        if way == Way::Counted {
            // Columns of a row are one channel's, or neighbours of one in pairs.
            let ncdhw = context.request.output_format == MemoryFormat::Contiguous;
            let pairs = of_samples.of_channel == 1 || of_samples.of_channel == 2 && ncdhw;
            let all_at_once = batch == geometry.batch() && !has_gaps(&lattices) && !packed;
            if !pairs || !all_at_once || !of_samples.count_for(context) {
                return None;
            }
        }

        let plan = Halo {
            operand,
            kernel,
            lattices,
            axes,
            block,
            pw,
            batch,
            slices,
            slice_out,
            channel_panels,
            chunk_panels,
            chunks,
            blocks,
            w_low,
            w_steps,
            w_step,
            lead,
            tail,
            whole_h,
            unit_steps,
            resident,
            by_work: false,
            team,
            stage_rows,
            a_stages,
            b_stages,
            shared,
            short,
            fold,
            between,
            along,
            way,
            of_samples,
            behind,
            seconds: 0.0,
        };
        plan.timed(context)
    }

    /// How so many samples are packed.
    fn input(&self, context: Context<'_>, count: usize) -> InputPanels {
        let shape @ [_, _, voxels @ ..] = context.request.geometry.input_shape();
        InputPanels {
            operand: self.operand,
            rows: self.packed_rows(count),
            lead: self.lead,
            pitches: [self.axes[0].pitch, self.axes[1].pitch, self.pw],
            voxels,
            strides: strides(shape, context.request.input_format),
            block: self.block,
            count,
            slices: self.slices,
            panels: self.panels(),
            channel_panels: self.channel_panels,
            unit: PACKED_TOGETHER,
        }
    }

    /// Rows of so many samples, gaps included.
    fn rows(&self, batch: usize) -> usize {
        let [depth, height, _] = &self.axes;
        batch * depth.pitch * height.pitch * self.pw
    }

    /// Rows of a panel where all samples are packed already.
    pub(super) fn panel_rows(&self) -> usize {
        self.packed_rows(self.batch)
    }

    /// Rows that are packed.
    fn packed_rows(&self, batch: usize) -> usize {
        let (tile, advance) = (tile_rows(self.kernel), self.advance());
        self.lead + self.rows(batch).next_multiple_of(advance) + tile - advance + self.tail
    }

    /// Rows from a tile to the next.
    fn advance(&self) -> usize {
        advance(self.kernel, self.fold, self.between)
    }

    /// Panels of a slice.
    fn panels(&self) -> usize {
        self.chunks * self.chunk_panels
    }

    /// Positions of a row times residues along width.
    fn outputs(&self) -> usize {
        self.block * self.axes[2].axis.stride
    }
}

/// Rows from a tile to the next, of a kernel that may leave some to the one after it.
fn advance(kernel: &Variant, fold: Option<Fold>, between: Option<Between>) -> usize {
    let advance = fold.map(|fold| fold.advance).or(between.map(|between| between.advance));
    advance.unwrap_or(tile_rows(kernel))
}

/// Whether there are outputs that are on no lattice.
pub(super) fn has_gaps(lattices: &[Lattice; 3]) -> bool {
    lattices.iter().any(|lattice| lattice.step > 1)
}

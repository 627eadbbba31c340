//! How a block is cut into tasks: a pure function of its geometry and of the CPU.
//!
//! A task is a box of positions of one sample and group. It copies the input that the box reads into
//! a slab (widened to the accumulator, zeros beyond the borders), and computes all phases of a range
//! of output channels from there. Positions of several rows are taken as one line, so that narrow
//! volumes fill the vectors too: a slab's rows lie at a pitch that leaves zeros between them.

use crate::conv::Kernels;
use crate::layer::TapClass;
use std::fmt;
use std::ops::Range;
use volup::phases::{Phase, phases};
use volup::{Axis, Geometry};

/// What the planner knows of the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CpuInfo {
    /// Threads that share the tasks.
    pub threads: usize,
    /// Elements of a vector.
    pub lanes: usize,
    /// Bytes of an element of the slab.
    pub element: usize,
}

/// Bytes that a slab may take: it is read once for each phase and block of channels, and so should
/// stay in the L2 cache.
pub(crate) const SLAB_BYTES: usize = 256 << 10;

/// Bytes of sums that a kernel call leaves behind for the epilogue, to be found in the L1 cache.
pub(crate) const SUMS_BYTES: usize = 16 << 10;

/// Bytes of output above which it is written past the caches.
const STREAM_BYTES: usize = 32 << 20;

/// An axis: its phases, and what they read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AxisPlan {
    pub axis: Axis,
    /// Phases and, where they have taps, the index of their class in the layer.
    pub phases: Vec<(Phase, Option<usize>)>,
    /// The positions of all phases together.
    pub positions: Range<usize>,
    /// The smallest and largest offset of any tap.
    pub offsets: (usize, usize),
    /// Different offsets of taps.
    pub distinct: usize,
}

impl AxisPlan {
    fn new(axis: &Axis, classes: &[TapClass]) -> AxisPlan {
        let phases: Vec<(Phase, Option<usize>)> = phases(axis)
            .into_iter()
            .map(|phase| {
                let class = classes.iter().position(|class| class.residue == phase.residue);
                (phase, class)
            })
            .collect();
        let mut offsets: Vec<usize> =
            phases.iter().flat_map(|(phase, _)| phase.taps.iter().map(|tap| tap.offset)).collect();
        offsets.sort_unstable();
        offsets.dedup();
        let start = phases.iter().map(|(phase, _)| phase.positions.start).min().unwrap_or(0);
        let end = phases.iter().map(|(phase, _)| phase.positions.end).max().unwrap_or(0);
        AxisPlan {
            axis: *axis,
            positions: start..end,
            distinct: offsets.len(),
            offsets: (offsets.first().copied().unwrap_or(0), offsets.last().copied().unwrap_or(0)),
            phases,
        }
    }

    /// The index of the phase of a residue that some output has.
    pub fn phase_of(&self, residue: usize) -> usize {
        let at = self.phases.binary_search_by_key(&residue, |(phase, _)| phase.residue);
        at.expect("every output's residue has a phase")
    }

    /// How much further than a position's own range its taps reach.
    pub fn reach(&self) -> usize {
        self.offsets.1 - self.offsets.0
    }

    /// The positions of tile `index` of tiles of `size`.
    pub fn tile(&self, index: usize, size: usize) -> Range<usize> {
        let start = self.positions.start + index * size;
        start..(start + size).min(self.positions.end)
    }

    fn tiles(&self, size: usize) -> usize {
        self.positions.len().div_ceil(size)
    }

    /// The input voxels that a range of positions keeps in its slab, `None` for zeros outside of the
    /// input. A single position needs only what its taps hit; of several, all rows must follow one
    /// another as the positions do.
    pub fn inputs(&self, positions: &Range<usize>) -> Vec<Option<usize>> {
        let inside = |q: usize, offset: usize| q.checked_sub(offset).filter(|&i| i < self.axis.input);
        if positions.len() == 1 {
            let taps = self.phases.iter().flat_map(|(phase, _)| &phase.taps);
            let mut inputs: Vec<_> =
                taps.filter_map(|tap| inside(positions.start, tap.offset)).map(Some).collect();
            inputs.sort_unstable();
            inputs.dedup();
            return inputs;
        }
        let (least, most) = self.offsets;
        // Counted from the largest offset, so that nothing is negative.
        (positions.start..positions.end + most - least).map(|q| inside(q, most)).collect()
    }

    /// Input voxels along this axis that a tile of `size` positions keeps in its slab. A single
    /// position needs only what its taps hit, several a contiguous range.
    fn slab(&self, size: usize) -> usize {
        if size == 1 { self.distinct.max(1) } else { size + self.reach() }
    }
}

/// How to cut a block into tasks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    pub geometry: Geometry,
    pub axes: [AxisPlan; 3],
    /// Positions of a tile per axis.
    pub tile: [usize; 3],
    /// Tiles per axis.
    pub tiles: [usize; 3],
    /// Blocks of output channels that a task computes.
    pub blocks: usize,
    /// Tasks that share a tile, each with its blocks.
    pub splits: usize,
}

/// What a task is about.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub sample: usize,
    pub group: usize,
    /// Index of the tile within its sample.
    pub tile: usize,
    /// Positions per axis.
    pub positions: [Range<usize>; 3],
    /// Blocks of output channels within the group.
    pub blocks: Range<usize>,
}

impl Plan {
    /// Chooses tile and split with the least estimated time.
    pub fn new(geometry: &Geometry, classes: &[Vec<TapClass>; 3], blocks: usize, cpu: CpuInfo) -> Plan {
        let axes = [0, 1, 2].map(|a| AxisPlan::new(&geometry.axes()[a], &classes[a]));
        let [d, h, w] = [0, 1, 2].map(|a| axes[a].positions.len());
        let mut plan = Plan { geometry: *geometry, axes, tile: [d, h, w], tiles: [1; 3], blocks, splits: 1 };
        // Rows are cut only where a single one is too much.
        let volumes = splits_of(h).flat_map(|h| splits_of(d).map(move |d| [d, h, w]));
        let rows = splits_of(w).skip(1).map(|w| [1, 1, w]);
        let mut best = (f64::INFINITY, plan.tile, blocks);
        for tile in volumes.chain(rows) {
            for blocks_per_task in splits_of(blocks) {
                plan.cut(tile, blocks, blocks_per_task);
                let cost = plan.cost(cpu);
                if cost < best.0 {
                    best = (cost, tile, blocks_per_task);
                }
            }
        }
        plan.cut(best.1, blocks, best.2);
        plan
    }

    fn cut(&mut self, tile: [usize; 3], blocks: usize, blocks_per_task: usize) {
        self.tile = tile;
        self.tiles = [0, 1, 2].map(|a| self.axes[a].tiles(tile[a]));
        self.blocks = blocks_per_task;
        self.splits = blocks.div_ceil(blocks_per_task);
    }

    /// The number of tasks.
    pub fn tasks(&self) -> usize {
        let groups = self.geometry.conv().groups();
        self.geometry.batch() * groups * self.tiles_per_sample() * self.splits
    }

    /// The number of tiles of one sample and group.
    pub fn tiles_per_sample(&self) -> usize {
        self.tiles.iter().product()
    }

    /// The task of an index. Neighbouring tasks share a tile's input, then a sample's.
    pub fn task(&self, index: usize, blocks: usize) -> Task {
        let groups = self.geometry.conv().groups();
        let (index, split) = (index / self.splits, index % self.splits);
        let (index, tile) = (index / self.tiles_per_sample(), index % self.tiles_per_sample());
        let [_, tiles_h, tiles_w] = self.tiles;
        let at = [tile / (tiles_h * tiles_w), tile / tiles_w % tiles_h, tile % tiles_w];
        Task {
            sample: index / groups,
            group: index % groups,
            tile,
            positions: [0, 1, 2].map(|a| self.axes[a].tile(at[a], self.tile[a])),
            blocks: split * self.blocks..((split + 1) * self.blocks).min(blocks),
        }
    }

    /// Elements from one row of a slab to the next, for a tile of `positions` along the width.
    ///
    /// Column `c` holds input `first + c`. What a row reads past the pitch it finds at the start of
    /// the next row, so that one gap of zeros serves the end of a row and the start of the next.
    pub fn pitch(&self, positions: &Range<usize>) -> usize {
        let width = &self.axes[2];
        let need = positions.len() + width.reach();
        let first = positions.start as isize - width.offsets.1 as isize;
        if first >= 0 {
            return need;
        }
        let inside = (width.axis.input as isize - first) as usize;
        let gap = need.saturating_sub(first.unsigned_abs());
        positions.len().max(inside).max(gap).min(need)
    }

    /// Rows that a kernel call computes as one line.
    pub fn rows_per_call(&self, pitch: usize, cpu: CpuInfo) -> usize {
        let lines = self.axes[2].phases.len() * crate::layer::CO_BLOCK;
        (SUMS_BYTES / cpu.element / lines / pitch).max(1)
    }

    /// Whether the output is written past the caches: it would have left them before it is read.
    pub fn streams(&self, element: usize) -> bool {
        self.geometry.output_shape().iter().product::<usize>() * element > STREAM_BYTES
    }

    /// Estimated cycles of the slowest thread. The constants are rough; they only have to rank cuts
    /// of one block.
    fn cost(&self, cpu: CpuInfo) -> f64 {
        let conv = self.geometry.conv();
        let group_in = conv.in_channels() / conv.groups();
        let [tile_d, tile_h, tile_w] = self.tile;
        let pitch = self.pitch(&self.axes[2].tile(0, tile_w));
        let planes = self.axes[0].slab(tile_d).min(tile_d * self.axes[0].distinct.max(1));
        let slab = (group_in * planes * self.axes[1].slab(tile_h) * pitch) as f64;
        let slab_bytes = slab * cpu.element as f64;
        // A line's last vector is partly empty, and so are the gaps between its rows.
        let rows = self.rows_per_call(pitch, cpu).min(tile_h);
        let vectors = ((rows - 1) * pitch + tile_w).div_ceil(cpu.lanes) as f64 / rows as f64;
        let channels = (self.blocks * crate::layer::CO_BLOCK) as f64;
        let taps: usize = conv.kernel_size().iter().product();
        let phases: usize = self.axes.iter().map(|axis| axis.phases.len()).product();
        let lines = (tile_d * tile_h) as f64 * vectors * channels;
        let compute = lines * (group_in * taps) as f64 / 2.0;
        let epilogue = lines * phases as f64 * 3.0;
        let spill = if slab_bytes > SLAB_BYTES as f64 { slab_bytes / SLAB_BYTES as f64 } else { 1.0 };
        let pack = slab / 4.0 + (planes * self.axes[1].slab(tile_h) * group_in) as f64 * 20.0;
        let task = compute * (0.9 + 0.1 * spill) + epilogue + pack + 2000.0;
        // Threads take tasks as they come: the last round is partly idle.
        task * self.tasks().div_ceil(cpu.threads) as f64
    }
}

/// Sizes that cut `len` into equal parts: the whole, halves, thirds, quarters, then ever finer.
pub(crate) fn splits_of(len: usize) -> impl Iterator<Item = usize> {
    let mut parts = 1;
    let mut last = 0;
    std::iter::from_fn(move || {
        while parts <= len {
            let size = len.div_ceil(parts);
            parts = if parts < 4 { parts + 1 } else { parts * 3 / 2 };
            if size != last {
                last = size;
                return Some(size);
            }
        }
        (last > 1).then(|| {
            last = 1;
            1
        })
    })
}

impl CpuInfo {
    /// What the planner needs to know of kernels that run on a number of threads.
    pub fn new<T>(kernels: &Kernels<T>, threads: usize) -> CpuInfo {
        CpuInfo { threads, lanes: kernels.lanes, element: size_of::<T>() }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [d, h, w] = self.tile;
        write!(f, "{}: tiles of {d}x{h}x{w} positions, {} channel splits", self.geometry, self.splits)?;
        write!(f, ", {} tasks", self.tasks())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volup::ConvSpec;

    const CPU: CpuInfo = CpuInfo { threads: 2, lanes: 16, element: 4 };

    fn plan(batch: usize, input: [usize; 3], conv: volup::ConvSpecBuilder) -> Plan {
        let geometry = conv.build().unwrap().geometry(batch, input).unwrap();
        let classes = crate::layer::tap_classes_of(geometry.conv());
        let blocks = (geometry.conv().out_channels() / geometry.conv().groups()).div_ceil(8);
        Plan::new(&geometry, &classes, blocks, CPU)
    }

    #[test]
    fn a_full_transposed_convolution_wastes_no_pitch() {
        let plan = plan(1, [32; 3], ConvSpec::builder(64, 128, 3));
        assert_eq!(plan.pitch(&plan.axes[2].tile(0, 34)), 34);
    }

    #[test]
    fn slabs_stay_in_the_cache() {
        for (input, conv) in [
            ([64, 64, 64], ConvSpec::builder(64, 32, 2).stride(2)),
            ([32, 64, 128], ConvSpec::builder(32, 32, 3).stride(2).padding(1).groups(4)),
            ([32, 32, 32], ConvSpec::builder(64, 128, 3)),
        ] {
            let plan = plan(1, input, conv);
            let [d, h, w] = plan.tile;
            let rows = plan.axes[0].slab(d) * plan.axes[1].slab(h);
            let conv = plan.geometry.conv();
            let slab = conv.in_channels() / conv.groups() * rows * plan.pitch(&plan.axes[2].tile(0, w)) * 4;
            assert!(slab <= 2 * SLAB_BYTES, "{plan}: {slab} bytes");
        }
    }

    #[test]
    fn small_problems_are_split_over_the_threads() {
        assert!(plan(1, [1, 1, 1], ConvSpec::builder(512, 512, 4)).tasks() >= CPU.threads);
    }

    #[test]
    fn tasks_cover_every_position_and_block_once() {
        let plan = plan(2, [7, 9, 11], ConvSpec::builder(6, 34, 3).stride(2).padding(1).groups(2));
        let blocks = 17usize.div_ceil(8);
        let mut seen = std::collections::HashMap::new();
        for index in 0..plan.tasks() {
            let task = plan.task(index, blocks);
            let [d, h, w] = task.positions.clone();
            for block in task.blocks {
                for at in d.clone().flat_map(|d| h.clone().map(move |h| (d, h))) {
                    for w in w.clone() {
                        *seen.entry((task.sample, task.group, block, at, w)).or_insert(0) += 1;
                    }
                }
            }
        }
        let positions: usize = plan.axes.iter().map(|axis| axis.positions.len()).product();
        assert_eq!(seen.len(), 2 * 2 * blocks * positions);
        assert!(seen.values().all(|&count| count == 1));
    }
}

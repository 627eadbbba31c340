//! The gradient of the input: `dx[n,ci,i] = sum over co, t of dy[n,co,i*s - p + t*d] * w[ci,co',t]`.
//!
//! A task is a box of input positions of one sample and group. It copies the outputs that the box's
//! taps reach into a slab `[output channel][residues][plane][row]`, widened, with zeros beyond the
//! borders: there every tap is one constant offset, and the sum is that of the forward pass with the
//! channels' parts swapped. Rows lie at a pitch that leaves zeros between them, so that positions of
//! several rows form one line.

use super::Volume;
use super::axis::TapAxis;
use crate::Storage;
use crate::buffer::Buffer;
use crate::conv::{Accumulate, Kernels, TapOffset};
use crate::forward::Shared;
use crate::layer::{CO_BLOCK, ChannelBlock, channel_blocks};
use crate::plan::{CpuInfo, SLAB_BYTES, SUMS_BYTES, splits_of};
use std::ops::Range;
use volup::{ConvSpec, Element, Geometry, MemoryFormat};

/// A convolution's weights for this sum: `[group][block of input channels][output channel][tap][channel
/// of the block]`.
pub(crate) struct TransposedWeights {
    packed: Buffer,
    blocks: Vec<ChannelBlock>,
    /// Whether all are finite: only then may they be multiplied with zeros beyond the borders.
    finite: bool,
}

impl TransposedWeights {
    /// Packs a weight `[Cin, Cout/groups, kD, kH, kW]`.
    pub fn new<W: Element>(conv: &ConvSpec, weight: &[W]) -> TransposedWeights {
        let [in_channels, group_out, kernel @ ..] = conv.weight_shape();
        let (group_in, taps) = (in_channels / conv.groups(), kernel.iter().product::<usize>());
        let blocks = channel_blocks(group_in);
        let padded: usize = blocks.iter().map(|block| block.width).sum();
        let mut packed = Buffer::default();
        // Fresh memory is zero, and so the padding is.
        let all = packed.get::<W::Acc>(conv.groups() * group_out * taps * padded);
        let groups = all.chunks_exact_mut(group_out * taps * padded);
        for (packed, weight) in groups.zip(weight.chunks_exact(group_in * group_out * taps)) {
            for block in &blocks {
                let packed = &mut packed[group_out * taps * block.start..];
                for lane in 0..block.count {
                    let of_channel = &weight[(block.start + lane) * group_out * taps..][..group_out * taps];
                    let lane = packed[lane..].iter_mut().step_by(block.width);
                    lane.zip(of_channel).for_each(|(to, value)| *to = value.to_acc());
                }
            }
        }
        let finite = weight.iter().all(|value| value.to_f64().is_finite());
        TransposedWeights { packed, blocks, finite }
    }
}

/// A thread's scratch memory.
#[derive(Default)]
pub(crate) struct Scratch {
    slab: Buffer,
    sums: Buffer,
    line: Buffer,
    taps: Vec<TapOffset>,
}

/// The gradient of one input: what all tasks share.
pub(crate) struct InputGradient<'a, T: Storage> {
    geometry: &'a Geometry,
    axes: [TapAxis; 3],
    weights: &'a TransposedWeights,
    kernels: &'static Kernels<T::Acc>,
    grad_output: Volume<'a, T>,
    grad_input: Shared<T>,
    format: MemoryFormat,
    /// Input positions of a tile per axis, and tiles per axis.
    tile: [usize; 3],
    tiles: [usize; 3],
    /// Blocks of input channels that a task computes, and tasks that share a tile.
    blocks: usize,
    splits: usize,
}

/// A box of positions and the channels that are computed for it.
struct Task {
    sample: usize,
    group: usize,
    positions: [Range<usize>; 3],
    blocks: Range<usize>,
}

/// Where a task's slab has what.
struct Slab {
    /// Elements from one output channel to the next.
    channel: usize,
    /// Elements from one row to the next.
    pitch: usize,
    /// Of the outputs of a residue, those that the slab's planes, rows and columns begin at.
    first: [isize; 3],
    planes: usize,
    rows: usize,
}

impl<'a, T: Storage> InputGradient<'a, T> {
    /// Cuts the work into tasks. `grad_input` points to an element for each of the input.
    pub fn new(
        geometry: &'a Geometry,
        weights: &'a TransposedWeights,
        kernels: &'static Kernels<T::Acc>,
        cpu: CpuInfo,
        grad_output: Volume<'a, T>,
        (grad_input, format): (*mut T, MemoryFormat),
    ) -> InputGradient<'a, T> {
        let axes = geometry.axes().each_ref().map(TapAxis::new);
        let [d, h, w] = geometry.axes().map(|axis| axis.input);
        let mut work = InputGradient {
            geometry,
            axes,
            weights,
            kernels,
            grad_output,
            grad_input: Shared(grad_input),
            format,
            tile: [d, h, w],
            tiles: [1; 3],
            blocks: weights.blocks.len(),
            splits: 1,
        };
        // Rows are cut only where a single one is too much.
        let volumes = splits_of(h).flat_map(|h| splits_of(d).map(move |d| [d, h, w]));
        let rows = splits_of(w).skip(1).map(|w| [1, 1, w]);
        let mut best = (f64::INFINITY, work.tile, work.blocks);
        for tile in volumes.chain(rows) {
            for blocks in splits_of(weights.blocks.len()) {
                work.cut(tile, blocks);
                let cost = work.cost(cpu);
                if cost < best.0 {
                    best = (cost, tile, blocks);
                }
            }
        }
        work.cut(best.1, best.2);
        work
    }

    fn cut(&mut self, tile: [usize; 3], blocks: usize) {
        self.tile = tile;
        self.tiles = [0, 1, 2].map(|a| self.axes[a].axis.input.div_ceil(tile[a]));
        self.blocks = blocks;
        self.splits = self.weights.blocks.len().div_ceil(blocks);
    }

    /// The number of tasks.
    pub fn tasks(&self) -> usize {
        let tiles: usize = self.tiles.iter().product();
        self.geometry.batch() * self.geometry.conv().groups() * tiles * self.splits
    }

    /// Estimated cycles of the slowest thread, as for the forward pass: enough to rank cuts.
    fn cost(&self, cpu: CpuInfo) -> f64 {
        let [d, h, w] = self.tile;
        let [_, group_out, kernel @ ..] = self.geometry.conv().weight_shape();
        let pitch = self.pitch(&(0..w));
        let rows = (d + self.axes[0].reach()) * (h + self.axes[1].reach());
        let slab = (group_out * self.combinations() * rows * pitch) as f64;
        let together = rows_per_call::<T>(pitch).min(h);
        let vectors = ((together - 1) * pitch + w).div_ceil(cpu.lanes) as f64 / together as f64;
        let lines = (d * h) as f64 * vectors * (self.blocks * CO_BLOCK) as f64;
        let compute = lines * (group_out * kernel.iter().product::<usize>()) as f64 / 2.0;
        let bytes = slab * cpu.element as f64;
        let spill = (bytes / SLAB_BYTES as f64).max(1.0);
        let pack = slab / 3.0 + (group_out * self.combinations() * rows) as f64 * 15.0;
        let task = compute * (0.9 + 0.1 * spill) + pack + lines * 3.0 + 2000.0;
        task * self.tasks().div_ceil(cpu.threads) as f64
    }

    /// Combinations of residues that taps reach.
    fn combinations(&self) -> usize {
        self.axes.iter().map(|axis| axis.residues.len()).product()
    }

    /// Elements from one row of a slab to the next: what a row reads past it, it finds in the zeros at
    /// the start of the next row.
    fn pitch(&self, columns: &Range<usize>) -> usize {
        let axis = &self.axes[2];
        let need = columns.len() + axis.reach();
        let first = axis.first(columns);
        if first >= 0 {
            return need;
        }
        let most = (0..axis.residues.len()).map(|residue| axis.outputs(residue)).max().unwrap_or(0);
        let inside = most + first.unsigned_abs();
        columns.len().max(inside).max(need.saturating_sub(first.unsigned_abs())).min(need)
    }

    fn task(&self, index: usize) -> Task {
        let groups = self.geometry.conv().groups();
        let (index, split) = (index / self.splits, index % self.splits);
        let [tiles_d, tiles_h, tiles_w] = self.tiles;
        let (index, tile) = (index / (tiles_d * tiles_h * tiles_w), index % (tiles_d * tiles_h * tiles_w));
        let at = [tile / (tiles_h * tiles_w), tile / tiles_w % tiles_h, tile % tiles_w];
        let positions = [0, 1, 2].map(|a| {
            let start = at[a] * self.tile[a];
            start..(start + self.tile[a]).min(self.axes[a].axis.input)
        });
        let blocks = split * self.blocks..((split + 1) * self.blocks).min(self.weights.blocks.len());
        Task { sample: index / groups, group: index % groups, positions, blocks }
    }

    /// Runs a task.
    pub fn run(&self, index: usize, scratch: &mut Scratch) {
        let task = &self.task(index);
        let [d, h, w] = &task.positions;
        let slab = self.fill(task, scratch);
        let rows_per_call = rows_per_call::<T>(slab.pitch);
        for plane in d.clone() {
            for start in h.clone().step_by(rows_per_call) {
                let rows = start..(start + rows_per_call).min(h.end);
                self.find_taps(task, &slab, plane, &rows, &mut scratch.taps);
                let line = (rows.len() - 1) * slab.pitch + w.len();
                for block in &self.weights.blocks[task.blocks.clone()] {
                    let Scratch { slab: memory, sums, taps, .. } = &mut *scratch;
                    let out_channel = line.next_multiple_of(Buffer::line::<T::Acc>());
                    let sums = sums.get::<T::Acc>(CO_BLOCK * out_channel);
                    let x = memory.as_slice::<T::Acc>();
                    if self.weights.finite {
                        self.sum(&slab, x, task.group, block, taps, (line, out_channel), sums);
                    } else {
                        self.sum_exact(&slab, x, task, block, plane, &rows, out_channel, sums);
                    }
                    self.write(&slab, task, block, plane, &rows, (out_channel, sums));
                }
            }
        }
    }

    /// Copies what a task reads.
    fn fill(&self, task: &Task, scratch: &mut Scratch) -> Slab {
        let [_, group_out, ..] = self.geometry.conv().weight_shape();
        let [_, channels, depth, height, width] = self.geometry.output_shape();
        let [axis_d, axis_h, axis_w] = &self.axes;
        let [d, h, w] = &task.positions;
        let pitch = self.pitch(w);
        // Planes beyond the borders are left out, with their taps.
        let first_d = axis_d.first(d).max(0);
        let end_d =
            (d.end as isize + axis_d.shifts.1).min(axis_d.axis.output.div_ceil(axis_d.axis.stride) as isize);
        let slab_rows = h.len() + axis_h.reach();
        let planes = (end_d - first_d).max(0) as usize;
        let elements = self.combinations() * planes * slab_rows * pitch;
        // The last row reads on past its end as every row does. An odd number of cache lines keeps
        // channels from falling into the same cache sets.
        let line = Buffer::line::<T::Acc>();
        let lines = (elements + w.len() + axis_w.reach()).div_ceil(line);
        let slab = Slab {
            channel: (lines | 1) * line,
            pitch,
            first: [first_d, axis_h.first(h), axis_w.first(w)],
            planes,
            rows: slab_rows,
        };
        // A kernel reads whole vectors, at most a register tile past the last position.
        let memory = scratch.slab.get::<T::Acc>(group_out * slab.channel + 8 * self.kernels.lanes);
        memory.fill(T::Acc::default());
        let widened = scratch.line.get::<T::Acc>(width);
        let columns = |residue: usize| {
            let start = slab.first[2].max(0) as usize;
            let end = (slab.first[2] + (w.len() + axis_w.reach()) as isize).max(0) as usize;
            start..end.min(axis_w.outputs(residue)).max(start)
        };
        for co in 0..group_out {
            let channel = task.sample * channels + task.group * group_out + co;
            let memory = &mut memory[co * slab.channel..][..slab.channel];
            for (residue_d, residue_h, plane, row) in self.rows(&slab) {
                let o_d = (slab.first[0] as usize + plane) * axis_d.axis.stride + axis_d.residues[residue_d];
                let q_h = slab.first[1] + row as isize;
                if o_d >= depth || q_h < 0 || q_h as usize >= axis_h.outputs(residue_h) {
                    continue;
                }
                let o_h = q_h as usize * axis_h.axis.stride + axis_h.residues[residue_h];
                let base = (o_d * height + o_h) * width;
                let combination = (residue_d * axis_h.residues.len() + residue_h) * axis_w.residues.len();
                let at = |residue_w: usize| {
                    let start = columns(residue_w).start as isize - slab.first[2];
                    slab.row(combination + residue_w, plane, row) + start as usize
                };
                if self.format_interleaves() {
                    let (even, odd) = (columns(0), columns(1));
                    let both = even.len() + odd.len();
                    if both == 0 {
                        continue;
                    }
                    let from = &self.grad_output.values
                        [channel * depth * height * width + base + 2 * even.start..][..both];
                    let line = T::widened(from, widened);
                    let (head, tail) = memory.split_at_mut(at(1));
                    let (even, odd) = (&mut head[at(0)..][..even.len()], &mut tail[..odd.len()]);
                    // SAFETY: the kernels are those of this CPU.
                    unsafe { (self.kernels.deinterleave)(line, even, odd) };
                    continue;
                }
                for (residue_w, &residue) in axis_w.residues.iter().enumerate() {
                    let columns = columns(residue_w);
                    let to = &mut memory[at(residue_w)..][..columns.len()];
                    let first = base + columns.start * axis_w.axis.stride + residue;
                    let shape = [channels, depth * height * width];
                    self.grad_output.read(shape, channel, first, axis_w.axis.stride, to, widened);
                }
            }
        }
        slab
    }

    /// Whether rows consist of two residues in turn, one element after the other.
    fn format_interleaves(&self) -> bool {
        let axis = &self.axes[2];
        self.grad_output.format == MemoryFormat::Contiguous
            && axis.axis.stride == 2
            && axis.residues.len() == 2
    }

    /// All rows of a slab: residues of depth and height, plane and row.
    fn rows(&self, slab: &Slab) -> impl Iterator<Item = (usize, usize, usize, usize)> + use<T> {
        let (residues_d, residues_h) = (self.axes[0].residues.len(), self.axes[1].residues.len());
        let (planes, rows) = (slab.planes, slab.rows);
        (0..residues_d).flat_map(move |d| {
            (0..residues_h).flat_map(move |h| {
                (0..planes).flat_map(move |plane| (0..rows).map(move |row| (d, h, plane, row)))
            })
        })
    }

    /// The taps of some rows of a plane that reach an output, in the kernel's order.
    fn find_taps(
        &self,
        task: &Task,
        slab: &Slab,
        plane: usize,
        rows: &Range<usize>,
        taps: &mut Vec<TapOffset>,
    ) {
        taps.clear();
        let [axis_d, axis_h, axis_w] = &self.axes;
        for (d, tap_d) in axis_d.taps.iter().enumerate() {
            if axis_d.connected(*tap_d, &(plane..plane + 1)).is_empty() {
                continue;
            }
            let plane = (plane as isize + tap_d.shift - slab.first[0]) as usize;
            for (h, tap_h) in axis_h.taps.iter().enumerate() {
                if axis_h.connected(*tap_h, rows).is_empty() {
                    continue;
                }
                let row = (rows.start as isize + tap_h.shift - slab.first[1]) as usize;
                for (w, tap_w) in axis_w.taps.iter().enumerate() {
                    let residues = (tap_d.residue * axis_h.residues.len() + tap_h.residue)
                        * axis_w.residues.len()
                        + tap_w.residue;
                    let column = task.positions[2].start as isize + tap_w.shift - slab.first[2];
                    let tap = (d * axis_h.taps.len() + h) * axis_w.taps.len() + w;
                    let x = slab.row(residues, plane, row) + column as usize;
                    taps.push(TapOffset { x, w: tap });
                }
            }
        }
    }

    /// Sums a line for a block of channels.
    #[allow(clippy::too_many_arguments, reason = "the parts of one call of the kernel")]
    fn sum(
        &self,
        slab: &Slab,
        x: &[T::Acc],
        group: usize,
        block: &ChannelBlock,
        taps: &mut Vec<TapOffset>,
        (line, out_channel): (usize, usize),
        sums: &mut [T::Acc],
    ) {
        let (weights, taps_in_all) = self.weights_of(group, block);
        let [_, group_out, ..] = self.geometry.conv().weight_shape();
        // An offset among the packed weights is a tap's index times the block's width.
        taps.iter_mut().for_each(|tap| tap.w *= block.width);
        let args = Accumulate {
            x: x.as_ptr(),
            x_channel: slab.channel,
            channels: group_out,
            taps,
            weights: weights.as_ptr(),
            w_channel: taps_in_all * block.width,
            out: sums.as_mut_ptr(),
            out_channel,
            len: line,
            co: block.width,
        };
        // SAFETY: the slab was filled for this task and is readable a register tile past its end;
        // a line of sums is a whole number of vectors; the weights of a block are contiguous; the
        // kernels are those of this CPU.
        unsafe { (self.kernels.accumulate)(&args) };
        taps.iter_mut().for_each(|tap| tap.w /= block.width);
    }

    /// The packed weights from a block on, and the number of taps.
    fn weights_of(&self, group: usize, block: &ChannelBlock) -> (&[T::Acc], usize) {
        let [_, group_out, kernel @ ..] = self.geometry.conv().weight_shape();
        let taps = kernel.iter().product::<usize>();
        let padded: usize = self.weights.blocks.iter().map(|block| block.width).sum();
        let start = group_out * taps * (group * padded + block.start);
        (&self.weights.packed.as_slice::<T::Acc>()[start..], taps)
    }

    /// As the kernels sum, but leaving out what lies beyond the borders instead of multiplying zeros
    /// there: an infinite or NaN weight would make NaN of them.
    #[allow(clippy::too_many_arguments, reason = "as for `sum`")]
    fn sum_exact(
        &self,
        slab: &Slab,
        x: &[T::Acc],
        task: &Task,
        block: &ChannelBlock,
        plane: usize,
        rows: &Range<usize>,
        out_channel: usize,
        sums: &mut [T::Acc],
    ) {
        let (weights, taps_in_all) = self.weights_of(task.group, block);
        let [_, group_out, ..] = self.geometry.conv().weight_shape();
        let columns = &task.positions[2];
        let mut taps = Vec::new();
        sums.fill(T::Acc::default());
        for row in rows.clone() {
            self.find_taps(task, slab, plane, &(row..row + 1), &mut taps);
            let to = (row - rows.start) * slab.pitch;
            for tap in &taps {
                let tap_w = self.axes[2].taps[tap.w % self.axes[2].taps.len()];
                for column in self.axes[2].connected(tap_w, columns) {
                    let at = column - columns.start;
                    for lane in 0..block.width {
                        let sum = &mut sums[lane * out_channel + to + at];
                        for co in 0..group_out {
                            let weight = weights[(co * taps_in_all + tap.w) * block.width + lane];
                            *sum = *sum + x[co * slab.channel + tap.x + at] * weight;
                        }
                    }
                }
            }
        }
    }

    /// Writes rows of sums to the gradient.
    fn write(
        &self,
        slab: &Slab,
        task: &Task,
        block: &ChannelBlock,
        plane: usize,
        rows: &Range<usize>,
        (out_channel, sums): (usize, &[T::Acc]),
    ) {
        let [_, channels, depth, height, width] = self.geometry.input_shape();
        let group_in = channels / self.geometry.conv().groups();
        let columns = &task.positions[2];
        for lane in 0..block.count {
            let channel = task.group * group_in + block.start + lane;
            for row in rows.clone() {
                let line = &sums[lane * out_channel + (row - rows.start) * slab.pitch..][..columns.len()];
                let sample = task.sample;
                // SAFETY: the gradient has the input's size, and this task alone writes these columns
                // of this row and channel.
                unsafe {
                    match self.format {
                        MemoryFormat::Contiguous => {
                            let row = ((sample * channels + channel) * depth + plane) * height + row;
                            T::store(line, self.grad_input.0.add(row * width + columns.start));
                        }
                        MemoryFormat::ChannelsLast3d => {
                            let row = ((sample * depth + plane) * height + row) * width + columns.start;
                            let to = self.grad_input.0.add(row * channels + channel);
                            for (column, &value) in line.iter().enumerate() {
                                to.add(column * channels).write(T::from_acc(value));
                            }
                        }
                    }
                }
            }
        }
    }
}

impl Slab {
    /// Where a row begins, from the start of its channel.
    fn row(&self, residues: usize, plane: usize, row: usize) -> usize {
        ((residues * self.planes + plane) * self.rows + row) * self.pitch
    }
}

/// Rows that a kernel call computes as one line.
fn rows_per_call<T: Storage>(pitch: usize) -> usize {
    (SUMS_BYTES / size_of::<T::Acc>() / CO_BLOCK / pitch).max(1)
}

//! The gradient of the weight: `dw[ci,co',t] = sum over n, i of x[n,ci,i] * dy[n,co,i*s - p + t*d]`.
//!
//! For each tap this is a matrix product over positions. A chunk is a box of input positions of one
//! sample; what it reads of both tensors is copied into slabs that have the channels of a position side
//! by side: `[tile of channels][row][column][channel]`, for the output's gradient a row for each residue.
//! The inner loop takes vectors of channels of the one, broadcasts channels of the other, and sums over
//! the rows and columns that the tap connects, no others: nothing is multiplied beyond the borders.
//!
//! Which chunks there are and in which order they are added follows from the geometry alone, and so do
//! the bits of the result. A chunk sums at most [`MOST_POSITIONS`] products one by one; what it leaves
//! behind is added in double precision.

use super::Volume;
use super::axis::TapAxis;
use crate::Storage;
use crate::buffer::Buffer;
use crate::conv::{Accumulate, Kernels, TapOffset};
use crate::forward::Shared;
use crate::plan::{SLAB_BYTES, splits_of};
use std::mem::MaybeUninit;
use std::ops::Range;
use volup::{Element, Geometry, MemoryFormat};

/// The longest chain of additions in the accumulator's type.
const MOST_POSITIONS: usize = 960;

/// Vectors of a full register tile.
const VECTORS: usize = 3;

/// Tasks that there should be at least, whatever the number of threads.
const TASKS: usize = 32;

/// Bytes that partial sums may take in any case; beyond, an eighth of the output's gradient.
const PARTIAL_BYTES: usize = 4 << 20;

/// A thread's scratch memory.
#[derive(Default)]
pub(crate) struct Scratch {
    vectors: Buffer,
    scalars: Buffer,
    sums: Buffer,
    widened: Buffer,
    taps: Vec<TapOffset>,
}

/// One side of the products: how its channels are cut.
#[derive(Clone, Copy, Debug)]
struct Side {
    /// Channels in a group.
    channels: usize,
    /// Channels in a tile.
    width: usize,
    /// Tiles of a group.
    tiles: usize,
    /// Tiles of a task.
    per_task: usize,
}

impl Side {
    fn new(channels: usize, width: usize) -> Side {
        let tiles = channels.div_ceil(width);
        Side { channels, width, tiles, per_task: tiles }
    }

    fn padded(&self) -> usize {
        self.tiles * self.width
    }

    fn splits(&self) -> usize {
        self.tiles.div_ceil(self.per_task)
    }

    fn of_task(&self, split: usize) -> Range<usize> {
        split * self.per_task..((split + 1) * self.per_task).min(self.tiles)
    }
}

/// The gradient of one weight: what all tasks share.
pub(crate) struct WeightGradient<'a, T: Storage> {
    geometry: &'a Geometry,
    axes: [TapAxis; 3],
    kernels: &'static Kernels<T::Acc>,
    input: Volume<'a, T>,
    grad_output: Volume<'a, T>,
    /// Whether vectors are made of output channels, or else of input channels.
    output_in_vectors: bool,
    vectors: Side,
    scalars: Side,
    /// Input positions of a chunk per axis, and chunks per axis.
    tile: [usize; 3],
    tiles: [usize; 3],
    /// Parts of the chunks' sequence, each with partial sums of its own.
    segments: usize,
}

/// Where a chunk's slabs have what.
struct Chunk {
    sample: usize,
    positions: [Range<usize>; 3],
    /// Of the outputs of a residue, those that planes, rows and columns begin at.
    first: [isize; 3],
    /// Planes, rows and columns of a residue's outputs.
    outputs: [usize; 3],
}

impl<'a, T: Storage> WeightGradient<'a, T> {
    /// Cuts the work into tasks, as the geometry asks for.
    pub fn new(
        geometry: &'a Geometry,
        kernels: &'static Kernels<T::Acc>,
        input: Volume<'a, T>,
        grad_output: Volume<'a, T>,
    ) -> WeightGradient<'a, T> {
        let conv = geometry.conv();
        let group_in = conv.in_channels() / conv.groups();
        let group_out = conv.out_channels() / conv.groups();
        let sides = |vectors: usize, scalars: usize| {
            let count = vectors.div_ceil(kernels.lanes);
            let width = count.div_ceil(count.div_ceil(VECTORS)) * kernels.lanes;
            (Side::new(vectors, width), Side::new(scalars, scalars.next_power_of_two().min(kernels.co_block)))
        };
        // The side whose channels leave fewer lanes empty makes the vectors.
        let products = |(vectors, scalars): (Side, Side)| vectors.padded() * scalars.padded();
        let output_in_vectors = products(sides(group_out, group_in)) <= products(sides(group_in, group_out));
        let (vectors, scalars) =
            if output_in_vectors { sides(group_out, group_in) } else { sides(group_in, group_out) };
        let [d, h, w] = geometry.axes().map(|axis| axis.input);
        let mut work = WeightGradient {
            geometry,
            axes: geometry.axes().each_ref().map(TapAxis::new),
            kernels,
            input,
            grad_output,
            output_in_vectors,
            vectors,
            scalars,
            tile: [1; 3],
            tiles: [d, h, w],
            segments: 1,
        };
        let tiles =
            splits_of(w).flat_map(|w| splits_of(h).flat_map(move |h| splits_of(d).map(move |d| [d, h, w])));
        let fits = |tile: &[usize; 3]| tile.iter().product::<usize>() <= MOST_POSITIONS;
        let mut best = (f64::INFINITY, work.tile, vectors.tiles, scalars.tiles);
        for tile in tiles.filter(fits) {
            for of_vectors in splits_of(vectors.tiles) {
                for of_scalars in splits_of(scalars.tiles) {
                    work.cut(tile, of_vectors, of_scalars);
                    let cost = work.cost();
                    if cost < best.0 {
                        best = (cost, tile, of_vectors, of_scalars);
                    }
                }
            }
        }
        work.cut(best.1, best.2, best.3);
        work
    }

    fn cut(&mut self, tile: [usize; 3], of_vectors: usize, of_scalars: usize) {
        self.tile = tile;
        self.tiles = [0, 1, 2].map(|a| self.axes[a].axis.input.div_ceil(tile[a]));
        self.vectors.per_task = of_vectors;
        self.scalars.per_task = of_scalars;
        let bytes = self.segment() * size_of::<f64>();
        let most = (PARTIAL_BYTES / bytes).max(size_of_val(self.grad_output.values) / 8 / bytes).max(1);
        self.segments = TASKS.div_ceil(self.tasks_per_segment()).min(self.chunks()).min(most).max(1);
    }

    /// Estimated cycles of all work; it only has to rank cuts.
    fn cost(&self) -> f64 {
        let [d, h, w] = self.tile;
        let taps: usize = self.geometry.conv().kernel_size().iter().product();
        let of_input = (d * h * w) as f64;
        let residues: usize = self.axes.iter().map(|axis| axis.residues.len()).product();
        let reached: usize = [0, 1, 2].map(|a| self.tile[a] + self.axes[a].reach()).iter().product();
        let of_output = (reached * residues) as f64;
        let width = |side: &Side| (side.per_task * side.width) as f64;
        let (vectors, scalars) = (width(&self.vectors), width(&self.scalars));
        let slabs = if self.output_in_vectors {
            vectors * of_output + scalars * of_input
        } else {
            vectors * of_input + scalars * of_output
        };
        let spill = (slabs * size_of::<T::Acc>() as f64 / SLAB_BYTES as f64).max(1.0);
        let calls = (taps * self.vectors.per_task * self.scalars.per_task) as f64;
        let products = taps as f64 * of_input * vectors * scalars / self.kernels.lanes as f64;
        let added = taps as f64 * vectors * scalars / 4.0;
        let chunk = products / 2.0 * (0.9 + 0.1 * spill) + slabs * 1.5 + calls * 60.0 + added + 1000.0;
        let tasks = self.tasks_per_segment();
        let idle = (TASKS as f64 / (tasks * self.segments) as f64).max(1.0);
        chunk * (self.chunks() * tasks) as f64 * idle
    }

    fn chunks(&self) -> usize {
        self.geometry.batch() * self.tiles.iter().product::<usize>()
    }

    fn tasks_per_segment(&self) -> usize {
        self.geometry.conv().groups() * self.vectors.splits() * self.scalars.splits()
    }

    /// The number of tasks.
    pub fn tasks(&self) -> usize {
        self.segments * self.tasks_per_segment()
    }

    /// Partial sums of one segment: `[group][tap][scalars' channel][vectors' channel]`, padded.
    fn segment(&self) -> usize {
        let conv = self.geometry.conv();
        let taps: usize = conv.kernel_size().iter().product();
        conv.groups() * taps * self.scalars.padded() * self.vectors.padded()
    }

    /// Partial sums of all segments.
    pub fn partials(&self) -> usize {
        self.segments * self.segment()
    }

    /// Runs a task: adds its chunks to its part of the partial sums, which are zero.
    pub fn run(&self, index: usize, partials: &Shared<f64>, scratch: &mut Scratch) {
        let (segment, index) = (index / self.tasks_per_segment(), index % self.tasks_per_segment());
        let (group, index) = (
            index / (self.vectors.splits() * self.scalars.splits()),
            index % (self.vectors.splits() * self.scalars.splits()),
        );
        let vectors = self.vectors.of_task(index / self.scalars.splits());
        let scalars = self.scalars.of_task(index % self.scalars.splits());
        let of = |segment: usize| segment * self.chunks() / self.segments;
        for chunk in of(segment)..of(segment + 1) {
            let chunk = self.chunk(chunk);
            let Scratch { vectors: a, scalars: b, widened, .. } = &mut *scratch;
            let (of_input, of_output, a_side, b_side) = if self.output_in_vectors {
                (b, a, (&self.scalars, &scalars), (&self.vectors, &vectors))
            } else {
                (a, b, (&self.vectors, &vectors), (&self.scalars, &scalars))
            };
            self.fill_input(&chunk, group, a_side, of_input, widened);
            self.fill_output(&chunk, group, b_side, of_output, widened);
            let start = segment * self.segment() + group * self.segment() / self.geometry.conv().groups();
            self.products(&chunk, [&vectors, &scalars], start, partials, scratch);
        }
    }

    fn chunk(&self, index: usize) -> Chunk {
        let [tiles_d, tiles_h, tiles_w] = self.tiles;
        let (sample, tile) = (index / (tiles_d * tiles_h * tiles_w), index % (tiles_d * tiles_h * tiles_w));
        let at = [tile / (tiles_h * tiles_w), tile / tiles_w % tiles_h, tile % tiles_w];
        let positions = [0, 1, 2].map(|a| {
            let start = at[a] * self.tile[a];
            start..(start + self.tile[a]).min(self.axes[a].axis.input)
        });
        Chunk {
            sample,
            first: [0, 1, 2].map(|a| self.axes[a].first(&positions[a])),
            outputs: [0, 1, 2].map(|a| positions[a].len() + self.axes[a].reach()),
            positions,
        }
    }

    /// Copies a chunk of the input.
    fn fill_input(
        &self,
        chunk: &Chunk,
        group: usize,
        (side, tiles): (&Side, &Range<usize>),
        slab: &mut Buffer,
        widened: &mut Buffer,
    ) {
        let [_, channels, depth, height, width] = self.geometry.input_shape();
        let [d, h, w] = &chunk.positions;
        let rows = d.len() * h.len();
        let row = w.len() * side.width;
        let slab = slab.get::<T::Acc>(tiles.len() * rows * row);
        let widened = widened.get::<T::Acc>(TOGETHER * width.max(side.width));
        for (tile, slab) in tiles.clone().zip(slab.chunks_exact_mut(rows * row)) {
            let source =
                Source::new(self.input, chunk.sample, channels, depth * height * width, group, side, tile);
            let positions = d.clone().flat_map(|d| h.clone().map(move |h| d * height + h));
            for (to, row) in slab.chunks_exact_mut(row).zip(positions) {
                source.copy(row * width + w.start, 1, w.len(), (to, side.width), widened);
            }
        }
    }

    /// Copies what a chunk's taps reach of the output's gradient.
    fn fill_output(
        &self,
        chunk: &Chunk,
        group: usize,
        (side, tiles): (&Side, &Range<usize>),
        slab: &mut Buffer,
        widened: &mut Buffer,
    ) {
        let [_, channels, depth, height, width] = self.geometry.output_shape();
        let [axis_d, axis_h, axis_w] = &self.axes;
        let [planes, rows, columns] = chunk.outputs;
        let residues: usize = self.axes.iter().map(|axis| axis.residues.len()).product();
        let row_len = columns * side.width;
        let tile_len = residues * planes * rows * row_len;
        let slab = slab.get::<T::Acc>(tiles.len() * tile_len);
        let widened = widened.get::<T::Acc>(TOGETHER * width.max(side.width));
        for (tile, slab) in tiles.clone().zip(slab.chunks_exact_mut(tile_len)) {
            let source = Source::new(
                self.grad_output,
                chunk.sample,
                channels,
                depth * height * width,
                group,
                side,
                tile,
            );
            for (index, to) in slab.chunks_exact_mut(row_len).enumerate() {
                let (index, row) = (index / rows, index % rows);
                let (index, plane) = (index / planes, index % planes);
                let (index, residue_w) = (index / axis_w.residues.len(), index % axis_w.residues.len());
                let (residue_d, residue_h) = (index / axis_h.residues.len(), index % axis_h.residues.len());
                let inside = |axis: &TapAxis, first: isize, at: usize, residue: usize| {
                    let q = usize::try_from(first + at as isize).ok()?;
                    (q < axis.outputs(residue)).then(|| q * axis.axis.stride + axis.residues[residue])
                };
                let o_d = inside(axis_d, chunk.first[0], plane, residue_d);
                let o_h = inside(axis_h, chunk.first[1], row, residue_h);
                let Some((o_d, o_h)) = o_d.zip(o_h) else { continue };
                // What lies outside is never read, so it is not written either.
                let start = chunk.first[2].max(0);
                let end = (chunk.first[2] + columns as isize).min(axis_w.outputs(residue_w) as isize);
                if end <= start {
                    continue;
                }
                let to = &mut to[(start - chunk.first[2]) as usize * side.width..];
                let first = (o_d * height + o_h) * width
                    + start as usize * axis_w.axis.stride
                    + axis_w.residues[residue_w];
                let count = (end - start) as usize;
                source.copy(first, axis_w.axis.stride, count, (to, side.width), widened);
            }
        }
    }

    /// Adds the products of a chunk, tap by tap, to the partial sums from `start` on.
    fn products(
        &self,
        chunk: &Chunk,
        [vectors, scalars]: [&Range<usize>; 2],
        start: usize,
        partials: &Shared<f64>,
        scratch: &mut Scratch,
    ) {
        let [axis_d, axis_h, axis_w] = &self.axes;
        let [planes, rows, columns] = chunk.outputs;
        let [d, h, w] = &chunk.positions;
        let (a_width, b_width) = (self.vectors.width, self.scalars.width);
        let residues: usize = self.axes.iter().map(|axis| axis.residues.len()).product();
        let input_tile = d.len() * h.len() * w.len();
        let output_tile = residues * planes * rows * columns;
        // Positions of a tile of either side.
        let (a_tile, b_tile) =
            if self.output_in_vectors { (output_tile, input_tile) } else { (input_tile, output_tile) };
        let Scratch { vectors: a, scalars: b, sums, taps, .. } = scratch;
        let (a, b) = (a.as_slice::<T::Acc>(), b.as_slice::<T::Acc>());
        let sums = sums.get::<T::Acc>(b_width * a_width);
        let kernel = axis_d.taps.iter().flat_map(|d| {
            axis_h.taps.iter().flat_map(move |h| axis_w.taps.iter().map(move |w| [*d, *h, *w]))
        });
        for (tap, [tap_d, tap_h, tap_w]) in kernel.enumerate() {
            let across = axis_w.connected(tap_w, w);
            let residue = (tap_d.residue * axis_h.residues.len() + tap_h.residue) * axis_w.residues.len()
                + tap_w.residue;
            taps.clear();
            for i_d in axis_d.connected(tap_d, d) {
                let plane = (i_d as isize + tap_d.shift - chunk.first[0]) as usize;
                for i_h in axis_h.connected(tap_h, h) {
                    let row = (i_h as isize + tap_h.shift - chunk.first[1]) as usize;
                    let of_input = ((i_d - d.start) * h.len() + i_h - h.start) * w.len();
                    let of_output = ((residue * planes + plane) * rows + row) * columns;
                    let (a, b) =
                        if self.output_in_vectors { (of_output, of_input) } else { (of_input, of_output) };
                    taps.push(TapOffset { x: a * a_width, w: b * b_width });
                }
            }
            if taps.is_empty() || across.is_empty() {
                continue;
            }
            let of_input = across.start - w.start;
            let of_output = (across.start as isize + tap_w.shift - chunk.first[2]) as usize;
            let (a_first, b_first) =
                if self.output_in_vectors { (of_output, of_input) } else { (of_input, of_output) };
            for (a_index, a_of) in vectors.clone().enumerate() {
                for (b_index, b_of) in scalars.clone().enumerate() {
                    let args = Accumulate {
                        x: a[(a_index * a_tile + a_first) * a_width..].as_ptr(),
                        x_channel: a_width,
                        channels: across.len(),
                        taps,
                        weights: b[(b_index * b_tile + b_first) * b_width..].as_ptr(),
                        w_channel: b_width,
                        out: sums.as_mut_ptr(),
                        out_channel: a_width,
                        len: a_width,
                        co: b_width,
                    };
                    // SAFETY: rows and columns are those of the slabs that were filled for this chunk;
                    // a tile of vectors is a whole number of vectors wide; the kernels are those of
                    // this CPU.
                    unsafe { (self.kernels.accumulate_by_taps)(&args) };
                    let row = (tap * self.scalars.padded() + b_of * b_width) * self.vectors.padded();
                    for (lane, sums) in sums.chunks_exact(a_width).enumerate() {
                        let at = start + row + lane * self.vectors.padded() + a_of * a_width;
                        // SAFETY: `at` lies in the partial sums of this segment, group and tap, of
                        // channels that are this task's alone.
                        let to = unsafe { std::slice::from_raw_parts_mut(partials.0.add(at), a_width) };
                        to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum.to_f64());
                    }
                }
            }
        }
    }

    /// Adds up the segments, in order, into the gradients of one input channel: `[Cout/groups][tap]`.
    pub fn reduce<V: Element>(&self, channel: usize, partials: &[f64], gradient: &mut [MaybeUninit<V>]) {
        let conv = self.geometry.conv();
        let (group_in, taps) =
            (conv.in_channels() / conv.groups(), conv.kernel_size().iter().product::<usize>());
        let (group, ci) = (channel / group_in, channel % group_in);
        for (index, to) in gradient.iter_mut().enumerate() {
            let (co, tap) = (index / taps, index % taps);
            let (vector, scalar) = if self.output_in_vectors { (co, ci) } else { (ci, co) };
            let row = (group * taps + tap) * self.scalars.padded() + scalar;
            let of_segments = partials[row * self.vectors.padded() + vector..].iter().step_by(self.segment());
            to.write(V::from_f64(of_segments.sum()));
        }
    }
}

/// Channels of which elements are put side by side at once.
const TOGETHER: usize = 4;

/// A tile of channels of a tensor.
struct Source<'a, T: Storage> {
    volume: Volume<'a, T>,
    shape: [usize; 2],
    /// Index in [N][C] of the first channel, and channels that exist.
    first: usize,
    count: usize,
}

impl<'a, T: Storage> Source<'a, T> {
    fn new(
        volume: Volume<'a, T>,
        sample: usize,
        channels: usize,
        voxels: usize,
        group: usize,
        side: &Side,
        tile: usize,
    ) -> Source<'a, T> {
        let start = tile * side.width;
        let first = sample * channels + group * side.channels + start;
        Source { volume, shape: [channels, voxels], first, count: side.width.min(side.channels - start) }
    }

    /// Copies voxels, `step` apart, with the tile's channels side by side.
    fn copy(
        &self,
        first: usize,
        step: usize,
        count: usize,
        (to, width): (&mut [T::Acc], usize),
        widened: &mut [T::Acc],
    ) {
        let [channels, voxels] = self.shape;
        match self.volume.format {
            MemoryFormat::Contiguous => {
                let len = (count - 1) * step + 1;
                let line = |lane: usize| &self.volume.values[(self.first + lane) * voxels + first..][..len];
                // Lines of which only some elements are taken are better read together.
                let together = if step == 1 { 0 } else { self.count - self.count % TOGETHER };
                for lane in (0..together).step_by(TOGETHER) {
                    let mut scratch = widened.chunks_mut(len);
                    let lines: [&[T::Acc]; TOGETHER] = std::array::from_fn(|at| {
                        T::widened(line(lane + at), scratch.next().unwrap_or_default())
                    });
                    for (index, to) in to[lane..].chunks_mut(width).take(count).enumerate() {
                        to[..TOGETHER].copy_from_slice(&lines.map(|line| line[index * step]));
                    }
                }
                for lane in together..self.count {
                    let from = T::widened(line(lane), widened);
                    let to = to[lane..].iter_mut().step_by(width);
                    to.zip(from.iter().step_by(step)).for_each(|(to, value)| *to = *value);
                }
            }
            MemoryFormat::ChannelsLast3d => {
                let (sample, channel) = (self.first / channels, self.first % channels);
                for (index, to) in to.chunks_mut(width).take(count).enumerate() {
                    let voxel = sample * voxels + first + index * step;
                    let from = &self.volume.values[voxel * channels + channel..][..self.count];
                    T::widen(from, &mut to[..self.count]);
                }
            }
        }
    }
}

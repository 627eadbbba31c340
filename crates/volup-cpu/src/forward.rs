//! One task: sum the phases of a box of positions from its slab, finish the lines, store them.

use crate::Storage;
use crate::buffer::Buffer;
use crate::conv::{Accumulate, Kernels, TapOffset, fence};
use crate::layer::{CO_BLOCK, ChannelBlock, CpuLayer};
use crate::math::Moments;
use crate::plan::{CpuInfo, Plan, Task};
use crate::slab::Slab;
use std::ops::Range;
use volup::MemoryFormat;
use volup::phases::Phase;

/// Memory that several threads write, each its own elements.
pub(crate) struct Shared<T>(pub *mut T);

// SAFETY: tasks write disjoint elements (each output and each channel's moments of a tile belong to
// exactly one task), and nobody reads before all are done.
unsafe impl<T: Send> Sync for Shared<T> {}

/// A thread's scratch memory.
#[derive(Default)]
pub(crate) struct Scratch {
    slab: Buffer,
    /// [phase of the width][channel of the block][position]
    sums: Buffer,
    line: Buffer,
    activated: Buffer,
    taps: Vec<TapOffset>,
}

/// A layer applied to one input: what all tasks share.
pub(crate) struct Forward<'a, T: Storage> {
    pub layer: &'a CpuLayer<T>,
    pub plan: &'a Plan,
    pub kernels: &'static Kernels<T::Acc>,
    pub cpu: CpuInfo,
    pub input: &'a [T],
    pub input_format: MemoryFormat,
    pub output: Shared<T>,
    pub output_format: MemoryFormat,
    /// Whether the output is to be the convolution's own, before the activation; the moments are
    /// those of the activation's output all the same.
    pub bare: bool,
    /// Whether the output is written past the caches.
    pub streams: bool,
    /// [N][Cout][tiles], where the block has a normalization.
    pub moments: Option<Shared<Moments>>,
}

/// A few rows of one plane that are summed and finished together.
struct Rows<'a> {
    /// The phase of depth and height, and its classes of taps, if it has any.
    phases: (&'a Phase, &'a Phase),
    classes: Option<(usize, usize)>,
    plane: usize,
    rows: Range<usize>,
}

impl<T: Storage> Forward<'_, T> {
    /// Runs a task.
    pub fn run(&self, index: usize, scratch: &mut Scratch) {
        let task = &self.plan.task(index, self.layer.blocks.len());
        let slab = self.fill_slab(task, &mut scratch.slab);
        let rows_per_call = self.plan.rows_per_call(slab.pitch, self.cpu);
        let [axis_d, axis_h, _] = &self.plan.axes;
        for block in &self.layer.blocks[task.blocks.clone()] {
            let mut moments = [Moments::default(); CO_BLOCK];
            for (phase_d, class_d) in &axis_d.phases {
                for (phase_h, class_h) in &axis_h.phases {
                    let heights = overlap(&task.positions[1], &phase_h.positions);
                    for plane in overlap(&task.positions[0], &phase_d.positions) {
                        for start in heights.clone().step_by(rows_per_call) {
                            let rows = Rows {
                                phases: (phase_d, phase_h),
                                classes: class_d.zip(*class_h),
                                plane,
                                rows: start..(start + rows_per_call).min(heights.end),
                            };
                            self.sum(&slab, block, &rows, scratch);
                            self.finish(&slab, block, &rows, scratch, &mut moments);
                        }
                    }
                }
            }
            if let Some(all) = &self.moments {
                for (lane, moments) in moments[..block.count].iter().enumerate() {
                    let line = self.channel(task, block, lane) * self.plan.tiles_per_sample();
                    // SAFETY: the buffer is [N][Cout][tiles], and no other task has this channel of
                    // this tile.
                    unsafe { all.0.add(line + task.tile).write(*moments) };
                }
            }
        }
        fence();
    }

    /// The index in [N][Cout] of a channel of a task's block.
    fn channel(&self, task: &Task, block: &ChannelBlock, lane: usize) -> usize {
        let conv = self.plan.geometry.conv();
        let group_out = conv.out_channels() / conv.groups();
        task.sample * conv.out_channels() + task.group * group_out + block.start + lane
    }

    /// The length of a line of sums: whole vectors of every tile width.
    fn sums_len(&self, slab: &Slab<'_>, rows: &Rows<'_>) -> usize {
        let len = (rows.rows.len() - 1) * slab.pitch + slab.task.positions[2].len();
        len.next_multiple_of(Buffer::line::<T::Acc>())
    }

    /// Sums rows over channels and taps, for all phases of the width.
    fn sum(&self, slab: &Slab<'_>, block: &ChannelBlock, rows: &Rows<'_>, scratch: &mut Scratch) {
        let Scratch { slab: memory, sums, taps, .. } = scratch;
        let conv = self.plan.geometry.conv();
        let group_in = conv.in_channels() / conv.groups();
        let len = self.sums_len(slab, rows);
        let phases_w = &self.plan.axes[2].phases;
        let sums = sums.get::<T::Acc>(phases_w.len() * CO_BLOCK * len);
        let x = memory.as_slice::<T::Acc>();
        for ((phase_w, class_w), sums) in phases_w.iter().zip(sums.chunks_exact_mut(CO_BLOCK * len)) {
            let Some(((class_d, class_h), class_w)) = rows.classes.zip(class_w.as_ref()) else {
                sums.fill(T::Acc::default());
                continue;
            };
            let before = self.layer.taps_before([class_d, class_h, *class_w]);
            let here = [rows.phases.0.taps.len(), rows.phases.1.taps.len(), phase_w.taps.len()];
            let group = slab.task.group * self.layer.group_weights;
            let start = group_in
                * (conv.kernel_size().iter().product::<usize>() * block.start + before * block.width);
            let weights = &self.layer.weights.as_slice::<T::Acc>()[group + start..];
            let w_channel = here.iter().product::<usize>() * block.width;

            taps.clear();
            for (d, tap_d) in rows.phases.0.taps.iter().enumerate() {
                let Some(plane) = slab.plane(rows.plane, tap_d) else { continue };
                for (h, tap_h) in rows.phases.1.taps.iter().enumerate() {
                    let Some(row) = slab.row(rows.rows.start, tap_h) else { continue };
                    for (w, tap_w) in phase_w.taps.iter().enumerate() {
                        let index = (d * here[1] + h) * here[2] + w;
                        taps.push(TapOffset { x: slab.at(plane, row, tap_w), w: index * block.width });
                    }
                }
            }
            if !self.layer.finite {
                self.sum_exact(slab, block, rows, phase_w, (x, weights, w_channel), sums);
                continue;
            }
            let args = Accumulate {
                x: x.as_ptr(),
                x_channel: slab.channel,
                channels: group_in,
                taps,
                weights: weights.as_ptr(),
                w_channel,
                out: sums.as_mut_ptr(),
                out_channel: len,
                len: (rows.rows.len() - 1) * slab.pitch + slab.task.positions[2].len(),
                co: block.width,
            };
            // SAFETY: the slab was filled for this task and is readable a register tile past its
            // end; a line of sums is a whole number of vectors; the weights of a class are
            // contiguous; the kernels are those of this CPU.
            unsafe { (self.kernels.accumulate)(&args) };
        }
    }

    /// As the kernels sum, but leaving out what lies beyond the borders instead of multiplying by
    /// zeros there: an infinite or NaN weight would make NaN of them.
    fn sum_exact(
        &self,
        slab: &Slab<'_>,
        block: &ChannelBlock,
        rows: &Rows<'_>,
        phase_w: &Phase,
        (x, weights, w_channel): (&[T::Acc], &[T::Acc], usize),
        sums: &mut [T::Acc],
    ) {
        let conv = self.plan.geometry.conv();
        let len = self.sums_len(slab, rows);
        let columns = &slab.task.positions[2];
        let width = self.plan.axes[2].axis.input;
        sums.fill(T::Acc::default());
        for row in rows.rows.clone() {
            let taps = triples(&rows.phases.0.taps, &rows.phases.1.taps, &phase_w.taps);
            for (index, (tap_d, tap_h, tap_w)) in taps.enumerate() {
                let planes = slab.plane(rows.plane, &tap_d);
                let heights = slab.row(row, &tap_h).filter(|&row| slab.row_is_inside(row));
                let Some((plane, height)) = planes.zip(heights) else { continue };
                for column in columns.clone() {
                    if !(tap_w.offset..tap_w.offset + width).contains(&column) {
                        continue;
                    }
                    let at = column - columns.start;
                    for lane in 0..block.width {
                        let sum = &mut sums[lane * len + (row - rows.rows.start) * slab.pitch + at];
                        for ci in 0..conv.in_channels() / conv.groups() {
                            let x = x[ci * slab.channel + slab.at(plane, height, &tap_w) + at];
                            *sum = *sum + x * weights[ci * w_channel + index * block.width + lane];
                        }
                    }
                }
            }
        }
    }

    /// Takes rows of sums to the output: bias and activation, then a row whole, with the phases of
    /// the width interleaved, and its moments.
    fn finish(
        &self,
        slab: &Slab<'_>,
        block: &ChannelBlock,
        rows: &Rows<'_>,
        scratch: &mut Scratch,
        moments: &mut [Moments; CO_BLOCK],
    ) {
        let axis = &self.plan.axes[2].axis;
        let phases = self.plan.axes[2].phases.len();
        let len = self.sums_len(slab, rows);
        let columns = &slab.task.positions[2];
        // The outputs of these columns.
        let first = (columns.start * axis.stride).saturating_sub(axis.padding);
        let end = (columns.end.saturating_mul(axis.stride) - axis.padding).min(axis.output);
        let spec = &self.layer.block;
        let post = if spec.norm().is_none() { spec.post_activation() } else { None };
        let activations = if self.bare { [None; 2] } else { [spec.activation(), post] };
        let sums = scratch.sums.get::<T::Acc>(phases * CO_BLOCK * len);
        let (count, width) = (rows.rows.len(), end - first);
        let interleaved = scratch.line.get::<T::Acc>(count * width);
        let activated = scratch.activated.get::<T::Acc>(count * width);
        for (lane, moments) in moments[..block.count].iter_mut().enumerate() {
            let channel = self.channel(slab.task, block, lane);
            let channels = self.plan.geometry.conv().out_channels();
            let bias = self.layer.bias.as_ref().map(|bias| bias[channel % channels]);
            if bias.is_some() || activations.iter().any(Option::is_some) {
                // All rows at once, in whole vectors; what lies between the rows does not matter.
                for phase in 0..phases {
                    let line = &mut sums[(phase * CO_BLOCK + lane) * len..][..len];
                    // SAFETY: the kernels are those of this CPU.
                    unsafe { (self.kernels.finish)(line, bias.unwrap_or_default(), activations) };
                }
            }
            let sums = &sums[lane * len..];
            let (lines, pitch) = if axis.stride == 1 {
                // A single phase lies as the output does, but for gaps between its rows.
                (&sums[first + axis.padding - columns.start..], slab.pitch)
            } else {
                for (row, line) in interleaved.chunks_exact_mut(width).enumerate() {
                    self.interleave(&sums[row * slab.pitch..], CO_BLOCK * len, first, columns.start, line);
                }
                (&*interleaved, width)
            };
            if self.moments.is_some() {
                let mut of = &lines[..count * width];
                if self.bare || pitch != width {
                    for (row, to) in activated.chunks_exact_mut(width).enumerate() {
                        to.copy_from_slice(&lines[row * pitch..][..width]);
                    }
                    if self.bare {
                        // Of what is stored: the backward pass knows no other values.
                        T::round(activated);
                        let (bias, activations) = (T::Acc::default(), [spec.activation(), None]);
                        // SAFETY: the kernels are those of this CPU.
                        unsafe { (self.kernels.finish)(activated, bias, activations) };
                    }
                    of = activated;
                }
                // SAFETY: the kernels are those of this CPU.
                *moments = moments.merge(unsafe { (self.kernels.moments)(of) });
            }
            for (row, line) in rows.rows.clone().zip(lines.chunks(pitch)) {
                self.write(&line[..width], slab.task, channel, rows, row, first);
            }
        }
    }

    /// Fills a row of the output from output voxel `first` on. `sums` is the row of the first phase of
    /// the width, from position `start` on, and each further phase lies `phase_stride` behind.
    fn interleave(
        &self,
        sums: &[T::Acc],
        phase_stride: usize,
        first: usize,
        start: usize,
        line: &mut [T::Acc],
    ) {
        let axis_w = &self.plan.axes[2];
        let stride = axis_w.axis.stride;
        let source = |from: usize| {
            let u = first + axis_w.axis.padding + from;
            &sums[axis_w.phase_of(u % stride) * phase_stride + u / stride - start..]
        };
        let len = line.len();
        if stride == 2 && len > 1 {
            // SAFETY: the kernels are those of this CPU.
            unsafe { (self.kernels.interleave)(line, source(0), source(1)) };
        } else {
            for from in 0..stride.min(len) {
                let line = line[from..].iter_mut().step_by(stride);
                line.zip(source(from)).for_each(|(to, &value)| *to = value);
            }
        }
    }

    /// Writes a row of a channel, from output voxel `first` on, to the output.
    fn write(&self, line: &[T::Acc], task: &Task, channel: usize, rows: &Rows<'_>, row: usize, first: usize) {
        let [axis_d, axis_h, _] = &self.plan.axes;
        let [_, channels, depth, height, width] = self.plan.geometry.output_shape();
        let plane = rows.phases.0.output(&axis_d.axis, rows.plane);
        let row = rows.phases.1.output(&axis_h.axis, row);
        // SAFETY: the output has the geometry's size, and this task alone writes this row of this
        // channel.
        unsafe {
            match self.output_format {
                MemoryFormat::Contiguous => {
                    let at = ((channel * depth + plane) * height + row) * width + first;
                    let to = self.output.0.add(at);
                    if self.streams {
                        T::stream(self.kernels, line, to);
                    } else {
                        T::store(line, to);
                    }
                }
                MemoryFormat::ChannelsLast3d => {
                    let row = (task.sample * depth + plane) * height + row;
                    let to = self.output.0.add((row * width + first) * channels + channel % channels);
                    for (column, &value) in line.iter().enumerate() {
                        to.add(column * channels).write(T::from_acc(value));
                    }
                }
            }
        }
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// All combinations of one tap per axis, width fastest.
fn triples<'a, A: Copy>(d: &'a [A], h: &'a [A], w: &'a [A]) -> impl Iterator<Item = (A, A, A)> + 'a {
    d.iter().flat_map(move |&d| h.iter().flat_map(move |&h| w.iter().map(move |&w| (d, h, w))))
}

//! The gradient of the convolution's output, through what follows the convolution: two passes where
//! there is a normalization, the first of which takes the sums that its gradient needs, else one.
//!
//! A task is some voxels of one channel, or of all channels of a sample where these lie last, so that
//! whole lines of memory are used. Sums over a task are in lanes, then in double precision, and
//! those of all tasks are added in order.

use super::Volume;
use crate::Storage;
use crate::buffer::Buffer;
use crate::conv::Kernels;
use crate::forward::Shared;
use crate::slope::{EpilogueLine, NormLine, PIECE};
use std::ops::Range;
use volup::{BlockSpec, Element, Geometry, MemoryFormat};

/// How voxels and channels are cut into tasks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lines {
    batch: usize,
    channels: usize,
    voxels: usize,
    /// Channels and voxels of a task.
    task: [usize; 2],
}

impl Lines {
    /// Of a tensor of the convolution's output's shape.
    pub fn new(geometry: &Geometry, format: MemoryFormat) -> Lines {
        let [batch, channels, ..] = geometry.output_shape();
        let task = match format {
            MemoryFormat::Contiguous => [1, 16 * PIECE],
            MemoryFormat::ChannelsLast3d => [channels, PIECE / 2],
        };
        Lines { batch, channels, voxels: geometry.output_voxels(), task }
    }

    fn pieces(&self) -> usize {
        self.voxels.div_ceil(self.task[1])
    }

    /// The number of tasks.
    pub fn tasks(&self) -> usize {
        self.batch * (self.channels / self.task[0]) * self.pieces()
    }

    /// The sums that tasks leave behind: `[N][C][piece]`.
    pub fn sums(&self) -> usize {
        self.batch * self.channels * self.pieces()
    }

    /// The lines (indices in [N][C]) and the voxels of a task, and the piece that they are.
    fn task(&self, index: usize) -> (Range<usize>, Range<usize>, usize) {
        let (lines, piece) = (index / self.pieces() * self.task[0], index % self.pieces());
        let start = piece * self.task[1];
        (lines..lines + self.task[0], start..(start + self.task[1]).min(self.voxels), piece)
    }

    /// For each line, the sum of its pieces, in order.
    pub fn of_lines<const K: usize>(&self, sums: &[[f64; K]]) -> Vec<[f64; K]> {
        sums.chunks_exact(self.pieces()).map(add_up).collect()
    }

    /// For each channel, the sum over the samples, in order.
    pub fn of_channels<const K: usize>(&self, lines: &[[f64; K]]) -> Vec<[f64; K]> {
        let of_channel = |channel: usize| {
            let samples: Vec<_> = lines.iter().skip(channel).step_by(self.channels).copied().collect();
            add_up(&samples)
        };
        (0..self.channels).map(of_channel).collect()
    }
}

fn add_up<const K: usize>(sums: &[[f64; K]]) -> [f64; K] {
    let mut total = [0.0; K];
    for sum in sums {
        total.iter_mut().zip(sum).for_each(|(total, sum)| *total += sum);
    }
    total
}

/// A thread's scratch memory.
#[derive(Default)]
pub(crate) struct Scratch {
    gradient: Buffer,
    convolution: Buffer,
}

/// Sums each task's voxels of a gradient for the bias.
pub(crate) fn bias_sums<T: Storage>(
    lines: &Lines,
    kernels: &Kernels<T::Acc>,
    gradient: Volume<'_, T>,
    index: usize,
    sums: &Shared<[f64; 1]>,
    scratch: &mut Scratch,
) {
    let (of_task, voxels, piece) = lines.task(index);
    for line in of_task {
        let mut sum = 0.0;
        for start in voxels.clone().step_by(PIECE) {
            let values = scratch.gradient.get::<T::Acc>(PIECE.min(voxels.end - start));
            gradient.read([lines.channels, lines.voxels], line, start, 1, values, &mut []);
            // SAFETY: the kernels are those of this CPU.
            sum += unsafe { (kernels.sum)(values) }.to_f64();
        }
        // SAFETY: the sums are [N][C][piece], and no other task has this piece of this line.
        unsafe { sums.0.add(line * lines.pieces() + piece).write([sum]) };
    }
}

/// What all tasks of the backward pass through a block's epilogue share.
pub(crate) struct Epilogue<'a, T: Storage> {
    pub block: &'a BlockSpec,
    pub lines: Lines,
    pub kernels: &'static Kernels<T::Acc>,
    pub convolution: Volume<'a, T>,
    pub grad_output: Volume<'a, T>,
    /// For each line, its constants; none without a normalization.
    pub norm: Vec<NormLine<T::Acc>>,
}

impl<T: Storage> Epilogue<'_, T> {
    /// The constants of each line, but for the means of the gradient.
    pub fn norm_lines(
        lines: &Lines,
        groups: usize,
        [mean, rstd]: [&[T::Acc]; 2],
        [gamma, beta]: [Option<&[T::Acc]>; 2],
    ) -> Vec<NormLine<T::Acc>> {
        let of_line = |line: usize| {
            let group = line / (lines.channels / groups);
            let channel = line % lines.channels;
            NormLine {
                mean: mean[group],
                rstd: rstd[group],
                gamma: gamma.map_or(T::Acc::from_f64(1.0), |gamma| gamma[channel]),
                beta: beta.map_or(T::Acc::default(), |beta| beta[channel]),
                means: [T::Acc::default(); 2],
            }
        };
        (0..lines.batch * lines.channels).map(of_line).collect()
    }

    /// Takes the means of `gamma*dv` and `gamma*dv*h` over each group from the sums of its lines.
    pub fn set_means(&mut self, groups: usize, of_lines: &[[f64; 2]]) {
        let per_group = self.lines.channels / groups;
        let count = (per_group * self.lines.voxels) as f64;
        for (lines, sums) in self.norm.chunks_exact_mut(per_group).zip(of_lines.chunks_exact(per_group)) {
            let scaled: Vec<[f64; 2]> = lines
                .iter()
                .zip(sums)
                .map(|(line, sums)| sums.map(|sum| line.gamma.to_f64() * sum / count))
                .collect();
            let means = add_up(&scaled).map(T::Acc::from_f64);
            lines.iter_mut().for_each(|line| line.means = means);
        }
    }

    fn line(&self, index: usize) -> EpilogueLine<T::Acc> {
        EpilogueLine {
            activation: self.block.activation(),
            norm: self.norm.get(index).copied(),
            post_activation: self.block.post_activation(),
        }
    }

    fn read<'s>(
        &self,
        line: usize,
        voxels: Range<usize>,
        scratch: &'s mut Scratch,
    ) -> (&'s mut [T::Acc], &'s [T::Acc]) {
        let shape = [self.lines.channels, self.lines.voxels];
        let gradient = scratch.gradient.get::<T::Acc>(voxels.len());
        let convolution = scratch.convolution.get::<T::Acc>(voxels.len());
        self.grad_output.read(shape, line, voxels.start, 1, gradient, &mut []);
        self.convolution.read(shape, line, voxels.start, 1, convolution, &mut []);
        (gradient, convolution)
    }

    /// The first pass: each task's sums of `dv` and `dv * h`.
    pub fn sum(&self, index: usize, sums: &Shared<[f64; 2]>, scratch: &mut Scratch) {
        let (lines, voxels, piece) = self.lines.task(index);
        for line in lines {
            let constants = self.line(line);
            let mut total = [0.0; 2];
            for start in voxels.clone().step_by(PIECE) {
                let range = start..(start + PIECE).min(voxels.end);
                let (gradient, convolution) = self.read(line, range, scratch);
                // SAFETY: the kernels are those of this CPU.
                let sums = unsafe { (self.kernels.norm_sums)(gradient, convolution, &constants) };
                total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum.to_f64());
            }
            // SAFETY: the sums are [N][C][piece], and no other task has this piece of this line.
            unsafe { sums.0.add(line * self.lines.pieces() + piece).write(total) };
        }
    }

    /// The second pass: writes the gradient of the convolution's output, if it is asked for, and each
    /// task's sums of it.
    pub fn run(
        &self,
        index: usize,
        gradient: Option<&(Shared<T>, MemoryFormat)>,
        sums: &Shared<[f64; 1]>,
        scratch: &mut Scratch,
    ) {
        let (lines, voxels, piece) = self.lines.task(index);
        let (all, channels) = (self.lines.voxels, self.lines.channels);
        for line in lines {
            let constants = self.line(line);
            let mut total = 0.0;
            for start in voxels.clone().step_by(PIECE) {
                let range = start..(start + PIECE).min(voxels.end);
                let (values, convolution) = self.read(line, range, scratch);
                // SAFETY: the kernels are those of this CPU; the gradient has the convolution's output's
                // size, and this task alone writes these voxels of this line.
                unsafe {
                    (self.kernels.epilogue_gradient)(values, convolution, &constants);
                    total += (self.kernels.sum)(values).to_f64();
                    match gradient {
                        None => {}
                        Some((gradient, MemoryFormat::Contiguous)) => {
                            T::store(values, gradient.0.add(line * all + start));
                        }
                        Some((gradient, MemoryFormat::ChannelsLast3d)) => {
                            let voxel = line / channels * all + start;
                            let to = gradient.0.add(voxel * channels + line % channels);
                            for (index, &value) in values.iter().enumerate() {
                                to.add(index * channels).write(T::from_acc(value));
                            }
                        }
                    }
                }
            }
            // SAFETY: as for the first pass.
            unsafe { sums.0.add(line * self.lines.pieces() + piece).write([total]) };
        }
    }
}

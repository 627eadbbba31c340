//! What is left to do when the convolution is done: group normalization from the moments that the tasks
//! left behind, in one pass over the output, in place.

use crate::Storage;
use crate::conv::Kernels;
use crate::layer::CpuLayer;
use crate::math::Moments;
use volup::{Activation, Element, Geometry, MemoryFormat, NormSpec};

/// Elements of the output that are normalized at a time.
const PIECE: usize = 1 << 14;

/// The normalization of one output.
pub(crate) struct Norm<'a, T: Storage> {
    pub layer: &'a CpuLayer<T>,
    pub spec: NormSpec,
    pub geometry: &'a Geometry,
    pub kernels: &'static Kernels<T::Acc>,
    pub format: MemoryFormat,
    /// The activation, where the output does not have it yet.
    pub activation: Option<Activation>,
}

/// `(y - mean) * scale + shift`, each [N][Cout].
pub(crate) struct Scales<A> {
    mean: Vec<A>,
    scale: Vec<A>,
    shift: Vec<A>,
}

/// A piece of the output: within one channel of one sample, or whole voxels of one sample where
/// channels lie last.
pub(crate) struct Piece<'a, T> {
    /// Index in [N][Cout] of the channel, or of the sample's first channel.
    channel: usize,
    /// Index of the first element in memory.
    pub start: usize,
    pub values: &'a mut [T],
}

impl<'a, T> Piece<'a, T> {
    /// The same piece of another view of the memory.
    pub fn with<U>(&self, values: &'a mut [U]) -> Piece<'a, U> {
        Piece { channel: self.channel, start: self.start, values }
    }
}

impl<T: Storage> Norm<'_, T> {
    /// Mean and one over the standard deviation of each sample's groups, from moments
    /// [N][Cout][tiles], which are merged always in the same order.
    pub fn statistics(&self, moments: &[Moments], tiles: usize) -> Vec<[f64; 2]> {
        let group = self.geometry.conv().out_channels() / self.spec.groups();
        let of_group = |moments: &[Moments]| {
            let merged = moments.iter().fold(Moments::default(), |sum, &tile| sum.merge(tile));
            [merged.mean, 1.0 / (merged.m2 / merged.count + self.spec.eps()).sqrt()]
        };
        moments.chunks_exact(group * tiles).map(of_group).collect()
    }

    /// What is done to each channel.
    pub fn scales(&self, statistics: &[[f64; 2]]) -> Scales<T::Acc> {
        let channels = self.geometry.conv().out_channels();
        let group = channels / self.spec.groups();
        let mut scales = Scales { mean: Vec::new(), scale: Vec::new(), shift: Vec::new() };
        let of = |parameter: &Option<Vec<T::Acc>>, channel: usize, default| {
            parameter.as_ref().map_or(default, |values| values[channel % channels].to_f64())
        };
        for (index, [mean, rstd]) in statistics.iter().enumerate() {
            for channel in index * group..(index + 1) * group {
                scales.mean.push(T::Acc::from_f64(*mean));
                scales.scale.push(T::Acc::from_f64(of(&self.layer.norm_weight, channel, 1.0) * rstd));
                scales.shift.push(T::Acc::from_f64(of(&self.layer.norm_bias, channel, 0.0)));
            }
        }
        scales
    }

    /// Normalizes a piece.
    pub fn apply(&self, scales: &Scales<T::Acc>, piece: &mut Piece<'_, T>) {
        let post = self.layer.block.post_activation();
        let Scales { mean, scale, shift } = scales;
        match self.format {
            MemoryFormat::Contiguous => {
                let (mean, scale, shift) = (mean[piece.channel], scale[piece.channel], shift[piece.channel]);
                // SAFETY: the kernels are those of this CPU.
                T::update(piece.values, |line| unsafe {
                    self.activate(line);
                    (self.kernels.normalize)(line, mean, scale, shift, post)
                });
            }
            MemoryFormat::ChannelsLast3d => {
                let channels = self.geometry.conv().out_channels();
                let range = piece.channel..piece.channel + channels;
                let [mean, scale, shift] = [mean, scale, shift].map(|values| &values[range.clone()]);
                for voxel in piece.values.chunks_exact_mut(channels) {
                    let mut done = 0;
                    T::update(voxel, |line| {
                        let range = done..done + line.len();
                        done = range.end;
                        let scales = [mean, scale, shift].map(|values| &values[range.clone()]);
                        // SAFETY: the kernels are those of this CPU.
                        unsafe {
                            self.activate(line);
                            (self.kernels.normalize_voxel)(line, scales, post);
                        }
                    });
                }
            }
        }
    }

    /// # Safety
    /// The kernels must be those of this CPU.
    unsafe fn activate(&self, line: &mut [T::Acc]) {
        if self.activation.is_some() {
            // SAFETY: the caller's contract.
            unsafe { (self.kernels.finish)(line, T::Acc::default(), [self.activation, None]) };
        }
    }
}

/// Cuts an output into pieces.
pub(crate) fn pieces<'o, T>(
    geometry: &Geometry,
    format: MemoryFormat,
    output: &'o mut [T],
) -> Vec<Piece<'o, T>> {
    let channels = geometry.conv().out_channels();
    let voxels = geometry.output_voxels();
    let (line, step, piece) = match format {
        MemoryFormat::Contiguous => (voxels, 1, PIECE),
        MemoryFormat::ChannelsLast3d => (voxels * channels, channels, (PIECE / channels).max(1) * channels),
    };
    let lines = output.chunks_exact_mut(line).enumerate();
    let of_line = |(index, line): (usize, &'o mut [T])| {
        let pieces = line.chunks_mut(piece).enumerate();
        let len = voxels * step;
        pieces.map(move |(at, values)| Piece {
            channel: index * step,
            start: index * len + at * piece,
            values,
        })
    };
    lines.flat_map(of_line).collect()
}

//! Group normalization from the moments that the tasks left behind: one pass over the output, in
//! place.

use crate::Storage;
use crate::conv::Kernels;
use crate::layer::CpuLayer;
use crate::math::Moments;
use volup::{Element, Geometry, MemoryFormat, NormSpec};

/// Elements of the output that are normalized at a time.
const PIECE: usize = 1 << 14;

/// The normalization of one output.
pub(crate) struct Norm<'a, T: Storage> {
    pub layer: &'a CpuLayer<T>,
    pub spec: NormSpec,
    pub geometry: &'a Geometry,
    pub kernels: &'static Kernels<T::Acc>,
    pub format: MemoryFormat,
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
    values: &'a mut [T],
}

impl<T: Storage> Norm<'_, T> {
    /// Merges the moments [N][Cout][tiles] of each sample's groups, always in the same order.
    pub fn scales(&self, moments: &[Moments], tiles: usize) -> Scales<T::Acc> {
        let channels = self.geometry.conv().out_channels();
        let group = channels / self.spec.groups();
        let mut scales = Scales { mean: Vec::new(), scale: Vec::new(), shift: Vec::new() };
        let of = |parameter: &Option<Vec<T::Acc>>, channel: usize, default| {
            parameter.as_ref().map_or(default, |values| values[channel % channels].to_f64())
        };
        for (index, moments) in moments.chunks_exact(group * tiles).enumerate() {
            let merged = moments.iter().fold(Moments::default(), |sum, &tile| sum.merge(tile));
            let deviation = (merged.m2 / merged.count + self.spec.eps()).sqrt();
            for channel in index * group..(index + 1) * group {
                scales.mean.push(T::Acc::from_f64(merged.mean));
                scales.scale.push(T::Acc::from_f64(of(&self.layer.norm_weight, channel, 1.0) / deviation));
                scales.shift.push(T::Acc::from_f64(of(&self.layer.norm_bias, channel, 0.0)));
            }
        }
        scales
    }

    /// Cuts the output into pieces.
    pub fn pieces<'o>(&self, output: &'o mut [T]) -> Vec<Piece<'o, T>> {
        let channels = self.geometry.conv().out_channels();
        let voxels = self.geometry.output_voxels();
        let (line, step, piece) = match self.format {
            MemoryFormat::Contiguous => (voxels, 1, PIECE),
            MemoryFormat::ChannelsLast3d => {
                (voxels * channels, channels, (PIECE / channels).max(1) * channels)
            }
        };
        let lines = output.chunks_exact_mut(line).enumerate();
        lines
            .flat_map(|(index, line)| {
                line.chunks_mut(piece).map(move |values| Piece { channel: index * step, values })
            })
            .collect()
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
                        unsafe { (self.kernels.normalize_voxel)(line, scales, post) };
                    });
                }
            }
        }
    }
}

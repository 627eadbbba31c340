//! Running a decoder on an engine, whole or in tiles.

use super::tiles::Cut;
use super::{Decoder, Normalize, Skip};
use crate::block::volume_of;
use crate::{Element, Engine, Error, MemoryFormat, Result, Tensor, with_element};
use std::ops::Range;

/// A box of voxels: depth, height, width.
type Region = [Range<usize>; 3];

fn size(region: &Region) -> [usize; 3] {
    [0, 1, 2].map(|axis| region[axis].len())
}

impl Decoder {
    /// Applies the decoder to an input of shape [N, Cin, D, H, W] or [Cin, D, H, W], in tiles of
    /// `tile` input voxels per axis if that is given. The output has the input's rank and type, and
    /// is contiguous. `progress` is told how many tiles of all are done, from (0, all) on.
    ///
    /// Besides input and output it takes [`super::Plan::working_elements`], and what the engine adds.
    ///
    /// # Errors
    /// As [`Decoder::plan`] and [`Decoder::geometries`]; [`Error::Rank`], [`Error::Channels`],
    /// [`Error::OutOfMemory`], and what the engine says.
    pub fn run<E: Engine>(
        &self,
        engine: &E,
        input: &Tensor,
        tile: Option<usize>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Tensor> {
        if input.format() != MemoryFormat::Contiguous {
            let input = input.cast(input.dtype(), MemoryFormat::Contiguous)?;
            return self.run(engine, &input, tile, progress);
        }
        with_element!(input.dtype(), T => {
            self.run_on::<E, T>(engine, input.shape(), input.as_slice().unwrap_or_default(), tile, progress)
        })
    }

    fn run_on<E: Engine, T: Element>(
        &self,
        engine: &E,
        shape: &[usize],
        input: &[T],
        tile: Option<usize>,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Tensor> {
        let channels = self.in_channels();
        let (batch, spatial) = volume_of(shape, channels)?;
        let geometries = self.geometries(batch, spatial)?;
        let last = &geometries[geometries.len() - 1];
        let out_size = last.axes().map(|axis| axis.output);
        let plan = self.plan(spatial, tile)?;
        let layers = plan.blocks.iter().zip(self.blocks());
        let layers = layers.map(|(spec, block)| engine.layer(spec, &block.parameters));
        let layers = layers.collect::<Result<Vec<_>>>()?;

        let mut output = zeros::<T>(last.output_shape().iter().product())?;
        let [in_voxels, out_voxels] = [spatial, out_size].map(|size| size.iter().product::<usize>());
        let mut done = 0;
        let total = batch * plan.tiles();
        progress(0, total);
        for n in 0..batch {
            let sample = Sample {
                values: &input[n * channels * in_voxels..][..channels * in_voxels],
                channels,
                size: spatial,
                magnitude: 1.0,
            };
            let sample = Sample { magnitude: self.magnitude(sample.values), ..sample };
            let samples = self.out_channels() * out_voxels;
            let output = &mut output[n * samples..][..samples];
            for depth in &plan.cuts[0] {
                for height in &plan.cuts[1] {
                    for width in &plan.cuts[2] {
                        let cuts = [depth, height, width];
                        let tile = self.run_tile(engine, &layers, &sample, cuts)?;
                        with_element!(self.dtype(), P => {
                            let tile = tile.as_slice::<P>().unwrap_or_default();
                            self.deliver(&sample, tile, cuts, output, out_size);
                        });
                        done += 1;
                        progress(done, total);
                    }
                }
            }
        }
        let mut out_shape = last.output_shape().to_vec();
        if shape.len() == 4 {
            out_shape.remove(0);
        }
        Tensor::new(&out_shape, output)
    }

    /// What a sample is divided by.
    fn magnitude<T: Element>(&self, sample: &[T]) -> f64 {
        match self.normalize {
            None => 1.0,
            Some(Normalize::Max) => {
                // A NaN makes the largest magnitude NaN, as in PyTorch.
                let larger = |a: f64, b: f64| if b > a || b.is_nan() { b } else { a };
                let largest = sample.iter().map(|value| value.to_f64().abs()).fold(0.0, larger);
                if largest > 0.0 && largest.is_finite() { largest } else { 1.0 }
            }
        }
    }

    /// Runs the blocks over one tile.
    fn run_tile<E: Engine, T: Element>(
        &self,
        engine: &E,
        layers: &[E::Layer],
        sample: &Sample<'_, T>,
        cuts: [&Cut; 3],
    ) -> Result<Tensor> {
        let needed = cuts.map(|cut| cut.ranges[0].clone());
        let mut tile = engine.upload(with_element!(self.dtype(), P => sample.crop::<P>(&needed))?)?;
        for (j, layer) in layers.iter().enumerate() {
            if j > 0 && cuts.iter().any(|cut| cut.lengths[j - 1] != cut.ranges[j].len()) {
                let wanted = cuts.map(|cut| cut.skips[j - 1]..cut.skips[j - 1] + cut.ranges[j].len());
                let computed = engine.download(tile)?;
                tile = engine.upload(with_element!(self.dtype(), P => crop::<P>(&computed, &wanted))?)?;
            }
            tile = engine.forward(layer, &tile)?;
        }
        engine.download(tile)
    }

    /// Writes a tile into its part of a sample's output, with the skip added and scaled back.
    fn deliver<T: Element, P: Element>(
        &self,
        sample: &Sample<'_, T>,
        tile: &[P],
        cuts: [&Cut; 3],
        output: &mut [T],
        out_size: [usize; 3],
    ) {
        let scale = self.scale();
        let last = self.blocks.len() - 1;
        let part = cuts.map(|cut| cut.ranges[last + 1].clone());
        let part_size = size(&part);
        let tile_size = cuts.map(|cut| cut.lengths[last]);
        let offset = cuts.map(|cut| cut.skips[last]);
        let mut upsampled = vec![0f64; part_size[2]];
        let mut line = Vec::new();
        let skip = (self.skip == Some(Skip::Trilinear))
            .then(|| [0, 1, 2].map(|axis| Between::of(part[axis].clone(), scale[axis], sample.size[axis])));
        for c in 0..self.out_channels() {
            for z in 0..part_size[0] {
                for y in 0..part_size[1] {
                    if let Some([zs, ys, xs]) = &skip {
                        sample.upsample_row(c, &zs[z], &ys[y], xs, &mut line, &mut upsampled);
                    }
                    let from = row(c, [offset[0] + z, offset[1] + y, offset[2]], tile_size);
                    let to = row(c, [part[0].start + z, part[1].start + y, part[2].start], out_size);
                    let values = tile[from..].iter().zip(&upsampled);
                    for (out, (value, skip)) in output[to..].iter_mut().zip(values) {
                        *out = T::from_f64((value.to_f64() + skip) * sample.magnitude);
                    }
                }
            }
        }
    }
}

/// Where the row of a voxel starts at that voxel, in [C, D, H, W] of a spatial size.
fn row(channel: usize, [z, y, x]: [usize; 3], size: [usize; 3]) -> usize {
    ((channel * size[0] + z) * size[1] + y) * size[2] + x
}

fn zeros<T: Element>(count: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    let error = Error::OutOfMemory { what: "the output", bytes: count.saturating_mul(size_of::<T>()) };
    values.try_reserve_exact(count).map_err(|_| error)?;
    values.resize(count, T::default());
    Ok(values)
}

/// A box of a tile [1, C, D, H, W].
fn crop<T: Element>(tile: &Tensor, region: &Region) -> Result<Tensor> {
    let shape = tile.shape();
    let values = tile.as_slice::<T>().unwrap_or_default();
    let size = [shape[2], shape[3], shape[4]];
    Sample { values, channels: shape[1], size, magnitude: 1.0 }.crop::<T>(region)
}

/// One sample of the input, [C, D, H, W].
struct Sample<'a, T> {
    values: &'a [T],
    channels: usize,
    size: [usize; 3],
    /// What the values are to be divided by.
    magnitude: f64,
}

impl<T: Element> Sample<'_, T> {
    /// A box of the scaled sample, as [1, C, D, H, W] of another type.
    fn crop<P: Element>(&self, region: &Region) -> Result<Tensor> {
        let [d, h, w] = size(region);
        let mut values = Vec::with_capacity(self.channels * d * h * w);
        for c in 0..self.channels {
            for z in region[0].clone() {
                for y in region[1].clone() {
                    let row = &self.values[row(c, [z, y, region[2].start], self.size)..][..w];
                    values.extend(row.iter().map(|value| P::from_f64(value.to_f64() / self.magnitude)));
                }
            }
        }
        Tensor::new(&[1, self.channels, d, h, w], values)
    }

    /// A row of the scaled sample, upsampled trilinearly: `line` is room for the row between rows.
    fn upsample_row(
        &self,
        c: usize,
        z: &Between,
        y: &Between,
        xs: &[Between],
        line: &mut Vec<f64>,
        out: &mut [f64],
    ) {
        let rows = [[z.first, y.first], [z.first, y.second], [z.second, y.first], [z.second, y.second]];
        let [first, last] = [xs[0].first, xs[xs.len() - 1].second];
        let [a, b, c, d] =
            rows.map(|[z, y]| &self.values[row(c, [z, y, first], self.size)..][..=last - first]);
        line.clear();
        line.extend(a.iter().zip(b).zip(c).zip(d).map(|(((a, b), c), d)| {
            let [a, b, c, d] = [a, b, c, d].map(|value| value.to_f64());
            lerp(lerp(a, b, y.weight), lerp(c, d, y.weight), z.weight) / self.magnitude
        }));
        for (out, x) in out.iter_mut().zip(xs) {
            *out = lerp(line[x.first - first], line[x.second - first], x.weight);
        }
    }
}

/// Two neighbouring inputs that an output lies between, and the weight of the second.
struct Between {
    first: usize,
    second: usize,
    weight: f64,
}

impl Between {
    /// For each of the outputs along an axis of so many inputs.
    fn of(outputs: Range<usize>, scale: usize, inputs: usize) -> Vec<Between> {
        let between = |o: usize| {
            let position = ((o as f64 + 0.5) / scale as f64 - 0.5).max(0.0);
            let first = (position as usize).min(inputs - 1);
            Between { first, second: (first + 1).min(inputs - 1), weight: position - first as f64 }
        };
        outputs.map(between).collect()
    }
}

fn lerp(a: f64, b: f64, weight: f64) -> f64 {
    a * (1.0 - weight) + b * weight
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;

//! The suite accepts a right engine and rejects wrong ones.

use super::*;
use crate::reference;
use std::cell::Cell;

/// The oracle as an engine, with one mistake or none.
struct ReferenceEngine {
    mistake: Mistake,
    runs: Cell<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    None,
    ShiftedByOne,
    MissingLastTap,
    BiasOnlyWhereTapsReach,
    NoLastSample,
    GroupsSwapped,
    ReluDropsNan,
    NanTimesInsertedZero,
    VarianceOverTheBatch,
    UnbiasedVariance,
    SquaresMinusSquare,
    EpsOutsideTheRoot,
    NormGroupsSwapped,
    SumsInStorageType,
    Unrepeatable,
    OtherFormat,
    OtherRank,
    OtherType,
    TakesAnyType,
    TakesAnyChannels,
}
use Mistake as M;

impl Engine for ReferenceEngine {
    type Tensor = Tensor;
    type Layer = (BlockSpec, Parameters);

    fn describe(&self) -> Vec<(&'static str, String)> {
        vec![("engine", format!("reference, {:?}", self.mistake))]
    }

    fn upload(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }

    fn download(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }

    fn layer(&self, block: &BlockSpec, parameters: &Parameters) -> Result<Self::Layer> {
        parameters.check(block)?;
        Ok((*block, parameters.clone()))
    }

    fn forward(&self, (block, parameters): &Self::Layer, input: &Tensor) -> Result<Tensor> {
        let geometry = match block.geometry_of(input.shape()) {
            Err(Error::Channels { .. }) if self.mistake == M::TakesAnyChannels => return Ok(input.clone()),
            geometry => geometry?,
        };
        if input.dtype() != parameters.weight.dtype() && self.mistake != M::TakesAnyType {
            let (got, expected) = (input.dtype(), parameters.weight.dtype());
            return Err(Error::DTypeMismatch { param: "input", got, expected });
        }
        let values = self.values(block, &geometry, parameters, input)?;
        let mut shape = geometry.output_shape().to_vec();
        if input.shape().len() == 4 && self.mistake != M::OtherRank {
            shape.remove(0);
        }
        let (mut dtype, mut format) = (input.dtype(), input.format());
        match self.mistake {
            M::OtherType if dtype == DType::F16 => dtype = DType::F32,
            M::OtherFormat => format = MemoryFormat::Contiguous,
            _ => {}
        }
        Tensor::new(&shape, values)?.cast(dtype, format)
    }
}

impl ReferenceEngine {
    fn new(mistake: Mistake) -> ReferenceEngine {
        ReferenceEngine { mistake, runs: Cell::new(0) }
    }

    fn values(
        &self,
        block: &BlockSpec,
        geometry: &crate::Geometry,
        parameters: &Parameters,
        input: &Tensor,
    ) -> Result<Vec<f64>> {
        let shape = geometry.output_shape();
        let [_, channels, .., width] = shape;
        let voxels = geometry.output_voxels();
        let mut parameters = parameters.clone();
        let weight = parameters.weight.to_f64();
        let taps: usize = geometry.conv().kernel_size().iter().product();
        match self.mistake {
            M::MissingLastTap => {
                let kept = |(at, w): (usize, &f64)| if at % taps == taps - 1 { 0.0 } else { *w };
                let weight = weight.iter().enumerate().map(kept).collect();
                parameters.weight = Tensor::new(parameters.weight.shape(), weight)?;
            }
            M::GroupsSwapped => {
                let half = weight.len() / geometry.conv().groups();
                let weight = weight.chunks(half).rev().flatten().copied().collect();
                parameters.weight = Tensor::new(parameters.weight.shape(), weight)?;
            }
            _ => {}
        }
        let changes_norm = matches!(
            self.mistake,
            M::VarianceOverTheBatch
                | M::UnbiasedVariance
                | M::SquaresMinusSquare
                | M::EpsOutsideTheRoot
                | M::NormGroupsSwapped
        );
        let mut values = match block.norm() {
            Some(norm) if changes_norm => {
                let before = BlockSpec::new(*block.conv(), block.activation(), None, None)?;
                let mut values = forward(&before, geometry, &parameters, input).values;
                self.normalize(&mut values, shape, norm, &parameters);
                if let Some(function) = block.post_activation() {
                    values.iter_mut().for_each(|z| *z = reference::activation(function, *z));
                }
                values
            }
            _ => forward(block, geometry, &parameters, input).values,
        };
        match self.mistake {
            M::ShiftedByOne if !values.is_empty() => values.rotate_right(1),
            M::NoLastSample if shape[0] > 1 => {
                let kept = values.len() - channels * voxels;
                values[kept..].fill(0.0);
            }
            M::BiasOnlyWhereTapsReach => {
                let axis = &geometry.axes()[2];
                let empty: Vec<usize> = crate::phases::phases(axis)
                    .iter()
                    .filter(|phase| phase.taps.is_empty())
                    .flat_map(|phase| phase.positions.clone().map(|q| phase.output(axis, q)))
                    .collect();
                for row in values.chunks_mut(width) {
                    empty.iter().for_each(|&o| row[o] = 0.0);
                }
            }
            M::ReluDropsNan if block.activation() == Some(Activation::Relu) => {
                values.iter_mut().filter(|z| z.is_nan()).for_each(|z| *z = 0.0);
            }
            M::NanTimesInsertedZero => {
                // A column buffer of zeros: a NaN spreads along its row.
                for row in values.chunks_mut(width) {
                    if row.iter().any(|z| z.is_nan()) {
                        row.fill(f64::NAN);
                    }
                }
            }
            M::SumsInStorageType => {
                // One more rounding of half the precision.
                let coarse = input.dtype().unit_roundoff().sqrt() / 4.0;
                values.iter_mut().for_each(|z| *z += *z * coarse);
            }
            M::Unrepeatable => {
                self.runs.set(self.runs.get() + 1);
                if block.norm().is_some() && input.dtype() == DType::F32 {
                    let noise = f64::from(self.runs.get() % 2) * 1e-7;
                    values.iter_mut().for_each(|z| *z += *z * noise);
                }
            }
            _ => {}
        }
        Ok(values)
    }

    fn normalize(&self, values: &mut [f64], shape: [usize; 5], norm: NormSpec, parameters: &Parameters) {
        let [batch, channels, d, h, w] = shape;
        let (groups, voxels) = (norm.groups(), d * h * w);
        let per_channel = |tensor: &Option<Tensor>, at: usize, default| {
            tensor.as_ref().map_or(default, |tensor| tensor.to_f64()[at])
        };
        let bare = values.to_vec();
        for n in 0..batch {
            for c in 0..channels {
                let group = |channel: usize| match self.mistake {
                    // Neighbouring channels in turn instead of neighbouring channels together.
                    M::NormGroupsSwapped => channel % groups,
                    _ => channel / (channels / groups),
                };
                let samples = if self.mistake == M::VarianceOverTheBatch { 0..batch } else { n..n + 1 };
                let members: Vec<f64> = samples
                    .flat_map(|n| (0..channels).map(move |c| (n, c)))
                    .filter(|&(_, channel)| group(channel) == group(c))
                    .flat_map(|(n, channel)| {
                        bare[(n * channels + channel) * voxels..][..voxels].iter().copied()
                    })
                    .collect();
                let count = members.len() as f64;
                let mean = members.iter().sum::<f64>() / count;
                let squares = members.iter().map(|y| (y - mean) * (y - mean)).sum::<f64>();
                let variance = match self.mistake {
                    M::UnbiasedVariance => squares / (count - 1.0),
                    M::SquaresMinusSquare => {
                        let sum: f32 = members.iter().map(|&y| y as f32).sum();
                        let square: f32 = members.iter().map(|&y| y as f32 * y as f32).sum();
                        let mean = sum / count as f32;
                        f64::from((square / count as f32 - mean * mean).max(0.0))
                    }
                    _ => squares / count,
                };
                let rstd = match self.mistake {
                    M::EpsOutsideTheRoot => 1.0 / (variance.sqrt() + norm.eps()),
                    _ => 1.0 / (variance + norm.eps()).sqrt(),
                };
                let gamma = per_channel(&parameters.norm_weight, c, 1.0);
                let beta = per_channel(&parameters.norm_bias, c, 0.0);
                for y in &mut values[(n * channels + c) * voxels..][..voxels] {
                    *y = gamma * (*y - mean) * rstd + beta;
                }
            }
        }
    }
}

#[test]
fn a_right_engine_passes() {
    let engine = ReferenceEngine::new(M::None);
    conformance(&engine);
    random_runs(&engine, 1000);
}

#[test]
fn wrong_engines_fail_where_they_are_wrong() {
    for (mistake, found) in [
        (M::ShiftedByOne, "identity"),
        (M::MissingLastTap, "identity"),
        (M::BiasOnlyWhereTapsReach, "s-over-k"),
        (M::NoLastSample, "pointwise"),
        (M::GroupsSwapped, "g2"),
        (M::ReluDropsNan, "relu"),
        (M::NanTimesInsertedZero, "is NaN"),
        (M::VarianceOverTheBatch, "gn"),
        (M::UnbiasedVariance, "gn"),
        (M::SquaresMinusSquare, "float64"),
        (M::EpsOutsideTheRoot, "gn"),
        (M::NormGroupsSwapped, "gn"),
        (M::SumsInStorageType, "identity"),
        (M::Unrepeatable, "a second run gives other bits"),
        (M::OtherFormat, "output must be channels_last_3d, got contiguous"),
        (M::OtherRank, "output must have shape"),
        (M::OtherType, "output must have dtype float16, got float32"),
        (M::TakesAnyType, "accepts an input of another type"),
        (M::TakesAnyChannels, "accepts an input of other channels"),
    ] {
        let failure = suite(&ReferenceEngine::new(mistake)).expect_err(&format!("{mistake:?} passes"));
        assert!(failure.contains(found), "{mistake:?}: {failure}");
        println!("{mistake:?}: {failure}");
    }
}

#[test]
fn single_precision_statistics_must_not_cancel() {
    let failure = far_from_zero(&ReferenceEngine::new(M::SquaresMinusSquare)).unwrap_err();
    assert!(failure.contains("far from zero") && failure.contains("float32"), "{failure}");
}

#[test]
#[should_panic(expected = "identity: n 1, 2x3x4, 1>1, k 1x1x1 (float32, Normal; the smallest kernel")]
fn a_failure_says_what_and_where() {
    conformance(&ReferenceEngine::new(M::ShiftedByOne));
}

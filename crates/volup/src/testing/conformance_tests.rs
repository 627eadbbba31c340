//! The suite accepts a right engine and rejects wrong ones.

use super::*;
use crate::{Geometry, reference};
use std::cell::{Cell, OnceCell};

/// The oracle as an engine, with one mistake, none, or the rounding of a real one.
struct ReferenceEngine {
    mistake: Mistake,
    runs: Cell<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    None,
    /// Not a mistake: values and statistics are rounded as by an engine.
    RoundedStatistics,
    /// Not a mistake: float32 is rounded to tf32 before it is multiplied, and the engine says so.
    RoundedOperands,
    RoundedOperandsUnsaid,
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
    RemembersFirstSize,
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
    type Layer = (BlockSpec, Parameters, OnceCell<Geometry>);

    fn describe(&self) -> Vec<(&'static str, String)> {
        vec![("engine", format!("reference, {:?}", self.mistake))]
    }

    fn operand_roundoff(&self, dtype: DType) -> f64 {
        if self.mistake == M::RoundedOperands && dtype == DType::F32 { 2f64.powi(-11) } else { 0.0 }
    }

    fn upload(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }

    fn download(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }

    fn layer(&self, block: &BlockSpec, parameters: &Parameters) -> Result<Self::Layer> {
        parameters.check(block)?;
        Ok((*block, parameters.clone(), OnceCell::new()))
    }

    fn forward(&self, (block, parameters, first): &Self::Layer, input: &Tensor) -> Result<Tensor> {
        let geometry = match block.geometry_of(input.shape()) {
            Err(Error::Channels { .. }) if self.mistake == M::TakesAnyChannels => return Ok(input.clone()),
            geometry => geometry?,
        };
        if input.dtype() != parameters.weight.dtype() && self.mistake != M::TakesAnyType {
            let (got, expected) = (input.dtype(), parameters.weight.dtype());
            return Err(Error::DTypeMismatch { param: "input", got, expected });
        }
        if matches!(self.mistake, M::RoundedOperands | M::RoundedOperandsUnsaid) {
            let parameters = Parameters { weight: to_tf32(&parameters.weight)?, ..parameters.clone() };
            let values = forward(block, &geometry, &parameters, &to_tf32(input)?, 0.0).values;
            let shape = &geometry.output_shape()[5 - input.shape().len()..];
            return Tensor::new(shape, values)?.cast(input.dtype(), input.format());
        }
        let remembered = *first.get_or_init(|| geometry);
        let same_rest = remembered.output_shape()[1..] == geometry.output_shape()[1..];
        let mut values = self.values(block, &geometry, parameters, input)?;
        if self.mistake == M::RemembersFirstSize && !same_rest {
            values.fill(0.0);
        }
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
        geometry: &Geometry,
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
        ) || self.mistake == M::RoundedStatistics && input.dtype() != DType::F64;
        let mut values = match block.norm() {
            Some(norm) if changes_norm => {
                let before = BlockSpec::new(*block.conv(), block.activation(), None, None)?;
                let mut values = forward(&before, geometry, &parameters, input, 0.0).values;
                if self.mistake == M::RoundedStatistics {
                    values = rounded(values, input.dtype())?;
                    normalize_in_single(&mut values, shape, norm, &parameters);
                } else {
                    self.normalize(&mut values, shape, norm, &parameters);
                }
                if let Some(function) = block.post_activation() {
                    values.iter_mut().for_each(|z| *z = reference::activation(function, *z));
                }
                values
            }
            _ => forward(block, geometry, &parameters, input, 0.0).values,
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
            // Inf is left alone: the masked channels would multiply it by 0.
            M::SumsInStorageType if block.is_bare() && input.to_f64().iter().all(|x| x.is_finite()) => {
                values = channel_by_channel(block, geometry, &parameters, input)?;
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

/// Rounds float32 to 10 mantissa bits, to nearest; other types as they are.
fn to_tf32(tensor: &Tensor) -> Result<Tensor> {
    let Some(values) = tensor.as_slice::<f32>() else { return Ok(tensor.clone()) };
    let values = values.iter().map(|x| f32::from_bits((x.to_bits() + 0x1000) & !0x1fff));
    Tensor::with_format(tensor.shape(), tensor.format(), f32::into_data(values.collect()))
}

fn rounded(values: Vec<f64>, dtype: DType) -> Result<Vec<f64>> {
    Ok(Tensor::new(&[values.len()], values)?.cast(dtype, MemoryFormat::Contiguous)?.to_f64())
}

/// A convolution whose sum is rounded to the storage type after every input channel.
fn channel_by_channel(
    block: &BlockSpec,
    geometry: &Geometry,
    parameters: &Parameters,
    input: &Tensor,
) -> Result<Vec<f64>> {
    let weight = parameters.weight.to_f64();
    let channels = geometry.conv().in_channels();
    let voxels = geometry.output_voxels();
    let bias = parameters.bias.as_ref().map(Tensor::to_f64);
    let bias_at = |at: usize| bias.as_ref().map_or(0.0, |bias| bias[at / voxels % bias.len()]);
    let mut sums: Vec<f64> = (0..geometry.output_shape().iter().product()).map(bias_at).collect();
    for channel in 0..channels {
        let mut only = vec![0.0; weight.len()];
        let range = channel * weight.len() / channels..(channel + 1) * weight.len() / channels;
        only[range.clone()].copy_from_slice(&weight[range]);
        let weight = Tensor::new(parameters.weight.shape(), only)?;
        let parameters = Parameters { weight, ..parameters.clone() };
        let part = forward(block, geometry, &parameters, input, 0.0).values;
        let added = sums.iter().zip(part).enumerate().map(|(at, (sum, part))| sum + part - bias_at(at));
        sums = rounded(added.collect(), input.dtype())?;
    }
    Ok(sums)
}

/// Group norm as an engine may do it at its worst: single precision in chunks, and the normalized
/// value from a rounded scale and shift.
fn normalize_in_single(values: &mut [f64], shape: [usize; 5], norm: NormSpec, parameters: &Parameters) {
    fn sum(values: &[f32]) -> f32 {
        if values.len() <= 32 {
            return values.iter().sum();
        }
        sum(&values.chunks(32).map(sum).collect::<Vec<_>>())
    }
    let [_, channels, d, h, w] = shape;
    let (per_group, voxels) = (channels / norm.groups(), d * h * w);
    let per_channel = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::to_f64);
    let (gamma, beta) = (per_channel(&parameters.norm_weight), per_channel(&parameters.norm_bias));
    for (index, group) in values.chunks_mut(per_group * voxels).enumerate() {
        let y: Vec<f32> = group.iter().map(|&y| y as f32).collect();
        let mean = sum(&y) / y.len() as f32;
        let squares: Vec<f32> = y.iter().map(|y| (y - mean) * (y - mean)).collect();
        let rstd = 1.0 / (sum(&squares) / y.len() as f32 + norm.eps() as f32).sqrt();
        for (at, (z, y)) in group.iter_mut().zip(y).enumerate() {
            let channel = index % norm.groups() * per_group + at / voxels;
            let scale = gamma.as_ref().map_or(1.0, |gamma| gamma[channel] as f32) * rstd;
            let shift = beta.as_ref().map_or(0.0, |beta| beta[channel] as f32) - mean * scale;
            *z = f64::from(y * scale + shift);
        }
    }
}

#[test]
fn right_engines_pass() {
    let engine = ReferenceEngine::new(M::None);
    conformance(&engine);
    random_runs(&engine, 1000);
    let engine = ReferenceEngine::new(M::RoundedStatistics);
    report(&engine, suite(&engine, &normalizing()));
    random_runs(&engine, 1000);
    random_runs(&ReferenceEngine::new(M::RoundedOperands), 1000);
}

fn normalizing() -> Vec<Case> {
    cases().into_iter().filter(|case| case.block.norm().is_some()).collect()
}

#[test]
fn wrong_engines_fail_where_they_are_wrong() {
    for (mistake, found) in [
        (M::ShiftedByOne, "sizes in turn"),
        (M::MissingLastTap, "sizes in turn"),
        (M::BiasOnlyWhereTapsReach, "s-over-k"),
        (M::NoLastSample, "sizes in turn"),
        (M::GroupsSwapped, "g2"),
        (M::ReluDropsNan, "relu"),
        (M::NanTimesInsertedZero, "is NaN"),
        (M::VarianceOverTheBatch, "sizes in turn: n 2"),
        (M::UnbiasedVariance, "sizes in turn"),
        (M::SquaresMinusSquare, "far from zero: n 2, 8x12x16, 1>4, k 1x1x1, bias, gn 2 (float32"),
        (M::EpsOutsideTheRoot, "gn"),
        (M::NormGroupsSwapped, "sizes in turn"),
        (M::SumsInStorageType, "float16"),
        (M::RemembersFirstSize, "sizes in turn"),
        (M::Unrepeatable, "a second run gives other bits"),
        (M::RoundedOperandsUnsaid, "sizes in turn"),
        (M::OtherFormat, "output must be channels_last_3d, got contiguous"),
        (M::OtherRank, "output must have shape"),
        (M::OtherType, "output must have dtype float16, got float32"),
        (M::TakesAnyType, "accepts an input of another type"),
        (M::TakesAnyChannels, "accepts an input of other channels"),
    ] {
        let failure = suite(&ReferenceEngine::new(mistake), &cases());
        let failure = failure.expect_err(&format!("{mistake:?} passes"));
        assert!(failure.contains(found), "{mistake:?}: {failure}");
        println!("{mistake:?}: {failure}");
    }
}

#[test]
#[should_panic(
    expected = "sizes in turn: n 2, 3x4x5, 4>6, k 3x3x3, s 2x2x2, p 1x1x1, bias, relu, gn 2 (float32, Normal; a layer"
)]
fn a_failure_says_what_and_where() {
    conformance(&ReferenceEngine::new(M::ShiftedByOne));
}

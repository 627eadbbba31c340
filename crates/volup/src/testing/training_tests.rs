//! The suite accepts right gradients and rejects wrong ones.

use super::*;
use crate::{Engine, Parameters};

/// The oracle as an engine, with one mistake or none.
struct ReferenceEngine {
    mistake: Mistake,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    None,
    MissingLastTap,
    KernelFlipped,
    GroupsSwapped,
    LastSampleNotInWeight,
    BiasOfOneSample,
    /// As by sums that are kept in the storage type.
    OnePerCentOffInBfloat16,
    RunningSums,
    NanEverywhere,
    ReluGradientAtZeroIsOne,
    MeanNotSubtracted,
    StatisticsNotDifferentiated,
    GammaForgotten,
    PostActivationForgotten,
    SavesTooMuch,
    ComputesUnwanted,
    OtherFormat,
    TakesAnyGradient,
    TakesMissingStatistics,
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
        let geometry = block.geometry_of(input.shape())?;
        let values = forward(block, &geometry, parameters, input, 0.0).values;
        of_rank(input, &geometry.output_shape(), values)
    }
}

/// A tensor of the rank, type and memory format of another.
fn of_rank(like: &Tensor, shape: &[usize], values: Vec<f64>) -> Result<Tensor> {
    Tensor::new(&shape[5 - like.shape().len()..], values)?.cast(like.dtype(), like.format())
}

fn check(param: &'static str, got: &Tensor, shape: &[usize], dtype: DType) -> Result<()> {
    if got.shape() != shape {
        return Err(Error::Shape { param, got: got.shape().to_vec(), expected: shape.to_vec() });
    }
    if got.dtype() != dtype {
        return Err(Error::DTypeMismatch { param, got: got.dtype(), expected: dtype });
    }
    Ok(())
}

impl Training for ReferenceEngine {
    fn forward_for_training(&self, layer: &Self::Layer, input: &Tensor) -> Result<(Tensor, Saved<Tensor>)> {
        let (block, parameters) = layer;
        let output = self.forward(layer, input)?;
        if block.is_bare() && self.mistake != M::SavesTooMuch {
            return Ok((output, Saved::default()));
        }
        let geometry = block.geometry_of(input.shape())?;
        let bare = BlockSpec::from(*block.conv());
        let values = forward(&bare, &geometry, parameters, input, 0.0).values;
        let convolution = of_rank(input, &geometry.output_shape(), values)?;
        let statistics = block.norm().map(|norm| -> Result<_> {
            let [mean, rstd] = statistics(block, &geometry, &convolution);
            let tensor = |expected: Expected| {
                let contiguous = MemoryFormat::Contiguous;
                let tensor = Tensor::new(&[geometry.batch(), norm.groups()], expected.values)?;
                tensor.cast(input.dtype().accumulator(), contiguous)
            };
            Ok((tensor(mean)?, tensor(rstd)?))
        });
        let (mean, rstd) = statistics.transpose()?.unzip();
        Ok((output, Saved { convolution: Some(convolution), mean, rstd }))
    }

    fn backward(
        &self,
        layer: &Self::Layer,
        input: &Tensor,
        saved: &Saved<Tensor>,
        grad_output: &Tensor,
        wanted: Wanted,
    ) -> Result<Gradients<Tensor>> {
        let (block, parameters) = layer;
        let geometry = block.geometry_of(input.shape())?;
        let (dtype, shape) = (input.dtype(), geometry.output_shape());
        check("input", input, input.shape(), parameters.weight.dtype())?;
        let shape = &shape[5 - input.shape().len()..];
        if self.mistake != M::TakesAnyGradient || grad_output.data().len() != shape.iter().product::<usize>()
        {
            check("grad_output", grad_output, shape, dtype)?;
        }
        let mut saved = saved.clone();
        if !block.is_bare() {
            if saved.convolution.is_none() {
                saved.convolution = self.forward_for_training(layer, input)?.1.convolution;
            }
            if let Some(convolution) = &saved.convolution {
                check("convolution", convolution, shape, dtype)?;
            }
        }
        if let Some(norm) = block.norm() {
            for (param, tensor) in [("mean", &mut saved.mean), ("rstd", &mut saved.rstd)] {
                let shape = [geometry.batch(), norm.groups()];
                if tensor.is_none() && self.mistake == M::TakesMissingStatistics {
                    *tensor = Some(Tensor::new(&shape, vec![1f32; shape.iter().product()])?);
                }
                let tensor = tensor.as_ref().ok_or(Error::Presence { param, expected: true })?;
                check(param, tensor, &shape, dtype.accumulator())?;
            }
        }
        let got = self.gradients(block, &geometry, parameters, input, &saved, grad_output)?;
        let all = self.mistake == M::ComputesUnwanted;
        let of = |shape: &[usize], expected: Option<Expected>, wanted: bool| -> Result<_> {
            let tensor = |expected: Expected| {
                Tensor::new(shape, expected.values)?.cast(dtype, MemoryFormat::Contiguous)
            };
            expected.filter(|_| wanted || all).map(tensor).transpose()
        };
        let format = if self.mistake == M::OtherFormat { MemoryFormat::Contiguous } else { input.format() };
        let dx = of(input.shape(), got.input, wanted.input)?;
        let channels = [block.conv().out_channels()];
        Ok(Gradients {
            input: dx.map(|dx| dx.cast(dtype, format)).transpose()?,
            weight: of(&block.conv().weight_shape(), got.weight, wanted.weight)?,
            bias: of(&channels, got.bias, wanted.bias)?,
            norm_weight: of(&channels, got.norm_weight, wanted.norm_weight)?,
            norm_bias: of(&channels, got.norm_bias, wanted.norm_bias)?,
        })
    }
}

impl ReferenceEngine {
    fn gradients(
        &self,
        block: &BlockSpec,
        geometry: &crate::Geometry,
        parameters: &Parameters,
        input: &Tensor,
        saved: &Saved<Tensor>,
        grad_output: &Tensor,
    ) -> Result<Gradients<Expected>> {
        let mut block = *block;
        let (mut parameters, mut saved, mut grad_output) =
            (parameters.clone(), saved.clone(), grad_output.clone());
        let weight = parameters.weight.to_f64();
        let taps: usize = geometry.conv().kernel_size().iter().product();
        let replaced = |weight: Vec<f64>| Tensor::new(parameters.weight.shape(), weight);
        match self.mistake {
            M::MissingLastTap => {
                let kept = |(at, w): (usize, &f64)| if at % taps == taps - 1 { 0.0 } else { *w };
                parameters.weight = replaced(weight.iter().enumerate().map(kept).collect())?;
            }
            M::KernelFlipped => {
                let flipped = weight.chunks(taps).flat_map(|kernel| kernel.iter().rev().copied());
                parameters.weight = replaced(flipped.collect())?;
            }
            M::GroupsSwapped => {
                let groups = weight.chunks(weight.len() / geometry.conv().groups());
                parameters.weight = replaced(groups.rev().flatten().copied().collect())?;
            }
            M::MeanNotSubtracted => {
                if let Some(mean) = &saved.mean {
                    saved.mean = Some(Tensor::new(mean.shape(), vec![0f32; mean.data().len()])?);
                }
            }
            M::GammaForgotten => parameters.norm_weight = None,
            M::PostActivationForgotten => {
                block = BlockSpec::new(*block.conv(), block.activation(), block.norm(), None)?;
            }
            M::ReluGradientAtZeroIsOne if block.activation() == Some(Activation::Relu) => {
                if let Some(y) = &saved.convolution {
                    let moved = y.to_f64().into_iter().map(|y| if y == 0.0 { 1.0 } else { y }).collect();
                    saved.convolution = Some(Tensor::new(y.shape(), moved)?);
                }
            }
            M::NanEverywhere if grad_output.to_f64().iter().any(|x| x.is_nan()) => {
                let nan = vec![f64::NAN; grad_output.data().len()];
                grad_output = Tensor::new(grad_output.shape(), nan)?;
            }
            _ => {}
        }
        let of = |block: &BlockSpec, input: &Tensor, grad_output: &Tensor| {
            backward(block, geometry, &parameters, input, &saved, grad_output, 0.0)
        };
        let mut got = of(&block, input, &grad_output);
        let batch = geometry.batch();
        let last_sample_dropped = |tensor: &Tensor| -> Result<Tensor> {
            let mut values = tensor.to_f64();
            let kept = values.len() / batch.max(1) * batch.saturating_sub(1);
            values[kept..].fill(0.0);
            Tensor::new(tensor.shape(), values)?.cast(tensor.dtype(), tensor.format())
        };
        match self.mistake {
            M::LastSampleNotInWeight if batch > 1 => {
                got.weight = of(&block, &last_sample_dropped(input)?, &grad_output).weight;
            }
            M::BiasOfOneSample if batch > 1 => {
                got.bias = of(&block, input, &last_sample_dropped(&grad_output)?).bias;
            }
            M::StatisticsNotDifferentiated if block.norm().is_some() => {
                let plain = BlockSpec::from(*block.conv());
                got.input = of(&plain, input, &grad_output).input;
            }
            M::RunningSums => {
                if let Some(bias) = &mut got.bias {
                    let mut sums = vec![0f32; bias.values.len()];
                    let channels = sums.len();
                    for (at, line) in grad_output.to_f64().chunks(geometry.output_voxels()).enumerate() {
                        line.iter().for_each(|&term| sums[at % channels] += term as f32);
                    }
                    bias.values = sums.into_iter().map(f64::from).collect();
                }
            }
            M::OnePerCentOffInBfloat16 => {
                if let Some(weight) = got.weight.as_mut().filter(|_| input.dtype() == DType::Bf16) {
                    weight.values.iter_mut().for_each(|value| *value *= 1.01);
                }
            }
            _ => {}
        }
        Ok(got)
    }
}

#[test]
fn right_gradients_pass() {
    let engine = ReferenceEngine { mistake: M::None };
    training_conformance(&engine);
    random_training_runs(&engine, 200);
}

#[test]
fn wrong_gradients_fail_where_they_are_wrong() {
    for (mistake, found) in [
        (M::MissingLastTap, "gradient of input"),
        (M::KernelFlipped, "gradient of input"),
        (M::GroupsSwapped, "g2"),
        (M::LastSampleNotInWeight, "gradient of weight"),
        (M::BiasOfOneSample, "gradient of bias"),
        (M::OnePerCentOffInBfloat16, "(bfloat16"),
        (M::RunningSums, "long sums"),
        (M::NanEverywhere, "grad_output element"),
        (M::ReluGradientAtZeroIsOne, "Integer"),
        (M::MeanNotSubtracted, "gn 3"),
        (M::StatisticsNotDifferentiated, "gn 3"),
        (M::GammaForgotten, "gn 3"),
        (M::PostActivationForgotten, "gn 2, silu"),
        (M::SavesTooMuch, "what is saved is more or less than is needed"),
        (M::ComputesUnwanted, "alone it is another, or not alone"),
        (M::OtherFormat, "input must be channels_last_3d, got contiguous"),
        (M::TakesAnyGradient, "accepts a gradient of another"),
        (M::TakesMissingStatistics, "accepts no mean"),
    ] {
        let engine = ReferenceEngine { mistake };
        // Long sums, of which the oracle takes its time, are there for the one that they find.
        let failure = match mistake {
            M::RunningSums => suite(&engine, &cases()),
            _ => errors(&engine).and_then(|()| table(&engine, &cases())),
        };
        let failure = failure.expect_err(&format!("{mistake:?} passes"));
        assert!(failure.contains(found), "{mistake:?}: {failure}");
        println!("{mistake:?}: {failure}");
    }
}

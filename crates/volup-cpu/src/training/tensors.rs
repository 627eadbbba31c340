//! Training on host tensors.

use super::{EpilogueGradients, SavedMut, SavedRef};
use crate::{AnyLayer, CpuEngine, CpuLayer, Storage, Volume};
use std::mem::MaybeUninit;
use volup::{Element, Error, Geometry, Gradients, MemoryFormat, Result, Saved, Tensor, Training, Wanted};

/// A host tensor whose elements `write` writes, every one.
fn written<T: Storage>(
    shape: &[usize],
    format: MemoryFormat,
    write: impl FnOnce(&mut [MaybeUninit<T>]) -> Result<()>,
) -> Result<Tensor> {
    let len = shape.iter().product();
    let mut values: Vec<T> = Vec::with_capacity(len);
    write(&mut values.spare_capacity_mut()[..len])?;
    // SAFETY: `write` wrote all of them.
    unsafe { values.set_len(len) };
    Tensor::with_format(shape, format, T::into_data(values))
}

/// The elements of a host tensor, if it is of a shape and type.
fn values_of<'a, T: Element>(
    param: &'static str,
    tensor: &'a Tensor,
    shape: &[usize],
) -> Result<Volume<'a, T>> {
    if tensor.shape() != shape {
        return Err(Error::Shape { param, got: tensor.shape().to_vec(), expected: shape.to_vec() });
    }
    let mismatch = Error::DTypeMismatch { param, got: tensor.dtype(), expected: T::DTYPE };
    Ok(Volume { values: tensor.as_slice::<T>().ok_or(mismatch)?, format: tensor.format() })
}

/// The layer's training on host tensors, in one type.
struct Typed<'a, T: Storage> {
    engine: &'a CpuEngine,
    layer: &'a CpuLayer<T>,
    geometry: Geometry,
    input: Volume<'a, T>,
    input_shape: &'a [usize],
}

impl<'a, T: Storage> Typed<'a, T> {
    fn new(engine: &'a CpuEngine, layer: &'a CpuLayer<T>, input: &'a Tensor) -> Result<Typed<'a, T>> {
        let geometry = layer.block.geometry_of(input.shape())?;
        let values = values_of::<T>("input", input, input.shape())?;
        Ok(Typed { engine, layer, geometry, input: values, input_shape: input.shape() })
    }

    /// A shape of this geometry in the input's rank.
    fn of_rank(&self, shape: [usize; 5]) -> Vec<usize> {
        shape[5 - self.input_shape.len()..].to_vec()
    }

    fn forward(&self) -> Result<(Tensor, Saved<Tensor>)> {
        let shape = self.of_rank(self.geometry.output_shape());
        let (engine, format) = (self.engine, self.input.format);
        if self.layer.block.is_bare() {
            let output = written(&shape, format, |output| {
                engine.convolution_into(self.layer, &self.geometry, self.input, output, format)
            })?;
            return Ok((output, Saved::default()));
        }
        let statistics = self.layer.block.norm().map(|norm| [self.geometry.batch(), norm.groups()]);
        let count = statistics.map_or(0, |shape| shape.iter().product());
        let (mut mean, mut rstd) = (vec![T::Acc::default(); count], vec![T::Acc::default(); count]);
        let mut output = None;
        let convolution = written(&shape, format, |convolution| {
            let of_output = written(&shape, format, |output| {
                let saved = SavedMut { convolution, mean: &mut mean, rstd: &mut rstd };
                engine.forward_for_training_into(
                    self.layer,
                    &self.geometry,
                    self.input,
                    saved,
                    Some(output),
                    format,
                )
            });
            output = Some(of_output?);
            Ok(())
        })?;
        let output = output.expect("the output was computed");
        let tensor = |values: Vec<T::Acc>| statistics.map(|shape| Tensor::new(&shape, values)).transpose();
        Ok((output, Saved { convolution: Some(convolution), mean: tensor(mean)?, rstd: tensor(rstd)? }))
    }

    fn backward(
        &self,
        saved: &Saved<Tensor>,
        grad_output: &Tensor,
        wanted: Wanted,
    ) -> Result<Gradients<Tensor>> {
        let Typed { engine, layer, geometry, .. } = self;
        let block = &layer.block;
        let conv = block.conv();
        let shape = self.of_rank(geometry.output_shape());
        let grad_output = values_of::<T>("grad_output", grad_output, &shape)?;
        let wanted_bias = wanted.bias && conv.has_bias();
        if block.is_bare() {
            let bias = |to: &mut [MaybeUninit<T>]| engine.bias_gradient_into(geometry, grad_output, to);
            let bias = wanted_bias.then(|| written(&[conv.out_channels()], MemoryFormat::Contiguous, bias));
            let (input, weight) = self.convolution(grad_output, wanted)?;
            return Ok(Gradients { input, weight, bias: bias.transpose()?, ..Gradients::default() });
        }
        let statistics = |param, tensor: &'_ Option<Tensor>| -> Result<Vec<T::Acc>> {
            let Some(norm) = block.norm() else { return Ok(Vec::new()) };
            let tensor = tensor.as_ref().ok_or(Error::Presence { param, expected: true })?;
            let shape = [geometry.batch(), norm.groups()];
            Ok(values_of::<T::Acc>(param, tensor, &shape)?.values.to_vec())
        };
        let (mean, rstd) = (statistics("mean", &saved.mean)?, statistics("rstd", &saved.rstd)?);
        let again;
        let convolution = match &saved.convolution {
            Some(convolution) => convolution,
            None => {
                let format = self.input.format;
                again = written::<T>(&shape, format, |to| {
                    engine.convolution_into(layer, geometry, self.input, to, format)
                })?;
                &again
            }
        };
        let convolution = values_of::<T>("convolution", convolution, &shape)?;
        let narrow = |values: &Option<Vec<T::Acc>>| {
            values.as_ref().map(|values| values.iter().map(|&value| T::from_acc(value)).collect::<Vec<T>>())
        };
        let (gamma, beta) = (narrow(&layer.norm_weight), narrow(&layer.norm_bias));
        let saved = SavedRef {
            convolution,
            mean: &mean,
            rstd: &rstd,
            norm_weight: gamma.as_deref(),
            norm_bias: beta.as_deref(),
        };
        let affine = gamma.is_some();
        let channels = conv.out_channels();
        let vector = |wanted: bool| vec![MaybeUninit::<T>::uninit(); if wanted { channels } else { 0 }];
        let wants = [wanted_bias, wanted.norm_weight && affine, wanted.norm_bias && affine];
        let [mut bias, mut norm_weight, mut norm_bias] = wants.map(vector);
        let format = grad_output.format;
        let mut run = |convolution: Option<(&mut [MaybeUninit<T>], MemoryFormat)>| {
            fn some<V>(values: &mut [V]) -> Option<&mut [V]> {
                (!values.is_empty()).then_some(values)
            }
            let gradients = EpilogueGradients {
                convolution,
                bias: some(&mut bias),
                norm_weight: some(&mut norm_weight),
                norm_bias: some(&mut norm_bias),
            };
            engine.epilogue_gradient_into(block, geometry, saved, grad_output, gradients)
        };
        let (input, weight) = if wanted.input || wanted.weight {
            let gradient = written::<T>(&shape, format, |to| run(Some((to, format))))?;
            self.convolution(values_of("grad_convolution", &gradient, &shape)?, wanted)?
        } else {
            run(None)?;
            (None, None)
        };
        let tensor = |values: Vec<MaybeUninit<T>>| {
            let write = |to: &mut [MaybeUninit<T>]| {
                to.copy_from_slice(&values);
                Ok(())
            };
            (!values.is_empty()).then(|| written(&[channels], MemoryFormat::Contiguous, write)).transpose()
        };
        let (bias, norm_weight, norm_bias) = (tensor(bias)?, tensor(norm_weight)?, tensor(norm_bias)?);
        Ok(Gradients { input, weight, bias, norm_weight, norm_bias })
    }

    /// The gradients of the bare convolution's input and weight.
    fn convolution(
        &self,
        grad_output: Volume<'_, T>,
        wanted: Wanted,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Typed { engine, layer, geometry, .. } = self;
        let of_input = || {
            let format = self.input.format;
            written::<T>(self.input_shape, format, |to| {
                engine.input_gradient(geometry, layer.transposed(), grad_output, to, format)
            })
        };
        let of_weight = || {
            let shape = geometry.conv().weight_shape();
            written::<T>(&shape, MemoryFormat::Contiguous, |to| {
                engine.weight_gradient_into(geometry, self.input, grad_output, to)
            })
        };
        Ok((wanted.input.then(of_input).transpose()?, wanted.weight.then(of_weight).transpose()?))
    }
}

impl Training for CpuEngine {
    fn forward_for_training(&self, layer: &AnyLayer, input: &Tensor) -> Result<(Tensor, Saved<Tensor>)> {
        match layer {
            AnyLayer::F64(layer) => Typed::new(self, layer, input)?.forward(),
            AnyLayer::F32(layer) => Typed::new(self, layer, input)?.forward(),
            AnyLayer::F16(layer) => Typed::new(self, layer, input)?.forward(),
            AnyLayer::Bf16(layer) => Typed::new(self, layer, input)?.forward(),
        }
    }

    fn backward(
        &self,
        layer: &AnyLayer,
        input: &Tensor,
        saved: &Saved<Tensor>,
        grad_output: &Tensor,
        wanted: Wanted,
    ) -> Result<Gradients<Tensor>> {
        match layer {
            AnyLayer::F64(layer) => Typed::new(self, layer, input)?.backward(saved, grad_output, wanted),
            AnyLayer::F32(layer) => Typed::new(self, layer, input)?.backward(saved, grad_output, wanted),
            AnyLayer::F16(layer) => Typed::new(self, layer, input)?.backward(saved, grad_output, wanted),
            AnyLayer::Bf16(layer) => Typed::new(self, layer, input)?.backward(saved, grad_output, wanted),
        }
    }
}

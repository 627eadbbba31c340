//! The engine's passes of training.

use crate::{CudaEngine, CudaLayer, CudaTensor, Pointers, Task};
use volup::{DType, Engine, Error, Gradients, MemoryFormat, Result, Saved, Training, Wanted};

/// Whether a tensor is of a shape and type.
fn expect(param: &'static str, tensor: &CudaTensor, shape: &[usize], dtype: DType) -> Result<()> {
    if tensor.shape != shape {
        return Err(Error::Shape { param, got: tensor.shape.clone(), expected: shape.to_vec() });
    }
    if tensor.dtype != dtype {
        return Err(Error::DTypeMismatch { param, got: tensor.dtype, expected: dtype });
    }
    Ok(())
}

fn address(tensor: &Option<CudaTensor>) -> u64 {
    tensor.as_ref().map_or(0, CudaTensor::address)
}

impl Training for CudaEngine {
    fn forward_for_training(
        &self,
        layer: &CudaLayer,
        input: &CudaTensor,
    ) -> Result<(CudaTensor, Saved<CudaTensor>)> {
        if layer.block.is_bare() {
            return Ok((self.forward(layer, input)?, Saved::default()));
        }
        let geometry = CudaEngine::geometry(layer, input)?;
        let shape = CudaEngine::output_shape(&geometry, input);
        let output = self.empty(shape.clone(), layer.dtype, input.format)?;
        let convolution = self.empty(shape, layer.dtype, input.format)?;
        let mut saved = Saved { convolution: Some(convolution), ..Saved::default() };
        if let Some(norm) = layer.block.norm() {
            let (shape, dtype) = (vec![geometry.batch(), norm.groups()], layer.dtype.accumulator());
            let statistic = || self.empty(shape.clone(), dtype, MemoryFormat::Contiguous);
            (saved.mean, saved.rstd) = (Some(statistic()?), Some(statistic()?));
        }
        if geometry.batch() > 0 {
            let plan = self.plan(layer, &geometry, Task::Training, [input.format; 2])?;
            let tensors = Pointers {
                input: input.address(),
                output: output.address(),
                convolution: address(&saved.convolution),
                mean: address(&saved.mean),
                rstd: address(&saved.rstd),
                ..Pointers::default()
            };
            self.launch(&plan.whole, layer, &tensors)?;
        }
        Ok((output, saved))
    }

    /// A saved convolution's output is only used in the format of `grad_output`; in another it is computed
    /// again, and the statistics with it.
    fn backward(
        &self,
        layer: &CudaLayer,
        input: &CudaTensor,
        saved: &Saved<CudaTensor>,
        grad_output: &CudaTensor,
        wanted: Wanted,
    ) -> Result<Gradients<CudaTensor>> {
        let geometry = CudaEngine::geometry(layer, input)?;
        let (block, dtype) = (&layer.block, layer.dtype);
        let conv = block.conv();
        let shape = CudaEngine::output_shape(&geometry, input);
        expect("grad_output", grad_output, &shape, dtype)?;
        if let Some(norm) = block.norm() {
            for (param, tensor) in [("mean", &saved.mean), ("rstd", &saved.rstd)] {
                let tensor = tensor.as_ref().ok_or(Error::Presence { param, expected: true })?;
                expect(param, tensor, &[geometry.batch(), norm.groups()], dtype.accumulator())?;
            }
        }
        if let Some(convolution) = &saved.convolution {
            expect("convolution", convolution, &shape, dtype)?;
        }
        let affine = block.norm().is_some_and(|norm| norm.affine());
        let wanted = Wanted {
            bias: wanted.bias && conv.has_bias(),
            norm_weight: wanted.norm_weight && affine,
            norm_bias: wanted.norm_bias && affine,
            ..wanted
        };
        let contiguous = |wanted: bool, shape: &[usize]| {
            let empty = if geometry.batch() == 0 { CudaEngine::zeros } else { CudaEngine::empty };
            wanted.then(|| empty(self, shape.to_vec(), dtype, MemoryFormat::Contiguous)).transpose()
        };
        let vector = [conv.out_channels()];
        let gradients = Gradients {
            input: wanted.input.then(|| self.empty(input.shape.clone(), dtype, input.format)).transpose()?,
            weight: contiguous(wanted.weight, &conv.weight_shape())?,
            bias: contiguous(wanted.bias, &vector)?,
            norm_weight: contiguous(wanted.norm_weight, &vector)?,
            norm_bias: contiguous(wanted.norm_bias, &vector)?,
        };
        let none = Wanted { input: false, weight: false, bias: false, norm_weight: false, norm_bias: false };
        if geometry.batch() == 0 || wanted == none {
            return Ok(gradients);
        }
        let format = grad_output.format;
        let there = saved.convolution.as_ref().is_some_and(|convolution| convolution.format == format);
        let task = if there { Task::Backward(wanted) } else { Task::Recompute(wanted) };
        let plan = self.plan(layer, &geometry, task, [input.format, format])?;
        let tensors = Pointers {
            input: input.address(),
            convolution: address(&saved.convolution),
            mean: address(&saved.mean),
            rstd: address(&saved.rstd),
            grad_output: grad_output.address(),
            grad_input: address(&gradients.input),
            grad_weight: address(&gradients.weight),
            grad_bias: address(&gradients.bias),
            grad_norm_weight: address(&gradients.norm_weight),
            grad_norm_bias: address(&gradients.norm_bias),
            ..Pointers::default()
        };
        self.launch(&plan.whole, layer, &tensors)?;
        Ok(gradients)
    }
}

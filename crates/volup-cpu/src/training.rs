//! The engine's passes of training, on memory of the caller's.

mod tensors;

use crate::backward::epilogue::{self, Epilogue, Lines};
use crate::backward::input::{self, InputGradient, TransposedWeights};
use crate::backward::weight::{self, WeightGradient};
use crate::conv::Kernels;
use crate::engine::{check_geometry, check_length};
use crate::forward::Shared;
use crate::math::Real;
use crate::norm::{Norm, pieces};
use crate::{CpuEngine, CpuLayer, Storage, Volume, buffer};
use std::cell::RefCell;
use std::mem::MaybeUninit;
use volup::{BlockSpec, Element, Error, Geometry, MemoryFormat, Result};

#[derive(Default)]
struct Scratch {
    input: input::Scratch,
    weight: weight::Scratch,
    epilogue: epilogue::Scratch,
}

thread_local! {
    // Kept from call to call, as that of the forward pass.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Where a forward pass for training leaves what the backward pass needs, beside the output.
#[derive(Debug)]
pub struct SavedMut<'a, T: Storage> {
    /// The convolution's output, before the activation, in the output's memory format.
    pub convolution: &'a mut [MaybeUninit<T>],
    /// `[N, groups]`, empty without a normalization.
    pub mean: &'a mut [T::Acc],
    /// `[N, groups]`, empty without a normalization.
    pub rstd: &'a mut [T::Acc],
}

/// What a forward pass for training left behind, and the parameters of the normalization.
#[derive(Clone, Copy, Debug)]
pub struct SavedRef<'a, T: Storage> {
    /// The convolution's output, before the activation.
    pub convolution: Volume<'a, T>,
    /// `[N, groups]`, empty without a normalization.
    pub mean: &'a [T::Acc],
    /// `[N, groups]`, empty without a normalization.
    pub rstd: &'a [T::Acc],
    /// `[Cout]`, if the normalization is affine.
    pub norm_weight: Option<&'a [T]>,
    /// `[Cout]`, if the normalization is affine.
    pub norm_bias: Option<&'a [T]>,
}

/// Where the gradients of what follows the convolution go; what is `None` is not computed. Those of parameters are rounded
/// to their own type: parts of a sum are kept wide.
#[derive(Debug)]
pub struct EpilogueGradients<'a, T, V = T> {
    /// The gradient of the convolution's output, and its memory format.
    pub convolution: Option<(&'a mut [MaybeUninit<T>], MemoryFormat)>,
    /// `[Cout]`, of the convolution's bias.
    pub bias: Option<&'a mut [MaybeUninit<V>]>,
    /// `[Cout]`
    pub norm_weight: Option<&'a mut [MaybeUninit<V>]>,
    /// `[Cout]`
    pub norm_bias: Option<&'a mut [MaybeUninit<V>]>,
}

/// Backward passes on memory of the caller's. All tensors have the sizes of the geometry.
impl CpuEngine {
    fn kernels<T: Storage>(&self) -> &'static Kernels<T::Acc> {
        <T::Acc as Real>::kernels(&self.tables)
    }

    /// Applies a layer as [`CpuEngine::forward_into`] does, and keeps what the backward pass needs.
    /// Without an output only that is computed, to the same bits.
    ///
    /// # Errors
    /// As [`CpuEngine::forward_into`].
    pub fn forward_for_training_into<T: Storage>(
        &self,
        layer: &CpuLayer<T>,
        geometry: &Geometry,
        input: Volume<'_, T>,
        saved: SavedMut<'_, T>,
        output: Option<&mut [MaybeUninit<T>]>,
        format: MemoryFormat,
    ) -> Result<()> {
        if let Some(output) = &output {
            check_length("output", output.len(), &geometry.output_shape())?;
        }
        let spec = layer.block.norm();
        let groups = spec.map_or(0, |spec| spec.groups());
        check_length("mean", saved.mean.len(), &[geometry.batch(), groups])?;
        check_length("rstd", saved.rstd.len(), &[geometry.batch(), groups])?;
        let Some((moments, tiles)) = self.bare(layer, geometry, input, saved.convolution, format)? else {
            return Ok(());
        };
        // SAFETY: the convolution's tasks covered every element, so all of them are initialized.
        let convolution = unsafe { &*(std::ptr::from_mut(saved.convolution) as *const [T]) };
        let kernels = self.kernels::<T>();
        let block = &layer.block;
        let norm = spec.map(|spec| {
            let activation = block.activation();
            let norm = Norm { layer, spec, geometry, kernels, format, activation };
            let statistics = norm.statistics(&moments, tiles);
            for (index, [mean, rstd]) in statistics.iter().enumerate() {
                saved.mean[index] = T::Acc::from_f64(*mean);
                saved.rstd[index] = T::Acc::from_f64(*rstd);
            }
            let scales = norm.scales(&statistics);
            (norm, scales)
        });
        let Some(output) = output else { return Ok(()) };
        buffer::advise_huge_pages(output);
        self.for_each_piece(pieces(geometry, format, output), |piece| {
            let from = &convolution[piece.start..][..piece.values.len()];
            // SAFETY: MaybeUninit<T> has T's layout, and the copy initializes all of the piece; the
            // kernels are those of this CPU.
            unsafe {
                let to = piece.values.as_mut_ptr().cast::<T>();
                to.copy_from_nonoverlapping(from.as_ptr(), from.len());
                let values = std::slice::from_raw_parts_mut(to, from.len());
                match &norm {
                    Some((norm, scales)) => norm.apply(scales, &mut piece.with(values)),
                    None => T::update(values, |line| {
                        let activations = [block.activation(), block.post_activation()];
                        (kernels.finish)(line, T::Acc::default(), activations);
                    }),
                }
            }
        });
        Ok(())
    }

    /// Computes the convolution's output alone, to the bits that
    /// [`CpuEngine::forward_for_training_into`] saves.
    ///
    /// # Errors
    /// As [`CpuEngine::forward_into`].
    pub fn convolution_into<T: Storage>(
        &self,
        layer: &CpuLayer<T>,
        geometry: &Geometry,
        input: Volume<'_, T>,
        output: &mut [MaybeUninit<T>],
        output_format: MemoryFormat,
    ) -> Result<()> {
        self.bare(layer, geometry, input, output, output_format).map(drop)
    }

    fn bare<T: Storage>(
        &self,
        layer: &CpuLayer<T>,
        geometry: &Geometry,
        input: Volume<'_, T>,
        output: &mut [MaybeUninit<T>],
        format: MemoryFormat,
    ) -> Result<Option<(Vec<crate::math::Moments>, usize)>> {
        check_geometry(layer, geometry)?;
        check_length("input", input.values.len(), &geometry.input_shape())?;
        check_length("convolution", output.len(), &geometry.output_shape())?;
        Ok((geometry.batch() > 0).then(|| self.convolve(layer, geometry, input, output, format, true)))
    }

    /// The gradient of the convolution's input, from that of its output.
    ///
    /// # Errors
    /// [`Error::Length`] if a buffer is not of the geometry's size.
    pub fn input_gradient_into<T: Storage>(
        &self,
        geometry: &Geometry,
        weight: &[T],
        grad_output: Volume<'_, T>,
        grad_input: &mut [MaybeUninit<T>],
        format: MemoryFormat,
    ) -> Result<()> {
        check_length("weight", weight.len(), &geometry.conv().weight_shape())?;
        let weights = TransposedWeights::new(geometry.conv(), weight);
        self.input_gradient(geometry, &weights, grad_output, grad_input, format)
    }

    fn input_gradient<T: Storage>(
        &self,
        geometry: &Geometry,
        weights: &TransposedWeights,
        grad_output: Volume<'_, T>,
        grad_input: &mut [MaybeUninit<T>],
        format: MemoryFormat,
    ) -> Result<()> {
        check_length("grad_output", grad_output.values.len(), &geometry.output_shape())?;
        check_length("grad_input", grad_input.len(), &geometry.input_shape())?;
        if geometry.batch() == 0 {
            return Ok(());
        }
        let to = (grad_input.as_mut_ptr().cast::<T>(), format);
        let (kernels, cpu) = (self.kernels::<T>(), self.cpu::<T>());
        let work = InputGradient::new(geometry, weights, kernels, cpu, grad_output, to);
        self.for_each(work.tasks(), |task| {
            SCRATCH.with_borrow_mut(|scratch| work.run(task, &mut scratch.input));
        });
        Ok(())
    }

    /// The gradient of the convolution's weight, from the input and the gradient of the output, rounded to a type of its own.
    ///
    /// # Errors
    /// [`Error::Length`] if a buffer is not of the geometry's size.
    pub fn weight_gradient_into<T: Storage, V: Storage>(
        &self,
        geometry: &Geometry,
        input: Volume<'_, T>,
        grad_output: Volume<'_, T>,
        grad_weight: &mut [MaybeUninit<V>],
    ) -> Result<()> {
        check_length("input", input.values.len(), &geometry.input_shape())?;
        check_length("grad_output", grad_output.values.len(), &geometry.output_shape())?;
        check_length("grad_weight", grad_weight.len(), &geometry.conv().weight_shape())?;
        if geometry.batch() == 0 {
            grad_weight.fill(MaybeUninit::new(V::default()));
            return Ok(());
        }
        let work = WeightGradient::new(geometry, self.kernels::<T>(), input, grad_output);
        let mut partials = vec![0.0; work.partials()];
        let shared = Shared(partials.as_mut_ptr());
        self.for_each(work.tasks(), |task| {
            SCRATCH.with_borrow_mut(|scratch| work.run(task, &shared, &mut scratch.weight));
        });
        let channels = geometry.conv().in_channels();
        let per_channel = grad_weight.len() / channels;
        let gradient = Shared(grad_weight.as_mut_ptr());
        let gradient = &gradient;
        self.for_each(channels, |channel| {
            // SAFETY: each input channel's weights lie in one piece, which this call alone writes.
            let to =
                unsafe { std::slice::from_raw_parts_mut(gradient.0.add(channel * per_channel), per_channel) };
            work.reduce(channel, &partials, to);
        });
        Ok(())
    }

    /// The gradient of the convolution's bias, from that of the output.
    ///
    /// # Errors
    /// [`Error::Length`] if a buffer is not of the geometry's size.
    pub fn bias_gradient_into<T: Storage>(
        &self,
        geometry: &Geometry,
        grad_output: Volume<'_, T>,
        grad_bias: &mut [MaybeUninit<T>],
    ) -> Result<()> {
        check_length("grad_output", grad_output.values.len(), &geometry.output_shape())?;
        check_length("grad_bias", grad_bias.len(), &[geometry.conv().out_channels()])?;
        let lines = Lines::new(geometry, grad_output.format);
        let mut sums = vec![[0.0]; lines.sums()];
        let shared = Shared(sums.as_mut_ptr());
        let kernels = self.kernels::<T>();
        self.for_each(lines.tasks(), |task| {
            SCRATCH.with_borrow_mut(|scratch| {
                epilogue::bias_sums(&lines, kernels, grad_output, task, &shared, &mut scratch.epilogue);
            });
        });
        store(grad_bias, &lines.of_channels(&lines.of_lines(&sums)), |[sum]| *sum);
        Ok(())
    }

    /// The gradients through what follows the convolution in a block, from that of its output.
    ///
    /// # Errors
    /// [`Error::Length`] if a buffer is not of the geometry's size; [`Error::Presence`] for a weight
    /// or bias of the normalization that the block has no use for, or lacks.
    pub fn epilogue_gradient_into<T: Storage, V: Storage>(
        &self,
        block: &BlockSpec,
        geometry: &Geometry,
        saved: SavedRef<'_, T>,
        grad_output: Volume<'_, T>,
        gradients: EpilogueGradients<'_, T, V>,
    ) -> Result<()> {
        let groups = block.norm().map_or(0, |norm| norm.groups());
        let channels = geometry.conv().out_channels();
        check_length("grad_output", grad_output.values.len(), &geometry.output_shape())?;
        check_length("convolution", saved.convolution.values.len(), &geometry.output_shape())?;
        check_length("mean", saved.mean.len(), &[geometry.batch(), groups])?;
        check_length("rstd", saved.rstd.len(), &[geometry.batch(), groups])?;
        let affine = block.norm().is_some_and(|norm| norm.affine());
        for (param, given) in [("norm_weight", saved.norm_weight), ("norm_bias", saved.norm_bias)] {
            if given.is_some() != affine {
                return Err(Error::Presence { param, expected: affine });
            }
            given.map_or(Ok(()), |given| check_length(param, given.len(), &[channels]))?;
        }
        let EpilogueGradients { convolution, bias, norm_weight, norm_bias } = gradients;
        for (param, given) in
            [("grad_bias", &bias), ("grad_norm_weight", &norm_weight), ("grad_norm_bias", &norm_bias)]
        {
            given.as_ref().map_or(Ok(()), |given| check_length(param, given.len(), &[channels]))?;
        }
        let lines = Lines::new(geometry, grad_output.format);
        let widen = |values: Option<&[T]>| {
            values.map(|values| values.iter().map(|value| value.to_acc()).collect::<Vec<_>>())
        };
        let (gamma, beta) = (widen(saved.norm_weight), widen(saved.norm_bias));
        let statistics = [saved.mean, saved.rstd];
        let norm = match block.norm() {
            Some(_) => {
                Epilogue::<T>::norm_lines(&lines, groups, statistics, [gamma.as_deref(), beta.as_deref()])
            }
            None => Vec::new(),
        };
        let kernels = self.kernels::<T>();
        let mut work = Epilogue { block, lines, kernels, convolution: saved.convolution, grad_output, norm };
        if block.norm().is_some() {
            let mut sums = vec![[0.0; 2]; lines.sums()];
            let shared = Shared(sums.as_mut_ptr());
            self.for_each(lines.tasks(), |task| {
                SCRATCH.with_borrow_mut(|scratch| work.sum(task, &shared, &mut scratch.epilogue));
            });
            let of_lines = lines.of_lines(&sums);
            work.set_means(groups, &of_lines);
            let of_channels = lines.of_channels(&of_lines);
            norm_weight.into_iter().for_each(|to| store(to, &of_channels, |[_, of_dvh]| *of_dvh));
            norm_bias.into_iter().for_each(|to| store(to, &of_channels, |[of_dv, _]| *of_dv));
        }
        if convolution.is_none() && bias.is_none() {
            return Ok(());
        }
        let mut sums = vec![[0.0]; lines.sums()];
        let shared = Shared(sums.as_mut_ptr());
        let to = match convolution {
            Some((to, format)) => {
                check_length("grad_convolution", to.len(), &geometry.output_shape())?;
                buffer::advise_huge_pages(to);
                Some((Shared(to.as_mut_ptr().cast::<T>()), format))
            }
            None => None,
        };
        self.for_each(lines.tasks(), |task| {
            SCRATCH.with_borrow_mut(|scratch| work.run(task, to.as_ref(), &shared, &mut scratch.epilogue));
        });
        bias.into_iter().for_each(|to| store(to, &lines.of_channels(&lines.of_lines(&sums)), |[sum]| *sum));
        Ok(())
    }
}

/// Rounds sums to a gradient.
fn store<T: Storage, const K: usize>(
    to: &mut [MaybeUninit<T>],
    sums: &[[f64; K]],
    pick: impl Fn(&[f64; K]) -> f64,
) {
    to.iter_mut().zip(sums).for_each(|(to, sums)| {
        to.write(T::from_f64(pick(sums)));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use volup::{Activation, ConvSpec, NormSpec};

    const SHAPES: [usize; 3] = [4 * 27, 6 * 125, 4 * 6 * 27];

    fn block() -> BlockSpec {
        let conv = ConvSpec::builder(4, 6, 3).bias(true).build().unwrap();
        let norm = NormSpec::new(2, 1e-5, true).unwrap();
        BlockSpec::new(conv, Some(Activation::Relu), Some(norm), None).unwrap()
    }

    fn volume(values: &[f32]) -> Volume<'_, f32> {
        Volume { values, format: MemoryFormat::Contiguous }
    }

    /// Each gradient of the convolution with one buffer cut short.
    #[test]
    fn buffers_of_another_length_are_refused() {
        let (engine, geometry) = (CpuEngine::with_threads(1), block().geometry(1, [3; 3]).unwrap());
        let tensors = SHAPES.map(|len| vec![1f32; len]);
        let run = |which: &str, cut: usize| {
            let of = |at: usize| &tensors[at][usize::from(cut == at)..];
            let mut to = vec![MaybeUninit::uninit(); SHAPES[2]];
            let (input, output) = (volume(of(0)), volume(of(1)));
            match which {
                "input" => {
                    let to = &mut to[..SHAPES[0] - usize::from(cut == 3)];
                    engine.input_gradient_into(&geometry, of(2), output, to, MemoryFormat::Contiguous)
                }
                "weight" => {
                    let to = &mut to[usize::from(cut == 3)..];
                    engine.weight_gradient_into(&geometry, input, output, to)
                }
                _ => engine.bias_gradient_into(&geometry, output, &mut to[..6 - usize::from(cut == 3)]),
            }
        };
        for which in ["input", "weight", "bias"] {
            run(which, 4).unwrap();
        }
        for (which, cut, name) in [
            ("input", 1, "grad_output"),
            ("input", 2, "weight"),
            ("input", 3, "grad_input"),
            ("weight", 0, "input"),
            ("weight", 1, "grad_output"),
            ("weight", 3, "grad_weight"),
            ("bias", 1, "grad_output"),
            ("bias", 3, "grad_bias"),
        ] {
            let error = run(which, cut).unwrap_err();
            assert!(matches!(error, Error::Length { param, .. } if param == name), "{which}, {cut}: {error}");
        }
    }

    #[test]
    fn an_epilogue_takes_what_belongs_to_its_block() {
        let (engine, block) = (CpuEngine::with_threads(1), block());
        let geometry = block.geometry(1, [3; 3]).unwrap();
        let (output, vector) = (vec![1f32; SHAPES[1]], vec![1f32; 6]);
        let right = SavedRef {
            convolution: volume(&output),
            mean: &vector[..2],
            rstd: &vector[..2],
            norm_weight: Some(&vector),
            norm_bias: Some(&vector),
        };
        let run = |saved: SavedRef<'_, f32>, bias: usize| {
            let mut to = vec![MaybeUninit::<f32>::uninit(); bias];
            let gradients = EpilogueGradients {
                convolution: None,
                bias: Some(&mut to),
                norm_weight: None,
                norm_bias: None,
            };
            engine.epilogue_gradient_into(&block, &geometry, saved, volume(&output), gradients)
        };
        run(right, 6).unwrap();
        let length = |result: Result<()>, name: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Length { param, .. } if param == name), "{name}: {error}");
        };
        length(run(SavedRef { convolution: volume(&output[1..]), ..right }, 6), "convolution");
        length(run(SavedRef { mean: &vector[..3], ..right }, 6), "mean");
        length(run(SavedRef { rstd: &[], ..right }, 6), "rstd");
        length(run(SavedRef { norm_weight: Some(&output), ..right }, 6), "norm_weight");
        length(run(right, 5), "grad_bias");
        let error = run(SavedRef { norm_bias: None, ..right }, 6).unwrap_err();
        assert!(matches!(error, Error::Presence { param: "norm_bias", expected: true }));
    }

    #[test]
    fn a_forward_pass_for_training_checks_its_buffers() {
        let (engine, block) = (CpuEngine::with_threads(1), block());
        let geometry = block.geometry(1, [3; 3]).unwrap();
        let (weight, vector, input) = (vec![1f32; SHAPES[2]], vec![1f32; 6], vec![1f32; SHAPES[0]]);
        let parameters = crate::ParametersRef {
            weight: &weight,
            bias: Some(&vector),
            norm_weight: Some(&vector),
            norm_bias: Some(&vector),
        };
        let layer = CpuLayer::new(&block, parameters).unwrap();
        let run = |[input_len, convolution, statistics, output]: [usize; 4]| {
            let [mut convolution, mut output] =
                [convolution, output].map(|len| vec![MaybeUninit::uninit(); len]);
            let [mut mean, mut rstd] = [vec![0f32; 2], vec![0f32; statistics]];
            let saved = SavedMut { convolution: &mut convolution, mean: &mut mean, rstd: &mut rstd };
            let (input, format) = (volume(&input[..input_len]), MemoryFormat::Contiguous);
            engine.forward_for_training_into(&layer, &geometry, input, saved, Some(&mut output), format)
        };
        let right = [SHAPES[0], SHAPES[1], 2, SHAPES[1]];
        run(right).unwrap();
        for (index, name) in ["input", "convolution", "rstd", "output"].into_iter().enumerate() {
            let mut lengths = right;
            lengths[index] -= 1;
            let error = run(lengths).unwrap_err();
            assert!(matches!(error, Error::Length { param, .. } if param == name), "{name}: {error}");
        }
    }
}

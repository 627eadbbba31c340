//! The block: checked once, then asked for the shape of its output and computed.

use crate::arguments::{self, integer, triple};
use crate::cache::Cache;
use crate::error::raised;
use crate::memory::RawTensor;
use crate::team;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use volup::{BlockSpec, ConvSpec, Engine as _, Error, MemoryFormat, NormSpec, with_element};
use volup_cpu::{CpuEngine, CpuLayer, ParametersRef, Storage};

/// A transposed convolution with what follows it, checked.
///
/// Building one is cheap (no tensor is looked at), so the package builds one a call and keeps none.
#[pyclass(frozen, module = "volup._native")]
pub(crate) struct Block {
    pub(crate) spec: BlockSpec,
}

#[pymethods]
impl Block {
    #[new]
    #[pyo3(signature = (
        weight_shape, stride, padding, output_padding, groups, dilation, bias,
        activation, norm_groups, affine, eps, post_activation,
    ))]
    #[allow(clippy::too_many_arguments, reason = "PyTorch's own parameters")]
    fn new(
        weight_shape: Vec<usize>,
        stride: &Bound<'_, PyAny>,
        padding: &Bound<'_, PyAny>,
        output_padding: &Bound<'_, PyAny>,
        groups: &Bound<'_, PyAny>,
        dilation: &Bound<'_, PyAny>,
        bias: bool,
        activation: &Bound<'_, PyAny>,
        norm_groups: &Bound<'_, PyAny>,
        affine: bool,
        eps: f64,
        post_activation: &Bound<'_, PyAny>,
    ) -> PyResult<Block> {
        let [in_channels, out_per_group, depth, height, width] = weight_shape[..] else {
            let (got, expected) = (weight_shape.len(), "5-D (in, out/groups, depth, height, width)");
            return Err(raised(Error::Rank { param: "weight", got, expected }));
        };
        let groups = count("groups", groups)?;
        let out_channels = out_per_group
            .checked_mul(groups)
            .ok_or_else(|| raised(Error::Overflow { what: "the number of output channels" }))?;
        let conv = ConvSpec::builder(in_channels, out_channels, [depth, height, width])
            .stride(triple("stride", stride)?)
            .padding(triple("padding", padding)?)
            .output_padding(triple("output_padding", output_padding)?)
            .groups(groups)
            .dilation(triple("dilation", dilation)?)
            .bias(bias)
            .build()
            .map_err(raised)?;
        let norm = if norm_groups.is_none() {
            None
        } else {
            let groups = count("norm_groups", norm_groups)?;
            Some(NormSpec::new(groups, eps, affine).map_err(raised)?)
        };
        let activation = arguments::activation("activation", activation)?;
        let post_activation = arguments::activation("post_activation", post_activation)?;
        let spec = BlockSpec::new(conv, activation, norm, post_activation).map_err(raised)?;
        Ok(Block { spec })
    }

    fn __str__(&self) -> String {
        self.spec.to_string()
    }

    /// Groups of the normalization, if there is one.
    #[getter]
    fn norm_groups(&self) -> Option<usize> {
        self.spec.norm().map(|norm| norm.groups())
    }

    #[getter]
    fn stride(&self) -> [usize; 3] {
        self.spec.conv().stride()
    }

    #[getter]
    fn padding(&self) -> [usize; 3] {
        self.spec.conv().padding()
    }

    #[getter]
    fn output_padding(&self) -> [usize; 3] {
        self.spec.conv().output_padding()
    }

    #[getter]
    fn groups(&self) -> usize {
        self.spec.conv().groups()
    }

    #[getter]
    fn dilation(&self) -> [usize; 3] {
        self.spec.conv().dilation()
    }

    /// The shape [N, C, D, H, W] of the output for an input of a shape; N is 1 for an input
    /// [C, D, H, W] without a batch.
    fn output_shape(&self, input_shape: Vec<usize>) -> PyResult<[usize; 5]> {
        Ok(self.spec.geometry_of(&input_shape).map_err(raised)?.output_shape())
    }

    /// Checks the shapes and types of an input, batched, and of the parameters; their addresses are
    /// not looked at.
    #[pyo3(signature = (input, weight, bias, norm_weight, norm_bias, /))]
    fn check(
        &self,
        input: RawTensor,
        weight: RawTensor,
        bias: Option<RawTensor>,
        norm_weight: Option<RawTensor>,
        norm_bias: Option<RawTensor>,
    ) -> PyResult<()> {
        expect_tensors(&self.spec, &input, &weight, [&bias, &norm_weight, &norm_bias])
    }

    /// Computes the block on the host, on a number of threads, without holding the GIL.
    ///
    /// Every tensor is (address, shape, type's name), the input's and output's shapes are batched,
    /// the parameters are contiguous. Whoever calls this keeps the tensors alive meanwhile. With a
    /// cache, packed parameters are kept in it.
    #[pyo3(signature = (
        threads, input, input_channels_last, weight, bias, norm_weight, norm_bias,
        output, output_channels_last, cache, /
    ))]
    #[allow(clippy::too_many_arguments, reason = "a block's tensors")]
    fn forward_cpu(
        &self,
        py: Python<'_>,
        threads: usize,
        input: RawTensor,
        input_channels_last: bool,
        weight: RawTensor,
        bias: Option<RawTensor>,
        norm_weight: Option<RawTensor>,
        norm_bias: Option<RawTensor>,
        output: RawTensor,
        output_channels_last: bool,
        cache: Option<&Cache>,
    ) -> PyResult<()> {
        let call = Call {
            input,
            input_format: format(input_channels_last),
            weight,
            bias,
            norm_weight,
            norm_bias,
            output,
            output_format: format(output_channels_last),
        };
        let engine = engine(threads);
        with_element!(call.input.dtype()?, T => call.run::<T>(py, &self.spec, &engine, cache))
    }
}

/// The tensors of one call.
struct Call {
    input: RawTensor,
    input_format: MemoryFormat,
    weight: RawTensor,
    bias: Option<RawTensor>,
    norm_weight: Option<RawTensor>,
    norm_bias: Option<RawTensor>,
    output: RawTensor,
    output_format: MemoryFormat,
}

impl Call {
    fn run<T: Storage>(
        &self,
        py: Python<'_>,
        spec: &BlockSpec,
        engine: &CpuEngine,
        cache: Option<&Cache>,
    ) -> PyResult<()> {
        let geometry = spec.geometry_of(self.input.shape()).map_err(raised)?;
        let vectors = [&self.bias, &self.norm_weight, &self.norm_bias];
        expect_tensors(spec, &self.input, &self.weight, vectors)?;
        self.output.expect("output", &geometry.output_shape(), T::DTYPE)?;
        // SAFETY: the package passes the addresses of dense tensors of these shapes and types, which
        // `expect` compared with what is read and written here, and holds on to them until this call
        // returns. The output is fresh from torch.empty, so nothing else refers to it. That no
        // other thread writes to the inputs meanwhile is up to the user, as it is with PyTorch's
        // own operators, which release the GIL too.
        let (input, parameters, output) = unsafe {
            let vector = |tensor: &Option<RawTensor>| tensor.as_ref().map(|t| t.elements::<T>()).transpose();
            let parameters = ParametersRef {
                weight: self.weight.elements::<T>()?,
                bias: vector(&self.bias)?,
                norm_weight: vector(&self.norm_weight)?,
                norm_bias: vector(&self.norm_bias)?,
            };
            (self.input.elements::<T>()?, parameters, self.output.elements_mut::<T>()?)
        };
        py.detach(|| {
            let mut forward = |layer: &CpuLayer<T>| {
                engine.forward_into(layer, &geometry, input, self.input_format, output, self.output_format)
            };
            match cache {
                Some(cache) => forward(&cache.layer(spec, parameters)?.layer),
                None => forward(&CpuLayer::new(spec, parameters)?),
            }
        })
        .map_err(raised)
    }
}

/// Checks an input and parameters (bias, norm_weight, norm_bias) against a block and one another.
pub(crate) fn expect_tensors(
    spec: &BlockSpec,
    input: &RawTensor,
    weight: &RawTensor,
    vectors: [&Option<RawTensor>; 3],
) -> PyResult<()> {
    let dtype = input.dtype()?;
    input.expect("input", &spec.geometry_of(input.shape()).map_err(raised)?.input_shape(), dtype)?;
    weight.expect("weight", &spec.conv().weight_shape(), dtype)?;
    let affine = spec.norm().is_some_and(|norm| norm.affine());
    let expected = [("bias", spec.conv().has_bias()), ("norm_weight", affine), ("norm_bias", affine)];
    for ((param, expected), tensor) in expected.into_iter().zip(vectors) {
        if tensor.is_some() != expected {
            return Err(raised(Error::Presence { param, expected }));
        }
        if let Some(tensor) = tensor {
            tensor.expect(param, &[spec.conv().out_channels()], dtype)?;
        }
    }
    Ok(())
}

pub(crate) fn format(channels_last: bool) -> MemoryFormat {
    if channels_last { MemoryFormat::ChannelsLast3d } else { MemoryFormat::Contiguous }
}

/// A number of groups.
fn count(param: &'static str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    let got = integer(param, "int", value)?;
    match usize::try_from(got) {
        Ok(groups) if groups > 0 => Ok(groups),
        _ => Err(raised(Error::NotPositive { param, got })),
    }
}

/// What the engine of a number of threads says of itself, as (name, value).
#[pyfunction]
pub(crate) fn describe_cpu(threads: usize) -> Vec<(&'static str, String)> {
    engine(threads).describe()
}

/// The engine of a number of threads.
///
/// Threads do not survive a fork, so a child process (a data loader's worker) gets engines of its
/// own. The lock is only ever taken under the GIL and is not held while computing, so no fork finds
/// it taken.
pub(crate) fn engine(threads: usize) -> Arc<CpuEngine> {
    type Engines = BTreeMap<(u32, usize), Arc<CpuEngine>>;
    static ENGINES: Mutex<Engines> = Mutex::new(BTreeMap::new());
    let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
    let engine = || Arc::new(team::engine(threads));
    engines.entry((std::process::id(), threads)).or_insert_with(engine).clone()
}

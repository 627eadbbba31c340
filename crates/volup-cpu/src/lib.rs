//! The CPU engine of volup.

use std::mem::MaybeUninit;
use volup::{BlockSpec, DType, Element, Engine, Geometry, MemoryFormat, Parameters, Result, Tensor};

/// A block's parameters in the caller's memory, contiguous, in PyTorch's shapes.
#[derive(Clone, Copy, Debug)]
pub struct ParametersRef<'a, T> {
    /// [Cin, Cout/groups, kD, kH, kW].
    pub weight: &'a [T],
    /// [Cout], if the convolution has a bias.
    pub bias: Option<&'a [T]>,
    /// [Cout], if the normalization is affine.
    pub norm_weight: Option<&'a [T]>,
    /// [Cout], if the normalization is affine.
    pub norm_bias: Option<&'a [T]>,
}

/// A block with its parameters packed for the CPU's kernels.
pub struct CpuLayer<T: Element> {
    block: BlockSpec,
    parameters: std::marker::PhantomData<T>,
}

impl<T: Element> CpuLayer<T> {
    /// Packs the parameters of a block.
    ///
    /// # Errors
    /// [`volup::Error::Length`], [`volup::Error::Presence`].
    pub fn new(block: &BlockSpec, parameters: ParametersRef<'_, T>) -> Result<CpuLayer<T>> {
        let _ = parameters;
        Ok(CpuLayer { block: *block, parameters: std::marker::PhantomData })
    }
}

/// Computes blocks on the host's cores.
pub struct CpuEngine {
    threads: usize,
}

impl CpuEngine {
    /// An engine on all cores.
    pub fn new() -> CpuEngine {
        CpuEngine::with_threads(std::thread::available_parallelism().map_or(1, |n| n.get()))
    }

    /// An engine on a number of threads; with 1, all work is done on the caller's thread.
    pub fn with_threads(threads: usize) -> CpuEngine {
        CpuEngine { threads: threads.max(1) }
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Applies a layer to memory of the caller's: reads `input`, writes every element of `output`.
    ///
    /// # Errors
    /// [`volup::Error::Length`] if a buffer is not of the geometry's size.
    pub fn forward_into<T: Element>(
        &self,
        layer: &CpuLayer<T>,
        geometry: &Geometry,
        input: &[T],
        input_format: MemoryFormat,
        output: &mut [MaybeUninit<T>],
        output_format: MemoryFormat,
    ) -> Result<()> {
        let _ = (&layer.block, geometry, input, input_format, output, output_format);
        unimplemented!()
    }
}

impl Default for CpuEngine {
    fn default() -> CpuEngine {
        CpuEngine::new()
    }
}

/// A packed layer of any type.
pub enum AnyLayer {
    /// Single precision.
    F32(CpuLayer<f32>),
}

impl Engine for CpuEngine {
    type Tensor = Tensor;
    type Layer = AnyLayer;

    fn describe(&self) -> Vec<(&'static str, String)> {
        vec![("engine", "cpu".into()), ("threads", self.threads.to_string())]
    }

    fn upload(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }

    fn download(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }

    fn layer(&self, block: &BlockSpec, parameters: &Parameters) -> Result<AnyLayer> {
        let _: DType = parameters.check(block)?;
        unimplemented!()
    }

    fn forward(&self, layer: &AnyLayer, input: &Tensor) -> Result<Tensor> {
        let _ = (layer, input);
        unimplemented!()
    }
}

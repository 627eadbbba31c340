//! What an engine is: something that runs blocks on tensors in its own memory.

use crate::{BlockSpec, DType, Parameters, Result, Tensor};

/// Runs blocks on a device. Tensors live in the engine's own memory; only [`Engine::upload`] and
/// [`Engine::download`] cross over to the host.
pub trait Engine {
    /// A tensor in the engine's memory.
    type Tensor;
    /// A block whose parameters are checked, in the engine's memory and laid out for its kernels.
    type Layer;

    /// The engine in a few (name, value) lines: device, instruction set, threads.
    fn describe(&self) -> Vec<(&'static str, String)>;

    /// The unit roundoff to which the engine rounds each input and weight before it multiplies them,
    /// beyond what they lost when they were stored in this type; 0 where it multiplies what it is
    /// given. The bounds of [`crate::reference`] grow with it.
    fn operand_roundoff(&self, dtype: DType) -> f64 {
        let _ = dtype;
        0.0
    }

    /// Waits until all work that was asked for is done. An engine whose [`Engine::forward`] returns
    /// results, not promises of them, has nothing to wait for.
    ///
    /// # Errors
    /// Where the device failed.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// Moves a tensor into the engine's memory.
    ///
    /// # Errors
    /// Where the device has no room for it.
    fn upload(&self, tensor: Tensor) -> Result<Self::Tensor>;

    /// Moves a tensor back to the host, when all work on it is done.
    ///
    /// # Errors
    /// Where the device failed.
    fn download(&self, tensor: Self::Tensor) -> Result<Tensor>;

    /// Packs a block's parameters for this engine; done once, used for any number of inputs.
    ///
    /// # Errors
    /// As [`Parameters::check`].
    fn layer(&self, block: &BlockSpec, parameters: &Parameters) -> Result<Self::Layer>;

    /// Applies a block to an input of shape [N, Cin, D, H, W] or [Cin, D, H, W]. The output has the
    /// input's rank, type and memory format.
    ///
    /// # Errors
    /// As [`BlockSpec::geometry_of`]; [`crate::Error::DTypeMismatch`] if the input's type is not
    /// the parameters'.
    fn forward(&self, layer: &Self::Layer, input: &Self::Tensor) -> Result<Self::Tensor>;
}

//! A block on inputs of one size: what is launched for it, in which order.

use crate::{Device, Stream};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use volup::{BlockSpec, DType, Error, Geometry, MemoryFormat, Precision, Result};

/// A kernel family that computes convolutions. Normally the plan chooses; tests choose for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Each output by its definition.
    Direct,
    /// A matrix product a phase, over all positions in one dimension.
    LinearGemm,
    /// A matrix product whose columns are interleaved phases.
    Interleave,
}

impl Algorithm {
    /// All families.
    pub const ALL: [Algorithm; 3] = [Algorithm::Direct, Algorithm::LinearGemm, Algorithm::Interleave];
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Algorithm::Direct => "direct",
            Algorithm::LinearGemm => "linear_gemm",
            Algorithm::Interleave => "interleave",
        })
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Algorithm> {
        let named = Algorithm::ALL.into_iter().find(|algorithm| algorithm.to_string() == name);
        named.ok_or_else(|| Error::UnknownName {
            param: "algorithm",
            got: name.into(),
            expected: "direct, linear_gemm, interleave",
        })
    }
}

/// Device addresses of a block's tensors, each dense and of the block's type; 0 where the block has no
/// such tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pointers {
    /// The input, in its memory format.
    pub input: u64,
    /// The weight, contiguous.
    pub weight: u64,
    /// The convolution's bias.
    pub bias: u64,
    /// The normalization's weight (gamma).
    pub norm_weight: u64,
    /// The normalization's bias (beta).
    pub norm_bias: u64,
    /// The output, in its memory format; every element is written.
    pub output: u64,
    /// [`Forward::workspace_bytes`] of memory.
    pub workspace: u64,
}

/// A block, planned for inputs of one size on one device.
#[derive(Debug)]
pub struct Forward;

impl Forward {
    /// Plans a block. `algorithm` is used where it applies, and left to the plan where it does not.
    ///
    /// # Errors
    /// [`Error::NoKernels`], [`Error::NoKernelsForArch`], [`Error::MissingKernel`], [`Error::Cuda`].
    #[expect(clippy::too_many_arguments, reason = "each is one choice of the caller's")]
    pub fn new(
        device: &Arc<Device>,
        block: &BlockSpec,
        geometry: &Geometry,
        dtype: DType,
        precision: Precision,
        input_format: MemoryFormat,
        output_format: MemoryFormat,
        algorithm: Option<Algorithm>,
    ) -> Result<Forward> {
        let _ = (device, block, geometry, dtype, precision, input_format, output_format, algorithm);
        Err(Error::NoKernels)
    }

    /// How much memory [`Forward::run`] works in besides its tensors.
    pub fn workspace_bytes(&self) -> usize {
        0
    }

    /// Asks a stream for the block's work; it is not waited for.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// The stream is of the device that this was planned for. Each address that the block needs is that
    /// of a tensor of the planned size, type and format on that device, valid until the work is done, in
    /// stream order. Nobody else uses the output and the workspace meanwhile.
    pub unsafe fn run(&self, pointers: &Pointers, stream: &Stream) -> Result<()> {
        let _ = (pointers, stream);
        Err(Error::NoKernels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_as_they_print() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse::<Algorithm>().unwrap(), algorithm);
        }
        assert!(matches!("im2col".parse::<Algorithm>(), Err(Error::UnknownName { param: "algorithm", .. })));
    }
}

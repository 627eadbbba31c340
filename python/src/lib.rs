//! The part of the Python package `volup` that is not Python: checks a block, computes it on memory
//! that PyTorch owns, and reads and writes decoder files. The package turns
//! tensors into addresses and shapes; only `tensors` looks at PyTorch's own.

mod arguments;
mod block;
mod cache;
mod cases;
mod cuda;
mod decoder;
mod error;
mod memory;
mod team;
mod tensors;
mod training;

/// `volup._native`.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::block::{Block, describe_cpu};
    #[pymodule_export]
    use crate::cache::Cache;
    #[pymodule_export]
    use crate::cases::{cases, published};
    #[pymodule_export]
    use crate::cuda::{CudaPass, cuda_status, kind};
    #[pymodule_export]
    use crate::decoder::{read_decoder, write_decoder};
    #[pymodule_export]
    use crate::error::NoEngineError;
    #[pymodule_export]
    use crate::tensors::described;
    #[pymodule_export]
    use crate::training::{epilogue_gradient, forward_for_training, input_gradient, weight_gradient};

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}

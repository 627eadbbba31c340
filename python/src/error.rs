//! The Python exception of each broken rule.

use pyo3::PyErr;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use volup::Error;

pyo3::create_exception!(
    _native,
    NoEngineError,
    PyRuntimeError,
    "The CUDA engine cannot run here: it lacks a driver, a device or kernels."
);

/// The same text as in Rust, in the class that PyTorch raises for the same rule.
pub(crate) fn raised(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        // torch.nn.functional.group_norm raises this one from Python, hence another class.
        Error::SingleValueNorm { .. } => PyValueError::new_err(text),
        // PyTorch has no such names and takes any eps and slope; a wrong value is a ValueError.
        Error::UnknownName { .. } | Error::Eps { .. } | Error::Slope { .. } | Error::Decoder { .. } => {
            PyValueError::new_err(text)
        }
        Error::NoDriver
        | Error::OldDriver { .. }
        | Error::NoDevice { .. }
        | Error::NoKernels
        | Error::NoKernelsForArch { .. }
        | Error::MissingKernel { .. } => NoEngineError::new_err(text),
        Error::Io { .. } => PyOSError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}

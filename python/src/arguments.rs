//! Python values as PyTorch's functions take them: which types pass, and what is raised otherwise.

use crate::error::raised;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList, PyString, PyTuple};
use volup::{Activation, Error};

fn wrong_type(param: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyErr {
    match value.get_type().name() {
        Ok(got) => PyTypeError::new_err(format!("argument '{param}' must be {expected}, not {got}")),
        Err(error) => error,
    }
}

/// An int, or what stands for one (NumPy's integers, a tensor of one integer). A bool is an int to
/// Python but a mistake here, as it is to PyTorch.
pub(crate) fn integer(param: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    if value.is_instance_of::<PyBool>() {
        return Err(wrong_type(param, expected, value));
    }
    value.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            PyValueError::new_err(format!("argument '{param}' does not fit in 64 bits"))
        } else {
            wrong_type(param, expected, value)
        }
    })
}

/// One integer for all three axes, or a list or tuple of one or three.
pub(crate) fn triple(param: &'static str, value: &Bound<'_, PyAny>) -> PyResult<[i64; 3]> {
    const EXPECTED: &str = "int or tuple of ints";
    let values: Vec<i64> = if let Ok(values) = value.cast::<PyTuple>() {
        values.iter().map(|v| integer(param, EXPECTED, &v)).collect::<PyResult<_>>()?
    } else if let Ok(values) = value.cast::<PyList>() {
        values.iter().map(|v| integer(param, EXPECTED, &v)).collect::<PyResult<_>>()?
    } else {
        vec![integer(param, EXPECTED, value)?]
    };
    match values[..] {
        [value] => Ok([value; 3]),
        [depth, height, width] => Ok([depth, height, width]),
        _ => Err(raised(Error::Arity { param, got: values.len() })),
    }
}

/// None, a name, or ("leaky_relu", slope).
pub(crate) fn activation(param: &str, value: &Bound<'_, PyAny>) -> PyResult<Option<Activation>> {
    if value.is_none() {
        return Ok(None);
    }
    if let Ok(name) = value.cast::<PyString>() {
        return Activation::from_name(name.to_str()?).map(Some).map_err(raised);
    }
    let Ok((name, slope)) = value.extract::<(String, f64)>() else {
        return Err(wrong_type(param, "str, (\"leaky_relu\", float) or None", value));
    };
    match Activation::from_name(&name).map_err(raised)? {
        Activation::LeakyRelu(_) => Activation::leaky_relu(slope).map(Some).map_err(raised),
        other => Err(PyValueError::new_err(format!("{} takes no slope, got {slope}", other.name()))),
    }
}

/// An activation as the package takes it.
pub(crate) fn activation_to_python<'py>(
    py: Python<'py>,
    activation: Option<Activation>,
) -> PyResult<Bound<'py, PyAny>> {
    match activation {
        None => Ok(py.None().into_bound(py)),
        Some(Activation::LeakyRelu(slope)) => Ok(("leaky_relu", slope.get()).into_pyobject(py)?.into_any()),
        Some(other) => Ok(other.name().into_pyobject(py)?.into_any()),
    }
}

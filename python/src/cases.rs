//! The tables of cases, for the package's own conformance test and for benchmarks.

use crate::decoder::block_to_python;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use volup::MemoryFormat;
use volup::testing::Case;

/// The conformance table.
#[pyfunction]
pub(crate) fn cases(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    to_python(py, volup::testing::cases())
}

/// The published shapes at full size.
#[pyfunction]
pub(crate) fn published(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    to_python(py, volup::testing::published())
}

/// Cases as dicts: name, why, batch (None without one), input (depth, height, width),
/// channels_last, and the block under the names of `ConvTranspose3dBlock`'s parameters.
fn to_python(py: Python<'_>, cases: Vec<Case>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let case = |case: Case| {
        let dict = PyDict::new(py);
        dict.set_item("name", case.name)?;
        dict.set_item("why", case.why)?;
        dict.set_item("batch", case.batch)?;
        dict.set_item("input", case.input)?;
        dict.set_item("channels_last", case.format == MemoryFormat::ChannelsLast3d)?;
        dict.set_item("block", block_to_python(py, &case.block)?)?;
        Ok(dict)
    };
    cases.into_iter().map(case).collect()
}

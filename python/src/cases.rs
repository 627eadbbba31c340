//! The engines' table of cases, for the package's own conformance test.

use crate::decoder::block_to_python;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use volup::MemoryFormat;

/// The table as dicts: name, why, batch (None without one), input (depth, height, width),
/// channels_last, and the block under the names of `ConvTranspose3dBlock`'s parameters.
#[pyfunction]
pub(crate) fn cases(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let case = |case: volup::testing::Case| {
        let dict = PyDict::new(py);
        dict.set_item("name", case.name)?;
        dict.set_item("why", case.why)?;
        dict.set_item("batch", case.batch)?;
        dict.set_item("input", case.input)?;
        dict.set_item("channels_last", case.format == MemoryFormat::ChannelsLast3d)?;
        dict.set_item("block", block_to_python(py, &case.block)?)?;
        Ok(dict)
    };
    volup::testing::cases().into_iter().map(case).collect()
}

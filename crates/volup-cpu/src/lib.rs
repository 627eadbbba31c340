#![doc = include_str!("../README.md")]

mod backward;
mod buffer;
mod conv;
mod engine;
mod forward;
mod layer;
mod math;
mod norm;
mod plan;
mod slab;
mod slope;
mod storage;
mod training;

pub use backward::Volume;
pub use conv::Isa;
pub use engine::{AnyLayer, CpuEngine};
pub use layer::{CpuLayer, ParametersRef};
pub use storage::Storage;
pub use training::{EpilogueGradients, SavedMut, SavedRef};

// The examples of the repository's front page run with this crate's tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct FrontPage;

#![doc = include_str!("../README.md")]

mod block;
pub mod decoder;
mod engine;
mod error;
pub mod phases;
mod precision;
pub mod reference;
mod spec;
mod tensor;
pub mod testing;
mod training;

pub use block::{Activation, BlockSpec, Finite, NormSpec, Parameters};
pub use engine::Engine;
pub use error::{Error, Result};
pub use half::{bf16, f16};
pub use precision::Precision;
pub use spec::{AXES, Axis, ConvSpec, ConvSpecBuilder, Geometry, Triple};
pub use tensor::{DType, Data, Element, MemoryFormat, Tensor};
pub use training::{Gradients, Saved, Training, Wanted};

#![doc = include_str!("../README.md")]

mod device;
mod driver;
mod engine;
mod executable;

#[cfg(test)]
mod listing;
mod manifest;
mod plan;
mod training;
mod tuning;

pub use device::{Arch, DeviceInfo};
pub use driver::{Arguments, Device, DeviceMemory, Entered, Kernel, Stream, devices, launch};
pub use engine::{CudaEngine, CudaLayer, CudaTensor, TimedPlan, TunedPlan};
pub use executable::{Algorithm, Executable, Pointers};
pub use manifest::{Cubin, Manifest, Variant};
pub use plan::{Argument, Buffer, Plan, Prepacked, Request, Step, Task};
pub use tuning::{Tuning, path as tuning_path};

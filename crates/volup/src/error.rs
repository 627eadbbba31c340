//! Every way in which a request can be wrong: one variant per broken rule.
//!
//! Each message names the parameter, what it got and what it expected, so that the same text serves
//! Rust, the command line and Python.

use crate::{DType, MemoryFormat};
use std::path::PathBuf;

/// A broken rule: what was given, and what would have been right.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A size, stride, dilation or count below one.
    #[error("{param} must be positive, got {got}")]
    NotPositive {
        /// The parameter's name.
        param: &'static str,
        /// The value given.
        got: i64,
    },
    /// A padding below zero.
    #[error("{param} must not be negative, got {got}")]
    Negative {
        /// The parameter's name.
        param: &'static str,
        /// The value given.
        got: i64,
    },
    /// A per-axis parameter with neither one value nor three.
    #[error("{param} must be one integer or a list of 3 (depth, height, width), got {got} values")]
    Arity {
        /// The parameter's name.
        param: &'static str,
        /// How many values were given.
        got: usize,
    },
    /// `output_padding` reaches both the stride and the dilation of its axis.
    #[error(
        "output_padding must be smaller than either stride or dilation, got output_padding {got} \
         with stride {stride} and dilation {dilation} along {axis}"
    )]
    OutputPadding {
        /// `depth`, `height` or `width`.
        axis: &'static str,
        /// The output padding given.
        got: usize,
        /// The axis' stride.
        stride: usize,
        /// The axis' dilation.
        dilation: usize,
    },
    /// A channel count that `groups` (or `norm_groups`) does not divide.
    #[error("{param} must be divisible by {divisor_param}, got {param} {got} with {divisor_param} {divisor}")]
    Indivisible {
        /// The parameter that must be divisible.
        param: &'static str,
        /// Its value.
        got: usize,
        /// The parameter that must divide it.
        divisor_param: &'static str,
        /// Its value.
        divisor: usize,
    },
    /// An eps that is negative, infinite or NaN.
    #[error("eps must be finite and not negative, got {got}")]
    Eps {
        /// The value given.
        got: f64,
    },
    /// The slope of a leaky ReLU that is infinite or NaN.
    #[error("negative_slope must be finite, got {got}")]
    Slope {
        /// The value given.
        got: f64,
    },
    /// A tensor of the wrong rank.
    #[error("{param} must be {expected}, got {got} dimensions")]
    Rank {
        /// The tensor's name.
        param: &'static str,
        /// Its number of dimensions.
        got: usize,
        /// The ranks that are accepted, in words.
        expected: &'static str,
    },
    /// A tensor of the wrong shape.
    #[error("{param} must have shape {expected:?}, got {got:?}")]
    Shape {
        /// The tensor's name.
        param: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// The shape it should have.
        expected: Vec<usize>,
    },
    /// An input with another number of channels than the weight.
    #[error("input must have {expected} channels (in_channels), got {got}")]
    Channels {
        /// The input's channels.
        got: usize,
        /// `in_channels`.
        expected: usize,
    },
    /// A spatial size of zero: only the batch may be empty.
    #[error("input must not be empty along {axis}: only the batch may have size 0")]
    EmptyInput {
        /// `depth`, `height` or `width`.
        axis: &'static str,
    },
    /// Padding that leaves no output.
    #[error("output size along {axis} must be at least 1, got {got}")]
    OutputTooSmall {
        /// `depth`, `height` or `width`.
        axis: &'static str,
        /// The size that the parameters give.
        got: i64,
    },
    /// A size that does not fit in the address space.
    #[error("{what} overflows the address space")]
    Overflow {
        /// What was being computed.
        what: &'static str,
    },
    /// Normalization over a single value, which PyTorch refuses too.
    #[error(
        "norm_groups must leave more than 1 value in the batch's groups, got {channels} channels, {norm_groups} groups and 1 voxel"
    )]
    SingleValueNorm {
        /// Channels of the output.
        channels: usize,
        /// Groups asked for.
        norm_groups: usize,
    },
    /// A tensor of another type than the input, or of a type volup has no kernels for.
    #[error("{param} must have dtype {expected}, got {got}")]
    DTypeMismatch {
        /// The tensor's name.
        param: &'static str,
        /// Its type.
        got: DType,
        /// The type it should have.
        expected: DType,
    },
    /// A tensor in another memory format than asked for.
    #[error("{param} must be {expected}, got {got}")]
    Format {
        /// The tensor's name.
        param: &'static str,
        /// Its memory format.
        got: MemoryFormat,
        /// The format it should have.
        expected: MemoryFormat,
    },
    /// Data of another length than the shape asks for.
    #[error("{param} must hold {expected} elements, got {got}")]
    Length {
        /// The buffer's name.
        param: &'static str,
        /// Its length in elements.
        got: usize,
        /// The elements that its shape asks for.
        expected: usize,
    },
    /// A tensor that the description has no use for, or one that it needs and lacks.
    #[error("{param} must be {}", if *.expected { "given" } else { "absent" })]
    Presence {
        /// The tensor's name.
        param: &'static str,
        /// Whether the description asks for it.
        expected: bool,
    },
    /// A name that is not one of a fixed list.
    #[error("{param} must be one of {expected}, got {got:?}")]
    UnknownName {
        /// The parameter's name.
        param: &'static str,
        /// The name given.
        got: String,
        /// The names that are accepted.
        expected: &'static str,
    },
    /// A line that does not describe a block and its input.
    #[error("{line:?}: {reason}")]
    Notation {
        /// The line.
        line: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file that could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A block of a decoder that breaks one of the rules above.
    #[error("block {block}: {source}")]
    DecoderBlock {
        /// The block's name.
        block: String,
        /// The rule.
        source: Box<Error>,
    },
    /// More memory than the system has to give.
    #[error("{what} takes {bytes} bytes, which the system has not to give")]
    OutOfMemory {
        /// What the memory is for.
        what: &'static str,
        /// How much it takes.
        bytes: usize,
    },
    /// No NVIDIA driver on this system.
    #[error("a CUDA device needs the NVIDIA driver, whose library (libcuda) was not found")]
    NoDriver,
    /// An NVIDIA driver from before the oldest that the kernels run on.
    #[error("the NVIDIA driver must be {expected} or newer, got {got}")]
    OldDriver {
        /// The driver's CUDA version and the branch that it came with, as in `12.8 (r570)`.
        got: String,
        /// The oldest that will do, in the same words.
        expected: &'static str,
    },
    /// A CUDA device that the system does not have.
    #[error(
        "device must be one of the system's CUDA devices, of which there are {count}, got cuda:{ordinal}"
    )]
    NoDevice {
        /// The device asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// A build without GPU kernels, which are compiled apart.
    #[error("this build of volup contains no GPU kernels; `make kernels` builds them")]
    NoKernels,
    /// A GPU of an architecture that the kernels were not built for.
    #[error("device must be of an architecture with kernels in this build ({built}), got {device} ({arch})")]
    NoKernelsForArch {
        /// The GPU's name.
        device: String,
        /// Its architecture, as in `sm_75`.
        arch: String,
        /// The architectures that there are kernels for.
        built: String,
    },
    /// A kernel that was expected in this build and is not there.
    #[error("this build of volup lacks the GPU kernel {name} for {arch}")]
    MissingKernel {
        /// The kernel's name.
        name: String,
        /// The architecture asked for.
        arch: String,
    },
    /// More memory than the GPU has to give.
    #[error("{bytes} bytes were asked of the GPU's memory, which has not as many left")]
    OutOfDeviceMemory {
        /// How much was asked for.
        bytes: usize,
    },
    /// A tensor whose memory starts where kernels cannot read vectors from.
    #[error("{param} must start at a multiple of {expected} bytes, got the address {got:#x}")]
    Misaligned {
        /// The tensor's name.
        param: &'static str,
        /// Its address.
        got: u64,
        /// What addresses are multiples of.
        expected: u64,
    },
    /// A call that the CUDA driver refused.
    #[error("{call} failed: {message} (CUDA error {code})")]
    Cuda {
        /// The driver's function.
        call: &'static str,
        /// Its error code.
        code: u32,
        /// What the driver says about that code.
        message: String,
    },
    /// A decoder file whose contents are not a decoder.
    #[error("{field} must be {expected}, got {got}")]
    Decoder {
        /// The field or tensor of the file.
        field: String,
        /// What it holds.
        got: String,
        /// What it should hold.
        expected: String,
    },
}

/// Shorthand for a result with volup's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_gpu_lacks_is_named() {
        let cuda = Error::Cuda { call: "cuInit", code: 999, message: "unknown error".into() };
        for (error, text) in [
            (Error::NoDriver, "a CUDA device needs the NVIDIA driver, whose library (libcuda) was not found"),
            (
                Error::OldDriver { got: "12.8 (r570)".into(), expected: "13.0 (r580)" },
                "the NVIDIA driver must be 13.0 (r580) or newer, got 12.8 (r570)",
            ),
            (
                Error::NoDevice { ordinal: 3, count: 2 },
                "device must be one of the system's CUDA devices, of which there are 2, got cuda:3",
            ),
            (Error::NoKernels, "this build of volup contains no GPU kernels; `make kernels` builds them"),
            (
                Error::NoKernelsForArch {
                    device: "Tesla T4".into(),
                    arch: "sm_75".into(),
                    built: "sm_80, sm_90".into(),
                },
                "device must be of an architecture with kernels in this build (sm_80, sm_90), \
                 got Tesla T4 (sm_75)",
            ),
            (
                Error::MissingKernel { name: "pack_f32".into(), arch: "sm_90".into() },
                "this build of volup lacks the GPU kernel pack_f32 for sm_90",
            ),
            (
                Error::OutOfDeviceMemory { bytes: 1 << 40 },
                "1099511627776 bytes were asked of the GPU's memory, which has not as many left",
            ),
            (
                Error::Misaligned { param: "input", got: 0x7004, expected: 16 },
                "input must start at a multiple of 16 bytes, got the address 0x7004",
            ),
            (cuda, "cuInit failed: unknown error (CUDA error 999)"),
        ] {
            assert_eq!(error.to_string(), text);
        }
    }
}

//! What a plan is made of, as plain values.

#[cfg(doc)]
use super::Plan;
use crate::Variant;

/// Memory that a kernel is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// The input; it, and every tensor, starts at a multiple of 16 bytes.
    Input,
    /// The weight.
    Weight,
    /// The convolution's bias.
    Bias,
    /// The normalization's weight.
    NormWeight,
    /// The normalization's bias.
    NormBias,
    /// The output.
    Output,
    /// The convolution's output, which is saved for the backward pass.
    Convolution,
    /// The means of the normalization's groups, which are saved.
    Mean,
    /// One over their standard deviations.
    Rstd,
    /// The gradient of the output.
    GradOutput,
    /// The gradient of the input.
    GradInput,
    /// The gradient of the weight.
    GradWeight,
    /// The gradient of the convolution's bias.
    GradBias,
    /// The gradient of the normalization's weight.
    GradNormWeight,
    /// The gradient of the normalization's bias.
    GradNormBias,
    /// What the plan works in; starts at a multiple of 256 bytes.
    Workspace,
    /// The weight as [`Plan::prepacked`] has it packed; starts at a multiple of 256 bytes.
    Packed,
    /// For a plan within another one, words upon which its launches do nothing; address 0 where there are none.
    Unless,
}

/// One argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// An address: a buffer and bytes into it. A tensor that the block lacks is address 0.
    Pointer(Buffer, u64),
    /// A 32-bit integer.
    I32(i32),
    /// A 64-bit integer.
    I64(i64),
    /// A single-precision number.
    F32(f32),
    /// A double-precision number.
    F64(f64),
}

impl From<i32> for Argument {
    fn from(value: i32) -> Argument {
        Argument::I32(value)
    }
}

/// One thing that the device does.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Clears 32-bit words of the workspace.
    Clear {
        /// Where they start, in bytes.
        at: u64,
        /// How many there are.
        words: usize,
    },
    /// Launches a kernel.
    Launch {
        /// The kernel.
        variant: Variant,
        /// Blocks.
        grid: [u32; 3],
        /// Bytes of shared memory a block, besides what the kernel has of itself.
        shared: u32,
        /// What it is given, in its order.
        arguments: Vec<Argument>,
        /// Whether it may start before the launch before it is done: it waits for that itself.
        overlap: bool,
    },
}

impl Step {
    /// A launch after all before it, without more shared memory than the kernel has of itself.
    pub(super) fn launch(variant: Variant, grid: [u32; 3], arguments: Vec<Argument>) -> Step {
        Step::Launch { variant, grid, shared: 0, arguments, overlap: false }
    }

    /// Whether it launches a kernel, by the name of its function or of the variant.
    pub(super) fn launches(&self, kernel: &str) -> bool {
        matches!(self, Step::Launch { variant, .. } if [variant.entry, variant.name].contains(&kernel))
    }

    /// Whether it launches a kernel in CUDA C++, which lets others start while it runs.
    pub(super) fn is_exact(&self) -> bool {
        matches!(self, Step::Launch { variant, .. } if variant.exact)
    }

    /// Whether it starts while what is launched before it runs.
    pub(super) fn is_early(&self) -> bool {
        matches!(self, Step::Launch { overlap: true, .. })
    }

    /// The same, starting while what is launched before it runs, or not.
    pub(super) fn overlapping(mut self, so: bool) -> Step {
        if let Step::Launch { overlap, .. } = &mut self {
            *overlap = so;
        }
        self
    }

    /// The same with other buffers: what a buffer and bytes into it become.
    pub(super) fn moved(&self, to: impl Fn(Buffer, u64) -> (Buffer, u64)) -> Step {
        let mut step = self.clone();
        match &mut step {
            Step::Clear { at, .. } => *at = to(Buffer::Workspace, *at).1,
            Step::Launch { arguments, .. } => {
                for argument in arguments {
                    if let Argument::Pointer(buffer, offset) = argument {
                        (*buffer, *offset) = to(*buffer, *offset);
                    }
                }
            }
        }
        step
    }
}

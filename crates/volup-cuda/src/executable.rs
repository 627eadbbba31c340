//! A block on inputs of one size: what is launched for it, in which order.

use crate::driver::{Graph, Launch};
use crate::plan::{Argument, Buffer, Plan, Prepacked, Request, Step};
use crate::{Arguments, Device, Kernel, Manifest, Stream, launch};
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use volup::{Error, Result};

/// A kernel family that computes convolutions. Normally the plan chooses; tests choose for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Each output by its definition.
    Direct,
    /// A matrix product a phase, over all positions in one dimension.
    LinearGemm,
    /// A matrix product whose columns are interleaved phases.
    Interleave,
    /// The matrix product a phase on Hopper, from operands in shared memory.
    HaloGemm,
    /// The same for many channels and few voxels: without gaps, rows gathered by those who multiply them.
    GatherGemm,
    /// All phases of a box of positions on tensor cores, from the input itself.
    BoxGemm,
    /// One matrix product whose results are dealt out among the residues, from operands as they lie.
    ShuffleGemm,
    /// The same of many channels, which pass through shared memory.
    ShuffleRing,
    /// The same on Hopper's own matrix instructions.
    ShuffleWgmma,
    /// Few channels: a matrix product of exactly the taps that a residue has.
    ImplicitGemm,
    /// One tap and few channels: every voxel times a matrix, in float32.
    Pointwise,
}

impl Algorithm {
    /// All families.
    pub const ALL: [Algorithm; 11] = [
        Algorithm::Direct,
        Algorithm::LinearGemm,
        Algorithm::Interleave,
        Algorithm::HaloGemm,
        Algorithm::GatherGemm,
        Algorithm::BoxGemm,
        Algorithm::ShuffleGemm,
        Algorithm::ShuffleRing,
        Algorithm::ShuffleWgmma,
        Algorithm::ImplicitGemm,
        Algorithm::Pointwise,
    ];
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Algorithm::Direct => "direct",
            Algorithm::LinearGemm => "linear_gemm",
            Algorithm::Interleave => "interleave",
            Algorithm::HaloGemm => "halo_gemm",
            Algorithm::GatherGemm => "gather_gemm",
            Algorithm::BoxGemm => "box_gemm",
            Algorithm::ShuffleGemm => "shuffle_gemm",
            Algorithm::ShuffleRing => "shuffle_ring",
            Algorithm::ShuffleWgmma => "shuffle_wgmma",
            Algorithm::ImplicitGemm => "implicit_gemm",
            Algorithm::Pointwise => "pointwise",
        })
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Algorithm> {
        let named = Algorithm::ALL.into_iter().find(|algorithm| algorithm.to_string() == name);
        named.ok_or_else(|| Error::UnknownName {
            param: "algorithm",
            got: name.into(),
            expected: "direct, linear_gemm, interleave, halo_gemm, gather_gemm, box_gemm, \
                       shuffle_gemm, shuffle_ring, shuffle_wgmma, implicit_gemm, pointwise",
        })
    }
}

/// Device addresses of a block's tensors, each dense, of the block's type, and at a multiple of 16 bytes,
/// since kernels read and write vectors; 0 where the block has no such tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pointers {
    /// The input, in its memory format.
    pub input: u64,
    /// The weight, contiguous.
    pub weight: u64,
    /// The convolution's bias.
    pub bias: u64,
    /// The normalization's weight (gamma).
    pub norm_weight: u64,
    /// The normalization's bias (beta).
    pub norm_bias: u64,
    /// The output, in its memory format; every element is written.
    pub output: u64,
    /// The convolution's output, as [`volup::Saved`] has it and in the output's memory format: written by the
    /// forward pass of training, read by the backward pass.
    pub convolution: u64,
    /// The means of the normalization's groups, likewise, in the accumulator's type.
    pub mean: u64,
    /// One over their standard deviations, likewise.
    pub rstd: u64,
    /// The gradient of the output, in the output's memory format.
    pub grad_output: u64,
    /// The gradient of the input, in the input's memory format; it and those below are written where they
    /// are wanted.
    pub grad_input: u64,
    /// The gradient of the weight.
    pub grad_weight: u64,
    /// The gradient of the convolution's bias.
    pub grad_bias: u64,
    /// The gradient of the normalization's weight.
    pub grad_norm_weight: u64,
    /// The gradient of the normalization's bias.
    pub grad_norm_bias: u64,
    /// [`Executable::workspace_bytes`] of memory, at a multiple of 256 bytes.
    pub workspace: u64,
    /// The packed weight, for the second of [`Executable::prepacked`]: what the first had as its workspace.
    pub packed: u64,
}

impl Pointers {
    /// What the addresses are called, and which they are.
    fn named(&self) -> [(&'static str, u64); 17] {
        [
            ("input", self.input),
            ("weight", self.weight),
            ("bias", self.bias),
            ("norm_weight", self.norm_weight),
            ("norm_bias", self.norm_bias),
            ("output", self.output),
            ("convolution", self.convolution),
            ("mean", self.mean),
            ("rstd", self.rstd),
            ("grad_output", self.grad_output),
            ("grad_input", self.grad_input),
            ("grad_weight", self.grad_weight),
            ("grad_bias", self.grad_bias),
            ("grad_norm_weight", self.grad_norm_weight),
            ("grad_norm_bias", self.grad_norm_bias),
            ("workspace", self.workspace),
            ("packed", self.packed),
        ]
    }

    /// Whether all addresses are multiples of what they have to be.
    fn check(&self) -> Result<()> {
        for (param, got) in self.named() {
            let expected = if matches!(param, "workspace" | "packed") { 256 } else { 16 };
            if !got.is_multiple_of(expected) {
                return Err(Error::Misaligned { param, got, expected });
            }
        }
        Ok(())
    }

    fn address(&self, buffer: Buffer, offset: u64) -> u64 {
        let start = match buffer {
            Buffer::Input => self.input,
            Buffer::Weight => self.weight,
            Buffer::Bias => self.bias,
            Buffer::NormWeight => self.norm_weight,
            Buffer::NormBias => self.norm_bias,
            Buffer::Output => self.output,
            Buffer::Convolution => self.convolution,
            Buffer::Mean => self.mean,
            Buffer::Rstd => self.rstd,
            Buffer::GradOutput => self.grad_output,
            Buffer::GradInput => self.grad_input,
            Buffer::GradWeight => self.grad_weight,
            Buffer::GradBias => self.grad_bias,
            Buffer::GradNormWeight => self.grad_norm_weight,
            Buffer::GradNormBias => self.grad_norm_bias,
            Buffer::Workspace => self.workspace,
            Buffer::Packed => self.packed,
            Buffer::Unless => 0,
        };
        if start == 0 { 0 } else { start + offset }
    }
}

/// A block, planned for inputs of one size on one device, with its kernels loaded.
#[derive(Debug)]
pub struct Executable {
    plan: Plan,
    actions: Vec<Action>,
    graph: Mutex<Habit>,
}

/// The runs before, so that those of a program that runs again and again on one stream become launches of a graph.
#[derive(Debug, Default)]
struct Habit {
    /// The stream of the last run, by its handle.
    stream: usize,
    /// How many there were in a row on that stream.
    runs: u32,
    /// Made once; None if that failed.
    graph: Option<Option<Graph>>,
}

/// Runs in a row before a graph is made, which takes as long as some dozens of launches.
const RUNS_BEFORE_GRAPH: u32 = 4;

/// A step of the plan, ready to go.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a plan has few steps, and most of them are launches")]
enum Action {
    Clear {
        at: u64,
        words: usize,
    },
    Launch {
        kernel: Kernel,
        grid: [u32; 3],
        arguments: Arguments,
        addresses: Vec<(usize, Buffer, u64)>,
        overlap: bool,
    },
}

impl Executable {
    /// Plans a request, as [`crate::Tuning`] has it if it was tuned, and loads its kernels.
    ///
    /// # Errors
    /// [`Error::NoKernels`], [`Error::NoKernelsForArch`], [`Error::MissingKernel`], [`Error::Overflow`],
    /// [`Error::OutOfDeviceMemory`], [`Error::Cuda`].
    pub fn new(device: &Arc<Device>, request: &Request) -> Result<Executable> {
        let variants = Manifest::embedded().for_device(device.info())?;
        Executable::of(device, device.tuning(&variants).plan(request, device.info(), &variants)?)
    }

    /// Loads the kernels of a plan, which was made for the device with the kernels of this build.
    ///
    /// # Errors
    /// [`Error::OutOfDeviceMemory`], [`Error::Cuda`].
    pub fn of(device: &Arc<Device>, plan: Plan) -> Result<Executable> {
        let actions = plan.steps.iter().map(|step| Action::new(device, step)).collect::<Result<_>>()?;
        Ok(Executable { plan, actions, graph: Mutex::default() })
    }

    /// What packs the weight, for layers that keep it so, and what computes the block with it, as [`Plan::prepacked`] has them:
    /// none where nothing is packed.
    ///
    /// # Errors
    /// As [`Executable::of`].
    pub fn prepacked(&self, device: &Arc<Device>) -> Result<Option<[Executable; 2]>> {
        let Some(Prepacked { packing, block }) = self.plan.prepacked() else { return Ok(None) };
        Ok(Some([Executable::of(device, packing)?, Executable::of(device, block)?]))
    }

    /// What will be done.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// How much memory [`Executable::run`] works in besides its tensors, from a multiple of 256 bytes on.
    pub fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes
    }

    /// Asks a stream for the block's work; it is not waited for.
    ///
    /// # Errors
    /// [`Error::Misaligned`], before anything is launched; [`Error::Cuda`].
    ///
    /// # Safety
    /// The stream is of the device that this was planned for. Each address that the block needs is that
    /// of a tensor of the planned size, type and format on that device, valid until the work is done, in
    /// stream order. Nobody else uses the output and the workspace meanwhile.
    pub unsafe fn run(&self, pointers: &Pointers, stream: &Stream) -> Result<()> {
        pointers.check()?;
        let _entered = stream.device().enter()?;
        // SAFETY: as of this function.
        if unsafe { self.run_graph(pointers, stream) }? {
            return Ok(());
        }
        for action in &self.actions {
            // SAFETY: as of this function.
            unsafe { action.run(pointers, stream) }?;
        }
        Ok(())
    }

    /// Runs it as a graph if that is what is best; false if nothing was done.
    ///
    /// Launches of one graph wait for each other, whatever their streams, so it is left alone where streams take turns.
    ///
    /// # Safety
    /// As [`Executable::run`].
    unsafe fn run_graph(&self, pointers: &Pointers, stream: &Stream) -> Result<bool> {
        if stream.is_captured() {
            return Ok(false);
        }
        // Another thread that is at it uses another stream, or may as well launch.
        let Ok(mut habit) = self.graph.try_lock() else { return Ok(false) };
        let handle = stream.handle() as usize;
        if habit.stream != handle {
            (habit.stream, habit.runs) = (handle, 0);
        }
        habit.runs = habit.runs.saturating_add(1);
        if habit.runs <= RUNS_BEFORE_GRAPH || matches!(habit.graph, Some(None)) {
            return Ok(false);
        }
        let filled: Vec<Arguments> = self.actions.iter().map(|action| action.arguments(pointers)).collect();
        let launches =
            || std::iter::zip(&self.actions, &filled).filter_map(|(action, filled)| action.launch(filled));
        let graph = habit.graph.get_or_insert_with(|| {
            let possible = !self.actions.is_empty() && launches().count() == self.actions.len();
            // SAFETY: the plan gives each kernel the arguments that its file asks for.
            possible.then(|| unsafe { Graph::new(stream.device(), launches()) }.ok()).flatten()
        });
        let Some(graph) = graph else { return Ok(false) };
        // SAFETY: as of this function; the launches are those that it was made of.
        unsafe { graph.launch(launches(), stream) }?;
        Ok(true)
    }
}

impl Action {
    /// # Safety
    /// As [`Executable::run`], of whose actions this is one.
    unsafe fn run(&self, pointers: &Pointers, stream: &Stream) -> Result<()> {
        match self {
            // SAFETY: the plan took these words of the workspace, which the caller answers for.
            Action::Clear { at, words } => unsafe { stream.fill(pointers.workspace + at, 0, *words) },
            Action::Launch { kernel, grid, overlap, .. } => {
                let arguments = self.arguments(pointers);
                // SAFETY: the plan gives each kernel the arguments that its file asks for, sized by the
                // geometry that the caller's tensors have.
                unsafe { launch(*kernel, *grid, &arguments, stream, *overlap) }
            }
        }
    }

    /// A launch's arguments with the tensors' addresses.
    fn arguments(&self, pointers: &Pointers) -> Arguments {
        let Action::Launch { arguments, addresses, .. } = self else { return Arguments::new() };
        let mut arguments = arguments.clone();
        for &(slot, buffer, offset) in addresses {
            arguments.set_pointer(slot, pointers.address(buffer, offset));
        }
        arguments
    }

    /// As a launch of a graph, if it can be one: it waits for the one before it.
    fn launch<'a>(&self, arguments: &'a Arguments) -> Option<Launch<'a>> {
        match self {
            Action::Launch { kernel, grid, overlap: false, .. } => Some((*kernel, *grid, arguments)),
            _ => None,
        }
    }

    fn new(device: &Arc<Device>, step: &Step) -> Result<Action> {
        match step {
            Step::Clear { at, words } => Ok(Action::Clear { at: *at, words: *words }),
            Step::Launch { variant, grid, shared, arguments: given, overlap } => {
                let kernel = device.kernel(variant)?.with_shared(device, *shared)?;
                let (mut arguments, mut addresses) = (Arguments::new(), Vec::new());
                for (slot, argument) in given.iter().enumerate() {
                    match *argument {
                        Argument::Pointer(buffer, offset) => {
                            addresses.push((slot, buffer, offset));
                            arguments.pointer(0)
                        }
                        Argument::I32(value) => arguments.i32(value),
                        Argument::I64(value) => arguments.i64(value),
                        Argument::F32(value) => arguments.f32(value),
                        Argument::F64(value) => arguments.f64(value),
                    };
                }
                Ok(Action::Launch { kernel, grid: *grid, arguments, addresses, overlap: *overlap })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_vectors_cannot_start_at_is_named() {
        let right = Pointers { input: 0x7010, output: 0x8000, workspace: 0x9100, ..Pointers::default() };
        right.check().unwrap();
        let refused = |pointers: Pointers| pointers.check().unwrap_err().to_string();
        assert!(
            refused(Pointers { input: 0x7008, ..right }).starts_with("input must start at a multiple of 16")
        );
        assert!(refused(Pointers { norm_bias: 2, ..right }).starts_with("norm_bias"));
        assert!(
            refused(Pointers { workspace: 0x9110, ..right })
                .starts_with("workspace must start at a multiple of 256")
        );
    }

    #[test]
    fn names_read_as_they_print() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse::<Algorithm>().unwrap(), algorithm);
        }
        assert!(matches!("im2col".parse::<Algorithm>(), Err(Error::UnknownName { param: "algorithm", .. })));
    }
}

//! Runs PTX on the CPU: the kernels that `volup-cuda` launches on a GPU, in tests without one.
//!
//! Of PTX what `nvcc` makes of volup's kernels, for one architecture, Hopper; what else there is, the reader
//! names and refuses. It is not a simulator of time: blocks, or clusters of them, run one after the other, their warps in
//! turns of random length, and what the GPU does beside them, copies and barriers of copies, happens as late as it may,
//! or at a random moment. So a result that depends on who comes first differs from one seed to the next, or is
//! wrong for all.
//!
//! Every access is checked: that it is inside of one allocation, aligned, of bytes that have been written; that
//! no two blocks write the same byte; that what matrix instructions or copies still read is not changed. Bulk copies may
//! bring bytes that nobody wrote, as kernels do with rows that no result is of; those are numbers that are none. So is
//! shared memory at some blocks' start; at others' it is of tiny numbers.

mod block;
mod counters;
mod instruction;
mod matrix;
mod memory;
mod number;
mod parse;
mod together;
mod warp;

pub use counters::Counters;
pub use instruction::Module;
pub use memory::Memory;

/// Lanes of a warp.
pub(crate) const LANES: usize = 32;

/// What a kernel may not do, or what the reader does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(String);

impl Fault {
    pub(crate) fn new(what: impl Into<String>) -> Fault {
        Fault(what.into())
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Fault>;

/// How a kernel is started.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block, a multiple of 32.
    pub threads: u32,
    /// Bytes of shared memory of a block, besides the kernel's own.
    pub shared: u32,
    /// The arguments as they lie in the kernel's parameters.
    pub arguments: Vec<u8>,
    /// What decides who comes first.
    pub seed: u64,
}

impl Module {
    /// Reads the PTX of one kernel.
    ///
    /// # Errors
    /// [`Fault`] names the line and what is not known of it.
    pub fn parse(text: &str) -> Result<Module> {
        parse::module(text)
    }

    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs the kernel to its end.
    ///
    /// # Errors
    /// [`Fault`] names the line of PTX, the block and the warp, and what was wrong there: also where all wait for
    /// one another.
    pub fn run(&self, launch: &Launch, memory: &mut Memory) -> Result<()> {
        if launch.arguments.len() != self.param_bytes as usize {
            let (got, expected) = (launch.arguments.len(), self.param_bytes);
            return Err(Fault::new(format!("{}: {got} bytes of arguments, not {expected}", self.name)));
        }
        memory.next_launch();
        let [x, y, z] = launch.grid;
        let mut room = block::Room::new(self, launch);
        if !x.is_multiple_of(self.cluster) {
            return Err(Fault::new(format!("{}: {x} blocks, in clusters of {}", self.name, self.cluster)));
        }
        for block in (0..x * y * z).step_by(self.cluster as usize) {
            block::run(self, launch, [block % x, block / x % y, block / x / y], memory, &mut room)?;
        }
        Ok(())
    }
}

//! A GPU made of values: memory that knows what was written to it, and calls of kernels by the names
//! of their parameters.

use super::manifest::{Signature, signature};
use crate::Variant;
use crate::plan::{Argument, Buffer, Plan, Prepacked, Step};
use volup::{bf16, f16};
use volup_ptx::Memory;

/// Bytes that a cell stands for.
const CELL: usize = 2;
/// The width of cells that were cleared: zeros of any type.
const CLEARED: u32 = u32::MAX;
/// How many buffers there are.
pub const BUFFERS: usize = Buffer::Unless as usize + 1;

/// What the bytes from an address on hold: a value that is not rounded, of a type so wide.
#[derive(Clone, Copy)]
struct Cell {
    value: f64,
    /// Bytes of the value; 0 where none starts, [`CLEARED`].
    width: u32,
    /// The launch that wrote it; 0 for what was there before.
    writer: u32,
}

/// A buffer's part that a kernel is given, as elements of some bytes.
#[derive(Clone, Copy, Debug)]
pub struct Pointer {
    /// The buffer.
    pub buffer: Buffer,
    /// Bytes into it.
    pub at: usize,
    /// Bytes of an element.
    pub width: usize,
    /// The element's type; of what is filled and read from outside, nothing.
    of: &'static str,
}

/// All buffers. Every access is checked: it is in bounds, aligned, of the type that was written, and no
/// launch touches what it has written itself.
pub struct Machine {
    buffers: [Vec<Cell>; BUFFERS],
    launch: u32,
    doing: String,
    /// Where kernels run as they are compiled, what the buffers are then.
    pub compiled: Option<Bytes>,
}

/// Buffers as bytes of an emulated GPU's memory.
pub struct Bytes {
    /// The memory.
    pub memory: Memory,
    /// Where each buffer starts; 0 if it has none.
    pub starts: [u64; BUFFERS],
}

impl Bytes {
    fn address(&self, pointer: Pointer, index: i64) -> u64 {
        let start = self.starts[pointer.buffer as usize] + pointer.at as u64;
        start.wrapping_add_signed(index * pointer.width as i64)
    }

    fn read(&self, pointer: Pointer, index: i64) -> volup_ptx::Result<f64> {
        let mut word = [0; 8];
        word[..pointer.width]
            .copy_from_slice(self.memory.bytes(self.address(pointer, index), pointer.width)?);
        let bits = u64::from_le_bytes(word);
        Ok(match pointer.of {
            "f16" => f16::from_bits(bits as u16).into(),
            "bf16" => bf16::from_bits(bits as u16).into(),
            "f32" => f32::from_bits(bits as u32).into(),
            "f64" => f64::from_bits(bits),
            _ => bits as f64,
        })
    }

    fn write(&mut self, pointer: Pointer, index: i64, value: f64) -> volup_ptx::Result<()> {
        let bits = match pointer.of {
            "f16" => f16::from_f64(value).to_bits().into(),
            "bf16" => bf16::from_f64(value).to_bits().into(),
            "f32" => (value as f32).to_bits().into(),
            "f64" => value.to_bits(),
            _ => value as u64,
        };
        self.memory.fill(self.address(pointer, index), &bits.to_le_bytes()[..pointer.width])
    }
}

impl Machine {
    /// Nothing but a workspace that nobody has written to.
    pub fn new(workspace_bytes: usize) -> Machine {
        let mut machine =
            Machine { buffers: Default::default(), launch: 0, doing: "outside".into(), compiled: None };
        machine.work_in(workspace_bytes);
        machine
    }

    /// Gives a buffer its memory.
    pub fn allocate(&mut self, buffer: Buffer, bytes: usize) {
        let unset = Cell { value: f64::NAN, width: 0, writer: 0 };
        self.buffers[buffer as usize] = vec![unset; bytes.div_ceil(CELL)];
    }

    /// Fills a buffer with elements.
    pub fn fill(&mut self, buffer: Buffer, width: usize, values: &[f64]) {
        self.allocate(buffer, values.len() * width);
        for (index, &value) in values.iter().enumerate() {
            self.write(Pointer { buffer, at: 0, width, of: "" }, index as i64, value);
        }
    }

    /// Whether a buffer has memory: the address of a tensor that the block lacks is 0.
    pub fn has(&self, buffer: Buffer) -> bool {
        match &self.compiled {
            Some(bytes) => bytes.starts[buffer as usize] != 0,
            None => !self.buffers[buffer as usize].is_empty(),
        }
    }

    /// Every element of a buffer.
    pub fn values(&self, buffer: Buffer, width: usize) -> Vec<f64> {
        let count = self.buffers[buffer as usize].len() * CELL / width;
        (0..count).map(|index| self.read(Pointer { buffer, at: 0, width, of: "" }, index as i64)).collect()
    }

    #[inline(always)]
    fn cell(&self, pointer: Pointer, index: i64) -> usize {
        let Pointer { buffer, at, width, .. } = pointer;
        let start = at as i64 + index * width as i64;
        let cells = self.buffers[buffer as usize].len();
        let inside = start >= 0 && start as usize + width <= cells * CELL;
        assert!(inside, "{}: element {index} of {pointer:?} is out of bounds", self.doing);
        // Widths are powers of two.
        assert!(start as usize & (width - 1) == 0, "{}: {pointer:?} is not aligned", self.doing);
        start as usize / CELL
    }

    /// An element.
    #[inline]
    pub fn read(&self, pointer: Pointer, index: i64) -> f64 {
        if let Some(bytes) = &self.compiled {
            return bytes.read(pointer, index).unwrap_or_else(|fault| panic!("{}: {fault}", self.doing));
        }
        let (cells, first) = (&self.buffers[pointer.buffer as usize], self.cell(pointer, index));
        let Cell { value, width, writer } = cells[first];
        let doing = &self.doing;
        let cleared = || cells[first..first + pointer.width / CELL].iter().all(|cell| cell.width == CLEARED);
        let holds = width as usize == pointer.width || width == CLEARED && cleared();
        assert!(holds, "{doing}: element {index} of {pointer:?} holds {width} bytes");
        assert!(self.launch == 0 || writer != self.launch, "{doing}: {pointer:?}, {index} is read in a race");
        value
    }

    /// Writes an element.
    #[inline]
    pub fn write(&mut self, pointer: Pointer, index: i64, value: f64) {
        if let Some(bytes) = &mut self.compiled {
            return bytes
                .write(pointer, index, value)
                .unwrap_or_else(|fault| panic!("{}: {fault}", self.doing));
        }
        let first = self.cell(pointer, index);
        let (launch, doing) = (self.launch, &self.doing);
        let cells = &mut self.buffers[pointer.buffer as usize][first..first + pointer.width / CELL];
        for (at, cell) in cells.iter_mut().enumerate() {
            let race = launch > 0 && cell.writer == launch;
            assert!(!race, "{doing}: element {index} of {pointer:?} is written twice");
            *cell = Cell { value, width: if at == 0 { pointer.width as u32 } else { 0 }, writer: launch };
        }
    }

    /// Changes an element as an atomic does, in no order with others. What nobody cleared stays unset.
    pub fn update(&mut self, pointer: Pointer, index: i64, change: impl Fn(f64) -> f64) {
        if self.compiled.is_some() {
            let value = change(self.read(pointer, index));
            return self.write(pointer, index, value);
        }
        let first = self.cell(pointer, index);
        if self.buffers[pointer.buffer as usize][first].width > 0 {
            let value = change(self.read(pointer, index));
            let cells = &mut self.buffers[pointer.buffer as usize];
            for (at, cell) in cells[first..first + pointer.width / CELL].iter_mut().enumerate() {
                let width = if at == 0 { pointer.width as u32 } else { 0 };
                *cell = Cell { value, width, writer: cell.writer };
            }
        }
    }

    /// What was written so far may be touched: a launch is over, or waits for what it has written itself.
    pub fn await_writes(&mut self) {
        self.launch += 1;
    }

    /// Does what a plan asks for; `kernel` does a launch.
    pub fn run(&mut self, plan: &Plan, kernel: impl Fn(&Call<'_>, &mut Machine)) {
        for (index, step) in plan.steps.iter().enumerate() {
            self.await_writes();
            match step {
                Step::Clear { at, words } => {
                    self.doing = "clear".into();
                    let pointer =
                        Pointer { buffer: Buffer::Workspace, at: *at as usize, width: 4, of: "i32" };
                    assert!(*words > 0, "nothing is cleared at {at}");
                    if let Some(Bytes { memory, starts }) = &mut self.compiled {
                        let start = starts[Buffer::Workspace as usize] + at;
                        memory.fill(start, &vec![0; words * 4]).expect("words of the workspace");
                        continue;
                    }
                    let (first, last) = (self.cell(pointer, 0), self.cell(pointer, *words as i64 - 1));
                    let cleared = Cell { value: 0.0, width: CLEARED, writer: self.launch };
                    self.buffers[Buffer::Workspace as usize][first..last + 4 / CELL].fill(cleared);
                }
                Step::Launch { .. } => {
                    let call = Call::new(step).expect("a launch");
                    self.doing = format!("step {index}, {}", call.variant.name);
                    kernel(&call, self);
                }
            }
        }
        self.launch = 0;
    }

    /// The same of a plan in two, the second of which works in memory of its own.
    pub fn run_prepacked(&mut self, plans: &Prepacked, kernel: impl Fn(&Call<'_>, &mut Machine)) {
        let [workspace, packed] = [Buffer::Workspace, Buffer::Packed].map(|buffer| buffer as usize);
        let Prepacked { packing, block } = plans;
        self.work_in(packing.workspace_bytes);
        self.run(packing, &kernel);
        self.buffers.swap(workspace, packed);
        self.buffers[packed].iter_mut().for_each(|cell| cell.writer = 0);
        if let Some(Bytes { starts, .. }) = &mut self.compiled {
            starts.swap(workspace, packed);
        }
        self.work_in(block.workspace_bytes);
        self.run(block, kernel);
    }

    /// Gives a plan its workspace.
    pub fn work_in(&mut self, bytes: usize) {
        match &mut self.compiled {
            Some(Bytes { memory, starts }) => {
                starts[Buffer::Workspace as usize] = memory.allocate("the workspace", bytes);
            }
            None => self.allocate(Buffer::Workspace, bytes),
        }
    }
}

/// A launch, its arguments by the names that the kernel's file gives them.
pub struct Call<'a> {
    /// The kernel.
    pub variant: &'a Variant,
    /// Blocks.
    pub grid: [i64; 3],
    /// Bytes of shared memory a block that the launch adds.
    pub shared: i64,
    /// What it is given.
    pub arguments: &'a [Argument],
    /// What it asks for.
    pub signature: &'static Signature,
    /// Which parameter a name was that lay at some place: contracts ask for the same ones again and again.
    asked: [std::cell::Cell<usize>; NAMES],
}

/// Names that a call remembers.
const NAMES: usize = 64;

impl<'a> Call<'a> {
    /// A step that is a launch.
    pub fn new(step: &'a Step) -> Option<Call<'a>> {
        let Step::Launch { variant, grid, shared, arguments, .. } = step else { return None };
        let (grid, shared) = (grid.map(i64::from), i64::from(*shared));
        let asked = [const { std::cell::Cell::new(0) }; NAMES];
        Some(Call { variant, grid, shared, arguments, signature: signature(variant), asked })
    }

    /// The function's name.
    pub fn kernel(&self) -> &'static str {
        self.variant.entry.trim_end_matches("_entry")
    }

    /// Whether there is a parameter of that name.
    pub fn has(&self, name: &str) -> bool {
        self.signature.parameters.iter().any(|(other, _)| *other == name)
    }

    fn argument(&self, name: &str) -> (Argument, &'static str) {
        let (parameters, asked) =
            (&self.signature.parameters, &self.asked[name.as_ptr() as usize / 2 % NAMES]);
        if parameters[asked.get()].0 != name {
            let at = parameters.iter().position(|(other, _)| *other == name);
            asked.set(at.unwrap_or_else(|| panic!("{} has no parameter {name}", self.kernel())));
        }
        (self.arguments[asked.get()], parameters[asked.get()].1)
    }

    /// A whole number.
    pub fn int(&self, name: &str) -> i64 {
        match self.argument(name).0 {
            Argument::I32(value) => value.into(),
            Argument::I64(value) => value,
            other => panic!("{}: {name} is {other:?}", self.kernel()),
        }
    }

    /// Whole numbers.
    pub fn ints<const N: usize>(&self, names: [&str; N]) -> [i64; N] {
        names.map(|name| self.int(name))
    }

    /// A number.
    pub fn float(&self, name: &str) -> f64 {
        match self.argument(name).0 {
            Argument::F32(value) => value.into(),
            Argument::F64(value) => value,
            other => panic!("{}: {name} is {other:?}", self.kernel()),
        }
    }

    /// An address, unless nothing is at it.
    pub fn given(&self, name: &str) -> Option<Pointer> {
        let null = match self.argument(name) {
            (Argument::I64(0), of) => of.starts_with("*mut "),
            (argument, _) => matches!(argument, Argument::Pointer(Buffer::Unless, _)),
        };
        (!null).then(|| self.pointer(name))
    }

    /// An address.
    pub fn pointer(&self, name: &str) -> Pointer {
        let (argument, of) = self.argument(name);
        let Argument::Pointer(buffer, at) = argument else { panic!("{}: {name}", self.kernel()) };
        let of = of.strip_prefix("*mut ").unwrap_or(of);
        let generic = self.signature.types.iter().position(|name| *name == of);
        let of = generic.map_or(of, |at| self.variant.types[at]);
        let width = match of {
            "f16" | "bf16" => 2,
            "f32" | "i32" => 4,
            "f64" => 8,
            other => panic!("{}: {name} is of {other}", self.kernel()),
        };
        Pointer { buffer, at: at as usize, width, of }
    }

    /// A compile-time size.
    pub fn size(&self, name: &str) -> i64 {
        self.variant.param(name).unwrap_or_else(|| panic!("{} has no size {name}", self.kernel()))
    }
}

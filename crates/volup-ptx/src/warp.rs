//! A warp: its lanes' registers, where each lane is, and what instructions do.

use crate::block::{CopyAsync, World};
use crate::instruction::{Address, Instruction, Module, Op, Operand, Register, Space, Special, Type};
use crate::matrix::element;
use crate::number;
use crate::{Fault, LANES, Result};
use half::f16;
use std::collections::VecDeque;

/// Numbers of all lanes.
pub(crate) type Lanes = [u64; LANES];

/// Lanes that are at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub at: usize,
    pub mask: u32,
}

/// Copies of a thread: those since it last closed a group, and the groups.
pub(crate) struct Pending<T> {
    pub open: Vec<T>,
    pub closed: VecDeque<Vec<T>>,
}

impl<T> Default for Pending<T> {
    fn default() -> Pending<T> {
        Pending { open: Vec::new(), closed: VecDeque::new() }
    }
}

impl<T> Pending<T> {
    pub fn close(&mut self) {
        self.closed.push_back(std::mem::take(&mut self.open));
    }

    /// What is in all groups but the last ones.
    pub fn all_but(&mut self, last: usize) -> Vec<T> {
        let count = self.closed.len().saturating_sub(last);
        self.closed.drain(..count).flatten().collect()
    }

    pub fn all(&mut self) -> Vec<T> {
        self.close();
        self.all_but(0)
    }
}

/// A copy from shared memory.
pub(crate) struct BulkStore {
    pub to: u64,
    pub from: u32,
    pub bytes: usize,
}

/// Shared memory that a matrix instruction reads until it is waited for: what it read, and what that was.
pub(crate) struct Reads {
    pub a: Option<u64>,
    pub b: u64,
    pub columns: usize,
    pub transposed: bool,
    pub seen: u64,
    pub line: u32,
}

pub(crate) struct Warp {
    /// The block's number in its cluster, and the warp's in its block.
    pub rank: u32,
    pub index: u32,
    pub registers: Vec<Lanes>,
    /// By where they are.
    pub groups: Vec<Group>,
    pub copies: Vec<Pending<CopyAsync>>,
    pub stores: Vec<Pending<BulkStore>>,
    pub products: Pending<Reads>,
    /// The barrier and generation that all wait for.
    pub waiting: Option<(usize, u64)>,
    /// The generation of the cluster's barrier that it has come to.
    pub cluster: Option<u64>,
}

/// What came of an instruction.
pub(crate) enum Step {
    /// The lanes go on.
    Next,
    /// They stay where they are, but something was done.
    Stay,
    /// They have to wait, and nothing was done.
    Wait,
    /// Lanes jump.
    Jump(usize, u32),
    /// Lanes end.
    End(u32),
}

impl Warp {
    pub fn new(rank: u32, index: u32, registers: u32) -> Warp {
        Warp {
            rank,
            index,
            registers: vec![[u64::MAX; LANES]; registers as usize],
            groups: Vec::new(),
            copies: (0..LANES).map(|_| Pending::default()).collect(),
            stores: (0..LANES).map(|_| Pending::default()).collect(),
            products: Pending::default(),
            waiting: None,
            cluster: None,
        }
    }

    /// Starts at the kernel's first instruction; registers keep what nobody may read.
    pub fn begin(&mut self) {
        self.groups = vec![Group { at: 0, mask: u32::MAX }];
        self.copies.iter_mut().for_each(|copies| *copies = Pending::default());
        self.products = Pending::default();
        self.cluster = None;
    }

    pub fn is_done(&self) -> bool {
        self.groups.is_empty()
    }

    /// Where its lanes are.
    pub fn place(&self, module: &Module) -> String {
        let of = |group: &Group| format!("lanes {:08x} at line {}", group.mask, module.code[group.at].line);
        format!(
            "block {} of the cluster, warp {}, {}",
            self.rank,
            self.index,
            self.groups.iter().map(of).collect::<Vec<_>>().join(", ")
        )
    }

    fn live(&self) -> u32 {
        self.groups.iter().fold(0, |live, group| live | group.mask)
    }

    /// Does so many instructions at most; how many were done.
    pub fn run(&mut self, world: &mut World<'_>, most: u64) -> Result<u64> {
        let module = world.module;
        let mut done = 0;
        'turn: while done < most {
            for index in 0..self.groups.len() {
                let group = self.groups[index];
                let Some(instruction) = module.code.get(group.at) else {
                    return Err(Fault::new("the kernel has no more instructions"));
                };
                let step = self.step(instruction, group, world).map_err(|fault| {
                    Fault::new(format!("warp {}, line {}: {fault}", self.index, instruction.line))
                })?;
                match step {
                    Step::Wait => continue,
                    Step::Stay => {}
                    Step::Next => self.groups[index].at += 1,
                    Step::Jump(to, lanes) => {
                        self.groups[index] = Group { at: to, mask: lanes };
                        if lanes != group.mask {
                            self.groups.push(Group { at: group.at + 1, mask: group.mask & !lanes });
                        }
                    }
                    Step::End(lanes) => {
                        self.groups[index] = Group { at: group.at + 1, mask: group.mask & !lanes };
                    }
                }
                done += 1;
                world.memory.counters.instructions += 1;
                if self.groups.len() > 1 || self.groups[0].mask == 0 {
                    self.regroup();
                }
                if self.groups.is_empty() {
                    break 'turn;
                }
                continue 'turn;
            }
            break;
        }
        Ok(done)
    }

    /// Lanes that come together go on together.
    fn regroup(&mut self) {
        self.groups.retain(|group| group.mask != 0);
        self.groups.sort_by_key(|group| group.at);
        self.groups.dedup_by(|next, group| {
            let same = next.at == group.at;
            group.mask |= if same { next.mask } else { 0 };
            same
        });
    }

    /// What an operand is in every lane.
    pub fn get(&self, operand: Operand, world: &World<'_>) -> Lanes {
        match operand {
            Operand::Register(register) => self.registers[register as usize],
            Operand::Number(value) => [value; LANES],
            // Of a cluster's blocks addresses say whose memory they are of.
            Operand::Dynamic if world.module.cluster > 1 => {
                [world.known(world.module.dynamic_at).into(); LANES]
            }
            Operand::Dynamic => [world.module.dynamic_at.into(); LANES],
            Operand::Special(special) => match special {
                Special::Thread(0) => {
                    std::array::from_fn(|lane| u64::from(self.index) * LANES as u64 + lane as u64)
                }
                Special::Thread(_) => [0; LANES],
                Special::Threads(0) => [world.launch.threads.into(); LANES],
                Special::Threads(_) => [1; LANES],
                Special::Block(axis) => [world.block()[axis].into(); LANES],
                Special::Blocks(axis) => [world.launch.grid[axis].into(); LANES],
                Special::Lane => std::array::from_fn(|lane| lane as u64),
                Special::Rank => [self.rank.into(); LANES],
            },
        }
    }

    pub fn addresses(&self, address: Address, world: &World<'_>) -> Lanes {
        self.get(address.base, world).map(|base| base.wrapping_add(address.offset as u64))
    }

    pub fn set(&mut self, register: Register, mask: u32, values: &Lanes) {
        let to = &mut self.registers[register as usize];
        if mask == u32::MAX {
            *to = *values;
            return;
        }
        for lane in lanes(mask) {
            to[lane] = values[lane];
        }
    }

    /// A lane's thread, of all of the cluster.
    pub fn thread(&self, lane: usize, world: &World<'_>) -> u32 {
        self.rank * world.launch.threads + self.index * LANES as u32 + lane as u32
    }

    /// Whether all lanes of a mask that have not ended are in a group.
    pub fn are_together(&self, mask: u32, group: Group) -> bool {
        mask & self.live() & !group.mask == 0
    }

    fn step(&mut self, instruction: &Instruction, group: Group, world: &mut World<'_>) -> Result<Step> {
        let mut mask = group.mask;
        if let Some(guard) = instruction.guard {
            let predicate = &self.registers[guard.register as usize];
            for lane in lanes(group.mask) {
                if (predicate[lane] & 1 == 1) == guard.negated {
                    mask &= !(1 << lane);
                }
            }
            if mask == 0 {
                return Ok(Step::Next);
            }
        }
        let unknown = || Fault::new("no such instruction of this type");
        match &instruction.op {
            Op::Nothing => {}
            Op::Branch(to) => return Ok(Step::Jump(*to, mask)),
            Op::Exit => {
                for lane in lanes(mask) {
                    let pending = &self.stores[lane];
                    if pending.open.len() + pending.closed.len() > 0 {
                        return Err(Fault::new("a thread ends before its copies have read shared memory"));
                    }
                }
                return Ok(Step::End(mask));
            }
            Op::Compute { of, ty, to, from } => {
                // Registers are looked at where they are.
                let others = from.map(|from| match from {
                    Operand::Register(_) => [0; LANES],
                    _ => self.get(from, world),
                });
                let values = std::array::from_fn(|at| match from[at] {
                    Operand::Register(register) => &self.registers[register as usize],
                    _ => &others[at],
                });
                let result = number::compute_all(*of, *ty, values, mask).ok_or_else(unknown)?;
                self.set(*to, mask, &result);
            }
            Op::SetPredicate { compare, ty, to, a, b } => {
                let (a, b) = (self.get(*a, world), self.get(*b, world));
                let mut result = [0; LANES];
                for lane in lanes(mask) {
                    result[lane] =
                        number::compare(*compare, *ty, a[lane], b[lane]).ok_or_else(unknown)?.into();
                }
                self.set(*to, mask, &result);
            }
            Op::Convert { round, to_type, from_type, to, from } => {
                let from = self.get(*from, world);
                let mut result = [0; LANES];
                for lane in lanes(mask) {
                    result[lane] =
                        number::convert(*round, *to_type, *from_type, from[lane]).ok_or_else(unknown)?;
                }
                self.set(*to, mask, &result);
            }
            Op::ConvertTwo { of, to, high, low } => {
                let (high, low) = (self.get(*high, world), self.get(*low, world));
                let one = |bits| {
                    number::convert(crate::instruction::Round::None, *of, Type::F32, bits).ok_or_else(unknown)
                };
                let mut result = [0; LANES];
                for lane in lanes(mask) {
                    result[lane] = one(high[lane])? << 16 | one(low[lane])?;
                }
                self.set(*to, mask, &result);
            }
            Op::MultiplyTwo { to, a, b } => {
                let (a, b) = (self.get(*a, world), self.get(*b, world));
                let mut result = [0; LANES];
                for lane in lanes(mask) {
                    let one = |shift: u32| {
                        let of = |bits: u64| element(Type::F16, (bits >> shift) as u32);
                        u64::from(f16::from_f64(of(a[lane]) * of(b[lane])).to_bits()) << shift
                    };
                    result[lane] = one(16) | one(0);
                }
                self.set(*to, mask, &result);
            }
            Op::Pack { to, from, bits } => {
                let width = bits / from.len() as u32;
                let mut result = [0; LANES];
                for (at, &from) in from.iter().enumerate() {
                    let part = self.get(from, world);
                    for lane in lanes(mask) {
                        result[lane] |= (part[lane] & ((1 << width) - 1)) << (width * at as u32);
                    }
                }
                self.set(*to, mask, &result);
            }
            Op::Unpack { to, from, bits } => {
                let (from, width) = (self.get(*from, world), bits / to.len() as u32);
                for (at, &to) in to.iter().enumerate() {
                    self.set(to, mask, &from.map(|from| from >> (width * at as u32) & ((1 << width) - 1)));
                }
            }
            Op::Load { space, ty, to, from } => self.load(*space, *ty, to, *from, mask, world)?,
            Op::Store { space, ty, to, from } => self.store(*space, *ty, *to, from, mask, world)?,
            Op::Atomic { of, space, ty, to, at, from } => {
                let (at, from) = (self.addresses(*at, world), self.get(*from, world));
                let mut result = [0; LANES];
                for lane in lanes(mask) {
                    let bytes = ty.bytes();
                    let before = read(*space, at[lane], bytes, bytes, world)?;
                    let after = number::compute(*of, *ty, [before, from[lane], 0, 0]).ok_or_else(unknown)?;
                    let after = &after.to_le_bytes()[..bytes];
                    match space {
                        Space::Shared => {
                            world.write_shared(at[lane] as u32, after, bytes, self.thread(lane, world))?
                        }
                        _ => world.memory.update(at[lane], after)?,
                    }
                    result[lane] = before;
                }
                self.set(*to, mask, &result);
            }
            _ => return self.together(instruction, group, mask, world),
        }
        Ok(Step::Next)
    }

    fn load(
        &mut self,
        space: Space,
        ty: Type,
        to: &[Register],
        from: Address,
        mask: u32,
        world: &mut World<'_>,
    ) -> Result<()> {
        let (from, bytes) = (self.addresses(from, world), ty.bytes());
        let whole = bytes * to.len();
        let counters = &mut world.memory.counters;
        match space {
            Space::Param => {}
            Space::Shared => counters.shared(lanes(mask).map(|lane| from[lane] as u32), whole),
            Space::Global | Space::Generic => counters.read(lanes(mask).map(|lane| from[lane]), whole),
        }
        for (at, &to) in to.iter().enumerate() {
            let (mut result, align) = ([0; LANES], if at == 0 { whole } else { bytes });
            for lane in lanes(mask) {
                let address = from[lane] + (at * bytes) as u64;
                let bits = read(space, address, bytes, align, world)?;
                let shift = 64 - ty.bits();
                result[lane] = if ty.is_signed() { ((bits << shift) as i64 >> shift) as u64 } else { bits };
            }
            self.set(to, mask, &result);
        }
        Ok(())
    }

    fn store(
        &mut self,
        space: Space,
        ty: Type,
        to: Address,
        from: &[Operand],
        mask: u32,
        world: &mut World<'_>,
    ) -> Result<()> {
        let (to, bytes) = (self.addresses(to, world), ty.bytes());
        let values: Vec<Lanes> = from.iter().map(|&from| self.get(from, world)).collect();
        let (mut whole, count) = ([0; 32], values.len() * bytes);
        let counters = &mut world.memory.counters;
        match space {
            Space::Shared => counters.shared(lanes(mask).map(|lane| to[lane] as u32), count),
            _ => counters.written(lanes(mask).map(|lane| to[lane]), count),
        }
        for lane in lanes(mask) {
            for (at, values) in values.iter().enumerate() {
                whole[at * bytes..][..bytes].copy_from_slice(&values[lane].to_le_bytes()[..bytes]);
            }
            match space {
                Space::Shared => {
                    world.write_shared(to[lane] as u32, &whole[..count], count, self.thread(lane, world))?
                }
                Space::Global | Space::Generic => {
                    let block = world.number();
                    world.memory.write(to[lane], &whole[..count], count, block)?;
                }
                Space::Param => return Err(Fault::new("parameters are written")),
            }
        }
        Ok(())
    }
}

/// A number in a space.
fn read(space: Space, address: u64, bytes: usize, align: usize, world: &World<'_>) -> Result<u64> {
    let mut word = [0; 8];
    match space {
        Space::Shared => word[..bytes].copy_from_slice(world.shared(address as u32, bytes, align)?),
        Space::Param => word[..bytes].copy_from_slice(&world.launch.arguments[address as usize..][..bytes]),
        Space::Global | Space::Generic => return world.memory.read(address, bytes, align),
    }
    Ok(u64::from_le_bytes(word))
}

/// The lanes of a mask.
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        (left != 0).then(|| {
            let lane = left.trailing_zeros() as usize;
            left &= left - 1;
            lane
        })
    })
}

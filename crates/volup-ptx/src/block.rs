//! A cluster of blocks, mostly one: shared memory, barriers, what happens beside warps, and whose turn it is.

use crate::instruction::{Module, Vote};
use crate::memory::Memory;
use crate::parse::SHARED_BASE;
use crate::warp::Warp;
use crate::{Fault, LANES, Launch, Result};
use std::collections::HashMap;

/// Instructions of a warp's turn at most.
const TURN: u64 = 96;

/// A barrier of copies, in shared memory.
#[derive(Clone, Copy, Debug, Default)]
struct Phases {
    count: i64,
    pending: i64,
    bytes: i64,
    phase: u64,
}

impl Phases {
    /// Whether some, but not all, have come.
    fn is_begun(&self) -> bool {
        self.pending != self.count || self.bytes != 0
    }
}

/// A barrier of warps.
#[derive(Clone, Copy, Debug, Default)]
struct Meeting {
    arrived: u32,
    /// Whether it is for all threads that there are.
    all: bool,
    generation: u64,
    votes: [u32; 2],
    /// Of the generation before: lanes whose predicate was set, and was not.
    result: [u32; 2],
}

/// What happens at some time. Addresses of shared memory are those that all blocks of the cluster know it by.
pub(crate) enum Event {
    /// A bulk copy to shared memory, and the barrier that counts its bytes.
    Bulk { to: u32, from: u64, bytes: usize, barrier: u32 },
    /// Copies, and then an arrival.
    Arrive { copies: Vec<CopyAsync>, barrier: u32 },
}

/// A copy of a thread to shared memory, by the address that all blocks of the cluster know: so many bytes, of which the first are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyAsync {
    pub to: u32,
    pub from: u64,
    pub bytes: usize,
    pub source: usize,
    pub thread: u32,
}

/// What the warps of a cluster's blocks share.
pub(crate) struct World<'a> {
    pub memory: &'a mut Memory,
    pub launch: &'a Launch,
    pub module: &'a Module,
    /// Whose warp has its turn.
    pub rank: u32,
    pub events: Vec<Event>,
    /// The cluster's first block.
    first: [u32; 3],
    /// Of all blocks, one after the other, as what follows.
    shared: &'a mut [u8],
    /// Of each byte of shared memory the thread that wrote it as threads do, and when; 0 if none did.
    stamps: &'a mut [(u32, u64)],
    /// When each thread last let copies and matrix instructions see what it wrote, or had seen.
    fences: Vec<u64>,
    clock: u64,
    /// By the address that all blocks know.
    phases: HashMap<u32, Phases>,
    blocks: Vec<Block>,
    /// Threads at the cluster's barrier, and how often that has ended.
    arrived: u32,
    generation: u64,
    random: u64,
}

/// What a block's warps share.
#[derive(Clone, Copy)]
struct Block {
    meetings: [Meeting; 16],
    live_warps: u32,
}

/// The bit from which on an address says whose shared memory it is in: zero for one's own, else one more than the rank.
const RANK: u32 = 24;

/// Bytes that shared memory is of when a block starts: numbers that are none, and tiny ones.
const LEFT_BEHIND: [u8; 2] = [0xff, 0x01];

/// What blocks take one after the other, since it is large.
pub(crate) struct Room {
    shared: Vec<u8>,
    stamps: Vec<(u32, u64)>,
    warps: Vec<Warp>,
}

impl Room {
    /// For clusters of a launch.
    pub fn new(module: &Module, launch: &Launch) -> Room {
        let bytes = (module.dynamic_at - SHARED_BASE + launch.shared) as usize * module.cluster as usize;
        let warps = launch.threads / LANES as u32;
        let of_cluster = (0..module.cluster).flat_map(|rank| (0..warps).map(move |index| (rank, index)));
        Room {
            shared: vec![0; bytes],
            stamps: vec![(0, 0); bytes],
            warps: of_cluster.map(|(rank, index)| Warp::new(rank, index, module.registers)).collect(),
        }
    }
}

/// Runs the blocks of one cluster, of which this is the first, to their end.
pub(crate) fn run(
    module: &Module,
    launch: &Launch,
    first: [u32; 3],
    memory: &mut Memory,
    room: &mut Room,
) -> Result<()> {
    let Room { shared, stamps, warps: all } = room;
    stamps.fill((0, 0));
    all.iter_mut().for_each(Warp::begin);
    let seed = (launch.seed ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xd134_2543_de82_ef95);
    let number = first[0] + launch.grid[0] * (first[1] + launch.grid[1] * first[2]);
    let block = Block { meetings: [Meeting::default(); 16], live_warps: launch.threads / LANES as u32 };
    let mut world = World {
        memory,
        launch,
        module,
        rank: 0,
        events: Vec::new(),
        first,
        shared,
        stamps,
        fences: vec![0; all.len() * LANES],
        clock: 1,
        phases: HashMap::new(),
        blocks: vec![block; module.cluster as usize],
        arrived: 0,
        generation: 0,
        random: seed ^ u64::from(number).wrapping_mul(0xa076_1d64_78bd_642f) | 1,
    };
    let found = LEFT_BEHIND[world.below(LEFT_BEHIND.len())];
    world.shared.fill(found);
    let place = |rank: u32, fault: Fault| {
        let block = [first[0] + rank, first[1], first[2]];
        Fault::new(format!("{}, block {block:?}: {fault}", module.name))
    };
    // Warps that could do nothing since something last happened.
    let mut stuck = vec![false; all.len()];
    loop {
        let ready: Vec<usize> = (0..all.len()).filter(|&at| !all[at].is_done() && !stuck[at]).collect();
        let choices = ready.len() + usize::from(!world.events.is_empty());
        if choices == 0 {
            break;
        }
        let choice = world.below(choices);
        let happened = match ready.get(choice) {
            Some(&at) => {
                let turn = 1 + world.below(TURN as usize) as u64;
                world.rank = all[at].rank;
                let ran = all[at].run(&mut world, turn).map_err(|fault| place(world.rank, fault))?;
                if all[at].is_done() {
                    world.leave();
                }
                stuck[at] = ran == 0;
                ran > 0
            }
            None => {
                let event = world.below(world.events.len());
                let event = world.events.swap_remove(event);
                world.happen(event).map_err(|fault| place(world.rank, fault))?;
                true
            }
        };
        if happened {
            stuck.fill(false);
        }
    }
    if all.iter().all(Warp::is_done) {
        return Ok(());
    }
    let waiting: Vec<String> =
        all.iter().filter(|warp| !warp.is_done()).map(|warp| warp.place(module)).collect();
    let mut begun: Vec<_> = world.phases.iter().filter(|(_, phases)| phases.is_begun()).collect();
    begun.sort_unstable_by_key(|(address, _)| **address);
    let begun: Vec<String> = begun.into_iter().map(|(at, phases)| format!("at {at} {phases:?}")).collect();
    let what = format!("all wait for one another: {}; barriers {}", waiting.join("; "), begun.join(", "));
    Err(place(0, Fault::new(what)))
}

impl World<'_> {
    /// A random number.
    pub fn below(&mut self, count: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        ((self.random >> 11) % count as u64) as usize
    }

    /// The block whose warp has its turn.
    pub fn block(&self) -> [u32; 3] {
        let [x, y, z] = self.first;
        [x + self.rank, y, z]
    }

    /// The block's number.
    pub fn number(&self) -> u32 {
        let [x, y, z] = self.block();
        x + self.launch.grid[0] * (y + self.launch.grid[1] * z)
    }

    /// The address that all blocks of the cluster know what the block has at one of its own by.
    pub fn known(&self, address: u32) -> u32 {
        if address >> RANK == 0 { (self.rank + 1) << RANK | address } else { address }
    }

    /// What another block of the cluster has at an address of one's own.
    pub fn mapped(&self, address: u32, rank: u32) -> Result<u32> {
        if rank as usize >= self.blocks.len() {
            return Err(Fault::new(format!("block {rank} of {} of the cluster", self.blocks.len())));
        }
        Ok((rank + 1) << RANK | address & ((1 << RANK) - 1))
    }

    fn place(&self, address: u32, bytes: usize, align: usize) -> Result<usize> {
        let known = self.known(address);
        let rank = (known >> RANK) - 1;
        let address = known & ((1 << RANK) - 1);
        let (at, size) =
            ((address as usize).wrapping_sub(SHARED_BASE as usize), self.shared.len() / self.blocks.len());
        if at.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(Fault::new(format!("byte {} of shared memory, of {size}", at as isize)));
        }
        if !(address as usize).is_multiple_of(align) {
            return Err(Fault::new(format!("byte {at} of shared memory is not aligned to {align}")));
        }
        if rank != self.rank && (self.generation == 0 || self.blocks[rank as usize].live_warps == 0) {
            return Err(Fault::new(format!("block {rank} of the cluster may not have begun, or has ended")));
        }
        Ok(rank as usize * size + at)
    }

    /// Bytes of shared memory.
    pub fn shared(&self, address: u32, bytes: usize, align: usize) -> Result<&[u8]> {
        let at = self.place(address, bytes, align)?;
        Ok(&self.shared[at..at + bytes])
    }

    /// The same for what sees a thread's writes only after a fence: by that thread, or by the `reader` that has waited
    /// for it.
    pub fn shared_async(&self, address: u32, bytes: usize, align: usize, reader: u32) -> Result<&[u8]> {
        let at = self.place(address, bytes, align)?;
        let fenced = |time: u64, thread: u32| time < self.fences[thread as usize];
        let unseen =
            |&(thread, time): &(u32, u64)| time > 0 && !fenced(time, thread) && !fenced(time, reader);
        if let Some(byte) = self.stamps[at..at + bytes].iter().position(unseen) {
            let thread = self.stamps[at + byte].0;
            return Err(Fault::new(format!(
                "byte {} of shared memory was written by thread {thread} without a fence for copies and matrix \
                 instructions",
                at + byte
            )));
        }
        Ok(&self.shared[at..at + bytes])
    }

    /// Writes to shared memory, as a thread does.
    pub fn write_shared(&mut self, address: u32, bytes: &[u8], align: usize, thread: u32) -> Result<()> {
        let at = self.place(address, bytes.len(), align)?;
        self.shared[at..at + bytes.len()].copy_from_slice(bytes);
        self.stamps[at..at + bytes.len()].fill((thread, self.clock));
        Ok(())
    }

    /// From now on copies and matrix instructions see what a thread wrote, and its own what it has seen.
    pub fn fence(&mut self, thread: u32) {
        self.clock += 1;
        self.fences[thread as usize] = self.clock;
    }

    /// What had been left for later.
    pub fn happen(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Bulk { to, from, bytes, barrier } => {
                self.rank = (to >> RANK) - 1;
                let copied = self.memory.bytes_or_ones(from, bytes)?.to_vec();
                self.memory.counters.bytes_copied += bytes as u64;
                let at = self.place(to, bytes, 16)?;
                self.shared[at..at + bytes].copy_from_slice(&copied);
                self.stamps[at..at + bytes].fill((0, 0));
                self.change(barrier, |phases| phases.bytes -= bytes as i64)
            }
            Event::Arrive { copies, barrier } => {
                self.rank = (barrier >> RANK) - 1;
                copies.into_iter().try_for_each(|copy| self.copy(copy))?;
                self.change(barrier, |phases| phases.pending -= 1)
            }
        }
    }

    /// Does a copy.
    pub fn copy(&mut self, copy: CopyAsync) -> Result<()> {
        let CopyAsync { to, from, bytes, source, thread } = copy;
        let mut copied = vec![0; bytes];
        self.memory.counters.bytes_copied += source as u64;
        if source > 0 {
            copied[..source].copy_from_slice(self.memory.bytes(from, source)?);
        }
        if !from.is_multiple_of(bytes as u64) && source > 0 {
            return Err(Fault::new(format!("a copy of {bytes} bytes from {from:#x}")));
        }
        self.write_shared(to, &copied, bytes, thread)
    }

    /// Starts a barrier of copies.
    pub fn begin(&mut self, address: u32, count: i64) -> Result<()> {
        self.place(address, 8, 8)?;
        self.phases.insert(self.known(address), Phases { count, pending: count, bytes: 0, phase: 0 });
        Ok(())
    }

    fn change(&mut self, address: u32, what: impl Fn(&mut Phases)) -> Result<()> {
        self.place(address, 8, 8)?;
        let Some(phases) = self.phases.get_mut(&self.known(address)) else {
            return Err(Fault::new(format!("no barrier at {address}")));
        };
        what(phases);
        if phases.pending < 0 {
            return Err(Fault::new(format!("more than {} arrive at the barrier at {address}", phases.count)));
        }
        if phases.pending == 0 && phases.bytes == 0 {
            *phases = Phases { pending: phases.count, phase: phases.phase + 1, ..*phases };
        }
        Ok(())
    }

    /// A thread arrives, and says how many bytes it expects.
    pub fn arrive(&mut self, address: u32, bytes: i64) -> Result<()> {
        self.change(address, |phases| {
            phases.bytes += bytes;
            phases.pending -= 1;
        })
    }

    /// Whether the phase of a parity is over.
    pub fn is_over(&self, address: u32, parity: u64) -> Result<bool> {
        match self.phases.get(&self.known(address)) {
            Some(phases) => Ok(phases.phase & 1 != parity & 1),
            None => Err(Fault::new(format!("no barrier at {address}"))),
        }
    }

    /// A warp comes to a barrier of warps; the generation that it waits for the end of.
    pub fn meet(&mut self, id: usize, threads: Option<u32>, votes: [u32; 2]) -> Result<u64> {
        let block = &mut self.blocks[self.rank as usize];
        let live = block.live_warps * LANES as u32;
        let Some(meeting) = block.meetings.get_mut(id) else {
            return Err(Fault::new(format!("there is no barrier {id}")));
        };
        meeting.arrived += LANES as u32;
        meeting.all = threads.is_none();
        for (sum, votes) in meeting.votes.iter_mut().zip(votes) {
            *sum += votes;
        }
        let (expected, generation) = (threads.unwrap_or(live), meeting.generation);
        if meeting.arrived > expected {
            return Err(Fault::new(format!("{} threads at barrier {id} of {expected}", meeting.arrived)));
        }
        if meeting.arrived == expected {
            meeting.end();
        }
        Ok(generation)
    }

    /// The votes of a generation that has ended.
    pub fn met(&self, id: usize, generation: u64) -> Option<[u32; 2]> {
        let meeting = self.blocks[self.rank as usize].meetings[id];
        (meeting.generation > generation).then_some(meeting.result)
    }

    /// A warp comes to the cluster's barrier; the generation that it waits for the end of.
    pub fn meet_cluster(&mut self) -> u64 {
        let generation = self.generation;
        self.arrived += LANES as u32;
        self.end_cluster();
        generation
    }

    /// Whether a generation of the cluster's barrier has ended.
    pub fn met_cluster(&self, generation: u64) -> bool {
        self.generation > generation
    }

    fn end_cluster(&mut self) {
        let live: u32 = self.blocks.iter().map(|block| block.live_warps * LANES as u32).sum();
        if self.arrived > 0 && self.arrived == live {
            (self.arrived, self.generation) = (0, self.generation + 1);
        }
    }

    /// A warp has ended: others do not wait for it.
    fn leave(&mut self) {
        let block = &mut self.blocks[self.rank as usize];
        block.live_warps -= 1;
        let live = block.live_warps * LANES as u32;
        for meeting in block.meetings.iter_mut().filter(|meeting| meeting.all && meeting.arrived > 0) {
            if meeting.arrived == live {
                meeting.end();
            }
        }
        self.end_cluster();
    }
}

impl Meeting {
    fn end(&mut self) {
        let result = self.votes;
        *self = Meeting { arrived: 0, generation: self.generation + 1, votes: [0, 0], result, ..*self };
    }
}

/// What a vote makes of the lanes whose predicate is set, and is not.
pub(crate) fn outcome(vote: Vote, [set, unset]: [u32; 2]) -> u64 {
    match vote {
        Vote::Any => u64::from(set > 0),
        Vote::All => u64::from(unset == 0),
        Vote::Count | Vote::Ballot => set.into(),
    }
}

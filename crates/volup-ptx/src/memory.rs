//! Global memory, every byte of which is known to have been written or not.

use crate::{Counters, Fault, Result};

/// Bits of an address inside of an allocation: a wrong offset never meets another one.
const WINDOW: u32 = 40;

struct Allocation {
    name: &'static str,
    bytes: Vec<u8>,
    written: Vec<bool>,
    /// Of each byte the launch and the block that wrote it last, plus one.
    writers: Vec<u32>,
    /// Whether blocks of a launch may write what another has written.
    handed_over: bool,
}

/// The memory of a GPU.
#[derive(Default)]
pub struct Memory {
    allocations: Vec<Allocation>,
    launch: u32,
    pub(crate) counters: Counters,
}

impl Memory {
    /// None is allocated.
    pub fn new() -> Memory {
        Memory::default()
    }

    /// What the launches so far asked for.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes that nobody has written to; their address.
    pub fn allocate(&mut self, name: &'static str, bytes: usize) -> u64 {
        let allocation = Allocation {
            name,
            bytes: vec![0xff; bytes],
            written: vec![false; bytes],
            writers: vec![0; bytes],
            handed_over: false,
        };
        self.allocations.push(allocation);
        (self.allocations.len() as u64) << WINDOW
    }

    /// Lets blocks of a launch write what another has written, of the allocation that an address is in: or forbids it again.
    ///
    /// # Errors
    /// [`Fault`] if it is in none.
    pub fn hand_over(&mut self, address: u64, allowed: bool) -> Result<()> {
        let (index, _) = self.place(address, 1, 1)?;
        self.allocations[index].handed_over = allowed;
        Ok(())
    }

    /// Writes bytes from outside of any kernel.
    ///
    /// # Errors
    /// [`Fault`] if they are not in one allocation.
    pub fn fill(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        let (index, at) = self.place(address, bytes.len(), 1)?;
        let allocation = &mut self.allocations[index];
        allocation.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        allocation.written[at..at + bytes.len()].fill(true);
        allocation.writers[at..at + bytes.len()].fill(0);
        Ok(())
    }

    /// Bytes, all of which have been written.
    ///
    /// # Errors
    /// [`Fault`] if they are not in one allocation, or some were not.
    pub fn bytes(&self, address: u64, count: usize) -> Result<&[u8]> {
        let (index, at) = self.place(address, count, 1)?;
        let allocation = &self.allocations[index];
        if let Some(unset) = allocation.written[at..at + count].iter().position(|&written| !written) {
            return Err(Fault::new(format!("byte {} of {} was never written", at + unset, allocation.name)));
        }
        Ok(&allocation.bytes[at..at + count])
    }

    /// Bytes, of which some may never have been written: these are all ones, which are no number.
    pub(crate) fn bytes_or_ones(&self, address: u64, count: usize) -> Result<&[u8]> {
        let (index, at) = self.place(address, count, 1)?;
        Ok(&self.allocations[index].bytes[at..at + count])
    }

    /// What follows is of another launch.
    pub(crate) fn next_launch(&mut self) {
        self.launch += 1;
    }

    fn place(&self, address: u64, count: usize, align: usize) -> Result<(usize, usize)> {
        let (index, at) = ((address >> WINDOW) as usize, (address & ((1 << WINDOW) - 1)) as usize);
        let Some(allocation) = index.checked_sub(1).and_then(|index| self.allocations.get(index)) else {
            return Err(Fault::new(format!("address {address:#x} is nowhere")));
        };
        let (name, size) = (allocation.name, allocation.bytes.len());
        if at + count > size {
            return Err(Fault::new(format!("bytes {at} to {} of {name}, which has {size}", at + count)));
        }
        if !at.is_multiple_of(align) {
            return Err(Fault::new(format!("byte {at} of {name} is not aligned to {align}")));
        }
        Ok((index - 1, at))
    }

    /// A number of some bytes, none of which may be unset.
    pub(crate) fn read(&self, address: u64, bytes: usize, align: usize) -> Result<u64> {
        self.place(address, bytes, align)?;
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(self.bytes(address, bytes)?);
        Ok(u64::from_le_bytes(word))
    }

    /// Writes bytes for a block; no two blocks of a launch may write the same one, unless it is handed over.
    pub(crate) fn write(&mut self, address: u64, bytes: &[u8], align: usize, block: u32) -> Result<()> {
        let (index, at) = self.place(address, bytes.len(), align)?;
        let (launch, allocation) = (self.launch, &mut self.allocations[index]);
        let stamp = launch << 16 | (block & 0xffff);
        let range = at..at + bytes.len();
        let others = |writer: u32| writer >> 16 == launch && writer != stamp;
        let mut writers = allocation.writers[range.clone()].iter();
        if let Some(byte) = writers.position(|&writer| others(writer) && !allocation.handed_over) {
            return Err(Fault::new(format!(
                "byte {} of {} is written by two blocks",
                at + byte,
                allocation.name
            )));
        }
        allocation.writers[range.clone()].fill(stamp);
        allocation.written[range.clone()].fill(true);
        allocation.bytes[range].copy_from_slice(bytes);
        Ok(())
    }

    /// As [`Memory::write`], of atomics, which any block may do.
    pub(crate) fn update(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        let (index, at) = self.place(address, bytes.len(), bytes.len())?;
        self.allocations[index].bytes[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

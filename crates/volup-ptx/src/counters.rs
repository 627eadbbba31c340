//! What a run asked of the machine: not how long it takes, but what it cannot take less than.

use crate::LANES;

/// Banks of shared memory, of 4 bytes each.
const BANKS: usize = 32;
/// Bytes that memory moves at least.
const SECTOR: u64 = 32;

/// Sums over all warps of all launches so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Instructions of PTX that warps issued. `ptxas` makes more or fewer of them.
    pub instructions: u64,
    /// Loads and stores of shared memory, and how often it had to be asked for all of their lanes: more often where lanes meet in
    /// a bank.
    pub shared_requests: u64,
    /// See `shared_requests`.
    pub shared_wavefronts: u64,
    /// Sectors of 32 bytes that loads of lanes asked for, stores wrote, and stores wrote in part, an instruction at a time.
    pub sectors_read: u64,
    /// See `sectors_read`.
    pub sectors_written: u64,
    /// See `sectors_read`.
    pub sectors_written_in_part: u64,
    /// Bytes that copies brought to shared memory, and bulk copies wrote from it.
    pub bytes_copied: u64,
    /// See `bytes_copied`.
    pub bytes_stored: u64,
    /// Matrix instructions of a warp, and of a warpgroup, counted for each of its warps.
    pub products: u64,
    /// See `products`.
    pub group_products: u64,
}

impl Counters {
    /// A load or store of shared memory, of so many bytes of each lane that has an address.
    pub(crate) fn shared(&mut self, addresses: impl Iterator<Item = u32>, bytes: usize) {
        self.shared_requests += 1;
        // Wide ones are done for a half or a quarter of the warp at a time.
        let at_once = LANES * 4 / bytes.clamp(4, 16);
        let addresses: Vec<u32> = addresses.collect();
        for part in addresses.chunks(at_once) {
            let mut words = [const { Vec::<u32>::new() }; BANKS];
            for word in part.iter().flat_map(|&at| at / 4..(at + bytes as u32).div_ceil(4)) {
                let bank = &mut words[word as usize % BANKS];
                if !bank.contains(&word) {
                    bank.push(word);
                }
            }
            self.shared_wavefronts += words.iter().map(Vec::len).max().unwrap_or(0) as u64;
        }
    }

    /// Sectors that lanes ask for; each with the bytes of it that they have.
    fn sectors(addresses: impl Iterator<Item = u64>, bytes: usize) -> Vec<(u64, u32)> {
        let mut found: Vec<(u64, u32)> = Vec::new();
        for at in addresses.flat_map(|at| at..at + bytes as u64) {
            let (sector, byte) = (at / SECTOR, 1 << (at % SECTOR));
            match found.iter_mut().rev().find(|(known, _)| *known == sector) {
                Some((_, mask)) => *mask |= byte,
                None => found.push((sector, byte)),
            }
        }
        found
    }

    /// A load of memory.
    pub(crate) fn read(&mut self, addresses: impl Iterator<Item = u64>, bytes: usize) {
        self.sectors_read += Counters::sectors(addresses, bytes).len() as u64;
    }

    /// A store.
    pub(crate) fn written(&mut self, addresses: impl Iterator<Item = u64>, bytes: usize) {
        let sectors = Counters::sectors(addresses, bytes);
        self.sectors_written += sectors.len() as u64;
        self.sectors_written_in_part += sectors.iter().filter(|(_, mask)| *mask != u32::MAX).count() as u64;
    }
}

//! Instructions of lanes that have to be together, and those that say what happens beside them: barriers, copies, matrices.

use crate::block::{CopyAsync, Event, World, outcome};
use crate::instruction::{Address, Copy, Instruction, Op, Operand, Register, Type, Vote};
use crate::matrix;
use crate::number;
use crate::warp::{BulkStore, Group, Lanes, Reads, Step, Warp, lanes};
use crate::{Fault, LANES, Result};
use std::ops::Range;

impl Warp {
    /// Instructions of lanes that have to be together, and those that say what happens beside them.
    pub(crate) fn together(
        &mut self,
        instruction: &Instruction,
        group: Group,
        mask: u32,
        world: &mut World<'_>,
    ) -> Result<Step> {
        let all_here = self.are_together(u32::MAX, group);
        let first = mask.trailing_zeros() as usize;
        match &instruction.op {
            Op::AlignedNothing if !all_here => return Ok(Step::Wait),
            Op::AlignedNothing => {}
            Op::WarpSync { mask: of } => {
                if !self.are_together(self.get(*of, world)[first] as u32, group) {
                    return Ok(Step::Wait);
                }
            }
            Op::Barrier { id, threads, vote } => {
                if !all_here {
                    return Ok(Step::Wait);
                }
                let id = self.get(*id, world)[first] as usize;
                let Some((_, generation)) = self.waiting else {
                    let threads = threads.map(|threads| self.get(threads, world)[first] as u32);
                    let votes = vote.map_or([0, 0], |(_, _, of)| self.votes(of, mask, world));
                    self.waiting = Some((id, world.meet(id, threads, votes)?));
                    return Ok(Step::Stay);
                };
                let Some(votes) = world.met(id, generation) else { return Ok(Step::Wait) };
                self.waiting = None;
                if let Some((vote, to, _)) = vote {
                    self.set(*to, mask, &[outcome(*vote, votes); LANES]);
                }
            }
            Op::Shuffle { mode, to, found, from, lane, clamp, mask: of } => {
                if !self.are_together(self.get(*of, world)[first] as u32, group) {
                    return Ok(Step::Wait);
                }
                let [from, by, clamp] = [*from, *lane, *clamp].map(|operand| self.get(operand, world));
                let (mut result, mut inside) = ([0; LANES], [0; LANES]);
                for lane in lanes(mask) {
                    let (segment, limit) = ((clamp[lane] >> 8 & 31) as usize, (clamp[lane] & 31) as usize);
                    let most = lane & segment | limit & !segment;
                    let (source, is_inside) = match mode.as_str() {
                        "idx" => {
                            let source = lane & segment | by[lane] as usize & 31 & !segment;
                            (source, source <= most)
                        }
                        "bfly" => (lane ^ by[lane] as usize & 31, (lane ^ by[lane] as usize & 31) <= most),
                        "down" => (lane + (by[lane] as usize & 31), lane + (by[lane] as usize & 31) <= most),
                        "up" => {
                            let source = lane as i64 - (by[lane] & 31) as i64;
                            (source.max(0) as usize, source >= most as i64)
                        }
                        _ => return Err(Fault::new(format!("shuffle {mode}"))),
                    };
                    let source = if is_inside { source } else { lane };
                    if mask >> source & 1 == 0 {
                        return Err(Fault::new(format!("lane {source} is not there to be read")));
                    }
                    result[lane] = from[source];
                    inside[lane] = is_inside.into();
                }
                self.set(*to, mask, &result);
                if let Some(found) = found {
                    self.set(*found, mask, &inside);
                }
            }
            Op::Vote { vote, to, from, mask: of } => {
                let of = self.get(*of, world)[first] as u32;
                if !self.are_together(of, group) {
                    return Ok(Step::Wait);
                }
                let from_lanes = self.get(*from, world);
                let result = match vote {
                    Vote::Ballot => lanes(mask & of).map(|lane| (from_lanes[lane] & 1) << lane).sum(),
                    vote => outcome(*vote, self.votes(*from, mask & of, world)),
                };
                self.set(*to, mask, &[result; LANES]);
            }
            Op::Reduce { of, ty, to, from, mask: members } => {
                let members = self.get(*members, world)[first] as u32;
                if !self.are_together(members, group) {
                    return Ok(Step::Wait);
                }
                let from = self.get(*from, world);
                let both = |a: Option<u64>, lane: usize| match a {
                    None => Some(from[lane]),
                    Some(a) => number::compute(*of, *ty, [a, from[lane], 0, 0]),
                };
                let result = lanes(mask & members).fold(None, both);
                self.set(*to, mask, &[result.ok_or_else(|| Fault::new("no such reduction"))?; LANES]);
            }
            Op::BarrierInit { at, count } => {
                let (at, count) = (self.addresses(*at, world), self.get(*count, world));
                for lane in lanes(mask) {
                    world.begin(at[lane] as u32, count[lane] as i64)?;
                }
            }
            Op::BarrierArrive { at, bytes } => {
                let at = self.addresses(*at, world);
                let bytes = self.get(bytes.unwrap_or(Operand::Number(0)), world);
                for lane in lanes(mask) {
                    world.arrive(at[lane] as u32, i64::from(bytes[lane] as u32))?;
                }
            }
            Op::BarrierWait { to, at, parity } => {
                let (at, parity) = (self.addresses(*at, world), self.get(*parity, world));
                for lane in lanes(mask) {
                    if !world.is_over(at[lane] as u32, parity[lane])? {
                        return Ok(Step::Wait);
                    }
                }
                self.set(*to, mask, &[1; LANES]);
            }
            Op::BarrierTest { to, at, parity } => {
                let (at, parity) = (self.addresses(*at, world), self.get(*parity, world));
                let mut over = [0; LANES];
                for lane in lanes(mask) {
                    over[lane] = world.is_over(at[lane] as u32, parity[lane])?.into();
                }
                self.set(*to, mask, &over);
            }
            Op::BulkLoad { to, from, bytes, barrier } => {
                let [to, from, barrier] =
                    [*to, *from, *barrier].map(|address| self.addresses(address, world));
                let bytes = self.get(*bytes, world);
                for lane in lanes(mask) {
                    let bytes = bytes[lane] as u32 as usize;
                    if bytes == 0 || !bytes.is_multiple_of(16) || !from[lane].is_multiple_of(16) {
                        return Err(Fault::new(format!("a copy of {bytes} bytes from {:#x}", from[lane])));
                    }
                    let [to, barrier] = [to, barrier].map(|at| world.known(at[lane] as u32));
                    world.events.push(Event::Bulk { to, from: from[lane], bytes, barrier });
                }
            }
            Op::BulkStore { to, from, bytes } => {
                let [to, from] = [*to, *from].map(|address| self.addresses(address, world));
                let bytes = self.get(*bytes, world);
                for lane in lanes(mask) {
                    let bytes = bytes[lane] as u32 as usize;
                    if bytes == 0 || !bytes.is_multiple_of(16) || !to[lane].is_multiple_of(16) {
                        return Err(Fault::new(format!("a copy of {bytes} bytes to {:#x}", to[lane])));
                    }
                    let from = from[lane] as u32;
                    world.shared_async(from, bytes, 16, self.thread(lane, world))?;
                    self.stores[lane].open.push(BulkStore { to: to[lane], from, bytes });
                }
            }
            Op::CopyAsync { to, from, bytes, source } => {
                let [to, from] = [*to, *from].map(|address| self.addresses(address, world));
                let source = self.get(source.unwrap_or(Operand::Number(*bytes as u64)), world);
                for lane in lanes(mask) {
                    let source = source[lane] as u32 as usize;
                    let (to, thread) = (world.known(to[lane] as u32), self.thread(lane, world));
                    let copy = CopyAsync { to, from: from[lane], bytes: *bytes, source, thread };
                    self.copies[lane].open.push(copy);
                }
            }
            Op::Copies(what) => self.copies(*what, mask, world)?,
            Op::CopiesArrive { at } => {
                let at = self.addresses(*at, world);
                for lane in lanes(mask) {
                    let copies = self.copies[lane].all();
                    let barrier = world.known(at[lane] as u32);
                    world.events.push(Event::Arrive { copies, barrier });
                }
            }
            Op::MapShared { to, from, rank } => {
                let (from, rank) = (self.get(*from, world), self.get(*rank, world));
                let mut result = [0; LANES];
                for lane in lanes(mask) {
                    result[lane] = world.mapped(from[lane] as u32, rank[lane] as u32)?.into();
                }
                self.set(*to, mask, &result);
            }
            Op::ProxyFence => lanes(mask).for_each(|lane| world.fence(self.thread(lane, world))),
            _ if !all_here => return Ok(Step::Wait),
            Op::ClusterArrive => self.cluster = Some(world.meet_cluster()),
            Op::ClusterWait => match self.cluster {
                Some(generation) if world.met_cluster(generation) => self.cluster = None,
                Some(_) => return Ok(Step::Wait),
                None => return Err(Fault::new("a warp waits for the cluster without having come")),
            },
            Op::LoadMatrix { to, from, transposed } => self.load_matrix(to, *from, *transposed, world)?,
            Op::StoreMatrix { to, from, transposed } => self.store_matrix(*to, from, *transposed, world)?,
            Op::Multiply { of, to, a, b, c } => {
                world.memory.counters.products += 1;
                let [a, b] = [a, b].map(|list| self.all_of(list));
                let (rows, columns) =
                    (matrix::rows_of_registers(*of, &a), matrix::columns_of_registers(*of, &b));
                let mut sums = self.all_of(c);
                matrix::multiply_add(*of, &rows, &columns, &mut sums, true);
                for (&to, sums) in to.iter().zip(&sums) {
                    self.set(to, mask, sums);
                }
            }
            Op::GroupMultiply { of, to, a, a_registers, b, keep, transposed } => {
                world.memory.counters.group_products += 1;
                let keep = self.get(*keep, world)[first] & 1 == 1;
                let b = self.get(*b, world)[first];
                let a = if a_registers.is_empty() { Some(self.get(*a, world)[first]) } else { None };
                let columns = to.len() * 2;
                let line = instruction.line;
                let (reads, of_a) = self.operands(a, b, columns, *transposed, world)?;
                let rows = match a {
                    None => matrix::rows_of_registers(*of, &self.all_of(a_registers)),
                    Some(_) => elements_of(*of, false, &reads[..of_a]),
                };
                let b_columns = elements_of(*of, *transposed, &reads[of_a..]);
                let mut sums = self.all_of(to);
                matrix::multiply_add(*of, &rows, &b_columns, &mut sums, keep);
                for (&to, sums) in to.iter().zip(&sums) {
                    self.set(to, mask, sums);
                }
                let reads = Reads { a, b, columns, transposed: *transposed, seen: hash(&reads), line };
                self.products.open.push(reads);
            }
            Op::GroupCommit => self.products.close(),
            Op::GroupWait(last) => {
                for Reads { a, b, columns, transposed, seen, line } in self.products.all_but(*last) {
                    let (reads, _) = self.operands(a, b, columns, transposed, world)?;
                    if hash(&reads) != seen {
                        let what =
                            "shared memory changed while the matrix instruction read it that is at line";
                        return Err(Fault::new(format!("{what} {line}")));
                    }
                }
            }
            other => return Err(Fault::new(format!("{other:?} is not known"))),
        }
        Ok(Step::Next)
    }

    /// What a warpgroup's instruction reads of shared memory for this warp: of A, if it is there, the rows that are its own, so many bytes, and B.
    fn operands(
        &self,
        a: Option<u64>,
        b: u64,
        columns: usize,
        transposed: bool,
        world: &World<'_>,
    ) -> Result<(Vec<u8>, usize)> {
        let (reader, first) = (self.thread(0, world), self.index as usize % 4 * 16);
        let mut reads = Vec::with_capacity(32 * (16 + columns));
        if let Some(a) = a {
            read_operand(a, &(first..first + 16), false, reader, world, &mut reads)?;
        }
        let of_a = reads.len();
        read_operand(b, &(0..columns), transposed, reader, world, &mut reads)?;
        Ok((reads, of_a))
    }

    /// Lanes of a mask whose predicate is set, and is not.
    fn votes(&self, of: Operand, mask: u32, world: &World<'_>) -> [u32; 2] {
        let values = self.get(of, world);
        let set = lanes(mask).filter(|&lane| values[lane] & 1 == 1).count() as u32;
        [set, mask.count_ones() - set]
    }

    fn all_of(&self, list: &[Register]) -> Vec<Lanes> {
        list.iter().map(|&register| self.registers[register as usize]).collect()
    }

    fn copies(&mut self, what: Copy, mask: u32, world: &mut World<'_>) -> Result<()> {
        for lane in lanes(mask) {
            let copies = match what {
                Copy::Commit => {
                    self.copies[lane].close();
                    vec![]
                }
                Copy::Wait(last) => self.copies[lane].all_but(last),
                Copy::WaitAll => self.copies[lane].all(),
                Copy::BulkCommit => {
                    self.stores[lane].close();
                    vec![]
                }
                Copy::BulkWait(last) => {
                    for BulkStore { to, from, bytes } in self.stores[lane].all_but(last) {
                        let stored = world.shared(from, bytes, 16)?.to_vec();
                        world.memory.counters.bytes_stored += bytes as u64;
                        let block = world.number();
                        world.memory.write(to, &stored, 16, block)?;
                    }
                    vec![]
                }
            };
            copies.into_iter().try_for_each(|copy| world.copy(copy))?;
        }
        Ok(())
    }

    fn load_matrix(
        &mut self,
        to: &[Register],
        from: Address,
        transposed: bool,
        world: &mut World<'_>,
    ) -> Result<()> {
        let from = self.addresses(from, world);
        for (matrix, &to) in to.iter().enumerate() {
            let rows_at = from[matrix * 8..][..8].iter().map(|&at| at as u32);
            world.memory.counters.shared(rows_at, 16);
            let mut rows = [[0u16; 8]; 8];
            for (row, values) in rows.iter_mut().enumerate() {
                let bytes = world.shared(from[matrix * 8 + row] as u32, 16, 16)?;
                for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(2)) {
                    *value = u16::from_le_bytes([bytes[0], bytes[1]]);
                }
            }
            let word = |lane: usize| {
                let (row, column) = (lane / 4, lane % 4 * 2);
                let [low, high] = match transposed {
                    false => [rows[row][column], rows[row][column + 1]],
                    true => [rows[column][row], rows[column + 1][row]],
                };
                u64::from(low) | u64::from(high) << 16
            };
            self.registers[to as usize] = std::array::from_fn(word);
        }
        Ok(())
    }

    fn store_matrix(
        &mut self,
        to: Address,
        from: &[Register],
        transposed: bool,
        world: &mut World<'_>,
    ) -> Result<()> {
        let to = self.addresses(to, world);
        for (matrix, &from) in from.iter().enumerate() {
            let rows_at: [u32; 8] = std::array::from_fn(|row| to[matrix * 8 + row] as u32);
            world.memory.counters.shared(rows_at.into_iter(), 16);
            let words = self.registers[from as usize];
            for (row, &at) in rows_at.iter().enumerate() {
                let element = |column: usize| {
                    let [row, column] = if transposed { [column, row] } else { [row, column] };
                    (words[row * 4 + column / 2] >> (column % 2 * 16)) as u16
                };
                let bytes: [u8; 16] = std::array::from_fn(|byte| element(byte / 2).to_le_bytes()[byte % 2]);
                world.write_shared(at, &bytes, 16, self.thread(matrix * 8 + row, world))?;
            }
        }
        Ok(())
    }
}

/// Reads rows of A or columns of B, 32 bytes of K each, that a descriptor tells of, for a reading thread: eights of rows of 16 bytes one after the
/// other, first their first halves, or rows that are swizzled, any of which may be the first.
fn read_operand(
    descriptor: u64,
    rows: &Range<usize>,
    transposed: bool,
    reader: u32,
    world: &World<'_>,
    reads: &mut Vec<u8>,
) -> Result<()> {
    let field = |shift: u32| ((descriptor >> shift & 0x3fff) << 4) as u32;
    let (start, along_k, along_rows) = (field(0), field(16), field(32));
    if descriptor >> 49 & 0x1fff != 0 {
        return Err(Fault::new("a descriptor with a base offset"));
    }
    let swizzled = match descriptor >> 62 {
        0 => None,
        _ if transposed => return Err(Fault::new("a descriptor of swizzled columns")),
        kind => Some(256 >> kind),
    };
    for eight in 0..rows.len() / 8 {
        for half in 0..2 {
            // Eight rows of 16 bytes.
            let at = start + (rows.start / 8 + eight) as u32 * along_rows;
            match swizzled {
                None => {
                    let at = at + half * along_k;
                    reads.extend_from_slice(world.shared_async(at, 128, 16, reader)?);
                }
                Some(bytes) => {
                    for row in 0..8 {
                        let at = at + row * bytes + half * 16;
                        let at = at ^ (at >> 7 & (bytes / 16 - 1)) << 4;
                        reads.extend_from_slice(world.shared_async(at, 16, 16, reader)?);
                    }
                }
            }
        }
    }
    Ok(())
}

/// The elements of what was read so.
fn elements_of(of: Type, transposed: bool, reads: &[u8]) -> Vec<[f64; 16]> {
    let mut found = vec![[0.0; 16]; reads.len() / 32];
    for (index, bytes) in reads.chunks_exact(128).enumerate() {
        let (eight, half) = (index / 2, index % 2);
        for (row, bytes) in bytes.chunks_exact(16).enumerate() {
            if of == Type::TF32 {
                for (k, bytes) in bytes.chunks_exact(4).enumerate() {
                    let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                    found[eight * 8 + row][half * 4 + k] = matrix::element(of, bits);
                }
                continue;
            }
            for (at, bytes) in bytes.chunks_exact(2).enumerate() {
                let bits = u16::from_le_bytes([bytes[0], bytes[1]]).into();
                let (row, k) = if transposed { (at, row) } else { (row, at) };
                found[eight * 8 + row][half * 8 + k] = matrix::element(of, bits);
            }
        }
    }
    found
}

/// FNV-1a of words instead of bytes.
fn hash(bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
    words.fold(0xcbf2_9ce4_8422_2325, |hash, word| (hash ^ word).wrapping_mul(0x100_0000_01b3))
}

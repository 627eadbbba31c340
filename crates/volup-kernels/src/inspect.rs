//! What a cubin's machine code shows: registers, local memory, and whether matrix instructions
//! overlap.

use anyhow::{Context, Result, bail, ensure};
use std::path::Path;
use std::process::Command;

/// What a kernel takes of a multiprocessor.
pub struct Usage {
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of local memory a thread: stack and spills.
    pub local_bytes: u32,
    /// Bytes of shared memory a block.
    pub shared_bytes: u32,
}

/// The only generation whose matrix instructions are issued in batches.
const HOPPER: &str = "sm_9";

/// Reads a cubin; refuses one that spills, or that waits after each matrix instruction; of CUDA C++ also one that may give back
/// shared memory while it still reads it. What the compiler of tiles makes is its own affair.
pub fn gate(cubin: &Path, arch: &str, is_cuda: bool) -> Result<Usage> {
    let usage = usage(&cuobjdump("-res-usage", cubin)?)?;
    if usage.local_bytes > 0 {
        bail!("refused: {} bytes of local memory at {} registers", usage.local_bytes, usage.registers);
    }
    // The disassembly takes as long as a third of the compiler.
    if arch.starts_with(HOPPER) {
        let sass = cuobjdump("-sass", cubin)?;
        let why = serialised(&sass).or_else(|| overtaken(&sass).filter(|_| is_cuda));
        if let Some(why) = why {
            bail!("refused: {why}");
        }
    }
    Ok(usage)
}

fn cuobjdump(what: &str, cubin: &Path) -> Result<String> {
    let output = Command::new("cuobjdump").arg(what).arg(cubin).output().context("cannot run cuobjdump")?;
    ensure!(output.status.success(), "cuobjdump: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Adds up what `cuobjdump -res-usage` says of each function.
fn usage(text: &str) -> Result<Usage> {
    let most = |field: &str| -> Option<u32> {
        let values = text.split_whitespace().filter_map(|word| word.strip_prefix(field)?.parse().ok());
        values.max()
    };
    let registers = most("REG:").context("cuobjdump names no registers")?;
    let local_bytes = most("STACK:").unwrap_or(0).max(most("LOCAL:").unwrap_or(0));
    Ok(Usage { registers, local_bytes, shared_bytes: most("SHARED:").unwrap_or(0) })
}

/// Why Hopper's matrix instructions do not overlap, if they do not. They are issued in batches, one
/// batch a step of the reduction, and a batch's last instruction signals its end; a pipelined loop
/// waits until all batches but one are done (`DEPBAR.LE gsb0, 0x1`), a serialised one for every
/// instruction. Other generations have nothing of the kind: Ampere's HMMA writes registers in order, and
/// Blackwell's UTCHMMA its own memory, behind barriers that serve copies too.
fn serialised(sass: &str) -> Option<String> {
    let (mut matrix, mut signals, mut waits) = (0, 0, 0);
    for line in sass.lines() {
        if line.contains("HGMMA") {
            matrix += 1;
            signals += usize::from(line.contains("gsb0"));
        } else if line.contains("WARPGROUP.DEPBAR") {
            waits += 1;
        }
    }
    let alone = matrix > 2 && (signals == matrix || waits >= matrix);
    alone.then(|| format!("{matrix} matrix instructions with {signals} signals and {waits} waits"))
}

/// An arrival at a barrier that does not wait for a load from shared memory before it, if there is one: whoever it lets go on may
/// overwrite what is loaded. Each instruction's second half says which of six counters a load raises until it is there, and which ones
/// the instruction waits for. Instructions are gone through as they lie, whatever branches there are.
fn overtaken(sass: &str) -> Option<String> {
    const NONE: u64 = 7;
    let mut loads: [Option<&str>; 6] = [None; 6];
    let mut lines = sass.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        let Some((_, what)) = line.split_once(';').and_then(|(what, _)| what.split_once("*/")) else {
            continue;
        };
        let what = what.trim();
        let half =
            |line: &&str| u64::from_str_radix(line.strip_prefix("/* 0x")?.strip_suffix(" */")?, 16).ok();
        let Some(half) = lines.peek().and_then(half) else { continue };
        let control = half >> 41;
        let (raised, waits) = (control >> 5 & NONE, control >> 11 & 63);
        for (counter, load) in loads.iter_mut().enumerate() {
            *load = load.filter(|_| waits >> counter & 1 == 0);
        }
        let is = |name| what.split_whitespace().any(|word| word.starts_with(name));
        if is("SYNCS.ARRIVE")
            && let Some(load) = loads.iter().flatten().next()
        {
            return Some(format!("`{what}` does not wait for `{load}`"));
        }
        if let Some(load) = loads.get_mut(raised as usize).filter(|_| is("LDS")) {
            *load = Some(what);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An instruction as it is disassembled, with the counter that it raises, and one that it waits for.
    fn instruction(what: &str, raises: u64, waits: Option<u64>) -> String {
        let control = raises << 5 | 7 << 8 | waits.map_or(0, |counter| 1 << counter) << 11;
        format!("        /*0010*/  {what} ;  /* 0x0000000000007918 */\n  /* 0x{:016x} */\n", control << 41)
    }

    #[test]
    fn an_arrival_that_overtakes_a_load_is_noticed() {
        let load = instruction("LDS.64 R2, [R1]", 2, None);
        let arrival = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R5+0x8], RZ";
        let (at_once, later) = (instruction(arrival, 7, None), instruction(arrival, 7, Some(2)));
        assert!(overtaken(&format!("{load}{at_once}")).is_some_and(|why| why.contains("LDS.64")));
        assert!(overtaken(&format!("{load}{later}")).is_none());
        let used = instruction("FADD R2, R2, R3", 7, Some(2));
        assert!(overtaken(&format!("{load}{used}{at_once}")).is_none());
        let other = instruction("FADD R4, R4, R3", 7, Some(1));
        assert!(overtaken(&format!("{load}{other}{at_once}")).is_some());
        let matrix = instruction("LDSM.16.M88.4 R4, [R1]", 0, None);
        assert!(overtaken(&format!("{matrix}{at_once}")).is_some());
        let elsewhere = instruction("LDG.E R4, [R2.64]", 0, None);
        assert!(overtaken(&format!("{elsewhere}{at_once}")).is_none());
    }

    #[test]
    fn usage_is_the_largest_of_any_function() {
        let text = " Function a:\n  REG:58 STACK:0 SHARED:2048 LOCAL:0\n Function b:\n  REG:90 STACK:8 SHARED:0 LOCAL:0";
        let usage = usage(text).unwrap();
        assert_eq!((usage.registers, usage.local_bytes, usage.shared_bytes), (90, 8, 2048));
        assert!(super::usage("nothing").is_err());
    }

    #[test]
    fn a_wait_after_each_matrix_instruction_is_noticed() {
        let batch = "HGMMA R24, gdesc[UR12], R24 ;\n".repeat(3) + "HGMMA R24, gdesc[UR12], R24, gsb0 ;\n";
        let pipelined = format!("{batch}{batch}WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n");
        assert!(serialised(&pipelined).is_none());
        let alone = "HGMMA R24, gdesc[UR12], R24, gsb0 ;\nWARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n".repeat(8);
        assert!(serialised(&alone).is_some());
        assert!(serialised("FFMA R1, R2, R3, R4 ;").is_none());
        let ampere = "HMMA.16816.F32 R24, R4, R8, R24 ;\nDEPBAR.LE SB0, 0x0 ;\n".repeat(8);
        let blackwell =
            "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0 ;\n".repeat(8);
        assert!(serialised(&ampere).is_none() && serialised(&blackwell).is_none());
    }
}

//! Kernels in CUDA C++: `src/cuda/<kernel>.cu` compiled by `nvcc` to PTX, which tests run on the CPU, and from that to
//! machine code; one kernel a file.
//!
//! Files are read when they are compiled, so that changing one does not make this tool anew. Macros tell
//! them what to be: `TYPE_F16` or `TYPE_BF16` for those types, and each size by its name.

use crate::variants::Variant;
use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The kernels' files, and what they include.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda");
/// What all are compiled with, to PTX and on: for Hopper with the instructions that no other architecture has.
const TO_PTX: [&str; 4] = ["-ptx", "-std=c++17", "-gencode", "arch=compute_90a,code=compute_90a"];
const TO_CUBIN: [&str; 3] = ["-cubin", "-gencode", "arch=compute_90a,code=sm_90a"];
/// How the numbers of the warnings begin that say why matrix instructions do not overlap.
const SERIALISED: &str = "C75";

/// Everything that a cubin is made from, as bytes: the compiler, what it is told, and the files.
pub fn recipe(variant: &Variant) -> Result<Vec<u8>> {
    let threads = variant.threads.unwrap_or(1);
    let told = flags(variant).join("\n") + &TO_CUBIN.join("\n");
    let mut known = format!("{}\n{threads} threads\n{told}\n", version()?);
    let mut files = vec![source(variant)];
    let mut read = 0;
    while read < files.len() {
        let text = std::fs::read_to_string(&files[read])
            .with_context(|| format!("cannot read {}", files[read].display()))?;
        for file in included(&text).map(|name| Path::new(FOLDER).join(name)) {
            if !files.contains(&file) {
                files.push(file);
            }
        }
        known += &text;
        read += 1;
    }
    Ok(known.into_bytes())
}

/// The names of files that a file includes, of this folder.
fn included(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'))
}

/// Compiles a variant to PTX, unless the file says in its last line that it is of this recipe, given as a hash.
pub fn to_ptx(variant: &Variant, recipe: &str, ptx: &Path) -> Result<()> {
    let signature = format!("// recipe {recipe}\n");
    if std::fs::read_to_string(ptx).is_ok_and(|text| text.ends_with(&signature)) {
        return Ok(());
    }
    // Of this process alone: others may make the same.
    let fresh = ptx.with_extension(format!("ptx.{}", std::process::id()));
    run(&flags(variant), &source(variant), &fresh)?;
    let mut text = std::fs::read_to_string(&fresh)?;
    text += &signature;
    std::fs::write(&fresh, text)?;
    std::fs::rename(&fresh, ptx).with_context(|| format!("cannot write {}", ptx.display()))
}

/// Compiles a variant, by its PTX; refuses one whose matrix instructions the compiler has to serialise.
pub fn compile(variant: &Variant, recipe: &str, ptx: &Path, cubin: &Path) -> Result<()> {
    to_ptx(variant, recipe, ptx)?;
    let said = run(&TO_CUBIN, ptx, cubin)?;
    if let Some(warning) = serialised(&said) {
        bail!("refused: {warning}");
    }
    Ok(())
}

/// Makes a file of another; what the compiler said.
fn run(flags: &[impl AsRef<OsStr>], from: &Path, to: &Path) -> Result<String> {
    let output =
        Command::new("nvcc").args(flags).arg("-o").args([to, from]).output().context("cannot run nvcc")?;
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    if !output.status.success() {
        bail!("nvcc: {}", said.trim());
    }
    Ok(said)
}

fn source(variant: &Variant) -> PathBuf {
    Path::new(FOLDER).join(format!("{}.cu", variant.kernel))
}

fn flags(variant: &Variant) -> Vec<String> {
    let types = variant.types.iter().map(|name| format!("-DTYPE_{}", name.to_uppercase()));
    let sizes = variant.params.iter().map(|(name, value)| format!("-D{name}={value}"));
    TO_PTX.into_iter().map(String::from).chain(types).chain(sizes).collect()
}

/// The warning that says so.
fn serialised(said: &str) -> Option<&str> {
    said.lines().find(|line| line.contains(SERIALISED))
}

/// The compiler's version.
fn version() -> Result<&'static str> {
    static VERSION: OnceLock<String> = OnceLock::new();
    if let Some(version) = VERSION.get() {
        return Ok(version);
    }
    let output =
        Command::new("nvcc").arg("--version").output().context("cannot run nvcc: is it on the PATH?")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split_whitespace().find(|word| word.starts_with('V')).context("nvcc's version")?;
    Ok(VERSION.get_or_init(|| format!("nvcc {}", version.trim_start_matches('V'))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variants::parse;

    #[test]
    fn a_file_is_told_what_to_be() {
        let text = "[[variant]]\nfamily = \"halo_gemm\"\nkernel = \"halo_gemm\"\ntypes = [\"bf16\"]\n\
                    params = { KIND = 0, BN = 64 }\nthreads = 288\nwhy = \"a test\"\n";
        let variant = parse(text).unwrap().remove(0);
        let expected = ["-DTYPE_BF16", "-DKIND=0", "-DBN=64"];
        assert_eq!(flags(&variant)[TO_PTX.len()..], expected);
        assert!(source(&variant).ends_with("src/cuda/halo_gemm.cu"));
    }

    #[test]
    fn a_file_is_known_by_what_it_includes() {
        let text = "#include \"mma.cuh\"\nint x;\n  // #include \"no.cuh\"\n#include <no>\n#include \"operand.cuh\"\n";
        assert_eq!(included(text).collect::<Vec<_>>(), ["mma.cuh", "operand.cuh"]);
    }

    #[test]
    fn a_warning_that_costs_speed_is_noticed() {
        let warning = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are \
                       serialized due to insufficient register resources";
        assert_eq!(serialised(&format!("a.cu\n{warning}\n")), Some(warning));
        assert_eq!(serialised("ptxas info : 1 bytes gmem\n"), None);
    }
}

//! From kernel to cubin: Tile IR by cuTile's compiler, machine code by `tileiras`, the manifest.

use crate::inspect::{self, Usage};
use crate::variants::Variant;
use crate::{direct, interleave, linear_gemm, norm, nvcc, pack};
use anyhow::{Context, Result, anyhow, bail};
use cutile::compile_api::KernelCompiler;
use cutile::cutile_compiler::ast::Module;
use cutile::tile_kernel::CompileOptions;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// cuTile's compiler recurses deeply.
const STACK: usize = 64 << 20;

/// What was built, for whoever loads it.
#[derive(Default, Deserialize, Serialize)]
struct Manifest {
    compiler: String,
    variants: Vec<Entry>,
}

/// One cubin.
#[derive(Clone, Deserialize, Serialize)]
struct Entry {
    name: String,
    family: String,
    entry: String,
    arch: String,
    file: String,
    types: Vec<String>,
    params: serde_json::Map<String, serde_json::Value>,
    registers: u32,
    local_bytes: u32,
    shared_bytes: u32,
    /// Threads of a block, if the cubin leaves them to the launch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    threads: Option<u32>,
    /// Whether it runs on no other architecture of its generation.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    exact: bool,
    /// Of the Tile IR or the source, the options, the compiler's version and the architecture.
    hash: String,
}

/// Compiles every variant for every architecture into `out`, `jobs` at once.
pub fn build(variants: &[Variant], archs: &[String], out: &Path, jobs: usize) -> Result<()> {
    let compiler = version()?;
    let known: Manifest = fs::read(out.join("manifest.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    let known: HashMap<String, Entry> =
        known.variants.into_iter().map(|entry| (entry.file.clone(), entry)).collect();
    for arch in archs {
        fs::create_dir_all(out.join(arch)).context("cannot make the folder for cubins")?;
    }
    let tasks: Vec<(&String, &Variant)> =
        archs.iter().flat_map(|arch| variants.iter().map(move |variant| (arch, variant))).collect();
    let tasks: Vec<_> = tasks.into_iter().filter(|(arch, variant)| variant.is_for(arch)).collect();
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Result<Entry>)>> = Mutex::default();
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(arch, variant)) = tasks.get(at) else { break };
            let entry = one(variant, arch, &compiler, out, &known)
                .with_context(|| format!("{} for {arch}", variant.name()));
            if let Err(error) = &entry {
                eprintln!("{error:#}");
            }
            done.lock().expect("no thread panics while it holds the lock").push((at, entry));
        }
    };
    std::thread::scope(|scope| -> Result<()> {
        for _ in 0..jobs {
            std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work)?;
        }
        Ok(())
    })?;
    let mut done = done.into_inner().expect("no thread panics while it holds the lock");
    done.sort_by_key(|(at, _)| *at);
    let failed = done.iter().filter(|(_, entry)| entry.is_err()).count();
    if failed > 0 || done.len() != tasks.len() {
        bail!("{failed} of {} cubins could not be built", tasks.len());
    }
    let variants = done.into_iter().map(|(_, entry)| entry).collect::<Result<Vec<Entry>>>()?;
    println!("{} cubins in {}", variants.len(), out.display());
    let manifest = serde_json::to_vec_pretty(&Manifest { compiler, variants })?;
    write_whole(&out.join("manifest.json"), &manifest)
}

/// Compiles one variant for one architecture, unless that was done before.
fn one(
    variant: &Variant,
    arch: &str,
    compiler: &str,
    out: &Path,
    known: &HashMap<String, Entry>,
) -> Result<Entry> {
    let name = variant.name();
    let code = if variant.is_cuda() { nvcc::recipe(variant)? } else { tile_ir(variant, arch)? };
    let hash = hash([code.as_slice(), compiler.as_bytes(), arch.as_bytes()]);
    let file = format!("{arch}/{name}.cubin");
    let path = out.join(&file);
    if let Some(entry) = known.get(&file)
        && entry.hash == hash
        && path.exists()
    {
        return Ok(entry.clone());
    }
    let fresh = out.join(arch).join(format!("{name}.part"));
    if variant.is_cuda() {
        nvcc::compile(variant, &fresh)?;
    } else {
        tileiras(&code, arch, &fresh)?;
    }
    let Usage { registers, local_bytes, shared_bytes } = inspect::gate(&fresh, arch)?;
    fs::rename(&fresh, &path)?;
    let spilled = if local_bytes > 0 { format!(", {local_bytes} bytes spilled") } else { String::new() };
    println!("{file}: {registers} registers, {shared_bytes} bytes of shared memory{spilled}");
    let params = variant.params.iter().map(|(name, value)| {
        let value = value.as_integer().ok_or_else(|| anyhow!("{name} is not a number"))?;
        Ok((name.clone(), value.into()))
    });
    Ok(Entry {
        name,
        family: variant.family.clone(),
        entry: variant.entry(),
        arch: arch.to_string(),
        file,
        types: variant.types.clone(),
        params: params.collect::<Result<_>>()?,
        registers,
        local_bytes,
        shared_bytes,
        threads: variant.threads,
        exact: variant.is_cuda(),
        hash,
    })
}

/// Assembles Tile IR's bytecode into a cubin.
fn tileiras(bytecode: &[u8], arch: &str, cubin: &Path) -> Result<()> {
    let source = cubin.with_extension("tileirbc");
    fs::write(&source, bytecode)?;
    let output = Command::new("tileiras")
        .args(["--gpu-name", arch, "-o"])
        .arg(cubin)
        .arg(&source)
        .output()
        .context("cannot run tileiras")?;
    fs::remove_file(&source)?;
    if !output.status.success() {
        bail!("tileiras: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// What parts, and where each ends, are known by.
fn hash(parts: [&[u8]; 3]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The variant in Tile IR's bytecode.
fn tile_ir(variant: &Variant, arch: &str) -> Result<Vec<u8>> {
    let module: fn() -> Module = match variant.family.as_str() {
        "direct" => direct::direct::__module_ast_self,
        "interleave" => interleave::interleave::__module_ast_self,
        "linear_gemm" => linear_gemm::linear_gemm::__module_ast_self,
        "norm" => norm::norm::__module_ast_self,
        "pack" => pack::pack::__module_ast_self,
        family => bail!("there is no family {family}"),
    };
    let mut options = CompileOptions::default();
    if let Some(occupancy) = variant.occupancy {
        options = options.occupancy(occupancy);
    }
    if let Some(warps) = variant.worker_warps {
        options = options.num_worker_warps_per_cta(warps);
    }
    let compile = || {
        KernelCompiler::new(module, &variant.family, &variant.kernel)
            .generics(variant.generics())
            .target(arch)
            .options(options)
            .compile()
            .and_then(|artifacts| artifacts.bytecode())
            .map_err(|error| anyhow!("{error}"))
    };
    // The compiler panics on some mistakes in a kernel.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(compile))
        .map_err(|_| anyhow!("cuTile's compiler panicked"))?
}

/// The assembler's version, which is part of what a cubin is known by.
fn version() -> Result<String> {
    let output = Command::new("tileiras")
        .arg("--version")
        .output()
        .context("cannot run tileiras: is it on the PATH?")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split_whitespace().find(|word| word.starts_with('V')).context("tileiras' version")?;
    Ok(format!("tileiras {}", version.trim_start_matches('V').trim_end_matches(',')))
}

/// Writes a file whole or not at all.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let fresh = path.with_extension("part");
    fs::write(&fresh, bytes)?;
    fs::rename(&fresh, path).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variants::parse;

    /// A kernel whose Tile IR takes no time.
    fn variant(family: &str, kernel: &str, size: &str) -> Variant {
        let text = format!(
            "[[variant]]\nfamily = {family:?}\nkernel = {kernel:?}\nparams = {{ B = {size} }}\nwhy = \"a test\"\n"
        );
        parse(&text).unwrap().remove(0)
    }

    #[test]
    fn tile_ir_needs_no_tools_and_is_the_same_again() {
        let compile = |size| tile_ir(&variant("pack", "pack_largest", size), "sm_90");
        assert_eq!(compile("1024").unwrap(), compile("1024").unwrap());
        assert_ne!(compile("1024").unwrap(), compile("2048").unwrap());
    }

    #[test]
    fn what_there_is_no_kernel_for_is_an_error() {
        let error =
            |family, kernel| tile_ir(&variant(family, kernel, "1024"), "sm_90").unwrap_err().to_string();
        assert_eq!(error("packing", "pack_largest"), "there is no family packing");
        assert!(error("pack", "pack_smallest").contains("pack_smallest"));
    }

    #[test]
    fn cubins_are_known_by_all_that_they_are_made_from() {
        let of = |a: &str, b: &str, c: &str| hash([a.as_bytes(), b.as_bytes(), c.as_bytes()]);
        assert_eq!(of("ir", "13.5", "sm_90"), of("ir", "13.5", "sm_90"));
        for other in [
            of("i", "13.5", "sm_90"),
            of("ir", "13.6", "sm_90"),
            of("ir", "13.5", "sm_80"),
            of("ir1", "3.5", "sm_90"),
        ] {
            assert_ne!(of("ir", "13.5", "sm_90"), other);
        }
    }

    #[test]
    fn a_file_is_written_whole() {
        let folder = std::env::temp_dir().join(format!("volup-kernels-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("manifest.json");
        write_whole(&path, b"first").unwrap();
        write_whole(&path, b"second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        assert!(write_whole(&folder.join("missing/manifest.json"), b"").is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}

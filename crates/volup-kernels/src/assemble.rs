//! From kernel to cubin: Tile IR by cuTile's compiler, machine code by `tileiras`, the manifest.

use crate::inspect::{self, Usage};
use crate::variants::{CUDA_ARCH, Options, Variant};
use crate::{direct, interleave, linear_gemm, norm, nvcc, pack};
use anyhow::{Context, Result, anyhow, bail, ensure};
use cutile::compile_api::KernelCompiler;
use cutile::cutile_compiler::ast::Module;
use cutile::tile_kernel::CompileOptions;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
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
    /// Of all that the Tile IR is made from. Empty if written by a build that kept none.
    #[serde(default)]
    source: String,
    /// Of the Tile IR, the options, the compiler's version and the architecture.
    hash: String,
}

/// All that Tile IR is made from, but the variant.
const SOURCES: [&str; 7] = [
    include_str!("direct.rs"),
    include_str!("epilogue.rs"),
    include_str!("interleave.rs"),
    include_str!("linear_gemm.rs"),
    include_str!("norm.rs"),
    include_str!("pack.rs"),
    // The version of cuTile's compiler.
    include_str!("../Cargo.lock"),
];

/// What all variants are compiled with.
struct Build<'a> {
    archs: &'a [String],
    out: &'a Path,
    compiler: String,
    /// What an earlier build left, by file.
    known: HashMap<String, Entry>,
}

/// Compiles a variant in CUDA C++ to PTX, in `out`, unless that was done before.
pub fn ptx(variant: &Variant, out: &Path) -> Result<()> {
    let folder = out.join(CUDA_ARCH);
    fs::create_dir_all(&folder).context("cannot make the folder for PTX")?;
    let recipe = hash(&[&nvcc::recipe(variant)?]);
    nvcc::to_ptx(variant, &recipe, &folder.join(format!("{}.ptx", variant.name())))
}

/// Compiles every variant for every architecture into `out`, `jobs` at once.
pub fn build(variants: &[Variant], archs: &[String], out: &Path, jobs: usize) -> Result<()> {
    let known: Manifest = fs::read(out.join("manifest.json"))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    let known = known.variants.into_iter().map(|entry| (entry.file.clone(), entry)).collect();
    for arch in archs {
        fs::create_dir_all(out.join(arch)).context("cannot make the folder for cubins")?;
    }
    let build = Build { archs, out, compiler: version()?, known };
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Result<Vec<Entry>>)>> = Mutex::default();
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(variant) = variants.get(at) else { break };
            let entries = build.variant(variant).with_context(|| variant.name());
            if let Err(error) = &entries {
                eprintln!("{error:#}");
            }
            done.lock().expect("no thread panics while it holds the lock").push((at, entries));
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
    let failed = done.iter().filter(|(_, entries)| entries.is_err()).count();
    let entries: Vec<Entry> = done.into_iter().filter_map(|(_, entries)| entries.ok()).flatten().collect();
    println!("{} cubins in {}", entries.len(), out.display());
    // Also where some failed: the others are not built again.
    let manifest = serde_json::to_vec_pretty(&Manifest { compiler: build.compiler, variants: entries })?;
    write_whole(&out.join("manifest.json"), &manifest)?;
    ensure!(failed == 0, "{failed} of {} variants could not be built", variants.len());
    Ok(())
}

impl Build<'_> {
    /// Compiles a variant for each architecture that it is for, unless that was done before.
    fn variant(&self, variant: &Variant) -> Result<Vec<Entry>> {
        let mut bytecodes: Vec<(Options, Vec<u8>)> = Vec::new();
        let (mut entries, mut refused) = (Vec::new(), Vec::new());
        for arch in self.archs.iter().filter(|arch| variant.is_for(arch)) {
            let options = variant.options(arch);
            let source = if variant.is_cuda() {
                hash(&[&nvcc::recipe(variant)?])
            } else {
                source(variant, options, &self.compiler)
            };
            let file = format!("{arch}/{}.cubin", variant.name());
            let is_there = |ending| self.path(variant, arch, ending).exists();
            let known = self.known.get(&file);
            let known = known.filter(|_| is_there("cubin") && (!variant.is_cuda() || is_there("ptx")));
            if let Some(entry) = known.filter(|entry| entry.source == source) {
                entries.push(entry.clone());
                continue;
            }
            if variant.is_cuda() {
                match self.compile(variant, arch, &source) {
                    Ok(usage) => entries.push(entry(variant, arch, &usage, source.clone(), source)?),
                    Err(error) => refused.push(format!("{arch}: {error:#}")),
                }
                continue;
            }
            let at = match bytecodes.iter().position(|(other, _)| *other == options) {
                Some(at) => at,
                None => {
                    bytecodes.push((options, tile_ir(variant, options)?));
                    bytecodes.len() - 1
                }
            };
            let bytecode = &bytecodes[at].1;
            let hash = hash(&[bytecode, self.compiler.as_bytes(), arch.as_bytes()]);
            if let Some(entry) = known.filter(|entry| entry.hash == hash) {
                entries.push(Entry { source, ..entry.clone() });
                continue;
            }
            match self.assemble(variant, arch, bytecode) {
                Ok(usage) => entries.push(entry(variant, arch, &usage, source, hash)?),
                Err(error) => refused.push(format!("{arch}: {error:#}")),
            }
        }
        ensure!(refused.is_empty(), "{}", refused.join("; "));
        Ok(entries)
    }

    /// Where a variant's file of a kind lies.
    fn path(&self, variant: &Variant, arch: &str, ending: &str) -> PathBuf {
        self.out.join(arch).join(format!("{}.{ending}", variant.name()))
    }

    /// Makes a cubin of CUDA C++, beside its PTX.
    fn compile(&self, variant: &Variant, arch: &str, recipe: &str) -> Result<Usage> {
        nvcc::compile(variant, recipe, &self.path(variant, arch, "ptx"), &self.path(variant, arch, "part"))?;
        self.accept(variant, arch)
    }

    /// Makes a cubin of Tile IR.
    fn assemble(&self, variant: &Variant, arch: &str, bytecode: &[u8]) -> Result<Usage> {
        let (source, fresh) = (self.path(variant, arch, "tileirbc"), self.path(variant, arch, "part"));
        fs::write(&source, bytecode)?;
        let output = Command::new("tileiras")
            .args(["--gpu-name", arch, "-o"])
            .args([&fresh, &source])
            .output()
            .context("cannot run tileiras")?;
        fs::remove_file(&source)?;
        ensure!(output.status.success(), "tileiras: {}", String::from_utf8_lossy(&output.stderr).trim());
        self.accept(variant, arch)
    }

    /// Gives a cubin its name if the gate lets it pass.
    fn accept(&self, variant: &Variant, arch: &str) -> Result<Usage> {
        let fresh = self.path(variant, arch, "part");
        let usage = inspect::gate(&fresh, arch, variant.is_cuda())?;
        fs::rename(&fresh, self.path(variant, arch, "cubin"))?;
        let Usage { registers, shared_bytes, .. } = usage;
        println!("{arch}/{}: {registers} registers, {shared_bytes} bytes of shared memory", variant.name());
        Ok(usage)
    }
}

/// What the manifest says of a cubin.
fn entry(variant: &Variant, arch: &str, usage: &Usage, source: String, hash: String) -> Result<Entry> {
    let name = variant.name();
    let params = variant.params.iter().map(|(name, value)| {
        let value = value.as_integer().ok_or_else(|| anyhow!("{name} is not a number"))?;
        Ok((name.clone(), value.into()))
    });
    Ok(Entry {
        family: variant.family.clone(),
        entry: variant.entry(),
        arch: arch.to_string(),
        file: format!("{arch}/{name}.cubin"),
        name,
        types: variant.types.clone(),
        params: params.collect::<Result<_>>()?,
        registers: usage.registers,
        local_bytes: usage.local_bytes,
        shared_bytes: usage.shared_bytes,
        threads: variant.threads,
        exact: variant.is_cuda(),
        source,
        hash,
    })
}

/// What a variant's Tile IR and cubins are made from; where that is the same, so are they.
fn source(variant: &Variant, options: Options, compiler: &str) -> String {
    let Variant { family, kernel, .. } = variant;
    let settings = format!("{compiler} {family} {kernel} {:?} {options:?}", variant.generics());
    let parts: Vec<&[u8]> = SOURCES.iter().chain([&settings.as_str()]).map(|part| part.as_bytes()).collect();
    hash(&parts)
}

/// What parts, and where each ends, are known by.
fn hash(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The variant in Tile IR's bytecode. It depends on the architecture in nothing but the name that the
/// options are listed under; `default` serves all.
fn tile_ir(variant: &Variant, options: Options) -> Result<Vec<u8>> {
    let module: fn() -> Module = match variant.family.as_str() {
        "direct" => direct::direct::__module_ast_self,
        "interleave" => interleave::interleave::__module_ast_self,
        "linear_gemm" => linear_gemm::linear_gemm::__module_ast_self,
        "norm" => norm::norm::__module_ast_self,
        "pack" => pack::pack::__module_ast_self,
        family => bail!("there is no family {family}"),
    };
    let mut told = CompileOptions::default();
    if let Some(occupancy) = options.occupancy {
        told = told.occupancy(occupancy);
    }
    if let Some(warps) = options.worker_warps {
        told = told.num_worker_warps_per_cta(warps);
    }
    let compile = || {
        KernelCompiler::new(module, &variant.family, &variant.kernel)
            .generics(variant.generics())
            .target("default")
            .options(told)
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

    const NONE: Options = Options { occupancy: None, worker_warps: None };

    /// A kernel whose Tile IR takes no time.
    fn variant(family: &str, kernel: &str, size: &str) -> Variant {
        let text = format!(
            "[[variant]]\nfamily = {family:?}\nkernel = {kernel:?}\nparams = {{ B = {size} }}\nwhy = \"a test\"\n"
        );
        parse(&text).unwrap().remove(0)
    }

    #[test]
    fn tile_ir_needs_no_tools_and_is_the_same_again() {
        let compile = |size| tile_ir(&variant("pack", "pack_largest", size), NONE);
        assert_eq!(compile("1024").unwrap(), compile("1024").unwrap());
        assert_ne!(compile("1024").unwrap(), compile("2048").unwrap());
    }

    #[test]
    fn what_there_is_no_kernel_for_is_an_error() {
        let error = |family, kernel| tile_ir(&variant(family, kernel, "1024"), NONE).unwrap_err().to_string();
        assert_eq!(error("packing", "pack_largest"), "there is no family packing");
        assert!(error("pack", "pack_smallest").contains("pack_smallest"));
    }

    #[test]
    fn cubins_are_known_by_all_that_they_are_made_from() {
        let of = |a: &str, b: &str, c: &str| hash(&[a.as_bytes(), b.as_bytes(), c.as_bytes()]);
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
    fn tile_ir_is_made_again_for_what_changes_it() {
        let of = |size, options, compiler| source(&variant("pack", "pack_largest", size), options, compiler);
        let base = of("1024", NONE, "13.5");
        assert_eq!(of("1024", NONE, "13.5"), base);
        let wide = Options { worker_warps: Some(8), ..NONE };
        for other in [of("2048", NONE, "13.5"), of("1024", NONE, "13.6"), of("1024", wide, "13.5")] {
            assert_ne!(other, base);
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

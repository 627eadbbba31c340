//! Compiles volup's GPU kernels ahead of time: every variant of `variants.toml` for every
//! architecture asked for, to cubins and a manifest that `volup-cuda` embeds.
//!
//! Needs no GPU and no toolkit: `tileiras`, `nvcc` and `cuobjdump` come from the wheels of
//! `requirements.txt`, and `make kernels` puts them on the PATH. What is up to date is not compiled
//! again. A variant is refused whose machine code keeps registers in local memory, or waits for each
//! matrix instruction before it issues the next; one of CUDA C++ also if it may give back shared memory
//! that it is still reading.

// The kernels' bodies are read by cuTile's compiler, not by rustc, whose lints know nothing of them, and
// laid out by hand; the files' headers say what makes them sound.
#[allow(warnings, clippy::all, clippy::undocumented_unsafe_blocks)]
#[rustfmt::skip]
mod direct;
#[allow(warnings, clippy::all, clippy::undocumented_unsafe_blocks)]
#[rustfmt::skip]
mod epilogue;
#[allow(warnings, clippy::all, clippy::undocumented_unsafe_blocks)]
#[rustfmt::skip]
mod interleave;
#[allow(warnings, clippy::all, clippy::undocumented_unsafe_blocks)]
#[rustfmt::skip]
mod linear_gemm;
#[allow(warnings, clippy::all, clippy::undocumented_unsafe_blocks)]
#[rustfmt::skip]
mod norm;
#[allow(warnings, clippy::all, clippy::undocumented_unsafe_blocks)]
#[rustfmt::skip]
mod pack;

mod assemble;
mod inspect;
mod nvcc;
mod variants;

use anyhow::{Context, Result, bail};
use clap::Parser;
use std::path::PathBuf;

/// Compiles volup's GPU kernels to cubins and a manifest.
#[derive(Parser)]
struct Args {
    /// Where the cubins and `manifest.json` go.
    #[arg(long)]
    out: PathBuf,
    /// The list of variants.
    #[arg(long)]
    variants: PathBuf,
    /// The architectures to compile for.
    #[arg(long, value_delimiter = ',', default_value = "sm_90")]
    arch: Vec<String>,
    /// Compile only variants whose name contains this; the manifest then lists only those.
    #[arg(long, default_value = "")]
    only: String,
    /// Compiles at once [default: one a core].
    #[arg(long)]
    jobs: Option<usize>,
    /// Compile only the variant of this name, and only to PTX, for tests that run it on the CPU.
    #[arg(long, conflicts_with_all = ["only", "arch", "jobs"])]
    ptx: Option<String>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let text = std::fs::read_to_string(&args.variants)
        .with_context(|| format!("cannot read {}", args.variants.display()))?;
    let mut variants = variants::parse(&text)?;
    if let Some(name) = &args.ptx {
        let variant = variants.iter().find(|variant| variant.is_cuda() && variant.name() == *name);
        let variant = variant.with_context(|| format!("no variant in CUDA C++ is called {name:?}"))?;
        return assemble::ptx(variant, &args.out);
    }
    variants.retain(|variant| variant.name().contains(&args.only));
    if variants.is_empty() {
        bail!("no variant's name contains {:?}", args.only);
    }
    let jobs = args.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
    assemble::build(&variants, &args.arch, &args.out, jobs)
}

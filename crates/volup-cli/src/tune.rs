//! `volup tune`: measures plans, and keeps those that are faster than the model's.

use crate::arguments::{self, AnyEngine};
use anyhow::{Context, Result, bail};
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use volup::Engine;
use volup::testing::Fill;

/// Measure which plan of a block is the fastest on a GPU, for every later run.
#[derive(clap::Args)]
#[command(after_help = format!("\
A plan is chosen by a model of its time, which needs no tuning and is seldom far off. What is measured here to be faster is kept
in a file that every engine reads, of Rust, Python and the command line: for this kind of GPU, these kernels, and a block and
input of just this size, type, precision and memory format. Forward passes are tuned; training is not.

{}

Examples:
  volup tune --device cuda --precision tf32 --shape monai-128-32-48
  volup tune --device cuda --dtype bf16 --spec \"n 2, 24x24x24, 96>48, k 4, s 2, p 1, bias, relu, gn 8\"
  volup tune --device cuda --spec \"n 1, 64x64x64, 64>32, k 2, s 2, channels_last_3d\" --plans 100 --seconds 20", arguments::SPEC_HELP))]
pub struct Args {
    #[command(flatten)]
    shapes: arguments::Shapes,
    #[command(flatten)]
    place: arguments::Where,
    /// The most plans to time of each block, those that are expected to be fastest.
    #[arg(long, value_name = "N", default_value = "32")]
    plans: NonZeroUsize,
    /// Seconds to time each block for.
    #[arg(long, value_name = "S", default_value_t = 4.0, value_parser = arguments::seconds)]
    seconds: f64,
    /// The file to keep plans in [default: that which VOLUP_TUNING names, else volup/tuning.tsv among the user's caches].
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

/// Tunes the shapes.
pub fn run(args: &Args) -> Result<()> {
    let AnyEngine::Cuda(engine) = args.place.engine()? else {
        bail!("--device cpu: on the CPU there is but one plan")
    };
    let file = args.file.clone().or_else(volup_cuda::tuning_path);
    let file = file.context("--file: VOLUP_TUNING is empty, or no folder for caches is known")?;
    let cases = args.shapes.cases()?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{:<24} {:>10} {:>10}  plan", "name", "model ms", "tuned ms")?;
    for case in cases {
        let (input, parameters) = case.inputs(args.shapes.dtype, Fill::Normal, 1);
        let layer = engine.layer(&case.block, &parameters)?;
        let input = engine.upload(input)?;
        let tuned = engine.tune(&layer, &input, args.plans.get(), args.seconds, &file)?;
        let model = tuned.model.measured * 1e3;
        match tuned.faster {
            Some(plan) => {
                let ms = plan.measured * 1e3;
                writeln!(out, "{:<24} {model:>10.3} {ms:>10.3}  {}", case.name, plan.plan)?;
            }
            None => {
                writeln!(out, "{:<24} {model:>10.3} {:>10}  the model's, of {}", case.name, "", tuned.tried)?
            }
        }
    }
    writeln!(out, "kept in {}", file.display())?;
    Ok(())
}

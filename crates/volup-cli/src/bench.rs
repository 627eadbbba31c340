//! `volup bench`: how fast blocks run here.

use crate::arguments::{self, AnyEngine};
use anyhow::{Result, bail};
use serde_json::json;
use std::hint::black_box;
use std::io::Write;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};
use volup::Engine;
use volup::testing::{Case, Fill};
use volup_cuda::CudaEngine;

/// The fewest runs that a median is taken of.
const LEAST_RUNS: usize = 3;

/// Time blocks: published shapes by name, or any other by its spec.
#[derive(clap::Args)]
#[command(after_help = format!("\
Inputs are random. A run is timed from the input to the finished output, which it allocates; input
and parameters are in the engine's memory before. GFLOP/s count multiply-adds that reach the output, GB/s the input, weight and output once.

{}

Examples:
  volup bench
  volup bench --shape kb2-61 --shape kb2-61-block --batch 2 --dtype bf16
  volup bench --device cuda --precision tf32
  volup bench --device cuda --shape kb2-61 --explain
  volup bench --spec \"n 1, 64x64x64, 64>32, k 2, s 2, bias, relu, gn 8\" --threads 1 --json", arguments::SPEC_HELP))]
pub struct Args {
    #[command(flatten)]
    shapes: arguments::Shapes,
    #[command(flatten)]
    place: arguments::Where,
    /// Seconds to time each shape for; at least three runs are made.
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = arguments::seconds)]
    seconds: f64,
    /// On a GPU, time up to so many plans of each block instead, and print what each was expected to take.
    #[arg(long, value_name = "PLANS", num_args = 0..=1, default_missing_value = "8", conflicts_with = "json")]
    explain: Option<NonZeroUsize>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Times the shapes.
pub fn run(args: &Args) -> Result<()> {
    match (args.place.engine()?, args.explain) {
        (AnyEngine::Cuda(engine), Some(most)) => explain(&engine, args, most.get()),
        (AnyEngine::Cpu(_), Some(_)) => bail!("--explain: on the CPU there is but one plan"),
        (AnyEngine::Cpu(engine), None) => run_on(&engine, args),
        (AnyEngine::Cuda(engine), None) => run_on(&*engine, args),
    }
}

/// Prints the plans that may be the fastest, the chosen one first, and times them.
fn explain(engine: &CudaEngine, args: &Args, most: usize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for case in args.shapes.cases()? {
        let (input, parameters) = case.inputs(args.shapes.dtype, Fill::Normal, 1);
        let layer = engine.layer(&case.block, &parameters)?;
        let input = engine.upload(input)?;
        let plans = engine.time_plans(&layer, &input, most, args.seconds / most as f64)?;
        writeln!(out, "{case}")?;
        writeln!(out, "  expected ms  measured ms  plan")?;
        for plan in plans {
            let [expected, measured] = [plan.expected, plan.measured].map(|seconds| seconds * 1e3);
            writeln!(out, "  {expected:>11.3}  {measured:>11.3}  {}", plan.plan)?;
        }
    }
    Ok(())
}

fn run_on<E: Engine>(engine: &E, args: &Args) -> Result<()> {
    let cases = args.shapes.cases()?;
    let mut out = std::io::stdout().lock();
    let mut rows = Vec::new();
    if !args.json {
        let header = ["name", "median ms", "20 %", "80 %", "GFLOP/s", "GB/s"];
        let [name, median, low, high, flops, bytes] = header;
        writeln!(out, "{name:<24} {median:>10} {low:>10} {high:>10} {flops:>9} {bytes:>8}  spec")?;
    }
    for case in &cases {
        let times = time(engine, case, args)?;
        let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
        let [low, median, high] = [0.2, 0.5, 0.8].map(at);
        let geometry = case.geometry();
        let shapes = [geometry.input_shape(), geometry.conv().weight_shape(), geometry.output_shape()];
        let elements: f64 =
            shapes.iter().map(|shape| shape.iter().map(|&size| size as f64).product::<f64>()).sum();
        let flops = geometry.flops() / median / 1e9;
        let bytes = elements * args.shapes.dtype.size() as f64 / median / 1e9;
        let line = case.to_string();
        let spec = line.split_once(": ").map_or("", |(_, spec)| spec);
        if args.json {
            rows.push(json!({
                "name": case.name, "spec": spec, "runs": times.len(), "median_ms": median * 1e3,
                "p20_ms": low * 1e3, "p80_ms": high * 1e3, "gflops": flops, "gbytes_per_s": bytes,
            }));
        } else {
            let (name, [low, median, high]) = (case.name, [low, median, high].map(|time| time * 1e3));
            writeln!(
                out,
                "{name:<24} {median:>10.3} {low:>10.3} {high:>10.3} {flops:>9.1} {bytes:>8.2}  {spec}"
            )?;
        }
    }
    if args.json {
        let description: serde_json::Map<_, _> =
            engine.describe().into_iter().map(|(name, value)| (name.to_string(), value.into())).collect();
        let report = json!({
            "version": env!("CARGO_PKG_VERSION"), "engine": description,
            "dtype": args.shapes.dtype.to_string(), "results": rows,
        });
        writeln!(out, "{report:#}")?;
    }
    Ok(())
}

/// Seconds of each run, ascending.
fn time<E: Engine>(engine: &E, case: &Case, args: &Args) -> Result<Vec<f64>> {
    let (input, parameters) = case.inputs(args.shapes.dtype, Fill::Normal, 1);
    let layer = engine.layer(&case.block, &parameters)?;
    let input = engine.upload(input)?;
    let run = || -> Result<f64> {
        let start = Instant::now();
        let output = black_box(engine.forward(&layer, black_box(&input))?);
        engine.synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        drop(output);
        Ok(seconds)
    };
    let budget = Duration::from_secs_f64(args.seconds);
    let warm = Instant::now();
    run()?;
    while warm.elapsed() < budget / 4 {
        run()?;
    }
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < LEAST_RUNS || start.elapsed() < budget {
        times.push(run()?);
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

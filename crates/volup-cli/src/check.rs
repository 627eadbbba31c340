//! `volup check`: whether the engine computes what it should, against double precision.

use crate::arguments::{self, AnyEngine};
use crate::failure;
use anyhow::Result;
use std::io::Write;
use std::process::ExitCode;
use volup::testing::{Case, Fill, cases, check, check_gradients, published};
use volup::{DType, Element, Engine, MemoryFormat, Tensor, Training, reference, with_element};

/// A bare convolution of more than this is checked at chosen voxels.
const MOST_FLOPS: f64 = 2e9;
/// How many random voxels those are, besides the corners.
const SAMPLES: u64 = 4096;

/// Check the engine against a double-precision reference.
#[derive(clap::Args)]
#[command(after_help = format!("\
Every output voxel must be within a bound that follows from the type, the precision and the number of
terms of its sum. A bare convolution of more than {} GFLOP is checked at {SAMPLES} random voxels and all corners.

{}

Examples:
  volup check
  volup check --case kb1-61 --dtype bf16
  volup check --device cuda --precision tf32 --dtype f32
  volup check --case k3 --gradients
  volup check --spec \"n 2, 9x7x5, 8>6, k 3, s 2, p 1, op 1, g 2, bias, silu, gn 3\"", MOST_FLOPS / 1e9, arguments::SPEC_HELP))]
pub struct Args {
    /// A case of the table or a published shape, any number of times [default: the whole table].
    #[arg(long, value_name = "NAME", value_parser = case_parser(), hide_possible_values = true)]
    case: Vec<String>,
    /// A block and its input, any number of times.
    #[arg(long, value_name = "SPEC", value_parser = arguments::spec)]
    spec: Vec<Case>,
    /// The type to compute in, any number of times [default: all].
    #[arg(long, value_parser = arguments::dtype())]
    dtype: Vec<DType>,
    /// Check the passes of training too: what they save, and all gradients.
    #[arg(long)]
    gradients: bool,
    #[command(flatten)]
    place: arguments::Where,
    /// The most memory that a case's input, output and weight may take.
    #[arg(long, value_name = "BYTES", value_parser = arguments::bytes, default_value = arguments::MAX_BYTES)]
    max_bytes: u64,
}

fn case_parser() -> clap::builder::PossibleValuesParser {
    clap::builder::PossibleValuesParser::new(all_cases().iter().map(|case| case.name))
}

fn all_cases() -> Vec<Case> {
    let mut all = cases();
    all.extend(published());
    all
}

/// The worst voxel of a check.
struct Worst {
    ratio: f64,
    error: f64,
    bound: f64,
    at: Vec<usize>,
    outside: usize,
}

/// Runs the checks; fails if any does.
pub fn run(args: &Args) -> Result<ExitCode> {
    match args.place.engine()? {
        AnyEngine::Cpu(engine) => run_on(&engine, args),
        AnyEngine::Cuda(engine) => run_on(&*engine, args),
    }
}

fn run_on<E: Training>(engine: &E, args: &Args) -> Result<ExitCode> {
    let mut chosen = if args.case.is_empty() && args.spec.is_empty() { cases() } else { Vec::new() };
    chosen.extend(all_cases().into_iter().filter(|case| args.case.iter().any(|name| name == case.name)));
    chosen.extend(args.spec.iter().cloned());
    let dtypes = if args.dtype.is_empty() { &DType::ALL[..] } else { &args.dtype };
    for case in &chosen {
        for &dtype in dtypes {
            arguments::check_size(case, dtype, args.max_bytes)?;
        }
    }
    let mut out = std::io::stdout().lock();
    let (mut count, mut failed) = (0, 0);
    for case in &chosen {
        for &dtype in dtypes {
            for fill in Fill::ALL {
                count += 1;
                let verdict = worst(engine, case, dtype, fill);
                let (verdict, detail) = match verdict {
                    Ok(Worst { outside: 0, at, .. }) if at.is_empty() => ("ok  ", "exact".to_string()),
                    Ok(Worst { ratio, error, bound, at, outside }) => {
                        let verdict = if outside == 0 { "ok  " } else { "FAIL" };
                        let outside =
                            if outside == 0 { String::new() } else { format!(", {outside} outside") };
                        let line =
                            format!("{error:.1e} at {at:?}, {ratio:.3} of the bound {bound:.1e}{outside}");
                        (verdict, line)
                    }
                    Err(error) => ("FAIL", failure::one_line(&error)),
                };
                failed += usize::from(verdict == "FAIL");
                let filled = format!("{fill:?}").to_lowercase();
                // The type's Display knows no width.
                writeln!(out, "{verdict} {:<8} {filled:<7}  {detail}  ({case})", dtype.to_string())?;
                if args.gradients {
                    count += 1;
                    let (verdict, detail) = match check_gradients(engine, case, dtype, fill, 1) {
                        Ok(()) => ("ok  ", "gradients".to_string()),
                        Err(failure) => ("FAIL", failure),
                    };
                    failed += usize::from(verdict == "FAIL");
                    writeln!(out, "{verdict} {:<8} {filled:<7}  {detail}  ({case})", dtype.to_string())?;
                }
            }
        }
    }
    writeln!(out, "{count} checks, {failed} failed")?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn worst<E: Engine>(engine: &E, case: &Case, dtype: DType, fill: Fill) -> Result<Worst> {
    if case.block.is_bare() && case.geometry().flops() > MOST_FLOPS {
        return sampled(engine, case, dtype, fill);
    }
    let found = check(engine, case, dtype, fill, 1)?;
    Ok(Worst {
        ratio: found.worst_ratio,
        error: (found.got - found.expected).abs(),
        bound: found.bound,
        at: found.at,
        outside: found.count_outside,
    })
}

/// Checks a convolution that is too large for the reference at its corners and at random voxels.
fn sampled<E: Engine>(engine: &E, case: &Case, dtype: DType, fill: Fill) -> Result<Worst> {
    let geometry = case.geometry();
    let (input, parameters) = case.inputs(dtype, fill, 1);
    let weight = parameters.weight.to_f64();
    let bias = parameters.bias.as_ref().map(Tensor::to_f64);
    let values = input.to_f64();
    let layer = engine.layer(&case.block, &parameters)?;
    let output = engine.download(engine.forward(&layer, &engine.upload(input)?)?)?;
    anyhow::ensure!(output.shape() == case.output_shape(), "the output has shape {:?}", output.shape());

    let shape = geometry.output_shape();
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let corners = (0..32).map(|corner| [0, 1, 2, 3, 4].map(|axis| (corner >> axis & 1) * (shape[axis] - 1)));
    let mut voxels: Vec<[usize; 5]> = corners.collect();
    voxels.extend((0..SAMPLES).map(|_| shape.map(&mut random)));
    let mut worst = Worst { ratio: 0.0, error: 0.0, bound: 0.0, at: Vec::new(), outside: 0 };
    for at in voxels {
        let voxel = reference::voxel(&geometry, &weight, bias.as_deref(), &values, at);
        let (expected, bound) = match fill {
            // Whole numbers have one right answer.
            Fill::Integer => (with_element!(dtype, T => T::from_f64(voxel.sum).to_f64()), 0.0),
            Fill::Normal => (voxel.sum, voxel.bound(dtype, engine.operand_roundoff(dtype))),
        };
        let got = element(&output, shape, at);
        let error = if got == expected { 0.0 } else { (got - expected).abs() };
        // NaN is outside too.
        let ratio =
            if error <= bound { error / bound.max(f64::MIN_POSITIVE) } else { (error / bound).max(2.0) };
        worst.outside += usize::from(ratio > 1.0);
        if ratio > worst.ratio {
            worst = Worst { ratio, error, bound, at: at.to_vec(), outside: worst.outside };
        }
    }
    Ok(worst)
}

/// The element at [n, c, d, h, w].
fn element(tensor: &Tensor, shape: [usize; 5], at: [usize; 5]) -> f64 {
    let order = match tensor.format() {
        MemoryFormat::Contiguous => [0, 1, 2, 3, 4],
        MemoryFormat::ChannelsLast3d => [0, 2, 3, 4, 1],
    };
    let index = order.into_iter().fold(0, |index, axis| index * shape[axis] + at[axis]);
    with_element!(tensor.dtype(), T => {
        tensor.as_slice::<T>().map_or(f64::NAN, |values| values[index].to_f64())
    })
}

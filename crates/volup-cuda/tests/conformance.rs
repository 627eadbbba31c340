//! The suite that every engine passes, in both precisions and with each kernel family.

mod gpu;

use volup::testing::{
    Case, conformance, conformance_of, random_runs, random_training_runs, training_conformance,
};
use volup::{Error, Precision};
use volup_cuda::{Algorithm, CudaEngine};

/// Random runs of each engine.
const RUNS: u64 = 300;

fn passes(precision: Precision, algorithm: Option<Algorithm>) {
    passes_by(precision, algorithm, None);
}

/// An engine that takes a family and a kernel where they apply, if there is a GPU.
fn engine(precision: Precision, algorithm: Option<Algorithm>, kernel: Option<&str>) -> Option<CudaEngine> {
    let engine = gpu::or_skip(CudaEngine::new(0, precision))?;
    Some(engine.with_algorithm(algorithm).with_kernel(kernel.map(str::to_string)).unwrap())
}

fn passes_by(precision: Precision, algorithm: Option<Algorithm>, kernel: Option<&str>) {
    if let Some(engine) = engine(precision, algorithm, kernel) {
        conformance(&engine);
        random_runs(&engine, RUNS);
    }
}

#[test]
fn ieee() {
    passes(Precision::Ieee, None);
}

#[test]
fn tf32() {
    passes(Precision::Tf32, None);
}

#[test]
fn each_family_in_ieee() {
    Algorithm::ALL.into_iter().for_each(|algorithm| passes(Precision::Ieee, Some(algorithm)));
}

#[test]
fn each_family_in_tf32() {
    Algorithm::ALL.into_iter().for_each(|algorithm| passes(Precision::Tf32, Some(algorithm)));
}

/// Operands of one fp16, which are seldom expected to be faster where there is so little.
#[test]
fn scaled_in_tf32() {
    for algorithm in [Algorithm::HaloGemm, Algorithm::GatherGemm] {
        passes_by(Precision::Tf32, Some(algorithm), Some("half_scale"));
    }
    trains(Precision::Tf32, None, Some("half_input"));
}

/// Taps along depth as columns, likewise.
#[test]
fn sweeps() {
    for precision in [Precision::Ieee, Precision::Tf32] {
        passes_by(precision, Some(Algorithm::HaloGemm), Some("halo_sweep"));
    }
}

/// Norms beside products, likewise, and of more partial statistics than one warp merges.
#[test]
fn norms_behind() {
    let cases = [
        Case::parse(
            "residues",
            "n 3, 16x16x16, 8>64, k 2, s 2, bias, relu, gn 1",
            "partials of each residue",
        ),
        Case::parse("columns", "n 2, 16x16x16, 64>256, k 1, relu, gn 1", "partials of many columns"),
        Case::parse("rows", "n 3, 28x28x28, 16>64, k 1, relu, gn 1", "partials of many rows"),
    ]
    .map(Result::unwrap);
    for (precision, algorithm) in [
        (Precision::Ieee, Algorithm::GatherGemm),
        (Precision::Tf32, Algorithm::GatherGemm),
        (Precision::Ieee, Algorithm::HaloGemm),
    ] {
        // What stands in for the product that is not all there.
        let kernel = Some("direct_norm");
        passes_by(precision, Some(algorithm), kernel);
        if let Some(engine) = engine(precision, Some(algorithm), kernel) {
            conformance_of(&engine, &cases);
        }
    }
}

/// Sweeps that take a norm's statistics, which want more columns than the table's blocks have: planes that end within a tile's
/// rows and channels within its columns, and the order of NDHWC.
#[test]
fn sweeps_that_count() {
    let cases = [
        Case::parse("counted", "n 2, 2x13x15, 2>36, k 3, p 1, bias, relu, gn 9", "planes of odd rows"),
        Case::parse(
            "counted-last",
            "n 1, 2x14x14, 8>8, k 3, leaky_relu(0.1), gn 2, silu, channels_last_3d",
            "a curve behind the norm",
        ),
    ]
    .map(Result::unwrap);
    for (precision, kernel) in [
        (Precision::Ieee, "halo_sweep_2x32x3x1x1x3x1"),
        (Precision::Tf32, "halo_sweep_5x32x3x1x1x3x1"),
        (Precision::Ieee, "halo_sweep_f16_0x32x3x1x1x3x1"),
        (Precision::Ieee, "halo_sweep_bf16_0x32x3x1x1x3x1"),
    ] {
        if let Some(engine) = engine(precision, Some(Algorithm::HaloGemm), Some(kernel)) {
            conformance_of(&engine, &cases);
        }
    }
}

/// Outputs that are written with what is between them, likewise.
#[test]
fn outputs_on_lattices() {
    for (precision, kernel) in [
        (Precision::Tf32, "halo_gemm_5x64x1x2x1x4"),
        (Precision::Ieee, "halo_gemm_f16_0x64x1x2x1x4"),
        (Precision::Ieee, "halo_gemm_bf16_0x64x1x2x1x4"),
    ] {
        passes_by(precision, Some(Algorithm::HaloGemm), Some(kernel));
    }
}

/// Gradients of two fp16, likewise.
#[test]
fn two_fp16_in_ieee() {
    trains(Precision::Ieee, None, Some("channel_largest"));
}

/// What the plan seldom takes in training for what is as small as tests are: families whose forward pass is another one there,
/// and kernels of gradients, with a family that leaves them to be chosen.
const OF_TRAINING: [(Algorithm, Option<&str>); 7] = [
    (Algorithm::ShuffleWgmma, None),
    (Algorithm::ImplicitGemm, None),
    (Algorithm::ImplicitGemm, Some("plane_gradient")),
    (Algorithm::ShuffleGemm, Some("shuffle_gradient")),
    (Algorithm::HaloGemm, Some("weight_gradient")),
    (Algorithm::HaloGemm, Some("weight_gradient_lines")),
    (Algorithm::HaloGemm, Some("weight_gradient_narrow")),
];

#[test]
fn an_unknown_kernel_is_refused() {
    if let Some(engine) = gpu::or_skip(CudaEngine::new(0, Precision::Ieee)) {
        let refused = engine.with_kernel(Some("im2col".into())).err();
        assert!(matches!(refused, Some(Error::UnknownName { param: "kernel", .. })));
    }
}

#[test]
fn each_kernel_of_training_in_ieee() {
    OF_TRAINING.into_iter().for_each(|(family, kernel)| trains(Precision::Ieee, Some(family), kernel));
}

#[test]
fn each_kernel_of_training_in_tf32() {
    OF_TRAINING.into_iter().for_each(|(family, kernel)| trains(Precision::Tf32, Some(family), kernel));
}

fn trains(precision: Precision, algorithm: Option<Algorithm>, kernel: Option<&str>) {
    if let Some(engine) = engine(precision, algorithm, kernel) {
        training_conformance(&engine);
        random_training_runs(&engine, RUNS);
    }
}

#[test]
fn training_in_ieee() {
    trains(Precision::Ieee, None, None);
}

#[test]
fn training_in_tf32() {
    trains(Precision::Tf32, None, None);
}

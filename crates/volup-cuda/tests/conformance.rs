//! The suite that every engine passes, in both precisions and with each kernel family.

mod gpu;

use volup::testing::{conformance, random_runs, random_training_runs, training_conformance};
use volup::{Error, Precision};
use volup_cuda::{Algorithm, CudaEngine};

/// Random runs of each engine.
const RUNS: u64 = 300;

fn passes(precision: Precision, algorithm: Option<Algorithm>) {
    if let Some(engine) = gpu::or_skip(CudaEngine::new(0, precision)) {
        let engine = engine.with_algorithm(algorithm);
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

/// Kernels that the plan seldom takes for what is as small as tests are, with a family that leaves them to be chosen: of the
/// forward pass, which training's may be another plan of, then of gradients.
const KERNEL: &str = "shuffle_wgmma";
const OF_TRAINING: [(Algorithm, &str); 6] = [
    (Algorithm::ShuffleGemm, KERNEL),
    (Algorithm::ImplicitGemm, "implicit_gemm"),
    (Algorithm::ShuffleGemm, "shuffle_gradient"),
    (Algorithm::HaloGemm, "weight_gradient"),
    (Algorithm::HaloGemm, "weight_gradient_lines"),
    (Algorithm::HaloGemm, "weight_gradient_narrow"),
];

fn passes_with_kernels(precision: Precision) {
    if let Some(engine) = gpu::or_skip(CudaEngine::new(0, precision)) {
        conformance(&engine.with_kernel(Some(KERNEL.into())).unwrap());
    }
    OF_TRAINING.into_iter().for_each(|choice| trains(precision, Some(choice)));
}

#[test]
fn an_unknown_kernel_is_refused() {
    if let Some(engine) = gpu::or_skip(CudaEngine::new(0, Precision::Ieee)) {
        let refused = engine.with_kernel(Some("im2col".into())).err();
        assert!(matches!(refused, Some(Error::UnknownName { param: "kernel", .. })));
    }
}

#[test]
fn each_kernel_in_ieee() {
    passes_with_kernels(Precision::Ieee);
}

#[test]
fn each_kernel_in_tf32() {
    passes_with_kernels(Precision::Tf32);
}

fn trains(precision: Precision, choice: Option<(Algorithm, &str)>) {
    if let Some(engine) = gpu::or_skip(CudaEngine::new(0, precision)) {
        let (algorithm, kernel) = choice.unzip();
        let engine = engine.with_algorithm(algorithm).with_kernel(kernel.map(str::to_string)).unwrap();
        training_conformance(&engine);
        random_training_runs(&engine, RUNS);
    }
}

#[test]
fn training_in_ieee() {
    trains(Precision::Ieee, None);
}

#[test]
fn training_in_tf32() {
    trains(Precision::Tf32, None);
}

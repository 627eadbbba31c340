//! The suite that every engine passes, in both precisions and with each kernel family.

mod gpu;

use volup::Precision;
use volup::testing::{conformance, random_runs, random_training_runs, training_conformance};
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

fn trains(precision: Precision) {
    if let Some(engine) = gpu::or_skip(CudaEngine::new(0, precision)) {
        training_conformance(&engine);
        random_training_runs(&engine, RUNS);
    }
}

#[test]
fn training_in_ieee() {
    trains(Precision::Ieee);
}

#[test]
fn training_in_tf32() {
    trains(Precision::Tf32);
}

//! The suite that every engine passes, in both precisions and with each kernel family.

use volup::testing::{conformance, random_runs};
use volup::{Error, Precision};
use volup_cuda::{Algorithm, CudaEngine};

/// Random runs of each engine.
const RUNS: u64 = 300;

/// An engine on the first GPU; None, and says so, if there is none or no kernels.
fn engine(precision: Precision) -> Option<CudaEngine> {
    match CudaEngine::new(0, precision) {
        Ok(engine) => Some(engine),
        Err(error @ (Error::NoDriver | Error::NoDevice { .. } | Error::NoKernels)) => {
            let required = std::env::var_os("VOLUP_REQUIRE_GPU").is_some_and(|value| value == "1");
            assert!(!required, "VOLUP_REQUIRE_GPU is set: {error}");
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn passes(precision: Precision, algorithm: Option<Algorithm>) {
    if let Some(engine) = engine(precision) {
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

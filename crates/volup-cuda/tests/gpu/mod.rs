//! What tests that need a GPU have in common.

use volup::{Error, Result};

/// What is there if there is a GPU and kernels for it; None, and says so, if not. With
/// `VOLUP_REQUIRE_GPU=1` that is a failure.
pub fn or_skip<T>(result: Result<T>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error @ (Error::NoDriver | Error::NoDevice { .. } | Error::NoKernels)) => {
            let required = std::env::var_os("VOLUP_REQUIRE_GPU").is_some_and(|value| value == "1");
            assert!(!required, "VOLUP_REQUIRE_GPU is set: {error}");
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

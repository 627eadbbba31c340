//! How numbers become operands, as `operand.cuh` says: for the kernels in CUDA C++ that split by tf32.

use super::contracts::SPLIT_OFF;

/// 2^-113, below which two parts have not bits enough.
const TINY: f64 = f64::from_bits((1023 - 113) << 52);

/// A number's parts: what tf32 holds of it and the rest.
pub fn split(parts: i64, value: f64) -> [f64; 2] {
    let low = if parts == 2 { value * SPLIT_OFF } else { 0.0 };
    [value - low, low]
}

/// Whether 16 bytes hold an infinity or NaN, or for the split nothing but what is too small for its low part.
pub fn is_out_of_range(parts: i64, mut values: impl Iterator<Item = f64> + Clone) -> bool {
    let most = values.clone().fold(0.0, |most: f64, value| most.max(value.abs()));
    values.any(|value| !value.is_finite()) || parts == 2 && most > 0.0 && most < TINY
}

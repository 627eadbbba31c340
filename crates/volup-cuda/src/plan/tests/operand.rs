//! How numbers become operands, as `operand.cuh` says: for the kernels in CUDA C++ that split by tf32; and gradients two fp16, as
//! `half_parts.cuh` says.

use super::contracts::{LIFT, SPLIT_OFF, bits};
use volup::f16;

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

/// What fp16 holds.
fn half(value: f64) -> f64 {
    f16::from_f64(value).into()
}

/// A number as two fp16: what the first holds, and what this leaves, times a power of two. They are rounded: that what is left is of the
/// right scale shows in nothing else.
pub fn halves(value: f64, times: f64) -> [f64; 2] {
    [half(value), half((value - half(value)) * times)]
}

/// The high part that low ones are multiplied by which are lifted.
pub fn by_low(high: f64) -> f64 {
    half(high / LIFT)
}

/// Whether two fp16 are too coarse for what has this largest magnitude, given as bits, or it is past them.
pub fn is_too_coarse(most: f64) -> bool {
    most > 0.0 && !(bits(0.5f64.powi(18))..bits(65504.0)).contains(&most)
}

//! What is done to a line of outputs: interleaving, activations, moments, normalization.
//!
//! The loops are plain Rust without branches, so that they vectorize inside the functions that
//! `conv::kernels!` compiles for each instruction set. Everything is `inline(always)` for that.

use crate::slope::PIECE;
use volup::{Activation, Element};

/// A type that sums are kept in, with the functions that activations need.
pub trait Real:
    Element<Acc = Self>
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + PartialOrd
{
    const ZERO: Self;
    fn exp(self) -> Self;
    fn tanh(self) -> Self;
    /// `1 - erf(self)`
    fn erfc(self) -> Self;
    fn abs(self) -> Self;
    fn clamp(self, low: Self, high: Self) -> Self;
    fn kernels(tables: &crate::conv::Tables) -> &'static crate::conv::Kernels<Self>;
}

/// The reduced exponential of `x`: `(n, e^r - 1)` with `x = n ln 2 + r` and `|r| <= ln 2 / 2`, which
/// a Taylor polynomial of degree 7 gives to 6e-9.
#[inline(always)]
fn exp_parts(x: f32) -> (i32, f32) {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum. (A
    // conversion would saturate, and that keeps the loop from vectorizing.)
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: the first has few enough bits that n times it is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    for factorial in [720.0, 120.0, 24.0, 6.0, 2.0, 1.0] {
        p = p * r + 1.0 / factorial;
    }
    (rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32, p * r)
}

/// `2^n` for an integer `n` in [-126, 127].
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

impl Real for f32 {
    const ZERO: f32 = 0.0;

    #[inline(always)]
    fn exp(self) -> f32 {
        // Beyond these the result is 0 or infinite anyway; NaN passes through.
        let (n, fraction) = exp_parts(self.clamp(-104.0, 89.0));
        let half = n >> 1;
        // In two factors, since 2^n itself can overflow or be subnormal.
        (fraction + 1.0) * power_of_two(half) * power_of_two(n.wrapping_sub(half))
    }

    #[inline(always)]
    fn tanh(self) -> f32 {
        // By e^(-2|x|) - 1, which keeps its relative precision near zero.
        let (n, fraction) = exp_parts((-2.0 * self.abs()).clamp(-80.0, 0.0));
        let scale = power_of_two(n);
        let minus_one = scale * fraction + (scale - 1.0);
        (-minus_one / (minus_one + 2.0)).copysign(self)
    }

    #[inline(always)]
    fn erfc(self) -> f32 {
        // The rational Chebyshev fit of Numerical Recipes (2nd edition, section 6.2), whose fractional
        // error is below 1.2e-7 everywhere.
        const P: [f32; 10] = [
            0.170_872_77,
            -0.822_152_23,
            1.488_515_9,
            -1.135_204,
            0.278_868_07,
            -0.186_288_06,
            0.096_784_18,
            0.374_091_96,
            1.000_023_7,
            -1.265_512_2,
        ];
        let z = self.abs();
        let t = 1.0 / (1.0 + 0.5 * z);
        let mut p = P[0];
        for coefficient in &P[1..] {
            p = p * t + coefficient;
        }
        let positive = t * Real::exp(p - z * z);
        if self < 0.0 { 2.0 - positive } else { positive }
    }

    #[inline(always)]
    fn abs(self) -> f32 {
        f32::abs(self)
    }

    #[inline(always)]
    fn clamp(self, low: f32, high: f32) -> f32 {
        f32::clamp(self, low, high)
    }

    fn kernels(tables: &crate::conv::Tables) -> &'static crate::conv::Kernels<f32> {
        tables.f32
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;

    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }

    #[inline(always)]
    fn erfc(self) -> f64 {
        libm::erfc(self)
    }

    #[inline(always)]
    fn abs(self) -> f64 {
        f64::abs(self)
    }

    #[inline(always)]
    fn clamp(self, low: f64, high: f64) -> f64 {
        f64::clamp(self, low, high)
    }

    fn kernels(tables: &crate::conv::Tables) -> &'static crate::conv::Kernels<f64> {
        tables.f64
    }
}

#[inline(always)]
pub(crate) fn sigmoid<T: Real>(x: T) -> T {
    let one = T::from_f64(1.0);
    one / (one + (T::ZERO - x).exp())
}

/// What changes nothing when added, not even the sign of a zero, and of which the compiler does not know
/// that. Where a loop puts back some elements as they were, it makes stores under a mask of it, which take
/// AMD's processors tens of cycles each. So such loops add this first.
#[inline(always)]
pub(crate) fn nothing<T: Real>() -> T {
    std::hint::black_box(T::from_f64(-0.0))
}

/// Applies an activation to the sum of every element and `offset`.
#[inline(always)]
pub(crate) fn activate<T: Real>(line: &mut [T], offset: T, activation: Activation) {
    #[inline(always)]
    fn each<T: Real>(line: &mut [T], offset: T, f: impl Fn(T) -> T) {
        for value in line {
            *value = f(*value + offset);
        }
    }
    let c = T::from_f64;
    match activation {
        // Not `max`, which would turn NaN into 0.
        Activation::Relu => each(line, offset, |x| if x < T::ZERO { T::ZERO } else { x }),
        Activation::LeakyRelu(slope) => {
            let slope = c(slope.get());
            each(line, offset, |x| if x > T::ZERO { x } else { x * slope });
        }
        Activation::Silu => each(line, offset, |x| x * sigmoid(x)),
        Activation::Gelu => {
            let scale = c(-std::f64::consts::FRAC_1_SQRT_2);
            each(line, offset, |x| c(0.5) * x * (x * scale).erfc());
        }
        Activation::GeluTanh => {
            let scale = c((2.0 / std::f64::consts::PI).sqrt());
            each(line, offset, |x| c(0.5) * x * (c(1.0) + (scale * (x + c(0.044_715) * x * x * x)).tanh()));
        }
        Activation::Hardswish => each(line, offset, |x| x * (x + c(3.0)).clamp(T::ZERO, c(6.0)) / c(6.0)),
        Activation::Sigmoid => each(line, offset, |x| sigmoid(x)),
        Activation::Tanh => each(line, offset, |x| x.tanh()),
    }
}

/// Fills a line from two in turn: `even[0], odd[0], even[1], ...`
#[inline(always)]
pub(crate) fn interleave<T: Copy>(line: &mut [T], even: &[T], odd: &[T]) {
    let pairs = line.len() / 2;
    let (even, last) = (&even[..line.len() - pairs], even[line.len() - pairs - 1]);
    for ((pair, &a), &b) in line.chunks_exact_mut(2).zip(even).zip(&odd[..pairs]) {
        pair[0] = a;
        pair[1] = b;
    }
    if line.len() % 2 == 1 {
        line[2 * pairs] = last;
    }
}

/// Adds the bias and applies activations in turn, in place.
#[inline(always)]
pub(crate) fn finish_line<T: Real>(line: &mut [T], bias: T, activations: [Option<Activation>; 2]) {
    let mut offset = bias;
    for activation in activations.into_iter().flatten() {
        activate(line, offset, activation);
        offset = nothing();
    }
    if activations == [None; 2] {
        for value in line.iter_mut() {
            *value = *value + bias;
        }
    }
}

/// `post((y - mean) * scale + shift)`, in place. The mean is taken off first: folded into the shift
/// it would cancel badly where it is large beside the deviation.
#[inline(always)]
pub(crate) fn normalize_line<T: Real>(line: &mut [T], mean: T, scale: T, shift: T, post: Option<Activation>) {
    for piece in line.chunks_mut(PIECE) {
        for value in piece.iter_mut() {
            *value = (*value - mean) * scale + shift;
        }
        if let Some(activation) = post {
            activate(piece, nothing(), activation);
        }
    }
}

/// As [`normalize_line`], for the channels of one voxel, each with its own mean, scale and shift.
#[inline(always)]
pub(crate) fn normalize_voxel<T: Real>(
    line: &mut [T],
    [mean, scale, shift]: [&[T]; 3],
    post: Option<Activation>,
) {
    for (((value, &mean), &scale), &shift) in line.iter_mut().zip(mean).zip(scale).zip(shift) {
        *value = (*value - mean) * scale + shift;
    }
    if let Some(activation) = post {
        activate(line, nothing(), activation);
    }
}

/// Count, mean and sum of squared deviations from it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moments {
    pub count: f64,
    pub mean: f64,
    pub m2: f64,
}

impl Moments {
    /// The moments of both together (Chan, Golub and LeVeque, 1979).
    pub fn merge(self, other: Moments) -> Moments {
        if other.count == 0.0 {
            return self;
        }
        let count = self.count + other.count;
        let delta = other.mean - self.mean;
        let mean = self.mean + delta * (other.count / count);
        let m2 = self.m2 + other.m2 + delta * delta * (self.count * other.count / count);
        Moments { count, mean, m2 }
    }
}

/// Sums `f` over a line in 32 independent partial sums, which vectorize and lose less to rounding.
#[inline(always)]
pub(crate) fn sum<T: Real>(line: &[T], f: impl Fn(T) -> T) -> T {
    let [sum] = sums(line, |value| [f(value)]);
    sum
}

/// Sums several functions over a line at once, as [`sum`] does.
#[inline(always)]
fn sums<T: Real, const N: usize>(line: &[T], f: impl Fn(T) -> [T; N]) -> [T; N] {
    const WIDTH: usize = 32;
    let mut sums = [[T::ZERO; WIDTH]; N];
    let chunks = line.chunks_exact(WIDTH);
    let mut last = [T::ZERO; WIDTH];
    let left = chunks.remainder().len();
    last[..left].copy_from_slice(chunks.remainder());
    // The last chunk is whole, too, with nothing counted of what the line lacks.
    for (lane, &value) in last.iter().enumerate() {
        let values = f(value);
        for (sums, value) in sums.iter_mut().zip(values) {
            sums[lane] = if lane < left { value } else { T::ZERO };
        }
    }
    for chunk in chunks {
        for (lane, &value) in chunk.iter().enumerate() {
            let values = f(value);
            for (sums, value) in sums.iter_mut().zip(values) {
                sums[lane] = sums[lane] + value;
            }
        }
    }
    sums.map(|mut sums| {
        let mut width = WIDTH / 2;
        while width > 0 {
            for lane in 0..width {
                sums[lane] = sums[lane] + sums[lane + width];
            }
            width /= 2;
        }
        sums[0]
    })
}

/// The moments of a line, in two passes over it: it is short enough to be in the cache.
#[inline(always)]
pub(crate) fn moments<T: Real>(line: &[T]) -> Moments {
    if line.is_empty() {
        return Moments::default();
    }
    let count = line.len() as f64;
    let mean = T::from_f64(sum(line, |x| x).to_f64() / count);
    // The mean was rounded: the deviations from it sum to what was lost.
    let [m2, residue] = sums(line, |x| [(x - mean) * (x - mean), x - mean]);
    let residue = residue.to_f64() / count;
    Moments { count, mean: mean.to_f64() + residue, m2: (m2.to_f64() - count * residue * residue).max(0.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random bit patterns and a sweep of the interesting range.
    fn samples() -> impl Iterator<Item = f32> {
        let sweep = (-40_000..40_000).map(|i| i as f32 * 2.6e-3);
        let tiny = (-1000..1000).map(|i| i as f32 * 1e-6);
        sweep.chain(tiny).chain([0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 88.72, -103.9])
    }

    fn ulps(got: f32, exact: f64) -> f64 {
        let spacing = (exact.abs() as f32).max(f32::MIN_POSITIVE) as f64 * f64::from(f32::EPSILON);
        (f64::from(got) - exact).abs() / spacing
    }

    #[test]
    fn exp_is_within_two_ulps() {
        for x in samples().filter(|x| x.abs() < 88.7) {
            let got = Real::exp(x);
            assert!(ulps(got, f64::from(x).exp()) < 2.0, "exp({x}) = {got}");
        }
    }

    #[test]
    fn tanh_is_within_four_ulps() {
        for x in samples() {
            let got = Real::tanh(x);
            assert!(ulps(got, f64::from(x).tanh()) < 4.0, "tanh({x}) = {got}");
        }
    }

    #[test]
    fn erfc_is_within_its_stated_error() {
        for x in samples().filter(|x| x.abs() < 5.0) {
            let (got, exact) = (f64::from(Real::erfc(x)), libm::erfc(f64::from(x)));
            // Evaluated in single precision: the argument of exp is of size 1 + x^2, and its rounding
            // becomes a relative error of the result.
            let tolerance = 1.2e-7 * (4.0 + f64::from(x * x)) * exact;
            assert!((got - exact).abs() < tolerance, "erfc({x}) = {got}, not {exact}");
        }
    }

    #[test]
    fn special_values() {
        assert_eq!(Real::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Real::exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(Real::exp(200f32), f32::INFINITY);
        assert!(
            Real::exp(f32::NAN).is_nan() && Real::tanh(f32::NAN).is_nan() && Real::erfc(f32::NAN).is_nan()
        );
        assert_eq!((Real::tanh(f32::INFINITY), Real::tanh(f32::NEG_INFINITY)), (1.0, -1.0));
        assert!(Real::tanh(-0.0f32).is_sign_negative());
    }

    #[test]
    fn nothing_changes_nothing() {
        for x in samples() {
            assert_eq!((x + nothing::<f32>()).to_bits(), x.to_bits());
        }
        assert!((f64::NAN + nothing::<f64>()).is_nan());
    }

    #[test]
    fn moments_survive_a_large_mean() {
        let line: Vec<f32> = (0..1000).map(|i| 1e6 + (i % 7) as f32 * 0.125).collect();
        let exact: Vec<f64> = line.iter().map(|&x| f64::from(x)).collect();
        let mean = exact.iter().sum::<f64>() / 1000.0;
        let m2 = exact.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
        let halves = moments(&line[..300]).merge(moments(&line[300..]));
        for got in [moments(&line), halves] {
            assert!(
                (got.mean - mean).abs() < 1e-3 && (got.m2 / m2 - 1.0).abs() < 1e-3,
                "{got:?}, not {mean}, {m2}"
            );
        }
    }
}

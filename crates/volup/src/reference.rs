//! The oracle: every block in double precision, by the definition, with an error bound per element.
//!
//! Nothing here is fast and nothing is shared with an engine: output voxel `o` of an axis sums over
//! all pairs of an input `i` and a tap `t` with `o = i*s - p + t*d`.
//!
//! # The bounds
//!
//! [`forward`] also bounds, element by element, how far an engine may be from the exact result if it
//! stores values in the input's type (unit roundoff `v`) and computes in that type's accumulator
//! (unit roundoff `u`). The oracle's own rounding is counted in: every `u` below is that of the
//! accumulator plus that of double precision.
//!
//! - **Convolution.** A sum of `n` products and a bias, in any order, is off by at most
//!   `e = (n + 2) * u * m`, `m` the sum of the magnitudes of what is added.
//! - **Activation.** An error of `e` in the argument moves the result by at most `L * e`, `L` the
//!   largest slope; a transcendental function itself is off by a few `u * (|x| + 1)`.
//! - **Storing** a value adds `v * |y|` and half of the smallest subnormal. An engine may do so
//!   before the normalization or not; the bound allows it.
//! - **Statistics.** If each `y` of a group is off by at most `e`, the mean is off by at most
//!   `mean(e)`, and the standard deviation by at most `rms(e)` (it is a norm: the triangle
//!   inequality). Summing in chunks adds at most `c*u` of the magnitudes, with `c = 64`: an engine
//!   must not add a million values into one running sum. With `E = rms(e) + c*u*rms(y)` the variance
//!   is off by at most `2*sigma*E + E^2`, and `c*u` of itself.
//! - **Normalization.** `z = gamma*(y - mu)*r + beta` with `r = 1/sqrt(var + eps)`. From
//!   `(y' - mu')*r' - (y - mu)*r = ((y' - y) - (mu' - mu))*r' + (y - mu)*(r' - r)` and the largest
//!   `r'` that the variance's error allows, the error is at most
//!   `|gamma| * ((e + e_mu)*r' + |y - mu|*(r' - r))`, plus a few `u` of
//!   `|gamma|*(|y| + |mu|)*r' + |beta|` for the evaluation in either form.
//!
//! - **Operands.** An engine may round each input and weight to a unit roundoff `r` before it
//!   multiplies them ([`crate::Engine::operand_roundoff`]; 2^-11 in `tf32`). Each product is then off
//!   by at most `q = 2*r + r^2` of itself, the sum by `q*m`, and the rounding of the sum is that of
//!   numbers which are larger by as much: `e = q*m + (n + 2) * u * (1 + q)*m`. Operands that `r`
//!   rounds to themselves, such as small whole numbers, must still give the one right answer.

mod gradients;

use crate::{Activation, Axis, BlockSpec, DType, Geometry, NormSpec, Parameters, Tensor, bf16, f16};
pub use gradients::{activation_gradient, backward, statistics};

/// The longest chain of additions that a statistic may be made of, in roundings.
const STATISTIC_ROUNDINGS: f64 = 64.0;
/// Roundings of a transcendental function, and of scaling and shifting a normalized value.
const EVALUATION_ROUNDINGS: f64 = 8.0;

/// What a block's output should be, in contiguous [N, C, D, H, W] order.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The values in double precision.
    pub values: Vec<f64>,
    /// How far from its value each element of a right engine may be.
    pub bounds: Vec<f64>,
}

/// One output of the bare convolution.
#[derive(Clone, Copy, Debug)]
pub struct Voxel {
    /// The bias plus all products.
    pub sum: f64,
    /// The magnitude of the bias plus those of all products.
    pub magnitude: f64,
    /// The number of products.
    pub terms: usize,
}

impl Voxel {
    /// How far from [`Voxel::sum`] an engine of this type may be before it stores the result.
    fn sum_bound(&self, unit: &Rounding) -> f64 {
        // An infinity is exact: a ReLU may turn it into a 0 that is.
        if !self.sum.is_finite() {
            return 0.0;
        }
        let terms = self.terms as f64;
        let operands = unit.product * self.magnitude;
        operands + (terms + 2.0) * unit.acc * (self.magnitude + operands) + (terms + 1.0) * unit.acc_tiny
    }

    /// How far from [`Voxel::sum`] the stored output of an engine of this type may be that rounds its
    /// operands to `operand_roundoff`.
    pub fn bound(&self, dtype: DType, operand_roundoff: f64) -> f64 {
        let unit = Rounding::of(dtype, operand_roundoff);
        let bound = self.sum_bound(&unit);
        bound + unit.stored(self.sum, bound)
    }
}

/// What a storage type and its accumulator lose to rounding.
struct Rounding {
    /// Unit roundoff of the accumulator and of double precision, added up.
    acc: f64,
    /// What rounding both operands does to a product, as a share of it.
    product: f64,
    /// The smallest positive number of the accumulator.
    acc_tiny: f64,
    /// Unit roundoff of the storage type; 0 where it is the accumulator itself.
    store: f64,
    /// Half the smallest positive number of the storage type.
    tiny: f64,
}

impl Rounding {
    fn of(dtype: DType, operand_roundoff: f64) -> Rounding {
        let acc = dtype.accumulator();
        let (store, tiny) =
            if acc == dtype { (0.0, 0.0) } else { (dtype.unit_roundoff(), smallest(dtype) / 2.0) };
        Rounding {
            acc: acc.unit_roundoff() + DType::F64.unit_roundoff(),
            product: operand_roundoff * (2.0 + operand_roundoff),
            acc_tiny: smallest(acc),
            store,
            tiny,
        }
    }

    /// What storing a value that is already off by `error` adds.
    fn stored(&self, value: f64, error: f64) -> f64 {
        self.store * (value.abs() + error) + self.tiny
    }
}

/// The smallest positive number of a type.
fn smallest(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::from_bits(1),
        DType::F32 => f64::from(f32::from_bits(1)),
        DType::F16 => f64::from(f16::from_bits(1)),
        DType::Bf16 => f64::from(bf16::from_bits(1)),
    }
}

/// An activation in double precision, in the formula of `torch.nn.functional`, so that infinities
/// and NaN come out as there.
pub fn activation(activation: Activation, x: f64) -> f64 {
    match activation {
        // Not `max`, which drops NaN.
        Activation::Relu => {
            if x <= 0.0 {
                0.0
            } else {
                x
            }
        }
        Activation::LeakyRelu(slope) => {
            if x > 0.0 {
                x
            } else {
                slope.get() * x
            }
        }
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => x * 0.5 * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Hardswish => x * (x + 3.0).clamp(0.0, 6.0) / 6.0,
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Tanh => x.tanh(),
    }
}

/// The largest slope of an activation.
fn lipschitz(activation: Activation) -> f64 {
    match activation {
        Activation::Relu | Activation::Tanh => 1.0,
        Activation::LeakyRelu(slope) => slope.get().abs().max(1.0),
        Activation::Silu => 1.1,
        Activation::Gelu | Activation::GeluTanh => 1.13,
        Activation::Hardswish => 1.5,
        Activation::Sigmoid => 0.25,
    }
}

/// The roundings of an activation itself at an argument of magnitude `x`, as a multiple of the unit.
fn evaluation(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Relu => 0.0,
        Activation::LeakyRelu(slope) => slope.get().abs() * x,
        _ => EVALUATION_ROUNDINGS * (x + 1.0),
    }
}

/// The (input, tap) pairs that reach output `o`, in ascending tap.
fn pairs(axis: &Axis, o: usize) -> Vec<(usize, usize)> {
    (0..axis.kernel)
        .filter_map(|tap| {
            let strided = (o + axis.padding).checked_sub(tap * axis.dilation)?;
            let input = strided / axis.stride;
            (strided % axis.stride == 0 && input < axis.input).then_some((input, tap))
        })
        .collect()
}

/// The (input, tap) pairs that reach output [od, oh, ow], as indices into one channel of the input
/// and one channel pair of the weight.
fn taps(axes: &[Axis; 3], [od, oh, ow]: [usize; 3]) -> Vec<(usize, usize)> {
    let [depth, height, width] = axes;
    let (heights, widths) = (pairs(height, oh), pairs(width, ow));
    let mut taps = Vec::with_capacity(depth.kernel * heights.len() * widths.len());
    for (id, td) in pairs(depth, od) {
        for &(ih, th) in &heights {
            let (row, tap_row) = (id * height.input + ih, td * height.kernel + th);
            let of_row = widths.iter().map(|&(iw, tw)| (row * width.input + iw, tap_row * width.kernel + tw));
            taps.extend(of_row);
        }
    }
    taps
}

/// The convolution at output [n, co, od, oh, ow], so that an output too large to compute can be
/// checked at chosen voxels. The slices are contiguous, in the shapes of [`Geometry`].
///
/// # Panics
/// If a slice or the voxel is not of that shape.
pub fn voxel(
    geometry: &Geometry,
    weight: &[f64],
    bias: Option<&[f64]>,
    input: &[f64],
    [n, co, od, oh, ow]: [usize; 5],
) -> Voxel {
    gather(geometry, weight, bias, input, [n, co], &taps(geometry.axes(), [od, oh, ow]))
}

/// Sums over the given taps and the input channels of co's group.
fn gather(
    geometry: &Geometry,
    weight: &[f64],
    bias: Option<&[f64]>,
    input: &[f64],
    [n, co]: [usize; 2],
    taps: &[(usize, usize)],
) -> Voxel {
    let [_, channels, depth, height, width] = geometry.input_shape();
    let [_, out_per_group, kernel @ ..] = geometry.conv().weight_shape();
    let (voxels, kernel) = (depth * height * width, kernel.iter().product::<usize>());
    let in_per_group = channels / geometry.conv().groups();
    let (group, co_in_group) = (co / out_per_group, co % out_per_group);
    let bias = bias.map_or(0.0, |bias| bias[co]);
    let (mut sum, mut magnitude) = (bias, bias.abs());
    for ci in group * in_per_group..(group + 1) * in_per_group {
        let x = &input[(n * channels + ci) * voxels..][..voxels];
        let w = &weight[(ci * out_per_group + co_in_group) * kernel..][..kernel];
        for &(i, t) in taps {
            let product = x[i] * w[t];
            sum += product;
            magnitude += product.abs();
        }
    }
    Voxel { sum, magnitude, terms: in_per_group * taps.len() }
}

/// Runs a block on an input whose type is also the type that the engine stores, for an engine that
/// rounds its operands to `operand_roundoff` before it multiplies them.
///
/// # Panics
/// If the tensors are not of the shapes that the block and the geometry ask for.
pub fn forward(
    block: &BlockSpec,
    geometry: &Geometry,
    parameters: &Parameters,
    input: &Tensor,
    operand_roundoff: f64,
) -> Expected {
    let unit = Rounding::of(input.dtype(), operand_roundoff);
    let out = convolution(geometry, parameters, input, &unit);
    follow(out, block, geometry, parameters, &unit)
}

/// As [`forward`], for an engine that stores the convolution's output before it goes on.
///
/// # Panics
/// As [`forward`].
pub fn forward_for_training(
    block: &BlockSpec,
    geometry: &Geometry,
    parameters: &Parameters,
    input: &Tensor,
    operand_roundoff: f64,
) -> Expected {
    let unit = Rounding::of(input.dtype(), operand_roundoff);
    let mut out = convolution(geometry, parameters, input, &unit);
    if !block.is_bare() {
        store(&mut out, &unit);
    }
    follow(out, block, geometry, parameters, &unit)
}

/// What follows the convolution.
fn follow(
    mut out: Expected,
    block: &BlockSpec,
    geometry: &Geometry,
    parameters: &Parameters,
    unit: &Rounding,
) -> Expected {
    if let Some(activation) = block.activation() {
        activate(&mut out, activation, unit);
    }
    if let Some(norm) = block.norm() {
        store(&mut out, unit);
        normalize(&mut out, geometry, norm, parameters, unit);
    }
    if let Some(activation) = block.post_activation() {
        activate(&mut out, activation, unit);
    }
    store(&mut out, unit);
    out
}

fn convolution(geometry: &Geometry, parameters: &Parameters, input: &Tensor, unit: &Rounding) -> Expected {
    let weight = parameters.weight.to_f64();
    let bias = parameters.bias.as_ref().map(Tensor::to_f64);
    let input = input.to_f64();
    let [batch, channels, _, height, width] = geometry.output_shape();
    let voxels = geometry.output_voxels();
    let zeros = vec![0.0; batch * channels * voxels];
    let mut out = Expected { values: zeros.clone(), bounds: zeros };
    for at in 0..voxels {
        let taps = taps(geometry.axes(), [at / (height * width), at / width % height, at % width]);
        for n in 0..batch {
            for co in 0..channels {
                let voxel = gather(geometry, &weight, bias.as_deref(), &input, [n, co], &taps);
                let index = (n * channels + co) * voxels + at;
                out.values[index] = voxel.sum;
                out.bounds[index] = voxel.sum_bound(unit);
            }
        }
    }
    out
}

fn activate(out: &mut Expected, function: Activation, unit: &Rounding) {
    for (value, bound) in out.values.iter_mut().zip(&mut out.bounds) {
        let x = if value.is_finite() { value.abs() } else { 0.0 };
        *bound = lipschitz(function) * *bound + evaluation(function, x) * unit.acc + unit.acc_tiny;
        *value = activation(function, *value);
    }
}

fn store(out: &mut Expected, unit: &Rounding) {
    for (value, bound) in out.values.iter().zip(&mut out.bounds) {
        *bound += unit.stored(*value, *bound);
    }
}

fn normalize(
    out: &mut Expected,
    geometry: &Geometry,
    norm: NormSpec,
    parameters: &Parameters,
    unit: &Rounding,
) {
    let gamma = parameters.norm_weight.as_ref().map(Tensor::to_f64);
    let beta = parameters.norm_bias.as_ref().map(Tensor::to_f64);
    let channels = geometry.conv().out_channels() / norm.groups();
    let voxels = geometry.output_voxels();
    let groups = out.values.chunks_mut(channels * voxels).zip(out.bounds.chunks_mut(channels * voxels));
    for (index, (values, bounds)) in groups.enumerate() {
        let Statistics { mean, rstd, mean_error, rstd_high } =
            Statistics::of(values, bounds, norm.eps(), unit.acc);
        let first_channel = index % norm.groups() * channels;
        for (at, (value, bound)) in values.iter_mut().zip(bounds).enumerate() {
            let channel = first_channel + at / voxels;
            let gamma = gamma.as_ref().map_or(1.0, |gamma| gamma[channel]);
            let beta = beta.as_ref().map_or(0.0, |beta| beta[channel]);
            let y = *value;
            *value = gamma * (y - mean) * rstd + beta;
            let moved = (*bound + mean_error) * rstd_high + (y - mean).abs() * (rstd_high - rstd);
            let evaluation = gamma.abs() * (y.abs() + mean.abs()) * rstd_high + beta.abs();
            *bound = gamma.abs() * moved + EVALUATION_ROUNDINGS * unit.acc * evaluation + unit.acc_tiny;
        }
    }
}

/// One group's statistics and how far an engine's may be from them.
struct Statistics {
    mean: f64,
    rstd: f64,
    mean_error: f64,
    rstd_high: f64,
}

impl Statistics {
    fn of(values: &[f64], errors: &[f64], eps: f64, unit: f64) -> Statistics {
        let mean_of = |terms: &mut dyn Iterator<Item = f64>| sum(terms) / values.len() as f64;
        let mean = mean_of(&mut values.iter().copied());
        let variance = mean_of(&mut values.iter().map(|y| (y - mean) * (y - mean)));
        let magnitude = mean_of(&mut values.iter().map(|y| y.abs()));
        let rms = mean_of(&mut values.iter().map(|y| y * y)).sqrt();
        let error = mean_of(&mut errors.iter().copied());
        let rms_error = mean_of(&mut errors.iter().map(|e| e * e)).sqrt();

        let chunks = STATISTIC_ROUNDINGS * unit;
        let spread = rms_error + chunks * rms;
        let variance_error = 2.0 * variance.sqrt() * spread + spread * spread + chunks * (variance + eps);
        Statistics {
            mean,
            rstd: 1.0 / (variance + eps).sqrt(),
            mean_error: error + chunks * magnitude,
            rstd_high: 1.0 / ((variance - variance_error).max(0.0) + eps).sqrt(),
        }
    }
}

/// A compensated (Neumaier) sum, so that the oracle's own statistics are exact to a rounding or two.
fn sum(terms: &mut dyn Iterator<Item = f64>) -> f64 {
    let (mut sum, mut lost) = (0.0f64, 0.0);
    for term in terms {
        let next = sum + term;
        lost += if sum.abs() >= term.abs() { (sum - next) + term } else { (term - next) + sum };
        sum = next;
    }
    sum + lost
}

#[cfg(test)]
#[path = "reference_tests.rs"]
mod tests;

//! The gradients by the definition, with an error bound per element.
//!
//! # The bounds
//!
//! They take what the forward pass saved as it is, so that only the backward pass is judged here: the
//! convolution's output is exact as stored, and so are mean and rstd. With the units of
//! [`super`] (`u` of the accumulator, `v` of the storage type):
//!
//! - **A slope** `f'(x)` of an argument that is off by `e` is off by at most what [`slope_change`]
//!   says, a few `u * (|x| + 1)` more for its evaluation.
//! - **A sum over voxels** of `n` terms: an engine must not add up more than `c = 1024` of them one
//!   by one, so it is off by the errors of its terms and by `(min(n, c) + 2) * u * m`, `m` the sum of
//!   the magnitudes.
//! - **Products and differences** by the rules for these, to the first order in `u`, and to the second
//!   where two of the errors may be large.
//! - **The gradient of the convolution's output**, `dy`, may be stored in the storage type before it
//!   is used: `v * |dy|`. What is computed from it inherits its errors as `sum |w|*e`, `sum |x|*e`.

use super::{
    EVALUATION_ROUNDINGS, Expected, Rounding, STATISTIC_ROUNDINGS, activation, evaluation, lipschitz, taps,
};
use crate::{Activation, BlockSpec, Geometry, Gradients, Parameters, Saved, Tensor};

/// The longest chain of additions that a sum over voxels may be made of, in roundings.
const CHAIN: f64 = 1024.0;

/// `g * f'(x)`, with PyTorch's choice where `f` has a kink; where the slope is 0 for certain, `g` does
/// not matter, be it infinite.
pub fn activation_gradient(function: Activation, x: f64, g: f64) -> f64 {
    match function {
        // Not `x > 0`, for which NaN would count as negative.
        Activation::Relu if x <= 0.0 => 0.0,
        Activation::Relu => g,
        _ => g * slope(function, x),
    }
}

fn slope(function: Activation, x: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match function {
        Activation::Relu => f64::from(u8::from(x > 0.0)),
        Activation::LeakyRelu(slope) => {
            if x > 0.0 {
                1.0
            } else {
                slope.get()
            }
        }
        Activation::Silu => sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x))),
        Activation::Gelu => {
            let cdf = 0.5 * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2));
            cdf + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
        }
        Activation::GeluTanh => {
            let scale = (2.0 / std::f64::consts::PI).sqrt();
            let tanh = (scale * (x + 0.044715 * x * x * x)).tanh();
            0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * scale * (1.0 + 3.0 * 0.044715 * x * x)
        }
        Activation::Hardswish => {
            if x <= -3.0 {
                0.0
            } else if x < 3.0 {
                x / 3.0 + 0.5
            } else {
                1.0
            }
        }
        Activation::Sigmoid => sigmoid(x) * (1.0 - sigmoid(x)),
        Activation::Tanh => 1.0 - x.tanh() * x.tanh(),
    }
}

/// How far the slope can be from that at `x` anywhere within `error` of it: the largest curvature
/// times the error, and what the slope jumps by at kinks within reach.
fn slope_change(function: Activation, x: f64, error: f64) -> f64 {
    let jump = |at: f64, by: f64| if (x - at).abs() <= error { by } else { 0.0 };
    match function {
        Activation::Relu => jump(0.0, 1.0),
        Activation::LeakyRelu(slope) => jump(0.0, (1.0 - slope.get()).abs()),
        Activation::Silu => 0.5 * error,
        Activation::Gelu | Activation::GeluTanh => 0.82 * error,
        Activation::Hardswish => error / 3.0 + jump(-3.0, 0.5) + jump(3.0, 0.5),
        Activation::Sigmoid => 0.1 * error,
        Activation::Tanh => 0.78 * error,
    }
}

/// What evaluating a slope in the accumulator's type adds.
fn slope_evaluation(function: Activation, x: f64, unit: &Rounding) -> f64 {
    match function {
        Activation::Relu | Activation::LeakyRelu(_) => 0.0,
        _ => EVALUATION_ROUNDINGS * (x.abs() + 1.0) * unit.acc,
    }
}

/// A value and how far an engine's may be from it.
#[derive(Clone, Copy, Debug, Default)]
struct Near {
    value: f64,
    error: f64,
}

impl Near {
    /// `f(self)`.
    fn activate(self, function: Option<Activation>, unit: &Rounding) -> Near {
        let Some(function) = function else { return self };
        let error = lipschitz(function) * self.error + evaluation(function, self.value.abs()) * unit.acc;
        Near { value: activation(function, self.value), error }
    }

    /// `self * f'(x)`.
    fn through(self, function: Option<Activation>, x: Near, unit: &Rounding) -> Near {
        let Some(function) = function else { return self };
        let change = slope_change(function, x.value, x.error) + slope_evaluation(function, x.value, unit);
        let value = activation_gradient(function, x.value, self.value);
        let steepest = slope(function, x.value).abs() + change;
        let error = self.error * steepest + self.value.abs() * change;
        let rounding = if function == Activation::Relu { 0.0 } else { unit.acc * value.abs() };
        Near { value, error: error + rounding }
    }
}

/// The gradients of a block for the loss' gradient with respect to its output, given what the forward
/// pass saved. The engine stores values in the input's type and rounds the convolutions' operands to
/// `operand_roundoff`.
///
/// # Panics
/// If the tensors are not of the shapes that the block and the geometry ask for.
pub fn backward(
    block: &BlockSpec,
    geometry: &Geometry,
    parameters: &Parameters,
    input: &Tensor,
    saved: &Saved<Tensor>,
    grad_output: &Tensor,
    operand_roundoff: f64,
) -> Gradients<Expected> {
    let unit = Rounding::of(input.dtype(), operand_roundoff);
    let mut gradients = Gradients::default();
    let mut dy: Vec<Near> =
        grad_output.to_f64().into_iter().map(|value| Near { value, error: 0.0 }).collect();
    if !block.is_bare() {
        let epilogue = Epilogue { block, geometry, parameters, saved, unit: &unit };
        let sums = epilogue.backward(&mut dy);
        if block.norm().is_some_and(|norm| norm.affine()) {
            let stored = |pick: fn(&[Near; 2]) -> Near| {
                sums.iter().map(|sums| expected(pick(sums), &unit)).collect::<Vec<_>>()
            };
            gradients.norm_weight = Some(Expected::of(stored(|sums| sums[1])));
            gradients.norm_bias = Some(Expected::of(stored(|sums| sums[0])));
        }
    }
    if parameters.bias.is_some() {
        let channels = geometry.conv().out_channels();
        let lines = dy.chunks(geometry.output_voxels()).enumerate();
        let mut sums = vec![VoxelSum::default(); channels];
        for (index, line) in lines {
            line.iter().for_each(|&term| sums[index % channels].add(term.value, term.error));
        }
        let sums = sums.iter().map(|sum| expected(sum.near(&unit, 0.0), &unit)).collect();
        gradients.bias = Some(Expected::of(sums));
    }
    let (dx, dw) = convolution(geometry, &parameters.weight.to_f64(), &input.to_f64(), &dy, &unit);
    gradients.input = Some(dx);
    gradients.weight = Some(dw);
    gradients
}

impl Expected {
    fn of(elements: Vec<(f64, f64)>) -> Expected {
        let (values, bounds) = elements.into_iter().unzip();
        Expected { values, bounds }
    }
}

/// A value as it may be stored, and its bound.
fn expected(near: Near, unit: &Rounding) -> (f64, f64) {
    // An infinity is exact.
    if !near.value.is_finite() {
        return (near.value, 0.0);
    }
    (near.value, near.error + unit.stored(near.value, near.error))
}

/// A sum over voxels.
#[derive(Clone, Copy, Debug, Default)]
struct VoxelSum {
    sum: f64,
    lost: f64,
    magnitude: f64,
    error: f64,
    terms: usize,
}

impl VoxelSum {
    /// Compensated, so that the oracle's own sum is exact to a rounding or two.
    fn add(&mut self, term: f64, error: f64) {
        let next = self.sum + term;
        self.lost +=
            if self.sum.abs() >= term.abs() { (self.sum - next) + term } else { (term - next) + self.sum };
        self.sum = next;
        self.magnitude += term.abs();
        self.error += error;
        self.terms += 1;
    }

    /// `product` is what rounding the operands of a product does to it.
    fn near(&self, unit: &Rounding, product: f64) -> Near {
        if !self.sum.is_finite() {
            return Near { value: self.sum, error: 0.0 };
        }
        let terms = self.terms as f64;
        let operands = self.magnitude * product;
        let error = self.error + operands + (terms.min(CHAIN) + 2.0) * unit.acc * (self.magnitude + operands);
        Near { value: self.sum + self.lost, error: error + (terms + 1.0) * unit.acc_tiny }
    }
}

/// What follows the convolution.
struct Epilogue<'a> {
    block: &'a BlockSpec,
    geometry: &'a Geometry,
    parameters: &'a Parameters,
    saved: &'a Saved<Tensor>,
    unit: &'a Rounding,
}

impl Epilogue<'_> {
    /// Turns the gradient of the output into that of the convolution's output, and returns the sums
    /// of `dv` and `dv * h` for each channel.
    fn backward(&self, gradient: &mut [Near]) -> Vec<[Near; 2]> {
        let channels = self.geometry.conv().out_channels();
        let voxels = self.geometry.output_voxels();
        let groups = self.block.norm().map_or(1, |norm| norm.groups());
        let y = self.saved.convolution.as_ref().expect("the convolution's output is saved").to_f64();
        let mut sums = vec![[VoxelSum::default(); 2]; channels];
        let per_group = channels / groups * voxels;
        for (index, (gradient, y)) in gradient.chunks_mut(per_group).zip(y.chunks(per_group)).enumerate() {
            let first = index % groups * (channels / groups);
            let of_group = &mut sums[first..first + channels / groups];
            self.group(index, first, gradient, y, of_group);
        }
        sums.iter().map(|[dv, dvh]| [dv.near(self.unit, 0.0), dvh.near(self.unit, 0.0)]).collect()
    }

    /// One group of one sample.
    fn group(
        &self,
        index: usize,
        first: usize,
        gradient: &mut [Near],
        y: &[f64],
        sums: &mut [[VoxelSum; 2]],
    ) {
        let voxels = self.geometry.output_voxels();
        let unit = self.unit;
        let u = EVALUATION_ROUNDINGS * unit.acc;
        let per_channel = |tensor: &Option<Tensor>, channel: usize, default: f64| {
            tensor.as_ref().map_or(default, |tensor| tensor.to_f64()[channel])
        };
        let statistic = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| tensor.to_f64()[index]);
        let statistics = self.block.norm().map(|_| {
            let (mean, rstd) = (statistic(&self.saved.mean), statistic(&self.saved.rstd));
            (mean.expect("the mean is saved"), rstd.expect("rstd is saved"))
        });
        let gamma: Vec<f64> =
            (0..sums.len()).map(|c| per_channel(&self.parameters.norm_weight, first + c, 1.0)).collect();
        let beta: Vec<f64> =
            (0..sums.len()).map(|c| per_channel(&self.parameters.norm_bias, first + c, 0.0)).collect();
        let mut normalized = vec![Near::default(); y.len()];
        // What the means over the group are taken of: gamma*dv and gamma*dv*h.
        let mut of_group = [VoxelSum::default(); 2];
        for (at, (gradient, &y)) in gradient.iter_mut().zip(y).enumerate() {
            let c = at / voxels;
            let a = Near { value: y, error: 0.0 }.activate(self.block.activation(), unit);
            let Some((mean, rstd)) = statistics else {
                *gradient = gradient.through(self.block.post_activation(), a, unit);
                continue;
            };
            let h = Near {
                value: (a.value - mean) * rstd,
                error: (a.error + u * (a.value.abs() + mean.abs())) * rstd,
            };
            let v = Near {
                value: gamma[c] * h.value + beta[c],
                error: gamma[c].abs() * h.error + u * ((gamma[c] * h.value).abs() + beta[c].abs()),
            };
            let dv = gradient.through(self.block.post_activation(), v, unit);
            let dvh = dv.value * h.value;
            let dvh_error =
                dv.error * h.value.abs() + dv.value.abs() * h.error + dv.error * h.error + u * dvh.abs();
            sums[c][0].add(dv.value, dv.error);
            sums[c][1].add(dvh, dvh_error);
            of_group[0].add(gamma[c] * dv.value, gamma[c].abs() * dv.error);
            of_group[1].add(gamma[c] * dvh, gamma[c].abs() * dvh_error);
            *gradient = dv;
            normalized[at] = h;
        }
        let mean_of = |sum: &VoxelSum| {
            let count = y.len() as f64;
            let near = sum.near(unit, 0.0);
            let error = near.error + STATISTIC_ROUNDINGS * unit.acc * sum.magnitude;
            Near { value: near.value / count, error: error / count }
        };
        let [s1, s2] = [mean_of(&of_group[0]), mean_of(&of_group[1])];
        for (at, (gradient, &y)) in gradient.iter_mut().zip(y).enumerate() {
            if let Some((_, rstd)) = statistics {
                let (gamma, h, dv) = (gamma[at / voxels], normalized[at], *gradient);
                let terms = [gamma * dv.value, s1.value, h.value * s2.value];
                let magnitude: f64 = terms.iter().map(|term| term.abs()).sum();
                let inherited = gamma.abs() * dv.error
                    + s1.error
                    + h.error * (s2.value.abs() + s2.error)
                    + h.value.abs() * s2.error;
                *gradient = Near {
                    value: (terms[0] - terms[1] - terms[2]) * rstd,
                    error: (inherited + u * magnitude) * rstd,
                };
            }
            let y = Near { value: y, error: 0.0 };
            *gradient = gradient.through(self.block.activation(), y, unit);
            gradient.error += unit.stored(gradient.value, gradient.error) + unit.acc_tiny;
            // Without an epilogue that rounds, nothing is lost.
            if !gradient.value.is_finite() || (statistics.is_none() && self.selects()) {
                gradient.error = 0.0;
            }
        }
    }

    /// Whether the gradient is passed on or dropped, element by element, and never rounded.
    fn selects(&self) -> bool {
        let select = |function| matches!(function, None | Some(Activation::Relu));
        select(self.block.activation()) && select(self.block.post_activation())
    }
}

/// The gradients of the input and the weight of the bare convolution.
fn convolution(
    geometry: &Geometry,
    weight: &[f64],
    input: &[f64],
    dy: &[Near],
    unit: &Rounding,
) -> (Expected, Expected) {
    let [batch, in_channels, depth, height, width] = geometry.input_shape();
    let [_, out_channels, _, out_height, out_width] = geometry.output_shape();
    let [_, out_per_group, kernel @ ..] = geometry.conv().weight_shape();
    let (voxels, kernel) = (depth * height * width, kernel.iter().product::<usize>());
    let out_voxels = geometry.output_voxels();
    let in_per_group = in_channels / geometry.conv().groups();
    let mut dx = vec![VoxelSum::default(); input.len()];
    let mut dw = vec![VoxelSum::default(); weight.len()];
    for at in 0..out_voxels {
        let o = [at / (out_height * out_width), at / out_width % out_height, at % out_width];
        let pairs = taps(geometry.axes(), o);
        for n in 0..batch {
            for co in 0..out_channels {
                let gradient = dy[(n * out_channels + co) * out_voxels + at];
                let (group, co_in_group) = (co / out_per_group, co % out_per_group);
                for ci in group * in_per_group..(group + 1) * in_per_group {
                    for &(i, t) in &pairs {
                        let i = (n * in_channels + ci) * voxels + i;
                        let t = (ci * out_per_group + co_in_group) * kernel + t;
                        dx[i].add(gradient.value * weight[t], gradient.error * weight[t].abs());
                        dw[t].add(gradient.value * input[i], gradient.error * input[i].abs());
                    }
                }
            }
        }
    }
    // The gradient of the input sums over channels and taps as the forward pass does: in any order.
    let any_order = |sum: &VoxelSum| {
        let mut near = sum.near(unit, unit.product);
        near.error += (sum.terms as f64 - CHAIN).max(0.0) * unit.acc * sum.magnitude;
        expected(near, unit)
    };
    let in_parts = |sum: &VoxelSum| expected(sum.near(unit, unit.product), unit);
    (Expected::of(dx.iter().map(any_order).collect()), Expected::of(dw.iter().map(in_parts).collect()))
}

/// The statistics of a block's normalization, `[N, groups]` each, of the convolution's output as it
/// was saved: means and one over the standard deviations.
///
/// # Panics
/// If the block has no normalization, or the tensor is not of its output's shape.
pub fn statistics(block: &BlockSpec, geometry: &Geometry, convolution: &Tensor) -> [Expected; 2] {
    let norm = block.norm().expect("a normalization");
    let unit = Rounding::of(convolution.dtype(), 0.0);
    let per_group = geometry.conv().out_channels() / norm.groups() * geometry.output_voxels();
    let groups = convolution.to_f64();
    let groups = groups.chunks(per_group).map(|group| {
        // The engine takes them of values that it has not rounded yet.
        let near = group
            .iter()
            .map(|&value| Near { value, error: unit.stored(value, 0.0) }.activate(block.activation(), &unit));
        let (values, errors): (Vec<f64>, Vec<f64>) = near.map(|near| (near.value, near.error)).unzip();
        let found = super::Statistics::of(&values, &errors, norm.eps(), unit.acc);
        let rounding = EVALUATION_ROUNDINGS * unit.acc;
        [
            (found.mean, found.mean_error + rounding * found.mean.abs()),
            (found.rstd, found.rstd_high - found.rstd + rounding * found.rstd_high),
        ]
    });
    let groups: Vec<[(f64, f64); 2]> = groups.collect();
    [0, 1].map(|which| Expected::of(groups.iter().map(|group| group[which]).collect()))
}

#[cfg(test)]
#[path = "gradients_tests.rs"]
mod tests;

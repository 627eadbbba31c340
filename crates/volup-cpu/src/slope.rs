//! What the backward pass does to a line: the slopes of activations, the gradient of a normalization.
//!
//! Plain loops without branches, as in `math`, for `conv::kernels!` to compile.

use crate::math::{Real, activate, nothing, sigmoid, sum};
use volup::Activation;

/// `g * f'(x)`, in place, with PyTorch's choice where `f` has a kink.
#[inline(always)]
fn through<T: Real>(gradient: &mut [T], line: &[T], function: Activation) {
    #[inline(always)]
    fn each<T: Real>(gradient: &mut [T], line: &[T], f: impl Fn(T, T) -> T) {
        let nothing = nothing();
        for (g, &x) in gradient.iter_mut().zip(line) {
            *g = f(*g + nothing, x);
        }
    }
    let c = T::from_f64;
    let one = c(1.0);
    match function {
        // Not `x > 0`, for which NaN would count as negative.
        Activation::Relu => each(gradient, line, |g, x| if x <= T::ZERO { T::ZERO } else { g }),
        Activation::LeakyRelu(slope) => {
            let slope = c(slope.get());
            each(gradient, line, |g, x| if x > T::ZERO { g } else { g * slope });
        }
        Activation::Silu => each(gradient, line, |g, x| {
            let s = sigmoid(x);
            g * (s * (one + x * (one - s)))
        }),
        Activation::Gelu => {
            let scale = c(-std::f64::consts::FRAC_1_SQRT_2);
            let density = c(1.0 / (2.0 * std::f64::consts::PI).sqrt());
            each(gradient, line, |g, x| {
                let cdf = c(0.5) * (x * scale).erfc();
                g * (cdf + x * density * (c(-0.5) * x * x).exp())
            });
        }
        Activation::GeluTanh => {
            let scale = c((2.0 / std::f64::consts::PI).sqrt());
            each(gradient, line, |g, x| {
                let tanh = (scale * (x + c(0.044_715) * x * x * x)).tanh();
                let inner = scale * (one + c(3.0 * 0.044_715) * x * x);
                g * (c(0.5) * (one + tanh) + c(0.5) * x * (one - tanh * tanh) * inner)
            });
        }
        Activation::Hardswish => each(gradient, line, |g, x| {
            let inside = g * (x / c(3.0) + c(0.5));
            let inside = if x <= c(-3.0) { T::ZERO } else { inside };
            if x >= c(3.0) { g } else { inside }
        }),
        Activation::Sigmoid => each(gradient, line, |g, x| {
            let s = sigmoid(x);
            g * (s * (one - s))
        }),
        Activation::Tanh => each(gradient, line, |g, x| {
            let t = x.tanh();
            g * (one - t * t)
        }),
    }
}

/// The constants of a line of one channel of one sample.
#[derive(Clone, Copy, Debug)]
pub struct NormLine<T> {
    pub mean: T,
    pub rstd: T,
    pub gamma: T,
    pub beta: T,
    /// The group's means of `gamma*dv` and of `gamma*dv*h`.
    pub means: [T; 2],
}

/// What follows the convolution, for a line of one channel of one sample.
#[derive(Clone, Copy, Debug)]
pub struct EpilogueLine<T> {
    pub activation: Option<Activation>,
    pub norm: Option<NormLine<T>>,
    pub post_activation: Option<Activation>,
}

/// Elements of a line that are handled at a time: what one loop leaves to the next stays in the L1 cache.
pub const PIECE: usize = 1024;

/// Turns `dz` into `dv`, and returns the normalized values `h`, in `h`.
#[inline(always)]
fn to_norm<'a, T: Real>(
    gradient: &mut [T],
    convolution: &[T],
    norm: &NormLine<T>,
    line: &EpilogueLine<T>,
    [h, v]: [&'a mut [T; PIECE]; 2],
) -> &'a [T] {
    let h = &mut h[..convolution.len()];
    h.copy_from_slice(convolution);
    if let Some(activation) = line.activation {
        activate(h, nothing(), activation);
    }
    for value in h.iter_mut() {
        *value = (*value - norm.mean) * norm.rstd;
    }
    if let Some(post) = line.post_activation {
        let v = &mut v[..h.len()];
        for (v, &h) in v.iter_mut().zip(h.iter()) {
            *v = norm.gamma * h + norm.beta;
        }
        through(gradient, v, post);
    }
    h
}

/// The sums of `dv` and of `dv * h` over a line of a normalization, at most [`PIECE`] elements; `dz` is
/// overwritten.
#[inline(always)]
pub(crate) fn norm_sums<T: Real>(gradient: &mut [T], convolution: &[T], line: &EpilogueLine<T>) -> [T; 2] {
    let Some(norm) = &line.norm else { return [T::ZERO; 2] };
    let (mut h, mut v) = ([T::ZERO; PIECE], [T::ZERO; PIECE]);
    let h = to_norm(gradient, convolution, norm, line, [&mut h, &mut v]);
    let of_dv = sum(gradient, |dv| dv);
    for (dv, &h) in gradient.iter_mut().zip(h) {
        *dv = *dv * h;
    }
    [of_dv, sum(gradient, |dvh| dvh)]
}

/// Turns `dz` into `dy`, in place, over a line of at most [`PIECE`] elements.
#[inline(always)]
pub(crate) fn epilogue_gradient<T: Real>(gradient: &mut [T], convolution: &[T], line: &EpilogueLine<T>) {
    let (mut h, mut v) = ([T::ZERO; PIECE], [T::ZERO; PIECE]);
    if let Some(norm) = &line.norm {
        let h = to_norm(gradient, convolution, norm, line, [&mut h, &mut v]);
        let [of_dv, of_dvh] = norm.means;
        for (dv, &h) in gradient.iter_mut().zip(h) {
            *dv = (norm.gamma * *dv - of_dv - h * of_dvh) * norm.rstd;
        }
    } else if let Some(post) = line.post_activation {
        let a = &mut h[..convolution.len()];
        a.copy_from_slice(convolution);
        if let Some(activation) = line.activation {
            activate(a, nothing(), activation);
        }
        through(gradient, a, post);
    }
    if let Some(activation) = line.activation {
        through(gradient, convolution, activation);
    }
}

/// Takes a line of two in turn apart: `even[0], odd[0], even[1], ...`
#[inline(always)]
pub(crate) fn deinterleave<T: Copy>(line: &[T], even: &mut [T], odd: &mut [T]) {
    for ((pair, even), odd) in line.chunks_exact(2).zip(even.iter_mut()).zip(odd.iter_mut()) {
        *even = pair[0];
        *odd = pair[1];
    }
    if line.len() % 2 == 1 {
        even[line.len() / 2] = line[line.len() - 1];
    }
}

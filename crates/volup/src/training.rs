//! What an engine that trains adds: the forward pass that keeps what its gradients need, and the
//! backward pass.
//!
//! With `y = conv(x)`, `a = activation(y)`, `h = (a - mean) * rstd`, `v = gamma*h + beta` and
//! `z = post(v)`, and the loss' gradient `dz` (sums over a group's m values in means):
//!
//! - `dv = dz * post'(v)`, `dgamma = sum dv*h`, `dbeta = sum dv`, over samples and voxels;
//! - `da = rstd * (gamma*dv - mean(gamma*dv) - h * mean(gamma*dv*h))`, the means over the group;
//! - `dy = da * activation'(y)`;
//! - `dx[n,ci,i] = sum over co, t of dy[n,co,i*s - p + t*d] * w[ci,co',t]`;
//! - `dw[ci,co',t] = sum over n, i of x[n,ci,i] * dy[n,co,i*s - p + t*d]`;
//! - `db[co] = sum over n, o of dy[n,co,o]`.
//!
//! Where a function has a kink, its derivative is what PyTorch takes: 0 at 0 for ReLU, the slope at 0
//! for leaky ReLU, 0 at -3 and 1 at 3 for hardswish.

use crate::{Engine, Result};

/// Which gradients are asked for: the others are not computed. One that the block has no parameter
/// for is never there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// Of the input.
    pub input: bool,
    /// Of the convolution's weight.
    pub weight: bool,
    /// Of the convolution's bias.
    pub bias: bool,
    /// Of the normalization's weight.
    pub norm_weight: bool,
    /// Of the normalization's bias.
    pub norm_bias: bool,
}

impl Wanted {
    /// All of them.
    pub const ALL: Wanted =
        Wanted { input: true, weight: true, bias: true, norm_weight: true, norm_bias: true };
}

/// The gradients that were asked for, each of the shape of what it belongs to.
#[derive(Clone, Debug)]
pub struct Gradients<T> {
    /// Of the input, in its memory format.
    pub input: Option<T>,
    /// `[Cin, Cout/groups, kD, kH, kW]`.
    pub weight: Option<T>,
    /// `[Cout]`.
    pub bias: Option<T>,
    /// `[Cout]`.
    pub norm_weight: Option<T>,
    /// `[Cout]`.
    pub norm_bias: Option<T>,
}

// By hand: a derived one would ask for a default tensor.
impl<T> Default for Gradients<T> {
    fn default() -> Gradients<T> {
        Gradients { input: None, weight: None, bias: None, norm_weight: None, norm_bias: None }
    }
}

/// What the backward pass needs of the forward pass, beside the input and the parameters: nothing
/// for a bare convolution, else no more than a single tensor of the output's size.
#[derive(Clone, Debug)]
pub struct Saved<T> {
    /// The convolution's output, before the activation, if anything follows the convolution. It may
    /// be dropped to save memory: the backward pass then computes it again, to the same bits, or a
    /// part of a large batch at a time.
    pub convolution: Option<T>,
    /// `[N, groups]`, the means of the normalization's groups, in the accumulator's type: of the
    /// activation of the convolution's output as it is stored, or else the backward pass would take
    /// a rounding for a deviation.
    pub mean: Option<T>,
    /// `[N, groups]`, one over their standard deviations with eps, in the accumulator's type.
    pub rstd: Option<T>,
}

impl<T> Default for Saved<T> {
    fn default() -> Saved<T> {
        Saved { convolution: None, mean: None, rstd: None }
    }
}

/// An engine with gradients.
pub trait Training: Engine {
    /// Applies a block as [`Engine::forward`] does, and keeps what [`Training::backward`] needs. The
    /// output follows from the convolution's as it is stored, which in narrow types is rounded.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    fn forward_for_training(
        &self,
        layer: &Self::Layer,
        input: &Self::Tensor,
    ) -> Result<(Self::Tensor, Saved<Self::Tensor>)>;

    /// The gradients of a loss with respect to a block's input and parameters, from the loss'
    /// gradient with respect to its output, which has the output's shape, any memory format and the
    /// input's type. The same call gives the same bits.
    ///
    /// # Errors
    /// As [`Engine::forward`] for the input; [`crate::Error::Shape`] or [`crate::Error::DTypeMismatch`] for a
    /// `grad_output` that is not of the output's shape or type, and for saved tensors that are not
    /// what [`Training::forward_for_training`] returned for this input; [`crate::Error::Presence`] where
    /// the statistics are missing.
    fn backward(
        &self,
        layer: &Self::Layer,
        input: &Self::Tensor,
        saved: &Saved<Self::Tensor>,
        grad_output: &Self::Tensor,
        wanted: Wanted,
    ) -> Result<Gradients<Self::Tensor>>;
}

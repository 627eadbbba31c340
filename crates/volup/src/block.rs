//! The block: a transposed convolution with what follows it in a decoder.

use crate::{ConvSpec, DType, Error, Geometry, Result, Tensor};
use std::fmt;
use std::hash::{Hash, Hasher};

/// A finite number that compares and hashes by its bits, so that descriptions can be keys.
#[derive(Clone, Copy, Debug)]
pub struct Finite(f64);

impl Finite {
    /// The number.
    pub fn get(self) -> f64 {
        self.0
    }
}

impl PartialEq for Finite {
    fn eq(&self, other: &Finite) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}
impl Eq for Finite {}
impl Hash for Finite {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

/// An elementwise function, as `torch.nn.functional` defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `max(x, 0)`; NaN stays NaN.
    Relu,
    /// `x` where positive, else `slope * x`.
    LeakyRelu(Finite),
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * Phi(x)` with the exact normal distribution (erf).
    Gelu,
    /// The tanh approximation of [`Activation::Gelu`].
    GeluTanh,
    /// `x * clamp(x + 3, 0, 6) / 6`.
    Hardswish,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `tanh(x)`.
    Tanh,
}

impl Activation {
    /// The names that [`Activation::from_name`] takes.
    pub const NAMES: &'static str = "relu, leaky_relu, silu, gelu, gelu_tanh, hardswish, sigmoid, tanh";

    /// A leaky ReLU.
    ///
    /// # Errors
    /// [`Error::Slope`] if the slope is infinite or NaN.
    pub fn leaky_relu(slope: f64) -> Result<Activation> {
        if slope.is_finite() {
            Ok(Activation::LeakyRelu(Finite(slope)))
        } else {
            Err(Error::Slope { got: slope })
        }
    }

    /// The activation of a name; `leaky_relu` has PyTorch's slope of 0.01.
    ///
    /// # Errors
    /// [`Error::UnknownName`].
    pub fn from_name(name: &str) -> Result<Activation> {
        Ok(match name {
            "relu" => Activation::Relu,
            "leaky_relu" => Activation::LeakyRelu(Finite(0.01)),
            "silu" => Activation::Silu,
            "gelu" => Activation::Gelu,
            "gelu_tanh" => Activation::GeluTanh,
            "hardswish" => Activation::Hardswish,
            "sigmoid" => Activation::Sigmoid,
            "tanh" => Activation::Tanh,
            _ => {
                return Err(Error::UnknownName {
                    param: "activation",
                    got: name.into(),
                    expected: Activation::NAMES,
                });
            }
        })
    }

    /// The name that [`Activation::from_name`] takes.
    pub fn name(&self) -> &'static str {
        match self {
            Activation::Relu => "relu",
            Activation::LeakyRelu(_) => "leaky_relu",
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_tanh",
            Activation::Hardswish => "hardswish",
            Activation::Sigmoid => "sigmoid",
            Activation::Tanh => "tanh",
        }
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Activation::LeakyRelu(slope) => write!(f, "leaky_relu({})", slope.get()),
            _ => f.write_str(self.name()),
        }
    }
}

/// A group normalization: mean and biased variance per sample and group, over the group's channels
/// and all voxels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormSpec {
    groups: usize,
    eps: Finite,
    affine: bool,
}

impl NormSpec {
    /// A normalization in `groups` groups with `eps` inside the root; `affine` if it has a weight
    /// and a bias per channel.
    ///
    /// # Errors
    /// [`Error::NotPositive`] for no groups, [`Error::Eps`] for an eps that is negative, infinite
    /// or NaN.
    pub fn new(groups: usize, eps: f64, affine: bool) -> Result<NormSpec> {
        if groups == 0 {
            return Err(Error::NotPositive { param: "norm_groups", got: 0 });
        }
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(Error::Eps { got: eps });
        }
        Ok(NormSpec { groups, eps: Finite(eps), affine })
    }

    /// Groups per sample.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// What is added to the variance inside the root.
    pub fn eps(&self) -> f64 {
        self.eps.get()
    }

    /// Whether there are a weight and a bias per channel.
    pub fn affine(&self) -> bool {
        self.affine
    }
}

/// A convolution and what follows it: `z = post(norm(activation(conv(x))))`, each step optional.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockSpec {
    conv: ConvSpec,
    activation: Option<Activation>,
    norm: Option<NormSpec>,
    post_activation: Option<Activation>,
}

impl From<ConvSpec> for BlockSpec {
    /// The bare convolution.
    fn from(conv: ConvSpec) -> BlockSpec {
        BlockSpec { conv, activation: None, norm: None, post_activation: None }
    }
}

impl BlockSpec {
    /// A block of the given steps.
    ///
    /// # Errors
    /// [`Error::Indivisible`] if the normalization's groups do not divide the output's channels.
    pub fn new(
        conv: ConvSpec,
        activation: Option<Activation>,
        norm: Option<NormSpec>,
        post_activation: Option<Activation>,
    ) -> Result<BlockSpec> {
        if let Some(norm) = norm
            && !conv.out_channels().is_multiple_of(norm.groups)
        {
            return Err(Error::Indivisible {
                param: "out_channels",
                got: conv.out_channels(),
                divisor_param: "norm_groups",
                divisor: norm.groups,
            });
        }
        Ok(BlockSpec { conv, activation, norm, post_activation })
    }

    /// The convolution.
    pub fn conv(&self) -> &ConvSpec {
        &self.conv
    }

    /// What follows the convolution.
    pub fn activation(&self) -> Option<Activation> {
        self.activation
    }

    /// What follows the activation.
    pub fn norm(&self) -> Option<NormSpec> {
        self.norm
    }

    /// What follows the normalization.
    pub fn post_activation(&self) -> Option<Activation> {
        self.post_activation
    }

    /// Whether nothing follows the convolution.
    pub fn is_bare(&self) -> bool {
        self.activation.is_none() && self.norm.is_none() && self.post_activation.is_none()
    }

    /// The sizes of this block over a batch of inputs of spatial size [D, H, W].
    ///
    /// # Errors
    /// As [`ConvSpec::geometry`]; [`Error::SingleValueNorm`] where the batch holds a single value
    /// per group, which PyTorch refuses to normalize too.
    pub fn geometry(&self, batch: usize, input: [usize; 3]) -> Result<Geometry> {
        let geometry = self.conv.geometry(batch, input)?;
        if let Some(norm) = self.norm
            && batch * (self.conv.out_channels() / norm.groups) * geometry.output_voxels() == 1
        {
            return Err(Error::SingleValueNorm {
                channels: self.conv.out_channels(),
                norm_groups: norm.groups,
            });
        }
        Ok(geometry)
    }

    /// The sizes of this block over an input of shape [N, C, D, H, W], or [C, D, H, W] for a single
    /// volume without a batch dimension.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::Channels`], and as [`BlockSpec::geometry`].
    pub fn geometry_of(&self, input_shape: &[usize]) -> Result<Geometry> {
        let (batch, spatial) = volume_of(input_shape, self.conv.in_channels())?;
        self.geometry(batch, spatial)
    }
}

/// Batch and spatial size of an input of shape [N, C, D, H, W] or [C, D, H, W], once its rank and
/// channels are checked.
pub(crate) fn volume_of(input_shape: &[usize], in_channels: usize) -> Result<(usize, [usize; 3])> {
    let (batch, channels, spatial) = match *input_shape {
        [n, c, d, h, w] => (n, c, [d, h, w]),
        [c, d, h, w] => (1, c, [d, h, w]),
        _ => {
            let expected = "4-D (unbatched) or 5-D (batched)";
            return Err(Error::Rank { param: "input", got: input_shape.len(), expected });
        }
    };
    if channels != in_channels {
        return Err(Error::Channels { got: channels, expected: in_channels });
    }
    Ok((batch, spatial))
}

impl fmt::Display for BlockSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.conv)?;
        if let Some(activation) = self.activation {
            write!(f, ", {activation}")?;
        }
        if let Some(norm) = self.norm {
            write!(f, ", gn {}", norm.groups)?;
        }
        if let Some(activation) = self.post_activation {
            write!(f, ", {activation}")?;
        }
        Ok(())
    }
}

/// The parameters of a block, in PyTorch's shapes and contiguous, all of one type.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// `[Cin, Cout/groups, kD, kH, kW]`.
    pub weight: Tensor,
    /// `[Cout]`, if the convolution has a bias.
    pub bias: Option<Tensor>,
    /// `[Cout]`, the normalization's weight (gamma), if it is affine.
    pub norm_weight: Option<Tensor>,
    /// `[Cout]`, the normalization's bias (beta), if it is affine.
    pub norm_bias: Option<Tensor>,
}

impl Parameters {
    /// Checks the parameters against a description and returns their type.
    ///
    /// # Errors
    /// [`Error::Presence`], [`Error::Shape`], [`Error::DTypeMismatch`].
    pub fn check(&self, block: &BlockSpec) -> Result<DType> {
        let dtype = self.weight.dtype();
        let conv = block.conv();
        let affine = block.norm().is_some_and(|norm| norm.affine());
        let per_channel = [conv.out_channels()];
        check_shape("weight", self.weight.shape(), &conv.weight_shape())?;
        for (param, tensor, expected) in [
            ("bias", &self.bias, conv.has_bias()),
            ("norm_weight", &self.norm_weight, affine),
            ("norm_bias", &self.norm_bias, affine),
        ] {
            if tensor.is_some() != expected {
                return Err(Error::Presence { param, expected });
            }
            if let Some(tensor) = tensor {
                check_shape(param, tensor.shape(), &per_channel)?;
                if tensor.dtype() != dtype {
                    return Err(Error::DTypeMismatch { param, got: tensor.dtype(), expected: dtype });
                }
            }
        }
        Ok(dtype)
    }
}

fn check_shape(param: &'static str, got: &[usize], expected: &[usize]) -> Result<()> {
    if got == expected {
        Ok(())
    } else {
        Err(Error::Shape { param, got: got.to_vec(), expected: expected.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(norm_groups: usize) -> Result<BlockSpec> {
        let conv = ConvSpec::builder(2, 4, 1).bias(true).build()?;
        BlockSpec::new(conv, Some(Activation::Relu), Some(NormSpec::new(norm_groups, 1e-5, true)?), None)
    }

    fn tensor(shape: &[usize]) -> Tensor {
        Tensor::new(shape, vec![0f32; shape.iter().product()]).unwrap()
    }

    fn parameters() -> Parameters {
        let vector = Some(tensor(&[4]));
        Parameters {
            weight: tensor(&[2, 4, 1, 1, 1]),
            bias: vector.clone(),
            norm_weight: vector.clone(),
            norm_bias: vector,
        }
    }

    #[test]
    fn each_rule_has_its_error() {
        use Error as E;
        assert!(matches!(block(3), Err(E::Indivisible { divisor_param: "norm_groups", divisor: 3, .. })));
        assert!(matches!(NormSpec::new(0, 1e-5, true), Err(E::NotPositive { param: "norm_groups", .. })));
        assert!(matches!(NormSpec::new(1, -1.0, true), Err(E::Eps { .. })));
        assert!(matches!(NormSpec::new(1, f64::NAN, true), Err(E::Eps { .. })));
        assert!(matches!(Activation::leaky_relu(f64::INFINITY), Err(E::Slope { .. })));
        assert!(matches!(Activation::from_name("mish"), Err(E::UnknownName { param: "activation", .. })));
        assert!(matches!(block(4).unwrap().geometry(1, [1; 3]), Err(E::SingleValueNorm { .. })));
        assert!(matches!(block(4).unwrap().geometry_of(&[2, 1, 1]), Err(E::Rank { got: 3, .. })));
        assert!(matches!(
            block(4).unwrap().geometry_of(&[3, 2, 2, 2]),
            Err(E::Channels { got: 3, expected: 2 })
        ));
    }

    #[test]
    fn parameters_are_checked() {
        let block = block(2).unwrap();
        assert_eq!(parameters().check(&block).unwrap(), DType::F32);
        let wrong = Parameters { bias: None, ..parameters() };
        assert!(matches!(wrong.check(&block), Err(Error::Presence { param: "bias", expected: true })));
        let wrong = Parameters { norm_bias: Some(tensor(&[2])), ..parameters() };
        assert!(matches!(wrong.check(&block), Err(Error::Shape { param: "norm_bias", .. })));
        let wrong = Parameters { weight: tensor(&[4, 2, 1, 1, 1]), ..parameters() };
        assert!(matches!(wrong.check(&block), Err(Error::Shape { param: "weight", .. })));
        let wrong =
            Parameters { norm_weight: Some(Tensor::new(&[4], vec![0f64; 4]).unwrap()), ..parameters() };
        assert!(matches!(wrong.check(&block), Err(Error::DTypeMismatch { param: "norm_weight", .. })));
    }

    #[test]
    fn names_round_trip() {
        for name in Activation::NAMES.split(", ") {
            assert_eq!(Activation::from_name(name).unwrap().name(), name);
        }
    }
}

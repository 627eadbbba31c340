//! The convolution's parameters and its sizes, checked once; everything else only reads them.

use crate::tensor::numel;
use crate::{Error, Result};
use std::fmt;

/// The names of the three spatial axes, in memory order of a contiguous tensor.
pub const AXES: [&str; 3] = ["depth", "height", "width"];

/// One value for all three axes, or one each for depth, height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Triple([i64; 3]);

macro_rules! triple_from {
    ($($int:ty),*) => {$(
        impl From<$int> for Triple {
            fn from(value: $int) -> Triple {
                Triple::from([value; 3])
            }
        }
        impl From<[$int; 3]> for Triple {
            fn from(values: [$int; 3]) -> Triple {
                // A value past i64::MAX saturates and is then refused as an overflow.
                Triple(values.map(|v| i64::try_from(v).unwrap_or(i64::MAX)))
            }
        }
    )*};
}
triple_from!(i32, i64, usize);

impl Triple {
    /// The one value or three values of the parameter called `param`.
    ///
    /// # Errors
    /// [`Error::Arity`] unless there are one or three.
    pub fn from_slice(param: &'static str, values: &[i64]) -> Result<Triple> {
        match *values {
            [value] => Ok(Triple([value; 3])),
            [depth, height, width] => Ok(Triple([depth, height, width])),
            _ => Err(Error::Arity { param, got: values.len() }),
        }
    }

    fn positive(self, param: &'static str) -> Result<[usize; 3]> {
        self.at_least(1, |got| Error::NotPositive { param, got })
    }

    fn non_negative(self, param: &'static str) -> Result<[usize; 3]> {
        self.at_least(0, |got| Error::Negative { param, got })
    }

    fn at_least(self, least: i64, error: impl Fn(i64) -> Error) -> Result<[usize; 3]> {
        match self.0.iter().find(|&&v| v < least) {
            Some(&got) => Err(error(got)),
            None => Ok(self.0.map(|v| v as usize)),
        }
    }
}

/// The parameters of a 3D transposed convolution, whatever the size of its input.
///
/// They mean what PyTorch's `torch.nn.ConvTranspose3d` means by them. A `ConvSpec` is valid by
/// construction: build it with [`ConvSpec::builder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvSpec {
    in_channels: usize,
    out_channels: usize,
    kernel_size: [usize; 3],
    stride: [usize; 3],
    padding: [usize; 3],
    output_padding: [usize; 3],
    groups: usize,
    dilation: [usize; 3],
    bias: bool,
}

/// Collects the parameters of a [`ConvSpec`]; what is not set has PyTorch's default.
#[derive(Clone, Copy, Debug)]
pub struct ConvSpecBuilder {
    in_channels: usize,
    out_channels: usize,
    kernel_size: Triple,
    stride: Triple,
    padding: Triple,
    output_padding: Triple,
    groups: usize,
    dilation: Triple,
    bias: bool,
}

impl ConvSpecBuilder {
    /// Distance between the outputs of neighbouring inputs. Default 1.
    pub fn stride(mut self, stride: impl Into<Triple>) -> Self {
        self.stride = stride.into();
        self
    }

    /// Voxels cut off each side of the full output. Default 0.
    pub fn padding(mut self, padding: impl Into<Triple>) -> Self {
        self.padding = padding.into();
        self
    }

    /// Voxels added at the far side of the output. Default 0.
    pub fn output_padding(mut self, output_padding: impl Into<Triple>) -> Self {
        self.output_padding = output_padding.into();
        self
    }

    /// Independent convolutions side by side in the channels. Default 1.
    pub fn groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }

    /// Distance between the kernel's taps. Default 1.
    pub fn dilation(mut self, dilation: impl Into<Triple>) -> Self {
        self.dilation = dilation.into();
        self
    }

    /// Whether a bias per output channel is added. Default false.
    pub fn bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// Checks the parameters.
    ///
    /// # Errors
    /// [`Error::NotPositive`], [`Error::Negative`], [`Error::Indivisible`],
    /// [`Error::OutputPadding`] or [`Error::Overflow`], in PyTorch's terms.
    pub fn build(self) -> Result<ConvSpec> {
        let stride = self.stride.positive("stride")?;
        let padding = self.padding.non_negative("padding")?;
        let output_padding = self.output_padding.non_negative("output_padding")?;
        let dilation = self.dilation.positive("dilation")?;
        let kernel_size = self.kernel_size.positive("kernel_size")?;
        for (param, count) in
            [("in_channels", self.in_channels), ("out_channels", self.out_channels), ("groups", self.groups)]
        {
            if count == 0 {
                return Err(Error::NotPositive { param, got: 0 });
            }
        }
        for (param, got) in [("in_channels", self.in_channels), ("out_channels", self.out_channels)] {
            if got % self.groups != 0 {
                return Err(Error::Indivisible { param, got, divisor_param: "groups", divisor: self.groups });
            }
        }
        for axis in 0..3 {
            let (got, stride, dilation) = (output_padding[axis], stride[axis], dilation[axis]);
            if got >= stride && got >= dilation {
                return Err(Error::OutputPadding { axis: AXES[axis], got, stride, dilation });
            }
        }
        let spec = ConvSpec {
            in_channels: self.in_channels,
            out_channels: self.out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups: self.groups,
            dilation,
            bias: self.bias,
        };
        numel(&spec.weight_shape())?;
        Ok(spec)
    }
}

impl ConvSpec {
    /// Starts a description with PyTorch's defaults: stride 1, no padding, one group, no bias.
    pub fn builder(
        in_channels: usize,
        out_channels: usize,
        kernel_size: impl Into<Triple>,
    ) -> ConvSpecBuilder {
        ConvSpecBuilder {
            in_channels,
            out_channels,
            kernel_size: kernel_size.into(),
            stride: Triple([1; 3]),
            padding: Triple([0; 3]),
            output_padding: Triple([0; 3]),
            groups: 1,
            dilation: Triple([1; 3]),
            bias: false,
        }
    }

    /// Channels of the input.
    pub fn in_channels(&self) -> usize {
        self.in_channels
    }

    /// Channels of the output.
    pub fn out_channels(&self) -> usize {
        self.out_channels
    }

    /// Taps of the kernel per axis.
    pub fn kernel_size(&self) -> [usize; 3] {
        self.kernel_size
    }

    /// Stride per axis.
    pub fn stride(&self) -> [usize; 3] {
        self.stride
    }

    /// Padding per axis.
    pub fn padding(&self) -> [usize; 3] {
        self.padding
    }

    /// Output padding per axis.
    pub fn output_padding(&self) -> [usize; 3] {
        self.output_padding
    }

    /// Number of independent convolutions side by side in the channels.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Dilation per axis.
    pub fn dilation(&self) -> [usize; 3] {
        self.dilation
    }

    /// Whether a bias is added.
    pub fn has_bias(&self) -> bool {
        self.bias
    }

    /// The weight's shape: [Cin, Cout/groups, kD, kH, kW].
    pub fn weight_shape(&self) -> [usize; 5] {
        let [d, h, w] = self.kernel_size;
        [self.in_channels, self.out_channels / self.groups, d, h, w]
    }

    /// The sizes of this convolution over a batch of inputs of spatial size [D, H, W].
    ///
    /// # Errors
    /// [`Error::EmptyInput`] for a spatial size of 0 (a batch of 0 is fine),
    /// [`Error::OutputTooSmall`] where padding leaves nothing, [`Error::Overflow`].
    pub fn geometry(&self, batch: usize, input: [usize; 3]) -> Result<Geometry> {
        let mut axes = [Axis::default(); 3];
        for (a, axis) in axes.iter_mut().enumerate() {
            *axis = Axis::new(
                AXES[a],
                input[a],
                self.kernel_size[a],
                self.stride[a],
                self.padding[a],
                self.output_padding[a],
                self.dilation[a],
            )?;
        }
        let geometry = Geometry { conv: *self, batch, axes };
        numel(&geometry.input_shape())?;
        numel(&geometry.output_shape())?;
        Ok(geometry)
    }
}

impl fmt::Display for ConvSpec {
    /// For example `64>128, k 3x3x3, s 2x2x2, p 1x1x1, g 4, bias`; what has its default is left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = |v: [usize; 3]| format!("{}x{}x{}", v[0], v[1], v[2]);
        write!(f, "{}>{}, k {}", self.in_channels, self.out_channels, by(self.kernel_size))?;
        for (name, value, default) in [
            ("s", self.stride, 1),
            ("p", self.padding, 0),
            ("op", self.output_padding, 0),
            ("d", self.dilation, 1),
        ] {
            if value != [default; 3] {
                write!(f, ", {name} {}", by(value))?;
            }
        }
        if self.groups != 1 {
            write!(f, ", g {}", self.groups)?;
        }
        if self.bias {
            write!(f, ", bias")?;
        }
        Ok(())
    }
}

/// The sizes along one axis. Output voxel `o` sums over all pairs of an input voxel `i` and a tap
/// `t` with `o = i*stride - padding + t*dilation`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Axis {
    /// Input voxels, at least 1.
    pub input: usize,
    /// Output voxels, at least 1.
    pub output: usize,
    /// Taps, at least 1.
    pub kernel: usize,
    /// At least 1.
    pub stride: usize,
    /// Voxels cut off each side of the full output.
    pub padding: usize,
    /// Distance between taps, at least 1.
    pub dilation: usize,
}

impl Axis {
    /// Computes the output size `(I-1)*s - 2p + d*(k-1) + op + 1` in checked arithmetic.
    fn new(
        name: &'static str,
        input: usize,
        kernel: usize,
        stride: usize,
        padding: usize,
        output_padding: usize,
        dilation: usize,
    ) -> Result<Axis> {
        const OVERFLOW: Error = Error::Overflow { what: "the output size" };
        if input == 0 {
            return Err(Error::EmptyInput { axis: name });
        }
        let full = (input - 1)
            .checked_mul(stride)
            .zip(dilation.checked_mul(kernel - 1))
            .and_then(|(strided, reach)| {
                strided.checked_add(reach)?.checked_add(output_padding)?.checked_add(1)
            })
            .and_then(|full| i64::try_from(full).ok())
            .ok_or(OVERFLOW)?;
        let cut = padding.checked_mul(2).and_then(|cut| i64::try_from(cut).ok()).ok_or(OVERFLOW)?;
        let got = full - cut;
        if got < 1 {
            return Err(Error::OutputTooSmall { axis: name, got });
        }
        Ok(Axis { input, output: got as usize, kernel, stride, padding, dilation })
    }

    /// How many pairs of an input voxel and a tap reach an output voxel: the multiply-adds along
    /// this axis.
    pub fn pairs(&self) -> u64 {
        let (stride, padding) = (self.stride as u128, self.padding as u128);
        let pairs = (0..self.kernel as u128).map(|tap| {
            // i*s + t*d must lie in [p, p + O).
            let shift = tap * self.dilation as u128;
            let below = |limit: u128| limit.saturating_sub(shift).div_ceil(stride).min(self.input as u128);
            below(padding + self.output as u128) - below(padding)
        });
        pairs.sum::<u128>() as u64
    }
}

/// A convolution over an input of known size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    conv: ConvSpec,
    batch: usize,
    axes: [Axis; 3],
}

impl Geometry {
    /// The convolution's parameters.
    pub fn conv(&self) -> &ConvSpec {
        &self.conv
    }

    /// Samples in the batch; may be 0.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Depth, height and width.
    pub fn axes(&self) -> &[Axis; 3] {
        &self.axes
    }

    /// [N, Cin, D, H, W].
    pub fn input_shape(&self) -> [usize; 5] {
        let [d, h, w] = self.axes.map(|axis| axis.input);
        [self.batch, self.conv.in_channels, d, h, w]
    }

    /// [N, Cout, D, H, W].
    pub fn output_shape(&self) -> [usize; 5] {
        let [d, h, w] = self.axes.map(|axis| axis.output);
        [self.batch, self.conv.out_channels, d, h, w]
    }

    /// Voxels of one output channel.
    pub fn output_voxels(&self) -> usize {
        self.axes.iter().map(|axis| axis.output).product()
    }

    /// Floating-point operations that reach the output: two for each multiply-add.
    pub fn flops(&self) -> f64 {
        let pairs: f64 = self.axes.iter().map(|axis| axis.pairs() as f64).product();
        let channels = self.conv.in_channels as f64 * (self.conv.out_channels / self.conv.groups) as f64;
        2.0 * self.batch as f64 * channels * pairs
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [n, _, d, h, w] = self.input_shape();
        write!(f, "n {n}, {d}x{h}x{w}, {}", self.conv)
    }
}

#[cfg(test)]
#[path = "spec_tests.rs"]
pub(crate) mod tests;

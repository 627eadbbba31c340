//! The table of cases: what an engine has to get right, one row a line, with the reason.

use super::fill::Fill;
use super::notation::case;
use super::tensor;
use crate::{BlockSpec, DType, Geometry, MemoryFormat, Parameters, Tensor};
use std::fmt;

/// A block, an input for it, and why they are tested.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Case {
    /// Short and unique in its table.
    pub name: &'static str,
    /// What would go unnoticed without it.
    pub why: &'static str,
    /// The block.
    pub block: BlockSpec,
    /// The batch size; None for an input without a batch dimension.
    pub batch: Option<usize>,
    /// The input's depth, height and width.
    pub input: [usize; 3],
    /// The input's memory format.
    pub format: MemoryFormat,
}

impl Case {
    /// The sizes of this case.
    ///
    /// # Panics
    /// If the fields do not fit together; those of the tables do.
    pub fn geometry(&self) -> Geometry {
        self.block.geometry(self.batch.unwrap_or(1), self.input).expect("a valid case")
    }

    /// The shape of the input, of rank 4 or 5.
    pub fn input_shape(&self) -> Vec<usize> {
        self.of_rank(self.geometry().input_shape())
    }

    /// The shape of the output, of the input's rank.
    pub fn output_shape(&self) -> Vec<usize> {
        self.of_rank(self.geometry().output_shape())
    }

    fn of_rank(&self, shape: [usize; 5]) -> Vec<usize> {
        shape[usize::from(self.batch.is_none())..].to_vec()
    }

    /// Whether a convolution of [`Fill::Integer`] values comes out exact but for the last rounding.
    pub fn is_exact_on_integers(&self) -> bool {
        let piecewise = matches!(self.block.activation(), None | Some(crate::Activation::Relu));
        piecewise && self.block.norm().is_none() && self.block.post_activation().is_none()
    }

    /// An input and parameters of a type, the same for the same seed. Normal weights are scaled so
    /// that the convolution's outputs are of the order of 1.
    pub fn inputs(&self, dtype: DType, fill: Fill, seed: u64) -> (Tensor, Parameters) {
        let conv = self.block.conv();
        let taps: usize = (0..3).map(|a| conv.kernel_size()[a].div_ceil(conv.stride()[a])).product();
        let fan_in = conv.in_channels() / conv.groups() * taps;
        let scale = match fill {
            Fill::Normal => 1.0 / (fan_in as f64).sqrt(),
            Fill::Integer => 1.0,
        };
        // Each tensor has a stream of its own.
        let stream = |which: u64| seed ^ (which << 56);
        let contiguous = MemoryFormat::Contiguous;
        let per_channel = |given: bool, which| {
            given.then(|| tensor(&[conv.out_channels()], dtype, contiguous, fill, 1.0, stream(which)))
        };
        let affine = self.block.norm().is_some_and(|norm| norm.affine());
        let parameters = Parameters {
            weight: tensor(&conv.weight_shape(), dtype, contiguous, fill, scale, stream(1)),
            bias: per_channel(conv.has_bias(), 2),
            norm_weight: per_channel(affine, 3),
            norm_bias: per_channel(affine, 4),
        };
        (tensor(&self.input_shape(), dtype, self.format, fill, 1.0, stream(0)), parameters)
    }
}

impl fmt::Display for Case {
    /// The name and the description, for example `odd: n 1, 5x6x7, 3>5, k 3x3x3, relu`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.name)?;
        match self.batch {
            Some(n) => write!(f, "n {n}")?,
            None => write!(f, "unbatched")?,
        }
        let [d, h, w] = self.input;
        write!(f, ", {d}x{h}x{w}, {}", self.block)?;
        if self.format != MemoryFormat::Contiguous {
            write!(f, ", {}", self.format)?;
        }
        Ok(())
    }
}

/// The table. Each row runs in well under a second on a scalar engine.
pub fn cases() -> Vec<Case> {
    ROWS.iter().map(|(name, line, why)| case(name, line, why)).collect()
}

/// Name, what is run, why.
#[rustfmt::skip]
const ROWS: &[(&str, &str, &str)] = &[
    // Every parameter alone.
    ("identity", "2x3x4, 1>1, k 1", "the smallest kernel: an output is an input times a weight"),
    ("one-voxel", "1x1x1, 1>1, k 1", "one of everything: tiles are all remainder"),
    ("one-voxel-k3", "1x1x1, 2>3, k 3", "the output is the kernel itself, not flipped"),
    ("pointwise", "n 2, 4x5x6, 8>16, k 1, bias", "a plain matrix product: no tap but one"),
    ("k3", "n 2, 4x5x6, 4>6, k 3", "the dense stride-1 case"),
    ("k3-s2-vectors", "n 2, 2x3x8, 16>24, k 3, s 2, p 1, op 1, bias, relu", "both residues of a line fill whole vectors"),
    ("bias", "n 2, 3x4x5, 4>6, k 3, bias", "the bias alone on top of k3"),
    ("k2", "3x4x5, 4>6, k 2", "an even kernel has no middle tap"),
    ("k-asymmetric", "4x3x5, 4>6, k 1x2x5", "axes must not be swapped"),
    ("k-long-w", "2x2x9, 3>4, k 1x1x7", "taps along width only: unaligned loads on both sides"),
    ("k-long-d", "9x2x2, 3>4, k 7x1x1", "taps along depth only: whole planes are shifted"),
    ("k-even-4", "3x3x3, 4>4, k 4, s 2, p 1", "the GAN upsampler: two taps a phase on each axis"),
    ("s2", "3x4x5, 4>6, k 3, s 2", "phases of 1 and 2 taps interleave"),
    ("s3", "3x2x4, 4>6, k 4, s 3", "a stride that is not a power of two"),
    ("s-asymmetric", "3x4x3, 4>6, k 3, s 1x2x3", "each axis has its own number of phases"),
    ("s-w-only", "3x4x5, 4>6, k 3, s 1x1x2", "phases along the fastest axis only"),
    ("s-d-only", "3x4x5, 4>6, k 3, s 2x1x1", "phases along the slowest axis only"),
    ("s-over-k", "3x2x4, 4>6, k 2, s 3, bias", "stride past the kernel: outputs that no tap reaches hold the bias"),
    ("s-far-over-k", "2x3x2, 3>2, k 1, s 4, bias", "one output in 64 is reached at all"),
    ("s-over-k-no-bias", "3x2x4, 4>6, k 2, s 3", "without a bias such outputs are 0, not left unwritten"),
    ("s-huge", "1x1x2, 1>2, k 2, s 50x1x40", "more residues than most outputs: no table of s entries needed"),
    ("p1", "4x5x6, 4>6, k 3, p 1", "same size out as in"),
    ("p-asymmetric", "4x5x6, 4>6, k 3x4x5, p 0x1x3", "each axis is cropped on its own"),
    ("p-crops-input", "7x6x8, 3>4, k 2, p 2x1x3", "crops past the kernel's reach: whole input voxels have no output"),
    ("p-crops-strided", "5x4x6, 3>4, k 3, s 2, p 3x2x5", "the same with phases: positions start past 0"),
    ("p-leaves-one", "3x3x3, 3>4, k 3, p 2", "padding leaves a single output voxel"),
    ("p-phase-shift", "4x4x4, 3>4, k 3, s 3, p 1x2x4", "padding that is not a multiple of the stride shifts the residues"),
    ("op1", "3x4x5, 4>6, k 3, s 2, op 1", "one more voxel at the far side only"),
    ("op-asymmetric", "3x2x3, 4>6, k 3, s 3, op 0x1x2, bias", "each axis grows on its own"),
    ("op-past-reach", "2x3x2, 3>4, k 1, s 3, op 2, bias", "the added voxels are reached by no tap: bias only"),
    ("op-up-to-dilation", "3x3x3, 3>4, k 2, d 3, op 2, bias", "op may pass the stride where the dilation allows it"),
    ("op-over-stride", "3x4x3, 3>4, k 2, s 2, d 4, op 3, bias", "op past the stride with empty phases"),
    ("d2", "4x5x6, 4>6, k 3, d 2", "taps two apart"),
    ("d-asymmetric", "4x3x5, 4>6, k 2x3x2, d 3x1x2", "each axis has its own spacing"),
    ("d-over-input", "2x2x2, 3>4, k 3, d 4, bias", "taps farther apart than the input is long: holes between its copies"),
    ("g2", "n 2, 3x4x5, 4>6, k 3, g 2", "each half of the output sees half of the input"),
    ("g-depthwise", "3x4x5, 6>6, k 3, g 6", "one input channel for each output channel"),
    ("g-multiplier", "3x4x5, 3>12, k 3, g 3", "depthwise with 4 outputs a channel"),
    ("g-reduce", "3x4x5, 12>3, k 3, g 3", "4 inputs for each single output"),
    // Channels.
    ("cin-1", "4x5x6, 1>8, k 3", "a reduction over taps alone"),
    ("cout-1", "4x5x6, 8>1, k 3", "the last layer of most generators: one output channel"),
    ("channels-3-5", "3x4x5, 3>5, k 3, bias", "channel counts that no vector width divides"),
    ("channels-17-33", "2x3x4, 17>33, k 3, s 2, bias", "one past the usual tile sizes of 16 and 32"),
    ("channels-33-17", "2x3x4, 33>17, k 2, s 2", "the same the other way round"),
    ("channels-64-72", "2x2x3, 64>72, k 3, p 1", "a full tile of channels and a part of one"),
    ("channels-130", "1x2x3, 130>7, k 2", "a reduction past 128 with a remainder"),
    // Sizes.
    ("w-65", "2x2x65, 3>5, k 3", "one past a row of 64"),
    ("w-127-s2", "1x3x127, 4>6, k 3, s 2, p 1", "an odd row with an even and an odd phase"),
    ("w-300", "1x2x300, 4>3, k 1x3x5, p 0x1x2", "rows longer than any tile"),
    ("w-1", "5x7x1, 4>6, k 3, s 2, p 1, op 1", "rows of one voxel: vectors along width are empty"),
    ("h-1", "5x1x7, 4>6, k 3, s 2, p 1", "planes of one row"),
    ("d-1", "1x5x7, 4>6, k 3, s 2, p 1", "one plane: the depth taps fall off on both sides"),
    ("odd", "n 3, 5x7x9, 3>5, k 3, s 2, p 1", "no size has a factor of two"),
    ("k-over-input", "2x3x2, 4>6, k 5x7x5", "the kernel is larger than the input: edges everywhere"),
    ("k-over-input-p", "2x3x2, 4>6, k 5, p 2", "the same, cropped to the input's size"),
    ("batch-5", "n 5, 2x3x2, 3>4, k 3", "a batch that splits unevenly over threads"),
    ("batch-90-groups", "n 90, 1x2x3, 3>6, k 3, s 2, p 1, g 3, bias, relu, gn 3", "more samples and groups than a GPU has blocks at once"),
    ("batch-0", "n 0, 2x3x2, 3>4, k 3, bias", "an empty batch gives an empty output, not an error"),
    ("batch-0-block", "n 0, 2x3x2, 3>4, k 3, relu, gn 2, channels_last_3d", "nor does normalizing nothing"),
    ("unbatched", "unbatched, 3x4x5, 4>6, k 3, s 2, bias", "an input without a batch dimension gives an output without one"),
    ("unbatched-block", "unbatched, 3x4x5, 4>6, k 2, s 2, silu, gn 3", "its statistics are those of one sample"),
    // Memory format.
    ("last-k3", "n 2, 4x5x6, 4>6, k 3, p 1, channels_last_3d", "channels fastest, in and out"),
    ("last-s2", "n 2, 3x4x5, 8>6, k 3, s 2, p 1, op 1, bias, channels_last_3d", "phases interleave whole channel vectors"),
    ("last-k-s", "n 2, 3x4x5, 16>8, k 2, s 2, bias, channels_last_3d", "a GEMM whose rows are written apart"),
    ("last-k-s-many", "n 2, 3x4x3, 64>24, k 2, s 2, bias, relu, channels_last_3d", "many channels of a position, and of a tap"),
    ("last-groups", "n 2, 3x4x5, 6>9, k 3, g 3, channels_last_3d", "a group is a slice of each channel vector"),
    ("last-vectors", "n 2, 3x4x5, 40>16, k 3, p 1, bias, channels_last_3d", "channels are whole vectors on both sides"),
    ("few-tiles", "2x3x4, 140>20, k 3, s 2, p 1, op 1, bias, relu", "many channels and few voxels: a GPU's blocks share a tile"),
    ("last-few-tiles", "2x2x3, 260>8, k 3, s 2, p 1, bias, channels_last_3d", "the same by rows of a voxel's channels"),
    ("last-block", "n 2, 3x4x5, 5>6, k 3, s 2, bias, relu, gn 2, silu, channels_last_3d", "a group's values are strided"),
    ("last-cin-1", "3x4x5, 1>5, k 3, channels_last_3d", "both formats are the same memory on the way in, not on the way out"),
    // Parameters in pairs.
    ("k-s", "n 2, 3x4x5, 4>6, k 2, s 2, bias", "one tap a phase: the U-Net upsampler"),
    ("k-s-3", "2x3x4, 4>6, k 3, s 3", "one tap a phase on 27 phases"),
    ("k-s-asymmetric", "3x4x5, 4>6, k 1x2x2, s 1x2x2, bias", "anisotropic scans: no upsampling along depth"),
    ("k-s-full", "n 2, 2x5x8, 64>32, k 2, s 2, relu", "64 channels in and 256 taps of channels out: a tile without a remainder"),
    ("k-s-flat", "n 3, 3x3x4, 5>7, k 3x1x2, s 3x1x2, bias, silu, gn 7 plain, leaky_relu(0.2)", "whole vectors along width, none along an odd volume"),
    ("s2-p1", "3x4x5, 4>6, k 3, s 2, p 1", "the first output belongs to the odd phase"),
    ("s2-p1-op1", "3x4x5, 4>6, k 3, s 2, p 1, op 1", "exactly twice the size"),
    ("s2-d2", "3x4x5, 4>6, k 3, s 2, d 2, bias", "7 of 8 phases have no tap"),
    ("s2-p1-d2", "4x5x6, 4>6, k 3, s 2, p 1, d 2", "padding moves the one phase that has taps"),
    ("s2-d2-lines", "n 2, 2x9x17, 5>3, k 3, s 2, p 1, d 2, bias, relu", "lines of sectors, of which every second one has taps"),
    ("s4-d2", "2x3x2, 3>4, k 3, s 4, d 2, p 1, bias", "a common factor less than the stride: half of the phases are empty"),
    ("s2-d3", "3x4x3, 3>4, k 3, s 2, d 3, p 2, op 1", "coprime stride and dilation: no phase is empty, offsets jump"),
    ("s3-d2", "2x3x2, 3>4, k 4, s 3, d 2, p 1, op 2", "the same with the stride the larger"),
    ("s-d-mixed", "3x4x5, 3>4, k 3, s 1x2x3, p 0x2x1, d 2x2x1, op 1x1x2, bias", "empty phases on one axis only"),
    ("g-s2-op1", "n 2, 3x4x5, 8>12, k 3x5x7, s 2, p 1x2x3, op 1, g 4", "groups and everything else asymmetric"),
    ("g-d2", "3x4x5, 6>4, k 2, d 2, g 2, bias", "groups with spaced taps"),
    ("g-depthwise-k-s", "n 2, 3x4x5, 8>8, k 2, s 2, g 8", "learned interpolation, a channel at a time"),
    ("g-bilinear", "3x4x5, 5>5, k 4, s 2, p 1, g 5", "the layer that interpolation weights are loaded into"),
    ("everything", "n 2, 3x4x3, 6>9, k 3x2x4, s 2x3x2, p 1x0x2, op 1x2x0, d 1x2x3, g 3, bias, gelu, gn 3, tanh", "all at once"),
    // What follows the convolution.
    ("relu", "3x4x5, 4>6, k 3, bias, relu", "no normalization behind it"),
    ("relu-empty-phases", "3x2x3, 3>4, k 1, s 2, bias, relu", "a filled phase goes through the activation too"),
    ("leaky-relu", "3x4x5, 4>6, k 2, leaky_relu(0.01)", "PyTorch's default slope"),
    ("leaky-relu-steep", "3x4x5, 4>6, k 2, leaky_relu(-1.5)", "a slope that is negative and past 1"),
    ("silu", "3x4x5, 4>6, k 2, silu", "x * sigmoid(x)"),
    ("gelu", "3x4x5, 4>6, k 2, gelu", "erf, which the tanh form misses by 1e-3"),
    ("gelu-tanh", "3x4x5, 4>6, k 2, gelu_tanh", "the tanh form"),
    ("hardswish", "3x4x5, 4>6, k 2, hardswish", "clamped on both sides"),
    ("sigmoid", "3x4x5, 4>6, k 2, sigmoid", "0 goes to 0.5"),
    ("tanh", "3x4x5, 4>6, k 2, s 2, tanh", "the last layer of a generator"),
    ("two-activations", "3x4x5, 4>6, k 2, relu, sigmoid", "both steps without a normalization between them"),
    ("gn-1", "n 2, 3x4x5, 4>6, k 3, gn 1", "one group: layer norm over all channels"),
    ("gn-2", "n 2, 3x4x5, 4>6, k 3, gn 2", "statistics per sample, not over the batch"),
    ("gn-cout", "n 2, 3x4x5, 4>6, k 3, bias, relu, gn 6", "a group per channel: instance norm"),
    ("gn-plain", "n 2, 3x4x5, 4>6, k 2, gn 3 plain", "no weight and bias"),
    ("gn-post", "n 2, 3x4x5, 4>6, k 2, gn 3, hardswish", "nothing between convolution and normalization"),
    ("gn-only-post", "3x4x5, 4>6, k 2, s 2, gn 2, relu", "a ReLU behind, none before"),
    ("gn-conv-groups", "3x4x5, 6>12, k 3, g 3, leaky_relu(0.2), gn 4", "groups of the norm that straddle those of the convolution"),
    ("gn-constant-phases", "3x4x3, 4>6, k 3, s 2, p 1, d 2, bias, silu, gn 2", "7 of 8 values are a constant that counts in the statistics"),
    ("gn-one-value", "n 2, 1x1x1, 3>4, k 1, bias, gn 4", "a group of one value has variance 0: beta comes out"),
    ("gn-two-values", "1x1x1, 3>4, k 1x1x2, gn 4", "two values: biased and unbiased variance differ by 2"),
    ("gn-long", "1x16x150, 2>3, k 1x3x3, s 1x2x2, gn 1", "a group of tens of thousands of values"),
    ("gn-odd", "n 3, 3x5x7, 5>15, k 3, s 2, p 1, bias, tanh, gn 5", "groups of three channels of odd size"),
    ("gn-w-36", "n 2, 2x3x36, 3>5, k 3, s 2, p 1, op 1, bias, silu, gn 5, hardswish", "few channels, rows of whole vectors that pass 64 outputs"),
    // The published shapes, scaled down.
    ("kb1-58-small", "n 2, 4x5x9, 8>4, k 3x5x7", "kernel taps differ on every axis"),
    ("kb1-61-small", "6x6x6, 12>12, k 3", "a cube through a cube"),
    ("kb1-68-small", "5x6x6, 8>16, k 3x5x5", "75 taps"),
    ("kb1-70-small", "8x8x8, 12>6, k 3", "fewer channels out than in"),
    ("kb1-72-small", "n 2, 3x6x8, 16>16, k 3x5x7, s 2, p 1x2x3, op 1, g 4", "groups, stride and an asymmetric kernel"),
    ("kb1-73-small", "4x6x8, 32>32, k 3, s 2, p 1, g 4", "4 groups of 8 channels"),
    ("kb1-77-small", "n 2, 4x6x6, 8>16, k 3, s 2, p 1, d 2", "87% of the output is a constant"),
    ("kb2-61-block-small", "n 2, 4x4x4, 16>32, k 3, relu, gn 8", "the dense block"),
    ("kb2-60-block-small", "n 4, 4x6x6, 3>16, k 3, s 2, p 1, bias, silu, gn 4, hardswish", "three input channels"),
    ("nnunet-320-256-8-small", "n 2, 3x3x3, 80>64, k 2, s 2, bias", "many channels, few voxels"),
    ("nnunet-64-32-64-block-small", "n 2, 4x6x8, 16>32, k 2, s 2, bias, relu, gn 32", "instance norm behind a GEMM"),
    ("monai-128-32-48-block-small", "n 2, 5x5x5, 16>32, k 3, s 2, p 1, op 1, bias, relu, gn 32", "exactly twice the size, normalized"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_every_row_has_a_reason() {
        let cases = cases();
        assert!(cases.len() >= 60, "{}", cases.len());
        for field in [|case: &Case| case.name, |case: &Case| case.why] {
            assert_eq!(cases.iter().map(field).collect::<HashSet<_>>().len(), cases.len());
        }
        assert_eq!(
            cases
                .iter()
                .map(|case| (case.block, case.batch, case.input, case.format))
                .collect::<HashSet<_>>()
                .len(),
            cases.len()
        );
    }

    #[test]
    fn rows_are_small_enough_for_a_scalar_engine() {
        for case in cases() {
            assert!(case.geometry().flops() <= 6e6, "{case}: {}", case.geometry().flops());
        }
    }

    #[test]
    fn the_table_covers_what_goes_wrong() {
        let cases = cases();
        let any = |holds: &dyn Fn(&Case) -> bool| cases.iter().any(holds);
        let axis =
            |holds: &dyn Fn(&crate::Axis) -> bool| any(&|case| case.geometry().axes().iter().any(holds));
        assert!(any(&|c| c.block.conv().groups() > 1 && c.block.conv().stride()[0] > 1));
        assert!(any(&|c| c.block.conv().groups() > 1 && c.block.norm().is_some()));
        assert!(any(
            &|c| c.block.conv().groups() == c.block.conv().in_channels() && c.block.conv().groups() > 1
        ));
        assert!(any(&|c| c.format == MemoryFormat::ChannelsLast3d && c.block.norm().is_some()));
        assert!(any(&|c| c.batch == Some(0)) && any(&|c| c.batch.is_none()));
        assert!(any(&|c| c.block.norm().is_some_and(|norm| !norm.affine())));
        assert!(any(&|c| c.block.conv().output_padding() != [0; 3] && c.block.conv().dilation() != [1; 3]));
        assert!(axis(&|a| a.stride > a.kernel) && axis(&|a| a.kernel > a.input && a.input > 1));
        assert!(axis(&|a| a.padding > a.dilation * (a.kernel - 1)));
        let empty = |a: &crate::Axis| crate::phases::phases(a).iter().any(|phase| phase.taps.is_empty());
        assert!(axis(&|a| empty(a) && a.dilation > 1));
        for name in crate::Activation::NAMES.split(", ") {
            assert!(any(&|c| c.block.activation().is_some_and(|f| f.name() == name)), "{name}");
        }
        for differ in [
            crate::ConvSpec::kernel_size,
            crate::ConvSpec::stride,
            crate::ConvSpec::padding,
            crate::ConvSpec::output_padding,
            crate::ConvSpec::dilation,
        ] {
            assert!(any(&|c| differ(c.block.conv()).iter().collect::<HashSet<_>>().len() == 3));
        }
    }
}

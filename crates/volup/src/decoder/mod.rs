//! Decoders: chains of blocks that turn small volumes into large ones, stored one to a file.
//!
//! # The file
//!
//! A decoder is one [safetensors](https://github.com/huggingface/safetensors) file. Its metadata has
//! the key `volup`, whose value is this JSON, without any other field:
//!
//! ```json
//! {
//!   "format": "volup-decoder",
//!   "version": 1,
//!   "skip": "trilinear",
//!   "normalize": "max",
//!   "blocks": [
//!     {
//!       "name": "blocks.0",
//!       "in_channels": 1, "out_channels": 32,
//!       "kernel_size": [3, 3, 3], "stride": [2, 2, 2], "padding": [1, 1, 1],
//!       "output_padding": [1, 1, 1], "groups": 1, "dilation": [1, 1, 1], "bias": true,
//!       "activation": "relu",
//!       "norm_groups": 8, "eps": 1e-05, "affine": true,
//!       "post_activation": null
//!     }
//!   ]
//! }
//! ```
//!
//! - Every field is required. `skip` is `"trilinear"` or null, `normalize` is `"max"` or null.
//! - Sizes per axis are depth, height, width. They mean what PyTorch means by them.
//! - `activation` and `post_activation` are null, a name ([`crate::Activation::NAMES`]), or
//!   `["leaky_relu", slope]`.
//! - `norm_groups` is null for a block without group normalization; `eps` and `affine` then have no
//!   meaning.
//!
//! A block called `NAME` has the tensors `NAME.conv.weight` `[Cin, Cout/groups, kD, kH, kW]`,
//! `NAME.conv.bias` `[Cout]` if `bias`, and `NAME.norm.weight` and `NAME.norm.bias` `[Cout]` if it has an
//! affine normalization. The file holds no others, and all are of one type: F32, F64, F16 or BF16.
//! The metadata and the list of tensors together may take up to [`MAX_HEADER_BYTES`].
//!
//! # What it computes
//!
//! The blocks in order, each on the output of the one before. Around them:
//!
//! - `normalize = "max"`: each sample is divided by its largest magnitude over all its channels and
//!   voxels, and the output is multiplied by it again. A sample whose largest magnitude is zero or
//!   not finite is left as it is.
//! - `skip = "trilinear"`: the input, upsampled by the blocks' total scale, is added to their output,
//!   between the two steps above. It is PyTorch's `interpolate(mode="trilinear",
//!   align_corners=False)`. A decoder with a skip has as many channels out as in, and an output of
//!   exactly a whole multiple of the input's size.
//!
//! Both are computed in double precision and rounded once, to the type of the input, which is also
//! the output's. The blocks run in the type of the parameters ([`Decoder::cast`] changes it).
//!
//! # Tiles
//!
//! [`Decoder::run`] can cut a large input into tiles, so that the blocks' intermediates stay small.
//! Each tile is the part of the input that its part of the output depends on, computed exactly from
//! the blocks' geometry ([`Plan`]); nothing is blended, and what lies past the volume's border is
//! treated as in the whole. So for a decoder **without** normalization tiles change nothing. Group
//! norm takes its mean and variance over all voxels of a sample: in tiles it takes them over each
//! tile alone, so a decoder **with** normalization gives other values in tiles, with steps between
//! them ([`Decoder::has_norm`]).

mod format;
mod run;
mod tiles;

pub use format::MAX_HEADER_BYTES;
pub use tiles::Plan;

use crate::{BlockSpec, DType, Error, Geometry, MemoryFormat, Parameters, Result};

/// What is added to the output of a decoder's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Skip {
    /// The input, upsampled trilinearly by the blocks' total scale.
    Trilinear,
}

/// How a decoder's input is scaled before its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Normalize {
    /// Each sample is divided by its largest magnitude.
    Max,
}

/// A block of a decoder.
#[derive(Clone, Debug)]
pub struct DecoderBlock {
    /// What the block's tensors are called in the file, before `.conv.weight` and the like.
    pub name: String,
    /// The block.
    pub spec: BlockSpec,
    /// Its parameters.
    pub parameters: Parameters,
}

/// A chain of blocks with their parameters; valid by construction.
#[derive(Clone, Debug)]
pub struct Decoder {
    blocks: Vec<DecoderBlock>,
    skip: Option<Skip>,
    normalize: Option<Normalize>,
    dtype: DType,
}

impl Decoder {
    /// A decoder of the given blocks.
    ///
    /// # Errors
    /// [`Error::Decoder`] for no blocks, for names that are empty or not unique, for a block whose
    /// channels are not those of the one before, for parameters of several types, and for a skip
    /// where the output's channels are not the input's or its size no whole multiple;
    /// [`Error::DecoderBlock`] for parameters that are not the block's.
    pub fn new(
        blocks: Vec<DecoderBlock>,
        skip: Option<Skip>,
        normalize: Option<Normalize>,
    ) -> Result<Decoder> {
        let Some(first) = blocks.first() else {
            return Err(broken("blocks", "an empty list", "a list of at least one block"));
        };
        let dtype = first.parameters.weight.dtype();
        let mut names = std::collections::HashSet::new();
        for block in &blocks {
            let name = &block.name;
            if name.is_empty() || !names.insert(name.as_str()) {
                return Err(broken("name", format!("{name:?}"), "a name that no other block has"));
            }
            let got = block.parameters.check(&block.spec).map_err(|error| within(name, error))?;
            if got != dtype {
                return Err(broken(format!("{name}.conv.weight"), got, format!("{dtype} as all others")));
            }
        }
        for pair in blocks.windows(2) {
            let (out, got) = (pair[0].spec.conv().out_channels(), pair[1].spec.conv().in_channels());
            if got != out {
                let expected = format!("{out}, the out_channels of {}", pair[0].name);
                return Err(broken(format!("{}: in_channels", pair[1].name), got, expected));
            }
        }
        let decoder = Decoder { blocks, skip, normalize, dtype };
        if skip.is_some() {
            decoder.check_skip()?;
        }
        Ok(decoder)
    }

    fn check_skip(&self) -> Result<()> {
        let (channels, got) = (self.in_channels(), self.out_channels());
        if got != channels {
            let expected = format!("{channels}, the in_channels of the first: the decoder has a skip");
            return Err(broken("out_channels of the last block", got, expected));
        }
        // An axis of a block maps size I to s*I + c, so a chain of blocks does too.
        for axis in 0..3 {
            let mut offset = Some(0i128);
            for block in &self.blocks {
                let conv = block.spec.conv();
                let [k, s, p, op, d] = [
                    conv.kernel_size(),
                    conv.stride(),
                    conv.padding(),
                    conv.output_padding(),
                    conv.dilation(),
                ]
                .map(|parameter| parameter[axis] as i128);
                let own = d * (k - 1) + op + 1 - 2 * p - s;
                offset = offset.and_then(|offset| offset.checked_mul(s)?.checked_add(own));
            }
            if offset != Some(0) {
                let got = offset.map_or("a size past all bounds".into(), |c| format!("{c:+} voxels"));
                let expected = "a whole multiple of the input's size: the decoder has a skip";
                return Err(broken(format!("output size along {}", crate::AXES[axis]), got, expected));
            }
        }
        Ok(())
    }

    /// The blocks, first to last; at least one.
    pub fn blocks(&self) -> &[DecoderBlock] {
        &self.blocks
    }

    /// What is added to the output of the blocks.
    pub fn skip(&self) -> Option<Skip> {
        self.skip
    }

    /// How the input is scaled.
    pub fn normalize(&self) -> Option<Normalize> {
        self.normalize
    }

    /// The type of the parameters, in which the blocks run.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Channels of the input.
    pub fn in_channels(&self) -> usize {
        self.blocks[0].spec.conv().in_channels()
    }

    /// Channels of the output.
    pub fn out_channels(&self) -> usize {
        self.blocks[self.blocks.len() - 1].spec.conv().out_channels()
    }

    /// Whether any block normalizes, so that tiles change the output.
    pub fn has_norm(&self) -> bool {
        self.blocks.iter().any(|block| block.spec.norm().is_some())
    }

    /// The product of all strides, per axis; saturates.
    pub fn scale(&self) -> [usize; 3] {
        self.blocks.iter().fold([1; 3], |scale, block| {
            let stride = block.spec.conv().stride();
            [0, 1, 2].map(|axis| scale[axis].saturating_mul(stride[axis]))
        })
    }

    /// The sizes of every block over a batch of inputs of spatial size [D, H, W].
    ///
    /// # Errors
    /// [`Error::DecoderBlock`] with what [`BlockSpec::geometry`] says of the block.
    pub fn geometries(&self, batch: usize, input: [usize; 3]) -> Result<Vec<Geometry>> {
        let mut size = input;
        let geometry = |block: &DecoderBlock| {
            let geometry = block.spec.geometry(batch, size).map_err(|error| within(&block.name, error))?;
            size = geometry.axes().map(|axis| axis.output);
            Ok(geometry)
        };
        self.blocks.iter().map(geometry).collect()
    }

    /// The same decoder with parameters of another type, each value rounded to nearest.
    ///
    /// # Errors
    /// None in practice: the shapes are known to be good.
    pub fn cast(&self, dtype: DType) -> Result<Decoder> {
        let mut decoder = self.clone();
        decoder.dtype = dtype;
        for DecoderBlock { parameters, .. } in &mut decoder.blocks {
            let Parameters { weight, bias, norm_weight, norm_bias } = parameters;
            let optional = [bias, norm_weight, norm_bias].into_iter().flatten();
            for tensor in std::iter::once(weight).chain(optional) {
                *tensor = tensor.cast(dtype, MemoryFormat::Contiguous)?;
            }
        }
        Ok(decoder)
    }
}

/// What a field of a decoder holds and should hold.
fn broken(field: impl Into<String>, got: impl ToString, expected: impl Into<String>) -> Error {
    Error::Decoder { field: field.into(), got: got.to_string(), expected: expected.into() }
}

/// An error of one of the decoder's blocks.
fn within(block: &str, error: Error) -> Error {
    Error::DecoderBlock { block: block.into(), source: Box::new(error) }
}

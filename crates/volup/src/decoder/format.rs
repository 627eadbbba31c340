//! Reading and writing a decoder's file; the module above documents it.

use super::{Decoder, DecoderBlock, Normalize, Skip, broken, within};
use crate::{Activation, BlockSpec, ConvSpec, DType, Element, Error, NormSpec, Parameters, Result, Tensor};
use safetensors::tensor::Dtype;
use safetensors::{SafeTensors, View};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::path::Path;

/// The most that the header of a decoder's file may take: thousands of blocks. The bound keeps what
/// is allocated for a hostile header small.
pub const MAX_HEADER_BYTES: usize = 1 << 20;

const KEY: &str = "volup";
const FORMAT: &str = "volup-decoder";
const VERSION: u64 = 1;

/// What every version of the format has, and will have.
#[derive(Deserialize)]
struct Preamble {
    format: String,
    version: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    format: String,
    version: u64,
    // `Option` alone would let serde take a missing field for null.
    #[serde(deserialize_with = "Option::deserialize")]
    skip: Option<Skip>,
    #[serde(deserialize_with = "Option::deserialize")]
    normalize: Option<Normalize>,
    blocks: Vec<Block>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Block {
    name: String,
    in_channels: usize,
    out_channels: usize,
    kernel_size: [usize; 3],
    stride: [usize; 3],
    padding: [usize; 3],
    output_padding: [usize; 3],
    groups: usize,
    dilation: [usize; 3],
    bias: bool,
    #[serde(deserialize_with = "Option::deserialize")]
    activation: Option<Function>,
    #[serde(deserialize_with = "Option::deserialize")]
    norm_groups: Option<usize>,
    eps: f64,
    affine: bool,
    #[serde(deserialize_with = "Option::deserialize")]
    post_activation: Option<Function>,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "an activation must be null, a name, or [\"leaky_relu\", slope]")]
enum Function {
    Named(String),
    Sloped(String, f64),
}

impl From<Activation> for Function {
    fn from(activation: Activation) -> Function {
        let name = activation.name().to_string();
        match activation {
            Activation::LeakyRelu(slope) => Function::Sloped(name, slope.get()),
            _ => Function::Named(name),
        }
    }
}

impl Function {
    fn activation(&self) -> Result<Activation> {
        match self {
            Function::Named(name) => Activation::from_name(name),
            Function::Sloped(name, slope) if name == "leaky_relu" => Activation::leaky_relu(*slope),
            Function::Sloped(name, _) => {
                Err(broken("an activation with a slope", format!("{name:?}"), "\"leaky_relu\""))
            }
        }
    }
}

impl Block {
    fn of(DecoderBlock { name, spec, .. }: &DecoderBlock) -> Block {
        let (conv, norm) = (spec.conv(), spec.norm());
        Block {
            name: name.clone(),
            in_channels: conv.in_channels(),
            out_channels: conv.out_channels(),
            kernel_size: conv.kernel_size(),
            stride: conv.stride(),
            padding: conv.padding(),
            output_padding: conv.output_padding(),
            groups: conv.groups(),
            dilation: conv.dilation(),
            bias: conv.has_bias(),
            activation: spec.activation().map(Function::from),
            norm_groups: norm.map(|norm| norm.groups()),
            eps: norm.map_or(1e-5, |norm| norm.eps()),
            affine: norm.is_none_or(|norm| norm.affine()),
            post_activation: spec.post_activation().map(Function::from),
        }
    }

    fn spec(&self) -> Result<BlockSpec> {
        let conv = ConvSpec::builder(self.in_channels, self.out_channels, self.kernel_size)
            .stride(self.stride)
            .padding(self.padding)
            .output_padding(self.output_padding)
            .groups(self.groups)
            .dilation(self.dilation)
            .bias(self.bias)
            .build()?;
        let activation =
            |function: &Option<Function>| function.as_ref().map(Function::activation).transpose();
        let norm = self.norm_groups.map(|groups| NormSpec::new(groups, self.eps, self.affine)).transpose()?;
        BlockSpec::new(conv, activation(&self.activation)?, norm, activation(&self.post_activation)?)
    }
}

impl Decoder {
    /// Reads a decoder's file.
    ///
    /// # Errors
    /// [`Error::Io`], and as [`Decoder::from_bytes`].
    pub fn read(path: impl AsRef<Path>) -> Result<Decoder> {
        let path = path.as_ref();
        let read = || {
            // A device or a pipe may have no end.
            if !std::fs::metadata(path)?.is_file() {
                return Err(std::io::Error::other("not a regular file"));
            }
            std::fs::read(path)
        };
        Decoder::from_bytes(&read().map_err(|source| Error::Io { path: path.into(), source })?)
    }

    /// Writes the decoder's file: whole, or not at all.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let bytes = self.to_bytes()?;
        let write = || {
            // In the same folder, since a file cannot be renamed into another file system.
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let mut builder = tempfile::Builder::new();
            #[cfg(unix)]
            builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
            let mut file = builder.tempfile_in(folder.unwrap_or(Path::new(".")))?;
            file.write_all(&bytes)?;
            file.persist(path)?;
            Ok(())
        };
        write().map_err(|source| Error::Io { path: path.into(), source })
    }

    /// The decoder in a file's bytes. What is allocated is bounded by their number.
    ///
    /// # Errors
    /// [`Error::Decoder`] names the field or tensor that breaks the format, [`Error::DecoderBlock`]
    /// the block whose description breaks a rule.
    pub fn from_bytes(bytes: &[u8]) -> Result<Decoder> {
        let header = bytes.first_chunk().map_or(0, |&length| u64::from_le_bytes(length));
        if header > MAX_HEADER_BYTES as u64 {
            let expected = format!("at most {MAX_HEADER_BYTES}, as in a decoder's safetensors file");
            return Err(broken("the header's length", header, expected));
        }
        let malformed = |error| broken("the file", error, "a complete safetensors file");
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(malformed)?;
        let file = SafeTensors::deserialize(bytes).map_err(malformed)?;
        let Some(json) = header.metadata().as_ref().and_then(|metadata| metadata.get(KEY)) else {
            return Err(broken("metadata \"volup\"", "nothing", "the description of a decoder"));
        };
        let description = description(json)?;
        let mut unused: BTreeSet<&str> = file.names().into_iter().collect();
        let blocks = description.blocks.iter().map(|block| {
            let spec = block.spec().map_err(|error| within(&block.name, error))?;
            let parameters = parameters(&file, &block.name, &spec, &mut unused)?;
            Ok(DecoderBlock { name: block.name.clone(), spec, parameters })
        });
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        if let Some(name) = unused.first() {
            return Err(broken(*name, "a tensor", "absent: no block has it"));
        }
        Decoder::new(blocks, description.skip, description.normalize)
    }

    /// The bytes of the decoder's file.
    ///
    /// # Errors
    /// [`Error::Decoder`] if the header would be longer than [`MAX_HEADER_BYTES`].
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let description = Description {
            format: FORMAT.into(),
            version: VERSION,
            skip: self.skip,
            normalize: self.normalize,
            blocks: self.blocks.iter().map(Block::of).collect(),
        };
        let json = serde_json::to_string(&description)
            .map_err(|error| broken("the description", error, "representable in JSON"))?;
        let tensors = self.blocks.iter().flat_map(|DecoderBlock { name, parameters, .. }| {
            let Parameters { weight, bias, norm_weight, norm_bias } = parameters;
            [
                ("conv.weight", Some(weight)),
                ("conv.bias", bias.as_ref()),
                ("norm.weight", norm_weight.as_ref()),
                ("norm.bias", norm_bias.as_ref()),
            ]
            .into_iter()
            .filter_map(move |(part, tensor)| Some((format!("{name}.{part}"), Stored(tensor?))))
        });
        let metadata = HashMap::from([(KEY.to_string(), json)]);
        let bytes = safetensors::serialize(tensors, Some(metadata))
            .map_err(|error| broken("the decoder", error, "representable in safetensors"))?;
        let header = bytes.first_chunk().map_or(0, |&length| u64::from_le_bytes(length));
        if header > MAX_HEADER_BYTES as u64 {
            return Err(broken("the header's length", header, format!("at most {MAX_HEADER_BYTES}")));
        }
        Ok(bytes)
    }
}

fn description(json: &str) -> Result<Description> {
    let malformed = |error| broken("metadata \"volup\"", error, "the description of a decoder");
    let preamble: Preamble = serde_json::from_str(json).map_err(malformed)?;
    if preamble.format != FORMAT {
        return Err(broken("format", format!("{:?}", preamble.format), format!("{FORMAT:?}")));
    }
    if preamble.version != VERSION {
        return Err(broken("version", preamble.version, format!("{VERSION}, all that this volup reads")));
    }
    serde_json::from_str(json).map_err(malformed)
}

/// Takes a block's tensors out of the file, and out of the names that no block has used.
fn parameters<'a>(
    file: &SafeTensors<'a>,
    block: &str,
    spec: &BlockSpec,
    unused: &mut BTreeSet<&str>,
) -> Result<Parameters> {
    let channels = [spec.conv().out_channels()];
    let mut tensor = |part: &str, shape: &[usize]| {
        let name = format!("{block}.{part}");
        let Ok(view) = file.tensor(&name) else {
            return Err(broken(name, "nothing", format!("a tensor of shape {shape:?}")));
        };
        if view.shape() != shape {
            return Err(broken(name, format!("shape {:?}", view.shape()), format!("of shape {shape:?}")));
        }
        unused.remove(name.as_str());
        let dtype = match view.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::F64 => DType::F64,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::Bf16,
            other => return Err(broken(name, other, "of type F32, F64, F16 or BF16")),
        };
        crate::with_element!(dtype, T => Tensor::new(shape, from_le_bytes::<T>(view.data())))
    };
    let affine = spec.norm().is_some_and(|norm| norm.affine());
    Ok(Parameters {
        weight: tensor("conv.weight", &spec.conv().weight_shape())?,
        bias: spec.conv().has_bias().then(|| tensor("conv.bias", &channels)).transpose()?,
        norm_weight: affine.then(|| tensor("norm.weight", &channels)).transpose()?,
        norm_bias: affine.then(|| tensor("norm.bias", &channels)).transpose()?,
    })
}

fn from_le_bytes<T: Element>(bytes: &[u8]) -> Vec<T> {
    let element = |bytes: &[u8]| {
        if cfg!(target_endian = "little") {
            bytemuck::pod_read_unaligned(bytes)
        } else {
            bytemuck::pod_read_unaligned(&bytes.iter().rev().copied().collect::<Vec<u8>>())
        }
    };
    bytes.chunks_exact(size_of::<T>()).map(element).collect()
}

fn to_le_bytes<T: Element>(values: &[T]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        Cow::Borrowed(bytemuck::cast_slice(values))
    } else {
        values.iter().flat_map(|value| bytemuck::bytes_of(value).iter().rev().copied()).collect()
    }
}

/// A tensor as safetensors wants to see it.
struct Stored<'a>(&'a Tensor);

impl View for Stored<'_> {
    fn dtype(&self) -> Dtype {
        match self.0.dtype() {
            DType::F32 => Dtype::F32,
            DType::F64 => Dtype::F64,
            DType::F16 => Dtype::F16,
            DType::Bf16 => Dtype::BF16,
        }
    }
    fn shape(&self) -> &[usize] {
        self.0.shape()
    }
    fn data(&self) -> Cow<'_, [u8]> {
        crate::with_element!(self.0.dtype(), T => to_le_bytes(self.0.as_slice::<T>().unwrap_or_default()))
    }
    fn data_len(&self) -> usize {
        self.0.data().len() * self.0.dtype().size()
    }
}

#[cfg(test)]
#[path = "format_tests.rs"]
mod tests;

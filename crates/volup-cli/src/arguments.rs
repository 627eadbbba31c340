//! Arguments that several subcommands take.

use clap::builder::TypedValueParser;
use std::num::NonZeroUsize;
use volup::testing::{Case, published};
use volup::{DType, Precision};
use volup_cpu::CpuEngine;
use volup_cuda::{Algorithm, CudaEngine};

/// The default of `--max-bytes`.
pub const MAX_BYTES: &str = "8G";

/// Where a command computes, and how.
#[derive(clap::Args)]
pub struct Where {
    /// Where to compute: cpu, cuda, or cuda:N for the Nth GPU, counted from 0.
    #[arg(long, value_name = "cpu|cuda|cuda:N", value_parser = device, default_value = "cpu")]
    device: Device,
    /// How a GPU multiplies float32: as accurately as a CPU, or rounded to 10 mantissa bits.
    #[arg(long, value_parser = precision(), default_value = "ieee")]
    precision: Precision,
    /// Threads to run on with --device cpu [default: all cores].
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// The kernel family to use on a GPU, where it applies; for tests.
    #[arg(long, value_name = "NAME", hide = true)]
    algorithm: Option<Algorithm>,
    /// The kernel to use on a GPU, where a plan has it; for tests.
    #[arg(long, value_name = "NAME", hide = true)]
    kernel: Option<String>,
}

impl Where {
    /// The engine that is asked for.
    pub fn engine(&self) -> volup::Result<AnyEngine> {
        Ok(match self.device {
            Device::Cpu => AnyEngine::Cpu(self.threads.map_or_else(CpuEngine::new, CpuEngine::with_threads)),
            Device::Cuda(ordinal) => {
                let engine = CudaEngine::new(ordinal, self.precision)?.with_algorithm(self.algorithm);
                AnyEngine::Cuda(Box::new(engine.with_kernel(self.kernel.clone())?))
            }
        })
    }
}

/// An engine of either kind. Commands are generic over engines; a match on this is where they part.
pub enum AnyEngine {
    /// On the host's cores.
    Cpu(CpuEngine),
    /// On a GPU.
    Cuda(Box<CudaEngine>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Device {
    Cpu,
    Cuda(usize),
}

fn device(text: &str) -> Result<Device, String> {
    let wanted = || "cpu, cuda or cuda:N is wanted".to_string();
    match text {
        "cpu" => Ok(Device::Cpu),
        "cuda" => Ok(Device::Cuda(0)),
        _ => {
            let ordinal = text.strip_prefix("cuda:").ok_or_else(wanted)?;
            ordinal.parse().map(Device::Cuda).map_err(|_| wanted())
        }
    }
}

fn precision() -> impl TypedValueParser<Value = Precision> {
    clap::builder::PossibleValuesParser::new(["ieee", "tf32"]).try_map(|name| name.parse::<Precision>())
}

/// The blocks that a command times.
#[derive(clap::Args)]
pub struct Shapes {
    /// A published shape, any number of times [default: all of them].
    #[arg(long, value_name = "NAME", value_parser = shape_parser())]
    shape: Vec<String>,
    /// A block and its input, any number of times.
    #[arg(long, value_name = "SPEC", value_parser = spec)]
    spec: Vec<Case>,
    /// The type to compute in.
    #[arg(long, value_parser = dtype(), default_value = "f32")]
    pub dtype: DType,
    /// The batch size, in place of the shape's own.
    #[arg(long, value_name = "N")]
    batch: Option<NonZeroUsize>,
    /// The most memory that a shape's input, output and weight may take.
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = MAX_BYTES)]
    max_bytes: u64,
}

fn shape_parser() -> clap::builder::PossibleValuesParser {
    clap::builder::PossibleValuesParser::new(published().iter().map(|case| case.name))
}

impl Shapes {
    /// The cases that are asked for, with the batch that is.
    pub fn cases(&self) -> anyhow::Result<Vec<Case>> {
        let mut cases: Vec<Case> = published();
        let all = self.shape.is_empty() && self.spec.is_empty();
        cases.retain(|case| all || self.shape.iter().any(|name| name == case.name));
        cases.extend(self.spec.iter().cloned());
        if let Some(batch) = self.batch {
            for case in &mut cases {
                case.batch = Some(batch.get());
                // A larger batch may be past all bounds.
                case.block.geometry(batch.get(), case.input)?;
            }
        }
        for case in &cases {
            check_size(case, self.dtype, self.max_bytes)?;
            anyhow::ensure!(case.batch != Some(0), "{case}: nothing to time in an empty batch");
        }
        Ok(cases)
    }
}

/// Parses a number of seconds.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds from 0 to 86400 is wanted".into()),
    }
}

/// Parses a number of threads.
fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads) if (1..=1024).contains(&threads) => Ok(threads),
        _ => Err("a number from 1 to 1024 is wanted".into()),
    }
}

/// Parses a dtype by either of its names.
pub fn dtype() -> impl TypedValueParser<Value = DType> {
    clap::builder::PossibleValuesParser::new([
        clap::builder::PossibleValue::new("f32").alias("float32"),
        clap::builder::PossibleValue::new("f64").alias("float64"),
        clap::builder::PossibleValue::new("f16").alias("float16"),
        clap::builder::PossibleValue::new("bf16").alias("bfloat16"),
    ])
    .try_map(|name| name.parse::<DType>())
}

/// Parses a number of bytes: `1000`, `512M`, `8G` (powers of 1024).
pub fn bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes() {
        [.., b'k' | b'K'] => (&text[..text.len() - 1], 10),
        [.., b'm' | b'M'] => (&text[..text.len() - 1], 20),
        [.., b'g' | b'G'] => (&text[..text.len() - 1], 30),
        [.., b't' | b'T'] => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let count: u64 = digits.parse().map_err(|_| "a number of bytes, such as 512M or 8G, is wanted")?;
    count.checked_mul(1 << shift).ok_or_else(|| "that many bytes cannot be counted".into())
}

/// Parses the one-line notation of a block and its input.
pub fn spec(text: &str) -> Result<Case, String> {
    Case::parse("spec", text, "").map_err(|error| match error {
        volup::Error::Notation { reason, .. } => reason,
        other => other.to_string(),
    })
}

/// What `--help` says about that notation.
pub const SPEC_HELP: &str = "\
Specs name the batch, the input's size, the channels and what differs from PyTorch's defaults:
  n 1, 32x32x32, 64>128, k 3x3x3, s 2x2x2, p 1, op 1, g 1, d 1, bias, relu, gn 8
k kernel size, s stride, p padding, op output padding, g groups, d dilation; one number or three.
gn is a group norm of that many groups; an activation before it follows the convolution, one after
it the norm: relu, leaky_relu(0.2), silu, gelu, gelu_tanh, hardswish, sigmoid, tanh.";

/// Refuses a block whose input and output take more than `--max-bytes`.
pub fn check_size(case: &Case, dtype: DType, max_bytes: u64) -> anyhow::Result<()> {
    let geometry = case.geometry();
    let shapes = [geometry.input_shape(), geometry.output_shape(), geometry.conv().weight_shape()];
    let elements: u128 =
        shapes.iter().map(|shape| shape.iter().map(|&size| size as u128).product::<u128>()).sum();
    let bytes = elements * dtype.size() as u128;
    anyhow::ensure!(
        bytes <= max_bytes.into(),
        "{case}: input, output and weight take {bytes} bytes, more than --max-bytes {max_bytes}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_suffixes() {
        assert_eq!(bytes("12"), Ok(12));
        assert_eq!(bytes("3k"), Ok(3072));
        assert_eq!(bytes("8G"), Ok(8 << 30));
        assert_eq!(bytes("1T"), Ok(1 << 40));
        for wrong in ["", "G", "-1", "1.5G", "1GB", "99999999999G", "é"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn devices_have_names() {
        assert_eq!(device("cpu"), Ok(Device::Cpu));
        assert_eq!((device("cuda"), device("cuda:3")), (Ok(Device::Cuda(0)), Ok(Device::Cuda(3))));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cpu:0"] {
            assert!(device(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn specs_read_as_they_print() {
        for line in [
            "n 2, 5x6x7, 8>12, k 3x3x3, s 2x2x1, p 1x1x1, op 1x1x0, g 4, bias, relu, gn 2, silu",
            "n 1, 1x1x1, 1>1, k 1x2x3, d 2x2x2, leaky_relu(-0.5), tanh",
        ] {
            assert_eq!(spec(line).unwrap().to_string(), format!("spec: {line}"));
        }
        assert!(spec("n 1,2x2x2,1>1,k 2").is_ok());
        let error = spec("2x2x2, 4>6, k 3, g 4").unwrap_err();
        assert_eq!(error, "out_channels must be divisible by groups, got out_channels 6 with groups 4");
    }
}

//! Arguments that several subcommands take.

use clap::builder::TypedValueParser;
use volup::DType;
use volup::testing::Case;
use volup_cpu::CpuEngine;

/// The default of `--max-bytes`.
pub const MAX_BYTES: &str = "8G";

/// An engine on `--threads` threads, or on all cores.
pub fn engine(threads: Option<usize>) -> CpuEngine {
    threads.map_or_else(CpuEngine::new, CpuEngine::with_threads)
}

/// Parses a number of threads.
pub fn threads(text: &str) -> Result<usize, String> {
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

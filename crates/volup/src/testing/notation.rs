//! The one-line notation of a case, as `Geometry` and `BlockSpec` print themselves.

use super::Case;
use crate::{Activation, BlockSpec, ConvSpec, Error, MemoryFormat, NormSpec};

/// Reads a case such as `n 2, 5x6x7, 8>12, k 3, s 2x2x1, p 1, op 1, g 4, d 1, bias, relu, gn 2, silu`.
///
/// Size, channels and `k` are required; `k`, `s`, `p`, `op` and `d` take one number or three. An
/// activation before `gn` follows the convolution, one after it the normalization, and so does a
/// second one where there is no `gn`. `gn 2 plain` has no weight and bias. `unbatched` stands in
/// place of `n 1`; `channels_last_3d` is the memory format.
///
/// # Panics
/// If the line is not of that form or describes nothing valid: the lines are part of the source.
pub(super) fn case(name: &'static str, line: &str, why: &'static str) -> Case {
    Case::parse(name, line, why).unwrap_or_else(|error| panic!("{name}: {error}"))
}

impl Case {
    /// Reads a case from a line such as `n 2, 5x6x7, 8>12, k 3, s 2x2x1, p 1, g 4, bias, relu, gn 2`,
    /// as the description of a [`BlockSpec`] prints itself after the batch and the input's size.
    ///
    /// # Errors
    /// [`Error::Notation`] if the line is not of that form or describes nothing valid.
    pub fn parse(name: &'static str, line: &str, why: &'static str) -> Result<Case, Error> {
        let case = Row::read(line).and_then(|row| row.case(name, why));
        case.map_err(|reason| Error::Notation { line: line.into(), reason })
    }
}

#[derive(Default)]
struct Row {
    unbatched: bool,
    batch: Option<usize>,
    input: Vec<i64>,
    channels: Option<(usize, usize)>,
    triples: [Option<Vec<i64>>; 5],
    groups: Option<usize>,
    bias: bool,
    activation: Option<Activation>,
    norm: Option<NormSpec>,
    post_activation: Option<Activation>,
    format: MemoryFormat,
}

const TRIPLES: [&str; 5] = ["k", "s", "p", "op", "d"];

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{text:?} is not a number"))
}

fn numbers(text: &str) -> Result<Vec<i64>, String> {
    text.split('x').map(number).collect()
}

impl Row {
    fn read(line: &str) -> Result<Row, String> {
        let mut row = Row::default();
        for item in line.split(',').map(str::trim) {
            let (key, value) = item.split_once(' ').unwrap_or((item, ""));
            match key {
                "n" => row.batch = Some(number(value)?),
                "unbatched" => row.unbatched = true,
                "g" => row.groups = Some(number(value)?),
                "bias" => row.bias = true,
                "channels_last_3d" => row.format = MemoryFormat::ChannelsLast3d,
                "gn" => {
                    let (groups, affine) =
                        value.strip_suffix(" plain").map_or((value, true), |groups| (groups, false));
                    let norm = NormSpec::new(number(groups)?, 1e-5, affine);
                    row.norm = Some(norm.map_err(|error| error.to_string())?);
                }
                _ => row.read_other(key, value)?,
            }
        }
        Ok(row)
    }

    fn read_other(&mut self, key: &str, value: &str) -> Result<(), String> {
        if let Some(which) = TRIPLES.iter().position(|&triple| triple == key) {
            self.triples[which] = Some(numbers(value)?);
        } else if let Some((cin, cout)) = key.split_once('>') {
            self.channels = Some((number(cin)?, number(cout)?));
        } else if key.starts_with(|c: char| c.is_ascii_digit()) {
            self.input = numbers(key)?;
        } else {
            let activation = match key.strip_prefix("leaky_relu(").and_then(|key| key.strip_suffix(')')) {
                Some(slope) => Activation::leaky_relu(number(slope)?),
                None => Activation::from_name(key),
            };
            let activation = Some(activation.map_err(|error| error.to_string())?);
            if self.norm.is_some() || self.activation.is_some() {
                self.post_activation = activation;
            } else {
                self.activation = activation;
            }
        }
        Ok(())
    }

    fn case(self, name: &'static str, why: &'static str) -> Result<Case, String> {
        let (cin, cout) = self.channels.ok_or("no channels")?;
        let triple = |which: usize, default: i64| {
            let values = self.triples[which].clone().unwrap_or(vec![default]);
            crate::Triple::from_slice(TRIPLES[which], &values)
        };
        let block = || {
            let conv = ConvSpec::builder(cin, cout, triple(0, 0)?)
                .stride(triple(1, 1)?)
                .padding(triple(2, 0)?)
                .output_padding(triple(3, 0)?)
                .dilation(triple(4, 1)?)
                .groups(self.groups.unwrap_or(1))
                .bias(self.bias)
                .build()?;
            BlockSpec::new(conv, self.activation, self.norm, self.post_activation)
        };
        let size = |&size: &i64| usize::try_from(size).map_err(|_| "a negative size");
        let input: Vec<usize> = self.input.iter().map(size).collect::<Result<_, _>>()?;
        let case = Case {
            name,
            why,
            block: block().map_err(|error| error.to_string())?,
            batch: (!self.unbatched).then_some(self.batch.unwrap_or(1)),
            input: input.try_into().map_err(|_| "the size is not DxHxW")?,
            format: self.format,
        };
        case.block.geometry(case.batch.unwrap_or(1), case.input).map_err(|error| error.to_string())?;
        Ok(case)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_reads_as_it_prints() {
        for line in [
            "n 2, 5x6x7, 8>12, k 3x3x3, s 2x2x1, p 1x1x1, op 1x1x0, g 4, bias, relu, gn 2, silu",
            "n 0, 1x1x1, 1>1, k 1x2x3, d 2x2x2, leaky_relu(-0.5), tanh",
            "unbatched, 4x4x4, 3>3, k 2x2x2",
            "n 1, 4x4x4, 3>3, k 2x2x2, gn 3, gelu_tanh, channels_last_3d",
        ] {
            assert_eq!(case("name", line, "why").to_string(), format!("name: {line}"));
        }
        assert!(!case("name", "2x2x2, 4>4, k 1, gn 2 plain", "").block.norm().unwrap().affine());
    }

    #[test]
    fn nonsense_is_refused() {
        for line in
            ["2x2x2, k 1", "2x2, 1>1, k 1", "2x2x2, 1>1, k 1, mish", "2x2x2, 1>1, k 1, s q", "2x2x2, 1>1"]
        {
            assert!(matches!(Case::parse("", line, ""), Err(Error::Notation { .. })), "{line}");
        }
    }
}

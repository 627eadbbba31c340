//! How float32 is multiplied on GPUs.

use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// How an engine multiplies float32 on matrix units that take fewer bits. The other types are not
/// affected, nor are engines that multiply float32 as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// As accurate as IEEE single precision arithmetic.
    #[default]
    Ieee,
    /// Operands are rounded to 10 mantissa bits (unit roundoff 2^-11) and keep float32's range; sums
    /// are in float32. PyTorch's `allow_tf32`.
    Tf32,
}

impl Precision {
    /// Both.
    pub const ALL: [Precision; 2] = [Precision::Ieee, Precision::Tf32];
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::Ieee => "ieee",
            Precision::Tf32 => "tf32",
        })
    }
}

impl FromStr for Precision {
    type Err = Error;

    fn from_str(name: &str) -> Result<Precision> {
        let named = Precision::ALL.into_iter().find(|precision| precision.to_string() == name);
        named.ok_or_else(|| Error::UnknownName {
            param: "precision",
            got: name.into(),
            expected: "ieee, tf32",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_as_they_print() {
        for precision in Precision::ALL {
            assert_eq!(precision.to_string().parse::<Precision>().unwrap(), precision);
        }
        let error = "fp8".parse::<Precision>().unwrap_err();
        assert!(matches!(error, Error::UnknownName { param: "precision", .. }));
        assert_eq!(error.to_string(), "precision must be one of ieee, tf32, got \"fp8\"");
    }
}

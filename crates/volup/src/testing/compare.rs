//! Comparing a result with what was expected, element by element.

use crate::reference::Expected;
use crate::{DType, Tensor, bf16, f16};
use std::fmt;

/// How far a result is from what was expected.
#[derive(Clone, Debug, PartialEq)]
pub struct Deviation {
    /// The largest error of any element; infinite where one is NaN or Inf and should not be, or is
    /// not and should be.
    pub worst_abs: f64,
    /// The largest error as a share of the element's bound: at most 1 if all is well.
    pub worst_ratio: f64,
    /// Where that is: [n, c, d, h, w], or [c, d, h, w] for an unbatched result. Empty if there are
    /// no elements or all are exact.
    pub at: Vec<usize>,
    /// What the result holds there.
    pub got: f64,
    /// What was expected there.
    pub expected: f64,
    /// How far off it may be there.
    pub bound: f64,
    /// How many elements are outside their bounds.
    pub count_outside: usize,
}

impl Deviation {
    /// Whether every element is inside its bound.
    pub fn is_ok(&self) -> bool {
        self.count_outside == 0
    }
}

impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.at.is_empty() {
            return write!(f, "no deviation");
        }
        write!(
            f,
            "worst at {:?}: got {:e}, expected {:e}, off by {:.3} of its bound {:.3e}; largest error {:.3e}; \
             {} outside their bounds",
            self.at,
            self.got,
            self.expected,
            self.worst_ratio,
            self.bound,
            self.worst_abs,
            self.count_outside
        )
    }
}

/// The largest finite value of a type.
fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::MAX,
        DType::F32 => f64::from(f32::MAX),
        DType::F16 => f64::from(f16::MAX),
        DType::Bf16 => f64::from(bf16::MAX),
    }
}

/// Compares a result with what was expected.
///
/// Where NaN is expected the result must be NaN, where Inf is, the same Inf. A finite value that may
/// lie past the largest of the result's type may come out as Inf.
///
/// # Panics
/// If the result has another number of elements.
pub fn compare(expected: &Expected, got: &Tensor) -> Deviation {
    let values = got.to_f64();
    assert_eq!(values.len(), expected.values.len(), "a result of the expected shape");
    let largest = largest(got.dtype());
    let mut deviation = Deviation {
        worst_abs: 0.0,
        worst_ratio: 0.0,
        at: Vec::new(),
        got: 0.0,
        expected: 0.0,
        bound: 0.0,
        count_outside: 0,
    };
    let mut worst = None;
    for (index, ((&got, &expected), &bound)) in
        values.iter().zip(&expected.values).zip(&expected.bounds).enumerate()
    {
        let error = error(got, expected, bound, largest);
        let ratio = match error {
            0.0 => 0.0,
            // A finite error means nothing against a bound that is NaN, nor any against Inf.
            _ if bound.is_nan() || error.is_infinite() => f64::INFINITY,
            _ => error / bound,
        };
        let outside = ratio > 1.0;
        deviation.count_outside += usize::from(outside);
        deviation.worst_abs = deviation.worst_abs.max(error);
        if ratio > deviation.worst_ratio {
            deviation.worst_ratio = ratio;
            (deviation.got, deviation.expected, deviation.bound) = (got, expected, bound);
            worst = Some(index);
        }
    }
    if let Some(mut index) = worst {
        for &size in got.shape().iter().rev() {
            deviation.at.insert(0, index % size);
            index /= size;
        }
    }
    deviation
}

fn error(got: f64, expected: f64, bound: f64, largest: f64) -> f64 {
    let same = got == expected || (got.is_nan() && expected.is_nan());
    let overflow = got.is_infinite() && expected.is_finite() && expected * got.signum() + bound >= largest;
    if same || overflow {
        0.0
    } else if got.is_finite() && expected.is_finite() {
        (got - expected).abs()
    } else {
        f64::INFINITY
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryFormat;

    fn deviation(expected: [f64; 4], got: [f32; 4], dtype: DType) -> Deviation {
        let expected = Expected { values: expected.to_vec(), bounds: vec![0.5; 4] };
        let got = Tensor::new(&[1, 2, 1, 1, 2], got.to_vec()).unwrap();
        compare(&expected, &got.cast(dtype, MemoryFormat::ChannelsLast3d).unwrap())
    }

    #[test]
    fn the_worst_element_is_named() {
        let found = deviation([1.0, 2.0, 3.0, 4.0], [1.25, 2.0, 5.0, 4.75], DType::F32);
        assert_eq!((found.worst_abs, found.worst_ratio, found.count_outside), (2.0, 4.0, 2));
        assert_eq!(found.at, [0, 1, 0, 0, 0]);
        assert_eq!((found.got, found.expected, found.bound), (5.0, 3.0, 0.5));
        assert!(found.to_string().starts_with("worst at [0, 1, 0, 0, 0]: got 5e0, expected 3e0"));
    }

    #[test]
    fn nan_and_inf_must_be_the_same() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let (nan32, inf32) = (f32::NAN, f32::INFINITY);
        assert!(deviation([nan, inf, -inf, 0.0], [nan32, inf32, -inf32, 0.0], DType::F32).is_ok());
        for (expected, got) in
            [(nan, 0.0), (nan, inf32), (inf, 1e9), (inf, -inf32), (inf, nan32), (0.0, nan32), (0.0, inf32)]
        {
            let found = deviation([expected, 0.0, 0.0, 0.0], [got, 0.0, 0.0, 0.0], DType::F32);
            assert_eq!((found.count_outside, found.worst_ratio), (1, f64::INFINITY), "{expected} {got}");
            assert_eq!(found.at, [0, 0, 0, 0, 0]);
        }
    }

    #[test]
    fn only_an_overflow_may_become_inf() {
        let inf = f32::INFINITY;
        assert!(deviation([7e4, -7e4, 65504.0, 0.0], [inf, -inf, inf, 0.0], DType::F16).is_ok());
        assert_eq!(deviation([7e4, 6e4, 0.0, 0.0], [-inf, inf, 0.0, 0.0], DType::F16).count_outside, 2);
        assert_eq!(deviation([7e4, 0.0, 0.0, 0.0], [inf, 0.0, 0.0, 0.0], DType::F32).count_outside, 1);
    }

    #[test]
    fn nothing_deviates_from_nothing() {
        let got = Tensor::new(&[0, 1, 1, 1, 1], Vec::<f32>::new()).unwrap();
        let found = compare(&Expected { values: vec![], bounds: vec![] }, &got);
        assert!(found.is_ok() && found.at.is_empty());
        assert_eq!(found.to_string(), "no deviation");
    }
}

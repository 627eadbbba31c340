//! Deterministic tensors.

use crate::{DType, Data, Element, MemoryFormat, Tensor, with_element};

/// What a test tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fill {
    /// Close to standard normal, at most 3.5 in magnitude.
    Normal,
    /// Whole numbers from -4 to 4. Every type holds them and their products exactly, and every sum
    /// of up to 2^20 products is exact in single precision in any order, so a convolution of them
    /// has one right answer.
    Integer,
}

impl Fill {
    /// Both.
    pub const ALL: [Fill; 2] = [Fill::Normal, Fill::Integer];

    /// Turns 64 random bits into a value.
    fn value(self, bits: u64) -> f64 {
        match self {
            // Four uniform numbers of 16 bits, added up: variance 4/12, brought to 1.
            Fill::Normal => {
                let sum: u64 = (0..4).map(|part| (bits >> (16 * part)) & 0xffff).sum();
                (sum as f64 / 65536.0 - 2.0) * 3f64.sqrt()
            }
            Fill::Integer => (bits % 9) as f64 - 4.0,
        }
    }
}

/// The `index`-th output of the SplitMix64 generator of a seed (Steele, Lea and Flood, 2014).
pub fn split_mix(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A tensor of random values times `scale`, rounded to its type. A seed gives the same values in
/// every memory format.
///
/// # Panics
/// If there can be no tensor of that shape and format.
pub fn tensor(
    shape: &[usize],
    dtype: DType,
    format: MemoryFormat,
    fill: Fill,
    scale: f64,
    seed: u64,
) -> Tensor {
    let data = with_element!(dtype, T => data::<T>(shape, format, |index| {
        scale * fill.value(split_mix(seed, index))
    }));
    Tensor::with_format(shape, format, data).expect("a valid shape and format")
}

/// The values of a function of the contiguous index, in memory order.
fn data<T: Element>(shape: &[usize], format: MemoryFormat, value: impl Fn(u64) -> f64) -> Data {
    let count = shape.iter().product();
    let (channels, voxels) = match (format, shape) {
        (MemoryFormat::ChannelsLast3d, &[_, c, d, h, w]) => (c, d * h * w),
        _ => (1, count),
    };
    let mut values = Vec::with_capacity(count);
    for sample in 0..count / (channels * voxels).max(1) {
        for voxel in 0..voxels {
            for channel in 0..channels {
                let index = (sample * channels + channel) * voxels + voxel;
                values.push(T::from_f64(value(index as u64)));
            }
        }
    }
    T::into_data(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_and_types_hold_the_same_values() {
        let shape = [2, 3, 2, 1, 4];
        for fill in Fill::ALL {
            let make = |dtype, format| tensor(&shape, dtype, format, fill, 0.5, 7);
            let contiguous = make(DType::F16, MemoryFormat::Contiguous);
            let last = make(DType::F16, MemoryFormat::ChannelsLast3d);
            assert_eq!(contiguous.to_f64(), last.to_f64());
            assert_ne!(contiguous.data(), last.data());
            let rounded = make(DType::F64, MemoryFormat::Contiguous);
            assert_eq!(rounded.cast(DType::F16, MemoryFormat::Contiguous).unwrap(), contiguous);
        }
    }

    #[test]
    fn normal_values_have_mean_0_and_variance_1() {
        let values = tensor(&[1 << 16], DType::F64, MemoryFormat::Contiguous, Fill::Normal, 1.0, 1).to_f64();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let square = values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.02 && (square - 1.0).abs() < 0.02, "{mean} {square}");
    }

    #[test]
    fn integers_take_all_values_from_minus_4_to_4() {
        let values = tensor(&[1000], DType::Bf16, MemoryFormat::Contiguous, Fill::Integer, 1.0, 1).to_f64();
        for integer in -4..=4 {
            assert!(values.contains(&f64::from(integer)));
        }
        assert!(values.iter().all(|x| x.fract() == 0.0 && x.abs() <= 4.0));
    }

    #[test]
    fn the_generator_is_split_mix() {
        // The published first output of SplitMix64 from state 0.
        assert_eq!(split_mix(0, 0), 0xe220_a839_7b1d_cdaf);
    }
}

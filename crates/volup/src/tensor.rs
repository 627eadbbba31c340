//! Element types, memory formats and the owned host [`Tensor`].

use crate::{Error, Result};
use half::{bf16, f16};
use std::fmt;

/// The element types of every engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE double precision; sums in double precision too.
    F64,
    /// IEEE single precision.
    F32,
    /// IEEE half precision; sums and statistics in single precision.
    F16,
    /// The upper half of single precision; sums and statistics in single precision.
    Bf16,
}

impl DType {
    /// All four types.
    pub const ALL: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }

    /// The unit roundoff of a stored value: half the distance from 1 to the next number.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            DType::F64 => f64::EPSILON / 2.0,
            DType::F32 => f64::from(f32::EPSILON) / 2.0,
            DType::F16 => f64::from(f16::EPSILON) / 2.0,
            DType::Bf16 => f64::from(bf16::EPSILON) / 2.0,
        }
    }

    /// The type in which sums and statistics are kept.
    pub fn accumulator(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F64 => "float64",
            DType::F32 => "float32",
            DType::F16 => "float16",
            DType::Bf16 => "bfloat16",
        })
    }
}

impl std::str::FromStr for DType {
    type Err = Error;

    fn from_str(name: &str) -> Result<DType> {
        match name {
            "float64" | "f64" => Ok(DType::F64),
            "float32" | "f32" => Ok(DType::F32),
            "float16" | "f16" => Ok(DType::F16),
            "bfloat16" | "bf16" => Ok(DType::Bf16),
            _ => Err(Error::UnknownName {
                param: "dtype",
                got: name.into(),
                expected: "float32 (f32), float64 (f64), float16 (f16), bfloat16 (bf16)",
            }),
        }
    }
}

/// How the five dimensions [N, C, D, H, W] lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MemoryFormat {
    /// NCDHW, width fastest: PyTorch's `contiguous_format`.
    #[default]
    Contiguous,
    /// NDHWC, channels fastest: PyTorch's `channels_last_3d`.
    ChannelsLast3d,
}

impl fmt::Display for MemoryFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryFormat::Contiguous => "contiguous",
            MemoryFormat::ChannelsLast3d => "channels_last_3d",
        })
    }
}

/// A type that tensors are made of.
pub trait Element: Copy + Default + Send + Sync + fmt::Debug + bytemuck::Pod {
    /// The type in which sums and statistics of this type are kept: `f64` for `f64`, else `f32`.
    type Acc: Element<Acc = Self::Acc>;
    /// The type's name at run time.
    const DTYPE: DType;
    /// Widens to the accumulator, exactly.
    fn to_acc(self) -> Self::Acc;
    /// Rounds an accumulator to the nearest value of this type, ties to even.
    fn from_acc(acc: Self::Acc) -> Self;
    /// Widens to double precision, exactly.
    fn to_f64(self) -> f64;
    /// Rounds to the nearest value of this type, ties to even.
    fn from_f64(value: f64) -> Self;
    /// Wraps a vector of this type.
    fn into_data(values: Vec<Self>) -> Data;
    /// The vector inside, if it is of this type.
    fn of_data(data: &Data) -> Option<&[Self]>;
}

macro_rules! element {
    ($type:ty, $acc:ty, $variant:ident, $to_acc:expr, $from_acc:expr, $to_f64:expr, $from_f64:expr) => {
        impl Element for $type {
            type Acc = $acc;
            const DTYPE: DType = DType::$variant;
            #[inline(always)]
            fn to_acc(self) -> $acc {
                $to_acc(self)
            }
            #[inline(always)]
            fn from_acc(acc: $acc) -> Self {
                $from_acc(acc)
            }
            fn to_f64(self) -> f64 {
                $to_f64(self)
            }
            fn from_f64(value: f64) -> Self {
                $from_f64(value)
            }
            fn into_data(values: Vec<Self>) -> Data {
                Data::$variant(values)
            }
            fn of_data(data: &Data) -> Option<&[Self]> {
                match data {
                    Data::$variant(values) => Some(values),
                    _ => None,
                }
            }
        }
    };
}

element!(f64, f64, F64, |x| x, |x| x, |x| x, |x| x);
element!(f32, f32, F32, |x| x, |x| x, f64::from, |x| x as f32);
element!(f16, f32, F16, f16::to_f32, f16::from_f32, f16::to_f64, f16::from_f64);
element!(bf16, f32, Bf16, bf16::to_f32, bf16::from_f32, bf16::to_f64, bf16::from_f64);

/// Runs an expression with `$t` bound to the Rust type of a [`DType`].
#[macro_export]
macro_rules! with_element {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F64 => {
                type $t = f64;
                $body
            }
            $crate::DType::F32 => {
                type $t = f32;
                $body
            }
            $crate::DType::F16 => {
                type $t = $crate::f16;
                $body
            }
            $crate::DType::Bf16 => {
                type $t = $crate::bf16;
                $body
            }
        }
    };
}

/// The elements of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Double precision.
    F64(Vec<f64>),
    /// Single precision.
    F32(Vec<f32>),
    /// Half precision.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

impl Data {
    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Data::F64(v) => v.len(),
            Data::F32(v) => v.len(),
            Data::F16(v) => v.len(),
            Data::Bf16(v) => v.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as they lie in memory.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Data::F64(v) => bytemuck::cast_slice(v),
            Data::F32(v) => bytemuck::cast_slice(v),
            Data::F16(v) => bytemuck::cast_slice(v),
            Data::Bf16(v) => bytemuck::cast_slice(v),
        }
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        match self {
            Data::F64(_) => DType::F64,
            Data::F32(_) => DType::F32,
            Data::F16(_) => DType::F16,
            Data::Bf16(_) => DType::Bf16,
        }
    }
}

/// A dense tensor in host memory, of rank 0 to 5.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    format: MemoryFormat,
    data: Data,
}

/// The number of elements of a shape, checked.
pub(crate) fn numel(shape: &[usize]) -> Result<usize> {
    shape
        .iter()
        .try_fold(1usize, |product, &size| product.checked_mul(size))
        .filter(|&n| n <= isize::MAX as usize / 8)
        .ok_or(Error::Overflow { what: "the number of elements" })
}

impl Tensor {
    /// A contiguous tensor (last dimension fastest) of the given elements.
    ///
    /// # Errors
    /// [`Error::Length`] if the shape asks for another number of elements, [`Error::Overflow`] if
    /// that number does not fit in memory.
    pub fn new<T: Element>(shape: &[usize], data: Vec<T>) -> Result<Tensor> {
        Tensor::with_format(shape, MemoryFormat::Contiguous, T::into_data(data))
    }

    /// A tensor of the given elements in a memory format. The shape is always given as
    /// [N, C, D, H, W], whatever the format.
    ///
    /// # Errors
    /// As [`Tensor::new`]; [`Error::Rank`] for a channels-last tensor that is not of rank 5.
    pub fn with_format(shape: &[usize], format: MemoryFormat, data: Data) -> Result<Tensor> {
        let expected = numel(shape)?;
        if data.len() != expected {
            return Err(Error::Length { param: "data", got: data.len(), expected });
        }
        if format == MemoryFormat::ChannelsLast3d && shape.len() != 5 {
            return Err(Error::Rank {
                param: "a channels_last_3d tensor",
                got: shape.len(),
                expected: "5-D",
            });
        }
        Ok(Tensor { shape: shape.to_vec(), format, data })
    }

    /// The sizes, [N, C, D, H, W] for a batched volume.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// How the elements lie in memory.
    pub fn format(&self) -> MemoryFormat {
        self.format
    }

    /// The elements, in memory order.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// Gives up the elements, in memory order.
    pub fn into_data(self) -> Data {
        self.data
    }

    /// The elements' type.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// The elements, in memory order, if they are of type `T`.
    pub fn as_slice<T: Element>(&self) -> Option<&[T]> {
        T::of_data(&self.data)
    }

    /// The elements in double precision and contiguous order.
    pub fn to_f64(&self) -> Vec<f64> {
        let values: Vec<f64> = crate::with_element!(self.dtype(), T => {
            self.as_slice::<T>().unwrap_or_default().iter().map(|v| v.to_f64()).collect()
        });
        match self.format {
            MemoryFormat::Contiguous => values,
            MemoryFormat::ChannelsLast3d => {
                let [n, c, d, h, w] = [0, 1, 2, 3, 4].map(|axis| self.shape[axis]);
                permute(&values, n, d * h * w, c)
            }
        }
    }

    /// The same values with another element type and memory format, each rounded to nearest.
    ///
    /// # Errors
    /// [`Error::Rank`] for channels-last and a rank other than 5.
    pub fn cast(&self, dtype: DType, format: MemoryFormat) -> Result<Tensor> {
        let mut values = self.to_f64();
        if format == MemoryFormat::ChannelsLast3d && self.shape.len() == 5 {
            let voxels = self.shape[2] * self.shape[3] * self.shape[4];
            values = permute(&values, self.shape[0], self.shape[1], voxels);
        }
        let data =
            crate::with_element!(dtype, T => T::into_data(values.iter().map(|&v| T::from_f64(v)).collect()));
        Tensor::with_format(&self.shape, format, data)
    }

    /// The same elements under another shape of as many elements, contiguous tensors only.
    ///
    /// # Errors
    /// [`Error::Length`] if the number of elements differs, [`Error::Rank`] if the tensor is
    /// channels-last and the new rank is not 5.
    pub fn reshape(self, shape: &[usize]) -> Result<Tensor> {
        Tensor::with_format(shape, self.format, self.data)
    }
}

/// Swaps the two inner dimensions of [outer, rows, cols].
fn permute(values: &[f64], outer: usize, rows: usize, cols: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(values.len());
    for block in 0..outer {
        let block = &values[block * rows * cols..][..rows * cols];
        for col in 0..cols {
            out.extend((0..rows).map(|row| block[row * cols + col]));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_is_checked() {
        let error = Tensor::new(&[2, 3], vec![0f32; 5]).unwrap_err();
        assert!(matches!(error, Error::Length { got: 5, expected: 6, .. }));
    }

    #[test]
    fn huge_shapes_overflow_cleanly() {
        let error = Tensor::new(&[usize::MAX, 2], vec![0f32; 1]).unwrap_err();
        assert!(matches!(error, Error::Overflow { .. }));
    }

    #[test]
    fn channels_last_needs_five_dimensions() {
        let error =
            Tensor::with_format(&[2], MemoryFormat::ChannelsLast3d, Data::F32(vec![0.0; 2])).unwrap_err();
        assert!(matches!(error, Error::Rank { got: 1, .. }));
    }

    #[test]
    fn cast_keeps_values_across_formats() {
        let values: Vec<f32> = (0..2 * 3 * 4).map(|v| v as f32).collect();
        let tensor = Tensor::new(&[2, 3, 1, 2, 2], values).unwrap();
        let last = tensor.cast(DType::Bf16, MemoryFormat::ChannelsLast3d).unwrap();
        assert_eq!(last.to_f64(), tensor.to_f64());
        assert_ne!(
            format!("{:?}", last.data()),
            format!("{:?}", tensor.cast(DType::Bf16, MemoryFormat::Contiguous).unwrap().data())
        );
    }
}

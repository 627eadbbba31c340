//! NIfTI-1 and NIfTI-2, single files, in either byte order.
//!
//! The first dimension (x) is fastest, so the numbers of [x, y, z, t] are those of [t, z, y, x] in C
//! order: t becomes the channels, z the depth, y the height, x the width. A header is kept as the
//! bytes that were read; the output's differs only where it must.

use super::raw::{Encoding, Limits, Number, checked_count, decode, encode, read_header};
use anyhow::{Result, bail, ensure};
use std::io::{Read, Write};
use volup::{DType, Tensor};

/// Where the fields of a version lie.
struct Fields {
    size: usize,
    /// Bytes of a number of `dim`.
    dim_size: usize,
    dim: usize,
    datatype: usize,
    bitpix: usize,
    /// Bytes of a float of `pixdim`, `scl_slope`, the quaternion and the rows.
    float_size: usize,
    pixdim: usize,
    vox_offset: usize,
    /// `scl_slope`, then `scl_inter`.
    scl_slope: usize,
    /// Bytes that say how slices were acquired, which the output's slices were not.
    slices: &'static [(usize, usize)],
    sform_code: usize,
    quaternion: usize,
    qoffset: usize,
    srow: usize,
    magic: usize,
}

const NIFTI1: Fields = Fields {
    size: 348,
    dim_size: 2,
    dim: 40,
    datatype: 70,
    bitpix: 72,
    float_size: 4,
    pixdim: 76,
    vox_offset: 108,
    scl_slope: 112,
    // slice_start; slice_end, slice_code; slice_duration.
    slices: &[(74, 2), (120, 3), (132, 4)],
    sform_code: 254,
    quaternion: 256,
    qoffset: 268,
    srow: 280,
    magic: 344,
};

const NIFTI2: Fields = Fields {
    size: 540,
    dim_size: 8,
    dim: 16,
    datatype: 12,
    bitpix: 14,
    float_size: 8,
    pixdim: 104,
    vox_offset: 168,
    scl_slope: 176,
    // slice_duration; slice_start, slice_end; slice_code.
    slices: &[(208, 8), (224, 16), (496, 4)],
    sform_code: 348,
    quaternion: 352,
    qoffset: 376,
    srow: 400,
    magic: 4,
};

/// The header of a volume, as its bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    bytes: Vec<u8>,
    big_endian: bool,
}

impl Header {
    /// The header of a volume of unknown place: voxels of 1 mm, the first one's centre at zero.
    pub fn new() -> Header {
        let mut header = Header { bytes: vec![0; NIFTI1.size], big_endian: false };
        header.put(0, &348i32.to_le_bytes());
        header.put(NIFTI1.magic, b"n+1\0");
        for axis in 0..8 {
            header.set_float(NIFTI1.pixdim, axis, 1.0);
        }
        for axis in 0..3 {
            header.set_float(NIFTI1.srow, 5 * axis, 1.0);
        }
        // The units are millimetres; the place is that of some scanner.
        header.put(123, &[2]);
        header.set_integer(NIFTI1.sform_code, 2, 1);
        header
    }

    fn fields(&self) -> &'static Fields {
        if self.bytes.len() == NIFTI1.size { &NIFTI1 } else { &NIFTI2 }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// A signed integer of `size` bytes.
    fn integer(&self, at: usize, size: usize) -> i64 {
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(&self.bytes[at..at + size]);
        if self.big_endian {
            bytes[..size].reverse();
        }
        let unused = 64 - 8 * size;
        i64::from_le_bytes(bytes) << unused >> unused
    }

    fn set_integer(&mut self, at: usize, size: usize, value: i64) {
        let mut bytes = value.to_le_bytes();
        if self.big_endian {
            bytes[..size].reverse();
        }
        self.put(at, &bytes[..size]);
    }

    /// The `index`th float of the array at `at`.
    fn float(&self, at: usize, index: usize) -> f64 {
        let size = self.fields().float_size;
        let bits = self.integer(at + index * size, size);
        if size == 4 { f64::from(f32::from_bits(bits as u32)) } else { f64::from_bits(bits as u64) }
    }

    fn set_float(&mut self, at: usize, index: usize, value: f64) {
        let size = self.fields().float_size;
        let bits = if size == 4 { i64::from((value as f32).to_bits()) } else { value.to_bits() as i64 };
        self.set_integer(at + index * size, size, bits);
    }

    /// Sizes [x, y, z, t, ...] as the header has them, checked.
    fn dims(&self) -> Result<Vec<u64>> {
        let Fields { dim, dim_size, .. } = *self.fields();
        let rank = self.integer(dim, dim_size);
        ensure!((1..=7).contains(&rank), "dim[0] must be 1 to 7, got {rank}");
        let size = |axis: i64| {
            let size = self.integer(dim + axis as usize * dim_size, dim_size);
            ensure!(size > 0, "dim[{axis}] must be positive, got {size}");
            Ok(size as u64)
        };
        (1..=rank).map(size).collect()
    }

    fn encoding(&self) -> Result<Encoding> {
        let fields = self.fields();
        let number = match self.integer(fields.datatype, 2) {
            2 => Number::U8,
            4 => Number::I16,
            8 => Number::I32,
            16 => Number::F32,
            64 => Number::F64,
            256 => Number::I8,
            512 => Number::U16,
            768 => Number::U32,
            1024 => Number::I64,
            1280 => Number::U64,
            other => bail!("datatype {other} is not read; integers and floats of up to 64 bits are"),
        };
        let (slope, intercept) = (self.float(fields.scl_slope, 0), self.float(fields.scl_slope, 1));
        // A slope of zero says that there is no scaling.
        let scaled = slope != 0.0 && slope.is_finite() && intercept.is_finite();
        let (slope, intercept) = if scaled { (slope, intercept) } else { (1.0, 0.0) };
        Ok(Encoding { number, big_endian: self.big_endian, slope, intercept })
    }

    /// Makes this the header of a volume [C, D, H, W] of the same extent in space, given the sizes
    /// [D, H, W] that it has the place of.
    pub fn resize(&mut self, old: [usize; 3], shape: [usize; 4], keep_4d: bool, dtype: DType) -> Result<()> {
        let fields = self.fields();
        let [c, d, h, w] = shape;
        let rank = if c > 1 || keep_4d { 4 } else { 3 };
        let most = if fields.dim_size == 2 { i64::from(i16::MAX) } else { i64::MAX };
        for (axis, size) in [rank, w, h, d, c, 1, 1, 1].into_iter().enumerate() {
            ensure!(size as i64 <= most, "NIfTI-1 holds at most {most} voxels along an axis, not {size}");
            self.set_integer(fields.dim + axis * fields.dim_size, fields.dim_size, size as i64);
        }
        let (datatype, bits) = if dtype == DType::F64 { (64, 64) } else { (16, 32) };
        self.set_integer(fields.datatype, 2, datatype);
        self.set_integer(fields.bitpix, 2, bits);
        self.set_float(fields.scl_slope, 0, 1.0);
        self.set_float(fields.scl_slope, 1, 0.0);
        for &(at, size) in fields.slices {
            self.bytes[at..at + size].fill(0);
        }
        let offset = fields.size as i64 + 4;
        if fields.float_size == 4 {
            self.set_float(fields.vox_offset, 0, offset as f64);
        } else {
            self.set_integer(fields.vox_offset, 8, offset);
        }
        // x is the width. A new voxel is 1/scale old ones wide, and the first one's centre lies
        // (1/scale - 1)/2 old voxels from the old first one's.
        let ratio = [old[2] as f64 / w as f64, old[1] as f64 / h as f64, old[0] as f64 / d as f64];
        let shift = ratio.map(|ratio| (ratio - 1.0) / 2.0);
        let pixdim = [1, 2, 3].map(|x| self.float(fields.pixdim, x));
        for (row, rotation) in self.rotation().into_iter().enumerate() {
            let moved: f64 = (0..3).map(|x| rotation[x] * pixdim[x] * shift[x]).sum();
            self.set_float(fields.qoffset, row, self.float(fields.qoffset, row) + moved);
            let affine = [0, 1, 2, 3].map(|x| self.float(fields.srow, 4 * row + x));
            let moved: f64 = (0..3).map(|x| affine[x] * shift[x]).sum();
            self.set_float(fields.srow, 4 * row + 3, affine[3] + moved);
            for (x, ratio) in ratio.into_iter().enumerate() {
                self.set_float(fields.srow, 4 * row + x, affine[x] * ratio);
            }
        }
        for (x, ratio) in ratio.into_iter().enumerate() {
            self.set_float(fields.pixdim, 1 + x, pixdim[x] * ratio);
        }
        Ok(())
    }

    /// The rotation that the quaternion (b, c, d) stands for, with the sign of z in pixdim[0].
    fn rotation(&self) -> [[f64; 3]; 3] {
        let fields = self.fields();
        let [b, c, d] = [0, 1, 2].map(|i| self.float(fields.quaternion, i));
        let a = (1.0 - (b * b + c * c + d * d)).max(0.0).sqrt();
        let z = if self.float(fields.pixdim, 0) < 0.0 { -1.0 } else { 1.0 };
        [
            [a * a + b * b - c * c - d * d, 2.0 * (b * c - a * d), z * 2.0 * (b * d + a * c)],
            [2.0 * (b * c + a * d), a * a + c * c - b * b - d * d, z * 2.0 * (c * d - a * b)],
            [2.0 * (b * d - a * c), 2.0 * (c * d + a * b), z * (a * a + d * d - b * b - c * c)],
        ]
    }
}

/// Reads a volume as [D, H, W], or [C, D, H, W] if it has a fourth dimension.
pub fn read(reader: &mut dyn Read, dtype: DType, limits: Limits) -> Result<(Tensor, Header)> {
    let header = read_start(reader)?;
    let fields = header.fields();
    let mut dims = header.dims()?;
    ensure!(dims.iter().skip(4).all(|&size| size == 1), "dimensions {dims:?}: at most 4 are read");
    dims.truncate(4);
    while dims.len() < 3 {
        dims.push(1);
    }
    let offset = if fields.float_size == 4 {
        header.float(fields.vox_offset, 0)
    } else {
        header.integer(fields.vox_offset, 8) as f64
    };
    // What lies between header and data are extensions, which nobody makes large.
    ensure!(
        offset >= fields.size as f64 && offset <= 1e8 && offset.fract() == 0.0,
        "vox_offset must be a whole number from {} to 1e8, got {offset}",
        fields.size
    );
    let encoding = header.encoding()?;
    let count = checked_count(&dims, encoding.number, dtype, &limits.after(offset as u64))?;
    let between = offset as u64 - fields.size as u64;
    let skipped = std::io::copy(&mut reader.take(between), &mut std::io::sink())?;
    ensure!(skipped == between, "truncated: the data was to start at byte {offset}");
    let data = decode(reader, count, encoding, dtype)?;
    dims.reverse();
    let shape: Vec<usize> = dims.iter().map(|&size| size as usize).collect();
    Ok((Tensor::with_format(&shape, volup::MemoryFormat::Contiguous, data)?, header))
}

/// Reads the header's own bytes and finds out which version and byte order they have.
fn read_start(reader: &mut dyn Read) -> Result<Header> {
    let mut bytes = vec![0; 4];
    read_header(reader, &mut bytes)?;
    let little = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let (fields, big_endian) = match (little, little.swap_bytes()) {
        (348, _) => (&NIFTI1, false),
        (_, 348) => (&NIFTI1, true),
        (540, _) => (&NIFTI2, false),
        (_, 540) => (&NIFTI2, true),
        _ => bail!("not a NIfTI file: its header's size is neither 348 nor 540"),
    };
    bytes.resize(fields.size, 0);
    read_header(reader, &mut bytes[4..])?;
    match &bytes[fields.magic..fields.magic + 4] {
        b"n+1\0" | b"n+2\0" => Ok(Header { bytes, big_endian }),
        b"ni1\0" | b"ni2\0" => bail!("a header whose data is in an .img file; only single files are read"),
        _ => bail!("not a NIfTI file: it has no n+1 or n+2"),
    }
}

/// Writes a volume under its header, without extensions.
pub fn write(writer: &mut dyn Write, header: &Header, tensor: &Tensor) -> Result<()> {
    writer.write_all(&header.bytes)?;
    writer.write_all(&[0; 4])?;
    encode(writer, tensor.data(), header.big_endian)
}

#[cfg(test)]
#[path = "nifti_tests.rs"]
mod tests;

//! Numbers as they lie in files, and the limits under which they are read.

use anyhow::{Context, Result, bail};
use std::io::{ErrorKind, Read, Write};
use volup::{DType, Data, Element, f16, with_element};

/// The number types of volume files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    F32,
    F64,
}

impl Number {
    /// Bytes of one number.
    pub fn size(self) -> usize {
        match self {
            Number::U8 | Number::I8 => 1,
            Number::U16 | Number::I16 | Number::F16 => 2,
            Number::U32 | Number::I32 | Number::F32 => 4,
            Number::U64 | Number::I64 | Number::F64 => 8,
        }
    }
}

/// How the numbers of a file are to be read: `slope * number + intercept`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Encoding {
    pub number: Number,
    pub big_endian: bool,
    pub slope: f64,
    pub intercept: f64,
}

/// How much a file may ask for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most bytes that a volume may take in memory.
    pub max_bytes: u64,
    /// The bytes at hand for the data, and whether they are compressed.
    pub at_hand: Option<(u64, Compressed)>,
}

impl Limits {
    /// The limits behind a header of so many bytes. Compressed it may take next to nothing.
    pub fn after(self, header: u64) -> Limits {
        match self.at_hand {
            Some((bytes, Compressed::No)) => {
                Limits { at_hand: Some((bytes.saturating_sub(header), Compressed::No)), ..self }
            }
            _ => self,
        }
    }
}

/// Whether bytes are compressed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Compressed {
    No,
    Deflate,
}

/// The number of elements of a shape, once it is known that they fit in memory, under the limit, and
/// in the bytes at hand. Nothing may be allocated for a file before.
pub fn checked_count(shape: &[u64], number: Number, dtype: DType, limits: &Limits) -> Result<usize> {
    let count = shape.iter().try_fold(1u128, |count, &size| count.checked_mul(size.into()));
    let size = number.size().max(dtype.size()) as u128;
    let bytes = count.and_then(|count| count.checked_mul(size));
    let count = match (count, bytes) {
        (Some(count), Some(bytes)) if bytes <= u128::from(limits.max_bytes) => count,
        (_, bytes) => {
            let takes =
                bytes.map_or("more bytes than can be counted".into(), |bytes| format!("{bytes} bytes"));
            bail!("shape {shape:?} takes {takes}, more than --max-bytes {}", limits.max_bytes);
        }
    };
    let stored = count * number.size() as u128;
    match limits.at_hand {
        Some((at_hand, Compressed::No)) if stored > at_hand.into() => {
            bail!("truncated: shape {shape:?} takes {stored} bytes, the file has {at_hand} for it")
        }
        // Deflate cannot expand more than 1032 times.
        Some((at_hand, Compressed::Deflate)) if stored > u128::from(at_hand) * 1032 => {
            bail!("shape {shape:?} takes {stored} bytes, which {at_hand} compressed bytes cannot hold")
        }
        _ => {}
    }
    usize::try_from(count).context("the shape does not fit in memory")
}

/// Reads `count` numbers, known to be in bounds, and converts them to `dtype`.
pub fn decode(reader: &mut dyn Read, count: usize, encoding: Encoding, dtype: DType) -> Result<Data> {
    with_element!(dtype, T => Ok(T::into_data(decode_as::<T>(reader, count, encoding)?)))
}

fn decode_as<T: Element>(reader: &mut dyn Read, count: usize, encoding: Encoding) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).context("not enough memory for the volume")?;
    let size = encoding.number.size();
    let mut chunk = vec![0; size * count.min(1 << 14)];
    while values.len() < count {
        let chunk = &mut chunk[..size * (count - values.len()).min(1 << 14)];
        let got = read_full(reader, chunk)?;
        if got < chunk.len() {
            let (got, expected) = (values.len() * size + got, count * size);
            bail!("truncated: {got} of {expected} bytes of data");
        }
        extend(&mut values, chunk, encoding);
    }
    Ok(values)
}

fn extend<T: Element>(values: &mut Vec<T>, bytes: &[u8], encoding: Encoding) {
    macro_rules! numbers {
        ($type:ty, $to_f64:expr) => {{
            let convert = |bytes: &[u8]| {
                // The chunks have the type's size.
                let bytes = bytes.try_into().unwrap_or_default();
                let number = if encoding.big_endian {
                    <$type>::from_be_bytes(bytes)
                } else {
                    <$type>::from_le_bytes(bytes)
                };
                let number: f64 = $to_f64(number);
                T::from_f64(number * encoding.slope + encoding.intercept)
            };
            values.extend(bytes.chunks_exact(size_of::<$type>()).map(convert));
        }};
    }
    match encoding.number {
        Number::U8 => numbers!(u8, f64::from),
        Number::I8 => numbers!(i8, f64::from),
        Number::U16 => numbers!(u16, f64::from),
        Number::I16 => numbers!(i16, f64::from),
        Number::U32 => numbers!(u32, f64::from),
        Number::I32 => numbers!(i32, f64::from),
        Number::U64 => numbers!(u64, |v| v as f64),
        Number::I64 => numbers!(i64, |v| v as f64),
        Number::F16 => numbers!(f16, f16::to_f64),
        Number::F32 => numbers!(f32, f64::from),
        Number::F64 => numbers!(f64, |v| v),
    }
}

/// Reads until the buffer is full or the end is reached; returns how much was read.
pub fn read_full(reader: &mut dyn Read, buffer: &mut [u8]) -> Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match reader.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(count) => got += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // What a decompressor says of a stream that stops short.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(got)
}

/// Reads a buffer's worth of header.
pub fn read_header(reader: &mut dyn Read, buffer: &mut [u8]) -> Result<()> {
    let got = read_full(reader, buffer)?;
    if got < buffer.len() {
        bail!("truncated: {got} of {} bytes of header", buffer.len());
    }
    Ok(())
}

/// Reads on to the end of a compressed stream, where its checksum is, unless there is much more to
/// come than anyone leaves there.
pub fn verify_end(reader: &mut dyn Read) -> Result<()> {
    let mut rest = reader.take(1 << 20);
    std::io::copy(&mut rest, &mut std::io::sink()).context("corrupt compressed data")?;
    Ok(())
}

/// Writes f32 or f64 values (others as f32) in a byte order.
pub fn encode(writer: &mut dyn Write, data: &Data, big_endian: bool) -> Result<()> {
    fn write<T, const N: usize>(
        writer: &mut dyn Write,
        values: &[T],
        bytes: impl Fn(&T) -> [u8; N],
    ) -> Result<()> {
        let mut buffer = Vec::with_capacity(N << 14);
        for chunk in values.chunks(1 << 14) {
            buffer.clear();
            buffer.extend(chunk.iter().flat_map(&bytes));
            writer.write_all(&buffer)?;
        }
        Ok(())
    }
    match (data, big_endian) {
        (Data::F64(values), false) => write(writer, values, |v| v.to_le_bytes()),
        (Data::F64(values), true) => write(writer, values, |v| v.to_be_bytes()),
        (Data::F32(values), false) => write(writer, values, |v| v.to_le_bytes()),
        (Data::F32(values), true) => write(writer, values, |v| v.to_be_bytes()),
        (Data::F16(_) | Data::Bf16(_), _) => bail!("volumes are written as float32 or float64"),
    }
}

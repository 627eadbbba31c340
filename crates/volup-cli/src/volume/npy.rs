//! NumPy's `.npy`: a header that is a Python dictionary, then the numbers.

use super::raw::{Encoding, Limits, Number, checked_count, decode, encode, read_header};
use anyhow::{Context, Result, bail, ensure};
use std::io::{Read, Write};
use volup::{DType, Data, Element, Tensor, with_element};

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// The longest header that is read; NumPy's own limit is shorter still.
const MAX_HEADER: usize = 1 << 16;

#[derive(Debug, PartialEq)]
struct Header {
    encoding: Encoding,
    fortran_order: bool,
    shape: Vec<u64>,
}

/// Reads an array. `limits.at_hand` counts from the first byte of the header on.
pub fn read(reader: &mut dyn Read, dtype: DType, limits: Limits) -> Result<Tensor> {
    let mut start = [0; 10];
    read_header(reader, &mut start)?;
    ensure!(&start[..6] == MAGIC, "not an .npy array: it does not start with \\x93NUMPY");
    let (start_length, header_length) = match start[6] {
        1 => (10, u32::from(u16::from_le_bytes([start[8], start[9]]))),
        2 | 3 => {
            let mut more = [0; 2];
            read_header(reader, &mut more)?;
            (12, u32::from_le_bytes([start[8], start[9], more[0], more[1]]))
        }
        version => bail!("version {version} of .npy is not known (1 to 3 are)"),
    };
    ensure!(header_length as usize <= MAX_HEADER, "the header is longer than {MAX_HEADER} bytes");
    let mut text = vec![0; header_length as usize];
    read_header(reader, &mut text)?;
    let header = parse(&text).context("malformed .npy header")?;
    ensure!(header.shape.len() <= 5, "an array of {} dimensions; 3 to 5 are read", header.shape.len());

    let limits = limits.after(start_length + u64::from(header_length));
    let count = checked_count(&header.shape, header.encoding.number, dtype, &limits)?;
    let data = decode(reader, count, header.encoding, dtype)?;
    let mut beyond = [0];
    ensure!(
        super::raw::read_full(reader, &mut beyond)? == 0,
        "more bytes than shape {:?} asks for",
        header.shape
    );
    let shape: Vec<usize> = header.shape.iter().map(|&size| size as usize).collect();
    with_element!(dtype, T => {
        let mut values = match T::of_data(&data) {
            Some(values) if header.fortran_order => from_fortran(values, &shape),
            _ => return tensor(&shape, data),
        };
        values.shrink_to_fit();
        Ok(Tensor::new(&shape, values)?)
    })
}

fn tensor(shape: &[usize], data: Data) -> Result<Tensor> {
    Ok(Tensor::with_format(shape, volup::MemoryFormat::Contiguous, data)?)
}

/// Numbers with the first dimension fastest, put in order with the last one fastest.
fn from_fortran<T: Element>(values: &[T], shape: &[usize]) -> Vec<T> {
    let mut strides = vec![1; shape.len()];
    for axis in 1..shape.len() {
        strides[axis] = strides[axis - 1] * shape[axis - 1];
    }
    let mut index = vec![0; shape.len()];
    let mut ordered = Vec::with_capacity(values.len());
    for _ in 0..values.len() {
        ordered.push(values[index.iter().zip(&strides).map(|(i, stride)| i * stride).sum::<usize>()]);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    ordered
}

/// Writes an array as float32 (float64 if it is that), version 1.0, C order.
pub fn write(writer: &mut dyn Write, shape: &[usize], data: &Data) -> Result<()> {
    let descr = if data.dtype() == DType::F64 { "<f8" } else { "<f4" };
    let sizes: Vec<String> = shape.iter().map(|size| size.to_string()).collect();
    // A Python tuple of one needs the comma.
    let comma = if shape.len() == 1 { "," } else { "" };
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}{comma}), }}", sizes.join(", "));
    // The data starts at a multiple of 64 bytes.
    while (10 + header.len() + 1) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    writer.write_all(MAGIC)?;
    writer.write_all(&[1, 0])?;
    writer.write_all(&(header.len() as u16).to_le_bytes())?;
    writer.write_all(header.as_bytes())?;
    encode(writer, data, false)
}

fn parse(header: &[u8]) -> Result<Header> {
    let mut rest = Literal(std::str::from_utf8(header)?);
    let (mut descr, mut fortran_order, mut shape) = (None, None, None);
    rest.expect('{')?;
    while !rest.take('}') {
        let key = rest.string()?;
        rest.expect(':')?;
        match key {
            "descr" => {
                descr = Some(encoding(rest.string().context("descr: only plain number types are read")?)?)
            }
            "fortran_order" => fortran_order = Some(rest.boolean()?),
            "shape" => shape = Some(rest.tuple()?),
            _ => bail!("unknown key {key:?}"),
        }
        if !rest.take(',') {
            rest.expect('}')?;
            break;
        }
    }
    ensure!(rest.0.trim().is_empty(), "text after the dictionary");
    Ok(Header {
        encoding: descr.context("no descr")?,
        fortran_order: fortran_order.context("no fortran_order")?,
        shape: shape.context("no shape")?,
    })
}

fn encoding(descr: &str) -> Result<Encoding> {
    let number = match descr.get(1..) {
        Some("u1" | "b1") => Number::U8,
        Some("i1") => Number::I8,
        Some("u2") => Number::U16,
        Some("i2") => Number::I16,
        Some("u4") => Number::U32,
        Some("i4") => Number::I32,
        Some("u8") => Number::U64,
        Some("i8") => Number::I64,
        Some("f2") => Number::F16,
        Some("f4") => Number::F32,
        Some("f8") => Number::F64,
        _ => bail!("dtype {descr:?} is not read; integers and floats of up to 64 bits are"),
    };
    let big_endian = match descr.as_bytes()[0] {
        b'<' | b'|' => false,
        b'>' => true,
        b'=' => cfg!(target_endian = "big"),
        _ => bail!("dtype {descr:?} has an unknown byte order"),
    };
    Ok(Encoding { number, big_endian, slope: 1.0, intercept: 0.0 })
}

/// What is left of a Python literal.
struct Literal<'a>(&'a str);

impl<'a> Literal<'a> {
    fn take(&mut self, token: char) -> bool {
        self.0 = self.0.trim_start();
        let rest = self.0.strip_prefix(token);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn expect(&mut self, token: char) -> Result<()> {
        ensure!(self.take(token), "expected {token:?} at {:?}", self.0.chars().take(20).collect::<String>());
        Ok(())
    }

    fn string(&mut self) -> Result<&'a str> {
        let quote = if self.take('"') { '"' } else { '\'' };
        if quote == '\'' {
            self.expect('\'')?;
        }
        let (text, rest) = self.0.split_once(quote).context("a string without an end")?;
        self.0 = rest;
        Ok(text)
    }

    fn boolean(&mut self) -> Result<bool> {
        self.0 = self.0.trim_start();
        for (text, value) in [("True", true), ("False", false)] {
            if let Some(rest) = self.0.strip_prefix(text) {
                self.0 = rest;
                return Ok(value);
            }
        }
        bail!("expected True or False")
    }

    fn tuple(&mut self) -> Result<Vec<u64>> {
        let mut values = Vec::new();
        self.expect('(')?;
        while !self.take(')') {
            self.0 = self.0.trim_start();
            let end = self.0.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.0.len());
            let (digits, rest) = self.0.split_at(end);
            values.push(digits.parse().with_context(|| format!("{digits:?} is not a size"))?);
            self.0 = rest;
            if !self.take(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(values)
    }
}

#[cfg(test)]
#[path = "npy_tests.rs"]
mod tests;

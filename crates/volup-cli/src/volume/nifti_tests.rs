use super::super::raw::Compressed;
use super::*;

/// A header of a version and byte order, of int16 numbers 2*v + 1, with a rotated qform and an sform.
pub fn header(fields: &'static Fields, big_endian: bool, dims: &[i64]) -> Header {
    let mut header = Header { bytes: vec![0; fields.size], big_endian };
    header.set_integer(0, 4, fields.size as i64);
    header.put(fields.magic, if fields.size == 348 { b"n+1\0" } else { b"n+2\0" });
    header.set_integer(fields.dim, fields.dim_size, dims.len() as i64);
    for (axis, &size) in dims.iter().enumerate() {
        header.set_integer(fields.dim + (axis + 1) * fields.dim_size, fields.dim_size, size);
    }
    header.set_integer(fields.datatype, 2, 4);
    for (x, size) in [-1.0, 2.0, 3.0, 4.0].into_iter().enumerate() {
        header.set_float(fields.pixdim, x, size);
    }
    let offset = fields.size as i64 + 4;
    if fields.size == 348 {
        header.set_float(fields.vox_offset, 0, offset as f64);
    } else {
        header.set_integer(fields.vox_offset, 8, offset);
    }
    header.set_float(fields.scl_slope, 0, 2.0);
    header.set_float(fields.scl_slope, 1, 1.0);
    // A quarter turn about z: x becomes y, y becomes -x. The sign of pixdim[0] turns z around.
    for (i, value) in [0.0, 0.0, 0.5f64.sqrt(), 10.0, 20.0, 30.0].into_iter().enumerate() {
        header.set_float(fields.quaternion, i, value);
    }
    let rows = [0.0, -3.0, 0.0, 10.0, 2.0, 0.0, 0.0, 20.0, 0.0, 0.0, -4.0, 30.0];
    for (i, value) in rows.into_iter().enumerate() {
        header.set_float(fields.srow, i, value);
    }
    header
}

fn file(header: &Header, numbers: impl Iterator<Item = i16>) -> Vec<u8> {
    let mut bytes = header.bytes.clone();
    bytes.extend([0; 4]);
    for number in numbers {
        bytes.extend(if header.big_endian { number.to_be_bytes() } else { number.to_le_bytes() });
    }
    bytes
}

fn read_bytes(bytes: &[u8]) -> Result<(Tensor, Header)> {
    let limits = Limits { max_bytes: 1 << 20, at_hand: Some((bytes.len() as u64, Compressed::No)) };
    read(&mut &bytes[..], DType::F64, limits)
}

fn error(header: &Header) -> String {
    format!("{:#}", read_bytes(&file(header, 0..24)).unwrap_err())
}

/// Where the centre of a voxel lies, by the quaternion and by the rows.
fn places(header: &Header, voxel: [f64; 3]) -> [[f64; 3]; 2] {
    let fields = header.fields();
    let rotation = header.rotation();
    let quaternion = [0, 1, 2].map(|row| {
        let along = |x: usize| rotation[row][x] * header.float(fields.pixdim, x + 1) * voxel[x];
        (0..3).map(along).sum::<f64>() + header.float(fields.qoffset, row)
    });
    let rows = [0, 1, 2].map(|row| {
        let along = |x: usize| header.float(fields.srow, 4 * row + x) * voxel[x];
        (0..3).map(along).sum::<f64>() + header.float(fields.srow, 4 * row + 3)
    });
    [quaternion, rows]
}

fn close(a: [f64; 3], b: [f64; 3]) -> bool {
    a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5)
}

const ALL: [(&Fields, bool); 4] = [(&NIFTI1, false), (&NIFTI1, true), (&NIFTI2, false), (&NIFTI2, true)];

#[test]
fn both_versions_and_byte_orders_are_read() {
    for (fields, big_endian) in ALL {
        let given = header(fields, big_endian, &[2, 3, 4]);
        let (tensor, read) = read_bytes(&file(&given, -3..21)).unwrap();
        // x, the first dimension, is the width.
        assert_eq!(tensor.shape(), [4, 3, 2]);
        assert_eq!(tensor.to_f64(), (-3..21).map(|v| f64::from(2 * v + 1)).collect::<Vec<_>>());
        assert_eq!(read, given);
    }
}

#[test]
fn dimensions_are_those_of_a_volume() {
    for (dims, shape) in [
        (&[2, 3, 4, 1][..], &[1, 4, 3, 2][..]),
        (&[2, 3, 2, 2], &[2, 2, 3, 2]),
        (&[4, 6], &[1, 6, 4]),
        (&[2, 3, 4, 1, 1, 1, 1], &[1, 4, 3, 2]),
    ] {
        let (tensor, _) = read_bytes(&file(&header(&NIFTI1, false, dims), 0..24)).unwrap();
        assert_eq!(tensor.shape(), shape);
    }
    for dims in [&[2, 3, 2, 1, 2][..], &[], &[2, 0, 2], &[2, -3, 2]] {
        assert!(read_bytes(&file(&header(&NIFTI1, false, dims), 0..24)).is_err(), "{dims:?}");
    }
}

#[test]
fn a_slope_of_zero_or_nan_is_none() {
    for (slope, expected) in [(0.0, 5.0), (f64::NAN, 5.0), (f64::INFINITY, 5.0), (3.0, 16.0)] {
        let mut header = header(&NIFTI1, false, &[1, 1, 1]);
        header.set_float(NIFTI1.scl_slope, 0, slope);
        assert_eq!(read_bytes(&file(&header, 5..6)).unwrap().0.to_f64(), [expected]);
    }
}

#[test]
fn the_output_fills_the_same_space() {
    for (fields, big_endian) in ALL {
        let old = header(fields, big_endian, &[4, 6, 8]);
        let mut new = old.clone();
        new.resize([8, 6, 4], [1, 16, 18, 4], false, DType::F32).unwrap();
        assert_eq!(new.dims().unwrap(), [4, 18, 16]);
        assert_eq!(
            new.encoding().unwrap(),
            Encoding { number: Number::F32, big_endian, slope: 1.0, intercept: 0.0 }
        );
        assert_eq!([1, 2, 3].map(|x| new.float(fields.pixdim, x)), [2.0, 1.0, 2.0]);
        // The corners of the volume are half a voxel outside of the first and last centres.
        for corner in 0..8 {
            let at =
                |sizes: [f64; 3]| [0, 1, 2].map(|x| if corner >> x & 1 == 1 { sizes[x] - 0.5 } else { -0.5 });
            let [old_q, old_s] = places(&old, at([4.0, 6.0, 8.0]));
            let [new_q, new_s] = places(&new, at([4.0, 18.0, 16.0]));
            assert!(close(old_q, new_q) && close(old_s, new_s) && close(old_q, old_s));
        }
    }
}

#[test]
fn what_is_written_is_read() {
    for (fields, big_endian) in ALL {
        let mut header = header(fields, big_endian, &[1, 1, 1]);
        header.resize([1; 3], [2, 2, 1, 3], false, DType::F64).unwrap();
        let tensor = Tensor::new(&[2, 2, 1, 3], (0..12).map(f64::from).collect()).unwrap();
        let mut bytes = Vec::new();
        write(&mut bytes, &header, &tensor).unwrap();
        assert_eq!(read_bytes(&bytes).unwrap(), (tensor, header));
    }
}

#[test]
fn hostile_headers_are_refused() {
    let with = |change: &dyn Fn(&mut Header)| {
        let mut header = header(&NIFTI1, false, &[2, 3, 4]);
        change(&mut header);
        error(&header)
    };
    assert!(with(&|h| h.put(NIFTI1.dim + 2, &[0xff, 0x7f, 0xff, 0x7f, 0xff, 0x7f])).contains("--max-bytes"));
    assert!(with(&|h| h.set_integer(NIFTI1.dim + 2, 2, 3)).contains("truncated"));
    assert!(with(&|h| h.set_integer(NIFTI1.dim, 2, 9)).contains("dim[0]"));
    assert!(with(&|h| h.set_integer(NIFTI1.datatype, 2, 128)).contains("datatype 128"));
    for offset in [0.0, -1.0, 352.5, 1e30, f64::NAN, f64::INFINITY] {
        assert!(with(&|h| h.set_float(NIFTI1.vox_offset, 0, offset)).contains("vox_offset"), "{offset}");
    }
    assert!(with(&|h| h.set_float(NIFTI1.vox_offset, 0, 1e6)).contains("truncated"));
    assert!(with(&|h| h.put(NIFTI1.magic, b"ni1\0")).contains(".img"));
    assert!(with(&|h| h.put(NIFTI1.magic, b"xxxx")).contains("not a NIfTI"));
    assert!(with(&|h| h.set_integer(0, 4, 349)).contains("not a NIfTI"));
    let mut huge = header(&NIFTI2, false, &[i64::MAX, i64::MAX, i64::MAX, i64::MAX]);
    assert!(error(&huge).contains("more bytes than can be counted"));
    huge.set_integer(NIFTI2.vox_offset, 8, i64::MIN);
    assert!(error(&huge).contains("vox_offset"));
}

#[test]
fn a_size_past_the_versions_is_refused() {
    let mut header = Header::new();
    assert!(header.resize([1; 3], [1, 1, 1, 40_000], false, DType::F32).is_err());
    assert!(header.resize([1; 3], [1, 1, 1, 30_000], false, DType::F32).is_ok());
}

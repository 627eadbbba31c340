use super::super::raw::Compressed;
use super::*;

fn array(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

fn read_bytes(bytes: &[u8]) -> Result<Tensor> {
    let limits = Limits { max_bytes: 1 << 20, at_hand: Some((bytes.len() as u64, Compressed::No)) };
    read(&mut &bytes[..], DType::F64, limits)
}

fn error(bytes: &[u8]) -> String {
    format!("{:#}", read_bytes(bytes).unwrap_err())
}

fn header(descr: &str, order: &str, shape: &str) -> String {
    format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n")
}

#[test]
fn numbers_of_all_types_and_byte_orders_are_read() {
    fn check<const N: usize>(descr: &str, numbers: [[u8; N]; 2], expected: [f64; 2]) {
        for (order, bytes) in [('<', numbers), ('>', numbers.map(|mut bytes| (bytes.reverse(), bytes).1))] {
            let text = header(&format!("{order}{descr}"), "False", "(1, 1, 2)");
            let tensor = read_bytes(&array(&text, &bytes.concat())).unwrap();
            assert_eq!((tensor.to_f64(), tensor.shape()), (expected.to_vec(), &[1, 1, 2][..]), "{descr}");
        }
    }
    check("u1", [3u8, 255].map(u8::to_le_bytes), [3.0, 255.0]);
    check("b1", [1u8, 0].map(u8::to_le_bytes), [1.0, 0.0]);
    check("i1", [3i8, -128].map(i8::to_le_bytes), [3.0, -128.0]);
    check("u2", [3u16, 65535].map(u16::to_le_bytes), [3.0, 65535.0]);
    check("i2", [3i16, -300].map(i16::to_le_bytes), [3.0, -300.0]);
    check("u4", [3u32, 1 << 31].map(u32::to_le_bytes), [3.0, 2147483648.0]);
    check("i4", [3i32, -70000].map(i32::to_le_bytes), [3.0, -70000.0]);
    check("u8", [3u64, 1 << 63].map(u64::to_le_bytes), [3.0, 2f64.powi(63)]);
    check("i8", [3i64, -1 << 40].map(i64::to_le_bytes), [3.0, -(2f64.powi(40))]);
    check("f2", [3.0, -0.5].map(|v| volup::f16::from_f64(v).to_le_bytes()), [3.0, -0.5]);
    check("f4", [3f32, -0.25].map(f32::to_le_bytes), [3.0, -0.25]);
    check("f8", [3f64, -0.125].map(f64::to_le_bytes), [3.0, -0.125]);
}

#[test]
fn fortran_order_is_turned_around() {
    let data: Vec<u8> = (0..24).collect();
    let tensor = read_bytes(&array(&header("|u1", "True", "(2, 3, 4)"), &data)).unwrap();
    let expected: Vec<f64> = (0..24).map(|i| (i / 12 + i / 4 % 3 * 2 + i % 4 * 6) as f64).collect();
    assert_eq!(tensor.to_f64(), expected);
}

#[test]
fn what_is_written_is_read() {
    for shape in [&[2, 1, 3][..], &[5], &[], &[0, 2, 1, 1, 1]] {
        let values: Vec<f64> = (0..shape.iter().product::<usize>()).map(|i| i as f64 / 3.0).collect();
        for data in [Data::F64(values.clone()), Data::F32(values.iter().map(|&v| v as f32).collect())] {
            let mut bytes = Vec::new();
            write(&mut bytes, shape, &data).unwrap();
            assert_eq!((bytes.len() - data.len() * data.dtype().size()) % 64, 0);
            let limits = Limits { max_bytes: 1000, at_hand: None };
            let tensor = read(&mut &bytes[..], data.dtype(), limits).unwrap();
            assert_eq!((tensor.shape(), tensor.data()), (shape, &data));
        }
    }
}

#[test]
fn all_versions_and_spellings_are_read() {
    let text = "{\"shape\":(1,1,2,),\"fortran_order\":False,\"descr\":\"=f4\"}   \n";
    let mut bytes = array(text, &[0; 8]);
    assert!(read_bytes(&bytes).is_ok());
    bytes.splice(6..10, [2, 0, text.len() as u8, 0, 0, 0]);
    assert!(read_bytes(&bytes).is_ok());
    bytes[6] = 3;
    assert!(read_bytes(&bytes).is_ok());
    bytes[6] = 4;
    assert!(error(&bytes).contains("version 4"));
}

#[test]
fn hostile_headers_are_refused() {
    let of = |text: &str| error(&array(text, &[0; 8]));
    let most = u64::MAX;
    for (shape, expected) in [
        (format!("({most}, {most}, {most})"), "more bytes than can be counted"),
        (format!("({most},)"), "--max-bytes"),
        ("(1024, 1024, 1024)".into(), "--max-bytes"),
        ("(3, 1, 1)".into(), "truncated"),
        ("(1, 1, 1)".into(), "more bytes than"),
        ("(1, 1, 1, 1, 1, 2)".into(), "6 dimensions"),
        ("(99999999999999999999999,)".into(), "is not a size"),
        ("(-1, 2)".into(), "is not a size"),
        ("(1, 2".into(), "is not a size"),
        ("None".into(), "expected '('"),
    ] {
        let message = of(&header("<f4", "False", &shape));
        assert!(message.contains(expected), "{shape}: {message}");
    }
    for descr in ["<c8", "|O", "<f16", "", "<", "\u{e9}f4", "?f4", "|S3", "<U1"] {
        assert!(of(&header(descr, "False", "(1, 1, 2)")).contains("malformed"), "{descr}");
    }
    for text in ["", "{", "{}", "[]", "{'descr': [('a', '<f4')], }", "{'descr': '<f4'", "{'x': 1}", "{'descr"]
    {
        assert!(of(text).contains("malformed"), "{text}");
    }
    assert!(
        of("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 2)} import os").contains("malformed")
    );
    assert!(error(b"PK\x03\x04 is a zip archive").contains("not an .npy"));
    assert!(error(b"\x93NUMPY\x02\x00\xff\xff\xff\xff").contains("longer than"));
}

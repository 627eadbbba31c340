use super::*;
use crate::MemoryFormat;
use serde_json::{Value, json};

fn tensor(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    Tensor::new(shape, (0..count).map(|i| i as f32 * 0.25 - 1.0).collect()).unwrap()
}

/// Two blocks with all that a block can have: 2 -> 4 channels with a skip from 2 to 2.
fn decoder() -> Decoder {
    let conv = ConvSpec::builder(2, 4, [3, 1, 2]).stride(2).padding([1, 0, 0]).output_padding([1, 1, 0]);
    let conv = conv.groups(2).bias(true).build().unwrap();
    let norm = NormSpec::new(2, 1e-5, true).unwrap();
    let spec =
        BlockSpec::new(conv, Some(Activation::leaky_relu(0.2).unwrap()), Some(norm), Some(Activation::Gelu));
    let first = DecoderBlock {
        name: "blocks.0".into(),
        spec: spec.unwrap(),
        parameters: Parameters {
            weight: tensor(&conv.weight_shape()),
            bias: Some(tensor(&[4])),
            norm_weight: Some(tensor(&[4])),
            norm_bias: Some(tensor(&[4])),
        },
    };
    let conv = ConvSpec::builder(4, 2, 1).build().unwrap();
    let last = DecoderBlock {
        name: "last".into(),
        spec: conv.into(),
        parameters: Parameters {
            weight: tensor(&conv.weight_shape()),
            bias: None,
            norm_weight: None,
            norm_bias: None,
        },
    };
    Decoder::new(vec![first, last], Some(Skip::Trilinear), Some(Normalize::Max)).unwrap()
}

fn equal(a: &Decoder, b: &Decoder) -> bool {
    // Tensors and descriptions both print all they hold.
    format!("{a:?}") == format!("{b:?}")
}

/// A file with the decoder's tensors, changed, and its description, changed.
fn file(change: impl Fn(&mut Value), tensors: impl Fn(&mut Vec<(String, Tensor)>)) -> Vec<u8> {
    let bytes = decoder().to_bytes().unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut json: Value = serde_json::from_str(&header.metadata().as_ref().unwrap()[KEY]).unwrap();
    change(&mut json);
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<(String, Tensor)> = stored
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            let tensor = Tensor::new(view.shape(), from_le_bytes::<f32>(view.data())).unwrap();
            (name, tensor)
        })
        .collect();
    tensors(&mut all);
    let views = all.iter().map(|(name, tensor)| (name.clone(), Stored(tensor)));
    safetensors::serialize(views, Some(HashMap::from([(KEY.into(), json.to_string())]))).unwrap()
}

fn read_changed(change: impl Fn(&mut Value)) -> Error {
    Decoder::from_bytes(&file(change, |_| {})).unwrap_err()
}

fn field(error: Error) -> String {
    match error {
        Error::Decoder { field, .. } => field,
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_round_trip() {
    for dtype in DType::ALL {
        let decoder = decoder().cast(dtype).unwrap();
        let bytes = decoder.to_bytes().unwrap();
        let back = Decoder::from_bytes(&bytes).unwrap();
        assert!(equal(&decoder, &back));
        assert_eq!(back.dtype(), dtype);
        assert_eq!(bytes, back.to_bytes().unwrap());
    }
}

#[test]
fn files_are_written_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("decoder.safetensors");
    decoder().write(&path).unwrap();
    decoder().write(&path).unwrap();
    assert!(equal(&Decoder::read(&path).unwrap(), &decoder()));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    let missing = folder.path().join("none").join("decoder.safetensors");
    assert!(matches!(decoder().write(&missing), Err(Error::Io { .. })));
    assert!(matches!(Decoder::read(&missing), Err(Error::Io { .. })));
    assert!(matches!(Decoder::read(folder.path()), Err(Error::Io { .. })));
}

#[test]
fn the_documented_example_is_what_is_read() {
    let text = include_str!("mod.rs");
    let text: String =
        text.lines().filter_map(|line| line.strip_prefix("//! ")).collect::<Vec<_>>().join("\n");
    let json = text.split("```json").nth(1).unwrap().split("```").next().unwrap();
    let description = description(json).unwrap();
    let spec = description.blocks[0].spec().unwrap();
    assert_eq!(spec.to_string(), "1>32, k 3x3x3, s 2x2x2, p 1x1x1, op 1x1x1, bias, relu, gn 8");
    assert_eq!(spec.norm().unwrap().eps(), 1e-5);
}

#[test]
fn activations_are_null_names_or_slopes() {
    let read = |activation: Value| {
        let change = |json: &mut Value| json["blocks"][0]["activation"] = activation.clone();
        Decoder::from_bytes(&file(change, |_| {})).map(|decoder| decoder.blocks()[0].spec.activation())
    };
    assert_eq!(read(json!(null)).unwrap(), None);
    assert_eq!(read(json!("silu")).unwrap(), Some(Activation::Silu));
    assert_eq!(read(json!("leaky_relu")).unwrap(), Some(Activation::leaky_relu(0.01).unwrap()));
    assert_eq!(read(json!(["leaky_relu", 0.3])).unwrap(), Some(Activation::leaky_relu(0.3).unwrap()));
    assert!(matches!(read(json!("mish")), Err(Error::DecoderBlock { .. })));
    assert!(matches!(read(json!(["relu", 0.3])), Err(Error::DecoderBlock { .. })));
    assert!(matches!(read(json!([["relu"]])), Err(Error::Decoder { .. })));
}

#[test]
fn each_broken_field_is_named() {
    let set = |key: &'static str, value: Value| field(read_changed(|json| json[key] = value.clone()));
    assert_eq!(set("format", json!("onnx")), "format");
    assert_eq!(set("version", json!(2)), "version");
    assert_eq!(set("skip", json!("cubic")), "metadata \"volup\"");
    assert_eq!(set("normalize", json!(3)), "metadata \"volup\"");
    assert_eq!(set("extra", json!(3)), "metadata \"volup\"");
    assert_eq!(set("blocks", json!([])), "blocks.0.conv.bias", "a tensor that no block has");
    // A version to come may have other fields: it is refused as a version.
    let newer = read_changed(|json| {
        json["version"] = json!(7);
        json["extra"] = json!(3);
    });
    assert_eq!(field(newer), "version");
    for key in ["format", "version", "skip", "normalize", "blocks"] {
        let error = read_changed(|json| drop(json.as_object_mut().unwrap().remove(key)));
        assert!(error.to_string().contains(&format!("missing field `{key}`")), "{error}");
    }
    let block = serde_json::to_value(Block::of(&decoder().blocks()[0])).unwrap();
    for key in block.as_object().unwrap().keys() {
        let error = read_changed(|json| drop(json["blocks"][0].as_object_mut().unwrap().remove(key)));
        assert!(error.to_string().contains(&format!("missing field `{key}`")), "{error}");
    }
}

#[test]
fn each_rule_of_a_block_keeps_its_error() {
    let block =
        |key: &'static str, value: Value| match read_changed(|json| json["blocks"][0][key] = value.clone()) {
            Error::DecoderBlock { block, source } => {
                assert_eq!(block, "blocks.0");
                *source
            }
            other => panic!("{other:?}"),
        };
    assert!(matches!(block("stride", json!([2, 0, 2])), Error::NotPositive { param: "stride", .. }));
    assert!(matches!(block("in_channels", json!(0)), Error::NotPositive { param: "in_channels", .. }));
    assert!(matches!(block("groups", json!(3)), Error::Indivisible { .. }));
    assert!(matches!(block("output_padding", json!([2, 0, 0])), Error::OutputPadding { .. }));
    assert!(matches!(block("norm_groups", json!(3)), Error::Indivisible { .. }));
    assert!(matches!(block("eps", json!(-1.0)), Error::Eps { .. }));
    let most = u64::MAX;
    assert!(matches!(block("kernel_size", json!([most, most, most])), Error::Overflow { .. }));
    assert!(matches!(block("in_channels", json!(most - 1)), Error::Overflow { .. }));
}

#[test]
fn each_broken_tensor_is_named() {
    type Tensors = Vec<(String, Tensor)>;
    let read = |change: &dyn Fn(&mut Tensors)| field(Decoder::from_bytes(&file(|_| {}, change)).unwrap_err());
    assert_eq!(read(&|all| all.retain(|(name, _)| name != "blocks.0.norm.bias")), "blocks.0.norm.bias");
    assert_eq!(read(&|all| all.push(("last.conv.bias".into(), tensor(&[2])))), "last.conv.bias");
    let replace = |all: &mut Tensors, tensor: Tensor| {
        all.iter_mut().find(|(name, _)| name == "last.conv.weight").unwrap().1 = tensor;
    };
    assert_eq!(read(&|all| replace(all, tensor(&[2, 4, 1, 1, 1]))), "last.conv.weight");
    let half = tensor(&[4, 2, 1, 1, 1]).cast(DType::F16, MemoryFormat::Contiguous).unwrap();
    assert_eq!(read(&|all| replace(all, half.clone())), "last.conv.weight");
    // A type that no tensor of volup has.
    let bytes = decoder().to_bytes().unwrap();
    let text = String::from_utf8_lossy(&bytes[8..]).find("F32").unwrap();
    let mut wrong = bytes.clone();
    wrong[8 + text..][..3].copy_from_slice(b"I32");
    let Error::Decoder { expected, .. } = Decoder::from_bytes(&wrong).unwrap_err() else { panic!() };
    assert_eq!(expected, "of type F32, F64, F16 or BF16");
}

#[test]
fn chains_are_checked() {
    let (all, norm) = (decoder(), Some(Normalize::Max));
    let [first, last] = [0, 1].map(|j| all.blocks()[j].clone());
    let read = |blocks, skip| Decoder::new(blocks, skip, norm).map_err(field);
    assert_eq!(read(vec![], None).unwrap_err(), "blocks");
    assert_eq!(read(vec![last.clone(), last.clone()], None).unwrap_err(), "name");
    assert_eq!(read(vec![DecoderBlock { name: String::new(), ..last.clone() }], None).unwrap_err(), "name");
    let again = DecoderBlock { name: "again".into(), ..last.clone() };
    assert_eq!(read(vec![first.clone(), last.clone(), again], None).unwrap_err(), "again: in_channels");
    let skip = Some(Skip::Trilinear);
    assert_eq!(read(vec![last.clone()], skip).unwrap_err(), "out_channels of the last block");
    assert!(read(vec![first.clone(), last.clone()], skip).is_ok());
    // One voxel too many along the depth; none too many once a later block takes it off again.
    let resized = |kernel: usize, padding: usize, channels: [usize; 2]| {
        let conv = ConvSpec::builder(channels[0], channels[1], [kernel, 1, 1]).padding([padding, 0, 0]);
        let conv = conv.build().unwrap();
        let parameters = Parameters { weight: tensor(&conv.weight_shape()), ..last.parameters.clone() };
        DecoderBlock { name: format!("k{kernel}"), spec: conv.into(), parameters }
    };
    let grown = resized(3, 0, [2, 2]);
    let shrunk = resized(1, 1, [2, 2]);
    assert_eq!(read(vec![grown.clone()], skip).unwrap_err(), "output size along depth");
    assert!(read(vec![grown, shrunk], skip).is_ok());
    let mut mixed = last.clone();
    mixed.parameters.weight = mixed.parameters.weight.cast(DType::F64, MemoryFormat::Contiguous).unwrap();
    assert_eq!(read(vec![first.clone(), mixed], None).unwrap_err(), "last.conv.weight");
    let wrong = DecoderBlock { parameters: last.parameters.clone(), ..first };
    assert!(matches!(Decoder::new(vec![wrong], None, None), Err(Error::DecoderBlock { .. })));
}

#[test]
fn truncated_files_are_refused() {
    let bytes = decoder().to_bytes().unwrap();
    for length in 0..bytes.len() {
        assert!(matches!(Decoder::from_bytes(&bytes[..length]), Err(Error::Decoder { .. })), "{length}");
    }
}

#[test]
fn hostile_headers_are_refused() {
    let hostile = |header: u64, text: &str| {
        let mut bytes = header.to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        Decoder::from_bytes(&bytes)
    };
    let exact = |text: &str| hostile(text.len() as u64, text);
    let is_decoder = |result| matches!(result, Err(Error::Decoder { .. }));
    assert!(is_decoder(hostile(u64::MAX, "{}")));
    assert!(is_decoder(hostile(MAX_HEADER_BYTES as u64, "{}")));
    assert!(is_decoder(exact("")));
    assert!(is_decoder(exact("{}")));
    assert!(is_decoder(exact(&"[".repeat(100_000))));
    assert!(is_decoder(exact(&format!("{{\"a\":{}", "[".repeat(100_000)))));
    let huge = "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}";
    assert!(is_decoder(exact(huge)));
    let offsets = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[18446744073709551612,0]}}";
    assert!(is_decoder(exact(offsets)));
    let deep = json!({"__metadata__": {"volup": "[".repeat(100_000)}}).to_string();
    assert!(is_decoder(exact(&deep)));
    let number = json!({"__metadata__": {"volup": "{\"format\":\"volup-decoder\",\"version\":1e999}"}});
    assert!(is_decoder(exact(&number.to_string())));
}

#[test]
fn flipped_bytes_never_panic() {
    let bytes = decoder().to_bytes().unwrap();
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let mut refused = 0;
    for _ in 0..5000 {
        let mut wrong = bytes.clone();
        for _ in 0..1 + random(3) {
            wrong[random(bytes.len())] ^= 1 + random(255) as u8;
        }
        refused += usize::from(Decoder::from_bytes(&wrong).is_err());
    }
    assert!(refused > 3000, "{refused}");
}

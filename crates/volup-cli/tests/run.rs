//! `volup run`, as a user calls it.

mod room;

use flate2::read::GzDecoder;
use room::{Room, decoder, floats, npy, npy_header, read_npy};
use std::io::Read;
use volup::Tensor;
use volup::decoder::Decoder;
use volup_cpu::CpuEngine;

#[test]
fn the_output_is_the_decoders() {
    let room = Room::new();
    let outcome = room.run(&["in.npy", "out.npy"]).ok();
    assert!(outcome.stdout.contains("out.npy: 9x7x8 voxels -> 18x14x16 voxels"), "{outcome:?}");
    assert!(outcome.stdout.contains("GFLOP/s") && outcome.stderr.is_empty(), "{outcome:?}");
    let (shape, values) = read_npy(&room.path("out.npy"));
    assert_eq!(shape, "18, 14, 16");
    let input = read_npy(&room.path("in.npy")).1;
    let input = Tensor::new(&[1, 9, 7, 8], input).unwrap();
    let decoder = Decoder::read(room.path("plain.safetensors")).unwrap();
    let expected = decoder.run(&CpuEngine::new(), &input, None, |_, _| {}).unwrap();
    assert_eq!(values, expected.as_slice::<f32>().unwrap());
}

#[test]
fn quiet_is_quiet() {
    let room = Room::new();
    let outcome = room.run(&["in.npy", "out.npy", "--quiet", "--threads", "1"]).ok();
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("", ""));
}

#[test]
fn tiles_of_a_decoder_without_norm_change_nothing() {
    let room = Room::new();
    room.run(&["in.npy", "whole.npy"]).ok();
    let whole = std::fs::read(room.path("whole.npy")).unwrap();
    for tile in ["1", "3", "4", "8", "100", "auto"] {
        let outcome = room.run(&["in.npy", "tiled.npy", "--tile", tile]).ok();
        assert!(outcome.stderr.is_empty());
        assert_eq!(std::fs::read(room.path("tiled.npy")).unwrap(), whole, "tile {tile}");
    }
}

#[test]
fn tiles_of_a_decoder_with_norm_are_warned_about() {
    let room = Room::new();
    let run =
        |tile| room.volup(&["run", "--decoder", "normed.safetensors", "in.npy", "o.npy", "--tile", tile]);
    assert!(run("4").ok().stderr.starts_with("warning: the decoder has group norms"));
    // One tile is the whole.
    assert!(run("9").ok().stderr.is_empty());
    assert!(run("auto").ok().stderr.is_empty());
}

#[test]
fn all_types_come_close() {
    let room = Room::new();
    room.run(&["in.npy", "out.npy"]).ok();
    let expected = read_npy(&room.path("out.npy")).1;
    for (dtype, error) in [("float16", 1e-2), ("bf16", 1e-1)] {
        room.run(&["in.npy", "half.npy", "--dtype", dtype]).ok();
        let values = read_npy(&room.path("half.npy")).1;
        let worst = values.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst > 0.0 && worst < error * 250.0, "{dtype}: {worst}");
    }
    room.run(&["in.npy", "double.npy", "--dtype", "f64"]).ok();
    let bytes = std::fs::read(room.path("double.npy")).unwrap();
    assert!(bytes.windows(5).any(|window| window == b"'<f8'"));
}

#[test]
fn kinds_convert_into_each_other() {
    let room = Room::new();
    room.run(&["in.npy", "out.npy"]).ok();
    let expected = read_npy(&room.path("out.npy")).1;
    // NIfTI keeps the numbers' order, behind a header of 352 bytes.
    room.run(&["in.npy", "out.nii"]).ok();
    let bytes = std::fs::read(room.path("out.nii")).unwrap();
    assert_eq!(floats(&bytes[352..]), expected);
    assert_eq!(bytes[40..48], [3, 0, 16, 0, 14, 0, 18, 0]);
    room.run(&["in.npy", "out.nii.gz"]).ok();
    let mut unpacked = Vec::new();
    let file = std::fs::File::open(room.path("out.nii.gz")).unwrap();
    GzDecoder::new(file).read_to_end(&mut unpacked).unwrap();
    assert_eq!(unpacked, bytes);
    // Each of them is read again.
    room.run(&["in.npy", "out.npz"]).ok();
    room.run(&["out.npy", "again.npy"]).ok();
    let expected = read_npy(&room.path("again.npy"));
    assert_eq!(expected.0, "36, 28, 32");
    for name in ["out.npz", "out.nii", "out.nii.gz"] {
        room.run(&[name, "from.npy"]).ok();
        assert_eq!(read_npy(&room.path("from.npy")), expected, "{name}");
    }
}

#[test]
fn channels_and_samples_keep_their_place() {
    let room = Room::new();
    decoder(&["1x1x1, 2>2, k 2, s 2"]).write(room.path("two.safetensors")).unwrap();
    for (shape, expected) in [(&[2, 3, 4, 5][..], "2, 6, 8, 10"), (&[3, 2, 3, 4, 5], "3, 2, 6, 8, 10")] {
        std::fs::write(room.path("two.npy"), npy(shape)).unwrap();
        room.volup(&["run", "--decoder", "two.safetensors", "two.npy", "out.npy"]).ok();
        assert_eq!(read_npy(&room.path("out.npy")).0, expected);
    }
    room.volup(&["run", "--decoder", "two.safetensors", "two.npy", "out.nii"]).fails(&["out.nii", "3"]);
    room.run(&["two.npy", "out.npy"]).fails(&["two.npy", "has 2 channels, the decoder takes 1"]);
    std::fs::write(room.path("none.npy"), npy(&[0, 1, 3, 4, 5])).unwrap();
    room.run(&["none.npy", "out.npy"]).ok();
    assert_eq!(read_npy(&room.path("out.npy")), ("0, 1, 6, 8, 10".into(), vec![]));
}

#[test]
fn a_picture_is_drawn() {
    let room = Room::new();
    room.run(&["in.npy", "out.npy", "--png", "p.png"]).ok();
    assert!(std::fs::read(room.path("p.png")).unwrap().starts_with(b"\x89PNG"));
}

#[test]
fn what_is_read_is_not_replaced() {
    let room = Room::new();
    let before = std::fs::read(room.path("in.npy")).unwrap();
    room.run(&["in.npy", "in.npy"]).fails(&["in.npy", "would replace the input"]);
    room.run(&["in.npy", "./in.npy"]).fails(&["would replace the input"]);
    room.run(&["in.npy", "out.npy", "--png", "out.npy"]).fails(&["would replace the output"]);
    room.run(&["in.npy", "out.npy", "--png", "plain.safetensors"]).fails(&["would replace the decoder"]);
    assert_eq!(std::fs::read(room.path("in.npy")).unwrap(), before);
    assert_eq!(room.files(), ["in.npy", "normed.safetensors", "plain.safetensors"]);
}

#[test]
fn a_failed_run_leaves_the_folder_as_it_was() {
    let room = Room::new();
    std::fs::write(room.path("old.npy"), "old").unwrap();
    let files = room.files();
    room.run(&["none.npy", "old.npy"]).fails(&["none.npy"]);
    room.run(&["in.npy", "none/out.npy"]).fails(&["none/out.npy", "does not exist"]);
    room.run(&["in.npy", "in.npy/out.npy"]).fails(&["in.npy"]);
    room.run(&["in.npy", "old.npy", "--png", "none/p.png"]).fails(&["none/p.png"]);
    room.run(&["in.npy", "old.npy", "--max-bytes", "1000"]).fails(&["in.npy", "--max-bytes 1000"]);
    room.run(&["in.npy", "old.npy", "--max-bytes", "8000"]).fails(&["the output would take 16128 bytes"]);
    room.run(&["in.npy", "old.npy", "--max-bytes", "17000"]).fails(&["the blocks would take", "--tile"]);
    room.run(&["in.npy", "old.txt"]).fails(&["old.txt", "must end in"]);
    room.run(&[".", "old.npy"]).fails(&["must end in"]);
    assert_eq!(std::fs::read(room.path("old.npy")).unwrap(), b"old");
    assert_eq!(room.files(), files);
    room.run(&["in.npy", "old.npy", "--max-bytes", "17000", "--tile", "3"]).ok();
}

#[test]
#[cfg(unix)]
fn a_folder_that_cannot_be_written_is_named() {
    use std::os::unix::fs::PermissionsExt;
    let room = Room::new();
    let folder = room.path("locked");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o555)).unwrap();
    // Whoever may write everywhere, such as root, cannot try this.
    if std::fs::write(folder.join("probe"), "").is_err() {
        room.run(&["in.npy", "locked/out.npy"]).fails(&["locked/out.npy", "cannot write", "permission"]);
    }
}

#[test]
fn hostile_inputs_are_one_line() {
    let room = Room::new();
    let input = std::fs::read(room.path("in.npy")).unwrap();
    let try_bytes = |name: &str, bytes: &[u8], words: &[&str]| {
        std::fs::write(room.path(name), bytes).unwrap();
        room.run(&[name, "out.npy"]).fails(&[&[name], words].concat());
    };
    try_bytes("bad.npy", b"", &["truncated"]);
    try_bytes("bad.npy", &input[..input.len() - 1], &["truncated"]);
    try_bytes("bad.npy", &npy_header("<f4", &[1 << 40, 1 << 40, 1 << 40]), &["--max-bytes"]);
    try_bytes("bad.npy", &npy_header("<f4", &[1 << 20, 1 << 20, 1]), &["--max-bytes"]);
    try_bytes("bad.npy", &npy_header("<f4", &[1 << 10, 1 << 10, 1 << 10]), &["truncated"]);
    try_bytes("bad.npy", &npy_header("|O", &[1, 1, 1]), &["|O"]);
    try_bytes("bad.npy", &npy(&[3, 4]), &["[3, 4]"]);
    try_bytes("bad.npy", &npy(&[3, 0, 4]), &["empty along height"]);
    try_bytes("bad.npz", &input, &["not an .npz"]);
    try_bytes("bad.nii", &input, &["not a NIfTI"]);
    try_bytes("bad.nii.gz", &input, &["not a NIfTI"]);
    try_bytes("bad.nii.gz", &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0], &["truncated"]);
    assert!(!room.path("out.npy").exists());
}

#[test]
fn hostile_decoders_are_one_line() {
    let room = Room::new();
    let good = std::fs::read(room.path("plain.safetensors")).unwrap();
    let try_bytes = |bytes: &[u8]| {
        std::fs::write(room.path("bad.safetensors"), bytes).unwrap();
        room.volup(&["run", "--decoder", "bad.safetensors", "in.npy", "out.npy"]).fails(&["bad.safetensors"]);
    };
    try_bytes(b"");
    try_bytes(&good[..good.len() / 2]);
    try_bytes(&[0xff; 64]);
    try_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}");
    std::fs::remove_file(room.path("bad.safetensors")).unwrap();
    room.volup(&["run", "--decoder", "bad.safetensors", "in.npy", "out.npy"]).fails(&["bad.safetensors"]);
}

/// The decoder of the repository's example, which a training script wrote.
#[test]
fn the_examples_decoder_runs() {
    let decoder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/superres/decoder.safetensors");
    let room = Room::new();
    room.volup(&["run", "--decoder", decoder, "in.npy", "out.npy"]).ok();
    let (shape, values) = read_npy(&room.path("out.npy"));
    assert_eq!(shape, "18, 14, 16");
    assert!(values.iter().all(|value| value.is_finite()));
}

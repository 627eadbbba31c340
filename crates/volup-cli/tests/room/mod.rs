//! What the tests of the binary share: running it, small decoders, small arrays.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use volup::decoder::{Decoder, DecoderBlock, Normalize, Skip};
use volup::testing::Case;
use volup::{BlockSpec, DType};

/// A folder with the decoders `plain` (no norm), `normed`, and an input `in.npy` of 9x7x8 voxels.
pub struct Room {
    folder: tempfile::TempDir,
}

impl Room {
    /// A new folder.
    pub fn new() -> Room {
        let room = Room { folder: tempfile::tempdir().unwrap() };
        let plain = ["9x7x8, 1>3, k 3, p 1, bias, relu", "9x7x8, 3>1, k 4, s 2, p 1, bias"];
        decoder(&plain).write(room.path("plain.safetensors")).unwrap();
        let normed = ["9x7x8, 1>4, k 3, p 1, bias, relu, gn 2", "9x7x8, 4>1, k 2, s 2, bias"];
        decoder(&normed).write(room.path("normed.safetensors")).unwrap();
        std::fs::write(room.path("in.npy"), npy(&[9, 7, 8])).unwrap();
        room
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs the binary in the folder; it must not panic.
    pub fn volup(&self, args: &[&str]) -> Outcome {
        let mut command = Command::new(env!("CARGO_BIN_EXE_volup"));
        let output = command.args(args).current_dir(self.folder.path()).output().unwrap();
        let outcome = Outcome::of(output);
        assert!(matches!(outcome.code, 0..=2) && !outcome.stderr.contains("panicked"), "{outcome:?}");
        outcome
    }

    /// `volup run` with the decoder `plain`.
    pub fn run(&self, args: &[&str]) -> Outcome {
        self.volup(&[&["run", "--decoder", "plain.safetensors"], args].concat())
    }

    /// The names of all files in the folder.
    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// How a run of the binary ended.
#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    fn of(output: Output) -> Outcome {
        Outcome {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// It went well.
    pub fn ok(self) -> Outcome {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// It failed with one line that has all these words.
    pub fn fails(self, words: &[&str]) {
        assert_eq!((self.code, self.stderr.lines().count()), (1, 1), "{self:?}");
        assert!(self.stderr.starts_with("error: "), "{self:?}");
        assert!(words.iter().all(|word| self.stderr.contains(word)), "{words:?}: {self:?}");
    }
}

/// A decoder of blocks in the notation of the case table, with a skip, in float32.
pub fn decoder(blocks: &[&'static str]) -> Decoder {
    let blocks = blocks.iter().enumerate().map(|(j, line)| {
        let case = Case::parse("block", line, "").unwrap();
        let (_, parameters) = case.inputs(DType::F32, volup::testing::Fill::Normal, j as u64);
        DecoderBlock { name: format!("blocks.{j}"), spec: BlockSpec::clone(&case.block), parameters }
    });
    Decoder::new(blocks.collect(), Some(Skip::Trilinear), Some(Normalize::Max)).unwrap()
}

/// An .npy of float32 values, none like its neighbours.
pub fn npy(shape: &[usize]) -> Vec<u8> {
    let count: usize = shape.iter().product();
    let mut bytes = npy_header("<f4", shape);
    bytes.extend((0..count).flat_map(|i| ((i * i % 251) as f32).to_le_bytes()));
    bytes
}

/// The header of an .npy.
pub fn npy_header(descr: &str, shape: &[usize]) -> Vec<u8> {
    let sizes: String = shape.iter().map(|size| format!("{size}, ")).collect();
    let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.as_bytes());
    bytes
}

/// The shape, as text, and the values of a float32 .npy.
pub fn read_npy(path: &Path) -> (String, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    let start = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = String::from_utf8(bytes[10..start].to_vec()).unwrap();
    assert!(header.contains("'<f4'"), "{header}");
    let shape = header.split(['(', ')']).nth(1).unwrap().to_string();
    (shape, floats(&bytes[start..]))
}

/// Little-endian float32 values.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

//! Volumes in files: NumPy arrays (.npy, .npz) and NIfTI images (.nii, .nii.gz).
//!
//! Whatever the kind, nothing is allocated before the sizes in a header were checked against
//! `--max-bytes` and against the bytes that the file has.

mod nifti;
mod npy;
mod npz;
pub mod png;
mod raw;

use crate::output::{Output, WriteSeek};
use anyhow::{Context, Result, bail, ensure};
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use raw::{Compressed, Limits};
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;
use volup::{DType, Tensor};

/// The kinds of files that hold volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One NumPy array.
    Npy,
    /// A zip archive of NumPy arrays.
    Npz,
    /// A NIfTI image.
    Nifti,
    /// A NIfTI image in gzip.
    NiftiGz,
}

impl Kind {
    /// The kind that a path's ending stands for.
    pub fn of(path: &Path) -> Result<Kind> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let endings =
            [(".npy", Kind::Npy), (".npz", Kind::Npz), (".nii", Kind::Nifti), (".nii.gz", Kind::NiftiGz)];
        let kind = endings.into_iter().find(|(ending, _)| name.ends_with(ending));
        let kind = kind.with_context(|| {
            format!("{}: a volume's name must end in .npy, .npz, .nii or .nii.gz", path.display())
        });
        Ok(kind?.1)
    }
}

/// What a file says besides the numbers, and what the output takes over.
#[derive(Clone, Debug)]
enum Origin {
    Npy,
    Npz { array: String },
    Nifti(Box<nifti::Header>),
}

/// A volume and where it came from.
#[derive(Clone, Debug)]
pub struct Volume {
    /// [N, C, D, H, W], contiguous.
    pub tensor: Tensor,
    /// The number of dimensions in the file: [D, H, W], [C, D, H, W] or [N, C, D, H, W].
    rank: usize,
    origin: Origin,
}

/// How volumes are read.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// The type to convert to: F32 or F64.
    pub dtype: DType,
    /// The most bytes that a volume may take in memory.
    pub max_bytes: u64,
    /// The array of an .npz.
    pub array: Option<&'a str>,
}

impl Volume {
    /// Reads a volume; errors name the file.
    pub fn read(path: &Path, options: Options<'_>) -> Result<Volume> {
        let kind = Kind::of(path)?;
        Volume::read_as(path, kind, options).with_context(|| path.display().to_string())
    }

    fn read_as(path: &Path, kind: Kind, Options { dtype, max_bytes, array }: Options<'_>) -> Result<Volume> {
        // A folder cannot be read; a device or a pipe may have no end, or wait for ever when opened.
        let metadata = std::fs::metadata(path)?;
        ensure!(metadata.is_file(), "not a regular file");
        let mut file = File::open(path)?;
        let limits = Limits { max_bytes, at_hand: Some((metadata.len(), Compressed::No)) };
        let (tensor, origin) = match kind {
            Kind::Npy => (npy::read(&mut BufReader::new(file), dtype, limits)?, Origin::Npy),
            Kind::Npz => {
                let (tensor, array) = npz::read(file, array, dtype, limits)?;
                (tensor, Origin::Npz { array })
            }
            Kind::Nifti | Kind::NiftiGz => {
                // Files are often renamed without being unpacked, so the ending does not count.
                let mut magic = [0; 2];
                let gzip = raw::read_full(&mut file, &mut magic)? == 2 && magic == [0x1f, 0x8b];
                file.rewind()?;
                let reader = BufReader::with_capacity(1 << 16, file);
                let (tensor, header) = if gzip {
                    let limits = Limits { at_hand: Some((metadata.len(), Compressed::Deflate)), ..limits };
                    let mut reader = MultiGzDecoder::new(reader);
                    let read = nifti::read(&mut reader, dtype, limits)?;
                    raw::verify_end(&mut reader)?;
                    read
                } else {
                    nifti::read(&mut reader.take(metadata.len()), dtype, limits)?
                };
                (tensor, Origin::Nifti(Box::new(header)))
            }
        };
        let shape = tensor.shape().to_vec();
        let full = match *shape {
            [d, h, w] => [1, 1, d, h, w],
            [c, d, h, w] => [1, c, d, h, w],
            [n, c, d, h, w] => [n, c, d, h, w],
            _ => bail!("shape {shape:?}; [D, H, W], [C, D, H, W] or [N, C, D, H, W] is wanted"),
        };
        Ok(Volume { tensor: tensor.reshape(&full)?, rank: shape.len(), origin })
    }

    /// [D, H, W].
    pub fn size(&self) -> [usize; 3] {
        size(&self.tensor)
    }

    /// Whether the axes have directions in space, with up at the end of the axes.
    pub fn is_oriented(&self) -> bool {
        matches!(self.origin, Origin::Nifti(_))
    }

    /// Writes another volume of the same place: with as many dimensions as this one had in its file,
    /// but for channels that did not have one, and with what else the two kinds of file share.
    pub fn write_output(&self, volume: Tensor, kind: Kind, output: Output) -> Result<()> {
        let [n, c] = [volume.shape()[0], volume.shape()[1]];
        let [d, h, w] = size(&volume);
        let shape = match self.rank {
            3 if c == 1 => vec![d, h, w],
            3 | 4 => vec![c, d, h, w],
            _ => vec![n, c, d, h, w],
        };
        let write_nifti = |writer: &mut dyn std::io::Write| -> Result<()> {
            ensure!(n == 1, "NIfTI holds one sample, the output has {n}; write .npy or .npz");
            let mut header = match &self.origin {
                Origin::Nifti(header) => (**header).clone(),
                _ => nifti::Header::new(),
            };
            header.resize(self.size(), [c, d, h, w], shape.len() == 4, volume.dtype())?;
            nifti::write(writer, &header, &volume)
        };
        output.commit(|writer: &mut dyn WriteSeek| match kind {
            Kind::Npy => npy::write(writer, &shape, volume.data()),
            Kind::Npz => {
                let name = match &self.origin {
                    Origin::Npz { array } => array,
                    _ => "arr_0",
                };
                npz::write(writer, name, &shape, volume.data())
            }
            Kind::Nifti => write_nifti(writer),
            Kind::NiftiGz => {
                let mut encoder = GzEncoder::new(writer, Compression::fast());
                write_nifti(&mut encoder)?;
                encoder.finish()?;
                Ok(())
            }
        })
    }
}

/// [D, H, W] of [N, C, D, H, W].
pub fn size(tensor: &Tensor) -> [usize; 3] {
    [2, 3, 4].map(|axis| tensor.shape()[axis])
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

//! NumPy's `.npz`: a zip archive of `.npy` arrays.

use super::npy;
use super::raw::{Compressed, Limits};
use crate::output::WriteSeek;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::BufReader;
use volup::{DType, Data, Tensor};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Reads the array called `wanted`, or the only one, or `arr_0`. Returns it with its name.
pub fn read(file: File, wanted: Option<&str>, dtype: DType, limits: Limits) -> Result<(Tensor, String)> {
    let mut archive = ZipArchive::new(BufReader::new(file)).context("not an .npz archive")?;
    let mut names = Vec::new();
    for name in archive.file_names() {
        names.extend(name?.strip_suffix(".npy").map(String::from));
    }
    let name = match (wanted, names.as_slice()) {
        (Some(wanted), names) if names.iter().any(|name| name == wanted) => wanted.to_string(),
        (None, [only]) => only.clone(),
        (None, names) if names.iter().any(|name| name == "arr_0") => "arr_0".into(),
        (_, []) => bail!("no array in the archive"),
        (Some(wanted), names) => bail!("no array {wanted:?} in the archive; it has {}", names.join(", ")),
        (None, names) => bail!("choose one of the arrays with --array: {}", names.join(", ")),
    };
    let mut entry = archive.by_name(&format!("{name}.npy"))?;
    let at_hand = match entry.compression() {
        CompressionMethod::Stored => (entry.compressed_size().min(entry.size()), Compressed::No),
        _ => (entry.compressed_size(), Compressed::Deflate),
    };
    let array = npy::read(&mut entry, dtype, Limits { at_hand: Some(at_hand), ..limits });
    Ok((array.with_context(|| format!("array {name}"))?, name))
}

/// Writes an archive of one compressed array.
pub fn write(writer: &mut dyn WriteSeek, name: &str, shape: &[usize], data: &Data) -> Result<()> {
    let mut archive = ZipWriter::new(writer);
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Deflated)
        .compression_level(Some(1))
        .large_file(data.len() as u64 * 8 >= u64::from(u32::MAX));
    archive.start_file(format!("{name}.npy"), options)?;
    npy::write(&mut archive, shape, data)?;
    archive.finish()?;
    Ok(())
}

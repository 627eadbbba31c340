//! Files that are written whole or not at all.

use anyhow::{Context, Result, bail};
use std::io::{BufWriter, Seek, Write};
use std::path::{Path, PathBuf};

/// What a file's contents are written into.
pub trait WriteSeek: Write + Seek {}

impl<T: Write + Seek> WriteSeek for T {}

/// A file to be: its bytes collect in a temporary file beside it, which takes its name at the end.
/// What is not committed is removed.
pub struct Output {
    path: PathBuf,
}

impl Output {
    /// Tries whether a file can be made there, so that a path that cannot be written shows before
    /// any work is done.
    pub fn create(path: &Path) -> Result<Output> {
        // Not kept open: an interrupted run should leave nothing behind.
        open(path).map(drop).with_context(|| path.display().to_string())?;
        Ok(Output { path: path.into() })
    }

    /// Writes the contents with `write` and gives the file its name.
    pub fn commit(self, write: impl FnOnce(&mut dyn WriteSeek) -> Result<()>) -> Result<()> {
        let finish = || -> Result<()> {
            let mut file = BufWriter::with_capacity(1 << 20, open(&self.path)?);
            write(&mut file)?;
            let file = file.into_inner().map_err(|error| error.into_error())?;
            file.as_file().sync_all()?;
            file.persist(&self.path).map_err(|error| error.error)?;
            Ok(())
        };
        finish().with_context(|| self.path.display().to_string())
    }
}

/// A temporary file in the folder of a path.
fn open(path: &Path) -> Result<tempfile::NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match std::fs::metadata(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("the folder {} does not exist", folder.display())
        }
        Ok(folder_is) if !folder_is.is_dir() => bail!("{} is not a folder", folder.display()),
        _ => {}
    }
    // A folder or a device must not be replaced.
    if std::fs::metadata(path).is_ok_and(|existing| !existing.is_file()) {
        bail!("exists and is not a regular file");
    }
    let mut builder = tempfile::Builder::new();
    builder.prefix(".volup-");
    // As any new file: what the umask leaves, where a temporary file would be private.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    // The system's message would name the temporary file.
    builder
        .tempfile_in(folder)
        .map_err(|error| anyhow::anyhow!("cannot write in {}: {}", folder.display(), error.kind()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.npy");
        std::fs::write(&path, "old").unwrap();
        let failed = Output::create(&path).unwrap().commit(|out| {
            out.write_all(b"half")?;
            bail!("no more")
        });
        assert!(failed.is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        Output::create(&path).unwrap().commit(|out| Ok(out.write_all(b"new")?)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_path_that_cannot_be_written_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let message = |path: &Path| format!("{:#}", Output::create(path).err().unwrap());
        assert!(message(&folder.path().join("none/x.npy")).contains("does not exist"));
        assert!(message(folder.path()).contains("not a regular file"));
        std::fs::write(folder.path().join("file"), "").unwrap();
        assert!(message(&folder.path().join("file/x.npy")).contains("is not a folder"));
    }
}

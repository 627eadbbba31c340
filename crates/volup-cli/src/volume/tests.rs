use super::*;
use std::io::Cursor;
use std::path::PathBuf;

const KINDS: [(&str, Kind); 4] =
    [("v.npy", Kind::Npy), ("v.npz", Kind::Npz), ("v.nii", Kind::Nifti), ("v.nii.gz", Kind::NiftiGz)];

fn options(max_bytes: u64) -> Options<'static> {
    Options { dtype: DType::F32, max_bytes, array: None }
}

fn volume(shape: &[usize], rank: usize) -> Volume {
    let count: usize = shape.iter().product();
    let tensor = Tensor::new(shape, (0..count).map(|i| (i * i % 251) as f32).collect()).unwrap();
    Volume { tensor, rank, origin: Origin::Npy }
}

/// Writes a volume as every kind of file.
fn files(folder: &Path, volume: &Volume) -> Vec<PathBuf> {
    let write = |(name, kind): (&str, Kind)| {
        let path = folder.join(name);
        volume.write_output(volume.tensor.clone(), kind, Output::create(&path).unwrap()).unwrap();
        path
    };
    KINDS.into_iter().map(write).collect()
}

#[test]
fn endings_are_kinds() {
    for (name, kind) in KINDS {
        assert_eq!(Kind::of(Path::new(name)).unwrap(), kind);
        assert_eq!(Kind::of(Path::new(&name.to_uppercase())).unwrap(), kind);
    }
    for name in ["v", "v.gz", "v.png", "npy", ""] {
        assert!(Kind::of(Path::new(name)).is_err(), "{name}");
    }
}

#[test]
fn every_kind_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    for (shape, rank) in
        [([1, 1, 3, 4, 5], 3), ([1, 2, 3, 4, 5], 4), ([1, 1, 3, 4, 5], 4), ([1, 2, 1, 1, 1], 4)]
    {
        let volume = volume(&shape, rank);
        for path in files(folder.path(), &volume) {
            let read = Volume::read(&path, options(1 << 20)).unwrap();
            assert_eq!((read.tensor, read.rank), (volume.tensor.clone(), rank), "{path:?}");
        }
    }
}

#[test]
fn samples_need_numpy() {
    let folder = tempfile::tempdir().unwrap();
    let volume = volume(&[2, 1, 1, 2, 3], 5);
    for (name, kind) in KINDS {
        let path = folder.path().join(name);
        let written = volume.write_output(volume.tensor.clone(), kind, Output::create(&path).unwrap());
        let nifti = matches!(kind, Kind::Nifti | Kind::NiftiGz);
        assert_eq!((written.is_err(), path.exists()), (nifti, !nifti), "{name}");
        if !nifti {
            assert_eq!(Volume::read(&path, options(1 << 20)).unwrap().tensor, volume.tensor);
        }
    }
}

#[test]
fn an_archive_says_which_arrays_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.npz");
    let archive = |names: &[&str]| {
        let mut bytes = Cursor::new(Vec::new());
        let mut archive = zip::ZipWriter::new(&mut bytes);
        for (i, name) in names.iter().enumerate() {
            archive.start_file(*name, zip::write::SimpleFileOptions::default()).unwrap();
            npy::write(&mut archive, &[1, 1, 1], &volup::Data::F32(vec![i as f32])).unwrap();
        }
        archive.finish().unwrap();
        std::fs::write(&path, bytes.into_inner()).unwrap();
    };
    let read = |array| Volume::read(&path, Options { array, ..options(100) });
    archive(&["a.npy", "b.npy", "notes.txt"]);
    assert_eq!(read(Some("b")).unwrap().tensor.to_f64(), [1.0]);
    assert!(format!("{:#}", read(None).unwrap_err()).contains("--array: a, b"));
    assert!(format!("{:#}", read(Some("c")).unwrap_err()).contains("no array \"c\""));
    archive(&["x.npy", "arr_0.npy"]);
    assert_eq!(read(None).unwrap().tensor.to_f64(), [1.0]);
    archive(&["notes.txt"]);
    assert!(format!("{:#}", read(None).unwrap_err()).contains("no array in"));
}

#[test]
fn a_nifti_image_may_be_compressed_whatever_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let volume = volume(&[1, 1, 2, 3, 4], 3);
    let paths = files(folder.path(), &volume);
    let renamed = folder.path().join("renamed.nii");
    std::fs::rename(&paths[3], &renamed).unwrap();
    assert_eq!(Volume::read(&renamed, options(1 << 20)).unwrap().tensor, volume.tensor);
}

#[test]
fn limits_hold_for_every_kind() {
    let folder = tempfile::tempdir().unwrap();
    let volume = volume(&[1, 1, 16, 16, 16], 3);
    for path in files(folder.path(), &volume) {
        assert!(Volume::read(&path, options(16 * 16 * 16 * 4)).is_ok());
        let error = format!("{:#}", Volume::read(&path, options(16 * 16 * 16 * 4 - 1)).unwrap_err());
        assert!(error.starts_with(path.to_str().unwrap()) && error.contains("--max-bytes"), "{error}");
    }
}

#[test]
fn a_bomb_is_refused_by_its_header() {
    // 4 GiB of zeros said to be in a few bytes: more than deflate can do, so nothing is unpacked.
    let mut header = nifti::Header::new();
    header.resize([1; 3], [1, 1024, 1024, 1024], false, DType::F32).unwrap();
    let mut gz = GzEncoder::new(Vec::new(), Compression::best());
    nifti::write(&mut gz, &header, &Tensor::new(&[0], Vec::<f32>::new()).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bomb.nii.gz");
    std::fs::write(&path, gz.finish().unwrap()).unwrap();
    let error = format!("{:#}", Volume::read(&path, options(1 << 40)).unwrap_err());
    assert!(error.contains("compressed bytes cannot hold"), "{error}");
}

#[test]
fn truncated_files_are_refused_at_every_length() {
    let folder = tempfile::tempdir().unwrap();
    for path in files(folder.path(), &volume(&[1, 1, 2, 3, 4], 3)) {
        let bytes = std::fs::read(&path).unwrap();
        for length in 0..bytes.len() {
            std::fs::write(&path, &bytes[..length]).unwrap();
            assert!(Volume::read(&path, options(1 << 20)).is_err(), "{path:?} {length}");
        }
    }
}

#[test]
fn flipped_bytes_never_panic() {
    let folder = tempfile::tempdir().unwrap();
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    for path in files(folder.path(), &volume(&[1, 1, 2, 3, 4], 3)) {
        let bytes = std::fs::read(&path).unwrap();
        let mut refused = 0;
        for round in 0..2000 {
            let mut wrong = bytes.clone();
            for _ in 0..1 + round % 4 {
                // Half of them in the first bytes, where headers are.
                let end = if round % 2 == 0 { bytes.len() } else { bytes.len().min(128) };
                wrong[random(end)] ^= 1 + random(255) as u8;
            }
            std::fs::write(&path, &wrong).unwrap();
            refused += usize::from(Volume::read(&path, options(1 << 24)).is_err());
        }
        // A NIfTI header has much that does not matter here, an archive next to nothing.
        let least = if path.ends_with("v.nii") { 50 } else { 500 };
        assert!(refused > least, "{path:?} {refused}");
    }
}

#[test]
fn other_things_than_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("folder.npy");
    assert!(Volume::read(&path, options(1)).is_err());
    std::fs::create_dir(&path).unwrap();
    assert!(format!("{:#}", Volume::read(&path, options(1)).unwrap_err()).contains("not a regular file"));
}

#[test]
fn a_picture_shows_the_slices() {
    let [input, output] = [[1, 1, 2, 3, 4], [1, 1, 4, 6, 8]].map(|shape| volume(&shape, 3).tensor);
    for flip in [false, true] {
        let mut bytes = Vec::new();
        png::write(&mut bytes, &input, &output, flip).unwrap();
        let mut reader = ::png::Decoder::new(Cursor::new(bytes)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        // Two slices of up to 8 pixels across, three of 6, 4 and 4 down, with gaps of 4.
        assert_eq!((info.width, info.height), (2 * 8 + 4, 6 + 4 + 4 + 2 * 4));
        assert!(pixels.contains(&0) && pixels.contains(&255));
        // An input's voxel is 2x2 pixels.
        assert!(pixels[0] == pixels[1] && pixels[0] == pixels[20] && pixels[0] == pixels[21]);
    }
    let flat = Tensor::new(&[1, 1, 1, 1, 2], vec![f32::NAN; 2]).unwrap();
    assert!(png::write(&mut Vec::new(), &flat, &flat, false).is_ok());
    let empty = Tensor::new(&[0, 1, 1, 1, 2], Vec::<f32>::new()).unwrap();
    assert!(png::write(&mut Vec::new(), &empty, &empty, false).is_err());
}

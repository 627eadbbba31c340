//! `volup run`: a volume in, a larger one out.

use crate::arguments::{self, AnyEngine};
use crate::output::Output;
use crate::volume::{Kind, Options, Volume, png, size};
use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use volup::decoder::Decoder;
use volup::{DType, Tensor};

/// What a tile's intermediates may take with `--tile auto`.
const TILE_BYTES: u64 = 1 << 30;

const EXAMPLES: &str = "\
Volumes are NumPy arrays (.npy, .npz) or NIfTI images (.nii, .nii.gz), of shape [D, H, W],
[C, D, H, W] or [N, C, D, H, W]; a NIfTI image's fourth dimension is its channels. Integers and
floats of all sizes are read; the output is float32 (float64 with --dtype f64). A NIfTI output has
the same extent in space as the input, in smaller voxels. Input and output may be of different
kinds. Files appear whole or not at all.

Examples:
  volup run --decoder superres.safetensors brain.nii.gz brain-2x.nii.gz
  volup run --decoder superres.safetensors in.npy out.npy --png slices.png
  volup run --decoder superres.safetensors in.npy out.npy --device cuda
  volup run --decoder plain.safetensors large.nii larger.nii --tile auto --max-bytes 32G";

/// Run a decoder on a volume.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The volume to upsample.
    input: PathBuf,
    /// Where to write the result; its ending chooses the kind of file.
    output: PathBuf,
    /// The decoder, a .safetensors file.
    #[arg(long, value_name = "FILE")]
    decoder: PathBuf,
    /// Also write the middle slices of input and output, side by side, as a PNG.
    #[arg(long, value_name = "FILE")]
    png: Option<PathBuf>,
    /// Cut the input into tiles of N voxels along each axis, so that large volumes need less memory;
    /// `auto` does so where the whole needs more than 1 GiB besides input and output. Without group
    /// norm the result is the same and `auto` the default; a decoder with group norm gives other
    /// values in tiles and is not cut unless this says so.
    #[arg(long, value_name = "N|auto", value_parser = tile)]
    tile: Option<Tile>,
    #[command(flatten)]
    place: arguments::Where,
    /// The type to compute in.
    #[arg(long, value_parser = arguments::dtype(), default_value = "f32")]
    dtype: DType,
    /// The array to read from an .npz that holds several.
    #[arg(long, value_name = "NAME")]
    array: Option<String>,
    /// The most memory that the input, the output, or the run between them may take.
    #[arg(long, value_name = "BYTES", value_parser = arguments::bytes, default_value = arguments::MAX_BYTES)]
    max_bytes: u64,
    /// Print nothing but errors.
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Tile {
    Auto,
    Voxels(usize),
}

fn tile(text: &str) -> Result<Tile, String> {
    match text.parse() {
        _ if text == "auto" => Ok(Tile::Auto),
        Ok(voxels) if voxels > 0 => Ok(Tile::Voxels(voxels)),
        _ => Err("a positive number of voxels, or auto, is wanted".into()),
    }
}

/// Runs the decoder.
pub fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let kind = Kind::of(&args.output)?;
    check_paths(args)?;
    let engine = args.place.engine()?;
    let output = Output::create(&args.output)?;
    let picture = args.png.as_deref().map(Output::create).transpose()?;
    let decoder = Decoder::read(&args.decoder).map_err(|error| match error {
        // It names the file itself.
        volup::Error::Io { .. } => error.into(),
        error => anyhow::Error::from(error).context(args.decoder.display().to_string()),
    })?;
    let decoder = decoder.cast(args.dtype)?;
    // Half precision is for the blocks: the volume itself would lose what it measured.
    let dtype = args.dtype.accumulator();
    let options = Options { dtype, max_bytes: args.max_bytes, array: args.array.as_deref() };
    let volume = Volume::read(&args.input, options)?;
    let tile = plan(args, &decoder, &volume).with_context(|| args.input.display().to_string())?;

    let computing = Instant::now();
    let bar = progress_bar(args.quiet);
    let progress = |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    };
    let result = match &engine {
        AnyEngine::Cpu(engine) => decoder.run(engine, &volume.tensor, tile, progress),
        AnyEngine::Cuda(engine) => decoder.run(&**engine, &volume.tensor, tile, progress),
    };
    bar.finish_and_clear();
    let result = result.with_context(|| args.input.display().to_string())?;
    let seconds = computing.elapsed().as_secs_f64();

    if let Some(picture) = picture {
        picture.commit(|writer| png::write(writer, &volume.tensor, &result, volume.is_oriented()))?;
    }
    let [from, to] = [&volume.tensor, &result].map(shape_line);
    volume.write_output(result, kind, output)?;
    if !args.quiet {
        let batch = volume.tensor.shape()[0];
        let geometries = decoder.geometries(batch, volume.size())?;
        let flops: f64 = geometries.iter().map(|geometry| geometry.flops()).sum();
        let rate = flops / seconds / 1e9;
        let total = start.elapsed().as_secs_f64();
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}: {from} -> {to}", args.output.display())?;
        writeln!(
            out,
            "{seconds:.3} s computing at {rate:.1} GFLOP/s, {total:.3} s with reading and writing"
        )?;
    }
    Ok(())
}

/// Refuses to replace what is read, or to write one file over the other.
fn check_paths(args: &Args) -> Result<()> {
    let real = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // What does not exist yet is known by its folder and name.
        std::fs::canonicalize(path)
            .or_else(|_| Ok(std::fs::canonicalize(folder)?.join(path.file_name().unwrap_or_default())))
            .unwrap_or_else(|_: std::io::Error| path.into())
    };
    let mut taken = vec![("input", real(&args.input)), ("decoder", real(&args.decoder))];
    for (name, path) in [("output", Some(&args.output)), ("PNG", args.png.as_ref())] {
        let Some(path) = path else { continue };
        let is = real(path);
        if let Some((other, _)) = taken.iter().find(|(_, path)| *path == is) {
            bail!("{}: the {name} would replace the {other}", path.display());
        }
        taken.push((name, is));
    }
    Ok(())
}

/// Chooses the tile, and refuses what would take too much memory before any of it is taken.
fn plan(args: &Args, decoder: &Decoder, volume: &Volume) -> Result<Option<usize>> {
    let [batch, channels, ..] = *volume.tensor.shape() else { bail!("a volume of rank 5 is wanted") };
    ensure!(
        channels == decoder.in_channels(),
        "the volume has {channels} channels, the decoder takes {}",
        decoder.in_channels()
    );
    let geometries = decoder.geometries(batch, volume.size())?;
    let elements: u128 =
        geometries.last().map_or(0, |last| last.output_shape().iter().map(|&size| size as u128).product());
    let bytes = elements * volume.tensor.dtype().size() as u128;
    ensure!(
        bytes <= args.max_bytes.into(),
        "the output would take {bytes} bytes, more than --max-bytes {}",
        args.max_bytes
    );
    let tile = match args.tile {
        None if decoder.has_norm() => None,
        Some(Tile::Voxels(voxels)) => Some(voxels),
        None | Some(Tile::Auto) => decoder.tile_for(volume.size(), TILE_BYTES.min(args.max_bytes))?,
    };
    let plan = decoder.plan(volume.size(), tile)?;
    let bytes = plan.working_elements().saturating_mul(args.dtype.size() as u128);
    ensure!(
        bytes <= args.max_bytes.into(),
        "the blocks would take {bytes} bytes between them, more than --max-bytes {}; \
         --tile auto, or a smaller tile, takes less",
        args.max_bytes
    );
    if plan.tiles() > 1 && decoder.has_norm() && !args.quiet {
        eprintln!(
            "warning: the decoder has group norms, whose mean and variance are now those of each of {} tiles: \
             values differ from a run without tiles, and may step where tiles meet",
            plan.tiles()
        );
    }
    Ok(tile)
}

/// A bar on stderr, if that is a terminal.
fn progress_bar(quiet: bool) -> ProgressBar {
    if quiet {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(1);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_bar} {pos}/{len} tiles") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// For example `64x64x64 voxels`, `2 x 3 channels x 64x64x64 voxels`.
fn shape_line(tensor: &Tensor) -> String {
    let [d, h, w] = size(tensor);
    let mut line = format!("{d}x{h}x{w} voxels");
    for (count, what) in [(tensor.shape()[1], "channels"), (tensor.shape()[0], "samples")] {
        if count != 1 {
            line = format!("{count} {what} of {line}");
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_numbers_or_auto() {
        assert_eq!(tile("auto"), Ok(Tile::Auto));
        assert_eq!(tile("32"), Ok(Tile::Voxels(32)));
        for wrong in ["0", "-1", "", "big", "1.5"] {
            assert!(tile(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn shapes_read_well() {
        let tensor = |shape: &[usize]| Tensor::new(shape, vec![0f32; shape.iter().product()]).unwrap();
        assert_eq!(shape_line(&tensor(&[1, 1, 2, 3, 4])), "2x3x4 voxels");
        assert_eq!(shape_line(&tensor(&[2, 3, 2, 3, 4])), "2 samples of 3 channels of 2x3x4 voxels");
    }
}

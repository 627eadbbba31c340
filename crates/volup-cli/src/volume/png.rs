//! A picture to look at: the middle slices of a volume, before and after.

use super::size;
use anyhow::{Result, ensure};
use std::io::Write;
use volup::{Element, Tensor, with_element};

/// The most pixels of a slice along a side; larger ones are thinned out.
const MAX_SIDE: usize = 1024;
/// Pixels between the pictures.
const GAP: usize = 4;

/// A slice through the middle: which axes run down and across, which is cut.
struct Plane {
    cut: usize,
    down: usize,
    across: usize,
}

/// Axial, coronal and sagittal.
const PLANES: [Plane; 3] = [
    Plane { cut: 0, down: 1, across: 2 },
    Plane { cut: 1, down: 0, across: 2 },
    Plane { cut: 2, down: 0, across: 1 },
];

/// Writes the axial, coronal and sagittal middle slices, one below the other: the input (each voxel
/// as large as what became of it) on the left, the output on the right, in the same shades. It shows
/// the first channel of the first sample; `flip` turns slices upside down.
pub fn write(writer: &mut dyn Write, input: &Tensor, output: &Tensor, flip: bool) -> Result<()> {
    ensure!(!input.data().is_empty() && !output.data().is_empty(), "an empty volume has no slices");
    let sizes = size(output);
    let side = |axis: usize| sizes[axis].min(MAX_SIDE);
    let column = PLANES.iter().map(|plane| side(plane.across)).max().unwrap_or(0);
    let width = 2 * column + GAP;
    let height = PLANES.iter().map(|plane| side(plane.down)).sum::<usize>() + 2 * GAP;
    let slices: Vec<[Vec<f64>; 2]> = PLANES
        .iter()
        .map(|plane| {
            [input, output].map(|volume| slice(volume, plane, [side(plane.down), side(plane.across)], flip))
        })
        .collect();
    let (dark, bright) = window(slices.iter().flat_map(|[input, _]| input));
    let mut pixels = vec![0u8; width * height];
    let mut top = 0;
    for (plane, pair) in PLANES.iter().zip(&slices) {
        let across = side(plane.across);
        for (slice, left) in pair.iter().zip([0, column + GAP]) {
            for (y, row) in slice.chunks(across).enumerate() {
                let start = (top + y) * width + left + (column - across) / 2;
                for (pixel, value) in pixels[start..].iter_mut().zip(row) {
                    // A NaN becomes black.
                    *pixel = ((value - dark) / (bright - dark) * 255.0).round() as u8;
                }
            }
        }
        top += side(plane.down) + GAP;
    }
    let mut encoder = png::Encoder::new(writer, width as u32, height as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Eight);
    let mut encoder = encoder.write_header()?;
    encoder.write_image_data(&pixels)?;
    encoder.finish()?;
    Ok(())
}

/// The middle slice of a volume, each pixel the voxel that it lies in.
fn slice(volume: &Tensor, plane: &Plane, pixels: [usize; 2], flip: bool) -> Vec<f64> {
    let sizes = size(volume);
    let mut values = Vec::with_capacity(pixels[0] * pixels[1]);
    for y in 0..pixels[0] {
        for x in 0..pixels[1] {
            let mut at = [0; 3];
            at[plane.cut] = sizes[plane.cut] / 2;
            at[plane.down] = (if flip { pixels[0] - 1 - y } else { y }) * sizes[plane.down] / pixels[0];
            at[plane.across] = x * sizes[plane.across] / pixels[1];
            values.push(voxel(volume, (at[0] * sizes[1] + at[1]) * sizes[2] + at[2]));
        }
    }
    values
}

fn voxel(volume: &Tensor, index: usize) -> f64 {
    with_element!(volume.dtype(), T => {
        volume.as_slice::<T>().map_or(f64::NAN, |values| values[index].to_f64())
    })
}

/// The values to show as black and white: all but the outermost half per cent on each side.
fn window<'a>(values: impl Iterator<Item = &'a f64>) -> (f64, f64) {
    let mut values: Vec<f64> = values.copied().filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return (0.0, 1.0) };
    let (dark, bright) = (values[last / 200], values[last - last / 200]);
    if dark < bright { (dark, bright) } else { (dark - 0.5, dark + 0.5) }
}

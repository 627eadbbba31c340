//! Outputs on a lattice that are written with what is between them: where that is possible, and what it takes.

use super::super::{Argument, Context, activation_code, epilogue, push, size};
use crate::Variant;
use crate::plan::panels::tile_rows;
use crate::plan::phases::{Lattice, PhaseAxis};
use volup::{MemoryFormat, Result};

/// The last code of activations that are a comparison.
const STRAIGHT: i32 = 2;
/// Bytes of a sector; the most planes of a tile.
const SECTOR: usize = 32;
const PLANES: usize = 8;
/// Bytes of shared memory of what is known of a tile's planes, of each plane's part of a place, and that planes without outputs are stored
/// from.
const RUNS: usize = 128;
const STORE: usize = 32;
const PIECES: usize = 3 * 2048;

/// How such a kernel writes its tiles.
#[derive(Clone, Copy)]
pub(super) struct Between {
    /// Rows from a tile to the next: those of whole lines.
    pub(super) advance: usize,
    /// Bytes of a channel's place in shared memory.
    place: usize,
    /// Elements of a plane, before its first output, and from a line's first output to the line's end.
    plane: usize,
    head: usize,
    past: usize,
    /// Planes of a channel, and which of them have outputs.
    depth: usize,
    first: usize,
    step: usize,
}

impl Between {
    /// Of a kernel that is for it, if it is for that problem. A row is one position.
    pub(super) fn of(
        context: Context<'_>,
        kernel: &Variant,
        lattices: &[Lattice; 3],
        axes: &[PhaseAxis; 3],
    ) -> Option<Between> {
        let request = context.request;
        let bytes = request.dtype.size();
        let [_, channels, depth, height, width] = request.geometry.output_shape();
        let [d, h, w] = lattices;
        let (activation, _) = activation_code(epilogue(&request.block)[0]);
        let apart = h.step > 1 && h.axis.stride == 1 && w.axis.stride == 1;
        if !apart
            || activation > STRAIGHT
            || request.output_format != MemoryFormat::Contiguous
            || context.packed
        {
            return None;
        }
        // Runs meet where a sector starts, before the next line that has outputs.
        let line = h.step * width * bytes;
        let lines = (tile_rows(kernel) / axes[2].pitch).min((PLANES - 2) * axes[1].pitch + 1);
        if (h.step - 1) * width * bytes < SECTOR || lines == 0 {
            return None;
        }
        let planes = (lines - 1) / axes[1].pitch + 2;
        // Offsets of a tile's bytes are 32-bit, and what is in a place is counted in bits of a sector.
        let spanned = tile_rows(kernel) / (axes[0].pitch * axes[1].pitch * axes[2].pitch) + 2;
        let largest = channels.checked_mul(depth * height * width * bytes)?.checked_mul(spanned)?;
        let place = ((lines + planes) * line).next_multiple_of(SECTOR) + 2 * SECTOR * planes;
        if largest > i32::MAX as usize {
            return None;
        }
        Some(Between {
            advance: lines * axes[2].pitch,
            place,
            plane: height * width,
            head: h.first * width + w.first,
            past: width - w.first,
            depth,
            first: d.first,
            step: d.step,
        })
    }

    /// Bytes of shared memory instead of staging areas: tables of columns, of runs, and channels' places.
    pub(super) fn bytes(&self, kernel: &Variant, element: usize) -> usize {
        let places = SECTOR / element;
        let tables = 16 * size(kernel, "BN") * size(kernel, "WGS") + RUNS + STORE * PLANES * places;
        tables + places * self.place + PIECES
    }

    /// What the kernel is told of it.
    pub(super) fn push(&self, arguments: &mut Vec<Argument>) -> Result<()> {
        push(arguments, [self.advance, self.plane, self.head, self.past, self.place])?;
        push(arguments, [self.depth, self.first, self.step])
    }
}

//! Which part of each block a tile needs: the geometry of tiling, with no data.
//!
//! The axes are independent, so a tile is one [`Cut`] per axis. A cut starts from its part of the
//! last block's output and walks backwards: outputs [a, b) of a block depend on the inputs `i` with
//! a tap `t` such that `a <= i*s - p + t*d < b`. Cut edges are multiples of the total scale, so all
//! cuts in the middle of a volume look alike.
//!
//! A block that is applied to inputs [i0, i1) alone, without padding, gives outputs from `i0*s - p`
//! on. What it gives near the edges of [i0, i1) lacks the inputs past them, and lies outside [a, b)
//! unless there are no such inputs. So the padding must leave at least [a, b), and the output is
//! cropped to [a, b) before the next block, which must not see what lies past the volume's border.

use super::Decoder;
use crate::{BlockSpec, ConvSpec, Error, Geometry, Result};
use std::ops::Range;

/// A tile along one axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// The part of the decoder's input, then of every block's output, in voxels of the whole.
    pub ranges: Vec<Range<usize>>,
    /// How many voxels of output each block computes.
    pub lengths: Vec<usize>,
    /// How many of those come before the part that is wanted.
    pub skips: Vec<usize>,
}

/// How a decoder runs over an input of a known size in tiles.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Depth, height and width.
    pub(super) cuts: [Vec<Cut>; 3],
    /// The blocks with the padding that all tiles share; the decoder's own if there is one tile.
    pub(super) blocks: Vec<BlockSpec>,
}

impl Plan {
    /// How many tiles a sample is cut into.
    pub fn tiles(&self) -> usize {
        self.cuts.iter().map(|cuts| cuts.len()).product()
    }

    /// The most elements that a tile has at one time: a block's input and its output, and the part
    /// of that which is cropped for the next block.
    pub fn working_elements(&self) -> u128 {
        let longest = |length: &dyn Fn(&Cut) -> usize| -> u128 {
            let axes = self.cuts.iter().map(|cuts| cuts.iter().map(length).max().unwrap_or(0) as u128);
            axes.fold(1, u128::saturating_mul)
        };
        let of_block = |(j, block): (usize, &BlockSpec)| {
            let conv = block.conv();
            let (cin, cout) = (conv.in_channels() as u128, conv.out_channels() as u128);
            let input = longest(&|cut| cut.ranges[j].len()).saturating_mul(cin);
            let output = longest(&|cut| cut.lengths[j]).saturating_mul(cout);
            let crop = longest(&|cut| cut.ranges[j + 1].len()).saturating_mul(cout);
            output.saturating_add(input.max(crop))
        };
        self.blocks.iter().enumerate().map(of_block).max().unwrap_or(0)
    }
}

impl Decoder {
    /// Cuts an input of spatial size [D, H, W] into tiles of `tile` voxels per axis, or into one
    /// that takes all of it.
    ///
    /// # Errors
    /// [`Error::NotPositive`] for a tile of 0 voxels, and as [`Decoder::geometries`].
    pub fn plan(&self, input: [usize; 3], tile: Option<usize>) -> Result<Plan> {
        if tile == Some(0) {
            return Err(Error::NotPositive { param: "tile", got: 0 });
        }
        let geometries = self.geometries(1, input)?;
        let scale = self.scale();
        let mut cuts: [Vec<Cut>; 3] = Default::default();
        // Padding and output padding, for each axis one of each block.
        let mut paddings = [const { Vec::new() }; 3];
        for axis in 0..3 {
            let steps: Vec<Step> = geometries.iter().map(|geometry| Step::of(geometry, axis)).collect();
            let tile = tile.unwrap_or(input[axis]).min(input[axis]);
            (cuts[axis], paddings[axis]) = cut_axis(&steps, input[axis], tile, scale[axis]);
        }
        let block = |(j, spec): (usize, &BlockSpec)| {
            let (padding, output_padding) =
                (|axis: usize| paddings[axis][j].0, |axis: usize| paddings[axis][j].1);
            let conv = spec.conv();
            let conv = ConvSpec::builder(conv.in_channels(), conv.out_channels(), conv.kernel_size())
                .stride(conv.stride())
                .padding([0, 1, 2].map(padding))
                .output_padding([0, 1, 2].map(output_padding))
                .groups(conv.groups())
                .dilation(conv.dilation())
                .bias(conv.has_bias())
                .build()?;
            BlockSpec::new(conv, spec.activation(), spec.norm(), spec.post_activation())
        };
        let blocks = self.blocks().iter().map(|block| &block.spec).enumerate().map(block);
        Ok(Plan { blocks: blocks.collect::<Result<_>>()?, cuts })
    }

    /// The largest tile for which a tile's intermediates take at most `bytes`, or the smallest there
    /// is if none does; None if they do so without tiles.
    ///
    /// # Errors
    /// As [`Decoder::geometries`].
    pub fn tile_for(&self, input: [usize; 3], bytes: u64) -> Result<Option<usize>> {
        const SMALLEST: usize = 8;
        let size = self.dtype().size() as u128;
        let fits = |plan: Plan| plan.working_elements().saturating_mul(size) <= u128::from(bytes);
        if fits(self.plan(input, None)?) {
            return Ok(None);
        }
        let mut tile = input.into_iter().max().unwrap_or(1);
        while tile > SMALLEST {
            tile = (tile * 7 / 8).max(SMALLEST);
            if fits(self.plan(input, Some(tile))?) {
                break;
            }
        }
        Ok(Some(tile))
    }
}

/// One block along one axis. All numbers fit: the geometry of the whole was checked.
#[derive(Clone, Copy)]
struct Step {
    stride: i64,
    padding: i64,
    output_padding: i64,
    dilation: i64,
    /// From the first tap to the last.
    reach: i64,
    input: i64,
    output: i64,
}

impl Step {
    fn of(geometry: &Geometry, axis: usize) -> Step {
        let sizes = geometry.axes()[axis];
        Step {
            stride: sizes.stride as i64,
            padding: sizes.padding as i64,
            output_padding: geometry.conv().output_padding()[axis] as i64,
            dilation: sizes.dilation as i64,
            reach: (sizes.dilation * (sizes.kernel - 1)) as i64,
            input: sizes.input as i64,
            output: sizes.output as i64,
        }
    }

    /// The inputs that the outputs [a, b) depend on, as one range; never empty. It also starts no
    /// later than an input whose own outputs start at or before `a`, so that outputs which only the
    /// bias reaches are computed too.
    fn needed(&self, outputs: &Range<usize>) -> Range<usize> {
        let (a, b) = (outputs.start as i64, outputs.end as i64);
        let first_reaching = (a + self.padding - self.reach + self.stride - 1).div_euclid(self.stride);
        let first = first_reaching.min((a + self.padding) / self.stride).clamp(0, self.input - 1);
        let last = ((b - 1 + self.padding) / self.stride).min(self.input - 1);
        first as usize..last as usize + 1
    }

    /// Where the outputs of `inputs` start and end without padding, in voxels of the whole.
    fn unpadded(&self, inputs: &Range<usize>) -> (i64, i64) {
        let start = inputs.start as i64 * self.stride - self.padding;
        let last = (inputs.end as i64 - 1) * self.stride - self.padding;
        (start, last + self.reach + 1)
    }

    /// The padding and output padding that leave enough for every tile, given the (inputs, outputs)
    /// of each.
    fn shared_padding<'a>(
        &self,
        tiles: impl Iterator<Item = (&'a Range<usize>, &'a Range<usize>)>,
    ) -> (i64, i64) {
        let (mut lead, mut lack) = (i64::MAX, i64::MIN);
        for (inputs, outputs) in tiles {
            let (start, end) = self.unpadded(inputs);
            lead = lead.min(outputs.start as i64 - start);
            lack = lack.max(outputs.end as i64 - end);
        }
        // Padding cuts both ends alike: what it cuts too much at the far end, output padding puts
        // back, as far as it may. Without padding it never has to put back more than that.
        let most = self.stride.max(self.dilation) - 1;
        let padding = lead.min(most - lack);
        (padding, (lack + padding).max(0))
    }
}

/// The cuts of one axis and the (padding, output padding) of each block.
fn cut_axis(steps: &[Step], input: usize, tile: usize, scale: usize) -> (Vec<Cut>, Vec<(usize, usize)>) {
    let output = steps[steps.len() - 1].output as usize;
    let mut cuts = Vec::new();
    let mut start = 0;
    for first in (0..input).step_by(tile) {
        let next = first + tile;
        let end = if next >= input { output } else { next.saturating_mul(scale).min(output) };
        if start < end {
            let mut ranges = Vec::with_capacity(steps.len() + 1);
            ranges.push(start..end);
            for step in steps.iter().rev() {
                ranges.push(step.needed(&ranges[ranges.len() - 1]));
            }
            ranges.reverse();
            cuts.push(Cut { ranges, lengths: Vec::new(), skips: Vec::new() });
            start = end;
        }
    }
    if let [only] = cuts.as_mut_slice() {
        // The whole, with inputs at its border that may reach no output: the blocks stay as they are.
        let outputs = steps.iter().map(|step| 0..step.output as usize);
        only.ranges = std::iter::once(0..input).chain(outputs).collect();
    }
    let whole = cuts.len() == 1;
    let mut paddings = Vec::with_capacity(steps.len());
    for (j, step) in steps.iter().enumerate() {
        let (padding, output_padding) = if whole {
            (step.padding, step.output_padding)
        } else {
            step.shared_padding(cuts.iter().map(|cut| (&cut.ranges[j], &cut.ranges[j + 1])))
        };
        for cut in &mut cuts {
            let (start, end) = step.unpadded(&cut.ranges[j]);
            cut.skips.push((cut.ranges[j + 1].start as i64 - start - padding) as usize);
            cut.lengths.push((end - start - 2 * padding + output_padding) as usize);
        }
        paddings.push((padding as usize, output_padding as usize));
    }
    (cuts, paddings)
}

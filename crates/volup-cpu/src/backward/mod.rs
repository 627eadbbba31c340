//! The backward pass.
//!
//! Seen from the input, a tap reads outputs at one residue modulo the stride, at a constant distance.
//! So both gradients of the convolution run in the inner loop of the forward pass (`conv`):
//!
//! - the input's ([`input`]) sums over output channels and taps, from a slab of the output's gradient
//!   taken apart by residues;
//! - the weight's ([`weight`]) is, for each tap, a matrix product over positions, from slabs that have
//!   the channels of a position side by side.
//!
//! What follows the convolution is [`epilogue`].

mod axis;
pub(crate) mod epilogue;
pub(crate) mod input;
pub(crate) mod weight;

use crate::Storage;
use volup::MemoryFormat;

/// A tensor of rank 5 in the caller's memory.
#[derive(Clone, Copy, Debug)]
pub struct Volume<'a, T> {
    /// The elements, as they lie in memory.
    pub values: &'a [T],
    /// How they lie there.
    pub format: MemoryFormat,
}

impl<T: Storage> Volume<'_, T> {
    /// Reads elements of one channel, `step` voxels apart, widened; `widened` is scratch memory.
    fn read(
        &self,
        [channels, voxels]: [usize; 2],
        line: usize,
        first: usize,
        step: usize,
        to: &mut [T::Acc],
        widened: &mut [T::Acc],
    ) {
        let Some(last) = to.len().checked_sub(1) else { return };
        match self.format {
            MemoryFormat::Contiguous if step == 1 => {
                T::widen(&self.values[line * voxels + first..][..to.len()], to);
            }
            MemoryFormat::Contiguous => {
                let widened = &mut widened[..last * step + 1];
                T::widen(&self.values[line * voxels + first..][..widened.len()], widened);
                to.iter_mut().zip(widened.iter().step_by(step)).for_each(|(to, &value)| *to = value);
            }
            MemoryFormat::ChannelsLast3d => {
                let sample = line / channels * voxels;
                let from = &self.values[(sample + first) * channels + line % channels..];
                to.iter_mut().zip(from.iter().step_by(step * channels)).for_each(|(to, v)| *to = v.to_acc());
            }
        }
    }
}

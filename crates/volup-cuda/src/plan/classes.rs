//! Channels that lack taps: those of the gradient of an input, where taps of equal residue are channels.

use super::Context;
use super::pack::Operand;
use crate::Variant;

/// Channels of which some have fewer taps than others, as `halo_gemm` has them.
#[derive(Clone, Copy)]
pub(super) struct Classes {
    /// Channels of each.
    pub(super) channels: usize,
    /// How many there are along each axis, and how many of these have all taps; the others lack the first.
    pub(super) counts: [usize; 3],
    pub(super) full: [usize; 3],
}

/// Channels of which some lack taps, in panels.
#[derive(Clone, Copy)]
pub(super) struct Short {
    pub(super) panels: usize,
    pub(super) classes: Classes,
}

impl Short {
    /// Those of a convolution, if a kernel knows of them.
    pub(super) fn of(context: Context<'_>, kernel: &Variant, operand: Operand) -> Option<Short> {
        let classes = context.classes.filter(|_| kernel.param("SHORT").is_some())?;
        let bytes = classes.channels * operand.bytes();
        let lacks = classes.counts != classes.full;
        (lacks && context.request.geometry.conv().groups() == 1 && bytes.is_multiple_of(16))
            .then_some(Short { panels: bytes / 16, classes })
    }

    /// The shares of the taps along each axis that there are.
    pub(super) fn shares(&self, taps: [usize; 3]) -> [f64; 3] {
        let Classes { counts, full, .. } = self.classes;
        [0, 1, 2].map(|axis| {
            let lacking = counts[axis].saturating_sub(full[axis]) as f64 / counts[axis] as f64;
            1.0 - lacking / taps[axis] as f64
        })
    }
}

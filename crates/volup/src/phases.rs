//! The phases of a transposed convolution: dense stride-1 correlations that share no output.
//!
//! Along one axis put `u = o + p`. A tap `t` reaches output `o` only if `t*d = u (mod s)`, so the
//! taps that do depend on the residue `r = u mod s` alone. For `u = s*q + r` and a tap of that
//! residue the input index is `i = q - (t*d - r)/s`: within a phase every tap is one constant
//! offset. No modulo is left in the inner loop, and no multiplication by an inserted zero.

use crate::Axis;
use std::ops::Range;

/// A tap of a phase: output position `q` reads input `q - offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tap {
    /// The index in the kernel.
    pub tap: usize,
    /// How far the input lies before the position: `(t*d - r)/s`.
    pub offset: usize,
}

/// One residue of an axis: the outputs `o = s*q + residue - p` for `q` in `positions`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Phase {
    /// `(o + p) mod s` of all outputs of this phase.
    pub residue: usize,
    /// The positions `q` whose output lies inside [0, O); never empty.
    pub positions: Range<usize>,
    /// The taps that reach this phase; empty where only the bias does.
    pub taps: Vec<Tap>,
}

impl Phase {
    /// The output voxel at position `q`.
    pub fn output(&self, axis: &Axis, q: usize) -> usize {
        q * axis.stride + self.residue - axis.padding
    }
}

/// The phases of an axis that have an output, in ascending residue. Together they cover every
/// output exactly once.
pub fn phases(axis: &Axis) -> Vec<Phase> {
    let Axis { output, kernel, stride, padding, dilation, .. } = *axis;
    // With fewer outputs than residues only those at hand have a phase.
    let mut residues: Vec<usize> = (0..output.min(stride)).map(|o| (o + padding) % stride).collect();
    residues.sort_unstable();
    let mut phases: Vec<Phase> = residues
        .into_iter()
        .map(|residue| {
            let first = padding.saturating_sub(residue).div_ceil(stride);
            let last = (output - 1 + padding - residue) / stride;
            Phase { residue, positions: first..last + 1, taps: Vec::new() }
        })
        .collect();
    for tap in 0..kernel {
        let reach = tap * dilation;
        if let Ok(phase) = phases.binary_search_by_key(&(reach % stride), |phase| phase.residue) {
            phases[phase].taps.push(Tap { tap, offset: reach / stride });
        }
    }
    phases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ConvSpec;
    use crate::spec::tests::{any_axis, pairs_of};
    use proptest::prelude::*;

    fn axis(input: usize, conv: crate::ConvSpecBuilder) -> Axis {
        conv.build().unwrap().geometry(1, [input; 3]).unwrap().axes()[0]
    }

    #[test]
    fn dilation_that_shares_a_factor_with_the_stride_leaves_phases_empty() {
        let axis = axis(5, ConvSpec::builder(1, 1, 3).stride(2).padding(1).dilation(2));
        let taps: Vec<usize> = phases(&axis).iter().map(|phase| phase.taps.len()).collect();
        assert_eq!(taps, [3, 0]);
    }

    #[test]
    fn a_huge_stride_makes_no_more_phases_than_outputs() {
        assert_eq!(phases(&axis(1, ConvSpec::builder(1, 1, 2).stride(1i64 << 40))).len(), 2);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10_000))]

        /// Every output belongs to exactly one phase, and the phase's taps and offsets are exactly
        /// the (input, tap) pairs of the definition.
        #[test]
        fn phases_cover_every_output_once(axis in any_axis()) {
            let mut seen = vec![0; axis.output];
            for phase in phases(&axis) {
                prop_assert!(!phase.positions.is_empty());
                for q in phase.positions.clone() {
                    let o = phase.output(&axis, q);
                    seen[o] += 1;
                    let reads = phase.taps.iter().filter(|tap| (tap.offset..tap.offset + axis.input).contains(&q));
                    let mut pairs: Vec<_> = reads.map(|tap| (q - tap.offset, tap.tap)).collect();
                    pairs.sort_unstable();
                    prop_assert_eq!(pairs, pairs_of(&axis, o));
                }
            }
            prop_assert!(seen.iter().all(|&count| count == 1));
        }
    }
}

//! The taps of an axis, seen from the input.

use std::ops::Range;
use volup::Axis;

/// A tap: input `i` meets output `s*(i + shift) + r`, `r` the residue of this index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tap {
    pub residue: usize,
    pub shift: isize,
}

/// An axis whose outputs are taken apart by their residue modulo the stride, `o = s*q + r`: what a tap
/// reads of one residue lies at a constant distance from the input's position, without gaps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct TapAxis {
    pub axis: Axis,
    /// In the kernel's order.
    pub taps: Vec<Tap>,
    /// The residues that taps reach, ascending.
    pub residues: Vec<usize>,
    /// The least and the largest shift.
    pub shifts: (isize, isize),
}

impl TapAxis {
    pub fn new(axis: &Axis) -> TapAxis {
        let stride = axis.stride as isize;
        let offset = |tap: usize| (tap * axis.dilation) as isize - axis.padding as isize;
        let of_tap = |tap| (offset(tap).rem_euclid(stride) as usize, offset(tap).div_euclid(stride));
        let mut residues: Vec<usize> = (0..axis.kernel).map(|tap| of_tap(tap).0).collect();
        residues.sort_unstable();
        residues.dedup();
        let tap = |tap| {
            let (residue, shift) = of_tap(tap);
            let residue = residues.binary_search(&residue).expect("every tap's residue is listed");
            Tap { residue, shift }
        };
        let taps: Vec<Tap> = (0..axis.kernel).map(tap).collect();
        let shifts = taps.iter().map(|tap| tap.shift);
        let shifts = (shifts.clone().min().unwrap_or(0), shifts.max().unwrap_or(0));
        TapAxis { axis: *axis, taps, residues, shifts }
    }

    /// How many outputs there are of the residue of an index.
    pub fn outputs(&self, residue: usize) -> usize {
        self.axis.output.saturating_sub(self.residues[residue]).div_ceil(self.axis.stride)
    }

    /// How much further than an input's own range its taps reach.
    pub fn reach(&self) -> usize {
        (self.shifts.1 - self.shifts.0) as usize
    }

    /// Where the taps of some inputs begin to read, among the outputs of a residue.
    pub fn first(&self, inputs: &Range<usize>) -> isize {
        inputs.start as isize + self.shifts.0
    }

    /// Those of some inputs that a tap connects to an output.
    pub fn connected(&self, tap: Tap, inputs: &Range<usize>) -> Range<usize> {
        let end = self.outputs(tap.residue) as isize - tap.shift;
        let start = inputs.start.max((-tap.shift).max(0) as usize);
        start..inputs.end.min(end.max(0) as usize).max(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use volup::ConvSpec;

    proptest! {
        /// The pairs of an input and a tap, and the output of each, are those of the definition.
        #[test]
        fn taps_connect_what_the_definition_does(
            (input, kernel, stride, padding) in (1usize..9, 1usize..6, 1usize..5, 0usize..6),
            dilation in 1usize..5,
        ) {
            let conv = ConvSpec::builder(1, 1, kernel).stride(stride).padding(padding).dilation(dilation);
            let geometry = conv.build().unwrap().geometry(1, [input; 3]);
            prop_assume!(geometry.is_ok());
            let axis = TapAxis::new(&geometry.unwrap().axes()[0]);
            for (index, &tap) in axis.taps.iter().enumerate() {
                let connected = axis.connected(tap, &(0..input));
                for i in 0..input {
                    let o = (i * stride + index * dilation) as isize - padding as isize;
                    let inside = (0..axis.axis.output as isize).contains(&o);
                    prop_assert_eq!(connected.contains(&i), inside);
                    if inside {
                        let q = i as isize + tap.shift;
                        prop_assert_eq!(q * stride as isize + axis.residues[tap.residue] as isize, o);
                        prop_assert!(axis.first(&(i..i + 1)) <= q && q < axis.outputs(tap.residue) as isize);
                    }
                }
            }
        }
    }
}

//! The axes of a matrix product whose rows are positions: how far apart these are, and the residues.

use super::{Argument, gcd, int, push};
use volup::{Axis, Result};

/// One axis of the packed input and of the phases.
#[derive(Clone, Copy, Debug)]
pub(super) struct PhaseAxis {
    pub(super) axis: Axis,
    /// The first position that any output belongs to.
    pub(super) first: usize,
    /// Positions a row, plane or sample is apart from the next.
    pub(super) pitch: usize,
    /// Positions that any output belongs to.
    pub(super) positions: usize,
    /// The largest offset of a tap.
    pub(super) reach: usize,
    /// How far apart the offsets of all taps are: a number that divides them.
    pub(super) apart: usize,
}

/// The outputs along an axis that taps reach: every `step`-th from `first` on. Where stride and dilation have a common
/// divisor, or there is one tap, none reaches any other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lattice {
    pub(super) step: usize,
    pub(super) first: usize,
    /// The axis as these outputs see it: stride and dilation without their common divisor.
    pub(super) axis: Axis,
}

/// How many taps of an axis each residue of its outputs has.
pub(super) fn taps_of_residues(axis: Axis) -> Vec<usize> {
    let mut taps = vec![0; axis.stride];
    // Output `r` has tap `k` where r + padding = k*dilation, but for multiples of the stride.
    for k in 0..axis.kernel {
        taps[(k * axis.dilation + axis.stride * axis.padding - axis.padding) % axis.stride] += 1;
    }
    taps
}

impl Lattice {
    /// Nothing if no tap reaches any output.
    pub(super) fn new(axis: Axis) -> Option<Lattice> {
        // One tap has no distance to another.
        let dilation = if axis.kernel == 1 { axis.stride } else { axis.dilation };
        let step = gcd(axis.stride, dilation);
        // The first output for which output + padding is a multiple of the step.
        let first = axis.padding.next_multiple_of(step) - axis.padding;
        let mut seen = axis;
        seen.output = axis.output.checked_sub(first)?.div_ceil(step);
        seen.stride = axis.stride / step;
        seen.padding = (first + axis.padding) / step;
        seen.dilation = dilation / step;
        (seen.output > 0).then_some(Lattice { step, first, axis: seen })
    }
}

/// Where the first output on lattices lies, in elements, and how far apart they are along each axis, if all outputs have these strides.
pub(super) fn strides_of_lattices(lattices: &[Lattice; 3], strides: [usize; 3]) -> (usize, [usize; 3]) {
    let first = strides.iter().zip(lattices).map(|(stride, lattice)| stride * lattice.first).sum();
    (first, [0, 1, 2].map(|axis| strides[axis] * lattices[axis].step))
}

impl PhaseAxis {
    pub(super) fn new(axis: Axis) -> PhaseAxis {
        let Axis { input, output, kernel, stride, padding, dilation, .. } = axis;
        let first = padding / stride;
        let last = (padding + output - 1) / stride;
        let positions = last - first + 1;
        let reach = dilation * (kernel - 1) / stride;
        let left = reach.saturating_sub(first);
        let right = last.saturating_sub(input - 1);
        let pitch = (input + left.max(right)).max(positions);
        let apart = (0..kernel).map(|tap| tap * dilation / stride).fold(0, gcd).max(1);
        PhaseAxis { axis, first, pitch, positions, reach, apart }
    }

    /// Where the first position's residue 0 lies in the output.
    pub(super) fn shift(&self) -> i64 {
        (self.axis.stride * self.first) as i64 - self.axis.padding as i64
    }

    /// Stride over its greatest common divisor with the dilation, and the inverse of dilation over
    /// that divisor modulo it: a residue's first tap is `residue/gcd * inverse mod step`.
    pub(super) fn step_and_inverse(&self) -> (usize, usize) {
        let (stride, dilation) = (self.axis.stride, self.axis.dilation);
        let gcd = gcd(stride, dilation);
        let step = stride / gcd;
        let inverse = (0..step).find(|t| t * (dilation / gcd) % step == 1 % step).unwrap_or(0);
        (step, inverse)
    }

    /// How many taps each residue of positions has: that of an output and the padding.
    pub(super) fn taps_of_residues(&self) -> Vec<usize> {
        let mut axis = self.axis;
        axis.padding = 0;
        taps_of_residues(axis)
    }

    /// Positions from each tap of a residue to the next.
    pub(super) fn back(&self) -> usize {
        self.axis.dilation / gcd(self.axis.stride, self.axis.dilation)
    }

    /// Offsets of taps: multiples of how far apart they are, below so many of them.
    pub(super) fn offsets(&self) -> usize {
        self.reach / self.apart + 1
    }

    /// Whether a residue has a tap at an offset of that number.
    pub(super) fn hit(&self, residue: usize, offset: usize) -> bool {
        let Axis { kernel, stride, dilation, .. } = self.axis;
        let far = offset * self.apart * stride + residue;
        far.is_multiple_of(dilation) && far / dilation < kernel
    }

    /// Inputs that so many neighbouring positions need.
    pub(super) fn halo(&self, positions: usize) -> usize {
        positions + (self.offsets() - 1) * self.apart
    }

    /// Adds what kernels are told of an axis whose residues are phases.
    pub(super) fn push(&self, arguments: &mut Vec<Argument>) -> Result<()> {
        let (step, inverse) = self.step_and_inverse();
        let Axis { kernel, stride, dilation, output, .. } = self.axis;
        push(arguments, [kernel, stride, dilation, step, inverse, self.first])?;
        arguments.push((self.shift() as i32).into());
        arguments.push(int(output)?.into());
        Ok(())
    }
}

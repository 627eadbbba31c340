//! How the backward pass sees a batch: in parts, each by rows in which a tap is a constant number of rows further on.

use super::{Argument, Context, Task, gcd, push};
use volup::{Axis, Error, Result};

/// Bytes of an output that is taken in parts.
#[cfg(not(test))]
fn large() -> usize {
    1 << 26
}
#[cfg(test)]
use super::tests::large;
/// The fewest parts where the convolution's output is made again, and the most: launches of less work are slower.
const FEWEST_PARTS: usize = 4;
const MOST_PARTS: usize = 16;

/// One axis as the rows see it: taps of equal residue are a class.
#[derive(Clone, Copy, Debug)]
pub(super) struct TapAxis {
    pub(super) axis: Axis,
    /// Classes, which are those of the first taps.
    pub(super) classes: usize,
    /// From one tap of a class to its next: taps, and rows.
    pub(super) step: usize,
    pub(super) apart: usize,
    /// Taps of the class that has most.
    pub(super) count: usize,
    /// The input's voxels and as many more as taps reach.
    pub(super) rows: usize,
}

impl TapAxis {
    pub(super) fn new(axis: Axis) -> TapAxis {
        let common = gcd(axis.stride, axis.dilation);
        let (step, apart) = (axis.stride / common, axis.dilation / common);
        let count = axis.kernel.div_ceil(step);
        TapAxis {
            axis,
            classes: step.min(axis.kernel),
            step,
            apart,
            count,
            rows: axis.input + (count - 1) * apart,
        }
    }

    /// What kernels are told that go by the definition.
    fn push(&self, arguments: &mut Vec<Argument>) -> Result<()> {
        let Axis { input, output, stride, padding, dilation, kernel, .. } = self.axis;
        push(
            arguments,
            [
                input,
                output,
                stride,
                padding,
                dilation,
                kernel,
                self.rows,
                self.classes,
                self.step,
                self.apart,
            ],
        )
    }
}

/// How both operands of a part of the batch lie in rows.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// Samples of a part, of which there are so many.
    pub(super) batch: usize,
    pub(super) parts: usize,
    pub(super) axes: [TapAxis; 3],
    pub(super) groups: usize,
    pub(super) group_in: usize,
    pub(super) group_out: usize,
    /// Elements of a group in a row of the gradient: of each class its channels, then zeros to a multiple of 16 bytes.
    pub(super) slots: usize,
    /// Whether there are such zeros.
    pub(super) padded: bool,
    /// Elements of a row of the input.
    pub(super) x_pitch: usize,
    /// Rows.
    pub(super) count: usize,
    /// Rows from a panel of the gradient to its next, where the same 16 bytes of neighbouring rows lie side by side; else a
    /// row lies after the other.
    pub(super) panel_rows: Option<usize>,
}

impl Rows {
    pub(super) fn new(context: Context<'_>) -> Result<Rows> {
        let (geometry, conv) = (&context.request.geometry, context.request.geometry.conv());
        let vector = 16 / context.operand_bytes();
        let axes = geometry.axes().map(TapAxis::new);
        let groups = conv.groups();
        let (group_in, group_out) = (conv.in_channels() / groups, conv.out_channels() / groups);
        let filled = group_out * axes.iter().map(|axis| axis.classes).product::<usize>();
        let slots =
            if (groups * filled).is_multiple_of(vector) { filled } else { filled.next_multiple_of(vector) };
        let padded = slots != filled;
        let x_pitch = conv.in_channels().next_multiple_of(vector);
        let parts = parts_of(context);
        let batch = geometry.batch() / parts;
        let count = axes.iter().map(|axis| axis.rows).try_fold(batch, usize::checked_mul);
        // Voxels are counted in 32 bits.
        let count =
            count.filter(|&count| count < 1 << 30).ok_or(Error::Overflow { what: "voxels on the GPU" })?;
        Ok(Rows {
            batch,
            parts,
            axes,
            groups,
            group_in,
            group_out,
            slots,
            padded,
            x_pitch,
            count,
            panel_rows: None,
        })
    }

    /// Takes the batch as one part: where nothing is written by rows, there is no memory to save.
    pub(super) fn take_all(&mut self) {
        self.batch *= self.parts;
        self.parts = 1;
    }

    /// Elements of a row of the gradient.
    pub(super) fn pitch(&self) -> usize {
        self.groups * self.slots
    }

    /// Elements that the gradient's rows take.
    pub(super) fn elements(&self) -> usize {
        self.panel_rows.unwrap_or(self.count) * self.pitch()
    }

    /// Elements of so many bytes each from a row of the gradient to its next, and from 16 bytes of a row to the next.
    pub(super) fn layout(&self, element: usize) -> [Argument; 2] {
        let vector = 16 / element;
        let apart = match self.panel_rows {
            Some(rows) => [vector, vector * rows],
            None => [self.pitch(), vector],
        };
        apart.map(|apart| Argument::I64(apart as i64))
    }

    pub(super) fn taps(&self) -> usize {
        self.axes.iter().map(|axis| axis.axis.kernel).product()
    }

    pub(super) fn push_axes(&self, arguments: &mut Vec<Argument>) -> Result<()> {
        self.axes.iter().try_for_each(|axis| axis.push(arguments))
    }
}

/// Parts that the batch is taken in: one where rows are of 16 bits; two halves of a large one where they are of 32, so that they
/// and what is made of them take no more memory; at least four where the convolution's output is made again, which is then one
/// part of it at a time. Parts are of as many samples each, and start at whole vectors.
fn parts_of(context: Context<'_>) -> usize {
    let geometry = &context.request.geometry;
    let (batch, again) = (geometry.batch(), makes_again(context));
    let samples = [geometry.input_shape(), geometry.output_shape()].map(|shape| sample_bytes(context, shape));
    let narrow = context.operand_bytes() * context.halves.max(1) <= 2;
    if batch * samples[1] <= large() || narrow && !again {
        return 1;
    }
    let whole = |&parts: &usize| {
        batch.is_multiple_of(parts)
            && samples.iter().all(|sample| (batch / parts * sample).is_multiple_of(16))
    };
    let enough = FEWEST_PARTS.min(batch)..=MOST_PARTS;
    let enough = if again { enough.into_iter().find(whole) } else { None };
    enough.or_else(|| (2..FEWEST_PARTS).rev().filter(|&parts| again || parts == 2).find(whole)).unwrap_or(1)
}

/// Whether what the forward pass would have saved is made again.
pub(super) fn makes_again(context: Context<'_>) -> bool {
    matches!(context.request.task, Task::Recompute(_)) && !context.request.block.is_bare()
}

/// Bytes of a sample of a tensor.
pub(super) fn sample_bytes(context: Context<'_>, [_, sizes @ ..]: [usize; 5]) -> usize {
    sizes.iter().product::<usize>() * context.request.dtype.size()
}

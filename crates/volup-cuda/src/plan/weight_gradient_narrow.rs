//! Planning `weight_gradient_narrow`: how the rows are shared out. The kernel's file says what the numbers mean.

use super::rows::Rows;
use super::weight_gradient::{Shares, of_kind, operands};
use super::{Argument, Context, RESERVED, SHARED, Step, product, push, size};
use crate::Variant;
use std::fmt;
use volup::Result;

/// Slots of the gradient's rows and pairs of shift and channel that a block has, and stages.
const SLOTS: usize = 32;
const COLUMNS: usize = 24;
const STAGES: usize = 4;
/// Bytes after each panel.
const PAD: usize = 64;
/// Rows of a stage, of 16 bits and of 32.
const KC: [usize; 2] = [128, 64];

/// Bytes a second from the second-level cache.
const CACHE: f64 = 4.5e12;
/// What a stage takes at least, of 16 bits, tf32, two of them, and two fp16, in seconds.
const STAGE: [f64; 4] = [0.7e-6, 0.5e-6, 1.2e-6, 0.7e-6];

/// A plan of this kernel.
#[derive(Clone)]
pub(super) struct WeightGradientNarrow<'a> {
    kernel: &'a Variant,
    /// Blocks of a share.
    items: usize,
    /// Pairs of shifts along depth and height that a block has, at most.
    windows: usize,
    pub(super) splits: usize,
    /// Rows of a share.
    share: usize,
    pub(super) seconds: f64,
}

impl fmt::Display for WeightGradientNarrow<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "weight by {SLOTS}x{COLUMNS} of all shifts, {} shares of {} rows", self.splits, self.share)
    }
}

impl<'a> WeightGradientNarrow<'a> {
    /// The plan, if the kernel is there and the input's rows are of 16 bytes.
    pub(super) fn new(context: Context<'a>, rows: &Rows) -> Option<WeightGradientNarrow<'a>> {
        let (types, kind) = operands(context)?;
        let vector = 16 / context.operand_bytes();
        // Of two fp16 a row of the input holds both.
        let fits = rows.x_pitch == vector && rows.group_in * context.halves.max(1) <= vector;
        if rows.groups > 1 || !fits {
            return None;
        }
        let kernel = context.kernel("weight_gradient_narrow", &types, &[("KIND", kind)]).ok()?;
        let [d, h, w] = rows.axes;
        let columns = product(&[d.count, h.count, w.count, rows.group_in])?;
        let items = product(&[columns.div_ceil(COLUMNS), rows.slots.div_ceil(SLOTS)])?;
        let pair = |column: usize| column / rows.group_in / w.count;
        let of_block = |first: usize| pair((first + COLUMNS).min(columns) - 1) - pair(first) + 1;
        let windows = (0..columns).step_by(COLUMNS).map(of_block).max()?;
        let plan = WeightGradientNarrow { kernel, items, windows, splits: 1, share: 0, seconds: 0.0 };
        let shared = plan.shared_bytes(rows);
        let ctas = size(kernel, "CTAS").min(SHARED / (shared + kernel.shared_bytes as usize + RESERVED));
        if items >= 1 << 24 || ctas == 0 {
            return None;
        }
        let (kc, places) = (plan.stage_rows(), context.device.multiprocessors * ctas);
        let stage = ((shared / STAGES * places) as f64 / CACHE).max(of_kind(kind, &STAGE));
        let sums = rows.taps() * rows.group_in * rows.group_out * 4;
        let Shares { splits, share, seconds } = Shares::best(rows.count, (kc, stage), [items, places], sums)?;
        Some(WeightGradientNarrow { splits, share, seconds, ..plan })
    }

    /// Rows of a stage.
    fn stage_rows(&self) -> usize {
        KC[usize::from(self.kernel.param("KIND") != Some(0))]
    }

    /// Bytes of shared memory of a block.
    fn shared_bytes(&self, rows: &Rows) -> usize {
        let (kc, [_, _, w]) = (self.stage_rows(), rows.axes);
        // What is of 16 bits, or of both parts.
        let element = if self.kernel.param("KIND") == Some(0) { 2 } else { 4 };
        STAGES * (SLOTS * element / 16 * (16 * kc + PAD) + self.windows * (kc + (w.count - 1) * w.apart) * 16)
    }

    /// The launch, from the rows of the input and of the gradient to the shares' sums.
    pub(super) fn step(&self, context: Context<'_>, rows: &Rows, operands: [Argument; 3]) -> Result<Step> {
        let [d, h, w] = rows.axes;
        let mut arguments = operands.to_vec();
        push(&mut arguments, [rows.count, d.apart * h.rows * w.rows, h.apart * w.rows, w.apart])?;
        push(&mut arguments, [rows.group_in, rows.group_out, rows.slots])?;
        for axis in rows.axes {
            push(&mut arguments, [axis.axis.kernel, axis.classes, axis.step, axis.count])?;
        }
        push(&mut arguments, [self.windows, self.share])?;
        arguments.extend(rows.layout(context.operand_bytes()));
        arguments.extend((context.halves == 2).then(|| Argument::I64(rows.elements() as i64)));
        let (grid, shared) = ([self.items as u32, self.splits as u32, 1], self.shared_bytes(rows) as u32);
        Ok(Step::Launch { variant: *self.kernel, grid, shared, arguments, overlap: false })
    }
}

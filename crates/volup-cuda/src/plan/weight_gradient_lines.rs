//! Planning `weight_gradient_lines`: how lines are cut in strips and shared out. The kernel's file says what the numbers mean.

use super::rows::Rows;
use super::weight_gradient::{of_kind, operands};
use super::{Argument, Context, RESERVED, SHARED, Step, product, push, size, strides};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Taps of a block, bytes of shared memory before its rings, and of 32 bits the rows that later taps may be further on.
const TAPS: usize = 9;
const BARRIERS: usize = 1024;
const HALO: usize = 2;
/// Lines of the input that the rings hold, at least and at most, and strips of a line.
const AHEAD: std::ops::RangeInclusive<usize> = 3..=8;
const STRIPS: usize = 8;
/// Steps of a strip: a warp copies a channel's.
const MOST_STEPS: usize = 16;
/// Products and sums a second of one multiprocessor, of 16 bits, of tf32, of two of them, and of two fp16.
const RATES: [f64; 4] = [5.0e12, 2.3e12, 0.8e12, 1.5e12];
/// What it takes to turn eight rows of as many channels as there are threads for, or of twice as many in tf32, in seconds.
const TURN: f64 = 1.05e-6;
const TURNED: usize = 128;
/// Bytes a second from the second-level cache.
const CACHE: f64 = 4.5e12;
/// What a block takes beside its lines, and a line beside what it copies and multiplies, in seconds.
const BLOCK: f64 = 6e-6;
const LINE: f64 = 0.06e-6;
/// The most shares, and the fewest lines of one.
const MOST_SPLITS: usize = 512;
const FEWEST_LINES: usize = 4;

/// A plan of this kernel.
#[derive(Clone)]
pub(super) struct WeightGradientLines<'a> {
    kernel: &'a Variant,
    /// Blocks of a share.
    items: usize,
    /// Strips of a line, and steps of one.
    strips: usize,
    steps: usize,
    /// Lines of the input that shared memory holds.
    ahead: usize,
    pub(super) splits: usize,
    /// Lines of a share.
    share: usize,
    pub(super) seconds: f64,
}

impl fmt::Display for WeightGradientLines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [m, n] = tile(self.kernel);
        write!(f, "weight by lines of {m}x{n}x{TAPS}, {} strips of {} steps, ", self.strips, self.steps)?;
        write!(f, "{} lines ahead, {} shares of {} lines", self.ahead, self.splits, self.share)
    }
}

/// Whether operands are of 16 bits.
fn is_narrow(kind: i64) -> bool {
    [0, 2].contains(&kind)
}

/// Channels of the input and of the gradient that a block has.
fn tile(kernel: &Variant) -> [usize; 2] {
    [64 * size(kernel, "MI"), size(kernel, "NC")]
}

/// Lines of the gradient from the first that a block's taps read of one of the input to the last, at most.
fn span(rows: &Rows) -> usize {
    let [_, h, w] = rows.axes;
    let (plane, line) = (h.axis.kernel * w.axis.kernel, |tap: usize| tap / w.axis.kernel / h.step * h.apart);
    let of = |first: usize| line((first + TAPS).min(plane) - 1) - line(first);
    (0..plane).step_by(TAPS).map(of).max().unwrap_or(0)
}

/// Whether the input's channels lie together, and whether copies of 16 bytes may read it as it lies.
fn vectors(context: Context<'_>, rows: &Rows) -> bool {
    let vector = 16 / context.operand_bytes();
    let channels = match context.request.input_format {
        MemoryFormat::ChannelsLast3d => rows.groups * rows.group_in,
        MemoryFormat::Contiguous => return rows.axes[2].axis.input.is_multiple_of(vector),
    };
    channels.is_multiple_of(vector) && (rows.groups == 1 || rows.group_in.is_multiple_of(vector))
}

/// Bytes of a line of the gradient, and of one of the input, in shared memory.
fn line_bytes(kernel: &Variant, rows: &Rows, steps: usize, last: bool) -> [usize; 2] {
    let ([m, n], [_, h, w]) = (tile(kernel), rows.axes);
    let kind = kernel.param("KIND").unwrap_or(0);
    let (narrow, parts) = (is_narrow(kind), if kind > 1 { 2 } else { 1 });
    let gradient = if narrow {
        let panel = 16 * ((16 * steps + (w.count - 1) * w.apart) | 1);
        h.classes * w.classes * n / 8 * panel
    } else {
        h.classes * w.axis.kernel * 2 * steps * n * 16
    };
    let input = match (last, narrow) {
        (false, _) => m * (32 * steps + 16),
        (true, true) => 16 * steps * (2 * m + 16),
        (true, false) => 8 * steps * (4 * m + 32),
    };
    // float32 of the input is taken apart where it is multiplied.
    [parts * gradient, if kind == 2 { 2 } else { 1 } * input]
}

impl<'a> WeightGradientLines<'a> {
    /// The plans for each kernel that applies.
    pub(super) fn all(context: Context<'a>, rows: &Rows) -> Vec<WeightGradientLines<'a>> {
        let Some((types, kind)) = operands(context) else { return Vec::new() };
        let [_, _, w] = rows.axes;
        // Channels of the gradient are read by vectors of 16 bytes, or pairs.
        let vector = if is_narrow(kind) { 8 } else { 2 };
        let whole = rows.group_out.is_multiple_of(vector) && rows.slots.is_multiple_of(vector);
        if !vectors(context, rows) || !whole || !is_narrow(kind) && (w.count - 1) * w.apart > HALO {
            return Vec::new();
        }
        let kernels = context
            .kernels("weight_gradient_lines", &types)
            .filter(|kernel| kernel.param("KIND") == Some(kind));
        let cut = |kernel| {
            let most = STRIPS.min(w.axis.input);
            let plans = (1..=most).filter_map(|strips| Self::with(context, rows, kernel, strips));
            plans.min_by(|one, other| one.seconds.total_cmp(&other.seconds))
        };
        kernels.filter_map(cut).collect()
    }

    /// The best plan for a kernel and lines in so many strips.
    fn with(context: Context<'_>, rows: &Rows, kernel: &'a Variant, strips: usize) -> Option<Self> {
        let ([m, n], [d, h, w]) = (tile(kernel), rows.axes);
        let kind = kernel.param("KIND").unwrap_or(0);
        let step = 32 / context.operand_bytes();
        let element = context.operand_bytes() * context.halves.max(1);
        let steps = w.axis.input.div_ceil(strips).div_ceil(step);
        if (strips - 1) * steps * step >= w.axis.input || steps > MOST_STEPS {
            return None;
        }
        let span = span(rows);
        let last = context.request.input_format == MemoryFormat::ChannelsLast3d;
        let [of_gradient, of_input] = line_bytes(kernel, rows, steps, last);
        let bytes = |ahead: usize| BARRIERS + (span + ahead) * of_gradient + ahead * of_input;
        let ahead = AHEAD.rev().find(|&ahead| bytes(ahead) <= SHARED - RESERVED)?;
        let taps = h.axis.kernel * w.axis.kernel;
        let tiles = [rows.group_out.div_ceil(n), rows.group_in.div_ceil(m), rows.groups];
        let items = product(&[taps.div_ceil(TAPS), d.axis.kernel, tiles[0], tiles[1], tiles[2]]);
        let items = items.filter(|&items| items < 1 << 24)?;
        let lines =
            product(&[rows.batch, d.axis.input, strips, h.axis.input]).filter(|&lines| lines < 1 << 30)?;

        let places = context.device.multiprocessors;
        let compute = (2 * TAPS * m * n * steps * step) as f64 / of_kind(kind, &RATES);
        let copied = (steps * step + (w.count - 1) * w.apart) * h.classes * w.classes * n * element;
        let copy = |bytes: usize| (bytes * places) as f64 / CACHE;
        let turned = h.classes * w.classes * steps * n / if kind == 1 { 2 } else { 1 };
        let turns = if is_narrow(kind) { 0.0 } else { turned.div_ceil(TURNED) as f64 * TURN };
        let line = compute.max(copy(copied + steps * step * m * element)).max(turns) + LINE;
        let elements = (rows.taps() * rows.groups * rows.group_in * rows.group_out * 4) as f64;
        let plan = |splits: usize| {
            let share = lines.div_ceil(splits);
            let splits = lines.div_ceil(share);
            let waves = (items * splits).div_ceil(places) as f64;
            let runs = share as f64 / h.axis.input as f64 + 1.0;
            let fill = runs * span as f64 * (copy(copied).max(turns) + LINE);
            let seconds =
                waves * (BLOCK + share as f64 * line + fill) + 2.0 * splits as f64 * elements / CACHE + 6e-6;
            WeightGradientLines { kernel, items, strips, steps, ahead, splits, share, seconds }
        };
        let most = (lines / FEWEST_LINES).clamp(1, MOST_SPLITS);
        (1..=most).map(plan).min_by(|one, other| one.seconds.total_cmp(&other.seconds))
    }

    /// The launch, from the input, of which low parts are so many elements after high ones, and the rows of the gradient to the shares'
    /// sums; `control` gets the input's largest magnitude.
    pub(super) fn step(
        &self,
        context: Context<'_>,
        rows: &Rows,
        operands: [Argument; 4],
        low: usize,
    ) -> Result<Step> {
        let [d, h, w] = rows.axes;
        let mut arguments = operands.to_vec();
        push(&mut arguments, [rows.batch, d.axis.input, h.axis.input, w.axis.input])?;
        push(&mut arguments, [self.strips, self.steps])?;
        push(&mut arguments, [rows.groups, rows.group_in, rows.group_out, rows.slots])?;
        for axis in rows.axes {
            push(&mut arguments, [axis.rows, axis.apart, axis.axis.kernel, axis.classes, axis.step])?;
        }
        let span = span(rows);
        push(&mut arguments, [self.ahead, span + self.ahead, self.share])?;
        let format = context.request.input_format;
        let strides = strides(context.request.geometry.input_shape(), format);
        arguments.extend(strides.map(|stride| Argument::I64(stride as i64)));
        arguments.extend(rows.layout(context.operand_bytes()));
        if context.halves == 2 {
            arguments.extend([low, rows.elements()].map(|apart| Argument::I64(apart as i64)));
        }
        let [of_gradient, of_input] =
            line_bytes(self.kernel, rows, self.steps, format == MemoryFormat::ChannelsLast3d);
        let shared = BARRIERS + (span + self.ahead) * of_gradient + self.ahead * of_input;
        debug_assert!(shared <= SHARED - RESERVED);
        Ok(Step::Launch {
            variant: *self.kernel,
            grid: [self.items as u32, self.splits as u32, 1],
            shared: shared as u32,
            arguments,
            overlap: false,
        })
    }
}

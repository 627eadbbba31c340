//! Planning `weight_gradient`: which tile, and how the rows are shared out. The kernel's file says what the numbers mean.

use super::rows::{Rows, TapAxis};
use super::{Argument, Context, RESERVED, SHARED, Step, product, push, size};
use crate::Variant;
use std::fmt;
use volup::{DType, Precision, Result};

/// Rows of a stage, of 16 bits and of 32, those that later taps read, stages, and elements after each row.
const KC: [usize; 2] = [64, 32];
const HALO: usize = 4;
const STAGES: usize = 3;
const PAD: usize = 8;

/// Products and sums a second of one multiprocessor, of 16 bits, of tf32, and of two of them, with as many warps
/// as hide the latency of each other's instructions; fewer are slower.
const RATES: [f64; 3] = [3.1e12, 1.26e12, 0.58e12];
const WARPS: usize = 12;
/// Bytes a second from the second-level cache.
const CACHE: f64 = 4.5e12;
/// What a block takes beside its stages, and a stage at least, in seconds.
const BLOCK: f64 = 4e-6;
const STAGE: f64 = 0.35e-6;
/// The most shares, and the fewest rows of one.
const MOST_SPLITS: usize = 512;
const FEWEST_ROWS: usize = 256;

/// A plan of this kernel.
#[derive(Clone)]
pub(super) struct WeightGradient<'a> {
    kernel: &'a Variant,
    /// Blocks of a share.
    items: usize,
    pub(super) splits: usize,
    /// Rows of a share.
    share: usize,
    pub(super) seconds: f64,
}

impl fmt::Display for WeightGradient<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [m, n, taps] = tile(self.kernel);
        write!(f, "weight by tiles of {m}x{n}x{taps}, {} shares of {} rows", self.splits, self.share)
    }
}

/// How the rows are shared out among blocks.
#[derive(Clone, Copy)]
pub(super) struct Shares {
    pub(super) splits: usize,
    /// Rows of a share.
    pub(super) share: usize,
    /// The time that all is expected to take.
    pub(super) seconds: f64,
}

impl Shares {
    /// The best of `count` rows in stages of `kc` that take so many seconds each, for `items` blocks a share of which `places`
    /// run at once, with sums of so many bytes.
    pub(super) fn best(
        count: usize,
        (kc, stage): (usize, f64),
        [items, places]: [usize; 2],
        bytes: usize,
    ) -> Option<Shares> {
        let with = |splits: usize| {
            let share = count.div_ceil(splits).next_multiple_of(kc);
            let splits = count.div_ceil(share);
            let waves = (items * splits).div_ceil(places) as f64;
            let seconds = waves * (BLOCK + (share / kc) as f64 * stage)
                + 2.0 * splits as f64 * bytes as f64 / CACHE
                + 6e-6;
            Shares { splits, share, seconds }
        };
        let most = (count / FEWEST_ROWS).clamp(1, MOST_SPLITS);
        (1..=most).map(with).min_by(|one, other| one.seconds.total_cmp(&other.seconds))
    }
}

/// What is of a kind of numbers, of 16 bits, tf32, two of them, and two fp16 where there are kernels of these.
pub(super) fn of_kind(kind: i64, all: &[f64]) -> f64 {
    all[match kind {
        0 => 0,
        1 => 1,
        2 => 3,
        _ => 2,
    }]
}

/// Channels of a row of the gradient, of one of the input, and shifts that a block has.
fn tile(kernel: &Variant) -> [usize; 3] {
    let of = |name| size(kernel, name);
    [of("WARP_M") * of("WARPS_M"), of("WARP_N") * of("WARPS_N"), of("TAPS")]
}

/// Rows of a stage.
fn stage_rows(kernel: &Variant) -> usize {
    KC[usize::from(kernel.param("KIND") != Some(0))]
}

/// The types and the `KIND` of kernels that multiply gradients on tensor cores; none of float64.
pub(super) fn operands(context: Context<'_>) -> Option<(Vec<&'static str>, i64)> {
    match (context.request.dtype, context.request.precision) {
        (DType::F64, _) => None,
        (DType::F32, Precision::Tf32) if context.halves == 1 => Some((vec!["f16"], 0)),
        (DType::F32, Precision::Ieee) if context.halves == 2 => Some((vec![], 2)),
        (DType::F32, Precision::Tf32) => Some((vec![], 1)),
        (DType::F32, Precision::Ieee) => Some((vec![], 3)),
        (DType::F16 | DType::Bf16, _) => Some((vec![context.type_name()], 0)),
    }
}

impl<'a> WeightGradient<'a> {
    /// The plans that may be the fastest, the one that is expected to be first, if the kernel is there and applies.
    pub(super) fn all(context: Context<'a>, rows: &Rows) -> Vec<WeightGradient<'a>> {
        let Some((types, kind)) = operands(context) else { return Vec::new() };
        let kernels =
            context.kernels("weight_gradient", &types).filter(|kernel| kernel.param("KIND") == Some(kind));
        let mut all: Vec<_> =
            kernels.filter_map(|kernel| WeightGradient::with(context, rows, kernel, kind)).collect();
        all.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        all
    }

    /// The best plan for a kernel.
    fn with(context: Context<'_>, rows: &Rows, kernel: &'a Variant, kind: i64) -> Option<WeightGradient<'a>> {
        let [m, n, taps] = tile(kernel);
        let [d, h, w] = rows.axes;
        let halo = if taps > 1 { HALO } else { 0 };
        if (taps - 1) * w.apart > halo || taps > w.count {
            return None;
        }
        let (all_m, all_n) = (rows.pitch(), rows.groups * rows.group_in);
        let (tiles_m, tiles_n) = (all_m.div_ceil(m), all_n.div_ceil(n));
        let shifts = w.count.div_ceil(taps) * h.count * d.count;
        let items = product(&[shifts, tiles_m, tiles_n]).filter(|&items| items < 1 << 24)?;
        let (busy, kc) = (busy_items(rows, [m, n, taps]), stage_rows(kernel));

        let element = context.operand_bytes();
        let (device, ctas) = (context.device.multiprocessors, size(kernel, "CTAS"));
        let warps = ctas * size(kernel, "WARPS_M") * size(kernel, "WARPS_N");
        let rate = of_kind(kind, &RATES) * (warps as f64 / WARPS as f64).min(1.0);
        // The blocks of a multiprocessor share its rate.
        let compute = (2 * m * n * taps * kc) as f64 / rate * ctas as f64;
        let bytes = (((kc + halo) * m + kc * n) * element) as f64;
        let stage = compute.max(bytes * (device * ctas) as f64 / CACHE).max(STAGE);
        let places = device * ctas;
        let sums = rows.taps() * all_n * rows.group_out * 4;
        let Shares { splits, share, seconds } = Shares::best(rows.count, (kc, stage), [busy, places], sums)?;
        Some(WeightGradient { kernel, items, splits, share, seconds })
    }

    /// The launch, from the rows of the input and of the gradient to the shares' sums.
    pub(super) fn step(&self, rows: &Rows, operands: [Argument; 3]) -> Result<Step> {
        let [d, h, w] = rows.axes;
        let mut arguments = operands.to_vec();
        push(&mut arguments, [rows.count, rows.x_pitch, rows.pitch()])?;
        push(&mut arguments, [d.apart * h.rows * w.rows, h.apart * w.rows, w.apart])?;
        push(&mut arguments, [rows.groups, rows.group_in, rows.group_out, rows.slots])?;
        for axis in rows.axes {
            push(&mut arguments, [axis.axis.kernel, axis.classes, axis.step, axis.count])?;
        }
        push(&mut arguments, [self.splits, self.share])?;
        let shared = shared_bytes(self.kernel);
        debug_assert!(shared * size(self.kernel, "CTAS") <= SHARED - RESERVED * size(self.kernel, "CTAS"));
        Ok(Step::Launch {
            variant: *self.kernel,
            grid: [self.items as u32, self.splits as u32, 1],
            shared: shared as u32,
            arguments,
            overlap: false,
        })
    }
}

/// Bytes of shared memory of a block.
fn shared_bytes(kernel: &Variant) -> usize {
    let [m, n, taps] = tile(kernel);
    let halo = if taps > 1 { HALO } else { 0 };
    let element = if kernel.param("KIND") == Some(0) { 2 } else { 4 };
    let kc = stage_rows(kernel);
    STAGES * ((kc + halo) * (m + PAD) + kc * (n + PAD)) * element
}

/// Blocks of a share that have something to do: a pair of channels of one group, and a tap of one of the classes.
pub(super) fn busy_items(rows: &Rows, [m, n, taps]: [usize; 3]) -> usize {
    let (all_m, all_n) = (rows.pitch(), rows.groups * rows.group_in);
    let [d, h, w] = rows.axes;
    // Whether a class has a tap so many from its first, and how many blocks of taps along width it has any in.
    let has = |axis: &TapAxis, class: usize, shift: usize| class + shift * axis.step < axis.axis.kernel;
    let mut busy = 0;
    for tile in 0..all_m.div_ceil(m) {
        let (from, to) = (tile * m, ((tile + 1) * m).min(all_m));
        let columns = (from / rows.slots * rows.group_in / n
            ..=(((to - 1) / rows.slots + 1) * rows.group_in - 1).min(all_n - 1) / n)
            .count();
        let classes = |axes: &mut dyn FnMut(usize, usize, usize) -> bool| {
            (from..to).step_by(rows.group_out.min(m)).chain([to - 1]).any(|slot| {
                let j = slot % rows.slots / rows.group_out;
                axes(j / w.classes / h.classes, j / w.classes % h.classes, j % w.classes)
            })
        };
        for md in 0..d.count {
            for mh in 0..h.count {
                for mw in (0..w.count).step_by(taps) {
                    let any = classes(&mut |jd, jh, jw| {
                        jd < d.classes && has(&d, jd, md) && has(&h, jh, mh) && has(&w, jw, mw)
                    });
                    busy += usize::from(any) * columns;
                }
            }
        }
    }
    busy
}

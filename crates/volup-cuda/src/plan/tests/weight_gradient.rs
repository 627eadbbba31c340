//! What `weight_gradient` does, given its arguments.

use super::epilogue::tasks;
use super::gradient::of_axes;
use super::machine::{Call, Machine};
use super::operand::split;
use crate::Variant;

/// Bytes of shared memory of a multiprocessor, those of it that a block takes besides its own, and the most that one
/// block may have.
const SHARED: i64 = 233_472;
const RESERVED: i64 = 1024;
const MOST_SHARED: i64 = 232_448;
/// Stages, and elements after each of their rows.
const STAGES: i64 = 3;
const PAD: i64 = 8;

/// Rows of a stage, and those more that later shifts read.
fn stage(variant: &Variant) -> [i64; 2] {
    let of = |name| variant.param(name).expect("a size");
    [if of("KIND") == 0 { 64 } else { 32 }, if of("TAPS") > 1 { 4 } else { 0 }]
}

/// Bytes of shared memory that the file asks for.
fn shared_bytes(variant: &Variant) -> i64 {
    let of = |name| variant.param(name).expect("a size");
    let ([stage, halo], element) = (stage(variant), if of("KIND") == 0 { 2 } else { 4 });
    let (m, n) = (of("WARP_M") * of("WARPS_M"), of("WARP_N") * of("WARPS_N"));
    STAGES * ((stage + halo) * (m + PAD) + stage * (n + PAD)) * element
}

/// Whether as many blocks share a multiprocessor as the kernel says.
pub fn fits(variant: &Variant) -> bool {
    let shared = shared_bytes(variant);
    shared <= MOST_SHARED && (shared + RESERVED) * variant.param("CTAS").expect("a size") <= SHARED
}

/// How a launch is cut.
pub struct Layout {
    /// Channels of a row of the gradient, of one of the input, and shifts that a block has.
    pub tile: [i64; 3],
    /// Rows of a stage, and those more that later shifts read.
    pub stage: i64,
    pub halo: i64,
    /// Channels of all groups of both rows.
    pub all: [i64; 2],
    /// Of each axis taps, classes, taps from one of a class to its next, and taps of the class that has most.
    kernel: [i64; 3],
    classes: [i64; 3],
    step: [i64; 3],
    counts: [i64; 3],
    slots: i64,
    group_in: i64,
    group_out: i64,
}

/// What a block has: its first shift along each axis, then its first channels of both rows.
pub type Item = ([i64; 3], [i64; 2]);

impl Layout {
    pub fn new(call: &Call<'_>) -> Layout {
        let of = |name| call.size(name);
        let (taps, [stage, halo]) = (of("TAPS"), stage(call.variant));
        let [groups, group_in, group_out, slots] = call.ints(["groups", "group_in", "group_out", "slots"]);
        Layout {
            tile: [of("WARP_M") * of("WARPS_M"), of("WARP_N") * of("WARPS_N"), taps],
            stage,
            halo,
            all: [groups * slots, groups * group_in],
            kernel: of_axes(call, "kernel"),
            classes: of_axes(call, "classes"),
            step: of_axes(call, "step"),
            counts: of_axes(call, "count"),
            slots,
            group_in,
            group_out,
        }
    }

    /// What the blocks of a share have, in any order.
    pub fn items(&self) -> Vec<Item> {
        let [m, n, taps] = self.tile;
        let [depth, height, width] = self.counts;
        let firsts = |all: i64, of: i64| (0..tasks(all, of)).map(move |tile| tile * of);
        let mut items = Vec::new();
        for (m0, n0) in firsts(self.all[0], m).flat_map(|m0| firsts(self.all[1], n).map(move |n0| (m0, n0))) {
            for (md, mh) in (0..depth).flat_map(|md| (0..height).map(move |mh| (md, mh))) {
                items.extend(firsts(width, taps).map(|mw| ([md, mh, mw], [m0, n0])));
            }
        }
        items
    }

    /// The tap that a channel of the gradient's rows is of at a shift, if there is one.
    fn tap(&self, channel: i64, shift: [i64; 3]) -> Option<i64> {
        let [_, height, width] = self.classes;
        let class = channel % self.slots / self.group_out;
        let j = [class / width / height, class / width % height, class % width];
        let t = [0, 1, 2].map(|axis| j[axis] + shift[axis] * self.step[axis]);
        let there = j[0] < self.classes[0] && (0..3).all(|axis| t[axis] < self.kernel[axis]);
        there.then(|| (t[0] * self.kernel[1] + t[1]) * self.kernel[2] + t[2])
    }

    /// What of an item is kept: a channel of the gradient's rows, its tap, and the input's channels of its group.
    pub fn kept(&self, item: &Item, mw: i64) -> Vec<(i64, i64, std::ops::Range<i64>)> {
        let ([md, mh, _], [m0, n0]) = *item;
        let mut found = Vec::new();
        for channel in m0..self.all[0].min(m0 + self.tile[0]) {
            let Some(tap) = self.tap(channel, [md, mh, mw]).filter(|_| mw < self.counts[2]) else { continue };
            let group = channel / self.slots;
            let inputs = n0.max(group * self.group_in)..(n0 + self.tile[1]).min((group + 1) * self.group_in);
            found.extend((!inputs.is_empty()).then_some((channel, tap, inputs)));
        }
        found
    }

    /// Whether a block does anything: its tile has channels of one group, and of those of the gradient any has a tap.
    pub fn is_busy(&self, item: &Item) -> bool {
        let ([md, mh, mw0], [m0, n0]) = *item;
        let ends = [(m0 + self.tile[0]).min(self.all[0]), (n0 + self.tile[1]).min(self.all[1])];
        let groups = |first: i64, end: i64, of: i64| first / of..(end - 1) / of + 1;
        let (of_m, of_n) = (groups(m0, ends[0], self.slots), groups(n0, ends[1], self.group_in));
        let shifts = mw0..self.counts[2].min(mw0 + self.tile[2]);
        let any = |mw| (m0..ends[0]).any(|channel| self.tap(channel, [md, mh, mw]).is_some());
        of_m.start < of_n.end && of_n.start < of_m.end && shifts.into_iter().any(any)
    }
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let [count, x_pitch, pitch, splits] = call.ints(["count", "x_pitch", "pitch", "splits"]);
    let layout = Layout::new(call);
    let taps: i64 = layout.kernel.iter().product();
    let partial = splits * taps * layout.all[1] * layout.group_out;
    vec![("x", count * x_pitch), ("rows", count * pitch), ("partial", partial)]
}

/// What the sizes, the grid and the shared memory have to be.
pub fn check(call: &Call<'_>) {
    let (what, layout) = (call.variant.name, Layout::new(call));
    let Layout { tile: [m, n, taps], stage, halo, all, kernel, classes, step, counts, .. } = layout;
    let [count, x_pitch, pitch, splits, share] = call.ints(["count", "x_pitch", "pitch", "splits", "share"]);
    let (x, rows, partial) = (call.pointer("x"), call.pointer("rows"), call.pointer("partial"));
    assert_eq!(i64::from(call.variant.threads), 32 * call.size("WARPS_M") * call.size("WARPS_N"), "{what}");
    for axis in 0..3 {
        let right = [kernel[axis].min(step[axis]), tasks(kernel[axis], step[axis])];
        assert_eq!([classes[axis], counts[axis]], right, "{what}");
    }
    let items = tasks(counts[2], taps) * counts[1] * counts[0] * tasks(all[0], m) * tasks(all[1], n);
    assert_eq!(call.grid, [items, splits, 1], "{what}");
    assert!(items < 1 << 31 && splits < 1 << 16, "{:?} of {what}", call.grid);
    assert!(
        call.shared == shared_bytes(call.variant) && fits(call.variant),
        "{} bytes of {what}",
        call.shared
    );
    // Rows of whole vectors; all of a share, and none of no share.
    for (pointer, of, least) in [(x, x_pitch, all[1]), (rows, pitch, all[0])] {
        let whole = pointer.at.is_multiple_of(16) && of * pointer.width as i64 % 16 == 0;
        assert!(whole && of >= least, "{of} elements of a row: {what}");
    }
    assert!(pitch == all[0] && partial.width == 4 && share % stage == 0, "{what}");
    assert!(splits * share >= count && (splits - 1) * share < count && count < 1 << 30, "{what}");
    assert!((taps - 1) * call.int("shift_w") <= halo, "{what}");
}

/// What is unusual about a launch.
pub fn features(call: &Call<'_>) -> Vec<(&'static str, bool)> {
    let layout = Layout::new(call);
    let items = layout.items();
    let [m, n, taps] = layout.tile;
    let partly = |item: &Item| item.0[2] + taps > layout.counts[2];
    vec![
        ("blocks that do nothing", items.iter().any(|item| !layout.is_busy(item))),
        ("rows apart along width", call.int("shift_w") > 1 && layout.counts[2] > 1),
        ("shares", call.int("splits") > 1),
        ("shifts along all axes", layout.counts.iter().all(|&count| count > 1)),
        ("shifts at once", taps > 1),
        ("shifts past the last", taps > 1 && items.iter().any(partly)),
        ("tiles of the gradient's channels", layout.all[0] > m),
        ("tiles of the input's channels", layout.all[1] > n),
        ("groups of the weight", layout.all[1] > layout.group_in),
        (call.variant.name, true),
    ]
}

/// Of each share the sums over its rows of a channel of the gradient, shifted, and one of the input.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    let layout = Layout::new(call);
    let [count, x_pitch, pitch, splits, share] = call.ints(["count", "x_pitch", "pitch", "splits", "share"]);
    let shifts = of_axes(call, "shift");
    let [x, rows, partial] = ["x", "rows", "partial"].map(|name| call.pointer(name));
    let parts = if call.size("KIND") == 3 { 2 } else { 1 };
    // A channel's rows side by side, in their parts.
    let channel = |machine: &Machine, of, pitch: i64, channel: i64| -> [Vec<f64>; 2] {
        let both = (0..count).map(|row| split(parts, machine.read(of, row * pitch + channel)));
        both.map(|[high, low]| (high, low)).unzip::<f64, f64, Vec<_>, Vec<_>>().into()
    };
    let inputs: Vec<[Vec<f64>; 2]> = (0..layout.all[1]).map(|c| channel(machine, x, x_pitch, c)).collect();
    let mut gradients: Vec<Option<[Vec<f64>; 2]>> = vec![None; layout.all[0] as usize];
    let taps: i64 = layout.kernel.iter().product();
    for item in layout.items() {
        let [md, mh, mw0] = item.0;
        for mw in mw0..mw0 + layout.tile[2] {
            let shift = (md * shifts[0] + mh * shifts[1] + mw * shifts[2]) as usize;
            for (row_channel, tap, of_group) in layout.kept(&item, mw) {
                assert!(layout.is_busy(&item), "a block that returns has something to do");
                let gradient = gradients[row_channel as usize]
                    .get_or_insert_with(|| channel(machine, rows, pitch, row_channel));
                for (ci, at) in of_group.flat_map(|ci| (0..splits).map(move |at| (ci, at))) {
                    let from = (at * share) as usize;
                    let to = count.min((at + 1) * share) as usize;
                    // Past the last row are zeros.
                    let to = to.min((count as usize).saturating_sub(shift)).max(from);
                    let dot = |of_x: usize, of_g: usize| -> f64 {
                        let (x, g) = (&inputs[ci as usize][of_x], &gradient[of_g]);
                        let g = g.get(from + shift..to + shift).unwrap_or_default();
                        x[from..to].iter().zip(g).map(|(x, g)| x * g).sum()
                    };
                    let low = if parts == 2 { dot(1, 0) + dot(0, 1) } else { 0.0 };
                    let place = ((at * taps + tap) * layout.all[1] + ci) * layout.group_out;
                    let co = row_channel % layout.slots % layout.group_out;
                    machine.write(partial, place + co, dot(0, 0) + low);
                }
            }
        }
    }
}

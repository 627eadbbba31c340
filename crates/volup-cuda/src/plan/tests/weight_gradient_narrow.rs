//! What `weight_gradient_narrow` does, given its arguments.

use super::epilogue::tasks;
use super::gradient::{RowLayout, low, of_axes};
use super::machine::{Call, Machine};
use super::operand::{by_low, split};

/// Slots and pairs of shift and channel of a block, its stages, bytes after each panel of the gradient, threads.
const SLOTS: i64 = 32;
const COLUMNS: i64 = 24;
const STAGES: i64 = 4;
const PAD: i64 = 64;
const THREADS: u32 = 128;
/// Elements from a channel's high part to its low one in a row of the input that holds both.
const X_LOW: i64 = 4;
/// Bytes of shared memory of a multiprocessor, those of it that a block takes besides its own, and the most of a block.
const SHARED: i64 = 233_472;
const RESERVED: i64 = 1024;
const MOST_SHARED: i64 = 232_448;

/// How a launch is cut.
struct Layout {
    kernel: [i64; 3],
    classes: [i64; 3],
    step: [i64; 3],
    counts: [i64; 3],
    shifts: [i64; 3],
    group_in: i64,
    group_out: i64,
    slots: i64,
}

impl Layout {
    fn new(call: &Call<'_>) -> Layout {
        let [kernel, classes, step, counts, shifts] =
            ["kernel", "classes", "step", "count", "shift"].map(|name| of_axes(call, name));
        let [group_in, group_out, slots] = call.ints(["group_in", "group_out", "slots"]);
        Layout { kernel, classes, step, counts, shifts, group_in, group_out, slots }
    }

    fn columns(&self) -> i64 {
        self.counts.iter().product::<i64>() * self.group_in
    }

    /// The pair of shifts along depth and height of a column, counted through all.
    fn pair(&self, column: i64) -> i64 {
        column / self.group_in / self.counts[2]
    }

    /// Rows from the first that shifts along width reach back to.
    fn halo(&self) -> i64 {
        (self.counts[2] - 1) * self.shifts[2]
    }
}

fn stage(call: &Call<'_>) -> i64 {
    if call.size("KIND") == 0 { 128 } else { 64 }
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let (layout, count, [x, rows]) =
        (Layout::new(call), call.int("count"), ["x", "rows"].map(|name| call.pointer(name)));
    let taps: i64 = layout.kernel.iter().product();
    let partial = call.grid[1] * taps * layout.group_in * layout.group_out;
    let extent = low(call, "g_low") + RowLayout::new(call, rows).extent(count, layout.slots);
    vec![("x", count * 16 / x.width as i64), ("rows", extent), ("partial", partial)]
}

/// What the sizes, the grid and the shared memory have to be.
pub fn check(call: &Call<'_>) {
    let (what, layout) = (call.variant.name, Layout::new(call));
    let [count, windows, share] = call.ints(["count", "windows", "share"]);
    let (x, rows, partial) = (call.pointer("x"), call.pointer("rows"), call.pointer("partial"));
    for axis in 0..3 {
        let (kernel, step) = (layout.kernel[axis], layout.step[axis]);
        let right = [kernel.min(step), tasks(kernel, step)];
        assert_eq!([layout.classes[axis], layout.counts[axis]], right, "{what}");
    }
    let (columns, splits) = (layout.columns(), call.grid[1]);
    let items = tasks(columns, COLUMNS) * tasks(layout.slots, SLOTS);
    assert_eq!((call.variant.threads, call.grid), (THREADS, [items, splits, 1]), "{what}");
    assert!(items < 1 << 31 && splits < 1 << 16, "{:?} of {what}", call.grid);
    let pairs =
        |tile: i64| layout.pair(columns.min((tile + 1) * COLUMNS) - 1) - layout.pair(tile * COLUMNS) + 1;
    assert!((0..tasks(columns, COLUMNS)).all(|tile| pairs(tile) <= windows), "{windows} windows of {what}");
    // Two fp16 take as much as a float32.
    let element = if call.size("KIND") == 0 { 2 } else { 4 };
    let panels = SLOTS * element / 16;
    let shared = STAGES * (panels * (16 * stage(call) + PAD) + windows * (stage(call) + layout.halo()) * 16);
    assert!(call.shared == shared && shared <= MOST_SHARED, "{} bytes of {what}", call.shared);
    let many = call.size("CTAS") > 1 && windows <= 4 && layout.halo() <= 2;
    assert!(!many || 2 * (shared + RESERVED) <= SHARED, "{shared} bytes of {what}");
    // A row of the input is 16 bytes; all of a share, and none of no share.
    assert!([x, rows].iter().all(|of| of.at.is_multiple_of(16)) && partial.width == 4, "{what}");
    let most = if call.size("KIND") == 2 { X_LOW } else { 16 / x.width as i64 };
    assert!(layout.group_in <= most, "{what}");
    assert!(layout.slots >= layout.classes.iter().product::<i64>() * layout.group_out, "{what}");
    assert!(layout.slots * rows.width as i64 % 16 == 0 && share % stage(call) == 0, "{what}");
    assert!(splits * share >= count && (splits - 1) * share < count && count < 1 << 30, "{what}");
    let lie = RowLayout::new(call, rows);
    lie.check(count, layout.slots, what);
    if call.has("g_low") {
        let g_low = call.int("g_low");
        assert!(g_low >= lie.extent(count, layout.slots) && g_low % 8 == 0, "{what}");
    }
}

/// What is unusual about a launch.
pub fn features(call: &Call<'_>) -> Vec<(&'static str, bool)> {
    let layout = Layout::new(call);
    vec![
        ("all shifts: blocks of columns", layout.columns() > COLUMNS),
        ("all shifts: columns past the last", layout.columns() % COLUMNS > 0),
        ("all shifts: panels", call.int("row") == 16 / call.pointer("rows").width as i64 && layout.slots > 8),
        ("all shifts: shares", call.grid[1] > 1),
        ("all shifts: tiles of slots", layout.slots > SLOTS),
        (call.variant.name, true),
    ]
}

/// Of each share the sums over its rows of a slot of the gradient and a channel of the input, each shift before.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    let layout = Layout::new(call);
    let [count, share] = call.ints(["count", "share"]);
    let [x, rows, partial] = ["x", "rows", "partial"].map(|name| call.pointer(name));
    let (lie, vector) = (RowLayout::new(call, rows), 16 / x.width as i64);
    let (kind, parts) = (call.size("KIND"), if call.size("KIND") == 3 { 2 } else { 1 });
    // Both parts of a number.
    let both = |machine: &Machine, of, at, low| match kind {
        2 => [machine.read(of, at), machine.read(of, at + low)],
        _ => split(parts, machine.read(of, at)),
    };
    let taps: i64 = layout.kernel.iter().product();
    let Layout { kernel, classes, step, counts, shifts, group_in, group_out, .. } = layout;
    for at in 0..call.grid[1] {
        for slot in 0..classes.iter().product::<i64>() * group_out {
            let (class, co) = (slot / group_out, slot % group_out);
            let j = [class / classes[2] / classes[1], class / classes[2] % classes[1], class % classes[2]];
            for column in 0..layout.columns() {
                let (shift, ci) = (column / group_in, column % group_in);
                let m = [shift / counts[2] / counts[1], shift / counts[2] % counts[1], shift % counts[2]];
                let tap = [0, 1, 2].map(|axis| j[axis] + m[axis] * step[axis]);
                if (0..3).any(|axis| tap[axis] >= kernel[axis]) {
                    continue;
                }
                let back: i64 = (0..3).map(|axis| m[axis] * shifts[axis]).sum();
                let sum: f64 = (at * share..count.min((at + 1) * share))
                    .filter(|row| row - back >= 0)
                    .map(|row| {
                        let [high, of_low] = both(machine, rows, lie.at(row, slot), low(call, "g_low"));
                        let [x_high, x_low] = both(machine, x, (row - back) * vector + ci, X_LOW);
                        let x_by = if kind == 2 { by_low(x_high) } else { x_high };
                        x_high * high + (x_low * high + x_by * of_low)
                    })
                    .sum();
                let t = (tap[0] * kernel[1] + tap[1]) * kernel[2] + tap[2];
                machine.write(partial, ((at * taps + t) * group_in + ci) * group_out + co, sum);
            }
        }
    }
}

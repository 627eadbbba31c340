//! What `weight_gradient_lines` does, given its arguments.

use super::contracts::bits;
use super::epilogue::tasks;
use super::gradient::{RowLayout, low, of_axes};
use super::machine::{Call, Machine};
use super::operand::{by_low, split};
use crate::plan::Buffer;

/// Taps of a block, threads, bytes of shared memory before the rings, and how much a block may have.
const TAPS: i64 = 9;
const THREADS: u32 = 512;
const BARRIERS: i64 = 1024;
const MOST_SHARED: i64 = 232_448;
/// Of 32 bits how many rows further on a line's last tap may be; the most steps of a strip, the fewest lines of a ring.
const HALO: i64 = 2;
const MOST_STEPS: i64 = 16;
const AHEAD: i64 = 3;
/// Past what lines and rows are counted to.
const OVERFLOW: i64 = 1 << 30;

/// How a launch is cut.
struct Layout {
    kind: i64,
    /// Channels of the input and of the gradient that a block has.
    tile: [i64; 2],
    /// Of the input: samples, then sizes; of the gradient's lines the rows.
    batch: i64,
    size: [i64; 3],
    rows: [i64; 3],
    apart: [i64; 3],
    kernel: [i64; 3],
    classes: [i64; 3],
    step: [i64; 3],
    strips: i64,
    /// Voxels of a strip.
    strip: i64,
    last: bool,
}

/// Whether operands are of 16 bits.
fn is_narrow(kind: i64) -> bool {
    [0, 2].contains(&kind)
}

impl Layout {
    fn new(call: &Call<'_>) -> Layout {
        let kind = call.size("KIND");
        let [rows, apart, kernel, classes, step] =
            ["rows", "apart", "kernel", "classes", "step"].map(|name| of_axes(call, name));
        Layout {
            kind,
            tile: [64 * call.size("MI"), call.size("NC")],
            batch: call.int("batch"),
            size: call.ints(["depth", "height", "width"]),
            rows,
            apart,
            kernel,
            classes,
            step,
            strips: call.int("strips"),
            strip: call.int("steps") * if is_narrow(kind) { 16 } else { 8 },
            last: call.int("x_c") == 1,
        }
    }

    /// Lines of the gradient from the first that a block's taps read to the last, at most.
    fn span(&self) -> i64 {
        let plane = self.kernel[1] * self.kernel[2];
        let line = |tap: i64| tap / self.kernel[2] / self.step[1] * self.apart[1];
        let of = |first: i64| line((first + TAPS).min(plane) - 1) - line(first);
        (0..tasks(plane, TAPS)).map(|group| of(group * TAPS)).max().expect("a tap")
    }

    /// Rows from a voxel's own to that of its last tap along width.
    fn halo(&self) -> i64 {
        (self.kernel[2] - 1) / self.step[2] * self.apart[2]
    }

    /// Bytes of shared memory of a line of the gradient, and of one of the input.
    fn line_bytes(&self) -> [i64; 2] {
        let ([m, n], [_, of_h, of_w]) = (self.tile, self.classes);
        let narrow = is_narrow(self.kind);
        let (element, pad) = if narrow { (2, 16) } else { (4, 32) };
        // Two tf32 of the input are made where they are multiplied.
        let (parts, x_parts) = (if self.kind > 1 { 2 } else { 1 }, if self.kind == 2 { 2 } else { 1 });
        let gradient = if narrow {
            of_h * of_w * n / 8 * 16 * ((self.strip + self.halo()) | 1)
        } else {
            of_h * self.kernel[2] * self.strip * n * 4
        };
        let by_voxels = self.strip * (m * element + pad);
        let input = if self.last { by_voxels } else { m * (self.strip * element + 16) };
        [parts * gradient, x_parts * input]
    }

    fn voxels(&self) -> i64 {
        self.batch * self.size.iter().product::<i64>()
    }

    fn lines(&self) -> i64 {
        self.batch * self.size[0] * self.strips * self.size[1]
    }
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let layout = Layout::new(call);
    let [groups, group_in, group_out, slots] = call.ints(["groups", "group_in", "group_out", "slots"]);
    let taps: i64 = layout.kernel.iter().product();
    let rows = layout.batch * layout.rows.iter().product::<i64>();
    let partial = call.grid[1] * taps * groups * group_in * group_out;
    let extent = low(call, "g_low") + RowLayout::new(call, call.pointer("rows")).extent(rows, groups * slots);
    let mut found = vec![("rows", extent), ("partial", partial), ("control", 1)];
    if call.pointer("x").buffer == Buffer::Workspace {
        found.push(("x", low(call, "x_low") + layout.voxels() * groups * group_in));
    }
    found
}

/// What the sizes, the grid and the shared memory have to be.
pub fn check(call: &Call<'_>) {
    let (what, layout) = (call.variant.name, Layout::new(call));
    let [groups, group_in, group_out, slots] = call.ints(["groups", "group_in", "group_out", "slots"]);
    let [steps, x_slots, g_slots, share] = call.ints(["steps", "x_slots", "g_slots", "share"]);
    let (x, rows, partial) = (call.pointer("x"), call.pointer("rows"), call.pointer("partial"));
    let Layout { tile: [m, n], size, kernel, classes, step, apart, .. } = layout;
    // The input as it lies, or as fp16, which is nobody's tensor.
    let buffer = if layout.kind == 2 { Buffer::Workspace } else { Buffer::Input };
    let made = x.buffer == Buffer::Workspace && call.variant.types == ["f16"];
    assert!(x.buffer == buffer || made, "{what}");
    assert!(call.variant.threads == THREADS && x.at.is_multiple_of(16), "{what}");
    for axis in 0..3 {
        assert_eq!(classes[axis], kernel[axis].min(step[axis]), "{what}");
        let far = size[axis] + (tasks(kernel[axis], step[axis]) - 1) * apart[axis];
        assert!(layout.rows[axis] >= far && size[axis] > 0, "{what}");
    }
    let plane = kernel[1] * kernel[2];
    let items = tasks(plane, TAPS) * kernel[0] * tasks(group_out, n) * tasks(group_in, m) * groups;
    let splits = call.grid[1];
    assert_eq!(call.grid, [items, splits, 1], "{what}");
    assert!(items < 1 << 31 && splits < 1 << 16 && layout.lines() < OVERFLOW, "{:?} of {what}", call.grid);
    assert!(splits * share >= layout.lines() && (splits - 1) * share < layout.lines(), "{what}");
    // Strips cover a line, none is empty, and a warp copies a channel's.
    assert!(layout.strips * layout.strip >= size[2], "{what}");
    assert!((layout.strips - 1) * layout.strip < size[2] && steps <= MOST_STEPS, "{what}");
    let [of_gradient, of_input] = layout.line_bytes();
    assert_eq!(call.shared, BARRIERS + g_slots * of_gradient + x_slots * of_input, "{what}");
    assert!(call.shared <= MOST_SHARED && 16 * (g_slots + x_slots) <= BARRIERS, "{what}");
    assert!(x_slots >= AHEAD && g_slots >= AHEAD + layout.span(), "{what}");
    assert!(is_narrow(layout.kind) || layout.halo() <= HALO, "{what}");
    // What is copied by 16 bytes, and by pairs.
    let vector = 16 / x.width as i64;
    let [x_n, x_c, x_d, x_h, x_w] = call.ints(["x_n", "x_c", "x_d", "x_h", "x_w"]);
    let others = if layout.last { [x_n, x_d, x_h, x_w] } else { [x_n, x_c, x_d, x_h] };
    assert!(x.at.is_multiple_of(16) && others.iter().all(|stride| stride % vector == 0), "{what}");
    assert!(if layout.last { x_w >= groups * group_in } else { x_w == 1 && size[2] % vector == 0 }, "{what}");
    assert!(!layout.last || groups == 1 || group_in % vector == 0, "{what}");
    let vector = if is_narrow(layout.kind) { 8 } else { 2 };
    assert!(rows.at.is_multiple_of(16), "{what}");
    assert!([group_out, slots].iter().all(|channels| channels % vector == 0), "{what}");
    assert!(slots >= classes.iter().product::<i64>() * group_out && partial.width == 4, "{what}");
    let lie = RowLayout::new(call, rows);
    let rows = layout.batch * layout.rows.iter().product::<i64>();
    lie.check(rows, groups * slots, what);
    if layout.kind == 2 {
        let [x_low, g_low] = call.ints(["x_low", "g_low"]);
        assert!(x_low >= layout.voxels() * groups * group_in && x_low % 8 == 0, "{what}");
        assert!(g_low >= lie.extent(rows, groups * slots) && g_low % 8 == 0, "{what}");
    }
    assert!(rows < OVERFLOW && call.given("control").is_some(), "{what}");
}

/// What is unusual about a launch.
pub fn features(call: &Call<'_>) -> Vec<(&'static str, bool)> {
    let layout = Layout::new(call);
    let [groups, group_in, group_out] = call.ints(["groups", "group_in", "group_out"]);
    let [m, n] = layout.tile;
    vec![
        ("by lines: blocks of taps", layout.kernel[1] * layout.kernel[2] > TAPS),
        ("by lines: groups", groups > 1),
        ("by lines: channels last", layout.last),
        ("by lines: lines apart", layout.span() > 0 && layout.apart[1] > 1),
        ("by lines: shares", call.grid[1] > 1),
        ("by lines: strips", layout.strips > 1),
        ("by lines: line past its end", layout.strips * layout.strip > layout.size[2]),
        ("by lines: tiles of channels", group_in > m || group_out > n),
        (call.variant.name, true),
    ]
}

/// Of each share of the lines the sums of a channel of the input and one of the gradient, a tap further on.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    let layout = Layout::new(call);
    let [groups, group_in, group_out, slots] = call.ints(["groups", "group_in", "group_out", "slots"]);
    let share = call.int("share");
    let [x_n, x_c, x_d, x_h, x_w] = call.ints(["x_n", "x_c", "x_d", "x_h", "x_w"]);
    let [x, rows, partial, control] = ["x", "rows", "partial", "control"].map(|name| call.pointer(name));
    let lie = RowLayout::new(call, rows);
    let Layout { kernel, classes, step, apart, size, .. } = layout;
    let parts = if layout.kind == 3 { 2 } else { 1 };
    // Both parts of a number, and of the input what low ones of the gradient are multiplied by.
    let both = |machine: &Machine, of, at, low: &str| match layout.kind {
        2 => [machine.read(of, at), machine.read(of, at + call.int(low))],
        _ => split(parts, machine.read(of, at)),
    };
    let (taps, channels): (i64, i64) = (kernel.iter().product(), groups * group_in);
    let mut most = 0.0;
    for at in 0..call.grid[1] {
        let mut sums = vec![0.0; (taps * channels * group_out) as usize];
        for line in at * share..layout.lines().min((at + 1) * share) {
            let (h, rest) = (line % size[1], line / size[1]);
            let (strip, rest) = (rest % layout.strips, rest / layout.strips);
            let (n, i) = (rest / size[0], [rest % size[0], h, 0]);
            for w in strip * layout.strip..size[2].min((strip + 1) * layout.strip) {
                let i = [i[0], i[1], w];
                let from = n * x_n + i[0] * x_d + i[1] * x_h + w * x_w;
                let of_x: Vec<_> = (0..channels)
                    .map(|c| {
                        most = bits(machine.read(x, from + c * x_c)).max(most);
                        let [high, low] = both(machine, x, from + c * x_c, "x_low");
                        [high, low, if layout.kind == 2 { by_low(high) } else { high }]
                    })
                    .collect();
                for tap in 0..taps {
                    let t = [tap / kernel[2] / kernel[1], tap / kernel[2] % kernel[1], tap % kernel[2]];
                    let q = [0, 1, 2].map(|a| i[a] + t[a] / step[a] * apart[a]);
                    let row = ((n * layout.rows[0] + q[0]) * layout.rows[1] + q[1]) * layout.rows[2] + q[2];
                    let j = [0, 1, 2].map(|a| t[a] % step[a]);
                    let class = (j[0] * classes[1] + j[1]) * classes[2] + j[2];
                    for group in 0..groups {
                        for co in 0..group_out {
                            let of_g = lie.at(row, group * slots + class * group_out + co);
                            let [high, low] = both(machine, rows, of_g, "g_low");
                            for ci in group * group_in..(group + 1) * group_in {
                                let [x_high, x_low, x_by] = of_x[ci as usize];
                                let sum = &mut sums[((tap * channels + ci) * group_out + co) as usize];
                                *sum += x_high * high + (x_low * high + x_by * low);
                            }
                        }
                    }
                }
            }
        }
        let first = at * taps * channels * group_out;
        (first..).zip(sums).for_each(|(to, sum)| machine.write(partial, to, sum));
    }
    // Of two fp16 somebody has looked before.
    if layout.kind != 2 {
        machine.update(control, 0, |before| before.max(most));
    }
}

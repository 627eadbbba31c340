//! What the kernels that normalize by vectors of 16 bytes do, given their arguments.

use super::contracts::activate;
use super::machine::{Call, Machine, Pointer};
use super::norm::{self, PARTS};

/// The kernels.
pub const KERNELS: [&str; 2] = ["group_statistics", "group_scale"];
/// Threads of a block.
const THREADS: i64 = 256;
/// Vectors that a thread of `group_statistics` has.
const COUNTED: [i64; 2] = [8, 64];
/// Vectors that a thread of `group_scale` takes, of NCDHW and of NDHWC.
const SCALED: [i64; 2] = [4, 32];
/// Past what voxels are counted to.
const MOST_VOXELS: i64 = 1 << 30;
/// Past what 32 bits count.
const OVERFLOW: i64 = 1 << 31;

/// How a launch is cut.
struct Layout {
    last: bool,
    y: Pointer,
    /// Elements of a vector.
    vector: i64,
    channels: i64,
    groups: i64,
    group_channels: i64,
    /// Positions of NDHWC that a block has side by side.
    high: i64,
}

impl Layout {
    fn new(call: &Call<'_>) -> Layout {
        let (y, last) = (call.pointer("y"), call.size("LAST") == 1);
        let [channels, group_channels] = call.ints(["channels", "group_channels"]);
        let vector = 16 / y.width as i64;
        assert!(!last || channels % vector == 0, "{channels} channels, {vector} of a vector");
        let across = if last { channels / vector } else { 1 };
        assert!((1..=THREADS).contains(&across) && group_channels > 0, "{channels}, {group_channels}");
        let groups = channels / group_channels;
        Layout { last, y, vector, channels, groups, group_channels, high: THREADS / across }
    }

    /// Some elements of y: where whole vectors are read or written, these are aligned.
    fn some(&self, elements: std::ops::Range<i64>) -> std::ops::Range<i64> {
        let whole = (elements.start..elements.end).filter(|at| at % self.vector == 0);
        let mut whole = whole.filter(|at| at + self.vector <= elements.end);
        let aligned = |at: i64| (self.y.at + at as usize * self.y.width).is_multiple_of(16);
        assert!(whole.all(aligned), "{elements:?} of {:?}", self.y);
        elements
    }
}

fn tasks(of: i64, size: i64) -> i64 {
    (of + size - 1) / size
}

/// What the arguments and the grid have to be.
pub fn check(call: &Call<'_>) {
    let layout = Layout::new(call);
    let Layout { last, vector, channels, groups, group_channels, high, .. } = layout;
    let what = call.variant.name;
    let [blocks, rest @ ..] = call.grid;
    assert!(blocks > 0 && blocks < OVERFLOW && rest == [1, 1], "{:?} of {what}", call.grid);
    assert_eq!((i64::from(call.variant.threads), call.shared), (THREADS, 0), "{what}");
    assert!(layout.y.at.is_multiple_of(16), "{what}");
    assert_eq!(groups * group_channels, channels, "{what}");
    if call.kernel() == "group_statistics" {
        let [length, rows, chunks] = call.ints(["length", "rows", "chunks"]);
        assert!(length > 0 && rows > 0 && call.int("groups") == groups, "{what}");
        let right = match last {
            true => tasks(length, COUNTED[1] * high),
            false => tasks(length + vector - 1, THREADS * COUNTED[0] * vector),
        };
        assert_eq!(chunks, right, "{length} of {what}");
        assert_eq!(blocks, rows * chunks, "{what}");
        return;
    }
    let [count, voxels, parts] = call.ints(["count", "voxels", "parts"]);
    assert!(voxels > 0 && voxels < MOST_VOXELS, "{voxels} voxels of {what}");
    assert!(count > 0 && count % (channels * voxels) == 0, "{count} elements of {what}");
    // Rows, which are samples' channels.
    let samples = count / (channels * voxels);
    assert!(samples * channels < OVERFLOW, "{what}");
    if last {
        assert_eq!(parts, tasks(voxels, SCALED[1] * high), "{voxels} of {what}");
        assert_eq!(blocks, samples * parts, "{what}");
    } else {
        assert_eq!(blocks, tasks(count, THREADS * SCALED[0] * vector), "{count} of {what}");
    }
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let layout = Layout::new(call);
    if call.kernel() == "group_statistics" {
        let of_chunk = if layout.last { layout.groups } else { 1 };
        return PARTS.map(|name| (name, call.grid[0] * of_chunk)).into();
    }
    let samples = call.int("count") / (layout.channels * call.int("voxels"));
    ["mean", "rstd"].map(|name| (name, samples * layout.groups)).into()
}

/// What is unusual about a launch.
pub fn features(call: &Call<'_>) -> Vec<&'static str> {
    let layout = Layout::new(call);
    let Layout { last, vector, groups, group_channels, high, .. } = layout;
    let found = if call.kernel() == "group_statistics" {
        let [length, rows, chunks] = call.ints(["length", "rows", "chunks"]);
        let size = if last { COUNTED[1] * high } else { THREADS * COUNTED[0] * vector };
        vec![
            ("a chunk without elements", !last && length <= (chunks - 1) * size),
            ("a last chunk of few positions", last && length % size > 0),
            ("chunks of a row", !last && chunks > 1),
            ("chunks of a sample", last && chunks > 1),
            ("groups across vectors", last && group_channels % vector > 0 && vector % group_channels > 0),
            ("groups of a vector's part", last && group_channels < vector),
            ("groups of vectors", last && group_channels > vector),
            ("less than a vector", length < vector),
            ("more groups than warps", last && groups > THREADS / 32),
            ("rows apart", !last && rows > 1 && length % vector > 0),
            ("threads without channels", last && THREADS % (layout.channels / vector) > 0),
        ]
    } else {
        let [count, voxels, parts] = call.ints(["count", "voxels", "parts"]);
        let last_part = last && voxels % (SCALED[1] * high) > 0;
        vec![
            ("a curved activation", call.int("activation") > 2),
            ("a last part of few positions", last_part),
            ("a straight activation", [1, 2].contains(&call.int("activation"))),
            ("blocks of NCDHW", !last && parts > 1),
            ("parts of a sample", last && parts > 1),
            ("samples", count > layout.channels * voxels),
            ("vectors of many rows", !last && voxels < vector),
            ("vectors of two rows", !last && voxels >= vector && voxels % vector > 0),
            ("vectors past the end", !last && count % vector > 0),
        ]
    };
    found.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect()
}

/// Does what a launch does.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    check(call);
    let layout = Layout::new(call);
    match (call.kernel(), layout.last) {
        ("group_statistics", false) => count_rows(call, machine, &layout),
        ("group_statistics", true) => count_positions(call, machine, &layout),
        ("group_scale", false) => scale_rows(call, machine, &layout),
        ("group_scale", true) => scale_positions(call, machine, &layout),
        (name, _) => panic!("{name} has no contract here"),
    }
}

/// A partial statistic of each chunk of a row, counted from a multiple of 16 bytes on.
fn count_rows(call: &Call<'_>, machine: &mut Machine, layout: &Layout) {
    let [length, chunks] = call.ints(["length", "chunks"]);
    let size = THREADS * COUNTED[0] * layout.vector;
    for task in 0..call.grid[0] {
        let (row, chunk) = (task / chunks, task % chunks);
        let (start, end) = (row * length, (row + 1) * length);
        let base = start - start % layout.vector + chunk * size;
        let of_row = start.max(base)..end.min(base + size);
        let values: Vec<f64> = layout.some(of_row).map(|at| machine.read(layout.y, at)).collect();
        norm::put(call, machine, PARTS, task, &values);
    }
}

/// A partial statistic of each group of a chunk of positions.
fn count_positions(call: &Call<'_>, machine: &mut Machine, layout: &Layout) {
    let [length, chunks] = call.ints(["length", "chunks"]);
    let size = COUNTED[1] * layout.high;
    for task in 0..call.grid[0] {
        let (row, chunk) = (task / chunks, task % chunks);
        let mut of_groups = vec![Vec::new(); layout.groups as usize];
        for position in chunk * size..length.min((chunk + 1) * size) {
            let first = (row * length + position) * layout.channels;
            for at in layout.some(first..first + layout.channels) {
                let group = (at - first) / layout.group_channels;
                of_groups[group as usize].push(machine.read(layout.y, at));
            }
        }
        for (group, values) in of_groups.iter().enumerate() {
            norm::put(call, machine, PARTS, task * layout.groups + group as i64, values);
        }
    }
}

/// Scales neighbours, those of a row by its channel's numbers.
fn scale_rows(call: &Call<'_>, machine: &mut Machine, layout: &Layout) {
    let [count, voxels] = call.ints(["count", "voxels"]);
    let size = THREADS * SCALED[0] * layout.vector;
    for block in 0..call.grid[0] {
        for at in layout.some(block * size..count.min((block + 1) * size)) {
            let row = at / voxels;
            scale(call, machine, layout, [row / layout.channels, row % layout.channels], at);
        }
    }
}

/// Scales some positions of a sample with all their channels.
fn scale_positions(call: &Call<'_>, machine: &mut Machine, layout: &Layout) {
    let [voxels, parts] = call.ints(["voxels", "parts"]);
    let size = SCALED[1] * layout.high;
    for block in 0..call.grid[0] {
        let (sample, part) = (block / parts, block % parts);
        for position in part * size..voxels.min((part + 1) * size) {
            let first = (sample * voxels + position) * layout.channels;
            for at in layout.some(first..first + layout.channels) {
                scale(call, machine, layout, [sample, at - first], at);
            }
        }
    }
}

/// `y = act((y - mean) * (rstd * gamma) + beta)`, in place.
fn scale(call: &Call<'_>, machine: &mut Machine, layout: &Layout, [sample, channel]: [i64; 2], at: i64) {
    let group = sample * layout.groups + channel / layout.group_channels;
    let of_channel = |machine: &Machine, name, or| norm::of_channel(call, machine, name, channel, or);
    let deviation = machine.read(layout.y, at) - machine.read(call.pointer("mean"), group);
    let factor = machine.read(call.pointer("rstd"), group) * of_channel(machine, "gamma", 1.0);
    let value = deviation * factor + of_channel(machine, "beta", 0.0);
    machine.write(layout.y, at, activate(call, value, ["activation", "slope"]));
}

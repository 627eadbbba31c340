//! What `pointwise` does, given its arguments.

use super::contracts::{activate, biased};
use super::machine::{Call, Machine};
use std::ops::Range;

/// Warps of a block, and bytes of shared memory that it may have.
const WARPS: i64 = 8;
const MOST_SHARED: i64 = 227 << 10;

/// How the work is cut.
struct Layout {
    channels: i64,
    out_channels: i64,
    groups: i64,
    row_blocks: i64,
    /// Of an item.
    at_once: i64,
    volume: i64,
    blocks: i64,
    step: i64,
    items: i64,
    volume_out: i64,
    /// Bytes of an element, rows of a warp, voxels of an item.
    size: i64,
    rows: i64,
    span: i64,
    strided: bool,
}

impl Layout {
    fn new(call: &Call<'_>) -> Layout {
        let [channels, out_channels, groups, row_blocks] =
            call.ints(["channels", "out_channels", "groups", "row_blocks"]);
        let [at_once, volume, blocks, step, items] =
            call.ints(["row_blocks_of_item", "volume", "blocks", "step", "items"]);
        Layout {
            channels,
            out_channels,
            groups,
            row_blocks,
            at_once,
            volume,
            blocks,
            step,
            items,
            volume_out: call.int("volume_out"),
            size: call.pointer("x").width as i64,
            rows: call.size("ROWS"),
            span: 32 * call.size("VOXELS"),
            strided: call.size("STRIDED") == 1,
        }
    }

    /// Row blocks by those of an item, of all groups.
    fn parts(&self) -> i64 {
        self.groups * (self.row_blocks / self.at_once)
    }
}

/// What the sizes, the grid and the shared memory have to be.
pub fn check(call: &Call<'_>) {
    let what = call.variant.name;
    let layout = Layout::new(call);
    let Layout { channels, out_channels, groups, row_blocks, at_once, volume, size, rows, span, .. } = layout;
    let [unit, stage, ctas] = [call.size("UNIT"), call.int("stage"), call.size("CTAS")];
    assert!(i64::from(call.variant.threads) == 32 * WARPS && call.grid[0] > 0 && call.grid[1..] == [1, 1]);
    assert!([2, 4].contains(&size) && unit * size >= 4 && volume % unit == 0, "copies of {what}");
    assert_eq!(row_blocks, (out_channels + rows - 1) / rows, "{what}");
    assert!(at_once == row_blocks || at_once == 1 && row_blocks > 1, "{at_once} of {row_blocks}: {what}");
    let padded = (channels + 1) / 2 * 2;
    assert!(stage > 0 && stage % 2 == 0 && stage <= padded, "{stage} of {channels}: {what}");
    assert!(at_once == 1 || stage == padded, "all row blocks of a part of the channels: {what}");

    let within = volume * size % 32 != 0;
    let overlap = if within && !layout.strided { 32 / size } else { 0 };
    assert_eq!(layout.step, span - overlap, "{what}");
    assert_eq!(layout.blocks, (volume + layout.step - 1) / layout.step, "{what}");
    assert_eq!(layout.items % (layout.blocks * layout.parts()), 0, "{what}");
    let of_warp = 2 * size * stage * span + if layout.strided { 4 * rows * span } else { 0 };
    assert_eq!(call.shared, 4 * groups * row_blocks * rows * (padded + 2) + WARPS * of_warp, "{what}");
    assert!(call.shared + i64::from(call.variant.shared_bytes) <= MOST_SHARED && ctas > 0, "{what}");

    // What is counted in 32 bits: elements of a sample of x and y, of the weight, items with those of another round.
    let [x_n, y_n] = call.ints(["x_n", "y_n"]);
    let weights = groups * channels * out_channels;
    for count in [x_n, y_n, weights, layout.items + WARPS * call.grid[0]] {
        assert!(count < (1 << 31) - (1 << 12), "{count}: {what}");
    }
    let [plane, width, d_stride, h_stride, w_stride] =
        call.ints(["plane", "width", "d_stride", "h_stride", "w_stride"]);
    let out = call.ints(["depth_out", "height_out", "width_out"]);
    let dense = [volume / plane * d_stride, plane / width * h_stride, width * w_stride];
    assert!(out.iter().zip(dense).all(|(&out, dense)| out <= dense), "outputs past a stride: {what}");
    assert_eq!(layout.volume_out, out.iter().product::<i64>(), "{what}");
    assert!(layout.strided || layout.volume_out == volume, "{what}");
}

/// What is unusual about a launch.
pub fn features(call: &Call<'_>) -> Vec<&'static str> {
    let layout = Layout::new(call);
    let padded = (layout.channels + 1) / 2 * 2;
    let found = [
        ("all row blocks", layout.at_once > 1),
        ("copies of one voxel", call.size("UNIT") == 1),
        ("groups", layout.groups > 1),
        ("items overlap", !layout.strided && layout.step < layout.span),
        ("items do not overlap", !layout.strided && layout.step == layout.span),
        ("row blocks", layout.at_once < layout.row_blocks),
        ("several items", layout.items > WARPS * call.grid[0]),
        ("several stages", call.int("stage") < padded),
        ("strided", layout.strided),
        ("voxels past the end", layout.volume % layout.step > 0),
    ];
    found.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect()
}

/// Each item writes what is its own of the channels that it has.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    check(call);
    let layout = Layout::new(call);
    let parts = layout.parts();
    for item in 0..layout.items {
        let (block, part) = (item / parts, item % parts);
        let (sample, start) = (block / layout.blocks, block % layout.blocks * layout.step);
        let (group, part) = (part / (parts / layout.groups), part % (parts / layout.groups));
        for row in part * layout.at_once * layout.rows..(part + 1) * layout.at_once * layout.rows {
            if row < layout.out_channels {
                write(call, machine, &layout, [sample, group, row], start);
            }
        }
    }
}

/// An item's outputs of one channel.
fn write(
    call: &Call<'_>,
    machine: &mut Machine,
    layout: &Layout,
    [sample, group, row]: [i64; 3],
    start: i64,
) {
    let channel = group * layout.out_channels + row;
    let y = call.pointer("y");
    let begins = sample * call.int("y_n") + channel * layout.volume_out;
    let activated = |machine: &Machine, sum: f64| {
        let sum = sum + biased(call, machine, call.pointer("bias"), channel);
        activate(call, sum, ["activation", "slope"])
    };
    if layout.strided {
        for (at, voxel) in run_of(call, layout, start) {
            let sum = voxel.map_or(0.0, |voxel| sum(call, machine, layout, [sample, group, row], voxel));
            let value = activated(machine, sum);
            machine.write(y, begins + at, value);
        }
    } else {
        for voxel in own(layout, y.at as i64 / layout.size + begins, start) {
            let value = activated(machine, sum(call, machine, layout, [sample, group, row], voxel));
            machine.write(y, begins + voxel, value);
        }
    }
}

/// The voxels of an item whose outputs it writes, in a channel that begins with that element.
fn own(layout: &Layout, begins: i64, start: i64) -> Range<i64> {
    let sector = 32 / layout.size;
    let first = if layout.step == layout.span {
        start
    } else {
        (begins + start + sector - 1) / sector * sector - begins
    };
    (if start == 0 { 0 } else { first })..(first + layout.step).min(layout.volume)
}

/// With a stride the outputs of an item in a channel, each with the voxel whose sum it is, if it is one's.
fn run_of(call: &Call<'_>, layout: &Layout, start: i64) -> Vec<(i64, Option<i64>)> {
    let [plane, width, d_stride, h_stride, w_stride] =
        call.ints(["plane", "width", "d_stride", "h_stride", "w_stride"]);
    let [depth_out, height_out, width_out] = call.ints(["depth_out", "height_out", "width_out"]);
    let end = (start + layout.span).min(layout.volume);
    let mut found = Vec::new();
    for voxel in start..end {
        // From a voxel's output to the next one's in the plane.
        let (d, on_plane) = (voxel / plane, voxel % plane);
        let place = |voxel: i64| (voxel / width * h_stride) * width_out + voxel % width * w_stride;
        let next = if on_plane + 1 == plane { height_out * width_out } else { place(on_plane + 1) };
        for d_out in (d * d_stride..(d + 1) * d_stride).take_while(|&d_out| d_out < depth_out) {
            for at in place(on_plane)..next {
                let sum = d_out == d * d_stride && at == place(on_plane);
                found.push((d_out * height_out * width_out + at, sum.then_some(voxel)));
            }
        }
    }
    found
}

/// The sum of an output.
fn sum(
    call: &Call<'_>,
    machine: &Machine,
    layout: &Layout,
    [sample, group, row]: [i64; 3],
    voxel: i64,
) -> f64 {
    let (x, weight) = (call.pointer("x"), call.pointer("weight"));
    let product = |channel: i64| {
        let channel = group * layout.channels + channel;
        let from = sample * call.int("x_n") + channel * layout.volume + voxel;
        machine.read(x, from) * machine.read(weight, channel * layout.out_channels + row)
    };
    (0..layout.channels).map(product).sum()
}

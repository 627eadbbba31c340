//! What products do that take statistics of what they write, and the kernel that merges these.

use super::contracts::FINITE;
use super::machine::{Call, Machine};
use super::norm::Moments;
use super::norm_behind;
use std::ops::Range;

/// An output of a tile: its row, the channel and the value.
pub struct Output {
    pub row: i64,
    pub channel: i64,
    pub value: f64,
}

/// A tile's place among all: its number, of so many rows, and its rows, phase and channels.
pub struct Place {
    pub tile: i64,
    pub tile_rows: i64,
    pub rows: Range<i64>,
    pub rows_of_sample: i64,
    pub phase: i64,
    pub channels: Range<i64>,
}

/// Whether a product takes statistics of what it writes.
pub fn counts(call: &Call<'_>) -> bool {
    call.variant.param("COUNTS").is_some()
}

/// Rows of a sample of a product that does, or of a plane of it.
pub fn rows_of_sample(call: &Call<'_>) -> i64 {
    ["pd", "ph", "pw"].into_iter().filter(|name| call.has(name)).map(|name| call.int(name)).product()
}

/// Numbers of partials of one that does: twice, and once; and what a norm beside it has.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    if !counts(call) {
        return Vec::new();
    }
    let samples = call.int("rows") / rows_of_sample(call);
    let [chunks, phases] = call.ints(["part_chunks", "part_phases"]);
    let parts = 2 * samples * chunks * phases * columns(call);
    let mut found = vec![("parts", parts), ("counts", samples * chunks * phases)];
    found.extend(norm_behind::extents(call, samples));
    found
}

/// Columns of a partial: so many channels of one group side by side are one.
fn columns(call: &Call<'_>) -> i64 {
    let [channels, joined] = call.ints(["out_channels", "joined"]);
    assert!([1, 2, 4, 8, 16, 32].contains(&joined) && channels % joined == 0);
    channels / joined
}

/// Writes those of what each warpgroup of a tile writes of each sample that the tile has rows of.
pub fn count(call: &Call<'_>, machine: &mut Machine, place: &Place, outputs: &[Output]) {
    let [chunks, phases, joined] = call.ints(["part_chunks", "part_phases", "joined"]);
    let all = columns(call);
    assert!(place.channels.start % joined == 0 && place.channels.end % joined == 0);
    let (of_warpgroup, warpgroups) = (64 * call.size("MI"), call.size("WGS"));
    let of_sample = place.rows_of_sample;
    let samples = place.rows.start / of_sample..(place.rows.end - 1) / of_sample + 1;
    for (sample, warpgroup) in samples.flat_map(|n| (0..warpgroups).map(move |warpgroup| (n, warpgroup))) {
        let chunk = (place.tile - sample * of_sample / place.tile_rows) * warpgroups + warpgroup;
        assert!((0..chunks).contains(&chunk) && (0..phases).contains(&place.phase), "{chunk}");
        let at = (sample * chunks + chunk) * phases + place.phase;
        let first = place.tile * place.tile_rows + warpgroup * of_warpgroup;
        let own = |output: &&Output| {
            output.row / of_sample == sample && (first..first + of_warpgroup).contains(&output.row)
        };
        let own: Vec<&Output> = outputs.iter().filter(own).collect();
        for column in place.channels.start / joined..place.channels.end / joined {
            let of_column = own.iter().filter(|output| output.channel / joined == column);
            let values: Vec<f64> = of_column.map(|output| counted(call, output.value)).collect();
            let Moments { mean, m2, count } = Moments::of(&values);
            for (which, value) in [(0, mean), (1, m2)] {
                machine.write(call.pointer("parts"), 2 * (at * all + column) + which, value);
            }
            if column == 0 {
                machine.write(call.pointer("counts"), at, count);
            }
        }
    }
}

/// A value as it is counted, perhaps its ReLU.
fn counted(call: &Call<'_>, value: f64) -> f64 {
    if call.int("relus") == 1 && value < 0.0 { 0.0 } else { value }
}

/// The parts of the workspace that `group_merge` may touch.
pub fn extents_of_merge(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let product = |names: &[&str]| names.iter().map(|name| call.int(name)).product::<i64>();
    let samples = call.grid[0] / call.int("groups");
    let counts = samples * product(&["chunks", "phases"]);
    let parts = 2 * counts * product(&["groups", "group_channels"]) / call.int("joined");
    let merged = ["mean", "rstd"].map(|name| (name, call.grid[0]));
    [("parts", parts), ("counts", counts), ("control", 5)].into_iter().chain(merged).collect()
}

/// The mean and 1/sigma of each sample's groups, from their partials, or where control words say so from what y holds.
pub fn merge(call: &Call<'_>, machine: &mut Machine) {
    let [groups, group_channels, chunks, phases] =
        call.ints(["groups", "group_channels", "chunks", "phases"]);
    let [rows, tile_rows, warpgroups, voxels] = call.ints(["rows", "tile_rows", "warpgroups", "voxels"]);
    assert!(call.grid[0] % groups == 0 && call.grid[1..] == [1, 1] && call.variant.threads == 1024);
    let (control, channels) = (call.pointer("control"), groups * group_channels);
    let columns = group_channels / call.int("joined");
    assert_eq!(group_channels % call.int("joined"), 0);
    let word = |machine: &Machine, at| machine.read(control, at);
    let stands = word(machine, 0).max(word(machine, 1)) <= FINITE && word(machine, 2) == 0.0;
    for (sample, group) in (0..call.grid[0] / groups).flat_map(|n| (0..groups).map(move |group| (n, group))) {
        let of_group = group * group_channels..(group + 1) * group_channels;
        let mut all = Moments::default();
        if stands {
            let tiles = ((sample + 1) * rows - 1) / tile_rows - sample * rows / tile_rows + 1;
            assert!(tiles * warpgroups <= chunks);
            for at in (0..tiles * warpgroups * phases).map(|at| sample * chunks * phases + at) {
                let count = machine.read(call.pointer("counts"), at);
                for column in group * columns..(group + 1) * columns {
                    let [mean, m2] = [0, 1].map(|which| {
                        machine.read(call.pointer("parts"), 2 * (at * groups * columns + column) + which)
                    });
                    all.add(Moments { mean, m2, count });
                }
            }
        } else {
            for (channel, voxel) in of_group.flat_map(|c| (0..voxels).map(move |voxel| (c, voxel))) {
                let last = call.int("last") == 1;
                let of_sample = if last { voxel * channels + channel } else { channel * voxels + voxel };
                let value = machine.read(call.pointer("y"), sample * channels * voxels + of_sample);
                all.add(Moments::of(&[counted(call, value)]));
            }
        }
        all.finish(call, machine, sample * groups + group);
    }
}

//! What the kernels of the group normalization do, given their arguments.

use super::contracts::{activate, activation};
use super::machine::{Call, Machine, Pointer};
use volup::reference;

/// Where partial statistics lie.
pub const PARTS: [&str; 3] = ["mean", "m2", "count"];
/// The same of kernels that take means and 1/sigmas too.
pub const PARTIALS: [&str; 3] = ["part_mean", "part_m2", "part_count"];

/// Does what a launch does.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    assert!(call.grid[0] > 0 && call.grid[1..] == [1, 1]);
    match call.kernel() {
        "norm_stats_rows" => stats_rows(call, machine),
        "norm_stats_columns" => stats_columns(call, machine),
        "norm_merge" | "partial_merge" => merge(call, machine),
        "norm_apply_rows" | "norm_apply_columns" => apply(call, machine),
        name => panic!("{name} has no contract here"),
    }
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let product = |names: &[&str]| names.iter().map(|name| call.int(name)).product::<i64>();
    match call.kernel() {
        "norm_stats_rows" => PARTS.map(|name| (name, product(&["rows", "chunks"]))).into(),
        "norm_stats_columns" => PARTS.map(|name| (name, product(&["samples", "chunks", "width"]))).into(),
        "norm_merge" | "partial_merge" => {
            let last: i64 = ["sample", "group", "chunk", "repeat"]
                .map(|axis| (call.int(&format!("{axis}s")) - 1) * call.int(&format!("{axis}_step")))
                .iter()
                .sum();
            let parts = PARTIALS.map(|name| (name, last + call.int("columns")));
            let merged = ["mean", "rstd"].map(|name| (name, product(&["samples", "groups"])));
            parts.into_iter().chain(merged).collect()
        }
        _ => {
            let groups = call.int("channels") / call.int("group_channels");
            ["mean", "rstd"].map(|name| (name, call.int("samples") * groups)).into()
        }
    }
}

/// The mean of values, the sum of their squared deviations from it, and their count.
#[derive(Clone, Copy, Default)]
pub struct Moments {
    pub mean: f64,
    pub m2: f64,
    pub count: f64,
}

impl Moments {
    pub fn of(values: &[f64]) -> Moments {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count.max(1.0);
        let m2 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
        Moments { mean, m2, count }
    }

    /// Adds those of other values.
    pub fn add(&mut self, other: Moments) {
        if other.count > 0.0 {
            let (off, total) = (other.mean - self.mean, self.count + other.count);
            self.m2 += other.m2 + off * off * self.count * other.count / total;
            self.mean += off * other.count / total;
            self.count = total;
        }
    }

    /// Writes a group's mean and 1/sigma.
    pub fn finish(self, call: &Call<'_>, machine: &mut Machine, at: i64) {
        machine.write(call.pointer("mean"), at, self.mean);
        machine.write(call.pointer("rstd"), at, self.rstd(call));
    }

    /// 1/sigma.
    pub fn rstd(self, call: &Call<'_>) -> f64 {
        1.0 / (self.m2 / self.count + call.float("eps")).sqrt()
    }
}

/// Writes the moments of values to arrays of these names.
pub fn put(call: &Call<'_>, machine: &mut Machine, names: [&str; 3], at: i64, values: &[f64]) {
    let Moments { mean, m2, count } = Moments::of(values);
    for (name, value) in names.into_iter().zip([mean, m2, count]) {
        machine.write(call.pointer(name), at, value);
    }
}

/// A partial statistic for every run of a group and each B elements of it, counted from a multiple of 16
/// elements on.
fn stats_rows(call: &Call<'_>, machine: &mut Machine) {
    let [rows, length, chunks] = call.ints(["rows", "length", "chunks"]);
    let (y, size) = (call.pointer("y"), call.size("B"));
    for (row, chunk) in (0..rows).flat_map(|row| (0..chunks).map(move |chunk| (row, chunk))) {
        let (first, end) = (row * length, (row + 1) * length);
        let start = first - first % 16 + chunk * size;
        assert!(chunk + 1 < chunks || start + size >= end, "a run is covered");
        let values: Vec<f64> =
            (start.max(first)..(start + size).min(end)).map(|at| machine.read(y, at)).collect();
        put(call, machine, PARTS, row * chunks + chunk, &values);
    }
}

/// A partial statistic for every column of a sample, taken as rows of `width`, and each R rows.
fn stats_columns(call: &Call<'_>, machine: &mut Machine) {
    let [samples, length, width, chunks] = call.ints(["samples", "length", "width", "chunks"]);
    let (y, size) = (call.pointer("y"), call.size("R"));
    assert!(chunks * size * width >= length, "a sample is covered");
    for (sample, chunk) in (0..samples).flat_map(|sample| (0..chunks).map(move |chunk| (sample, chunk))) {
        for column in 0..width {
            let rows = chunk * size..(chunk + 1) * size;
            let elements = rows.map(|row| row * width + column).filter(|at| *at < length);
            let values: Vec<f64> = elements.map(|at| machine.read(y, sample * length + at)).collect();
            put(call, machine, PARTS, (sample * chunks + chunk) * width + column, &values);
        }
    }
}

/// The mean and 1/sigma of every sample's groups, from all of their partial statistics.
fn merge(call: &Call<'_>, machine: &mut Machine) {
    let [samples, groups, chunks, repeats, columns] =
        call.ints(["samples", "groups", "chunks", "repeats", "columns"]);
    let [sample_step, group_step, chunk_step, repeat_step] =
        call.ints(["sample_step", "group_step", "chunk_step", "repeat_step"]);
    let parts = PARTIALS.map(|name| call.pointer(name));
    for (sample, group) in (0..samples).flat_map(|sample| (0..groups).map(move |group| (sample, group))) {
        let mut all = Moments::default();
        for (chunk, repeat) in (0..chunks).flat_map(|chunk| (0..repeats).map(move |repeat| (chunk, repeat))) {
            for column in 0..columns {
                let at =
                    sample * sample_step + group * group_step + chunk * chunk_step + repeat * repeat_step;
                let [mean, m2, count] = parts.map(|pointer| machine.read(pointer, at + column));
                all.add(Moments { mean, m2, count });
            }
        }
        all.finish(call, machine, sample * groups + group);
    }
}

/// `y = act((y - mean) * rstd * gamma + beta)`, in place.
fn apply(call: &Call<'_>, machine: &mut Machine) {
    let [samples, channels, group_channels, voxels] =
        call.ints(["samples", "channels", "group_channels", "voxels"]);
    let [y, mean, rstd, gamma, beta] = ["y", "mean", "rstd", "gamma", "beta"].map(|name| call.pointer(name));
    let rows = call.kernel() == "norm_apply_rows";
    let affine = |machine: &Machine, pointer: Pointer, channel, or| {
        if call.int("affine") == 1 { machine.read(pointer, channel) } else { or }
    };
    for at in 0..samples * channels * voxels {
        let (sample, within) = (at / (channels * voxels), at % (channels * voxels));
        let channel = if rows { within / voxels } else { within % channels };
        let group = sample * (channels / group_channels) + channel / group_channels;
        let deviation = machine.read(y, at) - machine.read(mean, group);
        let scale = machine.read(rstd, group) * affine(machine, gamma, channel, 1.0);
        let value = deviation * scale + affine(machine, beta, channel, 0.0);
        machine.write(y, at, activate(call, value, ["activation", "slope"]));
    }
}

/// A number of a channel, or another where nothing is at its address.
pub fn of_channel(call: &Call<'_>, machine: &Machine, name: &str, channel: i64, or: f64) -> f64 {
    let pointer = call.pointer(name);
    if machine.has(pointer.buffer) { machine.read(pointer, channel) } else { or }
}

/// How outputs of a channel of a sample become normalized, and go through the activation behind.
pub fn normalized(
    call: &Call<'_>,
    machine: &Machine,
    [sample, channel]: [i64; 2],
) -> impl Fn(f64) -> f64 + use<> {
    let [norm_groups, group_channels] = call.ints(["norm_groups", "group_channels"]);
    let group = sample * norm_groups + channel / group_channels;
    let of_channel = |name, or| of_channel(call, machine, name, channel, or);
    let mean = machine.read(call.pointer("mean"), group);
    let scale = machine.read(call.pointer("rstd"), group) * of_channel("gamma", 1.0);
    let add = of_channel("beta", 0.0);
    let function = activation(call, ["post_activation", "post_slope"]);
    move |output| {
        let value = (output - mean) * scale + add;
        function.map_or(value, |function| reference::activation(function, value))
    }
}

//! What the kernels of the backward pass do, given their arguments: those that write and read rows. Those that deal with
//! what follows the convolution are in `epilogue`.

use super::contracts::{FINITE, LIFT, bits, raise, scale};
use super::epilogue::{self, Epilogue, check_epilogue, tasks};
use super::halo::input_scale;
use super::machine::{Call, Machine, Pointer};
use super::operand::{halves, is_too_coarse};
use super::plane_gradient;
use super::shuffle_gradient;
use super::weight_gradient;
use super::weight_gradient_lines;
use super::weight_gradient_narrow;
use crate::plan::Buffer;
use std::ops::Range;

/// The axes' names.
pub const AXES: [&str; 3] = ["d", "h", "w"];
/// Threads of a block.
const THREADS: i64 = 256;
/// Elements of a block of `gradient_rows`.
const ELEMENTS: i64 = 4096;
/// The bits of the least float32 that is an infinity when it is rounded to tf32.
pub const INFINITE_AS_TF32: f64 = 0x7f7f_f000_u32 as f64;
/// Past what positions and tasks are counted to, and rows.
const OVERFLOW: i64 = 1 << 31;
const MOST_ROWS: i64 = 1 << 30;
/// Channels that two fp16 are judged for together.
const JUDGED: i64 = 8;
/// Voxels of a piece of `direct_weight_gradient`, and channels of a tile.
const PIECE: i64 = 1024;
const TILE: i64 = 16;

/// One axis as the kernels that go by the definition are told of it.
struct TapAxis {
    input: i64,
    output: i64,
    stride: i64,
    padding: i64,
    dilation: i64,
    kernel: i64,
    rows: i64,
    classes: i64,
    step: i64,
    apart: i64,
}

impl TapAxis {
    fn all(call: &Call<'_>) -> [TapAxis; 3] {
        AXES.map(|axis| {
            let of = |name: &str| call.int(&format!("{axis}_{name}"));
            TapAxis {
                input: of("input"),
                output: of("output"),
                stride: of("stride"),
                padding: of("padding"),
                dilation: of("dilation"),
                kernel: of("kernel"),
                rows: of("rows"),
                classes: of("classes"),
                step: of("step"),
                apart: of("apart"),
            }
        })
    }

    /// Of a voxel the taps that read an output, each with its class and the row that it reads.
    fn taps(&self, i: i64) -> Vec<[i64; 3]> {
        let reads =
            |t: &i64| (0..self.output).contains(&(i * self.stride - self.padding + t * self.dilation));
        let place = |t| [t, t % self.step, i + t / self.step * self.apart];
        (0..self.kernel).filter(reads).map(place).collect()
    }
}

/// Pairs of one of each, in order.
fn every(counts: [i64; 3]) -> impl Iterator<Item = [i64; 3]> {
    let [_, height, width] = counts;
    (0..counts.iter().product()).map(move |at| [at / (height * width), at / width % height, at % width])
}

fn product(call: &Call<'_>, names: &[&str]) -> i64 {
    names.iter().map(|name| call.int(name)).product()
}

/// Of each axis a number that `gradient_rows`, `gradient_weight` or `weight_gradient` is told.
pub fn of_axes(call: &Call<'_>, name: &str) -> [i64; 3] {
    AXES.map(|axis| call.int(&format!("{name}_{axis}")))
}

/// How the rows lie that a kernel writes or reads: one after the other, or the same vector of neighbouring ones side by side.
#[derive(Clone, Copy)]
pub struct RowLayout {
    row: i64,
    panel: i64,
    vector: i64,
}

impl RowLayout {
    /// That of a kernel's rows, which this is the address of.
    pub fn new(call: &Call<'_>, rows: Pointer) -> RowLayout {
        let [row, panel] = call.ints(["row", "panel"]);
        RowLayout { row, panel, vector: 16 / rows.width as i64 }
    }

    /// Where a slot of a row lies, counted through all groups.
    pub fn at(&self, row: i64, slot: i64) -> i64 {
        row * self.row + slot / self.vector * self.panel + slot % self.vector
    }

    /// Elements from the first to the last of so many rows of so many slots.
    pub fn extent(&self, rows: i64, slots: i64) -> i64 {
        self.at(rows - 1, slots - 1) + 1
    }

    /// Rows of so many slots do not overlap.
    pub fn check(&self, rows: i64, slots: i64, what: &str) {
        let one_by_one = self.panel == self.vector && self.row == slots;
        let panels = self.row == self.vector && self.panel >= rows * self.vector && slots % self.vector == 0;
        assert!(one_by_one || panels && self.panel % self.vector == 0, "{what}");
    }
}

/// How the slots of a row follow each other.
struct Steps {
    layout: RowLayout,
    group: i64,
    class: i64,
}

impl Steps {
    /// Those of a kernel's rows to which a group's channels of a class have this name.
    fn new(call: &Call<'_>, rows: Pointer, channels: &str) -> Steps {
        let [slots, class] = call.ints(["slots", channels]);
        Steps { layout: RowLayout::new(call, rows), group: slots, class }
    }

    /// Where an element of a row lies: of a group and a class, a channel of both.
    fn at(&self, row: i64, [group, class, c]: [i64; 3]) -> i64 {
        self.layout.at(row, group * self.group + class * self.class + c)
    }
}

/// Samples of a launch of `gradient_rows`.
fn samples(call: &Call<'_>) -> i64 {
    let positions: i64 = [of_axes(call, "rows"), of_axes(call, "classes")].iter().flatten().product();
    let width = call.size("CHANNELS");
    call.grid[0] / (tasks(positions, ELEMENTS / width) * tasks(call.int("channels"), width))
}

/// Elements from a high part to its low one, of a tensor that has both.
pub fn low(call: &Call<'_>, name: &str) -> i64 {
    if call.has(name) { call.int(name) } else { 0 }
}

/// Slots of a row up to the last that `gradient_rows` writes.
fn written_slots(call: &Call<'_>) -> i64 {
    let [groups, group_in, slots] = call.ints(["groups", "group_in", "slots"]);
    (groups - 1) * slots + group_in * of_axes(call, "classes").iter().product::<i64>()
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    match call.kernel() {
        "gradient_rows" => {
            let rows = samples(call) * of_axes(call, "rows").iter().product::<i64>();
            let terms = 2 * samples(call) * (call.int("channels") / call.int("group_channels"));
            let layout = RowLayout::new(call, call.pointer("out"));
            let out = low(call, "low") + layout.extent(rows, written_slots(call));
            let words = [("control", 1), ("unless", 2)];
            [("out", out), ("terms", terms), ("bounds", call.int("channels"))]
                .into_iter()
                .chain(words)
                .collect()
        }
        "gradient_weight" => {
            let taps: i64 = of_axes(call, "count").iter().product();
            let out = taps * product(call, &["groups", "slots", "group_in"]);
            vec![("out", out), ("control", 1), ("bounds", product(call, &["groups", "group_out"]))]
        }
        "direct_input_gradient" | "direct_weight_gradient" => {
            let rows = product(call, &["n", "d_rows", "h_rows", "w_rows"]);
            let layout = RowLayout::new(call, call.pointer("rows"));
            let extent = layout.extent(rows, product(call, &["groups", "slots"]));
            let words = if call.size("KIND") == 5 { 5 } else { 2 };
            let mut found = vec![("control", words), ("rows", extent)];
            found.push(("bounds", product(call, &["groups", "group_out"])));
            found.push(("largest", product(call, &["groups", "group_in"])));
            if call.has("partial") {
                let pairs = product(call, &["groups", "group_in", "group_out", "splits"]);
                found.push(("partial", pairs * product(call, &["d_kernel", "h_kernel", "w_kernel"])));
            }
            found
        }
        "plane_gradient" => plane_gradient::extents(call),
        "shuffle_gradient" => shuffle_gradient::extents(call),
        "weight_gradient" => weight_gradient::extents(call),
        "weight_gradient_lines" => weight_gradient_lines::extents(call),
        "weight_gradient_narrow" => weight_gradient_narrow::extents(call),
        "weight_gradient_sum" => {
            let mut found = vec![("partial", product(call, &["splits", "taps", "in_channels", "group_out"]))];
            if call.has("bounds") {
                let parts = call.int("splits") / call.int("part_splits");
                let own = call.int("in_channels") / call.int("group_in") * call.int("group_out");
                let words = if call.size("KIND") == 2 { call.int("in_channels") } else { 5 };
                found.extend([("bounds", (parts - 1) * call.int("part_bounds") + own), ("control", words)]);
            }
            found
        }
        "half_input" => {
            let channels = if call.has("channels") { call.int("channels") } else { 0 };
            vec![("out", low(call, "low") + call.int("count")), ("control", 5), ("largest", channels)]
        }
        "channel_largest" => vec![("largest", call.int("channels")), ("control", 1), ("asked", 1)],
        _ => epilogue::extents(call),
    }
}

/// What the arguments and the grid have to be.
pub fn check(call: &Call<'_>) {
    let what = call.variant.name;
    match call.kernel() {
        "plane_gradient" => return plane_gradient::check(call),
        "shuffle_gradient" => return shuffle_gradient::check(call),
        "weight_gradient" => return weight_gradient::check(call),
        "weight_gradient_lines" => return weight_gradient_lines::check(call),
        "weight_gradient_narrow" => return weight_gradient_narrow::check(call),
        _ => {}
    }
    let [blocks, rest @ ..] = call.grid;
    assert!(blocks > 0 && blocks < OVERFLOW && rest == [1, 1], "{:?} of {what}", call.grid);
    assert_eq!((i64::from(call.variant.threads), call.shared), (THREADS, 0), "{what}");
    match call.kernel() {
        "gradient_rows" => check_rows(call),
        "gradient_weight" => {
            for axis in AXES {
                let [kernel, classes, step, count] =
                    ["kernel", "classes", "step", "count"].map(|name| call.int(&format!("{name}_{axis}")));
                assert_eq!([classes, count], [kernel.min(step), tasks(kernel, step)], "{axis} of {what}");
            }
            let classes: i64 = of_axes(call, "classes").iter().product();
            assert!(call.int("slots") >= classes * call.int("group_out"), "{what}");
        }
        "direct_input_gradient" | "direct_weight_gradient" => {
            for axis in TapAxis::all(call) {
                let far = axis.input + (tasks(axis.kernel, axis.step) - 1) * axis.apart;
                assert!(axis.rows >= far && axis.classes == axis.kernel.min(axis.step), "{what}");
                // What a class and a row are of: outputs that follow each other as rows do.
                assert_eq!(axis.step * axis.dilation, axis.apart * axis.stride, "{what}");
            }
            let rows = product(call, &["n", "d_rows", "h_rows", "w_rows"]);
            let slots = product(call, &["groups", "slots"]);
            RowLayout::new(call, call.pointer("rows")).check(rows, slots, what);
            let pieces = tasks(product(call, &["n", "d_input", "h_input", "w_input"]), PIECE);
            if call.has("splits") {
                let tiles = ["group_in", "group_out"].map(|name| tasks(call.int(name), TILE));
                let tasks = product(call, &["groups", "splits", "d_kernel", "h_kernel", "w_kernel"]);
                assert!(pieces * PIECE < MOST_ROWS && call.int("splits") > 0, "{what}");
                assert!(tasks * tiles[0] * tiles[1] < MOST_ROWS, "{what}");
            }
        }
        "weight_gradient_sum" => {
            let [splits, all] =
                [&["splits"][..], &["taps", "in_channels", "group_out"]].map(|n| product(call, n));
            let together = call.int("together");
            assert!(splits > 0 && THREADS % together == 0, "{what}");
            assert!(blocks == tasks(all * together, THREADS), "{what}");
            assert!(!call.has("part_splits") || splits % call.int("part_splits") == 0, "{what}");
        }
        "half_input" => {
            assert!(["x", "out"].iter().all(|name| call.pointer(name).at.is_multiple_of(16)), "{what}");
            if call.has("low") {
                let [count, low, inner, channels] = call.ints(["count", "low", "inner", "channels"]);
                // Whole samples, and low parts where vectors of them start.
                assert!(count % (inner * channels) == 0 && count < OVERFLOW, "{what}");
                assert!(low >= count && low % 8 == 0, "{what}");
            }
        }
        "channel_largest" => {
            let [volume, channels, last] = call.ints(["volume", "channels", "last"]);
            assert!(volume > 0 && channels > 0 && [0, 1].contains(&last), "{what}");
            let of_sample = channel_blocks(call) * call.int("chunks");
            assert!(call.int("chunks") > 0 && blocks % of_sample == 0, "{blocks} of {what}");
        }
        _ => epilogue::check(call),
    }
}

fn check_rows(call: &Call<'_>) {
    let what = call.variant.name;
    let [channels, groups, group_in, slots, round] =
        call.ints(["channels", "groups", "group_in", "slots", "round"]);
    let (out, width) = (call.pointer("out"), call.size("CHANNELS"));
    let [rows, classes, size] = ["rows", "classes", "size"].map(|name| of_axes(call, name));
    let positions = rows.iter().chain(&classes).product::<i64>();
    let of_sample = tasks(positions, ELEMENTS / width) * tasks(channels, width);
    assert!(positions < OVERFLOW && call.grid[0] == samples(call) * of_sample, "{what}");
    assert!(samples(call) > 0 && samples(call) * rows.iter().product::<i64>() < MOST_ROWS, "{what}");
    assert!(groups * group_in == channels && size.iter().all(|&size| size > 0), "{what}");
    assert!(slots >= group_in * classes.iter().product::<i64>(), "{what}");
    // Neighbouring channels are written by vectors, which the next kernels read rows by; others one by one, also to a half of a vector.
    let vector = 16 / out.width as i64;
    assert!(groups * slots % vector == 0, "{what}");
    assert!(group_in % vector > 0 || slots % vector == 0 && out.at.is_multiple_of(16), "{what}");
    RowLayout::new(call, out).check(samples(call) * rows.iter().product::<i64>(), groups * slots, what);
    assert!([0, 1].contains(&round) && (round == 0 || call.size("KIND") == 1), "{what}");
    if call.has("low") {
        let (layout, rows) = (RowLayout::new(call, out), samples(call) * rows.iter().product::<i64>());
        let apart = call.int("low");
        assert!(apart >= layout.extent(rows, groups * slots) && apart % vector == 0, "{what}");
        assert!(group_in % vector == 0 && vector == JUDGED, "{what}");
    }
    assert!(call.given("terms").is_some() == call.given("mean").is_some(), "{what}");
    check_epilogue(call);
}

/// Does what a launch does.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    check(call);
    match call.kernel() {
        "gradient_rows" => rows(call, machine),
        "gradient_weight" => weight(call, machine),
        "direct_input_gradient" => direct_input(call, machine),
        "direct_weight_gradient" => direct_weight(call, machine),
        "plane_gradient" => plane_gradient::run(call, machine),
        "shuffle_gradient" => shuffle_gradient::run(call, machine),
        "weight_gradient" => weight_gradient::run(call, machine),
        "weight_gradient_lines" => weight_gradient_lines::run(call, machine),
        "weight_gradient_narrow" => weight_gradient_narrow::run(call, machine),
        "weight_gradient_sum" => sum(call, machine),
        "half_input" => half_input(call, machine),
        "channel_largest" => channel_largest(call, machine),
        _ => epilogue::run(call, machine),
    }
}

/// What a channel of a gradient's rows is scaled by; 1 where nothing is.
fn row_scale(call: &Call<'_>, machine: &Machine, channel: i64) -> f64 {
    let bounds = if call.has("bounds") { call.given("bounds") } else { None };
    bounds.map_or(1.0, |bounds| scale(bits(machine.read(bounds, channel))).min(100f64.exp2()))
}

/// What a channel of the input is scaled by of kernels that know; 1 where nothing is.
fn input_scaled_by(call: &Call<'_>, machine: &Machine, channel: i64) -> f64 {
    match call.size("KIND") {
        5 => input_scale(call, machine),
        2 => {
            let largest = call.pointer(if call.has("largest") { "largest" } else { "control" });
            let largest = machine.read(largest, channel);
            if largest < bits(f64::INFINITY) { scale(largest) } else { 1.0 }
        }
        _ => 1.0,
    }
}

/// The input, scaled.
fn half_input(call: &Call<'_>, machine: &mut Machine) {
    let [x, out] = ["x", "out"].map(|name| call.pointer(name));
    for at in 0..call.int("count") {
        if !call.has("low") {
            let value = machine.read(x, at) * input_scaled_by(call, machine, 0);
            machine.write(out, at, value);
            continue;
        }
        let [low, inner, channels] = call.ints(["low", "inner", "channels"]);
        let value = machine.read(x, at) * input_scaled_by(call, machine, at / inner % channels);
        let parts = halves(value, 1.0);
        (0..).zip(parts).for_each(|(part, value)| machine.write(out, part * low + at, value));
    }
}

/// Blocks of `channel_largest` that a chunk of a sample has.
fn channel_blocks(call: &Call<'_>) -> i64 {
    let channels = call.int("channels");
    if call.int("last") == 1 { tasks(channels, THREADS) } else { channels }
}

/// The largest magnitude of each channel, and of all.
fn channel_largest(call: &Call<'_>, machine: &mut Machine) {
    let [volume, channels, chunks, last] = call.ints(["volume", "channels", "chunks", "last"]);
    let [x, largest, control, asked] = ["x", "largest", "control", "asked"].map(|name| call.pointer(name));
    let (blocks, each) = (channel_blocks(call), tasks(tasks(volume, chunks), 4) * 4);
    for block in 0..call.grid[0] {
        let (chunk, rest) = (block % chunks, block / chunks);
        let (n, of_channels) = (rest / blocks, rest % blocks);
        let own = if last == 1 { THREADS } else { 1 };
        for c in of_channels * own..channels.min((of_channels + 1) * own) {
            let voxels = (chunk * each).min(volume)..((chunk + 1) * each).min(volume);
            let at = |voxel| {
                n * volume * channels + if last == 1 { voxel * channels + c } else { c * volume + voxel }
            };
            let most = voxels.map(|voxel| bits(machine.read(x, at(voxel)))).fold(0.0, f64::max);
            for (word, at) in [(largest, c), (control, 0), (asked, 0)] {
                machine.update(word, at, |before| before.max(most));
            }
        }
    }
}

/// A tensor by rows, each with the slots of every group: of a class and a channel the element at `s*i - p + j*d`, or the
/// gradient that follows from it.
fn rows(call: &Call<'_>, machine: &mut Machine) {
    if stands(call, machine, "unless") {
        return;
    }
    let [groups, group_in] = call.ints(["groups", "group_in"]);
    let [size, counts, classes, stride, padding, dilation] =
        ["size", "rows", "classes", "stride", "padding", "dilation"].map(|name| of_axes(call, name));
    let strides = call.ints(["x_d", "x_h", "x_w"]);
    let [x_n, x_c] = call.ints(["x_n", "x_c"]);
    let [x, out, control] = ["x", "out", "control"].map(|name| call.pointer(name));
    let steps = Steps::new(call, out, "group_in");
    let (y, terms, epilogue) = (call.given("y"), call.given("terms"), Epilogue::new(call, machine));
    let mut most = 0.0;
    for (line, (sample, i)) in (0..).zip((0..samples(call)).flat_map(|n| every(counts).map(move |i| (n, i))))
    {
        for (class, j) in (0..).zip(every(classes)) {
            let o = [0, 1, 2].map(|a| stride[a] * i[a] - padding[a] + j[a] * dilation[a]);
            let inside = (0..3).all(|a| (0..size[a]).contains(&o[a]));
            let from = sample * x_n + (0..3).map(|a| o[a] * strides[a]).sum::<i64>();
            let mut of_vector = 0.0;
            for c in 0..groups * group_in {
                let mut value = if inside { machine.read(x, from + c * x_c) } else { 0.0 };
                if let Some(y) = y.filter(|_| inside) {
                    let y = machine.read(y, from + c * x_c);
                    value = epilogue.gradient(machine, [sample, c], terms, [y, value]);
                }
                value *= row_scale(call, machine, c);
                let to = steps.at(line, [c / group_in, class, c % group_in]);
                if call.has("low") {
                    let [high, low] = halves(value, LIFT);
                    machine.write(out, to, high);
                    machine.write(out, call.int("low") + to, low);
                    of_vector = bits(value).max(if c % JUDGED == 0 { 0.0 } else { of_vector });
                    if c % JUDGED == JUDGED - 1 && is_too_coarse(of_vector) {
                        most = FINITE + 1.0;
                    }
                } else {
                    most = bits(value).max(most);
                    machine.write(out, to, value);
                }
            }
        }
    }
    // Of float64 nobody asks.
    if call.size("KIND") != 4 {
        raise_first(machine, control, most);
    }
}

fn raise_first(machine: &mut Machine, word: Pointer, most: f64) {
    machine.update(word, 0, |before| before.max(most));
}

/// The weight as that of the convolution of stride 1 whose channels are the slots.
fn weight(call: &Call<'_>, machine: &mut Machine) {
    let [groups, group_in, group_out, slots] = call.ints(["groups", "group_in", "group_out", "slots"]);
    let [kernel, classes, step, count] =
        ["kernel", "classes", "step", "count"].map(|name| of_axes(call, name));
    let (w, out) = (call.pointer("w"), call.pointer("out"));
    let all_classes: i64 = classes.iter().product();
    let mut most = 0.0;
    let pairs = (0..groups * slots).flat_map(|row| (0..group_in).map(move |ci| (row, ci)));
    for (at, ((row, ci), m)) in (0..).zip(pairs.flat_map(|pair| every(count).map(move |m| (pair, m)))) {
        let (group, class, co) = (row / slots, row % slots / group_out, row % slots % group_out);
        let j = every(classes).nth(class as usize).filter(|_| class < all_classes);
        let t = j.map(|j| [0, 1, 2].map(|a| j[a] + (count[a] - 1 - m[a]) * step[a]));
        let t = t.filter(|t| (0..3).all(|a| t[a] < kernel[a]));
        let value = t.map_or(0.0, |[td, th, tw]| {
            let pair = (group * group_in + ci) * group_out + co;
            let by = row_scale(call, machine, group * group_out + co);
            machine.read(w, ((pair * kernel[0] + td) * kernel[1] + th) * kernel[2] + tw) / by
        });
        most = bits(value).max(most);
        machine.write(out, at, value);
    }
    if call.variant.param("KIND") == Some(2) {
        let all = groups * group_in * group_out * kernel.iter().product::<i64>();
        most = (0..all).fold(most, |most, at| most.max(bits(machine.read(w, at))));
        if (0..groups).any(|group| are_apart(call, machine, group * group_out..(group + 1) * group_out)) {
            most = bits(f64::INFINITY);
        }
    }
    raise(call, machine, 0, most);
}

/// Whether the bounds of channels, of those that are not zero throughout, are too far apart for a weight that is scaled by their inverses.
pub fn are_apart(call: &Call<'_>, machine: &Machine, channels: Range<i64>) -> bool {
    let bounds = call.pointer("bounds");
    let scales = channels.filter(|&c| machine.read(bounds, c) != 0.0).map(|c| row_scale(call, machine, c));
    let (least, most) =
        scales.fold((f64::INFINITY, 0.0f64), |(least, most), of| (least.min(of), most.max(of)));
    most / least > 24f64.exp2()
}

/// Whether the result of another kernel stands, which multiplied numbers that are all finite, also as tf32, or that two fp16 do for:
/// as words of this name say, if there are such.
pub fn stands(call: &Call<'_>, machine: &Machine, words: &str) -> bool {
    let words = if call.has(words) { call.given(words) } else { None };
    words.is_some_and(|words| (0..2).all(|word| machine.read(words, word) < INFINITE_AS_TF32))
}

/// Of each tap that reads something for a voxel: which tap it is, its class and the row.
fn reads(axes: &[TapAxis; 3], sample: i64, i: [i64; 3]) -> Vec<[i64; 3]> {
    let [depth, height, width] = axes;
    let [of_d, of_h, of_w] = [0, 1, 2].map(|a| axes[a].taps(i[a]));
    let mut found = Vec::new();
    for [td, jd, qd] in &of_d {
        for [th, jh, qh] in &of_h {
            for [tw, jw, qw] in &of_w {
                let row = ((sample * depth.rows + qd) * height.rows + qh) * width.rows + qw;
                let class = (jd * height.classes + jh) * width.classes + jw;
                found.push([(td * height.kernel + th) * width.kernel + tw, class, row]);
            }
        }
    }
    found
}

/// The gradient of the input by its definition, unless another's stands.
fn direct_input(call: &Call<'_>, machine: &mut Machine) {
    if stands(call, machine, "control") {
        return;
    }
    let axes = TapAxis::all(call);
    let [n, groups, group_in, group_out] = call.ints(["n", "groups", "group_in", "group_out"]);
    let steps = Steps::new(call, call.pointer("rows"), "group_out");
    let [rows, w, dx] = ["rows", "w", "dx"].map(|name| call.pointer(name));
    let [x_n, x_c, x_d, x_h, x_w] = call.ints(["x_n", "x_c", "x_d", "x_h", "x_w"]);
    let taps: i64 = axes.iter().map(|axis| axis.kernel).product();
    let voxels = axes.each_ref().map(|axis| axis.input);
    for (sample, i) in (0..n).flat_map(|n| every(voxels).map(move |i| (n, i))) {
        let reads = reads(&axes, sample, i);
        for channel in 0..groups * group_in {
            let mut sum = 0.0;
            for &[t, class, row] in &reads {
                for co in 0..group_out {
                    let group = channel / group_in;
                    let dy = machine.read(rows, steps.at(row, [group, class, co]));
                    let dy = dy / row_scale(call, machine, group * group_out + co);
                    sum += dy * machine.read(w, (channel * group_out + co) * taps + t);
                }
            }
            machine.write(dx, sample * x_n + channel * x_c + i[0] * x_d + i[1] * x_h + i[2] * x_w, sum);
        }
    }
}

/// The gradient of the weight by its definition, unless another's stands: of the voxels every `splits`-th piece.
fn direct_weight(call: &Call<'_>, machine: &mut Machine) {
    if stands(call, machine, "control") {
        return;
    }
    let axes = TapAxis::all(call);
    let [n, groups, group_in, group_out] = call.ints(["n", "groups", "group_in", "group_out"]);
    let steps = Steps::new(call, call.pointer("rows"), "group_out");
    let splits = call.int("splits");
    let [x_n, x_c, x_d, x_h, x_w] = call.ints(["x_n", "x_c", "x_d", "x_h", "x_w"]);
    let [x, rows, partial] = ["x", "rows", "partial"].map(|name| call.pointer(name));
    let taps: i64 = axes.iter().map(|axis| axis.kernel).product();
    let channels = groups * group_in;
    let mut sums = vec![0.0; (splits * taps * channels * group_out) as usize];
    let by: Vec<f64> = (0..channels).map(|ci| input_scaled_by(call, machine, ci)).collect();
    let voxels = (0..n).flat_map(|n| every(axes.each_ref().map(|axis| axis.input)).map(move |i| (n, i)));
    for (voxel, (sample, i)) in (0..).zip(voxels) {
        let split = voxel / PIECE % splits;
        let from = sample * x_n + i[0] * x_d + i[1] * x_h + i[2] * x_w;
        let of_x =
            by.iter().zip(0..).map(|(by, ci)| by * machine.read(x, from + ci * x_c)).collect::<Vec<_>>();
        for [t, class, row] in reads(&axes, sample, i) {
            for (ci, x) in (0..).zip(&of_x) {
                let first = ((split * taps + t) * channels + ci) * group_out;
                for co in 0..group_out {
                    let group = ci / group_in;
                    let dy = machine.read(rows, steps.at(row, [group, class, co]));
                    // Rows that this has bounds of are not scaled yet.
                    sums[(first + co) as usize] += x * dy * row_scale(call, machine, group * group_out + co);
                }
            }
        }
    }
    (0..).zip(sums).for_each(|(at, sum)| machine.write(partial, at, sum));
}

/// Adds up the parts of the gradient of the weight.
fn sum(call: &Call<'_>, machine: &mut Machine) {
    let [splits, taps, in_channels, group_out] = call.ints(["splits", "taps", "in_channels", "group_out"]);
    let (partial, dw, pairs) = (call.pointer("partial"), call.pointer("dw"), in_channels * group_out);
    for (t, pair) in (0..taps).flat_map(|t| (0..pairs).map(move |pair| (t, pair))) {
        let part = |split| {
            let of_part = machine.read(partial, (split * taps + t) * pairs + pair);
            if !call.has("bounds") {
                return of_part;
            }
            let [group_in, part_splits, part_bounds] = call.ints(["group_in", "part_splits", "part_bounds"]);
            let channel = pair / group_out / group_in * group_out + pair % group_out;
            let channel = split / part_splits * part_bounds + channel;
            of_part / row_scale(call, machine, channel) / input_scaled_by(call, machine, pair / group_out)
        };
        let sum = (0..splits).map(part).sum();
        machine.write(dw, pair * taps + t, sum);
    }
}

/// What is unusual about a launch.
pub fn features(call: &Call<'_>, machine: &Machine) -> Vec<&'static str> {
    let found = match call.kernel() {
        "gradient_rows" => {
            let [channels, groups, group_in, slots] = call.ints(["channels", "groups", "group_in", "slots"]);
            let classes: i64 = of_axes(call, "classes").iter().product();
            let vector = 16 / call.pointer("out").width as i64;
            let gradient = call.pointer("x").buffer == Buffer::GradOutput;
            let wide = call.has("unless") && call.given("unless").is_some();
            vec![
                ("blocks of channels of rows", channels > call.size("CHANNELS")),
                ("channels of rows one by one", group_in % vector > 0),
                ("classes", classes > 1),
                ("groups", groups > 1),
                ("panels of rows", call.int("row") == vector && groups * slots > vector),
                ("rows of channels last", call.int("x_c") == 1),
                ("rows that are rounded", call.int("round") == 1),
                ("rows that two fp16 are too coarse for", wide && !stands(call, machine, "unless")),
                ("slots past the last class", gradient && slots > classes * group_in),
                ("rows of a bare convolution", gradient && call.given("y").is_none()),
            ]
        }
        "plane_gradient" => plane_gradient::features(call),
        "shuffle_gradient" => shuffle_gradient::features(call, machine),
        "weight_gradient" => weight_gradient::features(call),
        "weight_gradient_lines" => weight_gradient_lines::features(call),
        "weight_gradient_narrow" => weight_gradient_narrow::features(call),
        "direct_input_gradient" | "direct_weight_gradient" => {
            let input = call.kernel() == "direct_input_gradient";
            let done = !stands(call, machine, "control");
            vec![
                ("the input by the definition", done && input),
                ("the weight by the definition", done && !input),
                ("splits", !input && done && call.int("splits") > 1),
            ]
        }
        _ => return epilogue::features(call),
    };
    found.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect()
}

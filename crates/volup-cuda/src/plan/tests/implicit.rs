//! What `implicit_gemm` does, given its arguments.

use super::contracts::{activation, biased};
use super::machine::{Call, Machine, Pointer};
use super::norm;
use super::operand::{is_out_of_range, split};
use volup::reference;

/// The most shared memory that a block may have.
const MOST_SHARED: i64 = 232_448;
/// Warps of a block; positions of a line, words around them, and words from a line to the next.
const WARPS: i64 = 8;
const LANES: i64 = 32;
const MARGIN: i64 = 4;
const PITCH: i64 = LANES + 2 * MARGIN;
/// Words from a channel's staged line to the next.
const STAGED: i64 = 2 * LANES + 8;
/// The most pairs of residues, and taps along width.
const MOST_CLASSES: i64 = 64;
const MOST_WIDTH: i64 = 9;
/// Past what 32 bits count.
const OVERFLOW: i64 = 1 << 31;

/// One axis of the convolution.
#[derive(Clone, Copy)]
pub struct Axis {
    pub input: i64,
    pub output: i64,
    pub kernel: i64,
    pub stride: i64,
    pub padding: i64,
    pub dilation: i64,
}

impl Axis {
    fn new(call: &Call<'_>, axis: &str) -> Axis {
        let of = |name: &str| call.int(&format!("{axis}_{name}"));
        let [input, output, kernel] = ["input", "output", "kernel"].map(of);
        let [stride, padding, dilation] = ["stride", "padding", "dilation"].map(of);
        Axis { input, output, kernel, stride, padding, dilation }
    }

    fn reach(&self) -> i64 {
        (self.kernel - 1) * self.dilation
    }

    /// The input, whether there is one or not, that an output takes a tap from.
    fn source(&self, o: i64, tap: i64) -> Option<i64> {
        let at = o + self.padding - tap * self.dilation;
        (at % self.stride == 0).then(|| at / self.stride)
    }

    /// The first input that a box starts with whose outputs start at 0.
    fn first(&self) -> i64 {
        (self.padding - self.reach() + self.stride - 1).div_euclid(self.stride)
    }

    /// Inputs of a box of so many outputs.
    pub fn reached(&self, outputs: i64) -> i64 {
        (outputs - 1 + self.padding).div_euclid(self.stride) - self.first() + 1
    }

    /// The taps of a residue, each with the number of its input in a box.
    pub fn taps(&self, residue: i64) -> Vec<(i64, i64)> {
        let from = |tap| self.source(residue, tap).map(|i| (tap, i - self.first()));
        (0..self.kernel).filter_map(from).collect()
    }

    /// Of an axis of pairs of outputs the inputs that they take, each with the taps of both, in the order of the taps.
    pub fn offsets(&self) -> Vec<(i64, [Option<i64>; 2])> {
        let mut found: Vec<(i64, [Option<i64>; 2])> = Vec::new();
        for tap in 0..self.kernel {
            for column in 0..2 {
                let Some(offset) = self.source(column, tap) else { continue };
                let known = found.iter().position(|&(other, _)| other == offset);
                let at = known.unwrap_or_else(|| {
                    found.push((offset, [None; 2]));
                    found.len() - 1
                });
                found[at].1[column as usize] = Some(tap);
            }
        }
        found
    }
}

/// How a launch is cut.
struct Layout {
    x: Pointer,
    w: Pointer,
    x_n: i64,
    /// Channels of a word, and parts of a number.
    together: i64,
    parts: i64,
    /// Tiles of eight channels of a warp, and its lines.
    tiles: i64,
    rows: i64,
    axes: [Axis; 3],
    input: i64,
    output: i64,
    groups: i64,
    box_d: i64,
    row_blocks: i64,
    boxes: [i64; 3],
    samples: i64,
    planes: i64,
    lines: i64,
    column_bits: i64,
}

impl Layout {
    fn new(call: &Call<'_>) -> Layout {
        let kind = call.size("KIND");
        let [input, output, groups] = call.ints(["in_per_group", "out_per_group", "groups"]);
        let [box_d, row_blocks, samples, planes] = call.ints(["box_d", "row_blocks", "samples", "planes"]);
        Layout {
            x: call.pointer("x"),
            w: call.pointer("w"),
            x_n: call.int("x_n"),
            together: if kind == 0 { 2 } else { 1 },
            parts: if kind == 3 { 2 } else { 1 },
            tiles: call.size("MT"),
            rows: call.size("ROWS"),
            axes: ["d", "h", "w"].map(|axis| Axis::new(call, axis)),
            input,
            output,
            groups,
            box_d,
            row_blocks,
            boxes: call.ints(["boxes_d", "boxes_h", "boxes_w"]),
            samples,
            planes,
            lines: call.int("lines"),
            column_bits: call.int("column_bits"),
        }
    }

    fn channels(&self) -> i64 {
        self.groups * self.output
    }

    /// Words of the input that hold all channels of a position.
    fn chunks(&self) -> i64 {
        ceil(self.input, self.together)
    }

    fn box_h(&self) -> i64 {
        self.row_blocks * self.rows * self.axes[1].stride
    }

    fn boxes(&self) -> i64 {
        self.boxes.iter().product()
    }

    /// Warps that have different lines.
    fn warp_rows(&self) -> i64 {
        WARPS >> self.column_bits
    }

    fn taps(&self) -> i64 {
        self.axes.map(|axis| axis.kernel).iter().product()
    }

    /// Units of work of a box.
    fn units_of_work(&self) -> i64 {
        self.box_d * self.axes[1].stride * self.row_blocks
    }

    /// Units of the sums of each pair of residues.
    fn units(&self) -> Vec<i64> {
        let [depth, height, width] = self.axes;
        let of_pair = width.offsets().len() as i64 * self.chunks();
        let pairs = |rd, rh| (depth.taps(rd).len() * height.taps(rh).len()) as i64;
        (0..depth.stride)
            .flat_map(|rd| (0..height.stride).map(move |rh| (rd, rh)))
            .map(|(rd, rh)| ceil(pairs(rd, rh) * of_pair, 8) * 8)
            .collect()
    }

    /// Elements of a sample of the input and of the output.
    fn of_sample(&self) -> [i64; 2] {
        let [inputs, outputs] = [self.axes.map(|axis| axis.input), self.axes.map(|axis| axis.output)];
        [
            self.groups * self.input * inputs.iter().product::<i64>(),
            self.channels() * outputs.iter().product::<i64>(),
        ]
    }

    /// A unit of work: its first plane and line of the box's, in the order that they are dealt out in.
    fn unit(&self, unit: i64) -> [i64; 2] {
        let h_stride = self.axes[1].stride;
        let of_lines = unit / h_stride;
        let turn = if self.warp_rows() % h_stride == 0 { unit / self.warp_rows() } else { 0 };
        let row = of_lines % self.row_blocks * self.rows;
        [of_lines / self.row_blocks, row * h_stride + (unit + turn) % h_stride]
    }
}

fn ceil(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}

/// Whether a launch writes statistics.
fn counts(call: &Call<'_>) -> bool {
    [1, 3].contains(&call.int("mode"))
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let layout = Layout::new(call);
    match call.int("mode") {
        1 | 3 => {
            let count = layout.samples * layout.boxes() * layout.warp_rows() * layout.channels();
            norm::PARTIALS.map(|name| (name, count)).into()
        }
        2 => ["mean", "rstd"].map(|name| (name, layout.samples * call.int("norm_groups"))).into(),
        _ => Vec::new(),
    }
}

/// What the sizes, the grid and the shared memory have to be.
pub fn check(call: &Call<'_>) {
    let layout = Layout::new(call);
    let what = call.variant.name;
    let [depth, height, width] = layout.axes;
    assert_eq!(i64::from(call.variant.threads), 32 * WARPS, "{what}");
    assert!(call.grid[0] > 0 && call.grid[1..] == [1, 1], "{what}");
    for (name, most) in [("has_bias", 1), ("activation", 8), ("mode", 3), ("post_activation", 8)] {
        assert!((0..=most).contains(&call.int(name)), "{name} of {what}");
    }
    // Statistics are of what a few instructions compute.
    assert_eq!(call.int("mode") == 3, call.variant.param("COUNTS").is_some(), "mode of {what}");
    let plain = |name| ![4, 8].contains(&call.int(name));
    assert!(!counts(call) || plain("activation"), "activation of {what}");
    assert!(call.int("mode") != 3 || plain("post_activation"), "activation behind {what}");
    assert_eq!(call.int("norm_groups") * call.int("group_channels"), layout.channels(), "{what}");

    // What the kernel is for, in its tables.
    assert!(width.stride == 2 && width.kernel <= MOST_WIDTH, "{what}");
    let near = |&(offset, _): &(i64, _)| (-MARGIN..=MARGIN).contains(&offset);
    assert!(width.offsets().iter().all(near), "{:?} of {what}", width.offsets());
    assert!(depth.stride * height.stride <= MOST_CLASSES, "{what}");
    assert!((0..=WARPS.ilog2().into()).contains(&layout.column_bits), "{what}");

    // Boxes that start with the first residue and leave no output out, none without any; their input.
    assert!(layout.box_d > 0 && layout.box_d % depth.stride == 0, "{} of {what}", layout.box_d);
    let sizes = [layout.box_d, layout.box_h(), 2 * LANES];
    for ((axis, size), boxes) in layout.axes.iter().zip(sizes).zip(layout.boxes) {
        assert!(size > 0 && boxes == ceil(axis.output, size), "{:?} boxes of {what}", layout.boxes);
    }
    let [planes, lines, x_c, units] = call.ints(["planes", "lines", "x_c", "units"]);
    assert_eq!([planes, lines], [depth.reached(layout.box_d), height.reached(layout.box_h())], "{what}");
    assert!(x_c >= planes * lines * PITCH && x_c % 16 == 0 && x_c % 32 != 0, "{x_c} words of {what}");
    assert!(x_c < planes * lines * PITCH + 32, "{x_c} words of {what}");
    assert_eq!(units, layout.units().iter().sum::<i64>(), "{what}");

    let padded = ceil(layout.output, 8 * layout.tiles) * 8 * layout.tiles;
    let shared = 16 * (units + layout.taps() + layout.units_of_work())
        + 4 * (layout.parts * layout.chunks() * x_c + 4 * padded)
        + 64 * layout.parts * (ceil(layout.output, 8) * (units - 8) + padded)
        + 4 * WARPS * 8 * layout.tiles * STAGED;
    assert_eq!(call.shared, shared, "{what}");
    let own = i64::from(call.variant.shared_bytes);
    assert!(shared + own <= MOST_SHARED, "{shared} bytes of {what}");

    // Samples without gaps, at addresses that vectors are read from.
    let [x, y] = layout.of_sample();
    assert_eq!(call.ints(["x_n", "y_n"]), [x, y], "{what}");
    for name in ["x", "w", "y"] {
        assert!(call.pointer(name).at.is_multiple_of(16), "{name} of {what}");
    }

    // What is counted in 32 bits: elements of a sample and of the weight; boxes, with those that the last round asks
    // for; partial statistics; vectors of a box; what the inputs of an output are found by, with a box past the end.
    let items = layout.samples * layout.boxes() * layout.groups;
    let found_by =
        layout.axes.iter().zip(sizes).map(|(axis, size)| {
            axis.output.max(axis.input) + size + axis.padding + axis.stride * axis.reach()
        });
    for count in [
        x,
        y,
        layout.groups * layout.input * layout.output * layout.taps(),
        items + call.grid[0],
        layout.samples * layout.boxes() * layout.warp_rows() * layout.channels(),
        layout.chunks() * planes * lines * PITCH,
    ]
    .into_iter()
    .chain(found_by)
    {
        assert!(count < OVERFLOW, "{count}: {what}");
    }
}

/// What is unusual about a launch.
pub fn features(call: &Call<'_>) -> Vec<&'static str> {
    let layout = Layout::new(call);
    let [depth, height, width] = layout.axes;
    let mode = call.int("mode");
    let items = layout.samples * layout.boxes() * layout.groups;
    let offsets = width.offsets();
    let warps = layout.warp_rows();
    let found = [
        ("blocks of many boxes", items > call.grid[0]),
        ("boxes past the end", depth.output % layout.box_d > 0),
        ("channels of a group past a tile", layout.output % 8 > 0),
        ("channels that a pair lacks", layout.input % layout.together > 0),
        ("columns past the end", width.output % (2 * LANES) > 0 && layout.boxes[2] > 1),
        ("groups", layout.groups > 1),
        ("inputs of one column", offsets.iter().any(|(_, taps)| taps.contains(&None))),
        ("lines one by one", width.input % 4 > 0),
        ("lines past the end", height.output % layout.box_h() > 0),
        ("normalized", mode == 2),
        ("odd lines", width.output % 2 > 0),
        ("residues in turns", height.stride > 1 && warps % height.stride == 0),
        ("residues without taps", layout.units().contains(&0)),
        ("statistics", mode == 1),
        ("statistics of what is written", mode == 3),
        ("warps of many channel blocks", ceil(layout.output, 8 * layout.tiles) > 1 << layout.column_bits),
        ("warps of other channels", layout.column_bits > 0),
        ("warps without lines", warps > layout.units_of_work()),
    ];
    found.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect()
}

/// What an output is summed over: where each factor lies from its line and position in the box, and the weight's parts.
type Terms = Vec<(i64, [f64; 2])>;

/// What a block keeps of a group's weight.
struct Weights {
    /// Of each pair of residues, column of a pair and channel of the group.
    terms: Vec<[Vec<Terms>; 2]>,
    /// Whether there is what is left to the definition.
    bad: bool,
}

impl Weights {
    fn new(call: &Call<'_>, machine: &Machine, layout: &Layout, group: i64) -> Weights {
        let [depth, height, width] = layout.axes;
        let (mut terms, mut bad) = (Vec::new(), false);
        for (rd, rh) in (0..depth.stride).flat_map(|rd| (0..height.stride).map(move |rh| (rd, rh))) {
            let mut of_pair = [(); 2].map(|()| vec![Terms::new(); layout.output as usize]);
            for (kd, at_d) in depth.taps(rd) {
                for (kh, at_h) in height.taps(rh) {
                    assert!(at_d >= 0 && at_h >= 0, "{at_d}, {at_h}: {}", call.variant.name);
                    for (offset, taps) in width.offsets() {
                        for (of_channels, tap) in of_pair.iter_mut().zip(taps) {
                            let Some(kw) = tap else { continue };
                            let tap = (kd * height.kernel + kh) * width.kernel + kw;
                            for c in 0..layout.input {
                                let from = ((c * layout.planes + at_d) * layout.lines + at_h) * PITCH;
                                for (o, terms) in of_channels.iter_mut().enumerate() {
                                    let pair = (group * layout.input + c) * layout.output + o as i64;
                                    let weight = machine.read(layout.w, pair * layout.taps() + tap);
                                    bad |= is_out_of_range(layout.parts, [weight].into_iter());
                                    terms.push((from + MARGIN + offset, split(layout.parts, weight)));
                                }
                            }
                        }
                    }
                }
            }
            terms.push(of_pair);
        }
        Weights { terms, bad }
    }
}

/// A box: its sample and group, and the first output and input of each axis, along width a pair of outputs.
struct BoxAt {
    sample: i64,
    group: i64,
    at: [i64; 3],
    outputs: [i64; 3],
    inputs: [i64; 3],
}

impl BoxAt {
    /// Boxes are counted by samples, these by groups.
    fn new(layout: &Layout, item: i64) -> BoxAt {
        let [_, boxes_h, boxes_w] = layout.boxes;
        let (of_sample, of_all) = (item % layout.boxes(), item / layout.boxes());
        let at = [of_sample / boxes_w / boxes_h, of_sample / boxes_w % boxes_h, of_sample % boxes_w];
        let outputs = [at[0] * layout.box_d, at[1] * layout.box_h(), 2 * LANES * at[2]];
        let [depth, height, _] = layout.axes;
        let inputs = [
            outputs[0] / depth.stride + depth.first(),
            outputs[1] / height.stride + height.first(),
            LANES * at[2] - MARGIN,
        ];
        let [group, sample] = [of_all / layout.samples, of_all % layout.samples];
        BoxAt { sample, group, at, outputs, inputs }
    }

    /// Where an input of a channel of the group lies.
    fn source(&self, layout: &Layout, [c, d, h, w]: [i64; 4]) -> Option<i64> {
        let [depth, height, width] = layout.axes.map(|axis| axis.input);
        let there = (0..depth).contains(&d) && (0..height).contains(&h) && (0..width).contains(&w);
        let channel = self.group * layout.input + c;
        there.then(|| self.sample * layout.x_n + ((channel * depth + d) * height + h) * width + w)
    }

    /// The box's input with zeros around, in its parts, and whether there is what is left to the definition: vectors of
    /// four positions are looked at, of every channel.
    fn fetch(&self, machine: &Machine, layout: &Layout) -> (Vec<[f64; 2]>, bool) {
        let [first_d, first_h, first_w] = self.inputs;
        let (mut kept, mut bad) = (Vec::new(), false);
        for c in 0..layout.input {
            for plane in 0..layout.planes {
                for line in 0..layout.lines {
                    for vector in (0..PITCH).step_by(4) {
                        let value = |f: i64| {
                            let place = [c, first_d + plane, first_h + line, first_w + vector + f];
                            self.source(layout, place).map_or(0.0, |at| machine.read(layout.x, at))
                        };
                        let values = [0, 1, 2, 3].map(value);
                        bad |= is_out_of_range(layout.parts, values.into_iter());
                        kept.extend(values.map(|value| split(layout.parts, value)));
                    }
                }
            }
        }
        (kept, bad)
    }

    /// An output's sum by the definition.
    fn defined(&self, machine: &Machine, layout: &Layout, [o, place @ ..]: [i64; 4]) -> f64 {
        let taps = [0, 1, 2].map(|axis| -> Vec<(i64, i64)> {
            let of = layout.axes[axis];
            (0..of.kernel).filter_map(|tap| of.source(place[axis], tap).map(|i| (tap, i))).collect()
        });
        let mut sum = 0.0;
        for (kd, d) in &taps[0] {
            for (kh, h) in &taps[1] {
                for (kw, w) in &taps[2] {
                    let tap = (kd * layout.axes[1].kernel + kh) * layout.axes[2].kernel + kw;
                    for c in 0..layout.input {
                        let Some(at) = self.source(layout, [c, *d, *h, *w]) else { continue };
                        let pair = (self.group * layout.input + c) * layout.output + o;
                        sum +=
                            machine.read(layout.x, at) * machine.read(layout.w, pair * layout.taps() + tap);
                    }
                }
            }
        }
        sum
    }
}

/// Blocks do one box after the other, of a group all samples' before the next group's.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    check(call);
    let layout = Layout::new(call);
    let of_group = layout.samples * layout.boxes();
    for group in 0..layout.groups {
        let weights = Weights::new(call, machine, &layout, group);
        for item in group * of_group..(group + 1) * of_group {
            compute(call, machine, &layout, &weights, &BoxAt::new(&layout, item));
        }
    }
}

/// A box: units of work are dealt out to the warps that have different lines, and each has all channels.
fn compute(call: &Call<'_>, machine: &mut Machine, layout: &Layout, weights: &Weights, here: &BoxAt) {
    let [depth, height, width] = layout.axes;
    let (kept, bad) = here.fetch(machine, layout);
    let (bias, y, mode) = (call.pointer("bias"), call.pointer("y"), call.int("mode"));
    let y_n = call.int("y_n");
    let function = activation(call, ["activation", "slope"]);
    let behind = activation(call, ["post_activation", "post_slope"]);
    let warps = layout.warp_rows();
    let columns = (width.output - here.outputs[2]).min(2 * LANES);
    for o in 0..layout.output {
        let channel = here.group * layout.output + o;
        let bias = biased(call, machine, bias, channel);
        let normalized = (mode == 2).then(|| norm::normalized(call, machine, [here.sample, channel]));
        let mut seen = vec![Vec::new(); if counts(call) { warps as usize } else { 0 }];
        for unit in 0..layout.units_of_work() {
            let [d, first_h] = layout.unit(unit);
            let residues = d % depth.stride * height.stride + first_h % height.stride;
            let terms = [0, 1].map(|column| &weights.terms[residues as usize][column][o as usize]);
            for row in 0..layout.rows {
                let h = first_h + row * height.stride;
                let [od, oh] = [here.outputs[0] + d, here.outputs[1] + h];
                if od >= depth.output || oh >= height.output {
                    continue;
                }
                let line = (d / depth.stride * layout.lines + h / height.stride) * PITCH;
                for column in 0..columns {
                    let ow = here.outputs[2] + column;
                    let sum = if bad || weights.bad {
                        here.defined(machine, layout, [o, od, oh, ow])
                    } else {
                        let first = line + column / 2;
                        let product = |&(at, [high, low]): &(i64, [f64; 2])| {
                            let [x_high, x_low] = kept[(first + at) as usize];
                            high * x_high + (low * x_high + high * x_low)
                        };
                        terms[column as usize % 2].iter().map(product).sum()
                    };
                    let value = function.map_or(sum + bias, |of| reference::activation(of, sum + bias));
                    if counts(call) {
                        let of = behind.filter(|_| mode == 3);
                        let counted = of.map_or(value, |of| reference::activation(of, value));
                        seen[(unit % warps) as usize].push(counted);
                    }
                    if mode != 1 {
                        let to = ((channel * depth.output + od) * height.output + oh) * width.output + ow;
                        let value = normalized.as_ref().map_or(value, |normalized| normalized(value));
                        machine.write(y, here.sample * y_n + to, value);
                    }
                }
            }
        }
        let [_, boxes_h, boxes_w] = layout.boxes;
        let place = (here.at[0] * boxes_h + here.at[1]) * boxes_w + here.at[2];
        for (warp, values) in seen.iter().enumerate() {
            let of_warp = (here.sample * layout.boxes() + place) * warps + warp as i64;
            norm::put(call, machine, norm::PARTIALS, of_warp * layout.channels() + channel, values);
        }
    }
}

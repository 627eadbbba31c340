//! What `implicit_gemm` does, given its arguments.

use super::contracts::{activation, biased};
use super::machine::{Call, Machine};
use super::norm;
use volup::{Activation, reference};

/// The most shared memory that a block may have.
const MOST_SHARED: i64 = 232_448;
/// Positions of a segment of a line, and words around a line.
const LANES: i64 = 32;
const MARGIN: i64 = 4;
/// Bytes that the copy engine stores at once.
const SECTOR: i64 = 32;
/// The most stages.
const MOST_STAGES: i64 = 8;
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
    /// Channels of a word, and parts of a weight.
    together: i64,
    parts: i64,
    /// Segments of a box, lines of each residue in a row block, warps that multiply.
    segments: i64,
    lines_of_block: i64,
    warps: i64,
    axes: [Axis; 3],
    input: i64,
    output: i64,
    groups: i64,
    box_d: i64,
    units_h: i64,
    blocks_h: i64,
    boxes: [i64; 3],
    samples: i64,
    joined: bool,
    linked: bool,
    /// Whether the input is NDHWC; where the output is, bytes of a voxel that are written at once.
    of_last: bool,
    voxel: Option<i64>,
    blocks_of_group: i64,
}

impl Layout {
    fn new(call: &Call<'_>) -> Layout {
        let kind = call.size("KIND");
        let [input, output, groups] = call.ints(["in_per_group", "out_per_group", "groups"]);
        let [box_d, units_h, blocks_h, samples] = call.ints(["box_d", "units_h", "blocks_h", "samples"]);
        let [joined, linked, blocks_of_group] = call.ints(["joined", "linked", "blocks_of_group"]);
        Layout {
            together: if kind == 0 { 2 } else { 1 },
            parts: if kind == 2 { 2 } else { 1 },
            segments: call.size("SEGMENTS"),
            lines_of_block: call.size("LINES"),
            warps: 4 * call.size("WARPGROUPS"),
            axes: ["d", "h", "w"].map(|axis| Axis::new(call, axis)),
            input,
            output,
            groups,
            box_d,
            units_h,
            blocks_h,
            boxes: call.ints(["boxes_d", "boxes_h", "boxes_w"]),
            samples,
            joined: joined == 1,
            linked: linked == 1,
            of_last: call.variant.param("VOXEL").is_some(),
            voxel: call.variant.param("VOXEL").filter(|&bytes| bytes > 0),
            blocks_of_group,
        }
    }

    fn channels(&self) -> i64 {
        self.groups * self.output
    }

    /// Words of the input that hold all channels of a position.
    fn chunks(&self) -> i64 {
        ceil(self.input, self.together)
    }

    /// Lines of a row block, and of a unit of work, which has some; sizes of a box.
    fn block_h(&self) -> i64 {
        self.lines_of_block * self.axes[1].stride
    }

    fn unit_h(&self) -> i64 {
        self.blocks_h * self.block_h()
    }

    fn box_sizes(&self) -> [i64; 3] {
        [self.box_d, self.units_h * self.unit_h(), 2 * LANES * self.segments]
    }

    /// Boxes of a group.
    fn items(&self) -> i64 {
        self.samples * self.boxes.iter().product::<i64>()
    }

    /// Tiles of eight channels.
    fn tiles(&self) -> i64 {
        ceil(self.output, 8)
    }

    fn taps(&self) -> i64 {
        self.axes.map(|axis| axis.kernel).iter().product()
    }

    /// Entries of the sums of each pair of residues.
    fn entries(&self) -> Vec<i64> {
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
}

/// Where a channel of a voxel lies in a sample, of so many channels and voxels.
fn place_in_sample(last: bool, [channel, channels]: [i64; 2], [voxel, voxels]: [i64; 2]) -> i64 {
    if last { voxel * channels + channel } else { channel * voxels + voxel }
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
            let count = layout.items() * layout.box_d * layout.units_h * layout.channels();
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
    assert_eq!(i64::from(call.variant.threads), 32 * layout.warps + 128, "{what}");
    assert_eq!(call.grid, [layout.groups * layout.blocks_of_group, 1, 1], "{what}");
    assert!((1..=layout.items()).contains(&layout.blocks_of_group), "{what}");
    for (name, most) in [
        ("has_bias", 1),
        ("activation", 8),
        ("mode", 3),
        ("post_activation", 8),
        ("joined", 1),
        ("linked", 1),
    ] {
        assert!((0..=most).contains(&call.int(name)), "{name} of {what}");
    }
    assert_eq!(call.int("mode") == 3, call.variant.param("COUNTS").is_some(), "mode of {what}");
    for name in ["activation", "post_activation"] {
        assert!(![4, 8].contains(&call.int(name)), "{name} of {what}");
    }
    assert_eq!(call.int("norm_groups") * call.int("group_channels"), layout.channels(), "{what}");

    // What the kernel is for, in its tables.
    assert!(width.stride == 2 && width.kernel <= MOST_WIDTH, "{what}");
    let near = |&(offset, _): &(i64, _)| (-MARGIN..=MARGIN).contains(&offset);
    assert!(width.offsets().iter().all(near), "{:?} of {what}", width.offsets());
    assert!(depth.stride * height.stride <= MOST_CLASSES, "{what}");

    // Boxes that start with the first residue and leave no output out, none without any; their input.
    assert!(layout.box_d > 0 && layout.box_d % depth.stride == 0, "{} of {what}", layout.box_d);
    let sizes = layout.box_sizes();
    for ((axis, size), boxes) in layout.axes.iter().zip(sizes).zip(layout.boxes) {
        assert!(size > 0 && boxes == ceil(axis.output, size), "{:?} boxes of {what}", layout.boxes);
    }
    let [planes, lines, x_c, entries] = call.ints(["planes", "lines", "x_c", "entries"]);
    assert_eq!([planes, lines], [depth.reached(sizes[0]), height.reached(sizes[1])], "{what}");
    let of_channel = planes * lines * (LANES * layout.segments + 2 * MARGIN);
    assert!(x_c >= of_channel && x_c % 16 == 0 && x_c % 32 != 0, "{x_c} words of {what}");
    assert!(x_c < of_channel + 32, "{x_c} words of {what}");
    assert_eq!(entries, layout.entries().iter().sum::<i64>(), "{what}");

    // Runs of lines of the output, all of a row block or one each; where they start, a sector may have started. One that goes on
    // where the one before has ended has sectors of its own.
    let [stages, run_pitch] = call.ints(["stages", "run_pitch"]);
    let element = call.pointer("y").width as i64;
    assert!(layout.boxes[2] == 1 || !layout.joined, "{what}");
    if let Some(voxel) = layout.voxel {
        // All voxels of a warp's lines, and a sector more for each four.
        let area = layout.lines_of_block * sizes[2] * (voxel + SECTOR / 4);
        assert_eq!(8 * run_pitch * element, area, "{what}");
        assert!(!layout.joined && !layout.linked && layout.output * element % voxel == 0, "{what}");
        assert!(layout.channels() * element % 16 == 0 && voxel % (8 * element) == 0, "{what}");
    } else {
        assert!(layout.joined || layout.lines_of_block == 1, "{what}");
        let run = if layout.joined { layout.block_h() * width.output } else { width.output.min(sizes[2]) };
        let least = run * element + SECTOR - element;
        assert!(run_pitch * element >= least && run_pitch * element % SECTOR == 0, "{what}");
        assert!(run_pitch * element < least + 224, "{what}");
        assert_eq!(layout.linked, layout.boxes[2] == 1 && run * element >= SECTOR, "{what}");
    }
    // No warp takes one box for another.
    let units =
        layout.box_d * layout.units_h * layout.tiles() / layout.voxel.map_or(1, |v| v / (8 * element));
    assert!((2..=MOST_STAGES).contains(&stages) && (stages - 1) * units >= layout.warps - 1, "{what}");

    let shared = 16 * entries
        + 4 * stages * layout.chunks() * x_c
        + 64 * layout.parts * layout.tiles() * entries
        + 96 * layout.tiles()
        + if layout.parts == 2 { 64 * layout.tiles() * depth.stride * height.stride } else { 0 }
        + layout.warps * 8 * run_pitch * element;
    assert_eq!(call.shared, shared, "{what}");
    let own = ceil(call.variant.shared_bytes.into(), SECTOR) * SECTOR;
    assert!(shared + own <= MOST_SHARED, "{shared} bytes of {what}");

    // Samples without gaps, at addresses that vectors are read from.
    let [x, y] = layout.of_sample();
    assert_eq!(call.ints(["x_n", "y_n"]), [x, y], "{what}");
    for name in ["x", "w", "y"] {
        assert!(call.pointer(name).at.is_multiple_of(16), "{name} of {what}");
    }

    // What is counted in 32 bits: elements of a sample and of the weight; units of work, with those that the last round
    // asks for; partial statistics; words of a box; what the inputs of an output are found by, with a box past the end.
    let found_by =
        layout.axes.iter().zip(sizes).map(|(axis, size)| {
            axis.output.max(axis.input) + size + axis.padding + axis.stride * axis.reach()
        });
    for count in [
        x,
        y,
        layout.groups * layout.input * layout.output * layout.taps(),
        layout.items() * units + layout.blocks_of_group * layout.warps,
        layout.items() * layout.box_d * layout.units_h * layout.channels(),
        layout.chunks() * x_c,
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
    let [box_d, box_h, box_w] = layout.box_sizes();
    let offsets = width.offsets();
    let found = [
        ("blocks of many boxes", layout.items() > layout.blocks_of_group),
        ("boxes past the end", depth.output % box_d > 0),
        ("channels last, few", layout.voxel.is_some()),
        ("channels last to first, few", layout.of_last && layout.voxel.is_none()),
        ("channels of a group past a tile", layout.output % 8 > 0),
        ("channels that a pair lacks", layout.input % layout.together > 0),
        ("columns past the end", width.output % box_w > 0 && layout.boxes[2] > 1),
        ("groups", layout.groups > 1),
        ("inputs of one column", offsets.iter().any(|(_, taps)| taps.contains(&None))),
        ("lines apart", !layout.joined && !layout.linked && layout.voxel.is_none()),
        ("lines that follow each other", !layout.joined && layout.linked),
        ("lines one by one", width.input % 4 > 0),
        ("lines past the end", height.output % box_h > 0),
        ("normalized", mode == 2),
        ("odd lines", width.output % 2 > 0),
        ("residues without taps", layout.entries().contains(&0)),
        ("statistics", mode == 1),
        ("row blocks apart", layout.joined && layout.blocks_h > 1 && !layout.linked),
        ("row blocks that follow each other", layout.joined && layout.blocks_h > 1 && layout.linked),
        ("statistics of what is written", mode == 3),
        (
            "units without lines",
            height.output % box_h > 0 && height.output % box_h <= box_h - layout.unit_h(),
        ),
        (
            "units without all row blocks",
            (height.output % box_h) % layout.unit_h() > 0 && layout.blocks_h > 1,
        ),
    ];
    found.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect()
}

/// Of each output along an axis its taps that read an input, and which.
fn taps_of_outputs(axis: Axis) -> Vec<Vec<(i64, i64)>> {
    let of = |output| {
        let inside = |i: &i64| (0..axis.input).contains(i);
        let from = |tap| axis.source(output, tap).filter(inside).map(|i| (tap, i));
        (0..axis.kernel).filter_map(from).collect()
    };
    (0..axis.output).map(of).collect()
}

/// An output's sum by the definition, of all elements of the input and the weight, with its taps along each axis.
fn defined(layout: &Layout, [x, w]: [&[f64]; 2], [n, channel]: [i64; 2], taps: [&[(i64, i64)]; 3]) -> f64 {
    let [depth, height, width] = layout.axes;
    let (x_n, channels) = (layout.of_sample()[0], layout.groups * layout.input);
    let voxels = depth.input * height.input * width.input;
    let (first, o) = (channel / layout.output * layout.input, channel % layout.output);
    // From a channel to the next.
    let (of_x, of_w) = (if layout.of_last { 1 } else { voxels }, layout.output * layout.taps());
    let mut sum = 0.0;
    for (kd, d) in taps[0] {
        for (kh, h) in taps[1] {
            for (kw, iw) in taps[2] {
                let tap = (kd * height.kernel + kh) * width.kernel + kw;
                let voxel = (d * height.input + h) * width.input + iw;
                let x_at = n * x_n + place_in_sample(layout.of_last, [first, channels], [voxel, voxels]);
                let w_at = (first * layout.output + o) * layout.taps() + tap;
                for c in 0..layout.input {
                    sum += x[(x_at + c * of_x) as usize] * w[(w_at + c * of_w) as usize];
                }
            }
        }
    }
    sum
}

/// What a launch computes, not how: its PTX is run by tests of its own.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    check(call);
    let layout = Layout::new(call);
    let (bias, y, mode) = (call.pointer("bias"), call.pointer("y"), call.int("mode"));
    let function = activation(call, ["activation", "slope"]);
    let behind = activation(call, ["post_activation", "post_slope"]).filter(|_| mode == 3);
    let of = |function: Option<Activation>, x: f64| {
        function.map_or(x, |function| reference::activation(function, x))
    };
    let all = |name: &str, count: i64| -> Vec<f64> {
        (0..count).map(|at| machine.read(call.pointer(name), at)).collect()
    };
    let x = all("x", layout.samples * layout.of_sample()[0]);
    let w = all("w", layout.groups * layout.input * layout.output * layout.taps());
    let [boxes_d, boxes_h, boxes_w] = layout.boxes;
    let [box_d, _, box_w] = layout.box_sizes();
    let [depth, height, width] = layout.axes.map(|axis| axis.output);
    let taps = layout.axes.map(taps_of_outputs);
    let y_n = call.int("y_n");
    for (n, channel) in (0..layout.samples).flat_map(|n| (0..layout.channels()).map(move |c| (n, c))) {
        let add = biased(call, machine, bias, channel);
        let normalized = (mode == 2).then(|| norm::normalized(call, machine, [n, channel]));
        for (d, unit_h, column) in (0..boxes_d * box_d).flat_map(|d| {
            (0..boxes_h * layout.units_h).flat_map(move |h| (0..boxes_w).map(move |w| (d, h, w)))
        }) {
            let lines = unit_h * layout.unit_h()..((unit_h + 1) * layout.unit_h()).min(height);
            let columns = column * box_w..((column + 1) * box_w).min(width);
            let mut seen = Vec::new();
            for (h, column) in lines.flat_map(|h| columns.clone().map(move |w| (h, w))).filter(|_| d < depth)
            {
                let [of_d, of_h, of_w] =
                    [(0, d), (1, h), (2, column)].map(|(axis, at)| &taps[axis][at as usize][..]);
                let sum = defined(&layout, [&x, &w], [n, channel], [of_d, of_h, of_w]);
                let value = of(function, sum + add);
                if mode != 1 {
                    let voxels = [(d * height + h) * width + column, depth * height * width];
                    let at = place_in_sample(layout.voxel.is_some(), [channel, layout.channels()], voxels);
                    let value = normalized.as_ref().map_or(value, |normalized| normalized(value));
                    machine.write(y, n * y_n + at, value);
                }
                seen.push(of(behind, value));
            }
            if counts(call) {
                let item = ((n * boxes_d + d / box_d) * boxes_h + unit_h / layout.units_h) * boxes_w + column;
                let unit = (item * box_d + d % box_d) * layout.units_h + unit_h % layout.units_h;
                norm::put(call, machine, norm::PARTIALS, unit * layout.channels() + channel, &seen);
            }
        }
    }
}

//! What `plane_gradient` does, given its arguments.

use super::contracts::{bits, scale};
use super::epilogue::{Epilogue, check_epilogue, tasks};
use super::gradient::{AXES, of_axes};
use super::machine::{Call, Machine, Pointer};
use std::ops::Range;

/// The most shared memory that a block may have.
const MOST_SHARED: i64 = 232_448;
const THREADS: i64 = 256;
/// Channels of the input, at most; voxels of a step, and elements after those of a channel.
const CHANNELS: i64 = 8;
const STEP: i64 = 16;
const APART: i64 = 8;
/// Channels of 16 bytes of what is multiplied; bytes of the copies of a tensor.
const VECTOR: i64 = 8;
const COPIES: i64 = 8 * 2 * 1152;
/// Past what 32 bits count.
const OVERFLOW: i64 = 1 << 31;

/// How a launch is cut.
struct Layout {
    input: [i64; 3],
    output: [i64; 3],
    kernel: [i64; 3],
    stride: [i64; 3],
    padding: [i64; 3],
    dilation: [i64; 3],
    in_channels: i64,
    out_channels: i64,
    lines: i64,
    planes: i64,
    items: i64,
    blocks: i64,
}

impl Layout {
    fn new(call: &Call<'_>) -> Layout {
        let [in_channels, out_channels, lines, planes, items] =
            call.ints(["in_channels", "out_channels", "lines", "planes", "items"]);
        let of = |name| of_axes(call, name);
        Layout {
            input: of("input"),
            output: of("output"),
            kernel: of("kernel"),
            stride: of("stride"),
            padding: of("padding"),
            dilation: of("dilation"),
            in_channels,
            out_channels,
            lines,
            planes,
            items,
            blocks: call.grid[0],
        }
    }

    fn taps(&self) -> i64 {
        self.kernel.iter().product()
    }

    /// Tiles of lines and segments of planes of a sample.
    fn tiles(&self) -> i64 {
        tasks(self.input[1], self.lines)
    }
    fn segments(&self) -> i64 {
        tasks(self.input[0], self.planes)
    }
    fn samples(&self) -> i64 {
        self.items / (self.tiles() * self.segments())
    }

    /// Outputs that taps of so many neighbouring voxels reach.
    fn reach(&self, axis: usize, voxels: i64) -> i64 {
        (voxels - 1) * self.stride[axis] + (self.kernel[axis] - 1) * self.dilation[axis] + 1
    }

    /// The sample, planes and lines of an item.
    fn item(&self, item: i64) -> (i64, Range<i64>, Range<i64>) {
        let (rest, line) = (item / self.tiles(), item % self.tiles() * self.lines);
        let (sample, plane) = (rest / self.segments(), rest % self.segments() * self.planes);
        let end = |first: i64, count, axis: usize| self.input[axis].min(first + count);
        (sample, plane..end(plane, self.planes, 0), line..end(line, self.lines, 1))
    }

    /// The output that a tap reads for a voxel, if there is one.
    fn reads(&self, voxel: [i64; 3], tap: [i64; 3]) -> Option<[i64; 3]> {
        let of = |axis: usize| {
            voxel[axis] * self.stride[axis] - self.padding[axis] + tap[axis] * self.dilation[axis]
        };
        let output = [of(0), of(1), of(2)];
        output.iter().zip(self.output).all(|(&o, size)| (0..size).contains(&o)).then_some(output)
    }

    /// Each tap with its number.
    fn each_tap(&self) -> impl Iterator<Item = (i64, [i64; 3])> {
        let [_, height, width] = self.kernel;
        (0..self.taps()).map(move |tap| (tap, [tap / width / height, tap / width % height, tap % width]))
    }

    /// The bytes of shared memory that the kernel's file asks for.
    fn shared_bytes(&self, call: &Call<'_>) -> i64 {
        let channels = call.size("CHANNELS");
        let columns = tasks(self.reach(2, self.input[2]), self.stride[2]) * self.stride[2];
        let ring = self.reach(0, 1) * self.reach(1, self.lines) * columns * 2 * channels;
        let voxels = STEP * tasks(self.lines * self.input[2], STEP) + APART;
        let element = call.pointer("dz").width as i64;
        let own = ring + self.in_channels * (2 * self.taps() * channels + element * voxels);
        let tensors = if call.given("y").is_some() { 2 } else { 1 };
        tasks(own, 16) * 16 + tensors * COPIES
    }
}

/// Strides of x or of y: of samples, channels and each axis.
fn strides(call: &Call<'_>, name: &str) -> [i64; 5] {
    ["n", "c", "d", "h", "w"].map(|of| call.int(&format!("{name}_{of}")))
}

/// Where a tensor has a channel's element.
fn place([of_n, of_c, of_axes @ ..]: [i64; 5], sample: i64, channel: i64, at: [i64; 3]) -> i64 {
    sample * of_n + channel * of_c + at.iter().zip(of_axes).map(|(at, stride)| at * stride).sum::<i64>()
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let layout = Layout::new(call);
    let groups = layout.out_channels / call.int("group_channels");
    let partial = layout.blocks * layout.taps() * layout.in_channels * layout.out_channels;
    vec![("terms", 2 * layout.samples() * groups), ("partial", partial), ("bounds", layout.out_channels)]
}

/// What the sizes, the grid and the shared memory have to be.
pub fn check(call: &Call<'_>) {
    let (what, layout) = (call.variant.name, Layout::new(call));
    let Layout { in_channels, out_channels, lines, planes, items, blocks, .. } = layout;
    assert_eq!(i64::from(call.variant.threads), THREADS, "{what}");
    assert!(blocks > 0 && blocks <= items && call.grid[1..] == [1, 1], "{:?} of {what}", call.grid);
    assert!((1..=CHANNELS).contains(&in_channels) && layout.taps() <= call.size("TAPS"), "{what}");
    assert!((1..=call.size("CHANNELS")).contains(&out_channels), "{what}");
    assert!((1..=layout.input[1]).contains(&lines) && (1..=layout.input[0]).contains(&planes), "{what}");
    assert!(items == layout.samples() * layout.tiles() * layout.segments() && items < OVERFLOW, "{what}");

    // Elements of a sample, of which voxels of a channel lie one after the other, or else channels.
    let (of_x, of_y) = (strides(call, "x"), strides(call, "y"));
    for ([of_n, ..], sizes, channels) in
        [(of_x, layout.input, in_channels), (of_y, layout.output, out_channels)]
    {
        assert!(of_n == channels * sizes.iter().product::<i64>() && of_n < OVERFLOW, "{what}");
    }
    let [_, of_c, _, of_h, of_w] = of_y;
    assert!(of_h == layout.output[2] * of_w, "{what}");
    assert!(of_w == 1 || of_c == 1 && of_w == out_channels, "{what}");

    assert_eq!(call.shared, layout.shared_bytes(call), "{what}");
    let ctas = call.size("CTAS");
    assert!(call.shared + i64::from(call.variant.shared_bytes) <= MOST_SHARED && ctas > 0, "{what}");

    for name in ["dz", "y"] {
        assert!(call.given(name).is_none_or(|pointer| pointer.at.is_multiple_of(16)), "{name} of {what}");
    }
    assert!(call.given("dz").is_some(), "{what}");
    // Without a gradient the other factor may not be there.
    for (factor, of_other) in [("x", "partial"), ("w", "dx")] {
        assert_eq!(call.given(factor).is_some(), call.given(of_other).is_some(), "{factor} of {what}");
    }
    assert!(["dx", "partial"].iter().any(|name| call.given(name).is_some()), "{what}");
    assert_eq!(call.given("terms").is_some(), call.given("mean").is_some(), "{what}");
    assert!(!call.has("bounds") || call.given("bounds").is_some(), "{what}");
    assert!(call.given("partial").is_none_or(|partial| partial.width == 4), "{what}");
    check_epilogue(call);
}

/// Of each item the gradient of the input, of each block that of the weight. What scales the gradient by channels is a power of two, of which
/// the products are freed again.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    let layout = Layout::new(call);
    let (of_x, of_y) = (strides(call, "x"), strides(call, "y"));
    let epilogue = Epilogue::new(call, machine);
    let (dz, y, terms) = (call.pointer("dz"), call.given("y"), call.given("terms"));
    let [x, w, dx, partial] = ["x", "w", "dx", "partial"].map(|name| call.given(name));
    let (taps, inputs, outputs) = (layout.taps(), layout.in_channels, layout.out_channels);
    let of_bound = |bounds: Pointer, c| scale(bits(machine.read(bounds, c))).min(100f64.exp2());
    let scales: Vec<f64> = (0..outputs)
        .map(|c| if call.has("bounds") { of_bound(call.pointer("bounds"), c) } else { 1.0 })
        .collect();
    for block in 0..layout.blocks {
        let mut sums = vec![0.0; (taps * inputs * outputs) as usize];
        for item in (block..layout.items).step_by(layout.blocks as usize) {
            let (sample, planes, lines) = layout.item(item);
            let voxels = planes
                .flat_map(|d| lines.clone().flat_map(move |h| (0..layout.input[2]).map(move |w| [d, h, w])));
            for voxel in voxels {
                let mut of_input = vec![0.0; inputs as usize];
                for (tap, at) in layout.each_tap() {
                    let Some(output) = layout.reads(voxel, at) else { continue };
                    for co in 0..outputs {
                        let place_y = place(of_y, sample, co, output);
                        let dz = machine.read(dz, place_y);
                        let gradient = y.map_or(dz, |y| {
                            epilogue.gradient(machine, [sample, co], terms, [machine.read(y, place_y), dz])
                        });
                        let scaled = gradient * scales[co as usize];
                        for (ci, of_input) in (0..).zip(&mut of_input) {
                            if let Some(w) = w {
                                let w = machine.read(w, (ci * outputs + co) * taps + tap);
                                *of_input += scaled * (w / scales[co as usize]);
                            }
                            if let Some(x) = x {
                                let x = machine.read(x, place(of_x, sample, ci, voxel));
                                sums[((tap * inputs + ci) * outputs + co) as usize] +=
                                    x * scaled / scales[co as usize];
                            }
                        }
                    }
                }
                if let Some(dx) = dx {
                    for (ci, sum) in (0..).zip(of_input) {
                        machine.write(dx, place(of_x, sample, ci, voxel), sum);
                    }
                }
            }
        }
        if let Some(partial) = partial {
            let first = block * sums.len() as i64;
            (first..).zip(sums).for_each(|(at, sum)| machine.write(partial, at, sum));
        }
    }
}

/// What is unusual about a launch.
pub fn features(call: &Call<'_>) -> Vec<(&'static str, bool)> {
    let layout = Layout::new(call);
    let outside = |axis: usize| {
        let first = -layout.padding[axis];
        first < 0 || first + layout.reach(axis, layout.input[axis]) > layout.output[axis]
    };
    let samples = |block| block / (layout.tiles() * layout.segments());
    vec![
        ("planes: blocks of many items", layout.items > layout.blocks),
        ("planes: blocks of many samples", samples(layout.blocks) < layout.samples() - 1),
        ("planes: channels past the last", layout.out_channels % VECTOR > 0),
        ("planes: channels together", call.int("y_c") == 1 && layout.out_channels % VECTOR == 0),
        ("planes: channels together, no vectors", call.int("y_w") > 1 && layout.out_channels % VECTOR > 0),
        ("planes: lines past the last", layout.input[1] % layout.lines > 0),
        ("planes: only the input's gradient", call.given("partial").is_none()),
        ("planes: only the weight's gradient", call.given("dx").is_none()),
        (
            "planes: outputs that nothing reads",
            layout.reach(2, layout.input[2]) < layout.output[2] + layout.padding[2],
        ),
        ("planes: segments", layout.segments() > 1),
        ("planes: segments past the last", layout.input[0] % layout.planes > 0),
        ("planes: several steps of channels", layout.out_channels > VECTOR),
        ("planes: taps outside", (0..AXES.len()).any(outside)),
        ("planes: the convolution alone", call.given("y").is_none()),
        ("planes: voxels past the last", layout.lines * layout.input[2] % STEP > 0),
        (call.variant.name, true),
    ]
}

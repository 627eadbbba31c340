//! What `shuffle_gemm`, `shuffle_wgmma` and the kernels of many channels, `shuffle_ring` and its like, do, given their arguments.

use super::contracts::{activate, activation, biased};
use super::machine::{Call, Machine};
use super::norm;
use super::operand::{is_out_of_range, split};
use volup::reference;

/// The kernels.
pub const KERNELS: [&str; 5] =
    ["shuffle_gemm", "shuffle_ring", "shuffle_ring_half", "shuffle_ring_last", "shuffle_wgmma"];
/// The most shared memory that a block may have.
const MOST_SHARED: i64 = 232_448;
/// Channels of a stage.
const CHUNK: i64 = 32;
/// Channels of columns that lie side by side in NDHWC.
const UNIT: i64 = 16;
/// Warpgroups of a block of `shuffle_wgmma`, and rows of one.
const GROUPS: i64 = 4;
const ROWS: i64 = 64;
/// Positions that its warps collect at a time, and pairs of rows that one has.
const COLLECTED: i64 = 64;
const PAIRS: i64 = 8;
/// Warps of a block of `shuffle_ring` that copy; of two parts half as many.
const COPIERS: i64 = 8;
/// Past what 32 bits count.
const OVERFLOW: i64 = 1 << 31;

/// A row of the product and a position of the sample, as numbers in their blocks.
type Place = [i64; 2];

/// How a launch is cut.
struct Layout {
    /// Whether rows are in the order of NDHWC.
    last: bool,
    /// Whether it is a kernel of many channels for NDHWC, or that on Hopper's own matrix instructions, whose rows are in the order of y.
    ring_last: bool,
    in_order: bool,
    /// Whether it is that of an NDHWC input.
    of_last: bool,
    wgmma: bool,
    /// Bytes of an element, elements of 16 bytes, and parts of a number.
    size: i64,
    vector: i64,
    parts: i64,
    /// Rows and positions of a block, and positions of a warp.
    rows: i64,
    positions: i64,
    warp_positions: i64,
    /// Warps side by side along positions; rows that a partial statistic is of.
    places: i64,
    together: i64,
    taps: i64,
    strides: [i64; 3],
    in_channels: i64,
    /// Channels of a stage.
    chunk: i64,
    out_channels: i64,
    /// Channels of a row block of NDHWC.
    channels: i64,
    volume: i64,
    row_blocks: i64,
    pos_blocks: i64,
    items: i64,
    /// Blocks of positions that are computed side by side.
    groups: i64,
}

impl Layout {
    fn new(call: &Call<'_>) -> Layout {
        let (wgmma, gemm) = (is_wgmma(call), is_gemm(call));
        let [d_stride, h_stride] = call.ints(["d_stride", "h_stride"]);
        let [of_last, in_order] = ["X_LAST", "Y_LAST"].map(|name| wgmma && call.size(name) == 1);
        let strides = [d_stride, h_stride, if call.has("w_stride") { call.int("w_stride") } else { 2 }];
        let size = call.pointer("x").width as i64;
        let row_blocks = call.int("row_blocks");
        assert!(row_blocks > 0 && call.grid[0] % row_blocks == 0, "{:?}, {row_blocks}", call.grid);
        let teams = if wgmma { GROUPS / call.int("row_groups") } else { 1 };
        let parts = if call.size("KIND") == 3 { 2 } else { 1 };
        let (rows, warp_positions, places) = if wgmma {
            (ROWS * call.int("row_groups"), 128, 1)
        } else {
            (call.size("WARP_ROWS") * call.size("ROW_WARPS"), call.size("WARP_POS"), call.size("POS_WARPS"))
        };
        Layout {
            last: gemm && call.size("LAST") == 1,
            in_order,
            of_last,
            wgmma,
            ring_last: is_ring_last(call),
            size,
            vector: 16 / size,
            parts,
            rows,
            positions: warp_positions * places,
            warp_positions,
            places,
            together: if wgmma && !in_order { 2 } else { 1 },
            taps: strides.iter().product(),
            strides,
            in_channels: match call.has("in_channels") {
                true => call.int("in_channels"),
                false => CHUNK * call.int("chunks"),
            },
            chunk: match call.kernel() {
                "shuffle_wgmma" => CHUNK / parts,
                "shuffle_ring_half" => 2 * CHUNK,
                _ => CHUNK,
            },
            out_channels: call.int("out_channels"),
            channels: if gemm { call.int("channels") } else { 0 },
            volume: call.int("volume"),
            row_blocks,
            pos_blocks: call.int("pos_blocks"),
            items: call.int("items"),
            groups: call.grid[0] / row_blocks * teams,
        }
    }

    /// Whether its input is NDHWC.
    fn is_last(&self) -> bool {
        self.last || self.ring_last || self.of_last
    }

    fn samples(&self) -> i64 {
        self.items / self.pos_blocks
    }

    /// From a voxel of y to the next of its line.
    fn y_w(&self, call: &Call<'_>) -> i64 {
        match call.has("y_w") {
            true => call.int("y_w"),
            false if self.in_order => self.out_channels,
            false => 1,
        }
    }

    /// Rows of the weight.
    fn all_rows(&self) -> i64 {
        self.out_channels * self.taps
    }

    /// The row of the weight, `co*taps + tap`, that a row of a row block is.
    fn row(&self, row_block: i64, row: i64) -> Option<i64> {
        if self.last {
            let tap = row / self.channels;
            let channel = row_block * self.channels + row % self.channels;
            return (tap < self.taps && channel < self.out_channels).then(|| channel * self.taps + tap);
        }
        let row = row_block * self.rows + row;
        let of_w = if self.in_order {
            let ([_, _, w_stride], channels) = (self.strides, self.out_channels);
            let (line, channel) = (row / (w_stride * channels), row % channels);
            channel * self.taps + line * w_stride + row / channels % w_stride
        } else {
            row
        };
        (row < self.all_rows()).then_some(of_w)
    }

    /// The sample of a block of positions, and its first position.
    fn first(&self, item: i64) -> [i64; 2] {
        [item / self.pos_blocks, item % self.pos_blocks * self.positions]
    }

    /// The neighbours that each lane writes, `whole` at once or not.
    fn neighbours(&self, whole: bool) -> Vec<Vec<Place>> {
        if self.ring_last {
            let side_by_side = self.vector;
            let first = (0..self.rows).filter(|row| row / self.taps % side_by_side == 0);
            let all = first.flat_map(|row| (0..self.positions).map(move |position| [row, position]));
            let of_lane =
                |[row, p]: Place| (0..side_by_side).map(|e| [row + e * self.taps, p]).collect::<Vec<_>>();
            return all.map(of_lane).collect();
        }
        let (row_step, pos_step) = match (self.last, self.strides[2]) {
            (true, _) => (4, 1),
            _ if self.in_order => (if whole { self.vector } else { 2 }, 1),
            // Of 16 bits two lanes give one what it writes.
            (false, 2) if self.wgmma => (2, self.vector / 2),
            (false, 2) => (2, 2),
            _ => (1, 4),
        };
        let steps = |end: i64, step: i64| (0..end / step).map(move |at| at * step);
        let all = steps(self.rows, row_step)
            .flat_map(|row| steps(self.positions, pos_step).map(move |position| [row, position]));
        let of_lane = |[row, position]: Place| -> Vec<Place> {
            (0..row_step * pos_step).map(|e| [row + e % row_step, position + e / row_step]).collect()
        };
        all.map(of_lane).collect()
    }
}

/// Whether it is the kernel on Hopper's own matrix instructions.
fn is_wgmma(call: &Call<'_>) -> bool {
    call.kernel() == "shuffle_wgmma"
}

/// Whether it is a kernel of many channels.
fn is_ring(call: &Call<'_>) -> bool {
    call.kernel().starts_with("shuffle_ring")
}

/// Whether it is one of those for NDHWC.
fn is_ring_last(call: &Call<'_>) -> bool {
    call.kernel() == "shuffle_ring_last" || call.kernel() == "shuffle_ring_half" && call.size("LAST") == 1
}

/// Whether it is the kernel of all layouts and strides.
fn is_gemm(call: &Call<'_>) -> bool {
    call.kernel() == "shuffle_gemm"
}

/// How it writes what a lane has of neighbours: 0, position by position; 1, at once; 2, by the copy engine, whole lines.
fn whole(call: &Call<'_>) -> i64 {
    match call.kernel() {
        "shuffle_wgmma" => call.int("how"),
        _ if is_ring_last(call) => 1,
        _ => call.int("whole"),
    }
}

/// What a launch does with what it computes.
fn mode(call: &Call<'_>) -> i64 {
    match call.kernel() {
        "shuffle_wgmma" => call.size("MODE"),
        _ if is_ring(call) => 0,
        _ => call.int("mode"),
    }
}

/// Whether it writes statistics.
fn counts(call: &Call<'_>) -> bool {
    [1, 3].contains(&mode(call))
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let layout = Layout::new(call);
    match mode(call) {
        1 | 3 => {
            let count =
                layout.samples() * layout.groups * layout.places * layout.all_rows() / layout.together;
            norm::PARTIALS.map(|name| (name, count)).into()
        }
        2 => ["mean", "rstd"].map(|name| (name, layout.samples() * call.int("norm_groups"))).into(),
        _ => Vec::new(),
    }
}

/// What the sizes, the grid and the shared memory have to be.
pub fn check(call: &Call<'_>) {
    let layout = Layout::new(call);
    let what = call.variant.name;
    let Layout { last, rows, positions, taps, channels, .. } = layout;
    let [chunks, row_blocks, pos_blocks] = call.ints(["chunks", "row_blocks", "pos_blocks"]);
    assert!(call.grid[0] > 0 && call.grid[1..] == [1, 1], "{what}");
    for (name, most) in [("whole", 1), ("how", 2), ("has_bias", 1), ("activation", 2), ("post_activation", 2)]
    {
        assert!(!call.has(name) || (0..=most).contains(&call.int(name)), "{name} of {what}");
    }
    assert!((0..=3).contains(&mode(call)), "mode {} of {what}", mode(call));

    // All channels, rows and positions, and no block without any.
    assert!(covers(chunks, layout.chunk, layout.in_channels), "{chunks} chunks of {what}");
    if last {
        assert!(channels % UNIT == 0 && taps * channels <= rows, "{channels} channels of {what}");
        assert!(covers(row_blocks, channels, layout.out_channels), "{row_blocks} row blocks of {what}");
    } else {
        let any = layout.ring_last || layout.in_order;
        assert!(any || [1, 2].contains(&layout.strides[2]), "{what}");
        assert!(covers(row_blocks, rows, layout.all_rows()), "{row_blocks} row blocks of {what}");
    }
    assert!(covers(pos_blocks, positions, layout.volume), "{pos_blocks} blocks of positions of {what}");
    assert!(layout.items > 0 && layout.items % pos_blocks == 0, "{} of {pos_blocks}: {what}", layout.items);
    let [plane, width] = call.ints(["plane", "width"]);
    assert!(layout.volume % plane == 0 && plane % width == 0, "{what}");
    let norm_groups = if is_ring(call) { 0 } else { call.int("norm_groups") };
    assert!(is_ring(call) || norm_groups * call.int("group_channels") == layout.out_channels, "{what}");

    match call.kernel() {
        "shuffle_wgmma" => check_wgmma(call, &layout),
        _ if is_ring(call) => check_ring(call, &layout),
        _ => check_gemm(call, &layout),
    }
    let own = i64::from(call.variant.shared_bytes);
    assert!(call.shared + own <= MOST_SHARED, "{} bytes of {what}", call.shared);
    assert!(call.pointer("x").at.is_multiple_of(16) && call.pointer("w").at.is_multiple_of(16), "{what}");

    // What is counted in 32 bits: elements of a sample, of x, of y and of a line of the weight, with a block past
    // the end; blocks of positions, and stages of a block; partial statistics.
    let [y_c, y_d, y_h] = call.ints(["y_c", "y_d", "y_h"]);
    let y_w = layout.y_w(call);
    let [d_stride, h_stride, w_stride] = layout.strides;
    let (depth, height) = (layout.volume / plane, plane / width);
    let farthest = (layout.out_channels - 1) * y_c
        + (depth * d_stride - 1) * y_d
        + (height * h_stride - 1) * y_h
        + (width * w_stride - 1) * y_w;
    let turns = (layout.items + layout.groups - 1) / layout.groups;
    let samples = layout.samples();
    for count in [
        layout.in_channels * layout.volume,
        farthest,
        row_blocks * layout.rows.max(channels * taps),
        pos_blocks * positions,
        layout.items + layout.groups,
        turns * chunks,
        if counts(call) { samples * layout.groups * layout.places } else { 0 },
        if mode(call) == 2 { samples * norm_groups } else { 0 },
    ] {
        assert!(count < OVERFLOW, "{count}: {what}");
    }
}

/// Whether so many blocks of a size are all, and none is empty.
fn covers(blocks: i64, of: i64, all: i64) -> bool {
    of > 0 && blocks == (all + of - 1) / of
}

/// What `shuffle_gemm` is given of its own.
fn check_gemm(call: &Call<'_>, layout: &Layout) {
    let what = call.variant.name;
    let &Layout { last, size, vector, rows, positions, taps, channels, .. } = layout;
    let [row_warps, stages] = ["ROW_WARPS", "STAGES"].map(|name| call.size(name));
    let [chunks, w_pitch] = call.ints(["chunks", "w_pitch"]);
    assert_eq!(i64::from(call.variant.threads), 32 * row_warps * layout.places, "{what}");
    assert!(mode(call) == 0 || mode(call) < 3 && call.size("NORM") == 1, "mode {} of {what}", mode(call));

    // Lines of the weight in shared memory, then all that is there.
    let pitch = if last {
        let (words, past) = (taps * (channels + vector) * size / 4, if size == 4 { 8 } else { 4 });
        (words..).find(|words| words % 32 == past).expect("a multiple") * 4 / size
    } else {
        rows + if size == 4 { 2 * vector } else { vector }
    };
    assert_eq!(w_pitch, pitch, "{what}");
    let stage = if last {
        positions * (CHUNK + vector)
    } else {
        CHUNK * (positions + if size == 4 { 2 * vector } else { vector })
    };
    let shared = size * (stages * layout.parts * stage + chunks * CHUNK * w_pitch)
        + 20 * rows
        + 8 * rows * layout.places;
    assert_eq!(call.shared, shared, "{what}");

    // Runs of x and w: a channel's positions or a position's channels, and a channel's rows.
    let [x_unit, w_unit, x_n] = call.ints(["x_unit", "w_unit", "x_n"]);
    let x_run = if last { layout.in_channels } else { layout.volume };
    let divides = |unit: i64, run: i64| [4, 8, 16].contains(&unit) && run * size % unit == 0;
    assert!(divides(x_unit, x_run) && divides(x_unit, x_n), "{x_unit} bytes of x: {what}");
    let any = last && w_unit != 16;
    assert!(any || divides(w_unit, layout.all_rows()), "{w_unit} bytes of w: {what}");
}

/// What the kernels of many channels are.
fn check_ring(call: &Call<'_>, layout: &Layout) {
    let what = call.variant.name;
    let warps = call.size("ROW_WARPS") * layout.places;
    let copiers = COPIERS / layout.parts;
    assert_eq!(i64::from(call.variant.threads), 32 * (warps + copiers), "{what}");
    let [chunks, stages, kept, x_n] = call.ints(["chunks", "stages", "kept", "x_n"]);
    assert!(stages > 0 && [0, 1].contains(&kept), "{stages} stages of {what}");
    let w_stages = if kept == 1 { chunks } else { stages };
    let (size, vector, chunk) = (layout.size, layout.vector, layout.chunk);
    let of_x =
        if layout.ring_last { layout.positions * (chunk + 8) } else { chunk * (layout.positions + vector) };
    let elements = stages * of_x + w_stages * chunk * (layout.rows + vector);
    let barriers = (16 * stages + 127) / 128 * 128;
    assert_eq!(call.shared, barriers + size * elements + 8 * layout.rows, "{what}");
    assert!([x_n, layout.all_rows()].iter().all(|run| run % vector == 0), "copies of {what}");
    if layout.ring_last {
        let taps = if size == 2 { 8 } else { call.size("TAPS") };
        assert!(layout.taps == taps && 8 % taps == 0, "{} taps of {what}", layout.taps);
        assert_eq!(layout.all_rows() % call.size("WARP_ROWS"), 0, "{what}");
        assert_eq!(layout.in_channels % vector, 0, "copies of {what}");
    } else {
        assert!(layout.volume % vector == 0, "copies of {what}");
        assert!(call.int("whole") == 0 || call.int("width") % 2 == 0, "{what}");
    }
}

/// What `shuffle_wgmma` is.
fn check_wgmma(call: &Call<'_>, layout: &Layout) {
    let what = call.variant.name;
    let [row_groups, stages, ahead, chunks] = call.ints(["row_groups", "stages", "ahead", "chunks"]);
    let size = layout.size;
    assert_eq!(i64::from(call.variant.threads), (128 + 32) * GROUPS, "{what}");
    assert!([1, 2, 4].contains(&row_groups), "{row_groups} warpgroups of {what}");
    assert!(mode(call) != 3 || call.int("activation") == 0, "an activation before y of {what}");
    assert!(
        (1..=2).contains(&ahead) && chunks.min(2) + ahead <= stages,
        "{ahead} of {stages} stages: {what}"
    );
    let teams = GROUPS / row_groups;
    assert!(stages * teams <= 128 * GROUPS, "{stages} stages of {what}");
    let (chunk, how) = (layout.chunk, call.int("how"));
    let weights = size * chunk * chunks * layout.rows * layout.parts;
    let barriers = (32 * stages * teams + 127) / 128 * 128;
    // Panels of 16 bytes: of 16 bits and NCDHW positions of each channel, else channels of each position.
    let last = layout.in_order;
    assert!(layout.of_last || !last, "{what}");
    let (panels, of_panel) = match layout.of_last {
        true => (chunk / layout.vector, layout.positions + 8 * layout.vector / chunk),
        false if size == 2 => (layout.positions / 8, chunk + 1),
        false => (chunk / 4, layout.positions + 1),
    };
    let stage = layout.parts * panels * 16 * of_panel;
    let areas = if how == 2 { 4 * GROUPS * PAIRS * (2 * COLLECTED * size + 32) } else { 0 };
    assert_eq!(call.shared, barriers + weights + teams * stages * stage + areas, "{what}");
    let most = if layout.parts == 2 { 192 } else { i64::MAX };
    assert!(layout.in_channels <= most, "{} channels of {what}", layout.in_channels);
    let x_n = call.int("x_n");
    let run = if layout.of_last { layout.in_channels } else { layout.volume };
    assert!(run * size % 16 == 0 && x_n * size % 16 == 0, "copies of {run}: {what}");
    let [width, line_bits, past_line, y_h] = call.ints(["width", "line_bits", "past_line", "y_h"]);
    assert!(how != 1 || !last && width % (8 / size) == 0, "{what}");
    assert!(how == 2 && !last || past_line == 0, "{past_line} past a line of {what}");
    if last {
        let [y_c, y_n] = call.ints(["y_c", "y_n"]);
        let voxels = layout.strides[2] * layout.out_channels;
        assert!(y_c == 1 && layout.out_channels % 2 == 0, "{what}");
        assert!(
            how == 0 || mode(call) != 1 && [voxels, y_h, y_n].iter().all(|at| at * size % 16 == 0),
            "{what}"
        );
    } else if how == 2 {
        // Lines are of whole eights of positions, in what is collected at a time, or the other way round.
        let line = width.min(COLLECTED);
        assert!(mode(call) != 1 && line == 1 << line_bits, "lines of {line}: {what}");
        assert!(line % 8 == 0 && COLLECTED % line == 0 && width % line == 0, "lines of {width}: {what}");
        // Those of y that are stored together lie side by side, and a warp has all of them.
        let h_stride = layout.strides[1];
        assert!(
            past_line == 0 || past_line == (h_stride - 1) * 2 * line,
            "{past_line} past a line of {what}"
        );
        assert!(past_line == 0 || PAIRS % h_stride == 0 && width == line && y_h == 2 * line, "{what}");
    }
}

/// What is unusual about a launch.
pub fn features(call: &Call<'_>) -> Vec<&'static str> {
    let layout = Layout::new(call);
    let (whole, chunks) = (whole(call), call.int("chunks"));
    let collected = whole == 2;
    let voxels = layout.in_order;
    let lines = collected && !voxels;
    let (joined, parts) = (lines && call.int("past_line") > 0, lines && call.int("width") > COLLECTED);
    let (mode, wgmma) = (mode(call), is_wgmma(call));
    let x_unit = if is_gemm(call) { call.int("x_unit") } else { 16 };
    let rows = if layout.last { layout.channels } else { layout.rows };
    let all = if layout.last { layout.out_channels } else { layout.all_rows() };
    let found = [
        ("blocks of many blocks of positions", layout.items > layout.groups),
        ("blocks without positions of a sample", counts(call) && layout.pos_blocks < layout.groups),
        ("channels last", layout.last),
        ("channels last, many", layout.ring_last),
        ("channels last, warpgroups", voxels),
        ("channels last to first", layout.of_last && !voxels),
        ("chunks", chunks > 1),
        ("copies of 4 bytes", x_unit == 4),
        ("copies of 8 bytes", x_unit == 8),
        ("copies of 16 bytes", x_unit == 16),
        ("lines stored alone", lines && !joined && !parts),
        ("lines stored in parts", parts),
        ("lines stored together", joined),
        ("many channels", is_ring(call)),
        ("neighbours apart", whole == 0),
        ("neighbours together", whole == 1),
        ("normalized", mode == 2),
        ("positions past the end", layout.volume % layout.positions > 0),
        ("row blocks", layout.row_blocks > 1),
        ("rows past the end", all % rows > 0),
        ("statistics", mode == 1),
        ("statistics of what is written", mode == 3),
        ("voxels stored together", voxels && collected),
        ("teams", wgmma && call.int("row_groups") < GROUPS),
        ("warpgroups", wgmma),
        ("weights kept", is_ring(call) && call.int("kept") == 1),
        ("weights one by one", layout.last && call.int("w_unit") != 16),
    ];
    found.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect()
}

/// What a block keeps of the weight, a row with its channels each, of those rows that there are.
struct Weights {
    rows: Vec<Option<(i64, Vec<f64>)>>,
    /// Whether there is what is left to the definition.
    bad: bool,
}

impl Weights {
    fn new(call: &Call<'_>, machine: &Machine, layout: &Layout, row_block: i64) -> Weights {
        let w = call.pointer("w");
        let channels = |row: i64| -> Vec<f64> {
            let at = |c: i64| machine.read(w, c * layout.all_rows() + row);
            (0..layout.in_channels).map(at).collect()
        };
        let rows: Vec<_> =
            (0..layout.rows).map(|row| layout.row(row_block, row).map(|row| (row, channels(row)))).collect();
        // Of the weight each is looked at by itself.
        let mut all = rows.iter().flatten().flat_map(|(_, channels)| channels);
        let bad = call.size("KIND") != 0 && all.any(|&w| is_out_of_range(layout.parts, [w].into_iter()));
        Weights { rows, bad }
    }
}

/// The inputs of a block of positions, a channel with its positions each, and whether there is what is left to the
/// definition.
fn fetch(call: &Call<'_>, machine: &Machine, layout: &Layout, item: i64) -> (Vec<Vec<f64>>, bool) {
    let (x, x_n) = (call.pointer("x"), call.int("x_n"));
    let [sample, first] = layout.first(item);
    let count = layout.positions.min(layout.volume - first);
    let read = |c: i64, p: i64| {
        let at = if layout.is_last() { p * layout.in_channels + c } else { c * layout.volume + p };
        machine.read(x, sample * x_n + at)
    };
    let kept: Vec<Vec<f64>> = (0..layout.in_channels)
        .map(|c| (0..count).map(|position| read(c, first + position)).collect())
        .collect();
    // A vector is of neighbours in memory, or as operands.
    let vector = layout.vector as usize;
    let is_bad = |values: &[f64]| is_out_of_range(layout.parts, values.iter().copied());
    let bad = call.size("KIND") != 0
        && if layout.last || is_wgmma(call) {
            (0..count as usize).any(|p| {
                kept.chunks(vector).any(|some| is_bad(&some.iter().map(|line| line[p]).collect::<Vec<_>>()))
            })
        } else {
            kept.iter().any(|line| line.chunks(vector).any(is_bad))
        };
    (kept, bad)
}

/// The sums of a row for a block of positions: from operands in their parts, or by the definition.
fn sums_of(layout: &Layout, weights: &[f64], kept: &[Vec<f64>], by_definition: bool) -> Vec<f64> {
    let mut sums = vec![0.0; kept[0].len()];
    for (&w, x) in weights.iter().zip(kept) {
        if by_definition {
            sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += w * x);
            continue;
        }
        let [high, low] = split(layout.parts, w);
        for (sum, &x) in sums.iter_mut().zip(x) {
            let [x_high, x_low] = split(layout.parts, x);
            *sum += high * x_high;
            if layout.parts == 2 {
                *sum += low * x_high + high * x_low;
            }
        }
    }
    sums
}

/// Rows are channels of y and taps, or positions where these are rows; columns are the others.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    check(call);
    let layout = Layout::new(call);
    let bias = call.pointer("bias");
    for row_block in 0..layout.row_blocks {
        let weights = Weights::new(call, machine, &layout, row_block);
        for group in 0..layout.groups {
            // Of each sample, place and row what counts in its statistics.
            let lists = (layout.samples() * layout.places * layout.rows) as usize;
            let mut seen = vec![Vec::new(); if counts(call) { lists } else { 0 }];
            for item in (group..layout.items).step_by(layout.groups as usize) {
                let (kept, bad) = fetch(call, machine, &layout, item);
                let outputs: Vec<Option<Vec<f64>>> = (weights.rows.iter())
                    .map(|row| {
                        let (row, weights_of_row) = row.as_ref()?;
                        let bias = biased(call, machine, bias, row / layout.taps);
                        let mut sums =
                            sums_of(&layout, weights_of_row, &kept, !is_ring(call) && (weights.bad || bad));
                        if is_ring(call) && sums.iter().any(|sum| !sum.is_finite()) {
                            sums = sums_of(&layout, weights_of_row, &kept, true);
                        }
                        let activated = |sum| activate(call, sum + bias, ["activation", "slope"]);
                        Some(sums.into_iter().map(activated).collect())
                    })
                    .collect();
                if mode(call) != 1 {
                    write(call, machine, &layout, [row_block, item], &outputs);
                }
                if !counts(call) {
                    continue;
                }
                let behind = activation(call, ["post_activation", "post_slope"]).filter(|_| mode(call) == 3);
                let counted = |&value: &f64| behind.map_or(value, |of| reference::activation(of, value));
                let [sample, _] = layout.first(item);
                for (row, values) in outputs.iter().enumerate() {
                    let of_warps = values.iter().flat_map(|row| row.chunks(layout.warp_positions as usize));
                    for (place, values) in of_warps.enumerate() {
                        let list = (sample * layout.places + place as i64) * layout.rows + row as i64;
                        seen[list as usize].extend(values.iter().map(counted));
                    }
                }
            }
            for (list, of_rows) in seen.chunks(layout.together as usize).enumerate() {
                let list = list as i64 * layout.together;
                let (of_place, row) = (list / layout.rows, list % layout.rows);
                let (sample, place) = (of_place / layout.places, of_place % layout.places);
                if let Some(row) = layout.row(row_block, row) {
                    let of_place = (sample * layout.groups + group) * layout.places + place;
                    let at = (of_place * layout.all_rows() + row) / layout.together;
                    norm::put(call, machine, norm::PARTIALS, at, &of_rows.concat());
                }
            }
        }
    }
}

/// Writes the outputs of a row block and a block of positions to y, normalized where that is asked for.
fn write(
    call: &Call<'_>,
    machine: &mut Machine,
    layout: &Layout,
    [row_block, item]: [i64; 2],
    outputs: &[Option<Vec<f64>>],
) {
    let [y_n, y_c, y_d, y_h] = call.ints(["y_n", "y_c", "y_d", "y_h"]);
    let y_w = layout.y_w(call);
    let [plane, width] = call.ints(["plane", "width"]);
    let whole = whole(call);
    let y = call.pointer("y");
    let [sample, first] = layout.first(item);
    let [d_stride, h_stride, w_stride] = layout.strides;
    // Where an output lies, if there is one.
    let place = |[row, position]: Place| {
        let (row, p) = (layout.row(row_block, row)?, first + position);
        let (channel, tap) = (row / layout.taps, row % layout.taps);
        let (line, tw) = (tap / w_stride, tap % w_stride);
        let (td, th) = (line / h_stride, line % h_stride);
        let (d, h, w) = (p / plane, p % plane / width, p % width);
        let within = (d * d_stride + td) * y_d + (h * h_stride + th) * y_h + (w * w_stride + tw) * y_w;
        (p < layout.volume).then_some(sample * y_n + channel * y_c + within)
    };
    let value = |machine: &Machine, [row, position]: Place| {
        let output = outputs[row as usize].as_ref().expect("a row")[position as usize];
        let channel = layout.row(row_block, row).expect("a row") / layout.taps;
        if mode(call) == 2 { norm::normalized(call, machine, [sample, channel])(output) } else { output }
    };
    // How many are written at once.
    for neighbours in layout.neighbours(whole > 0) {
        let together = match (whole, layout.last, w_stride) {
            (1, ..) => neighbours.len(),
            _ if layout.in_order => neighbours.len(),
            (_, false, 2) => 2,
            _ => 1,
        };
        for some in neighbours.chunks(together) {
            let places: Vec<Option<i64>> = some.iter().map(|&one| place(one)).collect();
            for (e, &at) in places.iter().enumerate() {
                let beside = places[0].map(|first| first + e as i64);
                assert_eq!(at, beside, "{some:?} of {} do not lie side by side", call.variant.name);
            }
            let Some(at) = places[0] else { continue };
            let bytes = y.at + at as usize * y.width;
            assert!(bytes.is_multiple_of(together * y.width), "{at}: {}", call.variant.name);
            for (e, &one) in some.iter().enumerate() {
                machine.write(y, at + e as i64, value(machine, one));
            }
        }
    }
}

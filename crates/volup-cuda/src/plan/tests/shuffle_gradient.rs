//! What `shuffle_gradient` does, given its arguments.

use super::contracts::{FINITE, LIFT, bits, raise, scale};
use super::epilogue::{Epilogue, check_epilogue, tasks};
use super::gradient::{INFINITE_AS_TF32, are_apart, stands};
use super::machine::{Call, Machine};
use super::operand::{by_low, halves, is_too_coarse, split};

/// The most shared memory that a block may have.
const MOST_SHARED: i64 = 232_448;
const THREADS: i64 = 512;
/// Channels of the input of a tile, and bytes of a tile of one tensor.
const CHANNELS: i64 = 64;
const TILE: i64 = 32_768;
/// The exponents of float32 that two fp16 are scaled from: of the weight, and of x, of which there are sums of many.
const SCALED: [std::ops::Range<i64>; 2] = [21..255, 21..207];
/// Past what 32 bits count.
const OVERFLOW: i64 = 1 << 31;

/// How a launch is cut.
struct Layout {
    kind: i64,
    /// Bytes of an element, and elements of 16 bytes.
    size: i64,
    vector: i64,
    /// Rows and positions of a tile, and shares of the positions.
    of_tile: i64,
    positions: i64,
    shares: i64,
    in_channels: i64,
    out_channels: i64,
    d_stride: i64,
    h_stride: i64,
    taps: i64,
    volume: i64,
    plane: i64,
    width: i64,
    tiles: i64,
    items: i64,
    blocks: i64,
}

impl Layout {
    fn new(call: &Call<'_>) -> Layout {
        let [kind, of_tile] = ["KIND", "ROWS"].map(|name| call.size(name));
        let size = call.pointer("dz").width as i64;
        let [in_channels, out_channels] = call.ints(["in_channels", "out_channels"]);
        let [d_stride, h_stride] = call.ints(["d_stride", "h_stride"]);
        let [volume, plane, width] = call.ints(["volume", "plane", "width"]);
        let [tiles, items] = call.ints(["tiles", "items"]);
        Layout {
            kind,
            size,
            vector: 16 / size,
            of_tile,
            positions: TILE / (size * of_tile),
            shares: if kind == 3 { call.int("shares") } else { 256 / of_tile },
            in_channels,
            out_channels,
            d_stride,
            h_stride,
            taps: 2 * d_stride * h_stride,
            volume,
            plane,
            width,
            tiles,
            items,
            blocks: call.grid[0],
        }
    }

    /// Rows of the gradient: a channel of y and a tap.
    fn rows(&self) -> i64 {
        self.out_channels * self.taps
    }

    fn samples(&self) -> i64 {
        self.items / self.tiles
    }

    /// From a line, a plane and a channel of y to the next.
    fn y_steps(&self) -> [i64; 3] {
        let line = 2 * self.width;
        [line, self.h_stride * (self.plane / self.width) * line, self.taps * self.volume]
    }

    /// Where in y what lies that a row has of a position.
    fn place(&self, sample: i64, row: i64, position: i64) -> i64 {
        let [y_h, y_d, y_c] = self.y_steps();
        let (channel, tap) = (row / self.taps, row % self.taps);
        let (line, tw) = (tap / 2, tap % 2);
        let (td, th) = (line / self.h_stride, line % self.h_stride);
        let (d, h) = (position / self.plane, position % self.plane / self.width);
        let in_channel = (d * self.d_stride + td) * y_d + (h * self.h_stride + th) * y_h;
        (sample * self.out_channels + channel) * y_c + in_channel + 2 * (position % self.width) + tw
    }

    /// Whether lines of y, and channels of x, are whole vectors.
    fn whole(&self) -> [bool; 2] {
        [2 * self.width, self.volume].map(|elements| elements % self.vector == 0)
    }

    /// The bytes of shared memory that the kernel's file asks for.
    fn shared_bytes(&self) -> i64 {
        let &Layout { kind, of_tile, positions, .. } = self;
        let products = match kind {
            0 => positions / 8 * (32 * (of_tile + 1) + 2080) + 128 * of_tile,
            1 => positions / 4 * (16 * (of_tile + 1) + 2080) + 32_768 + 256 * of_tile,
            2 => positions * (8 * of_tile + 658) + 320 * of_tile - 7_680,
            _ => 4 * ((of_tile + 128) * (positions + 8) + 64 * (of_tile + 4)),
        };
        65_536 + 20 * of_tile + products
    }

    /// Bytes of each part of shared memory, in order: copies of both tensors, what the products read, channels, lines.
    fn parts(&self) -> [i64; 4] {
        let &Layout { kind, size, vector, of_tile, positions, .. } = self;
        let products = if kind == 3 {
            let (pitch, of_w) = (positions + 8, of_tile + 4);
            size * (of_tile * pitch + 2 * CHANNELS * pitch + CHANNELS * of_w)
        } else if kind == 2 {
            // Panels as of 16 bits, of both parts, of x of three, and its copies. Two halves of the rows meet in sums of float32. Of each
            // channel two scales, of each position the largest gradient.
            let panels = |all: i64, rows: i64| all / 8 * 16 * rows;
            let x = 4 * CHANNELS * positions + 3 * panels(positions, CHANNELS + 1);
            let met = if of_tile > 128 { 4 * CHANNELS * positions } else { 0 };
            4 * panels(positions, of_tile + 1)
                + x
                + 2 * panels(of_tile, CHANNELS)
                + met
                + 8 * CHANNELS
                + 4 * positions
        } else {
            // Panels of 16 bytes a row, with a row between those of G and of x; of tf32 one G, and one turned.
            let panels = |all: i64, rows: i64| all / vector * 16 * rows;
            let g = panels(positions, of_tile + 1);
            let g = if kind == 0 { 2 * g } else { g + panels(of_tile, positions) };
            g + 2 * panels(positions, CHANNELS + 1) + panels(of_tile, CHANNELS)
        };
        // As many channels as rows of two taps each have, of 8 words; of a line 2.
        [2 * TILE, products, of_tile / 2 * 32, of_tile / 2 * 8]
    }
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let layout = Layout::new(call);
    let groups = layout.out_channels / call.int("group_channels");
    let partial = layout.blocks * layout.shares * layout.rows() * layout.in_channels;
    let words = [("bounds", layout.out_channels), ("control", 1), ("unless", 2)];
    [("terms", 2 * layout.samples() * groups), ("partial", partial)].into_iter().chain(words).collect()
}

/// What the sizes, the grid and the shared memory have to be.
pub fn check(call: &Call<'_>) {
    let (what, layout) = (call.variant.name, Layout::new(call));
    let Layout { of_tile, positions, volume, plane, width, tiles, items, blocks, .. } = layout;
    assert_eq!(i64::from(call.variant.threads), THREADS, "{what}");
    assert!(blocks > 0 && blocks <= items && call.grid[1..] == [1, 1], "{:?} of {what}", call.grid);
    assert_eq!(layout.size, if layout.kind == 0 { 2 } else { 4 }, "{what}");
    for channels in [layout.in_channels, layout.out_channels, layout.d_stride, layout.h_stride] {
        assert!(channels > 0, "{what}");
    }
    assert!(layout.rows() <= of_tile && layout.in_channels <= CHANNELS, "{} rows: {what}", layout.rows());

    // All positions, and no tile without any.
    assert!(volume > 0 && volume % plane == 0 && plane % width == 0, "{what}");
    assert!(tiles == tasks(volume, positions) && items % tiles == 0, "{tiles} tiles of {what}");
    assert_eq!(call.ints(["y_whole", "x_whole"]).map(|flag| flag == 1), layout.whole(), "{what}");
    assert!(["y_whole", "x_whole"].iter().all(|flag| (0..=1).contains(&call.int(flag))), "{what}");

    let parts = layout.parts();
    assert_eq!([call.shared, parts.iter().sum()], [layout.shared_bytes(); 2], "{what}");
    assert!((parts[0] + parts[1]) % 32 == 0, "channels are vectors of 32 bytes: {what}");
    assert!(call.shared + i64::from(call.variant.shared_bytes) <= MOST_SHARED, "{what}");

    // What is read and written by vectors starts at whole ones; a gradient at least is wanted.
    for name in ["x", "dz", "y", "dx"] {
        assert!(call.given(name).is_none_or(|pointer| pointer.at.is_multiple_of(16)), "{name} of {what}");
    }
    assert!(call.given("dz").is_some(), "{what}");
    // Without a gradient the other factor may not be there.
    for (factor, of_other) in [("x", "partial"), ("w", "dx")] {
        assert_eq!(call.given(factor).is_some(), call.given(of_other).is_some(), "{factor} of {what}");
    }
    assert!(["dx", "partial"].iter().any(|name| call.given(name).is_some()), "{what}");
    assert_eq!(call.given("terms").is_some(), call.given("mean").is_some(), "{what}");
    assert!(["bounds", "control"].iter().all(|name| !call.has(name) || call.given(name).is_some()), "{what}");
    assert!(layout.shares > 0, "{what}");
    assert!(call.given("partial").is_none_or(|partial| partial.width == 4), "{what}");
    check_epilogue(call);

    // What is counted in 32 bits: where a row's lines begin, elements of a channel of y, positions and tiles with those of
    // a turn past the end, terms.
    let [y_h, y_d, y_c] = layout.y_steps();
    let start = (layout.out_channels - 1) * y_c + (layout.d_stride - 1) * y_d + (layout.h_stride - 1) * y_h;
    let groups = layout.out_channels / call.int("group_channels");
    for count in [start, y_c, tiles * positions, items + blocks, 2 * layout.samples() * groups] {
        assert!(count < OVERFLOW, "{count}: {what}");
    }
}

/// What a block has of a tile.
struct Tile {
    sample: i64,
    first: i64,
    /// Each row, and each channel of x, with its positions.
    g: Vec<Vec<f64>>,
    x: Vec<Vec<f64>>,
    /// Whether it is multiplied in float32.
    by_definition: bool,
    /// Whether two fp16 are too coarse for a position.
    coarse: bool,
}

/// The launch with all that it reads.
struct Launch<'a> {
    call: &'a Call<'a>,
    layout: Layout,
    epilogue: Epilogue,
    /// Each channel of x with its rows; of two fp16 scaled by the inverse of what scales the gradient's channels.
    w: Vec<Vec<f64>>,
    /// What scales these.
    scales: Vec<f64>,
}

/// What a channel of x or of the weight is scaled by that becomes two fp16, and whether it cannot be.
fn scaled<'a>(values: impl IntoIterator<Item = &'a f64>, range: &std::ops::Range<i64>) -> (f64, bool) {
    let most = values.into_iter().map(|&value| bits(value)).fold(0.0, f64::max);
    (scale(most), most > 0.0 && !range.contains(&(most as i64 >> 23)))
}

/// Whether any is an infinity or NaN, also as tf32.
fn any_infinite(values: &[Vec<f64>]) -> bool {
    values.iter().flatten().any(|&value| bits(value) >= INFINITE_AS_TF32)
}

impl<'a> Launch<'a> {
    fn new(call: &'a Call<'a>, machine: &Machine) -> Launch<'a> {
        let layout = Layout::new(call);
        let rows = layout.rows();
        let of_channel = |w, c| (0..rows).map(|row| machine.read(w, c * rows + row)).collect();
        let of_w = |w| (0..layout.in_channels).map(|c| of_channel(w, c)).collect();
        let mut w: Vec<Vec<f64>> = call.given("w").map_or_else(Vec::new, of_w);
        let of_bound = |c| match layout.kind {
            2 => scale(bits(machine.read(call.pointer("bounds"), c))).min(100f64.exp2()),
            _ => 1.0,
        };
        let scales: Vec<f64> = (0..layout.out_channels).map(of_bound).collect();
        for (row, w) in w.iter_mut().flat_map(|w| w.iter_mut().enumerate()) {
            *w /= scales[row / layout.taps as usize];
        }
        Launch { call, layout, epilogue: Epilogue::new(call, machine), w, scales }
    }

    fn tile(&self, machine: &Machine, item: i64) -> Tile {
        let Launch { call, layout, epilogue, w, scales } = self;
        let (sample, first) = (item / layout.tiles, item % layout.tiles * layout.positions);
        let positions = || first..layout.volume.min(first + layout.positions);
        let (dz, y, terms) = (call.pointer("dz"), call.given("y"), call.given("terms"));
        let gradient = |row: i64, position| {
            let at = layout.place(sample, row, position);
            let dz = machine.read(dz, at);
            let gradient = y.map_or(dz, |y| {
                epilogue.gradient(machine, [sample, row / layout.taps], terms, [machine.read(y, at), dz])
            });
            gradient * scales[(row / layout.taps) as usize]
        };
        let g: Vec<Vec<f64>> =
            (0..layout.rows()).map(|row| positions().map(|p| gradient(row, p)).collect()).collect();
        // Of x nothing is read for the gradient of the input.
        let channels = if call.given("partial").is_some() { layout.in_channels } else { 0 };
        let of_x =
            |c, p| machine.read(call.pointer("x"), (sample * layout.in_channels + c) * layout.volume + p);
        let x: Vec<Vec<f64>> = (0..channels).map(|c| positions().map(|p| of_x(c, p)).collect()).collect();
        let by_definition = layout.kind == 3 && [&g, &x, w].into_iter().any(|values| any_infinite(values));
        let most = |p: usize| g.iter().map(|g| bits(g[p])).fold(0.0, f64::max);
        let coarse = layout.kind == 2
            && ((0..g[0].len()).any(|p| is_too_coarse(most(p))) || x.iter().any(|x| scaled(x, &SCALED[1]).1));
        Tile { sample, first, g, x, by_definition, coarse }
    }

    /// The tiles of a block, in order.
    fn of_block(&self, block: i64) -> impl Iterator<Item = i64> {
        (block..self.layout.items).step_by(self.layout.blocks as usize)
    }

    /// What a number of x is multiplied as, or else of the weight, each scaled: its parts, and what the gradient's low part is
    /// multiplied by.
    fn factor(&self, tile: &Tile, of_x: bool, value: f64) -> [f64; 3] {
        match self.layout.kind {
            2 if of_x => {
                let [high, low] = halves(value, 1.0);
                [high, low, by_low(high)]
            }
            2 => {
                let [high, low] = halves(value, LIFT);
                [high, low / LIFT, high / LIFT]
            }
            3 if !tile.by_definition => {
                let [high, low] = split(2, value);
                [high, low, high]
            }
            _ => [value, 0.0, 0.0],
        }
    }

    /// A product of a tile: of numbers, or of their parts.
    fn times(&self, tile: &Tile, [high, low, by]: [f64; 3], gradient: f64) -> f64 {
        let [of_high, of_low] = match self.layout.kind {
            2 => halves(gradient, LIFT),
            3 if !tile.by_definition => split(2, gradient),
            _ => return high * gradient,
        };
        high * of_high + (low * of_high + by * of_low)
    }
}

/// Of each tile the gradient of the input; of each block and share of its tiles' positions that of the weight.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    if stands(call, machine, "unless") {
        return;
    }
    let launch = Launch::new(call, machine);
    let layout = &launch.layout;
    // What a channel of x or of the weight is scaled by.
    let by = |values: &Vec<f64>| if layout.kind == 2 { scaled(values, &SCALED[0]).0 } else { 1.0 };
    let mut coarse = layout.kind == 2 && launch.w.iter().any(|w| scaled(w, &SCALED[0]).1);
    let (dx, partial) = (call.given("dx"), call.given("partial"));
    let (rows, channels) = (layout.rows(), layout.in_channels);
    for block in 0..layout.blocks {
        // Of each share, tap, channel of x and channel of y.
        let mut sums = vec![0.0; (layout.shares * rows * channels) as usize];
        for item in launch.of_block(block) {
            let tile = launch.tile(machine, item);
            coarse |= tile.coarse;
            let count = tile.g[0].len() as i64;
            if let Some(dx) = dx {
                for (c, w) in (0..).zip(&launch.w) {
                    let by = by(w);
                    let w: Vec<_> = w.iter().map(|w| launch.factor(&tile, false, w * by)).collect();
                    for p in 0..count {
                        let of_row = |(w, g): (&[f64; 3], &Vec<f64>)| launch.times(&tile, *w, g[p as usize]);
                        let sum: f64 = w.iter().zip(&tile.g).map(of_row).sum();
                        let at = (tile.sample * channels + c) * layout.volume + tile.first + p;
                        machine.write(dx, at, sum / by);
                    }
                }
            }
            for ((c, x), (row, g)) in
                (0..).zip(&tile.x).flat_map(|of_x| (0..).zip(&tile.g).map(move |of_g| (of_x, of_g)))
            {
                let (channel, tap) = (row / layout.taps, row % layout.taps);
                let by = by(x);
                for (p, (&x, &g)) in (0..).zip(x.iter().zip(g)) {
                    // Of two tf32 all is of the first share.
                    let share = if layout.kind == 3 { 0 } else { p / (layout.positions / layout.shares) };
                    let place = ((share * layout.taps + tap) * channels + c) * layout.out_channels + channel;
                    let x = launch.factor(&tile, true, x * by);
                    sums[place as usize] += launch.times(&tile, x, g) / by / launch.scales[channel as usize];
                }
            }
        }
        if let Some(partial) = partial {
            let first = block * sums.len() as i64;
            (first..).zip(sums).for_each(|(at, sum)| machine.write(partial, at, sum));
        }
    }
    if layout.kind == 2 {
        coarse |= dx.is_some() && are_apart(call, machine, 0..layout.out_channels);
        raise(call, machine, 0, if coarse { FINITE + 1.0 } else { 0.0 });
    }
}

/// What is unusual about a launch.
pub fn features(call: &Call<'_>, machine: &Machine) -> Vec<(&'static str, bool)> {
    let launch = Launch::new(call, machine);
    let layout = &launch.layout;
    let [y_whole, x_whole] = layout.whole();
    let changes = |block| {
        let samples: Vec<i64> = launch.of_block(block).map(|item| item / layout.tiles).collect();
        samples.first() != samples.last()
    };
    let defined = |item| launch.tile(machine, item).by_definition;
    if stands(call, machine, "unless") {
        return vec![];
    }
    let wide = layout.kind == 3 && call.given("unless").is_some();
    vec![
        ("all channels of a tile", layout.in_channels == CHANNELS),
        ("all rows of a tile", layout.rows() == layout.of_tile),
        ("blocks of many samples", (0..layout.blocks).any(changes)),
        ("blocks of many tiles", layout.items > layout.blocks),
        ("channels of vectors", x_whole),
        ("channels of x in pieces", !x_whole),
        ("lines of vectors", y_whole),
        ("lines of y in pieces", !y_whole),
        ("only the input's gradient", call.given("partial").is_none()),
        ("only the weight's gradient", call.given("dx").is_none()),
        ("positions past the end", layout.volume % layout.positions > 0),
        ("shares of positions", layout.shares > 1),
        ("shares without positions", layout.volume <= layout.positions / layout.shares),
        ("terms of a normalization", call.given("terms").is_some()),
        ("the convolution alone", call.given("y").is_none()),
        ("tiles by the definition", layout.kind == 3 && (0..layout.items).any(defined)),
        ("tiles of a sample", layout.tiles > 1),
        ("tiles that two fp16 are too coarse for", wide),
        (call.variant.name, true),
    ]
}

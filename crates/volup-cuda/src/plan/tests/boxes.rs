//! What the kernels of `box_gemm` do, given their arguments, and `fill_output`.

use super::box_layout::{Along, Layout, layout};
use super::contracts::{activate, activation, biased, through};
use super::machine::{Call, Machine};
use super::operand::{is_out_of_range, split};

/// Bytes of shared memory of a multiprocessor, those of it that a block takes besides its own, and the most
/// that one block may have.
const SHARED: i64 = 233_472;
const RESERVED: i64 = 1024;
const MOST_SHARED: i64 = 232_448;
/// Masks and types that there is room for.
const MOST_MASKS: i64 = 1024;
const MOST_TYPES: i64 = 64;
/// Positions that a warp stages at a time.
const PIECE: i64 = 32;
/// Past what 32 bits count.
const OVERFLOW: i64 = 1 << 31;

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let pack = call.kernel() == "box_pack_weight";
    let layout = layout(call);
    let (packed, flags, pieces) = if pack {
        ("out", call.grid[0], call.int("items"))
    } else {
        let [slices, channel_blocks, chunks] = call.ints(["slices", "channel_blocks", "chunks"]);
        let blocks = slices * channel_blocks * layout.types;
        ("a", call.int("flag_count"), blocks * layout.tiles_of_block(chunks) * 32)
    };
    vec![(packed, layout.parts * pieces * layout.e), ("flags", flags), ("mask_list", layout.mask_count())]
}

/// Does what a launch does.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    match call.kernel() {
        "box_pack_weight" => pack_weight(call, machine),
        "box_gemm" => multiply(call, machine),
        name => panic!("{name} has no contract here"),
    }
}

/// Slices are whole groups, and as few row blocks as hold their channels.
fn check_slices(call: &Call<'_>, layout: &Layout) {
    let [slice_in, slice_out, in_per_group, out_per_group] =
        call.ints(["slice_in", "slice_out", "in_per_group", "out_per_group"]);
    let what = call.variant.name;
    assert!(slice_in % in_per_group == 0 && slice_out % out_per_group == 0, "{what}");
    assert_eq!(slice_in / in_per_group, slice_out / out_per_group, "{what}");
    assert!(slice_in <= call.int("chunks") * layout.panels * layout.e, "{what}");
    let blocks = (slice_out + layout.channels - 1) / layout.channels;
    assert_eq!(call.int("channel_blocks"), blocks, "{what}");
    let classes = layout.axes[0].stride * layout.axes[1].stride;
    assert_eq!(layout.types, (classes + layout.classes - 1) / layout.classes, "{what}");
}

/// Fragments in the order [slice][channel block][type][offset d][h][unit][chunk][pair][tile][part][lane].
fn pack_weight(call: &Call<'_>, machine: &mut Machine) {
    let layout = layout(call);
    check_slices(call, &layout);
    let [items, slice_in, slice_out, chunks, channel_blocks] =
        call.ints(["items", "slice_in", "slice_out", "chunks", "channel_blocks"]);
    let [in_per_group, out_per_group] = call.ints(["in_per_group", "out_per_group"]);
    let [w, out, flags] = ["w", "out", "flags"].map(|name| call.pointer(name));
    let (blocks, [depth, height, width]) = (call.grid[0], &layout.axes);
    assert!(blocks > 0 && call.grid[1..] == [1, 1] && call.variant.threads == 256);
    let of_slice = channel_blocks * layout.types * layout.tiles_of_block(chunks) * 32;
    assert!(items * layout.parts < OVERFLOW && items % of_slice == 0, "{items} of {of_slice}");
    for (at, mask) in layout.masks().into_iter().enumerate() {
        machine.write(call.pointer("mask_list"), at as i64, mask as f64);
    }
    let taps = depth.kernel * height.kernel * width.kernel;
    let mut bad = vec![false; blocks as usize];
    for item in 0..items {
        let mut rest = item;
        let mut next = |count: i64| {
            let at = rest % count;
            rest /= count;
            at
        };
        let [lane, tile, pair, chunk] = [32, layout.tiles, layout.pairs, chunks].map(&mut next);
        let [unit, mh, md] = [layout.units, height.offsets, depth.offsets].map(&mut next);
        let [kind, channel_block] = [layout.types, channel_blocks].map(&mut next);
        let slice = rest;
        let mut values = Vec::new();
        for element in 0..layout.e {
            let [row, half, within] = layout.fragment(lane, element);
            let row = layout.row(kind, 16 * tile + row);
            let channel = channel_block * layout.channels + row.channel;
            let c = (chunk * layout.panels + layout.panel(pair, half)) * layout.e + within;
            let (ci, co) = (slice * slice_in + c, slice * slice_out + channel);
            let [rd, rh, rw] = row.residues;
            let tap = [depth.tap(rd, md), height.tap(rh, mh), width.tap(rw, layout.offset_w(unit, half))];
            let real = row.here && channel < slice_out && c < slice_in;
            let mut value = 0.0;
            if let ([Some(td), Some(th), Some(tw)], true) = (tap, real)
                && ci / in_per_group == co / out_per_group
            {
                let tap = (td * height.kernel + th) * width.kernel + tw;
                value = machine.read(w, (ci * out_per_group + co % out_per_group) * taps + tap);
            }
            values.push(value);
            for (part, value) in (0..layout.parts).zip(split(layout.parts, value)) {
                let piece = (item / 32 * layout.parts + part) * 32 + lane;
                machine.write(out, piece * layout.e + element, value);
            }
        }
        bad[(item / 256 % blocks) as usize] |= is_out_of_range(layout.parts, values.into_iter());
    }
    for (block, bad) in bad.into_iter().enumerate() {
        machine.write(flags, block as i64, f64::from(u8::from(bad)));
    }
}

/// One axis of a box's work.
struct Extent {
    input: i64,
    output: i64,
    padding: i64,
    first: i64,
    count: i64,
    size: i64,
    /// Boxes, and inputs of one.
    boxes: i64,
    halo: i64,
}

impl Extent {
    fn new(call: &Call<'_>, axis: &str, along: &Along) -> Extent {
        let int = |name: &str| call.int(&format!("{axis}_{name}"));
        let [input, output, padding] = ["input", "output", "padding"].map(int);
        let [first, count, size] = ["first", "count", "box"].map(int);
        let boxes = call.int(&format!("boxes_{axis}"));
        assert!(size > 0 && boxes == (count + size - 1) / size, "{boxes} boxes of {size} along {axis}");
        let halo = size + (along.offsets - 1) * along.apart;
        Extent { input, output, padding, first, count, size, boxes, halo }
    }
}

fn extents_of_box(call: &Call<'_>, layout: &Layout) -> [Extent; 3] {
    let [depth, height, width] = &layout.axes;
    [("d", depth), ("h", height), ("w", width)].map(|(axis, along)| Extent::new(call, axis, along))
}

/// What the sizes, the grid and the shared memory of the product have to be.
pub fn check(call: &Call<'_>) {
    let layout = layout(call);
    check_slices(call, &layout);
    let axes = extents_of_box(call, &layout);
    let what = call.variant.name;
    let [mt, nt, warps, ctas] = ["MT", "NT", "WARPS", "CTAS"].map(|name| call.size(name));
    let [slices, parts, chunks, channel_blocks] = call.ints(["slices", "parts", "chunks", "channel_blocks"]);
    let [row_warps, work, pitch, staging, lines] =
        call.ints(["row_warps", "work", "pitch", "staging", "line_count"]);
    assert_eq!(i64::from(call.variant.threads), 32 * warps, "{what}");
    assert!(call.grid[0] > 0 && call.grid[1..] == [1, 1], "{what}");
    assert!(work > 0 && work % (axes.iter().map(|axis| axis.boxes).product::<i64>() * slices * parts) == 0);
    let [depth, height, width] = &axes;
    let halo = depth.halo * height.halo * width.halo;
    assert_eq!(call.ints(["all_h", "all_w", "x_rows"]), [height.halo, width.halo, halo], "{what}");
    assert_eq!(call.ints(["units", "pairs"]), [layout.units, layout.pairs], "{what}");
    assert!(warps % row_warps == 0, "{row_warps} of {warps}");
    assert!((parts - 1) * row_warps < layout.types * channel_blocks, "a part of {what} has no rows");
    let positions: i64 = axes.iter().map(|axis| axis.size).product();
    assert!(positions <= warps / row_warps * 8 * nt, "{positions} positions of {what}, {row_warps}");
    assert!(layout.mask_count() <= MOST_MASKS && layout.types <= MOST_TYPES, "{what}");
    let [d_stride, h_stride, w_stride] = layout.axes.each_ref().map(|along| along.stride);

    // A warp's staged lines, and what it knows of each.
    let of_position = layout.classes * layout.channels * w_stride;
    let (line, count, known) = if call.int("y_last") == 1 {
        (of_position, PIECE, of_position)
    } else {
        (PIECE * w_stride, of_position / w_stride, of_position / w_stride)
    };
    assert!(pitch >= line && staging >= count * pitch && lines >= known, "{what}");
    assert!(staging % 4 == 0 && lines % 2 == 0, "{what}");
    if let (0, 1 | 2) = (call.int("y_last"), w_stride) {
        assert_eq!(pitch, PIECE * w_stride + if w_stride == 1 { 8 } else { 17 }, "{what}");
    }
    let masks = layout.masks();
    let steps: usize = (0..layout.types).map(|kind| layout.steps(kind, &masks).len()).sum();
    let areas = 4 * warps * (staging + 2 * lines);
    let shared = 16 * (layout.parts * layout.panels + 1) * halo + areas + 16 * steps as i64;
    assert_eq!(call.shared, shared, "{what}");
    assert_eq!(areas % 16, 0, "{what}");
    // Positions, masks, types, rows; divisors, two pieces of work, what each warp knows, two flags.
    let own = 16 * warps * 8 * nt + MOST_MASKS + 4 * (MOST_TYPES + 1) + 4 * 16 * mt;
    let own = own + 15 * 12 + 2 * 64 + 4 * warps + 8;
    assert!(shared + own <= MOST_SHARED && (shared + own + RESERVED) * ctas <= SHARED, "{what}");

    // What is counted in 32 bits: pieces of the weight, and how far elements lie from the box's first one.
    let pieces = slices * channel_blocks * layout.types * layout.tiles_of_block(chunks) * 32;
    assert!(
        pieces * layout.parts < OVERFLOW && 16 * halo * layout.panels * layout.parts < OVERFLOW,
        "{what}"
    );
    let farthest = |strides: [&str; 3], counts: [i64; 3]| -> i64 {
        call.ints(strides).iter().zip(counts).map(|(stride, count)| stride * (count - 1)).sum()
    };
    let x = farthest(["x_d", "x_h", "x_w"], axes.each_ref().map(|axis| axis.halo));
    let strides = [d_stride, h_stride, w_stride];
    let mut outputs = strides;
    outputs.iter_mut().zip(&axes).for_each(|(outputs, axis)| *outputs *= axis.size);
    let y = farthest(["y_d", "y_h", "y_w"], outputs);
    let lines = farthest(["y_d", "y_h", "y_w"], strides) + (layout.channels - 1) * call.int("y_c");
    assert!(x < OVERFLOW && y < OVERFLOW && lines < OVERFLOW, "{x}, {y}, {lines}: {what}");
}

/// What is unusual about a product.
pub fn features(call: &Call<'_>) -> Vec<&'static str> {
    let layout = layout(call);
    let axes = extents_of_box(call, &layout);
    let masks = layout.masks();
    let all = (1 << layout.tiles) - 1;
    let partly = (0..layout.types).any(|kind| layout.steps(kind, &masks).iter().any(|step| step.1 != all));
    let whole = call.int("channel_blocks") * layout.channels == call.int("slice_out");
    let found = [
        ("boxes past the end", axes.iter().any(|axis| axis.count % axis.size > 0)),
        ("chunks", call.int("chunks") > 1),
        ("many channel blocks", call.int("channel_blocks") > 1),
        ("many pieces a block", call.int("work") > call.grid[0]),
        ("many types", layout.types > 1),
        ("offsets apart", layout.axes.iter().any(|along| along.apart > 1)),
        ("pairs of offsets", layout.pair_w),
        ("parts", call.int("parts") > 1),
        ("a last channel block of fewer", !whole),
        ("residues without taps", layout.residues < layout.axes[2].stride),
        ("slices", call.int("slices") > 1),
        ("some tiles of a step", partly),
        ("warps of many row blocks", call.int("row_warps") > 1),
    ];
    found.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect()
}

/// Whether one piece of work of a box may be moved 16 bytes at a time, and then at which multiples.
fn vectors(call: &Call<'_>, layout: &Layout) {
    let [x_last, slice_in, x_c] = call.ints(["x_last", "slice_in", "x_c"]);
    let strides = call.ints(["x_n", "x_d", "x_h", "x_w"]);
    assert!([0, 1].contains(&x_last) && (x_last == 0 || x_c == 1), "channels {x_c} apart");
    if x_last == 1 && slice_in % layout.e == 0 && strides[3] % layout.e == 0 {
        let whole = strides.iter().all(|stride| stride % layout.e == 0);
        assert!(whole && call.pointer("x").at.is_multiple_of(16), "{strides:?}");
    }
}

/// A piece of work: a part of the row blocks of a slice, for a box of a sample.
struct Piece {
    part: i64,
    sample: i64,
    slice: i64,
    /// The box's first position along each axis.
    first: [i64; 3],
}

impl Piece {
    fn new(call: &Call<'_>, axes: &[Extent; 3], item: i64) -> Piece {
        let [parts, slices] = call.ints(["parts", "slices"]);
        let (mut rest, mut first) = (item / parts, [0; 3]);
        for (first, axis) in first.iter_mut().zip(axes).rev() {
            *first = axis.first + rest % axis.boxes * axis.size;
            rest /= axis.boxes;
        }
        Piece { part: item % parts, sample: rest / slices, slice: rest % slices, first }
    }
}

/// What a block keeps of a box's inputs: of each part [panel of all chunks][channel][row of X].
fn fetch(
    call: &Call<'_>,
    machine: &Machine,
    layout: &Layout,
    axes: &[Extent; 3],
    piece: &Piece,
) -> [Vec<f64>; 2] {
    let [chunks, slice_in] = call.ints(["chunks", "slice_in"]);
    let [x_n, x_c, x_d, x_h, x_w] = call.ints(["x_n", "x_c", "x_d", "x_h", "x_w"]);
    let x = call.pointer("x");
    let first: Vec<i64> =
        (0..3).map(|at| piece.first[at] - (layout.axes[at].offsets - 1) * layout.axes[at].apart).collect();
    let [depth, height, width] = axes;
    let mut kept = [Vec::new(), Vec::new()];
    for c in 0..chunks * layout.panels * layout.e {
        for (d, h) in (0..depth.halo).flat_map(|d| (0..height.halo).map(move |h| (d, h))) {
            for w in 0..width.halo {
                let at = [d + first[0], h + first[1], w + first[2]];
                let inside = at.iter().zip(axes).all(|(at, axis)| (0..axis.input).contains(at));
                let [id, ih, iw] = at;
                let channel = piece.slice * slice_in + c;
                let from = piece.sample * x_n + channel * x_c + id * x_d + ih * x_h + iw * x_w;
                let value = if inside && c < slice_in { machine.read(x, from) } else { 0.0 };
                kept.iter_mut().zip(split(layout.parts, value)).for_each(|(kept, value)| kept.push(value));
            }
        }
    }
    kept
}

/// All residues of a box of positions at once: rows are channels and residues, columns are positions.
fn multiply(call: &Call<'_>, machine: &mut Machine) {
    check(call);
    let layout = layout(call);
    vectors(call, &layout);
    let axes = extents_of_box(call, &layout);
    let [work, parts, row_warps, channel_blocks] =
        call.ints(["work", "parts", "row_warps", "channel_blocks"]);
    let read = |machine: &Machine, name: &str, count: i64| -> Vec<f64> {
        (0..count).map(|at| machine.read(call.pointer(name), at)).collect()
    };
    let bad_weight = read(machine, "flags", call.int("flag_count")).iter().any(|&flag| flag != 0.0);
    let masks: Vec<i64> =
        read(machine, "mask_list", layout.mask_count()).into_iter().map(|mask| mask as i64).collect();
    let blocks = layout.types * channel_blocks;
    for item in 0..work {
        let piece = Piece::new(call, &axes, item);
        let kept = fetch(call, machine, &layout, &axes, &piece);
        let rows = axes.iter().map(|axis| axis.halo).product::<i64>() as usize;
        let bad_input = kept[0].chunks(rows * layout.e as usize).any(|panel| {
            let vector = |row| panel.iter().skip(row).step_by(rows).copied();
            (0..rows).any(|row| is_out_of_range(layout.parts, vector(row)))
        });
        // Every `parts`-th turn of as many row blocks as a block's warps have.
        for first in (piece.part * row_warps..blocks).step_by((parts * row_warps) as usize) {
            for block in first..(first + row_warps).min(blocks) {
                let sum = (!bad_weight && !bad_input)
                    .then(|| sums(call, machine, &layout, &axes, [piece.slice, block], &kept, &masks));
                finish(call, machine, &layout, &axes, &piece, block, sum);
            }
        }
    }
}

/// The sums of a row block for a box: of each row all positions.
fn sums(
    call: &Call<'_>,
    machine: &Machine,
    layout: &Layout,
    axes: &[Extent; 3],
    [slice, block]: [i64; 2],
    kept: &[Vec<f64>; 2],
    masks: &[i64],
) -> Vec<Vec<f64>> {
    let [chunks, channel_blocks] = call.ints(["chunks", "channel_blocks"]);
    let a = call.pointer("a");
    let [depth, height, width] = axes;
    let line = |d: i64, h: i64, w: i64| (d * height.halo + h) * width.halo + w;
    let places: Vec<usize> = (0..depth.size * height.size * width.size)
        .map(|at| {
            line(at / (height.size * width.size), at / width.size % height.size, at % width.size) as usize
        })
        .collect();
    let rows = depth.halo * height.halo * width.halo;
    let first = (slice * channel_blocks * layout.types + block) * layout.tiles_of_block(chunks);
    // Else zeros times it are not zeros.
    let finite = kept[0].iter().all(|value| value.is_finite());
    let mut sums = vec![vec![0.0; places.len()]; 16 * layout.tiles as usize];
    for ([md, mh, unit], mask) in layout.steps(block % layout.types, masks) {
        let step = (md * layout.axes[1].offsets + mh) * layout.units + unit;
        let turns = (0..chunks).flat_map(|chunk| (0..layout.pairs).map(move |pair| (chunk, pair)));
        let tiles = (0..layout.tiles).filter(|tile| mask >> tile & 1 == 1);
        for ((chunk, pair), tile) in turns.flat_map(|turn| tiles.clone().map(move |tile| (turn, tile))) {
            let tile_at = first + ((step * chunks + chunk) * layout.pairs + pair) * layout.tiles + tile;
            for (lane, element) in (0..32).flat_map(|lane| (0..layout.e).map(move |at| (lane, at))) {
                let weight = |part: i64| {
                    let piece = (tile_at * layout.parts + part) * 32 + lane;
                    machine.read(a, piece * layout.e + element)
                };
                let high = weight(0);
                let low = if layout.parts == 2 { weight(1) } else { 0.0 };
                if finite && high == 0.0 && low == 0.0 {
                    continue;
                }
                let [row, half, within] = layout.fragment(lane, element);
                let offsets = [md, mh, layout.offset_w(unit, half)];
                // The farthest offset reads what lies first.
                let [d, h, w] = [0, 1, 2]
                    .map(|axis| (layout.axes[axis].offsets - 1 - offsets[axis]) * layout.axes[axis].apart);
                assert!(w >= 0, "a weight of no offset");
                let panel = chunk * layout.panels + layout.panel(pair, half);
                let from = ((panel * layout.e + within) * rows + line(d, h, w)) as usize;
                let row = &mut sums[(16 * tile + row) as usize];
                for (sum, place) in row.iter_mut().zip(&places) {
                    *sum += high * kept[0][from + place];
                    if layout.parts == 2 {
                        *sum += low * kept[0][from + place] + high * kept[1][from + place];
                    }
                }
            }
        }
    }
    sums
}

/// Writes the outputs of a row block and a box to y, with the bias and through the activation: from their
/// sums, or without these by the definition.
fn finish(
    call: &Call<'_>,
    machine: &mut Machine,
    layout: &Layout,
    axes: &[Extent; 3],
    piece: &Piece,
    block: i64,
    sums: Option<Vec<Vec<f64>>>,
) {
    let [slice_out, has_bias] = call.ints(["slice_out", "has_bias"]);
    let [y_n, y_c, y_d, y_h, y_w] = call.ints(["y_n", "y_c", "y_d", "y_h", "y_w"]);
    let (y, bias) = (call.pointer("y"), call.pointer("bias"));
    assert!([0, 1].contains(&has_bias));
    let (kind, channel0) = (block % layout.types, block / layout.types * layout.channels);
    let strides = layout.axes.each_ref().map(|along| along.stride);
    let numbers: Vec<Option<i64>> = (0..strides[2])
        .map(|residue| (0..layout.residues).find(|&number| layout.residue(number) == residue))
        .collect();
    let sizes = axes.each_ref().map(|axis| axis.size);
    for (local, rw) in (0..layout.classes).flat_map(|local| (0..strides[2]).map(move |rw| (local, rw))) {
        let class = kind * layout.classes + local;
        let residues = [class / strides[1], class % strides[1], rw];
        for channel in (0..layout.channels).filter(|channel| channel0 + channel < slice_out) {
            let row = numbers[rw as usize]
                .map(|number| (local * layout.residues + number) * layout.channels + channel);
            let co = piece.slice * slice_out + channel0 + channel;
            for at in 0..sizes.iter().product() {
                let place = [at / (sizes[1] * sizes[2]), at / sizes[2] % sizes[1], at % sizes[2]];
                let output = [0, 1, 2].map(|axis| {
                    (piece.first[axis] + place[axis]) * strides[axis] - axes[axis].padding + residues[axis]
                });
                let there = output.iter().zip(axes).all(|(at, axis)| (0..axis.output).contains(at));
                if class >= strides[0] * strides[1] || !there {
                    continue;
                }
                let sum = match (&sums, row) {
                    (Some(sums), Some(row)) => sums[row as usize][at as usize],
                    (Some(_), None) => 0.0,
                    (None, _) => define(call, machine, layout, axes, [piece.sample, co], output),
                };
                let value = activate(call, sum + biased(call, machine, bias, co), ["activation", "slope"]);
                let [od, oh, ow] = output;
                machine.write(y, piece.sample * y_n + co * y_c + od * y_d + oh * y_h + ow * y_w, value);
            }
        }
    }
}

/// An output's sum by the definition, from its group's channels.
fn define(
    call: &Call<'_>,
    machine: &Machine,
    layout: &Layout,
    axes: &[Extent; 3],
    [sample, co]: [i64; 2],
    output: [i64; 3],
) -> f64 {
    let [in_per_group, out_per_group] = call.ints(["in_per_group", "out_per_group"]);
    let [x_n, x_c, x_d, x_h, x_w] = call.ints(["x_n", "x_c", "x_d", "x_h", "x_w"]);
    let (x, w) = (call.pointer("x"), call.pointer("w"));
    let [d_kernel, h_kernel, w_kernel] = layout.axes.each_ref().map(|along| along.kernel);
    let taps = d_kernel * h_kernel * w_kernel;
    let (group, of_group) = (co / out_per_group, co % out_per_group);
    let mut sum = 0.0;
    for tap in 0..taps {
        let of_axes = [tap / (h_kernel * w_kernel), tap / w_kernel % h_kernel, tap % w_kernel];
        let far = [0, 1, 2].map(|at| output[at] + axes[at].padding - of_axes[at] * layout.axes[at].dilation);
        let reached = (0..3).all(|at| {
            let stride = layout.axes[at].stride;
            far[at] % stride == 0 && (0..axes[at].input).contains(&(far[at] / stride)) && far[at] >= 0
        });
        if !reached {
            continue;
        }
        let [id, ih, iw] = [0, 1, 2].map(|at| far[at] / layout.axes[at].stride);
        for ci in group * in_per_group..(group + 1) * in_per_group {
            let from = sample * x_n + ci * x_c + id * x_d + ih * x_h + iw * x_w;
            sum += machine.read(x, from) * machine.read(w, (ci * out_per_group + of_group) * taps + tap);
        }
    }
    sum
}

/// What an output is that no tap reaches, everywhere.
pub fn fill_output(call: &Call<'_>, machine: &mut Machine) {
    let [channels, inner, count] = call.ints(["channels", "inner", "count"]);
    let (y, bias) = (call.pointer("y"), call.pointer("bias"));
    assert!(call.grid[0] > 0 && call.grid[1..] == [1, 1] && call.variant.threads == 256);
    assert!(y.at.is_multiple_of(16) && [0, 1].contains(&call.int("has_bias")));
    let [leaves, d_out, h_out, w_out] = call.ints(["leaves", "d_out", "h_out", "w_out"]);
    let vectors = channels * y.width as i64 % 16 == 0;
    assert!(leaves == 0 || leaves == 1 && inner == 1 && vectors && count < 1 << 31);
    let lattices = ["d", "h", "w"].map(|axis| call.ints([&format!("{axis}_first"), &format!("{axis}_step")]));
    let is_on = |(out, [first, step]): (i64, [i64; 2])| out >= first && (out - first) % step == 0;
    let function = activation(call, ["activation", "slope"]);
    let values: Vec<f64> =
        (0..channels).map(|channel| through(function, biased(call, machine, bias, channel))).collect();
    for at in 0..count {
        let voxel = at / channels;
        let place = [voxel / w_out / h_out % d_out, voxel / w_out % h_out, voxel % w_out];
        if leaves == 0 || !place.into_iter().zip(lattices).all(is_on) {
            machine.write(y, at, values[(at / inner % channels) as usize]);
        }
    }
}

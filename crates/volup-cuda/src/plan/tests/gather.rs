//! What `gather_gemm` does, given its arguments.

use super::contracts::{activation, biased, defines, through};
use super::epilogue_statistics::{self, Output, Place, counts, rows_of_sample};
use super::halo::{Packing, pack_along, packer_bytes, parts, products, rows_of_tile, scaled_back};
use super::machine::{Call, Machine};
use super::norm_behind::{self, Written};
use std::collections::BTreeSet;

/// Panels of a chunk.
const PANELS: i64 = 8;
/// Warps of a block that pack, and bytes of shared memory of one that normalizes instead.
const PACKERS: i64 = 3;
const NORM_RING: i64 = 16384;
/// What a block may have of a multiprocessor's shared memory.
const SHARED: i64 = 232_448;
/// The most stages, phases, and taps of one along an axis.
const MOST: [i64; 3] = [60, 64, 10];

/// Taps of a residue along an axis: the first, how many, from one to the next, and the voxels that they reach from position 0.
struct Taps {
    first: i64,
    count: i64,
    step: i64,
    reached: i64,
    back: i64,
}

impl Taps {
    fn new(call: &Call<'_>, axis: &str, residue: i64) -> Taps {
        let int = |name: &str| call.int(&format!("{axis}_{name}"));
        let (kernel, stride, dilation, padding) =
            (int("kernel"), int("stride"), int("dilation"), int("padding"));
        let (step, back) = (int("step"), call.int(&format!("back_{axis}")));
        let gcd = stride / step;
        let rest = (residue + padding) % stride;
        let first = if rest % gcd == 0 { rest / gcd * int("inverse") % step } else { kernel };
        let count = (kernel - first + step - 1).max(0) / step;
        // The definition itself.
        let at = |tap: i64| residue + padding - tap * dilation;
        let right: Vec<i64> = (0..kernel).filter(|&tap| at(tap).rem_euclid(stride) == 0).collect();
        assert!(
            right.iter().copied().eq((0..count).map(|tap| first + tap * step)),
            "taps of {axis} {residue}"
        );
        for (turn, &tap) in (0..).zip(&right) {
            assert_eq!(at(tap) / stride, at(first) / stride - turn * back, "{axis} {residue}");
        }
        Taps { first, count, step, reached: at(first) / stride, back }
    }

    /// Pairs of neighbouring taps of an axis' two residues, of which the first lacks its first if the padding is odd.
    fn pairs(call: &Call<'_>, axis: &str) -> Taps {
        let int = |name: &str| call.int(&format!("{axis}_{name}"));
        let (kernel, padding) = (int("kernel"), int("padding"));
        assert!(int("stride") == 2 && int("dilation") == 1);
        let whole = call.int("channels") % (16 / call.pointer("y").width as i64) == 0;
        assert!(call.int("channels_first") == 1 || whole && call.int("activation") <= 2);
        assert_eq!(call.int(&format!("back_{axis}")), 1);
        let first = -(padding % 2);
        Taps { first, count: (kernel - first + 1) / 2, step: 2, reached: (padding + 1) / 2, back: 1 }
    }
}

/// The parts of the workspace that it may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let product = |names: &[&str]| names.iter().map(|name| call.int(name)).product::<i64>();
    let e = 16 / call.pointer("b").width as i64;
    let columns = call.size("BN") / call.size("RW");
    let parts = parts(call);
    let taps = product(&["slices", "blocks", "d_kernel", "h_kernel", "w_kernel", "chunks"]);
    let control = if call.int("ahead") > 0 { 10 + call.int("pieces") } else { 5 };
    let a = product(&["slices", "chunks", "a_rows"]) * PANELS * e * parts;
    let mut found = vec![("a", a), ("b", taps * PANELS * columns * e * parts), ("control", control)];
    found.push(("scale_w", product(&["slices", "blocks"]) * columns));
    found.extend(epilogue_statistics::extents(call));
    found
}

/// Phases: residues along depth, height and, unless these are columns, width.
fn phases(call: &Call<'_>) -> Vec<[i64; 3]> {
    let [d, h, w] = call.ints(["d_stride", "h_stride", "w_stride"]);
    let (h, w) = (h / call.size("RH"), w / call.size("RW"));
    let all = (0..d).flat_map(|rd| (0..h).flat_map(move |rh| (0..w).map(move |rw| [rd, rh, rw])));
    let mut all: Vec<[i64; 3]> = all.collect();
    if call.int("by_work") == 1 {
        all.sort_by_key(|&residues| -taps(call, residues).iter().map(|taps| taps.count).product::<i64>());
    }
    all
}

fn taps(call: &Call<'_>, [rd, rh, rw]: [i64; 3]) -> [Taps; 3] {
    let of = |axis, residues, residue| {
        if call.size(residues) == 2 { Taps::pairs(call, axis) } else { Taps::new(call, axis, residue) }
    };
    [Taps::new(call, "d", rd), of("h", "RH", rh), of("w", "RW", rw)]
}

/// What the sizes, the grid and the shared memory have to be.
pub fn check(call: &Call<'_>) {
    let [bn, mi, wgs] = ["BN", "MI", "WGS"].map(|name| call.size(name));
    let [a_stages, stage_rows, b_stages] = call.ints(["a_stages", "stage_rows", "b_stages"]);
    let rings = parts(call) * PANELS * 16 * (a_stages * stage_rows + b_stages * bn * call.size("RH"));
    let packers = if norm_behind::is_asked(call) && parts(call) == 1 {
        let warps = call.int("norm_warps");
        packer_bytes(call) / PACKERS * (PACKERS - warps) + NORM_RING * warps
    } else {
        packer_bytes(call)
    };
    norm_behind::check(call);
    let team = blocks_of_team(call);
    assert!(team == 1 || call.ints(["by_work", "ahead"]) == [1, 0] && a_stages + b_stages <= 54);
    let fixed = 4608 + wgs * (16 * bn + 4096 * mi + 1024);
    assert_eq!(call.shared, fixed + rings + packers + brought_bytes(call));
    assert!(call.shared <= SHARED && i64::from(call.variant.threads) == 128 * (wgs + 1));
    assert!(a_stages >= 2 && b_stages >= 2 && a_stages + b_stages <= MOST[0] && stage_rows % 8 == 0);
    assert!(call.grid[0] > 0 && call.grid[1..] == [1, 1] && [0, 1].contains(&call.int("by_work")));
    let [d, h, w] = call.ints(["d_stride", "h_stride", "w_stride"]);
    let columns = call.size("RH") * call.size("RW");
    assert!(d * h * w / columns <= MOST[1] && w % call.size("RW") == 0 && h % call.size("RH") == 0);
    // Lines and planes of positions are no shorter than those of voxels.
    for [positions, voxels] in [["pd", "in_d"], ["ph", "in_h"], ["pw", "in_w"]] {
        assert!(call.int(positions) >= call.int(voxels));
    }
    let [rows, pd, ph, pw, a_rows] = call.ints(["rows", "pd", "ph", "pw", "a_rows"]);
    assert_eq!(
        rows / (pd * ph * pw) * call.ints(["in_d", "in_h", "in_w"]).iter().product::<i64>(),
        call.int("voxels")
    );
    assert!(rows % (pd * ph * pw) == 0 && a_rows >= call.int("voxels") + stage_rows);
}

/// The first voxel that rows from a position on may reach by a tap along depth and the last ones along the others: where one
/// is past an edge, the first of the next line, plane or sample that positions reach.
fn first_reached(call: &Call<'_>, at: [i64; 4], [depth, height, width]: &[Taps; 3], ad: i64) -> i64 {
    let [in_d, in_h, in_w] = call.ints(["in_d", "in_h", "in_w"]);
    let behind = [ad * depth.back, (height.count - 1) * height.back, (width.count - 1) * width.back];
    let [moved_d, moved_h, moved_w] =
        [0, 1, 2].map(|axis| [depth, height, width][axis].reached - behind[axis]);
    let first = [moved_d, moved_h, moved_w].map(|moved| moved.max(0));
    let [mut n, mut d, mut h, mut w] = [at[0], at[1] + moved_d, at[2] + moved_h, at[3] + moved_w];
    if w >= in_w {
        (h, w) = (h + 1, first[2]);
    }
    if h >= in_h {
        (d, h, w) = (d + 1, first[1], first[2]);
    }
    if d >= in_d {
        (n, d, h, w) = (n + 1, first[0], first[1], first[2]);
    } else if d < 0 {
        (d, h, w) = (0, first[1], first[2]);
    } else if h < 0 {
        (h, w) = (0, first[2]);
    }
    (((n * in_d + d) * in_h + h) * in_w + w.max(0)).min(call.int("voxels"))
}

/// Does what a launch does.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    check(call);
    let voxels = ["x_depth", "x_height", "x_width"];
    let in_place = call.int("in_place");
    assert!(in_place == 0 || call.given("a").is_none() && call.int("ahead") == 0);
    assert!(
        in_place * 2 % 16 == 0 && (in_place == 0 || call.pointer("x").width == 2 && call.int("x_c") == 1)
    );
    pack_along(call, machine, |panels| Packing {
        a_rows: call.int("a_rows"),
        lead: 0,
        pitches: call.ints(voxels),
        block: 1,
        sizes: call.ints(["x_count", "x_depth", "x_height", "x_width"]),
        strides: call.ints(["x_n", "x_c", "x_d", "x_h", "x_w"]),
        slices: 1,
        slice_in: panels * 16 / call.pointer("b").width as i64,
        panels: call.int("chunks") * PANELS,
        channel_panels: panels,
        out: call.pointer("a"),
    });
    if defines(call, machine) {
        return;
    }
    let bm = rows_of_tile(call);
    let [rows, slices, blocks] = call.ints(["rows", "slices", "blocks"]);
    let (all, phases) = (slices * blocks, phases(call));
    let count = phases.len() as i64;
    let row_tiles = (rows + bm - 1) / bm;
    let teams = teams(call);
    let (tiles, turn) = (row_tiles * count * all, (teams / (all * count)).max(1));
    let (mut seen, mut written) = (BTreeSet::new(), Vec::new());
    for round in 0..(tiles + teams - 1) / teams {
        for team in 0..teams {
            let back = call.int("by_work") == 1 && round % 2 == 1;
            let of_tile = round * teams + if back { teams - 1 - team } else { team };
            if of_tile >= tiles {
                continue;
            }
            assert!(seen.insert(of_tile));
            let rest = of_tile / all;
            let (phase, row_tile) = if call.int("by_work") == 1 {
                (rest / row_tiles, rest % row_tiles)
            } else {
                ((rest % count + rest / count / turn) % count, rest / count)
            };
            tile(call, machine, row_tile * bm, of_tile % all, phases[phase as usize], &mut written);
        }
    }
    assert_eq!(seen.len() as i64, tiles);
    if norm_behind::is_asked(call) {
        norm_behind::finish(call, machine, &written);
    }
}

/// Blocks of a cluster, which do a tile together.
pub fn blocks_of_team(call: &Call<'_>) -> i64 {
    call.variant.param("SPLIT").unwrap_or(1)
}

/// Blocks, or clusters of them, that tiles are dealt out to.
pub fn teams(call: &Call<'_>) -> i64 {
    let team = blocks_of_team(call);
    assert_eq!(call.grid[0] % team, 0);
    call.grid[0] / team
}

/// Bytes of shared memory of sums that other blocks of a cluster bring.
pub fn brought_bytes(call: &Call<'_>) -> i64 {
    let team = blocks_of_team(call);
    let sums = rows_of_tile(call) * call.size("BN") * call.variant.param("RH").unwrap_or(1);
    4 * sums / team * (team - 1)
}

/// A row's sample and position.
fn position(call: &Call<'_>, row: i64) -> [i64; 4] {
    let [pd, ph, pw] = call.ints(["pd", "ph", "pw"]);
    [row / pw / ph / pd, row / pw / ph % pd, row / pw % ph, row % pw]
}

fn tile(
    call: &Call<'_>,
    machine: &mut Machine,
    row0: i64,
    column_block: i64,
    residues: [i64; 3],
    written: &mut Vec<Written>,
) {
    let (bm, of_line, of_row) = (rows_of_tile(call), call.size("RH"), call.size("RW"));
    let (bn, channels) = (call.size("BN") * of_line, call.size("BN") / of_row);
    let [rows, voxels, a_rows, stage_rows] = call.ints(["rows", "voxels", "a_rows", "stage_rows"]);
    let sizes = call.ints(["in_d", "in_h", "in_w"]);
    let [chunks, blocks, d_kernel, h_kernel, w_kernel] =
        call.ints(["chunks", "blocks", "d_kernel", "h_kernel", "w_kernel"]);
    let (a, x, b) = (call.given("a"), call.pointer("x"), call.pointer("b"));
    let [in_place, x_w] = call.ints(["in_place", "x_w"]);
    let e = 16 / b.width as i64;
    let parts = parts(call);
    // Of a part an element of a voxel's channels, so many on in its slice.
    let operand = |machine: &mut Machine, part: i64, slice: i64, voxel: i64, at: i64| match a {
        Some(a) => {
            let panel = (part * call.int("slices") + slice) * chunks * PANELS + at / e;
            machine.read(a, (panel * a_rows + voxel) * e + at % e)
        }
        None if at < in_place => machine.read(x, voxel * x_w + slice * in_place + at),
        None => 0.0,
    };
    let taps = taps(call, residues);
    assert!(taps.iter().all(|taps| taps.count <= MOST[2]));
    let there = taps.iter().all(|taps| taps.count > 0);
    let [depth, height, width] = &taps;
    let here = bm.min(rows - row0);
    let positions: Vec<[i64; 4]> = (0..here).map(|row| position(call, row0 + row)).collect();
    let mut sum = vec![0.0; (here * bn) as usize];
    let length = bm + (height.count - 1) * height.back * sizes[2] + (width.count - 1) * width.back;
    assert!(!there || length <= stage_rows, "{length} of {stage_rows}");
    for ad in 0..if there { depth.count } else { 0 } {
        let from = first_reached(call, position(call, row0), &taps, ad);
        assert!(from >= 0 && from + length <= a_rows);
        for (chunk, ah, aw) in (0..chunks)
            .flat_map(|chunk| (0..height.count).map(move |ah| (chunk, ah)))
            .flat_map(|(chunk, ah)| (0..width.count).map(move |aw| (chunk, ah, aw)))
        {
            for (rh, rr) in (0..of_line).flat_map(|rh| (0..of_row).map(move |rr| (rh, rr))) {
                let th = height.first + ah * height.step + rh;
                let tap = width.first + aw * width.step + rr;
                if !(0..h_kernel).contains(&th) || !(0..w_kernel).contains(&tap) {
                    continue;
                }
                let line = column_block * d_kernel + depth.first + ad * depth.step;
                let line = (line * chunks + chunk) * h_kernel + th;
                let unit = (line * w_kernel + tap) * PANELS * parts * channels * e;
                // Of each panel and element of it all channels: of a part.
                let weights: Vec<Vec<f64>> = (0..parts)
                    .map(|part| {
                        let of_part = (0..PANELS * e * channels).map(|at| {
                            let (piece, column) = (at / channels, at % channels);
                            let (panel, k) = (piece / e, piece % e);
                            machine.read(b, unit + ((panel * parts + part) * channels + column) * e + k)
                        });
                        of_part.collect()
                    })
                    .collect();
                for (row, &[n, ref at @ ..]) in (0..here).zip(&positions) {
                    let back = [ad * depth.back, ah * height.back, aw * width.back];
                    let voxel = [0, 1, 2].map(|axis| at[axis] + taps[axis].reached - back[axis]);
                    if (0..3).any(|axis| !(0..sizes[axis]).contains(&voxel[axis])) {
                        continue;
                    }
                    let voxel = ((n * sizes[0] + voxel[0]) * sizes[1] + voxel[1]) * sizes[2] + voxel[2];
                    assert!((from..from + length).contains(&voxel) && voxel < voxels, "{voxel} of {from}");
                    for &([part_a, part_b], by) in products(call) {
                        for (piece, weights) in (0..).zip(weights[part_b as usize].chunks(channels as usize))
                        {
                            let at = chunk * PANELS * e + piece;
                            let x = by * operand(machine, part_a, column_block / blocks, voxel, at);
                            if x == 0.0 {
                                continue;
                            }
                            let sums = &mut sum[(row * bn + (rh * of_row + rr) * channels) as usize..];
                            sums.iter_mut().zip(weights).for_each(|(sum, w)| *sum += x * w);
                        }
                    }
                }
            }
        }
    }
    let scales: Vec<f64> =
        (0..channels).map(|at| scaled_back(call, machine, column_block * channels + at)).collect();
    for (at, sum) in (0..).zip(&mut sum) {
        *sum *= scales[(at % bn % channels) as usize];
    }
    finish(call, machine, &sum, (row0, column_block, residues), written);
}

/// Writes what are outputs of a tile to y, with the bias and through the activation, or says what would be.
fn finish(
    call: &Call<'_>,
    machine: &mut Machine,
    sum: &[f64],
    (row0, column_block, residues): (i64, i64, [i64; 3]),
    written: &mut Vec<Written>,
) {
    let (of_line, of_row) = (call.size("RH"), call.size("RW"));
    let (bn, channels_of_tile) = (call.size("BN") * of_line, call.size("BN") / of_row);
    let [blocks, channels] = call.ints(["blocks", "channels"]);
    let strides = call.ints(["d_stride", "h_stride", "w_stride"]);
    let sizes = call.ints(["d_out", "h_out", "w_out"]);
    let [y_n, y_c, y @ ..] = call.ints(["y_n", "y_c", "y_d", "y_h", "y_w"]);
    let (y_at, bias) = (call.pointer("y"), call.pointer("bias"));
    let function = activation(call, ["activation", "slope"]);
    let biases: Vec<f64> =
        (0..channels).map(|co| biased(call, machine, bias, column_block / blocks * channels + co)).collect();
    let positions: Vec<[i64; 4]> = (0..sum.len() as i64 / bn).map(|row| position(call, row0 + row)).collect();
    let is_asked = norm_behind::is_asked(call);
    let mut outputs = Vec::new();
    for (at, &sum) in (0..).zip(sum) {
        let [n, position @ ..] = positions[(at / bn) as usize];
        let residue = at % bn / channels_of_tile;
        let co = column_block % blocks * channels_of_tile + at % bn % channels_of_tile;
        let mut output = [0, 1, 2].map(|axis| position[axis] * strides[axis] + residues[axis]);
        output[1] += residue / of_row;
        output[2] += residue % of_row;
        if co >= channels || (0..3).any(|axis| output[axis] >= sizes[axis]) {
            continue;
        }
        let value = through(function, sum + biases[co as usize]);
        let co = column_block / blocks * channels + co;
        let to = n * y_n + co * y_c + (0..3).map(|axis| output[axis] * y[axis]).sum::<i64>();
        if is_asked {
            written.push(Written { sample: n, channel: co, to, value });
        } else {
            machine.write(y_at, to, value);
        }
        outputs.push(Output { row: row0 + at / bn, channel: co, value });
    }
    if counts(call) {
        let tile_rows = rows_of_tile(call);
        let first = column_block % blocks * channels_of_tile;
        let slice = column_block / blocks * channels;
        let place = Place {
            tile: row0 / tile_rows,
            tile_rows,
            rows: row0..call.int("rows").min(row0 + tile_rows),
            rows_of_sample: rows_of_sample(call),
            phase: (residues[0] * (strides[1] / of_line) + residues[1]) * (strides[2] / of_row) + residues[2],
            channels: slice + first..slice + channels.min(first + channels_of_tile),
        };
        epilogue_statistics::count(call, machine, &place, &outputs);
    }
}

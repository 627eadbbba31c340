//! What `halo_sweep` does, given its arguments.

use super::contracts::{activation, biased, through};
use super::epilogue_statistics::{self, Output, Place, counts, rows_of_sample};
use super::halo::{
    MOST_STAGES, Packing, SHARED, elements, pack_along, packer_bytes, parts, products, rows_of_tile,
    scaled_back,
};
use super::machine::{Call, Machine};

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let product = |names: &[&str]| names.iter().map(|name| call.int(name)).product::<i64>();
    let columns = call.int("blocks") * call.size("BN");
    let e = elements(call.pointer("b"));
    let taps = product(&["h_kernel", "w_kernel", "chunks", "chunk_panels"]) * call.size("PLANES");
    let control = if call.int("ahead") > 0 { 10 + call.int("pieces") } else { 5 };
    let mut found = vec![
        ("a", parts(call) * product(&["chunks", "chunk_panels", "a_rows"]) * e),
        ("b", parts(call) * columns * taps * e),
        ("control", control),
        ("scale_w", columns),
    ];
    found.extend(epilogue_statistics::extents(call));
    found
}

/// What the sizes, the grid and the shared memory have to be.
pub fn check(call: &Call<'_>) {
    let [bn, mi, wgs, planes] = ["BN", "MI", "WGS", "PLANES"].map(|name| call.size(name));
    let [a_stages, stage_rows, b_stages] = call.ints(["a_stages", "stage_rows", "b_stages"]);
    let [chunk_panels, chunks, h_kernel, w_kernel] =
        call.ints(["chunk_panels", "chunks", "h_kernel", "w_kernel"]);
    let [back_h, w_step, blocks] = call.ints(["back_h", "w_step", "blocks"]);
    let unit_lines = call.int("unit_lines");
    let unit = unit_lines * w_kernel * parts(call) * chunk_panels * planes * bn * 16;
    // Statistics have means of two samples for each warp.
    let means = if counts(call) { 4 * 2 * 4 * bn } else { 0 };
    let tables = wgs * (16 * bn + 4096 * mi + 1024 + means);
    let stage = parts(call) * chunk_panels * stage_rows * 16;
    assert_eq!(call.shared, 4096 + tables + a_stages * stage + b_stages * unit + packer_bytes(call));
    assert!(call.shared <= SHARED[0] && i64::from(call.variant.threads) == 128 * wgs + 128);
    assert!(a_stages >= 2 && b_stages >= 1 && a_stages + b_stages <= MOST_STAGES);
    assert!(stage_rows % 8 == 0 && chunk_panels % 2 == 0);
    assert!(rows_of_tile(call) + (h_kernel - 1) * back_h + (w_kernel - 1) * w_step <= stage_rows);
    assert!(call.grid[0] > 0 && call.grid[0] % blocks == 0 && call.grid[1..] == [1, 1]);
    // Rows, and what is written, are counted in 32 bits.
    assert!(call.int("a_rows") < 1 << 31 && call.int("n") * call.int("y_n") < 1 << 31);
    assert!([0, 1].contains(&call.int("resident")) && [2, 3].contains(&call.int("pack_rounds")));
    assert!(unit_lines > 0 && h_kernel % unit_lines == 0 && unit < 1 << 20);
    assert!(call.int("resident") == 0 || b_stages >= chunks * h_kernel / unit_lines);
    // A piece has rows of two samples at most.
    assert!(!counts(call) || rows_of_sample(call) >= rows_of_tile(call) && call.int("activation") <= 2);
    let in_place = call.int("in_place");
    assert!(in_place == 0 || call.given("a").is_none() && call.int("ahead") == 0);
    if parts(call) > 1 {
        assert!(in_place == 0 && call.int("ahead") == 0 && (wgs == 2 || wgs == 3));
        // As many products go to registers together as in other kernels of the split, more or less.
        let together = unit_lines * w_kernel * chunk_panels * 8 * (1 + call.int("alternates"));
        assert!([0, 1].contains(&call.int("alternates")) && together <= 256, "{together} products");
    }
    assert!(in_place == 0 || [2, 4, 8].contains(&chunk_panels) && stage_rows <= 704);
    assert!(
        in_place * 2 % 16 == 0 && (in_place == 0 || call.pointer("x").width == 2 && call.int("x_c") == 1)
    );
}

/// What gives the elements of a panel of a plane's row, as they lie in A, of a part, or where the input has them.
fn operands<'a>(call: &Call<'_>, machine: &'a Machine) -> impl Fn(i64, [i64; 3]) -> Vec<f64> + 'a {
    let (a, x, e) = (call.given("a"), call.pointer("x"), elements(call.pointer("b")));
    let [rows, a_rows, lead, in_place] = call.ints(["rows", "a_rows", "lead", "in_place"]);
    let [ph, pw, height, width] = call.ints(["ph", "pw", "height", "width"]);
    let [x_n, x_d, x_h, x_w] = call.ints(["x_n", "x_d", "x_h", "x_w"]);
    let panels = call.int("chunks") * call.int("chunk_panels");
    move |part, [plane, row, panel]| {
        if let Some(a) = a {
            let from = (part * panels + panel) * a_rows + lead + plane * rows + row;
            return (0..e).map(|k| machine.read(a, from * e + k)).collect();
        }
        let (line, w) = (row.div_euclid(pw), row.rem_euclid(pw));
        let (sample, h) = (line.div_euclid(ph), line.rem_euclid(ph));
        let inside = (0..rows).contains(&row) && h < height && w < width;
        let from = plane * x_n + sample * x_d + h * x_h + w * x_w + panel * e;
        let there = |k: i64| inside && panel * e + k < in_place;
        (0..e).map(|k| if there(k) { machine.read(x, from + k) } else { 0.0 }).collect()
    }
}

/// Planes of the input are multiplied one after the other, each by all taps along depth.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    pack_along(call, machine, |panels| Packing {
        a_rows: call.int("a_rows"),
        lead: call.int("lead"),
        pitches: call.ints(["n", "ph", "pw"]),
        block: 1,
        sizes: call.ints(["planes", "n", "height", "width"]),
        strides: call.ints(["x_n", "x_c", "x_d", "x_h", "x_w"]),
        slices: 1,
        slice_in: panels * elements(call.pointer("b")),
        panels: call.int("chunks") * call.int("chunk_panels"),
        channel_panels: panels,
        out: call.pointer("a"),
    });
    check(call);
    let (bm, bn, taps) = (rows_of_tile(call), call.size("BN"), call.size("PLANES"));
    let [rows, planes, blocks, whole] = call.ints(["rows", "planes", "blocks", "whole"]);
    let (pieces, workers) = ((rows + bm - 1) / bm, call.grid[0] / blocks);
    // Of each piece the planes that somebody writes: all of whole ones, and of what is left each once.
    let left = (pieces - whole * workers) * planes;
    assert!(left >= 0, "more whole pieces than there are");
    for block in 0..blocks {
        let all = (0..whole * workers).map(|piece| (piece, 0, planes));
        let parts = (0..workers).flat_map(|worker| {
            let [first, last] = [worker, worker + 1].map(|worker| left * worker / workers);
            (0..2).map(move |turn| {
                let piece = first / planes + turn;
                let [from, to] = [first, last].map(|at| (at - piece * planes).clamp(0, planes));
                (whole * workers + piece, from, to)
            })
        });
        let work: Vec<_> = all.chain(parts).filter(|(_, from, to)| from < to).collect();
        // Of each piece those that have planes of it, each of which has statistics of its own.
        let mut shares = vec![0; pieces as usize];
        let written: i64 = work.iter().map(|(_, from, to)| to - from).sum();
        assert_eq!(written, pieces * planes, "a worker has planes of more than two pieces");
        for (piece, from, to) in work {
            let here = bm.min(rows - piece * bm);
            let end = if to == planes { planes + taps - 1 } else { to };
            // Sums of output planes, the first of them that of the first plane that is multiplied.
            let first = (from - taps + 1).max(0);
            let mut sums = vec![vec![0.0; (here * bn) as usize]; (end.max(to + taps - 1) - first) as usize];
            for plane in first..to {
                multiply(call, machine, [block, piece, plane], &mut sums[(plane - first) as usize..]);
            }
            let outputs: Vec<Output> = (from..end)
                .flat_map(|plane| {
                    finish(call, machine, &sums[(plane - first) as usize], [block, piece, plane])
                })
                .collect();
            let share = &mut shares[piece as usize];
            count(call, machine, [block, piece, *share], &outputs);
            *share += 1;
        }
        for (piece, shares) in shares.into_iter().enumerate() {
            // And nobody else has any.
            let others = if counts(call) { shares..call.int("part_phases") } else { 0..0 };
            others.for_each(|share| count(call, machine, [block, piece as i64, share], &[]));
        }
    }
}

/// Statistics of a share of a piece's planes.
fn count(call: &Call<'_>, machine: &mut Machine, [block, piece, share]: [i64; 3], outputs: &[Output]) {
    if !counts(call) {
        return;
    }
    let (bm, bn) = (rows_of_tile(call), call.size("BN"));
    let place = Place {
        tile: piece,
        tile_rows: bm,
        rows: piece * bm..call.int("rows").min((piece + 1) * bm),
        rows_of_sample: rows_of_sample(call),
        phase: share,
        channels: block * bn..call.int("channels").min((block + 1) * bn),
    };
    epilogue_statistics::count(call, machine, &place, outputs);
}

/// Adds the products of a plane to those output planes that it belongs to, the first of which is its own.
fn multiply(call: &Call<'_>, machine: &Machine, [block, piece, plane]: [i64; 3], sums: &mut [Vec<f64>]) {
    let (bm, bn, taps) = (rows_of_tile(call), call.size("BN"), call.size("PLANES"));
    let [rows, a_rows, lead, offset] = call.ints(["rows", "a_rows", "lead", "offset"]);
    let [h_kernel, back_h, w_kernel, w_step] = call.ints(["h_kernel", "back_h", "w_kernel", "w_step"]);
    let [panels, chunks] = call.ints(["chunk_panels", "chunks"]);
    let (b, operands) = (call.pointer("b"), operands(call, machine));
    let e = elements(b);
    let start = lead + plane * rows + piece * bm + offset;
    let length = bm + (w_kernel - 1) * w_step;
    assert!(
        start - (h_kernel - 1) * back_h >= 0 && start + length <= a_rows,
        "rows from {start} of {a_rows}"
    );
    let here = bm.min(rows - piece * bm);
    for (chunk, th) in (0..chunks).flat_map(|chunk| (0..h_kernel).map(move |th| (chunk, th))) {
        for (tw, panel) in (0..w_kernel).flat_map(|tw| (0..panels).map(move |panel| (tw, panel))) {
            let unit = ((block * chunks + chunk) * h_kernel + th) * w_kernel + tw;
            let row0 = piece * bm + offset - th * back_h + tw * w_step;
            for &([part_a, part_b], by) in products(call) {
                let inputs: Vec<Vec<f64>> = (0..here)
                    .map(|row| operands(part_a, [plane, row0 + row, chunk * panels + panel]))
                    .collect();
                let from_b = ((unit * panels + panel) * parts(call) + part_b) * taps * bn;
                for k in 0..e {
                    let inputs: Vec<f64> = inputs.iter().map(|row| row[k as usize]).collect();
                    for (td, sums) in (0..taps).zip(sums.iter_mut()) {
                        let weights: Vec<f64> =
                            (0..bn).map(|n| by * machine.read(b, (from_b + td * bn + n) * e + k)).collect();
                        let rows = inputs.iter().zip(sums.chunks_mut(bn as usize));
                        for (x, sums) in rows.filter(|(x, _)| **x != 0.0) {
                            sums.iter_mut().zip(&weights).for_each(|(sum, w)| *sum += x * w);
                        }
                    }
                }
            }
        }
    }
}

/// Writes what are outputs of a plane to y, with the bias and through the activation; what they are.
fn finish(
    call: &Call<'_>,
    machine: &mut Machine,
    sums: &[f64],
    [block, piece, plane]: [i64; 3],
) -> Vec<Output> {
    let bn = call.size("BN");
    let [ph, pw, channels] = call.ints(["ph", "pw", "channels"]);
    let [d_shift, d_out, h_shift, h_out, w_shift, w_out] =
        call.ints(["d_shift", "d_out", "h_shift", "h_out", "w_shift", "w_out"]);
    let [y_n, y_c, y_d, y_h, y_w] = call.ints(["y_n", "y_c", "y_d", "y_h", "y_w"]);
    let (y, bias) = (call.pointer("y"), call.pointer("bias"));
    let (function, first_row) = (activation(call, ["activation", "slope"]), piece * rows_of_tile(call));
    let of_columns: Vec<[f64; 2]> = (block * bn..((block + 1) * bn).min(channels))
        .map(|co| [scaled_back(call, machine, co), biased(call, machine, bias, co)])
        .collect();
    let mut outputs = Vec::new();
    for (at, &sum) in sums.iter().enumerate() {
        let row = first_row + at as i64 / bn;
        let co = block * bn + at as i64 % bn;
        let (line, n) = (row / pw, row / pw / ph);
        let [od, oh, ow] = [plane + d_shift, line - n * ph + h_shift, row % pw + w_shift];
        let inside = (0..d_out).contains(&od) && (0..h_out).contains(&oh) && (0..w_out).contains(&ow);
        if co < channels && inside {
            let [scale, add] = of_columns[at % bn as usize];
            let value = sum * scale + add;
            let value = through(function, value);
            machine.write(y, n * y_n + co * y_c + od * y_d + oh * y_h + ow * y_w, value);
            outputs.push(Output { row, channel: co, value });
        }
    }
    outputs
}

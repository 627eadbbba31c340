//! What the kernels of `interleave` do, given their arguments.

use super::contracts::{COARSE, LIFT, activate, biased, bits, scale};
use super::machine::{Call, Machine};

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let parts = if call.has("scale_w") { 2 } else { 1 };
    let columns = call.int("blocks") * call.size("BN");
    vec![("w", parts * weight_rows(call) * call.int("chunks") * call.size("BK")), ("scale_w", columns)]
}

/// Rows of a part of the packed weight: items of BN columns.
fn weight_rows(call: &Call<'_>) -> i64 {
    let [d_stride, h_stride, blocks] = call.ints(["d_stride", "h_stride", "blocks"]);
    d_stride * h_stride * blocks * call.size("BN")
}

/// What the sizes have to be, and the grid.
fn check(call: &Call<'_>) {
    let [n, cin, cout, depth, height, width] = call.ints(["n", "cin", "cout", "depth", "height", "width"]);
    let [d_stride, h_stride, w_stride, chunks, blocks, parts] =
        call.ints(["d_stride", "h_stride", "w_stride", "chunks", "blocks", "parts"]);
    let up = |size: i64, tile: &str| (size + call.size(tile) - 1) / call.size(tile);
    let tiles = if call.kernel().ends_with("_any") {
        assert!(call.size("PAIR") == 0 || (w_stride == 2 && call.size("LAST") == 0));
        n * up(depth * height * width, "BM")
    } else {
        let vector = call.size("VEC");
        let whole = |size: i64| size % vector == 0;
        let right = if call.size("LAST") == 0 {
            w_stride == 2 && whole(width)
        } else {
            whole(cin) && whole(w_stride * cout)
        };
        assert!(right && height % call.size("TH") == 0, "{}", call.variant.name);
        assert!(call.kernel().ends_with("_deep") || chunks == 1, "{}", call.variant.name);
        n * depth * (height / call.size("TH")) * up(width, "TW")
    };
    assert_eq!(call.grid, [tiles * parts, 1, 1], "{}", call.variant.name);
    assert!(
        parts <= d_stride * h_stride * blocks
            && blocks == up(cout * w_stride, "BN")
            && chunks == up(cin, "BK")
    );
}

/// Every position times every column: output channels and residues along width, for each pair of
/// residues along depth and height.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    check(call);
    let [n, cin, cout, depth, height, width] = call.ints(["n", "cin", "cout", "depth", "height", "width"]);
    let [d_stride, h_stride, w_stride, chunks, blocks] =
        call.ints(["d_stride", "h_stride", "w_stride", "chunks", "blocks"]);
    let [x, w, y, bias] = ["x", "w", "y", "bias"].map(|name| call.pointer(name));
    let (length, bn, last) = (chunks * call.size("BK"), call.size("BN"), call.size("LAST") == 1);
    let split = call.has("scale_w");
    let positions = depth * height * width;
    for (sample, at) in (0..n).flat_map(|sample| (0..positions).map(move |at| (sample, at))) {
        let from =
            |ci: i64| sample * cin * positions + if last { at * cin + ci } else { ci * positions + at };
        // Channels past the last are zeros.
        let row: Vec<f64> =
            (0..length).map(|ci| if ci < cin { machine.read(x, from(ci)) } else { 0.0 }).collect();
        if split {
            count_coarse(call, machine, &row);
        }
        let [d, h, pw] = [at / (height * width), at / width % height, at % width];
        for item in 0..d_stride * h_stride * blocks {
            let (pair, block) = (item / blocks, item % blocks);
            let [od, oh] = [d * d_stride + pair / h_stride, h * h_stride + pair % h_stride];
            for column in (0..bn).filter(|column| block * bn + column < cout * w_stride) {
                let of_all = block * bn + column;
                let (co, tw) = if last {
                    (of_all % cout, of_all / cout)
                } else {
                    (of_all / w_stride, of_all % w_stride)
                };
                let first = (item * bn + column) * length;
                let second = weight_rows(call) * length;
                let weight = |k: i64| {
                    let high = machine.read(w, first + k);
                    if split { high + machine.read(w, second + first + k) / LIFT } else { high }
                };
                let mut sum: f64 = row.iter().zip(0..).map(|(x, k)| x * weight(k)).sum();
                if split {
                    sum *= machine.read(call.pointer("scale_w"), of_all);
                }
                let value = activate(call, sum + biased(call, machine, bias, co), ["activation", "slope"]);
                let place = (od * height * h_stride + oh) * width * w_stride + pw * w_stride + tw;
                let voxels = positions * d_stride * h_stride * w_stride;
                let to = sample * cout * voxels + if last { place * cout + co } else { co * voxels + place };
                machine.write(y, to, value);
            }
        }
    }
}

/// Counts a position whose channels of a tile are all too small for the split, but not all zero.
fn count_coarse(call: &Call<'_>, machine: &mut Machine, row: &[f64]) {
    let control = call.pointer("control");
    let scale = scale(machine.read(control, 0));
    for tile in row.chunks(call.size("BK") as usize) {
        let most = tile.iter().map(|x| bits(x * scale)).fold(0.0, f64::max);
        if most > 0.0 && most < COARSE {
            machine.update(control, 2, |before| before + 1.0);
        }
    }
}

//! What `halo_gemm` writes between outputs on a lattice, given its arguments.

use super::contracts::{activation, biased, through};
use super::halo::rows_of_tile;
use super::machine::{Call, Machine};

const SECTOR: i64 = 32;
/// The most planes of a tile.
const PLANES: i64 = 8;

/// Whether it does.
pub fn is_asked(call: &Call<'_>) -> bool {
    call.has("place_bytes")
}

/// Bytes of shared memory, instead of those of staging areas.
pub fn bytes(call: &Call<'_>) -> i64 {
    let places = SECTOR / call.pointer("y").width as i64;
    128 + 32 * PLANES * places + places * call.int("place_bytes") + 3 * 2048
}

/// What its arguments have to be.
pub fn check(call: &Call<'_>) {
    let [advance, ph, pw, y_h, y_w] = call.ints(["advance", "ph", "pw", "y_h", "y_w"]);
    let [plane, head, past, depth] = call.ints(["y_plane", "y_head", "y_past", "y_depth"]);
    let [first, step] = call.ints(["y_first", "y_step"]);
    let width = call.pointer("y").width as i64;
    assert!(call.ints(["outputs", "block", "channels_first", "h_stride"]) == [1; 4]);
    assert!(call.int("activation") <= 2 && call.int("by_work") == 0 && call.int("ahead") == 0);
    let lines = advance / pw;
    assert!(advance % pw == 0 && lines > 0 && advance <= rows_of_tile(call));
    assert!((lines - 1) / ph + 2 <= PLANES);
    // What lies between lines of outputs holds a sector's start.
    assert!((y_h - past) * width >= SECTOR - width && y_w > 0 && head + past <= y_h);
    assert!(
        call.int("y_d") == step * plane && call.int("y_c") == depth * plane && (0..step).contains(&first)
    );
}

/// Writes what is between the outputs of a tile, and before and behind them in their planes as far as it is this tile's.
pub fn write(call: &Call<'_>, machine: &mut Machine, (row0, column_block, residues): (i64, i64, [i64; 2])) {
    let [rows, pd, ph, pw, advance] = call.ints(["rows", "pd", "ph", "pw", "advance"]);
    let [d_stride, d_shift, d_out] = call.ints(["d_stride", "d_shift", "d_out"]);
    let [h_shift, h_out, w_out] = call.ints(["h_shift", "h_out", "w_out"]);
    let [y_n, y_c, y_d, y_h, y_w] = call.ints(["y_n", "y_c", "y_d", "y_h", "y_w"]);
    let [plane, head, past, place_bytes] = call.ints(["y_plane", "y_head", "y_past", "place_bytes"]);
    let [blocks, channels] = call.ints(["blocks", "channels"]);
    let (line0, width) = (row0 / pw, call.pointer("y").width as i64);
    let end = (line0 + advance / pw).min(rows / pw);
    for (of_tile, number) in (line0 / ph..(end + ph - 1) / ph).enumerate() {
        let (n, od) = (number / pd, number % pd * d_stride + d_shift + residues[0]);
        let before = line0.max(number * ph);
        let first = (before - number * ph + h_shift).max(0);
        let last = (end.min((number + 1) * ph) - number * ph + h_shift).min(h_out);
        if first >= last || !(0..d_out).contains(&od) {
            continue;
        }
        let start = if first > 0 { (first - 1) * y_h + past } else { -head };
        let past_run = if last < h_out { (last - 1) * y_h + past } else { plane - head };
        let place = (before - line0 + of_tile as i64) * y_h * width + 2 * SECTOR * of_tile as i64;
        let room = (past_run - start) * width + 3 * SECTOR;
        assert!(place + room <= place_bytes, "a run of {room} bytes at {place} of {place_bytes}");
        let slice = column_block / blocks * channels;
        let of_block = column_block % blocks * call.size("BN");
        for co in slice + of_block..slice + channels.min(of_block + call.size("BN")) {
            let value = between(call, machine, co);
            for at in start..past_run {
                let [oh, ow] = [at.div_euclid(y_h), at.rem_euclid(y_h)];
                let is_output = ow % y_w == 0 && ow / y_w < w_out && (first..last).contains(&oh);
                if !is_output {
                    machine.write(call.pointer("y"), n * y_n + co * y_c + od * y_d + at, value);
                }
            }
        }
    }
}

/// Writes planes that have no outputs.
pub fn planes(call: &Call<'_>, machine: &mut Machine) {
    let [samples, slices, channels, plane] = call.ints(["n", "slices", "channels", "y_plane"]);
    let [head, depth, first, step] = call.ints(["y_head", "y_depth", "y_first", "y_step"]);
    for at in 0..samples * slices * channels {
        let value = between(call, machine, at % (slices * channels));
        for d in (0..depth).filter(|d| *d < first || (d - first) % step > 0) {
            for element in 0..plane {
                let to = (at * depth + d - first) * plane - head + element;
                machine.write(call.pointer("y"), to, value);
            }
        }
    }
}

fn between(call: &Call<'_>, machine: &Machine, channel: i64) -> f64 {
    through(activation(call, ["activation", "slope"]), biased(call, machine, call.pointer("bias"), channel))
}

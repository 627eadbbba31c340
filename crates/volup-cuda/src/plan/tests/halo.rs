//! What the kernels of `halo_gemm` do, given their arguments.

use super::contracts::{
    COARSE, FINITE, LIFT, Taps, activation, biased, bits, column_is, defines, put_parts, raise, scale,
    through,
};
use super::epilogue_statistics::{self, Output, Place, counts, rows_of_sample};
use super::gather::{blocks_of_team, brought_bytes, teams};
use super::gradient::stands;
use super::halo_between;
use super::machine::{Call, Machine, Pointer};
use super::norm_behind::{self, Written};
use super::operand::{halves, is_out_of_range, split};
use crate::plan::Buffer;

/// What a block may have of a multiprocessor's shared memory, by how many blocks share it.
pub const SHARED: [i64; 2] = [232_448, 115_712];
/// The most stages that the barriers' memory has room for.
pub const MOST_STAGES: i64 = 60;

/// Elements of 16 bytes.
pub fn elements(pointer: Pointer) -> i64 {
    16 / pointer.width as i64
}

/// Parts of an operand's elements.
pub fn parts(call: &Call<'_>) -> i64 {
    if matches!(call.size("KIND"), 2 | 3) { 2 } else { 1 }
}

/// The parts of both operands that are multiplied, and what their products count: high by high; low by high and high by low, which two fp16
/// have lifted.
pub fn products(call: &Call<'_>) -> &'static [([i64; 2], f64)] {
    match call.size("KIND") {
        2 => &[([0, 0], 1.0), ([1, 0], 1.0 / LIFT), ([0, 1], 1.0 / LIFT)],
        3 => &[([0, 0], 1.0), ([1, 0], 1.0), ([0, 1], 1.0)],
        _ => &[([0, 0], 1.0)],
    }
}

/// Whether float32 is scaled to what fp16 has.
fn scaled(call: &Call<'_>) -> bool {
    matches!(call.size("KIND"), 2 | 5)
}

/// What the input is scaled by while not all of it is looked at: by what some of it has shown, if that is not zero.
fn sample_scale(call: &Call<'_>, machine: &Machine) -> f64 {
    let some = machine.read(call.pointer("control"), 4);
    let room = if call.size("KIND") == 2 { 1 } else { 4 };
    if some == 0.0 { 1.0 } else { scale(some + f64::from(room << 23)) }
}

/// Whether two fp16 scaled so do not hold all of it, as far as it is finite.
fn is_beyond_sample(call: &Call<'_>, machine: &Machine) -> bool {
    let [all, some] = [0, 4].map(|at| machine.read(call.pointer("control"), at));
    let exponent = |bits: f64| bits as i32 >> 23;
    all > 0.0 && all <= FINITE && (some == 0.0 || exponent(all) > exponent(some) + 1)
}

/// What the input is scaled by when it is packed.
pub fn input_scale(call: &Call<'_>, machine: &Machine) -> f64 {
    if call.size("KIND") == 2 && is_beyond_sample(call, machine) {
        scale(machine.read(call.pointer("control"), 0))
    } else {
        sample_scale(call, machine)
    }
}

/// What sums of a column are scaled back by; 1 where nothing is.
pub fn scaled_back(call: &Call<'_>, machine: &Machine, column: i64) -> f64 {
    if !scaled(call) {
        return 1.0;
    }
    machine.read(call.pointer("scale_w"), column) / input_scale(call, machine)
}

/// Whether the bits of a position's largest magnitude, scaled, are of what one fp16, or two, cannot hold.
fn is_coarse(call: &Call<'_>, most: f64) -> bool {
    let held =
        if call.size("KIND") == 2 { COARSE..f64::INFINITY } else { bits(0.5f64.powi(14))..bits(65520.0) };
    most > 0.0 && !held.contains(&most)
}

/// Writes 16 bytes of an operand in its parts, and returns the bits of the largest magnitude: of one that two tf32
/// have not bits enough for those of an infinity.
fn put_operand(call: &Call<'_>, machine: &mut Machine, to: [(Pointer, i64); 2], values: &[f64]) -> f64 {
    for (e, &value) in (0..).zip(values) {
        let [high, low] = to.map(|(out, at)| (out, at + e));
        let parts = match call.size("KIND") {
            3 => split(2, value),
            // What is multiplied by two fp16 that are rounded is, too.
            2 if call.has("w") && call.pointer("w").buffer == Buffer::Workspace => halves(value, LIFT),
            kind => {
                put_parts(machine, [high, low], kind == 2, value);
                continue;
            }
        };
        for ((out, at), value) in [high, low].into_iter().zip(parts) {
            machine.write(out, at, value);
        }
    }
    let most = values.iter().copied().map(bits).fold(0.0, f64::max);
    let undefined = call.size("KIND") == 3 && is_out_of_range(2, values.iter().copied());
    if undefined { most.max(FINITE + 1.0) } else { most }
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    let product = |names: &[&str]| names.iter().map(|name| call.int(name)).product::<i64>();
    match call.kernel() {
        "halo_pack_input" => {
            let pieces = parts(call) * product(&["slices", "panels", "a_rows"]);
            vec![("out", pieces * elements(call.pointer("out"))), ("unless", 2)]
        }
        "halo_pack_weight" => {
            let columns = call.grid[2] * product(&["blocks", "columns"]);
            let panels = product(&["d_kernel", "h_kernel", "w_steps", "chunks", "chunk_panels"]);
            let pieces = parts(call) * columns * panels;
            vec![("out", pieces * elements(call.pointer("out"))), ("scale_w", columns / call.int("taps"))]
        }
        _ => {
            let a = parts(call) * product(&["slices", "chunks", "chunk_panels", "a_rows"]);
            let columns = product(&["slices", "blocks"]) * call.size("BN");
            let taps = product(&["d_kernel", "h_kernel", "w_steps", "chunks", "chunk_panels"]);
            let e = elements(call.pointer("a"));
            let scales = columns / of_tap(call)[0];
            let control = ("control", 10 + call.int("pieces"));
            let control = if call.int("ahead") > 0 { control } else { ("control", 5) };
            let b = parts(call) * columns * taps * e;
            let mut found = vec![("a", a * e), ("b", b), control, ("scale_w", scales), ("unless", 2)];
            found.extend(epilogue_statistics::extents(call));
            found
        }
    }
}

/// Taps along width that are columns of a tile, and the columns of one.
fn of_tap(call: &Call<'_>) -> [i64; 2] {
    let taps = call.variant.param("TAPS").unwrap_or(1);
    [taps, call.size("BN") / taps]
}

/// Does what a launch does.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    if stands(call, machine, "unless") {
        return;
    }
    match call.kernel() {
        "halo_pack_input" => pack_input(call, machine),
        "halo_pack_weight" => pack_weight(call, machine),
        _ => {
            pack_along(call, machine, |panels| Packing {
                a_rows: call.int("a_rows"),
                lead: call.int("lead"),
                pitches: call.ints(["pd", "ph", "pw"]),
                block: call.int("block"),
                sizes: call.ints(["n", "d_input", "height", "width"]),
                strides: call.ints(["x_n", "x_c", "x_d", "x_h", "x_w"]),
                slices: 1,
                slice_in: panels / call.int("block") * elements(call.pointer("a")),
                panels: call.int("chunks") * call.int("chunk_panels"),
                channel_panels: panels / call.int("block"),
                out: call.pointer("a"),
            });
            if !defines(call, machine) {
                multiply(call, machine);
            }
        }
    }
}

/// How an input is packed, by a launch of its own or beside products.
pub struct Packing {
    /// Rows of a panel, and those before the first position.
    pub a_rows: i64,
    pub lead: i64,
    /// Rows from a plane, line and position to the next, and positions of a row.
    pub pitches: [i64; 3],
    pub block: i64,
    /// Samples and voxels along each axis, and their strides with the channels'.
    pub sizes: [i64; 4],
    pub strides: [i64; 5],
    pub slices: i64,
    pub slice_in: i64,
    pub panels: i64,
    pub channel_panels: i64,
    pub out: Pointer,
}

fn pack_input(call: &Call<'_>, machine: &mut Machine) {
    let lanes = call.int("lanes");
    let packing = Packing {
        a_rows: call.int("a_rows"),
        lead: call.int("lead"),
        pitches: call.ints(["pd", "ph", "pw"]),
        block: call.int("block"),
        sizes: call.ints(["n", "depth", "height", "width"]),
        strides: call.ints(["x_n", "x_c", "x_d", "x_h", "x_w"]),
        slices: call.int("slices"),
        slice_in: call.int("slice_in"),
        panels: call.int("panels"),
        channel_panels: call.int("channel_panels"),
        out: call.pointer("out"),
    };
    assert!([1, 2, 4, 8, 16, 32].contains(&lanes) && call.grid[0] > 0 && call.grid[1..] == [1, 1]);
    let staged = lanes == 1 && call.int("x_c") == 1 && !scaled(call);
    assert_eq!(call.shared, if staged { 32_768 } else { 0 });
    let again = call.has("again") && call.int("again") == 1;
    if again {
        // It waits for those before it.
        machine.await_writes();
        if !is_beyond_sample(call, machine) {
            return;
        }
    }
    let by = match call.size("KIND") {
        2 if !again => sample_scale(call, machine),
        2 | 5 => input_scale(call, machine),
        _ => 1.0,
    };
    pack(call, machine, &packing, by);
}

/// What a product packs beside its work, if it does: of one slice, whose channels fill its panels, by pieces of so many
/// units of a line's positions.
pub fn pack_along(call: &Call<'_>, machine: &mut Machine, packing: impl FnOnce(i64) -> Packing) {
    let [units, before, shift, pieces, ahead] = call.ints(["units", "before", "shift", "pieces", "ahead"]);
    assert!(ahead >= 0);
    if ahead == 0 {
        return;
    }
    let packing = packing(call.int("panels"));
    let e = elements(packing.out);
    let voxels = unit(call);
    let ([.., pitch], block) = (packing.pitches, packing.block);
    assert!(call.size("CTAS") == 1 && !call.has("class_panels") && parts(call) == 1);
    assert!(
        (!call.has("slices") || call.int("slices") == 1) && packing.panels == block * packing.channel_panels
    );
    assert_eq!(packing.slice_in, packing.channel_panels * e);
    let up = |a: i64, b: i64| (a + b - 1) / b;
    assert!(units == up(pitch * block, voxels) && before == up(packing.lead, pitch));
    assert!((3..=5).contains(&shift) && packing.channel_panels % (32 >> shift) == 0);
    assert!(pieces << shift >= (before + up(packing.a_rows - packing.lead, pitch)) * units);
    // A turn of all blocks is less than what may be packed ahead.
    assert!((ahead << shift) * voxels >= (call.grid[0] * rows_of_tile(call)).min(packing.a_rows) * block);
    let control = call.pointer("control");
    for word in 8..10 + pieces {
        assert_eq!(machine.read(control, word), 0.0, "word {word} is not clear");
        machine.write(control, word, 1.0);
    }
    let by = if scaled(call) { input_scale(call, machine) } else { 1.0 };
    pack(call, machine, &packing, by);
    machine.await_writes();
}

/// Panel `slice*panels + parity*channel_panels + c/E` of row `lead + R` holds channels of the slice, of
/// the input at (n, jd, jh, jb*block + parity), scaled by a power of two. All else is zero.
fn pack(call: &Call<'_>, machine: &mut Machine, packing: &Packing, by: f64) {
    let &Packing { a_rows, lead, block, slices, slice_in, panels, channel_panels, out, .. } = packing;
    let ([pd, ph, pw], [n, depth, height, width]) = (packing.pitches, packing.sizes);
    let [x_n, x_c, x_d, x_h, x_w] = packing.strides;
    let x = call.pointer("x");
    let e = elements(out);
    assert!(block * channel_panels <= panels && slice_in <= channel_panels * e);
    let (mut most, mut coarse) = (0.0, 0.0);
    for row in 0..a_rows {
        let at = row - lead;
        let (line, jb) = (at.div_euclid(pw), at.rem_euclid(pw));
        let (plane, ih) = (line.div_euclid(ph), line.rem_euclid(ph));
        let (sample, id) = (plane.div_euclid(pd), plane.rem_euclid(pd));
        let line_here = at >= 0 && sample < n && id < depth && ih < height;
        let mut here = vec![0.0; block as usize];
        for (slice, panel) in (0..slices).flat_map(|slice| (0..panels).map(move |panel| (slice, panel))) {
            let (parity, first) = (panel / channel_panels, panel % channel_panels * e);
            let iw = jb * block + parity;
            let value = |c: i64| {
                let real = line_here && parity < block && iw < width && c < slice_in;
                let from = sample * x_n + (slice * slice_in + c) * x_c + id * x_d + ih * x_h + iw * x_w;
                if real { machine.read(x, from) } else { 0.0 }
            };
            let values: Vec<f64> = (first..first + e).map(value).collect();
            if call.size("KIND") == 2 {
                most = values.iter().copied().map(bits).fold(most, f64::max);
            }
            // What two fp16 do not hold shows: it is packed once more.
            let held = |value: f64| call.size("KIND") != 2 || value.abs() < 32768.0;
            let scaled = |value: f64| if held(value * by) { value * by } else { f64::INFINITY };
            let values: Vec<f64> = values.into_iter().map(scaled).collect();
            let to = |part: i64| (((part * slices + slice) * panels + panel) * a_rows + row) * e;
            let largest = put_operand(call, machine, [(out, to(0)), (out, to(1))], &values);
            if parity < block {
                here[parity as usize] = largest.max(here[parity as usize]);
            }
        }
        for here in here {
            most = if scaled(call) { most } else { here.max(most) };
            coarse += f64::from(scaled(call) && is_coarse(call, here));
        }
    }
    if scaled(call) {
        machine.update(call.pointer("control"), 2, |before| before + coarse);
    }
    // Rows of a sweep in 16 bits meet the weights of their taps only.
    let asks = call.size("KIND") != 0 || call.kernel() != "halo_sweep";
    if call.size("KIND") != 5 && asks && call.given("control").is_some() {
        raise(call, machine, 0, most);
    }
}

/// Tiles of `chunk_panels` panels of `columns` rows in the order [slice][column block][td][chunk][th][step].
fn pack_weight(call: &Call<'_>, machine: &mut Machine) {
    let [chunk_panels, chunks, columns, blocks] = call.ints(["chunk_panels", "chunks", "columns", "blocks"]);
    let [channels, slice_in, in_per_group, out_per_group] =
        call.ints(["channels", "slice_in", "in_per_group", "out_per_group"]);
    let [outputs, first] = call.ints(["outputs", "channels_first"]);
    let [block, channel_panels, w_first, w_stride, w_dilation] =
        call.ints(["block", "channel_panels", "w_first", "w_stride", "w_dilation"]);
    let [d_kernel, h_kernel, w_kernel] = call.ints(["d_kernel", "h_kernel", "w_kernel"]);
    let [w_low, w_steps, w_step, taps, sweeps] = call.ints(["w_low", "w_steps", "w_step", "taps", "sweeps"]);
    let (w, out) = (call.pointer("w"), call.pointer("out"));
    let e = elements(out);
    let tiles = call.grid[2] * blocks * d_kernel * chunks * h_kernel * w_steps;
    assert!(outputs == block * w_stride && columns % taps == 0 && [0, 1].contains(&sweeps));
    assert!(block * channel_panels <= chunks * chunk_panels && slice_in <= channel_panels * e);
    assert!(channels % out_per_group == 0 && channels / out_per_group * in_per_group == slice_in);
    let of_tap = columns / taps;
    // A block's share: every column is in one.
    let [run, lines, line_runs, pitch, each] = call.ints(["run", "lines", "line_runs", "pitch", "each"]);
    let all = blocks * columns;
    let held = match (taps, first) {
        (1, 1) => [(all + outputs - 1) / outputs, outputs],
        (1, _) => [channels, (all + channels - 1) / channels],
        _ => [blocks * of_tap, taps],
    };
    assert!(run > 0 && lines > 0 && each == held[1]);
    assert_eq!(line_runs, (d_kernel * h_kernel + lines - 1) / lines);
    assert_eq!(call.grid[..2], [(held[0] + run - 1) / run * line_runs, chunks * chunk_panels]);
    assert!(pitch >= lines * w_kernel);
    assert_eq!(call.shared, run * pitch * 16 * parts(call));
    let mut most = 0.0;
    for tile in 0..tiles {
        let (rest, step) = (tile / w_steps, tile % w_steps);
        let (rest, th) = (rest / h_kernel, rest % h_kernel);
        let (rest, chunk) = (rest / chunks, rest % chunks);
        let (all_blocks, td) = (rest / d_kernel, rest % d_kernel);
        let slice = all_blocks / blocks;
        for (panel, row) in (0..chunk_panels).flat_map(|panel| (0..columns).map(move |row| (panel, row))) {
            let inner = if first == 1 { outputs } else { channels };
            let (co, rr) = if taps > 1 {
                (all_blocks % blocks * of_tap + row % of_tap, 0)
            } else {
                column_is(call, all_blocks % blocks * columns + row, inner, first == 1)
            };
            let of_slice = chunk * chunk_panels + panel;
            let (parity, first_c) = (of_slice / channel_panels, of_slice % channel_panels * e);
            // What the step reads lies so far from the row's first position.
            let apart = (w_low + step * w_step) * block + parity;
            let (jj, residue) = (rr / w_stride, rr % w_stride);
            // Of a tap that has a column of its own, its own.
            let reach = match taps {
                1 => w_stride * (jj + w_first - apart) + residue,
                _ => row / of_tap * w_dilation,
            };
            let tap_here = parity < block
                && reach >= 0
                && (taps > 1 || apart <= jj + w_first)
                && reach % w_dilation == 0
                && reach / w_dilation < w_kernel;
            let value = |c: i64| {
                let (ci, co_all) = (slice * slice_in + c, slice * channels + co);
                let real = tap_here && co < channels && rr < outputs && c < slice_in;
                if !real || ci / in_per_group != co_all / out_per_group {
                    return 0.0;
                }
                let pair = ci * out_per_group + co_all % out_per_group;
                let tap = (td * h_kernel + th) * w_kernel + reach / w_dilation;
                machine.read(w, pair * d_kernel * h_kernel * w_kernel + tap)
            };
            let by = if scaled(call) {
                machine.read(call.pointer("scale_w"), all_blocks * of_tap + row % of_tap)
            } else {
                1.0
            };
            let values: Vec<f64> = (first_c..first_c + e).map(|c| value(c) / by).collect();
            // Where taps along depth are columns, those of a tile of all of them.
            let at = ((all_blocks * chunks + chunk) * h_kernel + th) * w_steps + step;
            let (at, columns, row) =
                if sweeps == 1 { (at, d_kernel * columns, td * columns + row) } else { (tile, columns, row) };
            let to = |part: i64| (((at * chunk_panels + panel) * parts(call) + part) * columns + row) * e;
            most = put_operand(call, machine, [(out, to(0)), (out, to(1))], &values).max(most);
        }
    }
    if call.has("control") {
        raise(call, machine, 1, most);
    }
}

/// Positions of a unit of what packs the input beside products.
fn unit(call: &Call<'_>) -> i64 {
    if call.kernel() == "halo_sweep" { 16 / call.pointer("x").width as i64 } else { 4 }
}

/// Bytes of shared memory of the warps that pack the input beside products.
pub fn packer_bytes(call: &Call<'_>) -> i64 {
    let width = call.pointer("x").width as i64;
    let rounds = if call.has("pack_rounds") { call.int("pack_rounds") } else { 2 };
    if call.int("ahead") > 0 { 3 * 256 * unit(call) * rounds * width } else { 0 }
}

/// Rows of a tile.
pub fn rows_of_tile(call: &Call<'_>) -> i64 {
    64 * call.size("MI") * call.size("WGS")
}

/// What the sizes, the grid and the shared memory have to be.
fn check(call: &Call<'_>) {
    let [bn, mi, ctas, wgs] = ["BN", "MI", "CTAS", "WGS"].map(|name| call.size(name));
    let [a_stages, stage_rows, b_stages, unit_steps] =
        call.ints(["a_stages", "stage_rows", "b_stages", "unit_steps"]);
    let [chunk_panels, chunks, w_steps] = call.ints(["chunk_panels", "chunks", "w_steps"]);
    let [d_kernel, h_kernel, slices, blocks] = call.ints(["d_kernel", "h_kernel", "slices", "blocks"]);
    let row_bytes = parts(call) * chunk_panels * 16;
    let unit = unit_steps * row_bytes * bn;
    let staging = if halo_between::is_asked(call) {
        halo_between::check(call);
        halo_between::bytes(call)
    } else {
        wgs * (4096 * mi + 1024)
    };
    let tables = wgs * 16 * bn + staging;
    let edges = if call.has("w_reach") { 32 * wgs * bn * call.int("w_reach") } else { 0 };
    let packers = packer_bytes(call);
    let rings = a_stages * row_bytes * stage_rows + b_stages * unit;
    let shared = 4096 + tables + edges + rings + packers + brought_bytes(call);
    assert_eq!(call.shared, shared);
    let team = blocks_of_team(call);
    assert!(team == 1 || chunks >= team && call.int("resident") == 0 && a_stages + b_stages <= 54);
    // The producer is a warp, or where the block is alone a warpgroup.
    let threads = 128 * wgs + if ctas == 1 { 128 } else { 32 };
    assert!(shared <= SHARED[ctas as usize - 1] && i64::from(call.variant.threads) == threads);
    assert!(a_stages >= 2 && b_stages >= 2 && a_stages + b_stages <= MOST_STAGES);
    assert!(stage_rows % 8 == 0 && chunk_panels % 2 == 0 && (unit_steps == 1 || unit_steps == w_steps));
    assert!(call.grid[0] > 0 && call.grid[1..] == [1, 1]);
    assert!([0, 1].contains(&call.int("resident")) && [0, 1].contains(&call.int("by_work")));
    if call.int("by_work") == 1 {
        let strides = call.int("d_stride") * call.int("h_stride");
        assert_eq!(call.grid[0] % (slices * blocks * strides), 0);
    }
    if call.int("resident") == 1 {
        let units = d_kernel * chunks * h_kernel * w_steps / unit_steps;
        assert!(b_stages >= units && call.grid[0] % (slices * blocks) == 0);
    }
    if call.has("w_reach") {
        // What a tile has no sums of is the next one's, which starts where whole sectors do.
        let [advance, reach, stride] = [call.int("advance"), call.int("w_reach"), call.size("W_STRIDE")];
        let ahead = rows_of_tile(call) - advance;
        assert!((reach..=16).contains(&ahead) && ahead % 8 == 0 && (1..=8).contains(&reach));
        let lies = [call.int("outputs"), w_steps, unit_steps];
        assert!(lies == [stride, 1, 1] && (call.int("channels_first") == 1 || stride == 1));
    }
    assert!(!call.has("promote") || call.int("promote") > 0);
    if counts(call) {
        norm_behind::check(call);
        let [outputs, first, joined] = call.ints(["outputs", "channels_first", "joined"]);
        assert!(ctas == 1 && (outputs == 1 || outputs == 2 && first == 1) && joined * outputs <= 32);
        assert!(bn % (joined * outputs) == 0 && call.int("rows") % rows_of_sample(call) == 0);
    }
    if call.has("class_panels") {
        let strides = call.ints(["d_stride", "h_stride", "slices"]);
        assert!(call.int("class_panels") % chunk_panels == 0 && chunks <= 512 && strides == [1; 3]);
        assert!(
            ["classes_h", "classes_w", "full_d", "full_h", "full_w"].iter().all(|name| call.int(name) > 0)
        );
    }
}

/// Whether the channels of a chunk lack the first tap along depth, that along height, and the last step along width.
fn lacking(call: &Call<'_>, chunk: i64) -> [bool; 3] {
    if !call.has("class_panels") {
        return [false; 3];
    }
    let [class_panels, classes_h, classes_w] = call.ints(["class_panels", "classes_h", "classes_w"]);
    let class = chunk * call.int("chunk_panels") / class_panels;
    let j = [class / classes_w / classes_h, class / classes_w % classes_h, class % classes_w];
    [0, 1, 2].map(|axis| j[axis] >= call.int(["full_d", "full_h", "full_w"][axis]))
}

/// A stage: rows of a chunk's panels, as 16 bytes each. What is past the last position need not be anything.
fn stage(
    call: &Call<'_>,
    machine: &Machine,
    [part, slice, chunk]: [i64; 3],
    from: i64,
    rows: i64,
) -> Vec<f64> {
    let [a_rows, slices, chunks, panels] = call.ints(["a_rows", "slices", "chunks", "chunk_panels"]);
    let filled = call.int("lead") + call.int("rows");
    let (a, first) = (call.pointer("a"), ((part * slices + slice) * chunks + chunk) * panels);
    let e = elements(a);
    assert!(rows <= call.int("stage_rows"), "{rows} rows of a stage");
    assert!(from >= 0 && from + rows <= a_rows, "rows {from} to {} of {a_rows}", from + rows);
    let pieces =
        (first..first + panels).flat_map(|panel| (from..from + rows).map(move |row| panel * a_rows + row));
    // What somebody else has packed leaves these as they were before.
    let x = call.pointer("x");
    let packed = (x.buffer, x.at) == (a.buffer, a.at);
    let read = |piece: i64, at| {
        let past = packed && piece % a_rows >= filled;
        if past { f64::NAN } else { machine.read(a, at) }
    };
    pieces.flat_map(|piece| (piece * e..(piece + 1) * e).map(move |at| read(piece, at))).collect()
}

/// A tile's phase: blocks turn through all of them, or of those in order of their taps to that as far from the other end.
fn phase_of(call: &Call<'_>, at: i64, turn: i64) -> i64 {
    let [d_stride, h_stride] = call.ints(["d_stride", "h_stride"]);
    let phases = d_stride * h_stride;
    if call.int("by_work") == 0 {
        return (at + turn) % phases;
    }
    let taps = |phase: i64| {
        Taps::new(call, "d", phase / h_stride).count * Taps::new(call, "h", phase % h_stride).count
    };
    let mut order: Vec<i64> = (0..phases).collect();
    order.sort_by_key(|&phase| -taps(phase));
    order[(if turn % 2 == 1 { phases - 1 - at } else { at }) as usize]
}

/// Rows are positions, or blocks of them, columns are channels and residues along width; residues along
/// depth and height are in the tile's number.
fn multiply(call: &Call<'_>, machine: &mut Machine) {
    check(call);
    let (bm, bn) = (rows_of_tile(call), call.size("BN"));
    let [rows, lead, pd, ph, pw, d_input] = call.ints(["rows", "lead", "pd", "ph", "pw", "d_input"]);
    let [d_stride, h_stride, d_kernel, h_kernel] =
        call.ints(["d_stride", "h_stride", "d_kernel", "h_kernel"]);
    let [d_first, h_first, w_low, w_steps, w_step] =
        call.ints(["d_first", "h_first", "w_low", "w_steps", "w_step"]);
    let [panels, chunks, slices, blocks] = call.ints(["chunk_panels", "chunks", "slices", "blocks"]);
    let b = call.pointer("b");
    let (e, parts, all, phases) = (elements(b), parts(call), slices * blocks, d_stride * h_stride);
    let advance = if call.has("advance") { call.int("advance") } else { bm };
    let reach = if call.has("w_reach") { call.int("w_reach") } else { 0 };
    let turn = (teams(call) / (all * phases)).max(1);
    let mut written = Vec::new();
    for tile in 0..(rows + advance - 1) / advance * phases * all {
        let (column_block, row_tile) = (tile % all, tile / all / phases);
        let (phase, row0) = (phase_of(call, tile / all % phases, row_tile / turn), row_tile * advance);
        let residues = [phase / h_stride, phase % h_stride];
        let [depth, height] =
            [("d", residues[0]), ("h", residues[1])].map(|(axis, r)| Taps::new(call, axis, r));
        let here = bm.min(rows - row0 + reach);
        let mut sum = vec![0.0; (here * bn) as usize];
        for (td, chunk) in (0..depth.count).flat_map(|td| (0..chunks).map(move |chunk| (td, chunk))) {
            // The planes that rows read, wherever along height.
            let plane = |row: i64| row / (ph * pw) + d_first - depth.offset - td * depth.back;
            let gap = |plane: i64| plane < 0 || plane % pd >= d_input;
            if (plane(row0)..=plane(row0 + here - 1)).all(gap) {
                continue;
            }
            let start = |th: i64| {
                let line = (d_first - depth.offset - td * depth.back) * ph + h_first - height.offset;
                lead + row0 + (line - th * height.back) * pw + w_low
            };
            let [lacks_d, lacks_h, lacks_w] = lacking(call, chunk);
            if td == 0 && lacks_d {
                continue;
            }
            let (h_start, there) = (i64::from(lacks_h), w_steps - i64::from(lacks_w));
            let together = if call.int("whole_h") == 1 { (height.count - h_start).max(1) } else { 1 };
            for first in (h_start..height.count).step_by(together as usize) {
                let last = first + together - 1;
                let from = start(last);
                let length = bm + start(first) - from + (w_steps - 1) * w_step;
                let slice = column_block / blocks;
                let stages: Vec<Vec<f64>> =
                    (0..parts).map(|part| stage(call, machine, [part, slice, chunk], from, length)).collect();
                for (th, step) in (first..=last).flat_map(|th| (0..there).map(move |step| (th, step))) {
                    let at = start(th) - from + step * w_step;
                    let tap = [depth.first + td * depth.step, height.first + th * height.step];
                    let unit = ((column_block * d_kernel + tap[0]) * chunks + chunk) * h_kernel + tap[1];
                    let from_b = (unit * w_steps + step) * parts * panels * bn * e;
                    for &([part_a, part_b], by) in products(call) {
                        for (panel, k) in (0..panels).flat_map(|panel| (0..e).map(move |k| (panel, k))) {
                            let column = |column: i64| ((panel * parts + part_b) * bn + column) * e + k;
                            let weights: Vec<f64> =
                                (0..bn).map(|n| machine.read(b, from_b + column(n)) * by).collect();
                            for (row, sum) in sum.chunks_mut(bn as usize).enumerate() {
                                let piece = panel * length + at + row as i64;
                                let x = stages[part_a as usize][(piece * e + k) as usize];
                                if x != 0.0 {
                                    sum.iter_mut().zip(&weights).for_each(|(sum, w)| *sum += x * w);
                                }
                            }
                        }
                    }
                }
            }
        }
        let [_, channels] = of_tap(call);
        let scales: Vec<f64> =
            (0..channels).map(|at| scaled_back(call, machine, column_block * channels + at)).collect();
        for (at, sum) in (0..).zip(&mut sum) {
            *sum *= scales[(at % bn % channels) as usize];
        }
        if call.has("w_reach") {
            sum = folded(call, &sum, advance.min(rows - row0));
        }
        if halo_between::is_asked(call) {
            sum.truncate((advance * bn) as usize);
            halo_between::write(call, machine, (row0, column_block, residues));
        }
        finish(call, machine, &sum, (row0, column_block, residues), &mut written);
    }
    if halo_between::is_asked(call) {
        halo_between::planes(call, machine);
    }
    if norm_behind::is_asked(call) {
        norm_behind::finish(call, machine, &written);
    }
}

/// Sums of so many rows: a row's products with a tap belong to a row before it. Columns are channels, then residues.
fn folded(call: &Call<'_>, products: &[f64], rows: i64) -> Vec<f64> {
    let ([taps, channels], bn, stride) = (of_tap(call), call.size("BN"), call.size("W_STRIDE"));
    let [dilation, reach] = call.ints(["w_dilation", "w_reach"]);
    let mut sums = vec![0.0; (rows * channels * stride) as usize];
    for (tap, row) in (0..taps).flat_map(|tap| (0..rows).map(move |row| (tap, row))) {
        let ahead = (reach - tap * dilation / stride).max(0);
        for channel in 0..channels {
            let from = (row + ahead) * bn + tap * channels + channel;
            sums[((row * channels + channel) * stride + tap % stride) as usize] += products[from as usize];
        }
    }
    sums
}

/// Writes what are outputs of a tile to y, with the bias and through the activation, or says what would be.
fn finish(
    call: &Call<'_>,
    machine: &mut Machine,
    sum: &[f64],
    (row0, column_block, residues): (i64, i64, [i64; 2]),
    written: &mut Vec<Written>,
) {
    let [pd, ph, pw, blocks, channels, outputs] =
        call.ints(["pd", "ph", "pw", "blocks", "channels", "outputs"]);
    let [d_stride, d_shift, d_out] = call.ints(["d_stride", "d_shift", "d_out"]);
    let [h_stride, h_shift, h_out] = call.ints(["h_stride", "h_shift", "h_out"]);
    let [w_shift, w_out, first] = call.ints(["w_shift", "w_out", "channels_first"]);
    let [y_n, y_c, y_d, y_h, y_w] = call.ints(["y_n", "y_c", "y_d", "y_h", "y_w"]);
    let (y, bias) = (call.pointer("y"), call.pointer("bias"));
    let bn = of_tap(call)[1] * call.variant.param("W_STRIDE").unwrap_or(1);
    let function = activation(call, ["activation", "slope"]);
    let biases: Vec<f64> =
        (0..channels).map(|co| biased(call, machine, bias, co + column_block / blocks * channels)).collect();
    let is_asked = norm_behind::is_asked(call);
    let mut counted = Vec::new();
    for (at, &sum) in sum.iter().enumerate() {
        let row = row0 + at as i64 / bn;
        let column = column_block % blocks * bn + at as i64 % bn;
        let inner = if first == 1 { outputs } else { channels };
        let (co, rr) = column_is(call, column, inner, first == 1);
        let (line, jb) = (row / pw, row % pw);
        let (plane, jh) = (line / ph, line % ph);
        let (n, jd) = (plane / pd, plane % pd);
        let [od, oh] = [jd * d_stride + d_shift + residues[0], jh * h_stride + h_shift + residues[1]];
        let ow = jb * outputs + rr + w_shift;
        let inside = (0..d_out).contains(&od) && (0..h_out).contains(&oh) && (0..w_out).contains(&ow);
        if co < channels && rr < outputs && inside {
            let value = sum + biases[co as usize];
            let value = through(function, value);
            let co = co + column_block / blocks * channels;
            let to = n * y_n + co * y_c + od * y_d + oh * y_h + ow * y_w;
            if is_asked {
                written.push(Written { sample: n, channel: co, to, value });
            } else {
                machine.write(y, to, value);
            }
            counted.push(Output { row, channel: co, value });
        }
    }
    if counts(call) {
        let (tile_rows, of_tile) = (rows_of_tile(call), bn / outputs);
        let (slice, first) = (column_block / blocks * channels, column_block % blocks * of_tile);
        let place = Place {
            tile: row0 / tile_rows,
            tile_rows,
            rows: row0..call.int("rows").min(row0 + tile_rows),
            rows_of_sample: rows_of_sample(call),
            phase: residues[0] * h_stride + residues[1],
            channels: slice + first..slice + channels.min(first + of_tile),
        };
        epilogue_statistics::count(call, machine, &place, &counted);
    }
}

//! What each kernel does, given its arguments: the executable form of what the kernels' files say.
//!
//! Values are not rounded to what the kernels store. A float32 is split as `hi + lo / 2048` with a `lo`
//! that matters but whose square does not, so that a part read in the other's place shows.

use super::boxes;
use super::epilogue_statistics;
use super::gather;
use super::gradient;
use super::group_norm;
use super::implicit;
use super::interleave;
use super::machine::{Call, Machine, Pointer};
use super::norm;
use super::norm_behind;
use super::pointwise;
use super::shuffle;
use super::{halo, halo_sweep};
use volup::{Activation, reference};

/// The bits of the largest float32.
pub const FINITE: f64 = 0x7f7f_ffff_u32 as f64;
/// The bits of 2^-12: 2^-26 of the largest magnitude that the split scales to.
pub const COARSE: f64 = 0x3980_0000_u32 as f64;
/// What lo is multiplied by.
pub const LIFT: f64 = 2048.0;
/// The share of a value that is split off.
pub const SPLIT_OFF: f64 = 1.0 / 65536.0;
/// Arguments that start at multiples of 256 bytes.
const ALIGNED: [&str; 15] = [
    "box_gemm a",
    "box_pack_weight out",
    "gather_gemm a",
    "gather_gemm b",
    "halo_gemm a",
    "halo_gemm b",
    "halo_pack_input out",
    "halo_pack_weight out",
    "halo_sweep a",
    "halo_sweep b",
    "linear_gemm a",
    "linear_gemm b",
    "pack_input out",
    "pack_input out_lo",
    "interleave w",
];

/// Does what a launch does.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    for (name, pointer) in aligned(call) {
        assert!(pointer.at.is_multiple_of(256), "{}: {name} is at {}", call.variant.name, pointer.at);
    }
    match call.kernel() {
        "direct" | "direct_output" => direct(call, machine),
        "direct_norm" => norm_behind::direct(call, machine),
        "pack_largest" => pack_largest(call, machine),
        "pack_weight_scale" => pack_weight_scale(call, machine),
        "half_scale" => half_scale(call, machine),
        "set_words" => set_words(call, machine),
        name if name.starts_with("pack_input_") => pack_input(call, machine),
        name if name.starts_with("pack_weight_") => pack_weight(call, machine),
        name if name.starts_with("linear_gemm_") => linear_gemm(call, machine),
        "fill_output" => boxes::fill_output(call, machine),
        name if name.starts_with("box_") => boxes::run(call, machine),
        "gather_gemm" => gather::run(call, machine),
        "halo_sweep" => halo_sweep::run(call, machine),
        name if name.starts_with("halo_") => halo::run(call, machine),
        name if shuffle::KERNELS.contains(&name) => shuffle::run(call, machine),
        "implicit_gemm" => implicit::run(call, machine),
        "pointwise" => pointwise::run(call, machine),
        name if name.starts_with("interleave_") => interleave::run(call, machine),
        "group_merge" => epilogue_statistics::merge(call, machine),
        name if group_norm::KERNELS.contains(&name) => group_norm::run(call, machine),
        _ if call.variant.family == "gradient" => gradient::run(call, machine),
        _ => norm::run(call, machine),
    }
}

/// The arguments of a launch that have to start at multiples of 256 bytes.
pub fn aligned(call: &Call<'_>) -> Vec<(&'static str, Pointer)> {
    let of = |row: &'static str| {
        let (kernel, name) = row.split_once(' ').expect("kernel and parameter");
        let given = || call.given(name).map(|pointer| (name, pointer));
        (call.kernel().starts_with(kernel) && call.has(name)).then(given).flatten()
    };
    ALIGNED.into_iter().filter_map(of).collect()
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(Pointer, i64)> {
    let product = |names: &[&str]| names.iter().map(|name| call.int(name)).product::<i64>();
    let mut found: Vec<(&str, i64)> = vec![("control", 5), ("of_control", 4)];
    match call.kernel() {
        "direct" | "direct_output" if call.int("guarded") == 0 => found.clear(),
        "pack_weight_scale" => found.push(("scale", call.grid[0])),
        "set_words" => found = ["control", "packed"].map(|name| (name, call.int("words"))).to_vec(),
        "half_scale" => {
            found.push(("scale", call.int("out_channels") / call.int("slice_out") * call.int("columns")))
        }
        name if name.starts_with("pack_input_") => {
            found.extend(["out", "out_lo"].map(|name| (name, product(&["rows", "pitch"]))));
        }
        name if name.starts_with("pack_weight_") => {
            found.extend(["out", "out_lo"].map(|name| (name, call.int("length"))));
            found.push(("scale", if call.has("columns") { call.int("columns") } else { 0 }));
        }
        name if name.starts_with("linear_gemm_") => {
            let (rows, parts) = (view(call), if call.has("lo_rows") { 2 } else { 1 });
            let columns = product(&["slices", "blocks"]) * call.size("BN");
            let taps = product(&["d_kernel", "h_kernel", "w_steps", "chunks"]);
            found.push(("a", (rows - 1) * call.int("pitch") + call.int("window")));
            found.push(("b", parts * taps * columns * call.size("BK")));
            found.extend([("scale_x", 1), ("scale_w", columns)]);
        }
        name if name.starts_with("norm_") || name == "partial_merge" => found = norm::extents(call),
        "group_merge" => found = epilogue_statistics::extents_of_merge(call),
        name if group_norm::KERNELS.contains(&name) => found = group_norm::extents(call),
        name if name.starts_with("box_") => found = boxes::extents(call),
        name if shuffle::KERNELS.contains(&name) => found = shuffle::extents(call),
        "implicit_gemm" => found = implicit::extents(call),
        _ if call.variant.family == "gradient" => found = gradient::extents(call),
        "gather_gemm" => found.extend(gather::extents(call)),
        "halo_sweep" => found.extend(halo_sweep::extents(call)),
        name if name.starts_with("halo_") => found.extend(halo::extents(call)),
        name if name.starts_with("interleave_") => found.extend(interleave::extents(call)),
        _ => {}
    }
    let found = found.into_iter().filter(|(name, _)| call.has(name));
    found.filter_map(|(name, count)| call.given(name).map(|pointer| (pointer, count))).collect()
}

/// Rows of the view of A.
pub fn view(call: &Call<'_>) -> i64 {
    call.int("view_rows") + if call.has("lo_rows") { call.int("lo_rows") } else { 0 }
}

/// The bits of a magnitude as float32.
pub fn bits(value: f64) -> f64 {
    f64::from((value.abs() as f32).to_bits())
}

/// The power of two that brings a magnitude, given as bits, to [2^14, 2^15), as far as float32 can.
pub fn scale(bits: f64) -> f64 {
    let biased = bits as i32 >> 23;
    f64::from((141 - biased).min(120)).exp2()
}

pub fn raise(call: &Call<'_>, machine: &mut Machine, word: i64, value: f64) {
    machine.update(call.pointer("control"), word, |before| before.max(value));
}

/// Blocks along an axis of the grid are exactly as many as cover a size in tiles.
fn covers(call: &Call<'_>, axis: usize, size: i64, tile: &str) {
    let tiles = (size + call.size(tile) - 1) / call.size(tile);
    assert_eq!(call.grid[axis], tiles, "{}: grid {axis}, {tile}", call.variant.name);
}

/// Control word 0 is raised to the bits of the largest of `length` magnitudes, in `tiles` tiles.
fn pack_largest(call: &Call<'_>, machine: &mut Machine) {
    let [length, tiles] = call.ints(["length", "tiles"]);
    assert!(call.grid[0] > 0 && tiles * call.size("B") >= length);
    let x = call.pointer("x");
    let most = (0..length).map(|at| bits(machine.read(x, at))).fold(0.0, f64::max);
    raise(call, machine, 0, most);
}

/// Row `lead + ((n*pd + id)*ph + ih)*pw + iw` of `pitch` elements holds a voxel: `slice_channels`
/// channels every `slice_pitch` elements. All else is zero.
fn pack_input(call: &Call<'_>, machine: &mut Machine) {
    let [rows, lead, pitch, pd, ph, pw, n] = call.ints(["rows", "lead", "pitch", "pd", "ph", "pw", "n"]);
    let [depth, height, width, channels] = call.ints(["depth", "height", "width", "channels"]);
    let [slice_channels, slice_pitch] = call.ints(["slice_channels", "slice_pitch"]);
    let [x_n, x_c, x_d, x_h, x_w] = call.ints(["x_n", "x_c", "x_d", "x_h", "x_w"]);
    let (x, out) = (call.pointer("x"), call.pointer("out"));
    covers(call, 0, rows, "BR");
    covers(call, 1, pitch, "BC");
    assert_eq!(pitch % 8, 0);
    let value = |machine: &Machine, row: i64, column: i64| {
        let at = row - lead;
        let (line, iw) = (at / pw, at % pw);
        let (plane, ih) = (line / ph, line % ph);
        let (sample, id) = (plane / pd, plane % pd);
        let voxel = at >= 0 && id < depth && ih < height && iw < width && sample < n;
        let (slice, within) = (column / slice_pitch, column % slice_pitch);
        let ci = slice * slice_channels + within;
        let channel = within < slice_channels && ci < channels;
        let from = sample * x_n + ci * x_c + id * x_d + ih * x_h + iw * x_w;
        if voxel && channel { machine.read(x, from) } else { 0.0 }
    };
    let split = call.has("out_lo");
    let control = call.pointer("control");
    let scale = if split { scale(machine.read(control, 0)) } else { 1.0 };
    if split {
        machine.write(control, 4, 1.0 / scale);
    }
    let (mut most, mut coarse) = (0.0, 0.0);
    for row in 0..rows {
        // What is coarse is told a tile of channels at a time.
        for first in (0..pitch).step_by(call.size("BC") as usize) {
            let mut here = 0.0;
            for column in first..(first + call.size("BC")).min(pitch) {
                let value = value(machine, row, column) * scale;
                put(call, machine, out, row * pitch + column, value);
                here = bits(value).max(here);
            }
            most = here.max(most);
            coarse += f64::from(here > 0.0 && here < COARSE);
        }
    }
    if split {
        machine.update(control, 2, |before| before + coarse);
    } else {
        raise(call, machine, 0, most);
    }
}

/// Writes a packed element, in two parts where the kernel has them: what fp16 holds, if it is finite.
fn put(call: &Call<'_>, machine: &mut Machine, out: Pointer, at: i64, value: f64) {
    let split = call.has("out_lo");
    let low = if split { call.pointer("out_lo") } else { out };
    put_parts(machine, [(out, at), (low, at)], split, value);
}

/// Writes a packed element to the place of its high part, and if it is split to that of its low part.
pub fn put_parts(machine: &mut Machine, [high, low]: [(Pointer, i64); 2], split: bool, value: f64) {
    if split {
        assert!(!value.is_finite() || value.abs() < 32768.0, "{value} is not scaled");
        machine.write(high.0, high.1, value - value * SPLIT_OFF);
        machine.write(low.0, low.1, value * SPLIT_OFF * LIFT);
    } else {
        machine.write(high.0, high.1, value);
    }
}

/// The channel in its slice and the residue along width of a column.
pub fn column_is(call: &Call<'_>, column: i64, inner: i64, channels_first: bool) -> (i64, i64) {
    let (high, low) = (column / inner, column % inner);
    assert!(inner > 0, "{}", call.variant.name);
    if channels_first { (high, low) } else { (low, high) }
}

/// For every column 2^-ew of its output channel's largest weight; control word 1 is raised to the bits
/// of the largest.
fn pack_weight_scale(call: &Call<'_>, machine: &mut Machine) {
    let [per_slice, inner, first] = call.ints(["columns_per_slice", "inner", "channels_first"]);
    let [slice_out, out_channels, taps] = call.ints(["slice_out", "out_channels", "taps"]);
    let [in_per_group, out_per_group] = call.ints(["in_per_group", "out_per_group"]);
    let (w, out) = (call.pointer("w"), call.pointer("scale"));
    for column in 0..call.grid[0] {
        let (slice, within) = (column / per_slice, column % per_slice);
        let (co, _) = column_is(call, within, inner, first == 1);
        let mut most = 0.0;
        if co < slice_out {
            let co = slice * slice_out + co;
            assert!(co < out_channels);
            let group = co / out_per_group;
            for ci in group * in_per_group..(group + 1) * in_per_group {
                for tap in 0..taps {
                    let at = (ci * out_per_group + co % out_per_group) * taps + tap;
                    most = bits(machine.read(w, at)).max(most);
                }
            }
        }
        raise(call, machine, 1, most);
        machine.write(out, column, 1.0 / scale(most));
    }
}

/// The same, those past the last channel having its scale; control word 4 is raised to the bits of the largest of the input's magnitudes
/// at which it looks.
fn half_scale(call: &Call<'_>, machine: &mut Machine) {
    let [count, samples, columns, inner] = call.ints(["count", "samples", "columns", "inner"]);
    let [slice_out, out_channels, taps] = call.ints(["slice_out", "out_channels", "taps"]);
    let [in_per_group, out_per_group] = call.ints(["in_per_group", "out_per_group"]);
    // One of both, if not both.
    assert!(call.grid[0] > 0 && (call.grid[0] > out_channels) == (samples > 0) && call.grid[1..] == [1, 1]);
    for channel in 0..out_channels {
        let (group, of_group) = (channel / out_per_group, channel % out_per_group);
        let inputs = group * in_per_group..(group + 1) * in_per_group;
        let places =
            inputs.flat_map(|ci| (0..taps).map(move |tap| (ci * out_per_group + of_group) * taps + tap));
        let (w, out) = (call.pointer("w"), call.pointer("scale"));
        let most = places.map(|at| bits(machine.read(w, at))).fold(0.0, f64::max);
        raise(call, machine, 1, most);
        for column in 0..columns {
            let (of_slice, _) = column_is(call, column, inner, call.int("channels_first") == 1);
            if of_slice.min(slice_out - 1) == channel % slice_out {
                machine.write(out, channel / slice_out * columns + column, 1.0 / scale(most));
            }
        }
    }
    if samples == 0 {
        return;
    }
    let x = call.pointer("x");
    let pieces = (count + 3) / 4;
    let apart = (pieces + samples - 1) / samples;
    let looked_at = (0..(pieces + apart - 1) / apart)
        .map(|index| index * apart + i64::from((index as u32).wrapping_mul(2_654_435_761) % apart as u32))
        .flat_map(|piece| 4 * piece..count.min(4 * piece + 4));
    let most = looked_at.map(|at| bits(machine.read(x, at))).fold(0.0, f64::max);
    raise(call, machine, 4, most);
}

/// Words as they are where a weight was packed.
fn set_words(call: &Call<'_>, machine: &mut Machine) {
    assert!(call.grid[0] > 0 && call.grid[1..] == [1, 1]);
    for word in 0..call.int("words") {
        let value = machine.read(call.pointer("packed"), word);
        machine.write(call.pointer("control"), word, value);
    }
}

/// Element `k` of a column, for every tap along depth and height and every step along width: the weight
/// from the input channel and at the offset along width that `k` stands for, where the column's residue
/// has such a tap and its group such a channel; else zero.
fn pack_weight(call: &Call<'_>, machine: &mut Machine) {
    let [length, k, columns, per_slice] = call.ints(["length", "k", "columns", "columns_per_slice"]);
    let [inner, first, slice_out, slice_in] = call.ints(["inner", "channels_first", "slice_out", "slice_in"]);
    let [in_per_group, out_per_group] = call.ints(["in_per_group", "out_per_group"]);
    let [in_channels, out_channels] = call.ints(["in_channels", "out_channels"]);
    let [d_kernel, h_kernel, w_kernel] = call.ints(["d_kernel", "h_kernel", "w_kernel"]);
    let [w_stride, w_dilation, w_steps, w_step] = call.ints(["w_stride", "w_dilation", "w_steps", "w_step"]);
    let [w_far, span] = call.ints(["w_far", "span"]);
    let (w, out) = (call.pointer("w"), call.pointer("out"));
    covers(call, 0, length, "B");
    let mut most = 0.0;
    for at in 0..length {
        let (row, at_k) = (at / k, at % k);
        let (rest, column) = (row / columns, row % columns);
        let (tap, wi) = (rest / w_steps, rest % w_steps);
        let slice = column / per_slice;
        let (co, residue) = column_is(call, column % per_slice, inner, first == 1);
        let (near, within) = (at_k / span, at_k % span);
        let offset = w_far - wi * w_step - near;
        let reach = w_stride * offset + residue;
        let tw = reach / w_dilation;
        let column_here = co < slice_out && residue < w_stride;
        let tap_here = offset >= 0 && reach % w_dilation == 0 && tw < w_kernel;
        let (co, ci) = (slice * slice_out + co, slice * slice_in + within);
        let channel_here = within < slice_in && ci < in_channels && co < out_channels;
        let mut value = 0.0;
        if column_here && tap_here && channel_here && co / out_per_group == ci / in_per_group {
            let pair = ci * out_per_group + co % out_per_group;
            value = machine.read(w, (pair * d_kernel * h_kernel + tap) * w_kernel + tw);
        }
        most = bits(value).max(most);
        if call.has("scale") {
            value /= machine.read(call.pointer("scale"), column);
        }
        put(call, machine, out, at, value);
    }
    if call.has("control") {
        raise(call, machine, 1, most);
    }
}

/// Taps of a residue along depth or height: the first, how many, and how far before a position the
/// first one and each further one reads.
pub struct Taps {
    pub first: i64,
    pub count: i64,
    pub step: i64,
    pub offset: i64,
    pub back: i64,
}

impl Taps {
    pub fn new(call: &Call<'_>, axis: &str, residue: i64) -> Taps {
        let int = |name: &str| call.int(&format!("{axis}_{name}"));
        let (kernel, stride, dilation) = (int("kernel"), int("stride"), int("dilation"));
        let step = int("step");
        let gcd = stride / step;
        let tap = residue / gcd * int("inverse") % step;
        let first = if residue % gcd == 0 { tap } else { tap.max(kernel) };
        let count = (kernel - first + step - 1).max(0) / step;
        // The definition itself.
        let right = (0..kernel).filter(|tap| tap * dilation % stride == residue);
        assert!(right.eq((0..count).map(|tap| first + tap * step)), "taps of {axis} residue {residue}");
        Taps { first, count, step, offset: (first * dilation - residue) / stride, back: dilation / gcd }
    }
}

/// A product of tiles: `sum += a b`, in rows of `n` and `k`.
fn multiply(sum: &mut [f64], a: &[f64], b: &[f64], k: usize, n: usize) {
    for (sum, a) in sum.chunks_mut(n).zip(a.chunks(k)) {
        for (&a, b) in a.iter().zip(b.chunks(n)).filter(|(a, _)| **a != 0.0) {
            sum.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
        }
    }
}

/// Rows are positions, columns are channels and residues along width; residues along depth and height
/// are in the grid: block `(tile * phases + phase) * (slices * blocks) + column block`.
fn linear_gemm(call: &Call<'_>, machine: &mut Machine) {
    let [bm, bn, bk] = ["BM", "BN", "BK"].map(|name| call.size(name));
    let [rows, pitch, window, ph, pw] = call.ints(["rows", "pitch", "window", "ph", "pw"]);
    let [d_stride, h_stride, h_kernel, d_kernel] =
        call.ints(["d_stride", "h_stride", "h_kernel", "d_kernel"]);
    let [d_first, h_first, w_base] = call.ints(["d_first", "h_first", "w_base"]);
    let [w_steps, w_step, chunks, slices, blocks] =
        call.ints(["w_steps", "w_step", "chunks", "slices", "blocks"]);
    let (a, b) = (call.pointer("a"), call.pointer("b"));
    let all = slices * blocks;
    assert_eq!(call.grid, [(rows + bm - 1) / bm * d_stride * h_stride * all, 1, 1]);
    assert!(pitch * a.width as i64 % 16 == 0 && chunks * bk * b.width as i64 % 32 == 0);

    stores(call);

    // Tiles of A start anywhere; outside the view are zeros.
    let view = view(call);
    let tile_a = |machine: &Machine, row: i64, chunk: i64| -> Vec<f64> {
        let elements =
            (row..row + bm).flat_map(|row| (chunk * bk..(chunk + 1) * bk).map(move |at| (row, at)));
        let inside = |row: i64, at: i64| (0..view).contains(&row) && (0..window).contains(&at);
        elements
            .map(|(row, at)| if inside(row, at) { machine.read(a, row * pitch + at) } else { 0.0 })
            .collect()
    };
    // Tiles of B, transposed, are whole.
    let tile_b = |machine: &Machine, column: i64, chunk: i64| -> Vec<f64> {
        let elements = (chunk * bk..(chunk + 1) * bk)
            .flat_map(|at| (column * bn..(column + 1) * bn).map(move |row| row * chunks * bk + at));
        elements.map(|at| machine.read(b, at)).collect()
    };
    let lo = call.has("lo_rows").then(|| (call.int("lo_rows"), d_kernel * h_kernel * w_steps * all));
    for block in 0..call.grid[0] {
        let (tile, column_block) = (block / all, block % all);
        let (row0, phase) = (tile / (d_stride * h_stride) * bm, tile % (d_stride * h_stride));
        let residues = [phase / h_stride, phase % h_stride];
        let [depth, height] =
            [("d", residues[0]), ("h", residues[1])].map(|(axis, r)| Taps::new(call, axis, r));
        let start = row0 + ((d_first - depth.offset) * ph + h_first - height.offset) * pw + w_base;
        // Slices of channels are so many chunks each.
        let chunk0 = if slices > 1 { column_block / blocks * chunks } else { 0 };
        let mut sum = vec![0.0; (bm * bn) as usize];
        let mut multiply = |a: &[f64], b: &[f64]| multiply(&mut sum, a, b, bk as usize, bn as usize);
        for (td, th) in (0..depth.count).flat_map(|td| (0..height.count).map(move |th| (td, th))) {
            let tap = (depth.first + td * depth.step) * h_kernel + height.first + th * height.step;
            let from = start - (td * depth.back * ph + th * height.back) * pw;
            for (wi, chunk) in (0..w_steps).flat_map(|wi| (0..chunks).map(move |chunk| (wi, chunk))) {
                let (row, column) = (from + wi * w_step, (tap * w_steps + wi) * all + column_block);
                let high = tile_a(machine, row, chunk0 + chunk);
                let weights = tile_b(machine, column, chunk);
                multiply(&high, &weights);
                if let Some((lo_rows, lo_columns)) = lo {
                    let low = tile_a(machine, row + lo_rows, chunk0 + chunk);
                    multiply(&low.iter().map(|x| x / LIFT).collect::<Vec<_>>(), &weights);
                    let low = tile_b(machine, column + lo_columns, chunk);
                    multiply(&high, &low.iter().map(|w| w / LIFT).collect::<Vec<_>>());
                }
            }
        }
        if lo.is_some() {
            let x = machine.read(call.pointer("scale_x"), 0);
            for (at, sum) in sum.iter_mut().enumerate() {
                *sum *= x * machine.read(call.pointer("scale_w"), column_block * bn + at as i64 % bn);
            }
        }
        finish(call, machine, &sum, row0, column_block, residues);
    }
}

/// What a kernel's way to write y asks for.
fn stores(call: &Call<'_>) {
    let [pd, ph, pw, slices, channels] = call.ints(["pd", "ph", "pw", "slices", "channels"]);
    let [d_stride, h_stride, w_stride] = call.ints(["d_stride", "h_stride", "w_stride"]);
    let right = match call.size("STORE") {
        2 => channels % 8 == 0 && (slices == 1 || w_stride == 1),
        3 => {
            let outputs = call.ints(["d_out", "h_out", "w_out"]);
            [d_stride, h_stride, w_stride] == [1; 3] && [pd, ph, pw] == outputs && pd * ph * pw % 8 == 0
        }
        _ => true,
    };
    assert!(right, "{}", call.variant.name);
}

/// Writes the rows of a tile that are positions and its columns that are channels to y, with the bias
/// and through the activation.
fn finish(
    call: &Call<'_>,
    machine: &mut Machine,
    sum: &[f64],
    row0: i64,
    column_block: i64,
    residues: [i64; 2],
) {
    let [rows, pd, ph, pw, blocks] = call.ints(["rows", "pd", "ph", "pw", "blocks"]);
    let [d_stride, d_shift, d_out] = call.ints(["d_stride", "d_shift", "d_out"]);
    let [h_stride, h_shift, h_out] = call.ints(["h_stride", "h_shift", "h_out"]);
    let [w_stride, w_shift, w_out, channels] = call.ints(["w_stride", "w_shift", "w_out", "channels"]);
    let [y_n, y_c, y_d, y_h, y_w] = call.ints(["y_n", "y_c", "y_d", "y_h", "y_w"]);
    let (y, bias) = (call.pointer("y"), call.pointer("bias"));
    let (slice, bn) = (column_block / blocks, call.size("BN"));
    let channels_first = call.size("CHANNELS_FIRST") == 1;
    for (at, &sum) in sum.iter().enumerate() {
        let row = row0 + at as i64 / bn;
        let column = column_block % blocks * bn + at as i64 % bn;
        let inner = if channels_first { w_stride } else { channels };
        let (co, rw) = column_is(call, column, inner, channels_first);
        let (line, jw) = (row / pw, row % pw);
        let (plane, jh) = (line / ph, line % ph);
        let (n, jd) = (plane / pd, plane % pd);
        let od = jd * d_stride + d_shift + residues[0];
        let oh = jh * h_stride + h_shift + residues[1];
        let ow = jw * w_stride + w_shift + rw;
        let inside = (0..d_out).contains(&od) && (0..h_out).contains(&oh) && (0..w_out).contains(&ow);
        if row < rows && co < channels && rw < w_stride && inside {
            let co = co + slice * channels;
            let to = n * y_n + co * y_c + od * y_d + oh * y_h + ow * y_w;
            let value = activate(call, sum + biased(call, machine, bias, co), ["activation", "slope"]);
            machine.write(y, to, value);
        }
    }
}

pub fn biased(call: &Call<'_>, machine: &Machine, bias: Pointer, channel: i64) -> f64 {
    if call.int("has_bias") == 1 { machine.read(bias, channel) } else { 0.0 }
}

/// The activation whose code and slope have these names.
pub fn activation(call: &Call<'_>, [code, slope]: [&str; 2]) -> Option<Activation> {
    Some(match call.int(code) {
        0 => return None,
        1 => Activation::Relu,
        2 => Activation::leaky_relu(call.float(slope)).expect("a slope"),
        3 => Activation::Silu,
        4 => Activation::Gelu,
        5 => Activation::GeluTanh,
        6 => Activation::Hardswish,
        7 => Activation::Sigmoid,
        8 => Activation::Tanh,
        code => panic!("no activation has code {code}"),
    })
}

/// A value through the activation whose code and slope have these names.
pub fn activate(call: &Call<'_>, x: f64, names: [&str; 2]) -> f64 {
    through(activation(call, names), x)
}

/// A value through an activation that is known already: to ask for it takes as long as many products.
pub fn through(function: Option<Activation>, x: f64) -> f64 {
    function.map_or(x, |function| reference::activation(function, x))
}

/// Whether a guarded launch has work to do: an infinity or NaN, or too many values that are too small.
pub fn is_needed(call: &Call<'_>, machine: &Machine) -> bool {
    let control = call.pointer(if call.has("control") { "control" } else { "of_control" });
    let small = if call.has("small_limit") { call.int("small_limit") as f64 } else { 0.0 };
    let limit = |word| if word < 2 { FINITE } else { small };
    let always = call.has("guarded") && call.int("guarded") == 0;
    always || (0..4).any(|word| machine.read(control, word) > limit(word))
}

/// Whether a launch whose kernel computes the definition itself where its own output cannot stand has done so.
pub fn defines(call: &Call<'_>, machine: &mut Machine) -> bool {
    let defines = call.int("guarded") == 1 && is_needed(call, machine);
    if defines {
        direct(call, machine);
    }
    defines
}

/// Where an output along an axis lies in y, and the taps that reach it, each with where its input lies.
type Reached = (i64, Vec<(i64, i64)>);

/// Every output by the definition, where there is need.
fn direct(call: &Call<'_>, machine: &mut Machine) {
    assert!(call.grid[0] > 0 && call.grid[1..] == [1, 1]);
    if !is_needed(call, machine) {
        return;
    }
    // Where a kernel takes more than this, these have longer names.
    let of = |name: &str| if call.has("of_control") { format!("of_{name}") } else { name.to_string() };
    let int = |name: &str| call.int(&of(name));
    let [n, groups, cin, cout] = ["n", "groups", "cin", "cout"].map(int);
    let axes = ["d", "h", "w"]
        .map(|axis| ["in", "out", "k", "s", "p", "d"].map(|size| int(&format!("{size}_{axis}"))));
    let x_strides = ["x_d", "x_h", "x_w"].map(int);
    let y_strides = ["y_d", "y_h", "y_w"].map(int);
    let [x_n, x_c, y_n, y_c] = ["x_n", "x_c", "y_n", "y_c"].map(int);
    let [x, w, bias, y] = ["x", "w", "bias", "y"].map(|name| call.pointer(&of(name)));
    let has_bias = int("has_bias") == 1;
    let curves = [["activation", "slope"], ["post", "post_slope"]].map(|names| names.map(of));
    // Along an axis, for each output: where it lies in y, and the taps that reach it with their inputs.
    let reached: [Vec<Reached>; 3] = [0, 1, 2].map(|axis| {
        let [input, output, kernel, stride, padding, dilation] = axes[axis];
        let reach = |o: i64| {
            let from = |tap: i64| (tap, o + padding - tap * dilation);
            let hits = (0..kernel).map(from).filter(|(_, at)| at % stride == 0);
            let inside = hits.map(|(tap, at)| (tap, at / stride)).filter(|(_, i)| (0..input).contains(i));
            inside.map(|(tap, i)| (tap, i * x_strides[axis])).collect()
        };
        (0..output).map(|o| (o * y_strides[axis], reach(o))).collect()
    });
    let [depths, heights, widths] = &reached;
    let [kernel_h, kernel_w, taps] = [axes[1][2], axes[2][2], axes.map(|axis| axis[2]).iter().product()];
    for (sample, co) in (0..n).flat_map(|sample| (0..groups * cout).map(move |co| (sample, co))) {
        let group = co / cout;
        for (to_d, from_d) in depths {
            for (to_h, from_h) in heights {
                for (to_w, from_w) in widths {
                    let mut sum = 0.0;
                    for ci in group * cin..(group + 1) * cin {
                        let (x_first, w_first) = (sample * x_n + ci * x_c, (ci * cout + co % cout) * taps);
                        for (td, id) in from_d {
                            for (th, ih) in from_h {
                                for (tw, iw) in from_w {
                                    let weight = w_first + (td * kernel_h + th) * kernel_w + tw;
                                    sum += machine.read(x, x_first + id + ih + iw) * machine.read(w, weight);
                                }
                            }
                        }
                    }
                    let sum = if has_bias { sum + machine.read(bias, co) } else { sum };
                    let curved = |value, [code, slope]: &[String; 2]| activate(call, value, [code, slope]);
                    let value = curves.iter().fold(sum, curved);
                    machine.write(y, sample * y_n + co * y_c + to_d + to_h + to_w, value);
                }
            }
        }
    }
}

//! What the kernels of training do that deal with what follows the convolution, given their arguments.

use super::contracts::{FINITE, activation, bits};
use super::machine::{Call, Machine, Pointer};
use super::norm::{self, PARTS};
use volup::{Activation, reference};

/// Threads of a block, vectors that one has at a time, and how often it has.
const THREADS: i64 = 256;
const VECTORS: i64 = 4;
const TURNS: i64 = 8;
/// Sums of a channel of a sample and chunk, then largest magnitudes.
const SUMS: i64 = 5;
const BOUNDED: i64 = 2;
/// The names of the activations' codes and slopes.
const FIRST: [&str; 2] = ["activation", "slope"];
const POST: [&str; 2] = ["post", "post_slope"];

/// The least number of tasks of a size that cover something.
pub fn tasks(of: i64, size: i64) -> i64 {
    (of + size - 1) / size
}

/// Sums and magnitudes of a channel of a sample.
fn found(call: &Call<'_>) -> i64 {
    if call.size("KIND") == 5 { SUMS + BOUNDED } else { SUMS }
}

/// The larger of a magnitude and a number's that is finite.
fn larger(most: f64, value: f64) -> f64 {
    if bits(value) <= FINITE { most.max(value.abs()) } else { most }
}

/// How a tensor of the output's size is dealt out.
struct Chunks {
    last: bool,
    vector: i64,
    voxels: i64,
    channels: i64,
    chunks: i64,
    channel_blocks: i64,
    /// Elements of a row's chunk of NCDHW, positions of one of NDHWC.
    size: i64,
    samples: i64,
}

impl Chunks {
    fn new(call: &Call<'_>) -> Chunks {
        let (last, vector) = (call.size("LAST") == 1, call.size("VECTOR"));
        let [voxels, channels, chunks, channel_blocks] =
            call.ints(["voxels", "channels", "chunks", "channel_blocks"]);
        let across = (channels / vector).clamp(1, THREADS);
        let size = VECTORS * TURNS * if last { THREADS / across } else { THREADS * vector };
        let rows = if last { channel_blocks } else { channels };
        let samples = call.grid[0] / (rows * chunks);
        Chunks { last, vector, voxels, channels, chunks, channel_blocks, size, samples }
    }

    fn check(&self, call: &Call<'_>) {
        let &Chunks { last, vector, voxels, channels, chunks, channel_blocks, size, samples } = self;
        let (what, y) = (call.variant.name, ["y", "dz"].into_iter().find_map(|name| call.given(name)));
        let y = y.expect("a tensor");
        assert!(voxels > 0 && channels > 0 && samples > 0 && vector * y.width as i64 <= 16, "{what}");
        let rows = if last { channel_blocks } else { channels };
        assert_eq!(call.grid[0], samples * rows * chunks, "{what}");
        let right = if last {
            assert_eq!(channels % vector, 0, "{what}");
            [tasks(voxels, size), tasks(channels / vector, THREADS)]
        } else {
            [tasks(voxels + vector - 1, size), 1]
        };
        assert_eq!([chunks, channel_blocks], right, "{voxels} voxels, {channels} channels of {what}");
        for pointer in
            ["y", "dz", "z"].into_iter().filter(|name| call.has(name)).filter_map(|n| call.given(n))
        {
            assert!(pointer.at.is_multiple_of(vector as usize * pointer.width), "{pointer:?} of {what}");
        }
    }

    /// The elements of a block, of each of its channels: sample, channel, chunk.
    fn of(&self, block: i64) -> Vec<([i64; 3], Vec<i64>)> {
        let &Chunks { voxels, channels, chunks, channel_blocks, size, .. } = self;
        if !self.last {
            let (row, chunk) = (block / chunks, block % chunks);
            let start = row * voxels;
            let base = start - start % self.vector + chunk * size;
            let elements = start.max(base)..(start + voxels).min(base + size);
            return vec![([row / channels, row % channels, chunk], elements.collect())];
        }
        let (rest, channel_block) = (block / channel_blocks, block % channel_blocks);
        let (sample, chunk) = (rest / chunks, rest % chunks);
        let first = channel_block * THREADS * self.vector;
        let of_channel = |channel: i64| {
            let positions = chunk * size..voxels.min((chunk + 1) * size);
            let elements = positions.map(|position| (sample * voxels + position) * channels + channel);
            ([sample, channel, chunk], elements.collect())
        };
        (first..channels.min(first + THREADS * self.vector)).map(of_channel).collect()
    }

    fn all(&self, call: &Call<'_>) -> Vec<([i64; 3], Vec<i64>)> {
        (0..call.grid[0]).flat_map(|block| self.of(block)).collect()
    }

    /// Which of a channel's partial results that of a chunk is.
    fn place(&self, [sample, channel, chunk]: [i64; 3]) -> i64 {
        (sample * self.channels + channel) * self.chunks + chunk
    }
}

/// What follows the convolution: `z = post(gamma*h + beta)`, `h = (first(y) - mean)*rstd`.
pub struct Epilogue {
    pub first: Option<Activation>,
    pub post: Option<Activation>,
    pub mean: Option<Pointer>,
    rstd: Option<Pointer>,
    affine: Option<[Pointer; 2]>,
    channels: i64,
    group_channels: i64,
}

/// What an output's gradient is made from.
pub struct At {
    /// Normalized, scaled and shifted.
    pub h: f64,
    pub v: f64,
    /// `rstd * gamma`.
    pub factor: f64,
    /// The sample's group.
    pub group: i64,
}

impl Epilogue {
    pub fn new(call: &Call<'_>, machine: &Machine) -> Epilogue {
        let there = |name| call.given(name).filter(|pointer| machine.has(pointer.buffer));
        Epilogue {
            first: activation(call, FIRST),
            post: activation(call, POST),
            mean: there("mean"),
            rstd: there("rstd"),
            affine: there("gamma").map(|gamma| [gamma, there("beta").expect("both or none")]),
            channels: channels(call),
            group_channels: call.int("group_channels"),
        }
    }

    /// An element of the convolution's output.
    pub fn at(&self, machine: &Machine, [sample, channel]: [i64; 2], y: f64) -> At {
        let a = self.first.map_or(y, |function| reference::activation(function, y));
        let group = sample * (self.channels / self.group_channels) + channel / self.group_channels;
        let Some(mean) = self.mean else { return At { h: a, v: a, factor: 1.0, group } };
        let rstd = machine.read(self.rstd.expect("both or none"), group);
        let [gamma, beta] = self
            .affine
            .map_or([1.0, 0.0], |affine| affine.map(|of_channel| machine.read(of_channel, channel)));
        let h = (a - machine.read(mean, group)) * rstd;
        At { h, v: h * gamma + beta, factor: rstd * gamma, group }
    }

    /// The gradient of an element of the convolution's output, from the element and the gradient of the block's output;
    /// with a normalization from the terms of its group.
    pub fn gradient(
        &self,
        machine: &Machine,
        place: [i64; 2],
        terms: Option<Pointer>,
        [y, dz]: [f64; 2],
    ) -> f64 {
        let At { h, v, factor, group } = self.at(machine, place, y);
        let dv = back(self.post, v, dz);
        let [q, r] = terms.map_or([0.0; 2], |at| [0, 1].map(|k| machine.read(at, 2 * group + k)));
        back(self.first, y, if terms.is_some() { factor * dv + (q + r * h) } else { dv })
    }
}

/// Channels of the convolution's output.
fn channels(call: &Call<'_>) -> i64 {
    call.int(if call.has("channels") { "channels" } else { "out_channels" })
}

/// A gradient through an activation.
pub fn back(function: Option<Activation>, x: f64, gradient: f64) -> f64 {
    function.map_or(gradient, |function| reference::activation_gradient(function, x, gradient))
}

/// What is told of the activations and of the normalization.
pub fn check_epilogue(call: &Call<'_>) {
    let what = call.variant.name;
    let there = |name: &str| call.given(name).is_some();
    for [code, _] in [FIRST, POST] {
        assert!((0..=8).contains(&call.int(code)), "{what}");
    }
    let (channels, group_channels) = (channels(call), call.int("group_channels"));
    assert!(group_channels > 0 && channels % group_channels == 0, "{what}");
    assert!(["rstd", "gamma", "beta"].iter().all(|name| there(name) == there("mean")), "{what}");
    let follows = call.int("activation") > 0 || call.int("post") > 0 || there("mean");
    let needed = follows || call.has("z");
    assert_eq!(there("y"), needed, "what follows the convolution follows from its output: {what}");
}

/// What the arguments and the grid have to be.
pub fn check(call: &Call<'_>) {
    let what = call.variant.name;
    match call.kernel() {
        "gradient_merge" => {
            let [rows, chunks] = call.ints(["rows", "chunks"]);
            assert!(rows > 0 && chunks > 0 && call.grid[0] == tasks(rows, THREADS / 32), "{what}");
        }
        "gradient_vectors" => {
            let [samples, channels, group_channels] = call.ints(["samples", "channels", "group_channels"]);
            assert!(samples > 0 && call.grid[0] * group_channels == channels, "{what}");
            let voxels = 1.0 / (call.float("by") * group_channels as f64);
            assert!(voxels > 0.5 && (voxels - voxels.round()).abs() < 1e-6 * voxels, "{voxels}: {what}");
            assert!(call.given("rstd").is_some() == call.given("gamma").is_some(), "{what}");
            assert!(!call.has("steepest") || call.float("steepest") >= 1.5, "{what}");
        }
        kernel => {
            Chunks::new(call).check(call);
            if kernel == "channel_statistics" {
                assert!((0..=8).contains(&call.int("activation")), "{what}");
            } else {
                check_epilogue(call);
            }
        }
    }
}

/// The parts of the workspace that a launch may touch, each with its number of elements.
pub fn extents(call: &Call<'_>) -> Vec<(&'static str, i64)> {
    match call.kernel() {
        "gradient_merge" => {
            let [rows, chunks] = call.ints(["rows", "chunks"]);
            vec![("sums", rows * chunks * found(call)), ("merged", rows * found(call))]
        }
        "gradient_vectors" => {
            let [samples, channels] = call.ints(["samples", "channels"]);
            let terms = if call.given("rstd").is_some() { 2 * samples * call.grid[0] } else { 0 };
            vec![("merged", samples * channels * found(call)), ("terms", terms), ("bounds", channels)]
        }
        "channel_statistics" => {
            let Chunks { samples, channels, chunks, .. } = Chunks::new(call);
            PARTS.map(|name| (name, samples * channels * chunks)).into()
        }
        "gradient_sums" => {
            let Chunks { samples, channels, chunks, .. } = Chunks::new(call);
            vec![("sums", samples * channels * chunks * found(call))]
        }
        _ => Vec::new(),
    }
}

/// What is unusual about a launch.
pub fn features(call: &Call<'_>) -> Vec<&'static str> {
    let found = match call.kernel() {
        "gradient_merge" => vec![("more chunks than a warp has lanes", call.int("chunks") > 32)],
        "gradient_vectors" => vec![
            ("more samples than a warp has lanes", call.int("samples") > 32),
            ("more channels of a group than a block has warps", call.int("group_channels") > 8),
            ("some vectors alone", call.given("dbias").is_some() != call.given("dbeta").is_some()),
        ],
        "block_output" | "channel_statistics" | "gradient_sums" => {
            let Chunks { last, vector, voxels, channels, chunks, channel_blocks, size, .. } =
                Chunks::new(call);
            let across = channels / vector;
            vec![
                ("a chunk without elements", !last && chunks > 1 && voxels <= (chunks - 1) * size),
                ("blocks of channels", channel_blocks > 1),
                ("channels one by one", last && vector == 1),
                ("chunks of a row", !last && chunks > 1),
                ("chunks of a sample", last && chunks > 1),
                ("rows that start in a vector", !last && voxels % vector > 0),
                ("less than a vector", !last && voxels < vector),
                ("threads without channels", last && THREADS % across.min(THREADS) > 0),
                ("nothing behind the convolution", call.has("y") && call.given("y").is_none()),
            ]
        }
        _ => Vec::new(),
    };
    found.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect()
}

/// Does what a launch does.
pub fn run(call: &Call<'_>, machine: &mut Machine) {
    match call.kernel() {
        "channel_statistics" => statistics(call, machine),
        "block_output" => output(call, machine),
        "gradient_sums" => sums(call, machine),
        "gradient_merge" => merge(call, machine),
        "gradient_vectors" => vectors(call, machine),
        name => panic!("{name} has no contract here"),
    }
}

/// Of each channel of each sample and chunk the mean of the activation, squared deviations and count.
fn statistics(call: &Call<'_>, machine: &mut Machine) {
    let (chunks, y, function) = (Chunks::new(call), call.pointer("y"), activation(call, FIRST));
    for (place, elements) in chunks.all(call) {
        let activated =
            |at| function.map_or(machine.read(y, at), |f| reference::activation(f, machine.read(y, at)));
        let values: Vec<f64> = elements.into_iter().map(activated).collect();
        norm::put(call, machine, PARTS, chunks.place(place), &values);
    }
}

/// The output of the block from that of its convolution.
fn output(call: &Call<'_>, machine: &mut Machine) {
    let (chunks, epilogue) = (Chunks::new(call), Epilogue::new(call, machine));
    let [y, z] = ["y", "z"].map(|name| call.pointer(name));
    for ([sample, channel, _], elements) in chunks.all(call) {
        for at in elements {
            let v = epilogue.at(machine, [sample, channel], machine.read(y, at)).v;
            machine.write(z, at, epilogue.post.map_or(v, |function| reference::activation(function, v)));
        }
    }
}

/// Of each channel of each sample and chunk the sums of dv, dv*h, dv*f, f and h*f; the largest of dv*f and h*f of channels that a
/// thread has together.
fn sums(call: &Call<'_>, machine: &mut Machine) {
    let (chunks, epilogue) = (Chunks::new(call), Epilogue::new(call, machine));
    let (y, dz, out) = (call.given("y"), call.pointer("dz"), call.pointer("sums"));
    for (place, elements) in chunks.all(call) {
        let mut sums = [0.0; SUMS as usize];
        let mut largest = [0.0; BOUNDED as usize];
        let own = if chunks.last { chunks.vector } else { 1 };
        let first = place[1] / own * own;
        for (at, channel) in elements.iter().flat_map(|at| (first..first + own).map(move |c| (at, c))) {
            let at = at + channel - place[1];
            let y = y.map_or(0.0, |y| machine.read(y, at));
            let At { h, v, .. } = epilogue.at(machine, [place[0], channel], y);
            let dv = back(epilogue.post, v, machine.read(dz, at));
            let slope = back(epilogue.first, y, 1.0);
            let terms = [dv, dv * h, back(epilogue.first, y, dv), slope, h * slope];
            if channel == place[1] {
                sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
            }
            let of_norm = if call.given("y").is_some() { terms[4] } else { 0.0 };
            largest = [larger(largest[0], terms[2]), larger(largest[1], of_norm)];
        }
        let found = found(call);
        for (which, value) in (0..found).zip(sums.into_iter().chain(largest)) {
            machine.write(out, chunks.place(place) * found + which, value);
        }
    }
}

/// Brings together the chunks of each row.
fn merge(call: &Call<'_>, machine: &mut Machine) {
    let [rows, chunks] = call.ints(["rows", "chunks"]);
    let [sums, merged] = ["sums", "merged"].map(|name| call.pointer(name));
    let found = found(call);
    for (row, which) in (0..rows).flat_map(|row| (0..found).map(move |which| (row, which))) {
        let of_chunk = |chunk| machine.read(sums, (row * chunks + chunk) * found + which);
        let all = (0..chunks).map(of_chunk);
        let value = if which < SUMS { all.sum() } else { all.fold(0.0, f64::max) };
        machine.write(merged, row * found + which, value);
    }
}

/// The gradients of the vectors, and the terms of each sample and group.
fn vectors(call: &Call<'_>, machine: &mut Machine) {
    let [samples, channels, group_channels] = call.ints(["samples", "channels", "group_channels"]);
    let (groups, by, merged) = (call.grid[0], call.float("by"), call.pointer("merged"));
    let there = |name| call.given(name).filter(|pointer: &Pointer| machine.has(pointer.buffer));
    let (rstd, gamma) = (there("rstd"), there("gamma"));
    let out = ["dbias", "dgamma", "dbeta"].map(there);
    for group in 0..groups {
        let of_group = group * group_channels..(group + 1) * group_channels;
        let scale = |machine: &Machine, channel| gamma.map_or(1.0, |gamma| machine.read(gamma, channel));
        let sum = |machine: &Machine, sample: i64, channel: i64, which: i64| {
            machine.read(merged, (sample * channels + channel) * found(call) + which)
        };
        // Of each sample rstd, q and r.
        let mut terms = vec![None; samples as usize];
        for (sample, terms) in (0..).zip(&mut terms) {
            let Some(rstd) = rstd.map(|rstd| machine.read(rstd, sample * groups + group)) else { continue };
            let [q, r] = [0, 1].map(|which| {
                let of_channel = |channel| scale(machine, channel) * sum(machine, sample, channel, which);
                -rstd * of_group.clone().map(of_channel).sum::<f64>() * by
            });
            for (which, term) in [(0, q), (1, r)] {
                machine.write(call.pointer("terms"), 2 * (sample * groups + group) + which, term);
            }
            *terms = Some([rstd, q, r]);
        }
        for channel in of_group {
            let (mut totals, mut bound) = ([0.0; 3], 0.0);
            for (sample, terms) in (0..).zip(&terms) {
                let [s0, s1, s2, s3, s4] = [0, 1, 2, 3, 4].map(|which| sum(machine, sample, channel, which));
                totals[0] += match *terms {
                    Some([rstd, q, r]) => rstd * scale(machine, channel) * s2 + q * s3 + r * s4,
                    None => s2,
                };
                totals[1] += s1;
                totals[2] += s0;
                if call.has("bounds") {
                    let [s5, s6] = [5, 6].map(|which| sum(machine, sample, channel, which));
                    let of_sample = match *terms {
                        Some([rstd, q, r]) => {
                            let steepest = call.float("steepest");
                            (rstd * scale(machine, channel)).abs() * s5 + q.abs() * steepest + r.abs() * s6
                        }
                        None => s5,
                    };
                    bound = larger(bound, of_sample);
                }
            }
            if let Some(bounds) = call.has("bounds").then(|| call.given("bounds")).flatten() {
                machine.write(bounds, channel, bound);
            }
            for (out, total) in out.into_iter().zip(totals) {
                out.into_iter().for_each(|out| machine.write(out, channel, total));
            }
        }
    }
}

//! The register-tiled inner loop, written once and compiled for each instruction set.
//!
//! A tile is `CO` output channels by `NV` vectors of neighbouring positions. Every step loads `NV`
//! vectors of the input at a tap's offset (an unaligned load, no copy), broadcasts `CO` weights and
//! does `CO * NV` multiply-adds into accumulators that stay in registers over all taps of as many
//! channels as the L1 cache holds the weights and input of.

use crate::buffer::Buffer;
use crate::math::{Moments, Real, finish_line, interleave, moments, normalize_line, normalize_voxel, sum};
use crate::slope::{self, EpilogueLine};
use std::ops::Range;
use volup::Activation;

/// A vector type of one instruction set.
///
/// # Safety
/// The methods may only be called where the instruction set is enabled; `load` and `store` touch
/// `LANES` elements at the pointer, `step` reads `NV` vectors of `x` and `CO` elements of `w`.
pub trait Simd: Sized {
    /// The element.
    type T: Real;
    /// The vector.
    type V: Copy;
    /// Elements in a vector.
    const LANES: usize;
    unsafe fn splat(value: Self::T) -> Self::V;
    unsafe fn load(from: *const Self::T) -> Self::V;
    unsafe fn store(to: *mut Self::T, vector: Self::V);
    /// Stores past the caches, where the instruction set can; `to` is aligned to a whole vector.
    unsafe fn stream(to: *mut Self::T, vector: Self::V);
    /// `a * b + c`
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The multiply-adds of one tap of one channel: `NV` vectors from `x` by `CO` weights from `w`.
    #[inline(always)]
    unsafe fn step<const CO: usize, const NV: usize>(
        sums: &mut [[Self::V; NV]; CO],
        x: *const Self::T,
        w: *const Self::T,
    ) {
        // SAFETY: the caller's contract.
        unsafe { multiply_add::<Self, CO, NV>(sums, x, w) }
    }
}

/// [`Simd::step`] as the compiler makes it.
///
/// # Safety
/// As [`Simd::step`].
#[inline(always)]
unsafe fn multiply_add<S: Simd, const CO: usize, const NV: usize>(
    sums: &mut [[S::V; NV]; CO],
    x: *const S::T,
    w: *const S::T,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut row = [S::splat(S::T::ZERO); NV];
        for (v, vector) in row.iter_mut().enumerate() {
            *vector = S::load(x.add(v * S::LANES));
        }
        for (co, sums) in sums.iter_mut().enumerate() {
            let weight = S::splat(*w.add(co));
            for (sum, &vector) in sums.iter_mut().zip(&row) {
                *sum = S::mul_add(vector, weight, *sum);
            }
        }
    }
}

/// Where a tap finds its operands.
#[derive(Clone, Copy, Debug)]
pub struct TapOffset {
    /// Elements from a position in the slab to what it reads.
    pub x: usize,
    /// Elements from a channel's packed weights to the tap's.
    pub w: usize,
}

/// A row of positions to accumulate: `out[co][p] = sum over channels and taps of x * w`.
pub struct Accumulate<'a, T> {
    /// The slab at the row's first position.
    pub x: *const T,
    /// Elements from one channel of the slab to the next.
    pub x_channel: usize,
    /// Input channels to sum over.
    pub channels: usize,
    /// The taps to sum over.
    pub taps: &'a [TapOffset],
    /// Packed weights of the first channel.
    pub weights: *const T,
    /// Elements from one channel's weights to the next.
    pub w_channel: usize,
    /// Sums, `co` rows of them.
    pub out: *mut T,
    /// Elements from one output channel's sums to the next.
    pub out_channel: usize,
    /// Positions; rounded up to whole vectors in what is read and written.
    pub len: usize,
    /// Output channels: 1, 2, 4 or 8, side by side in `weights`.
    pub co: usize,
}

/// See [`Kernels::norm_sums`].
type NormSums<T> = unsafe fn(&mut [T], &[T], &EpilogueLine<T>) -> [T; 2];

/// The functions of one instruction set for one accumulator type.
///
/// # Safety
/// All of them may only be called on a CPU that has the instruction set; [`Tables::of`] sees to that.
pub struct Kernels<T> {
    /// Elements of a vector.
    pub lanes: usize,
    /// Output channels of a full register tile.
    pub co_block: usize,
    /// Sums over channels and taps. The caller guarantees that the slab is readable at all taps of
    /// all positions, rounded up to whole vectors, and `out` writable likewise.
    pub accumulate: unsafe fn(&Accumulate<'_, T>),
    /// The same with the taps one after the other: for few taps of many channels, whose memory is then
    /// read from front to back.
    pub accumulate_by_taps: unsafe fn(&Accumulate<'_, T>),
    /// Copies a line past the caches, to memory that is valid for as many elements and that nobody
    /// reads before [`fence`].
    pub stream: unsafe fn(&[T], *mut T),
    /// Fills a line from two in turn, beginning with the first.
    pub interleave: unsafe fn(&mut [T], &[T], &[T]),
    /// Adds the bias and applies activations, in place.
    pub finish: unsafe fn(&mut [T], T, [Option<Activation>; 2]),
    /// Count, mean and sum of squared deviations of a line.
    pub moments: unsafe fn(&[T]) -> Moments,
    /// `post((y - mean) * scale + shift)`, in place.
    pub normalize: unsafe fn(&mut [T], T, T, T, Option<Activation>),
    /// The same for the channels of one voxel, each with its own mean, scale and shift.
    pub normalize_voxel: unsafe fn(&mut [T], [&[T]; 3], Option<Activation>),
    /// Takes a line of two in turn apart.
    pub deinterleave: unsafe fn(&[T], &mut [T], &mut [T]),
    /// The sum of a line, in parallel partial sums.
    pub sum: unsafe fn(&[T]) -> T,
    /// The sums that the gradient of a normalization needs, of a line of at most
    /// [`slope::PIECE`] elements of the output's gradient, which is overwritten, and the
    /// convolution's output.
    pub norm_sums: NormSums<T>,
    /// Turns a line of at most [`slope::PIECE`] elements of the output's gradient into that of the
    /// convolution's output, in place.
    pub epilogue_gradient: unsafe fn(&mut [T], &[T], &EpilogueLine<T>),
}

/// Bytes of weights and input that a register tile reads before the next one: what an L1 cache of
/// 32 KiB holds beside the sums.
const TILE_BYTES: usize = 24 << 10;

/// Input channels that are summed before the next tile. With all of them the tiles would read weights
/// and input from the L2 cache each time; so a line's sums come and go between some channels and the
/// next. A tap has `co` weights of a channel, and about a cache line of its input.
fn channels_at_once<T>(args: &Accumulate<'_, T>) -> usize {
    let bytes = args.taps.len() * (args.co * size_of::<T>() + 64);
    let parts = (args.channels * bytes).div_ceil(TILE_BYTES).max(1);
    args.channels.div_ceil(parts).max(1)
}

/// Sums one register tile over some input channels.
///
/// # Safety
/// As [`Kernels::accumulate`], for `NV` vectors from position `start` and `CO` channels from `co`.
#[inline(always)]
unsafe fn tile<S: Simd, const CO: usize, const NV: usize, const BY_TAPS: bool>(
    args: &Accumulate<'_, S::T>,
    channels: &Range<usize>,
    co: usize,
    start: usize,
) {
    // SAFETY: the caller guarantees every address below; they are the ones its contract lists.
    unsafe {
        let mut sums = [[S::splat(S::T::ZERO); NV]; CO];
        let out = args.out.add(co * args.out_channel + start);
        if channels.start > 0 {
            for (co, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = S::load(out.add(co * args.out_channel + v * S::LANES));
                }
            }
        }
        let mut x = args.x.add(start + channels.start * args.x_channel);
        let mut w = args.weights.add(co + channels.start * args.w_channel);
        if BY_TAPS {
            for tap in args.taps {
                let (mut x, mut w) = (x.add(tap.x), w.add(tap.w));
                for _ in channels.clone() {
                    S::step::<CO, NV>(&mut sums, x, w);
                    x = x.add(args.x_channel);
                    w = w.add(args.w_channel);
                }
            }
        } else {
            for _ in channels.clone() {
                for tap in args.taps {
                    S::step::<CO, NV>(&mut sums, x.add(tap.x), w.add(tap.w));
                }
                x = x.add(args.x_channel);
                w = w.add(args.w_channel);
            }
        }
        for (co, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                S::store(out.add(co * args.out_channel + v * S::LANES), sum);
            }
        }
    }
}

/// Sums a row in tiles of `NV` vectors, then of 2 and 1, four by twos.
///
/// # Safety
/// As [`Kernels::accumulate`], for a multiple of `CO` channels.
#[inline(always)]
unsafe fn row<S: Simd, const CO: usize, const NV: usize, const BY_TAPS: bool>(args: &Accumulate<'_, S::T>) {
    debug_assert!(args.co.is_multiple_of(CO));
    let vectors = args.len.div_ceil(S::LANES);
    let at_once = if BY_TAPS { args.channels.max(1) } else { channels_at_once(args) };
    // Once without channels, too: their sums are zero.
    for first in (0..args.channels.max(1)).step_by(at_once) {
        let channels = first..(first + at_once).min(args.channels);
        let mut done = 0;
        while done < vectors {
            let start = done * S::LANES;
            let width = match vectors - done {
                // Not three and one, whose few sums would wait for one another.
                4 if NV == 3 => 2,
                left if left >= NV => NV,
                left => left.min(2),
            };
            for co in (0..args.co).step_by(CO) {
                // SAFETY: tiles stay within the positions rounded up to whole vectors.
                unsafe {
                    match width {
                        1 => tile::<S, CO, 1, BY_TAPS>(args, &channels, co, start),
                        2 => tile::<S, CO, 2, BY_TAPS>(args, &channels, co, start),
                        _ => tile::<S, CO, NV, BY_TAPS>(args, &channels, co, start),
                    }
                }
            }
            done += width;
        }
    }
}

/// Copies a line in streaming stores of whole cache lines, its ends in ordinary ones. An ordinary store
/// reads the line of memory that it is about to overwrite, which these do not; but a cache line of which
/// they write a part costs more than both.
///
/// # Safety
/// As [`Kernels::stream`].
#[inline(always)]
unsafe fn stream_line<S: Simd>(line: &[S::T], to: *mut S::T) {
    let whole = Buffer::line::<S::T>();
    let head = to.align_offset(whole * size_of::<S::T>()).min(line.len());
    let tail = line.len() - (line.len() - head) % whole;
    // SAFETY: the three parts make up the line; the middle one starts aligned and is a whole number of
    // cache lines, each a whole number of vectors.
    unsafe {
        to.copy_from_nonoverlapping(line.as_ptr(), head);
        for at in (head..tail).step_by(S::LANES) {
            S::stream(to.add(at), S::load(line.as_ptr().add(at)));
        }
        to.add(tail).copy_from_nonoverlapping(line.as_ptr().add(tail), line.len() - tail);
    }
}

/// Makes streamed lines visible to other threads. Once a task is often enough: waiting for the
/// stores after every line took longer than they save.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 CPU has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// An instruction set that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// x86-64 with AVX-512 F, VL, BW and DQ.
    Avx512,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// AArch64.
    Neon,
    /// Whatever the compiler's baseline is.
    Portable,
}

impl Isa {
    /// The instruction sets that this CPU has, the fastest first.
    pub fn available() -> Vec<Isa> {
        [Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable]
            .into_iter()
            .filter(|&isa| Tables::of(isa).is_some())
            .collect()
    }

    /// The name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Neon => "neon",
            Isa::Portable => "portable",
        }
    }
}

/// The kernels of one instruction set.
#[derive(Clone, Copy)]
pub struct Tables {
    pub f32: &'static Kernels<f32>,
    pub f64: &'static Kernels<f64>,
}

impl Tables {
    /// The kernels of an instruction set, if this CPU has it: the one place that asks the CPU, which
    /// makes calling what is in the tables sound.
    pub fn of(isa: Isa) -> Option<Tables> {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::detected().then_some(Tables { f32: &avx512::F32, f64: &avx512::F64 }),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::detected().then_some(Tables { f32: &avx2::F32, f64: &avx2::F64 }),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Some(Tables { f32: &neon::F32, f64: &neon::F64 }),
            Isa::Portable => Some(Tables { f32: &portable::F32, f64: &portable::F64 }),
            #[allow(unreachable_patterns, reason = "which patterns are left depends on the target")]
            _ => None,
        }
    }
}

/// Implements [`Simd`] by intrinsics; fused multiply-add is given as an expression, its operands'
/// order differs between instruction sets. A tile of which the compiler makes too little can have a
/// step of its own.
macro_rules! simd {
    ($name:ident, $t:ty, $v:ty, $lanes:literal, $splat:ident, $load:ident, $store:ident, $stream:ident,
     $mul_add:expr $(, ($co:literal, $nv:literal): $full_tile:ident)?) => {
        struct $name;
        impl Simd for $name {
            type T = $t;
            type V = $v;
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn splat(value: $t) -> $v {
                // SAFETY: Simd's contract is the intrinsic's.
                unsafe { $splat(value) }
            }
            #[inline(always)]
            unsafe fn load(from: *const $t) -> $v {
                // SAFETY: Simd's contract is the intrinsic's.
                unsafe { $load(from) }
            }
            #[inline(always)]
            unsafe fn store(to: *mut $t, vector: $v) {
                // SAFETY: Simd's contract is the intrinsic's.
                unsafe { $store(to, vector) }
            }
            #[inline(always)]
            unsafe fn stream(to: *mut $t, vector: $v) {
                // SAFETY: Simd's contract is the intrinsic's.
                unsafe { $stream(to, vector) }
            }
            #[inline(always)]
            unsafe fn mul_add(a: $v, b: $v, c: $v) -> $v {
                let mul_add: unsafe fn($v, $v, $v) -> $v = $mul_add;
                // SAFETY: Simd's contract is the intrinsic's.
                unsafe { mul_add(a, b, c) }
            }
            $(
                #[inline(always)]
                unsafe fn step<const CO: usize, const NV: usize>(
                    sums: &mut [[$v; NV]; CO],
                    x: *const $t,
                    w: *const $t,
                ) {
                    // SAFETY: Simd's contract is handed on; the cast is to the same type.
                    unsafe {
                        if (CO, NV) == ($co, $nv) {
                            $full_tile(&mut *std::ptr::from_mut(sums).cast::<[[$v; $nv]; $co]>(), x, w);
                        } else {
                            multiply_add::<$name, CO, NV>(sums, x, w);
                        }
                    }
                }
            )?
        }
    };
}

/// Compiles the kernels of one instruction set for one type: each `(CO, NV)` pair is the tile for that
/// many channels, the full one first, chosen so that accumulators, one row of vectors and one weight
/// fit the register file.
macro_rules! kernels {
    ($table:ident: $t:ty, $module:ident, $simd:ty, [($co:literal, $nv:literal) $(, ($tile_co:literal, $tile_nv:literal))*],
     $(#[$feature:meta])*) => {
        pub(super) static $table: Kernels<$t> = Kernels {
            lanes: <$simd as Simd>::LANES,
            co_block: $co,
            accumulate: $module::accumulate,
            accumulate_by_taps: $module::accumulate_by_taps,
            stream: $module::stream,
            interleave: $module::interleave_pairs,
            finish: $module::finish,
            moments: $module::moments_of,
            normalize: $module::normalize,
            normalize_voxel: $module::normalize_each,
            deinterleave: $module::deinterleave,
            sum: $module::sum_of,
            norm_sums: $module::norm_sums,
            epilogue_gradient: $module::epilogue_gradient,
        };
        mod $module {
            use super::*;
            type T = $t;

            $(#[$feature])*
            pub(super) unsafe fn accumulate(args: &Accumulate<'_, T>) {
                // SAFETY: the caller's contract is handed on.
                unsafe {
                    match args.co {
                        $($tile_co => row::<$simd, $tile_co, $tile_nv, false>(args),)*
                        _ => row::<$simd, $co, $nv, false>(args),
                    }
                }
            }

            $(#[$feature])*
            pub(super) unsafe fn accumulate_by_taps(args: &Accumulate<'_, T>) {
                // SAFETY: the caller's contract is handed on.
                unsafe {
                    match args.co {
                        $($tile_co => row::<$simd, $tile_co, $tile_nv, true>(args),)*
                        _ => row::<$simd, $co, $nv, true>(args),
                    }
                }
            }

            $(#[$feature])*
            pub(super) unsafe fn stream(line: &[T], to: *mut T) {
                // SAFETY: the caller's contract is handed on.
                unsafe { stream_line::<$simd>(line, to) }
            }

            $(#[$feature])*
            pub(super) unsafe fn interleave_pairs(line: &mut [T], even: &[T], odd: &[T]) {
                interleave(line, even, odd);
            }

            $(#[$feature])*
            pub(super) unsafe fn finish(line: &mut [T], bias: T, activations: [Option<Activation>; 2]) {
                finish_line(line, bias, activations);
            }

            $(#[$feature])*
            pub(super) unsafe fn moments_of(line: &[T]) -> Moments {
                moments(line)
            }

            $(#[$feature])*
            pub(super) unsafe fn normalize(line: &mut [T], mean: T, scale: T, shift: T, post: Option<Activation>) {
                normalize_line(line, mean, scale, shift, post);
            }

            $(#[$feature])*
            pub(super) unsafe fn normalize_each(line: &mut [T], scales: [&[T]; 3], post: Option<Activation>) {
                normalize_voxel(line, scales, post);
            }

            $(#[$feature])*
            pub(super) unsafe fn deinterleave(line: &[T], even: &mut [T], odd: &mut [T]) {
                slope::deinterleave(line, even, odd);
            }

            $(#[$feature])*
            pub(super) unsafe fn sum_of(line: &[T]) -> T {
                sum(line, |value| value)
            }

            $(#[$feature])*
            pub(super) unsafe fn norm_sums(gradient: &mut [T], convolution: &[T], line: &EpilogueLine<T>) -> [T; 2] {
                slope::norm_sums(gradient, convolution, line)
            }

            $(#[$feature])*
            pub(super) unsafe fn epilogue_gradient(gradient: &mut [T], convolution: &[T], line: &EpilogueLine<T>) {
                slope::epilogue_gradient(gradient, convolution, line);
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(test)]
mod tests {
    use super::*;

    /// Every alignment and length, with guards on both sides.
    fn streamed_lines_arrive_whole<T: Real>(kernels: &Kernels<T>) {
        for start in 1..2 * kernels.lanes {
            for len in 0..4 * kernels.lanes {
                let line: Vec<T> = (1..=len).map(|value| T::from_f64(value as f64)).collect();
                let mut memory = vec![T::ZERO; start + len + 1];
                // SAFETY: the memory holds the line from `start` on; the kernels are of this CPU.
                unsafe { (kernels.stream)(&line, memory[start..].as_mut_ptr()) };
                fence();
                assert_eq!(memory[start..start + len], line);
                assert!(memory[start - 1] == T::ZERO && memory[start + len] == T::ZERO);
            }
        }
    }

    /// Sums of small integers, which are exact in any order.
    fn sums_are_those_of_the_definition<T: Real>(
        kernels: &Kernels<T>,
        channels: usize,
        len: usize,
        co: usize,
    ) {
        let (row, shifts) = (len.next_multiple_of(kernels.lanes) + 40, [0, 1, 9, 17, 30, 4, 25]);
        let number = |at: usize| T::from_f64((at * 7 % 11) as f64 - 5.0);
        // A kernel reads whole vectors, and a line of sums holds as many.
        let x: Vec<T> = (0..channels.max(1) * row + 8 * kernels.lanes).map(number).collect();
        let weights: Vec<T> = (0..channels.max(1) * shifts.len() * co).map(|at| number(at + 3)).collect();
        let taps: Vec<TapOffset> =
            shifts.iter().enumerate().map(|(tap, &x)| TapOffset { x, w: tap * co }).collect();
        let mut out = vec![T::from_f64(-77.0); co * row];
        let args = Accumulate {
            x: x.as_ptr(),
            x_channel: row,
            channels,
            taps: &taps,
            weights: weights.as_ptr(),
            w_channel: shifts.len() * co,
            out: out.as_mut_ptr(),
            out_channel: row,
            len,
            co,
        };
        // SAFETY: the vectors are as long as the contract asks for; the kernels are of this CPU.
        unsafe { (kernels.accumulate)(&args) };
        for (lane, out) in out.chunks_exact(row).enumerate() {
            for (at, &got) in out[..len].iter().enumerate() {
                let products = (0..channels).flat_map(|ci| taps.iter().map(move |tap| (ci, tap)));
                let expected: f64 = products
                    .map(|(ci, tap)| {
                        let weight = weights[ci * shifts.len() * co + tap.w + lane];
                        x[ci * row + tap.x + at].to_f64() * weight.to_f64()
                    })
                    .sum();
                assert_eq!(got.to_f64(), expected, "{channels} channels, {len} positions, {lane} of {co}");
            }
        }
    }

    #[test]
    fn tiles_of_all_widths_sum_all_channels() {
        for tables in Isa::available().into_iter().filter_map(Tables::of) {
            for co in [1, 2, 4, 8] {
                // None, some, and more than are summed at once.
                for channels in [0, 5, 200] {
                    for len in [1, 16, 40, 100] {
                        sums_are_those_of_the_definition(tables.f32, channels, len, co);
                        sums_are_those_of_the_definition(tables.f64, channels, len, co);
                    }
                }
            }
        }
    }

    #[test]
    fn streaming_writes_the_line_and_nothing_else() {
        for tables in Isa::available().into_iter().filter_map(Tables::of) {
            streamed_lines_arrive_whole(tables.f32);
            streamed_lines_arrive_whole(tables.f64);
        }
    }
}

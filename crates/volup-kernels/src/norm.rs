//! Group normalization in place: partial statistics, their merge, and the scaling.
//!
//! `y` is [N, C, voxels] contiguous: NCDHW (the `rows` kernels) or NDHWC (the `columns` kernels). `T`
//! is its type, `A` that of the statistics: f64 for f64, else f32. Equal calls give equal bits,
//! whatever the grid. `y` is aligned to 16 bytes, whoever allocates it; no kernel assumes anything of
//! sizes: where vectors would not be aligned or reach outside, a slower path takes over. Parameters
//! are listed in order; sizes count elements, and are i32 where nothing else is said. Offsets are in
//! 64 bits. Every grid is any number of blocks along the first axis, each of which takes every so
//! manieth task; a good number is what fits on the device at once.
//!
//! # Statistics
//! A partial statistic is the mean of some of a group's elements, the sum of their squared deviations
//! from that mean, and their count: three arrays of `A` (`mean`, `m2`, `count`), indexed alike. A block
//! holds a tile in registers and passes over it twice, so no square of a mean is ever subtracted; sums
//! are at most 32 additions in a row and a tree.
//!
//! `norm_stats_rows<T, A, B>(y, mean, m2, count, rows, length: i64, chunks)`: `rows = N * G` runs of
//! `length = C / G * voxels` elements. `chunks = ceil((length + 15) / B)` a row, as a chunk starts at a
//! multiple of 16 elements from the tensor's start; the last may be empty. Partial
//! `row * chunks + chunk`; each array has `rows * chunks` elements. `rows * chunks` tasks.
//!
//! `norm_stats_columns<T, A, R, B>(y, mean, m2, count, samples, length: i64, width, chunks)`: a sample
//! of `length = voxels * C` elements is taken as rows of `width`, a multiple of C, whose column j holds
//! channel `j % C`; best is a multiple of `B` too, such as `lcm(C, B)`. Its last row may be short.
//! `chunks = ceil(length / (R * width))` of R rows. Partial `(sample * chunks + chunk) * width + j`;
//! each array has `samples * chunks * width` elements. `samples * chunks * ceil(width / B)` tasks.
//! Whole tiles are read in vectors where `width` and `length` are multiples of 16.
//! `R * width` is below 2^31.
//!
//! # Merge
//! `norm_merge<A, B>(part_mean, part_m2, part_count, mean, rstd, samples, groups, chunks, repeats,
//! columns, sample_step: i64, group_step: i64, chunk_step: i64, repeat_step: i64, eps: f64)` merges,
//! for each sample and group, the `chunks * repeats * columns` (below 2^31) partials at
//! `sample * sample_step + group * group_step + chunk * chunk_step + repeat * repeat_step + column`,
//! in double precision and a fixed order, into `mean` and `rstd = 1 / sqrt(M2 / count + eps)`, both
//! [samples, groups] of `A`, rounded once. `samples * groups` tasks.
//!
//! | after | chunks | repeats | columns | sample_step | group_step | chunk_step | repeat_step |
//! |---|---|---|---|---|---|---|---|
//! | rows | chunks | 1 | 1 | `G * chunks` | chunks | 1 | 0 |
//! | columns | chunks | `width / C` | `C / G` | `chunks * width` | `C / G` | width | C |
//!
//! # Scaling
//! `y = act((y - mean) * (rstd * gamma) + beta)` in `A`, rounded once; the activation by its code in
//! `epilogue`. `WIDE` is 1 if `A` is f64, else 0. `gamma` and `beta` are [C] of `T`; both may be null
//! if `affine` is 0.
//!
//! `norm_apply_rows<T, A, WIDE, B>(y, mean, rstd, gamma, beta, affine, samples, channels,
//! group_channels, voxels: i64, activation, slope: f64)`: `ceil(N * C * voxels / B)` tasks. Fast where
//! `voxels >= B`, or at least where most tiles lie in two rows.
//!
//! `norm_apply_columns<T, A, WIDE, R, B>(y, mean, rstd, gamma, beta, affine, samples, channels,
//! group_channels, voxels: i64, width, activation, slope: f64)`: `width` as above;
//! `N * ceil(voxels * C / (R * width)) * ceil(width / B)` tasks.
#[cutile::module]
pub mod norm {
    use crate::epilogue::epilogue::activate;
    use cutile::core::*;

    /// A number in 64 bits.
    fn wide(x: i32) -> i64 {
        let tile: Tile<i32, { [] }> = scalar_to_tile(x);
        let tile: Tile<i64, { [] }> = exti(tile);
        tile_to_scalar(tile)
    }

    /// A number that fits in 32 bits.
    fn narrow(x: i64) -> i32 {
        let tile: Tile<i64, { [] }> = scalar_to_tile(x);
        let tile: Tile<i32, { [] }> = trunci(tile, overflow::NoSignedWrap);
        tile_to_scalar(tile)
    }

    /// `x` limited to what 32 bits hold, from 0 up.
    fn limited(x: i64) -> i32 {
        narrow(max(min(x, 2147483647i64), 0i64))
    }

    /// A pointer to `p[at]`, `at` a multiple of 16 and `p` a multiple of 16 bytes.
    unsafe fn aligned<T: ElementType>(p: *mut T, at: i64) -> PointerTile<*mut T, { [] }> {
        let at: i64 = unsafe { assume_div_by::<_, 16>(at) };
        let at: Tile<i64, { [] }> = scalar_to_tile(at);
        let p: PointerTile<*mut T, { [] }> = pointer_to_tile(p);
        let p: PointerTile<*mut T, { [] }> = unsafe { assume_div_by::<_, 16>(p) };
        let p: PointerTile<*mut T, { [] }> = p.offset_tile(at);
        p
    }

    /// A pointer to `p[at]`.
    unsafe fn anywhere<T: ElementType>(p: *mut T, at: i64) -> PointerTile<*mut T, { [] }> {
        let at: Tile<i64, { [] }> = scalar_to_tile(at);
        let p: PointerTile<*mut T, { [] }> = pointer_to_tile(p);
        let p: PointerTile<*mut T, { [] }> = p.offset_tile(at);
        p
    }

    /// `p[at]` for one element, which becomes `otherwise` if `on` is 0.
    unsafe fn one<T: ElementType, A: ElementType>(p: *mut T, at: i64, on: i32, otherwise: f32) -> Tile<A, { [1] }> {
        let p: PointerTile<*mut T, { [] }> = unsafe { anywhere(p, at) };
        let p: PointerTile<*mut T, { [1] }> = p.reshape(const_shape![1]);
        let on: Tile<i32, { [1] }> = broadcast_scalar(on, const_shape![1]);
        let none: Tile<i32, { [1] }> = constant(0i32, const_shape![1]);
        let on: Tile<bool, { [1] }> = ne_tile(on, none);
        let (value, _token): (Tile<T, { [1] }>, Token) = unsafe {
            load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(on), None, None, Latency::<0>)
        };
        let value: Tile<A, { [1] }> = convert_tile(value);
        let otherwise: Tile<f32, { [1] }> = broadcast_scalar(otherwise, const_shape![1]);
        let otherwise: Tile<A, { [1] }> = convert_tile(otherwise);
        select(on, value, otherwise)
    }

    /// `p[at] = value`.
    unsafe fn put<A: ElementType>(p: *mut A, at: i64, value: Tile<A, { [1] }>) {
        let p: PointerTile<*mut A, { [] }> = unsafe { anywhere(p, at) };
        let p: PointerTile<*mut A, { [1] }> = p.reshape(const_shape![1]);
        let _token: Token = unsafe {
            store_ptr_tko(p, value, ordering::Weak, None::<scope::TileBlock>, None, None, Latency::<0>)
        };
    }

    #[cutile::entry()]
    unsafe fn norm_stats_rows<T: ElementType, A: ElementType, const B: i32>(
        y: *mut T,
        mean: *mut A,
        m2: *mut A,
        count: *mut A,
        rows: i32,
        length: i64,
        chunks: i32,
    ) {
        let lane: Tile<i32, { [B] }> = iota(const_shape![B]);
        let zero: Tile<A, { [B] }> = constant(A::ZERO, const_shape![B]);
        for task in (program_id(0i32)..rows * chunks).step_by(num_programs(0i32) as usize) {
            let row: i32 = task / chunks;
            let begin: i64 = wide(row) * length;
            let first: i64 = (begin / 16i64) * 16i64 + wide(task % chunks) * wide(B);
            // Lanes [low, high) are the row's.
            let low: i32 = limited(begin - first);
            let high: i32 = limited(begin + length - first);
            let at: PointerTile<*mut T, { [] }> = unsafe { aligned(y, first) };
            let at: PointerTile<*mut T, { [1] }> = at.reshape(const_shape![1]);
            let at: PointerTile<*mut T, { [B] }> = at.broadcast(const_shape![B]);
            let at: PointerTile<*mut T, { [B] }> = at.offset_tile(lane);
            let elements: i32 = max(min(high, B) - low, 0i32);
            let n: Tile<i32, { [1] }> = broadcast_scalar(elements, const_shape![1]);
            let n: Tile<A, { [1] }> = convert_tile(n);
            let least: Tile<i32, { [1] }> = broadcast_scalar(max(elements, 1i32), const_shape![1]);
            let least: Tile<A, { [1] }> = convert_tile(least);
            let mut centre: Tile<A, { [1] }> = constant(A::ZERO, const_shape![1]);
            let mut spread: Tile<A, { [1] }> = constant(A::ZERO, const_shape![1]);
            if elements == B {
                let (v, _t0): (Tile<T, { [B] }>, Token) = unsafe {
                    load_ptr_tko(at, ordering::Weak, None::<scope::TileBlock>, None, None, None, Latency::<0>)
                };
                let x: Tile<A, { [B] }> = convert_tile(v);
                let sum: Tile<A, { [] }> = reduce_sum(x, 0i32);
                centre = sum.reshape(const_shape![1]) / least;
                let off: Tile<A, { [B] }> = x - centre.broadcast(const_shape![B]);
                let sum: Tile<A, { [] }> = reduce_sum(off * off, 0i32);
                spread = sum.reshape(const_shape![1]);
            } else {
                let inside: Tile<bool, { [B] }> = ge_tile(lane, broadcast_scalar(low, const_shape![B]))
                    & lt_tile(lane, broadcast_scalar(high, const_shape![B]));
                let (v, _t1): (Tile<T, { [B] }>, Token) = unsafe {
                    load_ptr_tko(at, ordering::Weak, None::<scope::TileBlock>, Some(inside), None, None, Latency::<0>)
                };
                let x: Tile<A, { [B] }> = convert_tile(v);
                let x: Tile<A, { [B] }> = select(inside, x, zero);
                let sum: Tile<A, { [] }> = reduce_sum(x, 0i32);
                centre = sum.reshape(const_shape![1]) / least;
                let off: Tile<A, { [B] }> = select(inside, x - centre.broadcast(const_shape![B]), zero);
                let sum: Tile<A, { [] }> = reduce_sum(off * off, 0i32);
                spread = sum.reshape(const_shape![1]);
            }
            unsafe { put(mean, wide(task), centre) };
            unsafe { put(m2, wide(task), spread) };
            unsafe { put(count, wide(task), n) };
        }
    }

    /// The pointers of an R x B tile of rows `pitch` apart.
    unsafe fn block<T: ElementType, const R: i32, const B: i32>(
        at: PointerTile<*mut T, { [] }>,
        pitch: i32,
    ) -> PointerTile<*mut T, { [R, B] }> {
        let at: PointerTile<*mut T, { [1, 1] }> = at.reshape(const_shape![1, 1]);
        let at: PointerTile<*mut T, { [R, B] }> = at.broadcast(const_shape![R, B]);
        let offsets: Tile<i32, { [R, B] }> = offsets::<R, B>(pitch);
        let at: PointerTile<*mut T, { [R, B] }> = at.offset_tile(offsets);
        at
    }

    /// `row * pitch + column`.
    fn offsets<const R: i32, const B: i32>(pitch: i32) -> Tile<i32, { [R, B] }> {
        let row: Tile<i32, { [R] }> = iota(const_shape![R]);
        let row: Tile<i32, { [R] }> = row * broadcast_scalar(pitch, const_shape![R]);
        let column: Tile<i32, { [B] }> = iota(const_shape![B]);
        row.reshape(const_shape![R, 1]).broadcast(const_shape![R, B])
            + column.reshape(const_shape![1, B]).broadcast(const_shape![R, B])
    }

    /// Which of a tile's elements are in their row and before the end.
    fn within<const R: i32, const B: i32>(pitch: i32, columns: i32, elements: i32) -> Tile<bool, { [R, B] }> {
        let column: Tile<i32, { [B] }> = iota(const_shape![B]);
        let in_row: Tile<bool, { [B] }> = lt_tile(column, broadcast_scalar(columns, const_shape![B]));
        let before: Tile<bool, { [R, B] }> =
            lt_tile(offsets::<R, B>(pitch), broadcast_scalar(elements, const_shape![R, B]));
        before & in_row.reshape(const_shape![1, B]).broadcast(const_shape![R, B])
    }

    /// `p[at + lane] = value` where `on`.
    unsafe fn put_all<A: ElementType, const B: i32>(
        p: *mut A,
        at: i64,
        value: Tile<A, { [B] }>,
        on: Tile<bool, { [B] }>,
    ) {
        let lane: Tile<i32, { [B] }> = iota(const_shape![B]);
        let p: PointerTile<*mut A, { [] }> = unsafe { anywhere(p, at) };
        let p: PointerTile<*mut A, { [1] }> = p.reshape(const_shape![1]);
        let p: PointerTile<*mut A, { [B] }> = p.broadcast(const_shape![B]);
        let p: PointerTile<*mut A, { [B] }> = p.offset_tile(lane);
        let _token: Token = unsafe {
            store_ptr_tko(p, value, ordering::Weak, None::<scope::TileBlock>, Some(on), None, Latency::<0>)
        };
    }

    #[cutile::entry()]
    unsafe fn norm_stats_columns<T: ElementType, A: ElementType, const R: i32, const B: i32>(
        y: *mut T,
        mean: *mut A,
        m2: *mut A,
        count: *mut A,
        samples: i32,
        length: i64,
        width: i32,
        chunks: i32,
    ) {
        let lane: Tile<i32, { [B] }> = iota(const_shape![B]);
        let strips: i32 = ceil_div(width, B);
        let total: i32 = samples * chunks * strips;
        let vectors: bool = width % 16i32 == 0i32 && length % 16i64 == 0i64;
        for task in (program_id(0i32)..total).step_by(num_programs(0i32) as usize) {
            let column: i32 = (task % strips) * B;
            let chunk: i32 = (task / strips) % chunks;
            let sample: i32 = (task / strips) / chunks;
            let before: i64 = wide(chunk) * wide(R) * wide(width) + wide(column);
            let first: i64 = wide(sample) * length + before;
            // Elements from the tile's first to the sample's end.
            let elements: i32 = limited(length - before);
            let mut n: Tile<A, { [B] }> = constant(A::ZERO, const_shape![B]);
            let mut centre: Tile<A, { [B] }> = constant(A::ZERO, const_shape![B]);
            let mut spread: Tile<A, { [B] }> = constant(A::ZERO, const_shape![B]);
            if vectors && column + B <= width && elements > (R - 1i32) * width + B - 1i32 {
                let all: Tile<i32, { [B] }> = broadcast_scalar(R, const_shape![B]);
                n = convert_tile(all);
                let pitch: i32 = unsafe { assume_div_by::<_, 16>(width) };
                let at: PointerTile<*mut T, { [] }> = unsafe { aligned(y, first) };
                let at: PointerTile<*mut T, { [R, B] }> = unsafe { block::<T, R, B>(at, pitch) };
                let (v, _t0): (Tile<T, { [R, B] }>, Token) = unsafe {
                    load_ptr_tko(at, ordering::Weak, None::<scope::TileBlock>, None, None, None, Latency::<0>)
                };
                let x: Tile<A, { [R, B] }> = convert_tile(v);
                let sum: Tile<A, { [B] }> = reduce_sum(x, 0i32);
                centre = sum / n;
                let off: Tile<A, { [R, B] }> = x - centre.reshape(const_shape![1, B]).broadcast(const_shape![R, B]);
                spread = reduce_sum(off * off, 0i32);
            } else {
                let inside: Tile<bool, { [R, B] }> = within::<R, B>(width, width - column, elements);
                let zero: Tile<A, { [R, B] }> = constant(A::ZERO, const_shape![R, B]);
                let one: Tile<i32, { [R, B] }> = constant(1i32, const_shape![R, B]);
                let none: Tile<i32, { [R, B] }> = constant(0i32, const_shape![R, B]);
                let at: PointerTile<*mut T, { [] }> = unsafe { anywhere(y, first) };
                let at: PointerTile<*mut T, { [R, B] }> = unsafe { block::<T, R, B>(at, width) };
                let (v, _t1): (Tile<T, { [R, B] }>, Token) = unsafe {
                    load_ptr_tko(at, ordering::Weak, None::<scope::TileBlock>, Some(inside), None, None, Latency::<0>)
                };
                let x: Tile<A, { [R, B] }> = convert_tile(v);
                let x: Tile<A, { [R, B] }> = select(inside, x, zero);
                let filled: Tile<i32, { [B] }> = reduce_sum(select(inside, one, none), 0i32);
                n = convert_tile(filled);
                let least: Tile<i32, { [B] }> = constant(1i32, const_shape![B]);
                let least: Tile<A, { [B] }> = convert_tile(max_tile(filled, least));
                let sum: Tile<A, { [B] }> = reduce_sum(x, 0i32);
                centre = sum / least;
                let off: Tile<A, { [R, B] }> = x - centre.reshape(const_shape![1, B]).broadcast(const_shape![R, B]);
                let off: Tile<A, { [R, B] }> = select(inside, off, zero);
                spread = reduce_sum(off * off, 0i32);
            }
            let on: Tile<bool, { [B] }> = lt_tile(lane, broadcast_scalar(width - column, const_shape![B]));
            let to: i64 = (wide(sample) * wide(chunks) + wide(chunk)) * wide(width) + wide(column);
            unsafe { put_all(mean, to, centre, on) };
            unsafe { put_all(m2, to, spread, on) };
            unsafe { put_all(count, to, n, on) };
        }
    }

    /// `p[at]` where `on`, else 0.
    unsafe fn gather<T: ElementType, A: ElementType, const B: i32>(
        p: *mut T,
        at: Tile<i64, { [B] }>,
        on: Tile<bool, { [B] }>,
    ) -> Tile<A, { [B] }> {
        let p: PointerTile<*mut T, { [] }> = pointer_to_tile(p);
        let p: PointerTile<*mut T, { [1] }> = p.reshape(const_shape![1]);
        let p: PointerTile<*mut T, { [B] }> = p.broadcast(const_shape![B]);
        let p: PointerTile<*mut T, { [B] }> = p.offset_tile(at);
        let (value, _token): (Tile<T, { [B] }>, Token) = unsafe {
            load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(on), None, None, Latency::<0>)
        };
        let value: Tile<A, { [B] }> = convert_tile(value);
        let zero: Tile<A, { [B] }> = constant(A::ZERO, const_shape![B]);
        select(on, value, zero)
    }

    /// Where a group's `index`-th partial statistics are.
    fn place<const B: i32>(
        index: Tile<i32, { [B] }>,
        columns: i32,
        repeats: i32,
        chunk_step: i64,
        repeat_step: i64,
        first: i64,
    ) -> Tile<i64, { [B] }> {
        let columns: Tile<i32, { [B] }> = broadcast_scalar(columns, const_shape![B]);
        let repeats: Tile<i32, { [B] }> = broadcast_scalar(repeats, const_shape![B]);
        let rest: Tile<i32, { [B] }> = index / columns;
        let column: Tile<i32, { [B] }> = index - rest * columns;
        let chunk: Tile<i32, { [B] }> = rest / repeats;
        let repeat: Tile<i32, { [B] }> = rest - chunk * repeats;
        let column: Tile<i64, { [B] }> = exti(column);
        let chunk: Tile<i64, { [B] }> = exti(chunk);
        let repeat: Tile<i64, { [B] }> = exti(repeat);
        column
            + chunk * broadcast_scalar(chunk_step, const_shape![B])
            + repeat * broadcast_scalar(repeat_step, const_shape![B])
            + broadcast_scalar(first, const_shape![B])
    }

    #[cutile::entry()]
    unsafe fn norm_merge<A: ElementType, const B: i32>(
        part_mean: *mut A,
        part_m2: *mut A,
        part_count: *mut A,
        mean: *mut A,
        rstd: *mut A,
        samples: i32,
        groups: i32,
        chunks: i32,
        repeats: i32,
        columns: i32,
        sample_step: i64,
        group_step: i64,
        chunk_step: i64,
        repeat_step: i64,
        eps: f64,
    ) {
        let lane: Tile<i32, { [B] }> = iota(const_shape![B]);
        let many: i32 = chunks * repeats * columns;
        let end: Tile<i32, { [B] }> = broadcast_scalar(many, const_shape![B]);
        for task in (program_id(0i32)..samples * groups).step_by(num_programs(0i32) as usize) {
            let first: i64 = wide(task / groups) * sample_step + wide(task % groups) * group_step;
            let mut total: Tile<f64, { [B] }> = constant(0.0f64, const_shape![B]);
            let mut sum: Tile<f64, { [B] }> = constant(0.0f64, const_shape![B]);
            for at in (0i32..many).step_by(B as usize) {
                let index: Tile<i32, { [B] }> = lane + broadcast_scalar(at, const_shape![B]);
                let on: Tile<bool, { [B] }> = lt_tile(index, end);
                let from: Tile<i64, { [B] }> = place(index, columns, repeats, chunk_step, repeat_step, first);
                let n: Tile<f64, { [B] }> = unsafe { gather::<A, f64, B>(part_count, from, on) };
                let m: Tile<f64, { [B] }> = unsafe { gather::<A, f64, B>(part_mean, from, on) };
                total = total + n;
                sum = sum + n * m;
            }
            let total: Tile<f64, { [] }> = reduce_sum(total, 0i32);
            let total: Tile<f64, { [1] }> = total.reshape(const_shape![1]);
            let sum: Tile<f64, { [] }> = reduce_sum(sum, 0i32);
            let centre: Tile<f64, { [1] }> = sum.reshape(const_shape![1]) / total;
            let mut spread: Tile<f64, { [B] }> = constant(0.0f64, const_shape![B]);
            for at in (0i32..many).step_by(B as usize) {
                let index: Tile<i32, { [B] }> = lane + broadcast_scalar(at, const_shape![B]);
                let on: Tile<bool, { [B] }> = lt_tile(index, end);
                let from: Tile<i64, { [B] }> = place(index, columns, repeats, chunk_step, repeat_step, first);
                let n: Tile<f64, { [B] }> = unsafe { gather::<A, f64, B>(part_count, from, on) };
                let m: Tile<f64, { [B] }> = unsafe { gather::<A, f64, B>(part_mean, from, on) };
                let m2: Tile<f64, { [B] }> = unsafe { gather::<A, f64, B>(part_m2, from, on) };
                let off: Tile<f64, { [B] }> = m - centre.broadcast(const_shape![B]);
                spread = spread + (m2 + n * off * off);
            }
            // Lanes that have nothing in them hold 0, as count and as spread, unless the mean is not finite.
            let spread: Tile<f64, { [] }> = reduce_sum(spread, 0i32);
            let spread: Tile<f64, { [1] }> = spread.reshape(const_shape![1]);
            let eps: Tile<f64, { [1] }> = broadcast_scalar(eps, const_shape![1]);
            let one: Tile<f64, { [1] }> = constant(1.0f64, const_shape![1]);
            let root: Tile<f64, { [1] }> = sqrt(spread / total + eps, rounding::NearestEven, ftz::Disabled);
            let centre: Tile<A, { [1] }> = convert_tile(centre);
            let inverse: Tile<A, { [1] }> = convert_tile(one / root);
            unsafe { put(mean, wide(task), centre) };
            unsafe { put(rstd, wide(task), inverse) };
        }
    }

    /// `(y - mean) * scale + shift`, then the activation.
    fn normalized<A: ElementType, const WIDE: i32, const M: i32, const B: i32>(
        y: Tile<A, { [M, B] }>,
        mean: Tile<A, { [M, B] }>,
        scale: Tile<A, { [M, B] }>,
        shift: Tile<A, { [M, B] }>,
        activation: i32,
        slope: f64,
    ) -> Tile<A, { [M, B] }> {
        let z: Tile<A, { [M, B] }> = fma(y - mean, scale, shift, rounding::NearestEven, ftz::Disabled);
        activate::<A, WIDE, M, B>(z, activation, slope)
    }

    /// What is the same for all of a row of B: `a` before lane `border`, `b` from there on.
    fn pick<A: ElementType, const B: i32>(
        a: Tile<A, { [1] }>,
        b: Tile<A, { [1] }>,
        border: i32,
    ) -> Tile<A, { [1, B] }> {
        let lane: Tile<i32, { [B] }> = iota(const_shape![B]);
        let early: Tile<bool, { [B] }> = lt_tile(lane, broadcast_scalar(border, const_shape![B]));
        let both: Tile<A, { [B] }> = select(early, a.broadcast(const_shape![B]), b.broadcast(const_shape![B]));
        both.reshape(const_shape![1, B])
    }

    #[cutile::entry()]
    unsafe fn norm_apply_rows<T: ElementType, A: ElementType, const WIDE: i32, const B: i32>(
        y: *mut T,
        mean: *mut A,
        rstd: *mut A,
        gamma: *mut T,
        beta: *mut T,
        affine: i32,
        samples: i32,
        channels: i32,
        group_channels: i32,
        voxels: i64,
        activation: i32,
        slope: f64,
    ) {
        let lane: Tile<i32, { [B] }> = iota(const_shape![B]);
        let rows: i32 = samples * channels;
        let size: i64 = wide(rows) * voxels;
        let tiles: i32 = narrow((size + wide(B - 1i32)) / wide(B));
        for tile in (program_id(0i32)..tiles).step_by(num_programs(0i32) as usize) {
            let first: i64 = wide(tile) * wide(B);
            let row: i32 = narrow(first / voxels);
            let column: i64 = first % voxels;
            let at: PointerTile<*mut T, { [] }> = unsafe { aligned(y, first) };
            let at: PointerTile<*mut T, { [1, 1] }> = at.reshape(const_shape![1, 1]);
            let at: PointerTile<*mut T, { [1, B] }> = at.broadcast(const_shape![1, B]);
            let at: PointerTile<*mut T, { [1, B] }> = at.offset_tile(lane.reshape(const_shape![1, B]));
            if column + wide(B) <= voxels + voxels && first + wide(B) <= size {
                // A whole tile in at most two rows.
                let border: i32 = limited(voxels - column);
                let next: i32 = min(row + 1i32, rows - 1i32);
                let (c0, c1): (i32, i32) = (row % channels, next % channels);
                let (g0, g1): (i64, i64) = (wide(row / group_channels), wide(next / group_channels));
                let m0: Tile<A, { [1] }> = unsafe { one::<A, A>(mean, g0, 1i32, 0.0f32) };
                let m1: Tile<A, { [1] }> = unsafe { one::<A, A>(mean, g1, 1i32, 0.0f32) };
                let r0: Tile<A, { [1] }> = unsafe { one::<A, A>(rstd, g0, 1i32, 0.0f32) };
                let r1: Tile<A, { [1] }> = unsafe { one::<A, A>(rstd, g1, 1i32, 0.0f32) };
                let s0: Tile<A, { [1] }> = unsafe { one::<T, A>(gamma, wide(c0), affine, 1.0f32) };
                let s1: Tile<A, { [1] }> = unsafe { one::<T, A>(gamma, wide(c1), affine, 1.0f32) };
                let h0: Tile<A, { [1] }> = unsafe { one::<T, A>(beta, wide(c0), affine, 0.0f32) };
                let h1: Tile<A, { [1] }> = unsafe { one::<T, A>(beta, wide(c1), affine, 0.0f32) };
                let centre: Tile<A, { [1, B] }> = pick::<A, B>(m0, m1, border);
                let scale: Tile<A, { [1, B] }> = pick::<A, B>(r0 * s0, r1 * s1, border);
                let shift: Tile<A, { [1, B] }> = pick::<A, B>(h0, h1, border);
                let (v, t0): (Tile<T, { [1, B] }>, Token) = unsafe {
                    load_ptr_tko(at, ordering::Weak, None::<scope::TileBlock>, None, None, None, Latency::<0>)
                };
                let v: Tile<A, { [1, B] }> = convert_tile(v);
                let z: Tile<A, { [1, B] }> = normalized::<A, WIDE, 1, B>(v, centre, scale, shift, activation, slope);
                let z: Tile<T, { [1, B] }> = convert_tile(z);
                let _t1: Token = unsafe {
                    store_ptr_tko(at, z, ordering::Weak, None::<scope::TileBlock>, None, Some(t0), Latency::<0>)
                };
            } else {
                // Many short rows, or the end.
                let left: Tile<i32, { [B] }> = broadcast_scalar(limited(size - first), const_shape![B]);
                let on: Tile<bool, { [B] }> = lt_tile(lane, left);
                // A row that is longer than 32 bits count keeps its end.
                let spare: i64 = max(voxels - 1073741824i64, 0i64);
                let start: Tile<i32, { [B] }> = broadcast_scalar(limited(column - spare), const_shape![B]);
                let pitch: Tile<i32, { [B] }> = broadcast_scalar(limited(voxels - spare), const_shape![B]);
                let rows_on: Tile<i32, { [B] }> = (start + lane) / pitch + broadcast_scalar(row, const_shape![B]);
                let channel: Tile<i32, { [B] }> = rows_on % broadcast_scalar(channels, const_shape![B]);
                let group: Tile<i32, { [B] }> = rows_on / broadcast_scalar(group_channels, const_shape![B]);
                let channel: Tile<i64, { [B] }> = exti(channel);
                let group: Tile<i64, { [B] }> = exti(group);
                let none: Tile<i32, { [B] }> = constant(0i32, const_shape![B]);
                let affected: Tile<bool, { [B] }> = ne_tile(broadcast_scalar(affine, const_shape![B]), none);
                let affected: Tile<bool, { [B] }> = affected & on;
                let unit: Tile<f32, { [B] }> = constant(1.0f32, const_shape![B]);
                let unit: Tile<A, { [B] }> = convert_tile(unit);
                let centre: Tile<A, { [B] }> = unsafe { gather::<A, A, B>(mean, group, on) };
                let inverse: Tile<A, { [B] }> = unsafe { gather::<A, A, B>(rstd, group, on) };
                let factor: Tile<A, { [B] }> = unsafe { gather::<T, A, B>(gamma, channel, affected) };
                let factor: Tile<A, { [B] }> = select(affected, factor, unit);
                let shift: Tile<A, { [B] }> = unsafe { gather::<T, A, B>(beta, channel, affected) };
                let scale: Tile<A, { [B] }> = inverse * factor;
                let on: Tile<bool, { [1, B] }> = on.reshape(const_shape![1, B]);
                let (v, t0): (Tile<T, { [1, B] }>, Token) = unsafe {
                    load_ptr_tko(at, ordering::Weak, None::<scope::TileBlock>, Some(on), None, None, Latency::<0>)
                };
                let v: Tile<A, { [1, B] }> = convert_tile(v);
                let z: Tile<A, { [1, B] }> = normalized::<A, WIDE, 1, B>(
                    v,
                    centre.reshape(const_shape![1, B]),
                    scale.reshape(const_shape![1, B]),
                    shift.reshape(const_shape![1, B]),
                    activation,
                    slope,
                );
                let z: Tile<T, { [1, B] }> = convert_tile(z);
                let _t1: Token = unsafe {
                    store_ptr_tko(at, z, ordering::Weak, None::<scope::TileBlock>, Some(on), Some(t0), Latency::<0>)
                };
            }
        }
    }

    #[cutile::entry()]
    unsafe fn norm_apply_columns<T: ElementType, A: ElementType, const WIDE: i32, const R: i32, const B: i32>(
        y: *mut T,
        mean: *mut A,
        rstd: *mut A,
        gamma: *mut T,
        beta: *mut T,
        affine: i32,
        samples: i32,
        channels: i32,
        group_channels: i32,
        voxels: i64,
        width: i32,
        activation: i32,
        slope: f64,
    ) {
        let lane: Tile<i32, { [B] }> = iota(const_shape![B]);
        let strips: i32 = ceil_div(width, B);
        let length: i64 = voxels * wide(channels);
        let many: i64 = wide(R) * wide(width);
        let chunks: i32 = narrow((length + many - 1i64) / many);
        let total: i32 = samples * chunks * strips;
        let vectors: bool = width % 16i32 == 0i32 && length % 16i64 == 0i64;
        for task in (program_id(0i32)..total).step_by(num_programs(0i32) as usize) {
            let column: i32 = (task % strips) * B;
            let chunk: i32 = (task / strips) % chunks;
            let sample: i32 = (task / strips) / chunks;
            let before: i64 = wide(chunk) * many + wide(column);
            let first: i64 = wide(sample) * length + before;
            let elements: i32 = limited(length - before);

            // What belongs to each column.
            let in_row: Tile<bool, { [B] }> = lt_tile(lane, broadcast_scalar(width - column, const_shape![B]));
            let channel: Tile<i32, { [B] }> =
                (lane + broadcast_scalar(column, const_shape![B])) % broadcast_scalar(channels, const_shape![B]);
            let group: Tile<i32, { [B] }> = channel / broadcast_scalar(group_channels, const_shape![B])
                + broadcast_scalar(sample * (channels / group_channels), const_shape![B]);
            let channel: Tile<i64, { [B] }> = exti(channel);
            let group: Tile<i64, { [B] }> = exti(group);
            let none: Tile<i32, { [B] }> = constant(0i32, const_shape![B]);
            let affected: Tile<bool, { [B] }> = ne_tile(broadcast_scalar(affine, const_shape![B]), none);
            let unit: Tile<f32, { [B] }> = constant(1.0f32, const_shape![B]);
            let unit: Tile<A, { [B] }> = convert_tile(unit);
            let centre: Tile<A, { [B] }> = unsafe { gather::<A, A, B>(mean, group, in_row) };
            let inverse: Tile<A, { [B] }> = unsafe { gather::<A, A, B>(rstd, group, in_row) };
            let factor: Tile<A, { [B] }> = unsafe { gather::<T, A, B>(gamma, channel, affected) };
            let factor: Tile<A, { [B] }> = select(affected, factor, unit);
            let shift: Tile<A, { [B] }> = unsafe { gather::<T, A, B>(beta, channel, affected) };
            let centre: Tile<A, { [R, B] }> = centre.reshape(const_shape![1, B]).broadcast(const_shape![R, B]);
            let scale: Tile<A, { [B] }> = inverse * factor;
            let scale: Tile<A, { [R, B] }> = scale.reshape(const_shape![1, B]).broadcast(const_shape![R, B]);
            let shift: Tile<A, { [R, B] }> = shift.reshape(const_shape![1, B]).broadcast(const_shape![R, B]);

            if vectors && column + B <= width && elements > (R - 1i32) * width + B - 1i32 {
                let pitch: i32 = unsafe { assume_div_by::<_, 16>(width) };
                let at: PointerTile<*mut T, { [] }> = unsafe { aligned(y, first) };
                let at: PointerTile<*mut T, { [R, B] }> = unsafe { block::<T, R, B>(at, pitch) };
                let (v, t0): (Tile<T, { [R, B] }>, Token) = unsafe {
                    load_ptr_tko(at, ordering::Weak, None::<scope::TileBlock>, None, None, None, Latency::<0>)
                };
                let v: Tile<A, { [R, B] }> = convert_tile(v);
                let z: Tile<A, { [R, B] }> = normalized::<A, WIDE, R, B>(v, centre, scale, shift, activation, slope);
                let z: Tile<T, { [R, B] }> = convert_tile(z);
                let _t1: Token = unsafe {
                    store_ptr_tko(at, z, ordering::Weak, None::<scope::TileBlock>, None, Some(t0), Latency::<0>)
                };
            } else {
                let inside: Tile<bool, { [R, B] }> = within::<R, B>(width, width - column, elements);
                let at: PointerTile<*mut T, { [] }> = unsafe { anywhere(y, first) };
                let at: PointerTile<*mut T, { [R, B] }> = unsafe { block::<T, R, B>(at, width) };
                let (v, t0): (Tile<T, { [R, B] }>, Token) = unsafe {
                    load_ptr_tko(at, ordering::Weak, None::<scope::TileBlock>, Some(inside), None, None, Latency::<0>)
                };
                let v: Tile<A, { [R, B] }> = convert_tile(v);
                let z: Tile<A, { [R, B] }> = normalized::<A, WIDE, R, B>(v, centre, scale, shift, activation, slope);
                let z: Tile<T, { [R, B] }> = convert_tile(z);
                let _t1: Token = unsafe {
                    store_ptr_tko(at, z, ordering::Weak, None::<scope::TileBlock>, Some(inside), Some(t0), Latency::<0>)
                };
            }
        }
    }
}

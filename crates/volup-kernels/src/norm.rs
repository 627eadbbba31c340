//! (in the making)
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
}

//! Interleave: transposed convolutions whose kernel is their stride, which cut the output into boxes
//! with one tap each (3D U-Nets go up this way).
//!
//! # What is computed
//!
//! Kernel = stride on every axis, no padding, no output padding, no dilation, one group:
//!
//! `y[n, co, d*sd + td, h*sh + th, w*sw + tw] = act(bias[co] + sum over ci of x[n, ci, d, h, w] * w[ci, co, td, th, tw])`
//!
//! A plain matrix product, positions by columns. x is read where it lies and y is written where it
//! belongs: nothing is packed but the weight. A block takes one tile of positions and runs through
//! *items*, each a pair (td, th) with BN columns of it: output channels times all residues along
//! width, so that rows of y are written whole.
//!
//! - **x** and **y** are both [N, C, D, H, W] (LAST = 0) or both [N, D, H, W, C] (LAST = 1).
//! - **w** is what `pack_weight_*` wrote with one slice, one step along width and no offset: row
//!   `item * BN + column` of `chunks * BK` elements. Columns are (co, tw) if LAST = 0, (tw, co) if
//!   LAST = 1.
//! - Channels past the last are zeros on both sides.
//!
//! Functions stand here where tiles have methods too (`reshape`, `broadcast`): of a method's call cuTile's
//! compiler tries each meaning on a copy of all types that it knows by then.
//!
//! # Three kinds of kernel
//!
//! - `interleave_half`, `_tf32`, `_split` move tiles of TH rows of TW positions (BM = TH * TW) as views,
//!   which the TMA takes where there is one. The tile of x is loaded once and serves all of a block's
//!   items; its channels must fit in BK. `x` and `y` start at multiples of 16 bytes, VEC elements are 16
//!   bytes, TH divides `height`; with LAST = 0 VEC divides `width` and `w_stride` is 2 (CO = BN / 2,
//!   TW2 = 2 * TW), with LAST = 1 VEC divides `cin` and `w_stride * cout`.
//! - `interleave_half_deep` and so on are the same for any number of channels: every item sums `chunks`
//!   tiles.
//! - `interleave_half_any` and so on take any sizes, strides and addresses, and BM positions of a sample
//!   in a row, by an address for each element: neighbouring threads take neighbours along a pointer
//!   tile's first dimension, so that is the one that is dense in memory. PAIR = 1 is for `w_stride` 2
//!   with LAST = 0: residues along width are interleaved in the tile (BM2 = 2 * BM, CO = BN / 2).
//!
//! # Numbers
//!
//! As in `linear_gemm`. `tf32`: x is rounded here, w was by the pack. `split`: x is split here, by the
//! exponent of control word 0, which `pack_largest` has filled; positions that it is too coarse for
//! (see `pack`), in any tile of BK channels, are counted in control word 2. Each output is a sum over
//! ci and nothing else, so infinities and NaN come out as they should, except of the split, which
//! needs the guard.
//!
//! # Parameters, in order
//!
//! 1. `x`, `w`; for the split `scale_w` (f32, of each of `blocks * BN` columns) and `control` (i32);
//!    `bias`, `y`.
//! 2. `n`, `cin`, `cout`, `depth`, `height`, `width` (of x), `d_stride`, `h_stride`, `w_stride` (i32).
//! 3. `chunks`: tiles along the channels. `blocks`: tiles of columns a pair (td, th). `parts`: blocks that
//!    share a tile of positions. All i32.
//! 4. `has_bias`, `activation` (i32), `slope` (f64).
//!
//! # Grid
//!
//! `tiles * parts` blocks along the first axis; part fastest, then tiles along width, height, depth
//! and samples (positions and samples in `_any`). No tile crosses samples. A sample of x and of y has
//! fewer than 2^31 elements; `n * depth * d_stride * height` and the elements of w are fewer, too. w
//! starts at a multiple of 256 bytes.
#[cutile::module]
pub mod interleave {
    use crate::epilogue::epilogue::activate;
    use crate::pack::pack::count_control;
    use crate::pack::pack::exponent;
    use crate::pack::pack::magnitude_2;
    use crate::pack::pack::power;
    use crate::pack::pack::read_control;
    use crate::pack::pack::round_tf32;
    use cutile::core::*;
    use cutile::tileir::*;

    /// x as [n, channels, rows, width].
    unsafe fn input_first<T: ElementType, const VEC: i32>(x: *mut T, n: i32, cin: i32, rows: i32, width: i32) -> Tensor<T, { [-1, -1, -1, -1] }> {
        let base: PointerTile<*mut T, { [] }> = pointer_to_tile(x);
        let base: PointerTile<*mut T, { [] }> = assume_div_by::<_, 16>(base);
        let n: i32 = assume_bounds_lower::<_, 0>(n);
        let cin: i32 = assume_bounds_lower::<_, 0>(cin);
        let rows: i32 = assume_bounds_lower::<_, 0>(rows);
        let width: i32 = assume_bounds_lower::<_, 0>(width);
        let width: i32 = assume_div_by::<_, VEC>(width);
        let plane: i32 = assume_div_by::<_, VEC>(rows * width);
        let plane: i32 = assume_bounds_lower::<_, 0>(plane);
        let sample: i32 = assume_div_by::<_, VEC>(cin * plane);
        let sample: i32 = assume_bounds_lower::<_, 0>(sample);
        let shape: Shape<{ [-1, -1, -1, -1] }> = Shape::<{ [-1, -1, -1, -1] }> { dims: &[n, cin, rows, width] };
        let strides: Array<{ [-1, -1, -1, 1] }> = Array::<{ [-1, -1, -1, 1] }> { dims: &[sample, plane, width] };
        make_tensor_view(base, shape, strides, new_token_unordered())
    }

    /// x as [rows, width, channels].
    unsafe fn input_last<T: ElementType, const VEC: i32>(x: *mut T, rows: i32, width: i32, cin: i32) -> Tensor<T, { [-1, -1, -1] }> {
        let base: PointerTile<*mut T, { [] }> = pointer_to_tile(x);
        let base: PointerTile<*mut T, { [] }> = assume_div_by::<_, 16>(base);
        let rows: i32 = assume_bounds_lower::<_, 0>(rows);
        let width: i32 = assume_bounds_lower::<_, 0>(width);
        let cin: i32 = assume_bounds_lower::<_, 0>(cin);
        let cin: i32 = assume_div_by::<_, VEC>(cin);
        let row: i32 = assume_div_by::<_, VEC>(width * cin);
        let row: i32 = assume_bounds_lower::<_, 0>(row);
        let shape: Shape<{ [-1, -1, -1] }> = Shape::<{ [-1, -1, -1] }> { dims: &[rows, width, cin] };
        let strides: Array<{ [-1, -1, 1] }> = Array::<{ [-1, -1, 1] }> { dims: &[row, cin] };
        make_tensor_view(base, shape, strides, new_token_unordered())
    }

    /// y as [n, channels, output planes * h, th, output width].
    unsafe fn output_first<T: ElementType, const VEC: i32>(y: *mut T, n: i32, cout: i32, rows: i32, h_stride: i32, width: i32) -> Tensor<T, { [-1, -1, -1, -1, -1] }> {
        let base: PointerTile<*mut T, { [] }> = pointer_to_tile(y);
        let base: PointerTile<*mut T, { [] }> = assume_div_by::<_, 16>(base);
        let n: i32 = assume_bounds_lower::<_, 0>(n);
        let cout: i32 = assume_bounds_lower::<_, 0>(cout);
        let rows: i32 = assume_bounds_lower::<_, 0>(rows);
        let h_stride: i32 = assume_bounds_lower::<_, 0>(h_stride);
        let width: i32 = assume_bounds_lower::<_, 0>(width);
        let width: i32 = assume_div_by::<_, VEC>(width);
        let row: i32 = assume_div_by::<_, VEC>(h_stride * width);
        let row: i32 = assume_bounds_lower::<_, 0>(row);
        let plane: i32 = assume_div_by::<_, VEC>(rows * row);
        let plane: i32 = assume_bounds_lower::<_, 0>(plane);
        let sample: i32 = assume_div_by::<_, VEC>(cout * plane);
        let sample: i32 = assume_bounds_lower::<_, 0>(sample);
        let shape: Shape<{ [-1, -1, -1, -1, -1] }> = Shape::<{ [-1, -1, -1, -1, -1] }> { dims: &[n, cout, rows, h_stride, width] };
        let strides: Array<{ [-1, -1, -1, -1, 1] }> = Array::<{ [-1, -1, -1, -1, 1] }> { dims: &[sample, plane, row, width] };
        make_tensor_view(base, shape, strides, new_token_unordered())
    }

    /// y as [n * output planes * h, th, w, (tw, channels)].
    unsafe fn output_last<T: ElementType, const VEC: i32>(y: *mut T, rows: i32, h_stride: i32, width: i32, columns: i32) -> Tensor<T, { [-1, -1, -1, -1] }> {
        let base: PointerTile<*mut T, { [] }> = pointer_to_tile(y);
        let base: PointerTile<*mut T, { [] }> = assume_div_by::<_, 16>(base);
        let rows: i32 = assume_bounds_lower::<_, 0>(rows);
        let h_stride: i32 = assume_bounds_lower::<_, 0>(h_stride);
        let width: i32 = assume_bounds_lower::<_, 0>(width);
        let columns: i32 = assume_bounds_lower::<_, 0>(columns);
        let columns: i32 = assume_div_by::<_, VEC>(columns);
        let line: i32 = assume_div_by::<_, VEC>(width * columns);
        let line: i32 = assume_bounds_lower::<_, 0>(line);
        let row: i32 = assume_div_by::<_, VEC>(h_stride * line);
        let row: i32 = assume_bounds_lower::<_, 0>(row);
        let shape: Shape<{ [-1, -1, -1, -1] }> = Shape::<{ [-1, -1, -1, -1] }> { dims: &[rows, h_stride, width, columns] };
        let strides: Array<{ [-1, -1, -1, 1] }> = Array::<{ [-1, -1, -1, 1] }> { dims: &[row, line, columns] };
        make_tensor_view(base, shape, strides, new_token_unordered())
    }

    /// The packed weight: rows of `length` elements.
    unsafe fn weight<T: ElementType>(w: *mut T, rows: i32, length: i32) -> Tensor<T, { [-1, -1] }> {
        let base: PointerTile<*mut T, { [] }> = pointer_to_tile(w);
        let base: PointerTile<*mut T, { [] }> = assume_div_by::<_, 256>(base);
        let rows: i32 = assume_bounds_lower::<_, 0>(rows);
        let length: i32 = assume_bounds_lower::<_, 0>(length);
        let length: i32 = assume_div_by::<_, 16>(length);
        let shape: Shape<{ [-1, -1] }> = Shape::<{ [-1, -1] }> { dims: &[rows, length] };
        let strides: Array<{ [-1, 1] }> = Array::<{ [-1, 1] }> { dims: &[length] };
        make_tensor_view(base, shape, strides, new_token_unordered())
    }

    /// The columns of block `jn`, counted in all of a pair's.
    fn columns<const BN: i32>(jn: i32) -> Tile<i32, { [BN] }> {
        let column: Tile<i32, { [BN] }> = iota(shape![BN]);
        column + broadcast_scalar(jn * BN, shape![BN])
    }

    /// The output channels of columns.
    fn channels<const BN: i32, const LAST: i32>(column: Tile<i32, { [BN] }>, cout: i32, w_stride: i32) -> Tile<i32, { [BN] }> {
        if LAST == 0i32 {
            column / broadcast_scalar(w_stride, shape![BN])
        } else {
            column % broadcast_scalar(cout, shape![BN])
        }
    }

    /// The bias of each column of block `jn`, of 16 bits; zeros if there is none.
    unsafe fn column_bias<T: ElementType, const BN: i32, const LAST: i32>(bias: *mut T, jn: i32, cout: i32, w_stride: i32, has_bias: i32) -> Tile<f32, { [BN] }> {
        let mut b: Tile<f32, { [BN] }> = constant(0.0f32, shape![BN]);
        if has_bias != 0i32 {
            let column: Tile<i32, { [BN] }> = columns::<BN>(jn);
            let here: Tile<bool, { [BN] }> = lt_tile(column, broadcast_scalar(cout * w_stride, shape![BN]));
            let p: PointerTile<*mut T, { [] }> = pointer_to_tile(bias);
            let p: PointerTile<*mut T, { [1] }> = reshape_ptr(p, shape![1]);
            let p: PointerTile<*mut T, { [BN] }> = broadcast_ptr(p, shape![BN]);
            let p: PointerTile<*mut T, { [BN] }> = addptr_tile(p, channels::<BN, LAST>(column, cout, w_stride));
            let (v, _t): (Tile<T, { [BN] }>, Token) = unsafe {
                load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<1>)
            };
            let v: Tile<f32, { [BN] }> = convert_tile(v);
            b = select(here, v, b);
        }
        b
    }

    /// The same of 32 bits.
    unsafe fn column_bias_32<const BN: i32, const LAST: i32>(bias: *mut f32, jn: i32, cout: i32, w_stride: i32, has_bias: i32) -> Tile<f32, { [BN] }> {
        let mut b: Tile<f32, { [BN] }> = constant(0.0f32, shape![BN]);
        if has_bias != 0i32 {
            let column: Tile<i32, { [BN] }> = columns::<BN>(jn);
            let here: Tile<bool, { [BN] }> = lt_tile(column, broadcast_scalar(cout * w_stride, shape![BN]));
            let v: Tile<f32, { [BN] }> = by_halves::<BN>(bias, channels::<BN, LAST>(column, cout, w_stride), here);
            b = select(here, v, b);
        }
        b
    }

    /// What undoes the scale of each column of block `jn`.
    unsafe fn column_scale<const BN: i32>(scale_w: *mut f32, jn: i32) -> Tile<f32, { [BN] }> {
        let here: Tile<bool, { [BN] }> = constant(true, shape![BN]);
        by_halves::<BN>(scale_w, columns::<BN>(jn), here)
    }

    /// Elements of a float32 tensor, read as 16 bits twice. A read of 32 bits in the loop over items
    /// becomes a copy to shared memory ahead of its use, by as many threads as the block has: where the
    /// tile has fewer elements, several write each.
    unsafe fn by_halves<const N: i32>(from: *mut f32, at: Tile<i32, { [N] }>, here: Tile<bool, { [N] }>) -> Tile<f32, { [N] }> {
        let p: PointerTile<*mut f32, { [] }> = pointer_to_tile(from);
        let p: PointerTile<*mut u16, { [] }> = ptr_to_ptr(p);
        let p: PointerTile<*mut u16, { [1] }> = reshape_ptr(p, shape![1]);
        let p: PointerTile<*mut u16, { [N] }> = broadcast_ptr(p, shape![N]);
        let p: PointerTile<*mut u16, { [N] }> = addptr_tile(p, at + at);
        let one: Tile<i32, { [N] }> = constant(1i32, shape![N]);
        let q: PointerTile<*mut u16, { [N] }> = addptr_tile(p, one);
        let (low, _t): (Tile<u16, { [N] }>, Token) = unsafe {
            load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<1>)
        };
        let (high, _t): (Tile<u16, { [N] }>, Token) = unsafe {
            load_ptr_tko(q, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<1>)
        };
        let low: Tile<u32, { [N] }> = exti(low);
        let high: Tile<u32, { [N] }> = exti(high);
        let lift: Tile<u32, { [N] }> = constant(65536u32, shape![N]);
        let bits: Tile<u32, { [N] }> = high * lift + low;
        bitcast(bits)
    }

    /// The upper part of a scaled tile.
    fn upper<const R: i32, const C: i32>(v: Tile<f32, { [R, C] }>) -> Tile<f16, { [R, C] }> {
        convert_tile(v)
    }

    /// What the upper part misses, times 2^11.
    fn lower<const R: i32, const C: i32>(v: Tile<f32, { [R, C] }>, hi: Tile<f16, { [R, C] }>) -> Tile<f16, { [R, C] }> {
        let high: Tile<f32, { [R, C] }> = convert_tile(hi);
        let lift: Tile<f32, { [R, C] }> = constant(2048.0f32, shape![R, C]);
        convert_tile((v - high) * lift)
    }

    /// Counts the positions of a scaled tile, given the bits of the largest magnitude of each, that the
    /// split is too coarse for.
    unsafe fn count_coarse<const N: i32>(bits: Tile<i32, { [N] }>, control: *mut i32) {
        let none: Tile<i32, { [N] }> = constant(0i32, shape![N]);
        let least: Tile<i32, { [N] }> = constant(964689920i32, shape![N]);
        let coarse: Tile<bool, { [N] }> = gt_tile(bits, none) & lt_tile(bits, least);
        let one: Tile<i32, { [N] }> = constant(1i32, shape![N]);
        let count: Tile<i32, { [] }> = reduce_sum(select(coarse, one, none), 0i32);
        let counted: i32 = tile_to_scalar(count);
        if counted > 0i32 {
            count_control(control, 2i32, reshape(count, shape![1]));
        }
    }

    /// A tile of x, [BM positions, BK channels], by addresses; zeros where there is nothing.
    unsafe fn gather<T: ElementType, const BM: i32, const BK: i32, const LAST: i32>(
        x: *mut T,
        sample: i32,
        position0: i32,
        positions: i32,
        channel0: i32,
        cin: i32,
    ) -> Tile<T, { [BM, BK] }> {
        let position: Tile<i32, { [BM] }> = iota(shape![BM]);
        let position: Tile<i32, { [BM] }> = position + broadcast_scalar(position0, shape![BM]);
        let position_here: Tile<bool, { [BM] }> = lt_tile(position, broadcast_scalar(positions, shape![BM]));
        let channel: Tile<i32, { [BK] }> = iota(shape![BK]);
        let channel: Tile<i32, { [BK] }> = channel + broadcast_scalar(channel0, shape![BK]);
        let channel_here: Tile<bool, { [BK] }> = lt_tile(channel, broadcast_scalar(cin, shape![BK]));
        let p: PointerTile<*mut T, { [1, 1] }> = sample_start(x, sample, cin * positions);
        let tile: Tile<T, { [BM, BK] }> = if LAST == 0i32 {
            let here: Tile<bool, { [BM, BK] }> = broadcast(reshape(position_here, shape![BM, 1]), shape![BM, BK])
                & broadcast(reshape(channel_here, shape![1, BK]), shape![BM, BK]);
            let channel: Tile<i32, { [BK] }> = channel * broadcast_scalar(positions, shape![BK]);
            let at: Tile<i32, { [BM, BK] }> = broadcast(reshape(position, shape![BM, 1]), shape![BM, BK])
                + broadcast(reshape(channel, shape![1, BK]), shape![BM, BK]);
            let p: PointerTile<*mut T, { [BM, BK] }> = broadcast_ptr(p, shape![BM, BK]);
            let p: PointerTile<*mut T, { [BM, BK] }> = addptr_tile(p, at);
            let (v, _t): (Tile<T, { [BM, BK] }>, Token) = unsafe {
                load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<0>)
            };
            let none: Tile<T, { [BM, BK] }> = constant(T::ZERO, shape![BM, BK]);
            let v: Tile<T, { [BM, BK] }> = select(here, v, none);
            v
        } else {
            let here: Tile<bool, { [BK, BM] }> = broadcast(reshape(position_here, shape![1, BM]), shape![BK, BM])
                & broadcast(reshape(channel_here, shape![BK, 1]), shape![BK, BM]);
            let position: Tile<i32, { [BM] }> = position * broadcast_scalar(cin, shape![BM]);
            let at: Tile<i32, { [BK, BM] }> = broadcast(reshape(position, shape![1, BM]), shape![BK, BM])
                + broadcast(reshape(channel, shape![BK, 1]), shape![BK, BM]);
            let p: PointerTile<*mut T, { [BK, BM] }> = broadcast_ptr(p, shape![BK, BM]);
            let p: PointerTile<*mut T, { [BK, BM] }> = addptr_tile(p, at);
            let (v, _t): (Tile<T, { [BK, BM] }>, Token) = unsafe {
                load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<0>)
            };
            let none: Tile<T, { [BK, BM] }> = constant(T::ZERO, shape![BK, BM]);
            let v: Tile<T, { [BK, BM] }> = select(here, v, none);
            let v: Tile<T, { [BM, BK] }> = v.transpose();
            v
        };
        tile
    }

    /// Where a sample of so many elements starts.
    unsafe fn sample_start<T: ElementType>(tensor: *mut T, sample: i32, elements: i32) -> PointerTile<*mut T, { [1, 1] }> {
        let p: PointerTile<*mut T, { [] }> = pointer_to_tile(tensor);
        let p: PointerTile<*mut T, { [1, 1] }> = reshape_ptr(p, shape![1, 1]);
        let sample: Tile<i32, { [1, 1] }> = broadcast_scalar(sample, shape![1, 1]);
        let sample: Tile<i64, { [1, 1] }> = exti(sample);
        let elements: Tile<i32, { [1, 1] }> = broadcast_scalar(elements, shape![1, 1]);
        let elements: Tile<i64, { [1, 1] }> = exti(elements);
        p.offset_tile(sample * elements)
    }

    /// Writes the columns of block `jn` of the pair (td, th) for BM positions, by addresses.
    unsafe fn scatter<T: ElementType, const BM: i32, const BM2: i32, const BN: i32, const CO: i32, const LAST: i32, const PAIR: i32>(
        v: Tile<T, { [BM, BN] }>,
        y: *mut T,
        sample: i32,
        position0: i32,
        td: i32,
        th: i32,
        jn: i32,
        cout: i32,
        depth: i32,
        height: i32,
        width: i32,
        d_stride: i32,
        h_stride: i32,
        w_stride: i32,
    ) {
        let positions: i32 = depth * height * width;
        let out_width: i32 = width * w_stride;
        let out_plane: i32 = height * h_stride * out_width;
        let out_positions: i32 = depth * d_stride * out_plane;
        let p: PointerTile<*mut T, { [1, 1] }> = sample_start(y, sample, cout * out_positions);
        // The output position of tw = 0.
        let position: Tile<i32, { [BM] }> = iota(shape![BM]);
        let position: Tile<i32, { [BM] }> = position + broadcast_scalar(position0, shape![BM]);
        let position_here: Tile<bool, { [BM] }> = lt_tile(position, broadcast_scalar(positions, shape![BM]));
        let line: Tile<i32, { [BM] }> = position / broadcast_scalar(width, shape![BM]);
        let w: Tile<i32, { [BM] }> = position - line * broadcast_scalar(width, shape![BM]);
        let d: Tile<i32, { [BM] }> = line / broadcast_scalar(height, shape![BM]);
        let h: Tile<i32, { [BM] }> = line - d * broadcast_scalar(height, shape![BM]);
        let start: Tile<i32, { [BM] }> = broadcast_scalar(td * out_plane + th * out_width, shape![BM]);
        let place: Tile<i32, { [BM] }> = d * broadcast_scalar(d_stride * out_plane, shape![BM])
            + h * broadcast_scalar(h_stride * out_width, shape![BM])
            + w * broadcast_scalar(w_stride, shape![BM])
            + start;
        if PAIR == 1i32 {
            let v: Tile<T, { [BM, CO, 2] }> = reshape(v, shape![BM, CO, 2]);
            let v: Tile<T, { [BM, 2, CO] }> = permute(v, const_array![0, 2, 1]);
            let v: Tile<T, { [BM2, CO] }> = reshape(v, shape![BM2, CO]);
            let place: Tile<i32, { [BM, 2] }> = broadcast(reshape(place, shape![BM, 1]), shape![BM, 2]);
            let tw: Tile<i32, { [2] }> = iota(shape![2]);
            let place: Tile<i32, { [BM, 2] }> = place + broadcast(reshape(tw, shape![1, 2]), shape![BM, 2]);
            let place: Tile<i32, { [BM2] }> = reshape(place, shape![BM2]);
            let place_here: Tile<bool, { [BM, 2] }> = broadcast(reshape(position_here, shape![BM, 1]), shape![BM, 2]);
            let place_here: Tile<bool, { [BM2] }> = reshape(place_here, shape![BM2]);
            let co: Tile<i32, { [CO] }> = iota(shape![CO]);
            let co: Tile<i32, { [CO] }> = co + broadcast_scalar(jn * CO, shape![CO]);
            let co_here: Tile<bool, { [CO] }> = lt_tile(co, broadcast_scalar(cout, shape![CO]));
            let co: Tile<i32, { [CO] }> = co * broadcast_scalar(out_positions, shape![CO]);
            let here: Tile<bool, { [BM2, CO] }> = broadcast(reshape(place_here, shape![BM2, 1]), shape![BM2, CO])
                & broadcast(reshape(co_here, shape![1, CO]), shape![BM2, CO]);
            let at: Tile<i32, { [BM2, CO] }> = broadcast(reshape(place, shape![BM2, 1]), shape![BM2, CO])
                + broadcast(reshape(co, shape![1, CO]), shape![BM2, CO]);
            let p: PointerTile<*mut T, { [BM2, CO] }> = broadcast_ptr(p, shape![BM2, CO]);
            let p: PointerTile<*mut T, { [BM2, CO] }> = addptr_tile(p, at);
            let _t: Token = unsafe {
                store_ptr_tko(p, v, ordering::Weak, None::<scope::TileBlock>, Some(here), None, Latency::<0>)
            };
        } else if LAST == 0i32 {
            let column: Tile<i32, { [BN] }> = iota(shape![BN]);
            let column: Tile<i32, { [BN] }> = column + broadcast_scalar(jn * BN, shape![BN]);
            let column_here: Tile<bool, { [BN] }> = lt_tile(column, broadcast_scalar(cout * w_stride, shape![BN]));
            let co: Tile<i32, { [BN] }> = column / broadcast_scalar(w_stride, shape![BN]);
            let tw: Tile<i32, { [BN] }> = column - co * broadcast_scalar(w_stride, shape![BN]);
            let column: Tile<i32, { [BN] }> = co * broadcast_scalar(out_positions, shape![BN]) + tw;
            let here: Tile<bool, { [BM, BN] }> = broadcast(reshape(position_here, shape![BM, 1]), shape![BM, BN])
                & broadcast(reshape(column_here, shape![1, BN]), shape![BM, BN]);
            let at: Tile<i32, { [BM, BN] }> = broadcast(reshape(place, shape![BM, 1]), shape![BM, BN])
                + broadcast(reshape(column, shape![1, BN]), shape![BM, BN]);
            let p: PointerTile<*mut T, { [BM, BN] }> = broadcast_ptr(p, shape![BM, BN]);
            let p: PointerTile<*mut T, { [BM, BN] }> = addptr_tile(p, at);
            let _t: Token = unsafe {
                store_ptr_tko(p, v, ordering::Weak, None::<scope::TileBlock>, Some(here), None, Latency::<0>)
            };
        } else {
            let column: Tile<i32, { [BN] }> = iota(shape![BN]);
            let column: Tile<i32, { [BN] }> = column + broadcast_scalar(jn * BN, shape![BN]);
            let column_here: Tile<bool, { [BN] }> = lt_tile(column, broadcast_scalar(cout * w_stride, shape![BN]));
            let place: Tile<i32, { [BM] }> = place * broadcast_scalar(cout, shape![BM]);
            let here: Tile<bool, { [BN, BM] }> = broadcast(reshape(position_here, shape![1, BM]), shape![BN, BM])
                & broadcast(reshape(column_here, shape![BN, 1]), shape![BN, BM]);
            let at: Tile<i32, { [BN, BM] }> = broadcast(reshape(place, shape![1, BM]), shape![BN, BM])
                + broadcast(reshape(column, shape![BN, 1]), shape![BN, BM]);
            let p: PointerTile<*mut T, { [BN, BM] }> = broadcast_ptr(p, shape![BN, BM]);
            let p: PointerTile<*mut T, { [BN, BM] }> = addptr_tile(p, at);
            let v: Tile<T, { [BN, BM] }> = v.transpose();
            let _t: Token = unsafe {
                store_ptr_tko(p, v, ordering::Weak, None::<scope::TileBlock>, Some(here), None, Latency::<0>)
            };
        }
    }

    /// f16 or bf16, in and out. One tile of x for all items.
    #[cutile::entry()]
    unsafe fn interleave_half<T: ElementType, const BN: i32, const BK: i32, const TH: i32, const TW: i32, const BM: i32, const CO: i32, const TW2: i32, const VEC: i32, const LAST: i32>(
        x: *mut T,
        w: *mut T,
        bias: *mut T,
        y: *mut T,
        n: i32,
        cin: i32,
        cout: i32,
        depth: i32,
        height: i32,
        width: i32,
        d_stride: i32,
        h_stride: i32,
        w_stride: i32,
        chunks: i32,
        blocks: i32,
        parts: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let part: i32 = pid.0 % parts;
        let tile: i32 = pid.0 / parts;
        let tiles_w: i32 = ceil_div(width, TW);
        let tiles_h: i32 = height / TH;
        let jw: i32 = tile % tiles_w;
        let ih: i32 = (tile / tiles_w) % tiles_h;
        let plane: i32 = tile / (tiles_w * tiles_h);
        let id: i32 = plane % depth;
        let sample: i32 = plane / depth;
        let items: i32 = d_stride * h_stride * blocks;
        let per: i32 = ceil_div(items, parts);
        let first: i32 = part * per;
        let last: i32 = min(first + per, items);
        let w2: Tensor<T, { [-1, -1] }> = weight::<T>(w, items * BN, chunks * BK);
        let wp = w2.partition(shape![BN, BK]);
        if LAST == 0i32 {
            let x4: Tensor<T, { [-1, -1, -1, -1] }> = input_first::<T, VEC>(x, n, cin, depth * height, width);
            let xp = x4.partition(shape![1, BK, TH, TW]);
            let y5: Tensor<T, { [-1, -1, -1, -1, -1] }> = output_first::<T, VEC>(y, n, cout, depth * d_stride * height, h_stride, width * w_stride);
            let yv: StridedView<T, { [1, CO, TH, 1, TW2] }, { [1, CO, TH, 1, TW2] }, { [0, 1, 2, 3, 4] }> =
                unsafe { make_strided_view(&y5, shape![1, CO, TH, 1, TW2], padding::None) };
            let xt: Tile<T, { [1, BK, TH, TW] }> = load_view_tko(&xp, [sample, 0i32, id * tiles_h + ih, jw], ordering::Weak, scope::TileBlock, None, tma::Enabled);
            let xt: Tile<T, { [BK, BM] }> = reshape(xt, shape![BK, BM]);
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let wt: Tile<T, { [BN, BK] }> = load_view_tko(&wp, [item, 0i32], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let zero: Tile<f32, { [BN, BM] }> = constant(0.0f32, shape![BN, BM]);
                let sum: Tile<f32, { [BN, BM] }> = mmaf(wt, xt, zero);
                let v: Tile<f32, { [BN, BM] }> = sum;
                let b: Tile<f32, { [BN] }> = column_bias::<T, BN, 0>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BN, BM] }> = v + broadcast(reshape(b, shape![BN, 1]), shape![BN, BM]);
                let v: Tile<f32, { [BN, BM] }> = activate::<f32, 0, BN, BM>(v, activation, slope);
                let o: Tile<T, { [BN, BM] }> = convert_tile(v);
                let o: Tile<T, { [CO, 2, BM] }> = reshape(o, shape![CO, 2, BM]);
                let o: Tile<T, { [CO, BM, 2] }> = permute(o, const_array![0, 2, 1]);
                let o: Tile<T, { [1, CO, TH, 1, TW2] }> = reshape(o, shape![1, CO, TH, 1, TW2]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [sample, jn, (id * d_stride + td) * tiles_h + ih, th, jw], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false, false])
                };
            }
        } else {
            let x3: Tensor<T, { [-1, -1, -1] }> = input_last::<T, VEC>(x, n * depth * height, width, cin);
            let xp = x3.partition(shape![TH, TW, BK]);
            let y4: Tensor<T, { [-1, -1, -1, -1] }> = output_last::<T, VEC>(y, n * depth * d_stride * height, h_stride, width, w_stride * cout);
            let yv: StridedView<T, { [TH, 1, TW, BN] }, { [TH, 1, TW, BN] }, { [0, 1, 2, 3] }> =
                unsafe { make_strided_view(&y4, shape![TH, 1, TW, BN], padding::None) };
            let xt: Tile<T, { [TH, TW, BK] }> = load_view_tko(&xp, [(sample * depth + id) * tiles_h + ih, jw, 0i32], ordering::Weak, scope::TileBlock, None, tma::Enabled);
            let xt: Tile<T, { [BM, BK] }> = reshape(xt, shape![BM, BK]);
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let wt: Tile<T, { [BN, BK] }> = load_view_tko(&wp, [item, 0i32], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
                let sum: Tile<f32, { [BM, BN] }> = mmaf(xt, wt.transpose(), zero);
                let v: Tile<f32, { [BM, BN] }> = sum;
                let b: Tile<f32, { [BN] }> = column_bias::<T, BN, 1>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BM, BN] }> = v + broadcast(reshape(b, shape![1, BN]), shape![BM, BN]);
                let v: Tile<f32, { [BM, BN] }> = activate::<f32, 0, BM, BN>(v, activation, slope);
                let o: Tile<T, { [BM, BN] }> = convert_tile(v);
                let o: Tile<T, { [TH, 1, TW, BN] }> = reshape(o, shape![TH, 1, TW, BN]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [((sample * depth + id) * d_stride + td) * tiles_h + ih, th, jw, jn], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false])
                };
            }
        }
    }

    /// f16 or bf16, in and out. Any number of channels.
    #[cutile::entry()]
    unsafe fn interleave_half_deep<T: ElementType, const BN: i32, const BK: i32, const TH: i32, const TW: i32, const BM: i32, const CO: i32, const TW2: i32, const VEC: i32, const LAST: i32>(
        x: *mut T,
        w: *mut T,
        bias: *mut T,
        y: *mut T,
        n: i32,
        cin: i32,
        cout: i32,
        depth: i32,
        height: i32,
        width: i32,
        d_stride: i32,
        h_stride: i32,
        w_stride: i32,
        chunks: i32,
        blocks: i32,
        parts: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let part: i32 = pid.0 % parts;
        let tile: i32 = pid.0 / parts;
        let tiles_w: i32 = ceil_div(width, TW);
        let tiles_h: i32 = height / TH;
        let jw: i32 = tile % tiles_w;
        let ih: i32 = (tile / tiles_w) % tiles_h;
        let plane: i32 = tile / (tiles_w * tiles_h);
        let id: i32 = plane % depth;
        let sample: i32 = plane / depth;
        let items: i32 = d_stride * h_stride * blocks;
        let per: i32 = ceil_div(items, parts);
        let first: i32 = part * per;
        let last: i32 = min(first + per, items);
        let w2: Tensor<T, { [-1, -1] }> = weight::<T>(w, items * BN, chunks * BK);
        let wp = w2.partition(shape![BN, BK]);
        if LAST == 0i32 {
            let x4: Tensor<T, { [-1, -1, -1, -1] }> = input_first::<T, VEC>(x, n, cin, depth * height, width);
            let xp = x4.partition(shape![1, BK, TH, TW]);
            let y5: Tensor<T, { [-1, -1, -1, -1, -1] }> = output_first::<T, VEC>(y, n, cout, depth * d_stride * height, h_stride, width * w_stride);
            let yv: StridedView<T, { [1, CO, TH, 1, TW2] }, { [1, CO, TH, 1, TW2] }, { [0, 1, 2, 3, 4] }> =
                unsafe { make_strided_view(&y5, shape![1, CO, TH, 1, TW2], padding::None) };
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let mut sum: Tile<f32, { [BN, BM] }> = constant(0.0f32, shape![BN, BM]);
                for kc in 0i32..chunks {
                    let xt: Tile<T, { [1, BK, TH, TW] }> = load_view_tko(&xp, [sample, kc, id * tiles_h + ih, jw], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    let xt: Tile<T, { [BK, BM] }> = reshape(xt, shape![BK, BM]);
                    let wt: Tile<T, { [BN, BK] }> = load_view_tko(&wp, [item, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    sum = mmaf(wt, xt, sum);
                }
                let v: Tile<f32, { [BN, BM] }> = sum;
                let b: Tile<f32, { [BN] }> = column_bias::<T, BN, 0>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BN, BM] }> = v + broadcast(reshape(b, shape![BN, 1]), shape![BN, BM]);
                let v: Tile<f32, { [BN, BM] }> = activate::<f32, 0, BN, BM>(v, activation, slope);
                let o: Tile<T, { [BN, BM] }> = convert_tile(v);
                let o: Tile<T, { [CO, 2, BM] }> = reshape(o, shape![CO, 2, BM]);
                let o: Tile<T, { [CO, BM, 2] }> = permute(o, const_array![0, 2, 1]);
                let o: Tile<T, { [1, CO, TH, 1, TW2] }> = reshape(o, shape![1, CO, TH, 1, TW2]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [sample, jn, (id * d_stride + td) * tiles_h + ih, th, jw], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false, false])
                };
            }
        } else {
            let x3: Tensor<T, { [-1, -1, -1] }> = input_last::<T, VEC>(x, n * depth * height, width, cin);
            let xp = x3.partition(shape![TH, TW, BK]);
            let y4: Tensor<T, { [-1, -1, -1, -1] }> = output_last::<T, VEC>(y, n * depth * d_stride * height, h_stride, width, w_stride * cout);
            let yv: StridedView<T, { [TH, 1, TW, BN] }, { [TH, 1, TW, BN] }, { [0, 1, 2, 3] }> =
                unsafe { make_strided_view(&y4, shape![TH, 1, TW, BN], padding::None) };
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let mut sum: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
                for kc in 0i32..chunks {
                    let xt: Tile<T, { [TH, TW, BK] }> = load_view_tko(&xp, [(sample * depth + id) * tiles_h + ih, jw, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    let xt: Tile<T, { [BM, BK] }> = reshape(xt, shape![BM, BK]);
                    let wt: Tile<T, { [BN, BK] }> = load_view_tko(&wp, [item, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    sum = mmaf(xt, wt.transpose(), sum);
                }
                let v: Tile<f32, { [BM, BN] }> = sum;
                let b: Tile<f32, { [BN] }> = column_bias::<T, BN, 1>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BM, BN] }> = v + broadcast(reshape(b, shape![1, BN]), shape![BM, BN]);
                let v: Tile<f32, { [BM, BN] }> = activate::<f32, 0, BM, BN>(v, activation, slope);
                let o: Tile<T, { [BM, BN] }> = convert_tile(v);
                let o: Tile<T, { [TH, 1, TW, BN] }> = reshape(o, shape![TH, 1, TW, BN]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [((sample * depth + id) * d_stride + td) * tiles_h + ih, th, jw, jn], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false])
                };
            }
        }
    }

    /// f16 or bf16, in and out. Any sizes and addresses.
    #[cutile::entry()]
    unsafe fn interleave_half_any<T: ElementType, const BM: i32, const BN: i32, const BK: i32, const BM2: i32, const CO: i32, const LAST: i32, const PAIR: i32>(
        x: *mut T,
        w: *mut T,
        bias: *mut T,
        y: *mut T,
        n: i32,
        cin: i32,
        cout: i32,
        depth: i32,
        height: i32,
        width: i32,
        d_stride: i32,
        h_stride: i32,
        w_stride: i32,
        chunks: i32,
        blocks: i32,
        parts: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let part: i32 = pid.0 % parts;
        let tile: i32 = pid.0 / parts;
        let positions: i32 = depth * height * width;
        let tiles: i32 = ceil_div(positions, BM);
        let sample: i32 = tile / tiles;
        let position0: i32 = (tile % tiles) * BM;
        let items: i32 = d_stride * h_stride * blocks;
        let per: i32 = ceil_div(items, parts);
        let first: i32 = part * per;
        let last: i32 = min(first + per, items);
        let w2: Tensor<T, { [-1, -1] }> = weight::<T>(w, items * BN, chunks * BK);
        let wp = w2.partition(shape![BN, BK]);
        for item in first..last {
            let tap: i32 = item / blocks;
            let jn: i32 = item - tap * blocks;
            let td: i32 = tap / h_stride;
            let th: i32 = tap - td * h_stride;
            let mut sum: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
            for kc in 0i32..chunks {
                let xt: Tile<T, { [BM, BK] }> = gather::<T, BM, BK, LAST>(x, sample, position0, positions, kc * BK, cin);
                let wt: Tile<T, { [BN, BK] }> = load_view_tko(&wp, [item, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                sum = mmaf(xt, wt.transpose(), sum);
            }
            let v: Tile<f32, { [BM, BN] }> = sum;
            let b: Tile<f32, { [BN] }> = column_bias::<T, BN, LAST>(bias, jn, cout, w_stride, has_bias);
            let v: Tile<f32, { [BM, BN] }> = v + broadcast(reshape(b, shape![1, BN]), shape![BM, BN]);
            let v: Tile<f32, { [BM, BN] }> = activate::<f32, 0, BM, BN>(v, activation, slope);
            let o: Tile<T, { [BM, BN] }> = convert_tile(v);
            scatter::<T, BM, BM2, BN, CO, LAST, PAIR>(
                o, y, sample, position0, td, th, jn, cout, depth, height, width, d_stride, h_stride, w_stride,
            );
        }
    }

    /// float32 by tf32. One tile of x for all items.
    #[cutile::entry()]
    unsafe fn interleave_tf32<const BN: i32, const BK: i32, const TH: i32, const TW: i32, const BM: i32, const CO: i32, const TW2: i32, const VEC: i32, const LAST: i32>(
        x: *mut f32,
        w: *mut f32,
        bias: *mut f32,
        y: *mut f32,
        n: i32,
        cin: i32,
        cout: i32,
        depth: i32,
        height: i32,
        width: i32,
        d_stride: i32,
        h_stride: i32,
        w_stride: i32,
        chunks: i32,
        blocks: i32,
        parts: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let part: i32 = pid.0 % parts;
        let tile: i32 = pid.0 / parts;
        let tiles_w: i32 = ceil_div(width, TW);
        let tiles_h: i32 = height / TH;
        let jw: i32 = tile % tiles_w;
        let ih: i32 = (tile / tiles_w) % tiles_h;
        let plane: i32 = tile / (tiles_w * tiles_h);
        let id: i32 = plane % depth;
        let sample: i32 = plane / depth;
        let items: i32 = d_stride * h_stride * blocks;
        let per: i32 = ceil_div(items, parts);
        let first: i32 = part * per;
        let last: i32 = min(first + per, items);
        let w2: Tensor<f32, { [-1, -1] }> = weight::<f32>(w, items * BN, chunks * BK);
        let wp = w2.partition(shape![BN, BK]);
        if LAST == 0i32 {
            let x4: Tensor<f32, { [-1, -1, -1, -1] }> = input_first::<f32, VEC>(x, n, cin, depth * height, width);
            let xp = x4.partition(shape![1, BK, TH, TW]);
            let y5: Tensor<f32, { [-1, -1, -1, -1, -1] }> = output_first::<f32, VEC>(y, n, cout, depth * d_stride * height, h_stride, width * w_stride);
            let yv: StridedView<f32, { [1, CO, TH, 1, TW2] }, { [1, CO, TH, 1, TW2] }, { [0, 1, 2, 3, 4] }> =
                unsafe { make_strided_view(&y5, shape![1, CO, TH, 1, TW2], padding::None) };
            let xt: Tile<f32, { [1, BK, TH, TW] }> = load_view_tko(&xp, [sample, 0i32, id * tiles_h + ih, jw], ordering::Weak, scope::TileBlock, None, tma::Enabled);
            let xt: Tile<f32, { [BK, BM] }> = reshape(xt, shape![BK, BM]);
            let xt: Tile<f32, { [BK, BM] }> = round_tf32(xt);
            let xt: Tile<tf32, { [BK, BM] }> = convert_tile(xt);
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let wt: Tile<f32, { [BN, BK] }> = load_view_tko(&wp, [item, 0i32], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let wt: Tile<tf32, { [BN, BK] }> = convert_tile(wt);
                let zero: Tile<f32, { [BN, BM] }> = constant(0.0f32, shape![BN, BM]);
                let sum: Tile<f32, { [BN, BM] }> = mmaf(wt, xt, zero);
                let v: Tile<f32, { [BN, BM] }> = sum;
                let b: Tile<f32, { [BN] }> = column_bias_32::<BN, 0>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BN, BM] }> = v + broadcast(reshape(b, shape![BN, 1]), shape![BN, BM]);
                let v: Tile<f32, { [BN, BM] }> = activate::<f32, 0, BN, BM>(v, activation, slope);
                let o: Tile<f32, { [BN, BM] }> = v;
                let o: Tile<f32, { [CO, 2, BM] }> = reshape(o, shape![CO, 2, BM]);
                let o: Tile<f32, { [CO, BM, 2] }> = permute(o, const_array![0, 2, 1]);
                let o: Tile<f32, { [1, CO, TH, 1, TW2] }> = reshape(o, shape![1, CO, TH, 1, TW2]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [sample, jn, (id * d_stride + td) * tiles_h + ih, th, jw], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false, false])
                };
            }
        } else {
            let x3: Tensor<f32, { [-1, -1, -1] }> = input_last::<f32, VEC>(x, n * depth * height, width, cin);
            let xp = x3.partition(shape![TH, TW, BK]);
            let y4: Tensor<f32, { [-1, -1, -1, -1] }> = output_last::<f32, VEC>(y, n * depth * d_stride * height, h_stride, width, w_stride * cout);
            let yv: StridedView<f32, { [TH, 1, TW, BN] }, { [TH, 1, TW, BN] }, { [0, 1, 2, 3] }> =
                unsafe { make_strided_view(&y4, shape![TH, 1, TW, BN], padding::None) };
            let xt: Tile<f32, { [TH, TW, BK] }> = load_view_tko(&xp, [(sample * depth + id) * tiles_h + ih, jw, 0i32], ordering::Weak, scope::TileBlock, None, tma::Enabled);
            let xt: Tile<f32, { [BM, BK] }> = reshape(xt, shape![BM, BK]);
            let xt: Tile<f32, { [BM, BK] }> = round_tf32(xt);
            let xt: Tile<tf32, { [BM, BK] }> = convert_tile(xt);
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let wt: Tile<f32, { [BN, BK] }> = load_view_tko(&wp, [item, 0i32], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let wt: Tile<tf32, { [BN, BK] }> = convert_tile(wt);
                let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
                let sum: Tile<f32, { [BM, BN] }> = mmaf(xt, wt.transpose(), zero);
                let v: Tile<f32, { [BM, BN] }> = sum;
                let b: Tile<f32, { [BN] }> = column_bias_32::<BN, 1>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BM, BN] }> = v + broadcast(reshape(b, shape![1, BN]), shape![BM, BN]);
                let v: Tile<f32, { [BM, BN] }> = activate::<f32, 0, BM, BN>(v, activation, slope);
                let o: Tile<f32, { [BM, BN] }> = v;
                let o: Tile<f32, { [TH, 1, TW, BN] }> = reshape(o, shape![TH, 1, TW, BN]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [((sample * depth + id) * d_stride + td) * tiles_h + ih, th, jw, jn], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false])
                };
            }
        }
    }

    /// float32 by tf32. Any number of channels.
    #[cutile::entry()]
    unsafe fn interleave_tf32_deep<const BN: i32, const BK: i32, const TH: i32, const TW: i32, const BM: i32, const CO: i32, const TW2: i32, const VEC: i32, const LAST: i32>(
        x: *mut f32,
        w: *mut f32,
        bias: *mut f32,
        y: *mut f32,
        n: i32,
        cin: i32,
        cout: i32,
        depth: i32,
        height: i32,
        width: i32,
        d_stride: i32,
        h_stride: i32,
        w_stride: i32,
        chunks: i32,
        blocks: i32,
        parts: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let part: i32 = pid.0 % parts;
        let tile: i32 = pid.0 / parts;
        let tiles_w: i32 = ceil_div(width, TW);
        let tiles_h: i32 = height / TH;
        let jw: i32 = tile % tiles_w;
        let ih: i32 = (tile / tiles_w) % tiles_h;
        let plane: i32 = tile / (tiles_w * tiles_h);
        let id: i32 = plane % depth;
        let sample: i32 = plane / depth;
        let items: i32 = d_stride * h_stride * blocks;
        let per: i32 = ceil_div(items, parts);
        let first: i32 = part * per;
        let last: i32 = min(first + per, items);
        let w2: Tensor<f32, { [-1, -1] }> = weight::<f32>(w, items * BN, chunks * BK);
        let wp = w2.partition(shape![BN, BK]);
        if LAST == 0i32 {
            let x4: Tensor<f32, { [-1, -1, -1, -1] }> = input_first::<f32, VEC>(x, n, cin, depth * height, width);
            let xp = x4.partition(shape![1, BK, TH, TW]);
            let y5: Tensor<f32, { [-1, -1, -1, -1, -1] }> = output_first::<f32, VEC>(y, n, cout, depth * d_stride * height, h_stride, width * w_stride);
            let yv: StridedView<f32, { [1, CO, TH, 1, TW2] }, { [1, CO, TH, 1, TW2] }, { [0, 1, 2, 3, 4] }> =
                unsafe { make_strided_view(&y5, shape![1, CO, TH, 1, TW2], padding::None) };
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let mut sum: Tile<f32, { [BN, BM] }> = constant(0.0f32, shape![BN, BM]);
                for kc in 0i32..chunks {
                    let xt: Tile<f32, { [1, BK, TH, TW] }> = load_view_tko(&xp, [sample, kc, id * tiles_h + ih, jw], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    let xt: Tile<f32, { [BK, BM] }> = reshape(xt, shape![BK, BM]);
                    let xt: Tile<f32, { [BK, BM] }> = round_tf32(xt);
                    let xt: Tile<tf32, { [BK, BM] }> = convert_tile(xt);
                    let wt: Tile<f32, { [BN, BK] }> = load_view_tko(&wp, [item, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    let wt: Tile<tf32, { [BN, BK] }> = convert_tile(wt);
                    sum = mmaf(wt, xt, sum);
                }
                let v: Tile<f32, { [BN, BM] }> = sum;
                let b: Tile<f32, { [BN] }> = column_bias_32::<BN, 0>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BN, BM] }> = v + broadcast(reshape(b, shape![BN, 1]), shape![BN, BM]);
                let v: Tile<f32, { [BN, BM] }> = activate::<f32, 0, BN, BM>(v, activation, slope);
                let o: Tile<f32, { [BN, BM] }> = v;
                let o: Tile<f32, { [CO, 2, BM] }> = reshape(o, shape![CO, 2, BM]);
                let o: Tile<f32, { [CO, BM, 2] }> = permute(o, const_array![0, 2, 1]);
                let o: Tile<f32, { [1, CO, TH, 1, TW2] }> = reshape(o, shape![1, CO, TH, 1, TW2]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [sample, jn, (id * d_stride + td) * tiles_h + ih, th, jw], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false, false])
                };
            }
        } else {
            let x3: Tensor<f32, { [-1, -1, -1] }> = input_last::<f32, VEC>(x, n * depth * height, width, cin);
            let xp = x3.partition(shape![TH, TW, BK]);
            let y4: Tensor<f32, { [-1, -1, -1, -1] }> = output_last::<f32, VEC>(y, n * depth * d_stride * height, h_stride, width, w_stride * cout);
            let yv: StridedView<f32, { [TH, 1, TW, BN] }, { [TH, 1, TW, BN] }, { [0, 1, 2, 3] }> =
                unsafe { make_strided_view(&y4, shape![TH, 1, TW, BN], padding::None) };
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let mut sum: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
                for kc in 0i32..chunks {
                    let xt: Tile<f32, { [TH, TW, BK] }> = load_view_tko(&xp, [(sample * depth + id) * tiles_h + ih, jw, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    let xt: Tile<f32, { [BM, BK] }> = reshape(xt, shape![BM, BK]);
                    let xt: Tile<f32, { [BM, BK] }> = round_tf32(xt);
                    let xt: Tile<tf32, { [BM, BK] }> = convert_tile(xt);
                    let wt: Tile<f32, { [BN, BK] }> = load_view_tko(&wp, [item, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    let wt: Tile<tf32, { [BN, BK] }> = convert_tile(wt);
                    sum = mmaf(xt, wt.transpose(), sum);
                }
                let v: Tile<f32, { [BM, BN] }> = sum;
                let b: Tile<f32, { [BN] }> = column_bias_32::<BN, 1>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BM, BN] }> = v + broadcast(reshape(b, shape![1, BN]), shape![BM, BN]);
                let v: Tile<f32, { [BM, BN] }> = activate::<f32, 0, BM, BN>(v, activation, slope);
                let o: Tile<f32, { [BM, BN] }> = v;
                let o: Tile<f32, { [TH, 1, TW, BN] }> = reshape(o, shape![TH, 1, TW, BN]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [((sample * depth + id) * d_stride + td) * tiles_h + ih, th, jw, jn], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false])
                };
            }
        }
    }

    /// float32 by tf32. Any sizes and addresses.
    #[cutile::entry()]
    unsafe fn interleave_tf32_any<const BM: i32, const BN: i32, const BK: i32, const BM2: i32, const CO: i32, const LAST: i32, const PAIR: i32>(
        x: *mut f32,
        w: *mut f32,
        bias: *mut f32,
        y: *mut f32,
        n: i32,
        cin: i32,
        cout: i32,
        depth: i32,
        height: i32,
        width: i32,
        d_stride: i32,
        h_stride: i32,
        w_stride: i32,
        chunks: i32,
        blocks: i32,
        parts: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let part: i32 = pid.0 % parts;
        let tile: i32 = pid.0 / parts;
        let positions: i32 = depth * height * width;
        let tiles: i32 = ceil_div(positions, BM);
        let sample: i32 = tile / tiles;
        let position0: i32 = (tile % tiles) * BM;
        let items: i32 = d_stride * h_stride * blocks;
        let per: i32 = ceil_div(items, parts);
        let first: i32 = part * per;
        let last: i32 = min(first + per, items);
        let w2: Tensor<f32, { [-1, -1] }> = weight::<f32>(w, items * BN, chunks * BK);
        let wp = w2.partition(shape![BN, BK]);
        for item in first..last {
            let tap: i32 = item / blocks;
            let jn: i32 = item - tap * blocks;
            let td: i32 = tap / h_stride;
            let th: i32 = tap - td * h_stride;
            let mut sum: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
            for kc in 0i32..chunks {
                let xt: Tile<f32, { [BM, BK] }> = gather::<f32, BM, BK, LAST>(x, sample, position0, positions, kc * BK, cin);
                let xt: Tile<f32, { [BM, BK] }> = round_tf32(xt);
                let xt: Tile<tf32, { [BM, BK] }> = convert_tile(xt);
                let wt: Tile<f32, { [BN, BK] }> = load_view_tko(&wp, [item, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let wt: Tile<tf32, { [BN, BK] }> = convert_tile(wt);
                sum = mmaf(xt, wt.transpose(), sum);
            }
            let v: Tile<f32, { [BM, BN] }> = sum;
            let b: Tile<f32, { [BN] }> = column_bias_32::<BN, LAST>(bias, jn, cout, w_stride, has_bias);
            let v: Tile<f32, { [BM, BN] }> = v + broadcast(reshape(b, shape![1, BN]), shape![BM, BN]);
            let v: Tile<f32, { [BM, BN] }> = activate::<f32, 0, BM, BN>(v, activation, slope);
            let o: Tile<f32, { [BM, BN] }> = v;
            scatter::<f32, BM, BM2, BN, CO, LAST, PAIR>(
                o, y, sample, position0, td, th, jn, cout, depth, height, width, d_stride, h_stride, w_stride,
            );
        }
    }

    /// float32 by two fp16 parts: the second of w follows the first. One tile of x for all items.
    #[cutile::entry()]
    unsafe fn interleave_split<const BN: i32, const BK: i32, const TH: i32, const TW: i32, const BM: i32, const CO: i32, const TW2: i32, const VEC: i32, const LAST: i32>(
        x: *mut f32,
        w: *mut f16,
        scale_w: *mut f32,
        control: *mut i32,
        bias: *mut f32,
        y: *mut f32,
        n: i32,
        cin: i32,
        cout: i32,
        depth: i32,
        height: i32,
        width: i32,
        d_stride: i32,
        h_stride: i32,
        w_stride: i32,
        chunks: i32,
        blocks: i32,
        parts: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let part: i32 = pid.0 % parts;
        let tile: i32 = pid.0 / parts;
        let tiles_w: i32 = ceil_div(width, TW);
        let tiles_h: i32 = height / TH;
        let jw: i32 = tile % tiles_w;
        let ih: i32 = (tile / tiles_w) % tiles_h;
        let plane: i32 = tile / (tiles_w * tiles_h);
        let id: i32 = plane % depth;
        let sample: i32 = plane / depth;
        let items: i32 = d_stride * h_stride * blocks;
        let per: i32 = ceil_div(items, parts);
        let first: i32 = part * per;
        let last: i32 = min(first + per, items);
        let w2: Tensor<f16, { [-1, -1] }> = weight::<f16>(w, 2i32 * items * BN, chunks * BK);
        let wp = w2.partition(shape![BN, BK]);
        let e: Tile<i32, { [1] }> = exponent(read_control(control, 0i32));
        let zero: Tile<i32, { [1] }> = constant(0i32, shape![1]);
        let up: Tile<f32, { [1] }> = power(e);
        let down: Tile<f32, { [1] }> = power(zero - e);
        if LAST == 0i32 {
            let x4: Tensor<f32, { [-1, -1, -1, -1] }> = input_first::<f32, VEC>(x, n, cin, depth * height, width);
            let xp = x4.partition(shape![1, BK, TH, TW]);
            let y5: Tensor<f32, { [-1, -1, -1, -1, -1] }> = output_first::<f32, VEC>(y, n, cout, depth * d_stride * height, h_stride, width * w_stride);
            let yv: StridedView<f32, { [1, CO, TH, 1, TW2] }, { [1, CO, TH, 1, TW2] }, { [0, 1, 2, 3, 4] }> =
                unsafe { make_strided_view(&y5, shape![1, CO, TH, 1, TW2], padding::None) };
            let xt: Tile<f32, { [1, BK, TH, TW] }> = load_view_tko(&xp, [sample, 0i32, id * tiles_h + ih, jw], ordering::Weak, scope::TileBlock, None, tma::Enabled);
            let xt: Tile<f32, { [BK, BM] }> = reshape(xt, shape![BK, BM]);
            let xt: Tile<f32, { [BK, BM] }> = xt * broadcast(reshape(up, shape![1, 1]), shape![BK, BM]);
            let xh: Tile<f16, { [BK, BM] }> = upper(xt);
            let xl: Tile<f16, { [BK, BM] }> = lower(xt, xh);
            if part == 0i32 {
                let bits: Tile<i32, { [BK, BM] }> = magnitude_2(xt);
                let bits: Tile<i32, { [BM] }> = reduce_max(bits, 0i32);
                count_coarse(bits, control);
            }
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let wh: Tile<f16, { [BN, BK] }> = load_view_tko(&wp, [item, 0i32], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let wl: Tile<f16, { [BN, BK] }> = load_view_tko(&wp, [item + items, 0i32], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let zero: Tile<f32, { [BN, BM] }> = constant(0.0f32, shape![BN, BM]);
                let cross: Tile<f32, { [BN, BM] }> = mmaf(wh, xl, zero);
                let cross: Tile<f32, { [BN, BM] }> = mmaf(wl, xh, cross);
                let sum: Tile<f32, { [BN, BM] }> = mmaf(wh, xh, zero);
                let low: Tile<f32, { [BN, BM] }> = constant(0.00048828125f32, shape![BN, BM]);
                let back: Tile<f32, { [BN] }> = column_scale::<BN>(scale_w, jn);
                let v: Tile<f32, { [BN, BM] }> = (sum + cross * low) * broadcast(reshape(down, shape![1, 1]), shape![BN, BM]);
                let v: Tile<f32, { [BN, BM] }> = v * broadcast(reshape(back, shape![BN, 1]), shape![BN, BM]);
                let b: Tile<f32, { [BN] }> = column_bias_32::<BN, 0>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BN, BM] }> = v + broadcast(reshape(b, shape![BN, 1]), shape![BN, BM]);
                let v: Tile<f32, { [BN, BM] }> = activate::<f32, 0, BN, BM>(v, activation, slope);
                let o: Tile<f32, { [BN, BM] }> = v;
                let o: Tile<f32, { [CO, 2, BM] }> = reshape(o, shape![CO, 2, BM]);
                let o: Tile<f32, { [CO, BM, 2] }> = permute(o, const_array![0, 2, 1]);
                let o: Tile<f32, { [1, CO, TH, 1, TW2] }> = reshape(o, shape![1, CO, TH, 1, TW2]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [sample, jn, (id * d_stride + td) * tiles_h + ih, th, jw], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false, false])
                };
            }
        } else {
            let x3: Tensor<f32, { [-1, -1, -1] }> = input_last::<f32, VEC>(x, n * depth * height, width, cin);
            let xp = x3.partition(shape![TH, TW, BK]);
            let y4: Tensor<f32, { [-1, -1, -1, -1] }> = output_last::<f32, VEC>(y, n * depth * d_stride * height, h_stride, width, w_stride * cout);
            let yv: StridedView<f32, { [TH, 1, TW, BN] }, { [TH, 1, TW, BN] }, { [0, 1, 2, 3] }> =
                unsafe { make_strided_view(&y4, shape![TH, 1, TW, BN], padding::None) };
            let xt: Tile<f32, { [TH, TW, BK] }> = load_view_tko(&xp, [(sample * depth + id) * tiles_h + ih, jw, 0i32], ordering::Weak, scope::TileBlock, None, tma::Enabled);
            let xt: Tile<f32, { [BM, BK] }> = reshape(xt, shape![BM, BK]);
            let xt: Tile<f32, { [BM, BK] }> = xt * broadcast(reshape(up, shape![1, 1]), shape![BM, BK]);
            let xh: Tile<f16, { [BM, BK] }> = upper(xt);
            let xl: Tile<f16, { [BM, BK] }> = lower(xt, xh);
            if part == 0i32 {
                let bits: Tile<i32, { [BM, BK] }> = magnitude_2(xt);
                let bits: Tile<i32, { [BM] }> = reduce_max(bits, 1i32);
                count_coarse(bits, control);
            }
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let wh: Tile<f16, { [BN, BK] }> = load_view_tko(&wp, [item, 0i32], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let wl: Tile<f16, { [BN, BK] }> = load_view_tko(&wp, [item + items, 0i32], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
                let wh: Tile<f16, { [BK, BN] }> = wh.transpose();
                let cross: Tile<f32, { [BM, BN] }> = mmaf(xl, wh, zero);
                let cross: Tile<f32, { [BM, BN] }> = mmaf(xh, wl.transpose(), cross);
                let sum: Tile<f32, { [BM, BN] }> = mmaf(xh, wh, zero);
                let low: Tile<f32, { [BM, BN] }> = constant(0.00048828125f32, shape![BM, BN]);
                let back: Tile<f32, { [BN] }> = column_scale::<BN>(scale_w, jn);
                let v: Tile<f32, { [BM, BN] }> = (sum + cross * low) * broadcast(reshape(down, shape![1, 1]), shape![BM, BN]);
                let v: Tile<f32, { [BM, BN] }> = v * broadcast(reshape(back, shape![1, BN]), shape![BM, BN]);
                let b: Tile<f32, { [BN] }> = column_bias_32::<BN, 1>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BM, BN] }> = v + broadcast(reshape(b, shape![1, BN]), shape![BM, BN]);
                let v: Tile<f32, { [BM, BN] }> = activate::<f32, 0, BM, BN>(v, activation, slope);
                let o: Tile<f32, { [BM, BN] }> = v;
                let o: Tile<f32, { [TH, 1, TW, BN] }> = reshape(o, shape![TH, 1, TW, BN]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [((sample * depth + id) * d_stride + td) * tiles_h + ih, th, jw, jn], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false])
                };
            }
        }
    }

    /// float32 by two fp16 parts: the second of w follows the first. Any number of channels.
    #[cutile::entry()]
    unsafe fn interleave_split_deep<const BN: i32, const BK: i32, const TH: i32, const TW: i32, const BM: i32, const CO: i32, const TW2: i32, const VEC: i32, const LAST: i32>(
        x: *mut f32,
        w: *mut f16,
        scale_w: *mut f32,
        control: *mut i32,
        bias: *mut f32,
        y: *mut f32,
        n: i32,
        cin: i32,
        cout: i32,
        depth: i32,
        height: i32,
        width: i32,
        d_stride: i32,
        h_stride: i32,
        w_stride: i32,
        chunks: i32,
        blocks: i32,
        parts: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let part: i32 = pid.0 % parts;
        let tile: i32 = pid.0 / parts;
        let tiles_w: i32 = ceil_div(width, TW);
        let tiles_h: i32 = height / TH;
        let jw: i32 = tile % tiles_w;
        let ih: i32 = (tile / tiles_w) % tiles_h;
        let plane: i32 = tile / (tiles_w * tiles_h);
        let id: i32 = plane % depth;
        let sample: i32 = plane / depth;
        let items: i32 = d_stride * h_stride * blocks;
        let per: i32 = ceil_div(items, parts);
        let first: i32 = part * per;
        let last: i32 = min(first + per, items);
        let w2: Tensor<f16, { [-1, -1] }> = weight::<f16>(w, 2i32 * items * BN, chunks * BK);
        let wp = w2.partition(shape![BN, BK]);
        let e: Tile<i32, { [1] }> = exponent(read_control(control, 0i32));
        let zero: Tile<i32, { [1] }> = constant(0i32, shape![1]);
        let up: Tile<f32, { [1] }> = power(e);
        let down: Tile<f32, { [1] }> = power(zero - e);
        if LAST == 0i32 {
            let x4: Tensor<f32, { [-1, -1, -1, -1] }> = input_first::<f32, VEC>(x, n, cin, depth * height, width);
            let xp = x4.partition(shape![1, BK, TH, TW]);
            let y5: Tensor<f32, { [-1, -1, -1, -1, -1] }> = output_first::<f32, VEC>(y, n, cout, depth * d_stride * height, h_stride, width * w_stride);
            let yv: StridedView<f32, { [1, CO, TH, 1, TW2] }, { [1, CO, TH, 1, TW2] }, { [0, 1, 2, 3, 4] }> =
                unsafe { make_strided_view(&y5, shape![1, CO, TH, 1, TW2], padding::None) };
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let mut sum: Tile<f32, { [BN, BM] }> = constant(0.0f32, shape![BN, BM]);
                let mut cross: Tile<f32, { [BN, BM] }> = constant(0.0f32, shape![BN, BM]);
                for kc in 0i32..chunks {
                    let xt: Tile<f32, { [1, BK, TH, TW] }> = load_view_tko(&xp, [sample, kc, id * tiles_h + ih, jw], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    let xt: Tile<f32, { [BK, BM] }> = reshape(xt, shape![BK, BM]);
                    let xt: Tile<f32, { [BK, BM] }> = xt * broadcast(reshape(up, shape![1, 1]), shape![BK, BM]);
                    let xh: Tile<f16, { [BK, BM] }> = upper(xt);
                    let xl: Tile<f16, { [BK, BM] }> = lower(xt, xh);
                    if item == 0i32 {
                        let bits: Tile<i32, { [BK, BM] }> = magnitude_2(xt);
                        let bits: Tile<i32, { [BM] }> = reduce_max(bits, 0i32);
                        count_coarse(bits, control);
                    }
                    let wh: Tile<f16, { [BN, BK] }> = load_view_tko(&wp, [item, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    let wl: Tile<f16, { [BN, BK] }> = load_view_tko(&wp, [item + items, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    cross = mmaf(wh, xl, cross);
                    cross = mmaf(wl, xh, cross);
                    let zero: Tile<f32, { [BN, BM] }> = constant(0.0f32, shape![BN, BM]);
                    let part: Tile<f32, { [BN, BM] }> = mmaf(wh, xh, zero);
                    sum = sum + part;
                }
                let low: Tile<f32, { [BN, BM] }> = constant(0.00048828125f32, shape![BN, BM]);
                let back: Tile<f32, { [BN] }> = column_scale::<BN>(scale_w, jn);
                let v: Tile<f32, { [BN, BM] }> = (sum + cross * low) * broadcast(reshape(down, shape![1, 1]), shape![BN, BM]);
                let v: Tile<f32, { [BN, BM] }> = v * broadcast(reshape(back, shape![BN, 1]), shape![BN, BM]);
                let b: Tile<f32, { [BN] }> = column_bias_32::<BN, 0>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BN, BM] }> = v + broadcast(reshape(b, shape![BN, 1]), shape![BN, BM]);
                let v: Tile<f32, { [BN, BM] }> = activate::<f32, 0, BN, BM>(v, activation, slope);
                let o: Tile<f32, { [BN, BM] }> = v;
                let o: Tile<f32, { [CO, 2, BM] }> = reshape(o, shape![CO, 2, BM]);
                let o: Tile<f32, { [CO, BM, 2] }> = permute(o, const_array![0, 2, 1]);
                let o: Tile<f32, { [1, CO, TH, 1, TW2] }> = reshape(o, shape![1, CO, TH, 1, TW2]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [sample, jn, (id * d_stride + td) * tiles_h + ih, th, jw], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false, false])
                };
            }
        } else {
            let x3: Tensor<f32, { [-1, -1, -1] }> = input_last::<f32, VEC>(x, n * depth * height, width, cin);
            let xp = x3.partition(shape![TH, TW, BK]);
            let y4: Tensor<f32, { [-1, -1, -1, -1] }> = output_last::<f32, VEC>(y, n * depth * d_stride * height, h_stride, width, w_stride * cout);
            let yv: StridedView<f32, { [TH, 1, TW, BN] }, { [TH, 1, TW, BN] }, { [0, 1, 2, 3] }> =
                unsafe { make_strided_view(&y4, shape![TH, 1, TW, BN], padding::None) };
            for item in first..last {
                let tap: i32 = item / blocks;
                let jn: i32 = item - tap * blocks;
                let td: i32 = tap / h_stride;
                let th: i32 = tap - td * h_stride;
                let mut sum: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
                let mut cross: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
                for kc in 0i32..chunks {
                    let xt: Tile<f32, { [TH, TW, BK] }> = load_view_tko(&xp, [(sample * depth + id) * tiles_h + ih, jw, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    let xt: Tile<f32, { [BM, BK] }> = reshape(xt, shape![BM, BK]);
                    let xt: Tile<f32, { [BM, BK] }> = xt * broadcast(reshape(up, shape![1, 1]), shape![BM, BK]);
                    let xh: Tile<f16, { [BM, BK] }> = upper(xt);
                    let xl: Tile<f16, { [BM, BK] }> = lower(xt, xh);
                    if item == 0i32 {
                        let bits: Tile<i32, { [BM, BK] }> = magnitude_2(xt);
                        let bits: Tile<i32, { [BM] }> = reduce_max(bits, 1i32);
                        count_coarse(bits, control);
                    }
                    let wh: Tile<f16, { [BN, BK] }> = load_view_tko(&wp, [item, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    let wl: Tile<f16, { [BN, BK] }> = load_view_tko(&wp, [item + items, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                    let wh: Tile<f16, { [BK, BN] }> = wh.transpose();
                    cross = mmaf(xl, wh, cross);
                    cross = mmaf(xh, wl.transpose(), cross);
                    let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
                    let part: Tile<f32, { [BM, BN] }> = mmaf(xh, wh, zero);
                    sum = sum + part;
                }
                let low: Tile<f32, { [BM, BN] }> = constant(0.00048828125f32, shape![BM, BN]);
                let back: Tile<f32, { [BN] }> = column_scale::<BN>(scale_w, jn);
                let v: Tile<f32, { [BM, BN] }> = (sum + cross * low) * broadcast(reshape(down, shape![1, 1]), shape![BM, BN]);
                let v: Tile<f32, { [BM, BN] }> = v * broadcast(reshape(back, shape![1, BN]), shape![BM, BN]);
                let b: Tile<f32, { [BN] }> = column_bias_32::<BN, 1>(bias, jn, cout, w_stride, has_bias);
                let v: Tile<f32, { [BM, BN] }> = v + broadcast(reshape(b, shape![1, BN]), shape![BM, BN]);
                let v: Tile<f32, { [BM, BN] }> = activate::<f32, 0, BM, BN>(v, activation, slope);
                let o: Tile<f32, { [BM, BN] }> = v;
                let o: Tile<f32, { [TH, 1, TW, BN] }> = reshape(o, shape![TH, 1, TW, BN]);
                let _t: Token = unsafe {
                    store_view_raw(&yv, o, [((sample * depth + id) * d_stride + td) * tiles_h + ih, th, jw, jn], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false, false, false])
                };
            }
        }
    }

    /// float32 by two fp16 parts: the second of w follows the first. Any sizes and addresses.
    #[cutile::entry()]
    unsafe fn interleave_split_any<const BM: i32, const BN: i32, const BK: i32, const BM2: i32, const CO: i32, const LAST: i32, const PAIR: i32>(
        x: *mut f32,
        w: *mut f16,
        scale_w: *mut f32,
        control: *mut i32,
        bias: *mut f32,
        y: *mut f32,
        n: i32,
        cin: i32,
        cout: i32,
        depth: i32,
        height: i32,
        width: i32,
        d_stride: i32,
        h_stride: i32,
        w_stride: i32,
        chunks: i32,
        blocks: i32,
        parts: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let part: i32 = pid.0 % parts;
        let tile: i32 = pid.0 / parts;
        let positions: i32 = depth * height * width;
        let tiles: i32 = ceil_div(positions, BM);
        let sample: i32 = tile / tiles;
        let position0: i32 = (tile % tiles) * BM;
        let items: i32 = d_stride * h_stride * blocks;
        let per: i32 = ceil_div(items, parts);
        let first: i32 = part * per;
        let last: i32 = min(first + per, items);
        let w2: Tensor<f16, { [-1, -1] }> = weight::<f16>(w, 2i32 * items * BN, chunks * BK);
        let wp = w2.partition(shape![BN, BK]);
        let e: Tile<i32, { [1] }> = exponent(read_control(control, 0i32));
        let zero: Tile<i32, { [1] }> = constant(0i32, shape![1]);
        let up: Tile<f32, { [1] }> = power(e);
        let down: Tile<f32, { [1] }> = power(zero - e);
        for item in first..last {
            let tap: i32 = item / blocks;
            let jn: i32 = item - tap * blocks;
            let td: i32 = tap / h_stride;
            let th: i32 = tap - td * h_stride;
            let mut sum: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
            let mut cross: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
            for kc in 0i32..chunks {
                let xt: Tile<f32, { [BM, BK] }> = gather::<f32, BM, BK, LAST>(x, sample, position0, positions, kc * BK, cin);
                let xt: Tile<f32, { [BM, BK] }> = xt * broadcast(reshape(up, shape![1, 1]), shape![BM, BK]);
                let xh: Tile<f16, { [BM, BK] }> = upper(xt);
                let xl: Tile<f16, { [BM, BK] }> = lower(xt, xh);
                if item == 0i32 {
                    let bits: Tile<i32, { [BM, BK] }> = magnitude_2(xt);
                    let bits: Tile<i32, { [BM] }> = reduce_max(bits, 1i32);
                    count_coarse(bits, control);
                }
                let wh: Tile<f16, { [BN, BK] }> = load_view_tko(&wp, [item, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let wl: Tile<f16, { [BN, BK] }> = load_view_tko(&wp, [item + items, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let wh: Tile<f16, { [BK, BN] }> = wh.transpose();
                cross = mmaf(xl, wh, cross);
                cross = mmaf(xh, wl.transpose(), cross);
                let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
                let part: Tile<f32, { [BM, BN] }> = mmaf(xh, wh, zero);
                sum = sum + part;
            }
            let low: Tile<f32, { [BM, BN] }> = constant(0.00048828125f32, shape![BM, BN]);
            let back: Tile<f32, { [BN] }> = column_scale::<BN>(scale_w, jn);
            let v: Tile<f32, { [BM, BN] }> = (sum + cross * low) * broadcast(reshape(down, shape![1, 1]), shape![BM, BN]);
            let v: Tile<f32, { [BM, BN] }> = v * broadcast(reshape(back, shape![1, BN]), shape![BM, BN]);
            let b: Tile<f32, { [BN] }> = column_bias_32::<BN, LAST>(bias, jn, cout, w_stride, has_bias);
            let v: Tile<f32, { [BM, BN] }> = v + broadcast(reshape(b, shape![1, BN]), shape![BM, BN]);
            let v: Tile<f32, { [BM, BN] }> = activate::<f32, 0, BM, BN>(v, activation, slope);
            let o: Tile<f32, { [BM, BN] }> = v;
            scatter::<f32, BM, BM2, BN, CO, LAST, PAIR>(
                o, y, sample, position0, td, th, jn, cout, depth, height, width, d_stride, h_stride, w_stride,
            );
        }
    }
}

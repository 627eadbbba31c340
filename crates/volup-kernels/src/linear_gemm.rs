//! Linear implicit GEMM: every phase of a transposed convolution as one matrix product whose rows are
//! the positions of all samples in one dimension.
//!
//! # What is computed
//!
//! Per axis let `u = o + p = s*q + r`. Output `o` of residue `r` sums over the taps `t` with
//! `t*d = r (mod s)`, each at input `q - m`, `m = (t*d - r)/s`. With positions `j = q - first` and
//! rows `R = ((n*PD + jd)*PH + jh)*PW + jw`,
//!
//! `Y[R, col] = sum over (td, th), w step, k: A[R + offset, k] * B[td, th, w step][col][k]`.
//!
//! - **A** is what `pack_input` wrote: position (n, id, ih, iw) of the input is a row of `pitch`
//!   elements, channels fastest, and rows, planes and samples end in shared zero gaps, so that every
//!   tap is one constant row offset and what falls off an end reads zeros. The view starts `lead`
//!   rows before the first position. A row of the view is `window` elements long, more than `pitch`
//!   where neighbouring positions along width are read as one run of the reduction (few channels).
//! - **B** is what `pack_weight` wrote: for every (td, th, w step) `column blocks * BN` rows of
//!   `chunks * BK` elements. Columns are the channels of a slice of the output (a number of whole
//!   groups) times all residues along width: rows of y are written whole, and what a residue or
//!   group does not see is zero.
//! - Residues along depth and height are in the grid: block `(tile * phases + phase) * blocks + block`.
//!   A phase without taps runs no step and writes its bias.
//!
//! Rows that are no position (gaps) and columns that are no channel are computed and dropped.
//!
//! # Stores
//!
//! Neighbouring threads take neighbours along a pointer tile's first dimension, unless the compiler
//! knows what lies together. `STORE` says: 0, any NCDHW, an element at a time; 1, any NDHWC; 2, NDHWC
//! whose channels and slices are multiples of 8, the slices or residues along width one alone: 16
//! bytes at a time; 3, NCDHW where every position is an output (stride 1, no padding) and a sample's
//! voxels are a multiple of 8: likewise. 2 and 3 ask for a y that starts at a multiple of 16 bytes.
//!
//! # Numbers
//!
//! `half`: f16 or bf16 operands. `tf32`: float32 rounded by the pack. `split`: float32 as two fp16
//! parts, `x = 2^-ex * (hi + 2^-11 * lo)`, the exponent from the largest magnitude (of the tensor for
//! x, of an output channel for w); hi*hi is summed in the tensor core for PROM steps at a time and
//! added to float32 registers, since the unit truncates; the cross terms have their own sum.
//!
//! # Who guarantees what
//!
//! `a` and `b` start at multiples of 256 bytes; `pitch` is a multiple of 16 bytes, a row
//! of B of 32; `rows` and the view's rows are below 2^31, and so are the
//! elements of the samples of y that a tile touches; where a sample starts is 64-bit. Elements of A
//! between the last row and the end of the last window are zeros.
#[cutile::module]
pub mod linear_gemm {
    use crate::epilogue::epilogue::activate;
    use cutile::core::*;
    use cutile::tileir::*;

    /// The view of A: `rows` windows of `window` elements, `pitch` apart.
    unsafe fn operand_a<T: ElementType>(a: *mut T, rows: i32, window: i32, pitch: i32) -> Tensor<T, { [-1, -1] }> {
        let base: PointerTile<*mut T, { [] }> = pointer_to_tile(a);
        let base: PointerTile<*mut T, { [] }> = assume_div_by::<_, 256>(base);
        let rows: i32 = assume_bounds_lower::<_, 0>(rows);
        let window: i32 = assume_bounds_lower::<_, 0>(window);
        let pitch: i32 = assume_bounds_lower::<_, 0>(pitch);
        let pitch: i32 = assume_div_by::<_, 8>(pitch);
        let shape: Shape<{ [-1, -1] }> = Shape::<{ [-1, -1] }> { dims: &[rows, window] };
        let strides: Array<{ [-1, 1] }> = Array::<{ [-1, 1] }> { dims: &[pitch] };
        make_tensor_view(base, shape, strides, new_token_unordered())
    }

    /// The view of B: rows of `length` elements.
    unsafe fn operand_b<T: ElementType>(b: *mut T, rows: i32, length: i32) -> Tensor<T, { [-1, -1] }> {
        let base: PointerTile<*mut T, { [] }> = pointer_to_tile(b);
        let base: PointerTile<*mut T, { [] }> = assume_div_by::<_, 256>(base);
        let rows: i32 = assume_bounds_lower::<_, 0>(rows);
        let length: i32 = assume_bounds_lower::<_, 0>(length);
        let length: i32 = assume_div_by::<_, 16>(length);
        let shape: Shape<{ [-1, -1] }> = Shape::<{ [-1, -1] }> { dims: &[rows, length] };
        let strides: Array<{ [-1, 1] }> = Array::<{ [-1, 1] }> { dims: &[length] };
        make_tensor_view(base, shape, strides, new_token_unordered())
    }

    /// The first tap of a residue: the smallest t with t*dilation = residue (mod stride); the kernel's
    /// size if there is none. `step` is stride/gcd, `inverse` that of dilation/gcd modulo step.
    fn first_tap(residue: i32, kernel: i32, stride: i32, step: i32, inverse: i32) -> i32 {
        let gcd: i32 = stride / step;
        let tap: i32 = ((residue / gcd) * inverse) % step;
        let none: i32 = min(residue % gcd, 1i32) * kernel;
        max(tap, none)
    }

    /// How many taps a residue has, from its first.
    fn taps(first: i32, kernel: i32, step: i32) -> i32 {
        max(kernel - first + step - 1i32, 0i32) / step
    }

    /// Adds the bias, applies the activation, and writes a tile's rows and columns that exist to y.
    unsafe fn finish<T: ElementType, const BM: i32, const BN: i32, const CHANNELS_FIRST: i32, const STORE: i32>(
        acc: Tile<f32, { [BM, BN] }>,
        bias: *mut T,
        y: *mut T,
        row0: i32,
        column0: i32,
        slice: i32,
        rd: i32,
        rh: i32,
        rows: i32,
        pd: i32,
        ph: i32,
        pw: i32,
        d_stride: i32,
        d_shift: i32,
        d_out: i32,
        h_stride: i32,
        h_shift: i32,
        h_out: i32,
        w_stride: i32,
        w_shift: i32,
        w_out: i32,
        channels: i32,
        y_n: i32,
        y_c: i32,
        y_d: i32,
        y_h: i32,
        y_w: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        // Columns: channels fastest where y has them fastest, else residues along width.
        let column: Tile<i32, { [BN] }> = iota(shape![BN]);
        let column: Tile<i32, { [BN] }> = column + broadcast_scalar(column0, shape![BN]);
        let inner: i32 = if CHANNELS_FIRST == 1i32 { w_stride } else { channels };
        let inner: Tile<i32, { [BN] }> = broadcast_scalar(inner, shape![BN]);
        let high: Tile<i32, { [BN] }> = column / inner;
        let low: Tile<i32, { [BN] }> = column - high * inner;
        let co: Tile<i32, { [BN] }> = if CHANNELS_FIRST == 1i32 { high } else { low };
        let rw: Tile<i32, { [BN] }> = if CHANNELS_FIRST == 1i32 { low } else { high };
        let co_here: Tile<bool, { [BN] }> = lt_tile(co, broadcast_scalar(channels, shape![BN]));
        let rw_here: Tile<bool, { [BN] }> = lt_tile(rw, broadcast_scalar(w_stride, shape![BN]));
        let column_here: Tile<bool, { [BN] }> = co_here & rw_here;
        let co: Tile<i32, { [BN] }> = co + broadcast_scalar(slice * channels, shape![BN]);

        let mut v: Tile<f32, { [BM, BN] }> = acc;
        if has_bias != 0i32 {
            let p: PointerTile<*mut T, { [] }> = pointer_to_tile(bias);
            let p: PointerTile<*mut T, { [1] }> = p.reshape(shape![1]);
            let p: PointerTile<*mut T, { [BN] }> = p.broadcast(shape![BN]);
            let p: PointerTile<*mut T, { [BN] }> = p.offset_tile(co);
            let (b, _t): (Tile<T, { [BN] }>, Token) = unsafe {
                load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(column_here), None, None, Latency::<0>)
            };
            let b: Tile<f32, { [BN] }> = convert_tile(b);
            let none: Tile<f32, { [BN] }> = constant(0.0f32, shape![BN]);
            let b: Tile<f32, { [BN] }> = select(column_here, b, none);
            v = v + b.reshape(shape![1, BN]).broadcast(shape![BM, BN]);
        }
        let v: Tile<f32, { [BM, BN] }> = activate::<f32, 0, BM, BN>(v, activation, slope);
        let o: Tile<T, { [BM, BN] }> = convert_tile(v);

        // Rows.
        let row: Tile<i32, { [BM] }> = iota(shape![BM]);
        let row: Tile<i32, { [BM] }> = row + broadcast_scalar(row0, shape![BM]);
        let widths: Tile<i32, { [BM] }> = broadcast_scalar(pw, shape![BM]);
        let heights: Tile<i32, { [BM] }> = broadcast_scalar(ph, shape![BM]);
        let depths: Tile<i32, { [BM] }> = broadcast_scalar(pd, shape![BM]);
        let line: Tile<i32, { [BM] }> = row / widths;
        let jw: Tile<i32, { [BM] }> = row - line * widths;
        let plane: Tile<i32, { [BM] }> = line / heights;
        let jh: Tile<i32, { [BM] }> = line - plane * heights;
        let n: Tile<i32, { [BM] }> = plane / depths;
        let jd: Tile<i32, { [BM] }> = plane - n * depths;
        let od: Tile<i32, { [BM] }> = jd * broadcast_scalar(d_stride, shape![BM]) + broadcast_scalar(d_shift + rd, shape![BM]);
        let oh: Tile<i32, { [BM] }> = jh * broadcast_scalar(h_stride, shape![BM]) + broadcast_scalar(h_shift + rh, shape![BM]);
        let ow: Tile<i32, { [BM] }> = jw * broadcast_scalar(w_stride, shape![BM]) + broadcast_scalar(w_shift, shape![BM]);
        let zero: Tile<i32, { [BM] }> = constant(0i32, shape![BM]);
        let d_here: Tile<bool, { [BM] }> = ge_tile(od, zero) & lt_tile(od, broadcast_scalar(d_out, shape![BM]));
        let h_here: Tile<bool, { [BM] }> = ge_tile(oh, zero) & lt_tile(oh, broadcast_scalar(h_out, shape![BM]));
        let row_here: Tile<bool, { [BM] }> = lt_tile(row, broadcast_scalar(rows, shape![BM]));
        let row_here: Tile<bool, { [BM] }> = row_here & d_here & h_here;

        // Offsets are 32-bit from the tile's first sample on; where that sample starts is 64-bit.
        let n_first: i32 = row0 / (pd * ph * pw);
        let row_at: Tile<i32, { [BM] }> = (n - broadcast_scalar(n_first, shape![BM])) * broadcast_scalar(y_n, shape![BM])
            + od * broadcast_scalar(y_d, shape![BM])
            + oh * broadcast_scalar(y_h, shape![BM])
            + ow * broadcast_scalar(y_w, shape![BM]);
        let column_at: Tile<i32, { [BN] }> = co * broadcast_scalar(y_c, shape![BN]) + rw * broadcast_scalar(y_w, shape![BN]);

        let p: PointerTile<*mut T, { [] }> = pointer_to_tile(y);
        let p: PointerTile<*mut T, { [1, 1] }> = p.reshape(shape![1, 1]);
        let n0: Tile<i32, { [1, 1] }> = broadcast_scalar(n_first, shape![1, 1]);
        let n0: Tile<i64, { [1, 1] }> = exti(n0);
        let sample: Tile<i32, { [1, 1] }> = broadcast_scalar(y_n, shape![1, 1]);
        let sample: Tile<i64, { [1, 1] }> = exti(sample);
        let p: PointerTile<*mut T, { [1, 1] }> = p.offset_tile(n0 * sample);
        if STORE == 3i32 {
            // NCDHW where positions are outputs: rows lie as y does, from one sample to its end.
            let voxels: i32 = unsafe { assume_div_by::<_, 8>(pd * ph * pw) };
            let rest: i32 = unsafe { assume_div_by::<_, 8>(y_n - voxels) };
            let crossed: Tile<i32, { [BM] }> = (n - broadcast_scalar(n_first, shape![BM])) * broadcast_scalar(rest, shape![BM]);
            let crossed: Tile<i32, { [BM] }> = unsafe { assume_div_by::<_, 8>(crossed) };
            let crossed: Tile<i32, { [BM] }> = unsafe { assume_same_elements_1d::<_, 8>(crossed) };
            let first: i32 = unsafe { assume_div_by::<_, 8>(row0 - n_first * voxels) };
            let row_at: Tile<i32, { [BM] }> = iota(shape![BM]);
            let row_at: Tile<i32, { [BM] }> = row_at + broadcast_scalar(first, shape![BM]) + crossed;
            let column_at: Tile<i32, { [BN] }> = co * broadcast_scalar(voxels, shape![BN]);
            let column_at: Tile<i32, { [BN] }> = unsafe { assume_div_by::<_, 8>(column_at) };
            let row_in: Tile<bool, { [BM] }> = lt_tile(row, broadcast_scalar(rows, shape![BM]));
            let here: Tile<bool, { [BN, BM] }> = row_in.reshape(shape![1, BM]).broadcast(shape![BN, BM])
                & column_here.reshape(shape![BN, 1]).broadcast(shape![BN, BM]);
            let one: Tile<i32, { [BN, BM] }> = constant(1i32, shape![BN, BM]);
            let zero: Tile<i32, { [BN, BM] }> = constant(0i32, shape![BN, BM]);
            let here: Tile<i32, { [BN, BM] }> = select(here, one, zero);
            let here: Tile<i32, { [BN, BM] }> = unsafe { assume_same_elements_2d::<_, 1, 8>(here) };
            let here: Tile<bool, { [BN, BM] }> = ne_tile(here, zero);
            let at: Tile<i32, { [BN, BM] }> = row_at.reshape(shape![1, BM]).broadcast(shape![BN, BM])
                + column_at.reshape(shape![BN, 1]).broadcast(shape![BN, BM]);
            let p: PointerTile<*mut T, { [1, 1] }> = unsafe { assume_div_by::<_, 16>(p) };
            let p: PointerTile<*mut T, { [BN, BM] }> = p.broadcast(shape![BN, BM]);
            let p: PointerTile<*mut T, { [BN, BM] }> = p.offset_tile(at);
            let turned: Tile<T, { [BN, BM] }> = o.transpose();
            let _t: Token = unsafe {
                store_ptr_tko(p, turned, ordering::Weak, None::<scope::TileBlock>, Some(here), None, Latency::<0>)
            };
        } else if STORE == 2i32 {
            // NDHWC whose rows of channels are whole vectors: columns lie as y does.
            let row_at: Tile<i32, { [BM] }> = unsafe { assume_div_by::<_, 8>(row_at) };
            let first: i32 = unsafe { assume_div_by::<_, 8>(slice * channels + column0) };
            let column_at: Tile<i32, { [BN] }> = iota(shape![BN]);
            let column_at: Tile<i32, { [BN] }> = column_at + broadcast_scalar(first, shape![BN]);
            let w_at: Tile<i32, { [BM, BN] }> = ow.reshape(shape![BM, 1]).broadcast(shape![BM, BN])
                + rw.reshape(shape![1, BN]).broadcast(shape![BM, BN]);
            let zero: Tile<i32, { [BM, BN] }> = constant(0i32, shape![BM, BN]);
            let w_here: Tile<bool, { [BM, BN] }> = ge_tile(w_at, zero)
                & lt_tile(w_at, broadcast_scalar(w_out, shape![BM, BN]));
            let here: Tile<bool, { [BM, BN] }> = row_here.reshape(shape![BM, 1]).broadcast(shape![BM, BN])
                & column_here.reshape(shape![1, BN]).broadcast(shape![BM, BN])
                & w_here;
            let one: Tile<i32, { [BM, BN] }> = constant(1i32, shape![BM, BN]);
            let here: Tile<i32, { [BM, BN] }> = select(here, one, zero);
            let here: Tile<i32, { [BM, BN] }> = unsafe { assume_same_elements_2d::<_, 1, 8>(here) };
            let here: Tile<bool, { [BM, BN] }> = ne_tile(here, zero);
            let at: Tile<i32, { [BM, BN] }> = row_at.reshape(shape![BM, 1]).broadcast(shape![BM, BN])
                + column_at.reshape(shape![1, BN]).broadcast(shape![BM, BN]);
            let p: PointerTile<*mut T, { [1, 1] }> = unsafe { assume_div_by::<_, 16>(p) };
            let p: PointerTile<*mut T, { [BM, BN] }> = p.broadcast(shape![BM, BN]);
            let p: PointerTile<*mut T, { [BM, BN] }> = p.offset_tile(at);
            let _t: Token = unsafe {
                store_ptr_tko(p, o, ordering::Weak, None::<scope::TileBlock>, Some(here), None, Latency::<0>)
            };
        } else if STORE == 1i32 {
            let here: Tile<bool, { [BN, BM] }> = row_here.reshape(shape![1, BM]).broadcast(shape![BN, BM])
                & column_here.reshape(shape![BN, 1]).broadcast(shape![BN, BM]);
            let w_at: Tile<i32, { [BN, BM] }> = ow.reshape(shape![1, BM]).broadcast(shape![BN, BM])
                + rw.reshape(shape![BN, 1]).broadcast(shape![BN, BM]);
            let zero: Tile<i32, { [BN, BM] }> = constant(0i32, shape![BN, BM]);
            let w_here: Tile<bool, { [BN, BM] }> = ge_tile(w_at, zero)
                & lt_tile(w_at, broadcast_scalar(w_out, shape![BN, BM]));
            let at: Tile<i32, { [BN, BM] }> = row_at.reshape(shape![1, BM]).broadcast(shape![BN, BM])
                + column_at.reshape(shape![BN, 1]).broadcast(shape![BN, BM]);
            let p: PointerTile<*mut T, { [BN, BM] }> = p.broadcast(shape![BN, BM]);
            let p: PointerTile<*mut T, { [BN, BM] }> = p.offset_tile(at);
            let turned: Tile<T, { [BN, BM] }> = o.transpose();
            let _t: Token = unsafe {
                store_ptr_tko(p, turned, ordering::Weak, None::<scope::TileBlock>, Some(here & w_here), None, Latency::<0>)
            };
        } else {
            let here: Tile<bool, { [BM, BN] }> = row_here.reshape(shape![BM, 1]).broadcast(shape![BM, BN])
                & column_here.reshape(shape![1, BN]).broadcast(shape![BM, BN]);
            let w_at: Tile<i32, { [BM, BN] }> = ow.reshape(shape![BM, 1]).broadcast(shape![BM, BN])
                + rw.reshape(shape![1, BN]).broadcast(shape![BM, BN]);
            let zero: Tile<i32, { [BM, BN] }> = constant(0i32, shape![BM, BN]);
            let w_here: Tile<bool, { [BM, BN] }> = ge_tile(w_at, zero)
                & lt_tile(w_at, broadcast_scalar(w_out, shape![BM, BN]));
            let at: Tile<i32, { [BM, BN] }> = row_at.reshape(shape![BM, 1]).broadcast(shape![BM, BN])
                + column_at.reshape(shape![1, BN]).broadcast(shape![BM, BN]);
            let p: PointerTile<*mut T, { [BM, BN] }> = p.broadcast(shape![BM, BN]);
            let p: PointerTile<*mut T, { [BM, BN] }> = p.offset_tile(at);
            let _t: Token = unsafe {
                store_ptr_tko(p, o, ordering::Weak, None::<scope::TileBlock>, Some(here & w_here), None, Latency::<0>)
            };
        }
    }

    /// f16 or bf16, in and out.
    #[cutile::entry()]
    unsafe fn linear_gemm_half<T: ElementType, const BM: i32, const BN: i32, const BK: i32, const CHANNELS_FIRST: i32, const STORE: i32>(
        a: *mut T,
        b: *mut T,
        bias: *mut T,
        y: *mut T,
        rows: i32,
        view_rows: i32,
        pitch: i32,
        window: i32,
        pd: i32,
        ph: i32,
        pw: i32,
        d_kernel: i32,
        d_stride: i32,
        d_dilation: i32,
        d_step: i32,
        d_inverse: i32,
        d_first: i32,
        d_shift: i32,
        d_out: i32,
        h_kernel: i32,
        h_stride: i32,
        h_dilation: i32,
        h_step: i32,
        h_inverse: i32,
        h_first: i32,
        h_shift: i32,
        h_out: i32,
        w_stride: i32,
        w_shift: i32,
        w_out: i32,
        w_base: i32,
        w_steps: i32,
        w_step: i32,
        chunks: i32,
        slices: i32,
        blocks: i32,
        channels: i32,
        y_n: i32,
        y_c: i32,
        y_d: i32,
        y_h: i32,
        y_w: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let all: i32 = slices * blocks;
        let jn: i32 = pid.0 % all;
        let slice: i32 = jn / blocks;
        let phase: i32 = (pid.0 / all) % (d_stride * h_stride);
        let row0: i32 = (pid.0 / (all * d_stride * h_stride)) * BM;
        let rd: i32 = phase / h_stride;
        let rh: i32 = phase % h_stride;
        let td: i32 = first_tap(rd, d_kernel, d_stride, d_step, d_inverse);
        let th: i32 = first_tap(rh, h_kernel, h_stride, h_step, h_inverse);
        let nd: i32 = taps(td, d_kernel, d_step);
        let nh: i32 = taps(th, h_kernel, h_step);
        let md: i32 = (td * d_dilation - rd) / d_stride;
        let mh: i32 = (th * h_dilation - rh) / h_stride;
        let per_tap: i32 = w_steps * chunks;
        let steps: i32 = nd * nh * per_tap;
        let start: i32 = row0 + ((d_first - md) * ph + (h_first - mh)) * pw + w_base;
        // Whole taps further back, along depth and height.
        let back_d: i32 = (d_dilation / (d_stride / d_step)) * ph * pw;
        let back_h: i32 = (h_dilation / (h_stride / h_step)) * pw;
        let chunk0: i32 = slice * chunks * min(slices - 1i32, 1i32);
        let at: Tensor<T, { [-1, -1] }> = operand_a(a, view_rows, window, pitch);
        let av: StridedView<T, { [BM, BK] }, { [1, BK] }, { [0, 1] }> = unsafe { make_strided_view(&at, shape![BM, BK], padding::Zero) };
        let bt: Tensor<T, { [-1, -1] }> = operand_b(b, d_kernel * h_kernel * w_steps * all * BN, chunks * BK);
        let bp = bt.partition(shape![BN, BK]);
        let mut acc: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
        for t in 0i32..steps {
            let tap: i32 = t / per_tap;
            let k: i32 = t - tap * per_tap;
            let wi: i32 = k / chunks;
            let kc: i32 = k - wi * chunks;
            let ad: i32 = tap / nh;
            let ah: i32 = tap - ad * nh;
            let row: i32 = start - ad * back_d - ah * back_h + wi * w_step;
            let column: i32 = (((td + ad * d_step) * h_kernel + th + ah * h_step) * w_steps + wi) * all + jn;
            let (ta, _ta): (Tile<T, { [BM, BK] }>, Token) = unsafe {
                load_view_raw(&av, [row, chunk0 + kc], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false], shape![BM, BK])
            };
            let tb: Tile<T, { [BN, BK] }> = load_view_tko(&bp, [column, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
            acc = mmaf(ta, tb.transpose(), acc);
        }
        finish::<T, BM, BN, CHANNELS_FIRST, STORE>(
            acc, bias, y, row0, (jn % blocks) * BN, slice, rd, rh, rows, pd, ph, pw, d_stride, d_shift, d_out, h_stride, h_shift, h_out,
            w_stride, w_shift, w_out, channels, y_n, y_c, y_d, y_h, y_w, has_bias, activation, slope,
        );
    }

    /// float32 that the pack rounded to tf32.
    #[cutile::entry()]
    unsafe fn linear_gemm_tf32<const BM: i32, const BN: i32, const BK: i32, const CHANNELS_FIRST: i32, const STORE: i32>(
        a: *mut f32,
        b: *mut f32,
        bias: *mut f32,
        y: *mut f32,
        rows: i32,
        view_rows: i32,
        pitch: i32,
        window: i32,
        pd: i32,
        ph: i32,
        pw: i32,
        d_kernel: i32,
        d_stride: i32,
        d_dilation: i32,
        d_step: i32,
        d_inverse: i32,
        d_first: i32,
        d_shift: i32,
        d_out: i32,
        h_kernel: i32,
        h_stride: i32,
        h_dilation: i32,
        h_step: i32,
        h_inverse: i32,
        h_first: i32,
        h_shift: i32,
        h_out: i32,
        w_stride: i32,
        w_shift: i32,
        w_out: i32,
        w_base: i32,
        w_steps: i32,
        w_step: i32,
        chunks: i32,
        slices: i32,
        blocks: i32,
        channels: i32,
        y_n: i32,
        y_c: i32,
        y_d: i32,
        y_h: i32,
        y_w: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let all: i32 = slices * blocks;
        let jn: i32 = pid.0 % all;
        let slice: i32 = jn / blocks;
        let phase: i32 = (pid.0 / all) % (d_stride * h_stride);
        let row0: i32 = (pid.0 / (all * d_stride * h_stride)) * BM;
        let rd: i32 = phase / h_stride;
        let rh: i32 = phase % h_stride;
        let td: i32 = first_tap(rd, d_kernel, d_stride, d_step, d_inverse);
        let th: i32 = first_tap(rh, h_kernel, h_stride, h_step, h_inverse);
        let nd: i32 = taps(td, d_kernel, d_step);
        let nh: i32 = taps(th, h_kernel, h_step);
        let md: i32 = (td * d_dilation - rd) / d_stride;
        let mh: i32 = (th * h_dilation - rh) / h_stride;
        let per_tap: i32 = w_steps * chunks;
        let steps: i32 = nd * nh * per_tap;
        let start: i32 = row0 + ((d_first - md) * ph + (h_first - mh)) * pw + w_base;
        // Whole taps further back, along depth and height.
        let back_d: i32 = (d_dilation / (d_stride / d_step)) * ph * pw;
        let back_h: i32 = (h_dilation / (h_stride / h_step)) * pw;
        let chunk0: i32 = slice * chunks * min(slices - 1i32, 1i32);
        let at: Tensor<f32, { [-1, -1] }> = operand_a(a, view_rows, window, pitch);
        let av: StridedView<f32, { [BM, BK] }, { [1, BK] }, { [0, 1] }> = unsafe { make_strided_view(&at, shape![BM, BK], padding::Zero) };
        let bt: Tensor<f32, { [-1, -1] }> = operand_b(b, d_kernel * h_kernel * w_steps * all * BN, chunks * BK);
        let bp = bt.partition(shape![BN, BK]);
        let mut acc: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
        for t in 0i32..steps {
            let tap: i32 = t / per_tap;
            let k: i32 = t - tap * per_tap;
            let wi: i32 = k / chunks;
            let kc: i32 = k - wi * chunks;
            let ad: i32 = tap / nh;
            let ah: i32 = tap - ad * nh;
            let row: i32 = start - ad * back_d - ah * back_h + wi * w_step;
            let column: i32 = (((td + ad * d_step) * h_kernel + th + ah * h_step) * w_steps + wi) * all + jn;
            let (ta, _ta): (Tile<f32, { [BM, BK] }>, Token) = unsafe {
                load_view_raw(&av, [row, chunk0 + kc], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false], shape![BM, BK])
            };
            let tb: Tile<f32, { [BN, BK] }> = load_view_tko(&bp, [column, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
            let ta: Tile<tf32, { [BM, BK] }> = convert_tile(ta);
            let tb: Tile<tf32, { [BN, BK] }> = convert_tile(tb);
            acc = mmaf(ta, tb.transpose(), acc);
        }
        finish::<f32, BM, BN, CHANNELS_FIRST, STORE>(
            acc, bias, y, row0, (jn % blocks) * BN, slice, rd, rh, rows, pd, ph, pw, d_stride, d_shift, d_out, h_stride, h_shift, h_out,
            w_stride, w_shift, w_out, channels, y_n, y_c, y_d, y_h, y_w, has_bias, activation, slope,
        );
    }

    /// float32 as two fp16 parts: the second of A starts `lo_rows` rows after the first, with zeros
    /// between them, that of B follows the first. `scale_x` is 2^-ex, `scale_w` 2^-ew of each column.
    #[cutile::entry()]
    unsafe fn linear_gemm_split<const BM: i32, const BN: i32, const BK: i32, const PROM: i32, const CHANNELS_FIRST: i32, const STORE: i32>(
        a: *mut f16,
        b: *mut f16,
        scale_x: *mut f32,
        scale_w: *mut f32,
        bias: *mut f32,
        y: *mut f32,
        rows: i32,
        view_rows: i32,
        pitch: i32,
        window: i32,
        pd: i32,
        ph: i32,
        pw: i32,
        d_kernel: i32,
        d_stride: i32,
        d_dilation: i32,
        d_step: i32,
        d_inverse: i32,
        d_first: i32,
        d_shift: i32,
        d_out: i32,
        h_kernel: i32,
        h_stride: i32,
        h_dilation: i32,
        h_step: i32,
        h_inverse: i32,
        h_first: i32,
        h_shift: i32,
        h_out: i32,
        w_stride: i32,
        w_shift: i32,
        w_out: i32,
        w_base: i32,
        w_steps: i32,
        w_step: i32,
        chunks: i32,
        slices: i32,
        blocks: i32,
        channels: i32,
        y_n: i32,
        y_c: i32,
        y_d: i32,
        y_h: i32,
        y_w: i32,
        has_bias: i32,
        activation: i32,
        slope: f64,
        lo_rows: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let all: i32 = slices * blocks;
        let jn: i32 = pid.0 % all;
        let slice: i32 = jn / blocks;
        let phase: i32 = (pid.0 / all) % (d_stride * h_stride);
        let row0: i32 = (pid.0 / (all * d_stride * h_stride)) * BM;
        let rd: i32 = phase / h_stride;
        let rh: i32 = phase % h_stride;
        let td: i32 = first_tap(rd, d_kernel, d_stride, d_step, d_inverse);
        let th: i32 = first_tap(rh, h_kernel, h_stride, h_step, h_inverse);
        let nd: i32 = taps(td, d_kernel, d_step);
        let nh: i32 = taps(th, h_kernel, h_step);
        let md: i32 = (td * d_dilation - rd) / d_stride;
        let mh: i32 = (th * h_dilation - rh) / h_stride;
        let per_tap: i32 = w_steps * chunks;
        let steps: i32 = nd * nh * per_tap;
        let start: i32 = row0 + ((d_first - md) * ph + (h_first - mh)) * pw + w_base;
        // Whole taps further back, along depth and height.
        let back_d: i32 = (d_dilation / (d_stride / d_step)) * ph * pw;
        let back_h: i32 = (h_dilation / (h_stride / h_step)) * pw;
        let chunk0: i32 = slice * chunks * min(slices - 1i32, 1i32);
        let at: Tensor<f16, { [-1, -1] }> = operand_a(a, lo_rows + view_rows, window, pitch);
        let av: StridedView<f16, { [BM, BK] }, { [1, BK] }, { [0, 1] }> = unsafe { make_strided_view(&at, shape![BM, BK], padding::Zero) };
        let bt: Tensor<f16, { [-1, -1] }> = operand_b(b, 2i32 * d_kernel * h_kernel * w_steps * all * BN, chunks * BK);
        let bp = bt.partition(shape![BN, BK]);
        let lo_columns: i32 = d_kernel * h_kernel * w_steps * all;
        let mut total: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
        let mut cross: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
        for u in 0i32..((steps + PROM - 1i32) / PROM) {
            let mut acc: Tile<f32, { [BM, BN] }> = constant(0.0f32, shape![BM, BN]);
            for v in 0i32..PROM {
                let t: i32 = u * PROM + v;
                let tap: i32 = t / per_tap;
                let k: i32 = t - tap * per_tap;
                let wi: i32 = k / chunks;
                let kc: i32 = k - wi * chunks;
                let ad: i32 = tap / nh;
                let ah: i32 = tap - ad * nh;
                let row: i32 = start - ad * back_d - ah * back_h + wi * w_step;
                let column: i32 = (((td + ad * d_step) * h_kernel + th + ah * h_step) * w_steps + wi) * all + jn;
                // Steps past the last one read no row: zeros.
                let row: i32 = if t < steps { row } else { lo_rows + view_rows };
                let column: i32 = if t < steps { column } else { 0i32 };
                let (xh, _ta): (Tile<f16, { [BM, BK] }>, Token) = unsafe {
                    load_view_raw(&av, [row, chunk0 + kc], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false], shape![BM, BK])
                };
                let (xl, _ta): (Tile<f16, { [BM, BK] }>, Token) = unsafe {
                    load_view_raw(&av, [row + lo_rows, chunk0 + kc], None, ordering::Weak, scope::TileBlock, tma::Enabled, None, [false, false], shape![BM, BK])
                };
                let wh: Tile<f16, { [BN, BK] }> = load_view_tko(&bp, [column, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let wl: Tile<f16, { [BN, BK] }> = load_view_tko(&bp, [column + lo_columns, kc], ordering::Weak, scope::TileBlock, None, tma::Enabled);
                let wh: Tile<f16, { [BK, BN] }> = wh.transpose();
                cross = mmaf(xl, wh, cross);
                cross = mmaf(xh, wl.transpose(), cross);
                acc = mmaf(xh, wh, acc);
            }
            total = total + acc;
        }
        let p: PointerTile<*mut f32, { [] }> = pointer_to_tile(scale_x);
        let p: PointerTile<*mut f32, { [1, 1] }> = p.reshape(shape![1, 1]);
        let (sx, _tx): (Tile<f32, { [1, 1] }>, Token) = unsafe {
            load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, None, None, None, Latency::<0>)
        };
        let p: PointerTile<*mut f32, { [] }> = pointer_to_tile(scale_w);
        let p: PointerTile<*mut f32, { [1] }> = p.reshape(shape![1]);
        let p: PointerTile<*mut f32, { [BN] }> = p.broadcast(shape![BN]);
        let column: Tile<i32, { [BN] }> = iota(shape![BN]);
        let column: Tile<i32, { [BN] }> = column + broadcast_scalar(jn * BN, shape![BN]);
        let p: PointerTile<*mut f32, { [BN] }> = p.offset_tile(column);
        let (sw, _tw): (Tile<f32, { [BN] }>, Token) = unsafe {
            load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, None, None, None, Latency::<0>)
        };
        let low: Tile<f32, { [BM, BN] }> = constant(0.00048828125f32, shape![BM, BN]);
        let total: Tile<f32, { [BM, BN] }> = total + cross * low;
        let total: Tile<f32, { [BM, BN] }> = total * sx.broadcast(shape![BM, BN]) * sw.reshape(shape![1, BN]).broadcast(shape![BM, BN]);
        finish::<f32, BM, BN, CHANNELS_FIRST, STORE>(
            total, bias, y, row0, (jn % blocks) * BN, slice, rd, rh, rows, pd, ph, pw, d_stride, d_shift, d_out, h_stride, h_shift, h_out,
            w_stride, w_shift, w_out, channels, y_n, y_c, y_d, y_h, y_w, has_bias, activation, slope,
        );
    }
}

//! Pack: x and w in the form that `linear_gemm` reads, and what is wrong with them.
//!
//! # Control words
//!
//! Eight 32-bit words that the host clears before a call. A later kernel reads them and computes
//! the call again by the definition where the fast path does not apply:
//! `[0]` the largest bits of |x| as float32, `[1]` those of |w| (both at or above 0x7f800000 if there
//! is an infinity or a NaN), `[2]` a count of voxels of x that the split is too coarse for, `[3]`
//! unused, `[4]` the float 2^-ex of the split. Only integer maxima and sums are taken, so their order
//! does not matter.
//!
//! # Loads
//!
//! `CHANNELS_LAST` says how x lies: 0, NCDHW; 1, any NDHWC; 2, NDHWC in one slice whose channels are a
//! multiple of 8, from an address that is a multiple of 16 bytes on: 16 bytes at a time.
//!
//! # The split
//!
//! `x * 2^ex = hi + 2^-11 * lo` with fp16 parts: the largest magnitude goes to [2^14, 2^15). A value
//! is off by at most 2^-22 of itself, or by 2^-51 of the largest. A voxel whose channels all lie
//! below 2^-26 of the largest, but not all at zero, is counted: relative to what such a voxel
//! contributes the split would be coarser than float32.
#[cutile::module]
pub mod pack {
    use cutile::core::*;
    use cutile::tileir::*;

    /// Bits of |x| as float32.
    fn magnitude_1<const N: i32>(x: Tile<f32, { [N] }>) -> Tile<i32, { [N] }> {
        let bits: Tile<i32, { [N] }> = bitcast(x);
        let low: Tile<i32, { [N] }> = constant(2147483647i32, shape![N]);
        bits & low
    }

    pub fn magnitude_2<const R: i32, const C: i32>(x: Tile<f32, { [R, C] }>) -> Tile<i32, { [R, C] }> {
        let bits: Tile<i32, { [R, C] }> = bitcast(x);
        let low: Tile<i32, { [R, C] }> = constant(2147483647i32, shape![R, C]);
        bits & low
    }

    /// The exponent that brings a magnitude, given as bits, to [2^14, 2^15), within what float32 can
    /// scale by.
    pub fn exponent<const N: i32>(bits: Tile<i32, { [N] }>) -> Tile<i32, { [N] }> {
        let biased: Tile<i32, { [N] }> = bits / broadcast_scalar(8388608i32, shape![N]);
        let want: Tile<i32, { [N] }> = broadcast_scalar(141i32, shape![N]);
        let most: Tile<i32, { [N] }> = broadcast_scalar(120i32, shape![N]);
        mini(want - biased, most)
    }

    /// 2^e as float32, for e within [-126, 127].
    pub fn power<const N: i32>(e: Tile<i32, { [N] }>) -> Tile<f32, { [N] }> {
        let bias: Tile<i32, { [N] }> = broadcast_scalar(127i32, shape![N]);
        let unit: Tile<i32, { [N] }> = broadcast_scalar(8388608i32, shape![N]);
        bitcast((e + bias) * unit)
    }

    /// float32 rounded to tf32, to nearest, ties away from zero; past the largest it stays finite.
    /// Infinities and NaN stay what they are.
    pub fn round_tf32<const R: i32, const C: i32>(x: Tile<f32, { [R, C] }>) -> Tile<f32, { [R, C] }> {
        let bits: Tile<i32, { [R, C] }> = bitcast(x);
        let size: Tile<i32, { [R, C] }> = magnitude_2(x);
        let sign: Tile<i32, { [R, C] }> = bits - size;
        let half: Tile<i32, { [R, C] }> = constant(4096i32, shape![R, C]);
        let keep: Tile<i32, { [R, C] }> = constant(-8192i32, shape![R, C]);
        let most: Tile<i32, { [R, C] }> = constant(2139086848i32, shape![R, C]);
        let infinite: Tile<i32, { [R, C] }> = constant(2139095040i32, shape![R, C]);
        let quiet: Tile<i32, { [R, C] }> = constant(2143289344i32, shape![R, C]);
        let finite: Tile<i32, { [R, C] }> = mini(mini(size, most) + half, most) & keep;
        let beyond: Tile<i32, { [R, C] }> = select(gt_tile(size, infinite), quiet, infinite);
        let size: Tile<i32, { [R, C] }> = select(lt_tile(size, infinite), finite, beyond);
        bitcast(sign + size)
    }

    unsafe fn control_word(control: *mut i32, at: i32) -> PointerTile<*mut i32, { [1] }> {
        let p: PointerTile<*mut i32, { [] }> = pointer_to_tile(control);
        let p: PointerTile<*mut i32, { [] }> = addptr(p, at);
        p.reshape(shape![1])
    }

    /// A control word that an earlier kernel left.
    pub unsafe fn read_control(control: *mut i32, at: i32) -> Tile<i32, { [1] }> {
        let p: PointerTile<*mut i32, { [1] }> = control_word(control, at);
        let (v, _t): (Tile<i32, { [1] }>, Token) = unsafe {
            load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, None, None, None, Latency::<0>)
        };
        v
    }

    unsafe fn raise_control(control: *mut i32, at: i32, value: Tile<i32, { [1] }>) {
        let p: PointerTile<*mut i32, { [1] }> = control_word(control, at);
        let (_old, _t): (Tile<i32, { [1] }>, Token) = unsafe {
            atomic_rmw_tko(p, value, atomic::Max, ordering::Relaxed, scope::Device, None, None)
        };
    }

    pub unsafe fn count_control(control: *mut i32, at: i32, value: Tile<i32, { [1] }>) {
        let p: PointerTile<*mut i32, { [1] }> = control_word(control, at);
        let (_old, _t): (Tile<i32, { [1] }>, Token) = unsafe {
            atomic_rmw_tko(p, value, atomic::Add, ordering::Relaxed, scope::Device, None, None)
        };
    }

    /// The largest magnitude of x, `length` float32 in any order, in `tiles` tiles of B, into control
    /// word 0. Any grid.
    #[cutile::entry()]
    unsafe fn pack_largest<const B: i32>(x: *mut f32, control: *mut i32, length: i64, tiles: i32) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let np: (i32, i32, i32) = get_num_tile_blocks();
        let lane: Tile<i32, { [B] }> = iota(shape![B]);
        let lane: Tile<i64, { [B] }> = exti(lane);
        let size: Tile<i32, { [B] }> = broadcast_scalar(B, shape![B]);
        let size: Tile<i64, { [B] }> = exti(size);
        let end: Tile<i64, { [B] }> = broadcast_scalar(length, shape![B]);
        let p: PointerTile<*mut f32, { [] }> = pointer_to_tile(x);
        let p: PointerTile<*mut f32, { [1] }> = p.reshape(shape![1]);
        let p: PointerTile<*mut f32, { [B] }> = p.broadcast(shape![B]);
        let mut most: Tile<i32, { [B] }> = constant(0i32, shape![B]);
        for i in (pid.0..tiles).step_by(np.0 as usize) {
            let tile: Tile<i32, { [B] }> = broadcast_scalar(i, shape![B]);
            let tile: Tile<i64, { [B] }> = exti(tile);
            let at: Tile<i64, { [B] }> = tile * size + lane;
            let here: Tile<bool, { [B] }> = lt_tile(at, end);
            let q: PointerTile<*mut f32, { [B] }> = p.offset_tile(at);
            let (v, _t): (Tile<f32, { [B] }>, Token) = unsafe {
                load_ptr_tko(q, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<0>)
            };
            let none: Tile<f32, { [B] }> = constant(0.0f32, shape![B]);
            let v: Tile<f32, { [B] }> = select(here, v, none);
            most = maxi(most, magnitude_1(v));
        }
        let most: Tile<i32, { [] }> = reduce_max(most, 0i32);
        raise_control(control, 0i32, most.reshape(shape![1]));
    }

    /// A tile [BR, BC] of the packed input as float32: rows from `row0`, columns from `column0`; zeros
    /// in the gaps and in padded channels.
    unsafe fn gather<T: ElementType, const BR: i32, const BC: i32, const CHANNELS_LAST: i32>(
        x: *mut T,
        row0: i32,
        column0: i32,
        lead: i32,
        pitch: i32,
        pd: i32,
        ph: i32,
        pw: i32,
        n: i32,
        depth: i32,
        height: i32,
        width: i32,
        channels: i32,
        slice_channels: i32,
        slice_pitch: i32,
        x_n: i32,
        x_c: i32,
        x_d: i32,
        x_h: i32,
        x_w: i32,
    ) -> Tile<f32, { [BR, BC] }> {
        let row: Tile<i32, { [BR] }> = iota(shape![BR]);
        let row: Tile<i32, { [BR] }> = row + broadcast_scalar(row0 - lead, shape![BR]);
        let zero: Tile<i32, { [BR] }> = constant(0i32, shape![BR]);
        let after: Tile<bool, { [BR] }> = ge_tile(row, zero);
        let row: Tile<i32, { [BR] }> = maxi(row, zero);
        let line: Tile<i32, { [BR] }> = row / broadcast_scalar(pw, shape![BR]);
        let iw: Tile<i32, { [BR] }> = row - line * broadcast_scalar(pw, shape![BR]);
        let plane: Tile<i32, { [BR] }> = line / broadcast_scalar(ph, shape![BR]);
        let ih: Tile<i32, { [BR] }> = line - plane * broadcast_scalar(ph, shape![BR]);
        let sample: Tile<i32, { [BR] }> = plane / broadcast_scalar(pd, shape![BR]);
        let id: Tile<i32, { [BR] }> = plane - sample * broadcast_scalar(pd, shape![BR]);
        let in_d: Tile<bool, { [BR] }> = lt_tile(id, broadcast_scalar(depth, shape![BR]));
        let in_h: Tile<bool, { [BR] }> = lt_tile(ih, broadcast_scalar(height, shape![BR]));
        let in_w: Tile<bool, { [BR] }> = lt_tile(iw, broadcast_scalar(width, shape![BR]));
        let in_n: Tile<bool, { [BR] }> = lt_tile(sample, broadcast_scalar(n, shape![BR]));
        let row_here: Tile<bool, { [BR] }> = after & in_d & in_h & in_w & in_n;
        // Offsets are 32-bit from the tile's first sample on; where that starts is 64-bit.
        let n0: i32 = max(row0 - lead, 0i32) / (pd * ph * pw);
        let row_at: Tile<i32, { [BR] }> = (sample - broadcast_scalar(n0, shape![BR])) * broadcast_scalar(x_n, shape![BR])
            + id * broadcast_scalar(x_d, shape![BR])
            + ih * broadcast_scalar(x_h, shape![BR])
            + iw * broadcast_scalar(x_w, shape![BR]);

        let column: Tile<i32, { [BC] }> = iota(shape![BC]);
        let column: Tile<i32, { [BC] }> = column + broadcast_scalar(column0, shape![BC]);
        let slice: Tile<i32, { [BC] }> = column / broadcast_scalar(slice_pitch, shape![BC]);
        let within: Tile<i32, { [BC] }> = column - slice * broadcast_scalar(slice_pitch, shape![BC]);
        let ci: Tile<i32, { [BC] }> = slice * broadcast_scalar(slice_channels, shape![BC]) + within;
        let in_slice: Tile<bool, { [BC] }> = lt_tile(within, broadcast_scalar(slice_channels, shape![BC]));
        let in_c: Tile<bool, { [BC] }> = lt_tile(ci, broadcast_scalar(channels, shape![BC]));
        let column_here: Tile<bool, { [BC] }> = in_slice & in_c;
        let column_at: Tile<i32, { [BC] }> = ci * broadcast_scalar(x_c, shape![BC]);

        let p: PointerTile<*mut T, { [] }> = pointer_to_tile(x);
        let p: PointerTile<*mut T, { [1, 1] }> = p.reshape(shape![1, 1]);
        let n0: Tile<i32, { [1, 1] }> = broadcast_scalar(n0, shape![1, 1]);
        let n0: Tile<i64, { [1, 1] }> = exti(n0);
        let step: Tile<i32, { [1, 1] }> = broadcast_scalar(x_n, shape![1, 1]);
        let step: Tile<i64, { [1, 1] }> = exti(step);
        let p: PointerTile<*mut T, { [1, 1] }> = p.offset_tile(n0 * step);
        // Neighbouring threads take neighbours along a pointer tile's first dimension, so that is the one
        // that lies densely in memory.
        let packed: Tile<f32, { [BR, BC] }> = if CHANNELS_LAST == 0i32 {
            let here: Tile<bool, { [BR, BC] }> = row_here.reshape(shape![BR, 1]).broadcast(shape![BR, BC])
                & column_here.reshape(shape![1, BC]).broadcast(shape![BR, BC]);
            let at: Tile<i32, { [BR, BC] }> = row_at.reshape(shape![BR, 1]).broadcast(shape![BR, BC])
                + column_at.reshape(shape![1, BC]).broadcast(shape![BR, BC]);
            let p: PointerTile<*mut T, { [BR, BC] }> = p.broadcast(shape![BR, BC]);
            let p: PointerTile<*mut T, { [BR, BC] }> = p.offset_tile(at);
            let (v, _t): (Tile<T, { [BR, BC] }>, Token) = unsafe {
                load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<0>)
            };
            let v: Tile<f32, { [BR, BC] }> = convert_tile(v);
            let none: Tile<f32, { [BR, BC] }> = constant(0.0f32, shape![BR, BC]);
            let v: Tile<f32, { [BR, BC] }> = select(here, v, none);
            v
        } else if CHANNELS_LAST == 2i32 {
            // One slice of whole vectors of channels: columns lie as x does.
            let row_at: Tile<i32, { [BR] }> = unsafe { assume_div_by::<_, 8>(row_at) };
            let first: i32 = unsafe { assume_div_by::<_, 8>(column0) };
            let along: Tile<i32, { [BC] }> = iota(shape![BC]);
            let along: Tile<i32, { [BC] }> = along + broadcast_scalar(first, shape![BC]);
            let here: Tile<bool, { [BR, BC] }> = row_here.reshape(shape![BR, 1]).broadcast(shape![BR, BC])
                & column_here.reshape(shape![1, BC]).broadcast(shape![BR, BC]);
            let one: Tile<i32, { [BR, BC] }> = constant(1i32, shape![BR, BC]);
            let zero: Tile<i32, { [BR, BC] }> = constant(0i32, shape![BR, BC]);
            let here: Tile<i32, { [BR, BC] }> = select(here, one, zero);
            let here: Tile<i32, { [BR, BC] }> = unsafe { assume_same_elements_2d::<_, 1, 8>(here) };
            let here: Tile<bool, { [BR, BC] }> = ne_tile(here, zero);
            let at: Tile<i32, { [BR, BC] }> = row_at.reshape(shape![BR, 1]).broadcast(shape![BR, BC])
                + along.reshape(shape![1, BC]).broadcast(shape![BR, BC]);
            let p: PointerTile<*mut T, { [1, 1] }> = unsafe { assume_div_by::<_, 16>(p) };
            let p: PointerTile<*mut T, { [BR, BC] }> = p.broadcast(shape![BR, BC]);
            let p: PointerTile<*mut T, { [BR, BC] }> = p.offset_tile(at);
            let (v, _t): (Tile<T, { [BR, BC] }>, Token) = unsafe {
                load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<0>)
            };
            let v: Tile<f32, { [BR, BC] }> = convert_tile(v);
            let none: Tile<f32, { [BR, BC] }> = constant(0.0f32, shape![BR, BC]);
            let v: Tile<f32, { [BR, BC] }> = select(here, v, none);
            v
        } else {
            let here: Tile<bool, { [BC, BR] }> = row_here.reshape(shape![1, BR]).broadcast(shape![BC, BR])
                & column_here.reshape(shape![BC, 1]).broadcast(shape![BC, BR]);
            let at: Tile<i32, { [BC, BR] }> = row_at.reshape(shape![1, BR]).broadcast(shape![BC, BR])
                + column_at.reshape(shape![BC, 1]).broadcast(shape![BC, BR]);
            let p: PointerTile<*mut T, { [BC, BR] }> = p.broadcast(shape![BC, BR]);
            let p: PointerTile<*mut T, { [BC, BR] }> = p.offset_tile(at);
            let (v, _t): (Tile<T, { [BC, BR] }>, Token) = unsafe {
                load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<0>)
            };
            let v: Tile<f32, { [BC, BR] }> = convert_tile(v);
            let none: Tile<f32, { [BC, BR] }> = constant(0.0f32, shape![BC, BR]);
            let v: Tile<f32, { [BC, BR] }> = select(here, v, none);
            let v: Tile<f32, { [BR, BC] }> = v.transpose();
            v
        };
        packed
    }

    /// Writes a tile of the packed input; what is past its end is clipped.
    unsafe fn put<T: ElementType, const BR: i32, const BC: i32>(
        tile: Tile<T, { [BR, BC] }>,
        out: *mut T,
        rows: i32,
        pitch: i32,
        i: i32,
        j: i32,
    ) {
        let base: PointerTile<*mut T, { [] }> = pointer_to_tile(out);
        let base: PointerTile<*mut T, { [] }> = assume_div_by::<_, 256>(base);
        let rows: i32 = assume_bounds_lower::<_, 0>(rows);
        let pitch: i32 = assume_bounds_lower::<_, 0>(pitch);
        let pitch: i32 = assume_div_by::<_, 8>(pitch);
        let shape: Shape<{ [-1, -1] }> = Shape::<{ [-1, -1] }> { dims: &[rows, pitch] };
        let strides: Array<{ [-1, 1] }> = Array::<{ [-1, 1] }> { dims: &[pitch] };
        let mut view: Tensor<T, { [-1, -1] }> = make_tensor_view(base, shape, strides, new_token_unordered());
        let mut part = view.partition_mut(shape![BR, BC]);
        unsafe { part.store_unchecked(tile, [i, j]) };
    }

    /// Raises control word 0 to the largest magnitude of a tile.
    unsafe fn watch<const BR: i32, const BC: i32>(tile: Tile<f32, { [BR, BC] }>, control: *mut i32) {
        let bits: Tile<i32, { [BR, BC] }> = magnitude_2(tile);
        let bits: Tile<i32, { [BC] }> = reduce_max(bits, 0i32);
        let most: Tile<i32, { [] }> = reduce_max(bits, 0i32);
        raise_control(control, 0i32, most.reshape(shape![1]));
    }

    /// f16 or bf16 as it is. Grid: (ceil(rows / BR), ceil(pitch / BC)).
    #[cutile::entry()]
    unsafe fn pack_input_half<T: ElementType, const BR: i32, const BC: i32, const CHANNELS_LAST: i32>(
        x: *mut T,
        out: *mut T,
        control: *mut i32,
        rows: i32,
        lead: i32,
        pitch: i32,
        pd: i32,
        ph: i32,
        pw: i32,
        n: i32,
        depth: i32,
        height: i32,
        width: i32,
        channels: i32,
        slice_channels: i32,
        slice_pitch: i32,
        x_n: i32,
        x_c: i32,
        x_d: i32,
        x_h: i32,
        x_w: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let v: Tile<f32, { [BR, BC] }> = gather::<T, BR, BC, CHANNELS_LAST>(
            x, pid.0 * BR, pid.1 * BC, lead, pitch, pd, ph, pw, n, depth, height, width, channels, slice_channels, slice_pitch,
            x_n, x_c, x_d, x_h, x_w,
        );
        watch(v, control);
        let o: Tile<T, { [BR, BC] }> = convert_tile(v);
        put(o, out, rows, pitch, pid.0, pid.1);
    }

    /// float32 rounded to tf32. Grid as above.
    #[cutile::entry()]
    unsafe fn pack_input_tf32<const BR: i32, const BC: i32, const CHANNELS_LAST: i32>(
        x: *mut f32,
        out: *mut f32,
        control: *mut i32,
        rows: i32,
        lead: i32,
        pitch: i32,
        pd: i32,
        ph: i32,
        pw: i32,
        n: i32,
        depth: i32,
        height: i32,
        width: i32,
        channels: i32,
        slice_channels: i32,
        slice_pitch: i32,
        x_n: i32,
        x_c: i32,
        x_d: i32,
        x_h: i32,
        x_w: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let v: Tile<f32, { [BR, BC] }> = gather::<f32, BR, BC, CHANNELS_LAST>(
            x, pid.0 * BR, pid.1 * BC, lead, pitch, pd, ph, pw, n, depth, height, width, channels, slice_channels, slice_pitch,
            x_n, x_c, x_d, x_h, x_w,
        );
        watch(v, control);
        put(round_tf32(v), out, rows, pitch, pid.0, pid.1);
    }

    /// float32 as two fp16 parts, by the exponent of control word 0, which `pack_largest` has filled;
    /// writes control words 2 and 4. Grid as above.
    #[cutile::entry()]
    unsafe fn pack_input_split<const BR: i32, const BC: i32, const CHANNELS_LAST: i32>(
        x: *mut f32,
        out: *mut f16,
        out_lo: *mut f16,
        control: *mut i32,
        rows: i32,
        lead: i32,
        pitch: i32,
        pd: i32,
        ph: i32,
        pw: i32,
        n: i32,
        depth: i32,
        height: i32,
        width: i32,
        channels: i32,
        slice_channels: i32,
        slice_pitch: i32,
        x_n: i32,
        x_c: i32,
        x_d: i32,
        x_h: i32,
        x_w: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let v: Tile<f32, { [BR, BC] }> = gather::<f32, BR, BC, CHANNELS_LAST>(
            x, pid.0 * BR, pid.1 * BC, lead, pitch, pd, ph, pw, n, depth, height, width, channels, slice_channels, slice_pitch,
            x_n, x_c, x_d, x_h, x_w,
        );
        let most: Tile<i32, { [1] }> = read_control(control, 0i32);
        let e: Tile<i32, { [1] }> = exponent(most);
        let scale: Tile<f32, { [1] }> = power(e);
        if pid.0 + pid.1 == 0i32 {
            let none: Tile<i32, { [1] }> = constant(0i32, shape![1]);
            let back: Tile<f32, { [1] }> = power(none - e);
            let back: Tile<i32, { [1] }> = bitcast(back);
            let p: PointerTile<*mut i32, { [1] }> = control_word(control, 4i32);
            let _t: Token = unsafe { store_ptr_tko(p, back, ordering::Weak, None::<scope::TileBlock>, None, None, Latency::<0>) };
        }
        let v: Tile<f32, { [BR, BC] }> = v * scale.reshape(shape![1, 1]).broadcast(shape![BR, BC]);
        let hi: Tile<f16, { [BR, BC] }> = convert_tile(v);
        let high: Tile<f32, { [BR, BC] }> = convert_tile(hi);
        let lift: Tile<f32, { [BR, BC] }> = constant(2048.0f32, shape![BR, BC]);
        let lo: Tile<f16, { [BR, BC] }> = convert_tile((v - high) * lift);
        put(hi, out, rows, pitch, pid.0, pid.1);
        put(lo, out_lo, rows, pitch, pid.0, pid.1);
        // 2^-26 of the largest, which is at least 2^14 now, unless it is too small to be scaled there.
        let bits: Tile<i32, { [BR, BC] }> = magnitude_2(v);
        let bits: Tile<i32, { [BR] }> = reduce_max(bits, 1i32);
        let none: Tile<i32, { [BR] }> = constant(0i32, shape![BR]);
        let least: Tile<i32, { [BR] }> = constant(964689920i32, shape![BR]);
        let coarse: Tile<bool, { [BR] }> = gt_tile(bits, none) & lt_tile(bits, least);
        let one: Tile<i32, { [BR] }> = constant(1i32, shape![BR]);
        let count: Tile<i32, { [] }> = reduce_sum(select(coarse, one, none), 0i32);
        let counted: i32 = tile_to_scalar(count);
        if counted > 0i32 {
            count_control(control, 2i32, count.reshape(shape![1]));
        }
    }

    /// What the columns of B are scaled by: 2^-ew of each output channel's largest weight, for the
    /// split; and control word 1. Grid: (columns, 1).
    #[cutile::entry()]
    unsafe fn pack_weight_scale<const B: i32>(
        w: *mut f32,
        scale: *mut f32,
        control: *mut i32,
        columns_per_slice: i32,
        inner: i32,
        channels_first: i32,
        slice_out: i32,
        in_per_group: i32,
        out_per_group: i32,
        out_channels: i32,
        taps: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let slice: i32 = pid.0 / columns_per_slice;
        let column: i32 = pid.0 % columns_per_slice;
        let co: i32 = if channels_first == 1i32 { column / inner } else { column % inner };
        let real: i32 = min(max(slice_out - co, 0i32), 1i32);
        let co: i32 = min(slice * slice_out + co, out_channels - 1i32);
        let group: i32 = co / out_per_group;
        let length: i32 = in_per_group * taps * real;
        let p: PointerTile<*mut f32, { [] }> = pointer_to_tile(w);
        let p: PointerTile<*mut f32, { [1] }> = p.reshape(shape![1]);
        let p: PointerTile<*mut f32, { [B] }> = p.broadcast(shape![B]);
        let lane: Tile<i32, { [B] }> = iota(shape![B]);
        let mut most: Tile<i32, { [B] }> = constant(0i32, shape![B]);
        for i in 0i32..((length + B - 1i32) / B) {
            let e: Tile<i32, { [B] }> = lane + broadcast_scalar(i * B, shape![B]);
            let here: Tile<bool, { [B] }> = lt_tile(e, broadcast_scalar(length, shape![B]));
            let ci: Tile<i32, { [B] }> = e / broadcast_scalar(taps, shape![B]);
            let tap: Tile<i32, { [B] }> = e - ci * broadcast_scalar(taps, shape![B]);
            let ci: Tile<i32, { [B] }> = ci + broadcast_scalar(group * in_per_group, shape![B]);
            let at: Tile<i32, { [B] }> = (ci * broadcast_scalar(out_per_group, shape![B])
                + broadcast_scalar(co - group * out_per_group, shape![B]))
                * broadcast_scalar(taps, shape![B])
                + tap;
            let q: PointerTile<*mut f32, { [B] }> = p.offset_tile(at);
            let (v, _t): (Tile<f32, { [B] }>, Token) = unsafe {
                load_ptr_tko(q, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<0>)
            };
            let none: Tile<f32, { [B] }> = constant(0.0f32, shape![B]);
            let v: Tile<f32, { [B] }> = select(here, v, none);
            most = maxi(most, magnitude_1(v));
        }
        let most: Tile<i32, { [] }> = reduce_max(most, 0i32);
        let most: Tile<i32, { [1] }> = most.reshape(shape![1]);
        raise_control(control, 1i32, most);
        let none: Tile<i32, { [1] }> = constant(0i32, shape![1]);
        let back: Tile<f32, { [1] }> = power(none - exponent(most));
        let p: PointerTile<*mut f32, { [] }> = pointer_to_tile(scale);
        let p: PointerTile<*mut f32, { [] }> = addptr(p, pid.0);
        let p: PointerTile<*mut f32, { [1] }> = p.reshape(shape![1]);
        let _t: Token = unsafe { store_ptr_tko(p, back, ordering::Weak, None::<scope::TileBlock>, None, None, Latency::<0>) };
    }

    /// B elements of the packed weight from `first`, as float32: zeros where a column's residue or
    /// group sees nothing. `w_far` is the offset m that the first element of a window is read at.
    unsafe fn gather_weight<T: ElementType, const B: i32>(
        w: *mut T,
        first: i32,
        length: i32,
        k: i32,
        columns: i32,
        columns_per_slice: i32,
        inner: i32,
        channels_first: i32,
        slice_out: i32,
        slice_in: i32,
        in_per_group: i32,
        out_per_group: i32,
        in_channels: i32,
        out_channels: i32,
        d_kernel: i32,
        h_kernel: i32,
        w_kernel: i32,
        w_stride: i32,
        w_dilation: i32,
        w_steps: i32,
        w_step: i32,
        w_far: i32,
        span: i32,
    ) -> Tile<f32, { [1, B] }> {
        let e: Tile<i32, { [B] }> = iota(shape![B]);
        let e: Tile<i32, { [B] }> = e + broadcast_scalar(first, shape![B]);
        let here: Tile<bool, { [B] }> = lt_tile(e, broadcast_scalar(length, shape![B]));
        let row: Tile<i32, { [B] }> = e / broadcast_scalar(k, shape![B]);
        let at_k: Tile<i32, { [B] }> = e - row * broadcast_scalar(k, shape![B]);
        let rest: Tile<i32, { [B] }> = row / broadcast_scalar(columns, shape![B]);
        let column: Tile<i32, { [B] }> = row - rest * broadcast_scalar(columns, shape![B]);
        let tap: Tile<i32, { [B] }> = rest / broadcast_scalar(w_steps, shape![B]);
        let wi: Tile<i32, { [B] }> = rest - tap * broadcast_scalar(w_steps, shape![B]);
        // Which output channel and residue.
        let slice: Tile<i32, { [B] }> = column / broadcast_scalar(columns_per_slice, shape![B]);
        let column: Tile<i32, { [B] }> = column - slice * broadcast_scalar(columns_per_slice, shape![B]);
        let high: Tile<i32, { [B] }> = column / broadcast_scalar(inner, shape![B]);
        let low: Tile<i32, { [B] }> = column - high * broadcast_scalar(inner, shape![B]);
        let co: Tile<i32, { [B] }> = if channels_first == 1i32 { high } else { low };
        let rw: Tile<i32, { [B] }> = if channels_first == 1i32 { low } else { high };
        let in_out: Tile<bool, { [B] }> = lt_tile(co, broadcast_scalar(slice_out, shape![B]));
        let in_rw: Tile<bool, { [B] }> = lt_tile(rw, broadcast_scalar(w_stride, shape![B]));
        let co: Tile<i32, { [B] }> = co + slice * broadcast_scalar(slice_out, shape![B]);
        // Which input channel and offset.
        let near: Tile<i32, { [B] }> = at_k / broadcast_scalar(span, shape![B]);
        let within: Tile<i32, { [B] }> = at_k - near * broadcast_scalar(span, shape![B]);
        let in_slice: Tile<bool, { [B] }> = lt_tile(within, broadcast_scalar(slice_in, shape![B]));
        let ci: Tile<i32, { [B] }> = within + slice * broadcast_scalar(slice_in, shape![B]);
        let in_in: Tile<bool, { [B] }> = lt_tile(ci, broadcast_scalar(in_channels, shape![B]));
        let in_co: Tile<bool, { [B] }> = lt_tile(co, broadcast_scalar(out_channels, shape![B]));
        let m: Tile<i32, { [B] }> = broadcast_scalar(w_far, shape![B]) - wi * broadcast_scalar(w_step, shape![B]) - near;
        let zero: Tile<i32, { [B] }> = constant(0i32, shape![B]);
        let reached: Tile<bool, { [B] }> = ge_tile(m, zero);
        // The tap along width: t*dilation = stride*m + rw.
        let far: Tile<i32, { [B] }> = maxi(m, zero) * broadcast_scalar(w_stride, shape![B]) + rw;
        let tw: Tile<i32, { [B] }> = far / broadcast_scalar(w_dilation, shape![B]);
        let whole: Tile<bool, { [B] }> = eq_tile(tw * broadcast_scalar(w_dilation, shape![B]), far);
        let in_kernel: Tile<bool, { [B] }> = lt_tile(tw, broadcast_scalar(w_kernel, shape![B]));
        let group: Tile<i32, { [B] }> = co / broadcast_scalar(out_per_group, shape![B]);
        let same: Tile<bool, { [B] }> = eq_tile(group, ci / broadcast_scalar(in_per_group, shape![B]));
        let here: Tile<bool, { [B] }> = here & in_out & in_rw & in_slice & in_in & in_co & reached & whole & in_kernel & same;
        let at: Tile<i32, { [B] }> = ((ci * broadcast_scalar(out_per_group, shape![B]) + co - group * broadcast_scalar(out_per_group, shape![B]))
            * broadcast_scalar(d_kernel * h_kernel, shape![B])
            + tap)
            * broadcast_scalar(w_kernel, shape![B])
            + tw;
        let p: PointerTile<*mut T, { [] }> = pointer_to_tile(w);
        let p: PointerTile<*mut T, { [1] }> = p.reshape(shape![1]);
        let p: PointerTile<*mut T, { [B] }> = p.broadcast(shape![B]);
        let p: PointerTile<*mut T, { [B] }> = p.offset_tile(at);
        let (v, _t): (Tile<T, { [B] }>, Token) = unsafe {
            load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<0>)
        };
        let v: Tile<f32, { [B] }> = convert_tile(v);
        let none: Tile<f32, { [B] }> = constant(0.0f32, shape![B]);
        let v: Tile<f32, { [B] }> = select(here, v, none);
        v.reshape(shape![1, B])
    }

    unsafe fn put_weight<T: ElementType, const B: i32>(v: Tile<T, { [1, B] }>, out: *mut T, first: i32, length: i32) {
        let v: Tile<T, { [B] }> = v.reshape(shape![B]);
        let e: Tile<i32, { [B] }> = iota(shape![B]);
        let e: Tile<i32, { [B] }> = e + broadcast_scalar(first, shape![B]);
        let here: Tile<bool, { [B] }> = lt_tile(e, broadcast_scalar(length, shape![B]));
        let p: PointerTile<*mut T, { [] }> = pointer_to_tile(out);
        let p: PointerTile<*mut T, { [1] }> = p.reshape(shape![1]);
        let p: PointerTile<*mut T, { [B] }> = p.broadcast(shape![B]);
        let p: PointerTile<*mut T, { [B] }> = p.offset_tile(e);
        let _t: Token = unsafe { store_ptr_tko(p, v, ordering::Weak, None::<scope::TileBlock>, Some(here), None, Latency::<0>) };
    }

    /// Raises control word 1.
    unsafe fn watch_weight<const B: i32>(v: Tile<f32, { [1, B] }>, control: *mut i32) {
        let bits: Tile<i32, { [1, B] }> = magnitude_2(v);
        let most: Tile<i32, { [1] }> = reduce_max(bits, 1i32);
        raise_control(control, 1i32, most);
    }

    /// f16 or bf16 as it is; control word 1. Grid: (ceil(length / B), 1).
    #[cutile::entry()]
    unsafe fn pack_weight_half<T: ElementType, const B: i32>(
        w: *mut T,
        out: *mut T,
        control: *mut i32,
        length: i32,
        k: i32,
        columns: i32,
        columns_per_slice: i32,
        inner: i32,
        channels_first: i32,
        slice_out: i32,
        slice_in: i32,
        in_per_group: i32,
        out_per_group: i32,
        in_channels: i32,
        out_channels: i32,
        d_kernel: i32,
        h_kernel: i32,
        w_kernel: i32,
        w_stride: i32,
        w_dilation: i32,
        w_steps: i32,
        w_step: i32,
        w_far: i32,
        span: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let v: Tile<f32, { [1, B] }> = gather_weight::<T, B>(
            w, pid.0 * B, length, k, columns, columns_per_slice, inner, channels_first, slice_out, slice_in, in_per_group, out_per_group, in_channels,
            out_channels, d_kernel, h_kernel, w_kernel, w_stride, w_dilation, w_steps, w_step, w_far, span,
        );
        watch_weight(v, control);
        let o: Tile<T, { [1, B] }> = convert_tile(v);
        put_weight(o, out, pid.0 * B, length);
    }

    /// float32 rounded to tf32; control word 1. Grid as above.
    #[cutile::entry()]
    unsafe fn pack_weight_tf32<const B: i32>(
        w: *mut f32,
        out: *mut f32,
        control: *mut i32,
        length: i32,
        k: i32,
        columns: i32,
        columns_per_slice: i32,
        inner: i32,
        channels_first: i32,
        slice_out: i32,
        slice_in: i32,
        in_per_group: i32,
        out_per_group: i32,
        in_channels: i32,
        out_channels: i32,
        d_kernel: i32,
        h_kernel: i32,
        w_kernel: i32,
        w_stride: i32,
        w_dilation: i32,
        w_steps: i32,
        w_step: i32,
        w_far: i32,
        span: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let v: Tile<f32, { [1, B] }> = gather_weight::<f32, B>(
            w, pid.0 * B, length, k, columns, columns_per_slice, inner, channels_first, slice_out, slice_in, in_per_group, out_per_group, in_channels,
            out_channels, d_kernel, h_kernel, w_kernel, w_stride, w_dilation, w_steps, w_step, w_far, span,
        );
        watch_weight(v, control);
        put_weight(round_tf32(v), out, pid.0 * B, length);
    }

    /// float32 as two fp16 parts, by the scales of `pack_weight_scale`. Grid as above.
    #[cutile::entry()]
    unsafe fn pack_weight_split<const B: i32>(
        w: *mut f32,
        out: *mut f16,
        out_lo: *mut f16,
        scale: *mut f32,
        length: i32,
        k: i32,
        columns: i32,
        columns_per_slice: i32,
        inner: i32,
        channels_first: i32,
        slice_out: i32,
        slice_in: i32,
        in_per_group: i32,
        out_per_group: i32,
        in_channels: i32,
        out_channels: i32,
        d_kernel: i32,
        h_kernel: i32,
        w_kernel: i32,
        w_stride: i32,
        w_dilation: i32,
        w_steps: i32,
        w_step: i32,
        w_far: i32,
        span: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let v: Tile<f32, { [1, B] }> = gather_weight::<f32, B>(
            w, pid.0 * B, length, k, columns, columns_per_slice, inner, channels_first, slice_out, slice_in, in_per_group, out_per_group, in_channels,
            out_channels, d_kernel, h_kernel, w_kernel, w_stride, w_dilation, w_steps, w_step, w_far, span,
        );
        let e: Tile<i32, { [B] }> = iota(shape![B]);
        let e: Tile<i32, { [B] }> = e + broadcast_scalar(pid.0 * B, shape![B]);
        let here: Tile<bool, { [B] }> = lt_tile(e, broadcast_scalar(length, shape![B]));
        let row: Tile<i32, { [B] }> = e / broadcast_scalar(k, shape![B]);
        let column: Tile<i32, { [B] }> = row % broadcast_scalar(columns, shape![B]);
        let p: PointerTile<*mut f32, { [] }> = pointer_to_tile(scale);
        let p: PointerTile<*mut f32, { [1] }> = p.reshape(shape![1]);
        let p: PointerTile<*mut f32, { [B] }> = p.broadcast(shape![B]);
        let p: PointerTile<*mut f32, { [B] }> = p.offset_tile(column);
        let (back, _t): (Tile<f32, { [B] }>, Token) = unsafe {
            load_ptr_tko(p, ordering::Weak, None::<scope::TileBlock>, Some(here), None, None, Latency::<0>)
        };
        let one: Tile<f32, { [B] }> = constant(1.0f32, shape![B]);
        let back: Tile<f32, { [B] }> = select(here, back, one);
        // A power of two: the division is exact.
        let v: Tile<f32, { [1, B] }> = v / back.reshape(shape![1, B]);
        let hi: Tile<f16, { [1, B] }> = convert_tile(v);
        let high: Tile<f32, { [1, B] }> = convert_tile(hi);
        let lift: Tile<f32, { [1, B] }> = constant(2048.0f32, shape![1, B]);
        let lo: Tile<f16, { [1, B] }> = convert_tile((v - high) * lift);
        put_weight(hi, out, pid.0 * B, length);
        put_weight(lo, out_lo, pid.0 * B, length);
    }
}

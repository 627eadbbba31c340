//! Any transposed convolution, by its definition: the kernel that is always right.
//!
//! `y[n, co, o] = act(bias[co] + sum over taps t and channels ci of co's group of
//! x[n, ci, i] * w[ci, co, t])`, `i = (o + p - t * d) / s` along each axis where that divides and
//! `0 <= i < I`. Sums are chains of fused multiply-adds in `A`, taps outside, channels inside, then the
//! bias, then the activation, and one rounding to `T`: the error stays below `(n + 2) * u * m`. A tap
//! that reads outside adds nothing, even where the weight is infinite or NaN. Equal calls give equal
//! bits.
//!
//! # Parameters, in order
//! 1. `x`, `w`, `bias`, `y` (`T`), `control` (i32): pointers. `x` and `y` have any layout; `w` is
//!    contiguous [Cin, Cout / groups, kD, kH, kW], `bias` is [Cout]. `y` overlaps none of the others.
//!    Only the type's own alignment is assumed. `bias` may be null if `has_bias` is 0, `control` if
//!    `guarded` is 0.
//! 2. `has_bias`, `guarded`, `small_limit` (i32).
//! 3. `n`, `groups`, `cin`, `cout` (i32): batch, groups, and channels **per group**.
//! 4. For depth, then height, then width (i32): input size, output size, kernel, stride, padding,
//!    dilation.
//! 5. Strides of `x`, then of `y`: n, c, d, h, w (i64), in elements.
//! 6. `activation` (i32), a code of `epilogue`, and its `slope` (f64); the same of a second one that
//!    follows it.
//!
//! All sizes are at least 1. Along each axis `O + p` and `d * k` are below 2^31; the product of the
//! kernel's sizes times `BC`, the channels, and the tiles (below) too. Offsets are in 64 bits.
//!
//! # Guard
//! If `guarded` is not 0 the kernel does its work only if `control` says that another kernel's result
//! cannot stand, else it returns without touching `y`. The words, as the pack kernels leave them: the
//! largest bit pattern of an |x| as f32, the same of w, and how many elements of x and of w are too
//! small. Work is done if one of the first two is at least 0x7f800000 (an infinity or NaN) or one of
//! the last two, as an unsigned number, is more than `small_limit` (which is not negative).
//!
//! # Grid
//! Any number of blocks along the first axis; each takes every so manieth tile of `BC` channels x `BP`
//! positions. There are `n * groups * ceil(cout / BC) * phases * ceil(positions / BP)` tiles: with
//! `q` the product of `ceil(O / s)`, if `q >= BP / 2` a tile's positions all have one residue
//! modulo the stride, `phases` is the product of `g = min(s, O)` and `positions` that of
//! `ceil(O / g)`; else `phases` is 1 and `positions` the product of `O`.
#[cutile::module]
pub mod direct {
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

    fn spread<const N: i32>(x: i32) -> Tile<i32, { [N] }> {
        broadcast_scalar(x, const_shape![N])
    }

    fn spread64<const N: i32>(x: i64) -> Tile<i64, { [N] }> {
        broadcast_scalar(x, const_shape![N])
    }

    /// `x[first + from]` where `on`; anything elsewhere.
    unsafe fn gather<T: ElementType, A: ElementType, const BP: i32>(
        x: *mut T,
        first: i64,
        from: Tile<i64, { [BP] }>,
        on: Tile<bool, { [BP] }>,
    ) -> Tile<A, { [BP] }> {
        let first: Tile<i64, { [] }> = scalar_to_tile(first);
        let base: PointerTile<*mut T, { [] }> = pointer_to_tile(x);
        let base: PointerTile<*mut T, { [] }> = base.offset_tile(first);
        let base: PointerTile<*mut T, { [1] }> = base.reshape(const_shape![1]);
        let base: PointerTile<*mut T, { [BP] }> = base.broadcast(const_shape![BP]);
        let at: PointerTile<*mut T, { [BP] }> = base.offset_tile(from);
        let (values, _token): (Tile<T, { [BP] }>, Token) = unsafe {
            load_ptr_tko(at, ordering::Weak, None::<scope::TileBlock>, Some(on), None, None, Latency::<0>)
        };
        let values: Tile<A, { [BP] }> = convert_tile(values);
        values
    }

    /// `w[first + lane]`.
    unsafe fn fetch<T: ElementType, A: ElementType, const BC: i32>(
        w: *mut T,
        first: i64,
        lane: Tile<i32, { [BC] }>,
    ) -> Tile<A, { [BC] }> {
        let first: Tile<i64, { [] }> = scalar_to_tile(first);
        let base: PointerTile<*mut T, { [] }> = pointer_to_tile(w);
        let base: PointerTile<*mut T, { [] }> = base.offset_tile(first);
        let base: PointerTile<*mut T, { [1] }> = base.reshape(const_shape![1]);
        let base: PointerTile<*mut T, { [BC] }> = base.broadcast(const_shape![BC]);
        let at: PointerTile<*mut T, { [BC] }> = base.offset_tile(lane);
        let (values, _token): (Tile<T, { [BC] }>, Token) = unsafe {
            load_ptr_tko(at, ordering::Weak, None::<scope::TileBlock>, None, None, None, Latency::<0>)
        };
        let values: Tile<A, { [BC] }> = convert_tile(values);
        values
    }

    /// `sum + w x^T`.
    fn outer<A: ElementType, const BC: i32, const BP: i32>(
        w: Tile<A, { [BC] }>,
        x: Tile<A, { [BP] }>,
        sum: Tile<A, { [BP, BC] }>,
    ) -> Tile<A, { [BP, BC] }> {
        let x: Tile<A, { [BP, BC] }> = x.reshape(const_shape![BP, 1]).broadcast(const_shape![BP, BC]);
        let w: Tile<A, { [BP, BC] }> = w.reshape(const_shape![1, BC]).broadcast(const_shape![BP, BC]);
        fma(w, x, sum, rounding::NearestEven, ftz::Disabled)
    }

    #[cutile::entry()]
    unsafe fn direct<T: ElementType, A: ElementType, const WIDE: i32, const BC: i32, const BP: i32, const U: i32>(
        x: *mut T,
        w: *mut T,
        bias: *mut T,
        y: *mut T,
        control: *mut i32,
        has_bias: i32,
        guarded: i32,
        small_limit: i32,
        n: i32,
        groups: i32,
        cin: i32,
        cout: i32,
        in_d: i32,
        out_d: i32,
        k_d: i32,
        s_d: i32,
        p_d: i32,
        d_d: i32,
        in_h: i32,
        out_h: i32,
        k_h: i32,
        s_h: i32,
        p_h: i32,
        d_h: i32,
        in_w: i32,
        out_w: i32,
        k_w: i32,
        s_w: i32,
        p_w: i32,
        d_w: i32,
        x_n: i64,
        x_c: i64,
        x_d: i64,
        x_h: i64,
        x_w: i64,
        y_n: i64,
        y_c: i64,
        y_d: i64,
        y_h: i64,
        y_w: i64,
        activation: i32,
        slope: f64,
        post: i32,
        post_slope: f64,
    ) {
        // What the guard says.
        let mut needed: i32 = 1i32;
        if guarded != 0i32 {
            let word: Tile<i32, { [4] }> = iota(const_shape![4]);
            let two: Tile<i32, { [4] }> = constant(2i32, const_shape![4]);
            let finite: Tile<i32, { [4] }> = constant(2139095039i32, const_shape![4]);
            let small: Tile<i32, { [4] }> = broadcast_scalar(small_limit, const_shape![4]);
            let limit: Tile<i32, { [4] }> = select(lt_tile(word, two), finite, small);
            let base: PointerTile<*mut i32, { [] }> = pointer_to_tile(control);
            let base: PointerTile<*mut i32, { [1] }> = base.reshape(const_shape![1]);
            let base: PointerTile<*mut i32, { [4] }> = base.broadcast(const_shape![4]);
            let at: PointerTile<*mut i32, { [4] }> = base.offset_tile(word);
            let (seen, _t): (Tile<i32, { [4] }>, Token) = unsafe {
                load_ptr_tko(at, ordering::Weak, None::<scope::TileBlock>, None, None, None, Latency::<0>)
            };
            let one: Tile<i32, { [4] }> = constant(1i32, const_shape![4]);
            let none: Tile<i32, { [4] }> = constant(0i32, const_shape![4]);
            let beyond: Tile<i32, { [4] }> =
                select(gt_tile(seen, limit), one, select(lt_tile(seen, none), one, none));
            let any: Tile<i32, { [] }> = reduce_max(beyond, 0i32);
            needed = tile_to_scalar(any);
        }

        // Along an axis either positions of one residue modulo the stride, or all of them.
        let q: i64 = wide(ceil_div(out_d, s_d)) * wide(ceil_div(out_h, s_h)) * wide(ceil_div(out_w, s_w));
        let phased: i32 = if q >= wide(BP / 2i32) { 1i32 } else { 0i32 };
        let g_d: i32 = if phased != 0i32 { min(s_d, out_d) } else { 1i32 };
        let g_h: i32 = if phased != 0i32 { min(s_h, out_h) } else { 1i32 };
        let g_w: i32 = if phased != 0i32 { min(s_w, out_w) } else { 1i32 };
        let q_d: i32 = ceil_div(out_d, g_d);
        let q_h: i32 = ceil_div(out_h, g_h);
        let q_w: i32 = ceil_div(out_w, g_w);
        let tiles: i32 = narrow((wide(q_d) * wide(q_h) * wide(q_w) + wide(BP - 1i32)) / wide(BP));
        let channel_blocks: i32 = ceil_div(cout, BC);
        let blocks: i32 = groups * channel_blocks;
        let phases: i32 = g_d * g_h * g_w;
        let total: i32 = blocks * tiles * phases * n;
        let limit: i32 = if needed != 0i32 { total } else { 0i32 };

        let taps: i32 = k_d * k_h * k_w;
        let lane: Tile<i32, { [BP] }> = iota(const_shape![BP]);
        let channel: Tile<i32, { [BC] }> = iota(const_shape![BC]);
        let nought: Tile<i32, { [BP] }> = constant(0i32, const_shape![BP]);

        for tile in (program_id(0i32)..limit).step_by(num_programs(0i32) as usize) {
            // Which channels, positions and sample.
            let block: i32 = tile % blocks;
            let rest: i32 = tile / blocks;
            let first: i64 = wide(rest % tiles) * wide(BP);
            let rest: i32 = rest / tiles;
            let phase: i32 = rest % phases;
            let sample: i32 = rest / phases;
            let f_w: i32 = phase % g_w;
            let f_h: i32 = (phase / g_w) % g_h;
            let f_d: i32 = phase / (g_w * g_h);
            let group: i32 = block / channel_blocks;
            let c_first: i32 = (block % channel_blocks) * BC;

            // The position of each lane.
            let row: i64 = first / wide(q_w);
            let at_w: Tile<i32, { [BP] }> = lane + spread::<BP>(narrow(first % wide(q_w)));
            let at_h: Tile<i32, { [BP] }> = at_w / spread::<BP>(q_w);
            let at_w: Tile<i32, { [BP] }> = at_w - at_h * spread::<BP>(q_w);
            let at_h: Tile<i32, { [BP] }> = at_h + spread::<BP>(narrow(row % wide(q_h)));
            let at_d: Tile<i32, { [BP] }> = at_h / spread::<BP>(q_h);
            let at_h: Tile<i32, { [BP] }> = at_h - at_d * spread::<BP>(q_h);
            let at_d: Tile<i32, { [BP] }> = at_d + spread::<BP>(narrow(row / wide(q_h)));
            let o_d: Tile<i32, { [BP] }> = at_d * spread::<BP>(g_d) + spread::<BP>(f_d);
            let o_h: Tile<i32, { [BP] }> = at_h * spread::<BP>(g_h) + spread::<BP>(f_h);
            let o_w: Tile<i32, { [BP] }> = at_w * spread::<BP>(g_w) + spread::<BP>(f_w);
            let inside: Tile<bool, { [BP] }> = lt_tile(o_d, spread::<BP>(out_d))
                & lt_tile(o_h, spread::<BP>(out_h))
                & lt_tile(o_w, spread::<BP>(out_w));

            // o + p = s * quotient + remainder.
            let quotient_d: Tile<i32, { [BP] }> = (o_d + spread::<BP>(p_d)) / spread::<BP>(s_d);
            let quotient_h: Tile<i32, { [BP] }> = (o_h + spread::<BP>(p_h)) / spread::<BP>(s_h);
            let quotient_w: Tile<i32, { [BP] }> = (o_w + spread::<BP>(p_w)) / spread::<BP>(s_w);
            let remainder_d: Tile<i32, { [BP] }> = o_d + spread::<BP>(p_d) - quotient_d * spread::<BP>(s_d);
            let remainder_h: Tile<i32, { [BP] }> = o_h + spread::<BP>(p_h) - quotient_h * spread::<BP>(s_h);
            let remainder_w: Tile<i32, { [BP] }> = o_w + spread::<BP>(p_w) - quotient_w * spread::<BP>(s_w);
            let r_d: i32 = (f_d + p_d) % s_d;
            let r_h: i32 = (f_h + p_h) % s_h;
            let r_w: i32 = (f_w + p_w) % s_w;

            let x_first: i64 = wide(sample) * x_n + wide(group * cin) * x_c;
            let w_first: i64 = (wide(group * cin) * wide(cout) + wide(c_first)) * wide(taps);
            let w_step: i64 = wide(cout) * wide(taps);
            // A channel past the last reads the last one's weights; it is not written.
            let c_last: Tile<i32, { [BC] }> = spread::<BC>(cout - c_first - 1i32);
            let w_lane: Tile<i32, { [BC] }> = min_tile(channel, c_last) * spread::<BC>(taps);
            let mut sum: Tile<A, { [BP, BC] }> = constant(A::ZERO, const_shape![BP, BC]);
            for t_d in 0i32..k_d {
                let a_d: i32 = (t_d * d_d) / s_d;
                let b_d: i32 = (t_d * d_d) % s_d;
                if phased == 0i32 || b_d == r_d {
                    let i_d: Tile<i32, { [BP] }> = quotient_d - spread::<BP>(a_d);
                    let on_d: Tile<bool, { [BP] }> = inside
                        & eq_tile(remainder_d, spread::<BP>(b_d))
                        & ge_tile(i_d, nought)
                        & lt_tile(i_d, spread::<BP>(in_d));
                    let i_d: Tile<i64, { [BP] }> = exti(i_d);
                    let from_d: Tile<i64, { [BP] }> = i_d * spread64::<BP>(x_d);
                    for t_h in 0i32..k_h {
                        let a_h: i32 = (t_h * d_h) / s_h;
                        let b_h: i32 = (t_h * d_h) % s_h;
                        if phased == 0i32 || b_h == r_h {
                            let i_h: Tile<i32, { [BP] }> = quotient_h - spread::<BP>(a_h);
                            let on_h: Tile<bool, { [BP] }> = on_d
                                & eq_tile(remainder_h, spread::<BP>(b_h))
                                & ge_tile(i_h, nought)
                                & lt_tile(i_h, spread::<BP>(in_h));
                            let i_h: Tile<i64, { [BP] }> = exti(i_h);
                            let from_h: Tile<i64, { [BP] }> = i_h * spread64::<BP>(x_h) + from_d;
                            for t_w in 0i32..k_w {
                                let a_w: i32 = (t_w * d_w) / s_w;
                                let b_w: i32 = (t_w * d_w) % s_w;
                                if phased == 0i32 || b_w == r_w {
                                    let i_w: Tile<i32, { [BP] }> = quotient_w - spread::<BP>(a_w);
                                    let on: Tile<bool, { [BP] }> = on_h
                                        & eq_tile(remainder_w, spread::<BP>(b_w))
                                        & ge_tile(i_w, nought)
                                        & lt_tile(i_w, spread::<BP>(in_w));
                                    let i_w: Tile<i64, { [BP] }> = exti(i_w);
                                    let from: Tile<i64, { [BP] }> = i_w * spread64::<BP>(x_w) + from_h;
                                    let w_tap: i64 = w_first + wide((t_d * k_h + t_h) * k_w + t_w);
                                    let mut part: Tile<A, { [BP, BC] }> = sum;
                                    for run in 0i32..cin / U {
                                        for j in 0i32..U {
                                            let ci: i64 = wide(run * U + j);
                                            let x_tile: Tile<A, { [BP] }> = gather::<T, A, BP>(x, x_first + ci * x_c, from, on);
                                            let w_tile: Tile<A, { [BC] }> = fetch::<T, A, BC>(w, w_tap + ci * w_step, w_lane);
                                            part = outer(w_tile, x_tile, part);
                                        }
                                    }
                                    for last in (cin - cin % U)..cin {
                                        let ci: i64 = wide(last);
                                        let x_tile: Tile<A, { [BP] }> = gather::<T, A, BP>(x, x_first + ci * x_c, from, on);
                                        let w_tile: Tile<A, { [BC] }> = fetch::<T, A, BC>(w, w_tap + ci * w_step, w_lane);
                                        part = outer(w_tile, x_tile, part);
                                    }
                                    // Where the tap reads outside, what was added is dropped, whatever it is.
                                    let on: Tile<bool, { [BP, BC] }> = on.reshape(const_shape![BP, 1]).broadcast(const_shape![BP, BC]);
                                    sum = select(on, part, sum);
                                }
                            }
                        }
                    }
                }
            }

            let in_group: Tile<i32, { [BC] }> = channel + spread::<BC>(c_first);
            let present: Tile<bool, { [BC] }> = lt_tile(in_group, spread::<BC>(cout));
            let out_channel: Tile<i32, { [BC] }> = in_group + spread::<BC>(group * cout);
            if has_bias != 0i32 {
                let base: PointerTile<*mut T, { [] }> = pointer_to_tile(bias);
                let base: PointerTile<*mut T, { [1] }> = base.reshape(const_shape![1]);
                let base: PointerTile<*mut T, { [BC] }> = base.broadcast(const_shape![BC]);
                let from: PointerTile<*mut T, { [BC] }> = base.offset_tile(out_channel);
                let (b, _t0): (Tile<T, { [BC] }>, Token) = unsafe {
                    load_ptr_tko(from, ordering::Weak, None::<scope::TileBlock>, Some(present), None, None, Latency::<0>)
                };
                let b: Tile<A, { [BC] }> = convert_tile(b);
                sum = sum + b.reshape(const_shape![1, BC]).broadcast(const_shape![BP, BC]);
            }
            let mut out: Tile<A, { [BP, BC] }> = sum;
            // A loop, so that the functions are in the code once.
            for i in 0i32..(1i32 + min(post, 1i32)) {
                let code: i32 = if i == 0i32 { activation } else { post };
                let slope: f64 = if i == 0i32 { slope } else { post_slope };
                out = activate::<A, WIDE, BP, BC>(out, code, slope);
            }
            let out: Tile<T, { [BP, BC] }> = convert_tile(out);
            let o_d: Tile<i64, { [BP] }> = exti(o_d);
            let o_h: Tile<i64, { [BP] }> = exti(o_h);
            let o_w: Tile<i64, { [BP] }> = exti(o_w);
            let to: Tile<i64, { [BP] }> = o_d * spread64::<BP>(y_d)
                + o_h * spread64::<BP>(y_h)
                + o_w * spread64::<BP>(y_w)
                + spread64::<BP>(wide(sample) * y_n);
            let to_channel: Tile<i64, { [BC] }> = exti(out_channel);
            let to_channel: Tile<i64, { [BC] }> = to_channel * spread64::<BC>(y_c);
            let to: Tile<i64, { [BP, BC] }> = to.reshape(const_shape![BP, 1]).broadcast(const_shape![BP, BC])
                + to_channel.reshape(const_shape![1, BC]).broadcast(const_shape![BP, BC]);
            let base: PointerTile<*mut T, { [] }> = pointer_to_tile(y);
            let base: PointerTile<*mut T, { [1, 1] }> = base.reshape(const_shape![1, 1]);
            let base: PointerTile<*mut T, { [BP, BC] }> = base.broadcast(const_shape![BP, BC]);
            let to: PointerTile<*mut T, { [BP, BC] }> = base.offset_tile(to);
            let written: Tile<bool, { [BP, BC] }> = inside.reshape(const_shape![BP, 1]).broadcast(const_shape![BP, BC])
                & present.reshape(const_shape![1, BC]).broadcast(const_shape![BP, BC]);
            let _t3: Token = unsafe {
                store_ptr_tko(to, out, ordering::Weak, None::<scope::TileBlock>, Some(written), None, Latency::<0>)
            };
        }
    }
}

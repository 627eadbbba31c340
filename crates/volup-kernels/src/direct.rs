//! (in the making)
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

    #[cutile::entry()]
    unsafe fn direct<T: ElementType, A: ElementType, const BC: i32, const BP: i32>(
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
        let phased: i32 = if ceil_div(out_d, s_d) * ceil_div(out_h, s_h) * ceil_div(out_w, s_w) >= BP / 2i32 {
            1i32
        } else {
            0i32
        };
        let g_d: i32 = if phased != 0i32 { min(s_d, out_d) } else { 1i32 };
        let g_h: i32 = if phased != 0i32 { min(s_h, out_h) } else { 1i32 };
        let g_w: i32 = if phased != 0i32 { min(s_w, out_w) } else { 1i32 };
        let q_d: i32 = ceil_div(out_d, g_d);
        let q_h: i32 = ceil_div(out_h, g_h);
        let q_w: i32 = ceil_div(out_w, g_w);

        let (q, many): (i64, i64) = (wide(q_d) * wide(q_h) * wide(q_w), wide(BP));
        let tiles: i64 = (q + many - 1i64) / many;
        let channel_blocks: i32 = ceil_div(cout, BC);
        let blocks: i64 = wide(groups) * wide(channel_blocks);
        let total: i64 = blocks * tiles * wide(g_d) * wide(g_h) * wide(g_w) * wide(n);
        let limit: i64 = if needed != 0i32 { total } else { 0i64 };

        let taps: i64 = wide(k_d) * wide(k_h) * wide(k_w);
        let lane: Tile<i32, { [BP] }> = iota(const_shape![BP]);
        let channel: Tile<i32, { [BC] }> = iota(const_shape![BC]);
        let nought: Tile<i32, { [BP] }> = constant(0i32, const_shape![BP]);
        let x_base: PointerTile<*mut T, { [] }> = pointer_to_tile(x);
        let x_base: PointerTile<*mut T, { [1] }> = x_base.reshape(const_shape![1]);
        let x_base: PointerTile<*mut T, { [BP] }> = x_base.broadcast(const_shape![BP]);
        let w_base: PointerTile<*mut T, { [] }> = pointer_to_tile(w);
        let w_base: PointerTile<*mut T, { [1] }> = w_base.reshape(const_shape![1]);
        let w_base: PointerTile<*mut T, { [BC] }> = w_base.broadcast(const_shape![BC]);
        let b_base: PointerTile<*mut T, { [] }> = pointer_to_tile(bias);
        let b_base: PointerTile<*mut T, { [1] }> = b_base.reshape(const_shape![1]);
        let b_base: PointerTile<*mut T, { [BC] }> = b_base.broadcast(const_shape![BC]);
        let y_base: PointerTile<*mut T, { [] }> = pointer_to_tile(y);
        let y_base: PointerTile<*mut T, { [1, 1] }> = y_base.reshape(const_shape![1, 1]);
        let y_base: PointerTile<*mut T, { [BC, BP] }> = y_base.broadcast(const_shape![BC, BP]);
        let x_step: Tile<i64, { [BP] }> = broadcast_scalar(x_c, const_shape![BP]);
        let w_step: Tile<i64, { [BC] }> = broadcast_scalar(wide(cout) * taps, const_shape![BC]);

        let mut tile: i64 = wide(program_id(0i32));
        let stride: i64 = wide(num_programs(0i32));
        while tile < limit {
            // Which channels, positions and sample.
            let block: i32 = narrow(tile % blocks);
            let rest: i64 = tile / blocks;
            let first: i64 = (rest % tiles) * many;
            let rest: i64 = rest / tiles;
            let phase: i64 = rest % (wide(g_d) * wide(g_h) * wide(g_w));
            let sample: i64 = rest / (wide(g_d) * wide(g_h) * wide(g_w));
            let f_w: i32 = narrow(phase % wide(g_w));
            let f_h: i32 = narrow((phase / wide(g_w)) % wide(g_h));
            let f_d: i32 = narrow(phase / (wide(g_w) * wide(g_h)));
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

            // The bias.
            let in_group: Tile<i32, { [BC] }> = channel + spread::<BC>(c_first);
            let present: Tile<bool, { [BC] }> = lt_tile(in_group, spread::<BC>(cout));
            let biased: Tile<bool, { [BC] }> = present & ne_tile(spread::<BC>(has_bias), spread::<BC>(0i32));
            let out_channel: Tile<i32, { [BC] }> = in_group + spread::<BC>(group * cout);
            let from: PointerTile<*mut T, { [BC] }> = b_base.offset_tile(out_channel);
            let (b, _t0): (Tile<T, { [BC] }>, Token) = unsafe {
                load_ptr_tko(from, ordering::Weak, None::<scope::TileBlock>, Some(biased), None, None, Latency::<0>)
            };
            let b: Tile<A, { [BC] }> = convert_tile(b);
            let zero: Tile<A, { [BC] }> = constant(A::ZERO, const_shape![BC]);
            let b: Tile<A, { [BC] }> = select(biased, b, zero);
            let mut sum: Tile<A, { [BC, BP] }> = b.reshape(const_shape![BC, 1]).broadcast(const_shape![BC, BP]);

            let x_first: i64 = sample * x_n + wide(group * cin) * x_c;
            let w_first: i64 = wide(group * cin) * wide(cout) * taps;
            let w_lane: Tile<i64, { [BC] }> = exti(in_group);
            let w_lane: Tile<i64, { [BC] }> = w_lane * spread64::<BC>(taps) + spread64::<BC>(w_first);
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
                    let from_d: Tile<i64, { [BP] }> = i_d * spread64::<BP>(x_d) + spread64::<BP>(x_first);
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
                                    let from_w: Tile<i64, { [BP] }> = i_w * spread64::<BP>(x_w) + from_h;
                                    let tap: i32 = (t_d * k_h + t_h) * k_w + t_w;
                                    let mut x_at: PointerTile<*mut T, { [BP] }> = x_base.offset_tile(from_w);
                                    let mut w_at: PointerTile<*mut T, { [BC] }> =
                                        w_base.offset_tile(w_lane + spread64::<BC>(wide(tap)));
                                    let mut part: Tile<A, { [BC, BP] }> = sum;
                                    for _ci in 0i32..cin {
                                        let (xs, _t1): (Tile<T, { [BP] }>, Token) = unsafe {
                                            load_ptr_tko(x_at, ordering::Weak, None::<scope::TileBlock>, Some(on), None, None, Latency::<0>)
                                        };
                                        let (ws, _t2): (Tile<T, { [BC] }>, Token) = unsafe {
                                            load_ptr_tko(w_at, ordering::Weak, None::<scope::TileBlock>, Some(present), None, None, Latency::<0>)
                                        };
                                        let xs: Tile<A, { [BP] }> = convert_tile(xs);
                                        let ws: Tile<A, { [BC] }> = convert_tile(ws);
                                        let xs: Tile<A, { [BC, BP] }> = xs.reshape(const_shape![1, BP]).broadcast(const_shape![BC, BP]);
                                        let ws: Tile<A, { [BC, BP] }> = ws.reshape(const_shape![BC, 1]).broadcast(const_shape![BC, BP]);
                                        part = fma(ws, xs, part, rounding::NearestEven, ftz::Disabled);
                                        x_at = x_at.offset_tile(x_step);
                                        w_at = w_at.offset_tile(w_step);
                                    }
                                    // Where the tap reads outside, what was added is dropped, whatever it is.
                                    let on: Tile<bool, { [BC, BP] }> = on.reshape(const_shape![1, BP]).broadcast(const_shape![BC, BP]);
                                    sum = select(on, part, sum);
                                }
                            }
                        }
                    }
                }
            }

            let out: Tile<A, { [BC, BP] }> = activate(sum, activation, slope);
            let out: Tile<T, { [BC, BP] }> = convert_tile(out);
            let (o_d, o_h, o_w): (Tile<i64, { [BP] }>, Tile<i64, { [BP] }>, Tile<i64, { [BP] }>) = (exti(o_d), exti(o_h), exti(o_w));
            let to: Tile<i64, { [BP] }> = o_d * spread64::<BP>(y_d)
                + o_h * spread64::<BP>(y_h)
                + o_w * spread64::<BP>(y_w)
                + spread64::<BP>(sample * y_n);
            let to_channel: Tile<i64, { [BC] }> = exti(out_channel);
            let to_channel: Tile<i64, { [BC] }> = to_channel * spread64::<BC>(y_c);
            let to: Tile<i64, { [BC, BP] }> = to.reshape(const_shape![1, BP]).broadcast(const_shape![BC, BP])
                + to_channel.reshape(const_shape![BC, 1]).broadcast(const_shape![BC, BP]);
            let to: PointerTile<*mut T, { [BC, BP] }> = y_base.offset_tile(to);
            let written: Tile<bool, { [BC, BP] }> = inside.reshape(const_shape![1, BP]).broadcast(const_shape![BC, BP])
                & present.reshape(const_shape![BC, 1]).broadcast(const_shape![BC, BP]);
            let _t3: Token = unsafe {
                store_ptr_tko(to, out, ordering::Weak, None::<scope::TileBlock>, Some(written), None, Latency::<0>)
            };
            tile = tile + stride;
        }
    }
}

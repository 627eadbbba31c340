//! What follows a sum: the activation, chosen at run time by its code.
//!
//! | code | activation | formula |
//! |---|---|---|
//! | 0 | none | `x` |
//! | 1 | relu | `x <= 0 ? 0 : x` |
//! | 2 | leaky_relu | `x > 0 ? x : slope * x` |
//! | 3 | silu | `x / (1 + exp(-x))` |
//! | 4 | gelu | `0.5 * x * (1 + erf(x / sqrt(2)))` |
//! | 5 | gelu_tanh | `x / (1 + exp(-2 * sqrt(2 / pi) * (x + 0.044715 * x^3)))` |
//! | 6 | hardswish | `x * (clamp(x + 3, 0, 6) / 6)` |
//! | 7 | sigmoid | `1 / (1 + exp(-x))` |
//! | 8 | tanh | `tanh(x)` |
//!
//! Infinities and NaN come out as from these formulas. In the accumulator's unit roundoff `u` each is
//! off by at most a few `u * (|x| + 1)`. `WIDE` is 1 if
//! the accumulator `A` is f64, 0 if it is f32: `activate::<f32, 0, BM, BN>(sum, code, slope)` after
//! `use crate::epilogue::epilogue::activate;`.
//!
//! There is no erf in Tile IR. `gelu` takes `1 + erf(x / sqrt(2))` from `e = erfc(a)` at
//! `a = |x| / sqrt(2)`: `2 - e` for positive `x`, `e` itself for negative, so nothing cancels. `e` is
//! `exp(-a * p(a))`, `p` a polynomial fitted so that the largest error of `e` is least: degree 8 on
//! [0, 4] for f32 (fit 2.2e-9; 1.2 `u * (|x| + 1)` with rounding), degree 22 on [0, 6.2] for f64 (fit
//! 2.9e-17; 1.3 `u * (|x| + 1)`). Beyond, `e` is 0 to the last bit of `1 + erf`.
#[cutile::module]
pub mod epilogue {
    use cutile::core::*;

    /// `p * a + c`.
    fn step32<const M: i32, const N: i32>(
        p: Tile<f32, { [M, N] }>,
        a: Tile<f32, { [M, N] }>,
        c: f32,
    ) -> Tile<f32, { [M, N] }> {
        let c: Tile<f32, { [M, N] }> = broadcast_scalar(c, const_shape![M, N]);
        fma(p, a, c, rounding::NearestEven, ftz::Disabled)
    }

    /// `p * a + c`.
    fn step64<const M: i32, const N: i32>(
        p: Tile<f64, { [M, N] }>,
        a: Tile<f64, { [M, N] }>,
        c: f64,
    ) -> Tile<f64, { [M, N] }> {
        let c: Tile<f64, { [M, N] }> = broadcast_scalar(c, const_shape![M, N]);
        fma(p, a, c, rounding::NearestEven, ftz::Disabled)
    }

    /// `erfc(|x| / sqrt(2))`.
    fn tail32<const M: i32, const N: i32>(x: Tile<f32, { [M, N] }>) -> Tile<f32, { [M, N] }> {
        let root: Tile<f32, { [M, N] }> = constant(0.70710678118654752f32, const_shape![M, N]);
        let a: Tile<f32, { [M, N] }> = absf(x) * root;
        // In powers of two.
        let mut p: Tile<f32, { [M, N] }> = constant(-0.000011578707106884411f32, const_shape![M, N]);
        p = step32(p, a, 0.00015271884331014007f32);
        p = step32(p, a, -0.0008472972549498081f32);
        p = step32(p, a, 0.002272913698107004f32);
        p = step32(p, a, -0.00008268933015642688f32);
        p = step32(p, a, -0.02772585116326809f32);
        p = step32(p, a, 0.1483084112405777f32);
        p = step32(p, a, 0.9184427857398987f32);
        p = step32(p, a, 1.6279072761535645f32);
        let e: Tile<f32, { [M, N] }> = exp2(negf(p * a), ftz::Disabled);
        let zero: Tile<f32, { [M, N] }> = constant(0.0f32, const_shape![M, N]);
        let end: Tile<f32, { [M, N] }> = constant(4.0f32, const_shape![M, N]);
        select(gt_tile(a, end), zero, e)
    }

    /// `erfc(|x| / sqrt(2))`.
    fn tail64<const M: i32, const N: i32>(x: Tile<f64, { [M, N] }>) -> Tile<f64, { [M, N] }> {
        let root: Tile<f64, { [M, N] }> = constant(0.70710678118654752f64, const_shape![M, N]);
        let a: Tile<f64, { [M, N] }> = absf(x) * root;
        let mut p: Tile<f64, { [M, N] }> = constant(0.0000000000000063090520032773154f64, const_shape![M, N]);
        p = step64(p, a, -0.00000000000025181874819754746f64);
        p = step64(p, a, 0.0000000000045056154978392174f64);
        p = step64(p, a, -0.00000000004666238991892396f64);
        p = step64(p, a, 0.000000000291936151209442f64);
        p = step64(p, a, -0.0000000008865849216129497f64);
        p = step64(p, a, -0.000000002210490851226287f64);
        p = step64(p, a, 0.00000004246889986846802f64);
        p = step64(p, a, -0.00000026538741894853007f64);
        p = step64(p, a, 0.0000010470478643485965f64);
        p = step64(p, a, -0.000002754763939488083f64);
        p = step64(p, a, 0.000003998111190694384f64);
        p = step64(p, a, 0.0000023389052331731843f64);
        p = step64(p, a, -0.00002894552792625306f64);
        p = step64(p, a, 0.0000640474362622648f64);
        p = step64(p, a, 0.00002607402359348663f64);
        p = step64(p, a, -0.0005901902564253105f64);
        p = step64(p, a, 0.0016962220295590165f64);
        p = step64(p, a, -0.00020919734158455372f64);
        p = step64(p, a, -0.019128446710441713f64);
        p = step64(p, a, 0.10277260328217411f64);
        p = step64(p, a, 0.6366197723682449f64);
        p = step64(p, a, 1.1283791670955048f64);
        let e: Tile<f64, { [M, N] }> = exp(negf(p * a));
        let zero: Tile<f64, { [M, N] }> = constant(0.0f64, const_shape![M, N]);
        let end: Tile<f64, { [M, N] }> = constant(6.2f64, const_shape![M, N]);
        select(gt_tile(a, end), zero, e)
    }

    /// A number in the accumulator's type everywhere.
    fn fill<A: ElementType, const M: i32, const N: i32>(value: f64) -> Tile<A, { [M, N] }> {
        let tile: Tile<f64, { [] }> = scalar_to_tile(value);
        let tile: Tile<A, { [] }> = convert_tile(tile);
        let tile: Tile<A, { [1, 1] }> = tile.reshape(const_shape![1, 1]);
        tile.broadcast(const_shape![M, N])
    }

    /// `x / (1 + exp(-z))`.
    fn over<A: ElementType, const WIDE: i32, const M: i32, const N: i32>(
        x: Tile<A, { [M, N] }>,
        z: Tile<A, { [M, N] }>,
    ) -> Tile<A, { [M, N] }> {
        let one: Tile<A, { [M, N] }> = fill::<A, M, N>(1.0f64);
        let below: Tile<A, { [M, N] }> = one + exp(negf(z));
        let mut y: Tile<A, { [M, N] }> = x;
        if WIDE == 1i32 {
            y = x / below;
        } else {
            // Off by two ulp at most; 0 where `below` is over 2^126, without the code for what is tiny.
            y = divf(x, below, rounding::Approx, ftz::Disabled);
        }
        y
    }

    /// A tile through the activation of a code. `WIDE` is 1 for f64, else 0.
    pub fn activate<A: ElementType, const WIDE: i32, const M: i32, const N: i32>(
        x: Tile<A, { [M, N] }>,
        code: i32,
        slope: f64,
    ) -> Tile<A, { [M, N] }> {
        let zero: Tile<A, { [M, N] }> = constant(A::ZERO, const_shape![M, N]);
        let mut y: Tile<A, { [M, N] }> = x;
        if code == 1i32 {
            y = select(le_tile(x, zero), zero, x);
        } else if code == 2i32 {
            let slope: Tile<A, { [M, N] }> = fill::<A, M, N>(slope);
            y = select(gt_tile(x, zero), x, slope * x);
        } else if code == 3i32 {
            y = over::<A, WIDE, M, N>(x, x);
        } else if code == 4i32 {
            let mut e: Tile<A, { [M, N] }> = zero;
            if WIDE == 1i32 {
                let x64: Tile<f64, { [M, N] }> = convert_tile(x);
                let e64: Tile<f64, { [M, N] }> = tail64(x64);
                e = convert_tile(e64);
            } else {
                let x32: Tile<f32, { [M, N] }> = convert_tile(x);
                let e32: Tile<f32, { [M, N] }> = tail32(x32);
                e = convert_tile(e32);
            }
            let two: Tile<A, { [M, N] }> = fill::<A, M, N>(2.0f64);
            let half: Tile<A, { [M, N] }> = fill::<A, M, N>(0.5f64);
            y = half * x * select(gt_tile(x, zero), two - e, e);
        } else if code == 5i32 {
            let scale: Tile<A, { [M, N] }> = fill::<A, M, N>(1.5957691216057308f64);
            let cubic: Tile<A, { [M, N] }> = fill::<A, M, N>(0.07135481627260025f64);
            let z: Tile<A, { [M, N] }> = x * (scale + cubic * x * x);
            y = over::<A, WIDE, M, N>(x, z);
        } else if code == 6i32 {
            let three: Tile<A, { [M, N] }> = fill::<A, M, N>(3.0f64);
            let six: Tile<A, { [M, N] }> = fill::<A, M, N>(6.0f64);
            let sixth: Tile<A, { [M, N] }> = fill::<A, M, N>(0.16666666666666666f64);
            let gate: Tile<A, { [M, N] }> = x + three;
            let gate: Tile<A, { [M, N] }> = select(lt_tile(gate, zero), zero, gate);
            let gate: Tile<A, { [M, N] }> = select(gt_tile(gate, six), six, gate);
            y = x * (gate * sixth);
        } else if code == 7i32 {
            let one: Tile<A, { [M, N] }> = fill::<A, M, N>(1.0f64);
            y = over::<A, WIDE, M, N>(one, x);
        } else if code == 8i32 {
            y = tanh(x);
        }
        y
    }

    /// [`activate`] for a tile of one dimension.
    pub fn activate_row<A: ElementType, const WIDE: i32, const N: i32>(
        x: Tile<A, { [N] }>,
        code: i32,
        slope: f64,
    ) -> Tile<A, { [N] }> {
        let x: Tile<A, { [1, N] }> = x.reshape(const_shape![1, N]);
        let y: Tile<A, { [1, N] }> = activate::<A, WIDE, 1, N>(x, code, slope);
        y.reshape(const_shape![N])
    }
}

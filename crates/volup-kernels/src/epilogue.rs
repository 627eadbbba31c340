//! (in the making)
#[cutile::module]
pub mod epilogue {
    use cutile::core::*;

    /// Whether a type of accumulator is f64.
    pub trait Wide {
        const WIDE: i32;
    }
    impl Wide for f32 {
        const WIDE: i32 = 0;
    }
    impl Wide for f64 {
        const WIDE: i32 = 1;
    }

    /// `x` through the activation of a code.
    pub fn activate<A: ElementType, const M: i32, const N: i32>(
        x: Tile<A, { [M, N] }>,
        code: i32,
        slope: f64,
    ) -> Tile<A, { [M, N] }> {
        let zero: Tile<A, { [M, N] }> = constant(A::ZERO, const_shape![M, N]);
        let mut y: Tile<A, { [M, N] }> = x;
        if code == 1i32 {
            y = select(le_tile(x, zero), zero, x);
        }
        y
    }
}

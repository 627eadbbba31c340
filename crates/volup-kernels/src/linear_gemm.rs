//! (in the making)
#[cutile::module]
pub mod linear_gemm {
    use cutile::core::*;
}

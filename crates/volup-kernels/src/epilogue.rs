//! (in the making)
#[cutile::module]
pub mod epilogue {
    use cutile::core::*;
}

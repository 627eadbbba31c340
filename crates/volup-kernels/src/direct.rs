//! (in the making)
#[cutile::module]
pub mod direct {
    use cutile::core::*;
}

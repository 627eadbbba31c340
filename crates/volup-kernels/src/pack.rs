//! (in the making)
#[cutile::module]
pub mod pack {
    use cutile::core::*;
}

//! (in the making)
#[cutile::module]
pub mod norm {
    use cutile::core::*;
}

//! Kernels of few input channels, from their PTX.

use super::*;

#[test]
fn box_gemm() {
    random(Some(Algorithm::BoxGemm), SEEDS);
}

#[test]
fn implicit_gemm() {
    random(Some(Algorithm::ImplicitGemm), SEEDS);
}

/// Few channels of NDHWC: more than a sector of a voxel, one, and such of 16 bits alone; groups, several boxes along width, residues
/// without taps, what comes before and behind a norm.
const VOXELS_OF_FEW: [&str; 5] = [
    "n 2, 3x4x9, 3>16, k 3, s 2, p 1, bias, silu, gn 4, hardswish",
    "n 1, 2x3x70, 5>32, k 3x1x4, s 2, p 1x0x2, bias, relu, gn 2",
    "n 2, 2x5x33, 8>16, k 2x3x3, s 1x2x2, p 0x1x0, op 0x1x1, g 2, bias, leaky_relu(0.2)",
    "n 3, 1x2x8, 4>48, k 1x2x5, s 1x3x2, d 1x2x1, p 0x0x1, g 1, silu, gn 3",
    "n 1, 4x4x40, 2>32, k 3, s 2, p 1, g 2, bias, gn 4 plain, silu",
];

#[test]
fn implicit_gemm_of_voxels() {
    engines(Some(Algorithm::ImplicitGemm), |engine| {
        let engine = saying(engine, "bytes of a voxel");
        right_of_last(&engine, &VOXELS_OF_FEW);
        let most = VOXELS_OF_FEW.len() * engine.types().len();
        assert!(engine.said.get() + 2 >= most, "{} plans", engine.said.get());
        let engine = to_first(&engine);
        right_of_last(&engine, &VOXELS_OF_FEW);
        assert!(engine.said.get() + 2 >= most, "{} plans", engine.said.get());
    });
}

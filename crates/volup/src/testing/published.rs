//! The shapes that the published measurements are of, at full size.

use super::Case;
use super::notation::case;

/// The shapes of KernelBench (kb1, kb2: level 1 and 2), nnU-Net and MONAI: the bare convolution under
/// the shape's name and, where the model has one, its block under `<name>-block`.
pub fn published() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, conv, block, why) in SHAPES {
        cases.push(case(name, conv, why));
        if let Some((name, block)) = block {
            cases.push(case(name, &format!("{conv}, {block}"), why));
        }
    }
    cases
}

/// Name, convolution, the block's name and what it adds, why.
type Shape = (&'static str, &'static str, Option<(&'static str, &'static str)>, &'static str);

#[rustfmt::skip]
const SHAPES: &[Shape] = &[
    ("kb1-58", "n 16, 16x32x64, 32>16, k 3x5x7", None, "asymmetric kernel and input, dense"),
    ("kb1-61", "n 8, 64x64x64, 48>48, k 3", None, "a dense cube whose channels are no power of two"),
    ("kb1-68", "n 16, 64x64x64, 32>64, k 3x5x5", None, "75 taps: the most arithmetic of all"),
    ("kb1-70", "n 8, 96x96x96, 48>24, k 3", None, "the largest input"),
    ("kb1-72", "n 8, 12x24x48, 32>32, k 3x5x7, s 2, p 1x2x3, op 1, g 4", None, "groups, stride and output padding"),
    ("kb1-73", "n 4, 32x64x128, 32>32, k 3, s 2, p 1, g 4", None, "groups of 8 channels, strided"),
    ("kb1-77", "n 16, 16x32x32, 32>64, k 3, s 2, p 1, d 2", None, "7 of 8 phases have no tap"),
    ("kb2-61", "n 16, 32x32x32, 64>128, k 3", Some(("kb2-61-block", "relu, gn 8")), "the dense block"),
    ("kb2-60", "n 128, 16x32x32, 3>16, k 3, s 2, p 1, bias", Some(("kb2-60-block", "silu, gn 4, hardswish")), "three input channels, a large output"),
    ("nnunet-320-256-8", "n 2, 8x8x8, 320>256, k 2, s 2, bias", None, "the deepest decoder step: many channels, few voxels"),
    ("nnunet-64-32-64", "n 2, 64x64x64, 64>32, k 2, s 2, bias", Some(("nnunet-64-32-64-block", "relu, gn 32")), "the last decoder step: memory bound"),
    ("monai-128-32-48", "n 4, 48x48x48, 128>32, k 3, s 2, p 1, op 1, bias", Some(("monai-128-32-48-block", "relu, gn 32")), "exactly twice the size with overlapping taps"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_has_its_name() {
        let names: Vec<_> = published().iter().map(|case| case.name).collect();
        assert_eq!(names.len(), 12 + 4);
        for case in published() {
            assert_eq!(case.name.ends_with("-block"), case.block.norm().is_some(), "{case}");
        }
        // Known sizes: the geometry of the largest and of the most intricate shape.
        let of = |name| published().into_iter().find(|case| case.name == name).unwrap().geometry();
        assert_eq!(of("kb1-70").output_shape(), [8, 24, 98, 98, 98]);
        assert_eq!(of("kb1-72").output_shape(), [8, 32, 24, 48, 96]);
        assert_eq!(of("kb1-77").output_shape(), [16, 64, 33, 65, 65]);
    }
}

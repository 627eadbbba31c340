//! Shapes that few random ones are, for the families of dense layers.

use super::super::halo_between_plans;
use super::*;

/// Cases of strides and dilations with a common divisor: outputs between those that have taps.
const LATTICES: [&str; 8] = [
    "n 2, 3x5x7, 8>20, k 3, s 2, p 1, d 2, bias, silu",
    "n 3, 3x4x19, 5>7, k 1x3x2, s 3x2x2, p 0x1x1, d 1x2x2, op 2x1x0",
    "n 1, 4x4x6, 5>9, k 1, s 2, bias",
    "n 2, 3x4x5, 16>8, k 1x2x1, s 3x2x3, p 0x1x0, op 1x0x2, bias, gelu",
    "n 1, 2x3x9, 4>70, k 3x1x3, s 2x2x4, d 2x1x4, p 1x0x0, relu",
    "n 3, 5x2x33, 6>34, k 1x3x1, s 2x4x5, d 1x2x1, g 2, bias, tanh",
    "n 1, 2x1x6, 3>2, k 1x1x3, s 1x1x2, d 1x1x2, p 0x0x1, op 0x0x1",
    "n 2, 4x3x2, 8>16, k 3x2x1, s 2x1x1, d 2x1x1, op 1x0x0, sigmoid",
];

#[test]
fn halo_gemm_of_lattices() {
    engines(Some(Algorithm::HaloGemm), |engine| {
        for (seed, line) in LATTICES.into_iter().enumerate() {
            let case = Case::parse("lattice", line, "few outputs with taps").expect("a valid case");
            for (turn, &dtype) in (seed..).zip(engine.types()) {
                let case = Case { format: FORMATS[turn / 2 % 2], ..case.clone() };
                right(engine, &case, dtype, Fill::ALL[turn % 2], seed as u64);
            }
        }
    });
}

/// What lies between outputs, in runs that end anywhere.
#[test]
fn what_is_between_outputs() {
    engines(Some(Algorithm::HaloGemm), |engine| {
        let engine = saying(engine, "with what is between");
        for (seed, (line, why)) in halo_between_plans::ROWS.into_iter().enumerate() {
            let case = Case::parse("between", line, why).expect("a valid case");
            right_in_all(&engine, &case, seed as u64);
        }
        assert!(engine.said.get() >= halo_between_plans::ROWS.len(), "{} plans", engine.said.get());
    });
}

/// Outputs that lie as rows do, in whole vectors or not quite: samples that meet in a tile, both residues along width and
/// height, two positions a row, planes that few taps reach.
const LINES: [&str; 7] = [
    "n 3, 4x4x4, 24>40, k 3, p 1, bias, relu",
    "n 2, 6x6x6, 64>72, k 3",
    "n 2, 4x6x8, 32>20, k 3, s 2, p 1, op 1, bias",
    "n 2, 3x5x6, 24>70, k 4, s 2, p 1, leaky_relu(-0.5)",
    "n 1, 2x3x16, 16>33, k 2x3x4, s 1x2x2, p 0x1x1, op 0x1x0, bias",
    "n 2, 6x6x6, 24>12, k 3, bias",
    "n 3, 1x2x6, 40>9, k 3x1x3, silu",
];

#[test]
fn lines_of_whole_vectors() {
    for family in [Algorithm::HaloGemm, Algorithm::GatherGemm] {
        engines(Some(family), |engine| {
            for (seed, line) in LINES.into_iter().enumerate() {
                let case = Case::parse("lines", line, "whole vectors").expect("a valid case");
                for (turn, &dtype) in (seed..).zip(engine.types()) {
                    let format = FORMATS[turn % 2];
                    right(engine, &Case { format, ..case.clone() }, dtype, Fill::Normal, seed as u64);
                }
            }
        });
    }
}

/// Lines that no pair of positions fits in, rows before the first and gaps between them, one and several positions a row, more
/// pieces than blocks take at once, panels that lanes share.
const ALONG: [&str; 7] = [
    "n 2, 6x6x6, 64>72, k 3",
    "n 3, 5x3x7, 32>24, k 3x1x3, p 1x0x1, bias, relu",
    "n 2, 4x6x8, 64>20, k 3, s 2, p 1, op 1, bias",
    "n 2, 3x5x12, 16>16, k 3x3x5, bias",
    "n 1, 9x10x11, 32>8, k 2x3x3, s 1x2x1",
    "n 3, 4x8x16, 64>40, k 3, p 1, silu",
    "n 2, 2x5x8, 256>8, k 1x3x2, p 0x1x0, bias",
];

/// Inputs that are packed beside the products, wherever there is such a plan: each in another format of each family.
#[test]
fn inputs_packed_along() {
    for (turn, family) in [Algorithm::HaloGemm, Algorithm::GatherGemm].into_iter().enumerate() {
        engines(Some(family), |engine| {
            let engine = saying(engine, "packs along");
            for (seed, line) in ALONG.into_iter().enumerate() {
                let case = Case::parse("along", line, "packed beside products").expect("a valid case");
                let format = FORMATS[(seed + turn) % 2];
                let case = Case { format, ..case };
                for &dtype in engine.types() {
                    let fill = Fill::ALL[seed % 2];
                    right(&engine, &case, dtype, fill, seed as u64);
                }
            }
            assert!(engine.said.get() > 3, "{family:?}: {} plans", engine.said.get());
        });
    }
}

/// Planes of the output that are a multiple of 16 bytes in all types, of 8 in some, and of less; whose rows are not all voxels;
/// samples that meet among a warpgroup's rows, and more channels than a column block.
const PLANES: [&str; 5] = [
    "n 2, 5x6x6, 32>40, k 3",
    "n 3, 4x4x4, 16>24, k 3, bias, relu",
    "n 5, 3x3x5, 24>9, k 3, p 1x0x0, leaky_relu(0.2)",
    "n 2, 3x8x9, 16>72, k 3, p 1, bias",
    "n 3, 2x4x8, 16>33, k 3x3x5, bias, silu",
];

#[test]
fn planes_of_sweeps() {
    engines(Some(Algorithm::HaloGemm), |engine| {
        let engine = saying(engine, "halo_gemm sweep");
        right_of(&engine, MemoryFormat::Contiguous, &PLANES);
        assert!(engine.said.get() >= PLANES.len(), "{} plans", engine.said.get());
    });
}

/// Few tiles, in parts: of phases, of taps along depth and of chunks.
const PARTS: [&str; 4] = [
    "n 1, 3x4x5, 140>40, k 3, s 2, p 1, op 1, bias, relu",
    "n 2, 4x4x4, 70>20, k 3, p 1, bias, gn 4",
    "n 1, 3x6x7, 66>34, k 5x3x2, p 2x1x0, g 2, leaky_relu(0.1)",
    "n 3, 2x8x9, 16>9, k 7x2x3, p 3x0x1",
];

#[test]
fn tiles_in_parts() {
    for (multiprocessors, precision) in [(7, Precision::Tf32), (132, Precision::Ieee)] {
        engine(multiprocessors, precision, Some(Algorithm::GatherGemm), |engine| {
            let engine = saying(engine, ", in ");
            for (seed, line) in PARTS.into_iter().enumerate() {
                let case = Case::parse("parts", line, "few tiles").expect("a valid case");
                let format = FORMATS[seed % 2];
                let case = Case { format, ..case };
                for &dtype in engine.types() {
                    right(&engine, &case, dtype, Fill::ALL[seed % 2], seed as u64);
                }
            }
            assert!(engine.said.get() >= PARTS.len(), "{} plans", engine.said.get());
        });
    }
    engine(132, Precision::Ieee, Some(Algorithm::HaloGemm), |engine| {
        let engine = saying(engine, "tiles in ");
        for (seed, line) in PARTS.into_iter().enumerate() {
            let case = Case::parse("parts", line, "few tiles").expect("a valid case");
            right(&engine, &case, DType::F32, Fill::ALL[seed % 2], seed as u64);
        }
        assert!(engine.said.get() >= 3, "{} plans", engine.said.get());
    });
}

/// Rows that come from the input itself, of sweeps and gathers: channels that are no whole chunk, samples within a tile, gaps, groups, a norm.
const FROM_X: [&str; 8] = [
    "n 2, 3x5x7, 16>8, k 3, bias, relu",
    "n 3, 2x3x4, 64>24, k 3, p 1",
    "n 1, 4x6x9, 40>20, k 3x3x4, p 1, d 1x2x1, bias",
    "n 1, 3x4x5, 24>16, k 3x1x2, p 1x0x1, bias, gn 4, silu",
    "n 1, 3x4x5, 80>36, k 3, s 2, p 1, op 1, g 2, bias",
    "n 2, 4x4x4, 64>32, k 4, s 2, p 1, bias, gn 8, silu",
    "n 1, 3x6x7, 72>34, k 5x3x2, p 2x1x0, leaky_relu(0.1)",
    "n 1, 4x4x4, 136>64, k 3, s 2, p 1, op 1, bias",
];

#[test]
fn rows_from_x() {
    for (multiprocessors, algorithm) in [(2, Algorithm::HaloGemm), (3, Algorithm::GatherGemm)] {
        // Of 16 bits alone, whatever the precision.
        engine(multiprocessors, Precision::Ieee, Some(algorithm), |engine| {
            let engine = saying(engine, "rows from x");
            right_of_last(&engine, &FROM_X);
            assert!(engine.said.get() > 3, "{} plans", engine.said.get());
        });
    }
}

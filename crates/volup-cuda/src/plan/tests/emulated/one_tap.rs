//! Kernels of layers whose outputs have one tap, from their PTX.

use super::*;

#[test]
fn shuffle_gemm() {
    for family in [Algorithm::ShuffleGemm, Algorithm::ShuffleRing, Algorithm::ShuffleWgmma] {
        random(Some(family), SEEDS);
    }
}

#[test]
fn pointwise() {
    engines(Some(Algorithm::Pointwise), |engine| {
        let engine = saying(engine, "pointwise");
        for (seed, case) in pointwise_plans::own().into_iter().enumerate() {
            right_in_all(&engine, &case, seed as u64);
        }
        assert!(engine.said.get() > 12, "{} plans", engine.said.get());
    });
}

/// Whole stages and copies, few positions and many, tiny values, and those of which some are.
const RINGS: [&str; 9] = [
    "n 2, 3x4x5, 32>9, k 2, s 2, bias, relu",
    "n 1, 2x3x6, 96>5, k 1x2x2, s 1x2x2",
    "n 3, 4x5x8, 64>20, k 2, s 2, leaky_relu(-0.75)",
    "n 2, 9x8x8, 64>8, k 3x1x2, s 3x1x2, bias",
    "n 2, 2x2x7, 160>3, k 2, s 2, bias",
    "n 3, 3x5x7, 64>24, k 2, s 2, bias, relu",
    "n 1, 3x3x5, 32>12, k 4x1x2, s 4x1x2, bias",
    "n 3, 3x8x3, 96>32, k 2, s 2, bias, leaky_relu(0.1)",
    "n 2, 1x4x6, 72>16, k 1x2x4, s 1x2x4, relu",
];

#[test]
fn shuffle_ring() {
    engines(Some(Algorithm::ShuffleRing), |engine| {
        for (seed, line) in RINGS.into_iter().enumerate() {
            let case = Case::parse("ring", line, "many channels").expect("a valid case");
            for (turn, format) in (seed..).zip(FORMATS) {
                let fill = Fill::ALL[turn % 2];
                let case = Case { format, ..case.clone() };
                right(engine, &case, DType::F32, fill, seed as u64);
                right(engine, &case, [DType::F16, DType::Bf16][seed % 2], fill, seed as u64);
                let (input, parameters) = case.inputs(DType::F32, fill, seed as u64);
                let layer = engine.layer(&case.block, &parameters).expect("a layer");
                // Whatever shared memory holds before.
                let [first, second] = [0, 1].map(|_| engine.forward(&layer, &input).expect("an output"));
                assert_eq!(first.data().as_bytes(), second.data().as_bytes(), "{case}");
            }
        }
    });
}

/// Lines that the copy engine stores, together, alone and in parts, others, and what comes before and behind a norm.
const LINES: [&str; 6] = [
    "n 2, 1x3x32, 20>6, k 2, s 2, bias, relu, gn 3, leaky_relu(0.1)",
    "n 2, 2x2x64, 9>5, k 1x2x2, s 1x2x2, bias, gn 5, relu",
    "n 1, 1x2x128, 17>3, k 2x1x2, s 2x1x2, bias, leaky_relu(0.2)",
    "n 1, 1x2x32, 5>3, k 1x3x2, s 1x3x2, relu, gn 3",
    "n 2, 2x3x48, 33>4, k 2, s 2, bias, relu, gn 2",
    "n 1, 1x5x64, 40>34, k 2, s 2, bias, relu, gn 17",
];

/// Voxels of NDHWC whose channels are whole vectors and not, of many row blocks and few, three residues along width.
const VOXELS: [&str; 5] = [
    "n 2, 3x5x7, 64>20, k 2, s 2, bias, relu, gn 5, leaky_relu(0.1)",
    "n 3, 2x3x4, 40>6, k 1x2x3, s 1x2x3, bias, gn 3, relu",
    "n 1, 5x6x9, 8>34, k 2, s 2, bias, leaky_relu(0.2)",
    "n 2, 7x5x4, 48>4, k 3x1x2, s 3x1x2, bias, gn 2",
    "n 1, 3x3x16, 72>40, k 2, s 2, relu, gn 20, relu",
];

#[test]
fn shuffle_wgmma() {
    let [first, last] = FORMATS;
    let lines = LINES.map(|line| (line, first));
    let voxels = LINES[4..].iter().chain(&VOXELS).map(|&line| (line, last));
    let all: Vec<_> = lines.into_iter().chain(voxels).collect();
    engines(Some(Algorithm::ShuffleWgmma), |engine| {
        let engine = saying(engine, "shuffle_wgmma");
        for (seed, &(line, format)) in all.iter().enumerate() {
            let case = Case::parse("shuffle", line, "outputs that are stored at once").expect("a valid case");
            let case = Case { format, ..case };
            right_in_all(&engine, &case, seed as u64);
            // What training keeps, too.
            let types = engine.types();
            check_gradients(&engine, &case, types[seed % types.len()], Fill::Normal, seed as u64)
                .unwrap_or_else(|what| panic!("{what}"));
        }
        assert!(engine.said.get() > 30, "{} plans", engine.said.get());
        let engine = to_first(&engine);
        right_of_last(&engine, LINES.iter().chain(&VOXELS));
        assert!(engine.said.get() > 5, "{} plans", engine.said.get());
    });
}

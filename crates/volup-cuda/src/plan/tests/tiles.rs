//! Which tiles plans of `interleave` take, and where the family applies.

use super::{fits, launches};
use crate::Algorithm;
use crate::device::made_up;
use crate::plan::{Argument, Plan, Request, Step, Task};
use volup::{ConvSpec, DType, MemoryFormat, Precision};

const FIRST: MemoryFormat = MemoryFormat::Contiguous;
const LAST: MemoryFormat = MemoryFormat::ChannelsLast3d;

/// Plans a kernel that is its stride, and says which tiles it takes.
fn plan(
    channels: [usize; 2],
    kernel: [i64; 3],
    input: [usize; 3],
    format: MemoryFormat,
    dtype: DType,
    precision: Precision,
) -> (Plan, String) {
    let conv = ConvSpec::builder(channels[0], channels[1], kernel).stride(kernel).bias(true);
    let conv = conv.build().unwrap();
    let request = request(conv, input, format, dtype, precision);
    let plan = super::plan(&request, &made_up(9, 0), &[]).unwrap();
    launches(&plan).iter().for_each(|call| fits(call, &plan, &format!("{request:?}")));
    assert_eq!(plan.algorithm, Algorithm::Interleave);
    let text = plan.to_string().split(';').next().unwrap().to_string();
    (plan, text)
}

fn request(
    conv: ConvSpec,
    input: [usize; 3],
    format: MemoryFormat,
    dtype: DType,
    precision: Precision,
) -> Request {
    Request {
        task: Task::Forward,
        block: conv.into(),
        geometry: conv.geometry(2, input).unwrap(),
        dtype,
        precision,
        input_format: format,
        output_format: format,
        algorithm: Some(Algorithm::Interleave),
    }
}

#[test]
fn kernels_get_what_they_ask_for_in_every_way_they_are_planned() {
    let kernels = [[2, 2, 2], [1, 2, 2], [2, 2, 1], [3, 1, 4], [1, 1, 1]];
    let inputs = [[4, 8, 64], [3, 5, 7], [8, 8, 8]];
    let channels = [[64, 32], [320, 256], [3, 5], [100, 12]];
    for (dtype, precision) in [
        (DType::F16, Precision::Ieee),
        (DType::Bf16, Precision::Ieee),
        (DType::F32, Precision::Tf32),
        (DType::F32, Precision::Ieee),
    ] {
        for format in [FIRST, LAST] {
            for (kernel, input) in kernels.iter().flat_map(|k| inputs.map(|input| (*k, input))) {
                for channels in channels {
                    plan(channels, kernel, input, format, dtype, precision);
                }
            }
        }
    }
}

#[test]
fn tiles_follow_the_sizes() {
    let half = |channels, kernel, input, format| {
        plan(channels, kernel, input, format, DType::Bf16, Precision::Ieee).1
    };
    let tf32 = |channels, kernel, input, format| {
        plan(channels, kernel, input, format, DType::F32, Precision::Tf32).1
    };
    let (two, cube) = ([2, 2, 2], [64, 64, 64]);
    assert_eq!(half([64, 32], two, cube, FIRST), "interleave half 128x64x64 by views, 1 parts");
    assert_eq!(tf32([64, 32], two, cube, FIRST), "interleave tf32 64x64x64 by views, 1 parts");
    assert_eq!(tf32([128, 64], two, [32; 3], LAST), "interleave tf32 64x64x128 by views, 1 parts");
    assert_eq!(tf32([320, 256], two, [8; 3], FIRST), "interleave tf32 64x64x64 by views, 32 parts");
    // Rows or channels that are no multiple of 16 bytes, other strides along width, odd heights.
    assert_eq!(half([64, 32], two, [64, 64, 60], FIRST), "interleave half 64x64x64 by addresses, 1 parts");
    assert_eq!(tf32([62, 32], two, cube, LAST), "interleave tf32 64x64x64 by addresses, 1 parts");
    assert_eq!(tf32([64, 32], [2, 2, 3], cube, FIRST), "interleave tf32 64x64x64 by addresses, 1 parts");
    assert_eq!(tf32([64, 32], [2, 2, 3], cube, LAST), "interleave tf32 64x64x64 by views, 1 parts");
    assert_eq!(half([64, 32], two, [64, 63, 64], FIRST), "interleave half 64x64x64 by addresses, 1 parts");
}

#[test]
fn the_weight_is_packed_for_the_tiles_that_read_it() {
    let (plan, _) = plan([100, 32], [2, 2, 2], [16; 3], FIRST, DType::F32, Precision::Tf32);
    let [
        Step::Clear { .. },
        Step::Launch { arguments: pack, .. },
        Step::Launch { variant, grid, arguments, .. },
    ] = plan.steps.as_slice()
    else {
        panic!("{plan:?}")
    };
    // Four pairs of residues along depth and height, 64 columns, 128 channels.
    assert_eq!(pack[3..5], [Argument::I32(4 * 64 * 128), Argument::I32(128)]);
    assert!(plan.workspace_bytes >= 4 * 64 * 128 * 4);
    assert_eq!(variant.param("BK"), Some(128));
    assert_eq!(arguments[13..15], [Argument::I32(1), Argument::I32(1)]);
    // One tile of 4x16 positions, shared by all of a sample's parts.
    assert_eq!(grid[0], 2 * 16 * 4 * 4);
}

#[test]
fn only_one_tap_an_output_applies() {
    let builder = || ConvSpec::builder(8, 8, 2).stride(2);
    let applies = |request: &Request| {
        let plan = super::plan(request, &made_up(9, 0), &[]).unwrap();
        plan.algorithm == Algorithm::Interleave
    };
    let of = |conv: ConvSpec| request(conv, [4; 3], FIRST, DType::F32, Precision::Ieee);
    let base = of(builder().build().unwrap());
    assert!(applies(&base));
    assert!(applies(&of(ConvSpec::builder(8, 8, 1).dilation(3).build().unwrap())));
    for other in [
        builder().padding(1),
        builder().output_padding(1),
        builder().groups(2),
        builder().dilation(2),
        ConvSpec::builder(8, 8, 3).stride(2),
        ConvSpec::builder(8, 8, 1).stride(2),
    ] {
        assert!(!applies(&of(other.build().unwrap())), "{other:?}");
    }
    assert!(!applies(&Request { dtype: DType::F64, ..base }));
    assert!(!applies(&Request { output_format: LAST, ..base }));
    assert!(!applies(&Request { algorithm: Some(Algorithm::LinearGemm), ..base }));
    assert!(!applies(&Request { algorithm: Some(Algorithm::Direct), ..base }));
    // More elements than 32 bits count.
    let large = ConvSpec::builder(64, 64, 2).stride(2).build().unwrap();
    assert!(!applies(&request(large, [256; 3], FIRST, DType::Bf16, Precision::Ieee)));
    // Left to itself a plan takes what is fastest: this, where there is no kernel for kernels that are their stride.
    let large = ConvSpec::builder(64, 32, 2).stride(2).build().unwrap();
    for precision in Precision::ALL {
        let request = request(large, [64; 3], FIRST, DType::F32, precision);
        let request = Request { algorithm: None, ..request };
        let others = [&["gather_gemm", "halo_gemm", "implicit_gemm"], &super::shuffle::KERNELS[..]].concat();
        let plan = super::plan(&request, &made_up(9, 0), &others).unwrap();
        assert_eq!(plan.algorithm, Algorithm::Interleave);
    }
}

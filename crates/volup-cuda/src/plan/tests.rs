//! Plans without a GPU: they exist, their sizes fit, and what they ask the kernels to do computes what
//! the definition says.

mod box_layout;
mod boxes;
mod contracts;
mod emulated;
mod epilogue;
mod epilogue_statistics;
mod gather;
mod gather_plans;
mod gradient;
mod group_norm;
mod group_norm_plans;
mod half_gradient_plans;
mod halo;
mod halo_between;
mod halo_between_plans;
mod halo_fold_plans;
mod halo_statistics_plans;
mod halo_sweep;
mod halo_sweep_plans;
mod implicit;
mod implicit_plans;
mod interleave;
mod machine;
mod manifest;
mod norm;
mod norm_behind;
mod operand;
mod plane_gradient;
mod plane_gradient_plans;
mod pointwise;
mod pointwise_plans;
mod results;
mod rows;
mod scaled_gradient_plans;
mod shuffle;
mod shuffle_gradient;
mod shuffle_gradient_plans;
mod shuffle_plans;
mod tiles;
mod training;
mod training_plans;
#[allow(dead_code, reason = "the kernels' build uses all of it")]
#[path = "../../../volup-kernels/src/variants.rs"]
mod variants;
mod weight_gradient;
mod weight_gradient_lines;
mod weight_gradient_lines_plans;
mod weight_gradient_narrow;
mod weight_gradient_narrow_plans;

use crate::plan::{Argument, Buffer, Plan, Prepacked, Request, Step, Task};
use crate::{Algorithm, Arguments, DeviceInfo, Variant};
use machine::Call;
use manifest::{devices, signature, source, variants_for};
use std::cell::Cell;
use volup::testing::{Case, cases, published};
use volup::{DType, Error, MemoryFormat, Precision};

/// The types that tensor cores multiply gradients of, and how float32 is multiplied.
const MULTIPLIED: [(DType, Precision); 4] = [
    (DType::F32, Precision::Ieee),
    (DType::F32, Precision::Tf32),
    (DType::F16, Precision::Ieee),
    (DType::Bf16, Precision::Ieee),
];
const FORMATS: [MemoryFormat; 2] = [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast3d];

/// The types that are asked for, float32 in all precisions, which are one for the others.
const NUMBERS: [(DType, Precision); 5] = [
    (DType::F32, Precision::Ieee),
    (DType::F32, Precision::Tf32),
    (DType::F64, Precision::Tf32),
    (DType::F16, Precision::Ieee),
    (DType::Bf16, Precision::Tf32),
];

thread_local! {
    /// Bytes of an output that the backward pass takes in parts: few, so that tests see parts, which few of the table's
    /// outputs would be large enough for.
    static LARGE: Cell<usize> = const { Cell::new(1 << 12) };
}

/// The same.
pub(super) fn large() -> usize {
    LARGE.get()
}

/// Each `step`th of many that are much the same, from another one on in each turn; one at least.
pub(super) fn some_of<T>(all: &[T], step: usize, turn: usize) -> impl Iterator<Item = &T> {
    all.iter().skip(turn % step.min(all.len()).max(1)).step_by(step)
}

/// Everything that can be asked of a case.
fn requests(case: &Case) -> Vec<Request> {
    let (block, geometry) = (case.block, case.geometry());
    let mut requests = Vec::new();
    for algorithm in [None].into_iter().chain(Algorithm::ALL.map(Some)) {
        for (dtype, precision) in NUMBERS {
            for (input_format, output_format) in
                FORMATS.iter().flat_map(|input| FORMATS.map(|output| (*input, output)))
            {
                requests.push(Request {
                    task: Task::Forward,
                    block,
                    geometry,
                    dtype,
                    precision,
                    input_format,
                    output_format,
                    algorithm,
                });
            }
        }
    }
    requests
}

/// A Hopper and its kernels.
pub(crate) fn hopper_kernels() -> (DeviceInfo, Vec<Variant>) {
    let [_, hopper, _] = devices();
    let variants = variants_for(hopper.arch);
    (hopper, variants)
}

/// A request for the output of one case, in float32 by tf32.
pub(crate) fn request_of(line: &str) -> Request {
    let case = Case::parse("given", line, "given").expect("a valid case");
    Request {
        task: Task::Forward,
        block: case.block,
        geometry: case.geometry(),
        dtype: DType::F32,
        precision: Precision::Tf32,
        input_format: case.format,
        output_format: case.format,
        algorithm: None,
    }
}

/// All cases that plans are made for: an engine answers for an empty batch without one.
fn planned() -> Vec<Case> {
    cases().into_iter().chain(published()).filter(|case| case.batch != Some(0)).collect()
}

/// Plans a request with all of a device's kernels but those that `without` names.
fn plan(request: &Request, device: &DeviceInfo, without: &[&str]) -> volup::Result<Plan> {
    let variants = variants_for(device.arch);
    let kept: Vec<&Variant> = variants.iter().filter(|variant| !without.contains(&variant.entry)).collect();
    Plan::new(request, device, &kept)
}

/// The launches of a plan.
fn launches(plan: &Plan) -> Vec<Call<'_>> {
    plan.steps.iter().filter_map(Call::new).collect()
}

#[test]
fn every_request_has_a_plan_whose_sizes_fit() {
    let mut overlapping = 0;
    for device in devices() {
        let variants = variants_for(device.arch);
        let variants: Vec<&Variant> = variants.iter().collect();
        for (first, case) in planned().iter().enumerate() {
            for (turn, &request) in some_of(&requests(case), 6, first).enumerate() {
                let what = format!("{case}, {request:?} on {device}");
                let plan = Plan::new(&request, &device, &variants).unwrap_or_else(|e| panic!("{e}: {what}"));
                assert!(plan.to_string().contains(&plan.algorithm.to_string()), "{plan}: {what}");
                let direct = request.algorithm == Some(Algorithm::Direct) || request.dtype == DType::F64;
                assert!(!direct || plan.algorithm == Algorithm::Direct, "{plan}: {what}");
                launches(&plan).iter().for_each(|call| fits(call, &plan, &what));
                overlapping += waiting(&plan);
                if turn.is_multiple_of(7) {
                    packs_before(&plan, &what);
                }
            }
        }
    }
    assert!(overlapping > 0);
}

/// How many launches start before the one ahead has ended, each of which waits for it.
fn waiting(plan: &Plan) -> usize {
    let overlaps = |step: &Step| matches!(step, Step::Launch { overlap: true, .. });
    for pair in plan.steps.windows(2) {
        let Step::Launch { variant, overlap: true, .. } = &pair[1] else { continue };
        assert!(source(variant).contains(" await_previous();"), "{} in {plan}", variant.name);
        assert!(matches!(pair[0], Step::Launch { .. }), "{} after no launch in {plan}", variant.name);
    }
    assert!(!plan.steps.first().is_some_and(overlaps), "{plan}");
    plan.steps.iter().filter(|step| overlaps(step)).count()
}

/// A plan whose weight is packed before, if it has one, in two: nothing of the input where it is packed, and none of its packing
/// afterwards.
fn packs_before(plan: &Plan, what: &str) {
    let packs = |plan: &Plan| plan.launches("halo_pack_weight");
    let Some(Prepacked { packing, block }) = plan.prepacked() else {
        return assert!(!packs(plan), "{plan}: {what}");
    };
    assert!(packs(&packing) && !packs(&block), "{plan}: {what}");
    for (part, packed_bytes) in [(&packing, 0), (&block, packing.workspace_bytes)] {
        launches(part).iter().for_each(|call| fits_beside(call, part, packed_bytes, what));
        waiting(part);
        // Who may start behind it needs its scales, and waits for them.
        for pair in part.steps.windows(2).filter(|pair| pair[0].launches("half_scale")) {
            let Some(call) = Call::new(&pair[1]) else { continue };
            let waits = call.has("awaits") && call.int("awaits") == 1 || call.kernel() == "halo_pack_weight";
            assert!(waits || !pair[1].is_early() && !call.has("awaits"), "{part}: {what}");
        }
        // And who may behind the words.
        for pair in part.steps.windows(2).filter(|pair| pair[0].launches("set_words")) {
            let waits = pair[1].launches("half_scale") || pair[1].launches("halo_pack_input");
            assert!(waits || !pair[1].is_early(), "{part}: {what}");
        }
    }
    let buffers = |plan: &Plan| -> Vec<Buffer> {
        let calls = launches(plan).into_iter().flat_map(|call| call.arguments.iter());
        let of = |argument: &Argument| {
            if let Argument::Pointer(buffer, _) = argument { Some(*buffer) } else { None }
        };
        calls.filter_map(of).collect()
    };
    let apart = |buffer: &Buffer| [Buffer::Weight, Buffer::Workspace].contains(buffer);
    assert!(
        buffers(&packing).iter().all(apart) && buffers(&block).contains(&Buffer::Packed),
        "{plan}: {what}"
    );
    // Scales are of both operands, and words start with what packing has found, unless they are the weight's alone.
    let again = [plan.launches("half_scale"), block.launches("set_words")].map(usize::from);
    assert_eq!(launches(&packing).len() + launches(&block).len(), launches(plan).len() + again[0] + again[1]);
}

/// A launch's grid, arguments and addresses.
fn fits(call: &Call<'_>, plan: &Plan, what: &str) {
    fits_beside(call, plan, 0, what);
}

/// The same beside so many bytes of a packed weight.
fn fits_beside(call: &Call<'_>, plan: &Plan, packed_bytes: usize, what: &str) {
    let what = format!("{}: {what}", call.variant.name);
    let [x, y, z] = call.grid;
    assert!(x > 0 && y > 0 && z > 0 && x < 1 << 31 && y < 1 << 16 && z < 1 << 16, "{:?}, {what}", call.grid);
    assert!(call.shared == 0 || call.variant.exact, "{what}");
    let (asked, given) = (&call.signature.parameters, call.arguments);
    assert_eq!(asked.len(), given.len(), "{what}");
    assert!(given.len() <= Arguments::MOST, "{} arguments: {what}", given.len());
    for ((name, of), argument) in asked.iter().zip(given) {
        let right = match argument {
            Argument::Pointer(..) => of.starts_with("*mut "),
            Argument::I32(_) => *of == "i32",
            // A kernel that does not use what would lie there is given no address.
            Argument::I64(value) => *of == "i64" || *value == 0 && of.starts_with("*mut "),
            Argument::F32(_) => *of == "f32",
            Argument::F64(_) => *of == "f64",
        };
        assert!(right, "{name} is {of}, got {argument:?}: {what}");
    }
    for (name, pointer) in contracts::aligned(call) {
        assert!(pointer.at.is_multiple_of(256), "{name} is at {}: {what}", pointer.at);
    }
    for (pointer, count) in contracts::extents(call) {
        let end = pointer.at + count as usize * pointer.width;
        let saved = [Buffer::Mean, Buffer::Rstd].contains(&pointer.buffer)
            && ["norm_merge", "partial_merge", "group_merge"].contains(&call.kernel());
        let most = match pointer.buffer {
            Buffer::Workspace => plan.workspace_bytes,
            Buffer::Packed => packed_bytes,
            _ if saved => continue,
            _ => panic!("{pointer:?} of {what}"),
        };
        assert!(end <= most, "{pointer:?}, {count} of {most}: {what}");
    }
    // Positions, and offsets from a tile's first sample on, are counted in 32 bits.
    if call.has("view_rows") {
        let [rows, pd, ph, pw, y_n] = call.ints(["rows", "pd", "ph", "pw", "y_n"]);
        let samples = rows / (pd * ph * pw);
        let spanned = (call.size("BM") / (pd * ph * pw) + 2).min(samples);
        let farthest = contracts::view(call) + rows + call.size("BM");
        assert!(farthest < 1 << 31 && spanned * y_n < 1 << 31, "{what}");
    }
    if call.kernel() == "halo_sweep" {
        halo_sweep::check(call);
    } else if call.has("stage_rows") {
        let [rows, pd, ph, pw, y_n] = call.ints(["rows", "pd", "ph", "pw", "y_n"]);
        let (bm, sample) = (halo::rows_of_tile(call), pd * ph * pw);
        let spanned = (bm / sample + 2).min(rows / sample);
        assert!(call.int("a_rows") + bm < 1 << 31 && spanned * y_n < 1 << 31, "{what}");
    }
    if call.kernel() == "gather_gemm" {
        gather::check(call);
    }
    if call.kernel() == "box_gemm" {
        boxes::check(call);
    }
    if shuffle::KERNELS.contains(&call.kernel()) {
        shuffle::check(call);
    }
    if call.kernel() == "implicit_gemm" {
        implicit::check(call);
    }
    if call.kernel() == "pointwise" {
        pointwise::check(call);
    }
    if group_norm::KERNELS.contains(&call.kernel()) {
        group_norm::check(call);
    }
    if call.variant.family == "gradient" {
        gradient::check(call);
    }
    if call.has("slice_pitch") {
        let [pd, ph, pw, n, x_n] = call.ints(["pd", "ph", "pw", "n", "x_n"]);
        let spanned = (call.size("BR") / (pd * ph * pw) + 2).min(n);
        assert!(spanned * x_n < 1 << 31, "{what}");
    }
}

/// Everything works in a few times its input, or its weight.
#[test]
fn the_workspace_is_small() {
    for device in devices() {
        for (turn, case) in published().into_iter().enumerate() {
            for request in some_of(&requests(&case), 3, turn) {
                let plan = plan(request, &device, &[]).unwrap();
                let bytes = |shape: [usize; 5]| shape.iter().product::<usize>() * request.dtype.size();
                let weight: usize = request.geometry.conv().weight_shape().iter().product();
                let most = bytes(request.geometry.input_shape()) * 5 / 2;
                let most = most.max(2 * weight * request.dtype.size()) + (1 << 20);
                let what = format!("{case}, {request:?}, {device}");
                assert!(plan.workspace_bytes <= most, "{plan}, {most} at most: {what}");
            }
        }
    }
}

#[test]
fn an_empty_batch_asks_for_nothing() {
    let case = cases().into_iter().find(|case| case.name == "batch-0").unwrap();
    for request in requests(&case) {
        let [_, device, _] = devices();
        let plan = plan(&request, &device, &[]).unwrap();
        assert!(plan.steps.is_empty() && plan.workspace_bytes == 0, "{plan}");
    }
}

#[test]
fn a_missing_kernel_is_named() {
    let [_, device, _] = devices();
    for case in planned() {
        for request in requests(&case).into_iter().filter(|request| request.algorithm.is_some()) {
            let error = Plan::new(&request, &device, &[]).unwrap_err();
            assert!(
                matches!(&error, Error::MissingKernel { name, .. } if name.contains("direct")),
                "{error}"
            );
        }
    }
    // One after another, of a plan that takes all kernels that there are for float32.
    let case = cases().into_iter().find(|case| case.name == "k3").unwrap();
    let is_it = |request: &&Request| {
        let dtype = request.dtype == DType::F32 && request.precision == Precision::Ieee;
        dtype && request.algorithm == Some(Algorithm::LinearGemm)
    };
    let request = *requests(&case).iter().find(is_it).unwrap();
    let whole = plan(&request, &device, &[]).unwrap();
    for call in launches(&whole) {
        let entry = call.variant.entry;
        match plan(&request, &device, &[entry]) {
            Ok(other) => {
                assert_eq!((other.algorithm, call.variant.family), (Algorithm::Direct, "linear_gemm"))
            }
            Err(Error::MissingKernel { name, arch }) => {
                assert!(name.contains(call.kernel()) && arch == "sm_90", "{name} for {arch}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn variants_fill_in_what_their_kernels_are_generic_over() {
    for variant in variants_for(devices()[1].arch) {
        let signature = signature(&variant);
        let sizes: Vec<&str> = variant.params.iter().map(|(name, _)| *name).collect();
        assert_eq!(sizes, signature.sizes, "{}", variant.name);
        assert_eq!(variant.types.len(), signature.types.len(), "{}", variant.name);
    }
}

/// Compile-time sizes that say how a kernel cuts its work, not what it can do.
const TILES: [&str; 28] = [
    "B",
    "BC",
    "BK",
    "BM",
    "BN",
    "BP",
    "BR",
    "CHANNELS",
    "LINES",
    "MT",
    "NT",
    "POS_WARPS",
    "R",
    "ROWS",
    "ROW_WARPS",
    "SEGMENTS",
    "STAGES",
    "TAPS",
    "U",
    "VOXELS",
    "WARPGROUPS",
    "WARPS",
    "WARPS_M",
    "WARPS_N",
    "WARP_M",
    "WARP_N",
    "WARP_POS",
    "WARP_ROWS",
];

/// Whether a kernel can do all that another can, in other tiles.
fn does_the_same(one: &Variant, other: &Variant) -> bool {
    let kind = |variant: &Variant| {
        let sizes = variant.params.iter().filter(|(name, _)| !TILES.contains(name));
        sizes.copied().collect::<Vec<_>>()
    };
    one.entry == other.entry && one.types == other.types && kind(one) == kind(other)
}

/// Where tiles would spill, a device's kernels are fewer: one of each kind is enough.
#[test]
fn plans_make_do_with_one_kernel_of_a_kind() {
    for device in devices() {
        let all = variants_for(device.arch);
        let mut variants: Vec<&Variant> = Vec::new();
        for variant in &all {
            if !variants.iter().any(|other| does_the_same(other, variant)) {
                variants.push(variant);
            }
        }
        assert!(variants.len() < all.len());
        let all: Vec<&Variant> = all.iter().collect();
        for (turn, case) in planned().iter().enumerate() {
            for &request in some_of(&requests(case), 3, turn) {
                let plan = Plan::new(&request, &device, &variants);
                let plan = plan.unwrap_or_else(|error| panic!("{error}: {case}, {request:?}"));
                if request.algorithm.is_none() {
                    continue;
                }
                let whole = Plan::new(&request, &device, &all).unwrap();
                // Shared memory holds some tiles of other sizes alone; there are other families.
                let kept = [
                    Algorithm::BoxGemm,
                    Algorithm::ImplicitGemm,
                    Algorithm::Pointwise,
                    Algorithm::ShuffleGemm,
                    Algorithm::ShuffleRing,
                    Algorithm::ShuffleWgmma,
                ]
                .contains(&whole.algorithm);
                assert!(kept || plan.algorithm == whole.algorithm, "{plan}, {whole}");
            }
        }
    }
}

/// What lies farther apart than 32 bits count is left to a family that counts in more.
#[test]
fn far_elements_are_not_counted_in_32_bits() {
    let case = |line| Case::parse("far", line, "rows of a box more than 2^31 elements apart").unwrap();
    for line in [
        "n 1, 1x16384x8192, 4>4, k 5x1x1, d 2x1x1, p 4x0x0, channels_last_3d",
        "n 1, 2x8192x4096, 4>4, k 3x1x1, d 16x1x1, p 16x0x0, channels_last_3d",
    ] {
        let case = case(line);
        let request = Request {
            task: Task::Forward,
            block: case.block,
            geometry: case.geometry(),
            dtype: DType::F32,
            precision: Precision::Tf32,
            input_format: MemoryFormat::ChannelsLast3d,
            output_format: MemoryFormat::ChannelsLast3d,
            algorithm: Some(Algorithm::BoxGemm),
        };
        let plan = plan(&request, &devices()[1], &[]).unwrap();
        assert_ne!(plan.algorithm, Algorithm::BoxGemm, "{plan}");
    }
}

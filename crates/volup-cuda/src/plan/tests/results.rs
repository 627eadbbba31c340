//! Plans run by the kernels' contracts, against the reference.

use super::boxes;
use super::contracts::{self, is_needed};
use super::halo::rows_of_tile;
use super::implicit;
use super::machine::{Call, Machine};
use super::manifest::{devices, variants_for};
use super::shuffle;
use super::{FORMATS, fits, launches, planned, some_of};
use crate::plan::{Argument, Buffer, Plan, Request, Step, Task};
use crate::{Algorithm, DeviceInfo, Variant};
use std::cell::{Cell, OnceCell};
use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use volup::reference::{Expected, forward};
use volup::testing::{Case, Deviation, Fill, cases, compare};
use volup::{ConvSpec, DType, Data, MemoryFormat, Parameters, Precision, Tensor};

/// Less than any address that is wrong does, more than the square of what the split leaves out.
const ROUNDOFF: f64 = 1e-9;

/// A case's tensors in double precision, rounded to a type, with the result.
pub struct Example {
    case: Case,
    dtype: DType,
    input: Tensor,
    parameters: Parameters,
    /// The result, once it is asked for.
    expected: OnceCell<Expected>,
    /// How many plans have been run: every second one's weight is packed before, if it is packed.
    runs: Cell<usize>,
}

impl Example {
    pub fn new(case: &Case, dtype: DType, change: impl Fn(&mut Vec<f64>, &mut Vec<f64>)) -> Example {
        let (input, parameters) = case.inputs(dtype, Fill::Normal, 5);
        let (mut x, mut w) = (input.to_f64(), parameters.weight.to_f64());
        change(&mut x, &mut w);
        let of = |shape: &[usize], values| Tensor::new(shape, values).expect("as many values");
        let input = of(&case.geometry().input_shape(), x);
        let weight = of(&case.block.conv().weight_shape(), w);
        let [bias, norm_weight, norm_bias] = [parameters.bias, parameters.norm_weight, parameters.norm_bias]
            .map(|tensor| tensor.map(|tensor| of(tensor.shape(), tensor.to_f64())));
        let parameters = Parameters { weight, bias, norm_weight, norm_bias };
        let (case, expected) = (case.clone(), OnceCell::new());
        Example { case, dtype, input, parameters, expected, runs: Cell::new(0) }
    }

    /// Whether one kernel would have to compute two activations: the definition's.
    fn is_left_to_direct(&self) -> bool {
        self.case.block.norm().is_none() && self.case.block.post_activation().is_some()
    }

    pub fn request(&self, algorithm: Algorithm, precision: Precision, formats: [MemoryFormat; 2]) -> Request {
        Request {
            task: Task::Forward,
            block: self.case.block,
            geometry: self.case.geometry(),
            dtype: self.dtype,
            precision,
            input_format: formats[0],
            output_format: formats[1],
            algorithm: Some(algorithm),
        }
    }

    /// Checks that a plan of a request computes what it should without a guarded kernel, by launches that fit.
    pub fn is_right(&self, plan: &Plan, request: &Request) {
        launches(plan).iter().for_each(|call| fits(call, plan, &format!("{request:?}")));
        let (deviation, needed) = self.run(plan, request);
        assert!(deviation.is_ok() && !needed, "{deviation}");
    }

    /// What the machine computes, beside what it should; and whether a guarded kernel had to.
    pub fn run(&self, plan: &Plan, request: &Request) -> (Deviation, bool) {
        let mut machine = Machine::new(plan.workspace_bytes);
        let width = self.dtype.size();
        let Data::F64(input) = self.input.cast(DType::F64, request.input_format).unwrap().into_data() else {
            unreachable!("it was cast")
        };
        machine.fill(Buffer::Input, width, &input);
        machine.fill(Buffer::Weight, width, &self.parameters.weight.to_f64());
        let Parameters { bias, norm_weight, norm_bias, .. } = &self.parameters;
        let given = [(Buffer::Bias, bias), (Buffer::NormWeight, norm_weight), (Buffer::NormBias, norm_bias)];
        for (buffer, tensor) in given {
            tensor.iter().for_each(|tensor| machine.fill(buffer, width, &tensor.to_f64()));
        }
        let shape = request.geometry.output_shape();
        machine.allocate(Buffer::Output, shape.iter().product::<usize>() * width);
        self.runs.set(self.runs.get() + 1);
        let prepacked = plan.prepacked().filter(|_| self.runs.get().is_multiple_of(2));
        match &prepacked {
            Some(plans) => machine.run_prepacked(plans, contracts::run),
            None => machine.run(plan, contracts::run),
        }
        let output = Data::F64(machine.values(Buffer::Output, width));
        let output = Tensor::with_format(&shape, request.output_format, output).unwrap();
        let done = prepacked.as_ref().map_or(plan, |plans| &plans.block);
        let guarded =
            launches(done).into_iter().filter(|call| call.has("guarded") && call.int("guarded") == 1);
        let needed = guarded.filter(|call| is_needed(call, &machine)).count() > 0;
        let expected = self.expected.get_or_init(|| {
            forward(&self.case.block, &self.case.geometry(), &self.parameters, &self.input, ROUNDOFF)
        });
        (compare(expected, &output), needed)
    }
}

/// A choice among a family's kernels.
pub type Choice = fn(&Variant) -> bool;

/// The kernels of a device; of each family's only those chosen, if there is a choice.
pub fn kernels(device: &DeviceInfo, choice: Option<Choice>) -> Vec<Variant> {
    let mut variants = variants_for(device.arch);
    variants.retain(|variant| choice.is_none_or(|choice| choice(variant)));
    variants
}

/// What is unusual about a plan.
pub fn features(plan: &Plan) -> BTreeSet<&'static str> {
    let mut found = BTreeSet::new();
    let calls = launches(plan);
    for call in calls.iter().filter(|call| call.variant.family == "interleave") {
        let kind = ["deep", "any"].into_iter().find(|kind| call.kernel().ends_with(kind));
        found.insert(kind.unwrap_or("kept"));
        found.extend((call.size("LAST") == 1).then_some("channels last"));
        found.extend((call.int("blocks") > 1).then_some("column blocks"));
    }
    for call in calls.iter().filter(|call| call.kernel() == "box_gemm") {
        found.extend(boxes::features(call));
    }
    for call in calls.iter().filter(|call| shuffle::KERNELS.contains(&call.kernel())) {
        found.extend(shuffle::features(call));
    }
    for call in calls.iter().filter(|call| call.kernel() == "implicit_gemm") {
        found.extend(implicit::features(call));
    }
    found.extend(calls.iter().any(|call| call.kernel() == "fill_output").then_some("outputs apart"));
    let products = calls.iter().filter(|call| call.has("rows") && call.kernel().contains("_gemm"));
    let batches: BTreeSet<i64> = products.clone().map(|call| call.int("rows")).collect();
    for call in products {
        if call.has("resident") {
            let [d_kernel, h_kernel] = call.ints(["d_kernel", "h_kernel"]);
            let resident = call.int("resident") == 1;
            found.insert(if resident { "resident units" } else { "passing units" });
            let whole = call.int("unit_steps") == call.int("w_steps") && call.int("w_steps") > 1;
            found.extend(whole.then_some("units of many steps"));
            found.extend((call.int("whole_h") == 1 && h_kernel > 1).then_some("lines together"));
            found.extend((call.int("whole_h") == 0).then_some("lines apart"));
            let tiles = (call.int("rows") + rows_of_tile(call) - 1) / rows_of_tile(call);
            let tiles = tiles * call.int("d_stride") * call.int("h_stride");
            let tiles = tiles * call.int("slices") * call.int("blocks");
            found.extend((tiles > call.grid[0]).then_some("blocks of many tiles"));
            found.extend((d_kernel > 1).then_some("taps along depth"));
        }
        let mut note = |what, is: bool| is.then(|| found.insert(what));
        note("slices", call.int("slices") > 1);
        note("column blocks", call.int("blocks") > 1);
        note("chunks", call.int("chunks") > 1);
        note("windows", call.has("window") && call.int("window") > call.int("pitch"));
        note("steps along width", call.has("w_steps") && call.int("w_steps") > 1);
        note("steps that skip", call.has("w_steps") && call.int("w_step") > 1);
        note("batches of two sizes", batches.len() > 1);
        note("a residue without taps", call.int("d_step") < call.int("d_stride"));
    }
    let blocked = calls.iter().any(|call| call.has("lanes") && call.int("block") > 1);
    found.extend(blocked.then_some("positions in blocks"));
    found
}

/// What the table has not: groups of so many channels that they are computed apart, and sizes that are
/// whole tiles of `interleave`, a batch that is cut, and lines of which shared memory holds no two.
fn more() -> [Case; 5] {
    let groups = ConvSpec::builder(256, 192, [1, 2, 3]).stride([1, 2, 1]).padding([0, 1, 1]).groups(4);
    let few = ConvSpec::builder(1, 2, [2, 1, 2]).stride([1, 1, 2]);
    let whole = |channels| ConvSpec::builder(channels, 40, 2).stride(2);
    let long = ConvSpec::builder(2, 3, [1, 5, 2]).padding([0, 2, 0]);
    [
        ("long-lines", long, [1, 2, 900], "a tile with all its lines does not fit"),
        ("many-groups", groups, [2, 3, 5], "each slice has its columns and its part of the reduction"),
        ("one-channel", few, [7, 18, 20], "takes far more memory when packed"),
        ("whole-tiles", whole(24), [1, 8, 16], "moved as views"),
        ("whole-deep-tiles", whole(136), [1, 8, 16], "more channels than a tile of x keeps"),
    ]
    .map(|(name, conv, input, why)| Case {
        name,
        why,
        block: conv.bias(true).build().expect("a valid convolution").into(),
        batch: Some(if name == "one-channel" { 5 } else { 2 }),
        input,
        format: MemoryFormat::Contiguous,
    })
}

/// The plans of a request that are of some kind.
pub fn plans_of_kind(
    request: &Request,
    device: &DeviceInfo,
    variants: &[&Variant],
    is_one: impl Fn(&Plan) -> bool,
) -> Vec<Plan> {
    let plans = Plan::candidates(request, device, variants, usize::MAX).expect("plans");
    plans.into_iter().filter(is_one).collect()
}

/// Cases of strides so wide that shared memory holds no row block of `box_gemm`.
const TOO_WIDE: [&str; 3] = ["op-past-reach", "s-far-over-k", "s-huge"];

/// Runs all planned cases of the table on a device's kernels, each in a quarter of the formats, another one of each precision.
fn check(
    device: &DeviceInfo,
    choice: Option<Choice>,
    dtype: DType,
    algorithm: Algorithm,
) -> BTreeSet<&'static str> {
    let variants = kernels(device, choice);
    let variants: Vec<&Variant> = variants.iter().collect();
    let mut found = BTreeSet::new();
    let precisions = if dtype == DType::F32 { &Precision::ALL[..] } else { &[Precision::Ieee] };
    for (index, case) in cases().iter().chain(&more()).filter(|case| case.batch != Some(0)).enumerate() {
        let example = Example::new(case, dtype, |_, _| {});
        for (turn, &precision) in (index..).zip(precisions) {
            let [first, last] = FORMATS;
            for &formats in some_of(&[[first; 2], [first, last], [last, first], [last; 2]], 4, turn) {
                // The input's format matters to the pack alone.
                if choice.is_some() && formats[0] != formats[1] {
                    continue;
                }
                let request = example.request(algorithm, precision, formats);
                let plan = Plan::new(&request, device, &variants).unwrap();
                // Where a family does not apply, or has no kernel that was chosen.
                let left = algorithm == Algorithm::BoxGemm && TOO_WIDE.contains(&case.name);
                let optional = algorithm == Algorithm::Interleave || choice.is_some() || left;
                if optional && plan.algorithm != algorithm {
                    continue;
                }
                let asked = if example.is_left_to_direct() { Algorithm::Direct } else { algorithm };
                assert_eq!(plan.algorithm, asked, "{plan} for {case}");
                println!("{case}; {dtype}, {precision}, {formats:?}; {plan}");
                let (deviation, needed) = example.run(&plan, &request);
                assert!(deviation.is_ok() && !needed, "{deviation}");
                found.extend(features(&plan));
            }
        }
    }
    found
}

fn columns(kernel: &Variant, columns: i64) -> bool {
    let is_product = kernel.family == "linear_gemm" || kernel.entry == "halo_gemm";
    !is_product || kernel.param("BN") == Some(columns)
}

#[test]
fn linear_gemm_computes_the_definition() {
    let [ampere, hopper, small] = devices();
    let mut found = check(&hopper, None, DType::F32, Algorithm::LinearGemm);
    found.extend(check(&hopper, Some(|kernel| columns(kernel, 32)), DType::F32, Algorithm::LinearGemm));
    found.extend(check(&small, Some(|kernel| columns(kernel, 64)), DType::Bf16, Algorithm::LinearGemm));
    check(&ampere, None, DType::F16, Algorithm::LinearGemm);
    // What the table does not lead to is not tested here.
    let expected = [
        "a residue without taps",
        "batches of two sizes",
        "chunks",
        "column blocks",
        "slices",
        "steps along width",
        "steps that skip",
        "windows",
    ];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn halo_gemm_computes_the_definition() {
    let [_, hopper, _] = devices();
    // A cache that holds no more of a packed input than other memory does.
    let hopper = DeviceInfo { l2_bytes: 1 << 20, ..hopper };
    let small = DeviceInfo { multiprocessors: 2, ..hopper.clone() };
    let mut found = check(&hopper, None, DType::F32, Algorithm::HaloGemm);
    found.extend(check(&small, Some(|kernel| columns(kernel, 16)), DType::F32, Algorithm::HaloGemm));
    found.extend(check(&small, Some(|kernel| columns(kernel, 96)), DType::F32, Algorithm::HaloGemm));
    found.extend(check(&small, Some(|kernel| columns(kernel, 64)), DType::Bf16, Algorithm::HaloGemm));
    check(&hopper, None, DType::F16, Algorithm::HaloGemm);
    let expected = [
        "batches of two sizes",
        "blocks of many tiles",
        "chunks",
        "column blocks",
        "lines apart",
        "lines together",
        "outputs apart",
        "passing units",
        "positions in blocks",
        "resident units",
        "slices",
        "steps along width",
        "steps that skip",
        "taps along depth",
        "units of many steps",
    ];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn box_gemm_computes_the_definition() {
    let [_, hopper, _] = devices();
    let small = DeviceInfo { multiprocessors: 2, ..hopper.clone() };
    let mut found = check(&hopper, None, DType::F32, Algorithm::BoxGemm);
    found.extend(check(&small, None, DType::Bf16, Algorithm::BoxGemm));
    // Row blocks of few rows.
    let few: Choice = |kernel| kernel.entry != "box_gemm" || kernel.param("MT") == Some(2);
    found.extend(check(&small, Some(few), DType::F32, Algorithm::BoxGemm));
    let fewer: Choice = |kernel| kernel.entry != "box_gemm" || kernel.param("MT") == Some(1);
    found.extend(check(&hopper, Some(fewer), DType::F16, Algorithm::BoxGemm));
    let expected = [
        "a last channel block of fewer",
        "boxes past the end",
        "chunks",
        "many channel blocks",
        "many pieces a block",
        "many types",
        "offsets apart",
        "pairs of offsets",
        "parts",
        "residues without taps",
        "slices",
        "some tiles of a step",
        "warps of many row blocks",
    ];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
}

/// Also those ways that are never the fastest for the table's sizes.
#[test]
fn box_gemm_computes_the_definition_however_rows_are_cut() {
    let [_, hopper, _] = devices();
    let variants = kernels(&hopper, None);
    let variants: Vec<&Variant> = variants.iter().collect();
    let mut found = 0;
    for (turn, case) in cases().iter().filter(|case| case.batch != Some(0)).enumerate() {
        for (dtype, format) in [DType::F32, DType::F16].into_iter().zip(FORMATS) {
            let example = Example::new(case, dtype, |_, _| {});
            let request = example.request(Algorithm::BoxGemm, Precision::Ieee, [format; 2]);
            let mut plans = Plan::candidates(&request, &hopper, &variants, usize::MAX).unwrap();
            plans.retain(|plan| plan.algorithm == Algorithm::BoxGemm);
            for plan in some_of(&plans, 2, turn) {
                println!("{case}; {dtype}, {format}; {plan}");
                let (deviation, _) = example.run(plan, &request);
                assert!(deviation.is_ok(), "{deviation}");
                found += 1;
            }
        }
    }
    assert!(found > 500, "{found}");
}

#[test]
fn interleave_computes_the_definition() {
    let [_, hopper, small] = devices();
    let mut found = check(&hopper, None, DType::F32, Algorithm::Interleave);
    found.extend(check(&small, None, DType::Bf16, Algorithm::Interleave));
    // Those for any sizes also where others are faster.
    let any: Choice = |kernel| kernel.family != "interleave" || kernel.param("PAIR").is_some();
    check(&hopper, Some(any), DType::F32, Algorithm::Interleave);
    check(&small, Some(any), DType::Bf16, Algorithm::Interleave);
    let expected = ["any", "channels last", "column blocks", "deep", "kept"];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn direct_computes_the_definition() {
    let [ampere, ..] = devices();
    for dtype in DType::ALL {
        check(&ampere, None, dtype, Algorithm::Direct);
    }
}

/// What the fast path cannot compute with is computed by the definition.
#[test]
fn the_guard_notices_what_the_fast_path_cannot_compute() {
    let [_, device, _] = devices();
    let variants = kernels(&device, None);
    let variants: Vec<&Variant> = variants.iter().collect();
    type Change = fn(&mut Vec<f64>, &mut Vec<f64>);
    let everywhere: [(&str, Change); 3] = [
        ("a NaN in the input", |x, _| x[3] = f64::NAN),
        ("an infinite weight", |_, w| w[1] = f64::INFINITY),
        ("the last weight is infinite", |_, w| *w.last_mut().unwrap() = f64::NEG_INFINITY),
    ];
    let small: (&str, Change) =
        ("voxels that are far smaller", |x, _| x[1..].iter_mut().for_each(|x| *x *= 1e-10));
    for case in planned().into_iter().filter(|case| ["k3", "g2", "s2", "cin-1"].contains(&case.name)) {
        for dtype in [DType::F32, DType::Bf16] {
            for precision in Precision::ALL {
                let split = dtype == DType::F32 && precision == Precision::Ieee;
                for (what, change) in everywhere.into_iter().chain([small]) {
                    let example = Example::new(&case, dtype, change);
                    let formats = [MemoryFormat::Contiguous; 2];
                    for algorithm in [Algorithm::LinearGemm, Algorithm::HaloGemm, Algorithm::BoxGemm] {
                        let request = example.request(algorithm, precision, formats);
                        let plan = Plan::new(&request, &device, &variants).unwrap();
                        println!("{case}; {dtype}, {precision}; {what}; {plan}");
                        assert_eq!(plan.algorithm, algorithm);
                        let (deviation, needed) = example.run(&plan, &request);
                        assert!(deviation.is_ok(), "{deviation}");
                        // Only fp16 is too coarse for what is small; boxes look for themselves.
                        let coarse = split || plan.to_string().contains("scaled");
                        let noticed = algorithm != Algorithm::BoxGemm && (what != small.0 || coarse);
                        assert_eq!(needed, noticed, "{what}");
                    }
                }
            }
        }
    }
}

/// The machine is worth what it notices.
#[test]
fn a_wrong_argument_shows() {
    let [_, device, _] = devices();
    let variants = kernels(&device, None);
    let variants: Vec<&Variant> = variants.iter().collect();
    let cases = cases();
    let case =
        cases.iter().find(|case| case.name == "monai-128-32-48-block-small").expect("a row of the table");
    let example = Example::new(case, DType::F32, |_, _| {});
    let wrong = [
        ("pack_input", "lead pitch pd ph pw n depth height width"),
        ("pack_weight_split", "length k columns inner w_kernel w_stride w_far"),
        ("pack_weight_scale", "inner out_per_group taps"),
        ("linear_gemm", "pitch pd ph pw d_inverse d_first d_shift d_out h_kernel h_stride w_base w_out"),
        ("linear_gemm", "chunks blocks channels y_d y_w has_bias lo_rows"),
        ("group_statistics", "length rows chunks channels groups group_channels"),
        ("group_scale", "voxels channels group_channels parts"),
        ("partial_merge", "chunks sample_step group_step"),
    ];
    let wrong_of_halo = [
        ("halo_pack_input", "lead pd ph pw block n depth height width slices slice_in panels channel_panels"),
        ("halo_pack_input", "a_rows x_n x_c x_d x_h x_w lanes"),
        ("halo_pack_weight", "run line_runs each"),
        ("halo_pack_weight", "chunk_panels chunks columns blocks channels slice_in outputs block"),
        ("halo_pack_weight", "w_first w_stride w_dilation d_kernel h_kernel w_kernel"),
        ("halo_pack_weight", "w_low w_steps w_step"),
        ("halo_gemm", "a_rows lead pd ph pw d_inverse d_first d_shift d_out"),
        ("halo_gemm", "h_kernel h_stride h_first h_out outputs w_shift w_out w_low w_steps w_step"),
        ("halo_gemm", "chunk_panels chunks blocks channels y_d y_w has_bias a_stages stage_rows b_stages"),
        ("halo_gemm", "unit_steps resident"),
        ("half_scale", "inner out_per_group taps"),
    ];
    let wrong_of_boxes = [
        ("box_pack_weight", "items slice_in slice_out in_per_group out_per_group chunk_panels chunks pair_w"),
        ("box_pack_weight", "channels channel_blocks classes types tiles residues"),
        ("box_pack_weight", "d_kernel d_stride d_dilation d_offsets d_apart"),
        ("box_pack_weight", "h_kernel h_stride h_dilation h_offsets h_apart"),
        ("box_pack_weight", "w_kernel w_stride w_dilation w_offsets w_apart"),
        ("box_gemm", "flag_count slices slice_in slice_out chunk_panels chunks pair_w"),
        ("box_gemm", "channels channel_blocks classes types parts residues in_per_group out_per_group"),
        (
            "box_gemm",
            "d_input d_output d_stride d_padding d_first d_count d_offsets d_apart d_box d_kernel d_dilation",
        ),
        (
            "box_gemm",
            "h_input h_output h_stride h_padding h_first h_count h_offsets h_apart h_box h_kernel h_dilation",
        ),
        ("box_gemm", "w_input w_output w_stride w_padding w_first w_count w_offsets w_apart w_box"),
        ("box_gemm", "x_last y_last has_bias pitch staging line_count"),
        ("box_gemm", "x_c x_d x_h x_w y_c y_d y_h y_w boxes_d boxes_h boxes_w"),
        ("box_gemm", "all_h all_w x_rows units pairs work"),
    ];
    let mut unnoticed = Vec::new();
    for (algorithm, wrong) in [
        (Algorithm::LinearGemm, &wrong[..]),
        (Algorithm::HaloGemm, &wrong_of_halo),
        (Algorithm::BoxGemm, &wrong_of_boxes),
    ] {
        let request = example.request(algorithm, Precision::Ieee, FORMATS);
        let plan = Plan::new(&request, &device, &variants).unwrap();
        unnoticed.extend(unnoticed_of(&example, &request, &plan, wrong));
    }
    assert!(unnoticed.is_empty(), "{unnoticed:?} may be wrong");
}

/// Those of a plan's arguments, named after their kernels, that do not show when they are one more.
pub fn unnoticed_of(
    example: &Example,
    request: &Request,
    plan: &Plan,
    wrong: &[(&'static str, &'static str)],
) -> Vec<(&'static str, &'static str)> {
    unnoticed(plan, wrong, |plan| example.run(plan, request).0.is_ok())
}

/// The same, of a plan that is right as long as it computes what it should.
pub fn unnoticed(
    plan: &Plan,
    wrong: &[(&'static str, &'static str)],
    is_right: impl Fn(&Plan) -> bool,
) -> Vec<(&'static str, &'static str)> {
    let names = wrong.iter().flat_map(|(kernel, names)| names.split(' ').map(move |name| (*kernel, name)));
    let shows = |&(kernel, name): &(&str, &str)| {
        let (mut plan, mut changed) = (plan.clone(), false);
        for step in &mut plan.steps {
            let Some(call) = Call::new(step) else { continue };
            let at = call.signature.parameters.iter().position(|(other, _)| *other == name);
            let is_it = call.kernel().starts_with(kernel) || call.variant.name.starts_with(kernel);
            if let (Some(at), Step::Launch { arguments, .. }) = (at.filter(|_| is_it), step) {
                match &mut arguments[at] {
                    Argument::I32(value) => *value += 1,
                    Argument::I64(value) => *value += 1,
                    Argument::Pointer(Buffer::Workspace, at) => *at += 4,
                    _ => continue,
                }
                changed = true;
            }
        }
        assert!(changed, "{kernel} has no {name}");
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| is_right(&plan)));
        !outcome.unwrap_or(false)
    };
    names.filter(|wrong| !shows(wrong)).collect()
}

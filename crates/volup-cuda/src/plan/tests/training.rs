//! Plans of training run by the kernels' contracts, against the reference.

use super::machine::Machine;
use super::manifest::{devices, variants_for};
use super::{FORMATS, contracts, fits, gradient, launches};
use crate::plan::{Buffer, Plan, Request, Task};
use crate::{Algorithm, DeviceInfo, Variant};
use std::cell::OnceCell;
use std::collections::BTreeSet;
use volup::reference::{Expected, backward, forward, forward_for_training, statistics};
use volup::testing::{Case, Fill, cases, compare, random_case, tensor};
use volup::{BlockSpec, DType, Data, Gradients, MemoryFormat, Parameters, Precision, Saved, Tensor, Wanted};

/// Less than any address that is wrong does, more than the square of what the split leaves out.
const ROUNDOFF: f64 = 1e-9;
/// What two fp16, which are rounded as the kernels round them, leave out of a number.
const HALVED: f64 = 1.0 / (1u32 << 22) as f64;
/// What gradients may be off by in any case where the convolution's output is made again: its own error goes through slopes and
/// deviations.
const AGAIN: f64 = 1e-6;

/// What is wanted of that which a block has.
pub fn wanted_of(block: &BlockSpec, wanted: Wanted) -> Wanted {
    let affine = block.norm().is_some_and(|norm| norm.affine());
    Wanted {
        bias: wanted.bias && block.conv().has_bias(),
        norm_weight: wanted.norm_weight && affine,
        norm_bias: wanted.norm_bias && affine,
        ..wanted
    }
}

/// No gradient.
pub const NONE: Wanted =
    Wanted { input: false, weight: false, bias: false, norm_weight: false, norm_bias: false };

/// A case in the table's notation.
pub fn case(line: &str) -> Case {
    Case::parse("given", line, "given").expect("a valid case")
}

/// Whether a plan launches a kernel.
pub fn has(plan: &Plan, kernel: &str) -> bool {
    launches(plan).iter().any(|call| call.kernel() == kernel)
}

/// The one plan that launches a kernel, if there is one, and whether it is expected to be the fastest; there are others beside it.
pub fn plan_of(
    kernel: &str,
    request: &Request,
    device: &DeviceInfo,
    variants: &[&Variant],
) -> Option<(Plan, bool)> {
    let plans = Plan::candidates(request, device, variants, usize::MAX).expect("plans");
    let found: Vec<usize> = (0..plans.len()).filter(|&at| has(&plans[at], kernel)).collect();
    assert!(found.len() <= 1 && found.len() < plans.len(), "one, and others beside it: {plans:?}");
    let (plan, first) = (&plans[*found.first()?], found[0] == 0);
    println!("{:?}, {}, {}; {plan}", request.task, request.dtype, request.precision);
    launches(plan).iter().for_each(|call| fits(call, plan, &format!("{request:?}")));
    Some((plan.clone(), first))
}

/// A case's tensors in double precision, rounded to a type, with all that training makes of them.
pub struct Example {
    case: Case,
    dtype: DType,
    input: Tensor,
    parameters: Parameters,
    grad_output: Tensor,
    convolution: Expected,
    output: Expected,
    saved: Saved<Tensor>,
    /// Once they are asked for.
    gradients: OnceCell<Gradients<Expected>>,
}

impl Example {
    /// `change` changes the input, the weight and the gradient of the output.
    pub fn new(case: &Case, dtype: DType, change: impl Fn([&mut Vec<f64>; 3])) -> Example {
        let (geometry, block) = (case.geometry(), &case.block);
        let (input, parameters) = case.inputs(dtype, Fill::Normal, 5);
        let shape = geometry.output_shape();
        let gradient = tensor(&shape, dtype, MemoryFormat::Contiguous, Fill::Normal, 1.0, 9);
        let [mut x, mut w, mut g] = [input, parameters.weight, gradient].map(|tensor| tensor.to_f64());
        change([&mut x, &mut w, &mut g]);
        let of = |shape: &[usize], values| Tensor::new(shape, values).expect("as many values");
        let [bias, norm_weight, norm_bias] = [parameters.bias, parameters.norm_weight, parameters.norm_bias]
            .map(|tensor| tensor.map(|tensor| of(tensor.shape(), tensor.to_f64())));
        let (input, grad_output) = (of(&geometry.input_shape(), x), of(&shape, g));
        let parameters =
            Parameters { weight: of(&block.conv().weight_shape(), w), bias, norm_weight, norm_bias };
        let bare = BlockSpec::from(*block.conv());
        let convolution = forward(&bare, &geometry, &parameters, &input, ROUNDOFF);
        let output = forward_for_training(block, &geometry, &parameters, &input, ROUNDOFF);
        let mut saved = Saved::default();
        if !block.is_bare() {
            let stored = of(&shape, convolution.values.clone());
            if let Some(norm) = block.norm() {
                let [mean, rstd] = statistics(block, &geometry, &stored)
                    .map(|expected| of(&[geometry.batch(), norm.groups()], expected.values));
                (saved.mean, saved.rstd) = (Some(mean), Some(rstd));
            }
            saved.convolution = Some(stored);
        }
        let (case, gradients) = (case.clone(), OnceCell::new());
        Example { case, dtype, input, parameters, grad_output, convolution, output, saved, gradients }
    }

    fn gradients(&self) -> &Gradients<Expected> {
        let Example { case, input, parameters, grad_output, saved, .. } = self;
        self.gradients.get_or_init(|| {
            backward(&case.block, &case.geometry(), parameters, input, saved, grad_output, ROUNDOFF)
        })
    }

    /// The same where elements of the weight's gradient are held to the largest of their channel of the input and so many neighbouring ones
    /// of the gradient.
    pub fn together(mut self, channels: usize) -> Example {
        self.gradients();
        let gradients = self.gradients.get_mut().expect("gradients");
        let weight = gradients.weight.as_mut().expect("a gradient");
        let taps: usize = self.case.block.conv().kernel_size().iter().product();
        for bounds in weight.bounds.chunks_mut(channels * taps) {
            let most = bounds.iter().copied().fold(0.0, f64::max);
            bounds.fill(most);
        }
        self
    }

    pub fn request(&self, task: Task, precision: Precision, formats: [MemoryFormat; 2]) -> Request {
        Request {
            task,
            block: self.case.block,
            geometry: self.case.geometry(),
            dtype: self.dtype,
            precision,
            input_format: formats[0],
            output_format: formats[1],
            algorithm: None,
        }
    }

    /// A machine with what both passes are given.
    fn machine(&self, plan: &Plan, request: &Request) -> Machine {
        let mut machine = Machine::new(plan.workspace_bytes);
        let width = self.dtype.size();
        let Parameters { weight, bias, norm_weight, norm_bias } = &self.parameters;
        machine.fill(Buffer::Input, width, &in_memory(&self.input, request.input_format));
        machine.fill(Buffer::Weight, width, &weight.to_f64());
        let given = [(Buffer::Bias, bias), (Buffer::NormWeight, norm_weight), (Buffer::NormBias, norm_bias)];
        for (buffer, tensor) in given {
            tensor.iter().for_each(|tensor| machine.fill(buffer, width, &tensor.to_f64()));
        }
        machine
    }

    /// What the forward pass computes is what it should.
    pub fn check_forward(&self, plan: &Plan, request: &Request) {
        let (block, shape) = (&request.block, request.geometry.output_shape());
        let mut machine = self.machine(plan, request);
        let (width, of_sums) = (self.dtype.size(), self.dtype.accumulator().size());
        let elements: usize = shape.iter().product();
        let groups = block.norm().map_or(0, |norm| norm.groups() * request.geometry.batch());
        machine.allocate(Buffer::Output, elements * width);
        machine.allocate(Buffer::Convolution, elements * width);
        machine.allocate(Buffer::Mean, groups * of_sums);
        machine.allocate(Buffer::Rstd, groups * of_sums);
        machine.run(plan, contracts::run);
        let read = |buffer| {
            let values = Data::F64(machine.values(buffer, width));
            Tensor::with_format(&shape, request.output_format, values).expect("as many values")
        };
        check("the output", &self.output, &read(Buffer::Output));
        let convolution = read(Buffer::Convolution);
        check("the convolution's output", &self.convolution, &convolution);
        if block.norm().is_some() {
            let expected = statistics(block, &request.geometry, &convolution);
            for (mut expected, buffer) in expected.into_iter().zip([Buffer::Mean, Buffer::Rstd]) {
                let values = machine.values(buffer, of_sums);
                // How sums are rounded is the kernels' matter.
                expected.bounds.iter_mut().for_each(|bound| *bound = bound.max(ROUNDOFF));
                check(&format!("{buffer:?}"), &expected, &Tensor::new(&[groups], values).expect("a row"));
            }
        }
    }

    /// What the backward pass computes is what it should; what was unusual.
    pub fn check_backward(&self, plan: &Plan, request: &Request) -> BTreeSet<&'static str> {
        let (wanted, saved, least) = match request.task {
            Task::Backward(wanted) => (wanted, &self.saved, 0.0),
            Task::Recompute(wanted) => (wanted, &Saved::default(), AGAIN),
            _ => panic!("{request:?}"),
        };
        let mut machine = self.machine(plan, request);
        let width = self.dtype.size();
        machine.fill(Buffer::GradOutput, width, &in_memory(&self.grad_output, request.output_format));
        let Saved { convolution, mean, rstd } = saved;
        if let Some(convolution) = convolution {
            machine.fill(Buffer::Convolution, width, &in_memory(convolution, request.output_format));
        }
        for (buffer, tensor) in [(Buffer::Mean, mean), (Buffer::Rstd, rstd)] {
            let width = self.dtype.accumulator().size();
            tensor.iter().for_each(|tensor| machine.fill(buffer, width, &tensor.to_f64()));
        }
        let Gradients { input, weight, bias, norm_weight, norm_bias } = self.gradients();
        let vector = [request.geometry.conv().out_channels()];
        let (of_input, of_weight) = (request.geometry.input_shape(), request.geometry.conv().weight_shape());
        let gradients = [
            (Buffer::GradInput, wanted.input, input, &of_input[..]),
            (Buffer::GradWeight, wanted.weight, weight, &of_weight),
            (Buffer::GradBias, wanted.bias, bias, &vector),
            (Buffer::GradNormWeight, wanted.norm_weight, norm_weight, &vector),
            (Buffer::GradNormBias, wanted.norm_bias, norm_bias, &vector),
        ];
        for (buffer, wanted, _, shape) in gradients {
            machine.allocate(buffer, if wanted { shape.iter().product::<usize>() * width } else { 0 });
        }
        machine.run(plan, contracts::run);
        let wider = if is_halved(plan) { HALVED / ROUNDOFF } else { 1.0 };
        for (buffer, _, expected, shape) in gradients.into_iter().filter(|gradient| gradient.1) {
            let format = if buffer == Buffer::GradInput { request.input_format } else { FORMATS[0] };
            let got = Tensor::with_format(shape, format, Data::F64(machine.values(buffer, width)));
            let mut expected = expected.clone().expect("a gradient of what the block has");
            let by = if [Buffer::GradInput, Buffer::GradWeight].contains(&buffer) { wider } else { 1.0 };
            expected.bounds.iter_mut().for_each(|bound| *bound = (*bound * by).max(least));
            check(&format!("{buffer:?}"), &expected, &got.expect("as many values"));
        }
        let calls = launches(plan);
        let short = calls.iter().any(|call| call.has("class_panels")).then_some("taps that are there");
        let halves = calls.iter().filter(|call| call.kernel() == "halo_gemm" && call.size("KIND") == 2);
        let halves: Vec<_> = halves.map(|call| call.variant.name).collect();
        let calls = calls.iter().filter(|call| call.variant.family == "gradient");
        calls.flat_map(|call| gradient::features(call, &machine)).chain(short).chain(halves).collect()
    }
}

/// A tensor's values in the order of a format.
fn in_memory(tensor: &Tensor, format: MemoryFormat) -> Vec<f64> {
    let Data::F64(values) = tensor.cast(DType::F64, format).expect("of rank 5").into_data() else {
        unreachable!("it was cast")
    };
    values
}

fn check(what: &str, expected: &Expected, got: &Tensor) {
    let deviation = compare(expected, got);
    assert!(deviation.is_ok(), "{what}: {deviation}");
}

/// Plans a request and holds the plan against what the kernels ask for.
pub fn planned(example: &Example, request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Plan {
    let plan = Plan::new(request, device, variants).expect("a plan");
    let Request { task, dtype, precision, input_format, output_format, .. } = request;
    println!("{}; {task:?}, {dtype}, {precision}, {input_format}, {output_format}; {plan}", example.case);
    launches(&plan).iter().for_each(|call| fits(call, &plan, &format!("{request:?}")));
    plan
}

/// Whether what a backward pass multiplies is two fp16.
fn is_halved(plan: &Plan) -> bool {
    plan.to_string().starts_with("backward, two fp16")
}

/// Plans of a backward pass whose operands are scaled to fp16, held against what the kernels ask for.
pub fn scaled(request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Vec<Plan> {
    let plans = Plan::candidates(request, device, variants, 32).expect("plans");
    // What goes without rows has tests of its own.
    let is_scaled = |plan: &Plan| {
        let what = plan.to_string();
        (is_halved(plan) || what.starts_with("backward, scaled")) && !what.contains("both by")
    };
    let plans: Vec<_> = plans.into_iter().filter(is_scaled).collect();
    for plan in &plans {
        launches(plan).iter().for_each(|call| fits(call, plan, &format!("{request:?}")));
    }
    plans
}

/// What the table has not, and why.
const ROWS: [(&str, &str); 11] = [
    ("n 1, 31x33x35, 1>2, k 1, bias, relu, gn 2", "chunks of a row, rows that start in a vector"),
    ("n 1, 32x32x32, 1>2, k 1, silu, gn 2 plain", "a last chunk without elements"),
    ("n 1, 12x13x30, 1>36, k 1, bias, gelu", "chunks of positions, threads without channels"),
    ("n 1, 5x5x41, 1>255, k 1, relu, gn 3", "more chunks than a warp has lanes"),
    ("n 2, 1x2x2, 1>1032, k 1, bias, gn 3, relu", "blocks of channels of four"),
    ("n 1, 1x2x2, 1>259, k 1, leaky_relu(0.1)", "blocks of channels one by one"),
    ("n 40, 1x2x2, 2>3, k 1x1x2, bias, gn 1", "more samples than a warp has lanes"),
    ("n 1, 16x16x16, 3>5, k 3, p 1", "shares, and splits of the definition's"),
    ("n 2, 2x3x8, 140>36, k 2x1x3, g 2, relu", "tiles of channels on both sides, shifts past the last"),
    ("n 1, 1x1x2200, 1>1, k 1x1x5, p 0x0x2", "many shares of one line"),
    ("n 2, 3x4x6, 12>20, k 4x3x5, s 2x1x2, p 1, bias, gn 4", "classes of several taps each"),
];

fn own() -> impl Iterator<Item = Case> {
    ROWS.iter().map(|(line, why)| Case::parse("training", line, why).expect("a valid case"))
}

/// A device's kernels with one that multiplies gradients for the weight's of each kind of numbers alone, a tile of
/// `weight_gradient`, then none, then `weight_gradient_lines`, then `weight_gradient_narrow`; or for 0 with all.
fn with_tile(variants: &[Variant], tile: usize) -> Vec<&Variant> {
    let of_kind = |variant: &Variant| (variant.entry, variant.types, variant.param("KIND"));
    let kept = |&(at, variant): &(usize, &Variant)| {
        let before = variants[..at].iter().filter(|other| of_kind(other) == of_kind(variant));
        let before = match variant.entry {
            "weight_gradient" => before.count() + 1,
            "weight_gradient_lines" => before.count() + TILES + 2,
            "weight_gradient_narrow" => TILES + LINES + 2,
            _ => tile,
        };
        tile == 0 || before == tile
    };
    variants.iter().enumerate().filter(kept).map(|(_, variant)| variant).collect()
}

/// The most tiles of `weight_gradient` that there are for a kind of numbers.
const TILES: usize = 5;
/// The most kernels of `weight_gradient_lines`.
const LINES: usize = 2;

/// How a case is run: in turn with each pair of formats, with all tiles, each alone and none, and each family for the
/// input's gradient.
pub struct Turn {
    pub formats: [MemoryFormat; 2],
    tile: usize,
    pub algorithm: Option<Algorithm>,
}

impl Turn {
    pub fn new(turn: usize) -> Turn {
        let formats = [turn % 2, turn / 2 % 2].map(|format| FORMATS[format]);
        // All but those that the input's gradient has none of; then the plan's choice.
        let others =
            [Algorithm::GatherGemm, Algorithm::Pointwise, Algorithm::ShuffleRing, Algorithm::ShuffleWgmma];
        let families: Vec<_> = Algorithm::ALL.into_iter().filter(|one| !others.contains(one)).collect();
        let algorithm = families.get(turn / 4 % (families.len() + 1)).copied();
        Turn { formats, tile: turn % (TILES + LINES + 3), algorithm }
    }
}

/// Runs the backward pass of a case, and the forward pass if that is asked for.
fn passes(
    example: &Example,
    precision: Precision,
    turn: usize,
    with_forward: bool,
) -> BTreeSet<&'static str> {
    let ([_, hopper, _], Turn { formats, tile, algorithm }) = (devices(), Turn::new(turn));
    let all = variants_for(hopper.arch);
    // What computes both gradients of few channels at once has tests of its own.
    let mut variants = with_tile(&all, tile);
    variants.retain(|variant| variant.entry != "plane_gradient");
    let of = |task| Request { algorithm, ..example.request(task, precision, formats) };
    let mut found = BTreeSet::new();
    if with_forward {
        let request = Request { algorithm: None, ..of(Task::Training) };
        let plan = planned(example, &request, &hopper, &variants);
        example.check_forward(&plan, &request);
        let calls = launches(&plan).into_iter().filter(|call| call.variant.family == "gradient");
        found.extend(calls.flat_map(|call| gradient::features(&call, &Machine::new(0))));
    }
    let wanted = wanted_of(&example.case.block, Wanted::ALL);
    for task in [Task::Backward(wanted), Task::Recompute(wanted)] {
        let request = of(task);
        let plan = planned(example, &request, &hopper, &variants);
        let features = example.check_backward(&plan, &request);
        // Which of the table's cases have both gradients at once depends on their turns; that kernel has tests of its own.
        if launches(&plan).iter().all(|call| call.kernel() != "shuffle_gradient") {
            found.extend(features);
        }
        // What is scaled to fp16 is seldom expected to be faster where there is so little.
        for plan in scaled(&request, &hopper, &variants).iter().take(1) {
            println!("{plan}");
            found.extend(example.check_backward(plan, &request));
        }
    }
    found
}

/// Runs all cases of a type.
fn check_all(dtype: DType, precision: Precision, first: usize) -> BTreeSet<&'static str> {
    let mut found = BTreeSet::new();
    let table = cases().into_iter().filter(|case| case.batch != Some(0)).map(|case| (case, 1));
    for (turn, (case, formats)) in (first..).zip(table.chain(own().map(|case| (case, 2)))) {
        let example = Example::new(&case, dtype, |_| {});
        for turn in [turn, turn + 2].into_iter().take(formats) {
            found.extend(passes(&example, precision, turn, true));
        }
    }
    found
}

#[test]
fn gradients_of_f32_are_those_of_the_definition() {
    let mut found = check_all(DType::F32, Precision::Ieee, 0);
    found.extend(check_all(DType::F32, Precision::Tf32, 1));
    // Those of lines, and of two fp16, have tests of their own.
    let own = ["by lines: ", "halo_gemm_2", "weight_gradient_lines_2", "weight_gradient_narrow_2"];
    found.retain(|what| !own.iter().any(|own| what.starts_with(own)));
    let (tiles, found): (BTreeSet<_>, BTreeSet<_>) =
        found.into_iter().partition(|what| what.starts_with("weight_gradient_"));
    let all = variants_for(devices()[1].arch);
    let of_f32 = all.iter().filter(|variant| {
        let names = ["weight_gradient", "weight_gradient_lines", "weight_gradient_narrow"];
        let halves = variant.types == ["f16"] && variant.entry == "weight_gradient_narrow";
        let two = variant.param("KIND") == Some(2);
        names.contains(&variant.entry) && !two && (variant.types.is_empty() || halves)
    });
    assert_eq!(tiles, of_f32.map(|variant| variant.name).collect());
    let expected = [
        "a chunk without elements",
        "all shifts: blocks of columns",
        "all shifts: columns past the last",
        "all shifts: panels",
        "all shifts: shares",
        "all shifts: tiles of slots",
        "blocks of channels",
        "blocks of channels of rows",
        "blocks that do nothing",
        "channels of rows one by one",
        "channels one by one",
        "chunks of a row",
        "chunks of a sample",
        "classes",
        "groups",
        "groups of the weight",
        "less than a vector",
        "more channels of a group than a block has warps",
        "more chunks than a warp has lanes",
        "more samples than a warp has lanes",
        "nothing behind the convolution",
        "panels of rows",
        "rows apart along width",
        "rows of a bare convolution",
        "rows of channels last",
        "rows that are rounded",
        "rows that start in a vector",
        "shares",
        "shifts along all axes",
        "shifts at once",
        "shifts past the last",
        "slots past the last class",
        "some vectors alone",
        "splits",
        "the weight by the definition",
        "threads without channels",
        "tiles of the gradient's channels",
        "tiles of the input's channels",
    ];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn gradients_of_narrow_types_are_those_of_the_definition() {
    check_all(DType::Bf16, Precision::Ieee, 2);
    check_all(DType::F16, Precision::Ieee, 3);
}

#[test]
fn gradients_of_f64_are_those_of_the_definition() {
    let found = check_all(DType::F64, Precision::Ieee, 0);
    let expected = [
        "a chunk without elements",
        "blocks of channels",
        "blocks of channels of rows",
        "channels of rows one by one",
        "channels one by one",
        "chunks of a row",
        "chunks of a sample",
        "classes",
        "groups",
        "less than a vector",
        "more channels of a group than a block has warps",
        "more chunks than a warp has lanes",
        "more samples than a warp has lanes",
        "nothing behind the convolution",
        "rows of a bare convolution",
        "rows of channels last",
        "rows that start in a vector",
        "slots past the last class",
        "some vectors alone",
        "splits",
        "the input by the definition",
        "the weight by the definition",
        "threads without channels",
    ];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn gradients_of_random_cases_are_those_of_the_definition() {
    for (turn, seed) in (0..300).enumerate() {
        let case = random_case(seed);
        if case.batch != Some(0) {
            println!("seed {seed}");
            let example = Example::new(&case, DType::ALL[turn % 4], |_| {});
            passes(&example, Precision::ALL[turn / 4 % 2], turn / 3, turn.is_multiple_of(5));
        }
    }
}

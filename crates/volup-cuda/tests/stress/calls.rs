//! What is computed: cases of every kernel family in every type, and the results of each call alone.

use crate::watchdog::UnderWay;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use volup::reference::forward;
use volup::testing::{Case, Fill, check_gradients, compare, tensor};
use volup::{DType, Engine, Gradients, Parameters, Precision, Result, Saved, Tensor, Training, Wanted};
use volup_cuda::{
    Algorithm, Arch, CudaEngine, Device, DeviceInfo, Executable, Manifest, Plan, Pointers, Request, Step,
    Task, Variant,
};

/// Of all tensors.
const SEED: u64 = 1;
/// What lies between tensors, and what a result holds before it is computed: NaN in every type.
pub const UNWRITTEN: u32 = u32::MAX;
/// Bytes that a tensor starts at a multiple of, and the least between two.
const ALIGNMENT: usize = 256;

/// What is computed, and why. Small enough that plans on several streams share the device, large enough for
/// every family.
const ROWS: [(&str, &str); 19] = [
    ("n 2, 4x8x16, 32>48, k 3, p 1, bias, relu, gn 8, silu", "the dense block"),
    ("n 6, 4x6x8, 64>32, k 3, p 1, relu, gn 8", "normalized beside the product"),
    ("n 2, 4x8x16, 32>32, k 3, s 2, p 1, op 1, bias", "eight phases"),
    ("n 2, 4x8x12, 32>32, k 3, s 2, p 1, op 1, bias, relu, gn 32, channels_last_3d", "the same in NDHWC"),
    ("n 2, 6x8x16, 64>32, k 2, s 2, bias", "the kernel is the stride"),
    ("n 2, 8x16x16, 32>16, k 2, s 2, bias, relu, gn 4", "and its block may be computed twice"),
    ("n 2, 16x32x32, 32>16, k 2, s 2, bias, relu, gn 4", "by warpgroups, of larger volumes"),
    ("n 2, 4x8x12, 64>32, k 2, s 2, bias, silu, gn 32, channels_last_3d", "or not"),
    ("n 8, 8x16x16, 3>16, k 3, s 2, p 1, bias, silu, gn 4, hardswish", "three input channels"),
    ("n 2, 8x12x24, 32>32, k 3, s 2, p 1, g 4", "groups"),
    ("n 2, 6x12x24, 16>16, k 3x5x7, s 2, p 1x2x3, op 1, g 4", "an asymmetric kernel"),
    ("n 2, 8x12x12, 16>32, k 3, s 2, p 1, d 2, bias", "7 of 8 phases have no tap"),
    ("n 1, 2x8x8, 320>48, k 2, s 2, bias", "many channels, few voxels"),
    ("n 2, 8x8x8, 1>8, k 3, tanh", "a single input channel"),
    ("n 4, 16x16x32, 8>1, k 3, p 1, bias, sigmoid", "a single output channel"),
    ("n 2, 5x7x9, 17>33, k 3, s 2, p 1, bias, gelu, gn 3, tanh", "odd sizes"),
    ("n 2, 5x6x7, 20>18, k 3x1x2, s 1x2x3, relu, gn 6 plain, channels_last_3d", "an anisotropic stride"),
    ("n 16, 2x3x4, 8>12, k 4, s 2, p 1, bias, leaky_relu(0.1)", "many samples"),
    ("unbatched, 1x1x1, 2>3, k 1, bias", "one voxel"),
];

/// Types, and how float32 is multiplied.
const KINDS: [(DType, Precision); 5] = [
    (DType::F32, Precision::Ieee),
    (DType::F32, Precision::Tf32),
    (DType::F16, Precision::Ieee),
    (DType::Bf16, Precision::Ieee),
    (DType::F64, Precision::Ieee),
];

/// What only plans of larger outputs launch unless they are asked to, of the forward pass and of the backward pass.
const OF_LARGER: [&str; 3] = ["direct_norm", "group_merge", "half_scale"];
const OF_LARGER_BACKWARD: &str = "half_input";

/// Tensors in one piece of memory, with some of it between them.
#[derive(Default)]
pub struct Packed {
    /// The memory.
    pub bytes: Vec<u8>,
    places: Vec<(Field, u64)>,
}

/// Whose address it is.
type Field = fn(&mut Pointers) -> &mut u64;

impl Packed {
    fn add(&mut self, field: Field, tensor: Option<&Tensor>) {
        let Some(tensor) = tensor else { return };
        self.places.push((field, self.bytes.len() as u64));
        self.bytes.extend_from_slice(tensor.data().as_bytes());
        let end = self.bytes.len().next_multiple_of(ALIGNMENT) + ALIGNMENT;
        self.bytes.resize(end, UNWRITTEN as u8);
    }

    /// Says where the tensors are if the memory starts at an address.
    pub fn place(&self, start: u64, pointers: &mut Pointers) {
        for (field, at) in &self.places {
            *field(pointers) = start + at;
        }
    }

    /// Its size in words of 32 bits.
    pub fn words(&self) -> usize {
        self.bytes.len() / 4
    }
}

/// A call: what is launched, for which tensors, and what they give alone.
pub struct Call {
    /// In words.
    pub what: String,
    /// What is launched.
    pub plan: Executable,
    /// The tensors that it reads.
    pub given: Packed,
    /// Its results.
    pub results: Packed,
}

/// A case in a type with its tensors.
struct Sample {
    case: Case,
    precision: Precision,
    /// Whether the input holds an infinity: fast paths then leave the call to the definition.
    infinite: bool,
    input: Tensor,
    parameters: Parameters,
}

/// The passes of training and what they are given.
struct Trained {
    output: Tensor,
    saved: Saved<Tensor>,
    grad_output: Tensor,
    gradients: Gradients<Tensor>,
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let special = if self.infinite { ", an infinity" } else { "" };
        write!(f, "{}, {}, {}{special}", self.case, self.input.dtype(), self.precision)
    }
}

/// All of them.
fn samples() -> Vec<Sample> {
    let mut samples = Vec::new();
    for (line, why) in ROWS {
        let case = Case::parse("case", line, why).expect("a valid case");
        for (dtype, precision) in KINDS {
            let (input, parameters) = case.inputs(dtype, Fill::Normal, SEED);
            if case.block.is_bare() && dtype == DType::F32 {
                let mut values = input.to_f64();
                let middle = values.len() / 2;
                values[middle] = f64::INFINITY;
                let input = Tensor::new(input.shape(), values).and_then(|x| x.cast(dtype, case.format));
                let (case, parameters) = (case.clone(), parameters.clone());
                let input = input.expect("a tensor of the same shape");
                samples.push(Sample { case, precision, infinite: true, input, parameters });
            }
            let case = case.clone();
            samples.push(Sample { case, precision, infinite: false, input, parameters });
        }
    }
    samples
}

/// A plan, what it is for, and the kernel that was asked for, if one was.
type Asked = (Request, Option<&'static str>, Plan);

/// Every different plan of a sample: of its output by each family, and of its passes of training.
fn plans(sample: &Sample, device: &DeviceInfo, variants: &[&Variant]) -> Result<Vec<Asked>> {
    let (block, format) = (sample.case.block, sample.case.format);
    let forward = Request {
        task: Task::Forward,
        block,
        geometry: sample.case.geometry(),
        dtype: sample.input.dtype(),
        precision: sample.precision,
        input_format: format,
        output_format: format,
        algorithm: None,
    };
    let mut requests = vec![forward];
    requests.extend(Algorithm::ALL.map(|algorithm| Request { algorithm: Some(algorithm), ..forward }));
    if !sample.infinite {
        let affine = block.norm().is_some_and(|norm| norm.affine());
        let bias = block.conv().has_bias();
        let wanted = Wanted { input: true, weight: true, bias, norm_weight: affine, norm_bias: affine };
        requests.push(Request { task: Task::Backward(wanted), ..forward });
        // Training keeps nothing of a convolution alone.
        if !block.is_bare() {
            requests.push(Request { task: Task::Training, ..forward });
        }
    }
    let mut plans = Vec::<Asked>::new();
    for &request in &requests {
        let plan = Plan::new(&request, device, variants)?;
        if plans.iter().all(|(.., other)| other.steps != plan.steps) {
            plans.push((request, None, plan));
        }
    }
    let backward = requests.iter().find(|request| matches!(request.task, Task::Backward(_)));
    let larger = OF_LARGER.map(|kernel| (&forward, kernel)).into_iter();
    for (request, kernel) in larger.chain(backward.map(|request| (request, OF_LARGER_BACKWARD))) {
        let plan = Plan::with_kernel(request, device, variants, kernel)?;
        plans.extend(plan.map(|plan| (*request, Some(kernel), plan)));
    }
    Ok(plans)
}

/// All calls, with their results: each computed alone, by an engine, and compared with the oracle.
///
/// # Panics
/// If a result is wrong.
pub fn calls(device: &Arc<Device>, under_way: &UnderWay) -> Result<Vec<Call>> {
    let variants = Manifest::embedded().for_device(device.info())?;
    let mut calls = Vec::new();
    for sample in samples() {
        under_way.set("alone", sample.to_string());
        sample.add_calls(device, &variants, &mut calls)?;
    }
    under_way.clear("alone");
    Ok(calls)
}

impl Sample {
    fn add_calls(&self, device: &Arc<Device>, variants: &[&Variant], calls: &mut Vec<Call>) -> Result<()> {
        let (case, dtype) = (&self.case, self.input.dtype());
        let engine = || CudaEngine::new(device.ordinal(), self.precision);
        let roundoff = engine()?.operand_roundoff(dtype);
        let expected = forward(&case.block, &case.geometry(), &self.parameters, &self.input, roundoff);
        let by_plan = if self.infinite { None } else { Some(self.trained(&engine()?)?) };
        for (request, kernel, plan) in plans(self, device.info(), variants)? {
            let engine = || engine()?.with_kernel(kernel.map(String::from));
            let asked = kernel.is_some() && request.task != Task::Forward;
            let trained = if asked { Some(self.trained(&engine()?)?) } else { None };
            let trained = trained.as_ref().or(by_plan.as_ref());
            let task = match request.task {
                Task::Forward => "forward",
                Task::Training => "forward for training",
                Task::Backward(_) | Task::Recompute(_) => "backward",
            };
            let what = format!("{self}, {task}, {plan}");
            let (mut given, mut results) = (self.given(), Packed::default());
            match (request.task, trained) {
                (Task::Forward, _) => {
                    let engine = engine()?.with_algorithm(request.algorithm);
                    let output = self.output(&engine)?;
                    let deviation = compare(&expected, &output);
                    assert!(deviation.is_ok(), "{what}: {deviation}");
                    results.add(|to| &mut to.output, Some(&output));
                }
                (Task::Training, Some(trained)) => {
                    results.add(|to| &mut to.output, Some(&trained.output));
                    add_saved(&mut results, &trained.saved);
                }
                (Task::Backward(_) | Task::Recompute(_), Some(trained)) => {
                    add_saved(&mut given, &trained.saved);
                    given.add(|to| &mut to.grad_output, Some(&trained.grad_output));
                    let Gradients { input, weight, bias, norm_weight, norm_bias } = &trained.gradients;
                    results.add(|to| &mut to.grad_input, input.as_ref());
                    results.add(|to| &mut to.grad_weight, weight.as_ref());
                    results.add(|to| &mut to.grad_bias, bias.as_ref());
                    results.add(|to| &mut to.grad_norm_weight, norm_weight.as_ref());
                    results.add(|to| &mut to.grad_norm_bias, norm_bias.as_ref());
                }
                (_, None) => unreachable!("an infinity is not trained with"),
            }
            calls.push(Call { what, plan: Executable::of(device, plan)?, given, results });
        }
        Ok(())
    }

    /// The input and the parameters.
    fn given(&self) -> Packed {
        let mut given = Packed::default();
        given.add(|to| &mut to.input, Some(&self.input));
        given.add(|to| &mut to.weight, Some(&self.parameters.weight));
        given.add(|to| &mut to.bias, self.parameters.bias.as_ref());
        given.add(|to| &mut to.norm_weight, self.parameters.norm_weight.as_ref());
        given.add(|to| &mut to.norm_bias, self.parameters.norm_bias.as_ref());
        given
    }

    fn output(&self, engine: &CudaEngine) -> Result<Tensor> {
        let layer = engine.layer(&self.case.block, &self.parameters)?;
        engine.download(engine.forward(&layer, &engine.upload(self.input.clone())?)?)
    }

    /// The passes of training, which were compared with the oracle for the same tensors.
    fn trained(&self, engine: &CudaEngine) -> Result<Trained> {
        let (case, dtype) = (&self.case, self.input.dtype());
        check_gradients(engine, case, dtype, Fill::Normal, SEED)
            .unwrap_or_else(|failure| panic!("{failure}"));
        // The gradient that it takes.
        let shape = case.output_shape();
        let grad_output = tensor(&shape, dtype, case.format, Fill::Normal, 1.0, SEED ^ (5 << 56));
        let layer = engine.layer(&case.block, &self.parameters)?;
        let input = engine.upload(self.input.clone())?;
        let (output, saved) = engine.forward_for_training(&layer, &input)?;
        let of_output = engine.upload(grad_output.clone())?;
        let gradients = engine.backward(&layer, &input, &saved, &of_output, Wanted::ALL)?;
        let host = |tensor: Option<_>| tensor.map(|tensor| engine.download(tensor)).transpose();
        let Saved { convolution, mean, rstd } = saved;
        let Gradients { input, weight, bias, norm_weight, norm_bias } = gradients;
        Ok(Trained {
            output: engine.download(output)?,
            saved: Saved { convolution: host(convolution)?, mean: host(mean)?, rstd: host(rstd)? },
            grad_output,
            gradients: Gradients {
                input: host(input)?,
                weight: host(weight)?,
                bias: host(bias)?,
                norm_weight: host(norm_weight)?,
                norm_bias: host(norm_bias)?,
            },
        })
    }
}

fn add_saved(to: &mut Packed, saved: &Saved<Tensor>) {
    to.add(|to| &mut to.convolution, saved.convolution.as_ref());
    to.add(|to| &mut to.mean, saved.mean.as_ref());
    to.add(|to| &mut to.rstd, saved.rstd.as_ref());
}

/// Needs kernels and no GPU.
#[test]
fn every_function_of_every_family_is_launched() {
    let hopper = DeviceInfo {
        name: "Hopper".into(),
        arch: Arch { major: 9, minor: 0 },
        multiprocessors: 132,
        l2_bytes: 60 << 20,
        memory_bytes: 141 << 30,
        memory_rate: 0,
        driver_version: 13000,
    };
    let Ok(variants) = Manifest::embedded().for_device(&hopper) else {
        println!("skipped: there are no kernels for Hopper");
        return;
    };
    let mut left: BTreeSet<(&str, &str)> = variants.iter().map(|v| (v.family, v.entry)).collect();
    for sample in samples() {
        for (.., plan) in plans(&sample, &hopper, &variants).unwrap() {
            // What is computed alone is by layers that keep their weight packed.
            let packed = plan.prepacked().map_or_else(Vec::new, |plans| plans.block.steps);
            for step in plan.steps.iter().chain(&packed) {
                if let Step::Launch { variant, .. } = step {
                    left.remove(&(variant.family, variant.entry));
                }
            }
        }
    }
    assert!(left.is_empty(), "{left:?}");
}

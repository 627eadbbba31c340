//! The suite of engines, without a GPU: plans' launches of CUDA C++ run as `nvcc` compiled them, from their PTX, on
//! the CPU; those of other kernels by their contracts.
//!
//! `VOLUP_PTX` names the folder of the PTX, one file a variant: `make kernels-check` and `make emulate` do. Without
//! it there is nothing to run, and tests say so. `VOLUP_PTX_TOOL` names what makes those that are missing or of older sources.
//! With `VOLUP_PTX_FEW` plans make do with fewer of them, of the same kinds.

mod both;
mod dense;
mod few_channels;
mod gradients;
mod magnitudes;
mod one_tap;
mod statistics;

use super::contracts;
use super::machine::{BUFFERS, Bytes, Call, Machine};
use super::manifest::{variants_for, with_multiprocessors};
use super::norm_behind;
use super::pointwise_plans;
use super::training::wanted_of;
use super::{FORMATS, LARGE};
use crate::engine::operand_roundoff;
use crate::plan::{Argument, Buffer, Plan, Request, Task};
use crate::{Algorithm, DeviceInfo, Variant};
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::OsString;
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};
use volup::testing::{
    Case, Fill, check, check_gradients, compare, conformance, random_case, training_conformance,
};
use volup::{
    BlockSpec, DType, Element, Engine, Error, Geometry, Gradients, MemoryFormat, Parameters, Precision,
    Result, Saved, Tensor, Training, Wanted, reference, with_element,
};
use volup_ptx::{Counters, Launch, Memory, Module};

/// Kernels that are not CUDA C++ whose contracts tell what they write to the last bit that matters; those of other
/// families write parts of numbers as the contracts choose them.
const BY_CONTRACT: [&str; 4] = ["direct_", "norm_", "pack_largest", "pack_weight_scale"];

/// Where the PTX is.
fn folder() -> Option<PathBuf> {
    std::env::var_os("VOLUP_PTX").map(PathBuf::from)
}

/// Makes a variant's PTX, unless it is there and of today's sources.
fn compile(tool: OsString, name: &str) {
    let variants = concat!(env!("CARGO_MANIFEST_DIR"), "/../volup-kernels/variants.toml");
    let folder = folder().expect("a folder");
    let mut command = Command::new(tool);
    command
        .args(["--variants", variants, "--ptx", name, "--out"])
        .arg(folder.parent().expect("a folder around it"));
    let output = command.output().expect("VOLUP_PTX_TOOL can be run");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A variant's kernel, read once.
fn module(name: &'static str) -> Arc<Module> {
    type Read = Mutex<HashMap<&'static str, Arc<OnceLock<Arc<Module>>>>>;
    static READ: OnceLock<Read> = OnceLock::new();
    let own = READ.get_or_init(Mutex::default).lock().unwrap().entry(name).or_default().clone();
    // Others are read meanwhile.
    let fresh = || {
        if let Some(tool) = std::env::var_os("VOLUP_PTX_TOOL") {
            compile(tool, name);
        }
        let path = folder().expect("a folder").join(format!("{name}.ptx"));
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Arc::new(Module::parse(&text).unwrap_or_else(|fault| panic!("{name}: {fault}")))
    };
    own.get_or_init(fresh).clone()
}

/// Another order of what happens at the same time for each launch: the same bits have to come of all.
fn next_seed() -> u64 {
    thread_local! { static LAST: Cell<u64> = const { Cell::new(0) } }
    LAST.set(LAST.get() + 1);
    LAST.get()
}

/// Does what a launch does.
fn launch(call: &Call<'_>, machine: &mut Machine) {
    if !call.variant.exact {
        return contracts::run(call, machine);
    }
    let Bytes { memory, starts } = machine.compiled.as_mut().expect("bytes");
    let mut arguments: Vec<u8> = Vec::new();
    for argument in call.arguments {
        let bytes = match *argument {
            Argument::Pointer(buffer, at) => {
                let start = starts[buffer as usize];
                (if start == 0 { 0 } else { start + at }).to_le_bytes().to_vec()
            }
            Argument::I32(value) => value.to_le_bytes().to_vec(),
            Argument::I64(value) => value.to_le_bytes().to_vec(),
            Argument::F32(value) => value.to_le_bytes().to_vec(),
            Argument::F64(value) => value.to_le_bytes().to_vec(),
        };
        arguments.resize(arguments.len().next_multiple_of(bytes.len()), 0);
        arguments.extend(bytes);
    }
    let launch = Launch {
        grid: call.grid.map(|blocks| blocks as u32),
        threads: call.variant.threads,
        shared: call.shared as u32,
        arguments,
        seed: next_seed(),
    };
    // What one block has written another one normalizes.
    let handed = norm_behind::is_asked(call).then(|| starts[Buffer::Output as usize]);
    let hand_over = |memory: &mut Memory, allowed| {
        handed.iter().for_each(|&at| memory.hand_over(at, allowed).expect("an output"));
    };
    hand_over(memory, true);
    let before = memory.counters();
    let ran = module(call.variant.name).run(&launch, memory);
    hand_over(memory, false);
    ran.unwrap_or_else(|fault| panic!("{}: {fault}", call.variant.name));
    let after = memory.counters();
    let since = |of: fn(&Counters) -> u64| of(&after) - of(&before);
    println!(
        "  {}: {} instructions; shared memory {} requests, {} wavefronts; sectors {} read, {} written, {} of them in part; \
         bytes {} copied, {} stored; products {} and {}",
        call.variant.name,
        since(|counters| counters.instructions),
        since(|counters| counters.shared_requests),
        since(|counters| counters.shared_wavefronts),
        since(|counters| counters.sectors_read),
        since(|counters| counters.sectors_written),
        since(|counters| counters.sectors_written_in_part),
        since(|counters| counters.bytes_copied),
        since(|counters| counters.bytes_stored),
        since(|counters| counters.products),
        since(|counters| counters.group_products),
    );
}

/// A GPU of few multiprocessors that is a program.
struct Emulated {
    device: DeviceInfo,
    variants: Vec<Variant>,
    precision: Precision,
    algorithm: Option<Algorithm>,
    kernel: Option<&'static str>,
    /// The format of a forward pass's output where it is not the input's.
    output: Option<MemoryFormat>,
    /// What the forward pass's plan is to say, if one does, and how many did.
    saying: Option<&'static str>,
    said: Cell<usize>,
}

/// A block and its parameters.
struct Layer {
    block: BlockSpec,
    dtype: DType,
    parameters: Parameters,
}

/// Sizes that say how large the tiles are.
const OF_TILES: [&str; 13] = [
    "BN",
    "CTAS",
    "LINES",
    "MI",
    "MT",
    "POS_WARPS",
    "ROW_WARPS",
    "SEGMENTS",
    "STAGES",
    "WARPGROUPS",
    "WARPS",
    "WARP_ROWS",
    "WGS",
];

/// Leaves each third of the kernels in CUDA C++ that differ in the size of their tiles alone: compiling the others takes longer than
/// running them does.
fn few(variants: &mut Vec<Variant>) {
    let mut counts = HashMap::new();
    variants.retain(|variant| {
        let of_kind = variant.params.iter().filter(|(name, _)| !OF_TILES.contains(name));
        let kind = (variant.entry, variant.types, of_kind.collect::<Vec<_>>());
        let count = counts.entry(kind).or_insert(0);
        *count += 1;
        !variant.exact || *count % 3 == 1
    });
}

impl Emulated {
    fn new(multiprocessors: usize, precision: Precision, algorithm: Option<Algorithm>) -> Emulated {
        let device = with_multiprocessors(multiprocessors);
        let mut variants = variants_for(device.arch);
        variants
            .retain(|variant| variant.exact || BY_CONTRACT.iter().any(|name| variant.name.starts_with(name)));
        // Arithmetic of pairs of 16 bits is not interpreted.
        variants.retain(|variant| variant.entry != "plane_gradient");
        if std::env::var_os("VOLUP_PTX_FEW").is_some() {
            few(&mut variants);
        }
        let (kernel, output, saying) = (None, None, None);
        Emulated { device, variants, precision, algorithm, kernel, output, saying, said: Cell::new(0) }
    }

    /// Types to compute a case in: the precision says nothing of 16 bits.
    fn types(&self) -> &'static [DType] {
        if self.precision == Precision::Ieee { &NARROW } else { &NARROW[..1] }
    }

    /// The best plan, or that which was asked for.
    fn plan(
        &self,
        layer: &Layer,
        geometry: &Geometry,
        task: Task,
        formats: [MemoryFormat; 2],
    ) -> Result<Plan> {
        let request = Request {
            task,
            block: layer.block,
            geometry: *geometry,
            dtype: layer.dtype,
            precision: self.precision,
            input_format: formats[0],
            output_format: formats[1],
            algorithm: self.algorithm,
        };
        let variants: Vec<&Variant> = self.variants.iter().collect();
        if let Some(kernel) = self.kernel
            && let Some(plan) = Plan::with_kernel(&request, &self.device, &variants, kernel)?
        {
            return Ok(plan);
        }
        if let Some(words) = self.saying {
            let plans = Plan::candidates(&request, &self.device, &variants, usize::MAX)?;
            if let Some(plan) =
                plans.into_iter().find(|plan| words.split(" .. ").all(|part| plan.to_string().contains(part)))
            {
                self.said.set(self.said.get() + 1);
                return Ok(plan);
            }
        }
        Plan::new(&request, &self.device, &variants)
    }

    /// Runs a plan on tensors; those of the second list are what it writes.
    fn run(
        &self,
        plan: &Plan,
        layer: &Layer,
        given: &[(Buffer, &Tensor)],
        written: &[(Buffer, usize)],
    ) -> Bytes {
        let mut bytes = Bytes { memory: Memory::new(), starts: [0; BUFFERS] };
        let Parameters { weight, bias, norm_weight, norm_bias } = &layer.parameters;
        let optional =
            [(Buffer::Bias, bias), (Buffer::NormWeight, norm_weight), (Buffer::NormBias, norm_bias)];
        let parameters = optional.into_iter().filter_map(|(buffer, tensor)| Some((buffer, tensor.as_ref()?)));
        for (buffer, tensor) in given.iter().copied().chain([(Buffer::Weight, weight)]).chain(parameters) {
            let data = tensor.data().as_bytes();
            let at = bytes.memory.allocate("a tensor", data.len());
            bytes.memory.fill(at, data).expect("as many bytes");
            bytes.starts[buffer as usize] = at;
        }
        for &(buffer, size) in written {
            bytes.starts[buffer as usize] = bytes.memory.allocate("a result", size);
        }
        println!("{plan}");
        let mut machine = Machine::new(0);
        machine.compiled = Some(bytes);
        // Every second weight that is packed is packed before.
        match plan.prepacked().filter(|_| next_seed().is_multiple_of(2)) {
            Some(plans) => machine.run_prepacked(&plans, launch),
            None => {
                machine.work_in(plan.workspace_bytes);
                machine.run(plan, launch);
            }
        }
        machine.compiled.expect("bytes")
    }

    /// What a layer makes of an input, of zeros.
    fn empty(&self, layer: &Layer, input: &Tensor) -> Result<Tensor> {
        let shape = &layer.block.geometry_of(input.shape())?.output_shape()[5 - input.shape().len()..];
        Tensor::new(shape, vec![0.0; shape.iter().product()])?.cast(layer.dtype, input.format())
    }

    fn geometry(layer: &Layer, input: &Tensor) -> Result<Geometry> {
        let geometry = layer.block.geometry_of(input.shape())?;
        if input.dtype() != layer.dtype {
            return Err(Error::DTypeMismatch { param: "input", got: input.dtype(), expected: layer.dtype });
        }
        Ok(geometry)
    }
}

/// A tensor of the shape, type and format of another, of these values.
fn with_values(like: &Tensor, values: Vec<f64>) -> Tensor {
    let new = Tensor::new(like.shape(), values).and_then(|new| new.cast(like.dtype(), like.format()));
    new.expect("as many values")
}

/// A tensor of a buffer's bytes, all of which were written.
fn tensor(bytes: &Bytes, buffer: Buffer, shape: &[usize], dtype: DType, format: MemoryFormat) -> Tensor {
    let count: usize = shape.iter().product();
    let memory = bytes.memory.bytes(bytes.starts[buffer as usize], count * dtype.size());
    let memory = memory.unwrap_or_else(|fault| panic!("{buffer:?}: {fault}"));
    let data = with_element!(dtype, T => {
        let mut values = vec![T::default(); count];
        bytemuck::cast_slice_mut::<T, u8>(&mut values).copy_from_slice(memory);
        T::into_data(values)
    });
    Tensor::with_format(shape, format, data).expect("as many values")
}

impl Engine for Emulated {
    type Tensor = Tensor;
    type Layer = Layer;

    fn describe(&self) -> Vec<(&'static str, String)> {
        vec![
            ("engine", "emulated".into()),
            ("device", self.device.to_string()),
            ("precision", self.precision.to_string()),
            ("algorithm", format!("{:?}", self.algorithm)),
            ("kernel", format!("{:?}", self.kernel)),
        ]
    }

    fn operand_roundoff(&self, dtype: DType) -> f64 {
        operand_roundoff(dtype, self.precision)
    }

    fn upload(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }

    fn download(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }

    fn layer(&self, block: &BlockSpec, parameters: &Parameters) -> Result<Layer> {
        let dtype = parameters.check(block)?;
        Ok(Layer { block: *block, dtype, parameters: parameters.clone() })
    }

    fn forward(&self, layer: &Layer, input: &Tensor) -> Result<Tensor> {
        let geometry = Emulated::geometry(layer, input)?;
        let output = self.empty(layer, input)?;
        if geometry.batch() == 0 {
            return Ok(output);
        }
        let format = self.output.unwrap_or(input.format());
        let plan = self.plan(layer, &geometry, Task::Forward, [input.format(), format])?;
        let written = (Buffer::Output, output.data().as_bytes().len());
        let bytes = self.run(&plan, layer, &[(Buffer::Input, input)], &[written]);
        tensor(&bytes, Buffer::Output, output.shape(), layer.dtype, format).cast(layer.dtype, input.format())
    }
}

/// Whether a tensor is of a shape and type.
fn expect(param: &'static str, tensor: &Tensor, shape: &[usize], dtype: DType) -> Result<()> {
    if tensor.shape() != shape {
        return Err(Error::Shape { param, got: tensor.shape().to_vec(), expected: shape.to_vec() });
    }
    if tensor.dtype() != dtype {
        return Err(Error::DTypeMismatch { param, got: tensor.dtype(), expected: dtype });
    }
    Ok(())
}

impl Training for Emulated {
    fn forward_for_training(&self, layer: &Layer, input: &Tensor) -> Result<(Tensor, Saved<Tensor>)> {
        if layer.block.is_bare() {
            return Ok((self.forward(layer, input)?, Saved::default()));
        }
        let geometry = Emulated::geometry(layer, input)?;
        let (format, dtype) = (input.format(), layer.dtype);
        let output = self.empty(layer, input)?;
        let sums = dtype.accumulator();
        let statistics = layer.block.norm().map(|norm| [geometry.batch(), norm.groups()]);
        let mut saved = Saved { convolution: Some(output.clone()), ..Saved::default() };
        if geometry.batch() == 0 {
            let empty = |shape: [usize; 2]| {
                Tensor::new(&shape, Vec::<f64>::new())?.cast(sums, MemoryFormat::Contiguous)
            };
            (saved.mean, saved.rstd) =
                (statistics.map(empty).transpose()?, statistics.map(empty).transpose()?);
            return Ok((output, saved));
        }
        let plan = self.plan(layer, &geometry, Task::Training, [format; 2])?;
        let bytes = output.data().as_bytes().len();
        let of_statistics = statistics.map_or(0, |shape| shape.iter().product::<usize>() * sums.size());
        let mut written = vec![(Buffer::Output, bytes), (Buffer::Convolution, bytes)];
        written.extend([Buffer::Mean, Buffer::Rstd].map(|buffer| (buffer, of_statistics)));
        written.retain(|(_, bytes)| *bytes > 0);
        let bytes = self.run(&plan, layer, &[(Buffer::Input, input)], &written);
        let of_output = |buffer| tensor(&bytes, buffer, output.shape(), dtype, format);
        saved.convolution = Some(of_output(Buffer::Convolution));
        if let Some(shape) = statistics {
            let [mean, rstd] = [Buffer::Mean, Buffer::Rstd]
                .map(|buffer| tensor(&bytes, buffer, &shape, sums, MemoryFormat::Contiguous));
            (saved.mean, saved.rstd) = (Some(mean), Some(rstd));
        }
        Ok((of_output(Buffer::Output), saved))
    }

    fn backward(
        &self,
        layer: &Layer,
        input: &Tensor,
        saved: &Saved<Tensor>,
        grad_output: &Tensor,
        wanted: Wanted,
    ) -> Result<Gradients<Tensor>> {
        let geometry = Emulated::geometry(layer, input)?;
        let (conv, dtype) = (layer.block.conv(), layer.dtype);
        let shape = self.empty(layer, input)?.shape().to_vec();
        expect("grad_output", grad_output, &shape, dtype)?;
        if let Some(norm) = layer.block.norm() {
            for (param, tensor) in [("mean", &saved.mean), ("rstd", &saved.rstd)] {
                let tensor = tensor.as_ref().ok_or(Error::Presence { param, expected: true })?;
                expect(param, tensor, &[geometry.batch(), norm.groups()], dtype.accumulator())?;
            }
        }
        if let Some(convolution) = &saved.convolution {
            expect("convolution", convolution, &shape, dtype)?;
        }
        let wanted = wanted_of(&layer.block, wanted);
        let (of_weight, vector) = (conv.weight_shape(), [conv.out_channels()]);
        let gradients = [
            (Buffer::GradInput, wanted.input, input.shape(), input.format()),
            (Buffer::GradWeight, wanted.weight, &of_weight[..], MemoryFormat::Contiguous),
            (Buffer::GradBias, wanted.bias, &vector[..], MemoryFormat::Contiguous),
            (Buffer::GradNormWeight, wanted.norm_weight, &vector[..], MemoryFormat::Contiguous),
            (Buffer::GradNormBias, wanted.norm_bias, &vector[..], MemoryFormat::Contiguous),
        ];
        let written = gradients.iter().filter(|gradient| gradient.1);
        let written: Vec<(Buffer, usize)> = written
            .map(|(buffer, _, shape, _)| (*buffer, shape.iter().product::<usize>() * dtype.size()))
            .collect();
        if geometry.batch() == 0 {
            let zeros = gradients.map(|(_, wanted, shape, format)| {
                let zeros = || Tensor::new(shape, vec![0.0; shape.iter().product()])?.cast(dtype, format);
                wanted.then(zeros).transpose()
            });
            let [input, weight, bias, norm_weight, norm_bias] = zeros;
            return Ok(Gradients {
                input: input?,
                weight: weight?,
                bias: bias?,
                norm_weight: norm_weight?,
                norm_bias: norm_bias?,
            });
        }
        let format = grad_output.format();
        let there = saved.convolution.as_ref().filter(|convolution| convolution.format() == format);
        let task = if there.is_some() { Task::Backward(wanted) } else { Task::Recompute(wanted) };
        let plan = self.plan(layer, &geometry, task, [input.format(), format])?;
        let mut given = vec![(Buffer::Input, input), (Buffer::GradOutput, grad_output)];
        let optional = [
            (Buffer::Convolution, there),
            (Buffer::Mean, saved.mean.as_ref()),
            (Buffer::Rstd, saved.rstd.as_ref()),
        ];
        given.extend(optional.into_iter().filter_map(|(buffer, tensor)| Some((buffer, tensor?))));
        let bytes = self.run(&plan, layer, &given, &written);
        let [input, weight, bias, norm_weight, norm_bias] =
            gradients.map(|(buffer, wanted, shape, format)| {
                wanted.then(|| tensor(&bytes, buffer, shape, dtype, format))
            });
        Ok(Gradients { input, weight, bias, norm_weight, norm_bias })
    }
}

/// Families of CUDA C++, each in a test of its own so that they run side by side; random cases, in types in turn.
fn random(algorithm: Option<Algorithm>, seeds: Range<u64>) {
    engines(algorithm, |engine| {
        for seed in seeds.clone() {
            let (case, fill) = (random_case(seed), Fill::ALL[seed as usize % 2]);
            let types = engine.types();
            let dtype = types[seed as usize / 2 % types.len()];
            if case.batch != Some(0) {
                println!("seed {seed}: {case}, {dtype}");
                right(engine, &case, dtype, fill, seed);
            }
        }
    });
}

/// Both precisions, on a device of few multiprocessors, whose blocks take several pieces of work each.
fn engines(algorithm: Option<Algorithm>, what: impl Fn(&Emulated)) {
    for (multiprocessors, precision) in [(2, Precision::Ieee), (3, Precision::Tf32)] {
        engine(multiprocessors, precision, algorithm, &what);
    }
}

/// One of them, where there are kernels for it.
fn engine(
    multiprocessors: usize,
    precision: Precision,
    algorithm: Option<Algorithm>,
    what: impl Fn(&Emulated),
) {
    if folder().is_none() {
        return println!("skipped: VOLUP_PTX is not set; make kernels-check sets it");
    }
    LARGE.set(1 << 26);
    what(&Emulated::new(multiprocessors, precision, algorithm));
}

/// Types that have fast paths. For fp16 kernels are what they are for bf16, but for conversions: the whole suite has it.
static NARROW: [DType; 2] = [DType::F32, DType::Bf16];
/// Cases of each test that runs always.
const SEEDS: Range<u64> = 0..24;

#[test]
fn halo_gemm() {
    random(Some(Algorithm::HaloGemm), SEEDS);
}

/// What it computes of a case is right.
fn right(engine: &Emulated, case: &Case, dtype: DType, fill: Fill, seed: u64) {
    let deviation = check(engine, case, dtype, fill, seed).expect("a result");
    assert!(deviation.is_ok(), "{case}, {dtype}: {deviation}");
}

/// The same in all types, each with other numbers.
fn right_in_all(engine: &Emulated, case: &Case, seed: u64) {
    for (turn, &dtype) in (seed as usize..).zip(engine.types()) {
        let fill = Fill::ALL[turn % 2];
        println!("{case}, {dtype}");
        right(engine, case, dtype, fill, seed);
    }
}

/// The same for cases in the notation of the table, with inputs of a format.
fn right_of<'a>(engine: &Emulated, format: MemoryFormat, lines: impl IntoIterator<Item = &'a &'a str>) {
    for (seed, line) in lines.into_iter().enumerate() {
        let case = Case::parse("given", line, "given").expect("a valid case");
        right_in_all(engine, &Case { format, ..case }, seed as u64);
    }
}

/// Those of NDHWC.
fn right_of_last<'a>(engine: &Emulated, lines: impl IntoIterator<Item = &'a &'a str>) {
    right_of(engine, MemoryFormat::ChannelsLast3d, lines);
}

/// One whose plans say something, or parts of it with dots between, where there are any that do.
fn saying(engine: &Emulated, words: &'static str) -> Emulated {
    Emulated {
        saying: Some(words),
        ..Emulated::new(engine.device.multiprocessors, engine.precision, engine.algorithm)
    }
}

/// One whose outputs are NCDHW where inputs are NDHWC.
fn to_first(engine: &Emulated) -> Emulated {
    Emulated { output: Some(MemoryFormat::Contiguous), ..saying(engine, "channels last to first") }
}

#[test]
fn gather_gemm() {
    random(Some(Algorithm::GatherGemm), SEEDS);
}

/// Prints what each launch asks of the machine, for specs of `VOLUP_SPECS`, parted by semicolons, on a whole Hopper.
#[test]
#[ignore = "prints: VOLUP_SPECS='n 1, 16x32x32, 3>16, k 3, s 2, p 1' ... counters --ignored --nocapture"]
fn counters() {
    let specs = std::env::var("VOLUP_SPECS").unwrap_or_default();
    for spec in specs.split(';').filter(|spec| !spec.trim().is_empty()) {
        let case = Case::parse("given", spec, "given").expect("a valid case");
        for (dtype, precision) in
            [(DType::F32, Precision::Ieee), (DType::F32, Precision::Tf32), (DType::Bf16, Precision::Ieee)]
        {
            right(&Emulated::new(132, precision, None), &case, dtype, Fill::Normal, 1);
        }
    }
}

/// All that engines are held to, of each family.
mod suite {
    use super::*;

    macro_rules! families {
        ($($name:ident: $family:ident),* $(,)?) => {
            $(
                #[test]
                #[ignore = "long: for whoever changes a kernel"]
                fn $name() {
                    engines(Some(Algorithm::$family), |engine| {
                        conformance(engine);
                        training_conformance(engine);
                    });
                }
            )*
        };
    }

    families! {
        halo_gemm: HaloGemm,
        gather_gemm: GatherGemm,
        box_gemm: BoxGemm,
        shuffle_gemm: ShuffleGemm,
        shuffle_ring: ShuffleRing,
        shuffle_wgmma: ShuffleWgmma,
        implicit_gemm: ImplicitGemm,
        pointwise: Pointwise,
    }
}

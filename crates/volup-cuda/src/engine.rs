//! The engine: tensors in a GPU's memory, blocks on a stream.

use crate::{
    Algorithm, Device, DeviceMemory, Executable, Manifest, Plan, Pointers, Request, Step, Stream, Task,
    Tuning,
};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use volup::{
    BlockSpec, DType, Element, Engine, Error, Geometry, MemoryFormat, Parameters, Precision, Result, Tensor,
    with_element,
};

/// Plans that tuning times alternately with the model's, how often each, and by how much one has to be faster.
const FINALISTS: usize = 3;
const ROUNDS: usize = 5;
const WORTH_KEEPING: f64 = 0.02;
/// The most sizes that plans are kept for, and the most ways in which a layer's weight is kept packed.
const MOST_PLANS: usize = 1024;
const MOST_PACKED: usize = 4;

/// Computes blocks on a GPU, on a stream of its own.
pub struct CudaEngine {
    device: Arc<Device>,
    stream: Arc<Stream>,
    precision: Precision,
    algorithm: Option<Algorithm>,
    kernel: Option<String>,
    kernels: usize,
    plans: Mutex<HashMap<Request, Arc<Planned>>>,
    /// Grown to the largest that a block has needed. Locked while a block is launched, so that its
    /// launches follow each other on the stream.
    workspace: Mutex<DeviceMemory>,
}

/// A plan, and for a forward pass the same in two, of which the first packs the weight.
pub(crate) struct Planned {
    pub(crate) whole: Executable,
    prepacked: Option<[Executable; 2]>,
}

/// A tensor in a GPU's memory; it belongs to the engine that made it.
pub struct CudaTensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    pub(crate) format: MemoryFormat,
    memory: DeviceMemory,
}

impl CudaTensor {
    /// The sizes, [N, C, D, H, W] for a batched volume.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements' type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How the elements lie in memory.
    pub fn format(&self) -> MemoryFormat {
        self.format
    }

    /// Where they are on the device.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }
}

/// A block with its parameters in a GPU's memory; it belongs to the engine that made it. Its weight is packed once, by the first
/// forward pass whose plan packs it, and stays so beside itself.
pub struct CudaLayer {
    pub(crate) block: BlockSpec,
    pub(crate) dtype: DType,
    weight: DeviceMemory,
    bias: Option<DeviceMemory>,
    norm_weight: Option<DeviceMemory>,
    norm_bias: Option<DeviceMemory>,
    /// The weight as it was packed, by the steps that did.
    packed: Mutex<Vec<(Vec<Step>, Arc<DeviceMemory>)>>,
}

/// A plan and its time.
#[derive(Clone, Debug)]
pub struct TimedPlan {
    /// What is launched, in words.
    pub plan: String,
    /// The seconds that the convolution was expected to take.
    pub expected: f64,
    /// The seconds that the block took, launched again and again.
    pub measured: f64,
}

/// What came of tuning a layer for an input.
#[derive(Clone, Debug)]
pub struct TunedPlan {
    /// The plan that the model chooses, with the median of its times.
    pub model: TimedPlan,
    /// That which is faster by enough to be kept, if there is one.
    pub faster: Option<TimedPlan>,
    /// How many plans were timed.
    pub tried: usize,
}

impl CudaEngine {
    /// An engine on the device of a number, counted as CUDA does.
    ///
    /// # Errors
    /// As [`Device::open`] and [`Manifest::for_device`].
    pub fn new(ordinal: usize, precision: Precision) -> Result<CudaEngine> {
        let device = Device::open(ordinal)?;
        let kernels = Manifest::embedded().for_device(device.info())?.len();
        let stream = Arc::new(Stream::new(&device)?);
        let workspace = Mutex::new(DeviceMemory::new(&stream, 0)?);
        Ok(CudaEngine {
            device,
            stream,
            precision,
            algorithm: None,
            kernel: None,
            kernels,
            plans: Mutex::default(),
            workspace,
        })
    }

    /// The same engine, with a kernel family where that applies in place of the plan's choice.
    pub fn with_algorithm(self, algorithm: Option<Algorithm>) -> CudaEngine {
        CudaEngine { algorithm, plans: Mutex::default(), ..self }
    }

    /// The same engine, with the best of the plans that launch a kernel or one variant of it, where there is one, in place of the plan's
    /// choice.
    ///
    /// # Errors
    /// [`Error::UnknownName`].
    pub fn with_kernel(self, kernel: Option<String>) -> Result<CudaEngine> {
        let variants = Manifest::embedded().for_device(self.device.info())?;
        let is_one = |name: &String| {
            variants.iter().any(|variant| [variant.entry, variant.name].contains(&name.as_str()))
        };
        if let Some(got) = kernel.clone().filter(|name| !is_one(name)) {
            let expected = "the name of a kernel's function, or of one of its variants";
            return Err(Error::UnknownName { param: "kernel", got, expected });
        }
        Ok(CudaEngine { kernel, plans: Mutex::default(), ..self })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// [`Error::Cuda`], also of work that was asked for earlier.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// Times the plans that may be the fastest for a layer and an input, at most `most` of them, the one
    /// that is expected to be first; `seconds` each, with the weight's packing, which a layer does once.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn time_plans(
        &self,
        layer: &CudaLayer,
        input: &CudaTensor,
        most: usize,
        seconds: f64,
    ) -> Result<Vec<TimedPlan>> {
        let (plans, pointers, _output) = self.candidates(layer, input, most)?;
        plans.iter().map(|plan| self.time(plan, layer, &pointers, seconds)).collect()
    }

    /// Times the plans that may be the fastest for a layer and an input, at most `most` of them, in so many seconds; then the
    /// fastest and the model's alternately. One that is faster than the model's by a fiftieth is recorded in a file of
    /// tuned plans, for all that plan after this; where there is none, none stays there.
    ///
    /// # Errors
    /// As [`Engine::forward`]; [`Error::Io`] where the file cannot be read or written.
    pub fn tune(
        &self,
        layer: &CudaLayer,
        input: &CudaTensor,
        most: usize,
        seconds: f64,
        file: &Path,
    ) -> Result<TunedPlan> {
        let variants = Manifest::embedded().for_device(self.device.info())?;
        // Before anything takes long.
        let mut tuning = Tuning::read(file, self.device.info(), &variants)?;
        let (plans, pointers, _output) = self.candidates(layer, input, most)?;
        let each = seconds / 2.0 / plans.len().max(1) as f64;
        let mut order = Vec::new();
        for (at, plan) in plans.iter().enumerate() {
            order.push((self.time(plan, layer, &pointers, each)?.measured, at));
        }
        order.sort_by(|one, other| one.0.total_cmp(&other.0));
        let mut finalists: Vec<usize> =
            order.iter().map(|&(_, at)| at).filter(|&at| at > 0).take(FINALISTS).collect();
        finalists.insert(0, 0);
        let each = seconds / 2.0 / (finalists.len() * ROUNDS) as f64;
        let mut times = vec![Vec::new(); finalists.len()];
        for _ in 0..ROUNDS {
            for (&at, times) in finalists.iter().zip(&mut times) {
                times.push(self.time(&plans[at], layer, &pointers, each)?);
            }
        }
        let mut medians = times.into_iter().map(|mut times| {
            times.sort_by(|one, other| one.measured.total_cmp(&other.measured));
            times.swap_remove(ROUNDS / 2)
        });
        let model = medians.next().ok_or(Error::Overflow { what: "plans" })?;
        let fastest = medians.min_by(|one, other| one.measured.total_cmp(&other.measured));
        let faster = fastest.filter(|plan| plan.measured < (1.0 - WORTH_KEEPING) * model.measured);
        let geometry = layer.block.geometry_of(&input.shape)?;
        let request = self.request(layer, &geometry, Task::Forward, [input.format; 2]);
        tuning.record(file, &request, faster.as_ref().map(|plan| plan.plan.as_str()))?;
        Ok(TunedPlan { model, faster, tried: plans.len() })
    }

    /// The plans that may be the fastest for a layer and an input, at most `most` of them, the model's choice first, with
    /// their kernels; the addresses that they are run with, and the output that is among them.
    fn candidates(
        &self,
        layer: &CudaLayer,
        input: &CudaTensor,
        most: usize,
    ) -> Result<(Vec<Executable>, Pointers, CudaTensor)> {
        let geometry = CudaEngine::geometry(layer, input)?;
        let request = self.request(layer, &geometry, Task::Forward, [input.format; 2]);
        let variants = Manifest::embedded().for_device(self.device.info())?;
        let output = self.empty(CudaEngine::output_shape(&geometry, input), layer.dtype, input.format)?;
        let pointers = Pointers { input: input.address(), output: output.address(), ..Pointers::default() };
        let plans = Plan::candidates(&request, self.device.info(), &variants, most)?;
        let plans =
            plans.into_iter().map(|plan| Executable::of(&self.device, plan)).collect::<Result<_>>()?;
        Ok((plans, pointers, output))
    }

    /// Times a plan for so many seconds.
    fn time(
        &self,
        plan: &Executable,
        layer: &CudaLayer,
        pointers: &Pointers,
        seconds: f64,
    ) -> Result<TimedPlan> {
        let run = |times: usize| -> Result<f64> {
            let start = Instant::now();
            for _ in 0..times {
                self.launch(plan, layer, pointers)?;
            }
            self.stream.synchronize()?;
            Ok(start.elapsed().as_secs_f64())
        };
        // The first loads the kernels; then as many in a row as fill the time.
        run(1)?;
        let times = (seconds / run(2)? * 2.0).clamp(1.0, 1e4) as usize;
        let measured = run(times)? / times as f64;
        Ok(TimedPlan { plan: plan.plan().to_string(), expected: plan.plan().seconds(), measured })
    }

    /// Launches a plan that was made for the layer and the sizes of the tensors at the addresses; those of the layer and
    /// of the workspace are added.
    pub(crate) fn launch(&self, plan: &Executable, layer: &CudaLayer, tensors: &Pointers) -> Result<()> {
        let mut workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        if workspace.bytes() < plan.workspace_bytes() {
            // The small one goes first: there may not be room for both.
            *workspace = DeviceMemory::new(&self.stream, 0)?;
            *workspace = DeviceMemory::new(&self.stream, plan.workspace_bytes())?;
        }
        let optional = |memory: &Option<DeviceMemory>| memory.as_ref().map_or(0, DeviceMemory::address);
        let pointers = Pointers {
            weight: layer.weight.address(),
            bias: optional(&layer.bias),
            norm_weight: optional(&layer.norm_weight),
            norm_bias: optional(&layer.norm_bias),
            workspace: workspace.address(),
            ..*tensors
        };
        // SAFETY: `layer` checked the parameters against the block, and the plan's geometry is that of the
        // tensors. All memory was taken on this stream and is given back in its order. Nobody else has what is
        // written yet, and the workspace is locked until the launches are made.
        unsafe { plan.run(&pointers, &self.stream) }
    }

    /// A layer's weight, packed now if it was not before.
    fn packed(&self, layer: &CudaLayer, packing: &Executable) -> Result<Arc<DeviceMemory>> {
        let mut kept = layer.packed.lock().unwrap_or_else(PoisonError::into_inner);
        let steps = &packing.plan().steps;
        if let Some((_, memory)) = kept.iter().find(|(by, _)| by == steps) {
            return Ok(memory.clone());
        }
        if kept.len() == MOST_PACKED {
            kept.remove(0);
        }
        let memory = Arc::new(DeviceMemory::new(&self.stream, packing.workspace_bytes())?);
        let pointers =
            Pointers { weight: layer.weight.address(), workspace: memory.address(), ..Pointers::default() };
        // SAFETY: `layer` checked the weight against the block, which the plan is of. Both were taken on this stream, and
        // nobody else has the memory yet.
        unsafe { packing.run(&pointers, &self.stream) }?;
        kept.push((steps.clone(), memory.clone()));
        Ok(memory)
    }

    /// What is asked for with the formats of the input and the output.
    fn request(
        &self,
        layer: &CudaLayer,
        geometry: &Geometry,
        task: Task,
        formats: [MemoryFormat; 2],
    ) -> Request {
        Request {
            task,
            block: layer.block,
            geometry: *geometry,
            dtype: layer.dtype,
            precision: self.precision,
            input_format: formats[0],
            output_format: formats[1],
            algorithm: self.algorithm,
        }
    }

    /// The plan of a task, with the formats of the input and the output.
    pub(crate) fn plan(
        &self,
        layer: &CudaLayer,
        geometry: &Geometry,
        task: Task,
        formats: [MemoryFormat; 2],
    ) -> Result<Arc<Planned>> {
        let request = self.request(layer, geometry, task, formats);
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&request) {
            return Ok(plan.clone());
        }
        let wanted = match &self.kernel {
            Some(kernel) => {
                let variants = Manifest::embedded().for_device(self.device.info())?;
                Plan::with_kernel(&request, self.device.info(), &variants, kernel)?
            }
            None => None,
        };
        let whole = match wanted {
            Some(plan) => Executable::of(&self.device, plan)?,
            None => Executable::new(&self.device, &request)?,
        };
        let prepacked = if task == Task::Forward { whole.prepacked(&self.device)? } else { None };
        let plan = Arc::new(Planned { whole, prepacked });
        if plans.len() == MOST_PLANS {
            plans.clear();
        }
        plans.insert(request, plan.clone());
        Ok(plan)
    }

    /// The geometry of a layer over an input.
    pub(crate) fn geometry(layer: &CudaLayer, input: &CudaTensor) -> Result<Geometry> {
        let geometry = layer.block.geometry_of(&input.shape)?;
        if input.dtype != layer.dtype {
            return Err(Error::DTypeMismatch { param: "input", got: input.dtype, expected: layer.dtype });
        }
        Ok(geometry)
    }

    /// The output's shape, of the input's rank.
    pub(crate) fn output_shape(geometry: &Geometry, input: &CudaTensor) -> Vec<usize> {
        geometry.output_shape()[5 - input.shape.len()..].to_vec()
    }

    /// A tensor that nobody has written yet.
    pub(crate) fn empty(&self, shape: Vec<usize>, dtype: DType, format: MemoryFormat) -> Result<CudaTensor> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Ok(CudaTensor { shape, dtype, format, memory: DeviceMemory::new(&self.stream, bytes)? })
    }

    /// A tensor of zeros.
    pub(crate) fn zeros(&self, shape: Vec<usize>, dtype: DType, format: MemoryFormat) -> Result<CudaTensor> {
        let zeros = vec![0; shape.iter().product::<usize>() * dtype.size()];
        Ok(CudaTensor { shape, dtype, format, memory: DeviceMemory::of(&self.stream, &zeros)? })
    }
}

/// For float32: `tf32` keeps 11 significant bits; `ieee` multiplies what two float16 numbers hold together.
pub(crate) fn operand_roundoff(dtype: DType, precision: Precision) -> f64 {
    match (dtype, precision) {
        (DType::F32, Precision::Tf32) => 2f64.powi(-11),
        (DType::F32, Precision::Ieee) => 2f64.powi(-21),
        _ => 0.0,
    }
}

impl Engine for CudaEngine {
    type Tensor = CudaTensor;
    type Layer = CudaLayer;

    fn describe(&self) -> Vec<(&'static str, String)> {
        let info = self.device.info();
        let mut lines = vec![
            ("engine", "cuda".into()),
            ("device", info.name.clone()),
            ("arch", info.arch.to_string()),
            ("multiprocessors", info.multiprocessors.to_string()),
            ("driver", info.driver()),
            ("precision", self.precision.to_string()),
            ("kernels", self.kernels.to_string()),
        ];
        lines.extend(self.algorithm.map(|algorithm| ("algorithm", algorithm.to_string())));
        lines.extend(self.kernel.clone().map(|kernel| ("kernel", kernel)));
        lines
    }

    fn operand_roundoff(&self, dtype: DType) -> f64 {
        operand_roundoff(dtype, self.precision)
    }

    fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    fn upload(&self, tensor: Tensor) -> Result<CudaTensor> {
        Ok(CudaTensor {
            shape: tensor.shape().to_vec(),
            dtype: tensor.dtype(),
            format: tensor.format(),
            memory: DeviceMemory::of(&self.stream, tensor.data().as_bytes())?,
        })
    }

    fn download(&self, tensor: CudaTensor) -> Result<Tensor> {
        let count = tensor.memory.bytes() / tensor.dtype.size();
        let data = with_element!(tensor.dtype, T => {
            let mut values = Vec::<T>::new();
            let refused = |_| Error::OutOfMemory { what: "the output", bytes: tensor.memory.bytes() };
            values.try_reserve_exact(count).map_err(refused)?;
            values.resize(count, T::default());
            tensor.memory.copy_to(bytemuck::cast_slice_mut(&mut values))?;
            T::into_data(values)
        });
        Tensor::with_format(&tensor.shape, tensor.format, data)
    }

    fn layer(&self, block: &BlockSpec, parameters: &Parameters) -> Result<CudaLayer> {
        let dtype = parameters.check(block)?;
        let upload = |tensor: &Tensor| DeviceMemory::of(&self.stream, tensor.data().as_bytes());
        let optional = |tensor: &Option<Tensor>| tensor.as_ref().map(upload).transpose();
        Ok(CudaLayer {
            block: *block,
            dtype,
            weight: upload(&parameters.weight)?,
            bias: optional(&parameters.bias)?,
            norm_weight: optional(&parameters.norm_weight)?,
            norm_bias: optional(&parameters.norm_bias)?,
            packed: Mutex::default(),
        })
    }

    fn forward(&self, layer: &CudaLayer, input: &CudaTensor) -> Result<CudaTensor> {
        let geometry = CudaEngine::geometry(layer, input)?;
        let shape = CudaEngine::output_shape(&geometry, input);
        let output = self.empty(shape, layer.dtype, input.format)?;
        if geometry.batch() == 0 {
            return Ok(output);
        }
        let plan = self.plan(layer, &geometry, Task::Forward, [input.format; 2])?;
        let tensors = Pointers { input: input.address(), output: output.address(), ..Pointers::default() };
        let Some([packing, block]) = &plan.prepacked else {
            self.launch(&plan.whole, layer, &tensors)?;
            return Ok(output);
        };
        match self.packed(layer, packing) {
            Ok(packed) => self.launch(block, layer, &Pointers { packed: packed.address(), ..tensors })?,
            // There is no room to keep it.
            Err(Error::OutOfDeviceMemory { .. }) => self.launch(&plan.whole, layer, &tensors)?,
            Err(error) => return Err(error),
        }
        Ok(output)
    }
}

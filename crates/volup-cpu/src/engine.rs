//! The engine: threads, the tasks of a plan, the normalization after them.

use crate::conv::{Isa, Tables};
use crate::forward::{Forward, Scratch, Shared};
use crate::layer::{CpuLayer, ParametersRef};
use crate::math::{Moments, Real};
use crate::norm::{Norm, Piece, pieces};
use crate::plan::{CpuInfo, Plan};
use crate::{Storage, Volume, buffer};
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use volup::{
    BlockSpec, DType, Element, Engine, Error, Geometry, MemoryFormat, Parameters, Result, Tensor, bf16, f16,
    with_element,
};

/// Computes blocks on the host's cores.
pub struct CpuEngine {
    isa: Isa,
    pub(crate) tables: Tables,
    threads: usize,
    team: Team,
}

/// What every thread of a team calls; it returns when no work is left.
type Work<'a> = &'a (dyn Fn() + Sync);

/// Who computes.
enum Team {
    /// The caller's thread.
    Caller,
    /// Threads of the engine's own.
    Own(rayon::ThreadPool),
    /// Threads of the caller's.
    Given(Box<dyn Fn(Work<'_>) + Send + Sync>),
}

thread_local! {
    // Kept from call to call: fresh memory costs a page fault for every 4 KiB.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl CpuEngine {
    /// An engine on all cores, with the widest instruction set that they have.
    pub fn new() -> CpuEngine {
        CpuEngine::with_threads(std::thread::available_parallelism().map_or(1, |n| n.get()))
    }

    /// An engine on a number of threads; with 1 all work is done on the caller's thread.
    pub fn with_threads(threads: usize) -> CpuEngine {
        CpuEngine::with_isa(threads, Isa::available()[0]).expect("an available instruction set is available")
    }

    /// An engine that keeps to an instruction set, or `None` if this CPU lacks it.
    pub fn with_isa(threads: usize, isa: Isa) -> Option<CpuEngine> {
        let tables = Tables::of(isa)?;
        let threads = threads.max(1);
        let pool = (threads > 1).then(|| {
            let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
            builder.thread_name(|index| format!("volup-{index}")).build()
        });
        // Where the system grants no more threads, the caller's own still does the work.
        let team = pool.and_then(|pool| pool.ok()).map_or(Team::Caller, Team::Own);
        let threads = if let Team::Own(pool) = &team { pool.current_num_threads() } else { 1 };
        Some(CpuEngine { isa, tables, threads, team })
    }

    /// An engine on threads of the caller's. `team` is given a function, calls it on some threads at
    /// once, `threads` of them at best, and returns when every call has; the calls share the work
    /// between them, so any number of them will do, but there must be one.
    pub fn on_team(threads: usize, team: impl Fn(&(dyn Fn() + Sync)) + Send + Sync + 'static) -> CpuEngine {
        CpuEngine { threads: threads.max(1), team: Team::Given(Box::new(team)), ..CpuEngine::with_threads(1) }
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// How a layer would be cut into tasks for an input, in words.
    pub fn explain<T: Storage>(&self, layer: &CpuLayer<T>, geometry: &Geometry) -> String {
        self.plan(layer, geometry).to_string()
    }

    pub(crate) fn cpu<T: Storage>(&self) -> CpuInfo {
        CpuInfo::new(<T::Acc as Real>::kernels(&self.tables), self.threads)
    }

    fn plan<T: Storage>(&self, layer: &CpuLayer<T>, geometry: &Geometry) -> Plan {
        Plan::new(geometry, &layer.classes, layer.blocks.len(), self.cpu::<T>())
    }

    /// Applies a layer to memory of the caller's: reads `input`, writes every element of `output`.
    /// Each is in the memory format given beside it.
    ///
    /// # Errors
    /// [`Error::Length`] if a buffer is not of the geometry's size; [`Error::Shape`] if the geometry
    /// belongs to another convolution.
    pub fn forward_into<T: Storage>(
        &self,
        layer: &CpuLayer<T>,
        geometry: &Geometry,
        input: &[T],
        input_format: MemoryFormat,
        output: &mut [MaybeUninit<T>],
        output_format: MemoryFormat,
    ) -> Result<()> {
        check_geometry(layer, geometry)?;
        check_length("input", input.len(), &geometry.input_shape())?;
        check_length("output", output.len(), &geometry.output_shape())?;
        if geometry.batch() == 0 {
            return Ok(());
        }
        let input = Volume { values: input, format: input_format };
        let (moments, tiles) = self.convolve(layer, geometry, input, output, output_format, false);
        if let Some(spec) = layer.block.norm() {
            // SAFETY: the tasks covered every output, so all of them are initialized.
            let output = unsafe { &mut *(std::ptr::from_mut(output) as *mut [T]) };
            let kernels = <T::Acc as Real>::kernels(&self.tables);
            let norm = Norm { layer, spec, geometry, kernels, format: output_format, activation: None };
            let scales = norm.scales(&norm.statistics(&moments, tiles));
            self.for_each_piece(pieces(geometry, output_format, output), |mut piece| {
                norm.apply(&scales, &mut piece);
            });
        }
        Ok(())
    }

    /// Runs the tasks of a layer's convolution, up to the normalization or, if the output is to be
    /// the convolution's own (`bare`), to the bias. Returns the moments [N][Cout][tiles] of the
    /// activation's output where the block normalizes it, and the number of tiles.
    pub(crate) fn convolve<T: Storage>(
        &self,
        layer: &CpuLayer<T>,
        geometry: &Geometry,
        input: Volume<'_, T>,
        output: &mut [MaybeUninit<T>],
        output_format: MemoryFormat,
        bare: bool,
    ) -> (Vec<Moments>, usize) {
        buffer::advise_huge_pages(output);
        let plan = self.plan(layer, geometry);
        let lines = geometry.batch() * geometry.conv().out_channels();
        let normalizes = layer.block.norm().is_some();
        let mut moments =
            vec![Moments::default(); if normalizes { lines * plan.tiles_per_sample() } else { 0 }];
        let forward = Forward {
            layer,
            plan: &plan,
            kernels: <T::Acc as Real>::kernels(&self.tables),
            cpu: self.cpu::<T>(),
            input: input.values,
            input_format: input.format,
            output: Shared(output.as_mut_ptr().cast::<T>()),
            output_format,
            bare,
            streams: plan.streams(size_of::<T>()),
            moments: normalizes.then_some(Shared(moments.as_mut_ptr())),
        };
        self.for_each(plan.tasks(), |task| SCRATCH.with_borrow_mut(|scratch| forward.run(task, scratch)));
        (moments, plan.tiles_per_sample())
    }

    /// Calls `run` once for every piece, on all threads.
    pub(crate) fn for_each_piece<T: Send>(
        &self,
        pieces: Vec<Piece<'_, T>>,
        run: impl Fn(Piece<'_, T>) + Sync,
    ) {
        let pieces: Vec<Mutex<Option<_>>> = pieces.into_iter().map(|piece| Mutex::new(Some(piece))).collect();
        self.for_each(pieces.len(), |index| {
            let piece = pieces[index].lock().ok().and_then(|mut piece| piece.take());
            run(piece.expect("a piece is taken once"));
        });
    }

    /// Calls `run` once for every index below `count`, on all threads.
    pub(crate) fn for_each(&self, count: usize, run: impl Fn(usize) + Sync) {
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    break;
                }
                run(index);
            }
        };
        match &self.team {
            Team::Own(pool) if count > 1 => {
                pool.broadcast(|_| work());
            }
            Team::Given(team) if count > 1 => team(&work),
            _ => work(),
        }
    }

    /// Applies a layer to a host tensor.
    fn apply<T: Storage>(&self, layer: &CpuLayer<T>, input: &Tensor) -> Result<Tensor> {
        let geometry = layer.block.geometry_of(input.shape())?;
        let Some(values) = input.as_slice::<T>() else {
            return Err(Error::DTypeMismatch { param: "input", got: input.dtype(), expected: T::DTYPE });
        };
        let shape = geometry.output_shape();
        let (format, len) = (input.format(), shape.iter().product());
        let mut output: Vec<T> = Vec::with_capacity(len);
        self.forward_into(layer, &geometry, values, format, &mut output.spare_capacity_mut()[..len], format)?;
        // SAFETY: forward_into wrote all of them.
        unsafe { output.set_len(len) };
        Tensor::with_format(&shape[5 - input.shape().len()..], format, T::into_data(output))
    }
}

/// Refuses a geometry of another convolution than the layer's.
pub(crate) fn check_geometry<T: Storage>(layer: &CpuLayer<T>, geometry: &Geometry) -> Result<()> {
    if geometry.conv() == layer.block.conv() {
        return Ok(());
    }
    let (got, expected) = (geometry.conv().weight_shape(), layer.block.conv().weight_shape());
    Err(Error::Shape { param: "weight", got: got.to_vec(), expected: expected.to_vec() })
}

/// Refuses a buffer that does not hold as many elements as its shape asks for.
pub(crate) fn check_length(param: &'static str, got: usize, shape: &[usize]) -> Result<()> {
    let expected = shape.iter().product();
    if got == expected { Ok(()) } else { Err(Error::Length { param, got, expected }) }
}

impl Default for CpuEngine {
    fn default() -> CpuEngine {
        CpuEngine::new()
    }
}

/// A packed layer of any of the four types.
pub enum AnyLayer {
    /// Double precision.
    F64(CpuLayer<f64>),
    /// Single precision.
    F32(CpuLayer<f32>),
    /// Half precision.
    F16(CpuLayer<f16>),
    /// bfloat16.
    Bf16(CpuLayer<bf16>),
}

macro_rules! into_any {
    ($($variant:ident: $type:ty),*) => {$(
        impl From<CpuLayer<$type>> for AnyLayer {
            fn from(layer: CpuLayer<$type>) -> AnyLayer {
                AnyLayer::$variant(layer)
            }
        }
    )*};
}
into_any!(F64: f64, F32: f32, F16: f16, Bf16: bf16);

impl Engine for CpuEngine {
    type Tensor = Tensor;
    type Layer = AnyLayer;

    fn describe(&self) -> Vec<(&'static str, String)> {
        vec![("engine", "cpu".into()), ("isa", self.isa.name().into()), ("threads", self.threads.to_string())]
    }

    fn upload(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }

    fn download(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }

    fn layer(&self, block: &BlockSpec, parameters: &Parameters) -> Result<AnyLayer> {
        let dtype: DType = parameters.check(block)?;
        with_element!(dtype, T => {
            fn values<T: Element>(tensor: &Option<Tensor>) -> Option<&[T]> {
                tensor.as_ref().and_then(|tensor| tensor.as_slice::<T>())
            }
            let parameters = ParametersRef::<T> {
                weight: parameters.weight.as_slice::<T>().unwrap_or_default(),
                bias: values(&parameters.bias),
                norm_weight: values(&parameters.norm_weight),
                norm_bias: values(&parameters.norm_bias),
            };
            Ok(CpuLayer::new(block, parameters)?.into())
        })
    }

    fn forward(&self, layer: &AnyLayer, input: &Tensor) -> Result<Tensor> {
        match layer {
            AnyLayer::F64(layer) => self.apply(layer, input),
            AnyLayer::F32(layer) => self.apply(layer, input),
            AnyLayer::F16(layer) => self.apply(layer, input),
            AnyLayer::Bf16(layer) => self.apply(layer, input),
        }
    }
}

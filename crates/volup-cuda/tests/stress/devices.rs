//! Two devices at once, each with its own engines: they give the same bits.

use crate::watchdog::{UnderWay, within};
use crate::{alone, gpu};
use std::sync::Barrier;
use std::thread;
use std::time::Duration;
use volup::reference::forward;
use volup::testing::{Case, Fill, cases, check_gradients, compare, tensor};
use volup::{DType, Engine, Gradients, Precision, Result, Saved, Tensor, Training, Wanted};
use volup_cuda::{Algorithm, CudaEngine, Device, devices};

/// Types, and how float32 is multiplied.
const KINDS: [(DType, Precision); 3] =
    [(DType::F32, Precision::Ieee), (DType::F32, Precision::Tf32), (DType::Bf16, Precision::Ieee)];
/// Of all tensors.
const SEED: u64 = 1;
/// Several times what all of it should take.
const LIMIT: Duration = Duration::from_secs(180);

/// A case in a type.
struct Sample {
    what: String,
    case: Case,
    dtype: DType,
    precision: Precision,
}

/// What an engine makes of a sample: its outputs by the plan's choice and by each family; what is saved for
/// training, and the gradients.
struct Computed {
    outputs: Vec<Tensor>,
    training: Vec<Tensor>,
}

impl Sample {
    fn all() -> Vec<Sample> {
        let all = KINDS.iter().flat_map(|&(dtype, precision)| {
            cases().into_iter().filter(|case| case.batch != Some(0)).map(move |case| {
                let what = format!("{case}, {dtype}, {precision}");
                Sample { what, case, dtype, precision }
            })
        });
        all.collect()
    }

    /// By engines of its precision, the first of which has the plan's choice.
    fn compute(&self, engines: &[CudaEngine]) -> Result<Computed> {
        let (input, parameters) = self.case.inputs(self.dtype, Fill::Normal, SEED);
        let mut outputs = Vec::new();
        for engine in engines {
            let layer = engine.layer(&self.case.block, &parameters)?;
            let output = engine.forward(&layer, &engine.upload(input.clone())?)?;
            outputs.push(engine.download(output)?);
        }

        let engine = &engines[0];
        let layer = engine.layer(&self.case.block, &parameters)?;
        let input = engine.upload(input)?;
        let shape = self.case.output_shape();
        let grad_output = tensor(&shape, self.dtype, self.case.format, Fill::Normal, 1.0, SEED + 1);
        let grad_output = engine.upload(grad_output)?;
        let (output, saved) = engine.forward_for_training(&layer, &input)?;
        let gradients = engine.backward(&layer, &input, &saved, &grad_output, Wanted::ALL)?;
        let Saved { convolution, mean, rstd } = saved;
        let Gradients { input, weight, bias, norm_weight, norm_bias } = gradients;
        let all = [Some(output), convolution, mean, rstd, input, weight, bias, norm_weight, norm_bias];
        let training = all.into_iter().flatten().map(|tensor| engine.download(tensor));
        Ok(Computed { outputs, training: training.collect::<Result<_>>()? })
    }

    /// Compares the outputs with the oracle's, and what a device's engine makes of training.
    fn check(&self, computed: &Computed, ordinal: usize) -> Result<()> {
        let (input, parameters) = self.case.inputs(self.dtype, Fill::Normal, SEED);
        let engine = CudaEngine::new(ordinal, self.precision)?;
        let roundoff = engine.operand_roundoff(self.dtype);
        let expected = forward(&self.case.block, &self.case.geometry(), &parameters, &input, roundoff);
        for output in &computed.outputs {
            let deviation = compare(&expected, output);
            assert!(deviation.is_ok(), "{}: {deviation}", self.what);
        }
        let trained = check_gradients(&engine, &self.case, self.dtype, Fill::Normal, SEED);
        trained.unwrap_or_else(|failure| panic!("device {ordinal}: {failure}"));
        Ok(())
    }
}

impl Computed {
    fn bytes(&self) -> Vec<&[u8]> {
        let all = self.outputs.iter().chain(&self.training);
        all.map(|tensor| tensor.data().as_bytes()).collect()
    }
}

/// An engine of the plan's choice, then one of each family.
fn engines(ordinal: usize, precision: Precision) -> Result<Vec<CudaEngine>> {
    let algorithms = [None].into_iter().chain(Algorithm::ALL.map(Some));
    let engine = |algorithm| Ok(CudaEngine::new(ordinal, precision)?.with_algorithm(algorithm));
    algorithms.map(engine).collect()
}

/// This thread's context.
fn current() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: the driver is started; it puts the context into `context`.
    unsafe { cudarc::driver::sys::cuCtxGetCurrent(&mut context) }.result().unwrap();
    context as usize
}

/// What a device makes of all samples, from a thread whose current context is that of device 0.
fn compute_all(
    ordinal: usize,
    samples: &[Sample],
    start: &Barrier,
    under_way: &UnderWay,
) -> Result<Vec<Computed>> {
    let place = format!("device {ordinal}");
    let first = Device::open(0)?;
    let _entered = first.enter()?;
    let context = current();
    start.wait();
    let mut computed = Vec::new();
    for alike in samples.chunk_by(|one, other| one.precision == other.precision) {
        let engines = engines(ordinal, alike[0].precision)?;
        for sample in alike {
            under_way.set(&place, sample.what.clone());
            computed.push(sample.compute(&engines)?);
            assert_eq!(current(), context, "another context is current after {}", sample.what);
        }
    }
    under_way.clear(&place);
    Ok(computed)
}

/// On device 0 and another; how many cases it was.
fn compute_both(other: usize, under_way: &UnderWay) -> Result<usize> {
    let samples = Sample::all();
    let start = Barrier::new(2);
    let computed = thread::scope(|scope| {
        let (samples, start) = (&samples, &start);
        let compute = |ordinal| scope.spawn(move || compute_all(ordinal, samples, start, under_way));
        [0, other].map(compute).map(|thread| thread.join().expect("a thread that does not panic"))
    });
    let [here, there] = computed;
    let first = Device::open(0)?;
    let _entered = first.enter()?;
    for ((sample, here), there) in samples.iter().zip(here?).zip(there?) {
        under_way.set("the oracle", sample.what.clone());
        sample.check(&there, other)?;
        assert!(here.bytes() == there.bytes(), "{}: the devices' bits differ", sample.what);
    }
    Ok(samples.len())
}

#[test]
fn two_devices_give_the_same_bits() {
    let _alone = alone();
    if gpu::or_skip(CudaEngine::new(0, Precision::Ieee)).is_none() {
        return;
    }
    let found = devices().unwrap();
    let Some(other) = (1..found.len()).find(|&ordinal| found[ordinal] == found[0]) else {
        println!("skipped: there is one GPU, or no other of its kind");
        return;
    };
    let count = within(LIMIT, move |under_way| compute_both(other, under_way)).unwrap();
    println!("devices: {count} cases on devices 0 and {other} at once, {}", found[0]);
}

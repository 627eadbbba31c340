//! Ten thousand plans in random order on four streams at once.

use crate::calls::{Call, UNWRITTEN, calls};
use crate::watchdog::{UnderWay, within};
use crate::{alone, gpu, ptx};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use volup::testing::split_mix;
use volup::{Precision, Result};
use volup_cuda::{Arguments, CudaEngine, Device, DeviceMemory, Kernel, Pointers, Stream, launch};

/// Plans that are launched, of all streams together.
const PLANS: usize = 10_000;
/// Threads that launch them, and streams of each.
const THREADS: usize = 2;
const STREAMS: usize = 2;
/// The most plans that wait on a stream.
const MOST_AT_ONCE: u64 = 48;
/// Of the order.
const SEED: u64 = 7;
/// Several times what all of it should take.
const LIMIT: Duration = Duration::from_secs(180);

/// Counts the words of two arrays that differ, a thread a word.
const COUNT: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry count_differences(
    .param .u64 one, .param .u64 other, .param .s32 words, .param .u64 count
) {
    .reg .u32 %block, %threads, %thread, %index, %words, %x, %y;
    .reg .u64 %one, %other, %count, %at;
    .reg .pred %past, %same;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %index, %block, %threads, %thread;
    ld.param.u32 %words, [words];
    setp.ge.u32 %past, %index, %words;
    @%past bra done;
    mul.wide.u32 %at, %index, 4;
    ld.param.u64 %one, [one];
    cvta.to.global.u64 %one, %one;
    add.u64 %one, %one, %at;
    ld.global.u32 %x, [%one];
    ld.param.u64 %other, [other];
    cvta.to.global.u64 %other, %other;
    add.u64 %other, %other, %at;
    ld.global.u32 %y, [%other];
    setp.eq.u32 %same, %x, %y;
    @%same bra done;
    ld.param.u64 %count, [count];
    cvta.to.global.u64 %count, %count;
    red.global.add.u32 [%count], 1;
done:
    ret;
}
\0";
/// Threads of its blocks.
const COUNT_THREADS: u32 = 256;

/// What all streams share.
struct Shared {
    calls: Vec<Call>,
    /// The results of each, computed alone.
    expected: Vec<DeviceMemory>,
    count: Kernel,
}

/// A stream with tensors of its own for every call.
struct Lane {
    name: String,
    stream: Arc<Stream>,
    tensors: Vec<Tensors>,
    /// That of all calls: what `tensors` points to, it lives as long.
    _workspace: DeviceMemory,
    /// The calls that it makes.
    order: Vec<usize>,
    /// Of each how many words of its results are wrong.
    differences: DeviceMemory,
    /// How many of them it made so far.
    launched: usize,
    /// Draws its order, and how many it makes at once.
    seed: u64,
}

/// The tensors of a call.
struct Tensors {
    pointers: Pointers,
    results: DeviceMemory,
    /// What is read: it lives as long as the pointers.
    _given: DeviceMemory,
}

impl Lane {
    fn new(device: &Arc<Device>, number: usize, shared: &Shared) -> Result<Lane> {
        let stream = Arc::new(Stream::new(device)?);
        let bytes = shared.calls.iter().map(|call| call.plan.workspace_bytes()).max().unwrap_or(0);
        let workspace = filled(&stream, bytes.next_multiple_of(4), UNWRITTEN)?;
        let tensors = |call: &Call| -> Result<Tensors> {
            let given = DeviceMemory::of(&stream, &call.given.bytes)?;
            let results = DeviceMemory::new(&stream, call.results.bytes.len())?;
            let mut pointers = Pointers { workspace: workspace.address(), ..Pointers::default() };
            call.given.place(given.address(), &mut pointers);
            call.results.place(results.address(), &mut pointers);
            Ok(Tensors { pointers, results, _given: given })
        };
        let tensors = shared.calls.iter().map(tensors).collect::<Result<_>>()?;
        let seed = split_mix(SEED, number as u64);
        let count = PLANS / (THREADS * STREAMS);
        let drawn = |at| (split_mix(seed, at) % shared.calls.len() as u64) as usize;
        let order: Vec<usize> = (0..count as u64).map(drawn).collect();
        let differences = filled(&stream, 4 * count, 0)?;
        let name = format!("stream {number}");
        Ok(Lane { name, stream, tensors, _workspace: workspace, order, differences, launched: 0, seed })
    }

    /// Waits for the calls that it made last, and makes the next.
    fn go_on(&mut self, shared: &Shared, under_way: &UnderWay) -> Result<()> {
        self.stream.synchronize()?;
        under_way.clear(&self.name);
        let some = 1 + split_mix(!self.seed, self.launched as u64) % MOST_AT_ONCE;
        let next = self.launched..self.order.len().min(self.launched + some as usize);
        self.launched = next.end;
        if next.is_empty() {
            return Ok(());
        }
        under_way.set(&self.name, self.describe(next.clone(), shared));
        next.into_iter().try_for_each(|number| self.launch(number, shared))
    }

    fn describe(&self, numbers: Range<usize>, shared: &Shared) -> String {
        let each = numbers.map(|number| format!("\n  {number}: {}", shared.calls[self.order[number]].what));
        each.collect()
    }

    /// Launches a call, and after it the comparison of its results.
    fn launch(&self, number: usize, shared: &Shared) -> Result<()> {
        let which = self.order[number];
        let (call, tensors) = (&shared.calls[which], &self.tensors[which]);
        let words = call.results.words();
        let mut arguments = Arguments::new();
        arguments.pointer(tensors.results.address()).pointer(shared.expected[which].address());
        arguments.i32(i32::try_from(words).expect("small results"));
        arguments.pointer(self.differences.address() + 4 * number as u64);
        let blocks = words.div_ceil(COUNT_THREADS as usize) as u32;
        // SAFETY: the tensors are of the sizes that the plan was made for, the workspace is that of the largest, and
        // this stream alone writes to them and to its counts. The expected results are as large as the results, and
        // only read. Everything lives until the streams are waited for.
        unsafe {
            self.stream.fill(tensors.results.address(), UNWRITTEN, words)?;
            call.plan.run(&tensors.pointers, &self.stream)?;
            launch(shared.count, [blocks, 1, 1], &arguments, &self.stream, false)
        }
    }

    /// The calls whose results were not those that they gave alone.
    fn wrong(&self, shared: &Shared) -> Result<Vec<String>> {
        let mut counts = vec![0; self.differences.bytes()];
        self.differences.copy_to(&mut counts)?;
        let counts = counts.as_chunks().0.iter().map(|&count| u32::from_le_bytes(count));
        let wrong = counts.zip(&self.order).enumerate().filter(|(_, (count, _))| *count > 0);
        let describe = |(number, (count, which)): (usize, (u32, &usize))| {
            let call = &shared.calls[*which];
            let words = call.results.words();
            format!("{}, call {number}, {count} of {words} words: {}", self.name, call.what)
        };
        Ok(wrong.map(describe).collect())
    }
}

/// Memory that holds a word again and again.
fn filled(stream: &Arc<Stream>, bytes: usize, word: u32) -> Result<DeviceMemory> {
    let memory = DeviceMemory::new(stream, bytes)?;
    // SAFETY: whole words of memory that nothing else uses yet.
    unsafe { stream.fill(memory.address(), word, bytes / 4) }?;
    Ok(memory)
}

/// All that a thread launches: while it waits for one stream, the others have work.
fn launch_all(lanes: &mut [Lane], shared: &Shared, under_way: &UnderWay) -> Result<()> {
    while lanes.iter().any(|lane| lane.launched < lane.order.len()) {
        lanes.iter_mut().try_for_each(|lane| lane.go_on(shared, under_way))?;
    }
    // The calls that they made last.
    lanes.iter_mut().try_for_each(|lane| lane.go_on(shared, under_way))
}

/// Returns what was done in words, and which calls were wrong.
fn stress(device: &Arc<Device>, under_way: &UnderWay) -> Result<(String, Vec<String>)> {
    let start = Instant::now();
    let calls = calls(device, under_way)?;
    let computed_alone = start.elapsed().as_secs_f64();
    under_way.set("streams", "getting their tensors".into());
    let stream = Arc::new(Stream::new(device)?);
    let expected = calls.iter().map(|call| DeviceMemory::of(&stream, &call.results.bytes));
    let expected = expected.collect::<Result<_>>()?;
    let count =
        device.kernel(&ptx::variant(COUNT, "count_differences", "count_differences", COUNT_THREADS))?;
    let shared = Shared { calls, expected, count };
    let lanes = (0..THREADS * STREAMS).map(|number| Lane::new(device, number, &shared));
    let mut lanes = lanes.collect::<Result<Vec<_>>>()?;
    under_way.clear("streams");

    let start = Instant::now();
    let outcome = thread::scope(|scope| {
        let shared = &shared;
        let start = |lanes| scope.spawn(move || launch_all(lanes, shared, under_way));
        let threads: Vec<_> = lanes.chunks_mut(STREAMS).map(start).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a thread that does not panic"))
    });
    // However it went, nothing is given back that is still read.
    lanes.iter().try_for_each(|lane| lane.stream.synchronize())?;
    outcome?;
    let seconds = start.elapsed().as_secs_f64();
    let wrong = lanes.iter().map(|lane| lane.wrong(&shared)).collect::<Result<Vec<_>>>()?.concat();
    let launched: usize = lanes.iter().map(|lane| lane.launched).sum();
    let summary = format!(
        "{launched} plans of {} calls on {} streams in {seconds:.1} s, {} wrong; each alone, with the oracle, in \
         {computed_alone:.1} s",
        shared.calls.len(),
        lanes.len(),
        wrong.len()
    );
    Ok((summary, wrong))
}

#[test]
fn plans_beside_one_another_give_what_they_give_alone() {
    let _alone = alone();
    let Some(engine) = gpu::or_skip(CudaEngine::new(0, Precision::Ieee)) else { return };
    let device = engine.device().clone();
    let (summary, wrong) = within(LIMIT, move |under_way| stress(&device, under_way)).unwrap();
    println!("stress: {summary}");
    let some = &wrong[..wrong.len().min(10)];
    assert!(wrong.is_empty(), "{} calls are wrong, among them\n{}", wrong.len(), some.join("\n"));
}

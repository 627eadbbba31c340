//! The suite that every engine passes, on every instruction set of this CPU.

use volup::testing::{self, Fill};
use volup::{DType, Engine};
use volup_cpu::{CpuEngine, Isa};

/// Two threads share the tasks, whatever the machine has.
const THREADS: usize = 2;

fn engines() -> impl Iterator<Item = CpuEngine> {
    Isa::available().into_iter().filter_map(|isa| CpuEngine::with_isa(THREADS, isa))
}

#[test]
fn conformance() {
    for engine in engines() {
        testing::conformance(&engine);
    }
}

#[test]
fn one_thousand_random_runs() {
    for engine in engines() {
        testing::random_runs(&engine, 1000);
    }
}

/// How the work is cut depends on the number of threads, the order of a sum does not. (Statistics
/// are merged tile by tile, so a normalized block may differ in the last place.)
#[test]
fn convolutions_do_not_depend_on_the_number_of_threads() {
    let one = CpuEngine::with_threads(1);
    let others = [
        CpuEngine::with_threads(3),
        CpuEngine::on_team(3, |work| {
            std::thread::scope(|scope| (0..3).for_each(|_| drop(scope.spawn(work))));
        }),
        CpuEngine::on_team(3, |work| work()),
    ];
    for case in testing::cases().iter().filter(|case| case.block.norm().is_none()) {
        let (input, parameters) = case.inputs(DType::F32, Fill::Normal, 5);
        let run = |engine: &CpuEngine| {
            let layer = engine.layer(&case.block, &parameters).unwrap();
            engine.forward(&layer, &input).unwrap()
        };
        for other in &others {
            assert_eq!(run(&one), run(other), "{case}");
        }
    }
}

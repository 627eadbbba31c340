//! The suite that every engine passes, on every instruction set of this CPU.

use volup::testing::{self, Fill};
use volup::{DType, Engine, Gradients, Training, Wanted};
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

#[test]
fn training() {
    for engine in engines() {
        testing::training_conformance(&engine);
    }
}

#[test]
fn one_thousand_random_gradients() {
    for engine in engines() {
        testing::random_training_runs(&engine, 1000);
    }
}

fn other_teams() -> [CpuEngine; 3] {
    [
        CpuEngine::with_threads(3),
        CpuEngine::on_team(3, |work| {
            std::thread::scope(|scope| (0..3).for_each(|_| drop(scope.spawn(work))));
        }),
        CpuEngine::on_team(3, |work| work()),
    ]
}

/// How the work is cut depends on the number of threads, the order of a sum does not. (Statistics
/// are merged tile by tile, so a normalized block may differ in the last place.)
#[test]
fn convolutions_do_not_depend_on_the_number_of_threads() {
    let one = CpuEngine::with_threads(1);
    let others = other_teams();
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

/// Gradients do not, whatever the block.
#[test]
fn gradients_do_not_depend_on_the_number_of_threads() {
    let one = CpuEngine::with_threads(1);
    let others = other_teams();
    for case in testing::cases() {
        let (input, parameters) = case.inputs(DType::F32, Fill::Normal, 5);
        let grad_output =
            testing::tensor(&case.output_shape(), DType::F32, case.format, Fill::Normal, 1.0, 6);
        let layer = one.layer(&case.block, &parameters).unwrap();
        let (_, saved) = one.forward_for_training(&layer, &input).unwrap();
        let run = |engine: &CpuEngine| {
            let Gradients { input, weight, bias, norm_weight, norm_bias } =
                engine.backward(&layer, &input, &saved, &grad_output, Wanted::ALL).unwrap();
            [input, weight, bias, norm_weight, norm_bias]
        };
        for other in &others {
            assert_eq!(run(&one), run(other), "{case}");
        }
    }
}

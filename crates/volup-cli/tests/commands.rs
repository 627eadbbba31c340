//! `volup bench`, `check` and `info`, and what all commands have in common.

mod room;

use room::Room;
use serde_json::Value;
use volup::Precision;
use volup_cuda::CudaEngine;

const SMALL: &str = "n 2, 5x4x3, 4>6, k 3, s 2, p 1, op 1, g 2, bias, relu, gn 3";

#[test]
fn bench_prints_a_table() {
    let room = Room::new();
    let outcome = room.volup(&["bench", "--spec", SMALL, "--seconds", "0"]).ok();
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines.len(), 2);
    assert!(lines[0].contains("median ms") && lines[1].contains("k 3x3x3, s 2x2x2"), "{lines:?}");
}

#[test]
fn bench_prints_json() {
    let room = Room::new();
    let args =
        ["bench", "--json", "--spec", SMALL, "--spec", "1x1x1,1>1,k 1", "--batch", "3", "--seconds", "0"];
    for dtype in ["f32", "f64", "f16", "bf16"] {
        let outcome = room.volup(&[&args[..], &["--dtype", dtype, "--threads", "1"]].concat()).ok();
        let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!(report["engine"]["threads"], "1");
        let rows = report["results"].as_array().unwrap();
        assert_eq!(rows.len(), 2);
        assert!(rows[0]["spec"].as_str().unwrap().starts_with("n 3, 5x4x3"));
        for key in ["median_ms", "p20_ms", "p80_ms", "gflops", "gbytes_per_s", "runs"] {
            assert!(rows[0][key].as_f64().unwrap() > 0.0, "{key}");
        }
    }
}

#[test]
fn bench_knows_the_published_shapes() {
    let room = Room::new();
    let args = ["bench", "--shape", "nnunet-320-256-8", "--batch", "1", "--seconds", "0"];
    assert!(room.volup(&args).ok().stdout.contains("nnunet-320-256-8"));
    room.volup(&[&args[..], &["--max-bytes", "1000"]].concat()).fails(&["--max-bytes 1000"]);
    room.volup(&["bench", "--spec", "n 0, 1x1x1, 1>1, k 1"]).fails(&["empty batch"]);
    room.volup(&["bench", "--spec", "1x1x1, 1>1, k 1", "--batch", "9223372036854775807"])
        .fails(&["overflows"]);
}

#[test]
fn check_passes() {
    let room = Room::new();
    let outcome = room.volup(&["check", "--spec", SMALL]).ok();
    assert!(outcome.stdout.ends_with("8 checks, 0 failed\n"), "{outcome:?}");
    let name = volup::testing::cases()[0].name;
    let outcome = room.volup(&["check", "--case", name, "--dtype", "f32", "--dtype", "bf16"]).ok();
    assert!(outcome.stdout.ends_with("4 checks, 0 failed\n"), "{outcome:?}");
}

#[test]
fn check_looks_at_gradients() {
    let room = Room::new();
    let outcome = room.volup(&["check", "--spec", SMALL, "--dtype", "f32", "--gradients"]).ok();
    assert_eq!(
        outcome.stdout.lines().filter(|line| line.contains("  gradients  (")).count(),
        2,
        "{outcome:?}"
    );
    assert!(outcome.stdout.ends_with("4 checks, 0 failed\n"), "{outcome:?}");
}

#[test]
fn check_samples_what_is_large() {
    let room = Room::new();
    for format in ["", ", channels_last_3d"] {
        let spec = format!("n 2, 16x17x18, 64>32, k 5, s 2, p 2, op 1, bias{format}");
        let outcome = room.volup(&["check", "--dtype", "f32", "--spec", &spec]).ok();
        assert!(outcome.stdout.ends_with("2 checks, 0 failed\n"), "{outcome:?}");
    }
}

#[test]
fn info_says_what_there_is() {
    let room = Room::new();
    let outcome = room.volup(&["info"]).ok();
    assert!(outcome.stdout.starts_with(concat!("volup ", env!("CARGO_PKG_VERSION"))));
    assert!(outcome.stdout.contains("threads"), "{outcome:?}");
    let gpu = match volup_cuda::devices() {
        Ok(devices) if devices.is_empty() => "none: no CUDA device here".into(),
        Ok(devices) => devices[0].to_string(),
        Err(error) => format!("none: {error}"),
    };
    assert!(outcome.stdout.contains(&gpu), "{gpu}: {outcome:?}");
    let info: Value = serde_json::from_str(&room.volup(&["info", "--json"]).ok().stdout).unwrap();
    assert_eq!(info["engines"][0]["engine"], "cpu");
    let devices = info["gpu"]["devices"].as_array().unwrap();
    assert_eq!(devices.len(), volup_cuda::devices().map_or(0, |devices| devices.len()));
    assert!(devices.iter().all(|device| device["memory_bytes"].as_u64() > Some(0)), "{info}");
}

/// Whether there is a GPU or not, what the library says is what the command says.
#[test]
fn a_gpu_that_cannot_be_used_says_why() {
    let room = Room::new();
    for (device, ordinal) in [("cuda", 0), ("cuda:1000000", 1_000_000)] {
        let Err(error) = CudaEngine::new(ordinal, Precision::Ieee) else { continue };
        let error = error.to_string();
        let on = ["--device", device];
        room.volup(&[&["bench", "--spec", SMALL, "--seconds", "0"], &on[..]].concat()).fails(&[&error]);
        room.volup(&[&["check", "--spec", SMALL, "--precision", "tf32"], &on[..]].concat()).fails(&[&error]);
        room.volup(&[&["tune", "--spec", SMALL], &on[..]].concat()).fails(&[&error]);
        let files = room.files();
        room.run(&[&["in.npy", "out.npy"], &on[..]].concat()).fails(&[&error]);
        assert_eq!(room.files(), files);
    }
}

/// On a GPU plans are kept where it is said, of which the next run has one or none; what is not a file is refused.
#[test]
fn tune_is_for_gpus() {
    let room = Room::new();
    room.volup(&["tune", "--spec", SMALL]).fails(&["--device cpu"]);
    let tune = ["tune", "--device", "cuda", "--spec", SMALL, "--seconds", "0", "--plans", "3", "--file"];
    match CudaEngine::new(0, Precision::Ieee) {
        Err(error) => {
            room.volup(&[&tune[..], &["tuning.tsv"]].concat()).fails(&[&error.to_string()]);
            assert!(!room.path("tuning.tsv").exists());
        }
        Ok(_) => {
            for _ in 0..2 {
                let outcome = room.volup(&[&tune[..], &["tuning.tsv"]].concat()).ok();
                assert!(outcome.stdout.ends_with("kept in tuning.tsv\n"), "{outcome:?}");
                let entries = std::fs::read_to_string(room.path("tuning.tsv")).unwrap();
                assert!(entries.lines().filter(|line| !line.is_empty()).count() <= 1, "{entries}");
            }
            room.volup(&[&tune[..], &["in.npy/tuning.tsv"]].concat()).fails(&["in.npy/tuning.tsv"]);
        }
    }
}

#[test]
fn the_cpu_takes_every_precision() {
    let room = Room::new();
    for precision in ["ieee", "tf32"] {
        let args = ["check", "--spec", SMALL, "--dtype", "f32", "--device", "cpu", "--precision", precision];
        room.volup(&args).ok();
    }
}

#[test]
fn wrong_usage_exits_with_2() {
    let room = Room::new();
    for args in [
        &[][..],
        &["fly"],
        &["run"],
        &["run", "in.npy", "out.npy"],
        &["run", "--decoder", "d", "in.npy", "out.npy", "--tile", "0"],
        &["run", "--decoder", "d", "in.npy", "out.npy", "--threads", "0"],
        &["run", "--decoder", "d", "in.npy", "out.npy", "--dtype", "int8"],
        &["run", "--decoder", "d", "in.npy", "out.npy", "--max-bytes", "lots"],
        &["bench", "--shape", "kb9-99"],
        &["bench", "--spec", "2x2x2, 1>1"],
        &["bench", "--seconds", "-1"],
        &["bench", "--device", "tpu"],
        &["bench", "--device", "cuda:first"],
        &["check", "--precision", "fp8"],
        &["check", "--algorithm", "im2col"],
        &["check", "--case", "none"],
        &["check", "--spec", "2x2x2, 4>6, k 3, g 4"],
    ] {
        let outcome = room.volup(args);
        assert_eq!(outcome.code, 2, "{args:?}: {outcome:?}");
    }
}

#[test]
fn every_help_has_an_example() {
    let room = Room::new();
    for command in ["run", "bench", "check", "info"] {
        let help = room.volup(&[command, "--help"]).ok().stdout;
        assert!(help.contains(&format!("  volup {command}")), "{help}");
    }
    assert!(room.volup(&["--help"]).ok().stdout.contains("Exit codes"));
}

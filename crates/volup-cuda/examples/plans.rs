//! Plans for an H200 as JSON, without a GPU: what `bench/replay.py` runs, there, with kernels that were compiled
//! since.
//!
//! ```sh
//! cargo run --release -p volup-cuda --example plans -- kb2-61,kb1-73 tf32,bf16 ncdhw,ndhwc 3 > plans.json
//! ```
//!
//! Names of the case table or of published shapes, `cases` for the whole table, or one case
//! in the notation of the table; precisions `ieee`, `tf32`, `bf16`, `f16`, `f64`; layouts, of the input and the output or, as
//! `ndhwc>ncdhw`, of both; how many plans of
//! each, those that are expected to be fastest; if wanted, `training`, `backward` or `recompute` for the
//! plan of that pass, and of which family. `MEMORY_RATE`, in the environment: bytes a second, for another Hopper
//! (an H100: 3352000000000).

use serde_json::{Value, json};
use std::error::Error;
use volup::testing::{Case, cases, published};
use volup::{DType, MemoryFormat, Precision, Wanted};
use volup_cuda::{Arch, Argument, DeviceInfo, Manifest, Plan, Request, Step, Task};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (task, family) = match arguments.get(4).map(String::as_str) {
        Some("training") => (Task::Training, arguments.get(5)),
        Some("backward") => (Task::Backward(Wanted::ALL), arguments.get(5)),
        Some("recompute") => (Task::Recompute(Wanted::ALL), arguments.get(5)),
        _ => (Task::Forward, arguments.get(4)),
    };
    let family = family.map(|name| name.parse()).transpose()?;
    let [names, precisions, layouts, most, ..] = &arguments[..] else {
        return Err(
            "expected: shapes, precisions, layouts (each divided by commas), how many plans, perhaps a family".into()
        );
    };
    let device = DeviceInfo {
        name: "H200".into(),
        arch: Arch { major: 9, minor: 0 },
        multiprocessors: 132,
        l2_bytes: 50 << 20,
        memory_bytes: 140 << 30,
        memory_rate: std::env::var("MEMORY_RATE").map_or(Ok(0), |rate| rate.parse())?,
        driver_version: 13000,
    };
    let variants = Manifest::embedded().for_device(&device)?;
    let mut plans = Vec::new();
    // Training keeps nothing of a convolution alone.
    let trains = |case: &Case| task != Task::Training || !case.block.is_bare();
    for case in wanted(names)?.into_iter().filter(trains) {
        for precision in precisions.split(',') {
            for layout in layouts.split(',') {
                let request = Request { task, algorithm: family, ..request(&case, precision, layout)? };
                for plan in Plan::candidates(&request, &device, &variants, most.parse()?)? {
                    plans.push(described(&case, &request, [precision, layout], &plan));
                }
            }
        }
    }
    println!("{}", Value::Array(plans));
    Ok(())
}

/// Cases by their names, or one by its notation.
fn wanted(names: &str) -> Result<Vec<Case>, Box<dyn Error>> {
    if names.contains('>') {
        return Ok(vec![Case::parse("given", names, "what was asked for")?]);
    }
    if names == "cases" {
        return Ok(cases().into_iter().filter(|case| case.batch != Some(0)).collect());
    }
    let find = |name| published().into_iter().chain(cases()).find(|case| case.name == name);
    names
        .split(',')
        .map(|name| find(name).ok_or_else(|| format!("no shape is called {name}").into()))
        .collect()
}

fn request(case: &Case, precision: &str, layout: &str) -> Result<Request, Box<dyn Error>> {
    let (dtype, precision) = match precision {
        "ieee" => (DType::F32, Precision::Ieee),
        "tf32" => (DType::F32, Precision::Tf32),
        "bf16" => (DType::Bf16, Precision::Ieee),
        "f16" => (DType::F16, Precision::Ieee),
        "f64" => (DType::F64, Precision::Ieee),
        other => return Err(format!("no precision is called {other}").into()),
    };
    let format = |name| match name {
        "ncdhw" => Ok(MemoryFormat::Contiguous),
        "ndhwc" => Ok(MemoryFormat::ChannelsLast3d),
        other => Err(format!("no layout is called {other}")),
    };
    let (input, output) = layout.split_once('>').unwrap_or((layout, layout));
    Ok(Request {
        task: Task::Forward,
        block: case.block,
        geometry: case.geometry(),
        dtype,
        precision,
        input_format: format(input)?,
        output_format: format(output)?,
        algorithm: None,
    })
}

fn described(case: &Case, request: &Request, [precision, layout]: [&str; 2], plan: &Plan) -> Value {
    let (geometry, conv) = (&request.geometry, request.geometry.conv());
    json!({
        "shape": case.name, "task": format!("{:?}", request.task), "precision": precision, "layout": layout,
        "input": geometry.input_shape(), "weight": conv.weight_shape(), "output": geometry.output_shape(),
        "stride": conv.stride(), "padding": conv.padding(), "output_padding": conv.output_padding(),
        "dilation": conv.dilation(), "groups": conv.groups(), "bias": conv.has_bias(),
        "activation": case.block.activation().map(|a| a.to_string()),
        "norm": case.block.norm().map(|n| json!([n.groups(), n.eps(), n.affine()])),
        "post_activation": case.block.post_activation().map(|a| a.to_string()),
        "plan": plan.to_string(), "expected_ms": plan.seconds() * 1e3, "workspace": plan.workspace_bytes,
        "steps": plan.steps.iter().map(step).collect::<Vec<_>>(),
    })
}

fn step(step: &Step) -> Value {
    match step {
        Step::Clear { at, words } => json!({ "clear": [at, words] }),
        Step::Launch { variant, grid, shared, arguments, overlap } => json!({
            "cubin": variant.name, "entry": variant.entry, "threads": variant.threads, "grid": grid,
            "shared": shared, "overlap": overlap,
            "arguments": arguments.iter().map(argument).collect::<Vec<_>>(),
        }),
    }
}

/// What it is, and its value; of an address the buffer, and bytes into it.
fn argument(argument: &Argument) -> Value {
    match argument {
        Argument::Pointer(buffer, offset) => json!([format!("{buffer:?}"), offset]),
        Argument::I32(value) => json!(["i32", value]),
        Argument::I64(value) => json!(["i64", value]),
        Argument::F32(value) => json!(["f32", value]),
        Argument::F64(value) => json!(["f64", value]),
    }
}

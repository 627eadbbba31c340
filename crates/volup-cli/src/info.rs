//! `volup info`: what this build can do here.

use anyhow::Result;
use serde_json::{Value, json};
use std::io::Write;
use volup::Engine;
use volup_cpu::CpuEngine;
use volup_cuda::{DeviceInfo, Manifest};

/// Show the version, the engines of this build and the GPUs of this system.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  volup info\n  volup info --json")]
pub struct Args {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Prints the version, the CPU engine and the GPUs.
pub fn run(args: &Args) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let lines = CpuEngine::new().describe();
    let devices = volup_cuda::devices();
    let mut out = std::io::stdout().lock();
    if args.json {
        let cpu: serde_json::Map<_, _> =
            lines.into_iter().map(|(name, value)| (name.to_string(), value.into())).collect();
        let gpu = match devices {
            Ok(devices) => json!({ "devices": devices.iter().map(description).collect::<Vec<_>>() }),
            Err(error) => json!({ "devices": [], "error": error.to_string() }),
        };
        let info = json!({ "version": version, "engines": [cpu], "gpu": gpu });
        writeln!(out, "{info:#}")?;
        return Ok(());
    }
    writeln!(out, "volup {version}")?;
    for (name, value) in lines {
        writeln!(out, "{name:<12} {value}")?;
    }
    match devices {
        Ok(devices) if devices.is_empty() => writeln!(out, "{:<12} none: no CUDA device here", "gpu")?,
        Ok(devices) => {
            for (ordinal, device) in devices.iter().enumerate() {
                let kernels = kernels(device).map(|count| format!("{count} kernels"));
                let kernels = kernels.unwrap_or_else(|error| error.to_string());
                writeln!(out, "{:<12} {device}; {kernels}", format!("cuda:{ordinal}"))?;
            }
        }
        Err(error) => writeln!(out, "{:<12} none: {error}", "gpu")?,
    }
    Ok(())
}

/// How many kernels this build has for a GPU.
fn kernels(device: &DeviceInfo) -> volup::Result<usize> {
    Manifest::embedded().for_device(device).map(|kernels| kernels.len())
}

/// A GPU as JSON.
fn description(device: &DeviceInfo) -> Value {
    let mut description = json!({
        "name": device.name, "arch": device.arch.to_string(), "multiprocessors": device.multiprocessors,
        "l2_bytes": device.l2_bytes, "memory_bytes": device.memory_bytes, "driver": device.driver(),
    });
    match kernels(device) {
        Ok(count) => description["kernels"] = count.into(),
        Err(error) => description["error"] = error.to_string().into(),
    }
    description
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_without_kernels_says_why() {
        // No build has kernels for these.
        let device = DeviceInfo {
            name: "GeForce 8800".into(),
            arch: volup_cuda::Arch { major: 1, minor: 0 },
            multiprocessors: 16,
            l2_bytes: 0,
            memory_bytes: 768 << 20,
            memory_rate: 0,
            driver_version: 13000,
        };
        let description = description(&device);
        assert_eq!((&description["arch"], &description["driver"]), (&"sm_10".into(), &"13.0 (r580)".into()));
        let error = description["error"].as_str().unwrap();
        assert!(error.contains("kernels"), "{error}");
    }
}

//! `volup info`: what this build can do here.

use crate::arguments;
use anyhow::Result;
use std::io::Write;
use volup::Engine;

/// Show the version and the engines of this build.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  volup info\n  volup info --json")]
pub struct Args {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Prints the version and the engines.
pub fn run(args: &Args) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let lines = arguments::engine(None).describe();
    let mut out = std::io::stdout().lock();
    if args.json {
        let cpu: serde_json::Map<_, _> =
            lines.into_iter().map(|(name, value)| (name.to_string(), value.into())).collect();
        let info = serde_json::json!({ "version": version, "engines": [cpu], "gpu": null });
        writeln!(out, "{info:#}")?;
    } else {
        writeln!(out, "volup {version}")?;
        for (name, value) in lines {
            writeln!(out, "{name:<12} {value}")?;
        }
        writeln!(out, "{:<12} none: this build has no GPU engine", "gpu")?;
    }
    Ok(())
}

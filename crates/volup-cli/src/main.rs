//! `volup`: learned volumetric upsampling from the command line.

mod arguments;
mod bench;
mod check;
mod failure;
mod info;
mod output;
mod run;
mod tune;
mod volume;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

const EXIT_CODES: &str = "\
Exit codes: 0 all went well, 1 the run or a check failed, 2 the arguments are wrong.";

/// Learned volumetric upsampling: 3D transposed convolutions, fused with activation and group norm.
#[derive(Parser)]
#[command(name = "volup", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Bench(bench::Args),
    Check(check::Args),
    Tune(tune::Args),
    Info(info::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Bench(args) => bench::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Check(args) => check::run(&args),
        Command::Tune(args) => tune::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Info(args) => info::run(&args).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        if !failure::is_broken_pipe(&error) {
            eprintln!("error: {}", failure::one_line(&error));
        }
        ExitCode::FAILURE
    })
}

//! Embeds the kernels: turns the manifest that their build wrote into Rust, or into an empty one
//! where they were not built.

#[path = "src/listing.rs"]
mod listing;

use listing::{Listed, Listing};
use std::env;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The folder of the manifest and its cubins, in place of the workspace's.
const FOLDER: &str = "VOLUP_KERNELS";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/listing.rs");
    println!("cargo::rerun-if-env-changed={FOLDER}");
    if let Err(error) = run() {
        println!("cargo::error={error}");
    }
}

fn run() -> Result<(), String> {
    let given = env::var_os(FOLDER).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let is_given = given.is_some();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = given.unwrap_or_else(|| crates.join("volup-kernels/cubins"));
    let manifest = folder.join("manifest.json");
    let listing = match std::fs::read_to_string(&manifest) {
        Ok(text) => {
            watch(&manifest);
            listing::parse(&text).map_err(|error| format!("{}: {error}", manifest.display()))?
        }
        Err(error) if is_given => return Err(format!("{FOLDER}: {}: {error}", manifest.display())),
        Err(_) => {
            // They may be built later. A path that does not exist would count as changed each time.
            let kernels = crates.join("volup-kernels");
            if let Some(there) = [&folder, &kernels].into_iter().find(|path| path.exists()) {
                watch(there);
            }
            Listing { compiler: String::new(), variants: Vec::new() }
        }
    };
    let code = code(&listing, &folder)?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?).join("manifest.rs");
    std::fs::write(&out, code).map_err(|error| format!("{}: {error}", out.display()))
}

fn watch(path: &Path) {
    println!("cargo::rerun-if-changed={}", path.display());
}

/// The manifest as an expression.
fn code(listing: &Listing, folder: &Path) -> Result<String, String> {
    let mut code = format!("Manifest {{ compiler: {:?}, variants: vec![\n", listing.compiler);
    for variant in &listing.variants {
        let Listed { name, family, entry, arch: (major, minor), file, types, params, .. } = variant;
        let Listed { registers, local_bytes, shared_bytes, threads, exact, hash, .. } = variant;
        let cubin = folder.join(file);
        let cubin = cubin.canonicalize().map_err(|error| format!("{name}: {}: {error}", cubin.display()))?;
        watch(&cubin);
        let done = writeln!(
            code,
            "Variant {{ name: {name:?}, family: {family:?}, entry: {entry:?}, \
             arch: Arch {{ major: {major}, minor: {minor} }}, types: &{types:?}, params: &{params:?}, \
             registers: {registers}, local_bytes: {local_bytes}, shared_bytes: {shared_bytes}, \
             threads: {threads}, exact: {exact}, hash: {hash:?}, cubin: cubin!({cubin:?}) }},"
        );
        done.map_err(|error| error.to_string())?;
    }
    code.push_str("] }");
    Ok(code)
}

//! The list of variants: which kernels are compiled, with which types and tile sizes, and why.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::collections::{BTreeMap, HashSet};

/// The architecture that kernels in CUDA C++ are for.
pub const CUDA_ARCH: &str = "sm_90";

/// One kernel with its types and sizes filled in.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// The file that the kernel is in: `src/<family>.rs`, or `src/cuda/<family>.cu` of one with `threads`.
    pub family: String,
    /// The kernel's function.
    pub kernel: String,
    /// Type arguments, in the function's order.
    #[serde(default)]
    pub types: Vec<String>,
    /// Number arguments by name, in the function's order (they follow the types).
    #[serde(default)]
    pub params: toml::Table,
    /// As in [`Options`].
    pub occupancy: Option<i32>,
    /// As in [`Options`].
    pub worker_warps: Option<i32>,
    /// Threads of a block, which CUDA C++ leaves to the launch. Only its kernels have this.
    pub threads: Option<u32>,
    /// Other options, by how the names of the architectures start that they are for: `on.sm_8`.
    #[serde(default)]
    pub on: BTreeMap<String, Options>,
    /// How the names of the architectures start that it is not compiled for, since it would keep values in
    /// local memory where other tiles do not.
    #[serde(default)]
    pub not_for: Vec<String>,
    /// What the variant is for.
    pub why: String,
}

/// What the compiler may be told about a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// Blocks that should fit on a multiprocessor at once; the compiler's choice if missing.
    pub occupancy: Option<i32>,
    /// Warps of a block that compute; the compiler's choice if missing.
    pub worker_warps: Option<i32>,
}

impl Variant {
    /// The options for an architecture.
    pub fn options(&self, arch: &str) -> Options {
        let own = Options { occupancy: self.occupancy, worker_warps: self.worker_warps };
        self.on
            .iter()
            .find(|(start, _)| arch.starts_with(start.as_str()))
            .map_or(own, |(_, options)| *options)
    }

    /// Whether it is CUDA C++, which is written for one architecture and runs on no other.
    pub fn is_cuda(&self) -> bool {
        self.threads.is_some()
    }

    /// The function's name in the cubin.
    pub fn entry(&self) -> String {
        if self.is_cuda() { self.kernel.clone() } else { format!("{}_entry", self.kernel) }
    }

    /// Whether it is compiled for an architecture.
    pub fn is_for(&self, arch: &str) -> bool {
        (!self.is_cuda() || arch == CUDA_ARCH)
            && !self.not_for.iter().any(|start| arch.starts_with(start.as_str()))
    }

    /// `kernel_types_sizes`, for example `linear_gemm_bf16_128x64x64`: the name of the cubin, in the
    /// manifest and in every message.
    pub fn name(&self) -> String {
        let mut name = self.kernel.clone();
        for part in self.types.iter().map(String::as_str) {
            name = format!("{name}_{part}");
        }
        let sizes: Vec<String> = self.params.values().map(ToString::to_string).collect();
        if sizes.is_empty() { name } else { format!("{name}_{}", sizes.join("x")) }
    }

    /// The arguments of the kernel's generics, in order.
    pub fn generics(&self) -> Vec<String> {
        let sizes = self.params.values().map(ToString::to_string);
        self.types.iter().cloned().chain(sizes).collect()
    }
}

/// Reads `variants.toml`.
pub fn parse(text: &str) -> Result<Vec<Variant>> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        variant: Vec<Variant>,
    }
    let file: File = toml::from_str(text).context("the list of variants")?;
    let mut names = HashSet::new();
    for variant in &file.variant {
        ensure!(names.insert(variant.name()), "{} is listed twice", variant.name());
        ensure!(!variant.why.is_empty(), "{} does not say why it exists", variant.name());
    }
    Ok(file.variant)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: &str = "[[variant]]\nfamily = \"pack\"\nkernel = \"pack_x\"\ntypes = [\"f16\"]\n\
                       params = { BR = 64, BC = 8 }\nwhy = \"x\"\n";

    fn refused(text: &str) -> String {
        format!("{:#}", parse(text).unwrap_err())
    }

    #[test]
    fn a_list_is_read() {
        let variants = parse(&(ROW.to_string() + "occupancy = 2\n")).unwrap();
        let [variant] = variants.as_slice() else { panic!("{variants:?}") };
        assert_eq!(variant.name(), "pack_x_f16_64x8");
        assert_eq!(variant.generics(), ["f16", "64", "8"]);
        assert_eq!((variant.occupancy, variant.worker_warps), (Some(2), None));
    }

    #[test]
    fn cuda_is_for_one_architecture() {
        let of = |more: &str| parse(&(ROW.to_string() + more)).unwrap().remove(0);
        let (tile, cuda) = (of(""), of("threads = 256\n"));
        assert_eq!([tile.entry(), cuda.entry()], ["pack_x_entry", "pack_x"]);
        assert!(tile.is_for("sm_90") && tile.is_for("sm_80") && !tile.is_cuda());
        assert!(cuda.is_for("sm_90") && !cuda.is_for("sm_80") && !cuda.is_for("sm_103"));
    }

    #[test]
    fn architectures_have_their_options_or_none() {
        let row = ROW.to_string() + "occupancy = 2\non.sm_8 = { occupancy = 1 }\nnot_for = [\"sm_12\"]\n";
        let variant = parse(&row).unwrap().remove(0);
        let occupancy = |arch| variant.options(arch).occupancy;
        assert_eq!([occupancy("sm_80"), occupancy("sm_90")], [Some(1), Some(2)]);
        assert!(variant.is_for("sm_100") && !variant.is_for("sm_120"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert!(refused(&ROW.repeat(2)).contains("pack_x_f16_64x8 is listed twice"));
        assert!(refused(&ROW.replace("\"x\"", "\"\"")).contains("pack_x_f16_64x8 does not say why"));
        assert!(refused(&ROW.replace("why = \"x\"", "")).contains("why"));
        assert!(refused(&(ROW.to_string() + "ocupancy = 2\n")).contains("ocupancy"));
        assert!(refused(&(ROW.to_string() + "on.sm_8 = { warps = 2 }\n")).contains("warps"));
        assert!(refused("[[variant]]\nfamily = 7\n").contains("the list of variants"));
        assert!(refused("").contains("variant"));
    }

    #[test]
    fn sizes_keep_their_order() {
        let variants = parse(&ROW.replace("BR = 64, BC = 8", "Z = 3, A = 1, M = 2")).unwrap();
        assert_eq!(variants[0].name(), "pack_x_f16_3x1x2");
    }
}

//! Which kernels this build contains.

use crate::{Arch, DeviceInfo};
use std::sync::OnceLock;
use volup::{Error, Result};

/// A compiled kernel: a cubin, ready for the driver.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cubin(&'static [u8]);

impl Cubin {
    /// No code at all, for plans that are never run.
    pub const NONE: Cubin = Cubin(&[]);

    /// A cubin in memory.
    ///
    /// # Safety
    /// The bytes are a whole module that the driver can load: it takes only their address and trusts
    /// what they say about their length.
    pub const unsafe fn new(bytes: &'static [u8]) -> Cubin {
        Cubin(bytes)
    }

    /// The bytes.
    pub fn bytes(self) -> &'static [u8] {
        self.0
    }
}

impl std::fmt::Debug for Cubin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cubin({} bytes)", self.0.len())
    }
}

/// One kernel: a family's code compiled for types, tile sizes and an architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Unique in its architecture.
    pub name: &'static str,
    /// The family that it belongs to.
    pub family: &'static str,
    /// The function's name in the cubin.
    pub entry: &'static str,
    /// The architecture that it was compiled for.
    pub arch: Arch,
    /// The types that it was compiled for.
    pub types: &'static [&'static str],
    /// Its compile-time sizes by name.
    pub params: &'static [(&'static str, i64)],
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of local memory a thread: 0, since the kernels' build refuses others.
    pub local_bytes: u32,
    /// Bytes of shared memory a block.
    pub shared_bytes: u32,
    /// Threads of a block as the launch counts them: 1 where they are part of the code.
    pub threads: u32,
    /// Whether it runs on its architecture alone, not on later ones of the generation.
    pub exact: bool,
    /// The hash of its sources, options, compiler and architecture.
    pub hash: &'static str,
    /// Its code.
    pub cubin: Cubin,
}

impl Variant {
    /// A compile-time size.
    pub fn param(&self, name: &str) -> Option<i64> {
        self.params.iter().find(|(other, _)| *other == name).map(|&(_, value)| value)
    }
}

/// All kernels of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The compiler that made them; empty where there are none.
    pub compiler: &'static str,
    /// The kernels.
    pub variants: Vec<Variant>,
}

/// A cubin of a file, aligned as the driver's own would be.
#[allow(unused_macros, reason = "a build without kernels embeds none")]
macro_rules! cubin {
    ($path:literal) => {{
        #[repr(align(64))]
        struct Aligned<const N: usize>([u8; N]);
        static ALIGNED: Aligned<{ include_bytes!($path).len() }> = Aligned(*include_bytes!($path));
        // SAFETY: the kernels' build wrote this file, and wrote it whole.
        unsafe { Cubin::new(&ALIGNED.0) }
    }};
}

impl Manifest {
    /// The kernels of this build.
    pub fn embedded() -> &'static Manifest {
        static EMBEDDED: OnceLock<Manifest> = OnceLock::new();
        EMBEDDED.get_or_init(|| include!(concat!(env!("OUT_DIR"), "/manifest.rs")))
    }

    /// The architectures that there are kernels for, in ascending order.
    pub fn archs(&self) -> Vec<Arch> {
        let mut archs: Vec<Arch> = self.variants.iter().map(|variant| variant.arch).collect();
        archs.sort_unstable();
        archs.dedup();
        archs
    }

    /// The kernels for a device: those of the closest architecture whose cubins it runs.
    ///
    /// # Errors
    /// [`Error::NoKernels`] if there are none at all, [`Error::NoKernelsForArch`].
    pub fn for_device(&self, device: &DeviceInfo) -> Result<Vec<&Variant>> {
        let archs = self.archs();
        if archs.is_empty() {
            return Err(Error::NoKernels);
        }
        let Some(&closest) = archs.iter().rfind(|&&built| device.arch.runs(built)) else {
            let built = archs.iter().map(Arch::to_string).collect::<Vec<_>>().join(", ");
            return Err(Error::NoKernelsForArch {
                device: device.name.clone(),
                arch: device.arch.to_string(),
                built,
            });
        };
        let runs = |variant: &&Variant| !variant.exact || variant.arch == device.arch;
        Ok(self.variants.iter().filter(|variant| variant.arch == closest).filter(runs).collect())
    }

    /// The kernel of a name for a device.
    ///
    /// # Errors
    /// As [`Manifest::for_device`]; [`Error::MissingKernel`].
    pub fn variant(&self, device: &DeviceInfo, name: &str) -> Result<&Variant> {
        let mut variants = self.for_device(device)?.into_iter();
        let missing = || Error::MissingKernel { name: name.into(), arch: device.arch.to_string() };
        variants.find(|variant| variant.name == name).ok_or_else(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::made_up;

    fn variant(name: &'static str, major: u32, minor: u32) -> Variant {
        Variant {
            name,
            family: "linear_gemm",
            entry: "linear_gemm_entry",
            arch: Arch { major, minor },
            types: &["bf16"],
            params: &[("BM", 128), ("BN", 64)],
            registers: 168,
            local_bytes: 0,
            shared_bytes: 100_000,
            threads: 1,
            exact: false,
            hash: "0af3",
            cubin: Cubin::NONE,
        }
    }

    fn manifest() -> Manifest {
        let variants = vec![
            variant("a", 9, 0),
            variant("a", 8, 6),
            variant("b", 8, 6),
            variant("a", 8, 0),
            variant("c", 8, 0),
        ];
        Manifest { compiler: "tileiras 13.5.37", variants }
    }

    #[test]
    fn the_closest_architecture_is_chosen() {
        let manifest = manifest();
        for ((major, minor), expected, names) in [
            ((8, 0), (8, 0), "a c"),
            ((8, 6), (8, 6), "a b"),
            ((8, 7), (8, 6), "a b"),
            ((8, 9), (8, 6), "a b"),
            ((9, 0), (9, 0), "a"),
        ] {
            let found = manifest.for_device(&made_up(major, minor)).unwrap();
            assert!(found.iter().all(|v| v.arch == Arch { major: expected.0, minor: expected.1 }));
            assert_eq!(found.iter().map(|v| v.name).collect::<Vec<_>>().join(" "), names);
        }
        assert_eq!(manifest.variant(&made_up(8, 9), "b").unwrap().param("BN"), Some(64));
        assert_eq!(manifest.variant(&made_up(8, 9), "b").unwrap().param("BK"), None);
    }

    #[test]
    fn what_is_for_one_architecture_runs_on_no_other() {
        let variants = vec![variant("a", 9, 0), Variant { exact: true, ..variant("b", 9, 0) }];
        let manifest = Manifest { compiler: "tileiras 13.5.37", variants };
        for (minor, names) in [(0, "a b"), (1, "a"), (3, "a")] {
            let found = manifest.for_device(&made_up(9, minor)).unwrap();
            assert_eq!(found.iter().map(|v| v.name).collect::<Vec<_>>().join(" "), names);
        }
    }

    #[test]
    fn what_there_is_no_kernel_for_is_named() {
        let manifest = manifest();
        for (major, minor) in [(7, 5), (10, 0), (12, 0)] {
            let error = manifest.for_device(&made_up(major, minor)).unwrap_err();
            assert!(
                matches!(&error, Error::NoKernelsForArch { built, .. } if built == "sm_80, sm_86, sm_90")
            );
        }
        let error = manifest.variant(&made_up(9, 0), "b").unwrap_err();
        assert!(matches!(&error, Error::MissingKernel { name, arch } if name == "b" && arch == "sm_90"));
        let empty = Manifest { compiler: "", variants: vec![] };
        assert!(matches!(empty.for_device(&made_up(9, 0)), Err(Error::NoKernels)));
    }

    #[test]
    fn what_is_embedded_is_whole() {
        let embedded = Manifest::embedded();
        assert_eq!(embedded.compiler.is_empty(), embedded.variants.is_empty());
        assert!(embedded.variants.iter().all(|variant| variant.cubin.bytes().starts_with(b"\x7fELF")));
        let found = embedded.for_device(&made_up(1, 0));
        assert!(matches!(found, Err(Error::NoKernels | Error::NoKernelsForArch { .. })));
    }
}

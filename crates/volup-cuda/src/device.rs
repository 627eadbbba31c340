//! What planning has to know of a GPU: plain values, so that it is tested without one.

use std::fmt;

/// A GPU architecture, as in `sm_90`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arch {
    /// The generation: 8 for Ampere and Ada, 9 for Hopper, 10 and 12 for Blackwell.
    pub major: u32,
    /// The variant within it.
    pub minor: u32,
}

impl Arch {
    /// Whether a GPU of this architecture runs what was compiled for another: that of its own
    /// generation, as old as itself or older.
    pub fn runs(self, built: Arch) -> bool {
        built.major == self.major && built.minor <= self.minor
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

/// A GPU and its driver.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeviceInfo {
    /// Its name, as in `NVIDIA H200`.
    pub name: String,
    /// Its architecture.
    pub arch: Arch,
    /// How many blocks run side by side at least.
    pub multiprocessors: usize,
    /// The size of its L2 cache.
    pub l2_bytes: usize,
    /// The size of its memory.
    pub memory_bytes: usize,
    /// Bytes a second that its memory moves at most, by its clock and width; 0 where the driver does not say.
    pub memory_rate: u64,
    /// The newest CUDA version that the driver knows, as `1000 * major + 10 * minor`.
    pub driver_version: i32,
}

impl DeviceInfo {
    /// Bytes a second that something moves which had such a rate on an H200: no more than the memory has here.
    pub(crate) fn memory(&self, of_h200: f64) -> f64 {
        if self.memory_rate == 0 { of_h200 } else { of_h200.min(self.memory_rate as f64) }
    }

    /// The newest CUDA version that the driver knows, and the driver branch that it came with where
    /// that is known: `13.0 (r580)`.
    pub fn driver(&self) -> String {
        driver_name(self.driver_version)
    }
}

impl fmt::Display for DeviceInfo {
    /// For example `NVIDIA H200, sm_90, 132 multiprocessors, 60 MiB of L2, 139.8 GiB, driver 13.0 (r580)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {}, {} multiprocessors, {} MiB of L2, {:.1} GiB, driver {}",
            self.name,
            self.arch,
            self.multiprocessors,
            self.l2_bytes >> 20,
            self.memory_bytes as f64 / f64::from(1 << 30),
            self.driver()
        )
    }
}

/// A CUDA version with the driver branch that it came with, where that is known: `12.8 (r570)`.
pub(crate) fn driver_name(version: i32) -> String {
    let (major, minor) = (version / 1000, version % 1000 / 10);
    let branch = match (major, minor) {
        (11, 4) => " (r470)",
        (11, 5) => " (r495)",
        (11, 6) => " (r510)",
        (11, 7) => " (r515)",
        (11, 8) => " (r520)",
        (12, 0) => " (r525)",
        (12, 1) => " (r530)",
        (12, 2) => " (r535)",
        (12, 3) => " (r545)",
        (12, 4) => " (r550)",
        (12, 5) => " (r555)",
        (12, 6) => " (r560)",
        (12, 7) => " (r565)",
        (12, 8) => " (r570)",
        (12, 9) => " (r575)",
        (13, 0) => " (r580)",
        _ => "",
    };
    format!("{major}.{minor}{branch}")
}

#[cfg(test)]
pub(crate) fn made_up(major: u32, minor: u32) -> DeviceInfo {
    DeviceInfo {
        name: "made up".into(),
        arch: Arch { major, minor },
        multiprocessors: 132,
        l2_bytes: 60 << 20,
        memory_bytes: 141 << 30,
        memory_rate: 0,
        driver_version: 13000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubins_run_on_their_generation_from_their_variant_on() {
        let arch = |major, minor| Arch { major, minor };
        assert!(arch(8, 9).runs(arch(8, 0)) && arch(8, 9).runs(arch(8, 9)));
        assert!(
            !arch(8, 0).runs(arch(8, 6)) && !arch(9, 0).runs(arch(8, 9)) && !arch(12, 0).runs(arch(10, 0))
        );
        assert_eq!(arch(12, 0).to_string(), "sm_120");
    }

    #[test]
    fn a_device_reads_well() {
        assert_eq!(
            made_up(9, 0).to_string(),
            "made up, sm_90, 132 multiprocessors, 60 MiB of L2, 141.0 GiB, driver 13.0 (r580)"
        );
        assert_eq!([12080, 13020].map(driver_name), ["12.8 (r570)", "13.2"]);
    }
}

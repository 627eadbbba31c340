//! Kernels of the tests' own, as text that the driver compiles for whatever device there is.

use volup_cuda::{Arch, Cubin, Variant};

/// A function of a module in PTX, which ends in a NUL; blocks have so many threads.
pub fn variant(text: &'static str, name: &'static str, entry: &'static str, threads: u32) -> Variant {
    assert!(text.ends_with('\0'), "the driver reads up to a NUL");
    // SAFETY: PTX text that ends in a NUL is a module too.
    let cubin = unsafe { Cubin::new(text.as_bytes()) };
    let arch = Arch { major: 8, minor: 0 };
    Variant {
        name,
        family: "test",
        entry,
        arch,
        types: &[],
        params: &[],
        registers: 0,
        local_bytes: 0,
        shared_bytes: 0,
        threads,
        exact: false,
        hash: "",
        cubin,
    }
}

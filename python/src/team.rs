//! PyTorch's own threads, for the engine to compute on.
//!
//! PyTorch's CPU operators run on OpenMP's threads, which spin for milliseconds after each operator,
//! in case another follows. Threads of the engine's own would share the cores with them: measured on
//! two cores, a call right after a PyTorch operator took 3 ms longer than one on its own. On the very
//! same threads there is nobody to share with, and nobody to wake.

use std::ffi::{c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use volup_cpu::CpuEngine;

/// What runs on every thread of a team.
type Work<'a> = &'a (dyn Fn() + Sync);

/// `GOMP_parallel` of GNU's OpenMP, which LLVM's and Intel's export too: calls the function with the
/// data on up to that many threads, this one among them, and returns when all have.
type GompParallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// The OpenMP that is loaded, and the process that loaded it.
struct OpenMp {
    parallel: GompParallel,
    process: u32,
}

/// Looks for it among the libraries that PyTorch has loaded; `import torch` comes before.
fn open_mp() -> Option<&'static OpenMp> {
    static FOUND: OnceLock<Option<OpenMp>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        #[cfg(unix)]
        {
            // SAFETY: looking a name up has no requirements; the signature is that of libgomp's ABI,
            // which is stable.
            unsafe {
                let symbol = libc::dlsym(libc::RTLD_DEFAULT, c"GOMP_parallel".as_ptr());
                let parallel =
                    (!symbol.is_null()).then(|| std::mem::transmute::<*mut c_void, GompParallel>(symbol));
                parallel.map(|parallel| OpenMp { parallel, process: std::process::id() })
            }
        }
        #[cfg(not(unix))]
        None
    });
    // OpenMP's threads do not survive a fork, and it does not know.
    found.as_ref().filter(|found| found.process == std::process::id())
}

/// What crosses the C interface.
struct Call<'a> {
    work: Work<'a>,
    panicked: AtomicBool,
}

extern "C" fn run(data: *mut c_void) {
    // SAFETY: `data` is the call below, which outlives the parallel region.
    let call = unsafe { &*data.cast::<Call<'_>>() };
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(call.work)).is_err() {
        call.panicked.store(true, Ordering::Relaxed);
    }
}

/// The engine of a number of threads: on OpenMP's where there are some, else on its own.
pub(crate) fn engine(threads: usize) -> CpuEngine {
    let Some(open_mp) = open_mp().filter(|_| threads > 1) else {
        return CpuEngine::with_threads(threads);
    };
    CpuEngine::on_team(threads, move |work| {
        let mut call = Call { work, panicked: AtomicBool::new(false) };
        let threads = c_uint::try_from(threads).unwrap_or(c_uint::MAX);
        // SAFETY: the region returns when every thread has left `run`, so `call` outlives it; `work`
        // may be called from several threads, and no panic leaves `run`.
        unsafe { (open_mp.parallel)(run, (&raw mut call).cast(), threads, 0) };
        assert!(!call.panicked.load(Ordering::Relaxed), "a thread of the engine panicked");
    })
}

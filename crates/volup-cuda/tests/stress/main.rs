//! Many plans beside one another: on the streams of one device, and on two devices.

mod calls;
mod devices;
#[path = "../gpu/mod.rs"]
mod gpu;
#[path = "../gpu/ptx.rs"]
mod ptx;
mod streams;
mod watchdog;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by a test that uses a GPU: nothing runs beside it but what it starts itself.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

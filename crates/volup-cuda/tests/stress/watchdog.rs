//! Ends what hangs.

use std::collections::BTreeMap;
use std::io::Write;
use std::panic::resume_unwind;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// What is under way, by where.
#[derive(Clone, Default)]
pub struct UnderWay(Arc<Mutex<BTreeMap<String, String>>>);

impl UnderWay {
    /// Notes what is under way somewhere, in place of what was.
    pub fn set(&self, place: &str, what: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(place.into(), what);
    }

    /// Notes that nothing is under way there.
    pub fn clear(&self, place: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(place);
    }
}

/// Does some work on a thread of its own and returns its result. Work that takes longer ends the process, with a
/// message that says what was under way: a thread that waits for a device cannot be ended otherwise.
pub fn within<T: Send + 'static>(limit: Duration, work: impl FnOnce(&UnderWay) -> T + Send + 'static) -> T {
    let under_way = UnderWay::default();
    let (noted, (sender, receiver)) = (under_way.clone(), channel());
    let worker = thread::spawn(move || {
        // Nobody listens any more once the time is over.
        let _ = sender.send(work(&noted));
    });
    match receiver.recv_timeout(limit) {
        Ok(result) => result,
        Err(RecvTimeoutError::Disconnected) => resume_unwind(worker.join().expect_err("work that panicked")),
        Err(RecvTimeoutError::Timeout) => {
            let noted = under_way.0.lock().unwrap_or_else(PoisonError::into_inner);
            let lines: String = noted.iter().map(|(place, what)| format!("\n{place}: {what}")).collect();
            // What is printed is kept until the test ends, which it does not; and exiting in order waits for the
            // device.
            let _ = writeln!(std::io::stderr(), "not done within {} s; under way:{lines}", limit.as_secs());
            std::process::abort()
        }
    }
}

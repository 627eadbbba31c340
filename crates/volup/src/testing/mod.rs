//! What every engine is tested with: one table of cases, one comparison, one suite.
//!
//! An engine crate proves itself in one test:
//!
//! ```
//! fn proves_itself(engine: &impl volup::Engine) {
//!     volup::testing::conformance(engine);
//!     volup::testing::random_runs(engine, 1000);
//! }
//!
//! fn proves_its_gradients(engine: &impl volup::Training) {
//!     volup::testing::training_conformance(engine);
//!     volup::testing::random_training_runs(engine, 1000);
//! }
//! ```

mod cases;
mod compare;
mod conformance;
mod fill;
mod notation;
mod published;
mod random;
mod training;

pub use cases::{Case, cases};
pub use compare::{Deviation, compare};
pub use conformance::{check, conformance, conformance_of, random_runs};
pub use fill::{Fill, split_mix, tensor};
pub use published::published;
pub use random::random_case;
pub use training::{check_gradients, random_training_runs, training_conformance};

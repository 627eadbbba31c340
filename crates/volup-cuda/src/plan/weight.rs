//! What computes the gradient of the weight on tensor cores: by tiles of rows, at all shifts where the input has few channels,
//! or by lines of the input.

use super::Context;
use super::rows::Rows;
use super::weight_gradient::WeightGradient;
use super::weight_gradient_lines::WeightGradientLines;
use super::weight_gradient_narrow::WeightGradientNarrow;
use std::fmt;

/// A plan of one of the kernels.
#[derive(Clone)]
pub(super) enum Weight<'a> {
    /// From rows of both operands.
    Rows(WeightGradient<'a>),
    /// The same for few channels of the input.
    Narrow(WeightGradientNarrow<'a>),
    /// From the input as it lies.
    Lines(WeightGradientLines<'a>),
}

impl fmt::Display for Weight<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Weight::Rows(plan) => plan.fmt(f),
            Weight::Narrow(plan) => plan.fmt(f),
            Weight::Lines(plan) => plan.fmt(f),
        }
    }
}

impl<'a> Weight<'a> {
    /// The plans that may be the fastest, the one that is expected to be first; `pass` is what it takes to write the input by
    /// rows.
    pub(super) fn all(context: Context<'a>, rows: &Rows, pass: f64) -> Vec<Weight<'a>> {
        let by_rows = WeightGradient::all(context, rows).into_iter().map(|mut plan| {
            plan.seconds += pass;
            Weight::Rows(plan)
        });
        let narrow = WeightGradientNarrow::new(context, rows).map(|mut plan| {
            plan.seconds += pass;
            Weight::Narrow(plan)
        });
        let by_lines = WeightGradientLines::all(context, rows).into_iter().map(Weight::Lines);
        let mut all: Vec<_> = by_rows.chain(narrow).chain(by_lines).collect();
        all.sort_by(|one, other| one.seconds().total_cmp(&other.seconds()));
        all
    }

    pub(super) fn seconds(&self) -> f64 {
        match self {
            Weight::Rows(plan) => plan.seconds,
            Weight::Narrow(plan) => plan.seconds,
            Weight::Lines(plan) => plan.seconds,
        }
    }

    /// Shares that there are sums of.
    pub(super) fn splits(&self) -> usize {
        match self {
            Weight::Rows(plan) => plan.splits,
            Weight::Narrow(plan) => plan.splits,
            Weight::Lines(plan) => plan.splits,
        }
    }
}

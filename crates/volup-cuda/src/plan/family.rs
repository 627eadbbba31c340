//! The families that a convolution's kernels are of, and which of them is expected to be the fastest.

use super::norm::Way;
use super::{
    Algorithm, Context, Step, Workspace, after, box_gemm, direct, gather_gemm, halo_gemm, halo_sweep,
    implicit_gemm, interleave, linear_gemm, pointwise, shuffle_gemm, shuffle_ring, shuffle_wgmma,
};
use std::fmt;
use volup::Result;

/// How a convolution may be computed, other than by the definition.
pub(super) enum Family<'a> {
    Linear(linear_gemm::Linear<'a>),
    Interleave(interleave::Interleave<'a>),
    Halo(Box<halo_gemm::Halo<'a>>),
    Sweep(Box<halo_sweep::Sweep<'a>>),
    Gather(Box<gather_gemm::GatherGemm<'a>>),
    Box(box_gemm::BoxGemm<'a>),
    Shuffle(shuffle_gemm::ShuffleGemm<'a>),
    Ring(shuffle_ring::ShuffleRing<'a>),
    Wgmma(shuffle_wgmma::ShuffleWgmma<'a>),
    Implicit(implicit_gemm::ImplicitGemm<'a>),
    Pointwise(pointwise::Pointwise<'a>),
}

impl<'a> Family<'a> {
    pub(super) fn algorithm(&self) -> Algorithm {
        match self {
            Family::Linear(_) => Algorithm::LinearGemm,
            Family::Interleave(_) => Algorithm::Interleave,
            Family::Halo(_) | Family::Sweep(_) => Algorithm::HaloGemm,
            Family::Gather(_) => Algorithm::GatherGemm,
            Family::Box(_) => Algorithm::BoxGemm,
            Family::Shuffle(_) => Algorithm::ShuffleGemm,
            Family::Ring(_) => Algorithm::ShuffleRing,
            Family::Wgmma(_) => Algorithm::ShuffleWgmma,
            Family::Implicit(_) => Algorithm::ImplicitGemm,
            Family::Pointwise(_) => Algorithm::Pointwise,
        }
    }

    /// What its steps do about a normalization.
    pub(super) fn way(&self) -> Way {
        match self {
            Family::Shuffle(shuffle) => shuffle.way(),
            Family::Wgmma(wgmma) => wgmma.way,
            Family::Implicit(implicit) => implicit.way,
            Family::Gather(gather) => gather.way,
            Family::Halo(halo) => halo.way,
            Family::Sweep(sweep) => sweep.way,
            _ => Way::Plain,
        }
    }

    /// The time that the block is expected to take.
    pub(super) fn seconds(&self, context: Context<'_>) -> f64 {
        let own = match self {
            Family::Linear(linear) => linear.seconds,
            Family::Interleave(interleave) => interleave.seconds,
            Family::Halo(halo) => halo.seconds,
            Family::Sweep(sweep) => sweep.seconds,
            Family::Gather(gather) => gather.seconds,
            Family::Box(boxes) => boxes.seconds,
            Family::Shuffle(shuffle) => shuffle.seconds,
            Family::Ring(ring) => ring.seconds,
            Family::Wgmma(wgmma) => wgmma.seconds,
            Family::Implicit(implicit) => implicit.seconds(),
            Family::Pointwise(pointwise) => pointwise.seconds,
        };
        if self.way() == Way::Plain { own + after(context) } else { own }
    }

    /// Every plan of every family that applies. On the architecture that `halo_gemm` is for, it does what
    /// `linear_gemm` does, faster.
    pub(super) fn all(context: Context<'a>) -> Result<Vec<Family<'a>>> {
        if context.request.geometry.batch() == 0 {
            return Ok(Vec::new());
        }
        let mut all: Vec<Family<'a>> =
            halo_gemm::Halo::all(context).into_iter().map(|halo| Family::Halo(Box::new(halo))).collect();
        let sweeps = halo_sweep::Sweep::all(context).into_iter();
        all.extend(sweeps.map(|sweep| Family::Sweep(Box::new(sweep))));
        let gathers = gather_gemm::GatherGemm::all(context).into_iter();
        all.extend(gathers.map(|gather| Family::Gather(Box::new(gather))));
        all.extend(interleave::Interleave::new(context).map(Family::Interleave));
        all.extend(box_gemm::BoxGemm::all(context).into_iter().map(Family::Box));
        all.extend(shuffle_gemm::ShuffleGemm::all(context).into_iter().map(Family::Shuffle));
        all.extend(shuffle_ring::ShuffleRing::all(context).into_iter().map(Family::Ring));
        all.extend(shuffle_wgmma::ShuffleWgmma::all(context).into_iter().map(Family::Wgmma));
        all.extend(implicit_gemm::ImplicitGemm::all(context).into_iter().map(Family::Implicit));
        all.extend(pointwise::Pointwise::all(context).into_iter().map(Family::Pointwise));
        if all.is_empty() && context.classes.is_some() {
            return Family::all(Context { classes: None, ..context });
        }
        let asked_for = |wanted| all.iter().any(|family: &Family<'_>| family.algorithm() == wanted);
        if all.is_empty() || !context.request.algorithm.is_none_or(asked_for) {
            all.extend(linear_gemm::Linear::new(context)?.map(Family::Linear));
        }
        Ok(all)
    }

    /// What is expected to be the fastest, of the family that is asked for if one is; nothing where the definition is.
    pub(super) fn best(context: Context<'a>) -> Result<Option<Family<'a>>> {
        let mut families = Family::all(context)?;
        match context.request.algorithm {
            Some(wanted) => {
                // What does not apply is left to the one that nearly always does.
                let there =
                    wanted == Algorithm::Direct || families.iter().any(|family| family.algorithm() == wanted);
                let wanted = if there { wanted } else { Algorithm::LinearGemm };
                families.retain(|family| family.algorithm() == wanted);
            }
            None => {
                let direct = direct::seconds(context) + after(context);
                families.retain(|family| family.seconds(context) < direct);
            }
        }
        let faster =
            |one: &Family<'_>, other: &Family<'_>| one.seconds(context).total_cmp(&other.seconds(context));
        Ok(families.into_iter().min_by(faster))
    }

    /// At most so many that are expected to be the fastest, in order, of the family that is asked for if one is; where there
    /// are none, the definition.
    pub(super) fn fastest(context: Context<'a>, most: usize) -> Result<Vec<Option<Family<'a>>>> {
        let mut families = Family::all(context)?;
        families.retain(|family| context.request.algorithm.is_none_or(|wanted| wanted == family.algorithm()));
        families.sort_by(|one, other| one.seconds(context).total_cmp(&other.seconds(context)));
        families.truncate(most);
        Ok(if families.is_empty() { vec![None] } else { families.into_iter().map(Some).collect() })
    }

    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        match self {
            Family::Linear(linear) => linear.steps(context, workspace, steps),
            Family::Interleave(interleave) => interleave.steps(context, workspace, steps),
            Family::Halo(halo) => halo.steps(context, workspace, steps),
            Family::Sweep(sweep) => sweep.steps(context, workspace, steps),
            Family::Gather(gather) => gather.steps(context, workspace, steps),
            Family::Box(boxes) => boxes.steps(context, workspace, steps),
            Family::Shuffle(shuffle) => shuffle.steps(context, workspace, steps),
            Family::Ring(ring) => ring.steps(context, steps),
            Family::Wgmma(wgmma) => wgmma.steps(context, workspace, steps),
            Family::Implicit(implicit) => implicit.steps(context, workspace, steps),
            Family::Pointwise(pointwise) => pointwise.steps(context, steps),
        }
    }
}

impl fmt::Display for Family<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Family::Linear(linear) => linear.fmt(f),
            Family::Interleave(interleave) => interleave.fmt(f),
            Family::Halo(halo) => halo.fmt(f),
            Family::Sweep(sweep) => sweep.fmt(f),
            Family::Gather(gather) => gather.fmt(f),
            Family::Box(boxes) => boxes.fmt(f),
            Family::Shuffle(shuffle) => shuffle.fmt(f),
            Family::Ring(ring) => ring.fmt(f),
            Family::Wgmma(wgmma) => wgmma.fmt(f),
            Family::Implicit(implicit) => implicit.fmt(f),
            Family::Pointwise(pointwise) => pointwise.fmt(f),
        }
    }
}

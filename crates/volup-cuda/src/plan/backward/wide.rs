//! What gradients are multiplied as where two fp16 are too coarse for them: two tf32, of any magnitudes beside each other. Its launches
//! do nothing unless the device has found out that they have to.

use super::super::halo_gemm::Halo;
use super::super::rows::Rows;
use super::super::{Context, Family, Plan, int};
use super::Backward;
use super::factors::input_plans;
use volup::Result;

/// Channels that `gradient_rows` judges together.
const JUDGED: usize = 8;

impl<'a> Backward<'a> {
    /// The same with what it needs for numbers that its fp16 are too coarse for; nothing if there is no such thing.
    pub(super) fn with_wide(self) -> Result<Option<Backward<'a>>> {
        if self.context.halves < 2 {
            return Ok(Some(self));
        }
        let [_, sizes @ ..] = self.context.request.geometry.input_shape();
        let input = self.rows.batch * sizes.iter().product::<usize>();
        if !self.rows.group_out.is_multiple_of(JUDGED) || int(input).is_err() {
            return Ok(None);
        }
        let context = Context { halves: 0, within: true, ..self.context };
        let rows = Rows::new(context)?;
        let plan = input_plans(context, &rows)?.into_iter().next();
        Ok(plan.map(|(input, _)| {
            let wide = Backward { context, rows, input, again: None, ..self.clone() };
            Backward { wide: Some(Box::new(wide)), ..self }
        }))
    }
}

/// The plan of the convolution that is the gradient of the input: by `halo_gemm`, whose launches know how to do nothing.
pub(super) fn plan(context: Context<'_>) -> Result<Option<Plan>> {
    Halo::best(context).map(|halo| Plan::of(context, Some(Family::Halo(Box::new(halo))))).transpose()
}

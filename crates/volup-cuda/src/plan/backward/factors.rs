//! What computes the gradients of both factors of a part of the batch.

use super::super::epilogue::{NULL, Sums, kernel};
use super::super::halo_gemm::Halo;
use super::super::pack;
use super::super::rows::{Rows, sample_bytes};
use super::super::weight::Weight;
use super::super::{
    Argument, Buffer, Classes, Context, Family, Plan, Request, Step, Task, Workspace, grid, push, strides,
};
use super::{ASKED, BLOCKS, Backward, LARGEST, wide};
use crate::Algorithm;
use volup::{ConvSpec, Error, MemoryFormat, Result};

/// Blocks a multiprocessor of the kernels that compute by the definition, where they seldom have work to do.
const IDLE_BLOCKS: usize = 2;

/// What the operands of the weight's gradient are scaled by: where what bounds the gradient is, and the largest magnitudes of the input's
/// channels.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    pub(super) bounding: Option<Sums>,
    pub(super) largest: u64,
}

impl Backward<'_> {
    /// The gradient of a part of the input: a convolution of the gradient's rows, then where it cannot stand the
    /// definition.
    pub(super) fn input_steps(
        &self,
        control: u64,
        [gradient, weight]: [u64; 2],
        bounding: Option<Sums>,
        part: usize,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let (context, rows) = (self.context, &self.rows);
        let geometry = &context.request.geometry;
        let start = self.start(part, sample_bytes(context, geometry.input_shape()));
        let mut words = NULL;
        if let Some(plan) = &self.input {
            let base = workspace.take(plan.workspace_bytes);
            steps.extend(plan.steps.iter().map(|step| {
                step.moved(|buffer, offset| match buffer {
                    Buffer::Input => (Buffer::Workspace, gradient + offset),
                    Buffer::Weight => (Buffer::Workspace, weight + offset),
                    Buffer::Output => (Buffer::GradInput, start + offset),
                    Buffer::Workspace => (Buffer::Workspace, base + offset),
                    Buffer::Unless if self.context.within => (Buffer::Workspace, control + ASKED[0]),
                    other => (other, offset),
                })
            }));
            words = Argument::Pointer(Buffer::Workspace, control + LARGEST[1]);
        }
        if self.wide.is_some() {
            return Ok(());
        }
        let mut arguments = vec![Argument::Pointer(Buffer::Workspace, gradient)];
        self.push_bounds(bounding, &mut arguments);
        arguments.extend(
            [(Buffer::Weight, 0), (Buffer::GradInput, start)]
                .map(|(buffer, at)| Argument::Pointer(buffer, at)),
        );
        arguments.push(words);
        push(&mut arguments, [rows.batch, rows.groups, rows.group_in, rows.group_out, rows.slots])?;
        rows.push_axes(&mut arguments)?;
        let [_, sizes @ ..] = geometry.input_shape();
        let strides = strides(geometry.input_shape(), context.request.input_format);
        arguments.extend(strides.map(|stride| Argument::I64(stride as i64)));
        arguments.extend(rows.layout(context.operand_bytes()));
        let tasks = (rows.batch * sizes.iter().product::<usize>()).div_ceil(256);
        steps.push(self.by_definition("direct_input_gradient", tasks, self.input.is_some(), arguments)?);
        Ok(())
    }

    /// What a part adds to the gradient of the weight, by shares of the rows.
    pub(super) fn weight_steps(
        &self,
        control: u64,
        [gradient, partial]: [u64; 2],
        scales: Scales,
        part: usize,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let (context, rows) = (self.context, &self.rows);
        let shape = context.request.geometry.input_shape();
        let start = self.start(part, sample_bytes(context, shape));
        let at = |offset: u64| Argument::Pointer(Buffer::Workspace, offset);
        let given = Argument::Pointer(Buffer::Input, start);
        let (mut operand, mut low) = (given, 0);
        if context.halves > 0 {
            let [_, sizes @ ..] = shape;
            let count = rows.batch * sizes.iter().product::<usize>();
            low = count.next_multiple_of(128);
            let halves = workspace.take(context.halves * low * context.operand_bytes());
            let by = if context.halves == 2 { scales.largest } else { control };
            steps.push(pack::half_input(context, [start, halves, by], count, low)?);
            operand = at(halves);
        }
        match &self.weight {
            Some(Weight::Rows(weight)) => {
                let input = self.input_rows(control, operand, low, workspace, steps)?;
                steps.push(weight.step(rows, [at(input), at(gradient), at(partial)])?);
            }
            Some(Weight::Narrow(weight)) => {
                let input = self.input_rows(control, operand, low, workspace, steps)?;
                steps.push(weight.step(context, rows, [at(input), at(gradient), at(partial)])?);
            }
            Some(Weight::Lines(weight)) => {
                let operands = [operand, at(gradient), at(partial), at(control + LARGEST[0])];
                steps.push(weight.step(context, rows, operands, low)?);
            }
            None => {}
        }
        Ok(())
    }

    /// The same by the definition, where those shares cannot stand.
    pub(super) fn weight_by_definition(
        &self,
        control: u64,
        rows: &Rows,
        [gradient, partial]: [u64; 2],
        scales: Scales,
        part: usize,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let context = self.context;
        let shape = context.request.geometry.input_shape();
        let start = self.start(part, sample_bytes(context, shape));
        let at = |offset: u64| Argument::Pointer(Buffer::Workspace, offset);
        let mut arguments = vec![Argument::Pointer(Buffer::Input, start), at(gradient), at(partial)];
        arguments.push(if self.weight.is_some() { at(control + LARGEST[0]) } else { NULL });
        if context.halves == 2 {
            self.push_bounds(scales.bounding, &mut arguments);
            arguments.push(at(scales.largest));
        }
        let channels = [rows.groups, rows.group_in, rows.group_out, rows.slots];
        push(&mut arguments, [rows.batch].into_iter().chain(channels).chain([self.splits()]))?;
        rows.push_axes(&mut arguments)?;
        let strides = strides(shape, context.request.input_format);
        arguments.extend(strides.map(|stride| Argument::I64(stride as i64)));
        // What is defined of two fp16 are rows of float32.
        let bytes = if context.halves == 2 { context.request.dtype.size() } else { context.operand_bytes() };
        arguments.extend(rows.layout(bytes));
        let tasks = self.pairs() * self.splits();
        if tasks >= 1 << 30 {
            return Err(Error::Overflow { what: "tiles of the weight's gradient on the GPU" });
        }
        steps.push(self.by_definition("direct_weight_gradient", tasks, self.weight.is_some(), arguments)?);
        Ok(())
    }

    /// The launch of a kernel that goes by the definition.
    fn by_definition(&self, name: &str, tasks: usize, idle: bool, arguments: Vec<Argument>) -> Result<Step> {
        let most = if idle { IDLE_BLOCKS } else { BLOCKS } * self.context.device.multiprocessors;
        Ok(Step::launch(kernel(self.context, name)?, grid(tasks.clamp(1, most))?, arguments))
    }
}

/// What computes the convolution of stride 1 that is the gradient of the input: from rows, and where that is faster from
/// panels, then with the rows of one.
pub(super) fn input_plans(context: Context<'_>, rows: &Rows) -> Result<Vec<(Option<Plan>, Option<usize>)>> {
    let request = context.request;
    let conv = ConvSpec::builder(rows.pitch(), rows.groups * rows.group_in, rows.axes.map(|axis| axis.count))
        .padding(rows.axes.map(|axis| axis.apart * (axis.count - 1)))
        .dilation(rows.axes.map(|axis| axis.apart))
        .groups(rows.groups)
        .build()?;
    let geometry = conv.geometry(rows.batch, rows.axes.map(|axis| axis.rows))?;
    let request = Request {
        task: Task::Forward,
        block: conv.into(),
        geometry,
        dtype: request.dtype,
        precision: request.precision,
        input_format: MemoryFormat::ChannelsLast3d,
        output_format: request.input_format,
        algorithm: request.algorithm,
    };
    let classes = Classes {
        channels: rows.group_out,
        counts: rows.axes.map(|axis| axis.classes),
        full: rows.axes.map(|axis| axis.axis.kernel - (axis.count - 1) * axis.step),
    };
    let context = Context { request: &request, classes: Some(classes), ..context };
    if context.within {
        return Ok(wide::plan(context)?.map(|plan| (Some(plan), None)).into_iter().collect());
    }
    // fp16 there is of panels alone.
    let plan = if context.halves > 0 { None } else { Some(Plan::forward(context)?) };
    let context = Context { packed: true, ..context };
    let may = request.algorithm.is_none_or(|algorithm| algorithm == Algorithm::HaloGemm);
    let faster = |halo: &Halo<'_>| plan.as_ref().is_none_or(|plan| halo.seconds < plan.seconds());
    let halo = Halo::best(context).filter(|halo| may && faster(halo));
    let mut plans: Vec<_> = plan.into_iter().map(|plan| (Some(plan), None)).collect();
    if let Some(halo) = halo {
        let panel_rows = Some(halo.panel_rows());
        plans.push((Some(Plan::of(context, Some(Family::Halo(Box::new(halo))))?), panel_rows));
    }
    Ok(plans)
}

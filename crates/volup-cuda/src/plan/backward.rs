//! Planning the backward pass. The gradient of the convolution's output is written by rows, in which each tap is a constant
//! number of rows further on for every voxel of the input: the gradient of the input is then a convolution of stride 1, that
//! of the weight a matrix product. The kernels' files say what the numbers mean.

mod factors;
mod operands;
mod wide;

use super::epilogue::{NULL, Sums, kernel, sum_bytes};
use super::pack;
use super::plane_gradient::PlaneGradient;
use super::rows::{Rows, makes_again, sample_bytes};
use super::shuffle_gradient::{Bounded, ShuffleGradient};
use super::weight::Weight;
use super::{Argument, Buffer, Context, Plan, Request, Step, Workspace, grid, push};
use crate::Algorithm;
use factors::{Scales, input_plans};
use std::fmt;
use volup::{DType, Result, Wanted};

/// Blocks a multiprocessor of the kernels that compute by the definition.
const BLOCKS: usize = 16;
/// Channels of a tile of the weight's gradient by its definition.
const TILE: usize = 16;
/// Threads of a block that adds up shares of the weight's gradient, those that have an element of a small one together, and how
/// many elements are few.
const ADDING: usize = 256;
const TOGETHER: usize = 8;
const SMALL: usize = 1 << 15;
/// Products and sums a second of one multiprocessor by the definition, at most.
const DEFINITION: f64 = 1e10;
/// Bytes a second that rows are written, and read, at.
const ROWS: f64 = 2.5e12;
/// What of such a pass is spared where rows are of half the size.
const HALVES: f64 = 0.5;
/// What a launch costs beside its work, in seconds, and how many there are of a part for what two fp16 are too coarse for.
const LAUNCH: f64 = 3.6e-6;
const WIDE_LAUNCHES: usize = 5;

/// The largest magnitudes among the control words: of the input, of the gradient and of the weight. A later one is of what of the input
/// was looked at to scale it.
const LARGEST: [u64; 3] = [0, 4, 8];
const CONTROL_WORDS: usize = 8;

/// Control words that are asked whether two fp16 will do: of what rows are made of, and of the input and the weight.
const ASKED: [u64; 2] = [20, 24];

/// Where in the workspace is what the forward pass has not saved: the convolution's output of a part, and means and deviations
/// of all samples.
#[derive(Clone, Copy)]
struct Made {
    convolution: u64,
    statistics: [u64; 2],
}

/// What makes both gradients without rows.
#[derive(Clone)]
enum Both<'a> {
    Shuffle(ShuffleGradient<'a>),
    Plane(PlaneGradient<'a>),
}

impl<'a> Both<'a> {
    /// What there is for so many samples.
    fn all(context: Context<'a>, batch: usize) -> impl Iterator<Item = Both<'a>> {
        let shuffle = ShuffleGradient::new(context, batch).map(Both::Shuffle);
        shuffle.into_iter().chain(PlaneGradient::new(context, batch).map(Both::Plane))
    }

    fn algorithm(&self) -> Algorithm {
        match self {
            Both::Shuffle(_) => Algorithm::ShuffleGemm,
            Both::Plane(_) => Algorithm::ImplicitGemm,
        }
    }

    fn seconds(&self) -> f64 {
        match self {
            Both::Shuffle(plan) => plan.seconds,
            Both::Plane(plan) => plan.seconds,
        }
    }

    /// Shares of the gradient of the weight.
    fn shares(&self) -> usize {
        match self {
            Both::Shuffle(plan) => plan.shares,
            Both::Plane(plan) => plan.blocks,
        }
    }

    /// The launches for the first part, to the gradients that are wanted: of the weight its shares.
    fn steps(
        &self,
        context: Context<'_>,
        wanted: Wanted,
        terms: Argument,
        partial: u64,
        bounded: Bounded,
    ) -> Result<Vec<Step>> {
        match self {
            Both::Shuffle(plan) => plan.steps(context, wanted, terms, partial, bounded),
            Both::Plane(plan) => Ok(vec![plan.step(context, wanted, terms, partial, bounded.bounds)?]),
        }
    }
}

impl fmt::Display for Both<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Both::Shuffle(plan) => plan.fmt(f),
            Both::Plane(plan) => plan.fmt(f),
        }
    }
}

/// The plan of a backward pass that some gradient is wanted of.
#[derive(Clone)]
pub(super) struct Backward<'a> {
    context: Context<'a>,
    wanted: Wanted,
    rows: Rows,
    /// What a part has of the forward pass is made again by this, for the part's own request.
    again: Option<(Plan, Request)>,
    /// What makes both gradients without rows.
    both: Option<Both<'a>>,
    input: Option<Plan>,
    weight: Option<Weight<'a>>,
    /// Where gradients are two fp16, the same for what these are too coarse for.
    wide: Option<Box<Backward<'a>>>,
}

impl fmt::Display for Backward<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["backward", "backward, scaled", "backward, two fp16"][self.context.halves])?;
        if self.rows.parts > 1 {
            write!(f, " in {} parts", self.rows.parts)?;
        }
        if let Some((plan, _)) = &self.again {
            write!(f, "; convolution again by {}", plan.summary)?;
        }
        if let Some(both) = &self.both {
            return write!(f, "; {both}");
        }
        match &self.input {
            Some(plan) => write!(f, "; input by {}", plan.summary)?,
            None if self.wanted.input => f.write_str("; input by the definition")?,
            None => {}
        }
        match &self.weight {
            Some(weight) => write!(f, "; {weight}"),
            None if self.wanted.weight => f.write_str("; weight by the definition"),
            None => Ok(()),
        }
    }
}

/// Keeps of each kind of plans the first.
fn keep_first<'a, K: PartialEq>(plans: &mut Vec<Backward<'a>>, kind: impl Fn(&Backward<'a>) -> K) {
    let mut seen = Vec::new();
    plans.retain(|plan| {
        let kind = kind(plan);
        let is_new = !seen.contains(&kind);
        seen.push(kind);
        is_new
    });
}

impl<'a> Backward<'a> {
    /// All plans, in the order of the time that they are expected to take: one without rows where that goes, and one for
    /// each tile that computes the gradient of the weight.
    pub(super) fn all(context: Context<'a>, wanted: Wanted) -> Result<Vec<Backward<'a>>> {
        let again = if makes_again(context) {
            let rows = Rows::new(context)?;
            let geometry = context
                .request
                .geometry
                .conv()
                .geometry(rows.batch, rows.axes.map(|axis| axis.axis.input))?;
            let request = Request { geometry, ..*context.request };
            Some((Plan::training(Context { request: &request, ..context }, false)?, request))
        } else {
            None
        };
        let with = |context: Context<'a>| {
            let (rows, again) = (Rows::new(context)?, again.clone());
            Ok(Backward { context, wanted, rows, again, both: None, input: None, weight: None, wide: None })
        };
        let by_rows = with(context)?;
        if !(wanted.input || wanted.weight) {
            return Ok(vec![by_rows]);
        }
        // The choice is made as if both were wanted: a gradient alone has the same bits.
        let both = Wanted { input: true, weight: true, ..wanted };
        let by_rows = Backward { wanted: both, ..by_rows };
        let mut all = by_rows.of_factors()?;
        let mut without_rows: Vec<_> = by_rows.without_rows().collect();
        let halves = context.most_halves();
        if halves > 0 {
            let by_halves = Backward { wanted: both, ..with(Context { halves, ..context })? };
            without_rows.extend(by_halves.without_rows());
            if let Some(by_halves) = by_halves.with_wide()? {
                all.extend(by_halves.of_factors()?);
            }
        }
        // Of each kernel the one of the numbers that are expected to be the fastest.
        without_rows.sort_by(|one, other| one.seconds().total_cmp(&other.seconds()));
        keep_first(&mut without_rows, Backward::algorithm);
        all.extend(without_rows);
        all.sort_by(|one, other| one.seconds().total_cmp(&other.seconds()));
        if !wanted.weight {
            // They do not differ by what computes that of the weight.
            keep_first(&mut all, |plan| plan.both.as_ref().map(Both::algorithm));
        }
        all.iter_mut().for_each(|plan| plan.leave_out(wanted));
        Ok(all)
    }

    /// The same with each pair of what computes the gradients of both factors from rows.
    fn of_factors(&self) -> Result<Vec<Backward<'a>>> {
        let (context, rows) = (self.context, &self.rows);
        let fast = context.request.dtype != DType::F64;
        let inputs = if fast { input_plans(context, rows)? } else { vec![(None, None)] };
        let input_bytes = rows.batch * sample_bytes(context, context.request.geometry.input_shape());
        let pass = 2.0 * input_bytes as f64 / ROWS + LAUNCH;
        let weights: Vec<_> = Weight::all(context, rows, pass).into_iter().map(Some).collect();
        let weights = if weights.is_empty() && context.halves == 0 { vec![None] } else { weights };
        let mut all = Vec::new();
        for weight in &weights {
            for (input, panel_rows) in &inputs {
                // Rows of tiles that are as wide as all panels would be read from as many places.
                if panel_rows.is_none() || !matches!(weight, Some(Weight::Rows(_))) {
                    let rows = Rows { panel_rows: *panel_rows, ..*rows };
                    let (input, weight) = (input.clone(), weight.clone());
                    all.push(Backward { input, weight, rows, ..self.clone() });
                }
            }
        }
        Ok(all)
    }

    /// Leaves out what is not wanted.
    pub(super) fn leave_out(&mut self, wanted: Wanted) {
        self.wanted = wanted;
        if let Some(wide) = &mut self.wide {
            wide.leave_out(wanted);
        }
        self.input = self.input.take().filter(|_| wanted.input);
        if !wanted.input {
            self.rows.panel_rows = None;
        }
        self.weight = self.weight.take().filter(|_| wanted.weight);
    }

    /// The same by what makes both gradients of a part without rows.
    fn without_rows(&self) -> impl Iterator<Item = Backward<'a>> {
        let mut rows = self.rows;
        if self.again.is_none() {
            rows.take_all();
        }
        Both::all(self.context, rows.batch).map(move |both| Backward {
            rows,
            both: Some(both),
            ..self.clone()
        })
    }

    /// The family that computes the gradient of the input.
    pub(super) fn algorithm(&self) -> Algorithm {
        match &self.both {
            Some(both) => both.algorithm(),
            None => self.input.as_ref().map_or(Algorithm::Direct, |plan| plan.algorithm),
        }
    }

    /// The time that all is expected to take.
    pub(super) fn seconds(&self) -> f64 {
        let geometry = &self.context.request.geometry;
        let output = (geometry.batch() * sample_bytes(self.context, geometry.output_shape())) as f64;
        let again = self.again.as_ref().map_or(0.0, |(plan, _)| plan.seconds());
        if let Some(both) = &self.both {
            let sums = if self.context.request.block.is_bare() { 1.0 } else { 2.0 };
            let idle = if self.context.halves > 0 { LAUNCH } else { 0.0 };
            return sums * output / ROWS + self.rows.parts as f64 * (again + both.seconds() + idle);
        }
        let passes = if self.context.request.block.norm().is_some() { 5.0 } else { 3.0 };
        let passes = if self.context.halves == 1 { passes - HALVES } else { passes };
        // By the definition what is wanted and has no plan.
        let slow = geometry.flops() / (DEFINITION * self.context.device.multiprocessors as f64);
        let slow = |wanted: bool| if wanted { slow / self.rows.parts as f64 } else { 0.0 };
        let input = self.input.as_ref().map_or(slow(self.wanted.input), Plan::seconds);
        let weight = self.weight.as_ref().map_or(slow(self.wanted.weight), Weight::seconds);
        // Rows are written, and an operand for the input's gradient; what goes by the definition is launched in any case.
        let launches = 1 + 2 * usize::from(self.wanted.input) + usize::from(self.wanted.weight);
        let idle = if self.wide.is_some() { WIDE_LAUNCHES } else { 0 };
        let launches = (launches + idle) as f64 * LAUNCH;
        passes * output / ROWS + self.rows.parts as f64 * (again + input + weight + launches)
    }

    /// What is launched.
    pub(super) fn steps(&self, workspace: &mut Workspace, steps: &mut Vec<Step>) -> Result<()> {
        let Backward { context, wanted, rows, .. } = self;
        let (context, request) = (*context, context.request);
        let vectors = [wanted.bias, wanted.norm_weight, wanted.norm_bias];
        let factors = wanted.input || wanted.weight;
        if !factors && !vectors.contains(&true) {
            return Ok(());
        }
        let takes_sums =
            vectors.contains(&true) || request.block.norm().is_some() || context.halves > 0 && factors;
        let sums = takes_sums.then(|| Sums::take(context, workspace));
        if let (Some(sums), None) = (sums, &self.again) {
            sums.launch(context, workspace, steps)?;
            sums.vectors(context, vectors, true, steps)?;
        }
        let statistics = if self.again.is_some() { request.geometry.batch() * self.statistic() } else { 0 };
        let statistics = [(); 2].map(|()| workspace.take(statistics));
        let (mut control, mut gradient, mut weight, mut partial, mut largest) = (0, 0, 0, 0, 0);
        // What is wide has rows in the same place, and a weight of its own.
        let mut wide_weight = 0;
        // Whether each part has bounds of its own, and a weight that is scaled by what follows from them.
        let anew = context.halves > 0 && self.again.is_some();
        if factors && self.both.is_none() {
            control = workspace.take(CONTROL_WORDS * 4);
            steps.push(Step::Clear { at: control, words: CONTROL_WORDS });
            let bytes = self.row_bytes();
            gradient = workspace.take(bytes.max(self.wide.as_ref().map_or(0, |wide| wide.row_bytes())));
            if rows.padded {
                steps.push(Step::Clear { at: gradient, words: bytes.div_ceil(4) });
            }
            if self.input.is_some() {
                weight = workspace.take(self.input_weight_elements() * request.dtype.size());
                if !anew {
                    self.input_weight(control, weight, sums, steps)?;
                }
            }
            if let Some(wide) = self.wide.as_ref().filter(|wide| wide.input.is_some()) {
                wide_weight = workspace.take(wide.input_weight_elements() * request.dtype.size());
                wide.input_weight(control, wide_weight, None, steps)?;
            }
            match context.halves {
                1 if wanted.weight => pack::input_scale(context, control, steps)?,
                2 if wanted.weight => {
                    largest = workspace.take(rows.groups * rows.group_in * 4);
                    let control = [LARGEST[0], ASKED[1]].map(|word| control + word);
                    pack::channel_largest(context, largest, control, steps)?;
                }
                _ => {}
            }
        }
        if context.halves > 0 && self.both.is_some() {
            control = workspace.take(8);
            steps.push(Step::Clear { at: control, words: 2 });
        }
        if wanted.weight {
            partial = workspace.take(rows.parts * self.partial_bytes());
        }
        // From here on each step's memory serves again.
        let convolution = workspace.take(0);
        let made = self.again.as_ref().map(|_| Made { convolution, statistics });
        let free = workspace.bytes;
        // What is wide reads once more what was made again.
        let output = rows.batch * sample_bytes(context, request.geometry.output_shape());
        let kept = if self.wide.is_some() && self.again.is_some() { output } else { 0 };
        for part in 0..rows.parts {
            let of_part = sums.map(|sums| sums.from(context, part * rows.batch));
            if let Some((plan, request)) = &self.again {
                let mut own = Workspace::from(free);
                let again = self.again_steps(plan, Context { request, ..context }, of_part, &mut own)?;
                steps.extend(again.iter().map(|step| self.on_part(step, part, made)));
                workspace.bytes = workspace.bytes.max(own.bytes);
            }
            if !factors {
                continue;
            }
            let terms = of_part.map_or(NULL, |sums| sums.terms(context));
            let to = partial + if wanted.weight { (part * self.partial_bytes()) as u64 } else { 0 };
            // What is made again has sums of each part alone.
            let bounding = if self.again.is_some() { of_part } else { sums };
            if let Some(both) = &self.both {
                let bounded = Bounded { bounds: bounding.map_or(0, |sums| sums.bounds), control };
                let launches = both.steps(context, *wanted, terms, to, bounded)?;
                steps.extend(launches.iter().map(|step| self.on_part(step, part, made)));
                continue;
            }
            if anew && self.input.is_some() {
                self.input_weight(control, weight, bounding, steps)?;
            }
            let of_rows = self.gradient_rows(control, gradient, terms, bounding)?;
            steps.push(self.on_part(&of_rows, part, made));
            let input = |by: &Self, weight, workspace: &mut Workspace, steps: &mut Vec<Step>| {
                let mut own = Workspace::from(free + kept);
                by.input_steps(control, [gradient, weight], bounding, part, &mut own, steps)?;
                workspace.bytes = workspace.bytes.max(own.bytes);
                Ok(())
            };
            if wanted.input {
                input(self, weight, workspace, steps)?;
            }
            let scales = Scales { bounding, largest };
            if wanted.weight {
                let mut own = Workspace::from(free + kept);
                self.weight_steps(control, [gradient, to], scales, part, &mut own, steps)?;
                workspace.bytes = workspace.bytes.max(own.bytes);
            }
            let mut defined = rows;
            if let Some(wide) = &self.wide {
                let of_rows = wide.gradient_rows(control, gradient, terms, None)?;
                steps.push(self.on_part(&of_rows, part, made));
                if wanted.input {
                    input(wide, wide_weight, workspace, steps)?;
                }
                defined = &wide.rows;
            }
            if wanted.weight {
                self.weight_by_definition(control, defined, [gradient, to], scales, part, steps)?;
            }
        }
        if let (Some(sums), Some(_), true) = (sums, &self.again, vectors.contains(&true)) {
            let mut last = Vec::new();
            sums.vectors(context, vectors, false, &mut last)?;
            steps.extend(last.iter().map(|step| self.on_part(step, 0, made)));
        }
        if wanted.weight {
            let pointers = [(Buffer::Workspace, partial), (Buffer::GradWeight, 0)];
            let mut arguments = pointers.map(|(buffer, at)| Argument::Pointer(buffer, at)).to_vec();
            // Without rows nothing that is added up is scaled.
            let context = if self.both.is_some() { Context { halves: 0, ..context } } else { context };
            if context.halves > 0 {
                self.push_bounds(sums, &mut arguments);
                let scales = if context.halves == 2 { largest } else { control };
                arguments.push(Argument::Pointer(Buffer::Workspace, scales));
                let own = if anew { rows.batch * rows.groups * rows.group_out } else { 0 };
                push(&mut arguments, [rows.group_in, self.splits(), own])?;
            }
            let splits = rows.parts * self.splits();
            let together = if self.elements() <= SMALL { TOGETHER } else { 1 };
            push(
                &mut arguments,
                [splits, rows.taps(), rows.groups * rows.group_in, rows.group_out, together],
            )?;
            let blocks = grid((self.elements() * together).div_ceil(ADDING))?;
            steps.push(Step::launch(kernel(context, "weight_gradient_sum")?, blocks, arguments));
        }
        Ok(())
    }

    /// What makes again what a part has of the forward pass, and takes its sums; with the part's own context.
    fn again_steps(
        &self,
        plan: &Plan,
        context: Context<'_>,
        sums: Option<Sums>,
        workspace: &mut Workspace,
    ) -> Result<Vec<Step>> {
        let request = context.request;
        workspace.take(request.geometry.batch() * sample_bytes(context, request.geometry.output_shape()));
        let mut of_sums = Workspace::from(workspace.bytes);
        let base = workspace.take(plan.workspace_bytes);
        let based = |buffer, at| (buffer, if buffer == Buffer::Workspace { base + at } else { at });
        let mut steps: Vec<Step> = plan.steps.iter().map(|step| step.moved(based)).collect();
        if let Some(sums) = sums {
            sums.launch(context, &mut of_sums, &mut steps)?;
            let asked = request.block.norm().is_some() || context.halves > 0;
            if asked && (self.wanted.input || self.wanted.weight) {
                sums.vectors(context, [false; 3], true, &mut steps)?;
            }
        }
        workspace.bytes = workspace.bytes.max(of_sums.bytes);
        Ok(steps)
    }

    /// A step for the samples of a part, where these lie among all; it reads what is made again, if something is.
    fn on_part(&self, step: &Step, part: usize, made: Option<Made>) -> Step {
        let geometry = &self.context.request.geometry;
        let of = |shape| self.start(part, sample_bytes(self.context, shape));
        let [input, output] = [geometry.input_shape(), geometry.output_shape()].map(of);
        let statistic = self.start(part, self.statistic());
        step.moved(|buffer, at| match (buffer, made) {
            (Buffer::Input | Buffer::GradInput, _) => (buffer, input + at),
            (Buffer::GradOutput, _) => (buffer, output + at),
            (Buffer::Convolution, Some(made)) => (Buffer::Workspace, made.convolution + at),
            (Buffer::Mean, Some(made)) => (Buffer::Workspace, made.statistics[0] + statistic + at),
            (Buffer::Rstd, Some(made)) => (Buffer::Workspace, made.statistics[1] + statistic + at),
            (Buffer::Convolution, None) => (buffer, output + at),
            (Buffer::Mean | Buffer::Rstd, None) => (buffer, statistic + at),
            _ => (buffer, at),
        })
    }

    /// Bytes of the means, and of the deviations, of a sample.
    fn statistic(&self) -> usize {
        self.context.request.block.norm().map_or(0, |norm| norm.groups()) * sum_bytes(self.context)
    }

    /// Bytes of all samples before a part, of what has so many a sample.
    fn start(&self, part: usize, sample: usize) -> u64 {
        (part * self.rows.batch * sample) as u64
    }

    /// Elements of the weight.
    fn elements(&self) -> usize {
        self.rows.taps() * self.rows.groups * self.rows.group_in * self.rows.group_out
    }

    /// Pairs of tiles of channels and taps of the weight's gradient by its definition.
    fn pairs(&self) -> usize {
        let tiles = |channels: usize| channels.div_ceil(TILE);
        self.rows.groups * tiles(self.rows.group_in) * tiles(self.rows.group_out) * self.rows.taps()
    }

    /// Shares of the rows that the gradient of the weight is computed in.
    fn splits(&self) -> usize {
        let voxels = self.rows.axes.iter().map(|axis| axis.axis.input).product::<usize>() * self.rows.batch;
        let slots = BLOCKS * self.context.device.multiprocessors;
        if let Some(both) = &self.both {
            return both.shares();
        }
        let by_definition = || slots.div_ceil(self.pairs()).min(voxels.div_ceil(1024)).max(1);
        self.weight.as_ref().map_or_else(by_definition, Weight::splits)
    }

    /// Bytes of the shares' sums of a part.
    fn partial_bytes(&self) -> usize {
        self.splits() * self.elements() * sum_bytes(self.context)
    }

    /// Bytes of the gradient's rows.
    fn row_bytes(&self) -> usize {
        self.rows.elements() * self.context.operand_bytes() * self.context.halves.max(1)
    }

    /// Adds where the bounds are that rows are scaled by, if they are.
    fn push_bounds(&self, sums: Option<Sums>, arguments: &mut Vec<Argument>) {
        let sums = sums.filter(|_| self.context.halves > 0);
        arguments.extend(sums.map(|sums| Argument::Pointer(Buffer::Workspace, sums.bounds)));
    }
}

//! Plans: what is launched for a block on inputs of one size, as plain values.
//!
//! A plan is a pure function of the block, its sizes, the device and the kernels at hand, so it is
//! tested without a GPU. [`crate::Executable`] runs one.

mod backward;
mod box_gemm;
mod classes;
mod direct;
mod epilogue;
mod epilogue_statistics;
mod family;
mod gather_gemm;
mod halo_gemm;
mod halo_sweep;
mod implicit_gemm;
mod interleave;
mod linear_gemm;
mod norm;
mod norm_behind;
mod pack;
mod panels;
mod phases;
mod plane_gradient;
mod pointwise;
mod prepacked;
mod rows;
mod shuffle_gemm;
mod shuffle_gradient;
mod shuffle_ring;
mod shuffle_wgmma;
mod step;
#[cfg(test)]
pub(crate) mod tests;
mod weight;
mod weight_gradient;
mod weight_gradient_lines;
mod weight_gradient_narrow;

use crate::{Algorithm, DeviceInfo, Variant};
use classes::Classes;
use family::Family;
use norm::Way;
pub use prepacked::Prepacked;
use prepacked::WeightPlaces;
use std::fmt;
pub use step::{Argument, Buffer, Step};
use volup::{Activation, BlockSpec, DType, Error, Geometry, MemoryFormat, Precision, Result, Wanted};

/// What of a block is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Task {
    /// Its output.
    Forward,
    /// Its output, and what its backward pass needs of the forward pass, as [`volup::Saved`] has it.
    Training,
    /// Gradients, from that of its output, the input, the parameters and what was saved.
    Backward(Wanted),
    /// The same where nothing was saved: that is made again, for a part of a large batch at a time.
    Recompute(Wanted),
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// What of the block is computed.
    pub task: Task,
    /// The block.
    pub block: BlockSpec,
    /// Its sizes over the input.
    pub geometry: Geometry,
    /// The type of all tensors.
    pub dtype: DType,
    /// How float32 is multiplied.
    pub precision: Precision,
    /// How the input lies in memory, and its gradient.
    pub input_format: MemoryFormat,
    /// How the output does, the convolution's output, and the output's gradient.
    pub output_format: MemoryFormat,
    /// The kernel family to use where it applies.
    pub algorithm: Option<Algorithm>,
}

/// Bytes of shared memory of a multiprocessor, and those that each of its blocks takes besides its own.
const SHARED: usize = 233_472;
const RESERVED: usize = 1024;

/// What is done for a block, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The steps.
    pub steps: Vec<Step>,
    /// The memory that they work in, besides the block's tensors.
    pub workspace_bytes: usize,
    /// The family that computes the convolution.
    pub algorithm: Algorithm,
    seconds: f64,
    summary: String,
    weight: Option<WeightPlaces>,
}

impl fmt::Display for Plan {
    /// For example `linear_gemm split 128x64x64, 2 slices, 1 chunk; two-pass norm; 5 launches, 12 MB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let launches = self.steps.iter().filter(|step| matches!(step, Step::Launch { .. })).count();
        let megabytes = self.workspace_bytes as f64 / 1e6;
        write!(f, "{}; {launches} launches, {megabytes:.1} MB", self.summary)
    }
}

/// Where parts of the workspace lie.
#[derive(Default)]
struct Workspace {
    bytes: usize,
    /// Where a weight is packed that layers may keep.
    weight: Option<WeightPlaces>,
}

impl Workspace {
    /// Past what is taken already.
    fn from(bytes: usize) -> Workspace {
        Workspace { bytes, weight: None }
    }

    /// Takes bytes; their offset is a multiple of 256.
    fn take(&mut self, bytes: usize) -> u64 {
        let at = self.bytes.next_multiple_of(256);
        self.bytes = at + bytes;
        at as u64
    }
}

/// What plans are made from.
#[derive(Clone, Copy)]
struct Context<'a> {
    request: &'a Request,
    device: &'a DeviceInfo,
    variants: &'a [&'a Variant],
    /// For the gradient of an input what its convolution's channels are. Gradients are of any magnitudes beside each
    /// other: the split is then left to devices that have nothing else.
    classes: Option<Classes>,
    /// Whether the input lies as `halo_gemm` takes it, and what that cannot multiply is somebody else's.
    packed: bool,
    /// Whether this is planned for what another plan finds that it cannot compute.
    within: bool,
    /// Of how many fp16, scaled, each float32 of a gradient is multiplied as; 0 where it is not.
    halves: usize,
    /// For the forward pass of training, where only the convolution is planned, the block whose normalization's statistics
    /// are taken of its output.
    counted: Option<BlockSpec>,
}

impl<'a> Context<'a> {
    /// For a request as it is asked for.
    fn new(request: &'a Request, device: &'a DeviceInfo, variants: &'a [&'a Variant]) -> Context<'a> {
        Context {
            request,
            device,
            variants,
            classes: None,
            packed: false,
            within: false,
            halves: 0,
            counted: None,
        }
    }

    /// Bytes of an element of what gradients are multiplied by, of one part of it.
    fn operand_bytes(self) -> usize {
        if self.halves > 0 { 2 } else { self.request.dtype.size() }
    }

    /// Of how many fp16 gradients of float32 may be multiplied as, if there are kernels for it.
    fn most_halves(self) -> usize {
        let (halves, kind) = match self.request.precision {
            Precision::Tf32 => (1, 5),
            Precision::Ieee => (2, 2),
        };
        let there = self.kernel("half_input", &[], &[("KIND", kind)]).is_ok();
        if self.request.dtype == DType::F32 && there { halves } else { 0 }
    }

    /// Whether the sums of a backward pass bound gradients, by which they may be scaled to fp16. That is so whatever multiplies
    /// them, as gradients of vectors are of these sums: each alone has the bits that it has with others.
    fn bounds_gradients(self) -> bool {
        self.most_halves() > 0
    }

    /// The kernels of a function, which the entry is named after, for some types: in a tile kernel's cubin
    /// with an ending.
    fn kernels(self, kernel: &str, types: &[&str]) -> impl Iterator<Item = &'a Variant> {
        let is_it = move |variant: &&&Variant| {
            variant.entry.strip_suffix("_entry").unwrap_or(variant.entry) == kernel && variant.types == types
        };
        self.variants.iter().filter(is_it).copied().collect::<Vec<_>>().into_iter()
    }

    /// For the forward pass of training that of the convolution alone.
    fn of_convolution<'b>(self, request: &'b Request) -> Context<'b>
    where
        'a: 'b,
    {
        let block = self.request.block;
        Context { request, counted: block.norm().map(|_| block), ..self }
    }

    /// The one kernel of a function for some types and sizes.
    fn kernel(self, kernel: &str, types: &[&str], params: &[(&str, i64)]) -> Result<&'a Variant> {
        let fits =
            |variant: &&Variant| params.iter().all(|&(name, value)| variant.param(name) == Some(value));
        self.kernels(kernel, types).find(fits).ok_or_else(|| Error::MissingKernel {
            name: format!("{kernel} {types:?} {params:?}"),
            arch: self.device.arch.to_string(),
        })
    }

    /// Of a function's kernels for some types and sizes, the narrowest whose tile, of the size `tile`, holds
    /// `wanted` at once, or the widest.
    fn narrowest(
        self,
        kernel: &str,
        types: &[&str],
        params: &[(&str, i64)],
        tile: &str,
        wanted: usize,
    ) -> Result<&'a Variant> {
        let fits =
            |variant: &&Variant| params.iter().all(|&(name, value)| variant.param(name) == Some(value));
        let enough = |variant: &&Variant| {
            let width = size(variant, tile);
            (width < wanted, width.abs_diff(wanted))
        };
        match self.kernels(kernel, types).filter(fits).min_by_key(enough) {
            Some(variant) => Ok(variant),
            None => self.kernel(kernel, types, params),
        }
    }

    /// The name of the tensors' type in cuTile.
    fn type_name(self) -> &'static str {
        match self.request.dtype {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
        }
    }

    /// The name of the type that sums are kept in.
    fn accumulator_name(self) -> &'static str {
        if self.request.dtype == DType::F64 { "f64" } else { "f32" }
    }
}

/// The request of a block's convolution alone.
fn bare(request: &Request) -> Request {
    Request { block: BlockSpec::from(*request.block.conv()), ..*request }
}

/// The activations that follow the convolution at once, in order. Without a normalization both of a
/// block's do; only `direct` computes two.
fn epilogue(block: &BlockSpec) -> [Option<Activation>; 2] {
    match (block.norm(), block.activation(), block.post_activation()) {
        (Some(_), activation, _) => [activation, None],
        (None, None, post) => [post, None],
        (None, activation, post) => [activation, post],
    }
}

/// Whether there is a bias, and the activation that follows it, as the kernels that compute one take them.
fn bias_and_activation(request: &Request) -> [Argument; 3] {
    let (code, slope) = activation_code(epilogue(&request.block)[0]);
    let has_bias = request.geometry.conv().has_bias();
    [i32::from(has_bias).into(), code.into(), Argument::F64(slope)]
}

/// The code that kernels know an activation by, and its slope.
fn activation_code(activation: Option<Activation>) -> (i32, f64) {
    match activation {
        None => (0, 0.0),
        Some(Activation::Relu) => (1, 0.0),
        Some(Activation::LeakyRelu(slope)) => (2, slope.get()),
        Some(Activation::Silu) => (3, 0.0),
        Some(Activation::Gelu) => (4, 0.0),
        Some(Activation::GeluTanh) => (5, 0.0),
        Some(Activation::Hardswish) => (6, 0.0),
        Some(Activation::Sigmoid) => (7, 0.0),
        Some(Activation::Tanh) => (8, 0.0),
    }
}

/// Strides of [N, C, D, H, W] in elements for a tensor of that shape in a memory format.
fn strides([_, c, d, h, w]: [usize; 5], format: MemoryFormat) -> [usize; 5] {
    match format {
        MemoryFormat::Contiguous => [c * d * h * w, d * h * w, h * w, w, 1],
        MemoryFormat::ChannelsLast3d => [c * d * h * w, 1, h * w * c, w * c, c],
    }
}

/// A number that kernels take as 32 bits.
fn int(value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::Overflow { what: "a size on the GPU" })
}

/// A grid of blocks along the first axis.
fn grid(blocks: usize) -> Result<[u32; 3]> {
    Ok([int(blocks)?.cast_unsigned(), 1, 1])
}

/// Adds numbers as 32-bit arguments.
fn push(arguments: &mut Vec<Argument>, numbers: impl IntoIterator<Item = usize>) -> Result<()> {
    for number in numbers {
        arguments.push(int(number)?.into());
    }
    Ok(())
}

/// A kernel's compile-time size; 1 if it has none of that name.
fn size(variant: &Variant, name: &str) -> usize {
    variant.param(name).map_or(1, |size| size as usize)
}

/// The product of sizes, unless it is past what is counted.
fn product(sizes: &[usize]) -> Option<usize> {
    sizes.iter().try_fold(1, |product: usize, &size| product.checked_mul(size))
}

/// Whether each output has one tap: kernels that are their stride.
fn one_tap(geometry: &Geometry) -> bool {
    geometry.axes().iter().all(|axis| {
        axis.kernel == axis.stride
            && (axis.dilation == 1 || axis.kernel == 1)
            && axis.padding == 0
            && axis.output == axis.input * axis.stride
    })
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The time that the normalization, or its statistics, are expected to take where they come after the convolution.
fn after(context: Context<'_>) -> f64 {
    let counted = context.counted.map_or(0.0, |block| norm::counting(context, &block));
    context.request.block.norm().map_or(counted, |_| norm::seconds(context))
}

impl Plan {
    /// Plans a request on a device with the kernels for it.
    ///
    /// # Errors
    /// [`Error::MissingKernel`] if the build lacks what the plan needs; [`Error::Overflow`] for sizes
    /// past what the kernels count to.
    pub fn new(request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Result<Plan> {
        let context = Context::new(request, device, variants);
        match request.task {
            Task::Forward => Plan::forward(context),
            _ if request.geometry.batch() == 0 => Ok(Plan::nothing()),
            Task::Training => Plan::training(context, true),
            Task::Backward(wanted) | Task::Recompute(wanted) => {
                Plan::backward(&backward::Backward::all(context, wanted)?[0])
            }
        }
    }

    /// What computes a block's output.
    fn forward(context: Context<'_>) -> Result<Plan> {
        Plan::of(context, Family::best(context)?)
    }

    /// The plans for a request that may be the fastest, the one that is expected to be first, at most `most`:
    /// for measuring which of them is. Of the family that is asked for, if one is.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn candidates(
        request: &Request,
        device: &DeviceInfo,
        variants: &[&Variant],
        most: usize,
    ) -> Result<Vec<Plan>> {
        let context = Context::new(request, device, variants);
        match request.task {
            Task::Forward => {
                let of = |family| Plan::of(context, family);
                Family::fastest(context, most)?.into_iter().map(of).collect()
            }
            _ if request.geometry.batch() == 0 => Ok(vec![Plan::nothing()]),
            Task::Training => {
                let convolution = bare(request);
                let convolution = context.of_convolution(&convolution);
                let of = |family| Plan::trained(context, convolution, family, true);
                Family::fastest(convolution, most)?.into_iter().map(of).collect()
            }
            Task::Backward(wanted) | Task::Recompute(wanted) => {
                let all = backward::Backward::all(context, wanted)?;
                all.iter().take(most).map(Plan::backward).collect()
            }
        }
    }

    /// The one of them that is expected to be the fastest of those that launch a kernel, by the name of its function or of a variant. That of
    /// gradients is chosen as if both of the convolution's were wanted: one alone has the same bits.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn with_kernel(
        request: &Request,
        device: &DeviceInfo,
        variants: &[&Variant],
        kernel: &str,
    ) -> Result<Option<Plan>> {
        let (Task::Backward(wanted) | Task::Recompute(wanted)) = request.task else {
            let plans = Plan::candidates(request, device, variants, usize::MAX)?;
            return Ok(plans.into_iter().find(|plan| plan.launches(kernel)));
        };
        if request.geometry.batch() == 0 || !(wanted.input || wanted.weight) {
            return Ok(None);
        }
        let context = Context::new(request, device, variants);
        for mut both in backward::Backward::all(context, Wanted { input: true, weight: true, ..wanted })? {
            if Plan::backward(&both)?.launches(kernel) {
                both.leave_out(wanted);
                return Plan::backward(&both).map(Some);
            }
        }
        Ok(None)
    }

    /// That of an empty batch.
    fn nothing() -> Plan {
        let (steps, summary) = (Vec::new(), "nothing to do".to_string());
        Plan { steps, workspace_bytes: 0, algorithm: Algorithm::Direct, seconds: 0.0, summary, weight: None }
    }

    /// What computes the convolution's output, which is saved, the statistics of what follows, and, if it is asked for, the
    /// output.
    fn training(context: Context<'_>, output: bool) -> Result<Plan> {
        let convolution = bare(context.request);
        let convolution = context.of_convolution(&convolution);
        Plan::trained(context, convolution, Family::best(convolution)?, output)
    }

    /// The same with the convolution, of whose own context, by a family.
    fn trained(
        context: Context<'_>,
        convolution: Context<'_>,
        family: Option<Family<'_>>,
        output: bool,
    ) -> Result<Plan> {
        let request = context.request;
        let counts = family.as_ref().is_some_and(|family| family.way() == Way::Counted);
        let mut plan = Plan::of(convolution, family)?;
        let saved =
            |buffer, offset| (if buffer == Buffer::Output { Buffer::Convolution } else { buffer }, offset);
        plan.steps = plan.steps.iter().map(|step| step.moved(saved)).collect();
        if let Some(norm) = request.block.norm().filter(|_| !counts) {
            // The convolution is done: its memory serves again.
            let mut again = Workspace::default();
            epilogue::statistics(context, norm, &mut again, &mut plan.steps)?;
            plan.workspace_bytes = plan.workspace_bytes.max(again.bytes);
        }
        if output {
            epilogue::output(context, &mut plan.steps)?;
            plan.summary.push_str("; saved for training");
            plan.seconds += norm::scaling(context);
        }
        Ok(plan)
    }

    /// What computes gradients.
    fn backward(backward: &backward::Backward<'_>) -> Result<Plan> {
        let (mut workspace, mut steps) = (Workspace::default(), Vec::new());
        backward.steps(&mut workspace, &mut steps)?;
        let algorithm = backward.algorithm();
        let (seconds, summary) = (backward.seconds(), backward.to_string());
        Ok(Plan { steps, workspace_bytes: workspace.bytes, algorithm, seconds, summary, weight: None })
    }

    /// The time that all steps are expected to take, in seconds.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Whether it launches a kernel, by the name of its function or of a variant.
    pub fn launches(&self, kernel: &str) -> bool {
        self.steps.iter().any(|step| step.launches(kernel))
    }

    /// What a family launches, or without one `direct`; then the normalization.
    fn of(context: Context<'_>, family: Option<Family<'_>>) -> Result<Plan> {
        let request = context.request;
        if request.geometry.batch() == 0 {
            return Ok(Plan::nothing());
        }
        let mut workspace = Workspace::default();
        let mut steps = Vec::new();
        let (algorithm, seconds, mut summary) = match &family {
            Some(family) => {
                family.steps(context, &mut workspace, &mut steps)?;
                (family.algorithm(), family.seconds(context), family.to_string())
            }
            None => {
                steps.push(direct::step(context, None)?);
                (Algorithm::Direct, direct::seconds(context) + after(context), "direct".to_string())
            }
        };
        let rest =
            request.block.norm().filter(|_| family.as_ref().is_none_or(|family| family.way() == Way::Plain));
        if let Some(norm) = rest {
            // The convolution is done: its memory serves again, but for the control words at its start,
            // which say how it was computed.
            let mut again = Workspace::from(if workspace.bytes > 0 { 256 } else { 0 });
            norm::steps(context, norm, &mut again, &mut steps)?;
            workspace.bytes = workspace.bytes.max(again.bytes);
            summary.push_str("; two-pass norm");
        }
        let Workspace { bytes: workspace_bytes, weight } = workspace;
        Ok(Plan { steps, workspace_bytes, algorithm, seconds, summary, weight })
    }
}

//! Planning `pack`: how operands are stored for the tensor cores, and what brings a weight there. The
//! kernels' file says what the numbers mean.

use super::{Argument, Buffer, Context, Step, Workspace, epilogue, grid, int, push, size};
use volup::{DType, MemoryFormat, Precision, Result};

/// Pieces of 16 bytes of the input that its magnitude is judged by, and those that a block looks at.
const SAMPLES: usize = 1 << 16;
const SAMPLED: usize = 1024;
/// Of how many pieces all are looked at, side by side: they take no longer than that many which lie apart.
const ALL: usize = 4 * SAMPLES;
/// Elements of a channel, or of all that a block of `channel_largest` has, that it looks at.
const LOOKED_AT: usize = 1 << 15;
/// Elements of a block of `half_input` that does all it can at once.
const HALVED: usize = 4096;
/// The words that the pack leaves for later kernels.
pub(super) const CONTROL_WORDS: usize = 8;

/// Which kernels: by how operands are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operand {
    /// float16 or bfloat16 as they are.
    Half,
    /// float32 rounded to tf32.
    Tf32,
    /// float32 as two float16, within 2^26 of the largest magnitude.
    Split,
    /// float32 as two tf32, of any magnitude.
    Parts,
    /// float32 as one float16, which has as many bits as tf32 and twice its rate, within 2^24 of the largest magnitude.
    Scaled,
}

impl Operand {
    /// How a request's operands are stored. Nothing for what is left to the definition: float64, and two
    /// activations in a row.
    pub(super) fn of(context: Context<'_>) -> Option<Operand> {
        if epilogue(&context.request.block)[1].is_some() {
            return None;
        }
        match (context.request.dtype, context.request.precision) {
            (DType::F64, _) => None,
            (DType::F16 | DType::Bf16, _) => Some(Operand::Half),
            (DType::F32, Precision::Tf32) => Some(Operand::Tf32),
            (DType::F32, Precision::Ieee) if context.classes.is_some() && context.halves == 0 => {
                Some(Operand::Parts)
            }
            (DType::F32, Precision::Ieee) => Some(Operand::Split),
        }
    }

    /// How those of the families that pack panels may be stored.
    pub(super) fn of_panels(context: Context<'_>) -> Vec<Operand> {
        let own = Operand::of(context);
        if own.is_some() && context.halves == 1 {
            return vec![Operand::Scaled];
        }
        let scaled = own == Some(Operand::Tf32) && context.classes.is_none() && !context.packed;
        own.into_iter().chain(scaled.then_some(Operand::Scaled)).collect()
    }

    /// What kernels' names say of it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Operand::Half => "half",
            Operand::Tf32 => "tf32",
            Operand::Split => "split",
            Operand::Parts => "parts",
            Operand::Scaled => "scaled",
        }
    }

    /// The types that its kernels are compiled for.
    pub(super) fn types(self, context: Context<'_>) -> Vec<&'static str> {
        if self == Operand::Half { vec![context.type_name()] } else { vec![] }
    }

    /// The `KIND` of numbers of the kernels that multiply what they find in the tensors, the split's parts both in tf32.
    pub(super) fn kind(self) -> i64 {
        match self {
            Operand::Half => 0,
            Operand::Tf32 | Operand::Scaled => 1,
            Operand::Split | Operand::Parts => 3,
        }
    }

    /// The `KIND` of numbers of the kernels that take the tensors' elements as they are.
    pub(super) fn tensor_kind(self) -> i64 {
        i64::from(self != Operand::Half)
    }

    /// The `KIND` of numbers of the kernels that multiply panels, and of those that write them.
    pub(super) fn panel_kind(self) -> i64 {
        match self {
            Operand::Half => 0,
            Operand::Tf32 => 1,
            Operand::Split => 2,
            Operand::Parts => 3,
            Operand::Scaled => 5,
        }
    }

    /// Bytes of a packed element.
    pub(super) fn bytes(self) -> usize {
        match self {
            Operand::Half | Operand::Split | Operand::Scaled => 2,
            Operand::Tf32 | Operand::Parts => 4,
        }
    }

    /// Whether it is scaled by powers of two: the weight by one for each channel.
    pub(super) fn has_scale(self) -> bool {
        matches!(self, Operand::Split | Operand::Scaled)
    }

    /// What launches are told last that somebody else may make unnecessary: those of what is there for the numbers that he cannot
    /// multiply.
    pub(super) fn unless(self) -> Option<Argument> {
        (self == Operand::Parts).then_some(Argument::Pointer(Buffer::Unless, 0))
    }

    /// Parts that a packed tensor has.
    pub(super) fn parts(self) -> usize {
        if matches!(self, Operand::Split | Operand::Parts) { 2 } else { 1 }
    }
}

/// Takes and clears the control words, and so many after them; returns where they lie.
pub(super) fn control(workspace: &mut Workspace, more: usize, steps: &mut Vec<Step>) -> u64 {
    let words = CONTROL_WORDS + more;
    let at = workspace.take(words * 4);
    steps.push(Step::Clear { at, words });
    at
}

/// Finds the largest magnitude of the input, which the split's exponent follows.
pub(super) fn largest(context: Context<'_>, control: u64, steps: &mut Vec<Step>) -> Result<()> {
    let elements: usize = context.request.geometry.input_shape().iter().product();
    let variant = *context.kernel("pack_largest", &[], &[])?;
    let tiles = elements.div_ceil(size(&variant, "B"));
    let arguments = vec![
        Argument::Pointer(Buffer::Input, 0),
        Argument::Pointer(Buffer::Workspace, control),
        Argument::I64(elements as i64),
        int(tiles)?.into(),
    ];
    steps.push(Step::launch(
        variant,
        [tiles.min(8 * context.device.multiprocessors) as u32, 1, 1],
        arguments,
    ));
    Ok(())
}

/// Finds what both operands are scaled by that become float16, one each or two: of a weight's slices the columns, as [`weight_scale`] does,
/// and of the input, unless that is scaled already, a part large enough to tell.
pub(super) fn half_scale(
    context: Context<'_>,
    [slices, columns, inner]: [usize; 3],
    scale: u64,
    control: u64,
    steps: &mut Vec<Step>,
) -> Result<()> {
    let conv = context.request.geometry.conv();
    let (cin, cout, groups) = (conv.in_channels(), conv.out_channels(), conv.groups());
    let first = usize::from(context.request.output_format == MemoryFormat::Contiguous);
    let cut = [columns, inner, first, cout / slices, cin / groups, cout / groups];
    let weight = Argument::Pointer(Buffer::Weight, 0);
    let samples = if context.packed { 0 } else { samples(context) };
    let taps = conv.kernel_size().iter().product();
    let weight = [weight, Argument::Pointer(Buffer::Workspace, scale)];
    steps.push(scales(context, weight, control, samples, cut, [taps, cout])?);
    Ok(())
}

/// Finds what the input alone is scaled by.
pub(super) fn input_scale(context: Context<'_>, control: u64, steps: &mut Vec<Step>) -> Result<()> {
    steps.push(scales(context, [epilogue::NULL; 2], control, samples(context), [1; 6], [1, 0])?);
    Ok(())
}

/// Pieces of the input.
fn pieces(context: Context<'_>) -> usize {
    context.request.geometry.input_shape().iter().product::<usize>().div_ceil(4)
}

/// Whether all of it is looked at, so that its largest magnitude is known before it is packed.
pub(super) fn looks_at_all(context: Context<'_>) -> bool {
    pieces(context) <= ALL
}

/// Pieces of it that are looked at.
fn samples(context: Context<'_>) -> usize {
    if looks_at_all(context) { pieces(context) } else { SAMPLES }
}

/// The launch of `half_scale`.
fn scales(
    context: Context<'_>,
    weight: [Argument; 2],
    control: u64,
    samples: usize,
    cut: [usize; 6],
    [taps, channels]: [usize; 2],
) -> Result<Step> {
    let elements: usize = context.request.geometry.input_shape().iter().product();
    let mut arguments = vec![Argument::Pointer(Buffer::Input, 0)];
    arguments.extend(weight);
    arguments.extend([Argument::Pointer(Buffer::Workspace, control), Argument::I64(elements as i64)]);
    push(&mut arguments, [samples].into_iter().chain(cut).chain([taps, channels]))?;
    let grid = [(channels + samples.div_ceil(SAMPLED)) as u32, 1, 1];
    Ok(Step::launch(*context.kernel("half_scale", &[], &[])?, grid, arguments))
}

/// A launch of `half_scale` as two: of the weight alone, and of the input alone.
pub(super) fn scales_apart(step: &Step) -> [Step; 2] {
    let mut apart = [step.clone(), step.clone()];
    let [
        Step::Launch { grid: of_weight, arguments: weight, .. },
        Step::Launch { grid: of_input, arguments: input, .. },
    ] = &mut apart
    else {
        return apart;
    };
    // As `scales` has them: samples, and the channels, of each of which there is a block.
    let channels = weight.len() - 1;
    if let Argument::I32(blocks) = weight[channels] {
        of_weight[0] = blocks.cast_unsigned();
        of_input[0] -= of_weight[0];
    }
    weight[0] = epilogue::NULL;
    weight[5] = 0.into();
    input[1] = epilogue::NULL;
    input[2] = epilogue::NULL;
    input[channels] = 0.into();
    apart
}

/// Finds the largest magnitude of each of the input's channels, and with it of all, for two control words.
pub(super) fn channel_largest(
    context: Context<'_>,
    largest: u64,
    control: [u64; 2],
    steps: &mut Vec<Step>,
) -> Result<()> {
    let [batch, channels, sizes @ ..] = context.request.geometry.input_shape();
    let (volume, last) =
        (sizes.iter().product::<usize>(), context.request.input_format == MemoryFormat::ChannelsLast3d);
    let (blocks, apiece) =
        if last { (channels.div_ceil(256), LOOKED_AT / channels.min(256)) } else { (channels, LOOKED_AT) };
    let chunks = volume.div_ceil(apiece);
    steps.push(Step::Clear { at: largest, words: channels });
    let mut arguments = vec![Argument::Pointer(Buffer::Input, 0)];
    arguments.extend([largest, control[0], control[1]].map(|at| Argument::Pointer(Buffer::Workspace, at)));
    push(&mut arguments, [volume, channels, chunks, usize::from(last)])?;
    let kernel = *context.kernel("channel_largest", &[], &[])?;
    steps.push(Step::launch(kernel, grid(batch * blocks * chunks)?, arguments));
    Ok(())
}

/// The launch that makes fp16 of so many samples' input, from an address of it on, where it is scaled: as its control words say, or
/// each channel by its largest magnitude; then with low parts so many elements after the high ones.
pub(super) fn half_input(
    context: Context<'_>,
    [from, to, scales]: [u64; 3],
    count: usize,
    low: usize,
) -> Result<Step> {
    let mut arguments = vec![Argument::Pointer(Buffer::Input, from)];
    arguments.extend([to, scales].map(|at| Argument::Pointer(Buffer::Workspace, at)));
    arguments.push(Argument::I64(count as i64));
    let two = context.halves == 2;
    if two {
        int(count)?;
        arguments.push(Argument::I64(low as i64));
        let [_, channels, sizes @ ..] = context.request.geometry.input_shape();
        let first = context.request.input_format == MemoryFormat::Contiguous;
        push(&mut arguments, [if first { sizes.iter().product() } else { 1 }, channels])?;
    }
    let blocks = count.div_ceil(HALVED).min(8 * context.device.multiprocessors);
    let kind = if two { 2 } else { 5 };
    Ok(Step::launch(*context.kernel("half_input", &[], &[("KIND", kind)])?, grid(blocks)?, arguments))
}

/// How a packed weight is cut.
pub(super) struct WeightLayout {
    /// Slices of whole groups.
    pub(super) slices: usize,
    /// Columns of a slice: blocks of a tile's columns.
    pub(super) columns_per_slice: usize,
    /// Elements of a row, which a step along width reduces over.
    pub(super) row: usize,
    /// Steps along width, and how far apart they are.
    pub(super) w_steps: usize,
    pub(super) w_step: usize,
    /// The offset that the first element of a row is read at.
    pub(super) w_far: usize,
    /// Elements of a row that share an offset.
    pub(super) span: usize,
}

/// Where a packed weight lies, and for the split what its columns are scaled by.
#[derive(Clone, Copy)]
pub(super) struct PackedWeight {
    pub(super) at: u64,
    pub(super) scale: u64,
}

/// Finds what the columns of a weight's slices are scaled by, for the split. `inner` is how many columns
/// lie together, of one channel or one residue.
pub(super) fn weight_scale(
    context: Context<'_>,
    slices: usize,
    columns_per_slice: usize,
    inner: usize,
    scale: u64,
    control: u64,
    steps: &mut Vec<Step>,
) -> Result<()> {
    let conv = context.request.geometry.conv();
    let (cin, cout, groups) = (conv.in_channels(), conv.out_channels(), conv.groups());
    let first = usize::from(context.request.output_format == MemoryFormat::Contiguous);
    let mut arguments = vec![Argument::Pointer(Buffer::Weight, 0)];
    arguments.extend([scale, control].map(|at| Argument::Pointer(Buffer::Workspace, at)));
    push(&mut arguments, [columns_per_slice, inner, first, cout / slices, cin / groups, cout / groups])?;
    push(&mut arguments, [cout, conv.kernel_size().iter().product()])?;
    let variant = *context.kernel("pack_weight_scale", &[], &[])?;
    let columns = slices * columns_per_slice;
    steps.push(Step::launch(variant, [columns as u32, 1, 1], arguments));
    Ok(())
}

/// Packs the weight.
pub(super) fn weight(
    context: Context<'_>,
    operand: Operand,
    layout: &WeightLayout,
    control: u64,
    workspace: &mut Workspace,
    steps: &mut Vec<Step>,
) -> Result<PackedWeight> {
    let request = context.request;
    let conv = request.geometry.conv();
    let &WeightLayout { slices, columns_per_slice, row, w_steps, w_step, w_far, span } = layout;
    let [d_kernel, h_kernel, w_kernel] = conv.kernel_size();
    let (w_stride, w_dilation) = (conv.stride()[2], conv.dilation()[2]);
    let (cin, cout, groups) = (conv.in_channels(), conv.out_channels(), conv.groups());
    let (slice_in, slice_out) = (cin / slices, cout / slices);
    let columns = slices * columns_per_slice;
    let length = d_kernel * h_kernel * w_steps * columns * row;
    let bytes = length * operand.bytes();
    let split = operand == Operand::Split;
    let at = workspace.take(bytes * operand.parts());
    let scale = workspace.take(if split { columns * 4 } else { 0 });

    let pointer = |at| Argument::Pointer(Buffer::Workspace, at);
    let first = usize::from(request.output_format == MemoryFormat::Contiguous);
    let inner = if first == 1 { w_stride } else { slice_out };
    let per_group = [cin / groups, cout / groups];
    if split {
        weight_scale(context, slices, columns_per_slice, inner, scale, control, steps)?;
    }
    let name = format!("pack_weight_{}", operand.name());
    let variant = *context.kernel(&name, &operand.types(context), &[])?;
    let mut arguments = vec![Argument::Pointer(Buffer::Weight, 0), pointer(at)];
    if split {
        arguments.extend([pointer(at + bytes as u64), pointer(scale)]);
    } else {
        arguments.push(pointer(control));
    }
    push(&mut arguments, [length, row, columns, columns_per_slice, inner, first, slice_out, slice_in])?;
    push(&mut arguments, per_group)?;
    push(&mut arguments, [cin, cout, d_kernel, h_kernel, w_kernel, w_stride, w_dilation])?;
    push(&mut arguments, [w_steps, w_step, w_far, span])?;
    let blocks = length.div_ceil(size(&variant, "B"));
    steps.push(Step::launch(variant, [blocks as u32, 1, 1], arguments));
    Ok(PackedWeight { at, scale })
}

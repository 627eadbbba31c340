//! Planning `pointwise`: kernels of one tap and few channels, NCDHW. The kernel's file says what the numbers mean.

use super::pack::Operand;
use super::shuffle_gemm::{CACHE, CLOCK, MEMORY, MOST, SECTOR, SEEN};
use super::{
    Argument, Buffer, Context, RESERVED, SHARED, Step, bias_and_activation, gcd, product, push, size, strides,
};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Voxels of a line, and warps of a block.
const LINE: usize = 32;
const WARPS: usize = 8;
/// Channels that are multiplied in a row, and those of a stage where an item does not have all row blocks.
const CHUNK: usize = 2;
const STAGE: usize = 8;

/// Seconds until blocks have what they start with.
const START: f64 = 7e-6;
/// Instructions of a warp for what it reads at once, and to write a row's; where there is a stride for 32 outputs of a row, by
/// what they share with others that are written at once, and to find whose sums they are.
const READ: f64 = 4.8;
const WRITE: [f64; 2] = [3.0, 4.0];
const SPREAD: [f64; 2] = [4.2, 16.5];
const FOUND: f64 = 29.0;
/// The share of its issue slots that a multiprocessor fills, with no warp and more with each of a scheduler, at most; without
/// a stride and with one.
const ISSUE: [[f64; 2]; 2] = [[0.57, 0.0], [0.24, 0.05]];
const MOST_ISSUED: f64 = 0.75;
/// Seconds of a stage at least, which waits for what was asked for one stage before; likewise.
const STAGE_WAIT: [f64; 2] = [4.6e-7, 1.6e-6];
/// Seconds of an item for each row block and for each of its rows, whatever there is to compute; likewise.
const TURN: [[f64; 2]; 2] = [[8e-8, 3.3e-8], [0.0, 1.6e-7]];
/// Of what other row blocks read again from the cache, the part that does not hide; likewise.
const AGAIN: [f64; 2] = [0.3, 0.9];

/// A plan of this family.
#[derive(Clone, Copy)]
pub(super) struct Pointwise<'a> {
    kernel: &'a Variant,
    /// Blocks of output channels of a group, and those of an item.
    row_blocks: usize,
    at_once: usize,
    /// Channels of a stage.
    stage: usize,
    /// Blocks of voxels of a sample, and voxels from one to the next.
    blocks: usize,
    step: usize,
    /// What warps compute at a time, and blocks of them.
    items: usize,
    grid: usize,
    shared: usize,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for Pointwise<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rows, voxels, ctas] = ["ROWS", "VOXELS", "CTAS"].map(|name| size(self.kernel, name));
        write!(
            f,
            "pointwise {rows} channels by {} voxels x{ctas}, {} at once, ",
            LINE * voxels,
            self.at_once
        )?;
        write!(f, "{} items", self.items)
    }
}

impl<'a> Pointwise<'a> {
    /// Every plan, where the kernel has one tap and each output is within a stride of one; not for float64, not past 32-bit counts.
    pub(super) fn all(context: Context<'a>) -> Vec<Pointwise<'a>> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let Some(operand) = Operand::of(context) else { return Vec::new() };
        let volume: usize = geometry.input_shape()[2..].iter().product();
        let counted = |sizes: &[usize]| product(sizes).is_some_and(|size| size <= MOST);
        let applies = conv.kernel_size() == [1; 3]
            && conv.padding() == [0; 3]
            && [request.input_format, request.output_format] == [MemoryFormat::Contiguous; 2]
            && counted(&geometry.input_shape()[1..])
            && counted(&geometry.output_shape()[1..])
            && counted(&conv.weight_shape())
            && volume > 0
            && geometry.axes().iter().all(|axis| axis.output <= axis.input * axis.stride);
        if !applies {
            return Vec::new();
        }
        let strided = i64::from(geometry.output_shape()[2..] != geometry.input_shape()[2..]);
        // float32 is multiplied as it is, whatever the precision.
        let types = operand.types(context);
        let is_it = |kernel: &&Variant| {
            kernel.param("KIND") == Some(operand.tensor_kind())
                && kernel.param("STRIDED") == Some(strided)
                && volume.is_multiple_of(size(kernel, "UNIT"))
        };
        let kernels = context.kernels("pointwise", &types).filter(is_it);
        let both = |kernel| [false, true].map(|at_once| Pointwise::new(context, kernel, at_once));
        kernels.flat_map(both).flatten().collect()
    }

    fn new(context: Context<'a>, kernel: &'a Variant, at_once: bool) -> Option<Pointwise<'a>> {
        let (geometry, conv) = (&context.request.geometry, context.request.geometry.conv());
        let [rows, voxels, ctas] = ["ROWS", "VOXELS", "CTAS"].map(|name| size(kernel, name));
        let groups = conv.groups();
        let [channels, out_channels] = [conv.in_channels(), conv.out_channels()].map(|all| all / groups);
        let row_blocks = out_channels.div_ceil(rows);
        if at_once && row_blocks == 1 {
            return None;
        }
        let padded = channels.next_multiple_of(CHUNK);
        let stage = if at_once { padded } else { padded.min(STAGE) };
        let at_once = if at_once { row_blocks } else { 1 };
        let sets = groups * row_blocks;
        let bytes = context.request.dtype.size();
        let strided = kernel.param("STRIDED") == Some(1);
        let of_warp = 2 * bytes * stage * LINE * voxels + if strided { 4 * rows * LINE * voxels } else { 0 };
        let shared = product(&[4, sets, rows, padded + 2])? + WARPS * of_warp;
        let ctas = ctas.min(SHARED / (shared + kernel.shared_bytes as usize + RESERVED));
        if ctas == 0 {
            return None;
        }
        let volume: usize = geometry.input_shape()[2..].iter().product();
        // Items overlap where channels start within 32 bytes: whoever writes the rest of such would let the cache read it.
        let overlap = if strided || (bytes * volume).is_multiple_of(SECTOR) { 0 } else { SECTOR / bytes };
        let step = LINE * voxels - overlap;
        let blocks = volume.div_ceil(step);
        let items = product(&[geometry.batch(), blocks, sets / at_once]).filter(|&items| items <= MOST)?;
        let processors = context.device.multiprocessors;
        let grid = items.div_ceil(WARPS).min(processors * ctas);

        let count = |shape: [usize; 5]| shape.iter().map(|&size| size as f64).product::<f64>();
        let (x, y) = (count(geometry.input_shape()), count(geometry.output_shape()));
        let element = bytes as f64;
        let which = usize::from(strided);
        let again = AGAIN[which] * x * (row_blocks / at_once - 1) as f64;
        let moved = element * ((x + y) / context.device.memory(MEMORY) + again / CACHE);
        let copies = (voxels / size(kernel, "UNIT")) as f64;
        // 16 bits are brought into float32, and back.
        let widened = if bytes == 2 { voxels as f64 } else { 0.0 };
        let of_channel = (rows * voxels + rows / 4 + 2) as f64 + READ * copies + widened;
        let row_blocks_of_all = (items * at_once) as f64;
        let written = if strided {
            let (vector, of_block) = (16 / bytes, rows.min(out_channels));
            let alike = vector / gcd(vector, geometry.output_voxels());
            let shared = alike.min(of_block) as f64 / of_block as f64;
            y / LINE as f64
                * (SPREAD[0] + SPREAD[1] / vector as f64 + FOUND * shared / conv.stride()[0] as f64)
        } else {
            row_blocks_of_all * rows as f64 * (WRITE[0] * copies + WRITE[1] + widened)
        };
        let instructions = row_blocks_of_all * padded as f64 * of_channel + written;
        // Warps take whole items.
        let warps = (grid * WARPS) as f64;
        let turns = (items as f64 / warps).ceil();
        let schedulers = 4.0 * grid.min(processors) as f64;
        let [least, more] = ISSUE[which];
        let issue = (least + more * warps / schedulers).min(MOST_ISSUED);
        let issued = instructions * turns * warps / items as f64 / (schedulers * issue * CLOCK);
        let issued = issued.max(turns * padded.div_ceil(stage) as f64 * STAGE_WAIT[which]);
        let [of_block, of_row] = TURN[which];
        let waited = turns * at_once as f64 * (of_block + of_row * rows as f64);
        let seconds = START + moved.max(issued) + SEEN * moved.min(issued) + waited;
        Some(Pointwise { kernel, row_blocks, at_once, stage, blocks, step, items, grid, shared, seconds })
    }

    /// What is launched: the convolution.
    pub(super) fn steps(&self, context: Context<'_>, steps: &mut Vec<Step>) -> Result<()> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let groups = conv.groups();
        let [_, _, depth, height, width] = geometry.input_shape();
        let [_, _, depth_out, height_out, width_out] = geometry.output_shape();
        let buffers = [Buffer::Input, Buffer::Weight, Buffer::Bias, Buffer::Output];
        let mut arguments: Vec<Argument> = buffers.map(|buffer| Argument::Pointer(buffer, 0)).into();
        push(&mut arguments, [conv.in_channels() / groups, conv.out_channels() / groups, groups])?;
        push(
            &mut arguments,
            [self.row_blocks, self.at_once, self.stage, depth * height * width, self.blocks],
        )?;
        push(&mut arguments, [self.step, self.items, depth_out * height_out * width_out])?;
        push(&mut arguments, [height * width, width])?;
        push(&mut arguments, conv.stride())?;
        push(&mut arguments, [depth_out, height_out, width_out])?;
        let [x_n, ..] = strides(geometry.input_shape(), request.input_format);
        let [y_n, ..] = strides(geometry.output_shape(), request.output_format);
        arguments.extend([x_n, y_n].map(|stride| Argument::I64(stride as i64)));
        arguments.extend(bias_and_activation(request));
        let (variant, grid, shared) = (*self.kernel, [self.grid as u32, 1, 1], self.shared as u32);
        steps.push(Step::Launch { variant, grid, shared, arguments, overlap: false });
        Ok(())
    }
}

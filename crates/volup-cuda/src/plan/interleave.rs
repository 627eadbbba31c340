//! Planning `interleave`: kernels that are their stride. The kernels' file says what the numbers mean.

use super::pack::{self, Operand, PackedWeight, WeightLayout};
use super::{
    Argument, Buffer, Context, Step, Workspace, bias_and_activation, direct, one_tap, product, push,
};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Counts are in 32 bits, with room for a tile past the end.
const MOST: usize = i32::MAX as usize - (1 << 16);
/// What a launch costs beside its work, in seconds.
const LAUNCH: f64 = 5e-6;
/// Bytes a second that tiles move at as views, and by an address for each element.
const BANDWIDTH: [f64; 2] = [2.6e12, 1.5e12];
/// The same where a stride along width leaves gaps between neighbouring threads.
const GAPPED: f64 = 0.8e12;
/// Bytes a second that are read again, from a cache.
const CACHED: f64 = 4e12;
/// What a product of one tile takes, with the wait for its operands, in seconds: of NCDHW, whose tiles of x lie
/// across, and of NDHWC.
const TURN: [f64; 2] = [2.6e-6, 2.3e-6];
/// Blocks that a multiprocessor is given, at least, where tiles can be shared by several.
const BLOCKS: usize = 6;

/// Executed flops a second of one multiprocessor: what an H200 should reach at these tiles, shared out.
/// Rounding and splitting stand between load and product.
fn rate(operand: Operand) -> f64 {
    let all = match operand {
        Operand::Half => 300e12,
        Operand::Tf32 | Operand::Scaled => 100e12,
        Operand::Split | Operand::Parts => 60e12,
    };
    all / 132.0
}

/// A kernel and how it cuts the work.
#[derive(Clone, Copy)]
struct Tiling<'a> {
    kernel: &'a Variant,
    /// Positions, columns and channels of a tile.
    size: [usize; 3],
    /// Tiles of positions, of the columns of a pair of residues, of channels.
    tiles: usize,
    blocks: usize,
    chunks: usize,
    /// Blocks that share a tile of positions.
    parts: usize,
    seconds: f64,
}

impl<'a> Tiling<'a> {
    /// Tiles as views, where the sizes allow it.
    fn view(context: Context<'_>, operand: Operand, kernel: &'a Variant, keep: bool) -> Option<Tiling<'a>> {
        let size = |name| kernel.param(name).and_then(|size| usize::try_from(size).ok());
        let (vector, rows, row) = (size("VEC")?, size("TH")?, size("TW")?);
        let conv = context.request.geometry.conv();
        let [batch, cin, depth, height, width] = context.request.geometry.input_shape();
        let stride = conv.stride()[2];
        let dense = if size("LAST")? == 0 {
            stride == 2 && width.is_multiple_of(vector)
        } else {
            cin.is_multiple_of(vector) && (stride * conv.out_channels()).is_multiple_of(vector)
        };
        if !dense || !height.is_multiple_of(rows) || keep && cin > size("BK")? {
            return None;
        }
        let tiles = (batch * depth).checked_mul(height / rows)?.checked_mul(width.div_ceil(row))?;
        Tiling::new(context, operand, kernel, tiles, keep, BANDWIDTH[0])
    }

    /// An address for each element.
    fn any(context: Context<'_>, operand: Operand, kernel: &'a Variant) -> Option<Tiling<'a>> {
        let size = |name| kernel.param(name).and_then(|size| usize::try_from(size).ok());
        let stride = context.request.geometry.conv().stride()[2];
        let (pair, first) = (size("PAIR")? == 1, size("LAST")? == 0);
        if pair && (stride != 2 || !first) {
            return None;
        }
        let [batch, _, depth, height, width] = context.request.geometry.input_shape();
        let tiles = batch.checked_mul((depth * height * width).div_ceil(size("BM")?))?;
        let bandwidth = if first && !pair && stride > 1 { GAPPED } else { BANDWIDTH[1] };
        Tiling::new(context, operand, kernel, tiles, false, bandwidth)
    }

    fn new(
        context: Context<'_>,
        operand: Operand,
        kernel: &'a Variant,
        tiles: usize,
        keep: bool,
        bandwidth: f64,
    ) -> Option<Tiling<'a>> {
        let size = |name| kernel.param(name).and_then(|size| usize::try_from(size).ok());
        let size = [size("BM")?, size("BN")?, size("BK")?];
        let [m, n, k] = size;
        let geometry = &context.request.geometry;
        let conv = geometry.conv();
        let [d_stride, h_stride, w_stride] = conv.stride();
        let chunks = conv.in_channels().div_ceil(k);
        let blocks = conv.out_channels().checked_mul(w_stride)?.div_ceil(n);
        let items = d_stride.checked_mul(h_stride)?.checked_mul(blocks)?;
        let processors = context.device.multiprocessors;
        let per = items.div_ceil((BLOCKS * processors).div_ceil(tiles).clamp(1, items));
        let parts = items.div_ceil(per);
        let weights = items.checked_mul(n)?.checked_mul(chunks * k)?;
        let grid = tiles.checked_mul(parts)?;
        if weights.checked_mul(operand.parts())? > MOST || grid > MOST {
            return None;
        }

        let work = 2.0 * (tiles * m) as f64 * (items * n) as f64 * (chunks * k) as f64;
        let full = (grid as f64 / processors as f64).min(1.0);
        let compute = work / (rate(operand) * processors as f64 * full);
        let bytes = |shape: [usize; 5]| {
            shape.iter().map(|&size| size as f64).product::<f64>() * context.request.dtype.size() as f64
        };
        let (input, output) = (bytes(geometry.input_shape()), bytes(geometry.output_shape()));
        let again = if keep { parts } else { items } as f64 - 1.0;
        let moved = (input + output) / context.device.memory(bandwidth) + again * input / CACHED;
        // Two blocks at a time, each turn after turn.
        let turns = grid.div_ceil(2 * processors) * per * chunks;
        let turn = TURN[usize::from(context.request.output_format == MemoryFormat::ChannelsLast3d)];
        let seconds = compute.max(moved).max(turns as f64 * turn) + LAUNCH;
        Some(Tiling { kernel, size, tiles, blocks, chunks, parts, seconds })
    }
}

/// A plan of this family.
pub(super) struct Interleave<'a> {
    operand: Operand,
    tiling: Tiling<'a>,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for Interleave<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tiling { kernel, size: [m, n, k], parts, .. } = self.tiling;
        let how = if kernel.param("VEC").is_some() { "views" } else { "addresses" };
        write!(f, "interleave {} {m}x{n}x{k} by {how}, {parts} parts", self.operand.name())
    }
}

impl<'a> Interleave<'a> {
    /// The best plan, if the family applies: where each output has one tap, in one group, and input and
    /// output lie the same way; not for float64, not past its 32-bit counts.
    pub(super) fn new(context: Context<'a>) -> Option<Interleave<'a>> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let operand = Operand::of(context).filter(|&operand| operand != Operand::Parts)?;
        let small = |sizes: &[usize]| product(sizes).is_some_and(|size| size <= MOST);
        let [batch, _, depth, height, _] = geometry.input_shape();
        let fits = small(&geometry.input_shape()[1..])
            && small(&geometry.output_shape()[1..])
            && small(&[batch, depth, height, conv.stride()[0]])
            && small(&conv.weight_shape());
        if !one_tap(geometry) || !fits || conv.groups() != 1 || request.input_format != request.output_format
        {
            return None;
        }
        let last = request.input_format == MemoryFormat::ChannelsLast3d;
        let types = operand.types(context);
        let kernels = |kind: &str| {
            let name = format!("interleave_{}{kind}", operand.name());
            let fits = |kernel: &&Variant| kernel.param("LAST") == Some(i64::from(last));
            context.kernels(&name, &types).filter(fits).collect::<Vec<_>>().into_iter()
        };
        let shorter = |a: &Tiling<'_>, b: &Tiling<'_>| a.seconds.total_cmp(&b.seconds);
        let any = || kernels("_any").filter_map(|kernel| Tiling::any(context, operand, kernel));
        let keep = kernels("").filter_map(|kernel| Tiling::view(context, operand, kernel, true));
        let deep = kernels("_deep").filter_map(|kernel| Tiling::view(context, operand, kernel, false));
        let tiling = keep.chain(deep).min_by(shorter).or_else(|| any().min_by(shorter))?;

        // The weight's pack; for the split also the scales, their check, and one more read of the input.
        let (launches, read) = match operand {
            Operand::Half | Operand::Tf32 | Operand::Scaled => (1.0, 0),
            Operand::Split | Operand::Parts => (5.0, geometry.input_shape().iter().product::<usize>() * 4),
        };
        let seconds = tiling.seconds + launches * LAUNCH + read as f64 / context.device.memory(3e12);
        Some(Interleave { operand, tiling, seconds })
    }

    /// What is launched.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let split = self.operand == Operand::Split;
        let control = pack::control(workspace, 0, steps);
        if split {
            pack::largest(context, control, steps)?;
        }
        let [_, n, k] = self.tiling.size;
        let row = self.tiling.chunks * k;
        // One slice; one step along width, at no offset, over a whole row.
        let (slices, w_steps, w_step, w_far, span) = (1, 1, 0, 0, row);
        let columns_per_slice = self.tiling.blocks * n;
        let layout = WeightLayout { slices, columns_per_slice, row, w_steps, w_step, w_far, span };
        let weight = pack::weight(context, self.operand, &layout, control, workspace, steps)?;
        steps.push(self.multiply(context, control, weight)?);
        if split {
            // Where the input or the weight holds what the split cannot compute with, the definition.
            steps.push(direct::step(context, Some(control))?);
        }
        Ok(())
    }

    /// The product.
    fn multiply(&self, context: Context<'_>, control: u64, weight: PackedWeight) -> Result<Step> {
        let tiling = &self.tiling;
        let request = context.request;
        let conv = request.geometry.conv();
        let [n, cin, depth, height, width] = request.geometry.input_shape();
        let at = |at| Argument::Pointer(Buffer::Workspace, at);
        let mut arguments = vec![Argument::Pointer(Buffer::Input, 0), at(weight.at)];
        if self.operand == Operand::Split {
            arguments.extend([at(weight.scale), at(control)]);
        }
        arguments.extend([Argument::Pointer(Buffer::Bias, 0), Argument::Pointer(Buffer::Output, 0)]);
        push(&mut arguments, [n, cin, conv.out_channels(), depth, height, width])?;
        push(&mut arguments, conv.stride())?;
        push(&mut arguments, [tiling.chunks, tiling.blocks, tiling.parts])?;
        arguments.extend(bias_and_activation(request));
        let grid = [(tiling.tiles * tiling.parts) as u32, 1, 1];
        Ok(Step::launch(*tiling.kernel, grid, arguments))
    }
}

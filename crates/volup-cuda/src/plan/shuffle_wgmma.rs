//! Planning `shuffle_wgmma`: kernels that are their stride on Hopper's own matrix instructions. The kernels' file says what
//! the numbers mean.

use super::norm::{self, Pass, Way};
use super::pack::Operand;
use super::shuffle_gemm::{CACHE, CLOCK, MEMORY, MOST, SEEN, START, applies, run, unit};
use super::{
    Argument, Buffer, Context, RESERVED, SHARED, Step, Workspace, activation_code, bias_and_activation,
    product, push, strides,
};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Warpgroups of a block, and warps of one.
const GROUPS: usize = 4;
const WARPS: usize = 4;
/// Positions of a tile, rows of a warpgroup, channels of a stage; elements from a line of a stage to the next.
const POSITIONS: usize = 128;
const ROWS: usize = 64;
const CHUNK: usize = 32;
const PITCH: usize = POSITIONS + 8;
/// The most channels that the split's products are added up over.
const MOST_SPLIT: usize = 192;
/// The most stages of a team.
const STAGES: usize = 8;
/// Modes that kernels have.
const MODES: usize = 4;

/// Clocks of a multiprocessor for a tile of one warpgroup, by kind of operand: for a stage, for what is written or counted.
const STAGE: [f64; 3] = [340.0, 680.0, 1100.0];
const TILE: [f64; 3] = [560.0, 300.0, 550.0];
/// How much more outputs take that are written position by position.
const APART: f64 = 2.0;
/// Seconds until blocks have what they start with, beside those of `shuffle_gemm`; for each byte of weights.
const SETUP: f64 = 0.5e-6;
const BROUGHT: f64 = 3e-11;

/// A plan of this family.
#[derive(Clone, Copy)]
pub(super) struct ShuffleWgmma<'a> {
    operand: Operand,
    /// What it does about a normalization, and the kernels of the modes that this takes.
    pub(super) way: Way,
    kernels: [Option<&'a Variant>; MODES],
    /// Warpgroups that share X.
    row_groups: usize,
    row_blocks: usize,
    /// Blocks of positions of a sample.
    pos_blocks: usize,
    /// Blocks side by side of each row block.
    blocks: usize,
    chunks: usize,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for ShuffleWgmma<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, rows) = (self.operand.name(), ROWS * self.row_groups);
        write!(f, "shuffle_wgmma {kind} {rows}x{POSITIONS}, ")?;
        write!(f, "{} row blocks, {} blocks{}", self.row_blocks, self.row_blocks * self.blocks, self.way)
    }
}

impl<'a> ShuffleWgmma<'a> {
    /// Every plan, where `shuffle_gemm` applies, for NCDHW with a stride of 2 along width.
    pub(super) fn all(context: Context<'a>) -> Vec<ShuffleWgmma<'a>> {
        let Some((operand, may_twice)) = applies(context) else { return Vec::new() };
        let conv = context.request.geometry.conv();
        let last = context.request.output_format == MemoryFormat::ChannelsLast3d;
        let split = operand.kind() == 3;
        let volume: usize = context.request.geometry.input_shape()[2..].iter().product();
        // Copies are of 16 bytes at least.
        let aligned = unit(volume * context.request.dtype.size()) == 16;
        if last || conv.stride()[2] != 2 || !aligned || split && conv.in_channels() > MOST_SPLIT {
            return Vec::new();
        }
        let kernel = |mode| {
            let params = [("KIND", operand.kind()), ("MODE", mode)];
            context.kernel("shuffle_wgmma", &operand.types(context), &params).ok()
        };
        let mut plans = Vec::new();
        for &way in Way::all(context, |activation| activation_code(activation).0 <= 2) {
            let modes: &[usize] = match way {
                Way::Plain => &[0],
                Way::Twice if may_twice => &[1, 2],
                // Only where no activation comes before y.
                Way::Counted if context.counted.is_some() => &[3],
                _ => continue,
            };
            let mut kernels = [None; MODES];
            modes.iter().for_each(|&mode| kernels[mode] = kernel(mode as i64));
            if modes.iter().all(|&mode| kernels[mode].is_some()) {
                let of = |row_groups| ShuffleWgmma::new(context, operand, way, kernels, row_groups);
                plans.extend([1, 2, 4].into_iter().filter_map(of));
            }
        }
        plans
    }

    fn new(
        context: Context<'a>,
        operand: Operand,
        way: Way,
        kernels: [Option<&'a Variant>; MODES],
        row_groups: usize,
    ) -> Option<ShuffleWgmma<'a>> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let (cin, cout) = (conv.in_channels(), conv.out_channels());
        let rows = cout * conv.stride().iter().product::<usize>();
        let volume: usize = geometry.input_shape()[2..].iter().product();
        let (chunks, row_blocks) = (cin.div_ceil(CHUNK), rows.div_ceil(ROWS * row_groups));
        let pos_blocks = volume.div_ceil(POSITIONS);
        let items = geometry.batch().checked_mul(pos_blocks)?;
        let teams = GROUPS / row_groups;
        let processors = context.device.multiprocessors;
        let blocks = (processors / row_blocks).clamp(1, items.div_ceil(teams));
        let mut plan = ShuffleWgmma {
            operand,
            way,
            kernels,
            row_groups,
            row_blocks,
            pos_blocks,
            blocks,
            chunks,
            seconds: 0.0,
        };
        if items.checked_mul(chunks)? > MOST || row_blocks > MOST / 1024 {
            return None;
        }
        for kernel in kernels.into_iter().flatten() {
            plan.stages(kernel, request.dtype.size())?;
        }

        let bytes = request.dtype.size();
        let count = |shape: [usize; 5]| shape.iter().map(|&size| size as f64).product::<f64>() * bytes as f64;
        let (x, y) = (count(geometry.input_shape()), count(geometry.output_shape()));
        if way != Way::Plain {
            // Three numbers of each pair of rows and warp, also of teams without an item in a sample.
            let of_sample = (12 * blocks * teams * WARPS * rows / 2) as f64;
            let norm_groups = norm::counted(context).map_or(1, |norm| norm.groups());
            let teams = blocks * teams * WARPS;
            let counted = product(&[geometry.batch(), teams.max(norm_groups)]).is_some_and(|n| n <= MOST);
            if !counted || geometry.batch() as f64 * of_sample > norm::room(y) {
                return None;
            }
        }
        let weights = plan.weights(bytes) as f64;
        let grid = (row_blocks * blocks) as f64;
        let kind = match operand {
            Operand::Half => 0,
            Operand::Tf32 | Operand::Scaled => 1,
            Operand::Split | Operand::Parts => 2,
        };
        let apart = if run(geometry, false).is_multiple_of(16 / bytes) { 1.0 } else { APART };
        let turns = items.div_ceil(blocks * teams) * (row_blocks * blocks).div_ceil(processors) * GROUPS;
        let read = x * row_blocks as f64 + grid * weights;
        let expected = |y: f64, tile: f64| {
            let compute = turns as f64 * (chunks as f64 * STAGE[kind] + TILE[kind] * tile) / CLOCK;
            let moved = ((x + y) / MEMORY).max((read + y) / CACHE);
            START + SETUP + BROUGHT * weights + moved.max(compute) + SEEN * moved.min(compute)
        };
        plan.seconds = match way {
            Way::Plain => expected(y, apart),
            Way::Twice => expected(0.0, apart) + norm::MERGE + expected(y, apart),
            Way::Counted => expected(y, 1.0 + apart) + norm::MERGE,
        };
        Some(plan)
    }

    /// Bytes of the weights of a block.
    fn weights(&self, bytes: usize) -> usize {
        bytes * CHUNK * self.chunks * ROWS * self.row_groups * if self.operand.kind() == 3 { 2 } else { 1 }
    }

    /// Stages of a team, of how many items copies are ahead, and bytes of shared memory with them; nothing if there is no
    /// room.
    fn stages(&self, kernel: &Variant, bytes: usize) -> Option<(usize, usize, usize)> {
        let teams = GROUPS / self.row_groups;
        let stage = bytes * CHUNK * PITCH;
        let fixed = (16 * STAGES * teams).next_multiple_of(128) + self.weights(bytes);
        let room = (SHARED - RESERVED).checked_sub(kernel.shared_bytes as usize + fixed)?;
        let stages = (room / (teams * stage)).min(STAGES.max(2 * self.chunks));
        if stages <= self.chunks {
            return None;
        }
        let barriers = (16 * stages * teams).next_multiple_of(128);
        let shared = barriers + self.weights(bytes) + teams * stages * stage;
        Some((stages, (stages / 2 / self.chunks).max(1), shared))
    }

    /// What is launched: the convolution, or with its normalization.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let conv = context.request.geometry.conv();
        // Residues along width are counted together.
        let pairs = conv.out_channels() * conv.stride().iter().product::<usize>() / 2;
        let chunks = self.blocks * (GROUPS / self.row_groups) * WARPS;
        norm::passes(context, self.way, [chunks, pairs], workspace, steps, |pass| self.step(context, pass))
    }

    /// One launch.
    fn step(&self, context: Context<'_>, pass: Pass) -> Result<Option<Step>> {
        let Some(kernel) = self.kernels[pass.mode() as usize] else { return Ok(None) };
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let [batch, cin, depth, height, width] = geometry.input_shape();
        let [d, h, _] = conv.stride();
        let (volume, bytes) = (depth * height * width, request.dtype.size());
        let Some((stages, ahead, shared)) = self.stages(kernel, bytes) else { return Ok(None) };
        let buffers = [Buffer::Input, Buffer::Weight, Buffer::Bias, Buffer::Output];
        let mut arguments: Vec<Argument> = buffers.map(|buffer| Argument::Pointer(buffer, 0)).into();
        push(&mut arguments, [cin, conv.out_channels(), volume, height * width, width, d, h])?;
        let [x_n, ..] = strides(geometry.input_shape(), request.input_format);
        let [y_n, y_c, y_d, y_h, _] = strides(geometry.output_shape(), request.output_format);
        arguments.extend([x_n, y_n].map(|stride| Argument::I64(stride as i64)));
        push(&mut arguments, [y_c, y_d, y_h, self.chunks, self.pos_blocks, batch * self.pos_blocks])?;
        push(&mut arguments, [self.row_blocks, self.row_groups, stages, ahead])?;
        arguments.push(i32::from(run(geometry, false).is_multiple_of(16 / bytes)).into());
        arguments.extend(bias_and_activation(request));
        pass.push(context, &mut arguments)?;
        let grid = [(self.row_blocks * self.blocks) as u32, 1, 1];
        Ok(Some(Step::Launch { variant: *kernel, grid, shared: shared as u32, arguments, overlap: false }))
    }
}

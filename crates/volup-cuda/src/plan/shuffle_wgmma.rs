//! Planning `shuffle_wgmma`: kernels that are their stride on Hopper's own matrix instructions. The kernels' file says what
//! the numbers mean.

use super::norm::{self, Partials, Pass};
use super::pack::Operand;
use super::shuffle_gemm::{CACHE, CLOCK, MEMORY, MOST, PARTIALS, ROOM, SEEN, START, applies, run, unit};
use super::{
    Argument, Buffer, Context, RESERVED, SHARED, Step, Workspace, activation_code, epilogue, product, push,
    size, strides,
};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Rows of a block.
const ROWS: [usize; 3] = [64, 128, 256];
/// Warpgroups of a block, and warps of one.
const GROUPS: usize = 4;
const WARPS: usize = 4;
/// Channels of a stage, and elements from a line of it to the next beside its positions.
const CHUNK: usize = 32;
const PAD: usize = 8;
/// The most channels that the split's products are added up over.
const MOST_SPLIT: usize = 192;
/// Stages of a team, where an item has not more.
const STAGES: usize = 8;

/// Clocks of a multiprocessor for 8192 outputs, by kind of operand: for a stage, for what is written or counted.
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
    /// What writes y; or what computes the statistics, and what writes it normalized.
    kernels: [Option<&'a Variant>; 3],
    /// Rows of a block, how often they are all; blocks side by side.
    rows: usize,
    row_blocks: usize,
    blocks: usize,
    chunks: usize,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for ShuffleWgmma<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shuffle_gemm {} {} rows by warpgroups, ", self.operand.name(), self.rows)?;
        write!(f, "{} row blocks, {} blocks", self.row_blocks, self.row_blocks * self.blocks)?;
        if self.twice() { f.write_str("; recomputed for the norm") } else { Ok(()) }
    }
}

/// How a kernel cuts the work of a block.
struct Cut {
    /// Items of a sample, and of all.
    pos_blocks: usize,
    items: usize,
    /// Warpgroups that share X, and how many such teams there are.
    row_groups: usize,
    teams: usize,
    /// Stages of a team, of how many items copies are ahead, and bytes of shared memory with them.
    stages: usize,
    ahead: usize,
    shared: usize,
}

impl<'a> ShuffleWgmma<'a> {
    /// Every plan, where `shuffle_gemm` applies, for NCDHW with a stride of 2 along width.
    pub(super) fn all(context: Context<'a>) -> Vec<ShuffleWgmma<'a>> {
        let Some((operand, may_twice)) = applies(context) else { return Vec::new() };
        let request = context.request;
        let conv = request.geometry.conv();
        let volume: usize = request.geometry.input_shape()[2..].iter().product();
        // Copies are of 16 bytes.
        let aligned = unit(volume * request.dtype.size()) == 16;
        let last = request.output_format == MemoryFormat::ChannelsLast3d;
        let split = operand.kind() == 3 && conv.in_channels() > MOST_SPLIT;
        if last || conv.stride()[2] != 2 || !aligned || split {
            return Vec::new();
        }
        let kernel = |mode| {
            let params = [("KIND", operand.kind()), ("MODE", mode)];
            context.kernel("shuffle_wgmma", &operand.types(context), &params).ok()
        };
        let ways = [[kernel(0), None, None], [None, kernel(1), kernel(2)]];
        let complete = |way: &[Option<&Variant>; 3]| way[0].is_some() || way[1].is_some() && way[2].is_some();
        let ways = ways.into_iter().take(if may_twice { 2 } else { 1 }).filter(complete);
        ways.flat_map(|way| ROWS.into_iter().filter_map(move |rows| Self::new(context, operand, way, rows)))
            .collect()
    }

    fn new(
        context: Context<'a>,
        operand: Operand,
        kernels: [Option<&'a Variant>; 3],
        rows: usize,
    ) -> Option<ShuffleWgmma<'a>> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let (cin, cout) = (conv.in_channels(), conv.out_channels());
        let all_rows = cout * conv.stride().iter().product::<usize>();
        let row_blocks = all_rows.div_ceil(rows);
        let processors = context.device.multiprocessors;
        let mut plan = ShuffleWgmma {
            operand,
            kernels,
            rows,
            row_blocks,
            blocks: (processors / row_blocks).max(1),
            chunks: cin.div_ceil(CHUNK),
            seconds: 0.0,
        };
        if row_blocks > MOST / 1024 {
            return None;
        }
        let cuts = kernels.map(|kernel| kernel.map(|kernel| plan.cut(context, kernel)));
        // No more blocks than have an item, of the kernel that has the fewest.
        for cut in cuts.iter().flatten() {
            let cut = cut.as_ref()?;
            plan.blocks = plan.blocks.min(cut.items.div_ceil(cut.teams));
        }

        let bytes = request.dtype.size();
        let count = |shape: [usize; 5]| shape.iter().map(|&size| size as f64).product::<f64>() * bytes as f64;
        let (x, y) = (count(geometry.input_shape()), count(geometry.output_shape()));
        let weights = plan.weights(bytes) as f64;
        let grid = row_blocks * plan.blocks;
        let kind = match operand {
            Operand::Half => 0,
            Operand::Tf32 => 1,
            Operand::Split | Operand::Parts => 2,
        };
        let apart = if run(geometry, false).is_multiple_of(16 / bytes) { 1.0 } else { APART };
        let read = x * row_blocks as f64 + grid as f64 * weights;
        for (mode, cut) in cuts.iter().enumerate() {
            let Some(Some(cut)) = cut else { continue };
            let teams = plan.blocks * cut.teams;
            let y = if mode == 1 {
                // Three numbers of each pair of rows and warp, also of teams without an item in a sample.
                let of_sample = (12 * teams * WARPS * all_rows / 2) as f64;
                let norm_groups = request.block.norm().map_or(1, |norm| norm.groups());
                let most = (teams * WARPS).max(norm_groups);
                let counted = product(&[geometry.batch(), most]).is_some_and(|n| n <= MOST);
                if !counted || geometry.batch() as f64 * of_sample > PARTIALS * y + ROOM {
                    return None;
                }
                0.0
            } else {
                y
            };
            let turns = cut.items.div_ceil(teams) * grid.div_ceil(processors) * GROUPS;
            let clocks = plan.chunks as f64 * STAGE[kind] + TILE[kind] * apart;
            let compute = turns as f64 * clocks / CLOCK;
            let moved = ((x + y) / MEMORY).max((read + y) / CACHE);
            let start = START + SETUP + BROUGHT * weights;
            plan.seconds += start + moved.max(compute) + SEEN * moved.min(compute);
        }
        plan.seconds += if plan.twice() { norm::MERGE } else { 0.0 };
        Some(plan)
    }

    /// Bytes of the weights of a block.
    fn weights(&self, bytes: usize) -> usize {
        bytes * CHUNK * self.chunks * self.rows * if self.operand.kind() == 3 { 2 } else { 1 }
    }

    /// How a kernel cuts it, if there is room and counts stay in bounds.
    fn cut(&self, context: Context<'_>, kernel: &Variant) -> Option<Cut> {
        let request = context.request;
        let (geometry, bytes) = (&request.geometry, request.dtype.size());
        let volume: usize = geometry.input_shape()[2..].iter().product();
        let tiles = size(kernel, "TILES");
        let (rows, positions) = (128 / tiles, 64 * tiles);
        if !self.rows.is_multiple_of(rows) {
            return None;
        }
        let row_groups = self.rows / rows;
        let teams = GROUPS / row_groups;
        let stage = bytes * CHUNK * (positions + PAD);
        let barriers = |stages: usize| (16 * stages * teams).next_multiple_of(128);
        let most = STAGES.max(2 * self.chunks);
        let fixed = barriers(most) + self.weights(bytes);
        let room = (SHARED - RESERVED).checked_sub(kernel.shared_bytes as usize + fixed)?;
        let stages = (room / (teams * stage)).min(most);
        let pos_blocks = volume.div_ceil(positions);
        let items = geometry.batch().checked_mul(pos_blocks)?;
        if stages <= self.chunks || items.checked_mul(self.chunks)? > MOST {
            return None;
        }
        let shared = barriers(stages) + self.weights(bytes) + teams * stages * stage;
        let ahead = (stages / 2 / self.chunks).max(1);
        Some(Cut { pos_blocks, items, row_groups, teams, stages, ahead, shared })
    }

    /// Whether everything is computed twice: for statistics, then to be written normalized.
    pub(super) fn twice(&self) -> bool {
        self.kernels[0].is_none()
    }

    /// What is launched: the convolution, or with its normalization.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let [written, statistics, normalized] = self.kernels;
        if let Some(kernel) = written {
            steps.extend(self.step(context, kernel, Pass::Written)?);
        }
        let (Some(norm), Some(first), Some(second)) = (context.request.block.norm(), statistics, normalized)
        else {
            return Ok(());
        };
        let Some(cut) = self.cut(context, first) else { return Ok(()) };
        let (geometry, conv) = (&context.request.geometry, context.request.geometry.conv());
        // Residues along width are counted together.
        let pairs = conv.out_channels() * conv.stride().iter().product::<usize>() / 2;
        let chunks = self.blocks * cut.teams * WARPS;
        let arrays = Partials::take(workspace, geometry.batch() * chunks * pairs, 4);
        steps.extend(self.step(context, first, Pass::Statistics(arrays))?);
        let columns = pairs / norm.groups();
        let partials =
            Partials { arrays, chunks, repeats: 1, columns, steps: [chunks * pairs, columns, pairs, 0] };
        let statistics = partials.merge(context, norm, workspace, steps)?;
        steps.extend(self.step(context, second, Pass::Normalized(statistics, norm))?);
        Ok(())
    }

    /// One launch.
    fn step(&self, context: Context<'_>, kernel: &Variant, pass: Pass) -> Result<Option<Step>> {
        let Some(cut) = self.cut(context, kernel) else { return Ok(None) };
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let [_, cin, depth, height, width] = geometry.input_shape();
        let [d, h, _] = conv.stride();
        let buffers = [Buffer::Input, Buffer::Weight, Buffer::Bias, Buffer::Output];
        let mut arguments: Vec<Argument> = buffers.map(|buffer| Argument::Pointer(buffer, 0)).into();
        let volume = depth * height * width;
        push(&mut arguments, [cin, conv.out_channels(), volume, height * width, width, d, h])?;
        let [x_n, ..] = strides(geometry.input_shape(), request.input_format);
        let [y_n, y_c, y_d, y_h, _] = strides(geometry.output_shape(), request.output_format);
        arguments.extend([x_n, y_n].map(|stride| Argument::I64(stride as i64)));
        push(&mut arguments, [y_c, y_d, y_h, self.chunks, cut.pos_blocks, cut.items, self.row_blocks])?;
        push(&mut arguments, [cut.row_groups, cut.stages, cut.ahead])?;
        let (code, slope) = activation_code(epilogue(&request.block)[0]);
        let whole = run(geometry, false).is_multiple_of(16 / request.dtype.size());
        arguments.extend([i32::from(whole), i32::from(conv.has_bias()), code].map(Argument::from));
        arguments.push(Argument::F64(slope));
        pass.push(context, &mut arguments)?;
        let grid = [(self.row_blocks * self.blocks) as u32, 1, 1];
        let (variant, shared) = (*kernel, cut.shared as u32);
        Ok(Some(Step::Launch { variant, grid, shared, arguments, overlap: false }))
    }
}

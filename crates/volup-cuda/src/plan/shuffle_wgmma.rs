//! Planning `shuffle_wgmma`: kernels that are their stride on Hopper's own matrix instructions, of both layouts. The kernels' file
//! says what the numbers mean.

use super::norm::{self, Pass, Way};
use super::pack::Operand;
use super::shuffle_gemm::{CACHE, CLOCK, MEMORY, MOST, SEEN, START, applies, unit};
use super::{
    Argument, Buffer, Context, RESERVED, SHARED, Step, Workspace, activation_code, bias_and_activation,
    product, push, strides,
};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Warpgroups of a block that multiply.
const GROUPS: usize = 4;
/// Rows of a warpgroup, positions of a tile, channels of a stage in all parts of an operand.
const ROWS: usize = 64;
const POSITIONS: usize = 128;
const CHUNK: usize = 32;
/// Bytes of a stage's barriers and of what its copiers have met.
const BARRIERS: usize = 32;
/// Positions whose outputs a warp collects for the copy engine at a time, pairs of rows of it, and bytes that stand behind
/// lines that are stored together; warps that do; the least positions of a line that is worth it.
const COLLECTED: usize = 64;
const WARP_PAIRS: usize = 8;
const AREA_PAD: usize = 32;
const WARPS: usize = 16;
const LEAST_LINE: usize = 32;
/// The most channels that the split's products are added up over.
const MOST_SPLIT: usize = 192;
/// The most stages of a team, and of these under way.
const STAGES: usize = 8;
const AHEAD: usize = 2;
/// Modes that kernels have.
const MODES: usize = 4;

/// Clocks of a multiprocessor for a tile of one warpgroup, by kind of operand: for a stage, for what is written or counted.
const STAGE: [f64; 3] = [230.0, 430.0, 440.0];
const TILE: [f64; 3] = [350.0, 400.0, 430.0];
/// Of NDHWC for what is written, and how much more tiles take where one, two or four warpgroups are a team: fewer warps bring X.
const TILE_LAST: [f64; 3] = [510.0, 760.0, 670.0];
const TEAM_LAST: [f64; 3] = [2.0, 1.2, 1.0];
/// Bytes a second that other row blocks read the input again at.
const AGAIN: f64 = 3e12;
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
    /// Whether input and output are NDHWC.
    of_last: bool,
    last: bool,
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
        f.write_str(match (self.of_last, self.last) {
            (true, true) => "channels last, ",
            (true, false) => "channels last to first, ",
            _ => "",
        })?;
        write!(f, "{} row blocks, {} blocks{}", self.row_blocks, self.row_blocks * self.blocks, self.way)
    }
}

/// Channels of a stage.
fn chunk(operand: Operand) -> usize {
    CHUNK / operand.parts()
}

/// Positions whose outputs are written at once, of elements of so many bytes.
fn together(bytes: usize) -> usize {
    8 / bytes
}

impl<'a> ShuffleWgmma<'a> {
    /// Every plan, where `shuffle_gemm` applies or would but for the formats: to NCDHW with a stride of 2 along width, to NDHWC, from there too,
    /// with an even number of channels.
    pub(super) fn all(context: Context<'a>) -> Vec<ShuffleWgmma<'a>> {
        let Some((operand, may_twice)) = applies(context) else { return Vec::new() };
        let conv = context.request.geometry.conv();
        let [of_last, last] = [context.request.input_format, context.request.output_format]
            .map(|format| format == MemoryFormat::ChannelsLast3d);
        let split = operand.kind() == 3;
        let volume: usize = context.request.geometry.input_shape()[2..].iter().product();
        // Copies are of 16 bytes at least: of a channel's positions, or a position's channels.
        let run = if of_last { conv.in_channels() } else { volume };
        let aligned = unit(run * context.request.dtype.size()) == 16;
        let pairs = if last { conv.out_channels().is_multiple_of(2) } else { conv.stride()[2] == 2 };
        if !pairs || !aligned || split && conv.in_channels() > MOST_SPLIT {
            return Vec::new();
        }
        let kernel = |mode| {
            let [x, y] = [of_last, last].map(i64::from);
            let params = [("KIND", operand.kind()), ("MODE", mode), ("X_LAST", x), ("Y_LAST", y)];
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
        let (chunks, row_blocks) = (cin.div_ceil(chunk(operand)), rows.div_ceil(ROWS * row_groups));
        let pos_blocks = volume.div_ceil(POSITIONS);
        let items = geometry.batch().checked_mul(pos_blocks)?;
        let teams = GROUPS / row_groups;
        let processors = context.device.multiprocessors;
        let blocks = (processors / row_blocks).clamp(1, items.div_ceil(teams));
        let mut plan = ShuffleWgmma {
            operand,
            way,
            kernels,
            of_last: request.input_format == MemoryFormat::ChannelsLast3d,
            last: request.output_format == MemoryFormat::ChannelsLast3d,
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
            plan.stages(kernel, request.dtype.size(), false)?;
        }

        let bytes = request.dtype.size();
        let count = |shape: [usize; 5]| shape.iter().map(|&size| size as f64).product::<f64>() * bytes as f64;
        let (x, y) = (count(geometry.input_shape()), count(geometry.output_shape()));
        if way != Way::Plain {
            // Three numbers of each pair of rows and team, also of those without an item in a sample.
            let of_sample = (12 * blocks * teams * plan.counted(rows)) as f64;
            let norm_groups = norm::counted(context).map_or(1, |norm| norm.groups());
            let counted =
                product(&[geometry.batch(), (blocks * teams).max(norm_groups)]).is_some_and(|n| n <= MOST);
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
        let neighbours = if plan.last {
            Self::may_collect(context)
        } else {
            geometry.input_shape()[4].is_multiple_of(together(bytes))
        };
        let apart = if neighbours { 1.0 } else { APART };
        let turns = items.div_ceil(blocks * teams) * (row_blocks * blocks).div_ceil(processors) * GROUPS;
        let read = x * row_blocks as f64 + grid * weights;
        let again = x * (row_blocks - 1) as f64 / AGAIN;
        let team = if plan.of_last { TEAM_LAST[row_groups.ilog2() as usize] } else { 1.0 };
        let expected = |y: f64, tile: f64| {
            let tile = tile * if plan.last && y > 0.0 { TILE_LAST } else { TILE }[kind];
            let compute = turns as f64 * team * (chunks as f64 * STAGE[kind] + tile) / CLOCK;
            let moved = ((x + y) / context.device.memory(MEMORY)).max((read + y) / CACHE) + again;
            START + SETUP + BROUGHT * weights + moved.max(compute) + SEEN * moved.min(compute)
        };
        plan.seconds = match way {
            Way::Plain => expected(y, apart),
            Way::Twice => expected(0.0, apart) + norm::MERGE + expected(y, apart),
            Way::Counted => expected(y, 1.0 + apart) + norm::MERGE,
        };
        Some(plan)
    }

    /// What is counted by itself of so many rows: of NCDHW residues along width are counted together.
    fn counted(&self, rows: usize) -> usize {
        if self.last { rows } else { rows / 2 }
    }

    /// Bytes of the weights of a block.
    fn weights(&self, bytes: usize) -> usize {
        bytes * chunk(self.operand) * self.chunks * ROWS * self.row_groups * self.operand.parts()
    }

    /// Whether the output may be collected before it is stored. Of NDHWC: what a position has of a line of it is of whole vectors. Of NCDHW,
    /// where the copy engine stores it: lines are part of what is collected at a time, or the other way round.
    fn may_collect(context: Context<'_>) -> bool {
        let request = context.request;
        if request.output_format == MemoryFormat::ChannelsLast3d {
            let conv = request.geometry.conv();
            return unit(conv.stride()[2] * conv.out_channels() * request.dtype.size()) == 16;
        }
        let width = request.geometry.input_shape()[4];
        width.is_multiple_of(COLLECTED) || width >= LEAST_LINE && COLLECTED.is_multiple_of(width)
    }

    /// Stages of a team, of how many copies are under way, and bytes of shared memory with them; nothing if there is no room.
    fn stages(&self, kernel: &Variant, bytes: usize, collects: bool) -> Option<(usize, usize, usize)> {
        let teams = GROUPS / self.row_groups;
        // Panels of 16 bytes, and more so that they start in other banks.
        let (chunk, vector) = (chunk(self.operand), 16 / bytes);
        let (panels, of_panel) = match self.of_last {
            true => (chunk / vector, POSITIONS + 8 * vector / chunk),
            false if bytes == 2 => (POSITIONS / vector, chunk + 1),
            false => (chunk / vector, POSITIONS + 1),
        };
        let stage = self.operand.parts() * panels * 16 * of_panel;
        let areas = if collects { WARPS * WARP_PAIRS * (2 * COLLECTED * bytes + AREA_PAD) } else { 0 };
        let fixed = (BARRIERS * STAGES * teams).next_multiple_of(128) + self.weights(bytes) + areas;
        let room = (SHARED - RESERVED).checked_sub(kernel.shared_bytes as usize + fixed)?;
        // One is multiplied until the next one is there, and copies are under way.
        let stages = (room / (teams * stage)).min(STAGES);
        let held = self.chunks.min(2);
        if stages <= held {
            return None;
        }
        let barriers = (BARRIERS * stages * teams).next_multiple_of(128);
        let shared = barriers + self.weights(bytes) + teams * stages * stage + areas;
        Some((stages, AHEAD.min(stages - held), shared))
    }

    /// What is launched: the convolution, or with its normalization.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let conv = context.request.geometry.conv();
        let rows = self.counted(conv.out_channels() * conv.stride().iter().product::<usize>());
        let chunks = self.blocks * (GROUPS / self.row_groups);
        norm::passes(context, self.way, [chunks, rows], workspace, steps, |pass| self.step(context, pass))
    }

    /// One launch.
    fn step(&self, context: Context<'_>, pass: Pass) -> Result<Option<Step>> {
        let Some(kernel) = self.kernels[pass.mode() as usize] else { return Ok(None) };
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        let [batch, cin, depth, height, width] = geometry.input_shape();
        let [d, h, w] = conv.stride();
        let (volume, bytes) = (depth * height * width, request.dtype.size());
        let writes = !matches!(pass, Pass::Statistics(_));
        let collected =
            (writes && Self::may_collect(context)).then(|| self.stages(kernel, bytes, true)).flatten();
        let Some((stages, ahead, shared)) = collected.or_else(|| self.stages(kernel, bytes, false)) else {
            return Ok(None);
        };
        let buffers = [Buffer::Input, Buffer::Weight, Buffer::Bias, Buffer::Output];
        let mut arguments: Vec<Argument> = buffers.map(|buffer| Argument::Pointer(buffer, 0)).into();
        push(&mut arguments, [cin, conv.out_channels(), volume, height * width, width, d, h])?;
        let [x_n, ..] = strides(geometry.input_shape(), request.input_format);
        let [y_n, y_c, y_d, y_h, _] = strides(geometry.output_shape(), request.output_format);
        arguments.extend([x_n, y_n].map(|stride| Argument::I64(stride as i64)));
        push(&mut arguments, [y_c, y_d, y_h, self.chunks, self.pos_blocks, batch * self.pos_blocks])?;
        push(&mut arguments, [self.row_blocks, self.row_groups, stages, ahead])?;
        let together = !self.last && width.is_multiple_of(together(bytes));
        let how = if collected.is_some() { 2 } else { usize::from(together) };
        // Lines of y that lie side by side are stored together, where a warp has all of them.
        let joins = !self.last && how == 2 && width <= COLLECTED && WARP_PAIRS.is_multiple_of(h);
        push(&mut arguments, [how, width.min(COLLECTED).ilog2() as usize])?;
        push(&mut arguments, [if joins { (h - 1) * 2 * width } else { 0 }, w])?;
        arguments.extend(bias_and_activation(request));
        pass.push(context, &mut arguments)?;
        let grid = [(self.row_blocks * self.blocks) as u32, 1, 1];
        Ok(Some(Step::Launch { variant: *kernel, grid, shared: shared as u32, arguments, overlap: false }))
    }
}

//! Panels of 16 bytes a row: what both operands of `halo_gemm` and `gather_gemm` are packed as, and what these have in
//! common. The kernels' files say what the numbers mean.

use super::epilogue::NULL;
use super::pack::{self, Operand};
use super::prepacked::WeightPlaces;
use super::{Argument, Buffer, Context, RESERVED, SHARED, Step, Workspace, push, size};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Positions of a unit of what packs beside products, and its rounds, where a kernel has no more.
pub(super) const PACKED_TOGETHER: usize = 4;
pub(super) const PACK_ROUNDS: usize = 2;
/// The most stages of both operands in shared memory.
pub(super) const MOST_STAGES: usize = 60;
/// Threads of the packs; bytes of shared memory of the input's where channels lie together, and a row is one thread's.
const THREADS: usize = 256;
const STAGED: u32 = 32_768;
/// Blocks of a multiprocessor that the weight's pack is cut into at least, as far as pieces of the weight that a block
/// brings to shared memory are no fewer than these, and no more.
const PACK_BLOCKS: usize = 2;
const PACK_PIECES: [usize; 2] = [256, 2304];
/// Channels of a block where a kernel has more pieces: what they write together is whole sectors.
const PACK_CHANNELS: usize = 4;

/// Bytes of shared memory of the warps of `pack_ahead.cuh` for each byte of an element, position of a unit and round.
const PACKER_BYTES: usize = 3 * 256;
/// Panels that a lane has at least there, where two or four lanes share a position's.
const SHARE: usize = 8;
/// The part of the second-level cache that what is packed ahead of the products may take, unless tiles in turn need more: so many
/// turns of all blocks.
const AHEAD: usize = 3;
/// What packing beside products takes of the time that it takes by itself: both take the GPU's power.
const BESIDE: f64 = 0.6;
/// Bytes a second of the input that may be packed so: by 8 bytes of a line at a time, by 16.
const PACKED: [f64; 2] = [0.5e12, 1e12];
/// The same where a position's channels lie together: of 16 bits, of 32.
const PACKED_LAST: [f64; 2] = [0.62e12, 0.72e12];
/// What waiting for the first rows takes, in seconds.
const FIRST: f64 = 6e-6;

/// Blocks a multiprocessor that may pack the input again.
const AGAIN: usize = 3;
/// Control words that a block sets.
const SET: usize = 1024;

/// The most blocks along the second and third axis of a grid.
const MOST_BLOCKS: usize = 65_535;

/// Whether a weight can be packed: its pack holds a line of taps, and has panels and slices along axes of its grid.
pub(super) fn packs(context: Context<'_>, operand: Operand, slices: usize, panels: usize) -> bool {
    let [.., w_kernel] = context.request.geometry.conv().kernel_size();
    let line_bytes = (w_kernel + 8) * 16 * operand.parts();
    line_bytes <= SHARED - 2 * RESERVED && slices.max(panels) <= MOST_BLOCKS
}

/// Rows of a product's tile: of each warpgroup so many times 64.
pub(super) fn tile_rows(kernel: &Variant) -> usize {
    64 * size(kernel, "MI") * size(kernel, "WGS")
}

/// Clusters of blocks that do tiles in parts which run side by side. Of a group of multiprocessors, which GPUs have of several sizes, some
/// are left over by clusters of more than two.
pub(super) fn most_teams(context: Context<'_>, kernel: &Variant) -> usize {
    let (team, all) = (size(kernel, "SPLIT"), context.device.multiprocessors);
    (if team > 2 { all * 7 / 8 } else { all }) / team
}

/// Bytes of shared memory of sums that other blocks of a cluster bring.
pub(super) fn brought_bytes(kernel: &Variant) -> usize {
    let team = size(kernel, "SPLIT");
    tile_rows(kernel) * size(kernel, "BN") * size(kernel, "RH") * 4 / team * (team - 1)
}

/// Bytes of shared memory of its tables and staging areas.
pub(super) fn table_bytes(kernel: &Variant) -> usize {
    size(kernel, "WGS") * (16 * size(kernel, "BN") + 4096 * size(kernel, "MI") + 1024)
}

/// Bytes of shared memory of what packs beside a product, by units of so many positions in so many rounds.
pub(super) fn packer_bytes(context: Context<'_>, unit: usize, rounds: usize) -> usize {
    PACKER_BYTES * unit * rounds * context.request.dtype.size()
}

/// Whether a product by that kernel may pack the input beside its work: all of it, in one part, with no slice and no panel's part
/// empty, below 32-bit counts.
pub(super) fn may_pack_along(context: Context<'_>, kernel: &Variant, operand: Operand) -> bool {
    let [_, channels, ..] = context.request.geometry.input_shape();
    let elements = context.request.geometry.input_shape().iter().product::<usize>();
    size(kernel, "CTAS") == 1
        && kernel.param("SHORT").is_none()
        && operand.parts() == 1
        && !context.packed
        && channels.is_multiple_of(16 / operand.bytes())
        && elements <= i32::MAX as usize
}

/// The launch that sets so many control words to what a packed weight starts with.
pub(super) fn words_of_packed(setting: Variant, control: u64, words: usize) -> Step {
    let arguments = vec![
        Argument::Pointer(Buffer::Workspace, control),
        Argument::Pointer(Buffer::Packed, 0),
        Argument::I32(words as i32),
    ];
    Step::launch(setting, [words.div_ceil(SET) as u32, 1, 1], arguments)
}

/// Where the rows of a product come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Panels that are packed before.
    Packed,
    /// Panels that are packed beside the products.
    Along,
    /// The input itself.
    InPlace,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Packed => "",
            Source::Along => ", packs along",
            Source::InPlace => ", rows from x",
        })
    }
}

impl Source {
    /// Whether those of a kernel's products may come from there: from the input where it is of 16 bits, a group's channels whole pieces of
    /// 16 bytes side by side.
    pub(super) fn is_possible(self, context: Context<'_>, kernel: &Variant, operand: Operand) -> bool {
        let conv = context.request.geometry.conv();
        match self {
            Source::Packed => true,
            Source::Along => may_pack_along(context, kernel, operand),
            Source::InPlace => {
                operand == Operand::Half
                    && !context.packed
                    && context.request.input_format == MemoryFormat::ChannelsLast3d
                    && (conv.in_channels() / conv.groups()).is_multiple_of(16 / operand.bytes())
            }
        }
    }
}

/// How a weight is packed.
pub(super) struct WeightPanels {
    pub(super) operand: Operand,
    pub(super) slices: usize,
    /// Column blocks of a slice, and columns of one.
    pub(super) blocks: usize,
    pub(super) columns: usize,
    /// Chunks of a slice, panels of one, and those that the slice's channels fill.
    pub(super) chunks: usize,
    pub(super) chunk_panels: usize,
    pub(super) channel_panels: usize,
    /// Positions of a row, and its outputs along width.
    pub(super) block: usize,
    pub(super) outputs: usize,
    /// Of the width: the first position, stride and dilation; the first step, how many there are, and from one to the next.
    pub(super) width: [usize; 3],
    pub(super) low: i64,
    pub(super) steps: usize,
    pub(super) step: i64,
    /// Taps along width that are columns of their own, else 1.
    pub(super) taps: usize,
    /// Whether taps along depth are columns, beside the channels, as `halo_sweep` has them.
    pub(super) sweeps: bool,
}

/// What blocks of the weight's pack take: the kernel's arguments of these names.
struct WeightCut {
    run: usize,
    runs: usize,
    lines: usize,
    line_runs: usize,
    pitch: usize,
    each: usize,
}

impl WeightPanels {
    /// Bytes of all of it.
    fn bytes(&self, context: Context<'_>) -> usize {
        let [d_kernel, h_kernel, _] = context.request.geometry.conv().kernel_size();
        let rows = self.slices * self.blocks * self.columns * d_kernel * h_kernel * self.steps;
        rows * self.panels() * self.operand.parts() * 16
    }

    /// Takes memory for it, and for what so many columns of a slice are scaled by, of which `inner` lie together, and has both
    /// written; where they are.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        [scaled, inner]: [usize; 2],
        control: u64,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<[u64; 2]> {
        let has_scale = self.operand.has_scale();
        let bytes = [self.bytes(context), if has_scale { self.slices * scaled * 4 } else { 0 }];
        let [weight, scale] = bytes.map(|bytes| workspace.take(bytes));
        if has_scale {
            pack::half_scale(context, [self.slices, scaled, inner], scale, control, steps)?;
        }
        steps.push(self.pack(context, weight, if has_scale { scale } else { control })?);
        let setting = *context.kernel("set_words", &[], &[])?;
        let places = WeightPlaces { control, alone: false, panels: weight, scales: scale, bytes, setting };
        workspace.weight = Some(places);
        Ok([weight, scale])
    }

    /// The launch that writes it: to an address of the workspace, with that of the split's scales, or else of the control
    /// words.
    fn pack(&self, context: Context<'_>, to: u64, control: u64) -> Result<Step> {
        let request = context.request;
        let conv = request.geometry.conv();
        let (cin, cout, groups) = (conv.in_channels(), conv.out_channels(), conv.groups());
        let first = usize::from(request.output_format == MemoryFormat::Contiguous);
        let mut arguments = vec![Argument::Pointer(Buffer::Weight, 0)];
        arguments.extend([to, control].map(|at| Argument::Pointer(Buffer::Workspace, at)));
        let cut = self.cut(context);
        push(&mut arguments, [cut.run, cut.lines, cut.line_runs, cut.pitch, cut.each])?;
        push(&mut arguments, [self.chunk_panels, self.chunks, self.columns, self.blocks])?;
        push(&mut arguments, [cout / self.slices, cin / self.slices, cin / groups, cout / groups])?;
        push(&mut arguments, [self.outputs, first, self.block, self.channel_panels])?;
        push(&mut arguments, self.width.into_iter().chain(conv.kernel_size()))?;
        arguments.push((self.low as i32).into());
        push(&mut arguments, [self.steps])?;
        arguments.push((self.step as i32).into());
        push(&mut arguments, [self.taps, usize::from(self.sweeps)])?;
        let params = [("KIND", self.operand.panel_kind())];
        let variant = *context.kernel("halo_pack_weight", &self.operand.types(context), &params)?;
        let grid = [cut.runs * cut.line_runs, self.panels(), self.slices].map(|blocks| blocks as u32);
        let shared = (cut.run * cut.pitch * 16 * self.operand.parts()) as u32;
        // After its scales.
        let overlap = self.operand.has_scale();
        Ok(Step::Launch { variant, grid, shared, arguments, overlap })
    }

    /// Panels of a slice.
    fn panels(&self) -> usize {
        self.chunks * self.chunk_panels
    }

    /// How the pack is cut into blocks.
    fn cut(&self, context: Context<'_>) -> WeightCut {
        let conv = context.request.geometry.conv();
        let [d_kernel, h_kernel, w_kernel] = conv.kernel_size();
        let (columns, slice_out) = (self.blocks * self.columns, conv.out_channels() / self.slices);
        let first = context.request.output_format == MemoryFormat::Contiguous;
        let (channels, each) = if self.taps > 1 {
            (columns / self.taps, self.taps)
        } else if first {
            (columns.div_ceil(self.outputs), self.outputs)
        } else {
            (slice_out, columns.div_ceil(slice_out))
        };
        let (kernel_lines, panels) = (d_kernel * h_kernel, self.slices * self.panels());
        let pieces = panels * channels * kernel_lines * w_kernel;
        let [least, most] = PACK_PIECES;
        let pieces = (pieces / (PACK_BLOCKS * context.device.multiprocessors))
            .clamp(least, most / self.operand.parts());
        // Neighbouring threads read pieces of neighbouring banks: those of a channel's columns, then the next channel's.
        let apart = if first && self.taps == 1 { each % 8 } else { 1 };
        let pitch = |lines: usize| lines * w_kernel + (apart + 8 - lines * w_kernel % 8) % 8;
        // Whole kernels of pairs of channels, unless these are large.
        let few = (pieces / pitch(1)).clamp(1, PACK_CHANNELS);
        let run = (pieces / pitch(kernel_lines) / 2 * 2).max(few).min(channels);
        let run = channels.div_ceil(channels.div_ceil(run)).next_multiple_of(2).min(run);
        let lines = (1..=kernel_lines).rev().find(|&lines| run * pitch(lines) <= pieces).unwrap_or(1);
        let pitch = pitch(lines);
        let [runs, line_runs] = [channels.div_ceil(run), kernel_lines.div_ceil(lines)];
        WeightCut { run, runs, lines, line_runs, pitch, each }
    }
}

/// How an input is packed.
pub(super) struct InputPanels {
    pub(super) operand: Operand,
    /// Rows of a panel, and those before the first position's.
    pub(super) rows: usize,
    pub(super) lead: usize,
    /// Rows from a plane, line and position to the next, and positions of a row.
    pub(super) pitches: [usize; 3],
    /// Voxels along each axis, and the strides of a sample, a channel and each axis.
    pub(super) voxels: [usize; 3],
    pub(super) strides: [usize; 5],
    pub(super) block: usize,
    /// Samples.
    pub(super) count: usize,
    pub(super) slices: usize,
    /// Panels of a slice, and those that its channels fill.
    pub(super) panels: usize,
    pub(super) channel_panels: usize,
    /// Positions of a unit of what packs beside products.
    pub(super) unit: usize,
}

/// A launch of `halo_pack_input` that waits for `half_scale`, which is launched before it.
pub(super) fn awaiting_scale(step: &Step) -> Step {
    let mut step = step.clone();
    if let Step::Launch { arguments, .. } = &mut step
        && let Some(awaits) = arguments.last_mut()
    {
        *awaits = 1.into();
    }
    step
}

impl InputPanels {
    /// Whether it may be packed beside products: whole panels of one slice.
    pub(super) fn may_go_along(&self) -> bool {
        self.slices == 1 && self.panels == self.block * self.channel_panels
    }

    /// The seconds that it is expected to take beside products that take so long, where it takes so long by itself.
    pub(super) fn beside(&self, context: Context<'_>, products: f64, alone: f64) -> f64 {
        let request = context.request;
        let size = request.dtype.size();
        let bytes = request.geometry.input_shape().iter().product::<usize>() * size;
        let rate = match request.input_format {
            MemoryFormat::Contiguous => PACKED[usize::from(self.unit * size >= 16)],
            MemoryFormat::ChannelsLast3d => PACKED_LAST[usize::from(size == 4)],
        };
        let least = bytes as f64 / rate;
        FIRST + (BESIDE * alone).max(least - products)
    }

    /// Units of a line, lines before the first, units of a piece as a power of two, and pieces, as `pack_ahead.cuh` has them.
    fn pieces(&self) -> [usize; 4] {
        let [.., pitch] = self.pitches;
        let (units, before) = ((pitch * self.block).div_ceil(self.unit), self.lead.div_ceil(pitch));
        let lines = before + self.rows.saturating_sub(self.lead).div_ceil(pitch);
        let fits = |shares: usize| {
            self.channel_panels.is_multiple_of(shares) && self.channel_panels >= SHARE * shares
        };
        let shift = if fits(4) {
            3
        } else if fits(2) {
            4
        } else {
            5
        };
        [units, before, shift, (lines * units).div_ceil(1 << shift)]
    }

    /// Words after the control words that packing it beside products takes.
    pub(super) fn words(&self) -> usize {
        let [.., pieces] = self.pieces();
        2 + pieces
    }

    /// What a product is given so that it packs the input beside its work, if it does: strides, units, lines before the
    /// first where there may be any, pieces, and how many of them it may be ahead. Blocks work on so many rows at once.
    pub(super) fn along(
        &self,
        context: Context<'_>,
        rows: Option<usize>,
        arguments: &mut Vec<Argument>,
    ) -> Result<()> {
        let row_bytes = self.slices * self.panels * self.operand.parts() * 16;
        let cached = context.device.l2_bytes / AHEAD / row_bytes;
        let [units, before, shift, pieces] = self.pieces();
        let ahead = |rows: usize| (cached.max(AHEAD * rows) * pieces).div_ceil(self.rows);
        push(arguments, self.strides)?;
        push(arguments, [units, before, shift, pieces, rows.map_or(0, ahead)])
    }

    /// Threads of a row: one, so that finding it is paid for once, unless there are few rows. More than eight of them where all run at
    /// once; neighbours along width are whole sectors.
    fn lanes(&self, context: Context<'_>) -> usize {
        let [few, busy] = [1024, 4096].map(|threads| context.device.multiprocessors * threads / self.rows);
        let of_sector = THREADS / 32 * context.request.dtype.size();
        let lanes = few.min(of_sector).max(busy.min(8)).max(1).next_power_of_two();
        lanes.min(1 << (self.slices * self.channel_panels).ilog2())
    }

    /// The launches that write it, of samples from so many bytes into the input on, to an address of the workspace; control words are told
    /// of it if somebody asks. They may go along with the weight's.
    pub(super) fn pack(
        &self,
        context: Context<'_>,
        from: u64,
        to: u64,
        control: Option<u64>,
        overlap: bool,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let channels = request.geometry.conv().in_channels();
        let of_workspace = |at| Argument::Pointer(Buffer::Workspace, at);
        let mut arguments = vec![Argument::Pointer(Buffer::Input, from), of_workspace(to)];
        arguments.push(control.map_or(NULL, of_workspace));
        push(&mut arguments, [self.rows, self.lead])?;
        push(&mut arguments, self.pitches)?;
        push(&mut arguments, [self.block, self.count])?;
        push(&mut arguments, self.voxels)?;
        push(&mut arguments, [self.slices, channels / self.slices, self.panels, self.channel_panels])?;
        push(&mut arguments, self.strides)?;
        let lanes = self.lanes(context);
        push(&mut arguments, [lanes])?;
        let params = [("KIND", self.operand.panel_kind())];
        let variant = *context.kernel("halo_pack_input", &self.operand.types(context), &params)?;
        let blocks = self.rows.div_ceil(THREADS / lanes);
        let staged = lanes == 1 && self.strides[1] == 1 && !self.operand.has_scale();
        let shared = if staged { STAGED } else { 0 };
        let mut launch = |last: &[Argument], blocks: usize, overlap| {
            let arguments = [&arguments, last].concat();
            steps.push(Step::Launch { variant, grid: [blocks as u32, 1, 1], shared, arguments, overlap });
        };
        // The weight's pack has waited for `half_scale`.
        let awaits = Argument::I32(0);
        match self.operand {
            Operand::Split => {
                launch(&[0.into(), awaits], blocks, overlap);
                // By the largest magnitude, should the sample's have been far smaller.
                if !pack::looks_at_all(context) {
                    launch(&[1.into(), awaits], blocks.min(AGAIN * context.device.multiprocessors), true);
                }
            }
            Operand::Scaled => launch(&[awaits], blocks, overlap),
            Operand::Half | Operand::Tf32 | Operand::Parts => {
                launch(self.operand.unless().as_slice(), blocks, overlap);
            }
        }
        Ok(())
    }
}

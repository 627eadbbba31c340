//! Planning `box_gemm`: boxes of positions, row blocks, panels at a time. The kernels' file says what the numbers
//! mean.

use super::pack::Operand;
use super::phases::PhaseAxis;
use super::{
    Argument, Buffer, Context, RESERVED, SHARED, Step, Workspace, bias_and_activation, product, push, size,
    strides,
};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Positions that a warp stages at a time.
const PIECE: usize = 32;
/// Masks and types that the kernels have room for, and residues along width.
const MOST_MASKS: usize = 1024;
const MOST_TYPES: usize = 64;
const MOST_STRIDE: usize = 16;
/// Sizes are counted in 32 bits, with room for a box past the end.
const MOST: usize = 1 << 29;
/// The same for distances of two elements.
const MOST_DISTANCE: usize = 1 << 30;
/// Threads of the pack, and its blocks a multiprocessor.
const THREADS: usize = 256;
const PACK_BLOCKS: usize = 4;

/// What a launch costs beside its work, in seconds.
const LAUNCH: f64 = 2.5e-6;
/// Bytes that a line of outputs touches beside its own, at its ends.
const SECTOR: f64 = 24.0;
/// How much more that costs where what lies beside is written later.
const APART: f64 = 2.5;
/// Clocks a second.
const CLOCK: f64 = 1.65e9;
/// Bytes a second of the memory.
const MEMORY: f64 = 3.2e12;
/// Clocks of a multiprocessor for an instruction of 16 rows by 8 positions, and for 512 bytes of an operand from a
/// cache or shared memory.
const PRODUCT: f64 = 2.5;
const OPERAND: f64 = 4.0;
/// Instructions of a warp for a step beside its products, for what a product of two parts adds up beside it, for 16 bytes of
/// 32 positions of X, and for 32 outputs; the share of its issue slots that a multiprocessor fills with few warps, and how
/// much more with each.
const TURN: f64 = 34.0;
const ADDED: f64 = 9.0;
const FETCH: f64 = 28.0;
const STORE: f64 = 14.5;
const ISSUE: [f64; 2] = [0.19, 0.009];
/// Clocks that a block alone waits: for a piece of work, for each batch of X, for a step's operands, for 32 outputs.
const BLOCK: f64 = 2450.0;
const WAIT: f64 = 1580.0;
const STEP: f64 = 340.0;
const LINE: f64 = 130.0;
/// Seconds until blocks have their tables.
const START: f64 = 5.5e-6;
/// Of what takes less, computing or moving, the part that does not hide behind the other.
const SEEN: f64 = 0.62;

/// How a slice's rows are cut: what does not depend on the box.
#[derive(Clone, Copy)]
struct Rows<'a> {
    kernel: &'a Variant,
    slices: usize,
    /// Channels of a row block, and row blocks of them.
    channels: usize,
    channel_blocks: usize,
    /// Pairs of residues along depth and height of a row block, and row blocks of them.
    classes: usize,
    types: usize,
    /// Residues along width that have taps, 4 bits each.
    residues: usize,
    residue_list: u64,
    /// Panels at a time, and how often.
    chunk_panels: usize,
    chunks: usize,
    pair_w: bool,
    /// Steps of all types for one pair of panels.
    listed: usize,
    /// Steps of all types, and tiles of 16 rows in them, with all channels.
    steps: usize,
    tiles: usize,
}

/// A plan of this family.
pub(super) struct BoxGemm<'a> {
    operand: Operand,
    axes: [PhaseAxis; 3],
    rows: Rows<'a>,
    size: [usize; 3],
    /// Warps that have different row blocks of the same positions.
    row_warps: usize,
    parts: usize,
    pitch: usize,
    staging: usize,
    lines: usize,
    shared: usize,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for BoxGemm<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rows { kernel, slices, channels, classes, chunk_panels, chunks, .. } = self.rows;
        let [d, h, w] = self.size;
        let (rows, warps) = (16 * size(kernel, "MT"), size(kernel, "WARPS"));
        write!(
            f,
            "box_gemm {} {rows}x{}, {warps} warps x{}, ",
            self.operand.name(),
            8 * size(kernel, "NT"),
            size(kernel, "CTAS")
        )?;
        write!(f, "boxes of {d}x{h}x{w}, {slices} slices, {channels} channels of {classes} classes, ")?;
        write!(f, "{chunks}x{chunk_panels} panels, {} parts by {}", self.parts, self.row_warps)
    }
}

/// Bit i of the result: whether a row of tile i has a tap.
fn mask(rows: usize, hit: impl Fn(usize) -> bool) -> u32 {
    (0..rows).filter(|&row| hit(row)).fold(0, |mask, row| mask | 1 << (row / 16))
}

impl<'a> Rows<'a> {
    fn all(context: Context<'a>, operand: Operand, axes: &[PhaseAxis; 3]) -> Vec<Rows<'a>> {
        let conv = context.request.geometry.conv();
        let groups = conv.groups();
        let (cin, cout) = (conv.in_channels(), conv.out_channels());
        let fits = |kernel: &&Variant| kernel.param("KIND") == Some(operand.kind());
        let kernels: Vec<_> = context.kernels("box_gemm", &operand.types(context)).filter(fits).collect();
        let mut all = Vec::new();
        for merged in (1..=groups).filter(|&merged| groups.is_multiple_of(merged)) {
            let slices = groups / merged;
            if merged > 1 && (cin / slices).max(cout / slices) > 64 {
                continue;
            }
            let panels = (cin / slices).div_ceil(16 / context.request.dtype.size());
            let mut chunk = if panels == 1 { 1 } else { panels.next_multiple_of(2) };
            let mut chunk_panels = vec![chunk];
            if panels % 2 == 1 && (3..8).contains(&panels) {
                chunk_panels.push(panels);
            }
            while chunk > 2 {
                chunk = chunk.div_ceil(2).next_multiple_of(2);
                chunk_panels.push(chunk);
            }
            for &kernel in &kernels {
                for &chunk_panels in &chunk_panels {
                    // All channels that the rows hold, or half of them and twice the classes.
                    let chunks = panels.div_ceil(chunk_panels);
                    let cut =
                        |parts| Rows::new(kernel, axes, slices, cout / slices, [chunk_panels, chunks], parts);
                    let (most, fewer) = (cut(1), cut(2));
                    let differ = |rows: &Rows<'_>| most.is_none_or(|most| most.channels != rows.channels);
                    all.extend(most);
                    all.extend(fewer.filter(differ));
                }
            }
        }
        all
    }

    /// Row blocks of a kernel; `parts` of the channels that its rows hold.
    fn new(
        kernel: &'a Variant,
        axes: &[PhaseAxis; 3],
        slices: usize,
        slice_out: usize,
        [chunk_panels, chunks]: [usize; 2],
        parts: usize,
    ) -> Option<Rows<'a>> {
        let [depth, height, width] = axes;
        let most = 16 * size(kernel, "MT");
        let stride = width.axis.stride;
        let with_taps: Vec<usize> =
            (0..stride).filter(|&r| (0..width.offsets()).any(|m| width.hit(r, m))).collect();
        let residues = with_taps.len();
        let residue_list = with_taps.iter().rev().fold(0, |list, &r| list << 4 | r as u64);
        let fits = most / residues / parts;
        if fits == 0 {
            return None;
        }
        let channel_blocks = slice_out.div_ceil(fits);
        let channels = slice_out.div_ceil(channel_blocks);
        let all_classes = depth.axis.stride * height.axis.stride;
        let classes = (most / (channels * residues)).min(all_classes);
        let types = all_classes.div_ceil(classes);
        let rows = Rows {
            kernel,
            slices,
            channels,
            channel_blocks,
            classes,
            types,
            residues,
            residue_list,
            chunk_panels,
            chunks,
            pair_w: chunk_panels % 2 == 1,
            listed: 0,
            steps: 0,
            tiles: 0,
        };
        if rows.masks(axes) > MOST_MASKS || types > MOST_TYPES {
            return None;
        }
        let (listed, tiles) = rows.count(axes, &with_taps);
        let pairs = chunks * rows.pairs();
        Some(Rows { listed, steps: listed * pairs, tiles: tiles * pairs, ..rows })
    }

    /// Steps of all types for one pair of panels, and the tiles that take part in them.
    fn count(&self, axes: &[PhaseAxis; 3], with_taps: &[usize]) -> (usize, usize) {
        let [depth, height, width] = axes;
        let &Rows { channels, classes, residues, pair_w, .. } = self;
        let all_classes = depth.axis.stride * height.axis.stride;
        let (mut steps, mut tiles) = (0, 0);
        let rows = classes * residues * channels;
        let along_w: Vec<u32> = (0..self.units(width))
            .map(|unit| {
                mask(rows, |row| {
                    let r = with_taps[row / channels % residues];
                    if pair_w {
                        width.hit(r, 2 * unit) || width.hit(r, 2 * unit + 1)
                    } else {
                        width.hit(r, unit)
                    }
                })
            })
            .collect();
        for kind in 0..self.types {
            let class = |row: usize| kind * classes + row / channels / residues;
            let along = |axis: &PhaseAxis, residue: &dyn Fn(usize) -> usize| -> Vec<u32> {
                let hit = |m| mask(rows, |row| class(row) < all_classes && axis.hit(residue(class(row)), m));
                (0..axis.offsets()).map(hit).collect()
            };
            let h_stride = height.axis.stride;
            let along_d = along(depth, &|class| class / h_stride);
            let along_h = along(height, &|class| class % h_stride);
            for d in &along_d {
                for h in &along_h {
                    for mask in along_w.iter().map(|w| d & h & w).filter(|&mask| mask != 0) {
                        steps += 1;
                        tiles += mask.count_ones() as usize;
                    }
                }
            }
        }
        (steps, tiles)
    }

    /// Row blocks of a slice.
    fn blocks(&self) -> usize {
        self.types * self.channel_blocks
    }

    /// Units along width.
    fn units(&self, width: &PhaseAxis) -> usize {
        if self.pair_w { width.offsets().div_ceil(2) } else { width.offsets() }
    }

    /// Pairs of panels of a chunk.
    fn pairs(&self) -> usize {
        if self.pair_w { self.chunk_panels } else { self.chunk_panels / 2 }
    }

    /// Masks of tiles.
    fn masks(&self, [depth, height, width]: &[PhaseAxis; 3]) -> usize {
        self.types * (depth.offsets() + height.offsets()) + self.units(width)
    }

    /// Pieces of 16 bytes of a part of the packed weight.
    fn pieces(&self, axes: &[PhaseAxis; 3]) -> Option<usize> {
        let [depth, height, _] = axes.map(|axis| axis.offsets());
        let units = self.units(&axes[2]);
        product(&[
            self.slices,
            self.blocks(),
            depth,
            height,
            units,
            self.chunks,
            self.pairs(),
            size(self.kernel, "MT"),
            32,
        ])
    }
}

/// Sizes of a box along an axis of so many positions, at most so many.
fn sizes(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let fewest = count.div_ceil(most);
    let mut known = 0;
    let cuts = (0..4).map(move |more| fewest + more).chain([2, 3, 4, 6, 8, 12, 16].map(|by| fewest * by));
    let sizes = cuts.map(move |cuts| count.div_ceil(cuts));
    sizes.filter(move |&size| std::mem::replace(&mut known, size) != size)
}

/// Sizes of boxes, each with numbers of warps that have different row blocks of the same positions, and of parts.
fn ways(axes: &[PhaseAxis; 3], rows: &Rows<'_>) -> Vec<([usize; 3], [usize; 2])> {
    let (warps, tiles) = (size(rows.kernel, "WARPS"), size(rows.kernel, "NT"));
    let [depth, height, width] = axes.map(|axis| axis.positions);
    let mut ways = Vec::new();
    for row_warps in [1, 2, 4, 8].into_iter().filter(|&row_warps| row_warps <= warps.min(rows.blocks())) {
        let (most, blocks) = (warps / row_warps * 8 * tiles, rows.blocks().div_ceil(row_warps));
        let mut shares = [1, 2, 4, 8, 16, 64, 256].map(|parts| [row_warps, blocks.min(parts)]).to_vec();
        shares.dedup();
        for w in sizes(width, width.min(most)) {
            for h in sizes(height, height.min(most / w)) {
                let d = sizes(depth, depth.min(most / w / h)).take(1);
                ways.extend(d.flat_map(|d| shares.iter().map(move |&share| ([d, h, w], share))));
            }
        }
    }
    ways
}

/// Boxes of a size along each axis.
fn boxes(axes: &[PhaseAxis; 3], size: [usize; 3]) -> [usize; 3] {
    [0, 1, 2].map(|axis| axes[axis].positions.div_ceil(size[axis]))
}

impl<'a> BoxGemm<'a> {
    /// The best plan of each way to cut rows, if the family applies and its kernels are there: not for float64, not
    /// past its 32-bit counts.
    pub(super) fn all(context: Context<'a>) -> Vec<BoxGemm<'a>> {
        BoxGemm::search(context).unwrap_or_default()
    }

    fn search(context: Context<'a>) -> Option<Vec<BoxGemm<'a>>> {
        let request = context.request;
        let operand = Operand::of(context)?;
        context.kernel("box_pack_weight", &operand.types(context), &[("KIND", operand.kind())]).ok()?;
        let geometry = &request.geometry;
        let axes = geometry.axes().map(PhaseAxis::new);
        let small = |sizes: &[usize]| product(sizes).is_some_and(|size| size <= MOST);
        let reach = axes.iter().all(|axis| {
            let conv = axis.axis;
            small(&[conv.output + conv.padding + conv.stride])
                && axis.reach < 1 << 12
                && conv.stride < 1 << 12
        });
        let fits = small(&geometry.input_shape()[1..])
            && small(&geometry.output_shape()[1..])
            && small(&geometry.conv().weight_shape());
        if !reach || !fits || axes[2].axis.stride > MOST_STRIDE {
            return None;
        }
        let all = Rows::all(context, operand, &axes);
        Some(all.into_iter().filter_map(|rows| BoxGemm::best(context, operand, &axes, rows)).collect())
    }

    /// The best box for row blocks, and the best way to share them.
    fn best(
        context: Context<'a>,
        operand: Operand,
        axes: &[PhaseAxis; 3],
        rows: Rows<'a>,
    ) -> Option<BoxGemm<'a>> {
        let plans = ways(axes, &rows).into_iter();
        let plans =
            plans.filter_map(|(size, shares)| BoxGemm::with(context, operand, axes, rows, size, shares));
        plans.min_by(|one, other| one.seconds.total_cmp(&other.seconds))
    }

    fn with(
        context: Context<'a>,
        operand: Operand,
        axes: &[PhaseAxis; 3],
        rows: Rows<'a>,
        box_size: [usize; 3],
        [row_warps, parts]: [usize; 2],
    ) -> Option<BoxGemm<'a>> {
        let request = context.request;
        let geometry = &request.geometry;
        let [mt, nt, warps, ctas] = ["MT", "NT", "WARPS", "CTAS"].map(|name| size(rows.kernel, name));
        let stride = axes[2].axis.stride;
        let last = request.output_format == MemoryFormat::ChannelsLast3d;
        let (channels, classes) = (rows.channels, rows.classes);
        // Lanes that write at once lie in different banks, mostly.
        let (pitch, staging) = if last {
            let pitch = (classes * stride * channels).next_multiple_of(32) + 4;
            (pitch, PIECE * pitch)
        } else {
            let pitch = PIECE * stride + if stride == 1 { 8 } else { 17 };
            (pitch, classes * channels * pitch)
        };
        let numbers = operand.parts();
        let staging = staging.next_multiple_of(4);
        let lines = (classes * channels * if last { stride } else { 1 }).next_multiple_of(2);
        let halo: usize = (0..3).map(|axis| axes[axis].halo(box_size[axis])).product();
        let shared = 16 * (numbers * rows.chunk_panels + 1) * halo
            + 4 * warps * (staging + 2 * lines)
            + 16 * rows.listed;
        let fixed = 16 * warps * 8 * nt + 4 * 16 * mt + MOST_MASKS + 4 * MOST_TYPES + 512;
        if shared + fixed + RESERVED > SHARED / ctas {
            return None;
        }
        let [d, h, w] = boxes(axes, box_size);
        let grid = product(&[geometry.batch(), d, h, w, rows.slices, parts])?;
        if grid > MOST || halo > MOST / 16 || rows.pieces(axes)?.checked_mul(numbers * 16)? > MOST {
            return None;
        }

        // Distances within a box are 32-bit.
        let [_, x_c, x @ ..] = strides(geometry.input_shape(), request.input_format);
        let [_, y_c, y @ ..] = strides(geometry.output_shape(), request.output_format);
        let across = |strides: [usize; 3], sizes: [usize; 3]| {
            let along = strides.iter().zip(sizes).map(|(stride, size)| (size - 1).checked_mul(*stride));
            along.sum::<Option<usize>>().filter(|&distance| distance < MOST_DISTANCE)
        };
        across(x, [0, 1, 2].map(|axis| axes[axis].halo(box_size[axis])))?;
        across(y, [0, 1, 2].map(|axis| box_size[axis] * axes[axis].axis.stride))?;
        if y_c.checked_mul(channels)? > MOST_DISTANCE || x_c > MOST_DISTANCE {
            return None;
        }

        // Cost: clocks of a multiprocessor that a part of a box takes, all row blocks of its own.
        let device = context.device.multiprocessors as f64;
        let rounds = rows.blocks().div_ceil(row_warps * parts) as f64;
        // Of the row blocks of a round, all warps'.
        let share = rounds * warps as f64 / rows.types as f64;
        // Three products, and sums that leave the unit.
        let times = if numbers == 2 { 4.0 } else { 1.0 };
        let (warp_steps, warp_tiles) = (rows.steps as f64 * share, rows.tiles as f64 * share);
        let products = warp_tiles * nt as f64 * times * PRODUCT;
        let operands = numbers as f64 * OPERAND * (warp_tiles + warp_steps * nt as f64 / 2.0);
        let fetches = if rows.chunks > 1 { rounds * rows.chunks as f64 } else { 1.0 };
        let pieces = (halo * rows.chunk_panels) as f64;
        let line = if last { channels * stride } else { box_size[2] * stride } * request.dtype.size();
        // Sectors at the ends of lines are touched twice, and at once where neighbours are written together: other
        // slices' channels, lines beside.
        let together = if last { rows.slices == 1 } else { classes >= axes[1].axis.stride };
        let partly = 1.0 + if together { SECTOR } else { APART * SECTOR } / line as f64;
        let outputs = rounds * (classes * channels * stride * warps * 8 * nt) as f64;
        let added = if numbers == 2 { warp_tiles * nt as f64 * ADDED } else { 0.0 };
        let issue =
            warp_steps * TURN + added + fetches * pieces / 32.0 * FETCH + outputs / 32.0 * STORE * partly;
        let filled = ISSUE[0] + ISSUE[1] * (warps * ctas) as f64;
        let busy = products.max(operands).max(issue / 4.0 / filled);
        // What one block takes alone.
        let per_warp = 1.0 / warps as f64;
        let batches = (pieces / (32 * warps) as f64 / 2.0).ceil();
        let alone = BLOCK
            + fetches * batches * WAIT
            + (warp_steps * STEP + outputs / 32.0 * LINE) * per_warp
            + products.max(operands);
        let turns = (grid as f64 / (device * ctas as f64)).ceil();
        let side_by_side = (grid as f64 / device / turns).max(1.0);
        let compute = START + turns * (side_by_side * busy).max(alone) / CLOCK;
        let bytes = |shape: [usize; 5]| {
            shape.iter().map(|&size| size as f64).product::<f64>() * request.dtype.size() as f64
        };
        let moved = (bytes(geometry.input_shape()) + partly * bytes(geometry.output_shape()))
            / context.device.memory(MEMORY);
        let seconds = compute.max(moved) + SEEN * compute.min(moved) + 2.0 * LAUNCH;
        Some(BoxGemm {
            operand,
            axes: *axes,
            rows,
            size: box_size,
            row_warps,
            parts,
            pitch,
            staging,
            lines,
            shared,
            seconds,
        })
    }

    /// What is launched.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let (conv, rows) = (request.geometry.conv(), &self.rows);
        let (cin, cout, groups) = (conv.in_channels(), conv.out_channels(), conv.groups());
        let pieces = rows.pieces(&self.axes).unwrap_or(MOST);
        let blocks = pieces.div_ceil(THREADS).min(PACK_BLOCKS * context.device.multiprocessors);
        let flags = workspace.take(4 * blocks);
        let masks = workspace.take(4 * rows.masks(&self.axes));
        let packed = workspace.take(16 * self.operand.parts() * pieces);
        let pointer = |at| Argument::Pointer(Buffer::Workspace, at);
        let slice = [cin / rows.slices, cout / rows.slices, cin / groups, cout / groups];
        let list = Argument::I64(rows.residue_list.cast_signed());

        let mut arguments = vec![Argument::Pointer(Buffer::Weight, 0), pointer(packed), pointer(flags)];
        arguments.push(pointer(masks));
        push(&mut arguments, [pieces])?;
        push(&mut arguments, slice)?;
        push(&mut arguments, [rows.chunk_panels, rows.chunks, usize::from(rows.pair_w), rows.channels])?;
        push(
            &mut arguments,
            [rows.channel_blocks, rows.classes, rows.types, size(rows.kernel, "MT"), rows.residues],
        )?;
        arguments.push(list);
        for axis in &self.axes {
            let conv = axis.axis;
            push(&mut arguments, [conv.kernel, conv.stride, conv.dilation, axis.offsets(), axis.apart])?;
        }
        let params = [("KIND", self.operand.kind())];
        let pack = *context.kernel("box_pack_weight", &self.operand.types(context), &params)?;
        steps.push(Step::launch(pack, [blocks as u32, 1, 1], arguments));

        let mut arguments = vec![Argument::Pointer(Buffer::Input, 0), pointer(packed), pointer(flags)];
        arguments.push(pointer(masks));
        arguments.extend([Buffer::Weight, Buffer::Bias, Buffer::Output].map(|of| Argument::Pointer(of, 0)));
        push(&mut arguments, [blocks, rows.slices])?;
        push(&mut arguments, slice)?;
        push(&mut arguments, [rows.chunk_panels, rows.chunks, usize::from(rows.pair_w), rows.channels])?;
        push(&mut arguments, [rows.channel_blocks, rows.classes, rows.types, self.parts, rows.residues])?;
        arguments.push(list);
        for (axis, &along) in self.axes.iter().zip(&self.size) {
            let conv = axis.axis;
            push(&mut arguments, [conv.input, conv.output, conv.kernel, conv.stride, conv.padding])?;
            push(
                &mut arguments,
                [conv.dilation, axis.first, axis.positions, axis.offsets(), axis.apart, along],
            )?;
        }
        let last = |format| i32::from(format == MemoryFormat::ChannelsLast3d);
        arguments.extend([last(request.input_format), last(request.output_format)].map(Argument::from));
        arguments.extend(bias_and_activation(request));
        push(&mut arguments, [self.pitch, self.staging, self.lines])?;
        for (shape, format) in [
            (request.geometry.input_shape(), request.input_format),
            (request.geometry.output_shape(), request.output_format),
        ] {
            let [n, rest @ ..] = strides(shape, format);
            arguments.push(Argument::I64(n as i64));
            push(&mut arguments, rest)?;
        }
        let halo = [0, 1, 2].map(|axis| self.axes[axis].halo(self.size[axis]));
        let boxes = boxes(&self.axes, self.size);
        push(&mut arguments, boxes)?;
        push(
            &mut arguments,
            [halo[1], halo[2], halo.iter().product(), rows.units(&self.axes[2]), rows.pairs()],
        )?;
        let boxes: usize = boxes.iter().product();
        let work = request.geometry.batch() * boxes * rows.slices * self.parts;
        push(&mut arguments, [work, self.row_warps])?;
        let side_by_side = context.device.multiprocessors * size(rows.kernel, "CTAS");
        let grid = [work.min(side_by_side) as u32, 1, 1];
        steps.push(Step::Launch {
            variant: *rows.kernel,
            grid,
            shared: self.shared as u32,
            arguments,
            overlap: true,
        });
        Ok(())
    }
}

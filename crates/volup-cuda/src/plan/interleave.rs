//! Planning `interleave`: kernels that are their stride. The kernels' file says what the numbers mean.

use super::pack::{self, Operand, PackedWeight, WeightLayout};
use super::{Argument, Buffer, Context, Step, Workspace, activation_code, direct, epilogue, push};
use crate::Variant;
use std::fmt;
use volup::{MemoryFormat, Result};

/// Counts are in 32 bits, with room for a tile past the end.
const MOST: usize = i32::MAX as usize - (1 << 16);
/// What a launch costs beside its work, in seconds.
const LAUNCH: f64 = 3e-6;
/// Bytes a second that tiles move at as views, and by an address for each element.
const BANDWIDTH: [f64; 2] = [2.6e12, 1.5e12];
/// The same where a stride along width leaves gaps between neighbouring threads.
const GAPPED: f64 = 0.8e12;
/// Bytes a second that are read again, from a cache.
const CACHED: f64 = 4e12;
/// What a product of one tile takes, with the wait for its operands, in seconds.
const TURN: f64 = 1.8e-6;
/// Blocks that a multiprocessor is given, at least, where tiles can be shared by several.
const BLOCKS: usize = 6;

/// Executed flops a second of one multiprocessor: what an H200 should reach at these tiles, shared out.
/// Rounding and splitting stand between load and product.
fn rate(operand: Operand) -> f64 {
    let all = match operand {
        Operand::Half => 300e12,
        Operand::Tf32 => 100e12,
        Operand::Split => 60e12,
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
        let moved = (input + output) / bandwidth + again * input / CACHED;
        // Two blocks at a time, each turn after turn.
        let turns = grid.div_ceil(2 * processors) * per * chunks;
        let seconds = compute.max(moved).max(turns as f64 * TURN) + LAUNCH;
        Some(Tiling { kernel, size, tiles, blocks, chunks, parts, seconds })
    }

    /// What the packed weight's layout depends on: columns of a tile, and a row's elements.
    fn weight(&self) -> (usize, usize) {
        let [_, n, k] = self.size;
        (n, self.chunks * k)
    }
}

/// A plan of this family.
pub(super) struct Interleave<'a> {
    operand: Operand,
    /// For inputs and outputs that start at multiples of 16 bytes, where their sizes allow it.
    aligned: Option<Tiling<'a>>,
    /// For all others.
    any: Tiling<'a>,
    /// The time that this is expected to take.
    pub(super) seconds: f64,
}

impl fmt::Display for Interleave<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tiling { size: [m, n, k], parts, .. } = self.aligned.unwrap_or(self.any);
        let how = if self.aligned.is_some() { "views" } else { "addresses" };
        write!(f, "interleave {} {m}x{n}x{k} by {how}, {parts} parts", self.operand.name())
    }
}

impl<'a> Interleave<'a> {
    /// The best plan, if the family applies: where each output has one tap, in one group, and input and
    /// output lie the same way; not for float64, not past its 32-bit counts.
    pub(super) fn new(context: Context<'a>) -> Option<Interleave<'a>> {
        let request = context.request;
        let (geometry, conv) = (&request.geometry, request.geometry.conv());
        // Two activations in a row are left to the definition.
        if epilogue(&request.block)[1].is_some() {
            return None;
        }
        let operand = Operand::of(context)?;
        let one_tap = geometry.axes().iter().all(|axis| {
            axis.kernel == axis.stride
                && (axis.dilation == 1 || axis.kernel == 1)
                && axis.padding == 0
                && axis.output == axis.input * axis.stride
        });
        let product = |sizes: &[usize]| sizes.iter().try_fold(1, |a: usize, &b| a.checked_mul(b));
        let small = |sizes: &[usize]| product(sizes).is_some_and(|size| size <= MOST);
        let [batch, _, depth, height, _] = geometry.input_shape();
        let fits = small(&geometry.input_shape()[1..])
            && small(&geometry.output_shape()[1..])
            && small(&[batch, depth, height, conv.stride()[0]])
            && small(&conv.weight_shape());
        if !one_tap || !fits || conv.groups() != 1 || request.input_format != request.output_format {
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
        let any = kernels("_any").filter_map(|kernel| Tiling::any(context, operand, kernel));
        let any = any.min_by(shorter)?;
        let keep = kernels("").filter_map(|kernel| Tiling::view(context, operand, kernel, true));
        let deep = kernels("_deep").filter_map(|kernel| Tiling::view(context, operand, kernel, false));
        // Both read the same packed weight.
        let aligned = keep.chain(deep).filter(|tiling| tiling.weight() == any.weight()).min_by(shorter);

        // The weight's pack; for the split also the scales, their check, and one more read of the input.
        let (launches, read) = match operand {
            Operand::Half | Operand::Tf32 => (1.0, 0),
            Operand::Split => (5.0, geometry.input_shape().iter().product::<usize>() * 4),
        };
        let seconds = aligned.unwrap_or(any).seconds + launches * LAUNCH + read as f64 / 3e12;
        Some(Interleave { operand, aligned, any, seconds })
    }

    /// What is launched.
    pub(super) fn steps(
        &self,
        context: Context<'_>,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let split = self.operand == Operand::Split;
        let control = pack::control(workspace, steps);
        if split {
            pack::largest(context, control, steps)?;
        }
        let (n, row) = self.any.weight();
        // One slice; one step along width, at no offset, over a whole row.
        let (slices, w_steps, w_step, w_far, span) = (1, 1, 0, 0, row);
        let columns_per_slice = self.any.blocks * n;
        let layout = WeightLayout { slices, columns_per_slice, row, w_steps, w_step, w_far, span };
        let weight = pack::weight(context, self.operand, &layout, control, workspace, steps)?;
        let any = self.multiply(context, &self.any, control, weight)?;
        steps.push(match &self.aligned {
            None => any,
            Some(tiling) => Step::Aligned {
                aligned: Box::new(self.multiply(context, tiling, control, weight)?),
                any: Box::new(any),
            },
        });
        if split {
            // Where the input or the weight holds what the split cannot compute with, the definition.
            steps.push(direct::step(context, Some(control))?);
        }
        Ok(())
    }

    /// The product by one of the kernels.
    fn multiply(
        &self,
        context: Context<'_>,
        tiling: &Tiling<'_>,
        control: u64,
        weight: PackedWeight,
    ) -> Result<Step> {
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
        let (code, slope) = activation_code(epilogue(&request.block)[0]);
        arguments.extend([i32::from(conv.has_bias()).into(), code.into(), Argument::F64(slope)]);
        let grid = [(tiling.tiles * tiling.parts) as u32, 1, 1];
        Ok(Step::launch(*tiling.kernel, grid, arguments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Plan, Request};
    use crate::{Algorithm, Arch, Cubin};
    use std::fs;
    use volup::{ConvSpec, DType, Precision};

    const KERNELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../volup-kernels");

    /// The kernels that are listed, as if compiled.
    fn variants() -> Vec<Variant> {
        let text = fs::read_to_string(format!("{KERNELS}/variants.toml")).unwrap();
        let leak = |text: &str| -> &'static str { Box::leak(text.to_string().into_boxed_str()) };
        let parts = |text: &str| -> Vec<String> {
            let inside = text.trim_matches(|c| "[]{} ".contains(c));
            inside.split(',').map(|part| part.trim().trim_matches('"').to_string()).collect()
        };
        let variant = |block: &str| {
            let field = |name: &str| {
                let mut fields = block.lines().filter_map(|line| line.split_once(" = "));
                fields.find(|(key, _)| *key == name).map(|(_, value)| value)
            };
            let kernel = field("kernel").unwrap().trim_matches('"');
            let types: Vec<&str> =
                field("types").map(parts).unwrap_or_default().iter().map(|t| leak(t)).collect();
            let params: Vec<(&str, i64)> = field("params")
                .map(parts)
                .unwrap_or_default()
                .iter()
                .map(|part| {
                    let (name, value) = part.split_once(" = ").unwrap();
                    (leak(name), value.parse().unwrap())
                })
                .collect();
            Variant {
                name: leak(kernel),
                family: leak(field("family").unwrap().trim_matches('"')),
                entry: leak(&format!("{kernel}_entry")),
                arch: Arch { major: 9, minor: 0 },
                types: types.leak(),
                params: params.leak(),
                registers: 0,
                local_bytes: 0,
                shared_bytes: 0,
                threads: 1,
                exact: false,
                hash: "",
                cubin: Cubin::NONE,
            }
        };
        text.split("[[variant]]").skip(1).map(variant).collect()
    }

    /// The types of a kernel's parameters, read from its source.
    fn parameters(variant: &Variant) -> Vec<String> {
        let text = fs::read_to_string(format!("{KERNELS}/src/{}.rs", variant.family)).unwrap();
        let kernel = variant.entry.trim_end_matches("_entry");
        let from = text.find(&format!("unsafe fn {kernel}<")).unwrap_or_else(|| panic!("{kernel}"));
        let list = text[from..].split_once(">(").unwrap().1.split_once(") {").unwrap().0;
        let types = list.split(',').filter_map(|parameter| parameter.split_once(": "));
        types.map(|(_, of)| of.trim().to_string()).collect()
    }

    fn check(step: &Step) {
        match step {
            Step::Clear { .. } => {}
            Step::Aligned { aligned, any } => {
                check(aligned);
                check(any);
            }
            Step::Launch { variant, grid, arguments, .. } => {
                let given = arguments.iter().map(|argument| match argument {
                    Argument::Pointer(..) => "*mut",
                    Argument::I32(_) => "i32",
                    Argument::I64(_) => "i64",
                    Argument::F32(_) => "f32",
                    Argument::F64(_) => "f64",
                });
                let asked = parameters(variant);
                let asked = asked.iter().map(|of| of.split(' ').next().unwrap());
                assert!(given.eq(asked), "{}: {arguments:?}", variant.name);
                assert!(grid[0] > 0, "{}", variant.name);
            }
        }
    }

    const FIRST: MemoryFormat = MemoryFormat::Contiguous;
    const LAST: MemoryFormat = MemoryFormat::ChannelsLast3d;

    /// Plans a kernel that is its stride, and says which tiles it takes.
    fn plan(
        channels: [usize; 2],
        kernel: [i64; 3],
        input: [usize; 3],
        format: MemoryFormat,
        dtype: DType,
        precision: Precision,
    ) -> (Plan, String) {
        let conv = ConvSpec::builder(channels[0], channels[1], kernel).stride(kernel).bias(true);
        let conv = conv.build().unwrap();
        let request = request(conv, input, format, dtype, precision);
        let variants = variants();
        let plan = Plan::new(&request, &crate::device::made_up(9, 0), &variants.iter().collect::<Vec<_>>());
        let plan = plan.unwrap();
        plan.steps.iter().for_each(check);
        assert_eq!(plan.algorithm, Algorithm::Interleave);
        let text = plan.to_string().split(';').next().unwrap().to_string();
        (plan, text)
    }

    fn request(
        conv: ConvSpec,
        input: [usize; 3],
        format: MemoryFormat,
        dtype: DType,
        precision: Precision,
    ) -> Request {
        Request {
            block: conv.into(),
            geometry: conv.geometry(2, input).unwrap(),
            dtype,
            precision,
            input_format: format,
            output_format: format,
            algorithm: Some(Algorithm::Interleave),
        }
    }

    #[test]
    fn kernels_get_what_they_ask_for_in_every_way_they_are_planned() {
        let kernels = [[2, 2, 2], [1, 2, 2], [2, 2, 1], [3, 1, 4], [1, 1, 1]];
        let inputs = [[4, 8, 64], [3, 5, 7], [8, 8, 8]];
        let channels = [[64, 32], [320, 256], [3, 5], [100, 12]];
        for (dtype, precision) in [
            (DType::F16, Precision::Ieee),
            (DType::Bf16, Precision::Ieee),
            (DType::F32, Precision::Tf32),
            (DType::F32, Precision::Ieee),
        ] {
            for format in [FIRST, LAST] {
                for (kernel, input) in kernels.iter().flat_map(|k| inputs.map(|input| (*k, input))) {
                    for channels in channels {
                        plan(channels, kernel, input, format, dtype, precision);
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_follow_the_sizes() {
        let half = |channels, kernel, input, format| {
            plan(channels, kernel, input, format, DType::Bf16, Precision::Ieee).1
        };
        let tf32 = |channels, kernel, input, format| {
            plan(channels, kernel, input, format, DType::F32, Precision::Tf32).1
        };
        let (two, cube) = ([2, 2, 2], [64, 64, 64]);
        assert_eq!(half([64, 32], two, cube, FIRST), "interleave half 128x64x64 by views, 1 parts");
        assert_eq!(tf32([64, 32], two, cube, FIRST), "interleave tf32 64x64x64 by views, 1 parts");
        assert_eq!(tf32([128, 64], two, [32; 3], LAST), "interleave tf32 64x64x128 by views, 1 parts");
        assert_eq!(tf32([320, 256], two, [8; 3], FIRST), "interleave tf32 64x64x64 by views, 32 parts");
        // Rows or channels that are no multiple of 16 bytes, other strides along width, odd heights.
        assert_eq!(
            half([64, 32], two, [64, 64, 60], FIRST),
            "interleave half 64x64x64 by addresses, 1 parts"
        );
        assert_eq!(tf32([62, 32], two, cube, LAST), "interleave tf32 64x64x64 by addresses, 1 parts");
        assert_eq!(tf32([64, 32], [2, 2, 3], cube, FIRST), "interleave tf32 64x64x64 by addresses, 1 parts");
        assert_eq!(tf32([64, 32], [2, 2, 3], cube, LAST), "interleave tf32 64x64x64 by views, 1 parts");
        assert_eq!(
            half([64, 32], two, [64, 63, 64], FIRST),
            "interleave half 64x64x64 by addresses, 1 parts"
        );
    }

    #[test]
    fn one_packed_weight_serves_both_kernels() {
        let (plan, _) = plan([100, 32], [2, 2, 2], [16; 3], FIRST, DType::F32, Precision::Tf32);
        let [Step::Clear { .. }, Step::Launch { arguments: pack, .. }, Step::Aligned { aligned, any }] =
            plan.steps.as_slice()
        else {
            panic!("{plan:?}")
        };
        // Four pairs of residues along depth and height, 64 columns, 128 channels.
        assert_eq!(pack[3..5], [Argument::I32(4 * 64 * 128), Argument::I32(128)]);
        assert!(plan.workspace_bytes >= 4 * 64 * 128 * 4);
        let cut = |step: &Step| match step {
            Step::Launch { variant, grid, arguments, .. } => {
                (variant.param("BK").unwrap(), arguments[13], arguments[14], grid[0])
            }
            _ => panic!("{step:?}"),
        };
        // One tile of 4x16 positions, shared by all of a sample's parts.
        assert_eq!(cut(aligned), (128, Argument::I32(1), Argument::I32(1), 2 * 16 * 4 * 4));
        assert_eq!(cut(any), (64, Argument::I32(2), Argument::I32(1), 2 * 64 * 4));
    }

    #[test]
    fn only_one_tap_an_output_applies() {
        let builder = || ConvSpec::builder(8, 8, 2).stride(2);
        let variants = variants();
        let variants: Vec<&Variant> = variants.iter().collect();
        let device = crate::device::made_up(9, 0);
        let applies = |request: &Request| {
            let plan = Plan::new(request, &device, &variants).unwrap();
            plan.algorithm == Algorithm::Interleave
        };
        let of = |conv: ConvSpec| request(conv, [4; 3], FIRST, DType::F32, Precision::Ieee);
        let base = of(builder().build().unwrap());
        assert!(applies(&base));
        assert!(applies(&of(ConvSpec::builder(8, 8, 1).dilation(3).build().unwrap())));
        for other in [
            builder().padding(1),
            builder().output_padding(1),
            builder().groups(2),
            builder().dilation(2),
            ConvSpec::builder(8, 8, 3).stride(2),
            ConvSpec::builder(8, 8, 1).stride(2),
        ] {
            assert!(!applies(&of(other.build().unwrap())), "{other:?}");
        }
        assert!(!applies(&Request { dtype: DType::F64, ..base }));
        assert!(!applies(&Request { output_format: LAST, ..base }));
        assert!(!applies(&Request { algorithm: Some(Algorithm::LinearGemm), ..base }));
        assert!(!applies(&Request { algorithm: Some(Algorithm::Direct), ..base }));
        // More elements than 32 bits count.
        let large = ConvSpec::builder(64, 64, 2).stride(2).build().unwrap();
        assert!(!applies(&request(large, [256; 3], FIRST, DType::Bf16, Precision::Ieee)));
        // Left to itself a plan takes what is fastest.
        let large = ConvSpec::builder(64, 32, 2).stride(2).build().unwrap();
        for precision in Precision::ALL {
            let request = request(large, [64; 3], FIRST, DType::F32, precision);
            assert!(applies(&Request { algorithm: None, ..request }));
        }
    }
}

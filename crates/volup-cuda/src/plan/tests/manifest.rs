//! The kernels as their sources and `variants.toml` declare them, without compiling any.

use super::variants;
use crate::{Arch, Cubin, DeviceInfo, Variant};
use std::collections::HashMap;
use std::sync::OnceLock;

/// The list of variants.
const VARIANTS: &str = include_str!("../../../../volup-kernels/variants.toml");

/// The kernels' files by family; those in CUDA C++ by kernel.
const SOURCES: [(&str, &str); 45] = [
    ("block_output", include_str!("../../../../volup-kernels/src/cuda/block_output.cu")),
    ("box_gemm", include_str!("../../../../volup-kernels/src/cuda/box_gemm.cu")),
    ("box_pack_weight", include_str!("../../../../volup-kernels/src/cuda/box_pack_weight.cu")),
    ("channel_largest", include_str!("../../../../volup-kernels/src/cuda/channel_largest.cu")),
    ("channel_statistics", include_str!("../../../../volup-kernels/src/cuda/channel_statistics.cu")),
    ("direct", include_str!("../../../../volup-kernels/src/direct.rs")),
    ("direct_input_gradient", include_str!("../../../../volup-kernels/src/cuda/direct_input_gradient.cu")),
    ("direct_norm", include_str!("../../../../volup-kernels/src/cuda/direct_norm.cu")),
    ("direct_output", include_str!("../../../../volup-kernels/src/cuda/direct_output.cu")),
    ("direct_weight_gradient", include_str!("../../../../volup-kernels/src/cuda/direct_weight_gradient.cu")),
    ("fill_output", include_str!("../../../../volup-kernels/src/cuda/fill_output.cu")),
    ("gather_gemm", include_str!("../../../../volup-kernels/src/cuda/gather_gemm.cu")),
    ("gradient_merge", include_str!("../../../../volup-kernels/src/cuda/gradient_merge.cu")),
    ("gradient_rows", include_str!("../../../../volup-kernels/src/cuda/gradient_rows.cu")),
    ("gradient_sums", include_str!("../../../../volup-kernels/src/cuda/gradient_sums.cu")),
    ("gradient_vectors", include_str!("../../../../volup-kernels/src/cuda/gradient_vectors.cu")),
    ("gradient_weight", include_str!("../../../../volup-kernels/src/cuda/gradient_weight.cu")),
    ("group_merge", include_str!("../../../../volup-kernels/src/cuda/group_merge.cu")),
    ("partial_merge", include_str!("../../../../volup-kernels/src/cuda/partial_merge.cu")),
    ("group_scale", include_str!("../../../../volup-kernels/src/cuda/group_scale.cu")),
    ("group_statistics", include_str!("../../../../volup-kernels/src/cuda/group_statistics.cu")),
    ("half_input", include_str!("../../../../volup-kernels/src/cuda/half_input.cu")),
    ("half_scale", include_str!("../../../../volup-kernels/src/cuda/half_scale.cu")),
    ("halo_gemm", include_str!("../../../../volup-kernels/src/cuda/halo_gemm.cu")),
    ("halo_pack_input", include_str!("../../../../volup-kernels/src/cuda/halo_pack_input.cu")),
    ("halo_pack_weight", include_str!("../../../../volup-kernels/src/cuda/halo_pack_weight.cu")),
    ("halo_sweep", include_str!("../../../../volup-kernels/src/cuda/halo_sweep.cu")),
    ("implicit_gemm", include_str!("../../../../volup-kernels/src/cuda/implicit_gemm.cu")),
    ("interleave", include_str!("../../../../volup-kernels/src/interleave.rs")),
    ("linear_gemm", include_str!("../../../../volup-kernels/src/linear_gemm.rs")),
    ("norm", include_str!("../../../../volup-kernels/src/norm.rs")),
    ("pack", include_str!("../../../../volup-kernels/src/pack.rs")),
    ("plane_gradient", include_str!("../../../../volup-kernels/src/cuda/plane_gradient.cu")),
    ("pointwise", include_str!("../../../../volup-kernels/src/cuda/pointwise.cu")),
    ("set_words", include_str!("../../../../volup-kernels/src/cuda/set_words.cu")),
    ("shuffle_gemm", include_str!("../../../../volup-kernels/src/cuda/shuffle_gemm.cu")),
    ("shuffle_gradient", include_str!("../../../../volup-kernels/src/cuda/shuffle_gradient.cu")),
    ("shuffle_ring", include_str!("../../../../volup-kernels/src/cuda/shuffle_ring.cu")),
    ("shuffle_ring_half", include_str!("../../../../volup-kernels/src/cuda/shuffle_ring_half.cu")),
    ("shuffle_ring_last", include_str!("../../../../volup-kernels/src/cuda/shuffle_ring_last.cu")),
    ("shuffle_wgmma", include_str!("../../../../volup-kernels/src/cuda/shuffle_wgmma.cu")),
    ("weight_gradient", include_str!("../../../../volup-kernels/src/cuda/weight_gradient.cu")),
    ("weight_gradient_lines", include_str!("../../../../volup-kernels/src/cuda/weight_gradient_lines.cu")),
    ("weight_gradient_narrow", include_str!("../../../../volup-kernels/src/cuda/weight_gradient_narrow.cu")),
    ("weight_gradient_sum", include_str!("../../../../volup-kernels/src/cuda/weight_gradient_sum.cu")),
];

/// Where the parameters of the definition are.
const DEFINITION: &str = include_str!("../../../../volup-kernels/src/cuda/definition.cuh");

/// Where the parameters of one axis are, of kernels that take all that the taps are about.
const TAPS: &str = include_str!("../../../../volup-kernels/src/cuda/gradient_taps.cuh");

/// Three devices that differ in what plans look at: an A100's, an H200's, a small Blackwell's.
pub fn devices() -> [DeviceInfo; 3] {
    [((8, 0), 108), ((9, 0), 132), ((12, 0), 24)].map(|((major, minor), multiprocessors)| DeviceInfo {
        multiprocessors,
        ..crate::device::made_up(major, minor)
    })
}

/// All variants for an architecture, as their build would list them.
pub fn variants_for(arch: Arch) -> Vec<Variant> {
    static LEAKED: OnceLock<Vec<(variants::Variant, Variant)>> = OnceLock::new();
    let all = LEAKED.get_or_init(|| {
        let listed = variants::parse(VARIANTS).expect("a valid list of variants");
        listed.into_iter().map(|listed| (listed.clone(), leaked(&listed))).collect()
    });
    let name = arch.to_string();
    let built = all.iter().filter(|(listed, _)| listed.is_for(&name));
    built.map(|&(_, variant)| Variant { arch, ..variant }).collect()
}

fn leaked(listed: &variants::Variant) -> Variant {
    let text = |text: &str| -> &'static str { text.to_string().leak() };
    let number = |value: &toml::Value| value.as_integer().expect("sizes are whole numbers");
    let params: Vec<_> = listed.params.iter().map(|(name, value)| (text(name), number(value))).collect();
    let types: Vec<_> = listed.types.iter().map(|name| text(name)).collect();
    Variant {
        name: listed.name().leak(),
        family: text(&listed.family),
        entry: listed.entry().leak(),
        arch: Arch { major: 0, minor: 0 },
        types: types.leak(),
        params: params.leak(),
        registers: 0,
        local_bytes: 0,
        shared_bytes: 0,
        threads: listed.threads.unwrap_or(1),
        exact: listed.is_cuda(),
        hash: "",
        cubin: Cubin::NONE,
    }
}

/// A kernel's function as its file declares it: what it is generic over, and its parameters.
pub struct Signature {
    /// Type arguments.
    pub types: Vec<&'static str>,
    /// Number arguments.
    pub sizes: Vec<&'static str>,
    /// Names and types.
    pub parameters: Vec<(&'static str, &'static str)>,
}

/// The signature of a variant's function.
pub fn signature(variant: &Variant) -> &'static Signature {
    // CUDA C++ has other parameters for other kinds of numbers, where channels lack taps, where taps are columns, of voxels, of
    // tiles in parts, and where what is between outputs is written with them.
    type Key = (&'static str, Option<i64>, [bool; 6]);
    static KNOWN: OnceLock<HashMap<Key, Signature>> = OnceLock::new();
    let options = |variant: &Variant| {
        ["SHORT", "COUNTS", "TAPS", "VOXEL", "SPLIT", "BETWEEN"].map(|name| variant.param(name).is_some())
    };
    let key = |variant: &Variant| (variant.entry, variant.param("KIND"), options(variant));
    let known = KNOWN.get_or_init(|| {
        let entries = variants_for(Arch { major: 9, minor: 0 });
        entries.iter().map(|variant| (key(variant), declared(variant))).collect()
    });
    known.get(&key(variant)).expect("a kernel of the list")
}

/// A Hopper of so many multiprocessors: of few blocks take several pieces of work, of several samples.
pub fn with_multiprocessors(multiprocessors: usize) -> DeviceInfo {
    DeviceInfo { multiprocessors, ..devices()[1].clone() }
}

/// The file of a variant's kernel.
pub fn source(variant: &Variant) -> &'static str {
    let file = if variant.exact { variant.entry } else { variant.family };
    let (_, source) = SOURCES.iter().find(|(known, _)| *known == file).expect("a known file");
    source
}

fn declared(variant: &Variant) -> Signature {
    let (name, source) = (variant.entry.trim_end_matches("_entry"), source(variant));
    if variant.exact {
        return declared_in_cuda(variant, source);
    }
    let (_, rest) =
        source.split_once(&format!("unsafe fn {name}<")).expect("the family's file has the kernel");
    let (generics, rest) = rest.split_once(">(").expect("generics end");
    let (parameters, _) = rest.split_once(')').expect("parameters end");
    let pairs = |list: &'static str| {
        let fields = list.split(',').map(str::trim).filter(|field| !field.is_empty());
        fields.map(|field| field.split_once(": ").expect("name and type")).collect::<Vec<_>>()
    };
    let (sizes, types): (Vec<_>, Vec<_>) =
        pairs(generics).into_iter().map(|(name, _)| name).partition(|name| name.starts_with("const "));
    let sizes = sizes.into_iter().map(|name| name.trim_start_matches("const ")).collect();
    Signature { types, sizes, parameters: pairs(parameters) }
}

/// The signature of a kernel in CUDA C++, as it is for the variant's kind of numbers.
fn declared_in_cuda(variant: &Variant, source: &'static str) -> Signature {
    let kind = variant.param("KIND").expect("a kind of numbers");
    let [short, counts] = ["SHORT", "COUNTS"].map(|name| variant.param(name).is_some());
    let compiled = compiled(variant, source);
    let (_, rest) = compiled.split_once("extern \"C\" __global__").expect("a kernel");
    let (_, rest) = rest.split_once(&format!(" {}(", variant.entry)).expect("the file has the kernel");
    let (list, _) = rest.split_once(") {").expect("parameters end");
    let list = expanded(list);
    let element = ["*mut T", "*mut f32", "*mut f32", "*mut f32", "*mut f64", "*mut f32"][kind as usize];
    let sum = if kind == 4 { "*mut f64" } else { "*mut f32" };
    let packed = if kind == 2 || kind == 5 { "*mut f16" } else { element };
    let parameter = |text: &'static str| {
        let (of, name) = text.rsplit_once([' ', '*']).expect("type and name");
        let of = match of.trim_start_matches("const ").trim() {
            "int" => "i32",
            "long long" => "i64",
            "double" if text.contains('*') => "*mut f64",
            "double" => "f64",
            "char" | "uint4" => packed,
            "Element" => element,
            "Half" => "*mut f16",
            // What gradients are multiplied as.
            "Row" if kind == 5 => "*mut f16",
            "Stored" if kind == 2 || kind == 5 => "*mut f16",
            "Operand" if kind == 2 => "*mut f16",
            "Row" | "Stored" | "Operand" => element,
            "Sum" => sum,
            "float" => "*mut f32",
            "unsigned" => "*mut i32",
            other => panic!("{name} is of {other}"),
        };
        (name, of)
    };
    let list = list.split(['\n', ',']).map(str::trim).filter(|text| !text.is_empty());
    let parameters = list.map(parameter).collect();
    let types = if kind == 0 { vec!["T"] } else { vec![] };
    // What the file asks for by `#error`.
    let sizes = match variant.entry {
        "halo_gemm" if short => vec!["KIND", "BN", "MI", "CTAS", "WGS", "SHORT"],
        "halo_gemm" if variant.param("TAPS").is_some() => {
            vec!["KIND", "BN", "MI", "CTAS", "WGS", "TAPS", "W_STRIDE"]
        }
        "halo_gemm" if variant.param("SPLIT").is_some() => vec!["KIND", "BN", "SPLIT", "MI", "CTAS", "WGS"],
        "halo_gemm" if variant.param("BETWEEN").is_some() => {
            vec!["KIND", "BN", "BETWEEN", "MI", "CTAS", "WGS"]
        }
        "halo_gemm" if counts => vec!["KIND", "COUNTS", "BN", "MI", "CTAS", "WGS"],
        "halo_gemm" => vec!["KIND", "BN", "MI", "CTAS", "WGS"],
        "halo_sweep" if counts => vec!["KIND", "BN", "PLANES", "MI", "CTAS", "WGS", "COUNTS"],
        "halo_sweep" => vec!["KIND", "BN", "PLANES", "MI", "CTAS", "WGS"],
        "gather_gemm" if counts => vec!["KIND", "BN", "MI", "CTAS", "WGS", "RW", "RH", "COUNTS"],
        "gather_gemm" if variant.param("SPLIT").is_some() => {
            vec!["KIND", "BN", "MI", "CTAS", "WGS", "RW", "RH", "SPLIT"]
        }
        "gather_gemm" => vec!["KIND", "BN", "MI", "CTAS", "WGS", "RW", "RH"],
        "box_gemm" => vec!["KIND", "MT", "NT", "WARPS", "CTAS"],
        "implicit_gemm" if counts => vec!["KIND", "SEGMENTS", "LINES", "WARPGROUPS", "COUNTS"],
        "implicit_gemm" if variant.param("VOXEL").is_some() => {
            vec!["KIND", "SEGMENTS", "LINES", "WARPGROUPS", "VOXEL"]
        }
        "implicit_gemm" => vec!["KIND", "SEGMENTS", "LINES", "WARPGROUPS"],
        "group_scale" | "group_statistics" => vec!["KIND", "LAST"],
        "shuffle_gemm" => {
            vec!["KIND", "NORM", "LAST", "STAGES", "WARP_ROWS", "WARP_POS", "ROW_WARPS", "POS_WARPS", "CTAS"]
        }
        "block_output" | "channel_statistics" | "gradient_sums" => vec!["KIND", "LAST", "VECTOR"],
        "gradient_rows" => vec!["KIND", "CHANNELS"],
        "plane_gradient" => vec!["KIND", "CHANNELS", "TAPS", "CTAS"],
        "pointwise" => vec!["KIND", "STRIDED", "ROWS", "VOXELS", "UNIT", "CTAS"],
        "shuffle_gradient" => vec!["KIND", "ROWS"],
        "shuffle_ring" => vec!["KIND", "WARP_ROWS", "WARP_POS", "ROW_WARPS", "POS_WARPS"],
        "shuffle_ring_half" => vec!["KIND", "LAST", "WARP_ROWS", "WARP_POS", "ROW_WARPS", "POS_WARPS"],
        "shuffle_ring_last" => vec!["KIND", "WARP_ROWS", "WARP_POS", "ROW_WARPS", "POS_WARPS", "TAPS"],
        "shuffle_wgmma" => vec!["KIND", "MODE", "X_LAST", "Y_LAST"],
        "weight_gradient" => vec!["KIND", "WARP_M", "WARP_N", "WARPS_M", "WARPS_N", "TAPS", "CTAS"],
        "weight_gradient_lines" => vec!["KIND", "MI", "NC"],
        "weight_gradient_narrow" => vec!["KIND", "CTAS"],
        _ => vec!["KIND"],
    };
    Signature { types, sizes, parameters }
}

/// The lines of a file that are compiled for a variant, and those under what this does not know, with what they are under.
fn compiled(variant: &Variant, source: &str) -> String {
    let kind = variant.param("KIND").expect("a kind of numbers");
    let holds = |condition: &str| match condition {
        "SCALED" => Some(kind == 2 || kind == 5),
        "PARTED" => Some(kind == 2 || kind == 3),
        "SHORT" | "COUNTS" | "TAPS" | "VOXEL" | "SPLIT" | "BETWEEN" => {
            Some(variant.param(condition).is_some())
        }
        _ => condition.strip_prefix("KIND == ")?.parse().ok().map(|known: i64| kind == known),
    };
    // Of each condition that a line is under, whether it is kept; whether it or one before it was; whether this is known.
    let (mut under, mut kept): (Vec<[bool; 3]>, String) = Default::default();
    for line in source.lines() {
        let (directive, condition) = line.split_once(' ').unwrap_or((line, ""));
        match directive {
            "#if" | "#ifdef" | "#ifndef" => {
                let holds = holds(condition).filter(|_| directive != "#ifndef");
                under.push([holds.unwrap_or(true), holds.unwrap_or(true), holds.is_some()]);
            }
            "#elif" | "#else" => {
                let [is, was, known] = under.last_mut().expect("a condition before");
                let own = if directive == "#else" { Some(true) } else { holds(condition) };
                *known &= own.is_some();
                *is = !*known || !*was && own == Some(true);
                *was |= *is;
            }
            "#endif" => drop(under.pop()),
            _ => {}
        }
        let known = under.last().is_none_or(|[.., known]| *known);
        if under.iter().all(|[is, ..]| *is) && !(known && line.starts_with('#')) {
            kept.extend([line, "\n"]);
        }
    }
    kept
}

/// A list of parameters with what stands for those of an axis, and of the definition, written out.
fn expanded(list: &str) -> &'static str {
    let (_, rest) =
        DEFINITION.split_once("#define DEFINITION_PARAMETERS").expect("what the definition takes");
    let (of_definition, _) = rest.split_once("#define").expect("the next one");
    let of_definition = of_definition.replace('\\', "");
    let list = &list.replace("DEFINITION_PARAMETERS", of_definition.trim());
    let (_, rest) = TAPS.split_once("#define TAP_AXIS(a) ").expect("the parameters of an axis");
    let of_axis = rest.lines().next().expect("a line");
    let axes = ["d", "h", "w"].into_iter().filter(|axis| list.contains(&format!("TAP_AXIS({axis})")));
    let write_out =
        |list: String, axis: &str| list.replace(&format!("TAP_AXIS({axis})"), &of_axis.replace("a##", axis));
    axes.fold(list.to_string(), write_out).leak()
}

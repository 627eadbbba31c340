use super::*;
use crate::{ConvSpec, MemoryFormat};

/// The convolution the other way round: every input voxel adds to the outputs that it reaches.
fn scatter(geometry: &Geometry, weight: &[f64], bias: Option<&[f64]>, input: &[f64]) -> Vec<f64> {
    let [batch, cin, id, ih, iw] = geometry.input_shape();
    let [_, cout, od, oh, ow] = geometry.output_shape();
    let [_, per_group, kd, kh, kw] = geometry.conv().weight_shape();
    let size = [od, oh, ow];
    let mut out = vec![0.0; batch * cout * od * oh * ow];
    for (at, value) in out.iter_mut().enumerate() {
        *value = bias.map_or(0.0, |bias| bias[at / (od * oh * ow) % cout]);
    }
    for (from, x) in input.iter().enumerate() {
        let i = [from / (ih * iw) % id, from / iw % ih, from % iw];
        let (ci, n) = (from / (id * ih * iw) % cin, from / (id * ih * iw) / cin);
        for co_in_group in 0..per_group {
            for tap in 0..kd * kh * kw {
                let t = [tap / (kh * kw), tap / kw % kh, tap % kw];
                let o: Vec<isize> = (0..3)
                    .map(|a| {
                        let axis = geometry.axes()[a];
                        (i[a] * axis.stride + t[a] * axis.dilation) as isize - axis.padding as isize
                    })
                    .collect();
                if (0..3).all(|a| (0..size[a] as isize).contains(&o[a])) {
                    let co = ci / (cin / geometry.conv().groups()) * per_group + co_in_group;
                    let at = (((n * cout + co) * od + o[0] as usize) * oh + o[1] as usize) * ow;
                    out[at + o[2] as usize] +=
                        x * weight[(ci * per_group + co_in_group) * kd * kh * kw + tap];
                }
            }
        }
    }
    out
}

fn integers(shape: &[usize], step: usize) -> Tensor {
    let count: usize = shape.iter().product();
    Tensor::new(shape, (0..count).map(|v| ((v * step) % 7) as f64 - 3.0).collect()).unwrap()
}

fn parameters(conv: &ConvSpec, affine: bool) -> Parameters {
    let per_channel = |step| integers(&[conv.out_channels()], step);
    Parameters {
        weight: integers(&conv.weight_shape(), 5),
        bias: conv.has_bias().then(|| per_channel(3)),
        norm_weight: affine.then(|| per_channel(2)),
        norm_bias: affine.then(|| per_channel(4)),
    }
}

#[test]
fn gathering_by_the_definition_equals_scattering() {
    let specs = [
        (ConvSpec::builder(2, 3, [1, 2, 3]), 2, [2, 3, 4]),
        (
            ConvSpec::builder(4, 6, [3, 1, 2]).stride([2, 3, 1]).padding([1, 0, 1]).groups(2).bias(true),
            1,
            [3; 3],
        ),
        (
            ConvSpec::builder(3, 3, 3).stride(2).padding(1).output_padding(1).dilation(2).groups(3),
            2,
            [2, 3, 2],
        ),
        (ConvSpec::builder(1, 1, 2).stride(4).output_padding(3).bias(true), 1, [1, 2, 3]),
        (ConvSpec::builder(1, 2, 2).padding([3, 2, 0]).dilation([1, 3, 2]), 0, [7, 4, 2]),
    ];
    for (spec, batch, size) in specs {
        let conv = spec.build().unwrap();
        let geometry = conv.geometry(batch, size).unwrap();
        let parameters = parameters(&conv, false);
        let input = integers(&geometry.input_shape(), 3);
        let (weight, bias) = (parameters.weight.to_f64(), parameters.bias.as_ref().map(Tensor::to_f64));
        let right = scatter(&geometry, &weight, bias.as_deref(), &input.to_f64());
        let last = input.cast(DType::Bf16, MemoryFormat::ChannelsLast3d).unwrap();
        assert_eq!(forward(&conv.into(), &geometry, &parameters, &input, 0.0).values, right, "{geometry}");
        assert_eq!(forward(&conv.into(), &geometry, &parameters, &last, 0.0).values, right, "{geometry}");
        let [_, cout, od, oh, ow] = geometry.output_shape();
        for (at, &value) in right.iter().enumerate() {
            let (plane, row, volume) = (oh * ow, ow, od * oh * ow);
            let place = [at / volume / cout, at / volume % cout, at / plane % od, at / row % oh, at % ow];
            let voxel = voxel(&geometry, &weight, bias.as_deref(), &input.to_f64(), place);
            assert_eq!(voxel.sum, value);
            assert!(voxel.magnitude >= value.abs());
        }
    }
}

#[test]
fn pairs_are_those_of_the_definition() {
    let conv = ConvSpec::builder(1, 1, 4).stride(3).padding(2).output_padding(1).dilation(2).build().unwrap();
    for axis in conv.geometry(1, [1, 2, 5]).unwrap().axes() {
        for o in 0..axis.output {
            let mut found = pairs(axis, o);
            found.sort_unstable();
            assert_eq!(found, crate::spec::tests::pairs_of(axis, o));
        }
    }
}

#[test]
fn group_norm_has_zero_mean_and_unit_variance_before_gamma_and_beta() {
    let conv = ConvSpec::builder(2, 6, [2, 1, 3]).stride(2).bias(true).build().unwrap();
    let norm = NormSpec::new(3, 0.0, true).unwrap();
    let block = BlockSpec::new(conv, None, Some(norm), None).unwrap();
    let geometry = block.geometry(2, [2, 3, 2]).unwrap();
    let mut parameters = parameters(&conv, true);
    // Each channel of a group has its own gamma and beta, none of them 0.
    parameters.norm_weight = Some(Tensor::new(&[6], vec![2.0, -1.0, 0.5, 4.0, 1.0, -3.0]).unwrap());
    let (gamma, beta) =
        (parameters.norm_weight.clone().unwrap().to_f64(), parameters.norm_bias.clone().unwrap().to_f64());
    let input = integers(&geometry.input_shape(), 3);
    let normalized = forward(&block, &geometry, &parameters, &input, 0.0).values;
    let bare = forward(&conv.into(), &geometry, &parameters, &input, 0.0).values;
    let voxels = geometry.output_voxels();
    for group in 0..2 * 3 {
        let range = group * 2 * voxels..(group + 1) * 2 * voxels;
        let unit: Vec<f64> = range
            .clone()
            .map(|at| (normalized[at] - beta[at / voxels % 6]) / gamma[at / voxels % 6])
            .collect();
        let mean = unit.iter().sum::<f64>() / unit.len() as f64;
        let square = unit.iter().map(|z| z * z).sum::<f64>() / unit.len() as f64;
        assert!(mean.abs() < 1e-12 && (square - 1.0).abs() < 1e-12, "{mean} {square}");
        let bare = &bare[range];
        let center = bare.iter().sum::<f64>() / bare.len() as f64;
        let deviation = (bare.iter().map(|y| (y - center).powi(2)).sum::<f64>() / bare.len() as f64).sqrt();
        for (y, z) in bare.iter().zip(&unit) {
            assert!((z * deviation + center - y).abs() < 1e-9);
        }
    }
}

#[test]
fn activations_at_special_points() {
    let all: Vec<Activation> =
        Activation::NAMES.split(", ").map(|name| Activation::from_name(name).unwrap()).collect();
    for &function in &all {
        let f = |x| activation(function, x);
        assert!(f(f64::NAN).is_nan(), "{function}");
        assert_eq!(f(0.0), if function == Activation::Sigmoid { 0.5 } else { 0.0 }, "{function}");
        let bounded = matches!(function, Activation::Sigmoid | Activation::Tanh);
        assert_eq!(f(f64::INFINITY), if bounded { 1.0 } else { f64::INFINITY }, "{function}");
        // No slope is steeper than the constant of the bound.
        let steepest = (-8000..8000).map(|i| {
            let x = f64::from(i) / 1000.0;
            (f(x + 1e-3) - f(x)).abs() / 1e-3
        });
        let steepest = steepest.fold(0.0, f64::max);
        assert!(steepest <= lipschitz(function) * (1.0 + 1e-9), "{function}: {steepest}");
    }
    let f = activation;
    for x in [0.3, 1.0, 2.5] {
        // Odd, even and reflected parts that hold by definition.
        assert_eq!(f(Activation::Tanh, -x), -f(Activation::Tanh, x));
        assert!((f(Activation::Sigmoid, x) + f(Activation::Sigmoid, -x) - 1.0).abs() < 1e-15);
        for gate in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
            assert!((f(gate, x) - f(gate, -x) - x).abs() < 1e-15, "{gate}");
        }
        assert!((f(Activation::Gelu, x) - f(Activation::GeluTanh, x)).abs() < 1e-3);
        assert_eq!(f(Activation::leaky_relu(-0.5).unwrap(), -x), 0.5 * x);
    }
    assert_eq!(f(Activation::Hardswish, 3.0), 3.0);
    assert_eq!(f(Activation::Hardswish, -3.0), 0.0);
    assert_eq!(f(Activation::Relu, f64::NEG_INFINITY), 0.0);
    assert_eq!(f(Activation::Sigmoid, f64::NEG_INFINITY), 0.0);
}

#[test]
fn nan_reaches_its_group_and_no_other() {
    let conv = ConvSpec::builder(1, 4, 2).build().unwrap();
    let norm = NormSpec::new(2, 1e-5, false).unwrap();
    let block = BlockSpec::new(conv, Some(Activation::Relu), Some(norm), None).unwrap();
    let geometry = block.geometry(2, [2; 3]).unwrap();
    let mut parameters = parameters(&conv, false);
    let mut values = integers(&geometry.input_shape(), 3).to_f64();
    values[8] = f64::NAN;
    let input = Tensor::new(&geometry.input_shape(), values).unwrap();
    let out = forward(&block, &geometry, &parameters, &input, 0.0).values;
    let sample = out.len() / 2;
    assert!(out[..sample].iter().all(|z| z.is_finite()));
    assert!(out[sample..].iter().all(|z| z.is_nan()));
    parameters.weight = integers(&conv.weight_shape(), 0);
    let out = forward(&conv.into(), &geometry, &parameters, &input, 0.0).values;
    assert_eq!(out.iter().filter(|z| z.is_nan()).count(), 4 * 8);
}

#[test]
fn bounds_are_of_the_types_order() {
    let conv = ConvSpec::builder(8, 4, 3).build().unwrap();
    let norm = NormSpec::new(2, 1e-5, true).unwrap();
    let block = BlockSpec::new(conv, Some(Activation::Silu), Some(norm), Some(Activation::Tanh)).unwrap();
    let geometry = block.geometry(1, [4; 3]).unwrap();
    for (dtype, most) in [(DType::F64, 1e-10), (DType::F32, 1e-2), (DType::F16, 5e-2), (DType::Bf16, 0.2)] {
        let input = integers(&geometry.input_shape(), 3).cast(dtype, MemoryFormat::Contiguous).unwrap();
        let out = forward(&block, &geometry, &parameters(&conv, true), &input, 0.0);
        let worst = out.bounds.iter().copied().fold(0.0, f64::max);
        assert!(worst > 0.0 && worst < most, "{dtype}: {worst}");
    }
}

#[test]
fn rounded_operands_widen_the_bounds_by_what_they_do_to_products() {
    let voxel = Voxel { sum: 3.0, magnitude: 100.0, terms: 30 };
    let (u, r) = (DType::F32.unit_roundoff(), 2f64.powi(-11));
    let plain = voxel.bound(DType::F32, 0.0);
    assert!((plain / (32.0 * u * 100.0) - 1.0).abs() < 1e-6, "{plain}");
    let rounded = voxel.bound(DType::F32, r);
    let operands = (1.0 + r).powi(2) - 1.0;
    assert!((rounded - plain - operands * (100.0 + plain)).abs() < 1e-12, "{rounded}");

    let conv = ConvSpec::builder(8, 4, 3).build().unwrap();
    let geometry = conv.geometry(1, [4; 3]).unwrap();
    let input = integers(&geometry.input_shape(), 3).cast(DType::F32, MemoryFormat::Contiguous).unwrap();
    let of = |r| forward(&conv.into(), &geometry, &parameters(&conv, false), &input, r);
    let (plain, rounded) = (of(0.0), of(r));
    assert_eq!(plain.values, rounded.values);
    assert!(plain.bounds.iter().zip(&rounded.bounds).any(|(plain, rounded)| rounded > plain));
}

use super::*;
use crate::decoder::DecoderBlock;
use crate::{Activation, BlockSpec, ConvSpec, DType, NormSpec, Parameters};
use proptest::prelude::*;

/// Computes bare convolutions and ReLU as the formula reads, in double precision: the sum of an
/// output voxel has the same order wherever a crop lies.
struct Direct;

impl Engine for Direct {
    type Tensor = Tensor;
    type Layer = (BlockSpec, Parameters);

    fn describe(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }
    fn upload(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }
    fn download(&self, tensor: Tensor) -> Result<Tensor> {
        Ok(tensor)
    }
    fn layer(&self, block: &BlockSpec, parameters: &Parameters) -> Result<Self::Layer> {
        parameters.check(block)?;
        Ok((*block, parameters.clone()))
    }
    fn forward(&self, (block, parameters): &Self::Layer, input: &Tensor) -> Result<Tensor> {
        let geometry = block.geometry_of(input.shape())?;
        let (x, w) = (input.to_f64(), parameters.weight.to_f64());
        let bias = parameters.bias.as_ref().map(|bias| bias.to_f64());
        let [_, cin, di, hi, wi] = geometry.input_shape();
        let [n, cout, d, h, ww] = geometry.output_shape();
        assert_eq!((n, block.conv().groups()), (1, 1));
        let kernel = block.conv().kernel_size();
        let mut y = Vec::new();
        for (co, z, yy, xx) in product([cout, d, h, ww]) {
            let mut sum = bias.as_ref().map_or(0.0, |bias| bias[co]);
            for (ci, tz, ty, tx) in product([cin, kernel[0], kernel[1], kernel[2]]) {
                let source = |axis: usize, o: usize, t: usize| {
                    let axis = &geometry.axes()[axis];
                    let reach = (o + axis.padding).checked_sub(t * axis.dilation)?;
                    (reach % axis.stride == 0 && reach / axis.stride < axis.input)
                        .then_some(reach / axis.stride)
                };
                if let (Some(z), Some(y), Some(x_)) = (source(0, z, tz), source(1, yy, ty), source(2, xx, tx))
                {
                    let tap = ((tz * kernel[1] + ty) * kernel[2]) + tx;
                    let taps: usize = kernel.iter().product();
                    sum += x[((ci * di + z) * hi + y) * wi + x_] * w[(ci * cout + co) * taps + tap];
                }
            }
            y.push(if block.activation().is_some() { sum.max(0.0) } else { sum });
        }
        Tensor::new(&geometry.output_shape(), y)?.cast(input.dtype(), MemoryFormat::Contiguous)
    }
}

fn product([a, b, c, d]: [usize; 4]) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    (0..a * b * c * d).map(move |i| (i / (b * c * d), i / (c * d) % b, i / d % c, i % d))
}

/// Values that differ everywhere and repeat nowhere near.
fn tensor(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let values = (0..shape.iter().product::<usize>()).map(|_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f64 / (1 << 23) as f64 - 1.0
    });
    Tensor::new(shape, values.collect::<Vec<f64>>()).unwrap()
}

fn block(name: &str, conv: ConvSpec, activation: Option<Activation>) -> DecoderBlock {
    let parameters = Parameters {
        weight: tensor(&conv.weight_shape(), 7),
        bias: conv.has_bias().then(|| tensor(&[conv.out_channels()], 8)),
        norm_weight: None,
        norm_bias: None,
    };
    let spec = BlockSpec::new(conv, activation, None, None).unwrap();
    DecoderBlock { name: name.into(), spec, parameters }
}

/// A convolution that copies its one channel.
fn identity() -> DecoderBlock {
    let mut block = block("a", ConvSpec::builder(1, 1, 1).build().unwrap(), None);
    block.parameters.weight = Tensor::new(&[1, 1, 1, 1, 1], vec![1f64]).unwrap();
    block
}

fn quiet(_: usize, _: usize) {}

#[derive(Clone, Debug)]
struct AnyBlock {
    kernel: [usize; 3],
    stride: [usize; 3],
    padding: [usize; 3],
    output_padding: [usize; 3],
    dilation: [usize; 3],
    channels: usize,
}

fn any_block() -> impl Strategy<Value = AnyBlock> {
    let triple = |range: Range<usize>| prop::array::uniform3(range);
    (triple(1..5), triple(1..5), triple(0..4), triple(0..4), triple(1..4), 1usize..3).prop_map(
        |(kernel, stride, padding, output_padding, dilation, channels)| {
            let output_padding =
                [0, 1, 2].map(|axis| output_padding[axis] % stride[axis].max(dilation[axis]));
            AnyBlock { kernel, stride, padding, output_padding, dilation, channels }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { max_global_rejects: 1_000_000, ..ProptestConfig::with_cases(1_000) })]

    /// Tiles of any size give the very numbers of the whole.
    #[test]
    fn tiles_change_nothing(
        chain in prop::collection::vec(any_block(), 1..4),
        size in prop::array::uniform3(1usize..10),
        tile in 1usize..6,
    ) {
        let mut channels = 1;
        let blocks = chain.iter().enumerate().map(|(j, any)| {
            let conv = ConvSpec::builder(channels, any.channels, any.kernel)
                .stride(any.stride)
                .padding(any.padding)
                .output_padding(any.output_padding)
                .dilation(any.dilation)
                .bias(true)
                .build()
                .unwrap();
            channels = any.channels;
            block(&j.to_string(), conv, Some(Activation::Relu))
        });
        let decoder = Decoder::new(blocks.collect(), None, None).unwrap();
        let Ok(geometries) = decoder.geometries(1, size) else { return Err(TestCaseError::reject("no output")) };
        let work: f64 = geometries.iter().map(|g| g.flops() + g.output_voxels() as f64).sum();
        prop_assume!(work < 1e5);
        let input = tensor(&[1, size[0], size[1], size[2]], 1);
        let whole = decoder.run(&Direct, &input, None, quiet).unwrap();
        let tiled = decoder.run(&Direct, &input, Some(tile), quiet).unwrap();
        prop_assert_eq!(whole, tiled);
    }

    /// A tile computes little more than it must: no more than the kernel and a stride on each side.
    #[test]
    fn tiles_are_tight(any in any_block(), size in prop::array::uniform3(1usize..40), tile in 1usize..9) {
        let conv = ConvSpec::builder(1, 1, any.kernel)
            .stride(any.stride)
            .padding(any.padding)
            .output_padding(any.output_padding)
            .dilation(any.dilation)
            .build()
            .unwrap();
        let decoder = Decoder::new(vec![block("a", conv, None)], None, None).unwrap();
        let Ok(plan) = decoder.plan(size, Some(tile)) else { return Err(TestCaseError::reject("no output")) };
        for axis in 0..3 {
            let margin = any.dilation[axis] * any.kernel[axis] + any.stride[axis] + any.padding[axis] + any.output_padding[axis];
            let mut next = 0;
            for cut in &plan.cuts[axis] {
                prop_assert_eq!(cut.ranges[1].start, next);
                next = cut.ranges[1].end;
                prop_assert!(cut.lengths[0] <= tile * any.stride[axis] + 2 * margin, "{cut:?}");
            }
            prop_assert_eq!(next, conv.geometry(1, size).unwrap().axes()[axis].output);
        }
    }
}

#[test]
fn without_tiles_the_blocks_are_the_decoders_own() {
    let conv = ConvSpec::builder(1, 2, 3).stride(2).padding(2).output_padding(1).build().unwrap();
    let decoder = Decoder::new(vec![block("a", conv, Some(Activation::Relu))], None, None).unwrap();
    for tile in [None, Some(9), Some(usize::MAX)] {
        let plan = decoder.plan([9, 5, 7], tile).unwrap();
        assert_eq!((plan.tiles(), &plan.blocks), (1, &vec![decoder.blocks()[0].spec]));
    }
}

#[test]
fn a_tile_fits_what_it_is_given() {
    let conv = ConvSpec::builder(1, 8, 3).stride(2).padding(1).output_padding(1).build().unwrap();
    let decoder = Decoder::new(vec![block("a", conv, None)], None, None).unwrap();
    assert_eq!(decoder.tile_for([64; 3], 1 << 30).unwrap(), None);
    let tile = decoder.tile_for([64; 3], 1 << 22).unwrap();
    let bytes = |tile| decoder.plan([64; 3], tile).unwrap().working_elements() * 8;
    assert!(bytes(None) > 1 << 22 && bytes(tile) <= 1 << 22 && bytes(tile) > 1 << 20, "{tile:?}");
    assert_eq!(decoder.tile_for([64; 3], 0).unwrap(), Some(8));
}

#[test]
fn requests_are_checked() {
    let decoder = Decoder::new(vec![identity()], None, None).unwrap();
    let run = |shape: &[usize], tile| decoder.run(&Direct, &tensor(shape, 1), tile, quiet);
    assert!(matches!(run(&[1, 2, 2, 2], Some(0)), Err(Error::NotPositive { param: "tile", .. })));
    assert!(matches!(run(&[2, 2, 2], None), Err(Error::Rank { got: 3, .. })));
    assert!(matches!(run(&[2, 2, 2, 2], None), Err(Error::Channels { got: 2, expected: 1 })));
    assert!(matches!(run(&[1, 2, 0, 2], None), Err(Error::DecoderBlock { .. })));
    assert_eq!(run(&[0, 1, 2, 2, 2], Some(1)).unwrap().shape(), [0, 1, 2, 2, 2]);
}

#[test]
fn progress_counts_every_tile_of_every_sample() {
    let decoder = Decoder::new(vec![identity()], None, None).unwrap();
    let mut seen = Vec::new();
    let input = tensor(&[2, 1, 3, 2, 1], 1);
    decoder.run(&Direct, &input, Some(2), |done, all| seen.push((done, all))).unwrap();
    assert_eq!(seen, [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]);
}

#[test]
fn each_sample_is_scaled_by_its_own_largest_magnitude() {
    // A bias shows what the block was given: x/m + 1, times m, is x + m.
    let conv = ConvSpec::builder(1, 1, 1).bias(true).build().unwrap();
    let mut shifted = block("a", conv, None);
    shifted.parameters.weight = Tensor::new(&[1, 1, 1, 1, 1], vec![1f64]).unwrap();
    shifted.parameters.bias = Some(Tensor::new(&[1], vec![1f64]).unwrap());
    let decoder = Decoder::new(vec![shifted], None, Some(Normalize::Max)).unwrap();
    let nan = f64::NAN;
    let cases = [([1.0, -4.0], [5.0, 0.0]), ([0.0, 0.0], [1.0, 1.0]), ([2.0, nan], [3.0, nan])];
    for (given, expected) in cases {
        for tile in [None, Some(1)] {
            let input = Tensor::new(&[2, 1, 1, 1, 2], [[8.0, 4.0], given].concat()).unwrap();
            let output = decoder.run(&Direct, &input, tile, quiet).unwrap().to_f64();
            assert_eq!(output[..2], [16.0, 12.0]);
            assert_eq!(format!("{:?}", &output[2..]), format!("{expected:?}"));
        }
    }
}

/// The interpolation as PyTorch's documentation defines it: eight corners, weighted.
fn interpolate(input: &Tensor, scale: [usize; 3]) -> Vec<f64> {
    let shape = input.shape();
    let size = [shape[1], shape[2], shape[3]];
    let values = input.to_f64();
    let [d, h, w] = [0, 1, 2].map(|axis| size[axis] * scale[axis]);
    let output = product([shape[0], d, h, w]).map(|(c, z, y, x)| {
        let mut sum = 0.0;
        for corner in 0..8 {
            let (mut weight, mut index) = (1.0, c);
            for (axis, o) in [z, y, x].into_iter().enumerate() {
                let position = ((o as f64 + 0.5) / scale[axis] as f64 - 0.5).max(0.0);
                let fraction = position - position.floor();
                let upper = corner >> axis & 1 == 1;
                weight *= if upper { fraction } else { 1.0 - fraction };
                let i = (position.floor() as usize + usize::from(upper)).min(size[axis] - 1);
                index = index * size[axis] + i;
            }
            sum += weight * values[index];
        }
        sum
    });
    output.collect()
}

#[test]
fn the_skip_is_trilinear() {
    for (scale, size) in [([2, 2, 2], [3, 4, 5]), ([1, 3, 4], [2, 1, 6]), ([5, 1, 2], [1, 7, 2])] {
        let conv = ConvSpec::builder(2, 2, scale).stride(scale).build().unwrap();
        let mut silent = block("a", conv, None);
        silent.parameters.weight =
            Tensor::new(&conv.weight_shape(), vec![0f64; 4 * scale.iter().product::<usize>()]).unwrap();
        let decoder = Decoder::new(vec![silent], Some(Skip::Trilinear), Some(Normalize::Max)).unwrap();
        let input = tensor(&[2, size[0], size[1], size[2]], 3);
        let expected = interpolate(&input, scale);
        for tile in [None, Some(2)] {
            let output = decoder.run(&Direct, &input, tile, quiet).unwrap().to_f64();
            let worst = output.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(output.len() == expected.len() && worst < 1e-14, "{worst}");
        }
    }
}

#[test]
fn the_output_has_the_inputs_type_and_the_blocks_the_parameters() {
    let decoder = Decoder::new(vec![identity()], None, Some(Normalize::Max)).unwrap();
    let half = decoder.cast(DType::Bf16).unwrap();
    assert_eq!(half.dtype(), DType::Bf16);
    // Past float16's range, but not once it is scaled.
    let input = Tensor::new(&[1, 1, 1, 2], vec![1e6f32, 1.0 + 1e-5]).unwrap();
    assert_eq!(decoder.run(&Direct, &input, None, quiet).unwrap(), input);
    let output = half.run(&Direct, &input, None, quiet).unwrap();
    assert_eq!(output.dtype(), DType::F32);
    let output = output.to_f64();
    assert!(output[0] == 1e6 && output[1] != input.to_f64()[1] && (output[1] - 1.0).abs() < 1.0 / 128.0);
}

#[test]
fn channels_last_inputs_are_taken() {
    let conv = ConvSpec::builder(2, 2, 2).stride(2).build().unwrap();
    let decoder = Decoder::new(vec![block("a", conv, None)], Some(Skip::Trilinear), None).unwrap();
    let input = tensor(&[1, 2, 2, 3, 2], 5);
    let last = input.cast(DType::F64, MemoryFormat::ChannelsLast3d).unwrap();
    let run = |input| decoder.run(&Direct, input, Some(1), quiet).unwrap();
    assert_eq!(run(&input), run(&last));
}

#[test]
fn a_norm_is_noticed() {
    let conv = ConvSpec::builder(1, 2, 1).build().unwrap();
    let mut normed = block("a", conv, None);
    normed.spec = BlockSpec::new(conv, None, Some(NormSpec::new(1, 1e-5, false).unwrap()), None).unwrap();
    assert!(Decoder::new(vec![normed], None, None).unwrap().has_norm());
    assert!(!Decoder::new(vec![identity()], None, None).unwrap().has_norm());
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    assert!(matches!(zeros::<f64>(1 << 58), Err(Error::OutOfMemory { bytes, .. }) if bytes == 1 << 61));
}

//! How the backward pass sees taps, rows and the tiles of `weight_gradient`.

use super::machine::Call;
use super::manifest::{devices, variants_for};
use super::weight_gradient::{Layout, check, fits};
use super::{FORMATS, planned};
use crate::plan::rows::{Rows, TapAxis};
use crate::plan::weight_gradient::{WeightGradient, busy_items};
use crate::plan::{Argument, Buffer, Context, Plan, Request, Task};
use crate::{DeviceInfo, Variant};
use std::collections::BTreeSet;
use volup::testing::{Case, random_case};
use volup::{Axis, DType, Error, Precision, Wanted};

/// The types in which plans differ.
const NUMBERS: [(DType, Precision); 3] =
    [(DType::F32, Precision::Ieee), (DType::F32, Precision::Tf32), (DType::F16, Precision::Ieee)];

fn request(case: &Case, (dtype, precision): (DType, Precision)) -> Request {
    Request {
        task: Task::Backward(Wanted {
            input: false,
            weight: true,
            bias: false,
            norm_weight: false,
            norm_bias: false,
        }),
        block: case.block,
        geometry: case.geometry(),
        dtype,
        precision,
        input_format: FORMATS[0],
        output_format: FORMATS[1],
        algorithm: None,
    }
}

fn context<'a>(request: &'a Request, device: &'a DeviceInfo, variants: &'a [&'a Variant]) -> Context<'a> {
    Context::new(request, device, variants)
}

/// Cases that draw everything, without empty batches.
fn random() -> impl Iterator<Item = Case> {
    (1000..1400).map(random_case).filter(|case| case.batch != Some(0))
}

#[test]
fn every_tap_that_reads_is_of_one_class_at_one_row() {
    let mut apart = 0;
    for axis in random().flat_map(|case| *case.geometry().axes()) {
        let Axis { input, output, stride, padding, dilation, kernel, .. } = axis;
        let seen = TapAxis::new(axis);
        // What class `j` holds in row `q` is the output at `s*q - p + j*d`.
        let held = |class: usize, row: usize| {
            (row * stride + class * dilation).checked_sub(padding).filter(|&at| at < output)
        };
        assert!(seen.classes <= kernel && seen.classes <= seen.step, "{seen:?}");
        let (mut last, mut most) = (0, 0);
        for class in 0..seen.classes {
            let taps: Vec<usize> = (class..kernel).step_by(seen.step).collect();
            most = most.max(taps.len());
            for (i, (m, &tap)) in (0..input).flat_map(|i| taps.iter().enumerate().map(move |tap| (i, tap))) {
                let row = i + m * seen.apart;
                last = last.max(row);
                // The same output, or for both none.
                assert_eq!(held(class, row), held(tap, i), "tap {tap} of voxel {i}: {seen:?}");
            }
        }
        assert_eq!((seen.count, seen.rows), (most, last + 1), "{seen:?}");
        let mut all: Vec<usize> =
            (0..seen.classes).flat_map(|class| (class..kernel).step_by(seen.step)).collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..kernel), "each tap is of one class: {seen:?}");
        apart += usize::from(seen.apart > 1 && seen.count > 1 && seen.classes > 1);
    }
    assert!(apart > 40, "{apart}");
}

#[test]
fn rows_hold_what_there_is_in_whole_vectors() {
    let [_, hopper, _] = devices();
    let mut padded = BTreeSet::new();
    for case in random() {
        for dtype in DType::ALL {
            let request = request(&case, (dtype, Precision::Ieee));
            let rows = Rows::new(context(&request, &hopper, &[])).expect("few rows");
            let (conv, vector) = (case.block.conv(), 16 / dtype.size());
            assert_eq!(rows.groups * rows.group_in, conv.in_channels());
            assert_eq!(rows.groups * rows.group_out, conv.out_channels());
            let classes: usize = rows.axes.iter().map(|axis| axis.classes).product();
            let (slots, channels) = (rows.group_out * classes, conv.in_channels());
            assert!((slots..slots + vector).contains(&rows.slots) && rows.pitch().is_multiple_of(vector));
            assert!(
                (channels..channels + vector).contains(&rows.x_pitch) && rows.x_pitch.is_multiple_of(vector)
            );
            // Vectors of a class's channels start at whole ones.
            assert!(!rows.group_out.is_multiple_of(vector) || rows.slots.is_multiple_of(vector), "{case}");
            let batch = case.geometry().batch() / rows.parts;
            assert_eq!(rows.count, batch * rows.axes.iter().map(|axis| axis.rows).product::<usize>());
            assert_eq!(rows.taps(), conv.kernel_size().iter().product::<usize>());
            padded.insert((rows.slots > slots, rows.x_pitch > channels));
        }
    }
    assert_eq!(padded.len(), 4, "{padded:?}");
}

#[test]
fn rows_past_what_is_counted_are_refused() {
    let [_, hopper, _] = devices();
    let variants = variants_for(hopper.arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    for (line, is) in [("n 1, 1024x1024x1023, 1>1, k 1", true), ("n 1, 1024x1024x1022, 1>1, k 1x1x4", false)]
    {
        let case = Case::parse("far", line, "about 2^30 rows").expect("a valid case");
        for numbers in NUMBERS {
            match Plan::new(&request(&case, numbers), &hopper, &variants) {
                Ok(plan) => assert!(is, "{plan}"),
                Err(Error::Overflow { .. }) => assert!(!is, "{line}"),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Of all plans of cases those that there are for their tiles: what each is launched with, and what it is expected to be
/// busy with.
#[test]
fn shares_cover_the_rows_and_blocks_are_busy_with_what_there_is() {
    let [_, hopper, _] = devices();
    let variants = variants_for(hopper.arch);
    let variants: Vec<&Variant> = variants.iter().collect();
    let null = Argument::Pointer(Buffer::Workspace, 0);
    let (mut shares, mut idle, mut best) = (0, 0, BTreeSet::new());
    for case in random().take(150).chain(planned()) {
        for numbers in NUMBERS {
            let request = request(&case, numbers);
            let context = context(&request, &hopper, &variants);
            let rows = Rows::new(context).expect("few rows");
            let all = WeightGradient::all(context, &rows);
            assert!(all.is_sorted_by(|one, other| one.seconds <= other.seconds), "{case}");
            for (rank, weight) in all.iter().enumerate() {
                let step = weight.step(&rows, [null; 3]).expect("few rows");
                let call = Call::new(&step).expect("a launch");
                check(&call);
                assert!(weight.seconds.is_finite() && weight.seconds > 0.0, "{case}");
                best.extend((rank == 0).then_some(call.variant.name));
                let layout = Layout::new(&call);
                let items = layout.items();
                let busy = items.iter().filter(|item| layout.is_busy(item)).count();
                let expected = busy_items(&rows, layout.tile.map(|size| size as usize));
                assert_eq!(expected, busy, "{} for {case}", call.variant.name);
                idle += usize::from(busy < items.len());
                shares += usize::from(weight.splits > 1);
            }
        }
    }
    assert!(shares > 100 && idle > 50, "{shares}, {idle}");
    // Types of 16 bits have the same tiles.
    let is_tile = |variant: &&&Variant| variant.entry == "weight_gradient" && variant.types != ["bf16"];
    let tiles = variants.iter().filter(is_tile).map(|variant| variant.name);
    let never: Vec<&str> = tiles.filter(|name| !best.contains(name)).collect();
    assert!(never.is_empty(), "{never:?} are never expected to be the fastest");
}

/// What is told of a kernel's blocks is what fits.
#[test]
fn as_many_blocks_share_a_multiprocessor_as_kernels_say() {
    let [_, hopper, _] = devices();
    let all = variants_for(hopper.arch);
    let kernels = all.iter().filter(|variant| variant.entry == "weight_gradient");
    let found: Vec<&str> = kernels.filter(|variant| !fits(variant)).map(|variant| variant.name).collect();
    assert!(found.is_empty(), "{found:?}");
}

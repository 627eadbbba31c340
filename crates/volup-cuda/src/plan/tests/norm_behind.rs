//! What a product does that normalizes what it has written, and the kernel that does it where the product does not stand.

use super::contracts::{activate, is_needed};
use super::machine::{Call, Machine};
use super::norm::{Moments, of_channel};
use std::collections::BTreeMap;

/// An output before it is normalized: its sample, channel, place in y and value.
pub struct Written {
    pub sample: i64,
    pub channel: i64,
    pub to: i64,
    pub value: f64,
}

/// Whether the product normalizes.
pub fn is_asked(call: &Call<'_>) -> bool {
    call.has("norm_words") && call.given("norm_words").is_some()
}

/// Numbers of words, of what segments come to, and of means and 1/sigmas.
pub fn extents(call: &Call<'_>, samples: i64) -> Vec<(&'static str, i64)> {
    if !is_asked(call) {
        return Vec::new();
    }
    let groups = samples * call.int("norm_groups");
    vec![
        ("norm_words", 4 + 4 * samples),
        ("norm_sums", 4 * groups * call.int("norm_segments")),
        ("merged", 2 * groups),
    ]
}

/// What the sizes and the warps have to be.
pub fn check(call: &Call<'_>) {
    if !is_asked(call) {
        return;
    }
    let vector = 16 / call.pointer("y").width as i64;
    let [voxels, channels, groups] = call.ints(["y_voxels", "out_channels", "norm_groups"]);
    assert_eq!(voxels, call.ints(["d_out", "h_out", "w_out"]).iter().product::<i64>());
    assert!(voxels % vector == 0 && channels % groups == 0 && call.int("norm_activation") <= 2);
    assert_eq!(call.ints(["y_c", "y_w", "channels_first", "by_work"]), [voxels, 1, 1, 0]);
    // Of two parts, which are packed before, all three warps may.
    if call.size("KIND") == 2 {
        assert!((2..=3).contains(&call.int("norm_warps")));
    } else {
        assert!((1..=2).contains(&call.int("norm_warps")) && call.int("ahead") > 0);
    }
    assert_eq!((channels / groups) % call.int("joined"), 0);
}

/// Writes outputs normalized.
pub fn finish(call: &Call<'_>, machine: &mut Machine, outputs: &[Written]) {
    let [groups, channels] = call.ints(["norm_groups", "out_channels"]);
    let group = |output: &Written| (output.sample, output.channel / (channels / groups));
    let mut of_groups: BTreeMap<_, Vec<f64>> = BTreeMap::new();
    for output in outputs {
        of_groups.entry(group(output)).or_default().push(output.value);
    }
    let all = call.int("y_voxels") * (channels / groups);
    let moments: BTreeMap<_, _> =
        of_groups.into_iter().map(|(group, values)| (group, Moments::of(&values))).collect();
    for output in outputs {
        let moments = moments[&group(output)];
        assert_eq!(moments.count as i64, all, "all of a group's outputs");
        let value = normalized(call, machine, moments, output.channel, output.value);
        machine.write(call.pointer("y"), output.to, activate(call, value, ["norm_activation", "norm_slope"]));
    }
}

/// A channel's value, before the activation.
fn normalized(call: &Call<'_>, machine: &Machine, moments: Moments, channel: i64, value: f64) -> f64 {
    let of_channel = |name, or| of_channel(call, machine, name, channel, or);
    (value - moments.mean) * (moments.rstd(call) * of_channel("gamma", 1.0)) + of_channel("beta", 0.0)
}

/// Normalizes what the definition has written, where control words ask for that.
pub fn direct(call: &Call<'_>, machine: &mut Machine) {
    let [groups, group_channels, voxels] = call.ints(["groups", "group_channels", "voxels"]);
    assert!(call.grid[0] % groups == 0 && call.grid[1..] == [1, 1] && call.variant.threads == 512);
    if !is_needed(call, machine) {
        return;
    }
    let y = call.pointer("y");
    for block in 0..call.grid[0] {
        let many = group_channels * voxels;
        let values: Vec<f64> = (0..many).map(|at| machine.read(y, block * many + at)).collect();
        let moments = Moments::of(&values);
        for (at, value) in (0..).zip(values) {
            let channel = block % groups * group_channels + at / voxels;
            let value = normalized(call, machine, moments, channel, value);
            machine.write(y, block * many + at, activate(call, value, ["activation", "slope"]));
        }
    }
}

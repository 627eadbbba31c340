//! Random small cases.

use super::Case;
use super::fill::split_mix;
use crate::{Activation, BlockSpec, ConvSpec, Error, MemoryFormat, NormSpec};

/// The most multiply-adds and output elements of a random case.
const LARGEST: f64 = 2e5;

/// A random valid case of at most 200,000 multiply-adds, the same for the same seed. All parameters
/// are drawn, and the rare ones often.
pub fn random_case(seed: u64) -> Case {
    let mut draw = Draw { seed: split_mix(seed, 0), index: 0 };
    loop {
        // A draw that breaks a rule (padding that leaves nothing, one value to normalize) or is too
        // large is drawn again.
        if let Ok(case) = draw.case() {
            let geometry = case.geometry();
            let outputs: usize = geometry.output_shape().iter().product();
            if geometry.flops() / 2.0 <= LARGEST && outputs as f64 <= LARGEST {
                return case;
            }
        }
    }
}

struct Draw {
    seed: u64,
    index: u64,
}

impl Draw {
    /// One of `low..=high`, the low ones more often.
    fn between(&mut self, low: usize, high: usize) -> usize {
        let span = (high - low + 1) as u64;
        let mut one = || {
            self.index += 1;
            split_mix(self.seed, self.index) % span
        };
        low + one().min(one()) as usize
    }

    /// True once in `of` times.
    fn once_in(&mut self, of: usize) -> bool {
        self.index += 1;
        split_mix(self.seed, self.index).is_multiple_of(of as u64)
    }

    /// A value for each axis, the same one half of the time.
    fn axes(&mut self, low: usize, high: usize) -> [usize; 3] {
        let all = self.between(low, high);
        if self.once_in(2) { [all; 3] } else { [0; 3].map(|_| self.between(low, high)) }
    }

    fn activation(&mut self) -> Result<Option<Activation>, Error> {
        let names: Vec<_> = Activation::NAMES.split(", ").collect();
        self.index += 1;
        match names.get(split_mix(self.seed, self.index) as usize % (2 * names.len())) {
            Some(&"leaky_relu") => Activation::leaky_relu(self.between(0, 40) as f64 / 16.0 - 1.0).map(Some),
            Some(name) => Activation::from_name(name).map(Some),
            None => Ok(None),
        }
    }

    fn case(&mut self) -> Result<Case, Error> {
        let groups = if self.once_in(3) { self.between(2, 5) } else { 1 };
        // Now and then past the usual tiles.
        let most = if self.once_in(6) { 40 } else { 9 };
        let (cin, cout) = (groups * self.between(1, most), groups * self.between(1, most));
        let (kernel, stride, dilation) = (self.axes(1, 6), self.axes(1, 4), self.axes(1, 4));
        let mut input = self.axes(1, 7);
        if self.once_in(5) {
            input[2 - self.between(0, 2)] = self.between(16, 140);
        }
        let output_padding = [0, 1, 2].map(|a| self.between(0, stride[a].max(dilation[a]) - 1));
        let padding = if self.once_in(2) { [0; 3] } else { self.axes(0, 8) };
        let conv = ConvSpec::builder(cin, cout, kernel)
            .stride(stride)
            .padding(padding)
            .output_padding(output_padding)
            .dilation(dilation)
            .groups(groups)
            .bias(self.once_in(2))
            .build()?;
        let norm = if self.once_in(2) {
            let divisors: Vec<_> = (1..=cout).filter(|groups| cout % groups == 0).collect();
            let groups = divisors[self.between(0, divisors.len() - 1)];
            Some(NormSpec::new(groups, [1e-5, 1e-3, 0.1][self.between(0, 2)], !self.once_in(4))?)
        } else {
            None
        };
        let activation = self.activation()?;
        let post_activation = if self.once_in(2) { self.activation()? } else { None };
        let block = BlockSpec::new(conv, activation, norm, post_activation)?;
        let batch = match self.between(0, 12) {
            12 => Some(0),
            11 => None,
            drawn => Some(1 + drawn % 3),
        };
        let last = batch.is_some() && self.once_in(3);
        let format = if last { MemoryFormat::ChannelsLast3d } else { MemoryFormat::Contiguous };
        block.geometry(batch.unwrap_or(1), input)?;
        Ok(Case { name: "random", why: "no one thought of it", block, batch, input, format })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_cases_repeat_and_draw_everything() {
        let cases: Vec<_> = (0..1000).map(random_case).collect();
        assert_eq!(cases[17], random_case(17));
        let share = |holds: &dyn Fn(&Case) -> bool| cases.iter().filter(|case| holds(case)).count();
        for (what, count) in [
            ("batch 0", share(&|c| c.batch == Some(0))),
            ("unbatched", share(&|c| c.batch.is_none())),
            ("channels last", share(&|c| c.format == MemoryFormat::ChannelsLast3d)),
            ("groups", share(&|c| c.block.conv().groups() > 1)),
            ("norm", share(&|c| c.block.norm().is_some())),
            ("plain norm", share(&|c| c.block.norm().is_some_and(|norm| !norm.affine()))),
            ("post-activation", share(&|c| c.block.post_activation().is_some())),
            ("output padding", share(&|c| c.block.conv().output_padding() != [0; 3])),
            (
                "dilation with stride",
                share(&|c| c.geometry().axes().iter().any(|a| a.stride > 1 && a.dilation > 1)),
            ),
            ("padding", share(&|c| c.block.conv().padding() != [0; 3])),
            ("bias", share(&|c| c.block.conv().has_bias())),
            ("long rows", share(&|c| c.input[2] > 64)),
        ] {
            assert!(count >= 5, "{what}: {count} of 1000");
        }
    }
}

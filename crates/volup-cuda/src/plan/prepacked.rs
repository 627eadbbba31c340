//! Plans whose weight is packed beforehand, for layers that keep theirs.

use super::{Buffer, Plan, Step, Workspace, pack, panels};
use crate::Variant;

/// A plan in two: what is made of the weight alone, and what is left to do for every input. Together they do what the plan
/// did, by the same launches.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepacked {
    /// Packs the weight. The memory that it works in is the other's [`Buffer::Packed`], and what other plans of the same packing
    /// find there is the same.
    pub packing: Plan,
    /// Computes the block with it.
    pub block: Plan,
}

/// Where a plan packs a weight in its workspace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct WeightPlaces {
    /// The control words, of which the weight's largest magnitude is one.
    pub(super) control: u64,
    /// Whether that is all that they are of.
    pub(super) alone: bool,
    /// The panels, and what their columns are scaled by.
    pub(super) panels: u64,
    pub(super) scales: u64,
    /// Bytes of both.
    pub(super) bytes: [usize; 2],
    /// What sets the control words for an input.
    pub(super) setting: Variant,
}

impl Plan {
    /// The same plan for a layer that keeps its weight packed; none where the weight is multiplied as it lies, or what
    /// packs it cannot be told from what packs the input.
    pub fn prepacked(&self) -> Option<Prepacked> {
        let places = self.weight?;
        let is_control = |step: &Step| matches!(step, Step::Clear { at, .. } if *at == places.control);
        let Step::Clear { words, .. } = *self.steps.iter().find(|step| is_control(step))? else {
            return None;
        };
        let mut memory = Workspace::default();
        let [control, scales, panels] =
            [words * 4, places.bytes[1], places.bytes[0]].map(|bytes| memory.take(bytes));
        // Where what lies somewhere in the workspace is packed: of the weight, and of the control words.
        let of_weight = |at: u64| match at {
            at if at == places.panels => Some(panels),
            at if at == places.scales && places.bytes[1] > 0 => Some(scales),
            _ => None,
        };
        let of_control = |at: u64| (at == places.control).then_some(control);

        let mut packing = vec![Step::Clear { at: control, words }];
        let mut block = Vec::new();
        for step in &self.steps {
            let Step::Launch { variant, .. } = step else {
                if !is_control(step) {
                    block.push(step.clone());
                } else if !places.alone {
                    block.push(panels::words_of_packed(places.setting, places.control, words));
                }
                continue;
            };
            let of_packing = |step: &Step| {
                step.moved(|buffer, at| match buffer {
                    Buffer::Workspace => (buffer, of_weight(at).or_else(|| of_control(at)).unwrap_or(at)),
                    other => (other, at),
                })
            };
            match variant.entry {
                "half_scale" => {
                    let [of_weight, of_input] = pack::scales_apart(step);
                    packing.push(of_packing(&of_weight));
                    block.push(of_input);
                }
                "halo_pack_weight" => packing.push(of_packing(step)),
                kernel => {
                    // Whatever follows the product may have its memory again, but for the control words.
                    let multiplies = matches!(kernel, "halo_gemm" | "gather_gemm" | "halo_sweep");
                    let kept = |at: u64| {
                        let weight = of_weight(at).filter(|_| multiplies);
                        weight.or_else(|| of_control(at).filter(|_| places.alone))
                    };
                    block.push(step.moved(|buffer, at| match buffer {
                        Buffer::Workspace => kept(at).map_or((buffer, at), |at| (Buffer::Packed, at)),
                        other => (other, at),
                    }));
                }
            }
        }
        for at in 0..block.len() {
            let before = at.checked_sub(1).map(|before| &block[before]);
            let behind = |kernel| before.is_some_and(|step| step.launches(kernel));
            let [packs, scales] = ["halo_pack_input", "half_scale"].map(|kernel| block[at].launches(kernel));
            // Nobody has waited in between for the scale, or for the words: of those who may be next these do before they need them.
            if behind("half_scale") && packs {
                block[at] = panels::awaiting_scale(&block[at]);
            } else {
                let early = if behind("set_words") {
                    packs || scales
                } else {
                    before.is_some_and(Step::is_exact) && !behind("half_scale") && block[at].is_early()
                };
                block[at] = block[at].clone().overlapping(early);
            }
        }
        let packing = Plan {
            steps: packing,
            workspace_bytes: memory.bytes,
            algorithm: self.algorithm,
            seconds: 0.0,
            summary: "packs the weight".to_string(),
            weight: None,
        };
        let summary = format!("{}, weight packed before", self.summary);
        Some(Prepacked { packing, block: Plan { steps: block, summary, weight: None, ..*self } })
    }
}

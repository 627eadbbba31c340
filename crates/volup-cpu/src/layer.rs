//! A block's parameters, checked and packed for the kernels.

use crate::Storage;
use crate::backward::input::TransposedWeights;
use crate::buffer::Buffer;
use std::sync::OnceLock;
use volup::{BlockSpec, ConvSpec, Error, Result};

/// Channels of a block of packed weights; a kernel takes as many of them at once as its registers
/// hold.
pub(crate) const CO_BLOCK: usize = 8;

/// A block's parameters in the caller's memory, contiguous, in PyTorch's shapes.
#[derive(Clone, Copy, Debug)]
pub struct ParametersRef<'a, T> {
    /// `[Cin, Cout/groups, kD, kH, kW]`.
    pub weight: &'a [T],
    /// `[Cout]`, if the convolution has a bias.
    pub bias: Option<&'a [T]>,
    /// `[Cout]`, if the normalization is affine.
    pub norm_weight: Option<&'a [T]>,
    /// `[Cout]`, if the normalization is affine.
    pub norm_bias: Option<&'a [T]>,
}

/// The taps of one axis that share a residue, and so belong to the same phase.
pub(crate) struct TapClass {
    /// `(t*d) mod s` of all of them.
    pub residue: usize,
    /// Indices in the kernel, ascending.
    pub taps: Vec<usize>,
}

/// The classes of taps of each axis.
pub(crate) fn tap_classes_of(conv: &ConvSpec) -> [Vec<TapClass>; 3] {
    [0, 1, 2].map(|axis| {
        let (stride, dilation) = (conv.stride()[axis], conv.dilation()[axis]);
        let mut classes: Vec<TapClass> = Vec::new();
        for tap in 0..conv.kernel_size()[axis] {
            let residue = (tap as u128 * dilation as u128 % stride as u128) as usize;
            match classes.iter_mut().find(|class| class.residue == residue) {
                Some(class) => class.taps.push(tap),
                None => classes.push(TapClass { residue, taps: vec![tap] }),
            }
        }
        classes
    })
}

/// A block of output channels of one group: which channels, and where their weights start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChannelBlock {
    /// First channel within the group.
    pub start: usize,
    /// Channels that exist.
    pub count: usize,
    /// Channels with padding: 1, 2, 4 or 8.
    pub width: usize,
}

pub(crate) fn channel_blocks(channels: usize) -> Vec<ChannelBlock> {
    let starts = (0..channels).step_by(CO_BLOCK);
    starts
        .map(|start| {
            let count = CO_BLOCK.min(channels - start);
            ChannelBlock { start, count, width: count.next_power_of_two() }
        })
        .collect()
}

/// A block with its parameters packed for the CPU's kernels.
///
/// Weights lie as `[group][block of channels][class of taps][input channel][tap][channel of the
/// block]`, so that a kernel reads them from front to back; a block's channels are padded with zeros
/// to a power of two.
pub struct CpuLayer<T: Storage> {
    pub(crate) block: BlockSpec,
    pub(crate) weights: Buffer,
    pub(crate) bias: Option<Vec<T::Acc>>,
    pub(crate) norm_weight: Option<Vec<T::Acc>>,
    pub(crate) norm_bias: Option<Vec<T::Acc>>,
    pub(crate) classes: [Vec<TapClass>; 3],
    pub(crate) blocks: Vec<ChannelBlock>,
    /// Elements of one group's weights.
    pub(crate) group_weights: usize,
    /// Whether all weights are finite: only then may a kernel multiply them with zeros beyond the
    /// input's borders.
    pub(crate) finite: bool,
    /// The weights as the gradient of the input takes them, packed when it is first asked for.
    transposed: OnceLock<TransposedWeights>,
}

impl<T: Storage> CpuLayer<T> {
    /// Packs the parameters of a block.
    ///
    /// # Errors
    /// [`Error::Length`] for a buffer of the wrong size, [`Error::Presence`] for one that the block
    /// has no use for, or lacks.
    pub fn new(block: &BlockSpec, parameters: ParametersRef<'_, T>) -> Result<CpuLayer<T>> {
        let conv = block.conv();
        let affine = block.norm().is_some_and(|norm| norm.affine());
        let expected = conv.weight_shape().iter().product();
        if parameters.weight.len() != expected {
            return Err(Error::Length { param: "weight", got: parameters.weight.len(), expected });
        }
        let channels = conv.out_channels();
        let widen = |param, values: Option<&[T]>, expected| match values {
            Some(values) if expected && values.len() == channels => {
                Ok(Some(values.iter().map(|v| v.to_acc()).collect()))
            }
            Some(values) if expected => Err(Error::Length { param, got: values.len(), expected: channels }),
            None if !expected => Ok(None),
            _ => Err(Error::Presence { param, expected }),
        };
        let mut layer = CpuLayer {
            block: *block,
            weights: Buffer::default(),
            bias: widen("bias", parameters.bias, conv.has_bias())?,
            norm_weight: widen("norm_weight", parameters.norm_weight, affine)?,
            norm_bias: widen("norm_bias", parameters.norm_bias, affine)?,
            classes: tap_classes_of(conv),
            blocks: channel_blocks(channels / conv.groups()),
            group_weights: 0,
            finite: parameters.weight.iter().all(|v| (v.to_acc() - v.to_acc()) == T::Acc::default()),
            transposed: OnceLock::new(),
        };
        layer.pack(conv, parameters.weight);
        Ok(layer)
    }

    /// The block's description.
    pub fn block(&self) -> &BlockSpec {
        &self.block
    }

    /// Where the weights of a class of taps start, as a number of taps: all those of the classes
    /// before it. A class is one of taps per axis, given by their indices.
    pub(crate) fn taps_before(&self, class: [usize; 3]) -> usize {
        let [_, kernel_h, kernel_w] = self.block.conv().kernel_size();
        let [d, h, w] = [0, 1, 2].map(|axis| {
            let before = &self.classes[axis][..class[axis]];
            before.iter().map(|class| class.taps.len()).sum::<usize>()
        });
        let [here_d, here_h, _] = [0, 1, 2].map(|axis| self.classes[axis][class[axis]].taps.len());
        (d * kernel_h + here_d * h) * kernel_w + here_d * here_h * w
    }

    /// For each tap of the kernel, in its order: the taps before its class, the taps of its class,
    /// and its index among them.
    fn slots(&self) -> Vec<(usize, usize, usize)> {
        let [kernel_d, kernel_h, kernel_w] = self.block.conv().kernel_size();
        let place = |axis: usize, tap: usize| {
            let mut classes = self.classes[axis].iter().enumerate();
            let found = classes
                .find_map(|(class, of)| Some((class, of.taps.binary_search(&tap).ok()?, of.taps.len())));
            found.expect("every tap is in a class")
        };
        let mut slots = Vec::with_capacity(kernel_d * kernel_h * kernel_w);
        for (class_d, d, here_d) in (0..kernel_d).map(|tap| place(0, tap)) {
            for (class_h, h, here_h) in (0..kernel_h).map(|tap| place(1, tap)) {
                for (class_w, w, here_w) in (0..kernel_w).map(|tap| place(2, tap)) {
                    let before = self.taps_before([class_d, class_h, class_w]);
                    slots.push((before, here_d * here_h * here_w, (d * here_h + h) * here_w + w));
                }
            }
        }
        slots
    }

    /// The weights as the gradient of the input takes them.
    pub(crate) fn transposed(&self) -> &TransposedWeights {
        self.transposed.get_or_init(|| TransposedWeights::new(self.block.conv(), &self.unpack()))
    }

    /// The weights in PyTorch's order.
    fn unpack(&self) -> Vec<T::Acc> {
        let [in_channels, group_out, ..] = self.block.conv().weight_shape();
        let group_in = in_channels / self.block.conv().groups();
        let slots = self.slots();
        let packed = self.weights.as_slice::<T::Acc>();
        let mut weight = Vec::with_capacity(in_channels * group_out * slots.len());
        for channel in 0..in_channels {
            let (group, ci) = (channel / group_in, channel % group_in);
            for block in &self.blocks {
                let start = group * self.group_weights + group_in * slots.len() * block.start;
                for lane in 0..block.count {
                    weight.extend(slots.iter().map(|&(before, here, index)| {
                        packed[start + (before * group_in + ci * here + index) * block.width + lane]
                    }));
                }
            }
        }
        weight
    }

    /// Lays the weights out as the type's documentation says.
    fn pack(&mut self, conv: &ConvSpec, weight: &[T]) {
        let [in_channels, group_out, ..] = conv.weight_shape();
        let group_in = in_channels / conv.groups();
        let slots = self.slots();
        let padded: usize = self.blocks.iter().map(|block| block.width).sum();
        self.group_weights = group_in * slots.len() * padded;
        // Fresh memory is zero, and so the padding is.
        let packed = self.weights.get::<T::Acc>(self.group_weights * conv.groups());
        for channel in 0..in_channels {
            let (group, ci) = (channel / group_in, channel % group_in);
            for block in &self.blocks {
                let from = &weight[(channel * group_out + block.start) * slots.len()..];
                let start = group * self.group_weights + group_in * slots.len() * block.start;
                for (tap, &(before, here, index)) in slots.iter().enumerate() {
                    let at = start + (before * group_in + ci * here + index) * block.width;
                    for (lane, to) in packed[at..][..block.count].iter_mut().enumerate() {
                        *to = from[lane * slots.len() + tap].to_acc();
                    }
                }
            }
        }
    }
}

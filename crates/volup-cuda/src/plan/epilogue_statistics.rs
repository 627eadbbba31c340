//! Planning statistics that `gather_gemm`, `halo_gemm` and `halo_sweep` take of what they write, for a group norm. The kernels' files say
//! what the numbers mean.

use super::epilogue::{SAVED, kernel};
use super::norm::Way;
use super::norm_behind;
use super::{
    Argument, Buffer, Context, Step, Workspace, activation_code, epilogue, gcd, grid, norm, product, push,
};
use volup::{Activation, DType, MemoryFormat, Result};

/// The most whole samples whose rows a tile may hold: it is gone through once for each.
const MOST_SAMPLES: usize = 2;
/// The most channels whose statistics are joined: lanes of a warp.
const MOST_JOINED: usize = 32;

/// How a product's rows are dealt out to warpgroups.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    /// Rows of a sample.
    pub(super) of_sample: usize,
    /// Rows of a tile.
    pub(super) of_tile: usize,
    /// Warpgroups of a tile.
    pub(super) warpgroups: usize,
    /// Tiles of each row.
    pub(super) phases: usize,
    /// Columns of a channel.
    pub(super) of_channel: usize,
}

impl Rows {
    /// Partials of a sample's channel in a phase, where a tile begins and ends anywhere in it.
    fn chunks(self) -> usize {
        (self.of_sample.div_ceil(self.of_tile) + 1) * self.warpgroups
    }

    /// Numbers of all partials of a channel.
    fn count(self, context: Context<'_>) -> Option<usize> {
        product(&[context.request.geometry.batch(), self.chunks(), self.phases])
    }

    /// Whether statistics may be taken so: of a block's normalization, where what comes before is straight; for training, which
    /// writes the convolution's output, where nothing or ReLU does, which rounds as what is written does.
    pub(super) fn count_for(self, context: Context<'_>) -> bool {
        let request = context.request;
        let [_, channels, ..] = request.geometry.output_shape();
        let before = match context.counted {
            Some(block) => matches!(block.activation(), None | Some(Activation::Relu)),
            None => activation_code(epilogue(&request.block)[0]).0 <= 2,
        };
        let partials =
            self.count(context).and_then(|count| product(&[count, channels / self.joined(context) + 1, 8]));
        let room = norm::room(norm::bytes(context));
        let fits = partials.is_some_and(|bytes| bytes as f64 <= room && bytes <= i32::MAX as usize);
        let merges = request.dtype != DType::F64 && kernel(context, "group_merge").is_ok();
        norm::counted(context).is_some()
            && before
            && merges
            && fits
            && self.of_sample * MOST_SAMPLES >= self.of_tile
    }

    /// Takes memory for them, if there are any: where the partials are, and what the product is told of them.
    pub(super) fn tell(
        self,
        context: Context<'_>,
        way: Way,
        workspace: &mut Workspace,
    ) -> Result<(Option<[u64; 2]>, Vec<Argument>)> {
        if way != Way::Counted {
            return Ok((None, Vec::new()));
        }
        let parts = self.take(context, workspace);
        Ok((Some(parts), self.arguments(context, parts)?))
    }

    /// The same, and what the product is told of the norm beside it, whose words are at an address, for so many warps.
    pub(super) fn tell_with_norm(
        self,
        context: Context<'_>,
        way: Way,
        words: Option<(u64, usize)>,
        workspace: &mut Workspace,
    ) -> Result<(Option<[u64; 2]>, Vec<Argument>)> {
        let (parts, mut arguments) = self.tell(context, way, workspace)?;
        if parts.is_some() {
            let channels = context.request.block.conv().out_channels();
            let groups = context.request.block.norm().map_or(1, |norm| norm.groups());
            let partials = self.chunks() * self.phases * channels / self.joined(context) / groups;
            arguments.extend(norm_behind::arguments(context, words, partials, workspace)?);
        }
        Ok((parts, arguments))
    }

    /// Launches what follows the product, and what does its work where that does not stand: of partials that were told of, if there are any,
    /// and of a norm `behind`.
    pub(super) fn finish(
        self,
        context: Context<'_>,
        parts: Option<[u64; 2]>,
        behind: bool,
        control: u64,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        match parts {
            Some(_) if behind => steps.push(norm_behind::guard(context, control)?),
            Some(parts) => self.merge_and_scale(context, parts, control, workspace, steps)?,
            None => {}
        }
        Ok(())
    }

    /// Takes memory for them: where the partials are, and their counts.
    fn take(self, context: Context<'_>, workspace: &mut Workspace) -> [u64; 2] {
        let channels = context.request.block.conv().out_channels();
        let count = self.count(context).expect("few enough");
        [workspace.take(8 * count * channels / self.joined(context)), workspace.take(4 * count)]
    }

    /// Channels whose statistics are one: of a group, a power of two whose columns lanes of a warp have side by side.
    fn joined(self, context: Context<'_>) -> usize {
        let conv = context.request.geometry.conv();
        let of_group = norm::counted(context).map_or(1, |norm| conv.out_channels() / norm.groups());
        let both = gcd(of_group, conv.out_channels() / conv.groups());
        (1 << both.trailing_zeros()).min(MOST_JOINED / self.of_channel)
    }

    /// What the product is told of them.
    fn arguments(self, context: Context<'_>, parts: [u64; 2]) -> Result<Vec<Argument>> {
        let mut arguments: Vec<_> = parts.map(|at| Argument::Pointer(Buffer::Workspace, at)).into();
        let channels = context.request.block.conv().out_channels();
        push(&mut arguments, [self.chunks(), self.phases, channels, self.joined(context)])?;
        arguments.push(relus(context).into());
        Ok(arguments)
    }

    /// Launches what merges them, or takes those of what the definition has written instead, and scales the output; for training
    /// they are saved.
    fn merge_and_scale(
        self,
        context: Context<'_>,
        [parts, counts]: [u64; 2],
        control: u64,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let request = context.request;
        let spec = norm::counted(context).expect("a normalization");
        let (groups, channels) = (spec.groups(), request.block.conv().out_channels());
        let samples = request.geometry.batch();
        let saves = context.counted.is_some();
        let merged = if saves { SAVED } else { norm::merged(context, spec, workspace) };
        let mut arguments = vec![Argument::Pointer(Buffer::Output, 0)];
        arguments.extend([parts, counts, control].map(|at| Argument::Pointer(Buffer::Workspace, at)));
        arguments.extend(merged);
        let joined = self.joined(context);
        push(&mut arguments, [groups, channels / groups, joined, self.chunks(), self.phases])?;
        push(
            &mut arguments,
            [self.of_sample, self.of_tile, self.warpgroups, request.geometry.output_voxels()],
        )?;
        let last = i32::from(request.output_format == MemoryFormat::ChannelsLast3d);
        arguments.extend([last.into(), relus(context).into(), Argument::F64(spec.eps())]);
        steps.push(Step::launch(kernel(context, "group_merge")?, grid(samples * groups)?, arguments));
        if saves { Ok(()) } else { norm::scale(context, spec, merged, true, steps) }
    }
}

/// Whether statistics are of the ReLU of what is written: for training.
fn relus(context: Context<'_>) -> i32 {
    i32::from(context.counted.is_some_and(|block| block.activation() == Some(Activation::Relu)))
}

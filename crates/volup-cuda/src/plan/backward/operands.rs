//! What a backward pass multiplies: the gradient of the convolution's output and the input by rows, and the weight as the
//! convolution of these rows takes it.

use super::super::epilogue::{self, NULL, Sums, kernel, norm_arguments, push_activations};
use super::super::rows::Rows;
use super::super::{Argument, Buffer, Step, Workspace, grid, int, push, size, strides};
use super::{ASKED, BLOCKS, Backward, LARGEST};
use volup::{DType, Precision, Result};

/// Elements of a block of `gradient_rows`.
const ELEMENTS: usize = 4096;

impl Backward<'_> {
    /// The launch that writes the gradient of the convolution's output, for the samples of a part.
    pub(super) fn gradient_rows(
        &self,
        control: u64,
        out: u64,
        terms: Argument,
        bounding: Option<Sums>,
    ) -> Result<Step> {
        let Rows { axes, groups, group_out, slots, .. } = &self.rows;
        let request = self.context.request;
        let block = &request.block;
        let y = if block.is_bare() { NULL } else { Argument::Pointer(Buffer::Convolution, 0) };
        let axes = axes.map(|axis| {
            [
                axis.axis.output,
                axis.rows,
                axis.classes,
                axis.axis.stride,
                axis.axis.padding,
                axis.axis.dilation,
            ]
        });
        let strides = strides(request.geometry.output_shape(), request.output_format);
        let channels = block.conv().out_channels();
        let [mean, rstd, gamma, beta] = norm_arguments(self.context);
        let mut arguments = vec![Argument::Pointer(Buffer::GradOutput, 0)];
        arguments.push(Argument::Pointer(Buffer::Workspace, out));
        self.push_bounds(bounding, &mut arguments);
        let of @ (_, kind) = epilogue::element(self.context);
        if kind == 1 {
            let asked = Argument::Pointer(Buffer::Workspace, control + ASKED[0]);
            arguments.push(if self.context.within { asked } else { NULL });
        }
        let word = if kind == 2 { ASKED[0] } else { LARGEST[1] };
        arguments.push(Argument::Pointer(Buffer::Workspace, control + word));
        arguments.extend([y, mean, rstd, terms, gamma, beta]);
        push(&mut arguments, [channels, epilogue::group_channels(self.context)])?;
        push_activations(self.context, &mut arguments);
        push(&mut arguments, [self.rounded(), *groups, *group_out, *slots])?;
        let mut layout = self.rows.layout(self.context.operand_bytes()).to_vec();
        layout.extend((kind == 2).then(|| Argument::I64(self.rows.elements() as i64)));
        self.rows_step(of, arguments, axes, channels, strides, &layout)
    }

    /// Whether rows are rounded to tf32, once for all that multiply them.
    fn rounded(&self) -> usize {
        let request = self.context.request;
        let tf32 = request.dtype == DType::F32 && request.precision == Precision::Tf32;
        usize::from(tf32 && self.context.halves == 0)
    }

    /// Writes the input, of a part and in its format, by rows, which have gaps where those of the gradient have more; returns where
    /// they are. Low parts, so many elements after the high ones, go to the second half of a row.
    pub(super) fn input_rows(
        &self,
        control: u64,
        input: Argument,
        low: usize,
        workspace: &mut Workspace,
        steps: &mut Vec<Step>,
    ) -> Result<u64> {
        let request = self.context.request;
        let element = self.context.operand_bytes();
        let bytes = self.rows.count * self.rows.x_pitch * element;
        let out = workspace.take(bytes);
        if self.rows.x_pitch != self.rows.groups * self.rows.group_in {
            steps.push(Step::Clear { at: out, words: bytes / 4 });
        }
        let axes = self.rows.axes.map(|axis| [axis.axis.input, axis.rows, 1, 1, 0, 1]);
        let strides = strides(request.geometry.input_shape(), request.input_format);
        let channels = request.block.conv().in_channels();
        let layout = [self.rows.x_pitch, 16 / element].map(|apart| Argument::I64(apart as i64));
        for part in 0..self.context.halves.max(1) {
            // What is fp16 already is what it is.
            let of = if self.context.halves > 0 { (vec!["f16"], 0) } else { epilogue::element(self.context) };
            let from = match input {
                Argument::Pointer(buffer, at) => {
                    Argument::Pointer(buffer, at + (part * low * element) as u64)
                }
                other => other,
            };
            let mut arguments = vec![from, Argument::Pointer(Buffer::Workspace, out + 8 * part as u64)];
            arguments.extend((of.1 == 1).then_some(NULL));
            arguments.push(Argument::Pointer(Buffer::Workspace, control + LARGEST[0]));
            arguments.extend([NULL; 6]);
            push(&mut arguments, [channels, channels, 0, 0])?;
            arguments.extend([Argument::F64(0.0); 2]);
            push(&mut arguments, [self.rounded(), 1, channels, self.rows.x_pitch])?;
            steps.push(self.rows_step(of, arguments, axes, channels, strides, &layout)?);
        }
        Ok(out)
    }

    /// The launch that writes rows that lie so, by a kernel for elements of a type and kind.
    fn rows_step(
        &self,
        (types, kind): epilogue::Element,
        mut arguments: Vec<Argument>,
        axes: [[usize; 6]; 3],
        channels: usize,
        strides: [usize; 5],
        layout: &[Argument],
    ) -> Result<Step> {
        let positions: usize = axes.iter().map(|[_, rows, classes, ..]| rows * classes).product();
        int(positions)?;
        push(&mut arguments, axes.into_iter().flatten())?;
        arguments.extend(strides.map(|stride| Argument::I64(stride as i64)));
        arguments.extend_from_slice(layout);
        let kernel =
            *self.context.narrowest("gradient_rows", &types, &[("KIND", kind)], "CHANNELS", channels)?;
        let of_block = size(&kernel, "CHANNELS");
        let tiles = positions.div_ceil(ELEMENTS / of_block) * channels.div_ceil(of_block);
        Ok(Step::launch(kernel, grid(self.rows.batch * tiles)?, arguments))
    }

    /// Elements of the weight as the convolution of the gradient's rows takes it.
    pub(super) fn input_weight_elements(&self) -> usize {
        let counts: usize = self.rows.axes.iter().map(|axis| axis.count).product();
        self.rows.pitch() * self.rows.group_in * counts
    }

    /// Writes it, scaled to make up for what scales the rows.
    pub(super) fn input_weight(
        &self,
        control: u64,
        weight: u64,
        bounding: Option<Sums>,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let (context, rows) = (self.context, &self.rows);
        let elements = self.input_weight_elements();
        let mut arguments = vec![Argument::Pointer(Buffer::Weight, 0)];
        arguments.push(Argument::Pointer(Buffer::Workspace, weight));
        self.push_bounds(bounding, &mut arguments);
        let word = if context.halves == 2 { ASKED[1] } else { LARGEST[2] };
        arguments.push(Argument::Pointer(Buffer::Workspace, control + word));
        push(&mut arguments, [rows.groups, rows.group_in, rows.group_out, rows.slots])?;
        for axis in rows.axes {
            push(&mut arguments, [axis.axis.kernel, axis.classes, axis.step, axis.count])?;
        }
        let blocks = elements.div_ceil(256).min(BLOCKS * context.device.multiprocessors);
        steps.push(Step::launch(kernel(context, "gradient_weight")?, grid(blocks)?, arguments));
        Ok(())
    }
}

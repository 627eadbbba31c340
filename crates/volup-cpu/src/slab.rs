//! The slab: what a task reads of the input, widened, in rows with zeros between them.

use crate::Storage;
use crate::buffer::Buffer;
use crate::forward::Forward;
use crate::plan::Task;
use volup::MemoryFormat;
use volup::phases::Tap;

/// A task's copy of the input: `[channel][plane][row]` at a pitch.
pub(crate) struct Slab<'a> {
    pub task: &'a Task,
    /// Elements from one row to the next.
    pub pitch: usize,
    /// Elements from one channel to the next.
    pub channel: usize,
    /// Input plane of each plane.
    planes: Vec<usize>,
    /// Input row of each row; `None` for zeros outside of the input.
    rows: Vec<Option<usize>>,
    /// First position along the height, and the largest offset there.
    height: (usize, usize),
    /// The largest offset along the width.
    width_offset: usize,
}

impl Slab<'_> {
    /// The plane that a tap reads at a position; `None` if it lies outside of the input.
    pub fn plane(&self, position: usize, tap: &Tap) -> Option<usize> {
        self.planes.binary_search(&position.checked_sub(tap.offset)?).ok()
    }

    /// The row that a tap reads at a position; `None` if it lies outside of the input and no other
    /// position of the task needs zeros there.
    pub fn row(&self, position: usize, tap: &Tap) -> Option<usize> {
        if self.task.positions[1].len() == 1 {
            let input = position.checked_sub(tap.offset)?;
            return self.rows.iter().position(|&row| row == Some(input));
        }
        let (first, offset) = self.height;
        Some(position - first + offset - tap.offset)
    }

    /// Whether a row holds input, not zeros.
    pub fn row_is_inside(&self, row: usize) -> bool {
        self.rows[row].is_some()
    }

    /// Elements from the start of a channel to what a tap reads of a plane and row at the task's
    /// first position along the width.
    pub fn at(&self, plane: usize, row: usize, tap: &Tap) -> usize {
        (plane * self.rows.len() + row) * self.pitch + self.width_offset - tap.offset
    }
}

impl<T: Storage> Forward<'_, T> {
    /// Copies what a task reads.
    pub(crate) fn fill_slab<'t>(&self, task: &'t Task, buffer: &mut Buffer) -> Slab<'t> {
        let [axis_d, axis_h, axis_w] = &self.plan.axes;
        let [d, h, w] = &task.positions;
        let pitch = self.plan.pitch(w);
        let planes: Vec<usize> = axis_d.inputs(d).into_iter().flatten().collect();
        let rows = axis_h.inputs(h);
        // The last row reads on past its end as every row does. An odd number of cache lines keeps
        // channels from falling into the same cache sets.
        let line = Buffer::line::<T::Acc>();
        let lines = (planes.len() * rows.len() * pitch + w.len() + axis_w.reach()).div_ceil(line);
        let slab = Slab {
            task,
            pitch,
            channel: (lines | 1) * line,
            planes,
            rows,
            height: (h.start, axis_h.offsets.1),
            width_offset: axis_w.offsets.1,
        };

        let conv = self.plan.geometry.conv();
        let group_in = conv.in_channels() / conv.groups();
        // A kernel reads whole vectors, at most a register tile past the last position.
        let memory = buffer.get::<T::Acc>(group_in * slab.channel + 8 * self.kernels.lanes);
        memory.fill(T::Acc::default());
        // Column c of a row holds input first + c.
        let first = w.start as isize - axis_w.offsets.1 as isize;
        let (left, from) = (first.min(0).unsigned_abs(), first.max(0) as usize);
        let len = axis_w.axis.input.saturating_sub(from).min(pitch.saturating_sub(left));
        let [_, channels, depth, height, width] = self.plan.geometry.input_shape();
        let channel = task.group * group_in;
        // Rows in the order of memory, which is read ahead then.
        let rows = slab.planes.iter().enumerate().flat_map(|(plane, input_plane)| {
            let rows = slab.rows.iter().enumerate();
            rows.filter_map(move |(row, input_row)| {
                input_row.map(|input_row| (plane, row, input_plane * height + input_row))
            })
        });
        let at = |plane: usize, row: usize| (plane * slab.rows.len() + row) * pitch + left;
        match self.input_format {
            MemoryFormat::Contiguous => {
                for (ci, memory) in memory.chunks_exact_mut(slab.channel).take(group_in).enumerate() {
                    let volume = (task.sample * channels + channel + ci) * depth * height;
                    for (plane, row, input_row) in rows.clone() {
                        let from = (volume + input_row) * width + from;
                        T::widen(&self.input[from..][..len], &mut memory[at(plane, row)..][..len]);
                    }
                }
            }
            MemoryFormat::ChannelsLast3d => {
                for (plane, row, input_row) in rows {
                    let input_row = task.sample * depth * height + input_row;
                    let to = at(plane, row);
                    for column in 0..len {
                        let voxel = (input_row * width + from + column) * channels + channel;
                        for (ci, value) in self.input[voxel..][..group_in].iter().enumerate() {
                            memory[ci * slab.channel + to + column] = value.to_acc();
                        }
                    }
                }
            }
        }
        slab
    }
}

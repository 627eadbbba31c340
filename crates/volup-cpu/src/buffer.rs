//! Scratch memory whose start lies on a cache line, reused from task to task.

use volup::Element;

/// One cache line.
#[derive(Clone, Copy, Default, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// A growing buffer; its contents are whatever was written last.
#[derive(Default)]
pub(crate) struct Buffer(Vec<Line>);

impl Buffer {
    /// Elements of `T` in a cache line.
    pub fn line<T>() -> usize {
        size_of::<Line>() / size_of::<T>()
    }

    /// The first `len` elements.
    pub fn get<T: Element>(&mut self, len: usize) -> &mut [T] {
        let lines = len.div_ceil(Buffer::line::<T>());
        if self.0.len() < lines {
            self.0.resize(lines, Line::default());
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }

    /// All elements.
    pub fn as_slice<T: Element>(&self) -> &[T] {
        bytemuck::cast_slice(&self.0)
    }
}

//! Memory: scratch whose start lies on a cache line, reused from task to task, and the advice that
//! the system gets about large outputs.

use volup::Element;

/// One cache line.
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// A growing buffer; its contents are zeros where it is new, else whatever was written last.
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
            // From the system, already zero, where it is large: touched once, by who writes it.
            self.0 = bytemuck::zeroed_vec(lines);
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }

    /// All elements.
    pub fn as_slice<T: Element>(&self) -> &[T] {
        bytemuck::cast_slice(&self.0)
    }
}

/// Asks for huge pages under a large buffer that is about to be written for the first time.
///
/// Fresh memory costs a page fault for every page that is touched. With pages of 4 KiB that takes as
/// long as computing, on shapes whose output is large beside the arithmetic. Where the system does
/// not want to be asked, nothing changes.
pub(crate) fn advise_huge_pages<T>(memory: &mut [std::mem::MaybeUninit<T>]) {
    #[cfg(target_os = "linux")]
    {
        const HUGE: usize = 2 << 20;
        let bytes = size_of_val(memory);
        let start = memory.as_mut_ptr().cast::<u8>();
        let skip = start.align_offset(HUGE);
        if bytes >= 2 * HUGE && skip < bytes {
            let len = (bytes - skip) / HUGE * HUGE;
            // SAFETY: the range lies within the buffer, and the advice changes no contents. That it
            // may be refused is why the result does not matter.
            unsafe { libc::madvise(start.add(skip).cast(), len, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}

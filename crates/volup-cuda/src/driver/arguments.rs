//! A kernel's arguments.

use std::ffi::c_void;

/// The most arguments that a kernel takes.
const MOST: usize = 160;

/// The arguments of a launch in order, on the stack: nothing is allocated.
#[derive(Clone, Debug)]
pub struct Arguments {
    slots: [u64; MOST],
    count: usize,
}

// The driver reads an argument of 4 bytes from the first 4 of its slot.
const _: () = assert!(cfg!(target_endian = "little"));

impl Arguments {
    /// The most that there may be; tests hold all plans to it.
    pub const MOST: usize = MOST;

    /// No arguments yet.
    #[inline]
    pub fn new() -> Arguments {
        Arguments { slots: [0; MOST], count: 0 }
    }

    /// Adds a device address.
    ///
    /// # Panics
    /// Here and below: at one more argument than there are slots.
    #[inline]
    pub fn pointer(&mut self, address: u64) -> &mut Arguments {
        self.slots[self.count] = address;
        self.count += 1;
        self
    }

    /// Adds a 32-bit integer.
    #[inline]
    pub fn i32(&mut self, value: i32) -> &mut Arguments {
        self.pointer(u64::from(value.cast_unsigned()))
    }

    /// Adds a 64-bit integer.
    #[inline]
    pub fn i64(&mut self, value: i64) -> &mut Arguments {
        self.pointer(value.cast_unsigned())
    }

    /// Adds a single-precision number.
    #[inline]
    pub fn f32(&mut self, value: f32) -> &mut Arguments {
        self.pointer(u64::from(value.to_bits()))
    }

    /// Adds a double-precision number.
    #[inline]
    pub fn f64(&mut self, value: f64) -> &mut Arguments {
        self.pointer(value.to_bits())
    }

    /// Puts a device address in place of the argument of a number.
    ///
    /// # Panics
    /// If there is no such argument.
    #[inline]
    pub fn set_pointer(&mut self, slot: usize, address: u64) {
        self.slots[..self.count][slot] = address;
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Calls `f` with the address of each argument, which only reads are made through.
    #[inline]
    pub(super) fn with_addresses<R>(&self, f: impl FnOnce(&mut [*mut c_void]) -> R) -> R {
        let mut addresses = [std::ptr::null_mut(); MOST];
        let addresses = &mut addresses[..self.count];
        for (address, slot) in addresses.iter_mut().zip(&self.slots) {
            *address = std::ptr::from_ref(slot).cast_mut().cast();
        }
        f(addresses)
    }
}

impl Default for Arguments {
    fn default() -> Arguments {
        Arguments::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_lie_as_the_driver_reads_them() {
        let mut arguments = Arguments::new();
        assert!(arguments.is_empty());
        arguments.pointer(0x7f00_1234_5678).i32(-2).i64(-3).f32(1.5).f64(-0.25);
        assert_eq!(arguments.len(), 5);
        arguments.with_addresses(|addresses| {
            assert_eq!(addresses.len(), 5);
            // SAFETY: each is the address of a slot of 8 bytes, written as the type that is read.
            unsafe {
                assert_eq!(addresses[0].cast::<u64>().read(), 0x7f00_1234_5678);
                assert_eq!(addresses[1].cast::<i32>().read(), -2);
                assert_eq!(addresses[2].cast::<i64>().read(), -3);
                assert_eq!(addresses[3].cast::<f32>().read(), 1.5);
                assert_eq!(addresses[4].cast::<f64>().read(), -0.25);
            }
        });
    }

    #[test]
    #[should_panic(expected = "index out of bounds")]
    fn there_are_160_at_most() {
        let mut arguments = Arguments::new();
        (0..161).for_each(|value| _ = arguments.i32(value));
    }
}

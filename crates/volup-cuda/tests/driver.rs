//! Memory, streams and launches on a real device, with a kernel of its own.

mod gpu;
#[path = "gpu/ptx.rs"]
mod ptx;

use std::sync::Arc;
use volup::Error;
use volup_cuda::{Arguments, Cubin, Device, DeviceMemory, Stream, Variant, launch};

/// Each block writes its number plus the integers, and both floating-point numbers, to 32 bytes of its
/// own. The driver compiles this text for whatever device there is.
const STORE: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry store(
    .param .u64 out, .param .s32 a, .param .s64 b, .param .f32 c, .param .f64 d
) {
    .reg .u32 %block;
    .reg .s32 %a;
    .reg .s64 %b, %sum;
    .reg .u64 %out, %at;
    .reg .f32 %c;
    .reg .f64 %d;
    ld.param.u64 %out, [out];
    cvta.to.global.u64 %out, %out;
    mov.u32 %block, %ctaid.x;
    mul.wide.u32 %at, %block, 32;
    add.u64 %out, %out, %at;
    ld.param.s32 %a, [a];
    cvt.s64.s32 %sum, %a;
    ld.param.s64 %b, [b];
    add.s64 %sum, %sum, %b;
    cvt.s64.u32 %b, %block;
    add.s64 %sum, %sum, %b;
    st.global.s64 [%out], %sum;
    ld.param.f32 %c, [c];
    cvt.f64.f32 %d, %c;
    st.global.f64 [%out+8], %d;
    ld.param.f64 %d, [d];
    st.global.f64 [%out+16], %d;
    ret;
}
\0";

fn variant(name: &'static str, entry: &'static str) -> Variant {
    ptx::variant(STORE, name, entry, 1)
}

fn stream() -> Option<Arc<Stream>> {
    let device = gpu::or_skip(Device::open(0))?;
    Some(Arc::new(Stream::new(&device).unwrap()))
}

#[test]
fn a_device_is_opened_once() {
    let Some(device) = gpu::or_skip(Device::open(0)) else { return };
    assert!(Arc::ptr_eq(&device, &Device::open(0).unwrap()));
    let info = device.info();
    println!("{info}");
    assert!(
        info.multiprocessors > 0
            && info.l2_bytes > 0
            && info.memory_bytes > 0
            && info.memory_rate > 0
            && !info.name.is_empty()
    );
    assert_eq!(&volup_cuda::devices().unwrap()[0], info);
}

#[test]
fn memory_comes_back_as_it_went() {
    let Some(stream) = stream() else { return };
    let values: Vec<u8> = (0..1000).map(|value| (value % 251) as u8).collect();
    let memory = DeviceMemory::of(&stream, &values).unwrap();
    let mut back = vec![0; 1000];
    memory.copy_to(&mut back).unwrap();
    assert_eq!(back, values);
    // SAFETY: words 1 and 2 of 250, which nothing else uses.
    unsafe { stream.fill(memory.address() + 4, 0x0102_0304, 2) }.unwrap();
    memory.copy_to(&mut back).unwrap();
    assert_eq!(back[4..12], [4, 3, 2, 1, 4, 3, 2, 1]);
    assert_eq!((&back[..4], &back[12..]), (&values[..4], &values[12..]));
    let error = memory.copy_to(&mut back[1..]).unwrap_err();
    assert!(matches!(error, Error::Length { got: 999, expected: 1000, .. }));
    DeviceMemory::new(&stream, 0).unwrap().copy_to(&mut []).unwrap();
}

#[test]
fn too_much_memory_is_refused_and_the_stream_goes_on() {
    let Some(stream) = stream() else { return };
    let error = DeviceMemory::new(&stream, 1 << 46).unwrap_err();
    assert!(matches!(error, Error::OutOfDeviceMemory { bytes: 0x4000_0000_0000 }), "{error}");
    DeviceMemory::of(&stream, &[1; 64]).unwrap().copy_to(&mut [0; 64]).unwrap();
}

/// On the stream of the engine's kind and on the legacy default stream, from any thread.
#[test]
fn a_kernel_gets_its_arguments() {
    let Some(own) = stream() else { return };
    let device = own.device().clone();
    // SAFETY: the legacy default stream is always there.
    let default = Arc::new(unsafe { Stream::borrowed(&device, 0) });
    for stream in [own, default] {
        let device = device.clone();
        let run = move || {
            let kernel = device.kernel(&variant("store", "store")).unwrap();
            assert_eq!(device.kernel(&variant("store", "store")).unwrap(), kernel);
            let memory = DeviceMemory::new(&stream, 3 * 32).unwrap();
            let mut arguments = Arguments::new();
            arguments.pointer(memory.address()).i32(-7).i64(1 << 40).f32(1.5).f64(-0.1);
            // SAFETY: three blocks of 32 bytes each, the arguments as `STORE` declares them.
            unsafe { launch(kernel, [3, 1, 1], &arguments, &stream, false) }.unwrap();
            let mut back = [0; 3 * 32];
            memory.copy_to(&mut back).unwrap();
            for (block, bytes) in back.chunks(32).enumerate() {
                let word = |at: usize| <[u8; 8]>::try_from(&bytes[at..at + 8]).unwrap();
                assert_eq!(i64::from_le_bytes(word(0)), (1 << 40) - 7 + block as i64);
                assert_eq!(f64::from_le_bytes(word(8)), 1.5);
                assert_eq!(f64::from_le_bytes(word(16)), -0.1);
            }
        };
        std::thread::spawn(run).join().unwrap();
    }
}

#[test]
fn an_entry_that_is_not_there_is_named() {
    let Some(device) = gpu::or_skip(Device::open(0)) else { return };
    let error = device.kernel(&variant("lost", "no_such_entry")).unwrap_err();
    assert!(matches!(&error, Error::MissingKernel { name, .. } if name == "lost"), "{error}");
    let empty = Variant { cubin: Cubin::NONE, ..variant("empty", "store") };
    assert!(matches!(device.kernel(&empty), Err(Error::MissingKernel { .. })));
}

#[test]
fn the_callers_context_is_left_alone() {
    let Some(stream) = stream() else { return };
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is started; it puts the context into `context`.
        unsafe { cudarc::driver::sys::cuCtxGetCurrent(&mut context) }.result().unwrap();
        context
    };
    // A new thread has none.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(current().is_null());
            stream.synchronize().unwrap();
            assert!(current().is_null());
            let entered = stream.device().enter().unwrap();
            let ours = current();
            assert!(!ours.is_null());
            drop(stream.device().enter().unwrap());
            assert_eq!(current(), ours);
            drop(entered);
            assert!(current().is_null());
        });
    });
}

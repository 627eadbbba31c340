//! Launches one after another as one graph: they cost the host less than a single one of them alone does.

use super::{Arguments, Device, Kernel, RelaxedCapture, Stream, call};
use cudarc::driver::sys;
use std::ptr::null_mut;
use std::sync::Arc;
use volup::Result;

/// A kernel with its grid and its arguments.
pub type Launch<'a> = (Kernel, [u32; 3], &'a Arguments);

/// Launches in the order in which they were given, of which the arguments may change.
#[derive(Debug)]
pub struct Graph {
    device: Arc<Device>,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
    nodes: Vec<sys::CUgraphNode>,
}

// SAFETY: the driver's handles are not tied to a thread; they are used by whoever has the graph to itself.
unsafe impl Send for Graph {}

impl Graph {
    /// Works while a stream of this thread is being captured into a graph.
    ///
    /// # Errors
    /// [`Error::Cuda`](volup::Error::Cuda).
    ///
    /// # Safety
    /// The kernels were loaded by the device, and the arguments are of the number and types that they take.
    pub unsafe fn new<'a>(device: &Arc<Device>, launches: impl Iterator<Item = Launch<'a>>) -> Result<Graph> {
        let _entered = device.enter()?;
        let _relaxed = RelaxedCapture::begin()?;
        let mut made =
            Graph { device: device.clone(), graph: null_mut(), executable: null_mut(), nodes: Vec::new() };
        // SAFETY: `graph` receives the handle.
        unsafe { call!(cuGraphCreate(&mut made.graph, 0)) }?;
        for launch in launches {
            let before = made.nodes.last().copied();
            let mut node = null_mut();
            with_parameters(launch, |parameters| {
                let (first, count) = (
                    before.as_ref().map_or(null_mut(), |b| std::ptr::from_ref(b).cast_mut()),
                    before.iter().count(),
                );
                // SAFETY: the node before is of this graph; the driver copies the parameters and what they point to.
                unsafe { call!(cuGraphAddKernelNode_v2(&mut node, made.graph, first, count, parameters)) }
            })?;
            made.nodes.push(node);
        }
        // SAFETY: a whole graph of this context; `executable` receives the handle.
        unsafe { call!(cuGraphInstantiateWithFlags(&mut made.executable, made.graph, 0)) }?;
        Ok(made)
    }

    /// Launches all of them, in their order and with these arguments.
    ///
    /// # Errors
    /// As [`launch`](super::launch).
    ///
    /// # Safety
    /// As [`launch`](super::launch) of each, on a stream of the graph's device that is not being captured. They differ
    /// from those of [`Graph::new`] in the arguments alone.
    pub unsafe fn launch<'a>(
        &mut self,
        launches: impl Iterator<Item = Launch<'a>>,
        stream: &Stream,
    ) -> Result<()> {
        let _entered = self.device.enter()?;
        for (&node, launch) in std::iter::zip(&self.nodes, launches) {
            with_parameters(launch, |parameters| {
                // SAFETY: a node of the graph that was made executable; launches under way keep what they have.
                unsafe { call!(cuGraphExecKernelNodeSetParams_v2(self.executable, node, parameters)) }
            })?;
        }
        // SAFETY: the caller answers for the kernels and their arguments.
        unsafe { call!(cuGraphLaunch(self.executable, stream.handle())) }
    }
}

fn with_parameters<R>(
    (kernel, [x, y, z], arguments): Launch<'_>,
    f: impl FnOnce(&sys::CUDA_KERNEL_NODE_PARAMS) -> R,
) -> R {
    arguments.with_addresses(|addresses| {
        f(&sys::CUDA_KERNEL_NODE_PARAMS {
            func: kernel.function,
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: kernel.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: kernel.shared,
            kernelParams: addresses.as_mut_ptr(),
            extra: null_mut(),
            kern: null_mut(),
            ctx: null_mut(),
        })
    })
}

impl Drop for Graph {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter() else { return };
        // SAFETY: both are ours. What is under way is finished first; an error leaves nothing to do.
        unsafe {
            if !self.executable.is_null() {
                sys::cuGraphExecDestroy(self.executable);
            }
            if !self.graph.is_null() {
                sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

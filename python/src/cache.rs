//! Packed parameters that are kept from call to call.

use pyo3::prelude::*;
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};
use volup::{BlockSpec, Result};
use volup_cpu::{CpuLayer, ParametersRef, Storage};

/// What a weight was packed into last, for as long as Python keeps this.
///
/// PyTorch cannot tell whether a tensor has changed: writes through `.data`, NumPy or another
/// process pass by its version counter. So the values that were packed are kept too, and compared
/// with those at hand. That reads memory twice, where packing reads it once, but shuffles it.
#[pyclass(frozen, module = "volup._native")]
#[derive(Default)]
pub(crate) struct Cache {
    // Locked to look and to replace, not while computing.
    packed: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
}

#[pymethods]
impl Cache {
    #[new]
    fn new() -> Cache {
        Cache::default()
    }
}

impl Cache {
    /// The packed form of a block's parameters: the one kept, if it is of the same block and the
    /// same values, else a new one, which is kept from then on.
    pub(crate) fn layer<T: Storage>(
        &self,
        spec: &BlockSpec,
        parameters: ParametersRef<'_, T>,
    ) -> Result<Arc<Packed<T>>> {
        let kept = self.packed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(packed) = kept.and_then(|kept| kept.downcast::<Packed<T>>().ok())
            && packed.is_of(spec, &parameters)
        {
            return Ok(packed);
        }
        let packed = Arc::new(Packed::new(spec, parameters)?);
        *self.packed.lock().unwrap_or_else(PoisonError::into_inner) = Some(packed.clone());
        Ok(packed)
    }
}

/// A packed layer and what it was packed from.
pub(crate) struct Packed<T: Storage> {
    pub(crate) layer: CpuLayer<T>,
    spec: BlockSpec,
    source: [Option<Vec<T>>; 4],
}

impl<T: Storage> Packed<T> {
    fn new(spec: &BlockSpec, parameters: ParametersRef<'_, T>) -> Result<Packed<T>> {
        let source = tensors(&parameters).map(|tensor| tensor.map(<[T]>::to_vec));
        Ok(Packed { layer: CpuLayer::new(spec, parameters)?, spec: *spec, source })
    }

    fn is_of(&self, spec: &BlockSpec, parameters: &ParametersRef<'_, T>) -> bool {
        // Bytes, so that a NaN is the same as itself and 0 is not -0.
        let same = |(kept, given): (&Option<Vec<T>>, Option<&[T]>)| match (kept, given) {
            (Some(kept), Some(given)) => {
                bytemuck::cast_slice::<T, u8>(kept) == bytemuck::cast_slice::<T, u8>(given)
            }
            (None, None) => true,
            _ => false,
        };
        self.spec == *spec && self.source.iter().zip(tensors(parameters)).all(same)
    }
}

fn tensors<'a, T>(parameters: &ParametersRef<'a, T>) -> [Option<&'a [T]>; 4] {
    [Some(parameters.weight), parameters.bias, parameters.norm_weight, parameters.norm_bias]
}

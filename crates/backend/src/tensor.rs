use std::any::Any;
use std::fmt;

use fusionllm_graph::TensorType;

/// A tensor on a backend's device. Clones share its memory. Only that backend can read it.
pub struct Tensor {
    ty: TensorType,
    data: Box<dyn Storage>,
}

trait Storage: Send + Sync {
    fn duplicate(&self) -> Box<dyn Storage>;
    fn as_any(&self) -> &dyn Any;
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<T: Clone + Send + Sync + 'static> Storage for T {
    fn duplicate(&self) -> Box<dyn Storage> {
        Box::new(self.clone())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl Tensor {
    /// Wraps a framework's tensor. Its clones must share memory.
    pub fn new(ty: TensorType, data: impl Clone + Send + Sync + 'static) -> Self {
        Self { ty, data: Box::new(data) }
    }

    /// Element type and shape.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// The framework's tensor, or `None` if it belongs to another framework.
    pub fn get<T: 'static>(&self) -> Option<&T> {
        (*self.data).as_any().downcast_ref()
    }

    /// The framework's tensor by value, so that its sole owner can reuse the memory.
    pub fn into_inner<T: 'static>(self) -> Option<T> {
        self.data.into_any().downcast().ok().map(|b| *b)
    }
}

impl Clone for Tensor {
    fn clone(&self) -> Self {
        Self { ty: self.ty.clone(), data: (*self.data).duplicate() }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({})", self.ty)
    }
}

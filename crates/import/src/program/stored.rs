//! Inputs of the graph: those of the user, and the parameters, buffers and constants that the archive stores.

use std::collections::{BTreeSet, HashMap};

use fusionllm_graph::{DType, Init, TensorType};

use super::Import;
use crate::ImportError;
use crate::archive::StoredTensor;
use crate::call::{Item, Names};
use crate::context::{TensorId, Value};
use crate::schema::{Argument, InputSpec, SymInt};

/// The parameters and buffers of each member of the archive. Those with the same content are one tensor.
type Owners = HashMap<String, Vec<Owner>>;

struct Owner {
    stored: StoredTensor,
    name: String,
    tensor: TensorId,
    kind: Kind,
}

/// The way in which the content of a stored tensor changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Training updates it.
    Parameter,
    /// The forward pass updates it.
    Updated,
    Constant,
}

impl Import<'_> {
    /// Adds inputs, parameters, buffers and constants.
    pub(super) fn inputs(&mut self, updated: &BTreeSet<String>, names: &mut Names) -> Result<(), ImportError> {
        let mut owners = Owners::new();
        for spec in &self.program.signature.input_specs {
            let (name, item) = match spec {
                InputSpec::UserInput { arg: Argument::AsTensor(t) } => {
                    let ty = self.declared_type(&t.name).map_err(|r| self.model_error(r))?;
                    let id = self.cx.builder.input(&t.name, ty.dtype, ty.shape).map_err(|e| self.graph_error(e))?;
                    (&t.name, Item::Tensor(self.cx.new_tensor(Value::Node(id))))
                }
                InputSpec::UserInput { arg: Argument::AsSymInt(SymInt::AsName(n)) } => {
                    return Err(
                        self.model_error(format!("its input {n:?} is a number; only tensors are supported").into())
                    );
                }
                InputSpec::Parameter { arg, parameter_name } => {
                    (&arg.name, Item::Tensor(self.parameter(parameter_name, &mut owners)?))
                }
                InputSpec::Buffer { arg, buffer_name } => {
                    (&arg.name, Item::Tensor(self.buffer(buffer_name, updated.contains(buffer_name), &mut owners)?))
                }
                InputSpec::TensorConstant { arg, tensor_constant_name } => {
                    (&arg.name, Item::Tensor(self.constant(tensor_constant_name, &mut owners)?))
                }
                InputSpec::ConstantInput { name } => (name, Item::Unused),
                _ => continue,
            };
            names.insert(name.clone(), item);
        }
        self.tie_other_names(&owners);
        Ok(())
    }

    /// Ties the names of a tensor of which the graph knows only one. Export in strict mode writes such graphs.
    fn tie_other_names(&mut self, owners: &Owners) {
        for (name, stored) in &self.archive.weights {
            let known = self.tensors.contains_key(name) || self.tied.contains_key(name);
            let sharing = owners.get(&stored.member).filter(|_| !known).into_iter().flatten();
            if let Some(same) = sharing.into_iter().find(|o| o.stored == *stored && o.kind != Kind::Constant) {
                self.tied.insert(name.clone(), same.name.clone());
            }
        }
    }

    fn stored(&self, name: &str) -> Result<StoredTensor, ImportError> {
        let found = self.archive.weights.get(name).or_else(|| self.archive.constants.get(name));
        found.cloned().ok_or_else(|| self.model_error(format!("the archive has no tensor {name:?}").into()))
    }

    fn type_of(&self, stored: &StoredTensor) -> Result<TensorType, ImportError> {
        let ty = stored.ty().map_err(|r| self.archive.damaged(&stored.member, r))?;
        let dtype = if ty.dtype == DType::F32 { self.cx.single } else { ty.dtype };
        Ok(TensorType::new(dtype, ty.shape))
    }

    /// The tensor of the same content that was added before, if there is one.
    fn shared(
        &mut self,
        name: &str,
        stored: &StoredTensor,
        kind: Kind,
        owners: &Owners,
    ) -> Result<Option<TensorId>, ImportError> {
        let Some(sharing) = owners.get(&stored.member) else { return Ok(None) };
        if let Some(same) = sharing.iter().find(|o| o.stored == *stored && o.kind == kind) {
            if kind != Kind::Constant {
                self.tied.insert(name.into(), same.name.clone());
            }
            return Ok(Some(same.tensor));
        }
        match sharing.iter().find(|o| o.kind != Kind::Constant || kind != Kind::Constant) {
            Some(other) => Err(self.model_error(
                format!(
                    "{:?} and {name:?} share memory and one of them is updated, which is not supported",
                    other.name
                )
                .into(),
            )),
            None => Ok(None),
        }
    }

    fn parameter(&mut self, name: &str, owners: &mut Owners) -> Result<TensorId, ImportError> {
        let stored = self.stored(name)?;
        let ty = self.type_of(&stored)?;
        if !ty.dtype.is_float() || !stored.requires_grad {
            // A frozen parameter changes only if the forward pass overwrites it.
            return self.stored_node(name, stored, Kind::Updated, owners);
        }
        let tensor = self.stored_node(name, stored, Kind::Parameter, owners)?;
        let owner = format!("the parameter {name:?}, which is not supported; overwrite a copy (`clone`)");
        self.cx.fix(tensor, owner);
        Ok(tensor)
    }

    /// Adds a parameter or buffer that the graph reads and may update.
    fn stored_node(
        &mut self,
        name: &str,
        stored: StoredTensor,
        kind: Kind,
        owners: &mut Owners,
    ) -> Result<TensorId, ImportError> {
        if let Some(tensor) = self.shared(name, &stored, kind, owners)? {
            return Ok(tensor);
        }
        let TensorType { dtype, shape } = self.type_of(&stored)?;
        let unset = Init::Constant(0.0);
        let id = match kind {
            Kind::Parameter => self.cx.builder.parameter(name, dtype, shape, unset),
            Kind::Updated | Kind::Constant => self.cx.builder.buffer(name, dtype, shape, unset),
        };
        let id = id.map_err(|e| self.graph_error(e))?;
        let tensor = self.cx.new_tensor(Value::Node(id));
        if kind != Kind::Parameter {
            self.state.insert(name.into(), (tensor, id));
        }
        self.tensors.insert(name.into(), (stored.clone(), dtype));
        owners.entry(stored.member.clone()).or_default().push(Owner { stored, name: name.into(), tensor, kind });
        Ok(tensor)
    }

    /// Adds a buffer. A buffer that is never updated becomes a constant, unless it is too large.
    fn buffer(&mut self, name: &str, updated: bool, owners: &mut Owners) -> Result<TensorId, ImportError> {
        let stored = self.stored(name)?;
        let ty = self.type_of(&stored)?;
        if updated || ty.bytes() > crate::context::MAX_CONSTANT_BYTES {
            return self.stored_node(name, stored, Kind::Updated, owners);
        }
        let tensor = match self.shared(name, &stored, Kind::Constant, owners)? {
            Some(tensor) => tensor,
            None => {
                let content = self.archive.tensor(&stored)?.cast(ty.dtype).map_err(|e| self.graph_error(e))?;
                let value = self.cx.stored_constant(content);
                let (tensor, kind) = (self.cx.new_tensor(value), Kind::Constant);
                let owner = Owner { stored, name: name.into(), tensor, kind };
                owners.entry(owner.stored.member.clone()).or_default().push(owner);
                tensor
            }
        };
        self.constants.insert(name.into(), tensor);
        Ok(tensor)
    }

    /// Adds a tensor that the module keeps, but not as a buffer.
    fn constant(&mut self, name: &str, owners: &mut Owners) -> Result<TensorId, ImportError> {
        // A tensor without a name comes from a tensor that `torch.export` could not trace, and the archive may lack its
        // content.
        let untraced = format!("{name:?}, which torch.export took for a constant, as it does with `x.data`");
        let lifted = name.starts_with("lifted_tensor_");
        let tensor = match self.buffer(name, false, owners) {
            Err(ImportError::Damaged { .. }) if lifted => {
                let reason = format!("the archive lacks the content of {untraced}; use `x.detach()` instead");
                return Err(self.model_error(reason.into()));
            }
            tensor => tensor?,
        };
        let owner = match lifted {
            true => format!("{untraced}; write to `x.detach()` instead"),
            false => format!(
                "the tensor {name:?}, and PyTorch keeps the change from pass to pass; make it a buffer \
                 (`register_buffer`), or overwrite a copy (`clone`)"
            ),
        };
        self.cx.fix(tensor, owner);
        Ok(tensor)
    }
}

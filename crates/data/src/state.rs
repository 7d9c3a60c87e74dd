//! A file of weights as the state of a model: what it holds, under which names, and what it lacks.

use std::borrow::Cow;
use std::collections::BTreeSet;

use fusionllm_graph::{DType, GraphError, HostTensor, StateTensor, TensorType};
use safetensors::tensor::Dtype;

use crate::weights::{Weights, WeightsError};

/// The differences between a file of weights and the state of a model that it fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Differences {
    /// The tensors that the file lacks, by the first of their names, sorted.
    pub missing: Vec<String>,
    /// The tensors that the model has no place for, sorted.
    pub extra: Vec<String>,
}

/// The prefix that names of the bare GPT-2 lack.
const BARE: &str = "transformer.";

/// Batch norm's count of batches in PyTorch. No result depends on it, so files may have it or not.
const COUNT_OF_BATCHES: &str = "num_batches_tracked";

/// Whether a name is that of batch norm's count of batches.
fn is_count_of_batches(name: &str) -> bool {
    name.rsplit('.').next() == Some(COUNT_OF_BATCHES)
}

const HINT: &str = "[model] must have the settings of the model that the weights come from";

impl Weights {
    /// Compares the file with the state of a model.
    ///
    /// # Errors
    ///
    /// The file is one of another model: it lacks a parameter that is trained, has a tensor in another shape, or has
    /// two contents for one tied tensor. Or it can no longer be read.
    pub fn compare(&self, state: &[StateTensor]) -> Result<Differences, WeightsError> {
        let (mut read, mut missing, mut lacking) = (BTreeSet::new(), Vec::new(), Vec::new());
        for tensor in state {
            let stored: Vec<&str> = self.stored_names(tensor).collect();
            for name in &stored {
                self.check_type(name, &tensor.ty)?;
            }
            self.check_equal(&stored, &tensor.ty)?;
            match &tensor.names[..] {
                [name, ..] if stored.is_empty() && tensor.trained => lacking.push(name.as_str()),
                [name, ..] if stored.is_empty() && !is_count_of_batches(name) => missing.push(name.clone()),
                _ => read.extend(stored),
            }
        }
        if let [first, others @ ..] = &lacking[..] {
            return Err(self.of_another_model(first, others.len(), state));
        }
        missing.sort();
        let extra = self.names().filter(|name| !read.contains(name) && !is_count_of_batches(name));
        Ok(Differences { missing, extra: extra.map(str::to_owned).collect() })
    }

    /// Whether the file has a tensor of a model's state.
    pub fn holds(&self, tensor: &StateTensor) -> bool {
        self.stored_names(tensor).next().is_some()
    }

    /// Reads a tensor of a model's state. `None` if the file lacks it.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::compare`].
    pub fn state_tensor(&self, tensor: &StateTensor) -> Result<Option<HostTensor>, WeightsError> {
        match (self.stored_names(tensor).next(), &tensor.names[..]) {
            (Some(name), _) => self.converted(name, &tensor.ty).map(Some),
            (None, [name, ..]) if tensor.trained => Err(self.of_another_model(name, 0, std::slice::from_ref(tensor))),
            (None, _) => Ok(None),
        }
    }

    /// The name and the type under which the file has a tensor of floats, so that it can be read piece by piece
    /// ([`Self::append`]). `None` if the file lacks it, or stores it in a type that no graph has.
    ///
    /// # Errors
    ///
    /// The stored tensor does not fit the model's.
    pub fn stored_floats(&self, tensor: &StateTensor) -> Result<Option<(String, TensorType)>, WeightsError> {
        let Some(name) = self.stored_names(tensor).next() else { return Ok(None) };
        self.check_type(name, &tensor.ty)?;
        let stored = self.type_of(name).filter(|stored| stored.dtype.is_float() && tensor.ty.dtype.is_float());
        Ok(stored.map(|stored| (name.to_owned(), stored)))
    }

    /// The names under which the file has a tensor.
    fn stored_names<'a>(&self, tensor: &'a StateTensor) -> impl Iterator<Item = &'a str> {
        let bare = tensor.names.iter().filter_map(|name| name.strip_prefix(BARE));
        tensor.names.iter().map(String::as_str).chain(bare).filter(|name| self.stored_type(name).is_some())
    }

    fn check_type(&self, name: &str, ty: &TensorType) -> Result<(), WeightsError> {
        let Some((dtype, shape)) = self.stored_type(name) else { return Ok(()) };
        if *shape == *ty.shape && are_floats(dtype) == Some(ty.dtype.is_float()) {
            return Ok(());
        }
        let stored = format!("{}{shape:?}", dtype.to_string().to_lowercase());
        Err(self.other_model(format!("`{name}` is {stored} there, but the model takes {ty}"), HINT))
    }

    /// Refuses two names of one tensor that have different contents.
    fn check_equal(&self, names: &[&str], ty: &TensorType) -> Result<(), WeightsError> {
        let [first, others @ ..] = names else { return Ok(()) };
        for other in others {
            if self.converted(first, ty)? != self.converted(other, ty)? {
                let message = format!("`{first}` and `{other}` differ there, but they are one tensor in the model");
                return Err(self.other_model(message, HINT));
            }
        }
        Ok(())
    }

    /// The tensor stored as `name`, in the model's type.
    fn converted(&self, name: &str, ty: &TensorType) -> Result<HostTensor, WeightsError> {
        self.check_type(name, ty)?;
        let unreadable = |e: GraphError| self.other_model(format!("`{name}`: {e}"), HINT);
        let tensor = match self.read(name)? {
            Some(tensor) => tensor,
            None => HostTensor::from_i64(ty.shape.clone(), &self.small_integers(name)?).map_err(unreadable)?,
        };
        let integers = if ty.dtype == DType::I32 { tensor.to_i64() } else { None };
        if let Some(number) = integers.into_iter().flatten().find(|n| i32::try_from(*n).is_err()) {
            return Err(self.other_model(format!("`{name}` holds {number}, which is no number of {}", ty.dtype), HINT));
        }
        tensor.cast(ty.dtype).map_err(unreadable)
    }

    /// The integers stored as `name`, of a type that no graph has.
    fn small_integers(&self, name: &str) -> Result<Vec<i64>, WeightsError> {
        fn each<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> i64) -> Vec<i64> {
            bytes.as_chunks::<N>().0.iter().map(|chunk| number(*chunk)).collect()
        }
        let Some((dtype, shape)) = self.stored_type(name) else { return Ok(Vec::new()) };
        let mut bytes = Vec::new();
        self.append(name, 0, shape.iter().product::<usize>() * dtype.bitsize() / 8, &mut bytes)?;
        Ok(match dtype {
            Dtype::U8 => each(&bytes, |[byte]| byte.into()),
            Dtype::I8 => each(&bytes, |byte| i8::from_le_bytes(byte).into()),
            Dtype::U16 => each(&bytes, |chunk| u16::from_le_bytes(chunk).into()),
            Dtype::I16 => each(&bytes, |chunk| i16::from_le_bytes(chunk).into()),
            Dtype::U32 => each(&bytes, |chunk| u32::from_le_bytes(chunk).into()),
            _ => Vec::new(),
        })
    }

    /// The error about a file that lacks the tensor `first` and this number of others.
    fn of_another_model(&self, first: &str, others: usize, state: &[StateTensor]) -> WeightsError {
        let (and, are) = match others {
            0 => (String::new(), "is"),
            n => (format!(" and {n} more"), "are"),
        };
        let message = format!("the model's `{first}`{and} {are} not among the {} tensors", self.names().count());
        let hint = self.other_prefix(first, state).map_or(HINT.into(), Cow::Owned);
        self.other_model(message, hint)
    }

    /// The advice where all names have a prefix on one side alone: in the file or in the model.
    fn other_prefix(&self, first: &str, state: &[StateTensor]) -> Option<String> {
        let has = |name: &str| self.stored_type(name).is_some();
        let every = |stored: &dyn Fn(&str) -> Option<String>| {
            let mut trained = state.iter().filter(|tensor| tensor.trained);
            trained.all(|tensor| tensor.names.iter().any(|name| stored(name).is_some_and(|name| has(&name))))
        };
        let longer = self.names().find_map(|name| name.strip_suffix(first).filter(|prefix| prefix.ends_with('.')));
        if let Some(prefix) = longer.filter(|prefix| every(&|name| Some(format!("{prefix}{name}")))) {
            return Some(format!(
                "its names begin with `{prefix}`, and the model's do not: save the file again with \
                 {{name.removeprefix({prefix:?}): tensor for name, tensor in state.items()}}"
            ));
        }
        let shorter = first.match_indices('.').map(|(dot, _)| &first[..=dot]);
        let mut missing = shorter.filter(|prefix| every(&|name| name.strip_prefix(prefix).map(str::to_owned)));
        missing.next().map(|prefix| {
            format!(
                "the model's names begin with `{prefix}`, and those in the file do not: save the file again with \
                 {{{prefix:?} + name: tensor for name, tensor in state.items()}}"
            )
        })
    }

    fn other_model(&self, message: String, hint: impl Into<Cow<'static, str>>) -> WeightsError {
        WeightsError::OtherModel { path: self.path().to_owned(), message, hint: hint.into() }
    }
}

/// Whether elements of a type are floats. Otherwise they are integers or booleans. `None` for types that no model has.
fn are_floats(dtype: Dtype) -> Option<bool> {
    match dtype {
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 => Some(true),
        Dtype::I64 | Dtype::I32 | Dtype::I16 | Dtype::I8 => Some(false),
        Dtype::U32 | Dtype::U16 | Dtype::U8 | Dtype::BOOL => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use fusionllm_graph::Advice;
    use insta::assert_snapshot;
    use safetensors::tensor::TensorView;

    use super::*;

    fn wanted(names: &[&str], dtype: DType, shape: &[usize]) -> StateTensor {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        StateTensor { names, ty: TensorType::new(dtype, shape), trained: true }
    }

    fn buffer(name: &str, dtype: DType, shape: &[usize]) -> StateTensor {
        StateTensor { trained: false, ..wanted(&[name], dtype, shape) }
    }

    fn bytes_of(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    type Stored<'a> = (&'a str, Dtype, &'a [usize], &'a [u8]);

    /// A file of these tensors.
    fn file(dir: &tempfile::TempDir, tensors: &[Stored<'_>]) -> Weights {
        let path = dir.path().join("model.safetensors");
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            ((*name).to_owned(), TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, &path).unwrap();
        Weights::open(&path).unwrap()
    }

    /// The message of a file that does not fit.
    fn refusal(dir: &tempfile::TempDir, weights: &Weights, state: &[StateTensor]) -> String {
        let compared = weights.compare(state).unwrap_err().report();
        if let [tensor] = state {
            assert_eq!(weights.state_tensor(tensor).unwrap_err().report(), compared);
        }
        compared.replace(&dir.path().display().to_string(), "DIR")
    }

    #[test]
    fn a_file_has_a_tensor_under_any_of_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (bytes_of(&[1.0]), bytes_of(&[2.0]));
        let tensor = wanted(&["transformer.wte", "lm_head"], DType::F32, &[1]);
        for stored in [&["transformer.wte"][..], &["lm_head"], &["wte"], &["lm_head", "wte"]] {
            let tensors: Vec<Stored<'_>> = stored.iter().map(|name| (*name, Dtype::F32, &[1][..], &one[..])).collect();
            let weights = file(&dir, &tensors);
            let differences = weights.compare(std::slice::from_ref(&tensor)).unwrap();
            assert_eq!(differences, Differences { missing: vec![], extra: vec![] }, "{stored:?}");
            assert!(weights.holds(&tensor));
            assert_eq!(weights.state_tensor(&tensor).unwrap().unwrap().to_f64(), [1.0], "{stored:?}");
        }
        let weights = file(&dir, &[("lm_head", Dtype::F32, &[1], &one), ("wte", Dtype::F32, &[1], &two)]);
        assert_snapshot!(refusal(&dir, &weights, &[tensor, buffer("b", DType::F32, &[])]), @r"
        DIR/model.safetensors: `lm_head` and `wte` differ there, but they are one tensor in the model
        hint: [model] must have the settings of the model that the weights come from
        ");
    }

    /// PyTorch's `load_state_dict` converts them, too.
    #[test]
    fn elements_are_converted_within_their_kind() {
        let dir = tempfile::tempdir().unwrap();
        let doubles = [1.5f64, -2.0].map(f64::to_le_bytes).concat();
        let weights = file(
            &dir,
            &[
                ("f16", Dtype::F16, &[2], &[0x00, 0x3e, 0x00, 0xc0]),
                ("bf16", Dtype::BF16, &[2], &[0xc0, 0x3f, 0x00, 0xc0]),
                ("f64", Dtype::F64, &[2], &doubles),
                ("u8", Dtype::U8, &[2], &[200, 0]),
                ("i8", Dtype::I8, &[2], &[200, 0]),
                ("i16", Dtype::I16, &[2], &[0, 1, 0xff, 0xff]),
                ("u16", Dtype::U16, &[2], &[0, 1, 0xff, 0xff]),
                ("u32", Dtype::U32, &[1], &[0xff; 4]),
                ("i64", Dtype::I64, &[1], &(1i64 << 40).to_le_bytes()),
            ],
        );
        let read = |name: &str, dtype, count: usize| {
            weights.state_tensor(&wanted(&[name], dtype, &[count])).unwrap().unwrap().to_f64()
        };
        for name in ["f16", "bf16", "f64"] {
            assert_eq!(read(name, DType::F32, 2), [1.5, -2.0], "{name}");
        }
        assert_eq!(read("u8", DType::I32, 2), [200.0, 0.0]);
        assert_eq!(read("u8", DType::Bool, 2), [1.0, 0.0]);
        assert_eq!(read("i8", DType::I64, 2), [-56.0, 0.0]);
        assert_eq!(read("i16", DType::I32, 2), [256.0, -1.0]);
        assert_eq!(read("u16", DType::I64, 2), [256.0, 65535.0]);
        assert_eq!(read("i64", DType::I64, 1), [(1i64 << 40) as f64]);
        let error = |name: &str, dtype, shape: &[usize]| refusal(&dir, &weights, &[wanted(&[name], dtype, shape)]);
        assert_snapshot!(error("f16", DType::F32, &[3]), @r"
        DIR/model.safetensors: `f16` is f16[2] there, but the model takes f32[3]
        hint: [model] must have the settings of the model that the weights come from
        ");
        // Numbers of quantized weights mean nothing without their scale.
        assert_snapshot!(error("i8", DType::F32, &[2]), @r"
        DIR/model.safetensors: `i8` is i8[2] there, but the model takes f32[2]
        hint: [model] must have the settings of the model that the weights come from
        ");
        for (name, number) in [("u32", u32::MAX.into()), ("i64", 1i64 << 40)] {
            let error = weights.state_tensor(&wanted(&[name], DType::I32, &[1])).unwrap_err().to_string();
            assert!(error.ends_with(&format!("`{name}` holds {number}, which is no number of i32")), "{error}");
        }
    }

    #[test]
    fn what_a_file_lacks_and_has_besides_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let one = bytes_of(&[1.0]);
        let tensor = |name: &'static str| -> Stored<'_> { (name, Dtype::F32, &[1], &one) };
        let weights = file(&dir, &[tensor("w"), tensor("head.w"), tensor("bn.num_batches_tracked")]);
        let mean = buffer("bn.running_mean", DType::F32, &[1]);
        let state = [wanted(&["w"], DType::F32, &[1]), mean.clone(), buffer("n.num_batches_tracked", DType::I64, &[])];
        let Differences { missing, extra } = weights.compare(&state).unwrap();
        assert_eq!((missing, extra), (vec!["bn.running_mean".to_owned()], vec!["head.w".to_owned()]));
        assert!(!weights.holds(&mean));
        assert_eq!(weights.state_tensor(&mean).unwrap(), None);
        assert_snapshot!(refusal(&dir, &weights, &[wanted(&["v"], DType::F32, &[1])]), @r"
        DIR/model.safetensors: the model's `v` is not among the 3 tensors
        hint: [model] must have the settings of the model that the weights come from
        ");
    }

    #[test]
    fn another_prefix_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let one = bytes_of(&[1.0]);
        let tensor = |name: &'static str| -> Stored<'_> { (name, Dtype::F32, &[1], &one) };
        let state = |names: [&str; 2]| names.map(|name| wanted(&[name], DType::F32, &[1]));
        let weights = file(&dir, &[tensor("module.a.w"), tensor("module.b.w")]);
        assert_snapshot!(refusal(&dir, &weights, &state(["a.w", "b.w"])), @r#"
        DIR/model.safetensors: the model's `a.w` and 1 more are not among the 2 tensors
        hint: its names begin with `module.`, and the model's do not: save the file again with {name.removeprefix("module."): tensor for name, tensor in state.items()}
        "#);
        assert_snapshot!(refusal(&dir, &weights, &state(["net.module.a.w", "net.module.b.w"])), @r#"
        DIR/model.safetensors: the model's `net.module.a.w` and 1 more are not among the 2 tensors
        hint: the model's names begin with `net.`, and those in the file do not: save the file again with {"net." + name: tensor for name, tensor in state.items()}
        "#);
        // One tensor is missing whatever the prefix.
        let error = refusal(&dir, &weights, &state(["a.w", "c.w"]));
        assert!(error.contains("the model's `a.w` and 1 more are not") && !error.contains("begin"), "{error}");
    }
}

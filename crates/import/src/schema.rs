//! The JSON that `torch.export.save` writes: the part of `torch/_export/serde/schema.py` that the importer reads.
//!
//! This is schema 8, of PyTorch 2.9 to 2.15. Other fields are skipped.

use std::collections::{BTreeMap, HashMap};

use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, de};

/// `models/NAME.json`
#[derive(Debug, Deserialize)]
pub(crate) struct ExportedProgram {
    pub(crate) graph_module: GraphModule,
    #[serde(default)]
    pub(crate) schema_version: SchemaVersion,
    #[serde(default)]
    pub(crate) torch_version: Option<String>,
    /// The dialects of the graph: `TRAINING` from the export itself, `ATEN` and others after decompositions.
    #[serde(default)]
    pub(crate) verifiers: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct SchemaVersion {
    pub(crate) major: i64,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct GraphModule {
    pub(crate) graph: Graph,
    pub(crate) signature: Signature,
    #[serde(default)]
    pub(crate) module_call_graph: Vec<ModuleCall>,
}

/// How the user's module is called; that of the whole model has no name.
#[derive(Debug, Deserialize)]
pub(crate) struct ModuleCall {
    #[serde(default)]
    pub(crate) fqn: String,
    #[serde(default)]
    pub(crate) signature: Option<CallSignature>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct CallSignature {
    /// The structure of forward's results: a tree in JSON, as `torch.utils._pytree` writes it.
    #[serde(default)]
    pub(crate) out_spec: String,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct Graph {
    pub(crate) inputs: Vec<Argument>,
    pub(crate) outputs: Vec<Argument>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) tensor_values: HashMap<String, TensorMeta>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Node {
    pub(crate) target: String,
    pub(crate) inputs: Vec<NamedArgument>,
    pub(crate) outputs: Vec<Argument>,
    #[serde(default)]
    pub(crate) metadata: Metadata,
}

/// The place of a node in the user's model.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Metadata {
    #[serde(default)]
    pub(crate) stack_trace: String,
    #[serde(default)]
    pub(crate) nn_module_stack: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct NamedArgument {
    pub(crate) name: String,
    pub(crate) arg: Argument,
    #[serde(default)]
    pub(crate) kind: Option<i64>,
}

/// The [`NamedArgument::kind`] of an argument that can only be given by keyword.
pub(crate) const KEYWORD: i64 = 2;

#[derive(Debug, Deserialize)]
pub(crate) struct Named {
    pub(crate) name: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct GraphArgument {
    pub(crate) graph: Box<Graph>,
}

/// One argument: in JSON, an object with one field that names its type.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::enum_variant_names, reason = "the names are the schema's")]
pub(crate) enum Argument {
    AsNone(de::IgnoredAny),
    AsTensor(Named),
    AsTensors(Vec<Named>),
    AsInt(i64),
    AsInts(Vec<i64>),
    AsFloat(Number),
    AsFloats(Vec<Number>),
    AsString(String),
    AsStrings(de::IgnoredAny),
    AsSymInt(SymInt),
    AsSymInts(Vec<SymInt>),
    AsScalarType(i64),
    AsMemoryFormat(de::IgnoredAny),
    AsLayout(de::IgnoredAny),
    AsDevice(de::IgnoredAny),
    AsBool(bool),
    AsBools(de::IgnoredAny),
    AsSymBool(SymBool),
    AsGraph(GraphArgument),
    AsOptionalTensors(Vec<OptionalTensor>),
    AsOptionalTensor(OptionalTensor),
    AsOperator(de::IgnoredAny),
    AsSymFloat(SymFloat),
    AsSymBools(de::IgnoredAny),
    AsSymFloats(de::IgnoredAny),
    AsCustomObj(de::IgnoredAny),
    AsComplex(de::IgnoredAny),
    AsNestedTensors(de::IgnoredAny),
    AsIntLists(de::IgnoredAny),
    AsFloatLists(de::IgnoredAny),
    AsStringToArgument(de::IgnoredAny),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OptionalTensor {
    AsTensor(Named),
    AsNone(de::IgnoredAny),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SymInt {
    AsName(String),
    AsInt(i64),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SymFloat {
    AsName(String),
    AsFloat(Number),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SymBool {
    AsName(String),
    AsBool(bool),
}

/// A float. PyTorch writes infinities and NaN as strings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Number(pub(crate) f64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct AnyNumber;

        impl Visitor<'_> for AnyNumber {
            type Value = Number;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a number, \"Infinity\", \"-Infinity\" or \"NaN\"")
            }

            fn visit_f64<E: Error>(self, v: f64) -> Result<Number, E> {
                Ok(Number(v))
            }

            fn visit_i64<E: Error>(self, v: i64) -> Result<Number, E> {
                Ok(Number(v as f64))
            }

            fn visit_u64<E: Error>(self, v: u64) -> Result<Number, E> {
                Ok(Number(v as f64))
            }

            fn visit_str<E: Error>(self, v: &str) -> Result<Number, E> {
                match v {
                    "Infinity" => Ok(Number(f64::INFINITY)),
                    "-Infinity" => Ok(Number(f64::NEG_INFINITY)),
                    "NaN" => Ok(Number(f64::NAN)),
                    _ => Err(E::invalid_value(de::Unexpected::Str(v), &self)),
                }
            }
        }

        d.deserialize_any(AnyNumber)
    }
}

/// The description of a tensor.
#[derive(Debug, Deserialize)]
pub(crate) struct TensorMeta {
    pub(crate) dtype: i64,
    pub(crate) sizes: Vec<Size>,
    #[serde(default)]
    pub(crate) strides: Vec<Size>,
    #[serde(default)]
    pub(crate) storage_offset: Option<Size>,
    #[serde(default)]
    pub(crate) requires_grad: bool,
}

/// A size: a number, or an expression of symbols with its value at export.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Size {
    AsInt(i64),
    AsExpr(SizeExpression),
}

#[derive(Debug, Deserialize)]
pub(crate) struct SizeExpression {
    pub(crate) expr_str: String,
    #[serde(default)]
    pub(crate) hint: Option<Hint>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::enum_variant_names, reason = "the names are the schema's")]
pub(crate) enum Hint {
    AsInt(i64),
    AsBool(de::IgnoredAny),
    AsFloat(de::IgnoredAny),
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct Signature {
    pub(crate) input_specs: Vec<InputSpec>,
    pub(crate) output_specs: Vec<OutputSpec>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum InputSpec {
    UserInput { arg: Argument },
    Parameter { arg: Named, parameter_name: String },
    Buffer { arg: Named, buffer_name: String },
    TensorConstant { arg: Named, tensor_constant_name: String },
    ConstantInput { name: String },
    CustomObj(de::IgnoredAny),
    Token(de::IgnoredAny),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OutputSpec {
    UserOutput { arg: Argument },
    LossOutput { arg: Named },
    BufferMutation { arg: Named, buffer_name: String },
    ParameterMutation(de::IgnoredAny),
    GradientToParameter(de::IgnoredAny),
    GradientToUserInput(de::IgnoredAny),
    UserInputMutation(de::IgnoredAny),
    Token(de::IgnoredAny),
}

/// `data/weights/NAME_weights_config.json`, and the same for constants.
#[derive(Debug, Deserialize)]
pub(crate) struct PayloadConfig {
    pub(crate) config: BTreeMap<String, Payload>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Payload {
    pub(crate) path_name: String,
    #[serde(default)]
    pub(crate) use_pickle: bool,
    #[serde(default)]
    pub(crate) tensor_meta: Option<TensorMeta>,
}

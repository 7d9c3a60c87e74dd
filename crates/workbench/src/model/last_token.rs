//! A language model up to the logits of one position.

use fusionllm_graph::ops::{IndexSelect, View};
use fusionllm_graph::{Builder, DType, Graph, GraphError, HostTensor, Op, TensorType, ValueId, ValueKind};

/// The evaluation form of a network for texts of one length, up to the logits of one position.
pub(super) struct LastToken {
    pub(super) graph: Graph,
    /// The tokens, `i64 [rows, length]`.
    pub(super) ids: ValueId,
    /// The position, `i64 [1]`.
    pub(super) position: ValueId,
    /// `[rows, 1, vocabulary]`.
    pub(super) logits: ValueId,
    /// The most tokens of a text that the logits follow.
    pub(super) window: usize,
    /// The content of further inputs.
    pub(super) filled: Vec<(ValueId, HostTensor)>,
}

/// Why a graph does not continue a text.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotLanguage {
    #[error("the model has no logits for each of its tokens")]
    NoLogits,
    #[error("the model's logits depend on the input `{0}`, for which a text has nothing")]
    Input(String),
    #[error(transparent)]
    Graph(#[from] GraphError),
}

impl LastToken {
    /// Finds tokens and logits of a graph: by the names `input_ids` and `logits`, or else by what the loss is computed
    /// from. A mask of attention lets all tokens be read, and positions are counted from 0.
    pub(super) fn new(forward: Graph) -> Result<Self, NotLanguage> {
        let graph = forward.evaluation()?;
        let (all, ids) = logits(&graph).ok_or(NotLanguage::NoLogits)?;
        let filled = filled(&graph, all, ids)?;
        let (window, head) = (graph.ty(all).shape[1], graph.producer(all).map(|n| graph.node(n).clone()));
        let mut b = Builder::extend(graph);
        b.set_scope("");
        let position = b.input("generate.position", DType::I64, [1])?;
        let logits = match head {
            // The head is the largest product, and one row of it is enough.
            Some(node) if matches!(node.op, Op::Linear(_)) => {
                let mut operands = node.inputs;
                operands[0] = b.op(IndexSelect { dim: 1 }, &[operands[0], position])?;
                b.op(node.op, &operands)?
            }
            _ => b.op(IndexSelect { dim: 1 }, &[all, position])?,
        };
        Ok(Self { graph: b.finish()?, ids, position, logits, window, filled })
    }

    /// The tokens as the graph takes them: the same text in each row, with `padding` after it.
    pub(super) fn rows(&self, text: &[u32], padding: i64) -> Result<HostTensor, GraphError> {
        let shape = self.graph.ty(self.ids).shape.clone();
        let mut row: Vec<i64> = text.iter().map(|token| i64::from(*token)).collect();
        row.resize(shape[1], padding);
        HostTensor::from_i64(shape.clone(), &row.repeat(shape[0]))
    }

    /// The tokens of the vocabulary that have logits.
    pub(super) fn vocabulary(&self) -> usize {
        self.graph.ty(self.logits).shape[2]
    }
}

/// The logits `[rows, window, vocabulary]`, and the tokens `i64 [rows, length]` that they follow.
fn logits(graph: &Graph) -> Option<(ValueId, ValueId)> {
    let follows = |v: ValueId| Some((v, tokens(graph, v)?));
    let named = |(name, v): (&String, &ValueId)| (name.rsplit('.').next() == Some("logits")).then(|| follows(*v))?;
    graph.outputs.iter().find_map(named).or_else(|| follows(logits_of_loss(graph)?))
}

/// The inputs that hold tokens, as far as `logits` follow them. Tokens are numbers of rows of an embedding.
fn tokens(graph: &Graph, logits: ValueId) -> Option<ValueId> {
    let ty = graph.ty(logits);
    let &[rows, window, _] = &ty.shape[..] else { return None };
    if !ty.dtype.is_float() {
        return None;
    }
    let fits = |ty: &TensorType| ty.dtype == DType::I64 && matches!(ty.shape[..], [n, t] if n == rows && t >= window);
    let live = graph.ancestors([logits]);
    let embedded = graph.nodes.iter().zip(live).filter_map(|(node, live)| match node.op {
        Op::Embedding(_) if live => whole(graph, node.inputs[1]).last(),
        _ => None,
    });
    let mut found: Vec<ValueId> =
        embedded.filter(|v| graph.value(*v).kind == ValueKind::Input && fits(graph.ty(*v))).collect();
    found.sort_unstable();
    // Positions and the kinds of tokens have embeddings, too.
    let named = found.iter().find(|v| graph.value(**v).name == "input_ids");
    named.or(found.first()).copied()
}

/// The logits of the cross-entropy that the loss is, with a row for each token.
fn logits_of_loss(graph: &Graph) -> Option<ValueId> {
    let live = graph.ancestors([*graph.outputs.get("loss")?]);
    let losses = graph.nodes.iter().zip(live).filter(|(node, live)| *live && matches!(node.op, Op::CrossEntropy(_)));
    let operand = losses.map(|(node, _)| node.inputs[0]).next()?;
    let classes = *graph.ty(operand).shape.get(1)?;
    seen(graph, operand).find(|v| matches!(graph.ty(*v).shape[..], [_, _, last] if last == classes))
}

/// A value, what it is a view or a copy in another type of, and so on.
fn seen(graph: &Graph, value: ValueId) -> impl Iterator<Item = ValueId> + '_ {
    std::iter::successors(Some(value), |v| {
        let node = graph.node(graph.producer(*v)?);
        (node.op.view().is_some() || matches!(node.op, Op::Cast(_))).then(|| node.inputs[0])
    })
}

/// The same, where no element is left out.
fn whole(graph: &Graph, value: ValueId) -> impl Iterator<Item = ValueId> + '_ {
    let is_whole = |v: &ValueId| {
        let node = graph.producer(*v).map(|n| graph.node(n));
        node.is_none_or(|node| node.op.view() == Some(View::Whole))
    };
    seen(graph, value).take_while(is_whole)
}

/// The content of the inputs besides the tokens that the logits depend on.
fn filled(graph: &Graph, logits: ValueId, ids: ValueId) -> Result<Vec<(ValueId, HostTensor)>, NotLanguage> {
    let live = graph.ancestors([logits]);
    let read = |v: ValueId| graph.nodes.iter().zip(&live).any(|(node, live)| *live && node.inputs.contains(&v));
    let others = graph.inputs().filter(|v| *v != ids && read(*v));
    let content = others.map(|v| {
        let (name, ty) = (graph.value(v).name.as_str(), graph.ty(v));
        let numbers: Vec<f64> = match ty.shape.last() {
            Some(_) if name == "attention_mask" && ty.rank() == 2 => vec![1.0; ty.numel()],
            Some(&length) if matches!(name, "position_ids" | "cache_position") => {
                (0..ty.numel()).map(|i| (i % length) as f64).collect()
            }
            _ => return Err(NotLanguage::Input(name.to_owned())),
        };
        Ok((v, HostTensor::from_f64(ty.shape.clone(), &numbers)?.cast(ty.dtype)?))
    });
    content.collect()
}

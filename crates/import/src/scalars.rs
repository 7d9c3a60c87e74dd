//! The single numbers that a model returns, and the choice of the loss among them.

use serde_json::Value;

use crate::schema::GraphModule;

/// A single number that the model's forward returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scalar {
    /// Its position among what forward returns, from 0.
    pub position: usize,
    /// The keys that lead to it, joined by dots, or else the name of its node.
    pub name: String,
    /// Whether a parameter has a gradient of it.
    pub has_gradient: bool,
}

impl Scalar {
    fn is_called_loss(&self) -> bool {
        self.name.rsplit('.').next() == Some("loss")
    }
}

/// The single numbers that a model returns, and the loss among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LossChoice {
    scalars: Vec<Scalar>,
    index: Option<usize>,
}

impl LossChoice {
    /// Chooses the number that is wanted, by its name or position, or else one that can be trained, if there is one.
    ///
    /// # Errors
    ///
    /// There is no number of that name or position, or it cannot be trained. The numbers that can be come with it.
    pub(crate) fn new(scalars: Vec<Scalar>, wanted: Option<&str>) -> Result<Self, (String, String)> {
        let others = || listed(scalars.iter().filter(|s| s.has_gradient));
        let index = match wanted {
            None => {
                let mut trainable = (0..scalars.len()).filter(|i| scalars[*i].has_gradient);
                let first = trainable.clone().next();
                trainable.find(|i| scalars[*i].is_called_loss()).or(first)
            }
            Some(wanted) => {
                let position = wanted.parse().ok();
                let named = scalars.iter().position(|s| s.name == wanted);
                match named.or_else(|| scalars.iter().position(|s| Some(s.position) == position)) {
                    Some(index) if scalars[index].has_gradient => Some(index),
                    Some(index) => return Err((without_gradient(&scalars[index..=index]), others())),
                    None => {
                        let reason = format!("the model's forward returns no single number `{wanted}`");
                        return Err((reason, others()));
                    }
                }
            }
        };
        Ok(Self { scalars, index })
    }

    /// The index of the loss among the single numbers.
    pub(crate) fn index(&self) -> Option<usize> {
        self.index
    }

    /// A sentence about the loss, if there are several numbers.
    pub(crate) fn sentence(&self) -> Option<String> {
        let loss = self.index.filter(|_| self.scalars.len() > 1)?;
        let others = |has_gradient: bool| {
            let others = self.scalars.iter().enumerate().filter(|(i, s)| *i != loss && s.has_gradient == has_gradient);
            others.map(|(_, s)| s.clone()).collect::<Vec<_>>()
        };
        let mut text = format!("{} is the loss", listed(&self.scalars[loss..=loss]));
        match &others(true)[..] {
            [] => {}
            others => text += &format!(", not {}; `loss` in [model], or --loss, chooses another", listed(others)),
        }
        match &others(false)[..] {
            [] => {}
            others => text += &format!("; {}", without_gradient(others)),
        }
        Some(text)
    }

    /// The reason why nothing can be trained.
    pub(crate) fn refusal(&self) -> Option<String> {
        match &self.scalars[..] {
            _ if self.index.is_some() => None,
            [] => Some("the model's forward returns no loss".to_owned()),
            scalars => Some(without_gradient(scalars)),
        }
    }
}

/// Names in a sentence: ``output 0 (`accuracy`) and output 1 (`loss`)``.
fn listed<'s>(scalars: impl IntoIterator<Item = &'s Scalar>) -> String {
    let names = scalars.into_iter().map(|s| format!("output {} (`{}`)", s.position, s.name));
    let mut names: Vec<String> = names.collect();
    let last = names.pop().unwrap_or_default();
    if names.is_empty() { last } else { format!("{} and {last}", names.join(", ")) }
}

/// A sentence about numbers that cannot be the loss.
fn without_gradient(scalars: &[Scalar]) -> String {
    format!("no parameter has a gradient of {}", listed(scalars))
}

/// The keys that lead to each value that forward returns, joined by dots. `None` where there are none, as in a tuple.
pub(crate) fn output_keys(module: &GraphModule) -> Vec<Option<String>> {
    let signature =
        module.module_call_graph.iter().find(|call| call.fqn.is_empty()).and_then(|call| call.signature.as_ref());
    let spec = signature.and_then(|s| serde_json::from_str::<Value>(&s.out_spec).ok());
    let mut keys = Vec::new();
    if let Some(spec) = spec.as_ref().and_then(|spec| spec.get(1)) {
        walk(spec, &mut Vec::new(), false, &mut keys);
    }
    keys
}

/// Adds the keys of the leaves of a tree. `named` says whether one of the keys so far is a name.
fn walk(spec: &Value, path: &mut Vec<String>, named: bool, keys: &mut Vec<Option<String>>) {
    let children = spec.get("children_spec").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    if spec.get("type").is_none_or(Value::is_null) {
        return keys.push(named.then(|| path.join(".")));
    }
    // Of a dict, the context has the keys. Of a dataclass, it has a list of them, and more.
    let context = spec.get("context").and_then(Value::as_str).and_then(|text| serde_json::from_str::<Value>(text).ok());
    let context = context.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let context = context.first().and_then(Value::as_array).map_or(context, Vec::as_slice);
    let names: Option<Vec<&str>> = context.iter().map(Value::as_str).collect();
    let names = names.filter(|names| names.len() == children.len());
    for (i, child) in children.iter().enumerate() {
        path.push(names.as_ref().map_or_else(|| i.to_string(), |names| names[i].to_owned()));
        walk(child, path, named || names.is_some(), keys);
        path.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{CallSignature, ModuleCall};

    fn keys(out_spec: &str) -> Vec<Option<String>> {
        let signature = Some(CallSignature { out_spec: out_spec.to_owned() });
        let call = ModuleCall { fqn: String::new(), signature };
        output_keys(&GraphModule { module_call_graph: vec![call], ..GraphModule::default() })
    }

    /// As PyTorch 2.9 writes them.
    #[test]
    fn outputs_have_the_keys_of_dicts_and_dataclasses() {
        let leaf = r#"{"type": null, "context": null, "children_spec": []}"#;
        let tree = |kind: &str, context: &str, children: &[&str]| {
            format!(r#"{{"type": "{kind}", "context": "{context}", "children_spec": [{}]}}"#, children.join(", "))
        };
        let whole = |tree: &str| keys(&format!("[1, {tree}]"));
        let named = |names: &[&str]| names.iter().map(|n| Some((*n).to_owned())).collect::<Vec<_>>();
        assert_eq!(whole(leaf), [None]);
        assert_eq!(whole(&tree("builtins.tuple", "null", &[leaf, leaf])), [None, None]);
        let output = tree("transformers.modeling_outputs.CausalLMOutput", r#"[\"loss\", \"logits\"]"#, &[leaf, leaf]);
        assert_eq!(whole(&output), named(&["loss", "logits"]));
        assert_eq!(whole(&tree("DC", r#"[[\"acc\", \"loss\"], []]"#, &[leaf, leaf])), named(&["acc", "loss"]));
        let list = tree("builtins.list", "null", &[leaf, leaf]);
        let nested = tree("builtins.dict", r#"[\"a\", \"b\"]"#, &[&list, leaf]);
        assert_eq!(whole(&nested), named(&["a.0", "a.1", "b"]));
        assert_eq!(whole(&tree("builtins.dict", r#"[\"a\"]"#, &[leaf, leaf])), [None, None]);
        assert_eq!(keys("no JSON"), []);
    }

    fn scalar(position: usize, name: &str, has_gradient: bool) -> Scalar {
        Scalar { position, name: name.to_owned(), has_gradient }
    }

    #[test]
    fn the_loss_is_one_that_can_be_trained() {
        let pair = [scalar(0, "mean", false), scalar(1, "cross_entropy_loss", true)];
        let choose = |scalars: &[Scalar], wanted| LossChoice::new(scalars.to_vec(), wanted).map(|choice| choice.index);
        for wanted in [None, Some("1"), Some("cross_entropy_loss")] {
            assert_eq!(choose(&pair, wanted), Ok(Some(1)));
        }
        let refused = |wanted| LossChoice::new(pair.to_vec(), Some(wanted)).unwrap_err();
        let others = "output 1 (`cross_entropy_loss`)".to_owned();
        let reason = "no parameter has a gradient of output 0 (`mean`)";
        assert_eq!([refused("0"), refused("mean")], [(); 2].map(|()| (reason.to_owned(), others.clone())));
        for wanted in ["2", "-1", ""] {
            let reason = format!("the model's forward returns no single number `{wanted}`");
            assert_eq!(refused(wanted), (reason, others.clone()));
        }
        let several = [scalar(0, "aux", true), scalar(2, "out.loss", true), scalar(3, "7", true), scalar(7, "x", true)];
        assert_eq!(choose(&several, None), Ok(Some(1)));
        assert_eq!(choose(&several, Some("7")), Ok(Some(2)), "a name comes before a position");
    }

    #[test]
    fn people_are_told_which_number_is_trained() {
        let choice = |scalars: &[Scalar]| LossChoice::new(scalars.to_vec(), None).unwrap();
        let pair = [scalar(0, "mean", false), scalar(1, "ce", true)];
        let others = [scalar(0, "aux", true), scalar(1, "mean", false), scalar(2, "loss", true), scalar(3, "z", true)];
        assert_eq!(
            choice(&pair).sentence().unwrap(),
            "output 1 (`ce`) is the loss; no parameter has a gradient of output 0 (`mean`)"
        );
        assert_eq!(
            choice(&others).sentence().unwrap(),
            "output 2 (`loss`) is the loss, not output 0 (`aux`) and output 3 (`z`); `loss` in [model], or --loss, \
             chooses another; no parameter has a gradient of output 1 (`mean`)"
        );
        assert_eq!((choice(&pair[1..]).sentence(), choice(&pair[..1]).sentence()), (None, None));
        assert_eq!(choice(&pair).refusal(), None);
        assert_eq!(choice(&[]).refusal().unwrap(), "the model's forward returns no loss");
        assert_eq!(choice(&pair[..1]).refusal().unwrap(), "no parameter has a gradient of output 0 (`mean`)");
    }
}

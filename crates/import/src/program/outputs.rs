//! The results of forward, and the loss among them.

use fusionllm_graph::{ValueId, autodiff};

use super::Import;
use crate::ImportError;
use crate::context::Value;
use crate::scalars::{LossChoice, Scalar, output_keys};
use crate::schema::Size;

impl Import<'_> {
    /// The loss among the results, which have a position and the name of their node each, and its value in the graph.
    /// It is `wanted`, or else one that can be trained.
    pub(super) fn choose_loss(
        &mut self,
        results: &[(usize, String, Value)],
        wanted: Option<&str>,
    ) -> Result<(LossChoice, Option<ValueId>), ImportError> {
        let (scalars, values) = self.scalars(results)?;
        let archive = &self.archive.name;
        let choice = LossChoice::new(scalars, wanted).map_err(|(reason, others)| ImportError::Loss {
            archive: archive.clone(),
            reason,
            others,
        })?;
        let value = choice.index().map(|index| values[index]);
        Ok((choice, value))
    }

    /// The single numbers among the results, each with its value in the graph. A number for each sample is none, even of
    /// a batch of one.
    fn scalars(&mut self, results: &[(usize, String, Value)]) -> Result<(Vec<Scalar>, Vec<ValueId>), ImportError> {
        let keys = output_keys(self.program);
        let fixed = |name: &str| {
            let meta = self.program.graph.tensor_values.get(name);
            meta.is_none_or(|meta| meta.sizes.iter().all(|size| matches!(size, Size::AsInt(_))))
        };
        let is_number = |(_, name, value): &&(usize, String, Value)| {
            self.cx.dtype(*value).is_float() && self.cx.ty(*value).numel() == 1 && fixed(name)
        };
        let numbers: Vec<_> = results.iter().filter(is_number).collect();
        // Beside a number without dimensions, a tensor of one element is something else.
        let plain = numbers.iter().any(|(.., value)| self.cx.ty(*value).rank() == 0);
        let (mut scalars, mut ids) = (Vec::new(), Vec::new());
        for (position, name, value) in numbers {
            if plain && self.cx.ty(*value).rank() > 0 {
                continue;
            }
            let id = self.cx.materialize(*value).map_err(|r| self.model_error(r))?;
            let key = keys.get(*position).cloned().flatten();
            // An operator without a gradient is reported when the model is trained.
            let trained = autodiff::differentiate(self.cx.builder.graph(), id);
            let has_gradient = !trained.is_ok_and(|train| train.gradients.is_empty());
            scalars.push(Scalar { position: *position, name: key.unwrap_or_else(|| name.clone()), has_gradient });
            ids.push(id);
        }
        Ok((scalars, ids))
    }
}

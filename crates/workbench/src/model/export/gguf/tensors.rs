//! The changes that bring a tensor of a checkpoint into the form that llama.cpp reads.

use fusionllm_graph::{DType, GraphError, HostTensor, TensorType};

/// A change of a module's weight and bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// None.
    Keep,
    /// The weight is stored as `[in, out]`, and llama.cpp wants `[out, in]`. The bias stays.
    Transpose,
    /// The rows of a head are the first elements of all pairs that a rotary embedding turns, and then the second ones.
    /// llama.cpp wants the two of a pair one after the other.
    Pair,
    /// The rows are the query, the key and the value of each head. llama.cpp wants those of all heads together.
    Gather,
}

impl Change {
    /// The tensor of the same elements in llama.cpp's order, for heads of `head_dim` rows.
    ///
    /// # Errors
    ///
    /// The shape does not fit the heads.
    pub(super) fn apply(self, tensor: HostTensor, head_dim: usize) -> Result<HostTensor, GraphError> {
        match self {
            Self::Keep => Ok(tensor),
            Self::Transpose => transposed(tensor),
            // Row `j · head_dim / 2 + i` of a head is element `j` of pair `i`.
            Self::Pair => rows(tensor, head_dim, |_, row| {
                let (head, place) = (row / head_dim * head_dim, row % head_dim);
                head + place % 2 * (head_dim / 2) + place / 2
            }),
            Self::Gather => rows(tensor, 3 * head_dim, |count, row| {
                let (part, rest) = (row / (count / 3), row % (count / 3));
                rest / head_dim * 3 * head_dim + part * head_dim + rest % head_dim
            }),
        }
    }

    /// The shape of a tensor after the change.
    pub(super) fn shape(self, shape: &[usize]) -> Vec<usize> {
        match self {
            Self::Transpose => shape.iter().rev().copied().collect(),
            Self::Keep | Self::Pair | Self::Gather => shape.to_vec(),
        }
    }
}

/// The same rows in another order. `source` gives the place of a row in the old order, from the number of all rows and
/// the place in the new one. The number must be a multiple of `group`.
fn rows(tensor: HostTensor, group: usize, source: impl Fn(usize, usize) -> usize) -> Result<HostTensor, GraphError> {
    let count = tensor.shape().first().copied().unwrap_or(0);
    if group == 0 || count == 0 || count % group != 0 {
        return Err(GraphError::Tensor(format!("the rows of {} are no groups of {group}", tensor.ty())));
    }
    let width = tensor.bytes().len() / count;
    let mut bytes = Vec::with_capacity(tensor.bytes().len());
    for row in 0..count {
        let start = source(count, row) * width;
        bytes.extend_from_slice(&tensor.bytes()[start..start + width]);
    }
    HostTensor::from_bytes(tensor.ty().clone(), bytes)
}

fn transposed(tensor: HostTensor) -> Result<HostTensor, GraphError> {
    let &[height, width] = tensor.shape() else { return Ok(tensor) };
    let size = tensor.dtype().size();
    let mut bytes = Vec::with_capacity(tensor.bytes().len());
    for column in 0..width {
        for row in 0..height {
            let start = (row * width + column) * size;
            bytes.extend_from_slice(&tensor.bytes()[start..start + size]);
        }
    }
    HostTensor::from_bytes(TensorType::new(tensor.dtype(), [width, height]), bytes)
}

/// A weight of a normalisation that multiplies by one plus it, as one that multiplies by it, in f32.
pub(super) fn plus_one(tensor: &HostTensor) -> Result<HostTensor, GraphError> {
    let values = tensor.cast(DType::F32)?.to_f32_exact().unwrap_or_default();
    HostTensor::from_f32(tensor.shape(), &values.iter().map(|x| x + 1.0).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(change: Change, shape: &[usize], values: &[f32]) -> Vec<f32> {
        let tensor = HostTensor::from_f32(shape, values).unwrap();
        let changed = change.apply(tensor, 4).unwrap();
        assert_eq!(changed.shape(), change.shape(shape));
        changed.to_f32_exact().unwrap()
    }

    #[test]
    fn rows_of_pairs_stand_together() {
        // Two heads of four rows: pairs (0, 2), (1, 3), (4, 6), (5, 7).
        let rows: Vec<f32> = (0..8).map(|x| x as f32).collect();
        assert_eq!(changed(Change::Pair, &[8], &rows), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        let wide: Vec<f32> = (0..8).flat_map(|x| [x as f32, -(x as f32)]).collect();
        assert_eq!(changed(Change::Pair, &[8, 2], &wide)[..6], [0.0, 0.0, 2.0, -2.0, 1.0, -1.0]);
    }

    #[test]
    fn queries_of_all_heads_stand_together() {
        let rows: Vec<f32> = (0..24).map(|x| x as f32).collect();
        let expected: Vec<f32> = [0, 12, 4, 16, 8, 20].iter().flat_map(|x| (*x..x + 4).map(|x| x as f32)).collect();
        assert_eq!(changed(Change::Gather, &[24], &rows), expected);
    }

    #[test]
    fn weights_are_transposed_and_biases_stay() {
        assert_eq!(
            changed(Change::Transpose, &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
            [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]
        );
        assert_eq!(changed(Change::Transpose, &[2], &[1.0, 2.0]), [1.0, 2.0]);
    }

    #[test]
    fn rows_that_are_no_heads_are_an_error() {
        let tensor = HostTensor::from_f32([6], &[0.0; 6]).unwrap();
        let error = Change::Pair.apply(tensor, 4).unwrap_err();
        assert!(error.to_string().contains("the rows of f32[6] are no groups of 4"), "{error}");
    }
}

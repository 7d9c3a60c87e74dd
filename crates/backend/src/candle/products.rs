//! Matrix products. For small products, the order of candle's sums depends on strides. So small operands are made
//! contiguous, and shapes alone decide which leading dimensions become rows.

use candle_core::Tensor as Array;

use super::Result;

pub(super) fn matmul(a: &Array, b: &Array, shape: &[usize]) -> Result<Array> {
    let (m, k) = (a.dims()[a.rank() - 2], a.dims()[a.rank() - 1]);
    let n = b.dims()[b.rank() - 1];
    if b.rank() == 2 {
        // One matrix for all leading dimensions: their rows follow each other.
        let rows: usize = a.dims()[..a.rank() - 1].iter().product();
        let a = if a.rank() == 2 { a.clone() } else { a.reshape((rows, k))? };
        return Ok(product(&a, b, rows, n, k)?.reshape(shape)?);
    }
    let lead = &shape[..shape.len() - 2];
    let a = batched(&a.broadcast_as([lead, &[m, k]].concat())?)?;
    let b = batched(&b.broadcast_as([lead, &[k, n]].concat())?)?;
    Ok(product(&a, &b, m, n, k)?.reshape(shape)?)
}

/// `[.., rows, columns]` as `[batch, rows, columns]`. A transposed matrix is not copied.
fn batched(x: &Array) -> Result<Array> {
    let (rows, columns) = (x.dims()[x.rank() - 2], x.dims()[x.rank() - 1]);
    let batch: usize = x.dims()[..x.rank() - 2].iter().product();
    let swapped = x.t()?;
    Ok(match !x.is_contiguous() && swapped.is_contiguous() {
        true => swapped.reshape((batch, columns, rows))?.t()?,
        false => x.contiguous()?.reshape((batch, rows, columns))?,
    })
}

/// A product of matrices or batches. Its order of sums depends on `m`, `n` and `k` alone.
pub(super) fn product(a: &Array, b: &Array, m: usize, n: usize, k: usize) -> Result<Array> {
    // The bounds of the `gemm` crate, generously.
    let by_strides = m * n <= 1024 || m <= 1 || n <= 1 || k <= 2;
    let fit = |x: &Array| {
        let simple = x.is_contiguous() || x.t()?.is_contiguous();
        if by_strides || !simple { x.force_contiguous() } else { Ok(x.clone()) }
    };
    Ok(fit(a)?.matmul(&fit(b)?)?)
}

pub(super) fn linear(x: &Array, weight: &Array, bias: Option<&Array>, shape: &[usize]) -> Result<Array> {
    let x = if x.rank() == 1 { x.unsqueeze(0)? } else { x.clone() };
    let rows: usize = x.dims()[..x.rank() - 1].iter().product();
    let y = matmul(&x, &weight.t()?, &[rows, weight.dims()[0]])?.reshape(shape)?;
    Ok(match bias {
        Some(bias) => y.broadcast_add(bias)?,
        None => y,
    })
}

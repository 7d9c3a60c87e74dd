//! Products of matrices and vectors.

use fusionllm_graph::DType;
use fusionllm_graph::ops::{Compare, Linear, Permute, ReduceKind};

use super::entry::{Entry, entries, one};
use crate::call::{Call, Output};
use crate::context::{Context, Result, Step, Value};

entries! {
    "linear" ["default"] => linear,
    "matmul" ["default"] => |c, a| { let (x, y) = pair(c, a, "other")?; one(matmul(c, x, y)?) },
    "mm" ["default"] => |c, a| { let (x, y) = pair(c, a, "mat2")?; one(c.matmul(x, y)?) },
    "bmm" ["default"] => |c, a| { let (x, y) = pair(c, a, "mat2")?; one(c.matmul(x, y)?) },
    "mv" ["default"] => |c, a| { let (x, y) = pair(c, a, "vec")?; one(matmul(c, x, y)?) },
    "dot" ["default"] => |c, a| { let (x, y) = pair(c, a, "tensor")?; one(matmul(c, x, y)?) },
    "outer" ["default"] => outer,
    "addmm" ["default"] => |c, a| product_plus_bias(c, a, ["mat1", "mat2"]),
    "addmv" ["default"] => |c, a| product_plus_bias(c, a, ["mat", "vec"]),
    "baddbmm" ["default"] => |c, a| product_plus_bias(c, a, ["batch1", "batch2"]),
    "einsum" ["default"] => einsum,
    "_grouped_mm" ["default"] => |c, a| grouped_matmul(c, a, ["self", "mat2"]),
}

/// The operators that `transformers` registers for mixtures of experts.
pub(super) const TRANSFORMERS: &[Entry] = &[Entry {
    name: "grouped_mm_fallback",
    overloads: &["default"],
    translate: |c, a| grouped_matmul(c, a, ["input", "weight"]),
}];

fn pair(c: &mut Context<'_>, a: &Call<'_>, other: &str) -> Result<(Value, Value)> {
    Ok((a.value(c, "self")?, a.value(c, other)?))
}

fn linear(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, w) = (a.value(c, "input")?, a.value(c, "weight")?);
    if c.rank(w) == 1 {
        return one(matmul(c, x, w)?);
    }
    let operands: Vec<Value> = [x, w].into_iter().chain(a.optional(c, "bias")?).collect();
    one(c.op(Linear, &operands)?)
}

/// The product as in NumPy: a vector is a row on the left and a column on the right. Its dimension is removed again.
fn matmul(c: &mut Context<'_>, x: Value, y: Value) -> Result<Value> {
    let (xs, ys) = (c.shape(x), c.shape(y));
    if xs.is_empty() || ys.is_empty() {
        return Err("it needs at least one dimension in each operand".into());
    }
    let left = if xs.len() == 1 { c.reshape(x, &[1, xs[0]])? } else { x };
    let right = if ys.len() == 1 { c.reshape(y, &[ys[0], 1])? } else { y };
    let product = c.matmul(left, right)?;
    let mut shape = c.shape(product);
    if ys.len() == 1 {
        shape.pop();
    }
    if xs.len() == 1 {
        shape.remove(shape.len() - 1 - usize::from(ys.len() > 1));
    }
    c.reshape(product, &shape)
}

fn outer(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, y) = pair(c, a, "vec2")?;
    let dtype = a.result_type(c, 0)?;
    let (x, y) = (c.cast(x, dtype)?, c.cast(y, dtype)?);
    let n = c.ty(x).numel();
    let x = c.reshape(x, &[n, 1])?;
    one(c.mul(x, y)?)
}

/// `beta self + alpha (a b)`
fn product_plus_bias(c: &mut Context<'_>, a: &Call<'_>, [left, right]: [&str; 2]) -> Result<Vec<Output>> {
    let (bias, x, y) = (a.value(c, "self")?, a.value(c, left)?, a.value(c, right)?);
    let (alpha, beta) = (a.number_or("alpha", 1.0)?, a.number_or("beta", 1.0)?);
    let product = matmul(c, x, y)?;
    let product = c.mul_scalar(product, alpha)?;
    // As in PyTorch, `self` is ignored if beta is 0, even if it is infinite or NaN.
    if beta == 0.0 {
        return one(product);
    }
    let bias = c.mul_scalar(bias, beta)?;
    one(c.add(product, bias)?)
}

/// The longest equation of `einsum`.
const MAX_EQUATION_BYTES: usize = 1 << 12;

/// Einstein's sum over named dimensions, two operands at a time.
fn einsum(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let text: String = a.string("equation").unwrap_or_default().chars().filter(|ch| !ch.is_whitespace()).collect();
    let operands = a.values(c, "tensors")?;
    if text.contains('.') {
        return Err("an ellipsis in its equation is not supported".into());
    }
    // The search for labels below takes time that grows with the square of the equation.
    if text.len() > MAX_EQUATION_BYTES {
        return Err(format!("its equation has more than {MAX_EQUATION_BYTES} bytes").into());
    }
    let (inputs, output) = match text.split_once("->") {
        Some((inputs, output)) => (inputs.to_owned(), output.chars().collect::<Vec<_>>()),
        None => {
            // Labels that occur once belong to the output, in alphabetical order, if the equation leaves it out.
            let mut once: Vec<char> = text.chars().filter(|l| *l != ',' && text.matches(*l).count() == 1).collect();
            once.sort_unstable();
            (text.clone(), once)
        }
    };
    let labels: Vec<Vec<char>> = inputs.split(',').map(|s| s.chars().collect()).collect();
    if labels.len() != operands.len() || labels.iter().zip(&operands).any(|(l, v)| l.len() != c.rank(*v)) {
        return Err(format!("its equation {text:?} does not match its operands").into());
    }
    let twice = |l: &[char]| (1..l.len()).any(|i| l[..i].contains(&l[i]));
    if labels.iter().any(|l| twice(l)) || twice(&output) {
        return Err("a diagonal in its equation is not supported".into());
    }
    let mut terms = labels.into_iter().zip(operands);
    let (mut labels, mut value) = terms.next().ok_or("it has no operand")?;
    let rest: Vec<(Vec<char>, Value)> = terms.collect();
    for (i, (other, y)) in rest.iter().enumerate() {
        // A label is needed if the output or a later operand has it.
        let needed = |l: &char| output.contains(l) || rest[i + 1..].iter().any(|(o, _)| o.contains(l));
        (labels, value) = contract(c, (&labels, value), (other, *y), &needed)?;
    }
    let gone: Vec<usize> = (0..labels.len()).filter(|&d| !output.contains(&labels[d])).collect();
    value = c.reduce(ReduceKind::Sum, value, &gone, false)?;
    labels.retain(|l| output.contains(l));
    let order: Option<Vec<usize>> = output.iter().map(|l| labels.iter().position(|k| k == l)).collect();
    let order = order.ok_or_else(|| format!("its equation {text:?} has an output label that no operand has"))?;
    if let ([tensor], []) = (&a.tensors("tensors")?[..], &gone[..]) {
        // Without a product or a sum, the result is a view.
        return Ok(vec![Output::View(*tensor, vec![Step::Permute(Permute { dims: order })])]);
    }
    one(c.permute(value, &order)?)
}

/// The product of two operands, summed over the labels that both have and that are not needed later.
fn contract(
    c: &mut Context<'_>,
    (left, x): (&[char], Value),
    (right, y): (&[char], Value),
    needed: &dyn Fn(&char) -> bool,
) -> Result<(Vec<char>, Value)> {
    let batch: Vec<char> = left.iter().copied().filter(|l| right.contains(l) && needed(l)).collect();
    let inner: Vec<char> = left.iter().copied().filter(|l| right.contains(l) && !needed(l)).collect();
    let rows: Vec<char> = left.iter().copied().filter(|l| !right.contains(l)).collect();
    let columns: Vec<char> = right.iter().copied().filter(|l| !left.contains(l)).collect();
    let (xs, ys) = (c.shape(x), c.shape(y));
    let size = |names: &[char]| -> Vec<usize> {
        let of = |l: &char| match left.iter().position(|k| k == l) {
            Some(d) if xs[d] != 1 => xs[d],
            at => right.iter().position(|k| k == l).map_or_else(|| at.map_or(1, |d| xs[d]), |d| ys[d]),
        };
        names.iter().map(of).collect()
    };
    let arranged = |c: &mut Context<'_>, v: Value, own: &[char], parts: [&[char]; 3]| -> Result<Value> {
        let names = parts.concat();
        let order: Vec<usize> = names.iter().filter_map(|l| own.iter().position(|k| k == l)).collect();
        let v = c.permute(v, &order)?;
        let v = c.expand(v, &size(&names))?;
        let flat: Vec<usize> = parts.iter().map(|p| size(p).iter().product()).collect();
        c.reshape(v, &flat)
    };
    let l = arranged(c, x, left, [&batch, &rows, &inner])?;
    let r = arranged(c, y, right, [&batch, &inner, &columns])?;
    let product = c.matmul(l, r)?;
    let names = [batch, rows, columns].concat();
    let product = c.reshape(product, &size(&names))?;
    Ok((names, product))
}

/// `(x [S, K], weight [E, K, N], offs [E])`: each matrix multiplies the rows of `x` up to its offset.
///
/// Offsets depend on the data. So each matrix multiplies all rows, with the rows of other matrices set to zero. Rows
/// after the last offset become zeros.
fn grouped_matmul(c: &mut Context<'_>, a: &Call<'_>, [x, weight]: [&str; 2]) -> Result<Vec<Output>> {
    let (x, weight, ends) = (a.value(c, x)?, a.value(c, weight)?, a.value(c, "offs")?);
    let (xs, ws) = (c.shape(x), c.shape(weight));
    let ([rows, _], [experts, inner, columns]) = (&xs[..], &ws[..]) else {
        return Err("it needs rows and a stack of matrices".into());
    };
    if *experts == 0 || *experts > 4096 || c.ty(ends).numel() != *experts {
        return Err("its number of offsets does not match its matrices".into());
    }
    let row = c.arange(DType::I64, 0.0, 1.0, *rows)?;
    let row = c.reshape(row, &[*rows, 1])?;
    let ends = c.cast(ends, DType::I64)?;
    // The expert of row r is the number of groups that end at or before r.
    let over = c.compare(Compare::Le, ends, row)?;
    let over = c.cast(over, DType::I64)?;
    let expert = c.reduce(ReduceKind::Sum, over, &[1], true)?;
    let zero = c.full(c.dtype(x), &[], 0.0)?;
    let mut sum = None;
    for e in 0..*experts {
        let mine = c.compare_scalar(Compare::Eq, expert, e as f64)?;
        let part = c.where_(mine, x, zero)?;
        let matrix = c.slice(weight, 0, e, e + 1, 1)?;
        let matrix = c.reshape(matrix, &[*inner, *columns])?;
        let product = c.matmul(part, matrix)?;
        sum = Some(match sum {
            None => product,
            Some(sum) => c.add(sum, product)?,
        });
    }
    let mut y = sum.ok_or("it has no matrices")?;
    if let Some(bias) = a.optional(c, "bias")? {
        y = c.add(y, bias)?;
    }
    one(y)
}

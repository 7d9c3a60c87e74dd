//! Operators that create tensors, and the triangles of a matrix.

use fusionllm_graph::ops::{Compare, Triangle};
use fusionllm_graph::{DType, HostTensor};

use super::entry::{entries, one};
use crate::call::{Call, Output, size};
use crate::context::{Context, MAX_POSITIONS, Result, Value};

entries! {
    "zeros" ["default"] => |c, a| filled(c, a, 0.0),
    "ones" ["default"] => |c, a| filled(c, a, 1.0),
    "full" ["default"] => |c, a| { let v = a.number_or("fill_value", 0.0)?; filled(c, a, v) },
    "empty" ["memory_format"] => |c, a| filled(c, a, 0.0),
    "empty_permuted" ["default"] => |c, a| filled(c, a, 0.0),
    "empty_strided" ["default"] => |c, a| filled(c, a, 0.0),
    "new_zeros" ["default"] => |c, a| filled(c, a, 0.0),
    "new_ones" ["default"] => |c, a| filled(c, a, 1.0),
    "new_full" ["default"] => |c, a| { let v = a.number_or("fill_value", 0.0)?; filled(c, a, v) },
    "new_empty" ["default"] => |c, a| filled(c, a, 0.0),
    "zeros_like" ["default"] => |c, a| like(c, a, 0.0),
    "ones_like" ["default"] => |c, a| like(c, a, 1.0),
    "full_like" ["default"] => |c, a| { let v = a.number_or("fill_value", 0.0)?; like(c, a, v) },
    "empty_like" ["default"] => |c, a| like(c, a, 0.0),
    "scalar_tensor" ["default"] => |c, a| {
        let dtype = a.result_type(c, 0)?;
        one(c.full(dtype, &[], a.number_or("s", 0.0)?)?)
    },
    "fill" ["Scalar", "Tensor"] => fill,
    "zero" ["default"] => |c, a| like(c, a, 0.0),
    "arange" ["default", "start", "start_step"] => arange,
    "linspace" ["default"] => linspace,
    "eye" ["default", "m"] => eye,
    "tril" ["default"] => |c, a| triangle(c, a, false),
    "triu" ["default"] => |c, a| triangle(c, a, true),
}

fn filled(c: &mut Context<'_>, a: &Call<'_>, value: f64) -> Result<Vec<Output>> {
    let dtype = a.result_type(c, 0)?;
    one(c.full(dtype, &a.sizes("size")?, value)?)
}

fn like(c: &mut Context<'_>, a: &Call<'_>, value: f64) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dtype = a.result_type(c, 0)?;
    let shape = c.shape(x);
    one(c.full(dtype, &shape, value)?)
}

fn fill(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    if let Some(n) = a.number("value")? {
        return like(c, a, n);
    }
    let (x, value) = (a.value(c, "self")?, a.value(c, "value")?);
    let ty = c.ty(x).clone();
    let value = c.cast(value, ty.dtype)?;
    one(c.expand(value, &ty.shape)?)
}

fn arange(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let dtype = a.result_type(c, 0)?;
    let (start, step) = (a.number_or("start", 0.0)?, a.number_or("step", 1.0)?);
    let count = ((a.number_or("end", 0.0)? - start) / step).ceil();
    if !(0.0..9e15).contains(&count) {
        return Err(format!("a range of {count} elements is not supported").into());
    }
    one(c.arange(dtype, start, step, count as usize)?)
}

/// The elements are computed from both ends to the middle, as in PyTorch.
fn linspace(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let dtype = a.result_type(c, 0)?;
    let (start, end) = (a.number_or("start", 0.0)?, a.number_or("end", 0.0)?);
    let steps = size(a.int("steps")?)?;
    if steps > MAX_POSITIONS {
        return Err(format!("it has more than {MAX_POSITIONS} elements").into());
    }
    let step = (end - start) / (steps.max(2) - 1) as f64;
    let at = |i: usize| if i < steps / 2 { start + step * i as f64 } else { end - step * (steps - 1 - i) as f64 };
    let values: Vec<f64> = if steps == 1 { vec![start] } else { (0..steps).map(at).collect() };
    let tensor = HostTensor::from_f64([steps], &values)?.cast(dtype)?;
    one(c.constant(tensor)?)
}

fn eye(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let dtype = a.result_type(c, 0)?;
    let rows = size(a.int("n")?)?;
    let columns = size(a.int_or("m", rows as i64)?)?;
    let i = c.arange(DType::I64, 0.0, 1.0, rows)?;
    let i = c.reshape(i, &[rows, 1])?;
    let j = c.arange(DType::I64, 0.0, 1.0, columns)?;
    let hit = c.compare(Compare::Eq, i, j)?;
    one(c.cast(hit, dtype)?)
}

fn triangle(c: &mut Context<'_>, a: &Call<'_>, upper: bool) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    one(triangular(c, x, upper, a.int_or("diagonal", 0)?)?)
}

fn triangular(c: &mut Context<'_>, x: Value, upper: bool, diagonal: i64) -> Result<Value> {
    let dtype = c.dtype(x);
    // The operator takes numbers: booleans are converted to integers and back.
    let number = if dtype == DType::Bool { c.cast(x, DType::I32)? } else { x };
    let y = c.op(Triangle { upper, diagonal }, &[number])?;
    c.cast(y, dtype)
}

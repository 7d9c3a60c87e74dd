//! Arithmetic on sizes, and checks that PyTorch performs at run time.

use super::entry::Entry;
use crate::call::{Call, Item, Output, wrap};
use crate::context::{Context, Result};

/// Handles sizes and elements of tensors, and checks. Their results are known at import, or each operator checks the
/// same.
pub(super) const ATEN: &[Entry] = &[
    Entry { name: "sym_size", overloads: &["int"], translate: sym_size },
    Entry { name: "sym_numel", overloads: &["default"], translate: sym_numel },
    Entry { name: "item", overloads: &["default"], translate: item },
    Entry { name: "_local_scalar_dense", overloads: &["default"], translate: item },
    Entry { name: "_assert_tensor_metadata", overloads: &["default"], translate: nothing },
    Entry { name: "_assert_scalar", overloads: &["default"], translate: nothing },
    Entry { name: "_assert_async", overloads: &["default", "msg"], translate: nothing },
    Entry { name: "sym_constrain_range", overloads: &["default"], translate: nothing },
    Entry { name: "sym_constrain_range_for_size", overloads: &["default"], translate: nothing },
];

/// Python's arithmetic on sizes.
pub(super) const OPERATOR: &[Entry] = &[
    Entry { name: "add", overloads: &[], translate: |_, a| arithmetic(a, |x, y| Some(x + y), i64::checked_add) },
    Entry { name: "sub", overloads: &[], translate: |_, a| arithmetic(a, |x, y| Some(x - y), i64::checked_sub) },
    Entry { name: "mul", overloads: &[], translate: |_, a| arithmetic(a, |x, y| Some(x * y), i64::checked_mul) },
    Entry {
        name: "floordiv",
        overloads: &[],
        translate: |_, a| arithmetic(a, |x, y| Some((x / y).floor()), floor_divide),
    },
    Entry {
        name: "mod",
        overloads: &[],
        translate: |_, a| arithmetic(a, |x, y| Some(x - y * (x / y).floor()), modulo),
    },
    Entry { name: "truediv", overloads: &[], translate: |_, a| arithmetic(a, |x, y| Some(x / y), |_, _| None) },
    Entry {
        name: "pow",
        overloads: &[],
        translate: |_, a| arithmetic(a, |x, y| Some(x.powf(y)), |x, y| x.checked_pow(u32::try_from(y).ok()?)),
    },
    Entry { name: "neg", overloads: &[], translate: |_, a| arithmetic(a, |x, _| Some(-x), |x, _| x.checked_neg()) },
    Entry { name: "eq", overloads: &[], translate: |_, a| compare(a, |x, y| x == y) },
    Entry { name: "ne", overloads: &[], translate: |_, a| compare(a, |x, y| x != y) },
    Entry { name: "lt", overloads: &[], translate: |_, a| compare(a, |x, y| x < y) },
    Entry { name: "le", overloads: &[], translate: |_, a| compare(a, |x, y| x <= y) },
    Entry { name: "gt", overloads: &[], translate: |_, a| compare(a, |x, y| x > y) },
    Entry { name: "ge", overloads: &[], translate: |_, a| compare(a, |x, y| x >= y) },
];

/// PyTorch's functions of sizes.
pub(super) const TORCH: &[Entry] = &[
    Entry {
        name: "sym_max",
        overloads: &[],
        translate: |_, a| arithmetic(a, |x, y| Some(x.max(y)), |x, y| Some(x.max(y))),
    },
    Entry {
        name: "sym_min",
        overloads: &[],
        translate: |_, a| arithmetic(a, |x, y| Some(x.min(y)), |x, y| Some(x.min(y))),
    },
    Entry { name: "sym_float", overloads: &[], translate: |_, a| Ok(vec![Output::Item(Item::Float(operand(a, 0)?))]) },
    Entry {
        name: "sym_int",
        overloads: &[],
        translate: |_, a| Ok(vec![Output::Item(Item::Int(operand(a, 0)? as i64))]),
    },
    Entry {
        name: "sym_not",
        overloads: &[],
        translate: |_, a| Ok(vec![Output::Item(Item::Bool(operand(a, 0)? == 0.0))]),
    },
];

/// Python's functions of numbers.
pub(super) const MATH: &[Entry] = &[
    Entry {
        name: "trunc",
        overloads: &[],
        translate: |_, a| Ok(vec![Output::Item(Item::Int(operand(a, 0)?.trunc() as i64))]),
    },
    Entry {
        name: "floor",
        overloads: &[],
        translate: |_, a| Ok(vec![Output::Item(Item::Int(operand(a, 0)?.floor() as i64))]),
    },
    Entry {
        name: "ceil",
        overloads: &[],
        translate: |_, a| Ok(vec![Output::Item(Item::Int(operand(a, 0)?.ceil() as i64))]),
    },
];

fn nothing(_: &mut Context<'_>, _: &Call<'_>) -> Result<Vec<Output>> {
    Ok(Vec::new())
}

fn sym_size(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dim = wrap(a.int("dim")?, c.rank(x))?;
    let n = *c.shape(x).get(dim).ok_or("a scalar has no sizes")?;
    Ok(vec![Output::Item(Item::Int(n as i64))])
}

fn sym_numel(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    Ok(vec![Output::Item(Item::Int(c.ty(x).numel() as i64))])
}

/// The number in a tensor with one element. The tensor must be a constant.
fn item(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let known = c.constant_tensor(x).ok_or("it reads a number from the data; only constants can be read at import")?;
    let first = known.to_f64().first().copied().ok_or("the tensor is empty")?;
    let number = match c.dtype(x) {
        fusionllm_graph::DType::Bool => Item::Bool(first != 0.0),
        d if d.is_float() => Item::Float(first),
        _ => Item::Int(first as i64),
    };
    Ok(vec![Output::Item(number)])
}

/// The name of operand `i`.
fn name<'a>(a: &Call<'a>, i: usize) -> Result<&'a str> {
    Ok(&a.node.inputs.get(i).ok_or("an operand is missing")?.name)
}

fn operand(a: &Call<'_>, i: usize) -> Result<f64> {
    match a.number(name(a, i)?)? {
        Some(n) => Ok(n),
        None => Ok(a.bool_or(name(a, i)?, false)?.into()),
    }
}

fn integer(a: &Call<'_>, i: usize) -> Option<i64> {
    a.node.inputs.get(i).and_then(|input| match &input.arg {
        crate::schema::Argument::AsInt(_) | crate::schema::Argument::AsSymInt(_) => a.int(&input.name).ok(),
        _ => None,
    })
}

/// Computes with integers if all operands and the result are integers, and otherwise with floats.
fn arithmetic(
    a: &Call<'_>,
    floats: fn(f64, f64) -> Option<f64>,
    integers: fn(i64, i64) -> Option<i64>,
) -> Result<Vec<Output>> {
    let unary = a.node.inputs.len() == 1;
    let whole = integer(a, 0).zip(if unary { Some(0) } else { integer(a, 1) });
    if let Some(n) = whole.and_then(|(x, y)| integers(x, y)) {
        return Ok(vec![Output::Item(Item::Int(n))]);
    }
    let y = if unary { 0.0 } else { operand(a, 1)? };
    let result = floats(operand(a, 0)?, y).ok_or("it has no result")?;
    Ok(vec![Output::Item(Item::Float(result))])
}

fn compare(a: &Call<'_>, predicate: fn(f64, f64) -> bool) -> Result<Vec<Output>> {
    Ok(vec![Output::Item(Item::Bool(predicate(operand(a, 0)?, operand(a, 1)?)))])
}

fn floor_divide(x: i64, y: i64) -> Option<i64> {
    let q = x.checked_div(y)?;
    Some(if x.checked_rem(y)? != 0 && (x < 0) != (y < 0) { q - 1 } else { q })
}

fn modulo(x: i64, y: i64) -> Option<i64> {
    let r = x.checked_rem(y)?;
    Some(if r != 0 && (r < 0) != (y < 0) { r + y } else { r })
}

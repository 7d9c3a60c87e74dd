use std::cell::Cell;
use std::fmt;

use fusionllm_graph::{CounterRng, DType, Op, TensorType};

use super::reference::{Array, Elements, evaluate};

/// One operator on given operands.
#[derive(Debug, Clone)]
pub struct Case {
    /// The operator.
    pub op: Op,
    /// Its operands.
    pub operands: Vec<Operand>,
    /// The float types it runs in. They are the element types of operands that [follow](Operand::follows).
    pub floats: Vec<DType>,
    /// Whether the operands are bad, so that the backend must return an error.
    pub fails: bool,
    /// Whether its gradient is compared with finite differences.
    pub gradient: bool,
    /// Whether operands after the first depend on each other, as a result and its statistics do, and must keep their
    /// values.
    pub tied: bool,
    /// Factor of the tolerances, for operators with large rounding errors.
    pub slack: f64,
    /// Half the distance between the two points of a difference quotient.
    pub step: f64,
}

/// An operand of a [`Case`].
#[derive(Debug, Clone)]
pub struct Operand {
    /// The operand's values.
    pub array: Array,
    /// Whether it takes the float type that the case runs in. Otherwise it keeps its own type.
    pub follows: bool,
    /// Whether it is a sum: where it follows, its type is the [accumulator](DType::accumulator).
    pub sum: bool,
}

impl Operand {
    /// The operand's values in a case that runs in float type `dtype`.
    fn array(&self, dtype: DType) -> Array {
        match (self.follows, self.sum) {
            (false, _) => self.array.clone(),
            (true, false) => self.array.converted(dtype),
            (true, true) => self.array.converted(dtype.accumulator()),
        }
    }

    /// The same operand as a sum.
    pub(super) fn summed(&self) -> Self {
        Self { sum: true, ..self.clone() }
    }
}

impl Case {
    /// The operands with float type `dtype`.
    pub fn arrays(&self, dtype: DType) -> Vec<Array> {
        self.operands.iter().map(|o| o.array(dtype)).collect()
    }

    /// Compares no derivative: the operator has none here, or finite differences cannot find it.
    pub(super) fn values_only(&mut self) -> &mut Self {
        self.gradient = false;
        self
    }

    /// An error is expected.
    pub(super) fn fails(&mut self) -> &mut Self {
        self.fails = true;
        self.values_only()
    }

    /// Lets the case run in f16 and bf16, too.
    pub(super) fn half(&mut self) -> &mut Self {
        self.floats.extend([DType::F16, DType::BF16]);
        self
    }

    pub(super) fn tied(&mut self) -> &mut Self {
        self.tied = true;
        self
    }

    /// Takes a larger step, for linear operators with large rounding errors.
    pub(super) fn step(&mut self, step: f64) -> &mut Self {
        self.step = step;
        self
    }

    pub(super) fn slack(&mut self, factor: f64) -> &mut Self {
        self.slack = factor;
        self
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}(", self.op)?;
        for (i, o) in self.operands.iter().enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            match o.follows {
                true => write!(f, "{comma}float{:?}", o.array.ty.shape)?,
                false => write!(f, "{comma}{}", o.array.ty)?,
            }
        }
        write!(f, ")")
    }
}

/// Collects cases and draws their operands, which are the same in every run.
pub(super) struct Cases {
    cases: Vec<Case>,
    rng: CounterRng,
    drawn: Cell<u64>,
}

impl Cases {
    pub(super) fn new(family: &str) -> Self {
        Self { cases: Vec::new(), rng: CounterRng::for_name(7, family), drawn: Cell::new(0) }
    }

    pub(super) fn into_vec(self) -> Vec<Case> {
        self.cases
    }

    /// A case in f64 and f32.
    pub(super) fn add(&mut self, op: impl Into<Op>, operands: Vec<Operand>) -> &mut Case {
        let at = self.cases.len();
        let follows = operands.iter().any(|o| o.follows);
        self.cases.push(Case {
            op: op.into(),
            operands,
            // Without an operand that follows, all float types are the same case.
            floats: if follows { vec![DType::F64, DType::F32] } else { vec![DType::F32] },
            fails: false,
            gradient: true,
            tied: false,
            slack: 1.0,
            // Balances the quotient's error, which grows with the square of the step, against rounding.
            step: 1e-5,
        });
        &mut self.cases[at]
    }

    fn uniform(&self) -> f64 {
        let n = self.drawn.get();
        self.drawn.set(n + 1);
        f64::from(self.rng.uniform(n, 0))
    }

    fn drawn(&self, shape: &[usize], each: impl Fn(f64) -> f64) -> Operand {
        let n: usize = shape.iter().product();
        self.given(shape, &(0..n).map(|_| each(self.uniform())).collect::<Vec<_>>())
    }

    /// Floats of both signs up to 2, away from 0, where many functions have a kink or a pole.
    pub(super) fn floats(&self, shape: &[usize]) -> Operand {
        self.drawn(shape, |u| if u < 0.5 { -0.1 - 3.8 * u } else { 0.1 + 3.8 * (u - 0.5) })
    }

    /// Floats in a range.
    pub(super) fn between(&self, shape: &[usize], low: f64, high: f64) -> Operand {
        self.drawn(shape, |u| low + (high - low) * u)
    }

    /// Floats at least 0.05 apart, so that the largest one stays the largest under small steps.
    pub(super) fn distinct(&self, shape: &[usize]) -> Operand {
        let n: usize = shape.iter().product();
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, (self.uniform() * (i + 1) as f64) as usize);
        }
        let values: Vec<f64> = order.into_iter().map(|i| 0.0625 * (i as f64 - 0.5 * n as f64) + 0.01).collect();
        self.given(shape, &values)
    }

    /// These floats.
    pub(super) fn given(&self, shape: &[usize], values: &[f64]) -> Operand {
        Operand { array: Array::from_f64(shape, values.to_vec()), follows: true, sum: false }
    }

    /// These f64, whatever type the case runs in.
    pub(super) fn doubles(&self, shape: &[usize], values: &[f64]) -> Operand {
        Operand { array: Array::from_f64(shape, values.to_vec()), follows: false, sum: false }
    }

    fn whole(&self, dtype: DType, shape: &[usize], values: Vec<i64>) -> Operand {
        Operand { array: Array::new(TensorType::new(dtype, shape), Elements::Int(values)), follows: false, sum: false }
    }

    /// `i64` in `0 .. below`.
    pub(super) fn indices(&self, shape: &[usize], below: usize) -> Operand {
        let n: usize = shape.iter().product();
        let values = (0..n).map(|_| (self.uniform() * below as f64) as i64).collect();
        self.whole(DType::I64, shape, values)
    }

    /// `i64` or `i32` in `-9 ..= 9` without 0, so that they may divide.
    pub(super) fn numbers(&self, dtype: DType, shape: &[usize]) -> Operand {
        let n: usize = shape.iter().product();
        let draw = |_| {
            let v = (self.uniform() * 18.0) as i64 - 9;
            if v >= 0 { v + 1 } else { v }
        };
        self.whole(dtype, shape, (0..n).map(draw).collect())
    }

    /// These `i64`.
    pub(super) fn ints(&self, shape: &[usize], values: &[i64]) -> Operand {
        self.whole(DType::I64, shape, values.to_vec())
    }

    pub(super) fn bools(&self, shape: &[usize]) -> Operand {
        let n: usize = shape.iter().product();
        self.whole(DType::Bool, shape, (0..n).map(|_| i64::from(self.uniform() < 0.5)).collect())
    }

    pub(super) fn given_bools(&self, shape: &[usize], values: &[bool]) -> Operand {
        self.whole(DType::Bool, shape, values.iter().map(|&b| i64::from(b)).collect())
    }
}

/// The results of an operator in `f64`, as operands of another.
pub(super) fn results(op: impl Into<Op>, operands: &[&Operand]) -> Result<Vec<Operand>, String> {
    let arrays: Vec<Array> = operands.iter().map(|o| o.array.clone()).collect();
    let results = evaluate(&op.into(), &arrays)?;
    Ok(results.into_iter().map(|array| Operand { follows: array.ty.dtype.is_float(), sum: false, array }).collect())
}

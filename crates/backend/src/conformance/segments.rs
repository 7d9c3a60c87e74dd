use std::ops::ControlFlow;

use fusionllm_graph::ops::{AdamwStep, Detach, IndexSelect, SgdStep, Unary};
use fusionllm_graph::{Builder, DType, GraphError, HostTensor, Op, ValueId};

use super::reference::{Array, Reference};
use super::value::{compare, same_bits};
use super::{Report, download, guarded, holds, run};
use crate::{Backend, BackendError, Segment, Tensor};

/// A segment, and the tensor that each of its inputs is. Inputs with one number are one tensor.
struct Case {
    name: &'static str,
    segment: Segment,
    given: Vec<usize>,
}

/// The inputs and outputs of a segment whose operators are in a [`Builder`].
type Ends = Result<(Vec<ValueId>, Vec<ValueId>), GraphError>;

/// Runs segments of several operators, and compares their results with the [`Reference`]'s. It also checks that results
/// share no memory with each other or with inputs in use elsewhere, and that an operator that fails is named.
pub fn segments(backend: &dyn Backend) -> Report {
    let mut report = Report::default();
    for dtype in [DType::F64, DType::F32] {
        if !holds(backend, dtype) {
            report.unsupported.insert(dtype);
            continue;
        }
        match cases(dtype) {
            Ok(cases) => cases.iter().for_each(|case| check_all(backend, case, dtype, &mut report)),
            Err(e) => report.record("cases of segments", Err(e.to_string())),
        }
    }
    for row in [3, -1, i64::MAX] {
        report.record(format!("segment that takes row {row} of 3"), guarded(|| names_what_failed(backend, row)));
    }
    report
}

fn cases(dtype: DType) -> Result<Vec<Case>, BackendError> {
    let mut cases = Vec::new();
    let mut add = |name, make: &dyn Fn(&mut Builder) -> Ends| {
        let mut b = Builder::new(name);
        let (inputs, outputs) = make(&mut b)?;
        let segment = Segment::of_graph(b.graph(), &inputs, &outputs)?;
        cases.push(Case { name, given: (0..inputs.len()).collect(), segment });
        Ok::<_, BackendError>(())
    };
    let adamw = AdamwStep { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let sgd = SgdStep { momentum: 0.9, weight_decay: 0.01, nesterov: true };
    add("views", &|b| views(b, dtype))?;
    add("values read again", &|b| values_read_again(b, dtype))?;
    add("adamw_step", &|b| steps(b, dtype, adamw.into(), 4, 4))?;
    add("sgd_step", &|b| steps(b, dtype, sgd.into(), 3, 2))?;
    add("twins", &|b| twins(b, dtype))?;
    if let Some(twins) = cases.last_mut() {
        twins.given = vec![0, 0];
    }
    Ok(cases)
}

/// Results that are views of one tensor, and results that are one value.
fn views(b: &mut Builder, dtype: DType) -> Ends {
    let x = b.input("x", dtype, [4, 3])?;
    let same = b.op(Detach, &[x])?;
    let flat = b.reshape(same, [12])?;
    Ok((vec![x], vec![x, x, same, flat, flat]))
}

/// Operands that an operator may not overwrite, because a later one reads them, or a view of them.
fn values_read_again(b: &mut Builder, dtype: DType) -> Ends {
    let x = b.input("x", dtype, [3, 4])?;
    let negative = b.unary(Unary::Neg, x)?;
    let view = b.transpose(negative)?;
    let positive = b.unary(Unary::Abs, negative)?;
    let sum = b.add(positive, x)?;
    let doubled = b.mul_scalar(sum, 2.0)?;
    let product = b.matmul(doubled, view)?;
    Ok((vec![x], vec![product, doubled]))
}

/// Optimizer steps of several parameters, which a backend may run at once.
fn steps(b: &mut Builder, dtype: DType, step: Op, state: usize, settings: usize) -> Ends {
    let hyper = b.input("hyper", DType::F64, [settings])?;
    let (mut inputs, mut outputs) = (vec![hyper], Vec::new());
    for (i, shape) in [&[3, 4][..], &[5], &[], &[2, 0]].into_iter().enumerate() {
        let own = (0..state).map(|j| b.input(&format!("{i}.{j}"), dtype, shape)).collect::<Result<Vec<_>, _>>()?;
        outputs.extend(b.apply(step.clone(), &[&own[..], &[hyper]].concat())?);
        inputs.extend(own);
    }
    Ok((inputs, outputs))
}

/// Two inputs, which are one tensor.
fn twins(b: &mut Builder, dtype: DType) -> Ends {
    let inputs = vec![b.input("x", dtype, [5])?, b.input("y", dtype, [5])?];
    let negative = b.unary(Unary::Neg, inputs[0])?;
    let difference = b.sub(negative, inputs[1])?;
    Ok((inputs, vec![difference]))
}

/// A backend may overwrite inputs that are given up: none of them, each third one, or all.
fn check_all(backend: &dyn Backend, case: &Case, dtype: DType, report: &mut Report) {
    for (which, given_up) in [("no", usize::MAX), ("each third", 3), ("every", 1)] {
        let what = format!("segment with {} in {dtype}, to which {which} input is given up", case.name);
        report.record(what, guarded(|| check(backend, case, given_up)));
    }
}

fn check(backend: &dyn Backend, case: &Case, given_up: usize) -> Result<(), String> {
    let hosts = case.segment.inputs.iter().enumerate().map(|(i, ty)| {
        // Between 0.3 and 2, so that they are valid variances.
        let values = (0..ty.numel()).map(|j| 0.3 + ((37 * j + 11 * i) % 18) as f64 / 10.0).collect();
        Array::from_f64(&ty.shape, values).converted(ty.dtype).to_host()
    });
    let hosts = hosts.collect::<Result<Vec<HostTensor>, String>>()?;
    let upload = |backend: &dyn Backend| {
        hosts.iter().map(|host| backend.upload(host).map_err(|e| e.to_string())).collect::<Result<Vec<_>, _>>()
    };
    let inputs = |tensors: &[Tensor]| case.given.iter().map(|i| tensors[*i].clone()).collect::<Vec<_>>();
    let expected = results(&Reference, &case.segment, inputs(&upload(&Reference)?))?;

    let tensors = upload(backend)?;
    let given = inputs(&tensors);
    let held = tensors.into_iter().zip(hosts.iter().cloned()).enumerate().filter(|(i, _)| (i + 1) % given_up != 0);
    let mut kept: Vec<Kept> =
        held.map(|(i, (tensor, host))| Kept { name: format!("input {i}, still held,"), tensor, host }).collect();
    let got = results(backend, &case.segment, given)?;
    unchanged(backend, &kept)?;
    for (i, (tensor, expected)) in got.into_iter().zip(expected).enumerate() {
        let (name, host) = (format!("result {i}"), download(backend, &tensor)?);
        let expected = Array::from_host(&download(&Reference, &expected)?)?;
        compare(&expected, &host, 1.0).map_err(|e| format!("{name}: {e}"))?;
        kept.push(Kept { name, tensor, host });
    }
    // Each is overwritten in turn.
    while let Some(Kept { name, tensor, .. }) = kept.pop() {
        run(backend, &Unary::Neg.into(), vec![tensor])?;
        unchanged(backend, &kept).map_err(|e| format!("{e}, when {name} was overwritten"))?;
    }
    Ok(())
}

/// A tensor in use, and its value.
struct Kept {
    name: String,
    tensor: Tensor,
    host: HostTensor,
}

fn unchanged(backend: &dyn Backend, kept: &[Kept]) -> Result<(), String> {
    kept.iter().try_for_each(|Kept { name, tensor, host }| {
        same_bits(host, &download(backend, tensor)?).map_err(|e| format!("{name} changed: {e}"))
    })
}

fn results(backend: &dyn Backend, segment: &Segment, inputs: Vec<Tensor>) -> Result<Vec<Tensor>, String> {
    run_whole(backend, segment, inputs).map_err(|e| e.to_string())
}

fn run_whole(backend: &dyn Backend, segment: &Segment, inputs: Vec<Tensor>) -> Result<Vec<Tensor>, BackendError> {
    let prepared = backend.prepare(segment.clone())?;
    backend.run_segment(&prepared, inputs, &mut |_| ControlFlow::Continue(()))
}

/// The second operator fails. The backend goes on, and an input that is still held has not changed. A device that is not
/// waited for tells later, and then names no operator.
fn names_what_failed(backend: &dyn Backend, row: i64) -> Result<(), String> {
    let rows = HostTensor::from_f32([3, 2], &[0.5, 1.0, 1.5, 2.0, 2.5, 3.0]).map_err(|e| e.to_string())?;
    let taken = HostTensor::from_i64([2], &[0, row]).map_err(|e| e.to_string())?;
    let op = IndexSelect { dim: 0 };
    let segment = || -> Result<Segment, BackendError> {
        let mut b = Builder::new("rows");
        let inputs = [b.input("x", DType::F32, [3, 2])?, b.input("rows", DType::I64, [2])?];
        let grown = b.unary(Unary::Exp, inputs[0])?;
        let chosen = b.op(op, &[grown, inputs[1]])?;
        Segment::of_graph(b.graph(), &inputs, &[chosen])
    };
    let fail = |e: BackendError| e.to_string();
    let tensor = backend.upload(&rows).map_err(fail)?;
    let inputs = vec![tensor.clone(), backend.upload(&taken).map_err(fail)?];
    match run_whole(backend, &segment().map_err(fail)?, inputs) {
        Ok(_) if backend.synchronize().is_err() => {}
        Ok(_) => return Err("it was taken".into()),
        Err(BackendError::Operator { op: failed, .. }) if failed == Op::from(op).name() => {}
        Err(e) => return Err(format!("the error does not name the operator: {e}")),
    }
    unchanged(backend, &[Kept { name: "the first input".into(), tensor, host: rows }])
}

use fusionllm_graph::ops::{Expand, Permute, Reshape, Slice};
use fusionllm_graph::{DType, HostTensor, Op, TensorType};

use super::reference::{Array, Elements, evaluate};
use super::{Case, PANICKED, Report, download, guarded, holds, run};
use crate::{Backend, Tensor, run_decomposed};

/// The layout of operands in memory before the operator reads them.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    Plain,
    /// Dimensions in reverse order.
    Permuted,
    /// The operand is every other element of the last dimension of a larger tensor, without its first row. The elements
    /// between are NaN.
    Sliced,
    /// One dimension of the operand is stretched.
    Expanded,
}

/// Compares the results of every case with the reference evaluator's.
pub fn values(backend: &dyn Backend, cases: &[Case]) -> Report {
    let mut report = Report::default();
    for case in cases {
        for &dtype in &case.floats {
            if let Some(missing) = types(case, dtype).find(|&d| !holds(backend, d)) {
                report.unsupported.insert(missing);
                continue;
            }
            for layout in [Layout::Plain, Layout::Permuted, Layout::Sliced, Layout::Expanded] {
                if layout == Layout::Plain || case.operands.iter().any(|o| applies(layout, &o.array.ty.shape)) {
                    let what = format!("{case} in {dtype}, {layout:?}");
                    report.record(what, guarded(|| check(backend, case, dtype, layout)));
                }
            }
        }
    }
    report
}

/// The element types of a case's operands and results.
fn types(case: &Case, dtype: DType) -> impl Iterator<Item = DType> {
    let operands: Vec<TensorType> = case.arrays(dtype).into_iter().map(|a| a.ty).collect();
    let results = case.op.infer(&operands.iter().collect::<Vec<_>>()).unwrap_or_default();
    operands.into_iter().chain(results).map(|ty| ty.dtype)
}

fn applies(layout: Layout, shape: &[usize]) -> bool {
    match layout {
        Layout::Plain => true,
        Layout::Permuted => shape.len() >= 2,
        Layout::Sliced => !shape.is_empty(),
        Layout::Expanded => shape.iter().any(|&n| n > 1),
    }
}

fn check(backend: &dyn Backend, case: &Case, dtype: DType, layout: Layout) -> Result<(), String> {
    let mut arrays = case.arrays(dtype);
    let mut layouts = vec![layout; arrays.len()];
    if layout == Layout::Expanded {
        for (i, (array, layout)) in arrays.iter_mut().zip(&mut layouts).enumerate() {
            match case.tied && i > 0 {
                true => *layout = Layout::Plain,
                false => *array = stretched(array),
            }
        }
    }
    let place_as = |layouts: &[Layout]| -> Result<Vec<Tensor>, String> {
        arrays.iter().zip(layouts).map(|(a, l)| placed(backend, a, *l)).collect()
    };
    let place = || place_as(&layouts);
    if case.fails {
        return expect_error(backend, case, &arrays, place()?);
    }
    let expected = evaluate(&case.op, &arrays)?;

    // Operands in use elsewhere do not change.
    let held = place()?;
    let results = run(backend, &case.op, held.clone())?;
    let results = results.iter().map(|t| download(backend, t)).collect::<Result<Vec<_>, _>>()?;
    for (i, (expected, got)) in expected.iter().zip(&results).enumerate() {
        compare(expected, got, case.slack).map_err(|e| format!("result {i}: {e}"))?;
    }
    for (i, (tensor, array)) in held.iter().zip(&arrays).enumerate() {
        let now = download(backend, tensor)?;
        same_bits(&array.to_host()?, &now).map_err(|e| format!("operand {i}, still held, changed: {e}"))?;
    }

    // Operands without another owner may be overwritten. The results have the same bits.
    let again = run(backend, &case.op, place()?)?;
    for (i, (first, second)) in results.iter().zip(&again).enumerate() {
        same_bits(first, &download(backend, second)?).map_err(|e| format!("result {i} differs when repeated: {e}"))?;
    }

    // A tensor from another peer is row-major. The results have the same bits.
    let plain = run(backend, &case.op, place_as(&vec![Layout::Plain; arrays.len()])?)?;
    for (i, (here, sent)) in results.iter().zip(&plain).enumerate() {
        same_bits(here, &download(backend, sent)?)
            .map_err(|e| format!("result {i} depends on how the operands lie in memory: {e}"))?;
    }

    // A view of an operand is in use, the operand is not.
    let given = place()?;
    let views = given
        .iter()
        .map(|t| {
            let flat = Op::from(Reshape { shape: vec![t.ty().numel()] });
            Ok(run(backend, &flat, vec![t.clone()])?.remove(0))
        })
        .collect::<Result<Vec<Tensor>, String>>()?;
    run(backend, &case.op, given)?;
    for (i, (view, array)) in views.iter().zip(&arrays).enumerate() {
        let flat = array.to_host()?.reshaped([array.ty.numel()]).map_err(|e| e.to_string())?;
        same_bits(&flat, &download(backend, view)?)
            .map_err(|e| format!("a view of operand {i}, still held, changed: {e}"))?;
    }

    // The decomposition computes the same. In half precision it rounds at every step, so only wider types are compared.
    if matches!(dtype, DType::F64 | DType::F32) {
        let decomposed = guarded(|| run_decomposed(backend, &case.op, place()?).map_err(|e| e.to_string()))
            .map_err(|e| format!("decomposed: {e}"))?;
        for (i, (tensor, expected)) in decomposed.iter().flatten().zip(&expected).enumerate() {
            compare(expected, &download(backend, tensor)?, case.slack)
                .map_err(|e| format!("decomposed, result {i}: {e}"))?;
        }
    }
    Ok(())
}

fn expect_error(backend: &dyn Backend, case: &Case, arrays: &[Array], operands: Vec<Tensor>) -> Result<(), String> {
    if evaluate(&case.op, arrays).is_ok() {
        // A stretched operand may have lost its bad element.
        return Ok(());
    }
    // A device that is not waited for tells later.
    match run(backend, &case.op, operands).and_then(|_| backend.synchronize().map_err(|e| e.to_string())) {
        Ok(()) => Err("bad operands were accepted".into()),
        Err(e) if e.contains(PANICKED) => Err(e),
        Err(_) => Ok(()),
    }
}

/// The array with its first dimension larger than 1 made constant, for [`Layout::Expanded`].
fn stretched(a: &Array) -> Array {
    let Some(dim) = a.ty.shape.iter().position(|&n| n > 1) else { return a.clone() };
    let first = Op::from(Slice { dim, start: 0, end: 1, step: 1 });
    let expand = Op::from(Expand { shape: a.ty.shape.clone() });
    let one = evaluate(&first, std::slice::from_ref(a));
    one.and_then(|one| evaluate(&expand, &one)).ok().and_then(|mut v| v.pop()).unwrap_or_else(|| a.clone())
}

/// Uploads an array so that the tensor has the layout.
fn placed(backend: &dyn Backend, a: &Array, layout: Layout) -> Result<Tensor, String> {
    let shape = &a.ty.shape;
    let upload = |a: &Array| backend.upload(&a.to_host()?).map_err(|e| e.to_string());
    if !applies(layout, shape) {
        return upload(a);
    }
    match layout {
        Layout::Plain => upload(a),
        Layout::Permuted => {
            let reverse = Op::from(Permute { dims: (0..shape.len()).rev().collect() });
            let base = evaluate(&reverse, std::slice::from_ref(a))?;
            Ok(run(backend, &reverse, vec![upload(&base[0])?])?.remove(0))
        }
        Layout::Sliced => {
            let last = shape.len() - 1;
            let mut wide = shape.clone();
            wide[last] = 2 * shape[last] + 1;
            if last > 0 {
                wide[0] += 2;
            }
            let mut tensor = upload(&spaced(a, &wide)?)?;
            if last > 0 {
                let rows = Op::from(Slice { dim: 0, start: 1, end: shape[0] + 1, step: 1 });
                tensor = run(backend, &rows, vec![tensor])?.remove(0);
            }
            let every_other = Op::from(Slice { dim: last, start: 1, end: 2 * shape[last] + 1, step: 2 });
            Ok(run(backend, &every_other, vec![tensor])?.remove(0))
        }
        Layout::Expanded => {
            let Some(dim) = shape.iter().position(|&n| n > 1) else { return upload(a) };
            let first = evaluate(&Slice { dim, start: 0, end: 1, step: 1 }.into(), std::slice::from_ref(a))?;
            let expand = Op::from(Expand { shape: shape.clone() });
            Ok(run(backend, &expand, vec![upload(&first[0])?])?.remove(0))
        }
    }
}

/// `a` inside an array of shape `wide`. All other elements are NaN or invalid indices, which would show in results.
fn spaced(a: &Array, wide: &[usize]) -> Result<Array, String> {
    let ty = TensorType::new(a.ty.dtype, wide);
    let (n, last) = (ty.numel(), wide.len() - 1);
    let mut base = match a.elements {
        Elements::Float(_) => Array::filled(ty, f64::NAN),
        Elements::Int(_) => Array { elements: Elements::Int(vec![1 << 20; n]), ty },
    };
    if a.ty.dtype == DType::Bool {
        base = Array::filled(base.ty, 1.0);
    }
    let width = a.ty.shape[last];
    let rows = a.ty.numel().checked_div(width).unwrap_or(0);
    // Rows of `a` follow each other in `wide`, behind one slab of its first dimension.
    let lead = if last > 0 { wide[1..last].iter().product() } else { 0 };
    for r in 0..rows {
        for j in 0..width {
            let to = (r + lead) * wide[last] + 2 * j + 1;
            match (&mut base.elements, &a.elements) {
                (Elements::Float(b), Elements::Float(a)) => b[to] = a[r * width + j],
                (Elements::Int(b), Elements::Int(a)) => b[to] = a[r * width + j],
                _ => return Err("elements of two kinds".into()),
            }
        }
    }
    Ok(base)
}

/// Tolerance relative to 1 + the magnitude: the error of a few hundred roundings.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-11,
        DType::F32 => 1e-5,
        DType::F16 => 5e-3,
        DType::BF16 => 4e-2,
        DType::I64 | DType::I32 | DType::Bool => 0.0,
    }
}

pub(super) fn compare(expected: &Array, got: &HostTensor, slack: f64) -> Result<(), String> {
    if expected.ty != *got.ty() {
        return Err(format!("is {}, should be {}", got.ty(), expected.ty));
    }
    let got = Array::from_host(got)?;
    let tolerance = slack * tolerance(expected.ty.dtype);
    let close = |e: f64, g: f64| (e.is_nan() && g.is_nan()) || e == g || (e - g).abs() <= tolerance * (1.0 + e.abs());
    let wrong = match (&expected.elements, &got.elements) {
        (Elements::Float(e), Elements::Float(g)) => {
            e.iter().zip(g).position(|(&e, &g)| !close(e, g)).map(|i| (i, format!("{} instead of {}", g[i], e[i])))
        }
        (Elements::Int(e), Elements::Int(g)) => {
            e.iter().zip(g).position(|(e, g)| e != g).map(|i| (i, format!("{} instead of {}", g[i], e[i])))
        }
        _ => Some((0, "elements of another kind".into())),
    };
    match wrong {
        None => Ok(()),
        Some((i, how)) => Err(format!("element {i} of {} is {how}", expected.ty)),
    }
}

/// Equal bits, or NaN on both sides.
pub(super) fn same_bits(a: &HostTensor, b: &HostTensor) -> Result<(), String> {
    if a.bytes() == b.bytes() && a.ty() == b.ty() {
        return Ok(());
    }
    let size = a.dtype().size();
    let (x, y) = (a.to_f64(), b.to_f64());
    let differs = |i: &usize| {
        let (p, q) = (&a.bytes()[i * size..(i + 1) * size], &b.bytes()[i * size..(i + 1) * size]);
        p != q && !(x[*i].is_nan() && y[*i].is_nan())
    };
    if a.ty() != b.ty() {
        return Err(format!("{} against {}", a.ty(), b.ty()));
    }
    match (0..x.len()).find(differs) {
        None => Ok(()),
        Some(i) => Err(format!("element {i} of {} is {} and {}", a.ty(), x[i], y[i])),
    }
}

/// Checks that uploaded tensors come back with the same bits, and that another backend's tensors are refused.
pub fn transfers(backend: &dyn Backend) -> Report {
    let mut report = Report::default();
    let all = [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::Bool];
    for dtype in all {
        if !holds(backend, dtype) {
            report.unsupported.insert(dtype);
            continue;
        }
        for shape in [&[][..], &[0], &[1], &[7], &[2, 0, 3], &[2, 3, 4], &[1, 1, 5, 1, 1]] {
            let ty = TensorType::new(dtype, shape);
            // Bytes without a pattern, also NaN and infinity where they come up; a boolean is 0 or 1.
            let bytes = (0..ty.bytes()).map(|i| if dtype == DType::Bool { i % 2 } else { i * 167 % 256 } as u8);
            let outcome = HostTensor::from_bytes(ty.clone(), bytes.collect()).map_err(|e| e.to_string());
            let outcome = outcome.and_then(|host| {
                let tensor = guarded(|| backend.upload(&host).map_err(|e| e.to_string()))?;
                let back = download(backend, &tensor)?;
                if *tensor.ty() != ty || back != host { Err("does not come back as it went".into()) } else { Ok(()) }
            });
            report.record(ty, outcome);
        }
    }
    let stranger = Tensor::new(TensorType::new(DType::F32, [1]), ());
    let refused = guarded(|| {
        let neg = Op::from(fusionllm_graph::ops::Unary::Neg);
        let ran = backend.run(&neg, vec![stranger.clone()], &[stranger.ty().clone()]).is_ok();
        Ok(!ran && backend.download(&stranger).is_err())
    });
    let outcome = refused.and_then(|refused| if refused { Ok(()) } else { Err("was accepted".into()) });
    report.record("another backend's tensor", outcome);
    report
}

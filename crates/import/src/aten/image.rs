//! Convolution, pooling and resizing. One-dimensional forms become two-dimensional ones of height 1.

use fusionllm_graph::HostTensor;
use fusionllm_graph::ops::{AdaptiveAvgPool2d, AvgPool2d, Conv2d, Conv2dInputGrad, MaxPool2d};

use super::entry::{entries, one};
use super::rearrange::padded;
use crate::call::{Call, Output, size};
use crate::context::{Context, MAX_CONSTANT_BYTES, Result, Value};

entries! {
    "conv1d" ["default", "padding"] => |c, a| convolution(c, a, false),
    "conv2d" ["default", "padding"] => |c, a| convolution(c, a, false),
    "convolution" ["default"] => |c, a| { let t = a.bool_or("transposed", false)?; convolution(c, a, t) },
    "_convolution" ["default"] => |c, a| { let t = a.bool_or("transposed", false)?; convolution(c, a, t) },
    "conv_transpose1d" ["default"] => |c, a| convolution(c, a, true),
    "conv_transpose2d" ["input"] => |c, a| convolution(c, a, true),
    "max_pool1d" ["default"] => max_pool,
    "max_pool2d" ["default"] => max_pool,
    "max_pool2d_with_indices" ["default"] => max_pool,
    "avg_pool1d" ["default"] => avg_pool,
    "avg_pool2d" ["default"] => avg_pool,
    "adaptive_avg_pool1d" ["default"] => adaptive_avg_pool,
    "adaptive_avg_pool2d" ["default"] => adaptive_avg_pool,
    "_adaptive_avg_pool2d" ["default"] => adaptive_avg_pool,
    "adaptive_max_pool2d" ["default"] => adaptive_max_pool,
    "upsample_nearest1d" ["default", "vec"] => |c, a| resize(c, a, Method::Nearest { exact: false }),
    "upsample_nearest2d" ["default", "vec"] => |c, a| resize(c, a, Method::Nearest { exact: false }),
    "_upsample_nearest_exact2d" ["default", "vec"] => |c, a| resize(c, a, Method::Nearest { exact: true }),
    "upsample_linear1d" ["default", "vec"] => |c, a| resize(c, a, Method::Linear),
    "upsample_bilinear2d" ["default", "vec"] => |c, a| resize(c, a, Method::Linear),
    "upsample_bicubic2d" ["default", "vec"] => |c, a| resize(c, a, Method::Cubic),
}

/// A value reshaped to a batch with two spatial dimensions.
struct Image {
    value: Value,
    /// Whether a height of 1 was added.
    flat: bool,
    /// Whether a batch of 1 was added.
    single: bool,
}

fn image(c: &mut Context<'_>, x: Value, spatial: usize) -> Result<Image> {
    let mut shape = c.shape(x);
    let flat = spatial == 1;
    if flat && !shape.is_empty() {
        shape.insert(shape.len() - 1, 1);
    }
    let single = shape.len() == 3;
    if single {
        shape.insert(0, 1);
    }
    if shape.len() != 4 {
        return Err(format!("it needs {spatial} spatial dimensions, got {}", c.ty(x)).into());
    }
    Ok(Image { value: c.reshape(x, &shape)?, flat, single })
}

/// Removes the dimensions that [`image`] added.
fn restore_shape(c: &mut Context<'_>, y: Value, image: &Image) -> Result<Value> {
    let mut shape = c.shape(y);
    if image.flat {
        shape.remove(shape.len() - 2);
    }
    if image.single {
        shape.remove(0);
    }
    c.reshape(y, &shape)
}

/// The vertical and horizontal numbers of a list. Missing ones are `neutral`, also the vertical one in one dimension.
fn pair(list: &[i64], flat: bool, neutral: i64) -> Result<[usize; 2]> {
    Ok(match (list, flat) {
        ([], _) => [size(neutral)?; 2],
        ([n], true) => [size(neutral)?, size(*n)?],
        ([n], false) => [size(*n)?; 2],
        ([h, w], false) => [size(*h)?, size(*w)?],
        _ => return Err("more than two spatial dimensions are not supported".into()),
    })
}

fn convolution(c: &mut Context<'_>, a: &Call<'_>, transposed: bool) -> Result<Vec<Output>> {
    let (x, w) = (a.value(c, "input")?, a.value(c, "weight")?);
    let bias = a.optional(c, "bias")?;
    let spatial = c.rank(w).saturating_sub(2);
    if !(1..=2).contains(&spatial) {
        return Err("only one and two spatial dimensions are supported".into());
    }
    let flat = spatial == 1;
    let x = image(c, x, spatial)?;
    let w = if flat {
        let s = c.shape(w);
        c.reshape(w, &[s[0], s[1], 1, s[2]])?
    } else {
        w
    };
    let kernel = c.shape(w);
    let stride = pair(&a.ints_or("stride", &[1])?, flat, 1)?;
    let dilation = pair(&a.ints_or("dilation", &[1])?, flat, 1)?;
    let groups = size(a.int_or("groups", 1)?)?;
    let mut input = x.value;
    let padding = match a.string("padding") {
        None => pair(&a.ints_or("padding", &[0])?, flat, 0)?,
        Some("valid") => [0, 0],
        // The result has the size of the operand. If the padding is odd, the end gets one more.
        Some("same") => {
            let mut pads = [[0i64; 2]; 4];
            for i in 0..2 {
                let reach = dilation[i].checked_mul(kernel[2 + i].saturating_sub(1));
                let reach = reach.and_then(|r| i64::try_from(r).ok()).ok_or("its kernel reaches too far")?;
                pads[2 + i] = [reach / 2, reach - reach / 2];
            }
            input = padded(c, input, &pads, 0.0)?;
            [0, 0]
        }
        Some(other) => return Err(format!("the padding mode {other:?} is not supported").into()),
    };
    let conv = Conv2d { stride, padding, dilation, groups };
    let y = if transposed {
        let more = pair(&a.ints_or("output_padding", &[0])?, flat, 0)?;
        let shape = c.shape(input);
        let mut output = [0; 2];
        for i in 0..2 {
            let steps = shape[2 + i].saturating_sub(1).checked_mul(stride[i]);
            let reach = kernel[2 + i].saturating_sub(1).checked_mul(dilation[i]);
            output[i] = steps
                .zip(reach)
                .and_then(|(s, r)| {
                    s.checked_add(r)?.checked_add(more[i])?.checked_add(1)?.checked_sub(padding[i].checked_mul(2)?)
                })
                .ok_or("its padding is too large for its operand")?;
        }
        let y = c.op(Conv2dInputGrad { conv, input: output }, &[input, w])?;
        match bias {
            Some(bias) => {
                let n = c.ty(bias).numel();
                let bias = c.reshape(bias, &[n, 1, 1])?;
                c.add(y, bias)?
            }
            None => y,
        }
    } else {
        let operands: Vec<Value> = [input, w].into_iter().chain(bias).collect();
        c.op(conv, &operands)?
    };
    one(restore_shape(c, y, &x)?)
}

/// The number of spatial dimensions, from the operator's name.
fn spatial_dims(a: &Call<'_>) -> usize {
    if a.name.contains("1d") { 1 } else { 2 }
}

/// The kernel and the stride of a pool. By default the stride is the kernel.
fn windows(a: &Call<'_>, flat: bool) -> Result<([usize; 2], [usize; 2])> {
    let kernel = pair(&a.ints("kernel_size")?, flat, 1)?;
    Ok(match a.ints_or("stride", &[])? {
        none if none.is_empty() => (kernel, kernel),
        stride => (kernel, pair(&stride, flat, 1)?),
    })
}

/// Shrinks windows that are larger than their padded operand. With `ceil_mode` there is one such window, of which only
/// the elements inside count.
fn shrink(
    input: &[usize],
    kernel: &mut [usize; 2],
    stride: &mut [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
) -> Result<()> {
    for i in 0..2 {
        let padded =
            padding[i].checked_mul(2).and_then(|p| p.checked_add(input[i])).ok_or("its padding is too large")?;
        let reach = kernel[i].saturating_sub(1).checked_mul(dilation[i]).and_then(|r| r.checked_add(1));
        let reach = reach.ok_or("its window is too large")?;
        if padded > 0 && dilation[i] > 0 && reach > padded && reach - padded < stride[i] {
            (kernel[i], stride[i]) = ((padded - 1) / dilation[i] + 1, padded);
        }
    }
    Ok(())
}

fn max_pool(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let x = image(c, x, spatial_dims(a))?;
    let (mut kernel, mut stride) = windows(a, x.flat)?;
    let padding = pair(&a.ints_or("padding", &[0])?, x.flat, 0)?;
    let dilation = pair(&a.ints_or("dilation", &[1])?, x.flat, 1)?;
    let ceil_mode = a.bool_or("ceil_mode", false)?;
    if ceil_mode {
        shrink(&c.shape(x.value)[2..], &mut kernel, &mut stride, padding, dilation)?;
    }
    let op = MaxPool2d { kernel, stride, padding, dilation, ceil_mode };
    let results = c.apply(op, &[x.value])?;
    results.into_iter().map(|y| restore_shape(c, y, &x).map(Output::Value)).collect()
}

fn avg_pool(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let x = image(c, x, spatial_dims(a))?;
    let (mut kernel, mut stride) = windows(a, x.flat)?;
    let divisor = a.number("divisor_override")?;
    let padding = pair(&a.ints_or("padding", &[0])?, x.flat, 0)?;
    let ceil_mode = a.bool_or("ceil_mode", false)?;
    if ceil_mode {
        shrink(&c.shape(x.value)[2..], &mut kernel, &mut stride, padding, [1, 1])?;
    }
    let op = AvgPool2d {
        kernel,
        stride,
        padding,
        ceil_mode,
        count_include_pad: divisor.is_some() || a.bool_or("count_include_pad", true)?,
    };
    if divisor.is_some() && op.ceil_mode {
        return Err("divisor_override with ceil_mode is not supported".into());
    }
    let mut y = c.op(op, &[x.value])?;
    if let Some(divisor) = divisor {
        y = c.mul_scalar(y, kernel[0] as f64 * kernel[1] as f64 / divisor)?;
    }
    one(restore_shape(c, y, &x)?)
}

fn adaptive_avg_pool(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let x = image(c, x, spatial_dims(a))?;
    let output = pair(&a.ints("output_size")?, x.flat, 1)?;
    if c.shape(x.value)[2..] == output {
        return one(restore_shape(c, x.value, &x)?);
    }
    let y = c.op(AdaptiveAvgPool2d { output }, &[x.value])?;
    one(restore_shape(c, y, &x)?)
}

fn adaptive_max_pool(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let x = image(c, x, 2)?;
    let output = pair(&a.ints("output_size")?, false, 1)?;
    let shape = c.shape(x.value);
    if output.contains(&0) || !shape[2].is_multiple_of(output[0]) || !shape[3].is_multiple_of(output[1]) {
        return Err(format!("{:?} is not a multiple of {output:?} regions", &shape[2..]).into());
    }
    let kernel = [shape[2] / output[0], shape[3] / output[1]];
    let op = MaxPool2d { kernel, stride: kernel, padding: [0, 0], dilation: [1, 1], ceil_mode: false };
    let results = c.apply(op, &[x.value])?;
    results.into_iter().map(|y| restore_shape(c, y, &x).map(Output::Value)).collect()
}

#[derive(Clone, Copy)]
enum Method {
    Nearest { exact: bool },
    Linear,
    Cubic,
}

/// Resizes each direction by a product with a matrix, since resizing is linear in the operand.
fn resize(c: &mut Context<'_>, a: &Call<'_>, method: Method) -> Result<Vec<Output>> {
    let x = a.value(c, if a.has("input") { "input" } else { "self" })?;
    let x = image(c, x, spatial_dims(a))?;
    let shape = c.shape(x.value);
    let count = if x.flat { 1 } else { 2 };
    let factors = match a.argument("scale_factors") {
        Some(crate::schema::Argument::AsFloats(all)) => all.iter().map(|n| Some(n.0)).collect(),
        _ if x.flat => vec![a.number("scales")?],
        _ => vec![a.number("scales_h")?, a.number("scales_w")?],
    };
    let output = match a.has("output_size") {
        true => a.sizes("output_size")?,
        false => (0..count)
            .map(|i| {
                let scaled = shape[4 - count + i] as f64 * factors.get(i).copied().flatten().unwrap_or(1.0);
                size(scaled.floor() as i64)
            })
            .collect::<Result<_>>()?,
    };
    if output.len() != count {
        return Err("its number of sizes does not match its operand".into());
    }
    let align = a.bool_or("align_corners", false)?;
    let mut y = x.value;
    for (i, &wanted) in output.iter().enumerate() {
        let dim = 4 - count + i;
        // As in PyTorch, given sizes determine the scale.
        let factor = factors.get(i).copied().flatten().filter(|_| !a.has("output_size"));
        y = resize_dim(c, y, dim, wanted, method, align, factor)?;
    }
    one(restore_shape(c, y, &x)?)
}

/// Resizes one direction of an image.
fn resize_dim(
    c: &mut Context<'_>,
    x: Value,
    dim: usize,
    wanted: usize,
    method: Method,
    align: bool,
    factor: Option<f64>,
) -> Result<Value> {
    let n = c.shape(x)[dim];
    if n == wanted && factor.is_none_or(|f| f == 1.0) {
        return Ok(x);
    }
    let weights = n.checked_mul(wanted).filter(|count| (1..=MAX_CONSTANT_BYTES / size_of::<f64>()).contains(count));
    let count = weights.ok_or_else(|| format!("cannot resize {n} elements to {wanted}"))?;
    let scale = match factor {
        _ if align && !matches!(method, Method::Nearest { .. }) => {
            if wanted > 1 {
                (n - 1) as f64 / (wanted - 1) as f64
            } else {
                0.0
            }
        }
        Some(f) => 1.0 / f,
        None => n as f64 / wanted as f64,
    };
    let last = n as i64 - 1;
    if let Method::Nearest { exact } = method {
        let at = |i: usize| (((i as f64 + if exact { 0.5 } else { 0.0 }) * scale).floor() as i64).clamp(0, last);
        return c.index_select(x, dim, &(0..wanted).map(at).collect::<Vec<_>>());
    }
    let mut weights = vec![0.0; count];
    for i in 0..wanted {
        let place = if align { i as f64 * scale } else { (i as f64 + 0.5) * scale - 0.5 };
        let taps: Vec<(i64, f64)> = match method {
            Method::Cubic => {
                let low = place.floor();
                let t = place - low;
                (-1..=2).map(|k| ((low as i64).saturating_add(k), cubic(t - k as f64))).collect()
            }
            _ => {
                let place = place.max(0.0);
                let low = place.floor();
                vec![(low as i64, 1.0 - (place - low)), ((low as i64).saturating_add(1), place - low)]
            }
        };
        for (at, weight) in taps {
            weights[i * n + at.clamp(0, last) as usize] += weight;
        }
    }
    let matrix = HostTensor::from_f64([wanted, n], &weights)?.cast(c.dtype(x))?;
    let matrix = c.constant(matrix)?;
    if dim == 2 {
        return c.matmul(matrix, x);
    }
    let transposed = c.transpose(matrix)?;
    c.matmul(x, transposed)
}

/// Keys' kernel (1981) with a = -0.75, as in PyTorch.
fn cubic(t: f64) -> f64 {
    const A: f64 = -0.75;
    let t = t.abs();
    if t <= 1.0 {
        ((A + 2.0) * t - (A + 3.0)) * t * t + 1.0
    } else if t < 2.0 {
        ((A * t - 5.0 * A) * t + 8.0 * A) * t - 4.0 * A
    } else {
        0.0
    }
}

use fusionllm_graph::ops::{AdaptiveAvgPool2d, BatchNorm, Conv2d, MaxPool2d, Unary};
use fusionllm_graph::{Builder, DType, Graph, GraphError, Init, ValueId};
use serde::{Deserialize, Serialize};

use crate::count_correct;

/// The first layers of a residual network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ResNetStem {
    /// A 7x7 convolution and a pool, both with stride 2.
    #[default]
    Imagenet,
    /// A 3x3 convolution with stride 1.
    Cifar,
}

/// A residual network (He et al., 2016), with the layout and parameter names of torchvision. Its bottlenecks have the
/// stride in the 3x3 convolution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResNetConfig {
    /// Number of layers: 18, 34, 50, 101 or 152.
    pub depth: usize,
    /// Number of classes.
    pub num_classes: usize,
    /// The first layers.
    pub stem: ResNetStem,
    /// Number of channels after the stem.
    pub width: usize,
}

impl Default for ResNetConfig {
    fn default() -> Self {
        Self { depth: 18, num_classes: 1000, stem: ResNetStem::Imagenet, width: 64 }
    }
}

impl ResNetConfig {
    /// The number of blocks in each of the four stages, and whether they are bottlenecks.
    fn layout(&self) -> Result<([usize; 4], bool), GraphError> {
        match self.depth {
            18 => Ok(([2, 2, 2, 2], false)),
            34 => Ok(([3, 4, 6, 3], false)),
            50 => Ok(([3, 4, 6, 3], true)),
            101 => Ok(([3, 4, 23, 3], true)),
            152 => Ok(([3, 8, 36, 3], true)),
            d => Err(GraphError::Config(format!("depth = {d} is not supported; use 18, 34, 50, 101 or 152"))),
        }
    }

    /// The graph for micro-batches of `batch` images of `size` x `size` pixels.
    ///
    /// The inputs are `pixel_values [batch, 3, size, size]` and `labels`, `i64 [batch]`.
    pub fn build(&self, batch: usize, size: usize, dtype: DType) -> Result<Graph, GraphError> {
        let (blocks, bottleneck) = self.layout()?;
        if self.num_classes == 0 || self.width == 0 || batch == 0 {
            return Err(GraphError::Config(
                "num_classes, width and the size of the micro-batch must be positive".into(),
            ));
        }
        let mut b = Builder::new(format!("resnet{}", self.depth));
        let pixels = b.input("pixel_values", dtype, [batch, 3, size, size])?;
        let labels = b.input("labels", DType::I64, [batch])?;
        let mut x = match self.stem {
            ResNetStem::Imagenet => {
                let x = conv_bn(&mut b, pixels, ["conv1", "bn1"], self.width, 7, 2)?;
                let x = b.unary(Unary::Relu, x)?;
                let pool =
                    MaxPool2d { kernel: [3, 3], stride: [2, 2], padding: [1, 1], dilation: [1, 1], ceil_mode: false };
                b.scope("maxpool", |b| b.op(pool, &[x]))?
            }
            ResNetStem::Cifar => {
                let x = conv_bn(&mut b, pixels, ["conv1", "bn1"], self.width, 3, 1)?;
                b.unary(Unary::Relu, x)?
            }
        };
        for (stage, &count) in blocks.iter().enumerate() {
            let planes = self.width << stage;
            for block in 0..count {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                x = b.scope(format!("layer{}.{block}", stage + 1), |b| residual(b, x, planes, stride, bottleneck))?;
            }
        }
        let x = b.scope("avgpool", |b| b.op(AdaptiveAvgPool2d { output: [1, 1] }, &[x]))?;
        let features = b.ty(x).shape[1];
        let x = b.reshape(x, [batch, features])?;
        let logits = b.scope("fc", |b| {
            let init = Init::Uniform { bound: 1.0 / (features as f64).sqrt() };
            let w = b.parameter("weight", dtype, [self.num_classes, features], init.clone())?;
            let bias = b.parameter("bias", dtype, [self.num_classes], init)?;
            b.linear(x, w, Some(bias))
        })?;
        let loss = b.scope("loss", |b| b.cross_entropy(logits, labels, -100))?;
        b.output("logits", logits)?;
        b.output("loss", loss)?;
        let correct = b.scope("correct", |b| count_correct(b, logits, labels, dtype))?;
        b.output("correct", correct)?;
        let config = serde_json::to_value(self).map_err(|e| GraphError::Config(e.to_string()))?;
        b.metadata("family", "resnet".into());
        b.metadata("config", config);
        b.finish()
    }
}

/// A convolution without bias, then batch normalisation. Padding keeps the size at stride 1.
fn conv_bn(
    b: &mut Builder,
    x: ValueId,
    names: [&str; 2],
    planes: usize,
    kernel: usize,
    stride: usize,
) -> Result<ValueId, GraphError> {
    let dtype = b.ty(x).dtype;
    let channels = b.ty(x).shape[1];
    let y = b.scope(names[0], |b| {
        // Kaiming normal initialisation with the fan-out, for ReLU.
        let std = (2.0 / (planes * kernel * kernel) as f64).sqrt();
        let w = b.parameter("weight", dtype, [planes, channels, kernel, kernel], Init::Normal { std })?;
        let padding = kernel / 2;
        b.conv2d(x, w, None, Conv2d { stride: [stride; 2], padding: [padding; 2], dilation: [1, 1], groups: 1 })
    })?;
    b.scope(names[1], |b| {
        let w = b.parameter("weight", dtype, [planes], Init::Constant(1.0))?;
        let bias = b.parameter("bias", dtype, [planes], Init::Constant(0.0))?;
        let mean = b.buffer("running_mean", dtype, [planes], Init::Constant(0.0))?;
        let var = b.buffer("running_var", dtype, [planes], Init::Constant(1.0))?;
        let out = b.apply(BatchNorm { momentum: 0.1, eps: 1e-5 }, &[y, w, bias, mean, var])?;
        b.update_buffer(mean, out[3])?;
        b.update_buffer(var, out[4])?;
        Ok(out[0])
    })
}

fn residual(
    b: &mut Builder,
    x: ValueId,
    planes: usize,
    stride: usize,
    bottleneck: bool,
) -> Result<ValueId, GraphError> {
    let out = if bottleneck { 4 * planes } else { planes };
    let y = if bottleneck {
        let y = conv_bn(b, x, ["conv1", "bn1"], planes, 1, 1)?;
        let y = b.unary(Unary::Relu, y)?;
        let y = conv_bn(b, y, ["conv2", "bn2"], planes, 3, stride)?;
        let y = b.unary(Unary::Relu, y)?;
        conv_bn(b, y, ["conv3", "bn3"], out, 1, 1)?
    } else {
        let y = conv_bn(b, x, ["conv1", "bn1"], planes, 3, stride)?;
        let y = b.unary(Unary::Relu, y)?;
        conv_bn(b, y, ["conv2", "bn2"], planes, 3, 1)?
    };
    let shortcut = if stride != 1 || b.ty(x).shape[1] != out {
        conv_bn(b, x, ["downsample.0", "downsample.1"], out, 1, stride)?
    } else {
        x
    };
    let sum = b.add(y, shortcut)?;
    b.unary(Unary::Relu, sum)
}

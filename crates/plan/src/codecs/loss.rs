//! The loss that codecs cost.

use std::fmt;
use std::sync::LazyLock;

use fusionllm_compress::{Codec, Element, TopK};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How much the loss may rise by codecs, as a share of the loss without them: half a percent unless a job says otherwise.
///
/// It is compared with what codecs cost in measurements with small models. So it is an estimate, and no guarantee.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct LossBudget(f64);

impl LossBudget {
    /// A budget. `None` unless the share is from 0 to 1.
    pub fn new(share: f64) -> Option<Self> {
        (0.0..=1.0).contains(&share).then_some(Self(share))
    }

    /// The share of the loss.
    pub fn share(self) -> f64 {
        self.0
    }
}

impl Default for LossBudget {
    fn default() -> Self {
        Self(0.005)
    }
}

impl fmt::Display for LossBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", (self.0 * 1e12).round() / 1e10)
    }
}

/// In files, it has a unit. Between programs, it is the share.
impl Serialize for LossBudget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() { serializer.collect_str(self) } else { self.0.serialize(serializer) }
    }
}

impl<'de> Deserialize<'de> for LossBudget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let share = if deserializer.is_human_readable() {
            let text = String::deserialize(deserializer)?;
            let number = text.strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
            number.ok_or_else(|| Error::custom(format!("{text:?} is no percentage, such as \"0.5 %\"")))? / 100.0
        } else {
            f64::deserialize(deserializer)?
        };
        Self::new(share).ok_or_else(|| Error::custom("a budget of loss is from 0 to 100 %"))
    }
}

/// The loss that a codec cost in one set of runs.
#[derive(Debug, Clone, Deserialize)]
struct Row {
    codec: String,
    /// Bytes of f32 over bytes on the wire, for top-k.
    #[serde(default)]
    ratio: Option<f64>,
    /// By seed: the rise of the validation loss over that of the same run without a codec, in percent.
    change_percent: Vec<f64>,
}

/// The rows of `losses.json`. `scripts/compression.py table` makes that file.
static ROWS: LazyLock<Vec<Row>> = LazyLock::new(|| {
    let rows = serde_json::from_str(include_str!("losses.json"));
    rows.map(|Table { rows }| rows).unwrap_or_default()
});

#[derive(Deserialize)]
struct Table {
    rows: Vec<Row>,
}

/// By how much a codec raises the loss, as a share of the loss without it, when most numbers have the type `element`.
/// `None` if it was not measured.
pub(super) fn added_loss(codec: &Codec, element: Element) -> Option<f64> {
    match codec {
        Codec::None | Codec::Bf16 => Some(0.0),
        // A codec for top-k of another format is not what was measured.
        Codec::TopK(TopK { ratio, values: None }) => {
            let ratio = ratio * Element::F32.bytes() as f64 / element.bytes() as f64;
            let points = topk_points();
            let after = points.iter().position(|(at, _)| *at >= ratio * 0.999)?;
            let ((high, rise), (low, before)) = (points[after], points[after.checked_sub(1)?]);
            Some(before + (rise - before) * ((ratio - low) / (high - low)).min(1.0))
        }
        Codec::TopK(_) => None,
        other => mean(|row| row.codec == other.name()),
    }
}

/// The highest ratio at which top-k raises the loss by no more than a share, for numbers of f32.
pub(super) fn gentlest_topk(budget: f64) -> f64 {
    let mut most = 1.0;
    for pair in topk_points().windows(2) {
        let [(low, before), (high, rise)] = [pair[0], pair[1]];
        most = match budget {
            _ if rise <= budget => high,
            _ if before <= budget => low + (high - low) * (budget - before) / (rise - before),
            _ => break,
        };
    }
    most
}

/// The ratio at which numbers of `element` get as many bits as those of f32 get at `ratio`.
pub(super) fn of_f32(ratio: f64, element: Element) -> f64 {
    ratio * element.bytes() as f64 / Element::F32.bytes() as f64
}

/// The ratio of top-k and the rise of the loss, in ascending order. A larger ratio that did less harm shows that the
/// smaller one does no more either: seeds differ by more than such neighbours do.
fn topk_points() -> Vec<(f64, f64)> {
    let mut ratios: Vec<f64> = ROWS.iter().filter(|row| row.codec == "topk").filter_map(|row| row.ratio).collect();
    ratios.sort_by(f64::total_cmp);
    ratios.dedup();
    let rise = |ratio: f64| mean(|row| row.codec == "topk" && row.ratio == Some(ratio)).map(|rise| (ratio, rise));
    let mut points: Vec<(f64, f64)> = [(1.0, 0.0)].into_iter().chain(ratios.into_iter().filter_map(rise)).collect();
    let mut least = f64::INFINITY;
    for (_, rise) in points.iter_mut().rev() {
        least = least.min(*rise);
        *rise = least;
    }
    points
}

/// The mean rise over all seeds of these rows, as a share. Less than nothing is chance.
fn mean(of: impl Fn(&Row) -> bool) -> Option<f64> {
    let all: Vec<f64> = ROWS.iter().filter(|row| of(row)).flat_map(|row| row.change_percent.iter().copied()).collect();
    (!all.is_empty()).then(|| (all.iter().sum::<f64>() / all.len() as f64 / 100.0).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_rows_that_the_choice_needs() {
        assert!(ROWS.iter().all(|row| !row.change_percent.is_empty()), "{ROWS:?}");
        let topk = |ratio| added_loss(&Codec::TopK(TopK { ratio, values: None }), Element::F32);
        let losses: Vec<f64> = [2.0, 5.0, 7.0, 9.0, 10.0].map(|ratio| topk(ratio).unwrap()).to_vec();
        assert!(losses.is_sorted() && losses[4] > 0.0, "{losses:?}");
        assert_eq!(topk(1000.0), None, "nothing is known beyond the largest measured ratio");
        for name in ["int8", "int4-hadamard"] {
            let loss = added_loss(&Codec::from_name(name, 1.0).unwrap(), Element::F32).unwrap();
            assert!((0.0..0.1).contains(&loss), "{name}: {loss}");
        }
        // Half as many bits before: the same bits on the wire, and the same harm.
        let half = added_loss(&Codec::TopK(TopK { ratio: 4.0, values: None }), Element::Bf16);
        assert_eq!(half, topk(8.0));
        for budget in [0.003, 0.005, 0.01, 0.02] {
            let ratio = gentlest_topk(budget);
            assert!(topk(ratio).unwrap() <= budget + 1e-9 && topk(ratio * 1.02).is_none_or(|l| l > budget), "{ratio}");
        }
    }

    #[test]
    fn a_budget_is_written_with_its_unit() {
        let budget = LossBudget::new(0.07).unwrap();
        assert_eq!(serde_json::to_string(&budget).unwrap(), "\"7 %\"");
        assert_eq!(serde_json::from_str::<LossBudget>("\"0.5 %\"").unwrap(), LossBudget::default());
        let bytes = postcard::to_stdvec(&budget).unwrap();
        assert_eq!(postcard::from_bytes::<LossBudget>(&bytes).unwrap(), budget);
        assert!(serde_json::from_str::<LossBudget>("\"101%\"").is_err());
        assert!(serde_json::from_str::<LossBudget>("\"much\"").unwrap_err().to_string().contains("no percentage"));
    }
}

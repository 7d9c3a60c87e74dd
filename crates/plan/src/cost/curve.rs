use std::collections::BTreeMap;

/// Measured seconds or bytes of an operator, as a function of its work.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "Vec<(f64, f64)>", into = "Vec<(f64, f64)>")]
pub struct Curve(Vec<(f64, f64)>);

/// Curves by name.
pub type Curves = BTreeMap<String, Curve>;

impl Curve {
    /// A curve through points of (work, seconds or bytes).
    ///
    /// `None` if there is no point, if work does not ascend, or if a figure is not finite and above zero.
    pub fn new(points: Vec<(f64, f64)>) -> Option<Self> {
        let valid = |x: f64| x > 0.0 && x.is_finite();
        let ascending = points.windows(2).all(|w| w[0].0 < w[1].0);
        (!points.is_empty() && ascending && points.iter().all(|&(w, s)| valid(w) && valid(s))).then_some(Self(points))
    }

    /// The points of (work, seconds or bytes).
    pub fn points(&self) -> &[(f64, f64)] {
        &self.0
    }

    /// The curve of a device that is `times` as fast.
    pub fn faster(&self, times: f64) -> Self {
        Self(self.0.iter().map(|(work, seconds)| (*work, seconds / times)).collect())
    }

    /// The value for this much work: a power law between neighbouring points, constant below the first point, and
    /// proportional to work above the last.
    pub fn at(&self, work: f64) -> f64 {
        let at = self.0.partition_point(|p| p.0 < work);
        match (at.checked_sub(1).map(|i| self.0[i]), self.0.get(at)) {
            (Some((w0, s0)), Some(&(w1, s1))) => s0 * ((work / w0).ln() / (w1 / w0).ln() * (s1 / s0).ln()).exp(),
            (Some((w, s)), None) => s * work / w,
            (None, Some(&(_, s))) => s,
            (None, None) => 0.0,
        }
    }
}

impl TryFrom<Vec<(f64, f64)>> for Curve {
    type Error = String;

    fn try_from(points: Vec<(f64, f64)>) -> Result<Self, String> {
        Self::new(points).ok_or_else(|| "measured points must have ascending work and figures above zero".into())
    }
}

impl From<Curve> for Vec<(f64, f64)> {
    fn from(c: Curve) -> Self {
        c.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_passes_through_its_points() {
        let c = Curve::new(vec![(1e3, 1e-6), (1e5, 1e-5)]).unwrap();
        assert_eq!(c.at(0.0), 1e-6, "constant below the first point");
        assert!((c.at(1e3) - 1e-6).abs() < 1e-18);
        assert!((c.at(1e4) - 10f64.powf(-5.5)).abs() < 1e-12, "the middle on logarithmic axes");
        assert!((c.at(1e6) - 1e-4).abs() < 1e-15, "proportional above the last point");
        assert_eq!(Curve::new(vec![(2.0, 1.0), (1.0, 1.0)]), None);
        assert_eq!(Curve::new(vec![]), None);
    }
}

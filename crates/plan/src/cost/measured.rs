use serde::{Deserialize, Serialize};

use super::curve::{Curve, Curves};
use super::operators::RESULTS;

/// The two steps of a codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CodecStep {
    /// From a tensor to bytes.
    Encode,
    /// From bytes to a tensor.
    Decode,
}

/// The direction of a copy between a device's memory and the network's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyDirection {
    /// From the device.
    Download,
    /// To the device.
    Upload,
}

/// Measured curves of operators.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Curves", into = "Curves")]
pub struct OperatorCurves {
    /// By ATen name: operators in general.
    pub by_name: Curves,
    /// By [`signature`](crate::signature): a model's own operators.
    pub by_signature: Curves,
}

/// Times that were measured on a device, in seconds. Serialised as one map from string to curve.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Curves", into = "Curves")]
pub struct Measured {
    /// Operators, by their [`work_units`](crate::work_units).
    pub operators: OperatorCurves,
    /// By codec name: encoding, by bytes of the tensor.
    pub encode: Curves,
    /// By codec name: decoding, by bytes of the tensor.
    pub decode: Curves,
    /// Copies from the device, by bytes of the tensor.
    pub download: Option<Curve>,
    /// Copies to the device, by bytes of the tensor.
    pub upload: Option<Curve>,
    /// The processor's time to send or receive, divided by the number of computing threads, by bytes on the wire.
    pub traffic: Option<Curve>,
    /// The same for bytes whose packets are sent and received one at a time, as slow lines carry them.
    pub packets: Option<Curve>,
}

const ENCODE: &str = "encode.";
const DECODE: &str = "decode.";
const DOWNLOAD: &str = "download";
const UPLOAD: &str = "upload";
const TRAFFIC: &str = "traffic";
const PACKETS: &str = "packets";

impl OperatorCurves {
    /// Whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty() && self.by_signature.is_empty()
    }

    /// Adds a curve. A key with operand types is a signature; any other key is a name.
    fn insert(&mut self, key: String, curve: Curve) {
        let map = if key.contains(RESULTS) { &mut self.by_signature } else { &mut self.by_name };
        map.insert(key, curve);
    }

    fn curves_mut(&mut self) -> impl Iterator<Item = &mut Curve> {
        self.by_name.values_mut().chain(self.by_signature.values_mut())
    }
}

impl Measured {
    /// Whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many times as long operators take here as in another measurement of the same device: those of a model, if
    /// both have any. `None` without a common operator.
    pub fn times_as_long(&self, other: &Self) -> Option<f64> {
        let common = |ours: &Curves, theirs: &Curves| {
            let both = theirs.iter().filter_map(|(key, theirs)| Some((ours.get(key)?, theirs)));
            let at_largest = both.filter_map(|(ours, theirs)| {
                let (work, seconds) = *theirs.points().last()?;
                Some((ours.at(work), seconds))
            });
            let (ours, theirs) = at_largest.fold((0.0, 0.0), |sum, each| (sum.0 + each.0, sum.1 + each.1));
            (theirs > 0.0).then(|| ours / theirs)
        };
        let of = |curves: fn(&OperatorCurves) -> &Curves| common(curves(&self.operators), curves(&other.operators));
        of(|operators| &operators.by_signature).or_else(|| of(|operators| &operators.by_name))
    }

    /// The number of curves.
    pub fn len(&self) -> usize {
        let maps = [&self.operators.by_name, &self.operators.by_signature, &self.encode, &self.decode];
        let single = [&self.download, &self.upload, &self.traffic, &self.packets];
        maps.iter().map(|m| m.len()).sum::<usize>() + single.iter().filter(|c| c.is_some()).count()
    }

    /// The curves of one step of a codec, by codec name.
    pub fn codecs_mut(&mut self, step: CodecStep) -> &mut Curves {
        match step {
            CodecStep::Encode => &mut self.encode,
            CodecStep::Decode => &mut self.decode,
        }
    }

    /// The curves of one step of a codec, by codec name.
    pub fn codecs(&self, step: CodecStep) -> &Curves {
        match step {
            CodecStep::Encode => &self.encode,
            CodecStep::Decode => &self.decode,
        }
    }

    /// The curve of copies in one direction.
    pub fn copies(&self, direction: CopyDirection) -> Option<&Curve> {
        match direction {
            CopyDirection::Download => self.download.as_ref(),
            CopyDirection::Upload => self.upload.as_ref(),
        }
    }

    /// The curve of copies in one direction.
    pub fn copies_mut(&mut self, direction: CopyDirection) -> &mut Option<Curve> {
        match direction {
            CopyDirection::Download => &mut self.download,
            CopyDirection::Upload => &mut self.upload,
        }
    }

    /// Every curve.
    pub(crate) fn curves_mut(&mut self) -> impl Iterator<Item = &mut Curve> {
        let codecs = self.encode.values_mut().chain(self.decode.values_mut());
        let single = [&mut self.download, &mut self.upload, &mut self.traffic, &mut self.packets].into_iter().flatten();
        self.operators.curves_mut().chain(codecs).chain(single)
    }
}

impl From<Curves> for OperatorCurves {
    fn from(map: Curves) -> Self {
        let mut curves = Self::default();
        map.into_iter().for_each(|(key, curve)| curves.insert(key, curve));
        curves
    }
}

impl From<OperatorCurves> for Curves {
    fn from(c: OperatorCurves) -> Self {
        c.by_name.into_iter().chain(c.by_signature).collect()
    }
}

impl From<Curves> for Measured {
    fn from(map: Curves) -> Self {
        let mut m = Self::default();
        for (key, curve) in map {
            if let Some(codec) = key.strip_prefix(ENCODE) {
                m.encode.insert(codec.to_owned(), curve);
            } else if let Some(codec) = key.strip_prefix(DECODE) {
                m.decode.insert(codec.to_owned(), curve);
            } else {
                match key.as_str() {
                    DOWNLOAD => m.download = Some(curve),
                    UPLOAD => m.upload = Some(curve),
                    TRAFFIC => m.traffic = Some(curve),
                    PACKETS => m.packets = Some(curve),
                    _ => m.operators.insert(key, curve),
                }
            }
        }
        m
    }
}

impl From<Measured> for Curves {
    fn from(m: Measured) -> Self {
        let mut map = Self::from(m.operators);
        map.extend(m.encode.into_iter().map(|(codec, curve)| (format!("{ENCODE}{codec}"), curve)));
        map.extend(m.decode.into_iter().map(|(codec, curve)| (format!("{DECODE}{codec}"), curve)));
        let single = [(DOWNLOAD, m.download), (UPLOAD, m.upload), (TRAFFIC, m.traffic), (PACKETS, m.packets)];
        map.extend(single.into_iter().filter_map(|(key, curve)| Some((key.to_owned(), curve?))));
        map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_survive_their_map() {
        let curve = |seconds| Curve::new(vec![(1.0, seconds)]).unwrap();
        let keys = ["mm", "mm f32[2, 2] f32[2, 2] -> f32[2, 2]", "encode.int8", "decode.int8", "download", "upload"];
        let mut map: Curves = keys.iter().zip(1..).map(|(k, s)| (k.to_string(), curve(f64::from(s)))).collect();
        map.insert("traffic".into(), curve(9.0));
        map.insert("packets".into(), curve(10.0));
        let measured = Measured::from(map.clone());
        assert_eq!(measured.len(), map.len());
        assert_eq!(measured.operators.by_signature[keys[1]], curve(2.0));
        assert_eq!(measured.codecs(CodecStep::Decode)["int8"], curve(4.0));
        assert_eq!(measured.copies(CopyDirection::Upload), Some(&curve(6.0)));
        assert_eq!(Curves::from(measured), map);
    }
}

//! Settings that are numbers.

use super::tree::{Item, Node};
use super::{JobError, Section};

/// The largest size. No model or batch comes near it, and a product of two sizes does not overflow.
const MAX_SIZE: u64 = i32::MAX as u64;

impl Section<'_> {
    /// A whole number of at least `least`. A float is accepted if it is whole (`1e3`).
    pub(in crate::config) fn count(&self, key: &'static str, least: u64) -> Result<Option<u64>, JobError> {
        self.whole(key, least, Some(i64::MAX as u64))
    }

    /// [`Self::count`] for sizes in memory, which have a limit.
    pub(in crate::config) fn size(&self, key: &'static str, least: u64) -> Result<Option<usize>, JobError> {
        Ok(self.whole(key, least, Some(MAX_SIZE))?.map(|n| n as usize))
    }

    /// [`Self::count`] for a size that another setting limits. The code that reads the setting names that limit.
    pub(in crate::config) fn part(&self, key: &'static str, least: u64) -> Result<Option<usize>, JobError> {
        Ok(self.whole(key, least, None)?.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
    }

    fn whole(&self, key: &'static str, least: u64, most: Option<u64>) -> Result<Option<u64>, JobError> {
        let Some(node) = self.node(key) else { return Ok(None) };
        let range = |value: i128| match most {
            _ if value < i128::from(least) => Err(format!("it must be at least {least}")),
            Some(most) if value > i128::from(most) => Err(format!("it must be at most {most}")),
            _ => Ok(u64::try_from(value).unwrap_or(u64::MAX)),
        };
        let value = match node.item {
            Item::Integer(i) => i128::from(i),
            Item::Number(x) if is_whole(x) => x as i128,
            _ => {
                let meant = node.item.quoted_number().filter(|x| is_whole(*x)).and_then(|x| range(x as i128).ok());
                let hint = match meant {
                    Some(meant) => format!("write {key} = {meant}"),
                    None => format!("it must be a whole number of at least {least}"),
                };
                return Err(self.wrong_type(key, node, "a whole number", hint));
            }
        };
        let out_of_range = |hint| self.error(key, format!("`{}` is {value}", self.full_name(key)), hint);
        range(value).map(Some).map_err(out_of_range)
    }

    /// A finite number that `valid` accepts. `rule` describes the valid ones.
    pub(in crate::config) fn number(
        &self,
        key: &'static str,
        rule: &str,
        valid: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, JobError> {
        let Some(node) = self.node(key) else { return Ok(None) };
        let Some(value) = plain(node) else {
            let hint = match node.item.quoted_number().filter(|x| valid(*x)) {
                Some(meant) => format!("write {key} = {meant:?}"),
                None => format!("it must be a number {rule}"),
            };
            return Err(self.wrong_type(key, node, "a number", hint));
        };
        if value.is_finite() && valid(value) {
            return Ok(Some(value));
        }
        let finite = if value.is_finite() { "" } else { "a finite number " };
        let message = format!("`{}` is {value}", self.full_name(key));
        Err(self.error(key, message, format!("it must be {finite}{rule}")))
    }

    /// Two numbers in a list.
    pub(in crate::config) fn pair(
        &self,
        key: &'static str,
        rule: &str,
        valid: impl Fn(f64) -> bool,
    ) -> Result<Option<[f64; 2]>, JobError> {
        let Some(node) = self.node(key) else { return Ok(None) };
        let Item::List(nodes) = &node.item else {
            let hint = format!("write two numbers in brackets, such as {key} = [0.9, 0.95]");
            return Err(self.wrong_type(key, node, "two numbers", hint));
        };
        let numbers: Option<Vec<f64>> = nodes.iter().map(plain).collect();
        match numbers.as_deref() {
            Some(&[a, b]) if valid(a) && valid(b) => Ok(Some([a, b])),
            Some(&[_, _]) => {
                let message = format!("`{}` is out of range", self.full_name(key));
                Err(self.error(key, message, format!("both must be {rule}")))
            }
            _ => {
                let meant: Option<Vec<f64>> =
                    nodes.iter().map(|n| plain(n).or_else(|| n.item.quoted_number())).collect();
                let hint = match meant.as_deref() {
                    Some(&[a, b]) if valid(a) && valid(b) => format!("write {key} = [{a:?}, {b:?}]"),
                    _ => format!("write two numbers in brackets, such as {key} = [0.9, 0.95]"),
                };
                Err(self.error(key, format!("`{}` takes two numbers", self.full_name(key)), hint))
            }
        }
    }

    /// One of a few whole numbers.
    pub(in crate::config) fn one_of(
        &self,
        key: &'static str,
        what: &str,
        valid: &[usize],
    ) -> Result<Option<usize>, JobError> {
        let Some(node) = self.node(key) else { return Ok(None) };
        let all: Vec<String> = valid.iter().map(usize::to_string).collect();
        let written = plain(node).or_else(|| node.item.quoted_number());
        let meant = valid.iter().find(|n| written == Some(**n as f64));
        match (plain(node), meant) {
            (Some(_), Some(n)) => Ok(Some(*n)),
            (None, Some(n)) => Err(self.wrong_type(key, node, "a number", format!("write {key} = {n}"))),
            (Some(x), None) => {
                let message = format!("`{}` is {x}, and there is no {what}{x}", self.full_name(key));
                Err(self.error(key, message, format!("it is one of {}", all.join(", "))))
            }
            (None, None) => Err(self.wrong_type(key, node, "a number", format!("it is one of {}", all.join(", ")))),
        }
    }
}

/// Whether a float is a whole number. Floats that are too large for 64 bits count as whole, because it is their size
/// that is wrong.
fn is_whole(x: f64) -> bool {
    x.is_finite() && x.fract() == 0.0 && x.abs() < 1e30
}

/// The number in a node, if the node is a number.
fn plain(node: &Node) -> Option<f64> {
    match node.item {
        Item::Integer(i) => Some(i as f64),
        Item::Number(x) => Some(x),
        _ => None,
    }
}

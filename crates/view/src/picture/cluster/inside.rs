//! The connections between the blocks of an area.

use super::layout::{Lengths, Place};

/// At most this many connections are drawn between blocks that are not neighbours, the busiest ones.
const FAR: usize = 6;

/// A connection of an area as the points of its path, if it is drawn. `rank` counts those of the area that are no
/// neighbours, before this one.
pub(super) fn path(place: &Place, ends: [usize; 2], rank: &mut usize, l: &Lengths) -> Option<Vec<[f64; 2]>> {
    let [a, b] = [*place.blocks.get(ends[0])?, *place.blocks.get(ends[1])?];
    let middle = |[x, y, w, h]: [f64; 4]| [x + w / 2.0, y + h / 2.0];
    let ([ax, ay], [bx, by]) = (middle(a), middle(b));
    let (row, column) = ((ay - by).abs() < 1.0, (ax - bx).abs() < 1.0);
    if ends[0] == ends[1] {
        return None;
    }
    if row && (ends[1] - ends[0] == 1) {
        let (left, right) = if ax < bx { (a, b) } else { (b, a) };
        return Some(vec![[left[0] + left[2], ay], [right[0], ay]]);
    }
    if column && (ay - by).abs() < 1.5 * (l.height + l.gap[1]) {
        let (upper, lower) = if ay < by { (a, b) } else { (b, a) };
        return Some(vec![[ax, upper[1] + upper[3]], [ax, lower[1]]]);
    }
    if *rank >= FAR {
        return None;
    }
    let shift = 3.5 * (*rank as f64 - 2.0);
    *rank += 1;
    // From the lower edge of the first block through the gap below it, and along a gap between columns to the second.
    let low = a[1] + a[3] + (l.gap[1].min(l.foot) / 2.0) + shift.clamp(-0.3 * l.gap[1], 0.3 * l.gap[1]);
    let start = [ax + 14.0 + 2.0 * shift, a[1] + a[3]];
    if row {
        return Some(vec![
            start,
            [start[0], low],
            [bx - 14.0 + 2.0 * shift, low],
            [bx - 14.0 + 2.0 * shift, b[1] + b[3]],
        ]);
    }
    // A gap at the side of the second block that faces the first. The first column has the area's padding.
    let side = l.gap[0].min(l.pad) / 2.0 + shift.clamp(-0.3 * l.pad, 0.3 * l.pad);
    let (x, edge) = if ax < bx { (b[0] - side, b[0]) } else { (b[0] + b[2] + side, b[0] + b[2]) };
    Some(vec![start, [start[0], low], [x, low], [x, by + 2.0 * shift], [edge, by + 2.0 * shift]])
}

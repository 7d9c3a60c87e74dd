//! Places for areas and their blocks.
//!
//! Areas stand in rows, in pipeline order. The canvas has a fixed width, so rows are as wide as it, and its height
//! follows from them. Below each row is a channel, in which the connections between areas lead (see `wires`).

use super::super::measure::text_width;
use super::scene::Scene;

pub(super) const WIDTH: f64 = 1280.0;
/// Least space at both sides.
pub(super) const MARGIN: f64 = 28.0;

/// Space between two areas of a row.
const BETWEEN: f64 = 26.0;

/// How blocks are drawn. It follows from their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Detail {
    /// With everything that is known.
    Card,
    /// With name, stages and load.
    Compact,
    /// With the stage alone.
    Cell,
}

/// Lengths that follow from the detail.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lengths {
    /// Least and largest width of a block.
    pub(super) width: [f64; 2],
    pub(super) height: f64,
    /// Space between blocks, across and down.
    pub(super) gap: [f64; 2],
    pub(super) pad: f64,
    /// Space below the blocks of an area.
    pub(super) foot: f64,
    /// Least width of an area.
    area: f64,
}

impl Detail {
    fn of(scene: &Scene) -> Self {
        match (scene.areas.iter().map(|a| a.blocks.len()).sum(), scene.areas.len()) {
            (0..=36, 0..=24) => Self::Card,
            (0..=160, 0..=48) => Self::Compact,
            _ => Self::Cell,
        }
    }

    pub(super) fn lengths(self) -> Lengths {
        match self {
            Self::Card => {
                Lengths { width: [210.0, 460.0], height: 100.0, gap: [24.0, 28.0], pad: 16.0, foot: 32.0, area: 242.0 }
            }
            Self::Compact => {
                Lengths { width: [128.0, 260.0], height: 46.0, gap: [18.0, 20.0], pad: 12.0, foot: 26.0, area: 164.0 }
            }
            Self::Cell => {
                Lengths { width: [44.0, 64.0], height: 28.0, gap: [8.0, 8.0], pad: 8.0, foot: 16.0, area: 96.0 }
            }
        }
    }
}

/// An area with its place.
pub(super) struct Place {
    /// Left, top, width, height.
    pub(super) rect: [f64; 4],
    pub(super) row: usize,
    /// Of each block.
    pub(super) blocks: Vec<[f64; 4]>,
}

pub(super) struct Layout {
    pub(super) detail: Detail,
    pub(super) places: Vec<Place>,
    pub(super) rows: usize,
    /// Space at both sides.
    pub(super) margin: f64,
}

/// The areas of a row, by index, and the columns of each.
struct Row {
    first: usize,
    columns: Vec<usize>,
}

impl Layout {
    /// Areas in rows that all start at 0. They are moved down later, when the channels between them are known.
    /// `crossing` counts the connections between rows, which need space at both sides.
    pub(super) fn new(scene: &Scene, crossing: impl Fn(&[Place]) -> usize) -> Self {
        let detail = Detail::of(scene);
        let narrow = |margin| place(scene, detail, margin);
        let places = narrow(MARGIN);
        let (margin, places) = match crossing(&places) {
            0 => (MARGIN, places),
            n => {
                let margin = MARGIN + 8.0 * n.div_ceil(2) as f64;
                (margin, narrow(margin))
            }
        };
        let rows = places.last().map_or(0, |p| p.row + 1);
        Self { detail, places, rows, margin }
    }

    /// The lowest end of a row.
    pub(super) fn bottom(&self, row: usize) -> f64 {
        self.places.iter().filter(|p| p.row == row).map(|p| p.rect[1] + p.rect[3]).fold(0.0, f64::max)
    }

    /// Moves a row.
    pub(super) fn move_down(&mut self, row: usize, by: f64) {
        for p in self.places.iter_mut().filter(|p| p.row == row) {
            p.rect[1] += by;
            p.blocks.iter_mut().for_each(|b| b[1] += by);
        }
    }
}

/// Space above the blocks of an area, for its title.
pub(super) fn head(scene: &Scene, area: usize, detail: Detail) -> f64 {
    let a = &scene.areas[area];
    match (detail, a.title.is_empty(), a.subtitles.is_empty()) {
        (Detail::Cell, true, _) => 10.0,
        (Detail::Cell, ..) => 24.0,
        (_, true, true) => 16.0,
        (_, _, true) => 34.0,
        (_, _, false) => 52.0,
    }
}

fn place(scene: &Scene, detail: Detail, margin: f64) -> Vec<Place> {
    let room = WIDTH - 2.0 * margin;
    let rows = rows(scene, detail, room);
    let l = detail.lengths();
    let mut places = Vec::new();
    for (number, row) in rows.iter().enumerate() {
        let least: Vec<f64> = row.columns.iter().map(|c| area_width(*c, &l)).collect();
        let gaps = BETWEEN * (row.columns.len() as f64 - 1.0);
        let stretch = (room - gaps) / least.iter().sum::<f64>();
        // The last row of many may be short.
        let stretch = if number > 0 && detail == Detail::Cell { stretch.min(1.6) } else { stretch };
        let mut x = margin;
        for (i, (&columns, least)) in row.columns.iter().zip(least).enumerate() {
            let area = row.first + i;
            let rect = [x, 0.0, least * stretch, area_height(scene, area, columns, detail)];
            let count = scene.areas[area].blocks.len();
            let blocks = grid(rect, head(scene, area, detail), count, columns, &l);
            places.push(Place { rect, row: number, blocks });
            x += least * stretch + BETWEEN;
        }
    }
    places
}

/// The places of an area's blocks. Every second row leads back, so that neighbours in the pipeline are neighbours in
/// the picture.
fn grid([x, y, width, _]: [f64; 4], head: f64, count: usize, columns: usize, l: &Lengths) -> Vec<[f64; 4]> {
    let columns_f = columns as f64;
    let room = width - 2.0 * l.pad - (columns_f - 1.0) * l.gap[0];
    let block = (room / columns_f).min(l.width[1]);
    // Blocks that are as wide as they may be get more space between them, up to a point.
    let gap = ((width - 2.0 * l.pad - columns_f * block) / (columns_f - 1.0).max(1.0)).clamp(l.gap[0], 3.0 * l.gap[0]);
    let left = x + (width - columns_f * block - (columns_f - 1.0) * gap) / 2.0;
    let spot = |i: usize| {
        let (row, column) = (i / columns, i % columns);
        let column = if row % 2 == 1 { columns - 1 - column } else { column };
        [left + column as f64 * (block + gap), y + head + row as f64 * (l.height + l.gap[1]), block, l.height]
    };
    (0..count).map(spot).collect()
}

fn area_width(columns: usize, l: &Lengths) -> f64 {
    (columns as f64 * (l.width[0] + l.gap[0]) - l.gap[0] + 2.0 * l.pad).max(l.area)
}

fn area_height(scene: &Scene, area: usize, columns: usize, detail: Detail) -> f64 {
    let (l, rows) = (detail.lengths(), scene.areas[area].blocks.len().div_ceil(columns) as f64);
    head(scene, area, detail) + rows * (l.height + l.gap[1]) - l.gap[1] + l.foot
}

/// The rows that make the picture least high.
fn rows(scene: &Scene, detail: Detail, room: f64) -> Vec<Row> {
    let areas = scene.areas.len();
    let most = areas.min(40);
    let height = |rows: &[Row]| {
        let row = |r: &Row| {
            let tallest = r.columns.iter().enumerate().map(|(i, c)| area_height(scene, r.first + i, *c, detail));
            tallest.fold(0.0, f64::max) + 60.0
        };
        rows.iter().map(row).sum::<f64>()
    };
    let tried = (1..=most).map(|count| split(scene, detail, room, count));
    tried.min_by(|a, b| height(a).total_cmp(&height(b))).unwrap_or_default()
}

/// About `count` rows with about equally many blocks.
fn split(scene: &Scene, detail: Detail, room: f64, count: usize) -> Vec<Row> {
    let l = detail.lengths();
    let blocks = |a: usize| scene.areas[a].blocks.len() as f64 + 0.5;
    let share = (0..scene.areas.len()).map(blocks).sum::<f64>() / count as f64;
    let mut rows: Vec<Row> = Vec::new();
    let (mut width, mut held) = (f64::INFINITY, f64::INFINITY);
    for a in 0..scene.areas.len() {
        let least = area_width(1, &l) + BETWEEN;
        if width + least > room + BETWEEN || held + blocks(a) / 2.0 > share {
            rows.push(Row { first: a, columns: Vec::new() });
            (width, held) = (0.0, 0.0);
        }
        width += least;
        held += blocks(a);
        if let Some(row) = rows.last_mut() {
            row.columns.push(1);
        }
    }
    for row in &mut rows {
        widen(row, scene, &l, room);
    }
    rows
}

/// Gives the areas of a row more columns, the tallest one first, for as long as there is room.
fn widen(row: &mut Row, scene: &Scene, l: &Lengths, room: f64) {
    let gaps = BETWEEN * (row.columns.len() as f64 - 1.0);
    let mut open: Vec<bool> = vec![true; row.columns.len()];
    loop {
        let blocks = |i: usize| scene.areas[row.first + i].blocks.len();
        let tall = (0..open.len()).filter(|i| open[*i]).max_by_key(|i| blocks(*i).div_ceil(row.columns[*i]));
        let Some(i) = tall else { return };
        let lines = blocks(i).div_ceil(row.columns[i]);
        if lines <= 1 {
            return;
        }
        // The fewest columns with a line less.
        let more = blocks(i).div_ceil(lines - 1);
        let others = row.columns.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, c)| area_width(*c, l));
        if others.sum::<f64>() + area_width(more, l) + gaps <= room {
            row.columns[i] = more;
        } else {
            open[i] = false;
        }
    }
}

/// Places things of these widths from left to right, and goes on in further lines where there is no room.
pub(super) fn flow(widths: &[f64], left: f64, right: f64) -> Vec<(f64, usize)> {
    let (mut x, mut line) = (left, 0);
    let mut places = Vec::new();
    for &w in widths {
        if x > left && x + w > right {
            (x, line) = (left, line + 1);
        }
        places.push((x, line));
        x += w;
    }
    places
}

/// The width of a label with rounded ends.
pub(super) fn label_width(text: &str) -> f64 {
    text_width(text, 11.0, "strong") + 20.0
}

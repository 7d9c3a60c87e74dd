//! A writer of SVG.

use std::fmt::Write as _;

pub(super) const INK: &str = "#1f2937";
pub(super) const FAINT: &str = "#6b7280";
pub(super) const RULE: &str = "#e5e7eb";

pub(super) struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// The place of a text relative to its point.
#[derive(Debug, Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    pub(super) fn new(width: f64, height: f64) -> Self {
        Self { width, height, body: String::new() }
    }

    /// A rectangle with rounded corners. `title` is its tooltip.
    pub(super) fn rect(&mut self, [x, y, w, h]: [f64; 4], radius: f64, style: &str, title: &str) {
        let _ = write!(self.body, "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{w:.2}\" height=\"{h:.2}\"");
        if radius > 0.0 {
            let _ = write!(self.body, " rx=\"{radius:.1}\"");
        }
        let _ = match title {
            "" => writeln!(self.body, " {style}/>"),
            title => writeln!(self.body, " {style}><title>{}</title></rect>", escape(title)),
        };
    }

    pub(super) fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], style: &str) {
        let _ = writeln!(self.body, "<line x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\" {style}/>");
    }

    pub(super) fn path(&mut self, d: &str, style: &str, title: &str) {
        let _ = match title {
            "" => writeln!(self.body, "<path d=\"{d}\" {style}/>"),
            title => writeln!(self.body, "<path d=\"{d}\" {style}><title>{}</title></path>", escape(title)),
        };
    }

    pub(super) fn text(&mut self, [x, y]: [f64; 2], size: f64, anchor: Anchor, style: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.2}\" y=\"{y:.2}\" font-size=\"{size}\" text-anchor=\"{anchor}\" {style}>{}</text>",
            escape(text)
        );
    }

    pub(super) fn finish(self) -> String {
        let Self { width, height, body } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" \
             font-family=\"Inter, system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n"
        )
    }
}

pub(super) fn fill(color: &str) -> String {
    format!("fill=\"{color}\"")
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            // XML forbids other control characters.
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

//! A writer of SVG, whose elements have classes of [`style`](super::style) and no colours of their own.

use std::fmt::Write as _;

use super::measure::text_width;
use super::style::{PREFIX, file_style};

const FONTS: &str = "Inter, system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif";

pub(crate) struct Svg {
    picture: Picture,
}

/// A finished picture.
#[derive(Debug, Clone)]
pub struct Picture {
    /// A sentence that says what the picture shows.
    title: String,
    width: f64,
    height: f64,
    body: String,
    /// Left, top, width and height of each text, and the text.
    texts: Vec<([f64; 4], String)>,
}

/// The place of a text relative to its point.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    /// `title` says what the picture shows, to those who do not see it.
    pub(crate) fn new(title: &str, width: f64, height: f64) -> Self {
        let (body, texts) = (String::new(), Vec::new());
        Self { picture: Picture { title: title.into(), width, height, body, texts } }
    }

    /// A rectangle with rounded corners. `class` is one or several names of the table, separated by spaces. `title` is
    /// the tooltip.
    pub(crate) fn rect(&mut self, [x, y, w, h]: [f64; 4], radius: f64, class: &str, title: &str) {
        let body = &mut self.picture.body;
        let _ = write!(body, "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{w:.2}\" height=\"{h:.2}\"");
        if radius > 0.0 {
            let _ = write!(body, " rx=\"{radius:.1}\"");
        }
        self.close("rect", class, title);
    }

    pub(crate) fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], class: &str) {
        let _ = write!(self.picture.body, "<line x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\"");
        self.close("line", class, "");
    }

    /// A path. A `width` above zero is that of its stroke.
    pub(crate) fn path(&mut self, d: &str, class: &str, width: f64, title: &str) {
        let _ = write!(self.picture.body, "<path d=\"{d}\"");
        if width > 0.0 {
            let _ = write!(self.picture.body, " stroke-width=\"{width:.1}\"");
        }
        self.close("path", class, title);
    }

    pub(crate) fn text(&mut self, [x, y]: [f64; 2], size: f64, anchor: Anchor, class: &str, text: &str) {
        if text.is_empty() {
            return;
        }
        let width = text_width(text, size, class);
        let (name, left) = match anchor {
            Anchor::Start => ("start", x),
            Anchor::Middle => ("middle", x - width / 2.0),
            Anchor::End => ("end", x - width),
        };
        let _ = writeln!(
            self.picture.body,
            "<text x=\"{x:.2}\" y=\"{y:.2}\" font-size=\"{size}\" text-anchor=\"{name}\" {}>{}</text>",
            classes(class),
            escape(text)
        );
        // From the height of capitals to below the line of letters.
        self.picture.texts.push(([left, y - 0.76 * size, width, size], text.into()));
    }

    pub(crate) fn finish(self) -> Picture {
        self.picture
    }

    fn close(&mut self, element: &str, class: &str, title: &str) {
        let class = classes(class);
        let _ = match title {
            "" => writeln!(self.picture.body, " {class}/>"),
            title => writeln!(self.picture.body, " {class}><title>{}</title></{element}>", escape(title)),
        };
    }
}

impl Picture {
    /// A file of its own: it has its colours and its background, in light or dark as the reader prefers.
    pub fn file(&self) -> String {
        let inside = format!(
            "<title>{}</title>\n<style>\n{}</style>\n<rect width=\"100%\" height=\"100%\" class=\"{PREFIX}ground\"/>\n",
            escape(&self.title),
            file_style()
        );
        self.element("", &inside)
    }

    /// An element of an HTML page that holds [`style`](super::style()). It has no background.
    pub fn embedded(&self) -> String {
        // A title element would be the tooltip of the whole picture.
        self.element(&format!(" aria-label=\"{}\"", escape(&self.title)), "")
    }

    fn element(&self, attributes: &str, inside: &str) -> String {
        let Self { width, height, body, .. } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"{PREFIX}picture\" role=\"img\"{attributes} \
             width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" \
             font-family=\"{FONTS}\">\n{inside}{body}</svg>\n"
        )
    }

    /// Left, top, width and height of each text, and the text. Widths are estimates that are rather too large.
    pub fn texts(&self) -> &[([f64; 4], String)] {
        &self.texts
    }

    /// Width and height.
    pub fn size(&self) -> [f64; 2] {
        [self.width, self.height]
    }
}

/// The attribute for one or several classes.
fn classes(names: &str) -> String {
    let names: Vec<String> = names.split_whitespace().map(|n| format!("{PREFIX}{n}")).collect();
    format!("class=\"{}\"", names.join(" "))
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            // XML forbids other control characters, and these two code points.
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

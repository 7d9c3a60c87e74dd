//! The look of all pictures: one table of classes, in light and in dark.

use std::fmt::Write as _;

/// A colour in both themes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tone {
    /// The name of its variable in a page.
    name: &'static str,
    light: &'static str,
    dark: &'static str,
}

/// A kind of element.
pub(crate) struct Class {
    /// Without [`PREFIX`].
    pub(crate) name: &'static str,
    fill: Option<&'static Tone>,
    stroke: Option<&'static Tone>,
    /// Declarations that are the same in both themes.
    more: &'static str,
}

/// The beginning of every class and variable, so that they differ from those of a page around a picture.
pub(crate) const PREFIX: &str = "fl-";

macro_rules! tones {
    ($($constant:ident $name:literal $light:literal $dark:literal)*) => {
        $(static $constant: Tone = Tone { name: $name, light: $light, dark: $dark };)*
        static TONES: &[&Tone] = &[$(&$constant),*];
    };
}

tones! {
    GROUND "ground" "#ffffff" "#0f1521"
    INK "ink" "#1f2937" "#e6eaf0"
    FAINT "faint" "#586170" "#a3adbb"
    RULE "rule" "#e5e7eb" "#2a3444"
    SITE "site" "#f5f7fa" "#161e2c"
    SITE_EDGE "site-edge" "#d3dbe6" "#334155"
    CARD "card" "#ffffff" "#1e2838"
    CARD_EDGE "card-edge" "#bcc7d6" "#435168"
    UNUSED "unused" "#eceef1" "#1a212c"
    UNUSED_EDGE "unused-edge" "#c4c9d1" "#3b4453"
    STAGE "stage" "#1d4ed8" "#8fb8ff"
    BUSY "busy" "#3b82f6" "#5b9bff"
    MEMORY "memory" "#8b5cf6" "#a78bfa"
    ALARM "alarm" "#b91c1c" "#fca5a5"
    CALM "calm" "#0f9f6e" "#34d399"
    FAIR "fair" "#65a30d" "#a3e635"
    WARM "warm" "#d97706" "#fbbf24"
    HOT "hot" "#dc2626" "#f87171"
    FORWARD "forward" "#2563eb" "#60a5fa"
    BACKWARD "backward" "#f59e0b" "#f59e0b"
    WEIGHT_GRAD "weight-grad" "#fcd34d" "#fde68a"
    UPDATE "update" "#7c3aed" "#a78bfa"
    OFFLOAD "offload" "#8a5a2b" "#c79a6b"
    WAIT "wait" "#eef0f3" "#1b2432"
    VERDICT "verdict" "#d3d8e0" "#323e50"
    SEND "send" "#0d9488" "#2dd4bf"
    ROW "row" "#fafbfc" "#131b28"
    ON_DEEP "on-deep" "#ffffff" "#0b1220"
    ON_PALE "on-pale" "#451a03" "#451a03"
}

const fn filled(name: &'static str, fill: &'static Tone) -> Class {
    Class { name, fill: Some(fill), stroke: None, more: "" }
}

const fn framed(name: &'static str, fill: &'static Tone, stroke: &'static Tone) -> Class {
    Class { name, fill: Some(fill), stroke: Some(stroke), more: "" }
}

const fn drawn(name: &'static str, stroke: &'static Tone, more: &'static str) -> Class {
    Class { name, fill: None, stroke: Some(stroke), more }
}

const fn plain(name: &'static str, more: &'static str) -> Class {
    Class { name, fill: None, stroke: None, more }
}

const LINK: &str = "fill:none;stroke-linecap:round;stroke-linejoin:round";

/// All classes.
pub(crate) static CLASSES: &[Class] = &[
    filled("ground", &GROUND),
    // Texts.
    filled("ink", &INK),
    filled("faint", &FAINT),
    filled("stage", &STAGE),
    filled("alarm", &ALARM),
    filled("on-forward", &ON_DEEP),
    filled("on-backward", &ON_PALE),
    filled("on-weight-grad", &ON_PALE),
    filled("on-update", &ON_DEEP),
    filled("on-offload", &ON_DEEP),
    plain("strong", "font-weight:600"),
    // Areas.
    framed("site", &SITE, &SITE_EDGE),
    framed("device", &CARD, &CARD_EDGE),
    framed("unused", &UNUSED, &UNUSED_EDGE),
    plain("dashed", "stroke-dasharray:4 3"),
    plain("thin", "opacity:0.6"),
    framed("label", &CARD, &CARD_EDGE),
    framed("label-calm", &CARD, &CALM),
    framed("label-fair", &CARD, &FAIR),
    framed("label-warm", &CARD, &WARM),
    framed("label-hot", &CARD, &HOT),
    drawn("limit", &HOT, "fill:none;stroke-width:2.5"),
    // Bars.
    filled("track", &RULE),
    filled("busy", &BUSY),
    filled("memory", &MEMORY),
    filled("calm", &CALM),
    filled("fair", &FAIR),
    filled("warm", &WARM),
    filled("hot", &HOT),
    // Lines.
    drawn("rule", &RULE, "stroke-width:1"),
    drawn("link-calm", &CALM, LINK),
    drawn("link-fair", &FAIR, LINK),
    drawn("link-warm", &WARM, LINK),
    drawn("link-hot", &HOT, LINK),
    // A drawing of a step.
    filled("row", &ROW),
    filled("forward", &FORWARD),
    filled("backward", &BACKWARD),
    filled("weight-grad", &WEIGHT_GRAD),
    filled("update", &UPDATE),
    filled("offload", &OFFLOAD),
    filled("wait", &WAIT),
    filled("verdict", &VERDICT),
    filled("send", &SEND),
    drawn("message", &SEND, "fill:none;stroke-width:0.9;opacity:0.5"),
];

/// The rules for a page into which pictures are put with [`Picture::embedded`](super::Picture::embedded). The page may
/// force a theme with `data-theme="dark"` or `data-theme="light"` at its root element.
pub fn style() -> String {
    let mut out = format!(".{PREFIX}picture{{max-width:100%;height:auto}}\n");
    let variables = |theme: fn(&Tone) -> &'static str| {
        TONES.iter().fold(String::new(), |out, t| out + "--" + PREFIX + t.name + ":" + theme(t) + ";")
    };
    let (light, dark) = (variables(|t| t.light), variables(|t| t.dark));
    let _ = writeln!(out, ":root{{{light}}}");
    let _ = writeln!(out, "@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}");
    let _ = writeln!(out, ":root[data-theme=dark]{{{dark}}}");
    rules(&mut out, |t| format!("var(--{PREFIX}{})", t.name), true);
    out
}

/// The rules for a file of its own. Programs that know neither variables nor media queries draw it in light.
pub(super) fn file_style() -> String {
    let mut out = String::new();
    rules(&mut out, |t| t.light.into(), true);
    out += "@media (prefers-color-scheme:dark){\n";
    rules(&mut out, |t| t.dark.into(), false);
    out + "}\n"
}

fn rules(out: &mut String, color: impl Fn(&Tone) -> String, whole: bool) {
    for c in CLASSES {
        let mut declarations = Vec::new();
        declarations.extend(c.fill.map(|t| format!("fill:{}", color(t))));
        declarations.extend(c.stroke.map(|t| format!("stroke:{}", color(t))));
        declarations.extend((whole && !c.more.is_empty()).then(|| c.more.to_owned()));
        if !declarations.is_empty() {
            let _ = writeln!(out, ".{PREFIX}{}{{{}}}", c.name, declarations.join(";"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The relative luminance of WCAG 2.1.
    fn luminance(color: &str) -> f64 {
        let channel = |at: usize| {
            let c = f64::from(u8::from_str_radix(&color[at..at + 2], 16).unwrap()) / 255.0;
            if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    }

    fn contrast(a: &str, b: &str) -> f64 {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    /// The classes of texts, and the tones behind them.
    const TEXTS: [(&str, &[&Tone]); 9] = [
        ("ink", GROUNDS),
        ("faint", GROUNDS),
        ("stage", GROUNDS),
        ("alarm", GROUNDS),
        ("on-forward", &[&FORWARD]),
        ("on-backward", &[&BACKWARD]),
        ("on-weight-grad", &[&WEIGHT_GRAD]),
        ("on-update", &[&UPDATE]),
        ("on-offload", &[&OFFLOAD]),
    ];

    const GROUNDS: &[&Tone] = &[&GROUND, &SITE, &CARD, &UNUSED];

    /// WCAG 2.1 asks for 4.5 to 1 of small text (1.4.3).
    #[test]
    fn texts_are_legible_in_both_themes() {
        assert!((contrast("#000000", "#ffffff") - 21.0).abs() < 1e-9);
        let mut poor = Vec::new();
        for (name, grounds) in TEXTS {
            let text = CLASSES.iter().find(|c| c.name == name).and_then(|c| c.fill).unwrap();
            for ground in grounds {
                for (theme, a, b) in [("light", text.light, ground.light), ("dark", text.dark, ground.dark)] {
                    let contrast = contrast(a, b);
                    if contrast < 4.5 {
                        poor.push(format!("{name} on {} in {theme}: {contrast:.2}", ground.name));
                    }
                }
            }
        }
        assert!(poor.is_empty(), "{poor:#?}");
    }

    /// WCAG 2.1 asks for 3 to 1 of what carries meaning and is not text (1.4.11). Bars and lines do.
    #[test]
    fn bars_and_lines_stand_out_in_both_themes() {
        for tone in [&BUSY, &MEMORY, &CALM, &WARM, &HOT, &FORWARD, &UPDATE, &OFFLOAD, &SEND] {
            for (theme, a, b) in [("light", tone.light, GROUND.light), ("dark", tone.dark, GROUND.dark)] {
                assert!(contrast(a, b) >= 3.0, "{} in {theme}: {:.2}", tone.name, contrast(a, b));
            }
        }
    }

    #[test]
    fn a_page_may_force_a_theme() {
        let style = style();
        assert!(style.contains(":root[data-theme=dark]") && style.contains(":root:not([data-theme=light])"));
        assert!(style.contains(".fl-ink{fill:var(--fl-ink)}") && style.contains("--fl-ink:#1f2937;"));
        assert!(!file_style().contains("var("), "librsvg knows no variables");
        let names: std::collections::BTreeSet<_> = CLASSES.iter().map(|c| c.name).collect();
        assert_eq!(names.len(), CLASSES.len(), "each class has one rule");
    }
}

//! `status --watch`: a screen that shows how a run is doing, until it ends.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use console::Term;
use fusionllm_graph::units::counted;
use fusionllm_node::owner::{Found, OwnedRun};
use tokio::time::{MissedTickBehavior, interval};

use crate::failure::Failure;
use crate::output::{print, print_json_line};
use crate::status::{object, text};

/// The time between two looks at the run.
const PERIOD: Duration = Duration::from_secs(1);

/// Shows the status of a run again and again, until no broker conducts it or the user has seen enough. On a terminal it
/// has the whole screen, and the last status stays there at the end. Elsewhere, one status follows the other.
pub(crate) async fn watch(run: &OwnedRun, name: &Path, json: bool) -> Result<(), Failure> {
    let mut interrupted = std::pin::pin!(fusionllm_node::interrupted()?);
    let mut period = interval(PERIOD);
    period.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut screen = (!json && io::IsTerminal::is_terminal(&io::stdout())).then(|| Screen::new(io::stdout()));
    let mut last = String::new();
    loop {
        let looked = tokio::select! {
            () = &mut interrupted => None,
            found = async { period.tick().await; run.status().await } => Some(found?),
        };
        let Some(found) = looked else { break };
        let before = std::mem::replace(&mut last, text(&found, name));
        match &mut screen {
            Some(screen) => screen.show(&last, size())?,
            None if json => print_json_line(&object(&found)?)?,
            None if before.is_empty() => print(&last)?,
            None => print(&format!("\n{last}"))?,
        }
        if matches!(found, Found::Resting(_)) {
            break;
        }
    }
    match screen.take() {
        // The usual screen comes back first.
        Some(screen) => {
            drop(screen);
            print(&last)
        }
        None => Ok(()),
    }
}

/// The columns and rows of the terminal.
fn size() -> (usize, usize) {
    let (rows, columns) = Term::stdout().size();
    (usize::from(columns), usize::from(rows))
}

/// The other screen of a terminal. The usual one comes back when this is dropped, so also after an error.
struct Screen<W: Write> {
    out: W,
}

const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

impl<W: Write> Screen<W> {
    fn new(mut out: W) -> Self {
        // A terminal that is gone says so at the first frame.
        let _ = out.write_all(ENTER.as_bytes());
        Self { out }
    }

    fn show(&mut self, text: &str, size: (usize, usize)) -> Result<(), Failure> {
        let shown = self.out.write_all(frame(text, size).as_bytes()).and_then(|()| self.out.flush());
        shown.map_err(|e| match e.kind() {
            io::ErrorKind::BrokenPipe => Failure::Closed,
            _ => Failure::running(format!("the terminal cannot be written: {e}")),
        })
    }
}

impl<W: Write> Drop for Screen<W> {
    fn drop(&mut self) {
        let _ = self.out.write_all(LEAVE.as_bytes()).and_then(|()| self.out.flush());
    }
}

/// The text over the last frame, from the top. Each line is cleared behind its end, and the screen behind the last one, so
/// nothing is empty in between. It ends with a line's end, which has standard output write all of it at once. What finds
/// no room is left out.
fn frame(text: &str, (columns, rows): (usize, usize)) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let mut room = rows.max(2) - 1;
    if lines.len() > room {
        room -= 1;
    }
    let mut shown: Vec<String> = lines.iter().take(room).map(|line| cut(line, columns)).collect();
    let left = lines.len() - shown.len();
    if left > 0 {
        shown.push(cut(&format!("… and {}; a higher window has room for them", counted(left, "more line")), columns));
    }
    format!("\x1b[H{}\x1b[J\n", shown.join("\x1b[K\n"))
}

/// The beginning of a line that would go on in the next row.
fn cut(line: &str, columns: usize) -> String {
    match line.chars().count() > columns {
        true => line.chars().take(columns.saturating_sub(1)).chain(['…']).collect(),
        false => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_room_on_its_screen() {
        assert_eq!(frame("one\ntwo\n", (80, 24)), "\x1b[Hone\x1b[K\ntwo\x1b[J\n");
        let rows = |text: &str, size| -> Vec<String> {
            let frame = frame(text, size);
            let rows = frame.strip_prefix("\x1b[H").and_then(|rows| rows.strip_suffix("\x1b[J\n")).unwrap();
            rows.split("\x1b[K\n").map(str::to_owned).collect()
        };
        assert_eq!(rows("1\n2\n3\n4\n", (80, 5)), ["1", "2", "3", "4"]);
        assert_eq!(rows("1\n2\n3\n4\n", (20, 4)), ["1", "2", "… and 2 more lines;…"]);
        assert_eq!(rows("12345\n123456\n", (5, 24)), ["12345", "1234…"]);
        assert_eq!(rows("1\n2\n", (80, 0)), ["… and 2 more lines; a higher window has room for them"]);
    }

    #[test]
    fn the_usual_screen_comes_back_after_an_error() {
        struct Full<'a>(&'a mut String);
        impl Write for Full<'_> {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                let text = String::from_utf8_lossy(bytes);
                if text.contains("too much") {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                self.0.push_str(&text);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut written = String::new();
        let mut screen = Screen::new(Full(&mut written));
        screen.show("fits", (80, 24)).unwrap();
        assert!(screen.show("too much", (80, 24)).is_err());
        drop(screen);
        assert!(written.starts_with(ENTER) && written.contains("fits") && written.ends_with(LEAVE), "{written:?}");
    }
}

//! The page of a run in a real browser, while the run goes on and when it is over.
//!
//! Pictures of each state are left in `target/tmp/browser`, for people to look at.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use browser::Browser;
use fantoccini::key::Key;
use requirements::Missing;
use serde_json::Value;
use tempfile::TempDir;

#[path = "support/browser.rs"]
mod browser;
#[path = "support/requirements.rs"]
mod requirements;

requirements::main!(
    the_page_follows_a_run,
    the_keyboard_reaches_everything,
    the_page_can_be_read_on_every_screen,
    reports_can_be_read_on_every_screen
);

/// The most bytes of a page.
const MAX_PAGE: usize = 300_000;

const WIDTHS: [u32; 2] = [360, 1280];

/// A model small enough that it trains while a browser takes the processor.
const TINY: [&str; 8] = [
    "--set=model.n_layer=3",
    "--set=model.n_embd=16",
    "--set=model.n_head=2",
    "--set=data.context=16",
    "--set=train.batch=4",
    "--set=train.micro_batch=1",
    "--set=eval.every=4",
    "--set=eval.batches=1",
];

fn fusionllm() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusionllm"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// A run that three peers begin. It ends when it is stopped.
struct Run {
    directory: TempDir,
    broker: Child,
    ticket: String,
    joiners: Vec<(&'static str, Child)>,
    /// The address of its page.
    page: String,
}

impl Run {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run");
        let mut broker = fusionllm();
        broker.args(["broker", "--listen=127.0.0.1:0", "--dashboard=127.0.0.1:0", "--peers=3", "--steps=1000000"]);
        let broker = broker.arg("--set=checkpoint.every=4").arg("--run-dir").arg(&path).args(TINY).spawn().unwrap();
        let mut run = Self { directory, broker, ticket: String::new(), joiners: Vec::new(), page: String::new() };
        run.page = run.written("dashboard");
        run.ticket = run.written("ticket");
        // Joiners with a profile need not be measured.
        let device = "[[device]]\nname = \"any\"\nbackend = \"cpu\"\ntflops = 0.01\nmemory_bandwidth = \"9 GB/s\"\n\
                      memory = \"1 GiB\"\n";
        std::fs::write(run.directory.path().join("profile.toml"), device).unwrap();
        ["ada", "bob", "cleo"].into_iter().for_each(|name| run.join(name));
        run
    }

    /// Has another peer join. It is slow, and so leaves the processor to the browser.
    fn join(&mut self, name: &'static str) {
        let mut join = fusionllm();
        join.args(["join", &self.ticket, "--name", name, "--slowdown=20", "--memory=600 MiB", "--profile"]);
        let joiner = join.arg(self.directory.path().join("profile.toml")).spawn().unwrap();
        self.joiners.push((name, joiner));
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("run")
    }

    /// The line that the broker writes to a file of its directory.
    fn written(&mut self, file: &str) -> String {
        loop {
            match std::fs::read_to_string(self.path().join(file)) {
                Ok(line) if line.ends_with('\n') => return line.trim().to_owned(),
                _ => assert!(self.broker.try_wait().unwrap().is_none(), "the broker ended before it wrote {file}"),
            }
            std::thread::yield_now();
        }
    }

    /// Opens the page, and waits until it has all of its parts.
    fn watch(&self, browser: &Browser) {
        browser.open(&self.page);
        let parts = "return ['now', 'curves', 'cluster', 'step', 'peers', 'links', 'help', 'events', 'settings']
            .every(id => document.getElementById(id)?.childElementCount > 0) && !!document.querySelector('.plot')";
        browser.until("the page has all parts", parts);
    }

    /// Kills a peer once the run need not begin again without it, and waits until the page says that it is lost.
    fn lose(&mut self, name: &str, browser: &Browser) {
        let saved = "return document.getElementById('events').textContent.includes('is saved')";
        browser.until("a checkpoint is saved", saved);
        self.joiners.iter_mut().find(|(of, _)| *of == name).unwrap().1.kill().unwrap();
        let what = "the killed peer shows as lost, which should take 5 s at most";
        browser.until(what, &format!("return {} === 'lost'", standing(name)));
    }

    /// Stops the run as its user would, and waits until it has ended.
    fn stop(&mut self) {
        let pid = self.broker.id().to_string();
        assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
        assert!(self.broker.wait().unwrap().success());
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        for process in self.joiners.iter_mut().map(|(_, joiner)| joiner).chain([&mut self.broker]) {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// The word beside a peer's name, in the page's language.
fn standing(name: &str) -> String {
    format!(
        "[...document.querySelectorAll('#peers tbody tr')]
            .find(row => row.querySelector('th').textContent.trim() === '{name}')?.querySelector('.pill').textContent"
    )
}

/// The run's step as the page says it, and the last one of its first curve, in the page's language.
const STEP: &str = "+document.querySelector('#now dd').textContent";
const LAST_POINT: &str = "JSON.parse(document.querySelector('.plot').dataset.series)[0][1].at(-1)";

fn the_page_follows_a_run() -> Result<(), Missing> {
    let browser = Browser::start()?;
    let mut run = Run::start();
    run.watch(&browser);
    // Another load of the page would lose it.
    browser.ask("window.here = true");
    let goes_on = || {
        let (step, point) = (browser.ask(&format!("return {STEP}")), browser.ask(&format!("return {LAST_POINT}")));
        browser.until("the step rises", &format!("return {STEP} > {step}"));
        browser.until("the curve grows", &format!("return {LAST_POINT} > {point}"));
    };
    goes_on();
    run.join("dora");
    browser.until("a peer that came later is there", &format!("return !!{}", standing("dora")));
    run.lose("bob", &browser);
    goes_on();
    let connection = "document.getElementById('connection')";
    assert_eq!(browser.ask(&format!("return {connection}.hidden")), true, "nothing is said of the connection");
    run.stop();
    let over = format!("return !{connection}.hidden && {connection}.textContent.startsWith('The run is over.')");
    browser.until("the page says that the run is over", &over);
    let left = "return [...document.querySelectorAll('dt')].some(name => name.textContent === 'Left')";
    assert_eq!(browser.ask(left), false, "no time is left");
    assert_eq!(browser.ask("return window.here"), true, "the page was not loaded again");
    browser.check_logs(&run.page);
    browser.picture("over");
    Ok(())
}

/// The elements that the keyboard has to reach.
const REACH: &str = ".plot, .scroll, summary";

fn the_keyboard_reaches_everything() -> Result<(), Missing> {
    let browser = Browser::start()?;
    let run = Run::start();
    run.watch(&browser);
    let names = |script: &str| -> BTreeSet<String> { serde_json::from_value(browser.ask(script)).unwrap() };
    // An update puts other elements in their places, so they are known by part and number.
    let name = format!(
        "const name = element => {{
            const part = element.closest('section');
            return part && part.id + ' ' + [...part.querySelectorAll('{REACH}')].indexOf(element);
        }};"
    );
    let all = names(&format!("{name} return [...document.querySelectorAll('{REACH}')].map(name)"));
    assert!(all.len() >= 8, "two plots, two pictures, two tables, a list and the settings: {all:?}");
    let mut reached = BTreeSet::new();
    for _ in 0..3 * all.len() {
        browser.press(Key::Tab);
        reached.extend(names(&format!("{name} return [name(document.activeElement)].filter(Boolean)")));
        // What is closed is opened by keyboard, too.
        if browser.ask("return document.activeElement.matches('details:not([open]) > summary')") == true {
            browser.press(Key::Enter);
        }
    }
    assert_eq!(all.difference(&reached).collect::<Vec<_>>(), Vec::<&String>::new(), "the keyboard reaches the rest");

    browser.open(&run.page);
    browser.until("there is a curve again", "return !!document.querySelector('.plot')");
    let on_plot = "return document.activeElement.matches('.plot')";
    while browser.ask(on_plot) != true {
        browser.press(Key::Tab);
    }
    let tip = "const plot = document.activeElement, tip = plot.querySelector('.tip'), \
               cursor = plot.querySelector('.cursor'); ";
    let shown = format!("{tip} return !tip.hidden && !cursor.hidden && /^step \\d+\\n/.test(tip.textContent)");
    let step = || browser.ask(&format!("{tip} return +tip.textContent.match(/\\d+/)[0]")).as_u64().unwrap();
    browser.until("the tip shows", &shown);
    // At first the cursor is at the newest step, whichever that is.
    browser.press(Key::Left);
    let mut at = step();
    for _ in 0..3 {
        browser.press(Key::Left);
        let before = std::mem::replace(&mut at, step());
        assert!(at < before, "the cursor goes left: {before} {at}");
    }
    assert_eq!(browser.ask(&shown), true);

    browser.ask("window.plot = document.activeElement");
    browser.until("the curves are drawn anew", "return !window.plot.isConnected");
    assert_eq!(browser.ask(on_plot), true, "the keyboard is still there");
    assert_eq!((browser.ask(&shown), step()), (true.into(), at), "and so is the tip");
    Ok(())
}

/// Texts whose contrast with what is behind them is below that of WCAG 2's level AA. Texts of pictures have tests where
/// pictures are drawn.
const FAINT: &str = "
    const parse = color => (color.match(/[\\d.]+/g) ?? []).map(Number);
    const light = color => {
        const linear = parse(color).slice(0, 3).map(c => c / 255)
            .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    const behind = element => {
        for (let e = element; e; e = e.parentElement) {
            const color = getComputedStyle(e).backgroundColor;
            if ((parse(color)[3] ?? 1) === 1) return color;
        }
    };
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const faint = [];
    let seen = 0;
    while (texts.nextNode()) {
        const text = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement;
        if (!text || element.closest('svg, script') || !element.checkVisibility({ visibilityProperty: true })) continue;
        const style = getComputedStyle(element), size = parseFloat(style.fontSize);
        const [a, b] = [light(style.color), light(behind(element))].sort((a, b) => b - a);
        const ratio = (a + 0.05) / (b + 0.05);
        const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
        if (ratio < least) faint.push([text, style.color, behind(element), ratio]);
        seen++;
    }
    return [seen, faint];
";

/// Panics if the open page cannot be read in light or dark, on a phone or on a desk.
fn check_looks(browser: &Browser, name: &str) {
    let size = browser.ask("return new TextEncoder().encode(document.documentElement.outerHTML).length");
    assert!(size.as_u64().unwrap() < MAX_PAGE as u64, "{name} has {size} bytes");
    for (dark, scheme) in [(false, "light"), (true, "dark")] {
        for width in WIDTHS {
            browser.show(width, dark);
            // The tip is a text, too.
            let open = "for (const details of document.querySelectorAll('details')) details.open = true;
                document.querySelector('.plot').focus();";
            let answer = browser.ask(&format!("{open} {FAINT}"));
            let (seen, faint) = (answer[0].as_u64().unwrap(), answer[1].as_array().unwrap());
            assert!(seen > 50, "{name} has {seen} texts");
            assert_eq!(*faint, Vec::<Value>::new(), "{name} in {scheme}: text, colour, background, contrast");
            let wide =
                browser.ask("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]");
            assert!(wide[0].as_u64() <= wide[1].as_u64(), "{name} at {width} is {wide} wide");
            browser.picture(&format!("{name}-{scheme}-{width}"));
        }
    }
}

fn the_page_can_be_read_on_every_screen() -> Result<(), Missing> {
    let browser = Browser::start()?;
    let mut run = Run::start();
    run.watch(&browser);
    check_looks(&browser, "live");
    run.lose("bob", &browser);
    check_looks(&browser, "lost");
    browser.check_logs(&run.page);

    run.stop();
    let report = report(run.directory.path(), &[&run.path()]);
    browser.open(&report);
    check_looks(&browser, "report");
    browser.check_logs(&report);
    Ok(())
}

/// Writes the report of runs, and returns its address.
fn report(directory: &Path, runs: &[&Path]) -> String {
    let page = directory.join("report.html");
    assert!(fusionllm().arg("report").args(runs).arg("-o").arg(&page).status().unwrap().success());
    assert!(page.metadata().unwrap().len() < MAX_PAGE as u64);
    browser::address(&page)
}

fn reports_can_be_read_on_every_screen() -> Result<(), Missing> {
    let browser = Browser::start()?;
    let directory = tempfile::tempdir().unwrap();
    let runs = ["one", "two"].map(|peers| directory.path().join(peers));
    for (run, peers) in runs.iter().zip(["--peers=1", "--peers=2"]) {
        let mut train = fusionllm();
        train.args(["train", "--steps=12", "--dashboard=off", peers, "--run-dir"]).arg(run).args(TINY);
        assert!(train.status().unwrap().success());
    }
    let report = report(directory.path(), &[&runs[0], &runs[1]]);
    browser.open(&report);
    check_looks(&browser, "runs");
    browser.check_logs(&report);
    Ok(())
}

//! A browser without a screen: Chromium, which its driver starts.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fantoccini::actions::{InputSource, KeyAction, KeyActions};
use fantoccini::key::Key;
use fantoccini::wd::WebDriverCompatibleCommand;
use fantoccini::{Client, ClientBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use url::Url;

use crate::requirements::Missing;

/// The time after which a condition is given up. It is long, because a machine may have much else to do.
const PATIENCE: Duration = Duration::from_secs(60);

/// The time between two looks at a page.
const BETWEEN: Duration = Duration::from_millis(50);

pub(crate) struct Browser {
    client: Client,
    runtime: Runtime,
    driver: Child,
    _profile: TempDir,
}

/// A command that only Chromium's driver has.
#[derive(Debug)]
struct OfChromium {
    path: &'static str,
    body: Value,
}

impl WebDriverCompatibleCommand for OfChromium {
    fn endpoint(&self, base: &Url, session: Option<&str>) -> Result<Url, url::ParseError> {
        base.join(&format!("session/{}/{}", session.unwrap_or_default(), self.path))
    }

    fn method_and_body(&self, _: &Url) -> (http::Method, Option<String>) {
        (http::Method::POST, Some(self.body.to_string()))
    }
}

impl Browser {
    pub(crate) fn start() -> Result<Self, Missing> {
        for program in ["chromium", "chromedriver"] {
            if !Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success()) {
                let reason = format!("takes {program}: Debian has it in chromium and chromium-driver");
                return Err(Missing { requirement: "browser", reason });
            }
        }
        let profile = tempfile::tempdir().unwrap();
        let mut driver = Command::new("chromedriver");
        driver.arg("--port=0").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut driver = driver.spawn().unwrap();
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        let port = loop {
            let line = lines.next().expect("the driver ended before it said its port").unwrap();
            if let Some((_, port)) = line.split_once("started successfully on port ") {
                break port.trim_end_matches('.').to_owned();
            }
        };
        // What the driver says later is of no interest, but it has to go somewhere.
        std::thread::spawn(move || lines.for_each(drop));
        let user_data = format!("--user-data-dir={}", profile.path().display());
        // Chromium's own sandbox does not start for root, as which CI runs.
        let args = ["--headless", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900", &user_data];
        let capabilities = json!({
            "browserName": "chrome",
            "goog:chromeOptions": { "args": args },
            "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
        });
        let runtime = Runtime::new().unwrap();
        let mut builder = ClientBuilder::new(HttpConnector::new());
        builder.capabilities(capabilities.as_object().unwrap().clone());
        let client = runtime.block_on(builder.connect(&format!("http://127.0.0.1:{port}"))).unwrap();
        Ok(Self { client, runtime, driver, _profile: profile })
    }

    pub(crate) fn open(&self, url: &str) {
        self.runtime.block_on(self.client.goto(url)).unwrap();
    }

    /// The answer of a script, which is the body of a function.
    pub(crate) fn ask(&self, script: &str) -> Value {
        self.runtime.block_on(self.client.execute(script, Vec::new())).unwrap()
    }

    /// Waits until a script's answer is true.
    pub(crate) fn until(&self, what: &str, script: &str) {
        let began = Instant::now();
        while self.ask(script) != true {
            if began.elapsed() > PATIENCE {
                let page = self.ask("return document.body.innerText");
                panic!("in vain it was waited until {what}:\n{}", page.as_str().unwrap_or_default());
            }
            std::thread::sleep(BETWEEN);
        }
    }

    pub(crate) fn press(&self, key: Key) {
        let value = char::from(key);
        let keys = KeyActions::new("keyboard".into()).then(KeyAction::Down { value }).then(KeyAction::Up { value });
        self.runtime.block_on(self.client.perform_actions(keys)).unwrap();
    }

    /// Sets how wide the page is, and whether the person likes it dark.
    pub(crate) fn show(&self, width: u32, dark: bool) {
        let scheme = if dark { "dark" } else { "light" };
        let metrics = json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", &metrics);
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", &features);
    }

    /// Leaves a picture of the window for those who want to look.
    pub(crate) fn picture(&self, name: &str) {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("browser");
        std::fs::create_dir_all(&directory).unwrap();
        let picture = self.runtime.block_on(self.client.screenshot()).unwrap();
        std::fs::write(directory.join(format!("{name}.png")), picture).unwrap();
    }

    /// Panics if the console has an error, or if something was asked for elsewhere than at `origin`.
    pub(crate) fn check_logs(&self, origin: &str) {
        let console = self.log("browser");
        assert_eq!(console, Vec::<Value>::new(), "the console is empty");
        let mut requests = 0;
        for entry in self.log("performance") {
            let entry: Value = serde_json::from_str(entry["message"].as_str().unwrap()).unwrap();
            let (method, params) = (&entry["message"]["method"], &entry["message"]["params"]);
            // The browser's own first page asks for its parts, too.
            let is_own = params["documentURL"].as_str().is_some_and(|url| url.starts_with("chrome:"));
            let url = match method.as_str() {
                Some("Network.requestWillBeSent") if !is_own => &params["request"]["url"],
                Some("Network.webSocketCreated") => &params["url"],
                _ => continue,
            };
            let url = url.as_str().unwrap();
            assert!(url.starts_with(origin) || url.starts_with("data:"), "{url} is not at {origin}");
            requests += 1;
        }
        assert!(requests > 0, "the page itself was asked for");
    }

    /// The entries of a log since it was read last.
    fn log(&self, name: &str) -> Vec<Value> {
        let Value::Array(entries) = self.issue("se/log", json!({ "type": name })) else { panic!("no list") };
        entries
    }

    fn devtools(&self, command: &str, params: &Value) {
        self.issue("goog/cdp/execute", json!({ "cmd": command, "params": params }));
    }

    fn issue(&self, path: &'static str, body: Value) -> Value {
        self.runtime.block_on(self.client.issue_cmd(OfChromium { path, body })).unwrap()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser ends with its session, and the driver does not.
        let _ = self.runtime.block_on(self.client.clone().close());
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// The address of a file.
pub(crate) fn address(file: &Path) -> String {
    Url::from_file_path(file).unwrap().into()
}

//! The Python package, as `pip install` brings it, in an environment that has nothing else.
//!
//! `.ci/run wheel` makes the wheel and fetches those that it depends on.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use requirements::Missing;
use tempfile::TempDir;

#[path = "support/requirements.rs"]
mod requirements;

requirements::main!(the_installed_wheel_trains_and_gives_weights_back, the_installed_wheel_trains_a_model_of_pytorch);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A fresh environment with the package.
struct Environment(TempDir);

impl Environment {
    fn create() -> Result<Self, Missing> {
        let wheels = root().join("target/wheels");
        let built = fs::read_dir(&wheels).into_iter().flatten();
        if !built.flatten().any(|file| file.file_name().to_string_lossy().starts_with("fusionllm-")) {
            let reason = format!("takes a wheel in {}: see `.ci/run wheel`", wheels.display());
            return Err(Missing { requirement: "wheel", reason });
        }
        let environment = Self(TempDir::new().unwrap());
        let python = root().join("target/python/bin/python");
        succeeded(&Command::new(python).args(["-m", "venv"]).arg(environment.0.path()).output().unwrap());
        let pip = ["-m", "pip", "install", "--quiet", "--no-index", "--find-links"];
        succeeded(&environment.python().args(pip).args([wheels.as_os_str(), "fusionllm".as_ref()]).output().unwrap());
        // A wheel from before the last change would be tested otherwise.
        for file in fs::read_dir(root().join("python/fusionllm")).unwrap().flatten().filter(|f| f.path().is_file()) {
            let find = format!("import fusionllm; print(fusionllm.__path__[0] + '/{}')", file.file_name().display());
            let installed = environment.python().args(["-c", &find]).output().unwrap();
            let installed = fs::read(String::from_utf8_lossy(&installed.stdout).trim()).unwrap_or_default();
            assert!(installed == fs::read(file.path()).unwrap(), "the wheel is old: run `.ci/run wheel` again");
        }
        Ok(environment)
    }

    /// This environment's Python, as a shell without settings for Python starts it.
    fn python(&self) -> Command {
        let mut python = Command::new(self.0.path().join("bin/python"));
        python.current_dir(self.0.path()).env_remove("PYTHONPATH").env_remove("PYTHONHOME");
        python
    }

    fn runs(&self, example: &str, set: impl FnOnce(&mut Command)) -> String {
        let mut python = self.python();
        set(python.arg(root().join("examples/python").join(example)));
        succeeded(&python.output().unwrap())
    }
}

fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn the_installed_wheel_trains_and_gives_weights_back() -> Result<(), Missing> {
    let environment = Environment::create()?;
    let printed = environment.runs("quickstart.py", |_| {});
    let losses: Vec<f64> =
        printed.lines().filter_map(|l| l.split_once("loss ")).map(|(_, loss)| loss.parse().unwrap()).collect();
    assert!(losses.len() == 4 && losses.is_sorted_by(|a, b| a > b), "{printed}");
    assert!(printed.contains("28 tensors, transformer.wte.weight [256, 32]"), "{printed}");
    let runs = environment.0.path().join("runs/0001");
    assert!(runs.join("summary.json").is_file() && runs.join("checkpoints").is_dir());
    Ok(())
}

/// PyTorch is taken from the environment that `FUSIONLLM_PYTHON` belongs to, or else from that of `.ci/run python`. It
/// is too large to install.
fn the_installed_wheel_trains_a_model_of_pytorch() -> Result<(), Missing> {
    let find = "import sysconfig, torch; print(sysconfig.get_path('purelib'))";
    let python =
        std::env::var_os("FUSIONLLM_PYTHON").map_or_else(|| root().join("target/python/bin/python"), PathBuf::from);
    let packages = match Command::new(&python).args(["-c", find]).output() {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => {
            let reason = format!("takes Python with torch at {}: see `.ci/run python`", python.display());
            return Err(Missing { requirement: "torch", reason });
        }
    };
    let environment = Environment::create()?;
    let printed = environment.runs("own_model.py", |python| {
        python.env("PYTHONPATH", packages);
    });
    let numbers: Vec<f64> = printed.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!(matches!(numbers[..], [before, after] if before > 0.9 && after < 0.3), "{printed}");
    Ok(())
}

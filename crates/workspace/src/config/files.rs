//! Resolves the paths and patterns of a job or testbed file.

use std::path::{Path, PathBuf};

use glob::MatchOptions;

use super::reader::{JobError, Section};
use crate::run_dir::WRITTEN_IN;

/// The settings of a model in a Hugging Face folder.
pub(super) const CONFIG: &str = "config.json";

/// The directory at which relative paths start.
pub(super) struct Files {
    directory: PathBuf,
    /// If a run wrote the job file: the directory that the run had then, and the one that it has.
    run: Option<[PathBuf; 2]>,
}

impl From<&Path> for Files {
    fn from(directory: &Path) -> Self {
        // Without a working directory the paths stay relative. The files are then reported as missing.
        let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
        Self { directory, run: None }
    }
}

impl Files {
    /// The files of a job in a directory. `top` is the top of the job.
    pub(super) fn of_job(directory: &Path, top: &Section<'_>) -> Result<Self, JobError> {
        let mut files = Self::from(directory);
        let written = if top.has(WRITTEN_IN) { top.path(WRITTEN_IN)? } else { None };
        // A checkpoint is at RUN/checkpoints/step-N.
        let up = if files.directory.join("manifest.json").exists() { 2 } else { 0 };
        let now = files.directory.ancestors().nth(up).unwrap_or(&files.directory);
        files.run = written.map(|written| [PathBuf::from(written), now.to_owned()]);
        Ok(files)
    }

    /// Whether the job file is that of a run. What its checkpoints have may then be missing elsewhere.
    pub(super) fn of_run(&self) -> bool {
        self.run.is_some()
    }

    /// The path that a setting names, whether it exists or not.
    pub(super) fn named(&self, section: &Section<'_>, key: &'static str) -> Result<Option<PathBuf>, JobError> {
        Ok(section.path(key)?.map(|written| self.at(section, key, written)))
    }

    /// The path of a file that a setting names as `written`.
    pub(super) fn at(&self, section: &Section<'_>, key: &str, written: &str) -> PathBuf {
        self.here(section, key).as_ref().unwrap_or(self).find(written)
    }

    /// The files of the working directory, for a setting of a run's job that comes from the command line: whoever types it
    /// does not see the run's job file.
    fn here(&self, section: &Section<'_>, key: &str) -> Option<Self> {
        (self.of_run() && section.is_overridden(key)).then(|| Self::from(Path::new(".")))
    }

    /// Files of a run go where the run goes. Other files are looked for where they were, and then where they are if they
    /// were moved together with the run.
    fn find(&self, written: &str) -> PathBuf {
        let path = self.directory.join(written);
        let Some([old, now]) = self.run.as_ref().filter(|[old, now]| old != now) else { return path };
        match moved(&path, old, now) {
            Some(moved) if (path.starts_with(old) || !path.exists()) && moved.exists() => moved,
            _ => path,
        }
    }

    /// The file that a setting names, or the file `own` that the run keeps of it, if that file is gone.
    pub(super) fn one_or_own(
        &self,
        section: &Section<'_>,
        key: &'static str,
        own: &str,
    ) -> Result<Option<PathBuf>, JobError> {
        self.one(section, key).or_else(|error| {
            let own = self.run.as_ref().map(|[_, now]| now.join(own)).filter(|own| own.is_file());
            own.map(Some).ok_or(error)
        })
    }

    /// The existing file that a setting names.
    pub(super) fn one(&self, section: &Section<'_>, key: &'static str) -> Result<Option<PathBuf>, JobError> {
        if let Some(here) = self.here(section, key) {
            return here.one(section, key);
        }
        let Some(written) = section.path(key)? else { return Ok(None) };
        let path = self.find(written);
        if path.is_file() {
            return Ok(Some(path));
        }
        if path.is_dir() {
            let file = self.only_file(written).unwrap_or_else(|| "PATH".to_owned());
            let message = format!("`{}`: \"{written}\" is a directory", section.full_name(key));
            return Err(section.error(key, message, format!("write {key} = {file:?}, the path of a file")));
        }
        Err(self.missing(section, key, written))
    }

    /// The existing file or folder that a setting names.
    pub(super) fn file_or_folder(&self, section: &Section<'_>, key: &'static str) -> Result<Option<PathBuf>, JobError> {
        if let Some(here) = self.here(section, key) {
            return here.file_or_folder(section, key);
        }
        match section.path(key)?.map(|written| self.find(written)) {
            Some(path) if path.is_dir() => Ok(Some(path)),
            // Whether they are needed shows where they are read.
            Some(path) if self.of_run() && !path.exists() => Ok(Some(path)),
            _ => self.one(section, key),
        }
    }

    /// The Hugging Face folder that a setting names.
    pub(super) fn folder(&self, section: &Section<'_>, key: &'static str) -> Result<Option<PathBuf>, JobError> {
        if let Some(here) = self.here(section, key) {
            return here.folder(section, key);
        }
        let Some(written) = section.path(key)? else { return Ok(None) };
        let path = self.find(written);
        if path.join(CONFIG).is_file() {
            return Ok(Some(path));
        }
        let problem = match (path.is_dir(), path.exists()) {
            (true, _) => format!("the folder \"{written}\" holds no {CONFIG}"),
            (_, true) => format!("\"{written}\" is no folder"),
            _ => format!("there is no folder \"{written}\" in {}", self.directory.display()),
        };
        let hint =
            "name a Hugging Face folder, with config.json and safetensors files; paths start at this file's directory";
        Err(section.error(key, format!("`{}`: {problem}", section.full_name(key)), hint))
    }

    /// The files that a setting's paths and patterns match, each file once. They are sorted within each pattern.
    pub(super) fn many(&self, section: &Section<'_>, key: &'static str) -> Result<Option<Vec<PathBuf>>, JobError> {
        if let Some(here) = self.here(section, key) {
            return here.many(section, key);
        }
        let Some(patterns) = section.texts(key, &paths(key))? else { return Ok(None) };
        let mut files = Vec::new();
        for written in patterns {
            let matched = self.matches(section, key, written)?;
            if matched.is_empty() {
                return Err(self.missing(section, key, written));
            }
            files.extend(matched);
        }
        let mut seen = std::collections::BTreeSet::new();
        files.retain(|f| seen.insert(f.clone()));
        Ok(Some(files))
    }

    /// Finds files like [`Self::many`], but a directory stands for all files in it with this extension.
    pub(super) fn many_within(
        &self,
        section: &Section<'_>,
        key: &'static str,
        extension: &str,
    ) -> Result<Option<Vec<PathBuf>>, JobError> {
        if let Some(here) = self.here(section, key) {
            return here.many_within(section, key, extension);
        }
        let Some(written) = section.texts(key, &paths(key))? else { return Ok(None) };
        let mut files = Vec::new();
        for text in written {
            let pattern = match self.find(text).is_dir() {
                true => format!("{}/*.{extension}", text.trim_end_matches('/')),
                false => text.to_owned(),
            };
            let matched = self.matches(section, key, &pattern)?;
            if matched.is_empty() {
                return Err(self.missing(section, key, &pattern));
            }
            files.extend(matched);
        }
        let mut seen = std::collections::BTreeSet::new();
        files.retain(|f| seen.insert(f.clone()));
        Ok(Some(files))
    }

    fn matches(&self, section: &Section<'_>, key: &str, written: &str) -> Result<Vec<PathBuf>, JobError> {
        // A file whose name looks like a pattern is taken as that file.
        let literal = self.find(written);
        if literal.is_file() {
            return Ok(vec![literal]);
        }
        let pattern = if Path::new(written).is_absolute() {
            written.to_owned()
        } else {
            let directory = glob::Pattern::escape(&self.directory.to_string_lossy());
            format!("{directory}/{written}")
        };
        // Only a pattern with a dot at the start of a name means hidden files.
        let options = MatchOptions { require_literal_leading_dot: true, ..MatchOptions::new() };
        let paths = glob::glob_with(&pattern, options).map_err(|e| {
            let hint = "* stands for any part of a name, ** for any directories, [ab] for one of the letters";
            let name = section.full_name(key);
            section.error(key, format!("`{name}`: \"{written}\" is not a valid pattern: {}", e.msg), hint)
        })?;
        // `glob` sorts. A directory that cannot be listed holds no readable file.
        Ok(paths.filter_map(Result::ok).filter(|p| p.is_file()).collect())
    }

    fn missing(&self, section: &Section<'_>, key: &str, written: &str) -> JobError {
        let name = section.full_name(key);
        let path = self.find(written);
        if path.is_dir() {
            let within = written.trim_end_matches('/');
            let message = format!("`{name}`: \"{written}\" is a directory");
            return section.error(key, message, format!("name the files in it: write {key} = [\"{within}/*\"]"));
        }
        let message = format!("`{name}`: no file matches \"{written}\" in {}", self.directory.display());
        let start = "paths start at this file's directory";
        let hint = match self.similar(written) {
            Some(file) => format!("did you mean {file:?}? {start}"),
            None => start.to_owned(),
        };
        section.error(key, message, hint)
    }

    /// The files in a directory, as the job file would name them.
    fn names_in(&self, directory: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.directory.join(directory)).into_iter().flatten().filter_map(Result::ok);
        let files = entries.filter(|entry| entry.path().is_file());
        let named = |name: std::ffi::OsString| {
            let name = name.into_string().ok()?;
            Some(if directory.is_empty() { name } else { format!("{directory}/{name}") })
        };
        let mut names: Vec<String> = files.filter_map(|entry| named(entry.file_name())).collect();
        names.sort();
        names
    }

    /// The file in a directory, if it is the only one.
    fn only_file(&self, directory: &str) -> Option<String> {
        let mut names = self.names_in(directory.trim_end_matches('/'));
        names.pop().filter(|_| names.is_empty())
    }

    /// A file beside the missing one that has nearly its name.
    fn similar(&self, written: &str) -> Option<String> {
        let directory = written.rsplit_once('/').map_or("", |(directory, _)| directory);
        let likeness = |name: &str| strsim::jaro_winkler(&written.to_lowercase(), &name.to_lowercase());
        let names = self.names_in(directory).into_iter().map(|name| (likeness(&name), name));
        let nearest = names.max_by(|(a, _), (b, _)| a.total_cmp(b));
        nearest.filter(|(likeness, _)| *likeness >= MIN_LIKENESS).map(|(_, name)| name)
    }
}

/// The place of `path` after a directory was moved from `old` to `new`, together with what is around it. `None` if there
/// is none.
fn moved(path: &Path, old: &Path, new: &Path) -> Option<PathBuf> {
    let common = path.components().zip(old.components()).take_while(|(a, b)| a == b).count();
    let up = old.components().count() - common;
    let around = new.ancestors().nth(up)?;
    Some(around.join(path.components().skip(common).collect::<PathBuf>()))
}

/// The minimum Jaro-Winkler similarity of a path that is suggested. All paths in a directory are somewhat alike.
const MIN_LIKENESS: f64 = 0.9;

/// The hint for a setting that takes paths.
fn paths(key: &str) -> String {
    format!("write {key} = [\"PATH\"], the paths or patterns of files")
}

//! Resolves the paths and patterns of a job or testbed file.

use std::path::{Path, PathBuf};

use glob::MatchOptions;

use super::reader::{JobError, Section};

/// The settings of a model in a Hugging Face folder.
pub(super) const CONFIG: &str = "config.json";

/// The directory at which relative paths start.
pub(super) struct Files {
    directory: PathBuf,
}

impl From<&Path> for Files {
    fn from(directory: &Path) -> Self {
        // Without a working directory the paths stay relative. The files are then reported as missing.
        let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
        Self { directory }
    }
}

impl Files {
    /// The path that a setting names, whether it exists or not.
    pub(super) fn named(&self, section: &Section<'_>, key: &'static str) -> Result<Option<PathBuf>, JobError> {
        Ok(section.path(key)?.map(|written| self.at(written)))
    }

    /// The path of a file that is written in the job file.
    pub(super) fn at(&self, written: &str) -> PathBuf {
        self.directory.join(written)
    }

    /// The existing file that a setting names.
    pub(super) fn one(&self, section: &Section<'_>, key: &'static str) -> Result<Option<PathBuf>, JobError> {
        let Some(written) = section.path(key)? else { return Ok(None) };
        let path = self.directory.join(written);
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
        match section.path(key)?.map(|written| self.directory.join(written)) {
            Some(path) if path.is_dir() => Ok(Some(path)),
            _ => self.one(section, key),
        }
    }

    /// The Hugging Face folder that a setting names.
    pub(super) fn folder(&self, section: &Section<'_>, key: &'static str) -> Result<Option<PathBuf>, JobError> {
        let Some(written) = section.path(key)? else { return Ok(None) };
        let path = self.directory.join(written);
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
        let Some(written) = section.texts(key, &paths(key))? else { return Ok(None) };
        let mut files = Vec::new();
        for text in written {
            let pattern = match self.directory.join(text).is_dir() {
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
        let literal = self.directory.join(written);
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
        let path = self.directory.join(written);
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

/// The minimum Jaro-Winkler similarity of a path that is suggested. All paths in a directory are somewhat alike.
const MIN_LIKENESS: f64 = 0.9;

/// The hint for a setting that takes paths.
fn paths(key: &str) -> String {
    format!("write {key} = [\"PATH\"], the paths or patterns of files")
}

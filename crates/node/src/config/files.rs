//! Resolves the paths and patterns of a job file.

use std::path::{Path, PathBuf};

use super::reader::{JobError, Section};

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
    /// The existing file that a setting names.
    pub(super) fn one(&self, section: &Section<'_>, key: &'static str) -> Result<Option<PathBuf>, JobError> {
        let Some(written) = section.text(key)? else { return Ok(None) };
        let path = self.directory.join(written);
        if path.is_file() {
            return Ok(Some(path));
        }
        Err(self.missing(section, key, written))
    }

    /// The files that a setting's paths and patterns match, sorted within each pattern, each file once.
    pub(super) fn many(&self, section: &Section<'_>, key: &'static str) -> Result<Option<Vec<PathBuf>>, JobError> {
        let Some(patterns) = section.texts(key)? else { return Ok(None) };
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

    /// [`Self::many`], where a directory stands for all files in it with this extension.
    pub(super) fn many_within(
        &self,
        section: &Section<'_>,
        key: &'static str,
        extension: &str,
    ) -> Result<Option<Vec<PathBuf>>, JobError> {
        let Some(written) = section.texts(key)? else { return Ok(None) };
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
        let paths = glob::glob(&pattern).map_err(|e| {
            let hint = "* stands for any part of a name, ** for any directories, [ab] for one of the letters";
            section.error(key, format!("\"{written}\" is not a valid pattern: {}", e.msg), hint)
        })?;
        // `glob` sorts. A directory that cannot be listed holds no readable file.
        Ok(paths.filter_map(Result::ok).filter(|p| p.is_file()).collect())
    }

    fn missing(&self, section: &Section<'_>, key: &str, written: &str) -> JobError {
        let path = self.directory.join(written);
        if path.is_dir() {
            let hint = format!("name the files in it: \"{}/*\"", written.trim_end_matches('/'));
            return section.error(key, format!("\"{written}\" is a directory"), hint);
        }
        let message = format!("no file matches \"{written}\" in {}", self.directory.display());
        section.error(key, message, "paths start at the job file's directory")
    }
}

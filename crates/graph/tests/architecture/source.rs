//! The imports between a crate's modules, read from their text.
//!
//! Only code that compiles is read, and imports consist of `mod`, `use`, attributes and paths alone. So a reader of
//! words is enough, and no parser such as `syn` is needed.

use std::collections::{BTreeMap, BTreeSet};

/// A module's place in its crate: empty for the root.
pub(crate) type ModulePath = Vec<String>;

/// The modules of a crate.
pub(crate) struct Modules(BTreeMap<ModulePath, Module>);

/// The contents of one module, as its text declares them.
#[derive(Default)]
pub(crate) struct Module {
    pub(crate) file: String,
    /// The path that each imported name stands for.
    imports: BTreeMap<String, Vec<String>>,
    /// Modules of which all names are imported.
    globs: Vec<Vec<String>>,
    /// Names of the items that stand here.
    defined: BTreeSet<String>,
    /// All paths in imports and code.
    paths: BTreeSet<Vec<String>>,
}

impl Modules {
    /// Reads a crate from its files below `src`.
    pub(crate) fn read(files: &BTreeMap<String, String>) -> Self {
        let mut modules = Self(BTreeMap::new());
        let root = ["lib.rs", "main.rs"].into_iter().find(|name| files.contains_key(*name));
        let root = root.expect("a crate has lib.rs or main.rs");
        modules.add(files, Vec::new(), root, &tokens(&files[root]));
        modules
    }

    fn add(&mut self, files: &BTreeMap<String, String>, path: ModulePath, file: &str, tokens: &[&str]) {
        let mut module = Module { file: file.to_owned(), ..Module::default() };
        let children = module.scan(tokens);
        self.0.insert(path.clone(), module);
        for (name, inline) in children {
            let child = [&path[..], &[name.to_owned()]].concat();
            if let Some(tokens) = inline {
                self.add(files, child, file, tokens);
                continue;
            }
            let stem = child.join("/");
            let candidates = [format!("{stem}.rs"), format!("{stem}/mod.rs")];
            let file = candidates.iter().find(|file| files.contains_key(*file));
            let file = file.unwrap_or_else(|| panic!("no file of module {}", child.join("::")));
            self.add(files, child, file, &self::tokens(&files[file]));
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&ModulePath, &Module)> {
        self.0.iter()
    }

    /// The modules whose items `module` names, each with the path that names it. Names that a module only passes on
    /// belong to the module that defines them.
    pub(crate) fn uses<'a>(&'a self, at: &ModulePath, module: &'a Module) -> Vec<(ModulePath, &'a [String])> {
        let used = |path: &'a Vec<String>| Some((self.resolve(at, path, 0)?, &path[..]));
        module.paths.iter().filter_map(used).collect()
    }

    /// The module that defines the item at `path`, seen from `module`; `None` if the path leads out of the crate.
    fn resolve(&self, module: &[String], path: &[String], depth: usize) -> Option<ModulePath> {
        let mut at = module;
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => {
                at = &[];
                rest = &path[1..];
            }
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|name| name == "super") {
                    (at, rest) = (&at[..at.len().checked_sub(1)?], &rest[1..]);
                }
            }
            name if !self.0[at].imports.contains_key(name) && !self.0.contains_key(&child(at, name)) => return None,
            _ => {}
        }
        self.walk(at, rest, depth)
    }

    fn walk(&self, at: &[String], rest: &[String], depth: usize) -> Option<ModulePath> {
        /// The most modules that a name may pass through. A name that passes through more of them passes through
        /// itself.
        const MAX_DEPTH: usize = 32;
        let here = || Some(at.to_vec());
        let (Some(name), true) = (rest.first(), depth < MAX_DEPTH) else { return here() };
        let inner = child(at, name);
        if self.0.contains_key(&inner) {
            return self.walk(&inner, &rest[1..], depth + 1);
        }
        let module = &self.0[at];
        if let Some(target) = module.imports.get(name) {
            let path = [&target[..], &rest[1..]].concat();
            return self.resolve(at, &path, depth + 1).or_else(here);
        }
        if module.defined.contains(name) {
            return here();
        }
        let mut globs = module.globs.iter().filter_map(|glob| self.resolve(at, glob, depth + 1));
        let knows = |m: &ModulePath| {
            let module = &self.0[m];
            let named = module.imports.contains_key(name) || module.defined.contains(name);
            m != at && (named || self.0.contains_key(&child(m, name)))
        };
        match globs.find(knows) {
            Some(source) => self.walk(&source, rest, depth + 1),
            None => here(),
        }
    }
}

fn child(at: &[String], name: &str) -> ModulePath {
    [at, &[name.to_owned()]].concat()
}

impl Module {
    /// Reads the tokens. The result has the modules that they declare. Modules that stand here come with their own
    /// tokens.
    fn scan<'a>(&mut self, tokens: &'a [&'a str]) -> Vec<(&'a str, Option<&'a [&'a str]>)> {
        let mut children = Vec::new();
        let (mut i, mut depth) = (0, 0usize);
        let at = |i: usize| tokens.get(i).copied().unwrap_or_default();
        while i < tokens.len() {
            match (tokens[i], at(i + 1)) {
                ("#", "!") if at(i + 2) == "[" => {
                    let end = closing(tokens, i + 2);
                    if is_for_tests(&tokens[i + 2..end]) {
                        return Vec::new();
                    }
                    i = end;
                }
                ("#", "[") => {
                    let end = closing(tokens, i + 1);
                    i = if is_for_tests(&tokens[i + 1..end]) { end_of_item(tokens, end) } else { end };
                }
                ("mod", name) if at(i + 2) == ";" => {
                    children.push((name, None));
                    i += 3;
                }
                ("mod", name) if at(i + 2) == "{" => {
                    let end = closing(tokens, i + 2);
                    children.push((name, Some(&tokens[i + 3..end - 1])));
                    i = end;
                }
                // A type's captured lifetimes are no import.
                ("use", "<") => i += 2,
                ("use", _) => i = self.import(tokens, i + 1, &mut Vec::new()),
                ("{", _) => (i, depth) = (i + 1, depth + 1),
                ("}", _) => (i, depth) = (i + 1, depth.saturating_sub(1)),
                ("macro_rules", "!") => {
                    self.defined.insert(at(i + 2).to_owned());
                    i += 3;
                }
                ("fn" | "struct" | "enum" | "union" | "trait" | "type" | "const" | "static", name) if depth == 0 => {
                    self.defined.insert(name.to_owned());
                    i += 1;
                }
                (first, "::") if is_word(first) && (i == 0 || tokens[i - 1] != "::") => {
                    let mut path = vec![first.to_owned()];
                    i += 1;
                    while at(i) == "::" && is_word(at(i + 1)) {
                        path.push(at(i + 1).to_owned());
                        i += 2;
                    }
                    self.paths.insert(path);
                }
                _ => i += 1,
            }
        }
        children
    }

    /// Reads one tree of a `use` from `i` on, and returns where it ends.
    fn import(&mut self, tokens: &[&str], mut i: usize, path: &mut Vec<String>) -> usize {
        let length = path.len();
        while let Some(&token) = tokens.get(i) {
            match token {
                "::" => i += 1,
                "{" => {
                    i += 1;
                    while tokens.get(i).is_some_and(|t| *t != "}") {
                        i = self.import(tokens, i, path);
                        i += usize::from(tokens.get(i) == Some(&","));
                    }
                    i += 1;
                }
                "*" => {
                    self.globs.push(path.clone());
                    self.paths.insert(path.clone());
                    i += 1;
                }
                "," | "}" | ";" => break,
                word => {
                    path.push(word.to_owned());
                    i += 1;
                    if tokens.get(i) == Some(&"::") {
                        continue;
                    }
                    // `self` in braces stands for the path before them.
                    if word == "self" && path.len() > 1 {
                        path.pop();
                    }
                    let mut name = path.last().cloned().unwrap_or_default();
                    if tokens.get(i) == Some(&"as") {
                        name = tokens.get(i + 1).copied().unwrap_or_default().to_owned();
                        i += 2;
                    }
                    self.imports.insert(name, path.clone());
                    self.paths.insert(path.clone());
                }
            }
        }
        path.truncate(length);
        i
    }
}

/// Whether an attribute's tokens mean that the next item is for tests alone.
fn is_for_tests(attribute: &[&str]) -> bool {
    attribute.get(1) == Some(&"cfg") && attribute.contains(&"test") && !attribute.contains(&"not")
}

/// The index after the bracket that closes the one at `i`.
fn closing(tokens: &[&str], i: usize) -> usize {
    let mut depth = 0;
    for (j, token) in tokens.iter().enumerate().skip(i) {
        match *token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return j + 1;
        }
    }
    tokens.len()
}

/// The index after the item that begins at `i`: after its body, or after its semicolon.
fn end_of_item(tokens: &[&str], mut i: usize) -> usize {
    while let Some(token) = tokens.get(i) {
        match *token {
            "(" | "[" => i = closing(tokens, i),
            "{" => {
                i = closing(tokens, i);
                return i + usize::from(tokens.get(i) == Some(&";"));
            }
            ";" => return i + 1,
            // The item is the last field or arm of the item around it.
            ")" | "]" | "}" => return i,
            _ => i += 1,
        }
    }
    i
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// A text's words and signs, without comments, strings, characters and lifetimes.
pub(crate) fn tokens(text: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let after_word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let length = if first.is_whitespace() {
            first.len_utf8()
        } else if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if first == '"' {
            string(rest)
        } else if first == '\'' {
            character_or_lifetime(rest)
        } else if matches!(&rest[..after_word], "r" | "br" | "cr") && raw_string(&rest[after_word..]).is_some() {
            after_word + raw_string(&rest[after_word..]).unwrap_or(0)
        } else if after_word > 0 {
            tokens.push(&rest[..after_word]);
            after_word
        } else {
            let length = if rest.starts_with("::") { 2 } else { first.len_utf8() };
            tokens.push(&rest[..length]);
            length
        };
        rest = &rest[length..];
    }
    tokens
}

/// Length of the comment that `text` begins with; such comments nest.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut i) = (0, 0);
    while i < text.len() {
        match &text.as_bytes()[i..text.len().min(i + 2)] {
            b"/*" => (depth, i) = (depth + 1, i + 2),
            b"*/" => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
        if depth == 0 {
            return i;
        }
    }
    text.len()
}

/// Length of the string that `text` begins with.
fn string(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut i = 1;
    while i < bytes.len() && bytes[i] != b'"' {
        i += if bytes[i] == b'\\' { 2 } else { 1 };
    }
    text.len().min(i + 1)
}

/// Length of the raw string that `text` begins with, from its hashes on; none if it is something else.
fn raw_string(text: &str) -> Option<usize> {
    let hashes = text.bytes().take_while(|b| *b == b'#').count();
    text[hashes..].starts_with('"').then_some(())?;
    let end = format!("\"{}", &text[..hashes]);
    let length = text[hashes + 1..].find(&end).map(|at| hashes + 1 + at + end.len());
    Some(length.unwrap_or(text.len()))
}

/// Length of the character or lifetime that `text` begins with.
fn character_or_lifetime(text: &str) -> usize {
    let mut characters = text[1..].char_indices();
    match (characters.next(), characters.next()) {
        (Some((_, '\\')), Some((_, escaped))) => {
            let start = 2 + escaped.len_utf8();
            text[start..].find('\'').map_or(text.len(), |at| start + at + 1)
        }
        (Some(_), Some((at, '\''))) => at + 2,
        _ => 1,
    }
}

#[test]
fn comments_and_literals_are_no_tokens() {
    let text =
        "a::b // c::d\n/* e /* f */ g */ h(\"i \\\" j\", r#\"k \" l\"#, b\"m\", '\\'', 'n', '\\u{1F600}', &'o p)";
    assert_eq!(tokens(text), ["a", "::", "b", "h", "(", ",", ",", "b", ",", ",", ",", ",", "&", "o", "p", ")"]);
}

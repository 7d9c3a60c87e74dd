//! Modules of a crate do not import each other in a circle: each can be read with the modules below it alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;

use super::source::Modules;
use super::{files, root};

/// The imports between a folder's direct children, with the places that import.
type Imports = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// The imports between the direct children of each folder of a crate, by the folder's path from `crates`. Imports
/// between a folder's `mod.rs` and its children do not count.
fn imports(crate_name: &str, modules: &Modules) -> BTreeMap<String, Imports> {
    let mut folders: BTreeMap<String, Imports> = BTreeMap::new();
    for (from, module) in modules.iter() {
        for (to, path) in modules.uses(from, module) {
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            let (Some(importer), Some(imported)) = (from.get(common), to.get(common)) else { continue };
            let folder = [&[crate_name.to_owned()], &from[..common]].concat().join("/");
            let places = folders.entry(folder).or_default().entry(importer.clone()).or_default();
            let place = format!("{} uses {}", module.file, path.join("::"));
            places.entry(imported.clone()).or_default().insert(place);
        }
    }
    folders
}

/// The shortest chain of imports from one module to another or back to itself, without its end.
fn chain(imports: &Imports, start: &str, end: &str) -> Option<Vec<String>> {
    let mut importer: BTreeMap<&str, &str> = BTreeMap::new();
    let mut open = VecDeque::from([start]);
    while let Some(at) = open.pop_front() {
        for to in imports.get(at).into_iter().flat_map(BTreeMap::keys) {
            if to == end {
                let steps = std::iter::successors(Some(at), |module| importer.get(module).copied());
                let mut chain: Vec<String> = steps.map(String::from).collect();
                chain.reverse();
                return Some(chain);
            }
            if to != start && !importer.contains_key(to.as_str()) {
                importer.insert(to, at);
                open.push_back(to);
            }
        }
    }
    None
}

/// The shortest circle through each module that is in none reported before, with the imports that close it.
fn circles(folder: &str, imports: &Imports) -> Vec<String> {
    /// Places shown for each import.
    const MAX_PLACES: usize = 6;
    let mut found: Vec<Vec<String>> = imports.keys().filter_map(|module| chain(imports, module, module)).collect();
    found.sort_by_key(Vec::len);
    let mut seen = BTreeSet::new();
    found.retain(|circle| {
        let fresh = !circle.iter().any(|module| seen.contains(module));
        seen.extend(circle.iter().cloned());
        fresh
    });
    let report = |circle: Vec<String>| {
        let mut lines = format!("{folder}: {} -> {}\n", circle.join(" -> "), circle[0]);
        for (from, to) in circle.iter().zip(circle.iter().cycle().skip(1)) {
            let places = &imports[from][to];
            let shown: Vec<&str> = places.iter().map(String::as_str).take(MAX_PLACES).collect();
            let more = places.len().saturating_sub(MAX_PLACES);
            let more = if more == 0 { String::new() } else { format!("; and {more} more") };
            lines += &format!("    {from} imports {to}: {}{more}\n", shown.join("; "));
        }
        lines
    };
    found.into_iter().map(report).collect()
}

/// The circles of a crate.
fn check(crate_name: &str, files: &BTreeMap<String, String>) -> Vec<String> {
    let folders = imports(crate_name, &Modules::read(files));
    folders.iter().flat_map(|(folder, imports)| circles(folder, imports)).collect()
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let mut found = Vec::new();
    for entry in fs::read_dir(root().join("crates")).unwrap().map(Result::unwrap) {
        let source = entry.path().join("src");
        // This crate has tests alone.
        if source.is_dir() {
            found.extend(check(entry.file_name().to_str().unwrap(), &files(&source, "rs")));
        }
    }
    assert!(found.is_empty(), "modules import each other in a circle:\n{}", found.concat());
}

/// A crate with these files.
fn made_up(files: &[(&str, &str)]) -> BTreeMap<String, String> {
    files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
}

#[test]
fn a_circle_is_found_with_what_closes_it() {
    // `a` takes `Cost` from the root, which only passes it on; `c` takes what `b` defines by a path in code.
    let files = made_up(&[
        ("lib.rs", "mod a;\nmod b;\nmod c;\npub use b::{self, Cost as Price};\npub use c::*;"),
        ("a.rs", "use crate::Price;\npub struct Size;"),
        ("b.rs", "use crate::helper;\npub struct Cost;"),
        ("c.rs", "pub fn helper() -> crate::a::Size { todo!() }"),
    ]);
    let found = check("x", &files);
    let expected = "x: a -> b -> c -> a\n    a imports b: a.rs uses crate::Price\n    \
        b imports c: b.rs uses crate::helper\n    c imports a: c.rs uses crate::a::Size\n";
    assert_eq!(found, [expected]);
}

#[test]
fn folders_are_checked_and_tests_are_not() {
    let files = made_up(&[
        ("main.rs", "mod a;\nmod b;"),
        ("a/mod.rs", "mod one;\nmod two { pub fn f() { super::one::g() } }\nuse one::g;"),
        ("a/one.rs", "use super::two::f; // crate::b::B\npub fn g() {}"),
        ("b.rs", "use crate::a::A;\n#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}"),
    ]);
    let found = check("x", &files);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].starts_with("x/a: one -> two -> one\n    one imports two: a/one.rs uses super::two::f\n"),
        "{found:?}"
    );

    let for_tests = (
        "a/mod.rs",
        "#[cfg(test)]\nuse crate::b::{B, C};\n#[cfg(test)]\n#[derive(Debug)]\nstruct T(crate::b::B);\npub struct A;\n\
         impl A {\n    #[cfg(all(test, unix))]\n    fn f() -> crate::b::B {}\n}",
    );
    let files = made_up(&[("main.rs", "mod a;\nmod b;"), for_tests, ("b.rs", "use crate::a::A;\npub struct B;")]);
    assert!(check("x", &files).is_empty());
}

#[test]
fn paths_in_macros_count() {
    let files = made_up(&[
        ("lib.rs", "mod a;\nmod b;\nmod c;"),
        ("a.rs", "macro_rules! cost { ($x:expr) => { $crate::b::cost::<::c::T>($x) } }\npub(crate) use cost;"),
        ("b.rs", "pub fn cost() { print!(\"{} {}\", \"crate::c::C\", vec![1, super::a::cost!(x)]) }"),
        ("c.rs", "use crate::{a, b};"),
    ]);
    let found = check("x", &files);
    let expected = "x: a -> b -> a\n    a imports b: a.rs uses crate::b::cost\n    \
        b imports a: b.rs uses super::a::cost\n";
    assert_eq!(found, [expected]);
}

/// The word `use` in a type once kept the reader of imports busy for ever.
#[test]
fn what_a_type_captures_is_no_import() {
    let files = made_up(&[
        ("lib.rs", "mod a;\nmod b;"),
        ("a.rs", "pub fn f<'a>(x: &'a X) -> impl Iterator<Item = crate::b::B> + use<'a> { x.a(); x.b() }"),
        ("b.rs", "pub struct B(crate::a::A);"),
    ]);
    let found = check("x", &files);
    let expected = "x: a -> b -> a\n    a imports b: a.rs uses crate::b::B\n    b imports a: b.rs uses crate::a::A\n";
    assert_eq!(found, [expected]);
}

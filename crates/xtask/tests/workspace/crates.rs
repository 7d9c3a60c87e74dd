//! The table of crates in `ARCHITECTURE.md` says which crate imports which. These tests compare it with the manifests.
use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{CargoOpt, DependencyKind, MetadataCommand};

use super::root;

const PREFIX: &str = "fusionllm-";

type Imports = BTreeMap<String, BTreeSet<String>>;

/// The rows of the table whose columns include `crate` and `imports`.
fn table(document: &str) -> Imports {
    let cells = |line: &str| -> Vec<String> {
        line.trim().trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    let mut rows = document.lines().filter(|line| line.trim_start().starts_with('|')).map(cells);
    let headings = rows.by_ref().find(|row| row[0] == "crate").expect("a table with a column `crate`");
    let imports = headings.iter().position(|h| h == "imports").expect("a column `imports`");
    rows.skip(1)
        .take_while(|row| row.len() == headings.len())
        .map(|row| {
            let names = row[imports].split(',').map(|name| name.trim().trim_matches('`'));
            (row[0].clone(), names.filter(|name| !name.is_empty() && *name != "–").map(String::from).collect())
        })
        .collect()
}

/// The crates of the workspace that each of them depends on. Dependencies of tests and benchmarks do not count.
fn manifests() -> Imports {
    let metadata = MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .features(CargoOpt::AllFeatures)
        .no_deps()
        .other_options(vec!["--offline".into()])
        .exec()
        .expect("cargo metadata");
    metadata
        .workspace_packages()
        .into_iter()
        .map(|package| {
            let ours = package.dependencies.iter().filter(|d| d.kind == DependencyKind::Normal);
            let ours = ours.filter_map(|d| d.name.strip_prefix(PREFIX)).map(String::from).collect();
            (package.name.strip_prefix(PREFIX).expect("the prefix").to_owned(), ours)
        })
        .collect()
}

#[test]
fn the_crate_table_is_true() {
    let table = table(&std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap());
    let manifests = manifests();
    assert!(table.keys().eq(manifests.keys()), "the table has {:?}, crates/ {:?}", table.keys(), manifests.keys());
    for (name, imports) in &manifests {
        assert_eq!(table[name], *imports, "`{name}`: ARCHITECTURE.md (left) and its manifest (right) differ");
    }
}

/// A test of the tests: a missing row or a row in another shape must not pass.
#[test]
fn the_table_is_read_as_people_read_it() {
    let document = "| word | meaning |\n| --- | --- |\n| node | x |\n\ntext\n\n\
        | crate | what it is | imports | never |\n| --- | --- | --- | --- |\n\
        | `graph` | a, b | – | I/O |\n| `plan` | c | graph | |\n| `exec` | c | graph, `plan` | |\n\n| `x` | y |\n";
    let owned = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<BTreeSet<_>>();
    let expected = [("graph", owned(&[])), ("plan", owned(&["graph"])), ("exec", owned(&["graph", "plan"]))];
    assert_eq!(table(document), expected.map(|(name, imports)| (name.to_string(), imports)).into());
}

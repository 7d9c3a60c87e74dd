//! The command line is a contract: a change of it shows here.

use std::path::Path;

use insta::assert_snapshot;

use super::call;

#[test]
fn help() {
    let commands = [
        &[][..],
        &["train"],
        &["broker"],
        &["join"],
        &["generate"],
        &["export"],
        &["graph"],
        &["graph", "import"],
        &["graph", "show"],
        &["graph", "check"],
    ];
    let mut all = String::new();
    for command in commands {
        let ran = call(Path::new("."), &[command, &["--help"]].concat());
        assert_eq!((ran.status, ran.err.as_str()), (0, ""));
        all += &format!("$ fusionllm {}\n{}\n", [command, &["--help"]].concat().join(" "), ran.out);
    }
    assert_snapshot!(all);
}

#[test]
fn near_misses_get_a_hint() {
    for (args, hint) in [
        (&["trian"][..], "'train'"),
        (&["train", "--peer", "2"], "'--peers'"),
        (&["graph", "shwo", "x"], "'show'"),
        (&["export", "x", "--format", "fh", "-o", "y"], "[possible values: hf, torchvision, pt2-weights]"),
        (&["generate", "x", "--promt", "y"], "'--prompt'"),
    ] {
        let ran = call(Path::new("."), args);
        assert_eq!(ran.status, 2, "{args:?}");
        assert!(ran.err.contains(hint), "{args:?}: {}", ran.err);
    }
}

//! The help texts. A change of the command line shows here.

use std::path::Path;

use insta::assert_snapshot;

use super::call;

#[test]
fn help() {
    let commands = [
        &[][..],
        &["train"],
        &["finetune"],
        &["broker"],
        &["join"],
        &["status"],
        &["runs"],
        &["kick"],
        &["invite"],
        &["revoke"],
        &["identity"],
        &["doctor"],
        &["relay"],
        &["plan"],
        &["simulate"],
        &["profile"],
        &["generate"],
        &["chat"],
        &["export"],
        &["data"],
        &["data", "show"],
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
    let wide: Vec<&str> = all.lines().filter(|line| line.chars().count() > 80).collect();
    assert!(wide.is_empty(), "{wide:#?}");
    assert_snapshot!(all);
}

/// Whoever comes from another trainer is told what its options are called here.
#[test]
fn options_of_other_trainers_lead_to_ours() {
    for option in ["--nproc_per_node=4", "--num-processes"] {
        let refused = call(Path::new("."), &["train", option]).failure(2, Path::new("."));
        assert!(refused.contains("unexpected argument") && refused.contains("--peers says how many"), "{refused}");
    }
}

#[test]
fn near_misses_get_a_hint() {
    for (args, hint) in [
        (&["trian"][..], "'train'"),
        (&["train", "--peer", "2"], "'--peers'"),
        (&["graph", "shwo", "x"], "'show'"),
        (&["export", "x", "--format", "fh", "-o", "y"], "[possible values: hf, torchvision, pt2-weights, peft, gguf]"),
        (&["generate", "x", "--promt", "y"], "'--prompt'"),
    ] {
        let ran = call(Path::new("."), args);
        assert_eq!(ran.status, 2, "{args:?}");
        assert!(ran.err.contains(hint), "{args:?}: {}", ran.err);
    }
}

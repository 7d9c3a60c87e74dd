# The checks that CI runs, one by one. `just` lists them.

default:
    @just --list

# Everything that CI runs
ci:
    .ci/run

# Format all code
fmt:
    cargo fmt --all

# Lints; only tests may panic
lint:
    cargo clippy --workspace --all-features -- -D warnings -D clippy::unwrap_used -D clippy::expect_used -D clippy::panic
    cargo clippy --workspace --all-targets --all-features -- -D warnings

# Documentation of all crates
doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --all-features

# All tests, or those of `just test -p fusionllm-plan`
test *arguments:
    cargo test --all-features {{arguments}}

# Licences, sources and bans of dependencies; without arguments advisories, too
deny *checks:
    cargo deny check {{checks}}

# The quick start
train *arguments:
    cargo run --release -- train {{arguments}}

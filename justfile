# The checks that CI runs, and the quick start.

default:
    @just --list

# Everything that CI runs
ci:
    .ci/run

# Whether all code is formatted
fmt:
    .ci/run fmt

# Lints, with warnings denied; only tests may panic
lint:
    .ci/run lint

# Documentation of all crates, with warnings denied
doc:
    .ci/run doc

# All tests, or those of `just test -p fusionllm-plan`
test *arguments:
    cargo test {{arguments}}

# Tests of the optional backend on the processor: burn
frameworks:
    .ci/run frameworks

# Tests of the backend burn-wgpu on Mesa's software adapter
wgpu:
    .ci/run wgpu

# Licences, sources and bans of dependencies
deny:
    .ci/run deny

# Dependencies that nothing uses
unused:
    .ci/run unused

# Spelling; `.ci/run python` brings the program
typos:
    .ci/run typos

# Trains the quick start, or `just train JOB.toml`
train *arguments:
    cargo run --release -- train {{arguments}}

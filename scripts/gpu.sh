#!/usr/bin/env bash
# What a GPU shows:
#
#   - whether PyTorch's worker is right on it, with each of its options;
#   - the time of a step with that worker and each option, against PyTorch alone: GPT-2 small at sequence 1,024 in bf16,
#     then three models in float32 without TF32. Each row of the table at the end names PyTorch's fastest setting beside
#     it: eager, fused or compiled. The tables before it have all settings, and the device's memory;
#   - the same step of GPT-2 small with burn over wgpu, in float32;
#   - one run with a peer on the GPU and a peer on the processor: the predicted time of a step and the measured one.
#
#   scripts/gpu.sh [DEVICE]  builds and runs all of it; the device is cuda unless given
#   scripts/gpu.sh pack      only builds. A machine without Rust runs what it finds in target/gpu
#
# The machine needs Python with PyTorch, and no network. These variables choose less:
#
#   MODELS="gpt2-small:bf16 resnet50"  the models, those with :bf16 in that precision
#   OPTIONS=",--compile"               the worker's options, separated by commas; the first here are none
#   STEPS=10                           the steps of each row
#   PROFILE=release                    Cargo's profile
#
# `MODELS=gpt2-narrow scripts/gpu.sh cpu` tries the script where there is no GPU. It leaves out what takes one.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-cuda}
case $device in
    pack | cuda*) all_models="gpt2-small:bf16 gpt2-small gpt2-narrow resnet50"
                  all_options=",--compile,--cuda-graphs,--compile --cuda-graphs" ;;
    *)            all_models="gpt2-narrow resnet50"
                  all_options=",--compile" ;;
esac
features=()
[ "$device" = cpu ] || features=(--features wgpu)

# Builds a target with Cargo, and copies its program.
build() {
    local program
    program=$(cargo "$@" "${features[@]}" --profile "${PROFILE:-release}" --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    mkdir -p target/gpu
    cp "$program" "target/gpu/$(basename "$program" | sed 's/-[0-9a-f]*$//')"
}
if command -v cargo >/dev/null; then
    build build -p fusionllm-cli --bin fusionllm
    build bench -p fusionllm-exec --bench step --no-run
    strip target/gpu/*
elif [ ! -x target/gpu/step ]; then
    echo "error: target/gpu has no programs, and there is no cargo to build them: run \`$0 pack\` where Rust is" >&2
    exit 2
fi
[ "$device" != pack ] || exit 0

python=${PYTHON:-python3}
export PYTHONPATH=$PWD/python
table=$(mktemp) rows=$(mktemp)
trap 'rm -f "$table" "$rows"' EXIT
steps=${STEPS:-10}
IFS=, read -r -a options <<<"${OPTIONS-$all_options}"
[ ${#options[@]} -gt 0 ] || options=("")
worker() {
    echo "$python -m fusionllm_torch --device $device${1:+ $1}"
}

for option in "${options[@]}"; do
    # A compiler takes seconds for each case, so it gets a part of them.
    every=1
    [[ $option != *--compile* ]] || every=50
    echo "== Conformance of $(worker "$option"), one case in $every"
    target/gpu/fusionllm backend check --worker "$(worker "$option")" --every "$every" || echo "some checks failed"
done

# Adds a row to the last table: ours against the fastest row of PyTorch.
row() {
    awk -F ' *[|] *' -v start="| $1 | ${2:-none} |" '
        $2 == "FusionLLM" { ours = $3 }
        $2 ~ /^PyTorch/ && (best == "" || $3 + 0 < best + 0) { best = $3; name = $2; ratio = $4 }
        END { if (ours != "" && best != "") print start, ours, "|", name, "|", best, "|", ratio, "|"
              else print start, "failed | | | |" }' >>"$table"
}
for model in ${MODELS:-$all_models}; do
    for option in "${options[@]}"; do
        echo "== $model: a step with $(worker "$option") against PyTorch alone"
        precision=()
        [[ $model != *:bf16 ]] || precision=(--bf16)
        { "$python" scripts/against_pytorch.py "${model%:*}" "${precision[@]}" --steps "$steps" --device "$device" \
            --worker "$(worker "$option")" --step-binary "$PWD/target/gpu/step" || echo "this row failed"; } |
            tee "$rows"
        row "$model" "$option" <"$rows"
    done
done

if [ "$device" != cpu ]; then
    echo "== gpt2-small with burn over wgpu"
    target/gpu/step gpt2-small --backend burn-wgpu --steps "$steps" || echo "wgpu found no adapter that can"
fi
echo "== One peer on $device beside one on the processor"
precision=f32
[[ ${MODELS:-$all_models} != *:bf16* ]] || precision=bf16
target/gpu/fusionllm train --peers 2 --backend cpu --worker "$(worker "${options[0]}")" --steps 20 \
    --run-dir "$(mktemp -d)/run" --set "train.precision=$precision"

echo "== Each option of the worker against PyTorch's fastest setting"
echo "| model | options | step, s | PyTorch's fastest | its step, s | ours / theirs |"
echo "| --- | --- | --- | --- | --- | --- |"
cat "$table"

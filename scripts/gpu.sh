#!/usr/bin/env bash
# What a GPU shows, in under ten minutes: whether PyTorch's worker is right on it, and how fast against PyTorch alone.
#
#   scripts/gpu.sh pack      where Rust is: builds what a machine without Rust needs, in target/gpu
#   scripts/gpu.sh [DEVICE]  where the GPU is: runs it there; the device is cuda unless given
#
# The machine needs Python with PyTorch. It needs neither Rust nor a network. Figures are in float32 without TF32.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = pack ]; then
    mkdir -p target/gpu
    cargo build --release
    cp target/release/fusionllm target/gpu/
    step=$(cargo bench -p fusionllm-exec --bench step --no-run --message-format=json 2>/dev/null |
        sed -n 's/.*"executable":"\([^"]*step-[^"]*\)".*/\1/p')
    cp "$step" target/gpu/step
    strip target/gpu/*
    ls -l target/gpu
    exit
fi

device=${1:-cuda}
export PYTHONPATH=$PWD/python
worker="${PYTHON:-python3} -m fusionllm_torch --device $device"
echo "== Conformance on $device"
target/gpu/fusionllm backend check --worker "$worker" || echo "some checks failed"
for model in ${MODELS:-gpt2-small gpt2-narrow resnet50}; do
    echo "== $model: a step with the worker against PyTorch alone"
    "${PYTHON:-python3}" scripts/against_pytorch.py "$model" --steps "${STEPS:-10}" --device "$device" \
        --worker "$worker" --step-binary "$PWD/target/gpu/step"
done
echo "== One peer on $device beside one on the processor"
target/gpu/fusionllm train --peers 2 --backend cpu --worker "$worker" --steps 20 --run-dir "$(mktemp -d)/run"

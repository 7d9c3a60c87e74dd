#!/usr/bin/env bash
# What a GPU shows, in under ten minutes:
#
#   - whether PyTorch's worker is right on it;
#   - the time and the device memory of a step with that worker, against PyTorch eager and torch.compile: GPT-2 small at
#     sequence 1,024 in bf16, then three models in float32 without TF32;
#   - the same step of GPT-2 small with burn over wgpu, in float32;
#   - one run with a peer on the GPU and a peer on the processor: the predicted time of a step and the measured one.
#
#   scripts/gpu.sh pack      where Rust is: builds what a machine without Rust needs, in target/gpu
#   scripts/gpu.sh [DEVICE]  where the GPU is: runs it there; the device is cuda unless given
#
# The machine needs Python with PyTorch. It needs neither Rust nor a network.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = pack ]; then
    mkdir -p target/gpu
    cargo build --release --features wgpu
    cp target/release/fusionllm target/gpu/
    step=$(cargo bench -p fusionllm-exec --features wgpu --bench step --no-run --message-format=json 2>/dev/null |
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
against_pytorch() {
    echo "== $*: a step with the worker against PyTorch alone"
    "${PYTHON:-python3}" scripts/against_pytorch.py "$@" --steps "${STEPS:-10}" --device "$device" \
        --worker "$worker" --step-binary "$PWD/target/gpu/step"
}
against_pytorch gpt2-small --bf16
for model in ${MODELS:-gpt2-small gpt2-narrow resnet50}; do
    against_pytorch "$model"
done
echo "== gpt2-small with burn over wgpu"
target/gpu/step gpt2-small --backend burn-wgpu --steps "${STEPS:-10}" || echo "wgpu found no adapter that can"
echo "== One peer on $device beside one on the processor"
target/gpu/fusionllm train --peers 2 --backend cpu --worker "$worker" --steps 20 --run-dir "$(mktemp -d)/run" \
    --set train.precision=bf16

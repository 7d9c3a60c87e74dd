#!/usr/bin/env python3
"""Counts the stock models of transformers and torchvision whose loss and gradients here match PyTorch's.

    pip install torch torchvision transformers safetensors && cargo build --release
    python3 scripts/stock_models.py [--only TEXT] [--keep DIR] [--results FILE]

Each model is an unmodified class with a small configuration and random weights, in training mode, with every dropout
at 0. torch.export writes it, and PyTorch computes loss and gradients of one batch. `fusionllm graph check` compares
them with the same batch here. A model matches where every relative error is at most 1e-3, the command's tolerance.

The references of language models are float32. Those of models of images are float64, because batch norm over few values
makes float32 results depend on the kernels, in PyTorch too.

FUSIONLLM names the program, by default target/release/fusionllm.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

from common import add_results, program, write_results

# Hugging Face's names of model types, with settings that the shared ones below do not cover.
CAUSAL = {
    "gpt2": {}, "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8}, "gptj": {"rotary_dim": 8},
    "gpt_neox": {}, "gpt_bigcode": {}, "openai-gpt": {}, "codegen": {"rotary_dim": 8}, "ctrl": {"dff": 128},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64}, "bloom": {}, "falcon": {}, "mpt": {}, "biogpt": {},
    "llama": {}, "mistral": {}, "mixtral": {"num_local_experts": 4}, "qwen2": {}, "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16}, "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16}, "phi": {}, "phi3": {}, "stablelm": {}, "olmo": {},
    "olmo2": {}, "cohere": {}, "granite": {}, "starcoder2": {}, "persimmon": {}, "smollm3": {},
    "helium": {"head_dim": 16}, "nemotron": {}, "glm": {"head_dim": 16}, "exaone4": {},
    "xglm": {"ffn_dim": 128, "attention_heads": 4, "num_layers": 2},
}
MASKED = {
    "bert": {}, "roberta": {}, "camembert": {}, "electra": {"embedding_size": 64}, "albert": {"embedding_size": 32},
    "distilbert": {"hidden_dim": 128}, "mpnet": {}, "deberta-v2": {}, "convbert": {"embedding_size": 64},
    "squeezebert": {"embedding_size": 64}, "rembert": {"input_embedding_size": 32, "output_embedding_size": 64},
    "roformer": {"embedding_size": 64}, "modernbert": {}, "megatron-bert": {}, "xlm-roberta": {}, "nomic_bert": {},
}
TRANSLATING = {"t5": {"d_ff": 128, "d_kv": 16, "num_layers": 2}, "bart": {}, "marian": {}, "pegasus": {}}
IMAGES = {
    "vit": {}, "deit": {"architectures": ["DeiTForImageClassification"]}, "beit": {}, "dinov2": {}, "ijepa": {},
    "vit_msn": {}, "swin": {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4,
                            "hidden_size": None, "num_attention_heads": None, "num_hidden_layers": None},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "resnet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "layer_type": "basic"},
    "regnet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "groups_width": 16,
               "layer_type": "x", "num_hidden_layers": None},
    "mobilenet_v1": {}, "mobilenet_v2": {}, "poolformer": {}, "mobilevit": {},
    "segformer": {"num_attention_heads": None, "hidden_size": None, "hidden_sizes": [16, 32, 64, 128]},
}
TORCHVISION = ["alexnet", "vgg11_bn", "resnet18", "resnet50", "wide_resnet50_2", "resnext50_32x4d", "densenet121",
               "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "efficientnet_v2_s", "shufflenet_v2_x1_0",
               "squeezenet1_1", "mnasnet1_0", "regnet_x_400mf", "regnet_y_400mf", "convnext_tiny", "swin_t",
               "swin_v2_t", "vit_b_32", "maxvit_t", "googlenet"]
# Every model type ignores the names that it does not know. None stands for the type's own default.
SMALL = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "max_position_embeddings": 64, "type_vocab_size": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "use_cache": False, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_start_token_id": 0,
}
SMALL_IMAGES = {"image_size": 32, "patch_size": 8, "num_labels": 10, "hidden_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": 4, "intermediate_size": 128}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the models whose names contain this")
    parser.add_argument("--keep", type=pathlib.Path, help="keep the exported models and references in this folder")
    add_results(parser)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    binary = program()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = {}
        for name, build in models():
            if args.only in name:
                outcomes[name] = outcome(binary, folder, args.keep, name, build)
                print(f"{name}: {outcomes[name][1]}", flush=True)
    kinds = [kind for kind, _ in outcomes.values()]
    counts = {kind: kinds.count(kind) for kind in ("matches", "differs", "refused", "skipped")}
    tried = len(outcomes) - counts["skipped"]
    print(f"\n{counts['matches']} of {tried} stock models match PyTorch; {counts['differs']} differ, "
          f"{counts['refused']} are refused; {counts['skipped']} cannot be built or exported by PyTorch itself here")
    named = lambda kind: [f"{name}: {sentence}" for name, (found, sentence) in outcomes.items() if found == kind]
    write_results(args.results, counts | {
        "tried": tried, "refusals": named("refused"), "differences": named("differs"), "skips": named("skipped")})


def models():
    """Names, each with a function that builds the module and one batch for it."""
    for kind, types in [("causal", CAUSAL), ("masked", MASKED), ("translating", TRANSLATING)]:
        for name, settings in types.items():
            yield f"transformers/{name}", lambda kind=kind, name=name, settings=settings: text(kind, name, settings)
    for name, settings in IMAGES.items():
        yield f"transformers/{name}", lambda name=name, settings=settings: images(name, settings)
    for name in TORCHVISION:
        yield f"torchvision/{name}", lambda name=name: torchvision_model(name)


def text(kind, name, settings):
    import torch
    import transformers

    auto = {"causal": transformers.AutoModelForCausalLM, "masked": transformers.AutoModelForMaskedLM,
            "translating": transformers.AutoModelForSeq2SeqLM}[kind]
    model = auto.from_config(configuration(name, SMALL | settings))
    draw = lambda: torch.randint(3, 100, (2, 16))
    return model, (draw(), draw()), kind == "translating", torch.float32


def images(name, settings):
    import torch
    import transformers

    model = transformers.AutoModelForImageClassification.from_config(configuration(name, SMALL_IMAGES | settings))
    side = model.config.image_size if hasattr(model.config, "image_size") else 32
    return model, (torch.randn(2, 3, side, side), torch.randint(0, 10, (2,))), False, torch.float64


def torchvision_model(name):
    import torch
    import torchvision

    settings = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    side = 224 if name in ("vit_b_32", "maxvit_t") else 64
    model = torchvision.models.get_model(name, num_classes=10, **settings)
    return model, (torch.randn(2, 3, side, side), torch.randint(0, 10, (2,))), False, torch.float64


def configuration(name, settings):
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **{key: value for key, value in settings.items() if value is not None})
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def outcome(binary, folder, keep, name, build):
    """What became of a model, and a sentence on it."""
    import torch
    from safetensors.torch import save_file

    class Trained(torch.nn.Module):
        def __init__(self, model, two_sided):
            super().__init__()
            self.model, self.two_sided = model, two_sided

        def forward(self, x, y):
            out = self.model(input_ids=x, decoder_input_ids=y) if self.two_sided else self.model(x)
            logits = getattr(out, "logits", out)
            return torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())

    stem = folder / name.replace("/", "-")
    archive, reference = stem.with_suffix(".pt2"), stem.with_suffix(".safetensors")
    torch.manual_seed(1)
    try:
        model, (x, y), two_sided, dtype = build()
        trained = Trained(model, two_sided).train()
        for part in trained.modules():
            for key in ("p", "drop_prob"):
                if isinstance(getattr(part, key, None), float):
                    setattr(part, key, 0.0)
        torch.export.save(torch.export.export(trained, (x, y)), archive)
        trained = trained.to(dtype)
        x = x.to(dtype) if x.is_floating_point() else x
        loss = trained(x, y)
        loss.backward()
    except Exception as error:
        return "skipped", f"PyTorch cannot build or export it: {first_line(error)}"
    tensors = {"input.x": x, "input.y": y, "loss": loss.detach()}
    tensors |= {f"grad.{key}": p.grad for key, p in trained.named_parameters() if p.grad is not None}
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, reference)
    command = [binary, "graph", "check", archive, "--against", reference, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not keep:
        archive.unlink()
        reference.unlink()
    try:
        check = json.loads(done.stdout)
    except json.JSONDecodeError:
        return "refused", f"refused: {first_line(done.stderr)}"
    error = max(check["loss_rel_err"], check["max_grad_rel_err"])
    return ("matches", f"matches, {error:.1e}") if done.returncode == 0 else ("differs", f"differs by {error:.1e}")


def first_line(text):
    return (str(text).strip().splitlines() or ["?"])[0][:200]


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Exports stock models at small sizes, and compares FusionLLM's loss and gradients with PyTorch's.

    pip install torch torchvision transformers safetensors
    python crates/import/stock/models.py export DIR [NAME ...]
    python crates/import/stock/models.py check DIR [NAME ...] --fusionllm target/debug/fusionllm

`export` writes three files per model to DIR: NAME.pt2 (from `torch.export.export`), NAME.core.pt2 (after
`run_decompositions()`) and NAME.safetensors (inputs, loss and gradients). The last is in float64 for models with
convolutions or batch normalisation, because float32 results depend on the kernels there.

`check` runs `fusionllm graph check` on both forms with 1 and 3 peers, and prints a table. It needs PyTorch, so no test
runs it.
"""

import argparse
import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

VOCABULARY, LENGTH, CLASSES = 100, 16, 10

# Sizes under the names that most language models use. The others translate them.
TINY = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


class Language(torch.nn.Module):
    """A language model with its loss: from tokens and labels to the mean cross-entropy."""

    def __init__(self, model, **arguments):
        super().__init__()
        self.model = model
        self.arguments = arguments

    def forward(self, x, y):
        logits = self.model(input_ids=x, **self.arguments).logits
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


class Translation(torch.nn.Module):
    """An encoder-decoder model with its loss: from the tokens of both sides to the mean cross-entropy."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        logits = self.model(input_ids=x, decoder_input_ids=y, use_cache=False).logits
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


class Images(torch.nn.Module):
    """An image classifier with its loss: from images and labels to the mean cross-entropy."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        out = self.model(x)
        return F.cross_entropy(getattr(out, "logits", out), y)


def language(name, classes="ForCausalLM", kind=Language, arguments=None, **config):
    def build():
        import transformers

        tiny = {k: v for k, v in {**TINY, **config}.items() if v is not None}
        settings = getattr(transformers, f"{name}Config")(**tiny)
        model = getattr(transformers, f"{name.removesuffix('Text')}{classes}")(settings)
        if kind is Translation:
            return Translation(model)
        return Language(model, **({"use_cache": False} if arguments is None else arguments))

    return build, (lambda: tokens()), torch.float32


def masked(name, classes="ForMaskedLM", **config):
    return language(name, classes, arguments={}, **config)


def hf_image(name, size=32, classes="ForImageClassification", dtype=torch.float64, **config):
    def build():
        import transformers

        settings = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **config)
        return Images(getattr(transformers, f"{name}{classes}")(settings))

    return build, (lambda: images(size)), dtype


def vision(build, size=32, batch=2):
    def made():
        import torchvision.models

        return Images(build(torchvision.models))

    return made, (lambda: images(size, batch)), torch.float64


def tokens():
    return torch.randint(3, VOCABULARY, (2, LENGTH)), torch.randint(3, VOCABULARY, (2, LENGTH))


def images(size, batch=2):
    return torch.randn(batch, 3, size, size), torch.randint(0, CLASSES, (batch,))


def plain(name, **arguments):
    return vision(lambda m: getattr(m, name)(num_classes=CLASSES, **arguments))


GPT = dict(
    hidden_size=None, intermediate_size=None, num_hidden_layers=None, num_attention_heads=None,
    max_position_embeddings=None,
)
SMALL_IMAGE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)

MODELS = {
    # Causal language models.
    "gpt2": language("GPT2", "LMHeadModel", **GPT, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    "llama": language("Llama", num_key_value_heads=2),
    "mistral": language("Mistral", num_key_value_heads=2, sliding_window=8),
    "qwen2": language("Qwen2", num_key_value_heads=2),
    "qwen3": language("Qwen3", num_key_value_heads=2, head_dim=16),
    "gemma": language("Gemma", num_key_value_heads=1, head_dim=16),
    "gemma2": language("Gemma2", num_key_value_heads=2, head_dim=16, sliding_window=8),
    "gemma3": language("Gemma3Text", "ForCausalLM", num_key_value_heads=2, head_dim=16, sliding_window=8),
    "phi": language("Phi"),
    "phi3": language("Phi3", num_key_value_heads=2),
    "falcon": language("Falcon", max_position_embeddings=None, intermediate_size=None),
    "falcon_alibi": language("Falcon", max_position_embeddings=None, intermediate_size=None, alibi=True),
    "bloom": language("Bloom", intermediate_size=None, num_hidden_layers=None, num_attention_heads=None,
                      max_position_embeddings=None, n_layer=2, n_head=4),
    "mpt": language("Mpt", **GPT, d_model=64, n_layers=2, n_heads=4, max_seq_len=64),
    "gptj": language("GPTJ", **GPT, n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8),
    "gpt_neox": language("GPTNeoX"),
    "gpt_neo": language("GPTNeo", num_hidden_layers=None, num_attention_heads=None, num_layers=2, num_heads=4,
                        attention_types=[[["global", "local"], 1]], window_size=8),
    "opt": language("OPT", intermediate_size=None, ffn_dim=128, word_embed_proj_dim=64),
    "codegen": language("CodeGen", **GPT, n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8),
    "stablelm": language("StableLm", num_key_value_heads=2),
    "olmo2": language("Olmo2", num_key_value_heads=2),
    "starcoder2": language("Starcoder2", num_key_value_heads=2),
    "cohere": language("Cohere", num_key_value_heads=2),
    "granite": language("Granite", num_key_value_heads=2),
    "mamba": language("Mamba", intermediate_size=None, num_attention_heads=None, max_position_embeddings=None,
                      state_size=8),
    "mixtral": language("Mixtral", num_key_value_heads=2, num_local_experts=4),
    "qwen2_moe": language("Qwen2Moe", num_key_value_heads=2, num_experts=4, moe_intermediate_size=32,
                          shared_expert_intermediate_size=32),
    # Masked language models and encoder-decoder models.
    "bert": masked("Bert"),
    "roberta": masked("Roberta"),
    "distilbert": masked("DistilBert", hidden_size=None, intermediate_size=None, num_hidden_layers=None,
                         num_attention_heads=None, dim=64, hidden_dim=128, n_layers=2, n_heads=4),
    "albert": masked("Albert", embedding_size=32),
    "electra": masked("Electra", embedding_size=32),
    "mpnet": masked("MPNet"),
    "deberta": masked("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta_v2": masked("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"],
                         position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm"),
    "t5": language("T5", "ForConditionalGeneration", Translation, **GPT, d_model=64, d_kv=16, d_ff=128, num_layers=2,
                   num_heads=4, decoder_start_token_id=0),
    "bart": language("Bart", "ForConditionalGeneration", Translation, hidden_size=None, intermediate_size=None,
                     num_hidden_layers=None, num_attention_heads=None, d_model=64, encoder_layers=2, decoder_layers=2,
                     encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128),
    # Image models of transformers.
    "hf_vit": hf_image("ViT", image_size=32, patch_size=8, dtype=torch.float32, **SMALL_IMAGE),
    "hf_beit": hf_image("Beit", image_size=32, patch_size=8, use_relative_position_bias=True, **SMALL_IMAGE),
    "hf_dinov2": hf_image("Dinov2", image_size=28, patch_size=7, size=28, hidden_size=32, num_hidden_layers=2,
                          num_attention_heads=4),
    "hf_swin": hf_image("Swin", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                        window_size=4),
    "hf_convnext": hf_image("ConvNext", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]),
    "hf_resnet": hf_image("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    "hf_segformer": hf_image("Segformer", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
                             num_attention_heads=[1, 2, 4, 4]),
    "hf_mobilevit": hf_image("MobileViT", image_size=32, hidden_sizes=[24, 32, 40], neck_hidden_sizes=[8, 8, 16, 24, 32, 40, 64]),
    # Image models of torchvision.
    "alexnet": vision(lambda m: m.alexnet(num_classes=CLASSES), 64),
    "vgg11_bn": vision(lambda m: m.vgg11_bn(num_classes=CLASSES)),
    "resnet18": plain("resnet18"),
    "resnet50": plain("resnet50"),
    "resnext50": plain("resnext50_32x4d"),
    "mobilenet_v2": plain("mobilenet_v2"),
    "mobilenet_v3": plain("mobilenet_v3_small"),
    "mnasnet": plain("mnasnet0_5"),
    "shufflenet": plain("shufflenet_v2_x0_5"),
    "squeezenet": plain("squeezenet1_1"),
    "densenet121": plain("densenet121"),
    "efficientnet": plain("efficientnet_b0"),
    "efficientnet_v2": plain("efficientnet_v2_s"),
    "regnet_y": plain("regnet_y_400mf"),
    "googlenet": vision(lambda m: m.googlenet(num_classes=CLASSES, aux_logits=False, init_weights=False)),
    "inception_v3": vision(lambda m: m.inception_v3(num_classes=CLASSES, aux_logits=False, init_weights=False), 96),
    "convnext": vision(lambda m: m.convnext_tiny(num_classes=CLASSES)),
    "vit": vision(lambda m: m.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=CLASSES)),
    "swin": vision(lambda m: m.SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES), 36),
    "swin_v2": vision(
        lambda m: m.SwinTransformer(
            [2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES,
            block=m.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=m.swin_transformer.PatchMergingV2,
        ), 36),
    "maxvit": vision(
        lambda m: m.MaxVit(input_size=(32, 32), stem_channels=8, partition_size=4, block_channels=[8, 16],
                               block_layers=[1, 1], head_dim=4, stochastic_depth_prob=0.0, num_classes=CLASSES)),
}


def silence(model):
    """Turns off all dropout, so that results can be compared."""
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout", "attention_dropout", "attn_dropout", "hidden_dropout", "dropout_rate",
                     "final_dropout", "activation_dropout", "layerdrop", "attention_probs_dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def export(name, directory):
    build, sample, dtype = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    silence(model)
    x, y = sample()
    program = torch.export.export(model, (x, y))
    torch.export.save(program, str(directory / f"{name}.pt2"))
    try:
        torch.export.save(program.run_decompositions(), str(directory / f"{name}.core.pt2"))
    except (RuntimeError, ValueError) as error:
        # PyTorch cannot decompose every model that it exports, such as GPT-2 of transformers 5.23.
        print(f"{name:20} no core form: {str(error).splitlines()[0]}", flush=True)
    reference = copy.deepcopy(model).to(dtype)
    wide = x.to(dtype) if x.is_floating_point() else x
    loss = reference(wide, y)
    loss.backward()
    tensors = {"input.x": wide, "input.y": y, "loss": loss.detach()}
    for parameter, value in reference.named_parameters():
        if value.grad is not None:
            tensors[f"grad.{parameter}"] = value.grad.detach().clone().contiguous()
    from safetensors.torch import save_file

    save_file(tensors, str(directory / f"{name}.safetensors"))
    return len(tensors) - 3, float(loss)


def check(name, directory, program):
    good = True
    for form in (name, f"{name}.core"):
        if not (directory / f"{form}.pt2").exists():
            continue
        for peers in ("1", "3"):
            command = [program, "graph", "check", str(directory / f"{form}.pt2"), "--against",
                       str(directory / f"{name}.safetensors"), "--peers", peers, "--json"]
            done = subprocess.run(command, capture_output=True, text=True)
            try:
                result = json.loads(done.stdout)
                figures = (f"loss {result['loss_rel_err']:.1e}  gradients {result['max_grad_rel_err']:.1e}  "
                           f"{result['operators']} operators  {result['parameters']} parameters")
            except (ValueError, KeyError):
                figures = done.stderr.strip()
            good &= done.returncode == 0
            print(f"{'ok ' if done.returncode == 0 else 'BAD'} {form:24} peers {peers}  {figures}", flush=True)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("export", "check"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--fusionllm", default="fusionllm")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    failed = []
    for name in arguments.names or MODELS:
        if arguments.action == "check":
            if not check(name, arguments.directory, arguments.fusionllm):
                failed.append(name)
            continue
        try:
            gradients, loss = export(name, arguments.directory)
            print(f"{name:20} loss {loss:.4f}, {gradients} gradients", flush=True)
        except Exception as error:  # One model that cannot be exported must not keep the others back.
            failed.append(name)
            print(f"{name:20} {type(error).__name__}: {str(error)[:600]}", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

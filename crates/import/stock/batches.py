#!/usr/bin/env python3
"""Exports models with many kinds of loss, and what PyTorch computes for whole batches of them.

    pip install torch safetensors transformers
    python crates/import/stock/batches.py DIR [TEXT ...]

It writes NAME.pt2 for each loss whose test, `batches::NAME`, contains one of the texts: an archive with a dynamic batch dimension, from
tokens or numbers to the loss. NAME.safetensors has random batches of eight samples: `input.I.NAME`, `loss.I` and
`grad.I.PARAMETER` of batch I. In each batch, a part of the labels is masked, and some samples have no label at all.
`losses.json` lists the names, and how much of each follows from micro-batches. The last ones are stock
language models, with the losses of a training. The test `crates/workbench/tests/pytorch`
compares them with what our micro-batches add up to.
"""

import json
import pathlib
import sys
import warnings
import zlib

sys.dont_write_bytecode = True

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

ROWS, LENGTH, CLASSES, WIDTH, BATCHES, STEPS = 8, 5, 7, 6, 8, 30
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0, 1.0, 0.25])
LOSSES = {}
ADDS_UP, COUPLES, UNKNOWN = "adds_up", "couples", "unknown"


class Network(torch.nn.Module):
    """A small network of tokens, with one of the losses below."""

    def __init__(self, loss):
        super().__init__()
        self.embedding = torch.nn.Embedding(CLASSES, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.hidden = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, CLASSES)
        self.scale = torch.nn.Parameter(torch.tensor([0.3, -0.2]))
        self.register_buffer("class_weights", WEIGHTS.clone())
        self.register_buffer("teacher", torch.randn(CLASSES, WIDTH))
        self.loss = loss

    def forward(self, x, y, m):
        h = torch.tanh(self.hidden(self.norm(self.embedding(x))))
        return self.loss(self, self.head(h), h, y, m)


def loss(function, kind=ADDS_UP):
    """Adds a loss: a function of the network, the logits, the features, the labels and a float mask."""
    LOSSES[function.__name__] = (function, kind)
    return function


def each(logits, y, **options):
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none", **options)


def counted(y):
    return (y != -100).float()


@loss
def cross_entropy(net, logits, h, y, m):
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1))


@loss
def cross_entropy_of_classes_first(net, logits, h, y, m):
    return F.cross_entropy(logits.transpose(1, 2), y)


@loss
def shifted_labels(net, logits, h, y, m):
    return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1))


@loss
def padded_labels(net, logits, h, y, m):
    shifted = F.pad(y, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.reshape(-1, CLASSES).float(), shifted.reshape(-1), ignore_index=-100)


@loss
def class_weights(net, logits, h, y, m):
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1), weight=net.class_weights)


@loss
def label_smoothing(net, logits, h, y, m):
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1), label_smoothing=0.1)


@loss
def class_weights_and_smoothing(net, logits, h, y, m):
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1), weight=net.class_weights, label_smoothing=0.2)


@loss
def nll_of_log_softmax(net, logits, h, y, m):
    return F.nll_loss(F.log_softmax(logits, -1).reshape(-1, CLASSES), y.reshape(-1))


@loss
def sum_over_count(net, logits, h, y, m):
    return each(logits, y).sum() / (y != -100).sum()


@loss
def sum_over_clamped_count(net, logits, h, y, m):
    return (each(logits, y) * m).sum() / m.sum().clamp(min=1)


@loss
def sum_over_mask_and_epsilon(net, logits, h, y, m):
    return (each(logits, y) * m).sum() / (m.sum() + 1e-3)


@loss
def mean_over_mean_of_mask(net, logits, h, y, m):
    return (each(logits, y) * m).mean() / m.mean()


@loss
def weights_that_add_up_to_one(net, logits, h, y, m):
    w = m * counted(y)
    return (w / w.sum() * each(logits, y)).sum()


@loss
def times_the_reciprocal(net, logits, h, y, m):
    return (m * each(logits, y)).sum() * m.sum().reciprocal()


@loss
def dot_with_the_mask(net, logits, h, y, m):
    return torch.dot(m.reshape(-1), each(logits, y).reshape(-1)) / m.sum()


@loss
def labels_picked_by_index(net, logits, h, y, m):
    log = F.log_softmax(logits[:, -1], -1)
    return -log[torch.arange(log.size(0)), y[:, -1].clamp(min=0)].mean()


@loss
def labels_gathered(net, logits, h, y, m):
    w = counted(y)
    picked = F.log_softmax(logits, -1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * w).sum() / w.sum()


@loss
def one_hot(net, logits, h, y, m):
    target = F.one_hot(y.clamp(min=0), CLASSES).float()
    return F.cross_entropy(logits.reshape(-1, CLASSES), target.reshape(-1, CLASSES))


@loss
def sum_over_a_constant(net, logits, h, y, m):
    return each(logits, y).sum() / 100


@loss
def plain_sum(net, logits, h, y, m):
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1), reduction="sum")


@loss
def sum_over_rows(net, logits, h, y, m):
    return each(logits, y).sum() / y.size(0)


@loss
def sum_over_elements(net, logits, h, y, m):
    return (each(logits, y) / y.numel()).sum()


@loss
def mean_of_means_of_samples(net, logits, h, y, m):
    w = counted(y)
    return ((each(logits, y) * w).sum(1) / w.sum(1).clamp(min=1)).mean()


@loss
def mean_square(net, logits, h, y, m):
    return F.mse_loss(logits[..., 0], m)


@loss
def huber(net, logits, h, y, m):
    return F.huber_loss(logits[..., 0], m, delta=0.3)


@loss
def binary_cross_entropy(net, logits, h, y, m):
    return F.binary_cross_entropy_with_logits(logits[..., 0], m, pos_weight=torch.tensor(2.0))


@loss
def divergence_by_batchmean(net, logits, h, y, m):
    target = F.softmax(m, -1)
    return F.kl_div(F.log_softmax(logits[..., 0], -1), target, reduction="batchmean")


@loss
def cosine(net, logits, h, y, m):
    a, b = F.normalize(logits[:, 0], dim=-1), F.normalize(logits[:, -1], dim=-1)
    return (1 - (a * b).sum(-1)).mean()


@loss
def focal(net, logits, h, y, m):
    p = each(logits, y)
    return ((1 - torch.exp(-p)) ** 2 * p).sum() / counted(y).sum()


@loss
def two_means(net, logits, h, y, m):
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1)) + 0.5 * F.mse_loss(logits[..., 0], m)


@loss
def two_cross_entropies(net, logits, h, y, m):
    flat = logits.reshape(-1, CLASSES)
    return (F.cross_entropy(flat, y.reshape(-1)) + F.cross_entropy(flat, y.flip(1).clamp(max=3).reshape(-1)) * 2) / 3


@loss
def different_masks(net, logits, h, y, m):
    first = F.cross_entropy(logits[:, 0], y[:, 0])
    return torch.stack([first, F.cross_entropy(logits[:, -1], y[:, -1])]).mean()


@loss
def with_weight_decay(net, logits, h, y, m):
    decay = sum((p ** 2).sum() for p in net.parameters())
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1)) + 0.01 * decay + 0.5


@loss
def learned_weights(net, logits, h, y, m):
    a, b = F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1)), F.mse_loss(logits[..., 0], m)
    return torch.exp(-net.scale[0]) * a + net.scale[0] + torch.exp(-net.scale[1]) * b + net.scale[1]


@loss
def scaled_by_a_parameter(net, logits, h, y, m):
    return torch.exp(net.scale[0]) * F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1))


@loss
def logits_that_stay_small(net, logits, h, y, m):
    w = counted(y)
    z = (torch.logsumexp(logits, -1) ** 2 * w).sum() / w.sum()
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1)) + 1e-2 * z


@loss
def standardised_targets(net, logits, h, y, m):
    target = (m - m.mean()) / (m.std(unbiased=False) + 1e-5)
    return F.mse_loss(logits[..., 0], target)


@loss
def balanced_classes(net, logits, h, y, m):
    w = counted(y)
    one = F.one_hot(y.clamp(min=0), CLASSES).float() * w.unsqueeze(-1)
    counts = one.sum((0, 1))
    weight = w.sum() / (CLASSES * counts.clamp(min=1))
    return (each(logits, y) * weight[y.clamp(min=0)] * w).mean()


@loss
def largest_weight(net, logits, h, y, m):
    return (each(logits, y) * m / m.max()).mean()


@loss
def of_one_dimension(net, logits, h, y, m):
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1)).reshape(1)


@loss
def attention(net, logits, h, y, m):
    q = logits.unsqueeze(1)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
    return F.cross_entropy(out.reshape(-1, CLASSES), y.reshape(-1))


def coupled(function):
    return loss(function, COUPLES)


def unknown(function):
    return loss(function, UNKNOWN)


@unknown
def divided_by_what_a_teacher_computes(net, logits, h, y, m):
    w = torch.softmax(torch.tanh(F.one_hot(y.clamp(min=0), CLASSES).float() @ net.teacher), -1).amax(-1)
    return (each(logits, y) * w).sum() / w.sum()


@unknown
def labels_of_the_network(net, logits, h, y, m):
    return F.cross_entropy(logits[:, 0], logits[:, -1].argmax(-1))


@unknown
def divided_by_one_less_than_the_rows(net, logits, h, y, m):
    return each(logits, y).sum() / (y.size(0) - 1)


@coupled
def divided_by_what_a_network_computes(net, logits, h, y, m):
    w = torch.sigmoid(h @ WEIGHTS[:WIDTH]).detach()
    return (each(logits, y) * w).sum() / w.sum()


@coupled
def root_of_mean_square(net, logits, h, y, m):
    return F.mse_loss(logits[..., 0], m).sqrt()


@coupled
def overlap(net, logits, h, y, m):
    p = torch.sigmoid(logits[..., 0])
    return 1 - 2 * (p * m).sum() / (p.sum() + m.sum())


@coupled
def contrastive(net, logits, h, y, m):
    a, b = F.normalize(logits[:, 0], dim=-1), F.normalize(logits[:, -1], dim=-1)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(a.size(0)))


@coupled
def variance_of_the_batch(net, logits, h, y, m):
    return F.mse_loss(logits[..., 0], m) + torch.relu(1 - logits[:, 0].std(0)).mean()


def batch(generator):
    """Tokens, labels of which a part is masked, and numbers for a mask. Half of all batches have rows without labels."""
    def integers(*shape):
        return torch.randint(0, CLASSES, shape, generator=generator)

    x, y = integers(ROWS, LENGTH), integers(ROWS, LENGTH)
    share = torch.rand(1, generator=generator)
    y[torch.rand(ROWS, LENGTH, generator=generator) < share * 0.8] = -100
    m = torch.rand(ROWS, LENGTH, generator=generator)
    m[m < share * 0.5] = 0
    empty = int(torch.randint(0, ROWS - 1, (1,), generator=generator)) if share > 0.4 else 0
    y[ROWS - empty:], m[ROWS - empty:] = -100, 0
    # A batch has a label at the first and at the last place, so that no mean is one of nothing.
    y[0, 0] = y[0, -1] = 1
    m[0, 0] = 0.7
    return {"x": x, "y": y, "m": m}


def language_models():
    """Stock models with `labels=`, which return their own loss."""
    import transformers as t

    sizes = dict(vocab_size=50, num_hidden_layers=2, num_attention_heads=2, hidden_size=32, intermediate_size=64)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    gpt2 = dict(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    still = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return {
        "gpt2_with_labels": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2, **still)),
        "llama_with_labels": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes, max_position_embeddings=32)),
        "bert_with_labels": lambda: t.BertForMaskedLM(t.BertConfig(**sizes, **off, max_position_embeddings=32)),
    }


class WithLabels(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, mask, y):
        return self.model(input_ids=x, attention_mask=mask, labels=y).loss


def prompts(generator):
    """Chats: tokens of unlike lengths, of which the prompt has no labels. Some have no label at all."""
    x = torch.randint(0, 50, (ROWS, 12), generator=generator)
    y, mask = x.clone(), torch.ones_like(x)
    for row in range(ROWS):
        length = int(torch.randint(4, 13, (1,), generator=generator))
        prompt = int(torch.randint(1, length + 1, (1,), generator=generator))
        y[row, : prompt if row else 1] = -100
        y[row, length:], mask[row, length:] = -100, 0
    return {"x": x, "mask": mask, "y": y}


def train(name, build, directory):
    """Exports a stock model, and what PyTorch's training makes of it with whole batches."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    net = WithLabels(build()).train()
    example = {key: tensor[:4] for key, tensor in prompts(generator).items()}
    shapes = {key: {0: torch.export.Dim("rows", min=1)} for key in example}
    program = torch.export.export(net, (), example, dynamic_shapes=shapes, strict=False)
    torch.export.save(program, directory / f"{name}.pt2")
    batches = [prompts(generator) for _ in range(STEPS)]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    tensors = {f"input.{n}.{key}": tensor for n, inputs in enumerate(batches) for key, tensor in inputs.items()}
    for number, inputs in enumerate(batches):
        optimizer.zero_grad()
        result = net(**inputs)
        result.backward()
        optimizer.step()
        tensors[f"loss.{number}"] = result.detach()
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, directory / f"{name}.safetensors")


def export(name, function, directory):
    torch.manual_seed(zlib.crc32(name.encode()))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    net = Network(function)
    rows = torch.export.Dim("rows", min=1)
    example = {key: tensor[:4] for key, tensor in batch(generator).items()}
    shapes = {key: {0: rows} for key in example}
    program = torch.export.export(net, (), example, dynamic_shapes=shapes, strict=False)
    torch.export.save(program, directory / f"{name}.pt2")
    tensors = {}
    for number in range(BATCHES):
        inputs = batch(generator)
        net.zero_grad()
        result = net(**inputs)
        result.sum().backward()
        tensors[f"loss.{number}"] = result.detach().reshape(())
        tensors |= {f"input.{number}.{key}": tensor for key, tensor in inputs.items()}
        for key, parameter in net.named_parameters():
            if parameter.grad is not None:
                tensors[f"grad.{number}.{key}"] = parameter.grad.clone()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / f"{name}.safetensors")


def main():
    directory, *texts = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    listed = []
    for name, (function, kind) in LOSSES.items():
        if not texts or any(text in f"batches::{name}" for text in texts):
            export(name, function, directory)
            listed.append({"name": name, "kind": kind})
    for name, build in language_models().items():
        if not texts or any(text in f"batches::{name}" for text in texts):
            train(name, build, directory)
            listed.append({"name": name, "kind": "trained"})
    (directory / "losses.json").write_text(json.dumps(listed, indent=1))


if __name__ == "__main__":
    main()

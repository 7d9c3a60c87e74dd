"""Answers of llama.cpp about a GGUF file, for tests. It is a program of its own, because llama.cpp's threads go on.

    python3 llama_cpp_answers.py MODEL.gguf < REQUESTS.json > ANSWERS.json

The requests are a list of objects. The answer to `{"text": TEXT, "special": BOOL}` is the list of the text's tokens.
The answer to `{"tokens": IDS}` is an object with the logarithm of each next token's probability, or null if a token
that ends a text is the likeliest.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request

import xllamacpp


def open_model(path: str) -> xllamacpp.Server:
    """A server that computes as exactly as llama.cpp can."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 512
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_ram_mib = 0
    params.warmup = False
    params.verbosity = 0
    return xllamacpp.Server(params)


def ask(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def answer(address: str, request: dict):
    if "text" in request:
        body = {"content": request["text"], "add_special": False, "parse_special": request["special"]}
        return ask(f"{address}/tokenize", body)["tokens"]
    body = {"prompt": request["tokens"], "n_predict": 1, "n_probs": 1000, "temperature": 0, "cache_prompt": False}
    said = ask(f"{address}/completion", body)
    if "completion_probabilities" not in said:
        return None
    return {token["id"]: token["logprob"] for token in said["completion_probabilities"][0]["top_logprobs"]}


server = open_model(sys.argv[1])
answers = [answer(server.listening_address, request) for request in json.load(sys.stdin)]
print(json.dumps(answers), flush=True)
os._exit(0)

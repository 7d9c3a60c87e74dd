#!/usr/bin/env python3
"""Makes small tokenizers of four kinds, and what Hugging Face's `transformers` says about hard texts.

    pip install transformers
    python3 testdata/tokenizers/make.py

Each folder beside this script has the files that `save_pretrained` writes. `expected.json` has the tokens of each text
without and with special tokens in it, and the text of these tokens. Words that are equally frequent are trained in any
order, so another call makes other tokenizers.
"""

import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
TEXT = (HERE / "text.txt").read_text(encoding="utf-8") + " Größe 日本 über 2024 é."

# The way of many tokenizers to cut a text into words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXTS = [
    "",
    " ",
    "  two  spaces ",
    "Hello world, it's 2024!\n\n  ok",
    "tabs\tand\r\nlines\n\n\n",
    "fn main() { println!(\"Größe: {}\", 1234567); }",
    "日本語のテキスト 中文 한국어 العربية עברית ไทย हिन्दी",
    "emoji 🦀🇩🇪👩‍👩‍👧‍👦 e\u0301 é ﬁ ① ™ İ ß ſ",
    "\u00a0\u2003\u3000 wide\u200bspaces\u0085\u2028 \x00\x7f",
    "<|endoftext|> <|im_start|>user\nHi<|im_end|>",
    "<s>a</s> </s><s><unk>",
    "[CLS] a [SEP][MASK] [UNK]",
    "a<think>b</think> <think> x",
    "<0x0A><0xE6> ▁▁ Ġ Ċ ##ing",
    "   leading, and trailing   ",
    "'S 'll I'LL don't",
    "aaaaaaaaaaaaaaaaaaaaaaaa 000000000000 ----------",
]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    # A tokenizer may cut and fill up what it encodes. For a corpus, neither must happen.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8, pad_id=0, pad_token="<|endoftext|>")
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=template
    )
    return fast, {"bos_token_id": 0, "eos_token_id": [2, 0]}


def llama():
    """A byte-pair encoding of SentencePiece, as for Llama 2: without words, and with bytes for unknown characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # Words are for training alone.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    # Other characters become bytes.
    letters = [letter if letter.isascii() and letter != "\n" else " " for letter in TEXT]
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=["é", "<", ">", "/"], show_progress=False)
    tokenizer.train_from_iterator(["".join(letters)], trainer)
    trained = json.loads(tokenizer.to_str())
    words = sorted(trained["model"]["vocab"], key=trained["model"]["vocab"].get)
    vocabulary = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + words
    # A converter that makes merges of all words makes them of special tokens, too.
    merges = trained["model"]["merges"] + [["<", "/"], ["</", "s"], ["</s", ">"]]
    vocabulary += ["</", "</s"]
    trained["model"]["vocab"] = {word: number for number, word in enumerate(dict.fromkeys(vocabulary))}
    trained["model"]["merges"] = merges
    trained["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ["<unk>", "<s>", "</s>"]])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ), None


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ), None


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]"
    ), None


def main():
    expected = {}
    for make in [byte_level, llama, unigram, word_piece]:
        name = make.__name__
        fast, generation = make()
        folder = HERE / name
        fast.save_pretrained(folder)
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()), ensure_ascii=False, separators=(",", ":")) + "\n")
        if generation:
            (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
        fast = AutoTokenizer.from_pretrained(folder)
        cases = []
        for text in TEXTS:
            ids = fast(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            special = fast(text, add_special_tokens=False)["input_ids"]
            decoded = fast.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            cases.append({"text": text, "ids": ids, "with_special": special, "decoded": decoded})
        expected[name] = {
            "vocabulary": max(fast.get_vocab().values()) + 1,
            "special": sorted(set(fast.all_special_ids) - {fast.unk_token_id}),
            "cases": cases,
        }
    lines = json.dumps(expected, ensure_ascii=True, separators=(",", ":")).replace('{"text"', '\n{"text"')
    (HERE / "expected.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()

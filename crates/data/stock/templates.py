"""Chats as `transformers` writes them: the reference of the test `templates`.

    python3 templates.py DIRECTORY [WORD ...]

The templates are those that TRL ships, and some small ones for the tags and filters that they do not have. Words choose
templates by their names. DIRECTORY gets a tokenizer, the templates, and `cases.json`: for each template and
conversation, the text, or null where the template refuses it; its tokens; and which of them are the model's, where the
template says.
"""

import datetime
import importlib.util
import json
import pathlib
import sys

import transformers
from tokenizers import AddedToken
from transformers.utils import chat_template_utils

OWN = {
    "own_blanks": "{% for m in messages %}\n  {% if m.role == 'assistant' %}\n[\n    {% generation %}\n{{ m.content }}"
    "<|im_end|>\n  {% endgeneration %}\n]\n  {%- else -%}\n  {{ m.role }}: {{ m.content | trim }}\n  {% endif %}\n"
    "{% endfor %}",
    "own_inline": "{{ bos_token }}{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}A:{%- generation -%} "
    "{{- m['content'] -}}{{ eos_token }}{%- endgeneration -%}{%- else -%}U: {{ m['content'] }} {%- endif -%}"
    "{%- endfor -%}",
    "own_json": "{% for m in messages %}{{ m | tojson }}\n{{ m | tojson(indent=2) }}\n{{ [m.content, 1.5, none, true] "
    "| tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}{% endfor %}{{ [] | tojson(indent=4) }}",
    "own_clock": "{{ strftime_now('%d %b %Y, %A %B %j, %H:%M:%S %p %y %-d %% %I') }}{% for m in messages %}"
    "{% if loop.index0 is even %}{% continue %}{% endif %}{% if loop.last %}{% break %}{% endif %}"
    "{{ m.content.split('a')[0].lstrip().upper() }}{% endfor %}",
    "own_strict": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no ' ~ m.role ~ ' here') }}"
    "{% endif %}{{ m.content }}{% endfor %}",
}

SPECIAL = ["<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<think>", "</think>"]


def turns(*contents, system=None):
    roles = ["user", "assistant"]
    start = [] if system is None else [{"role": "system", "content": system}]
    return start + [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


CONVERSATIONS = [
    turns("Hello!", "Hi. How can I help?"),
    turns("Hello!", "Hi.", "And then?", "Nothing.\n\nReally.", "Why?", " leading and trailing "),
    turns("What is 2 + 2?", "4", system="You are brief."),
    turns("", "", system=""),
    turns("Größe? 日本語 🦀 ‮rtl", "Ça va – très bien 👩‍👩‍👧\t\"quoted\" \\ 'single'", system="Ünïcode"),
    turns("{{ not }} a {% template %} <|im_end|>", "<b>&amp;</b> </s>\r\nline"),
    turns("Think.", "<think>\nI think.\n</think>\n\nSo I am.", "More.", "<think>more</think>Yes."),
    turns("only a question"),
    [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": "Fine."}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}],
]


class Clock(datetime.datetime):
    """The day that templates see in training here."""

    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def templates():
    package = pathlib.Path(importlib.util.find_spec("trl").origin).parent
    named = {path.stem: path.read_text() for path in sorted((package / "chat_templates").glob("*.jinja"))}
    return named | OWN


def main():
    directory, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
    chat_template_utils.datetime = Clock
    made = pathlib.Path(__file__).parents[3] / "testdata/tokenizers/byte_level"
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(directory)
    cases = {}
    for name, template in templates().items():
        if words and not any(word in name for word in words):
            continue
        (directory / f"{name}.jinja").write_text(template)
        cases[name] = [case(tokenizer, template, conversation) for conversation in CONVERSATIONS]
    (directory / "cases.json").write_text(json.dumps(cases))


def case(tokenizer, template, messages):
    def apply(**options):
        return tokenizer.apply_chat_template(messages, chat_template=template, **options)

    found = {"messages": messages, "texts": [], "tokens": None, "mask": None}
    for prompt in [False, True]:
        try:
            found["texts"].append(apply(tokenize=False, add_generation_prompt=prompt))
        except Exception as error:  # Whatever the template does, it does not print this conversation.
            found["texts"].append(None)
            found["error"] = str(error)
    if found["texts"][0] is not None:
        marks = "endgeneration" in template
        encoded = apply(tokenize=True, return_dict=True, return_assistant_tokens_mask=marks)
        found["tokens"] = encoded["input_ids"]
        found["mask"] = encoded["assistant_masks"] if marks else None
    return found


main()

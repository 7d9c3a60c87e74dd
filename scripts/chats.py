"""How long a large file of chats takes to open, and how much memory it needs.

    cargo build --release
    python3 scripts/chats.py [--megabytes 1000] [--program target/release/fusionllm]

It writes conversations of a few hundred to a few thousand bytes to a temporary directory, has `fusionllm data show`
print one sample, and prints the time and the largest resident memory of that process as one JSON object.
"""

import argparse
import json
import pathlib
import random
import resource
import subprocess
import tempfile
import time

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% generation %}{{ m.content }}<|im_end|>
{% endgeneration %}{% endfor %}"""


def write(path, megabytes):
    """Writes conversations, and returns their number."""
    rng = random.Random(1)
    words = ["the", "model", "answers", "größer", "as", "it", "was", "asked,", "\n", "and", '"quotes"', "2 + 2"]
    text = " ".join(rng.choice(words) for _ in range(1 << 16))
    number = written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1_000_000:
            messages = []
            for turn in range(2 * rng.randint(1, 3)):
                start = rng.randrange(len(text) - 800)
                content = text[start : start + rng.randint(20, 800)]
                messages.append({"role": ["user", "assistant"][turn % 2], "content": content})
            line = json.dumps({"id": number, "messages": messages}, ensure_ascii=False) + "\n"
            written += len(line.encode())
            number += 1
            file.write(line)
    return number


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--program", default="target/release/fusionllm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        (directory / "chat.jinja").write_text(TEMPLATE)
        (directory / "job.toml").write_text(
            '[data]\nkind = "chats"\nfiles = ["chats.jsonl"]\ntokenizer = "gpt2"\ntemplate = "chat.jinja"\n'
        )
        conversations = write(directory / "chats.jsonl", options.megabytes)
        command = [options.program, "data", "show", directory / "job.toml", "--samples", "1", "--json"]
        started = time.monotonic()
        shown = subprocess.run(command, check=True, capture_output=True, text=True)
        took = time.monotonic() - started
    result = {
        "conversations": conversations,
        "megabytes": options.megabytes,
        "seconds": round(took, 2),
        "resident_mb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6, 1),
        "data": json.loads(shown.stdout)["data"],
    }
    print(json.dumps(result, indent=2))


main()

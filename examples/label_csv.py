"""Label the rows of a CSV file: all rows at once, the instruction they share computed once, no padding.

python examples/label_csv.py rows.csv --text body --labels spam,ham --model PATH
python examples/label_csv.py --demo       lines of code and of text, with the small model that is shipped
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"
INSTRUCTION = "Answer with one of: {labels}.\n\n"
QUESTION = "text: {text}\nlabel:"
DEMO = [
    "def parse(self, value):",
    "import os",
    "The list of names.",
    "return None",
    "Raises an error.",
    "class Error:",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a CSV file with a header")
    parser.add_argument("--demo", action="store_true", help="write rows.csv here, and label it")
    parser.add_argument("--text", default="text", help="the column that is labelled")
    parser.add_argument("--labels", default="code,text")
    parser.add_argument("--model", default=str(SHIPPED))
    arguments = parser.parse_args()
    if arguments.demo:
        arguments.file = Path("rows.csv")
        write(arguments.file, [{"text": text} for text in DEMO])
    if arguments.file is None or not arguments.file.is_file():
        parser.exit(2, f"label_csv: {arguments.file or 'no file'}: name a CSV file, or give --demo\n")
    with arguments.file.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or arguments.text not in rows[0]:
        parser.exit(
            2, f"label_csv: {arguments.file} has no row with a column {arguments.text!r}; name one by --text\n"
        )
    labels = [label.strip() for label in arguments.labels.split(",")]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = hf_accel.patch(AutoModelForCausalLM.from_pretrained(arguments.model), weights="int8")
    found = label(model, tokenizer, [row[arguments.text] for row in rows], labels)
    out = arguments.file.with_suffix(".labelled.csv")
    write(out, [row | {"label": one} for row, one in zip(rows, found, strict=True)])
    stats = hf_accel.stats(model)
    print(f"{out}: {len(rows)} rows, {stats['computed_tokens']} tokens computed, {stats['seconds']:.2f} s")


def label(model: Any, tokenizer: Any, texts: list[str], labels: list[str]) -> list[str]:
    """The likeliest label of each text: no other token than the labels' first ones may be chosen."""
    first = {tokenizer(f" {one}", add_special_tokens=False)["input_ids"][0]: one for one in labels}
    if len(first) < len(labels):
        raise SystemExit(f"label_csv: two of {', '.join(labels)} begin with the same token; choose other words")
    instruction = INSTRUCTION.format(labels=", ".join(labels))
    prompts = [tokenizer(instruction + QUESTION.format(text=text))["input_ids"] for text in texts]
    others = [token for token in range(model.config.vocab_size) if token not in first]
    config = GenerationConfig(max_new_tokens=1, do_sample=False, suppress_tokens=others)
    outputs = model.generate_batch(prompts, generation_config=config)
    return [first[output.generated_tokens[0]] for output in outputs.values()]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(file.name, path)


if __name__ == "__main__":
    main()

"""Write docs/support.md from the results: `python -m tests.families.report`. Exits with 1 if a fault stands there."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from .features import ALL, FAULTS, FEATURES, KINDS
from .models import families
from .results import FOLDER, ROOT, Line, read, versions

PAGE = ROOT / "docs" / "support.md"
PLACE = re.compile(r" \(/[^)]*\)$")  # a file of the machine that it ran on
TITLES = {
    "causal": "Causal language models",
    "seq2seq": "Sequence to sequence",
    "vision": "Vision-language models",
    "encoder": "Encoders",
}
HEAD = """# What is supported

Each model class of transformers' auto mappings that a tiny configuration builds, with random weights in float32 on a
CPU: {classes} classes, compared feature by feature with the same model unpatched. transformers {transformers}, torch
{torch}. `make families` runs all of it and writes this page; `python -m tests.families.run llama` runs one model.

| word | meaning |
|---|---|
| fast | hf_accel's own path, and the answer is transformers' own: the same logits within rounding, the same tokens |
| exact | comes back bit for bit |
| stock's loop | transformers' own generation loop, over the parts of the model that are fast; the same answer |
| stock | hf_accel leaves that part to transformers; the same answer |
| refused | asked for by name, it fails with an error that says why; by default it is left to transformers |
| stock cannot | transformers itself raises an error there, without hf_accel |
| not tried | the comparison makes no such input for this model (mostly: no images of its kind) |

The columns, with `hf_accel.patch(model, weights=None)` where nothing else is said:

| column | what was compared |
|---|---|
| forward | the logits of a padded batch, and of prompts of the shapes below |
| output_attentions | the logits, and the attention weights where transformers gives some |
| greedy, sampling, beams | `generate` over a padded batch: greedy search, sampling with the same seed, three beams |
| no cache, static cache | `use_cache=False`, `cache_implementation="static"` |
| checkpointing | the gradient under reentrant gradient checkpointing |
| changed in use | the text after weights, hooks, a forward, buffers or scalars of a model in use were changed |
| prompt lookup, assistant | `prompt_lookup_num_tokens=`, `assistant_model=` |
| image: ... | the same with images; two images behind the same words keep apart, also when a cache is passed along |
| cache asked for | `patch(model, weights=None, cache="paged")`: a paged cache is insisted on |
| int8 forward, int8 greedy | INT8 weights against the same numbers in the model's own float modules |
| int8 save, load | `save_pretrained`, then `from_pretrained` of the INT8 model |
| unpatch | class, configs, hooks and weights after `patch`, use and `unpatch` |

"forward", "greedy" and "static cache" are compared in five shapes: three rows with padding; one row and three of 13
tokens without padding, which is more than the attention windows of 6; one row of 6; three of 4.
"""


def page(lines: list[Line]) -> str:
    numbers = versions()
    return "\n".join([HEAD.format(classes=len({line["model"] for line in lines}), **numbers), *_sections(lines)])


def _sections(lines: list[Line]) -> Iterator[str]:
    for kind in ALL:
        ours = [line for line in lines if line["kind"] == kind and line["feature"] != "build"]
        if ours:
            yield f"## {TITLES[kind]}\n"
            yield from _table(kind, ours)
            yield from _reasons(ours)
    yield from _unbuilt(lines)


def _table(kind: str, lines: list[Line]) -> Iterator[str]:
    columns = [name for name in FEATURES if kind in KINDS[name]]
    words: dict[str, dict[str, str]] = defaultdict(dict)
    for line in lines:
        words[line["model"]][line["feature"]] = line["result"]
    yield f"| model | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for model in sorted(words, key=str.lower):
        yield f"| {model} | {' | '.join(words[model].get(name, '') for name in columns)} |"
    yield ""


def _reasons(lines: list[Line]) -> Iterator[str]:
    """Why greedy search is transformers' own, by reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        if line["feature"] == "greedy" and line["result"] == "stock's loop":
            own = line["model"].removesuffix(" (is_decoder)")
            reasons[line["reason"].replace(own, "the model") or "no paged cache"].append(line["model"])
    if reasons:
        yield "Why greedy search is on stock's loop:\n"
        for reason, models in sorted(reasons.items(), key=lambda item: -len(item[1])):
            yield f"- {reason}: {', '.join(sorted(models, key=str.lower))}"
        yield ""


def _unbuilt(lines: list[Line]) -> Iterator[str]:
    unbuilt = [line for line in lines if line["feature"] == "build"]
    if unbuilt:
        yield "## Not compared\n\nNo tiny model of these could be built here:\n"
        yield from (f"- {line['model']}: {PLACE.sub('', line['reason'].split('. You')[0])}" for line in unbuilt)


def main(folder: Path = FOLDER) -> int:
    lines = read(folder, versions())
    missing = families().keys() - {line["model"] for line in lines}
    faults = Counter((line["model"], line["feature"]) for line in lines if line["result"] in FAULTS)
    for model, name in faults:
        print(f"{model}: {name}")
    if missing:
        print(
            f"{len(missing)} models have no results for this code: run `python -m tests.families.run --all --resume`"
        )
    PAGE.write_text(page(lines).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(lines)} results, {len(faults)} faults")
    return int(bool(faults or missing))


if __name__ == "__main__":
    sys.exit(main())

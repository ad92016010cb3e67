"""Write docs/support.md from the results: `python -m tests.families.report`. Exits with 1 if a fault stands there.

With --encoders, or --kinds, only their sections are written anew, and all others stay as they stand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from .features import ALL, FAULTS, FEATURES, KINDS
from .models import families
from .passes import ENCODING
from .results import FOLDER, ROOT, Line, read, versions

PAGE = ROOT / "docs" / "support.md"
PLACE = re.compile(r" \(/[^)]*\)$")  # a file of the machine that it ran on
TITLES = {
    "causal": "Causal language models",
    "seq2seq": "Sequence to sequence",
    "speech": "Speech and sound models",
    "vision": "Vision-language models",
    "encoder": "Encoders",
    "texts": "Encoders of texts: layers",
    "images": "Encoders of images: layers",
    "sound": "Encoders of sound: layers",
}
UNBUILT = "Not compared"
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
| Engine | requests that an `hf_accel.Engine` computes together, each as transformers answers it alone |
| no cache, static cache | `use_cache=False`, `cache_implementation="static"` |
| checkpointing | the gradient under reentrant gradient checkpointing |
| changed in use | the text after weights, hooks, a forward, buffers or scalars of a model in use were changed |
| prompt lookup, assistant | `prompt_lookup_num_tokens=`, `assistant_model=` |
| image: ..., sound: ... | the same with images or sounds; two behind the same words keep apart, also over one cache |
| cache asked for | `patch(model, weights=None, cache="paged")`: a paged cache is insisted on |
| int8 forward, int8 greedy | INT8 weights against the same numbers in the model's own float modules |
| int8 save, load | `save_pretrained`, then `from_pretrained` of the INT8 model |
| unpatch | class, configs, hooks and weights after `patch`, use and `unpatch` |

"forward", "greedy" and "static cache" are compared in five shapes: three rows with padding; one row and three of 13
tokens without padding, which is more than the attention windows of 6; one row of 6; three of 4.
"""
LAYERS = """The plan of a model of each class with `weights=None`, and its passes. transformers {transformers}, torch {torch};
`python -m tests.families.run --encoders` compares these classes, `python -m tests.families.report --encoders` writes their
tables. Speeds were measured of none of these tiny models: those of some encoders of full size are in
[encoders](encoders.md), and no table of this page promises a speed for the others.

| column | word | meaning |
|---|---|---|
| layers | native | each of its layers is one native call |
| | partly native | some layers are; the reasons of the others stand below |
| | module by module | the layers run as in transformers, on fast linears where these are known |
| padding | left out of a whole pass, or of each native layer | it is not computed, and zeros stand there |
| | computed | as in transformers; "none": inputs have one size |
| pass | as stock | the outputs of each form of batch (alone, together, each mask and side of padding) are stock's within 1e-4 |
"""  # noqa: E501


def page(lines: list[Line]) -> str:
    numbers = versions()
    return "\n".join([HEAD.format(classes=len({line["model"] for line in lines}), **numbers), *_sections(lines)])


def _sections(lines: list[Line]) -> Iterator[str]:
    for kind in (*ALL, *ENCODING):
        ours = [line for line in lines if line["kind"] == kind and line["feature"] != "build"]
        if ours:
            yield f"## {TITLES[kind]}\n"
            if kind == ENCODING[0]:
                yield LAYERS.format(**versions())
            yield from _table(kind, ours)
            yield from _reasons(ours, "greedy", "stock's loop", "Why greedy search is on stock's loop")
            for word in ("partly native", "module by module"):
                yield from _reasons(ours, "layers", word, f"Why layers are {word}")
            yield from _reasons(ours, "pass", "not tried", "Why passes were not tried")
        if kind in ENCODING:
            yield from _unbuilt([line for line in lines if line["kind"] == kind], f"Not built here ({kind})")
    yield from _unbuilt([line for line in lines if line["kind"] in ALL], f"## {UNBUILT}")


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


def _reasons(lines: list[Line], feature: str, word: str, title: str) -> Iterator[str]:
    """The models of which a feature came out as `word`, by the reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        if line["feature"] == feature and line["result"] == word:
            own = line["model"].removesuffix(" (is_decoder)")
            reasons[line["reason"].replace(own, "the model") or "no paged cache"].append(line["model"])
    if reasons:
        yield f"{title}:\n"
        for reason, models in sorted(reasons.items(), key=lambda item: -len(item[1])):
            yield f"- {PLACE.sub('', reason)}: {', '.join(sorted(models, key=str.lower))}"
        yield ""


def _unbuilt(lines: list[Line], title: str) -> Iterator[str]:
    unbuilt = [line for line in lines if line["feature"] == "build"]
    if unbuilt:
        yield f"{title}\n\nNo tiny model of these could be built here:\n"
        yield from (f"- {line['model']}: {PLACE.sub('', line['reason'].split('. You')[0])}" for line in unbuilt)
        yield ""


def merged(before: str, lines: list[Line]) -> str:
    """The page as it stood, with the sections of the kinds in `lines` made anew, but that of classes not built."""
    head, *sections = _split(before)
    titles = [section.splitlines()[0] for section in sections]
    for made in _split("\n".join(_sections(lines)))[1:]:
        title = made.splitlines()[0]
        if title == f"## {UNBUILT}":
            continue
        if title in titles:
            sections[titles.index(title)] = made
        else:
            place = titles.index(f"## {UNBUILT}") if f"## {UNBUILT}" in titles else len(titles)
            sections.insert(place, made)
            titles.insert(place, title)
    return "".join([head, *(section.rstrip() + "\n\n" for section in sections)])


def _split(text: str) -> list[str]:
    """What stands before the first section, and the sections."""
    return re.split(r"^(?=## )", text, flags=re.MULTILINE)


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    every = (*ALL, *ENCODING)
    parser = argparse.ArgumentParser(prog="python -m tests.families.report")
    parser.add_argument("--encoders", action="store_true", help="only the layers of encoders; the rest stays")
    parser.add_argument("--kinds", nargs="+", choices=every, default=every, help="only these sections; the rest stays")
    parser.add_argument("--results", type=Path, default=folder, help="the folder of the JSON lines")
    parsed = parser.parse_args(arguments)
    kinds = ENCODING if parsed.encoders else tuple(parsed.kinds)
    lines = [line for line in read(parsed.results, versions()) if line["kind"] in kinds]
    wanted = {name for name, family in families().items() if family.kind in kinds}
    missing = wanted - {line["model"] for line in lines}
    faults = Counter((line["model"], line["feature"]) for line in lines if line["result"] in FAULTS)
    for model, name in faults:
        print(f"{model}: {name}")
    if missing:
        asked = "--encoders" if parsed.encoders else "--all"
        print(
            f"{len(missing)} models have no results for this code: run `python -m tests.families.run {asked} --resume`"
        )
    text = page(lines) if kinds == every else merged(PAGE.read_text(encoding="utf-8"), lines)
    PAGE.write_text(text.rstrip() + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(lines)} results, {len(faults)} faults")
    return int(bool(faults or missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

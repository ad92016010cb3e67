"""hf-accel bench: measures how much faster and smaller a model gets on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from .models import check_text_model, is_encoder_path, load_float
from .options import Asked, Dtype, common
from .output import BadInputError

TOPICS = ("decode", "prefill", "batch", "memory", "ladder", "encode")
BATCHES = {"batch": 16, "encode": 8}


@common()
def bench(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[TOPIC] PATH", help=f"One of {', '.join(TOPICS)} (decode or encode if left out), and a model."
        ),
    ],
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of the prompt: 512, or 128 for encode.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate; for batch, their mean.")] = 16,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences at a time: 1, 16 for batch, 8 for encode.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each model takes its turn.")] = 3,
    dtype: Dtype = "auto",
    *,
    asked: Asked,
) -> None:
    """Measure a model here, stock and patched in turns, after both were compared. Let nothing else run meanwhile.

    \b
    Examples:
      hf-accel bench examples/stdlib-tiny
      hf-accel bench ladder examples/stdlib-tiny --context 128
      hf-accel bench batch Qwen/Qwen3-0.6B --weights int4 --json
      hf-accel bench sentence-transformers/all-MiniLM-L6-v2 --batch 8
    """
    topic, path = _topic_and_path(words)
    keywords = asked.keywords()
    topic = _checked_topic(topic, path)
    with asked.output.progress("loading the model") as now:
        model = load_float(path, dtype=dtype)
        from ..hardware.busy import BUSY, busy_cores
        from . import topics

        now("looking whether the machine is quiet")
        busy = busy_cores(0.5)
        sizes = topics.Sizes(
            context or (128 if topic == "encode" else 512), new_tokens, batch or BATCHES.get(topic, 1), rounds
        )
        now("patching")
        if topic == "memory":
            rows = topics.memory(model, keywords, sizes)
        elif topic == "encode":
            from .encoders import encode

            rows = encode(model, keywords, sizes, now)
        else:
            chosen = topics.TOPICS[topic]
            rows = chosen.measure(model, keywords, sizes, now).rows(chosen.what)
        import torch

        where = {"kernels": topics.loaded_kernels(model), "threads": torch.get_num_threads()}
    quiet = busy is None or busy < BUSY
    document = {"path": path, "topic": topic, **vars(sizes), **where, "busy_cores": busy, "rows": rows}
    asked.output.write(document, _text(document, rows, quiet=quiet))


def _checked_topic(topic: str | None, path: str) -> str:
    """Return the topic, chosen by the model where it was left out. Raises BadInputError if the model is not for it."""
    encodes = is_encoder_path(path)
    topic = topic or ("encode" if encodes else "decode")
    if topic == "encode" and not encodes:
        raise BadInputError(f"bench encode is for encoders, and {path} is none; choose another topic")
    if topic != "encode":
        check_text_model(path, "bench")
    return topic


def _topic_and_path(words: Sequence[str]) -> tuple[str | None, str]:
    match list(words):
        case [path] if path not in TOPICS:
            return None, path
        case [topic, path] if topic in TOPICS:
            return topic, path
        case [topic, _]:
            raise BadInputError(f"{topic!r} is no topic; choose one of {', '.join(TOPICS)}")
        case [topic]:
            raise BadInputError(f"bench {topic} needs a model: hf-accel bench {topic} PATH")
    raise BadInputError(f"bench takes a topic and a model, and got {' '.join(words)}")


def _text(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *, quiet: bool) -> str:
    title = f"{document['topic']}: context {document['context']}, batch {document['batch']}"
    lines = [f"{title}; kernels {document['kernels']}, {document['threads']} threads, {document['rounds']} rounds"]
    if not quiet:
        lines.append(f"other processes took {document['busy_cores']:.1f} cores: the ratios are worth less")
    for row in rows:
        if "bytes" in row:
            size, spread = f"{row['bytes'] / 1e6:12,.2f} MB", ""
        else:
            size = f"{1e3 * row['seconds']:12,.2f} ms"
            spread = f"  ({row['lowest_ratio']:.2f} to {row['highest_ratio']:.2f})"
            if "cosine" in row:
                spread += f"  {row['per_second']:,.1f} inputs/s"
                spread += "" if row["name"] == rows[0]["name"] else f", cosine {row['cosine']:.5f}"
            elif row["name"] != rows[0]["name"]:
                spread += f"  KL {row['kl']:.2g}, same top token {row['same_top']:.0%}"
        lines.append(f"{row['name']:<20} {row['what']:<28} {size}  {row['ratio']:6.2f}x{spread}")
    return "\n".join(lines)

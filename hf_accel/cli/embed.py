"""hf-accel embed: vectors of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .models import checked_path, explained, is_row_path, named_dtype
from .options import Asked, Dtype, Path_, common, texts_in_file
from .output import BadInputError

ROWS = 64  # of a pass


@common("weights", "attention", "fuse", "keep_original", "deterministic")
def embed(
    path: Path_,
    *,
    texts: Annotated[list[str] | None, typer.Argument(help="The texts; each is one vector.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A file with a text on each line, or .jsonl with a key 'text'.")
    ] = None,
    prompt_name: Annotated[str | None, typer.Option(help="The prompt of the model's folder to put in front.")] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are longer than the model takes.")
    ] = False,
    dtype: Dtype = "auto",
    asked: Asked,
) -> None:
    """Make a vector of each text, by an encoder or a folder of sentence-transformers: a line of JSON for each.

    \b
    Examples:
      hf-accel embed sentence-transformers/all-MiniLM-L6-v2 "A text." "Another one."
      hf-accel embed BAAI/bge-small-en-v1.5 --file texts.jsonl --weights none --json
    """
    given = [*(texts or ()), *(_texts(file) if file is not None else ())]
    if not given:
        raise BadInputError("no text is given; add texts after PATH, or --file FILE")
    place, wanted, keywords = checked_path(path), named_dtype(dtype), asked.keywords()
    if not is_row_path(path):
        raise BadInputError(f"embed: {path} writes text; give an encoder, or a folder of sentence-transformers")
    with asked.output.progress("loading the model"), explained(path):
        from hf_accel.checkpoints.text_encoder import load_text_encoder

        encoder = load_text_encoder(place, dtype=wanted or "auto", **keywords)
    if encoder.scores:
        raise BadInputError(f"embed: {path} scores two texts, and makes no vectors; hf-accel serve answers /v1/rerank")
    vectors, counts = _vectors(encoder, given, prompt_name, truncate=truncate)
    document = {"path": path, "dimensions": vectors.shape[1], "tokens": counts, "vectors": vectors.tolist()}
    asked.output.write(document, "\n".join(str(vector) for vector in document["vectors"]))


def _texts(file: Path) -> list[str]:
    """Read the texts of a file: one on each line that is not empty, or one of each object of a .jsonl file."""
    found = texts_in_file(file)
    return found if file.suffix == ".jsonl" else [line for line in found[0].splitlines() if line.strip()]


def _vectors(encoder: Any, texts: Sequence[str], prompt: str | None, *, truncate: bool) -> tuple[Any, list[int]]:
    """Return the vectors of texts, and the tokens of each."""
    import torch

    from hf_accel.serving.row_queue import RowQueue

    if prompt is not None and prompt not in encoder.prompts:
        known = ", ".join(encoder.prompts) or "none"
        raise BadInputError(f"--prompt-name {prompt} is no prompt of the model; it has {known}")
    rows = [encoder.row(text, prompt=prompt, cut=encoder.max_tokens if truncate else None) for text in texts]
    longest = max(map(len, rows))
    if longest > encoder.max_tokens:
        raise BadInputError(f"a text has {longest} tokens, and the model takes {encoder.max_tokens}; add --truncate")
    queue: Any = RowQueue(encoder.model, encoder.compute, max_rows=ROWS)
    try:
        return torch.stack(queue.submit(rows).future.result()), [len(row) for row in rows]
    finally:
        queue.close()

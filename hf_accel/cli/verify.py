"""hf-accel verify: compares the tokens of a patched model with those of its reference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .models import check_text_model, checked_path, load_patched, tokenizer_of
from .options import Asked, Dtype, Path_, common, texts_in_file

DIFFERENT = 1  # exit code
PROMPTS = ["The most important", "import os\n\ndef ", "1, 2, 3, 4,", "Once upon a time"]


@common()
def verify(
    path: Path_,
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated; a few of its own if left out.")] = None,
    text: Annotated[Path | None, typer.Option(help="A file to measure the cost of quantization on.")] = None,
    reference: Annotated[str | None, typer.Option(help="The float model that a quantized PATH was made of.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to compare for each prompt.")] = 32,
    dtype: Dtype = "auto",
    *,
    asked: Asked,
) -> None:
    """Compare a patched model with its reference, token by token; exit code 1 if they differ beyond rounding.

    \b
    Examples:
      hf-accel verify examples/stdlib-tiny --weights none --prompt "def main("
      hf-accel verify examples/stdlib-tiny --weights int4 --text examples/stdlib-tiny/heldout.txt
      hf-accel verify tiny-int4 --reference examples/stdlib-tiny --json
    """
    keywords = asked.keywords()
    measured = None if text is None else texts_in_file(text)
    check_text_model(path, "verify")
    if reference is not None:
        reference = checked_path(reference)
    import hf_accel

    with asked.output.progress("loading the model") as now:
        tokenizer = tokenizer_of(path)
        model = load_patched(path, dtype=dtype, **keywords)
        now("comparing")
        certificate = hf_accel.verify(
            model, prompt or PROMPTS, tokenizer=tokenizer, reference=reference, text=measured,
            max_new_tokens=max_new_tokens,
        )  # fmt: skip
    asked.output.write({"path": path, **certificate.to_dict()}, certificate)
    if not certificate.explained:
        raise typer.Exit(DIFFERENT)

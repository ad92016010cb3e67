"""hf-accel verify: compares what a patched model writes, or an encoder returns, with its reference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .models import check_text_model, checked_path, is_encoder_path, is_quantized_path, load_patched, tokenizer_of
from .options import Asked, Dtype, Path_, common, texts_in_file
from .output import BadInputError

DIFFERENT = 1  # exit code
PROMPTS = ["The most important", "import os\n\ndef ", "1, 2, 3, 4,", "Once upon a time"]


@common()
def verify(
    path: Path_,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated; a few of its own if left out, and random inputs for an encoder."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A file to measure the cost of quantization on.")] = None,
    reference: Annotated[str | None, typer.Option(help="The float model that a quantized PATH was made of.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to compare for each prompt.")] = 32,
    dtype: Dtype = "auto",
    *,
    asked: Asked,
) -> None:
    """Compare a patched model with its reference, token by token, or vector by vector where it is an encoder; exit
    code 1 if they differ beyond rounding.

    \b
    Examples:
      hf-accel verify examples/stdlib-tiny --weights none --prompt "def main("
      hf-accel verify examples/stdlib-tiny --weights int4 --text examples/stdlib-tiny/heldout.txt
      hf-accel verify tiny-int4 --reference examples/stdlib-tiny --json
      hf-accel verify sentence-transformers/all-MiniLM-L6-v2 --prompt "A text." --prompt "One that is longer."
    """
    keywords = asked.keywords()
    measured = None if text is None else texts_in_file(text)
    encodes = is_encoder_path(path)
    if encodes and measured is not None:
        raise BadInputError("--text measures the perplexity of a model that generates; leave it out for an encoder")
    if not encodes:
        check_text_model(path, "verify")
    if reference is not None:
        reference = checked_path(reference)
    elif encodes and not is_quantized_path(path):
        reference = checked_path(path)  # what the patch is undone to is compared with the files
    import hf_accel

    with asked.output.progress("loading the model") as now:
        tokenizer = None if encodes and not prompt else tokenizer_of(path)
        model = load_patched(path, dtype=dtype, **keywords)
        now("comparing")
        certificate = hf_accel.verify(
            model, prompt or (None if encodes else PROMPTS), tokenizer=tokenizer, reference=reference, text=measured,
            max_new_tokens=max_new_tokens,
        )  # fmt: skip
    asked.output.write({"path": path, **certificate.to_dict()}, certificate)
    if not certificate.explained:
        raise typer.Exit(DIFFERENT)

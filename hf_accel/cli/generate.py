"""hf-accel generate: text from a prompt, streamed as it comes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .models import check_text_model, load_patched, tokenizer_of
from .options import Asked, Dtype, Fit, Path_, common, texts_in_file, with_fit
from .output import BadInputError
from .token_options import sampling_of

Prompt = Annotated[str | None, typer.Option(help="The prompt; without one it is read from stdin.")]
PromptFile = Annotated[Path | None, typer.Option(help="A file that holds the prompt; - is stdin.")]


@common(writes=True)
def generate(
    path: Path_,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is what a user says in a chat.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message, before the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to write.")] = 256,
    json_schema: Annotated[str | None, typer.Option(help="The text is JSON of this schema: a file, or JSON.")] = None,
    regex: Annotated[str | None, typer.Option(help="The text matches this regular expression.")] = None,
    grammar: Annotated[Path | None, typer.Option(help="A file with a grammar (Lark or GBNF) of the text.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The text is this; repeat it for others.")] = None,
    dtype: Dtype = "auto",
    fit: Fit = None,
    *,
    asked: Asked,
) -> None:
    """Write on from a prompt, or from what an encoder reads of it, token by token as they come.

    Without options, the model's generation_config.json decides how tokens are chosen.

    \b
    Examples:
      hf-accel generate examples/stdlib-tiny --prompt "import re" --max-new-tokens 32
      echo "def main(" | hf-accel generate examples/stdlib-tiny --weights none --speculative suffix
      hf-accel generate Qwen/Qwen3-0.6B --chat --prompt "Why is the sky blue?" --temperature 0.7
      hf-accel generate examples/stdlib-tiny --prompt "import " --choice re --choice os
    """
    text = given_prompt(prompt, prompt_file)
    keywords = with_fit(asked.keywords(), fit)
    matched = constraint_of(json_schema, regex, grammar, choice)
    check_text_model(path, "generate")
    with asked.output.progress("loading the model"):
        tokenizer = tokenizer_of(path)
        inputs = encoded(tokenizer, text, chat=chat, system=system)
        model = load_patched(path, dtype=dtype, **keywords)
    import torch

    import hf_accel

    tokens, own = asked.tokens, model.generation_config
    if tokens.seed is not None:
        torch.manual_seed(tokens.seed)
    beams = (own.num_beams or 1) > 1  # whose text is known at the end alone
    streamer = None if asked.output.json or beams else stream_to(asked.output, tokenizer)
    num_prompt = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]  # 1: its own first token
    ends = {"stop_strings": tokens.stop} if tokens.stop else {}
    output = model.generate(
        **inputs.to(model.device), max_new_tokens=max_new_tokens, streamer=streamer,
        **sampling_of(own, tokens.given, seed=tokens.seed, num_prompt=num_prompt), **matched,
        **({**ends, "tokenizer": tokenizer} if ends or own.stop_strings or matched else {}),
    )  # fmt: skip
    new = output[0, num_prompt:].tolist()
    if beams and not asked.output.json:
        asked.output.print(tokenizer.decode(new, skip_special_tokens=True), end="\n")
    if asked.output.json:
        statistics = {name: value for name, value in hf_accel.stats(model).items() if not isinstance(value, list)}
        written = tokenizer.decode(new, skip_special_tokens=True)
        asked.output.write({"path": path, "prompt": text, "text": written, "tokens": new, "stats": statistics}, "")


def constraint_of(
    schema: str | None, regex: str | None, grammar: Path | None, choice: list[str] | None
) -> dict[str, Any]:
    """Return the keyword of generate() that says what the text must match; empty for any text."""
    given: dict[str, Any] = {"regex": regex, "choice": choice or None}
    try:
        if schema is not None:
            text = schema if schema.lstrip().startswith("{") else Path(schema).read_text(encoding="utf-8")
            given["response_format"] = {"type": "json_schema", "schema": json.loads(text)}
        if grammar is not None:
            given["grammar"] = grammar.read_text(encoding="utf-8")
    except (OSError, ValueError, RecursionError) as error:
        name = "--json-schema" if grammar is None or schema is not None else "--grammar"
        raise BadInputError(f"{name}: {error}") from None
    return {name: value for name, value in given.items() if value is not None}


def given_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from the option, a file or stdin. Raises BadInputError for none, two or an empty one."""
    if prompt is not None and file is not None:
        raise BadInputError("--prompt and --prompt-file are both given; leave one of them out")
    if prompt is None and file is not None and str(file) != "-":
        prompt = next(iter(texts_in_file(file)), "")
    elif prompt is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise BadInputError("no prompt is given; add --prompt TEXT or --prompt-file FILE, or pipe a text in")
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise BadInputError("the prompt is empty; give at least a character")
    return prompt


def encoded(tokenizer: Any, text: str, *, chat: bool, system: str | None) -> Any:
    """Return token ids [1, n] and their mask."""
    if not chat:
        if system is not None:
            raise BadInputError("--system is a part of a chat; add --chat, or leave it out")
        return tokenizer(text, return_tensors="pt")
    if not getattr(tokenizer, "chat_template", None):
        raise BadInputError("--chat: the tokenizer has no chat template; leave --chat out, or take a chat model")
    said = [{"role": "system", "content": system}] if system is not None else []
    said.append({"role": "user", "content": text})
    return tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def stream_to(output: Any, tokenizer: Any) -> Any:
    """Make a streamer for generate() that prints new text."""
    from transformers import TextStreamer

    class Answers(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            output.print(text, end="\n" if stream_end else "")

    return Answers(tokenizer, skip_prompt=True, skip_special_tokens=True)

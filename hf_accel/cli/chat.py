"""hf-accel chat: a conversation in the shell, answered token by token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import typer

from .models import check_text_model, load_patched, tokenizer_of
from .options import Asked, Dtype, Fit, Path_, common, with_fit
from .output import BadInputError, say
from .token_options import asked_for

EXIT, CLEAR = "/exit", "/clear"
HELP = f"{EXIT} or Ctrl-D ends the chat, {CLEAR} begins a new one, Ctrl-C ends an answer"


@common(writes=True)
def chat(
    path: Path_,
    *,
    system: Annotated[str | None, typer.Option(help="The system message, before the first one.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 1024,
    adapter: Annotated[
        str | None, typer.Option(help="The PATH of a PEFT LoRA that the answers are made with.")
    ] = None,
    dtype: Dtype = "auto",
    fit: Fit = None,
    asked: Asked,
) -> None:
    """Chat with a model in the shell. Each line is a message; what was said before is not computed again.

    /exit ends the chat and /clear begins a new one. Without options, the model's generation_config.json decides how
    tokens are chosen.

    \b
    Examples:
      hf-accel chat Qwen/Qwen3-0.6B
      hf-accel chat Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
      hf-accel chat Qwen/Qwen3-0.6B --adapter loras/support
      echo "Why is the sky blue?" | hf-accel chat Qwen/Qwen3-0.6B
    """
    keywords = with_fit(asked.keywords(), fit)
    check_text_model(path, "chat")
    with asked.output.progress("loading the model"):
        tokenizer = tokenizer_of(path)
        if not getattr(tokenizer, "chat_template", None):
            raise BadInputError("chat: the tokenizer has no chat template; take a chat model, or hf-accel generate")
        if not tokenizer.is_fast:
            raise BadInputError(f"chat: {type(tokenizer).__name__} is no fast tokenizer, which streams need")
        model = load_patched(path, dtype=dtype, **keywords)
    import hf_accel

    config = model.generation_config
    seed = asked.tokens.seed
    settings = asked_for(config, asked.tokens.given, seed=seed) | {"num_beams": 1, "max_new_tokens": max_new_tokens}
    stops = asked.tokens.stop or config.stop_strings or []
    settings |= {"stop": [stops] if isinstance(stops, str) else list(stops)}
    settings |= {} if seed is None else {"seed": seed}
    with hf_accel.Engine(model, tokenizer=tokenizer) as engine:
        if adapter is not None:
            engine.load_adapter(adapter, adapter)
            settings["adapter"] = adapter
        conversation = Conversation(engine, settings, system)
        write = _nothing if asked.output.json else partial(asked.output.print, end="")
        for message in lines():
            if message == CLEAR:
                conversation = Conversation(engine, settings, system)
            elif message:
                conversation.answer(message, write)
                write("\n")
    if asked.output.json:
        asked.output.write({"path": path, "messages": conversation.messages}, "")


def lines() -> Iterator[str]:
    """Iterate over the lines that a user writes until /exit or the end of stdin."""
    shown = sys.stdin.isatty()
    if shown:
        say(HELP)
    while True:
        if shown:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == EXIT:
            return
        yield line.strip()


class Conversation:
    """The messages of a chat. settings: keywords of Engine.submit. system: the first message; None for none."""

    def __init__(self, engine: Any, settings: dict[str, Any], system: str | None) -> None:
        self._engine, self._settings = engine, settings
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, message: str, write: Callable[[str], object]) -> None:
        """Answer a message piece by piece. Ctrl-C ends the answer, of which the chat keeps what was written.

        A message for which the context has no room is not kept, and a line on stderr gives the reason.
        """
        from hf_accel.serving.token_text import TokenText

        tokenizer = self._engine.tokenizer
        messages = [*self.messages, {"role": "user", "content": message}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        context = getattr(self._engine.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        room = min(self._settings["max_new_tokens"], context - len(ids))
        if room < 1:
            return say(f"the chat has {len(ids)} tokens, and the context holds {context}; {CLEAR} begins a new one")
        text = TokenText(tokenizer, self._settings["stop"], keep_special=False)
        request = self._engine.submit(ids, **{**self._settings, "max_new_tokens": room})
        written: list[str] = []
        try:
            for token in request:
                _write(text.feed([token])[0], written, write)
            _write(text.end()[0], written, write)
        except KeyboardInterrupt:
            request.cancel()
        self.messages = [*messages, {"role": "assistant", "content": "".join(written)}]


def _nothing(_: str) -> None:
    """Write nothing: the messages are printed at the end."""


def _write(piece: str, written: list[str], write: Callable[[str], object]) -> None:
    if piece:
        written.append(piece)
        write(piece)

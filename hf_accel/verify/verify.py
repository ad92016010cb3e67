"""verify(model, prompts) -> Certificate: does the patched model write what the reference writes, token for token?"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import logging

from ..errors import HfAccelError, UnsupportedError
from ..generation.hf.vocabulary import check_ids, token_ids
from ..keywords import check_keywords, positive_int
from ..models import model_of
from ..patching.check import transformers_model
from ..patching.pack import PROGRESS_SECONDS
from ..patching.patch import is_patched, stock_twin
from ..undo.state import state_of
from .certificate import Certificate, Cost, Verdict
from .cost import measure_cost, text_windows
from .encoder import verify_encoder
from .passes import continuation, logits_by_steps, started
from .references import is_quantized, kv_config, quantized_reference
from .rounding import ReferenceModel

# Keywords that may change how generate() finds the tokens, but not which: the reference does not get them.
OF_THE_MODEL = ("speculative", "assistant_model", "prompt_lookup_num_tokens")
OUR_KEYWORDS = (
    "do_sample", "num_beams", "num_return_sequences", "return_dict_in_generate", "output_scores", "max_length",
    "attention_mask", "input_ids", "inputs",
)  # fmt: skip
ITSELF = "reference= is the model itself; leave it out to compare with an unpatched copy"
NO_ORIGINALS = "the model has no original weights to compare with; pass reference="


def verify(
    model: Any,
    prompts: Any = None,
    *,
    reference: PreTrainedModel | str | Path | None = None,
    tokenizer: Any = None,
    max_new_tokens: int = 32,
    text: Any = None,
    **generate: Any,
) -> Certificate:
    """Compare greedy generation of a patched model with a reference, prompt by prompt; and lower bits with float.

    Weights as they are: the reference is the float model. Quantized weights, keys or values: the reference has the
    same ones, in plain torch on stock's loop, and the certificate also says what they cost against the float model.

    Of an encoder passes are compared, of texts alone and together with every form of padding: states of tokens and
    pooled vectors within rounding, what lower bits cost as cosines to the float model's, and, where reference= is
    given, that an unpatched copy is that model bit for bit.

    prompts: lists or 1-D tensors of token ids, or texts if a tokenizer is given; or one such prompt. For an encoder
        also inputs as its forward takes them, by name; None, for an encoder alone, draws random ones. Of an
        encoder-decoder the encoder reads them; where it reads images or sound, they are the decoder's.
    reference: the float model, or a path to load it from; None for an unpatched copy of this model, which shares
        what weights it has in memory.
    text: what the cost is measured on: a text, token ids, or a list of these; windows of 512 tokens. None for the
        prompts with the float model's continuations.
    generate: keywords for generate() of both models, as images; speculative= and assistant_model= for the model alone.

    Raises UnsupportedError without anything to compare with, and HfAccelError if original weights cannot be read back.
    """
    if not transformers_model(model).can_generate():
        refused = [name for name, value in ({"text": text} | generate).items() if value is not None]
        if refused:
            raise UnsupportedError(f"an encoder generates no text: leave {', '.join(f'{n}=' for n in refused)} out")
        return _of_encoder(model, prompts, reference, tokenizer)
    model = model_of(model, keep_adapters=True)
    if prompts is None:
        raise UnsupportedError(
            f"verify() needs prompts for {type(model).__name__}, which generates text; pass texts and "
            "tokenizer=, or lists of token ids"
        )
    positive_int("max_new_tokens", max_new_tokens)
    _check_generate(model, generate)
    reference = reference if isinstance(reference, str | Path) else model_of(reference, keep_adapters=True)
    if reference is model:
        raise UnsupportedError(ITSELF)
    ids = _prompts(model, prompts, tokenizer, "prompt")
    texts = None if text is None else text_windows([ids[0].cpu() for ids in _prompts(model, text, tokenizer, "text")])
    if isinstance(reference, str | Path):
        AutoConfig.from_pretrained(reference)  # raises now, and not after the prompts have run
    run = Run(model, ids, max_new_tokens, generate)
    if is_quantized(model):
        exact = ReferenceModel(quantized_reference(model), _quantized_name(model))
        verdicts = run.verdicts(exact)
        del exact
        gc.collect()  # a patched model refers to itself; free it before the float model is made
        cost, no_cost = _cost(run, reference, texts)
        return Certificate(_quantized_name(model), verdicts, cost, no_cost)
    given = _float_reference(model, reference)
    return Certificate(given.name, run.verdicts(given))


def _of_encoder(given: Any, prompts: Any, reference: Any, tokenizer: Any) -> Certificate:
    model = transformers_model(given)
    if reference is not None:
        reference = _encoder_reference(model, reference)
    if prompts is not None and not isinstance(prompts, Mapping):
        own = getattr(given, "tokenizer", None)  # as a SentenceTransformer or a pipeline holds it
        prompts = _prompts(model, prompts, own if tokenizer is None else tokenizer, "prompt")
    return verify_encoder(model, prompts, reference)


def _encoder_reference(model: PreTrainedModel, reference: Any) -> ReferenceModel:
    if isinstance(reference, str | Path):
        return ReferenceModel.loaded(model, reference)
    inner = transformers_model(reference)
    if inner is model:
        raise UnsupportedError(ITSELF)
    return ReferenceModel(inner, f"the given {type(reference).__name__}")


@dataclass
class Run:
    """A model and its prompts, [1, n] each."""

    model: PreTrainedModel
    prompts: list[Tensor]
    max_new_tokens: int
    settings: dict[str, Any]

    @property
    def common(self) -> dict[str, Any]:
        """The keywords of generate() that apply to the reference too."""
        return {name: value for name, value in self.settings.items() if name not in OF_THE_MODEL}

    @torch.no_grad()
    def verdicts(self, reference: ReferenceModel) -> tuple[Verdict, ...]:
        bar = logging.tqdm(self.prompts, desc="Verifying", unit=" prompts", delay=PROGRESS_SECONDS)
        return tuple(self._compare(reference, prompt) for prompt in bar)

    def _compare(self, reference: ReferenceModel, prompt: Tensor) -> Verdict:
        start = started(reference.model, prompt, self.common)
        expected = continuation(reference.model, start, self.max_new_tokens, self.common)
        actual = continuation(self.model, start, self.max_new_tokens, self.settings)
        shared = min(len(expected), len(actual))
        differs = (expected[:shared] != actual[:shared]).nonzero()
        if not len(differs):
            return Verdict(identical=len(expected) == len(actual), tokens=shared)
        position = int(differs[0])
        pair = torch.stack([expected[position], actual[position]])
        history = start.after(expected[:position])
        # without speculation, which does not give its logits out
        ours = logits_by_steps(self.model, history, self.common)
        pair = pair.to(ours.device)  # of the tokens, where the model is

        def margin(theirs: Tensor) -> float:
            return float((theirs[pair[0]] - theirs[pair[1]]).abs())

        def distance(theirs: Tensor) -> float:
            return float(torch.where(ours == theirs, 0, (ours - theirs).abs()).max())  # -inf is far from nothing

        theirs, rounding, arbiter = reference.judge(
            history, self.common, needed=lambda logits: max(margin(logits), distance(logits))
        )
        return Verdict(
            identical=False,
            tokens=position,
            position=position,
            reference_token=int(pair[0]),
            model_token=int(pair[1]),
            reference_logits=tuple(theirs[pair].tolist()),
            model_logits=tuple(ours[pair].tolist()),
            margin=margin(theirs),
            rounding=rounding,
            arbiter=arbiter,
            distance=distance(theirs),
        )


def _cost(run: Run, reference: Any, windows: list[Tensor] | None) -> tuple[Cost | None, str | None]:
    """Return the cost, or the reason why there is none."""
    if run.model.config.is_encoder_decoder and run.model.main_input_name != "input_ids":
        return None, f"it is measured on texts, and the encoder reads {run.model.main_input_name}"
    try:
        given = _float_reference(run.model, reference)
    except HfAccelError as error:
        if reference is not None:
            raise
        return None, str(error)
    source = "the text given"
    if windows is None:
        source = "the prompts and how the float model goes on"
        starts = [started(given.model, prompt, run.common) for prompt in run.prompts]
        ends = [start.after(continuation(given.model, start, run.max_new_tokens, run.common)) for start in starts]
        windows = text_windows([end.read for end in ends])
    return measure_cost(run.model, given.model, windows, name=given.name, text=source), None


def _float_reference(model: PreTrainedModel, reference: PreTrainedModel | str | Path | None) -> ReferenceModel:
    if isinstance(reference, str | Path):
        return ReferenceModel.loaded(model, reference)
    if reference is not None:
        return ReferenceModel(reference, f"the given {type(reference).__name__}")
    if not is_patched(model):
        raise UnsupportedError("the model is not patched; patch it, or pass reference= to compare two models")
    originals = state_of(model).originals
    if originals.lost or originals.never_there:
        raise UnsupportedError(NO_ORIGINALS)
    return ReferenceModel(stock_twin(model), "the unpatched model")


def _check_generate(model: PreTrainedModel, generate: dict[str, Any]) -> None:
    """Raise UnsupportedError for a keyword that verify() sets itself, and for an unknown one."""
    for name in OUR_KEYWORDS:
        if name in generate:
            raise UnsupportedError(f"verify() compares the greedy tokens of one sequence at a time; leave {name}= out")
    functions = (verify, GenerationMixin.generate, type(transformers_model(model)).forward)
    known = {name for function in functions for name in inspect.signature(function).parameters}
    known |= {*GenerationConfig().to_dict(), *OF_THE_MODEL} - {"self", "kwargs", "generate", *OUR_KEYWORDS}
    check_keywords("verify()", generate, known, {"max_tokens": "max_new_tokens="})


def _quantized_name(model: PreTrainedModel) -> str:
    cache = kv_config(model)
    return "the quantized reference" + ("" if cache is None else f" with {cache.dtype} keys and values")


def _prompts(model: PreTrainedModel, given: Any, tokenizer: Any, name: str) -> list[Tensor]:
    """Return each text or list of token ids as ids [1, n] on the model's device; a single one needs no list."""
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise UnsupportedError(
            f"verify() got a {type(given).__name__} as {name}; pass texts and tokenizer=, or lists of token ids "
            "without padding"
        )
    several = [given] if isinstance(given, str) or (isinstance(given, Tensor) and given.ndim == 1) else list(given)
    if several and isinstance(several[0], int):
        several = [several]
    if not several:
        raise UnsupportedError(f"verify() needs at least one {name}")
    return [_ids(model, one, tokenizer, f"{name} {number}") for number, one in enumerate(several)]


def _ids(model: PreTrainedModel, prompt: Any, tokenizer: Any, name: str) -> Tensor:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UnsupportedError(f"{name} is a text; pass tokenizer= to verify(), or token ids")
        prompt = tokenizer(prompt)["input_ids"]
    ids = token_ids(prompt, name)
    check_ids(transformers_model(model), ids, name)
    return torch.tensor([ids], device=model.device)

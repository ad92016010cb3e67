"""distill_draft: a draft model for speculative decoding, from the model that it shall draft for."""

from __future__ import annotations

import copy
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

from ...errors import UnsupportedError
from ...keywords import checked_keywords, one_of, positive_int
from ...models import evaluating, layers_config
from ..losses.objective import Objective
from ..trainer.callback import DistillationCallback
from ..trainer.on_policy import collated, continued
from .decoding import Decoder, as_patched
from .head_optimizer import HeadOptimizer
from .heads import DraftHead, HeadTrainer, most_frequent
from .measuring import measure_acceptance
from .report import AcceptanceReport
from .student import init_student
from .token_rows import prompt_of, token_rows, windows

# This share of the rows, at most MOST_HELD_OUT of them, is for measuring and not for training.
HELD_OUT = 0.1
MOST_HELD_OUT = 32
# So many prompts are continued by the target together; with half as many a core writes a fifth fewer tokens a second.
AT_ONCE = 64
STEPS, BATCH, RATE = 500, 8, 5e-4
# For a head of this width: a step of HeadOptimizer moves what a wider matrix gives by the root of the width more.
HEAD_RATE, HEAD_WIDTH = 1e-2, 384


class DraftResult(NamedTuple):
    """A trained draft, and what it was worth before and after; None where measuring was left out."""

    draft: PreTrainedModel | DraftHead
    before: AcceptanceReport | None
    after: AcceptanceReport | None


@checked_keywords()
def distill_draft(
    target: PreTrainedModel,
    dataset: Any,
    *,
    kind: Literal["model", "eagle"] = "model",
    head_tokens: int | None = None,
    num_layers: int | None = None,
    layers: Sequence[int] | None = None,
    strategy: str | None = None,
    loss: str = "lk",
    alpha: float = 0.0,
    temperature: float = 1.0,
    regenerate: bool | float = True,
    prompt_tokens: int = 32,
    max_length: int = 256,
    max_steps: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    args: TrainingArguments | None = None,
    share_embeddings: bool = True,
    tokenizer: Any = None,
    measure: bool | Mapping[str, Any] = True,
    seed: int = 0,
    progress_bar: bool = True,
) -> DraftResult:
    """Make and train a draft model for `target`: draft, before, after = distill_draft(target, dataset, num_layers=1).

    The draft begins as some of the target's layers (`init_student`; one, if nothing is said). With kind="eagle" it is
    a head of one layer instead, which reads the target's own hidden states (EAGLE-3, 2503.01840) and drafts for this
    target alone, on a CPU. It learns the target's
    distribution, by a loss that is about acceptance (loss="lk", 2602.23881), on text that the target itself writes
    after the beginnings of the dataset's rows (DistillSpec, 2310.08461). `model.generate(..., speculative=draft)` of a
    patched target uses it, and draft.save_pretrained keeps it; `DraftHead.from_pretrained(folder, target)` loads a
    head.

    dataset: rows of token ids, dicts with input_ids, or with `tokenizer` texts; cut to max_length tokens. A tenth of
        the rows, at most 32, are kept for measuring.
    head_tokens: how many tokens a head drafts, those that come most often in what it is trained on; None for all.
        What it drafts costs less, and it never drafts another token, which the target still says.
    loss, alpha: as in `distillation_loss`; alpha=0 learns from the target alone.
    temperature: at which the draft will be used; the target writes, the loss compares, and both are measured at it.
        0 is greedy search, for which the loss compares at 1.
    regenerate: share of the rows of which the target rewrites what follows the first prompt_tokens (at most half a
        row); True is all, False none.
    max_steps, batch_size, learning_rate: 500, 8 and 5e-4 with a cosine, by AdamW (for a head 1e-2, less for one wider
        than 384, and Muon for its matrices); or args, which then rule the training alone.
    share_embeddings: embeddings and head are the target's memory, and not trained; False copies and trains them.
    measure: also run `measure_acceptance` before and after, on the rows kept for it; or keywords for it.

    The target stays as it is: weights, patch, mode; so do torch's, numpy's and Python's random numbers.
    Raises UnsupportedError for a target that cannot speculate, or has no float weights to begin from.
    """
    share = float(regenerate)
    if not 0 <= share <= 1:
        raise UnsupportedError(f"regenerate={regenerate!r}: the share of the rows to rewrite is from 0 to 1")
    one_of("kind", kind, ("model", "eagle"))
    given_layers = {"num_layers": num_layers, "layers": layers, "strategy": strategy}
    if kind == "eagle" and (named := [name for name, value in given_layers.items() if value is not None]):
        raise UnsupportedError(f"a head has one layer behind the target's states; leave {' and '.join(named)} out")
    if kind == "eagle" and not share_embeddings:
        raise UnsupportedError("a head reads the target's own embeddings; leave share_embeddings=False out")
    if head_tokens is not None:
        positive_int("head_tokens", head_tokens)
        if kind != "eagle":
            raise UnsupportedError("a draft model drafts all tokens; leave head_tokens= out, or say kind='eagle'")
    positive_int("prompt_tokens", prompt_tokens)
    positive_int("max_length", max_length)
    objective = Objective(alpha, temperature or 1.0, loss)
    with random_state_kept(), evaluating(target), tempfile.TemporaryDirectory() as folder:
        if kind == "eagle" and learning_rate is None and args is None:
            learning_rate = HEAD_RATE * min(1.0, HEAD_WIDTH / layers_config(target.config).hidden_size) ** 0.5
        given = {"max_steps": max_steps, "batch_size": batch_size, "learning_rate": learning_rate}
        fixed = {"output_dir": folder, "seed": seed, "disable_tqdm": not progress_bar}
        arguments = _arguments(args, given, target, **fixed)
        patched = as_patched(target)
        if num_layers is None and layers is None:
            num_layers = 1
        train, held_out = _rows(dataset, target, arguments, tokenizer=tokenizer, max_length=max_length)
        known = None if head_tokens is None else most_frequent(train, head_tokens)
        draft: Any = DraftHead.of(target, tokens=known, seed=seed) if kind == "eagle" else init_student(
            target, num_layers=num_layers, layers=layers, strategy=strategy or "uniform", dataset=train,
            share_embeddings=share_embeddings,
        ).eval()  # fmt: skip
        options: dict[str, Any] = {"temperature": temperature, "prompt_tokens": prompt_tokens, "seed": seed}
        options |= {"progress_bar": progress_bar, **(measure if isinstance(measure, Mapping) else {})}
        before = None if measure is False else measure_acceptance(target, draft, held_out, **options)
        decoder = Decoder(patched, temperature=temperature, seed=seed)
        chosen = set(random.Random(seed).sample(range(len(train)), round(share * len(train))))
        examples = _examples(
            decoder, train, chosen, prompt_tokens=prompt_tokens, max_length=max_length, progress_bar=progress_bar
        )
        unseen = [{"input_ids": row, "labels": row} for row in held_out]  # for an eval_strategy of args
        _train(draft, target, objective, (examples, unseen), args=arguments, is_ours=args is None)
        after = None if measure is False else measure_acceptance(target, draft, held_out, **options)
    return DraftResult(draft, before, after)


def _arguments(
    args: TrainingArguments | None, given: Mapping[str, float | None], target: Any, **fixed: Any
) -> TrainingArguments:
    """The arguments of the training. given: max_steps, batch_size and learning_rate. fixed: what else is passed on."""
    named = {name: value for name, value in given.items() if value is not None}
    if args is not None and named:
        raise UnsupportedError(f"args= says how to train, and so do {', '.join(named)}; leave one of them out")
    for name in named.keys() - {"learning_rate"}:
        positive_int(name, named[name])
    if args is None:
        found: dict[str, Any] = {"max_steps": STEPS, "batch_size": BATCH, "learning_rate": RATE, **named}
        steps = found["max_steps"]
        args = TrainingArguments(
            max_steps=steps,
            per_device_train_batch_size=found["batch_size"],
            learning_rate=found["learning_rate"],
            lr_scheduler_type="cosine",
            warmup_steps=min(steps // 10, 50),
            weight_decay=0.0,
            logging_steps=max(1, steps // 10),
            save_strategy="no",
            report_to=[],
            use_cpu=target.device.type == "cpu",
            dataloader_pin_memory=False,
            **fixed,
        )
    if args.device.type != target.device.type:
        raise UnsupportedError(
            f"args trains on {args.device}, and the target is on {target.device}; move it there, or set use_cpu"
        )
    return args


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave torch's, numpy's and Python's generators after the block as they were before."""
    numpy: Any = sys.modules["numpy"]  # transformers has imported it
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


# -- data ----------------------------------------------------------------------------------------------


def _rows(
    dataset: Any, target: Any, args: TrainingArguments, *, tokenizer: Any, max_length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Rows to train on, as many as the steps can take, and others to measure on."""
    wanted = None
    if args.max_steps > 0:
        wanted = args.max_steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        wanted += MOST_HELD_OUT
    rows = token_rows(dataset, target, tokenizer=tokenizer, limit=wanted)
    parts = list(islice(windows(rows, max_length), wanted))
    if len(parts) < 2:
        raise UnsupportedError("dataset is one row, and one to train on and one to measure on are needed; give more")
    held = max(1, min(MOST_HELD_OUT, round(HELD_OUT * len(parts))))
    return parts[:-held], parts[-held:]


def _examples(
    decoder: Decoder,
    rows: list[list[int]],
    chosen: set[int],
    *,
    prompt_tokens: int,
    max_length: int,
    progress_bar: bool = False,
) -> list[dict[str, list[int]]]:
    """Rows as input_ids and labels. The target continues the beginnings of the `chosen` ones (prompt_tokens tokens, at
    most half a row) up to max_length tokens, and of these the prompt is not learnt."""
    examples = [{"input_ids": row, "labels": row} for i, row in enumerate(rows) if i not in chosen]
    prompts = [prompt_of(rows[i], prompt_tokens) for i in sorted(chosen)]
    bar = logging.tqdm(total=len(prompts), desc="The target writes", unit=" rows", disable=not progress_bar)
    with bar:
        for start in range(0, len(prompts), AT_ONCE):
            some = prompts[start : start + AT_ONCE]
            made = decoder.run(some, [max(1, max_length - len(prompt)) for prompt in some])
            examples += [continued(prompt, new) for prompt, new in zip(some, made, strict=True)]
            bar.update(len(some))
    return examples


# -- training ------------------------------------------------------------------------------------------


def _pupil(draft: Any) -> Any:
    """The model that is trained: a copy of the draft in float32, in which small steps are not rounded away."""
    return copy.deepcopy(draft).float()


def _train(
    draft: Any, target: Any, objective: Objective, examples: tuple[Any, Any], *, args: TrainingArguments, is_ours: bool
) -> None:
    """Train a copy of the draft, which takes over the result in its own dtypes. is_ours: whether args are our own,
    and name no optimizer."""
    pupil = _pupil(draft)
    data = {"train_dataset": examples[0], "eval_dataset": examples[1], "data_collator": collated}
    if isinstance(draft, DraftHead):
        own = HeadOptimizer(pupil, args.learning_rate) if is_ours else None
        trainer: Trainer = HeadTrainer(pupil, target, objective, args=args, optimizers=(own, None), **data)
    else:
        trainer = Trainer(model=pupil, args=args, callbacks=[_teach(target, objective)], **data)
    if args.disable_tqdm:
        trainer.remove_callback(PrinterCallback)  # it would print every log
    trainer.train()
    learnt = dict(pupil.named_parameters())
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.requires_grad:  # shared ones are the target's
                parameter.copy_(learnt[name])


def _teach(target: Any, objective: Objective) -> DistillationCallback:
    return DistillationCallback(target, alpha=objective.alpha, temperature=objective.temperature, loss=objective.loss)

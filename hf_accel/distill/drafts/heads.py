"""Draft heads: made for a target, trained on it, and loaded for the target that they were trained for."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from ...errors import UnsupportedError
from ...generation.hf.head_module import HeadModule
from ...generation.hf.pass_states import tapped
from ...hardware.atomic import replaced_file
from ...hardware.device import bfloat16_is_faster
from ...models import layer_lists, layers_config, vocabulary_size
from ..losses.distillation_loss import distillation_loss
from ..losses.objective import Objective
from .published_heads import is_published, read_published
from .student import init_student

SETTINGS, WEIGHTS = "draft_head.json", "draft_head.safetensors"
KNOWN = "known"  # among the weights, the ids of the tokens that a head drafts
STEPS_AHEAD = 3  # tokens that a head is trained to draft in a row
DECAY = 0.8  # what a step counts of the one before, as in EAGLE-3


class DraftHead(HeadModule):
    """Drafts for one target, from the target's own hidden states (EAGLE-3, Li et al. 2503.01840).

    `distill_draft(target, rows, kind="eagle")` trains one; `generate(..., speculative=head)` and an Engine of the
    patched target use it, on a CPU. At each position it reads three hidden states of the target and the embedding of
    the next token, and drafts the token after that by one layer and the target's own head.
    """

    @classmethod
    def of(
        cls,
        target: PreTrainedModel,
        target_layers: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        *,
        seed: int = 0,
    ) -> DraftHead:
        """Make a head of one layer like the target's last one, with random weights; the last norm is the target's.

        The weights of the target's last layer are no better beginning: they make it sure of the token that was read
        last, which training has to undo first (after 100 steps a third as many tokens more are accepted without them).

        target_layers: the hidden states that it reads, as `output_hidden_states` numbers them; left out, a low, a
        middle and the last one. tokens: the ids of the only tokens that it drafts, rising; None for all. seed: draws
        the weights. Raises UnsupportedError for a target without float weights, and for numbers that it does not have.
        """
        count = layers_config(target.config).num_hidden_layers
        chosen = target_layers or (min(2, count), max(1, count // 2), count)
        tapped(target, chosen)
        if tokens is not None:
            check_tokens(tokens, vocabulary_size(target))
        decoder = init_student(target, layers=[count - 1], share_embeddings=True)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            head = cls(decoder, chosen, tokens)
            for layers in layer_lists(decoder, 1).values():
                for module in layers.modules():
                    decoder._init_weights(module)
            if head.words is not None:
                theirs = head.decoder.get_output_embeddings()
                if theirs.bias is not None:
                    raise UnsupportedError("the target's head adds a bias; leave tokens= (head_tokens=) out")
                head.words.weight.copy_(theirs.weight[head.known])
        return head.eval()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the head's own weights into a folder, without the target's embeddings. Each file is replaced whole.

        Raises UnsupportedError for a head that was read in the layout of others: its own files hold all of it.
        """
        if not self.form.fuses:
            raise UnsupportedError("the head was read from files of another layout; copy those to keep it")
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with replaced_file(path / WEIGHTS) as unfinished:
            own = {name: p.detach().contiguous() for name, p in self.own_parameters().items()}
            save_file(own if self.known is None else {**own, KNOWN: self.known}, unfinished)
        with replaced_file(path / SETTINGS) as unfinished:
            settings: dict[str, Any] = {"target": type(self.decoder).__name__, "target_layers": self.target_layers}
            settings["weights"] = self.weights
            settings |= {} if self.known is None else {"tokens": len(self.known), "tokens_sha256": digest(self.known)}
            unfinished.write_text(json.dumps(settings, indent=2), encoding="utf-8")

    @classmethod
    @torch.random.fork_rng(devices=[])
    def from_pretrained(cls, folder: str | os.PathLike[str], target: PreTrainedModel) -> DraftHead:
        """Load a head for the target that it was trained for.

        folder: what save_pretrained has written; or an EAGLE-3 head in the layout of its authors and SpecForge, or in
        that of vLLM's speculators.

        Raises UnsupportedError for a folder that holds none, for another target, and where the list of the tokens
        that it drafts is not the one that it was trained with.
        """
        path = Path(folder)
        if not (path / SETTINGS).is_file():
            if is_published(path):
                return read_published(cls, path, target)
            raise UnsupportedError(
                f"{path} holds no {SETTINGS}, and no EAGLE-3 head of others (a config.json with draft_vocab_size); "
                "give a folder that a head was saved to"
            )
        settings = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
        kept = load_file(path / WEIGHTS)
        known = kept.pop(KNOWN, None)
        if (None if known is None else digest(known)) != settings.get("tokens_sha256"):
            raise UnsupportedError(
                f"{path}: the list of the tokens that the head drafts is not the one of {SETTINGS}, by its sha256; "
                "copy both files from one head"
            )
        head = cls.of(target, settings["target_layers"], None if known is None else known.tolist())
        head.weights = settings.get("weights", cls.weights)
        own = head.own_parameters()
        odd = sorted(kept.keys() ^ own.keys()) or [name for name in own if own[name].shape != kept[name].shape]
        if odd:
            raise UnsupportedError(
                f"{path} was made for another model, a {settings.get('target')}: {odd[0]!r} and {len(odd) - 1} more "
                f"weights do not fit; train a head for this one with distill_draft(..., kind='eagle')"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(kept[name])
        return head


def holds_head(folder: str | os.PathLike[str]) -> bool:
    """Return whether `DraftHead.from_pretrained` reads this folder."""
    return (Path(folder) / SETTINGS).is_file() or is_published(Path(folder))


def check_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise UnsupportedError unless these are ids of different tokens, in rising order."""
    rising = all(first < second for first, second in pairwise(tokens))
    if not tokens or not rising or tokens[0] < 0 or tokens[-1] >= vocabulary:
        raise UnsupportedError(
            f"tokens={list(tokens[:4])}...: the ids of the tokens that a head drafts rise from 0 on and stay below "
            f"{vocabulary}, the size of the vocabulary"
        )


def digest(tokens: Tensor) -> str:
    """Return the SHA-256 of a list of token ids."""
    return hashlib.sha256(str(tokens.tolist()).encode()).hexdigest()


def most_frequent(rows: Iterable[Sequence[int]], count: int) -> list[int]:
    """Return the ids of the tokens that come most often in rows of tokens, at most `count`, in rising order."""
    counts = Counter(chain.from_iterable(rows))
    return sorted(token for token, _ in counts.most_common(count))


# -- training ------------------------------------------------------------------------------------------


class HeadTrainer(Trainer):
    """Trains a head over its own predictions (the training-time test of EAGLE-3, 2503.01840).

    In the first step the head reads the target's states, in each later one its own of the step before, as it does when
    it drafts. The later steps count DECAY of the one before. On a CPU that multiplies faster in bfloat16, the products
    are computed so (torch.autocast), and a step takes about a quarter less time; weights and losses stay in float32.
    """

    def __init__(self, head: DraftHead, target: Any, objective: Objective, **keywords: Any) -> None:
        super().__init__(model=head, **keywords)
        self.target, self.goal = target, objective
        self.multiplies_bfloat16 = head.device.type == "cpu" and bfloat16_is_faster()
        self._signature_columns: Any = ["input_ids", "attention_mask", "labels"]  # which Trainer reads from forward()

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids, labels = inputs["input_ids"], inputs["labels"]
        states, logits = target_states(self.target, model.target_layers, ids, inputs.get("attention_mask"))
        if model.known is not None:  # the target's distribution over these tokens
            logits, labels = logits[..., model.known], _numbers_among(model.known, labels)
        goal = self.goal
        rounded = partial(torch.autocast, "cpu", torch.bfloat16, enabled=self.multiplies_bfloat16)
        with rounded():
            read = own = model.narrowed(states[:, :-1].to(model.narrow.weight.dtype)).float()
        total: Any = 0.0
        for step in range(STEPS_AHEAD):
            with rounded():
                made, last = model(read, ids[:, 1:])
            read = torch.cat([own[:, :1], last[:, :-1]], dim=1)
            loss = distillation_loss(
                made, logits[:, 1:], labels[:, 1:], alpha=goal.alpha, temperature=goal.temperature, loss=goal.loss
            )
            total = total + DECAY**step * loss
        return (total, {}) if return_outputs else total


def _numbers_among(known: Tensor, labels: Tensor) -> Tensor:
    """Return the places of labels among known tokens; -100, which counts nothing, for others."""
    places = torch.searchsorted(known, labels).clamp(max=len(known) - 1)
    return torch.where(known[places] == labels, places, -100)


@torch.no_grad()
def target_states(
    target: Any, target_layers: Sequence[int], ids: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the hidden states [B, T, C] of a target that a head reads, side by side, and its logits [B, T, V]."""
    read = target(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return torch.cat([read.hidden_states[number] for number in target_layers], dim=-1), read.logits


@torch.no_grad()
def head_logits(head: DraftHead, target: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of a head and of its target about the same tokens of a text [1, T]: both [T - 1, V].

    They are those of the tokens from the third on, since a head reads a token before it drafts the next.
    """
    states, logits = target_states(target, head.target_layers, ids)
    made, _ = head(head.narrowed(states[:, :-1]), ids[:, 1:])
    return head.over_vocabulary(made[0], logits.shape[-1]), logits[0, 1:]

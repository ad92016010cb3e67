"""Whether two bfloat16 runs differ by rounding alone, judged by the float32 result of the same weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_accel import PagedCache


def positions_of(prompt_mask: Tensor, num_new: int) -> Tensor:
    """As generate() counts them: new tokens go on from the last column's position, which is 0 if it is padding."""
    prompt = (prompt_mask.cumsum(1) - 1).masked_fill(prompt_mask == 0, 0)
    return torch.cat([prompt, prompt[:, -1:] + 1 + torch.arange(num_new)], dim=1)


@torch.no_grad()
def logits_of(
    model: PreTrainedModel,
    sequences: Tensor,
    mask: Tensor,
    positions: Tensor,
    *,
    split: int = 0,
    cache: Cache | None = None,
) -> Tensor:
    """float32 logits [B, T, V], in one pass or split in two over a cache."""
    parts = [
        model(
            input_ids=sequences[:, columns],
            attention_mask=mask[:, : columns.stop],
            position_ids=positions[:, columns],
            past_key_values=cache,
            use_cache=cache is not None,
        ).logits
        for columns in (slice(0, split), slice(split, sequences.shape[1]))
        if columns.stop
    ]
    return torch.cat(parts, dim=1).float()


class Audit:
    """The logits of some sequences: exact (float32), stock and patched.

    rounding is stock's own largest distance from exact, over all tokens. A patched model that rounds as well as stock
    stays within twice that, and its argmax can leave stock's only if exact holds the two tokens within twice the
    distance of the worse of the two: 4 * rounding.
    """

    def __init__(
        self, stock: PreTrainedModel, patched: PreTrainedModel, sequences: Tensor, prompt_mask: Tensor
    ) -> None:
        rows, columns = sequences.shape
        prompt_mask = prompt_mask.repeat_interleave(rows // len(prompt_mask), dim=0)
        self.sequences, self.prompt_columns = sequences, prompt_mask.shape[1]
        self.mask = torch.cat([prompt_mask, prompt_mask.new_ones(rows, columns - self.prompt_columns)], dim=1)
        inputs = (sequences, self.mask, positions_of(prompt_mask, columns - self.prompt_columns))
        self.exact = logits_of(copy.deepcopy(stock).float(), *inputs)
        self.rounding = self.distance(logits_of(stock, *inputs))
        paged = logits_of(patched, *inputs, split=self.prompt_columns, cache=PagedCache(patched.config))
        self.error = self.distance(paged)

    def distance(self, logits: Tensor) -> float:
        """Over the tokens, and over the column that the first new token is drawn from, padding or not."""
        counted = self.mask.bool()
        counted[:, self.prompt_columns - 1] = True
        return float((logits - self.exact).abs().amax(-1)[counted].max())

    def assert_rounds_as_well_as_stock(self) -> None:
        assert 0 < self.rounding < 1, "the model is too chaotic to tell rounding from a defect"
        assert self.error <= 2 * self.rounding

    def assert_near_ties(self, others: Tensor, noise: Tensor | None = None) -> None:
        """Where a row of `others` first leaves the audited sequences, the two tokens are nearly equally good.

        noise [steps, B, V]: what was added to the logits before the largest was taken.
        """
        for row, (ours, theirs) in enumerate(zip(others.tolist(), self.sequences.tolist(), strict=True)):
            column = next((c for c, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
            if column is None:
                continue
            scores = self.exact[row, column - 1]
            if noise is not None:
                scores = scores + noise[column - self.prompt_columns, row]
            margin = float((scores[ours[column]] - scores[theirs[column]]).abs())
            assert margin <= 4 * self.rounding, f"row {row}, column {column}: {margin} against {self.rounding}"

    def mean_log_probabilities(self) -> Tensor:
        """Of the generated tokens of each row, [B]: what beam search maximizes."""
        columns = slice(self.prompt_columns - 1, -1)
        chosen = self.sequences[:, self.prompt_columns :].unsqueeze(-1)
        return self.exact[:, columns].log_softmax(-1).gather(-1, chosen).squeeze(-1).mean(-1)


def sampling_noise(seed: int, steps: int, rows: int, vocabulary: int) -> Tensor:
    """The noise of multinomial sampling: argmax(p / E) with E exponential is argmax(logits - log E)."""
    torch.manual_seed(seed)
    return torch.stack([-torch.empty(rows, vocabulary).exponential_().log() for _ in range(steps)])

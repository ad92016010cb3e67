"""How much is measured. Quick runs take fewer repetitions and lengths, never another kind of model."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run.

    model: a name in models.MODELS, or a path or name that from_pretrained takes; layers: cut a named model to so many.
    setups: names of setups to take beside stock; none: all that work here.
    context: tokens before the first generated one; new_tokens: of a whole generate() at batch 1.
    batch_tokens: of one that starts from a filled cache; naive_tokens: of the steps of the ladder without a KV cache.
    long_factor, long_batches: of the decode steps with many keys and values, after so many contexts.
    widths: rows whose cost is compared with that of one.
    attention_factors: contexts in the prompts whose attention memory is measured.
    requests, mean_length, max_length: of the simulated requests that block waste is measured on, in tokens.
    text, quality_tokens: a file whose first tokens perplexity is measured on; None: the shipped model's held-out text.
    """

    model: str = "bench-1b"
    layers: int | None = None
    setups: tuple[str, ...] = ()
    quick: bool = False
    rounds: int = 3
    batches: tuple[int, ...] = (1, 4, 16, 32)
    context: int = 512
    new_tokens: int = 32
    batch_tokens: int = 9
    long_factor: int = 16
    long_batches: tuple[int, ...] = (1, 8)
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    naive_tokens: int = 1
    attention_factors: tuple[int, ...] = (4, 16, 64)
    requests: int = 2000
    mean_length: int = 500
    max_length: int = 2048
    text: str | None = None
    quality_tokens: int = 8192
    seed: int = 0

    @property
    def long_context(self) -> int:
        return self.long_factor * self.context

    @property
    def attention_lengths(self) -> tuple[int, ...]:
        return tuple(factor * self.context for factor in self.attention_factors)

    def quicker(self) -> Settings:
        return replace(
            self,
            quick=True,
            rounds=2,
            batches=self.batches[::2],
            new_tokens=16,
            batch_tokens=5,
            widths=self.widths[::3],
            long_factor=self.long_factor // 4,
            attention_factors=self.attention_factors[:2],
            requests=500,
            quality_tokens=self.quality_tokens // 8,
        )

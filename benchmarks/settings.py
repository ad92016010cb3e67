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
    long_context, long_batches: of the decode steps with many keys and values.
    widths: rows whose cost is compared with that of one.
    attention_lengths: tokens of the prompts whose attention memory is measured.
    requests, mean_length, max_length: of the simulated requests that block waste is measured on, in tokens.
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
    long_context: int = 8192
    long_batches: tuple[int, ...] = (1, 8)
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    naive_tokens: int = 1
    attention_lengths: tuple[int, ...] = (2048, 8192, 32768)
    requests: int = 2000
    mean_length: int = 500
    max_length: int = 2048
    seed: int = 0

    def quicker(self) -> Settings:
        return replace(
            self,
            quick=True,
            rounds=2,
            batches=self.batches[::2],
            new_tokens=16,
            batch_tokens=5,
            widths=self.widths[::3],
            long_context=self.long_context // 4,
            attention_lengths=self.attention_lengths[:2],
            requests=500,
        )

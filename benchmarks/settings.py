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
    serve_requests: of the batching topic, for each mean output length in serve_means; serve_many: with the least of
        them (0: not measured); serve_prompts: fewest and most tokens of their prompts; serve_rounds: repetitions.
    serve_choices: (tokens of a pass, most requests at once) that stock's generate_batch is tried with.
    latency_requests: of each load in latency_loads, which are shares of a measured capacity.
    latency_budgets: most tokens of a pass.
    samples: of one prompt; shared_requests: that begin with the same `context` tokens, then shared_own of their own,
        then shared_new_tokens new ones.
    draft_prompt, draft_new_tokens, draft_batches, draft_acceptances, draft_counts, draft_rounds: of the oracle's
        drafts; nothing_batches, nothing_rounds: where none is accepted.
    student_layers: of the target, that students begin with; none: half of them. student_seeds, student_steps,
        student_batch, student_length, student_rate: of their training; ablation_steps: of each in the ablation.

    draft_steps, draft_rows, draft_length, draft_rate: of the training of a draft, on as many seeds; draft_measured:
        tokens that its acceptance is measured on; draft_prompts: that are continued with it.
    distill_vocabularies, distill_contexts: classes of the heads whose distillation is measured, and with how many
        contexts of tokens each; distill_width: of the hidden states.
    target, draft: checkpoints of the drafters topic. text_prompts: of text_prompt tokens of `text`, for each kind,
        with text_new_tokens after each, at text_temperatures, text_rounds times.
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
    serve_requests: int = 32
    serve_many: int = 128
    serve_means: tuple[int, ...] = (16, 32)
    serve_prompts: tuple[int, int] = (16, 128)
    serve_choices: tuple[tuple[int, int | None], ...] = ((256, None), (128, None), (256, 16))
    serve_rounds: int = 1
    latency_requests: int = 24
    latency_loads: tuple[float, ...] = (0.4, 0.8)
    latency_budgets: tuple[int, ...] = (64, 256, 1024)
    samples: int = 8
    shared_requests: int = 16
    shared_own: int = 32
    shared_new_tokens: int = 16
    draft_prompt: int = 32
    draft_new_tokens: int = 64
    draft_batches: tuple[int, ...] = (1, 4)
    draft_acceptances: tuple[float, ...] = (0.0, 0.5, 0.7, 0.8, 0.9, 1.0)
    draft_counts: tuple[int, ...] = (3, 7)
    draft_rounds: int = 2
    nothing_batches: tuple[int, ...] = (1, 4, 16)
    nothing_rounds: int = 3
    target: str | None = None
    draft: str | None = None
    text_prompts: int = 2
    text_prompt: int = 384
    text_new_tokens: int = 96
    text_temperatures: tuple[float, ...] = (0.0, 1.0)
    text_rounds: int = 2
    student_layers: tuple[int, ...] = ()
    student_seeds: tuple[int, ...] = (0, 1, 2)
    student_steps: int = 1500
    student_batch: int = 4
    student_length: int = 256
    student_rate: float = 2e-3
    ablation_steps: int = 100
    draft_steps: int = 300
    draft_rows: int = 8
    draft_length: int = 128
    draft_rate: float = 1e-3
    draft_measured: int = 2048
    draft_prompts: int = 4
    distill_vocabularies: tuple[int, ...] = (32_000, 151_936)
    distill_contexts: tuple[int, ...] = (4, 2)
    distill_width: int = 256
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
            serve_requests=self.serve_requests // 4,
            serve_many=0,
            serve_means=tuple(mean // 4 for mean in self.serve_means),
            serve_choices=self.serve_choices[:2],
            latency_requests=self.latency_requests // 3,
            latency_loads=self.latency_loads[:1],
            samples=self.samples // 2,
            shared_requests=self.shared_requests // 4,
            shared_new_tokens=self.shared_new_tokens // 4,
            draft_new_tokens=self.draft_new_tokens // 4,
            draft_acceptances=self.draft_acceptances[::3],
            draft_counts=self.draft_counts[:1],
            draft_rounds=1,
            nothing_batches=self.nothing_batches[:2],
            nothing_rounds=1,
            text_prompts=1,
            text_new_tokens=self.text_new_tokens // 4,
            text_temperatures=self.text_temperatures[:1],
            text_rounds=1,
            student_seeds=self.student_seeds[:1],
            student_steps=self.student_steps // 500,
            student_batch=self.student_batch // 2,
            student_length=self.student_length // 8,
            draft_steps=self.draft_steps // 150,
            draft_rows=self.draft_rows // 4,
            draft_measured=self.draft_measured // 8,
            draft_prompts=self.draft_prompts // 2,
            ablation_steps=self.ablation_steps // 50,
            distill_vocabularies=self.distill_vocabularies[:1],
            distill_contexts=self.distill_contexts[:1],
            quality_tokens=self.quality_tokens // 8,
        )

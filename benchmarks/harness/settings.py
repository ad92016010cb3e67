"""How much is measured. Quick runs take fewer repetitions and lengths, never another kind of model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Waste:
    """The simulated requests that the waste of blocks is measured on. Lengths are in tokens."""

    requests: int = 2000
    mean_length: int = 500
    max_length: int = 2048

    def quicker(self) -> Waste:
        return replace(self, requests=500)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The batching topic.

    requests: for each mean output length in means; many: with the least of them (0: not measured).
    prompts: fewest and most tokens of a prompt. rounds: repetitions.
    choices: (tokens of a pass, most requests at once) that stock's generate_batch is tried with.
    """

    requests: int = 32
    many: int = 128
    means: tuple[int, ...] = (16, 32)
    prompts: tuple[int, int] = (16, 128)
    choices: tuple[tuple[int, int | None], ...] = ((256, None), (128, None), (256, 16))
    rounds: int = 1

    def quicker(self) -> Serving:
        means = tuple(mean // 4 for mean in self.means)
        return replace(self, requests=self.requests // 4, many=0, means=means, choices=self.choices[:2])


@dataclass(frozen=True, kw_only=True)
class Latency:
    """requests: of each load; loads: shares of a measured capacity; budgets: most tokens of a pass."""

    requests: int = 24
    loads: tuple[float, ...] = (0.4, 0.8)
    budgets: tuple[int, ...] = (64, 256, 1024)

    def quicker(self) -> Latency:
        return replace(self, requests=self.requests // 3, loads=self.loads[:1])


@dataclass(frozen=True, kw_only=True)
class Shared:
    """samples: of one prompt; requests: that begin with the same `context` tokens, then `own`, then new_tokens."""

    samples: int = 8
    requests: int = 16
    own: int = 32
    new_tokens: int = 16

    def quicker(self) -> Shared:
        return replace(self, samples=self.samples // 2, requests=self.requests // 4, new_tokens=self.new_tokens // 4)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """loaded: adapters of this rank, at_once: requests, each with one of its own, of `prompt` tokens."""

    loaded: int = 64
    at_once: int = 16
    rank: int = 16
    prompt: int = 16
    new_tokens: int = 48

    def quicker(self) -> Adapters:
        return replace(self, loaded=4, at_once=2, rank=2, new_tokens=self.new_tokens // 8)


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Drafts of a known acceptance; nothing_batches, nothing_rounds: where none is accepted."""

    prompt: int = 32
    new_tokens: int = 64
    batches: tuple[int, ...] = (1, 4)
    acceptances: tuple[float, ...] = (0.0, 0.5, 0.7, 0.8, 0.9, 1.0)
    counts: tuple[int, ...] = (3, 7)
    rounds: int = 2
    nothing_batches: tuple[int, ...] = (1, 4, 16)
    nothing_rounds: int = 3

    def quicker(self) -> Oracle:
        return replace(
            self,
            new_tokens=self.new_tokens // 4,
            acceptances=self.acceptances[::3],
            counts=self.counts[:1],
            rounds=1,
            nothing_batches=self.nothing_batches[:2],
            nothing_rounds=1,
        )


@dataclass(frozen=True, kw_only=True)
class Drafters:
    """target, draft: checkpoints. prompts: of `prompt` tokens of a text, for each kind, with new_tokens after each."""

    target: str | None = None
    draft: str | None = None
    prompts: int = 2
    prompt: int = 384
    new_tokens: int = 96
    temperatures: tuple[float, ...] = (0.0, 1.0)
    rounds: int = 5

    def quicker(self) -> Drafters:
        return replace(self, prompts=1, new_tokens=self.new_tokens // 4, temperatures=self.temperatures[:1], rounds=1)


@dataclass(frozen=True, kw_only=True)
class Students:
    """layers: of the target, that students begin with; none: half of them. ablation_steps: of each in the ablation."""

    layers: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 1500
    batch: int = 4
    length: int = 256
    rate: float = 2e-3
    ablation_steps: int = 100

    def quicker(self) -> Students:
        return replace(
            self,
            seeds=self.seeds[:1],
            steps=self.steps // 500,
            batch=self.batch // 2,
            length=self.length // 8,
            ablation_steps=self.ablation_steps // 50,
        )


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """The training of a draft. head: the folder of one that was trained before, which is then measured.

    measured: tokens that its acceptance is measured on; prompts: that are continued with it, or as many as the batch;
    together: batches in which they are.

    Of the replay on the model of the run: batches; acceptances by position of a head that was trained for 15 minutes
    of one core on stdlib-14m, and the part of the rest that siblings have, an estimate from held-out text; how often
    the first sibling of an oracle's trees is right, and their size (3.2 tokens a pass). each_word: the head knows one
    of so many tokens.
    """

    head: str | None = None
    steps: int = 300
    rows: int = 8
    length: int = 128
    rate: float = 1e-3
    seeds: tuple[int, ...] = (0, 1)
    measured: int = 2048
    prompts: int = 4
    together: tuple[int, ...] = (1, 4, 32)
    batches: tuple[int, ...] = (1, 4)
    acceptances: tuple[float, ...] = (0.65, 0.63, 0.61)
    siblings: float = 0.5
    oracle: float = 0.74
    depth: int = 5
    nodes: int = 8
    each_word: int = 4

    def quicker(self) -> Drafts:
        return replace(
            self,
            steps=self.steps // 150,
            rows=self.rows // 4,
            seeds=self.seeds[:1],
            measured=self.measured // 8,
            prompts=self.prompts // 2,
            together=self.together[:2],
            batches=self.batches[:1],
        )


@dataclass(frozen=True, kw_only=True)
class Distill:
    """vocabularies, contexts: classes of the heads, and how many contexts of tokens each; width: of hidden states."""

    vocabularies: tuple[int, ...] = (32_000, 151_936)
    contexts: tuple[int, ...] = (4, 2)
    width: int = 256

    def quicker(self) -> Distill:
        return replace(self, vocabularies=self.vocabularies[:1], contexts=self.contexts[:1])


@dataclass(frozen=True, kw_only=True)
class Methods:
    """groups: sizes of groups of INT4; lopsided: those that get zero points too. windows: of calibration data.

    fewer: bits below 4, in groups of 32 with zero points. budgets: average bits, in these groups too. beside:
    checkpoints of other programs to score too.
    """

    groups: tuple[int, ...] = (128, 64, 32)
    lopsided: tuple[int, ...] = (128, 32)
    fewer: tuple[int, ...] = (3, 2)
    budgets: tuple[float, ...] = (5.28, 5.64)
    beside: tuple[str, ...] = ()
    windows: int = 32
    length: int = 512

    def quicker(self) -> Methods:
        return replace(
            self,
            groups=self.groups[-1:],
            lopsided=(),
            fewer=(),
            budgets=(),
            windows=self.windows // 8,
            length=self.length // 2,
        )


@dataclass(frozen=True, kw_only=True)
class ScaleOut:
    """rows: prompts, with new_tokens after each; batch: rows that an actor of Ray answers together.

    small_factor: times as many rows for the small model that is shipped.
    """

    rows: int = 128
    small_factor: int = 8
    new_tokens: int = 32
    batch: int = 16

    def quicker(self) -> ScaleOut:
        return replace(
            self, rows=self.rows // 16, small_factor=1, new_tokens=self.new_tokens // 4, batch=self.batch // 8
        )


@dataclass(frozen=True, kw_only=True)
class NeverSlower:
    """cases: models and their dtypes. batches: of decode steps after `context` tokens; prompts: lengths at batch 1.

    towers: names of vision towers in float32; images: how many they see at once.
    tokens: of a generate() whose steps are timed.
    turn: least seconds of each turn of a candidate, which repeats what takes less.
    """

    cases: tuple[tuple[str, str], ...] = (
        ("bench-qwen2", "bfloat16"), ("bench-qwen2", "float32"), ("bench-gpt2", "bfloat16"),
        ("bench-gpt2", "float32"), ("tiny", "bfloat16"), ("tiny", "float32"), ("bench-14m", "bfloat16"),
        ("bench-14m", "float32"), ("bench-14m", "float16"), ("bench-qwen3-moe", "bfloat16"),
        ("bench-gpt-oss", "bfloat16"),
    )  # fmt: skip
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    prompts: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    towers: tuple[str, ...] = ("ViT base", "CLIP base", "SigLIP base", "DINOv2 base")
    images: tuple[int, ...] = (1, 8, 32)
    context: int = 256
    tokens: int = 5
    turn: float = 0.1

    def quicker(self) -> NeverSlower:
        return replace(
            self,
            batches=self.batches[::2],
            prompts=self.prompts[1:4:2],
            context=self.context // 4,
            towers=self.towers[:1],
            images=self.images[:2],
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run: what several topics read, and a group for each topic that has settings of its own.

    model: a name in models.MODELS, or a path or name that from_pretrained takes; layers: cut a named model to so many.
    dtype: of the model's weights. device: where it is, "cpu" or "cuda".
    setups: names of setups to take beside stock; none: all that work here.
    context: tokens before the first generated one; new_tokens: of a whole generate() at batch 1.
    prompt: tokens of a prefill; None: as many as context.
    batch_tokens: of one that starts from a filled cache, or from a prompt if `prompted`; naive_tokens: of the steps of
        the ladder without a KV cache.
    long_factor, long_batches: of the decode steps with many keys and values, after so many contexts.
    widths: rows whose cost is compared with that of one.
    attention_factors: contexts in the prompts whose attention memory is measured.
    text, quality_tokens: a file whose first tokens perplexity is measured on; None: the shipped model's held-out text.
    kv_contexts: in which it is measured for each dtype of keys and values, where the model has so many positions.
    """

    model: str = "bench-1b"
    layers: int | None = None
    dtype: str = "bfloat16"
    setups: tuple[str, ...] = ()
    quick: bool = False
    rounds: int = 3
    batches: tuple[int, ...] = (1, 4, 16, 32)
    context: int = 512
    prompt: int | None = None
    new_tokens: int = 32
    batch_tokens: int = 9
    long_factor: int = 16
    long_batches: tuple[int, ...] = (1, 8)
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    naive_tokens: int = 1
    attention_factors: tuple[int, ...] = (4, 16, 64)
    text: str | None = None
    quality_tokens: int = 8192
    kv_contexts: tuple[int, ...] = (2048, 4096, 8192)
    device: str = "cpu"
    prompted: bool = False
    seed: int = 0
    waste: Waste = field(default_factory=Waste)
    serving: Serving = field(default_factory=Serving)
    latency: Latency = field(default_factory=Latency)
    shared: Shared = field(default_factory=Shared)
    adapters: Adapters = field(default_factory=Adapters)
    oracle: Oracle = field(default_factory=Oracle)
    drafters: Drafters = field(default_factory=Drafters)
    students: Students = field(default_factory=Students)
    drafts: Drafts = field(default_factory=Drafts)
    distill: Distill = field(default_factory=Distill)
    methods: Methods = field(default_factory=Methods)
    scale_out: ScaleOut = field(default_factory=ScaleOut)
    never_slower: NeverSlower = field(default_factory=NeverSlower)

    @property
    def long_context(self) -> int:
        return self.long_factor * self.context

    @property
    def attention_lengths(self) -> tuple[int, ...]:
        return tuple(factor * self.context for factor in self.attention_factors)

    def on_gpu(self) -> Settings:
        """Longer prompts and more requests, which a GPU is for, and less of what takes it longest."""
        serving = replace(
            self.serving, requests=64, many=0, means=(64,), prompts=(100, 1024), choices=((2048, None), (8192, None))
        )
        oracle = replace(self.oracle.quicker(), new_tokens=self.oracle.new_tokens)
        return replace(
            self, device="cuda", prompted=True, batches=(1, 8, 32), prompt=8192, batch_tokens=33, new_tokens=128,
            naive_tokens=4, rounds=2, serving=serving, oracle=oracle,
        )  # fmt: skip

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
            quality_tokens=self.quality_tokens // 8,
            kv_contexts=self.kv_contexts[:1],
            waste=self.waste.quicker(),
            serving=self.serving.quicker(),
            latency=self.latency.quicker(),
            shared=self.shared.quicker(),
            adapters=self.adapters.quicker(),
            oracle=self.oracle.quicker(),
            drafters=self.drafters.quicker(),
            students=self.students.quicker(),
            drafts=self.drafts.quicker(),
            distill=self.distill.quicker(),
            methods=self.methods.quicker(),
            scale_out=self.scale_out.quicker(),
            never_slower=self.never_slower.quicker(),
        )

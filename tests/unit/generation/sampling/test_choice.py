"""What sequences gain from a pass: as without drafts, together as alone, and one's error is nobody else's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_accel.errors import HfAccelError
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sampling.choice import Chosen, choose_tokens, processed
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sampling.token_prefix import Prefix
from hf_accel.generation.sequence import Draft, Sequence
from hf_accel.generation.speculation.verifiers import VERIFIERS, Place, TokenVerifier, verifier
from hf_accel.kernels import cpu

from ..asking import request_sampling
from ..chi_square import chi_square, critical

V = 11
NAMES = sorted(VERIFIERS)
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.3}


def model(tokens: list[int]) -> Tensor:
    """Logits after some tokens: a function of the last three."""
    seed = sum(13**j * token for j, token in enumerate(tokens[-3:]))
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 2


def rows(sequences: list[Sequence], drafts: list[Draft]) -> Tensor:
    pairs = zip(sequences, drafts, strict=True)
    return torch.stack([model(s.tokens + d.tokens[:j]) for s, d in pairs for j in range(len(d) + 1)])


def sequence(params: Sampling, seed: int = 0) -> Sequence:
    return Sequence([1, 2, 1], RequestSettings(1000, params), seed=seed)


def generated(params: Sampling, name: str, draft: Callable[[Sequence], Draft], count: int = 30) -> list[int]:
    one = sequence(params, seed=5)
    while one.num_new < count:
        drafts = [draft(one)]
        (chosen,) = choose_tokens(rows([one], drafts), [one], drafts, verifier(name))
        assert isinstance(chosen, Chosen)
        assert chosen.num_accepted == len(chosen.tokens) - 1
        assert chosen.tokens[:-1] == drafts[0].tokens[: chosen.num_accepted]
        one.tokens += chosen.tokens
    return one.tokens[: 3 + count]


def some_right(one: Sequence) -> Draft:
    """Looked up: tokens that are often what comes."""
    tokens: list[int] = []
    for _ in range(3):
        tokens.append(int(model(one.tokens + tokens).argmax()))
    return Draft(tokens)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("penalties", [{}, PENALTIES, {"min_new_tokens": 20, "stop_token_ids": (3, 4)}])
def test_drafts_that_were_not_drawn_change_nothing(name: str, temperature: float, penalties: dict[str, float]) -> None:
    """So penalties at draft positions are those of the sequential run, and the same seed gives the same tokens."""
    params = request_sampling(temperature=temperature, top_p=0.95, **penalties)
    plain = generated(params, name, lambda one: Draft())
    assert generated(params, name, some_right) == plain
    assert generated(params, name, lambda one: Draft([0, 0])) == plain
    assert generated(params, name, lambda one: Draft(plain[len(one.tokens) :][:4])) == plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kernel", [True, False])
def test_greedy_takes_the_largest_and_of_equals_the_first(
    dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(cpu, "refusal", lambda: "not here")
    logits = torch.tensor([[0, 5, 5], [7, 1, 7], [0, 0, 1], [2, 2, 2]], dtype=dtype)
    drafts = [Draft([1, 2]), Draft()]
    sequences = [sequence(Sampling()) for _ in drafts]
    assert choose_tokens(logits, sequences, drafts, TokenVerifier()) == [Chosen([1, 0], 1), Chosen([0], 0)]


@pytest.mark.parametrize("name", NAMES)
def test_sequences_are_chosen_for_together_as_alone(name: str) -> None:
    kinds = [
        Sampling(),
        request_sampling(temperature=0.7),
        request_sampling(temperature=0.7, logprobs=2),
        request_sampling(repetition_penalty=1.3),
        request_sampling(temperature=1.3, top_k=4, **PENALTIES),
    ]
    sequences = [sequence(params, seed) for seed, params in enumerate(kinds * 3)]
    laws = [model([seed]).softmax(0).expand(2, -1) for seed in range(15)]
    drafts = [[Draft(), Draft([1, 2]), Draft([3, 1], laws[seed])][(seed // 5 + seed) % 3] for seed in range(15)]
    together = choose_tokens(rows(sequences, drafts), sequences, drafts, verifier(name))
    for one, draft, chosen in zip(sequences, drafts, together, strict=True):
        assert choose_tokens(rows([one], [draft]), [one], [draft], verifier(name)) == [chosen]


def test_a_processor_sees_each_prefix_once() -> None:
    seen: list[list[int]] = []

    def counting(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.extend(input_ids.tolist())
        return scores

    params = request_sampling(temperature=1.0, processors=(counting,))
    sequences = [sequence(params), Sequence([9], RequestSettings(5, params))]
    drafts = [Draft([4, 5]), Draft()]
    choose_tokens(rows(sequences, drafts), sequences, drafts, TokenVerifier())
    assert seen == [[1, 2, 1], [1, 2, 1, 4], [1, 2, 1, 4, 5], [9]]


class Spiteful:
    """Fails for the sequence that begins with 9, in one way or another."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids[0, 0] != 9:
            return scores
        if self.how == "raises":
            raise KeyError("spite")
        return {"shape": scores[0], "nan": scores * torch.nan, "nothing": scores.fill_(-torch.inf)}[self.how]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "spite"),
        ("shape", "returned"),
        ("nan", "position 1.*NaN or are all -inf"),
        ("nothing", "position 1.*NaN or are all -inf"),
    ],
)
def test_an_error_is_its_own_sequences_alone(temperature: float, how: str, words: str) -> None:
    params = request_sampling(temperature=temperature, processors=(Spiteful(how),), logprobs=1)
    sequences = [sequence(params, 1), Sequence([9], RequestSettings(5, params)), sequence(params, 2)]
    drafts = [Draft([4]), Draft([1, 2]), Draft()]
    first, failed, last = choose_tokens(rows(sequences, drafts), sequences, drafts, TokenVerifier())
    others = [sequences[0], sequences[2]]
    alone = choose_tokens(rows(others, [drafts[0], drafts[2]]), others, [drafts[0], drafts[2]], TokenVerifier())
    assert [first, last] == alone
    with pytest.raises((KeyError, HfAccelError), match=words):
        raise failed


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["raises", "nothing"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prefix_that_nobody_reaches_may_fail(name: str, how: str, temperature: float) -> None:
    """A grammar rules token 4 out, and has no answer to what would come after it."""

    def grammar(input_ids: Tensor, scores: Tensor) -> Tensor:
        if 4 in input_ids[0]:
            if how == "raises":
                raise ValueError("4 is not in the language")
            return scores.fill_(-torch.inf)
        scores[:, 4] = -torch.inf
        return scores

    params = request_sampling(temperature=temperature, processors=(grammar,))
    law = torch.full((2, V), 1 / V)
    for draft in (Draft([4, 1]), Draft([1, 4]), Draft([4, 1], law), Draft([1, 4], law)):
        sequences = [sequence(params, seed) for seed in range(50)]
        drafts = [draft] * 50
        for chosen in choose_tokens(rows(sequences, drafts), sequences, drafts, verifier(name)):
            assert isinstance(chosen, Chosen)
            assert 4 not in chosen.tokens


def test_logits_that_are_not_numbers() -> None:
    settings = RequestSettings(5, request_sampling(temperature=1.0))
    one, other = (Sequence([token], settings) for token in (1, 2))
    logits = torch.stack([model([1]), model([2]) * torch.nan])
    fine, failed = choose_tokens(logits, [one, other], [Draft(), Draft()], TokenVerifier())
    assert isinstance(fine, Chosen)
    assert isinstance(failed, HfAccelError)


def test_wrong_number_of_rows() -> None:
    with pytest.raises(HfAccelError, match=r"3 rows of logits .* need 2"):
        choose_tokens(torch.zeros(3, V), [sequence(Sampling())], [Draft([1])], TokenVerifier())


def test_no_sequence_at_all() -> None:
    assert choose_tokens(torch.zeros(0, V), [], [], TokenVerifier()) == []


def test_logprobs_are_the_models_own() -> None:
    params = request_sampling(logit_bias={7: 100.0}, logprobs=2)
    one, draft = sequence(params), Draft([7])
    (chosen,) = choose_tokens(rows([one], [draft]), [one], [draft], TokenVerifier())
    assert isinstance(chosen, Chosen) and chosen.tokens == [7, 7] and chosen.logprobs is not None
    for report, tokens in zip(chosen.logprobs, ([1, 2, 1], [1, 2, 1, 7]), strict=True):
        logits = model(tokens).tolist()
        total = math.log(sum(map(math.exp, logits)))
        most = sorted(range(V), key=lambda token: -logits[token])[:2]
        assert report.token == 7
        assert report.logprob == pytest.approx(logits[7] - total, abs=1e-5)
        assert [token for token, _ in report.top] == most
        assert [value for _, value in report.top] == pytest.approx([logits[t] - total for t in most], abs=1e-5)


def drawing(probabilities: Tensor, sequences: list[Sequence]) -> list[int]:
    """Draws by itself where nothing is drafted."""
    assert probabilities.shape == (len(sequences), V)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(len(sequences)))
    return [seq.seed for seq in sequences]


def test_a_sampling_may_draw_undrafted_tokens_itself() -> None:
    steps = request_sampling(temperature=1.0, top_k=3).steps
    own = Sampling(steps, greedy=False, draw=drawing)
    sequences = [sequence(own, seed) for seed in range(6)]
    law = torch.full((1, V), 1 / V)
    drafts = [Draft(), Draft([1]), Draft(), Draft([2], law), Draft(), Draft()]
    results = choose_tokens(rows(sequences, drafts), sequences, drafts, TokenVerifier())
    verified = [sequence(request_sampling(temperature=1.0, top_k=3), seed) for seed in range(6)]
    as_usual = choose_tokens(rows(verified, drafts), verified, drafts, TokenVerifier())
    for index, draft in enumerate(drafts):
        assert results[index] == (as_usual[index] if len(draft) else Chosen([index], 0))


def test_a_draw_that_raises_is_an_error_of_its_sequences() -> None:
    def failing(probabilities: Tensor, sequences: list[Sequence]) -> list[int]:
        raise RuntimeError("no numbers left")

    sequences = [sequence(Sampling(greedy=False, draw=failing)), sequence(Sampling())]
    failed, fine = choose_tokens(rows(sequences, [Draft()] * 2), sequences, [Draft()] * 2, TokenVerifier())
    assert isinstance(failed, RuntimeError) and isinstance(fine, Chosen)


def test_drafters_get_the_law_that_the_model_would_be_given() -> None:
    kinds = [
        request_sampling(temperature=0.6, top_k=4, **PENALTIES),
        request_sampling(repetition_penalty=1.5),
    ]
    asked = [(sequence(kinds[n % 2]), [5, 1][: n // 2]) for n in range(6)]
    logits = torch.stack([model(seq.tokens + drafted) for seq, drafted in asked])
    laws = processed(logits, asked)
    for row, (seq, drafted) in enumerate(asked):
        scores = seq.settings.sampling.process(logits[row : row + 1], [Prefix(seq.tokens + drafted, 3)])
        expected = torch.eye(V)[scores.argmax(-1)] if seq.settings.sampling.greedy else scores.softmax(-1)
        assert torch.equal(laws[row : row + 1], expected)


def test_a_drafter_gets_some_law_even_where_processing_fails() -> None:
    params = request_sampling(temperature=1.0, processors=(Spiteful("raises"),))
    asked = [(sequence(params), []), (Sequence([9], RequestSettings(5, params)), [])]
    laws = processed(torch.zeros(2, V), asked)
    torch.testing.assert_close(laws.sum(-1), torch.ones(2))


@pytest.mark.parametrize("name", NAMES)
def test_law_of_two_tokens_under_processing(name: str) -> None:
    """3000 sequences with drafts drawn from a rough law, against the product of what process() says."""
    count, judge = 3000, verifier(name)
    params = request_sampling(temperature=0.9, top_k=4, repetition_penalty=1.3)
    sequences = [sequence(params, seed) for seed in range(count)]
    q = [(model([1, 2, 1]) + torch.linspace(0, 1, V)).softmax(0)]
    first = judge.draw(q[0].expand(count, -1), [Place(seed, 3) for seed in range(count)])
    table = torch.stack([model([1, 2, 1, token]) for token in range(V)])
    rough = (table * 0.8).softmax(-1)
    second = judge.draw(rough[first], [Place(seed, 3).next() for seed in range(count)])
    drafts = [
        Draft([a, b], torch.stack([q[0], rough[a]])) for a, b in zip(first, second, strict=True)
    ]  # fmt: skip
    logits = torch.stack(
        [model([1, 2, 1]).expand(count, -1), table[first], torch.stack([model([2, 1, 4])]).expand(count, -1)], dim=1
    ).view(-1, V)
    results = choose_tokens(logits, sequences, drafts, judge)
    observed = [0.0] * V**2
    left_over = []
    for seed, chosen in enumerate(results):
        assert isinstance(chosen, Chosen)
        if len(chosen.tokens) > 1:
            observed[V * chosen.tokens[0] + chosen.tokens[1]] += 1
        else:
            left_over.append((seed, chosen.tokens[0]))
    follow = [Sequence([1, 2, 1, token], RequestSettings(9, params), seed=seed) for seed, token in left_over]
    for seq in follow:
        seq.num_prompt = 3
    for seq, chosen in zip(
        follow,
        choose_tokens(table[[token for _, token in left_over]], follow, [Draft()] * len(follow), judge),
        strict=True,
    ):
        assert isinstance(chosen, Chosen)
        observed[V * seq.tokens[3] + chosen.tokens[0]] += 1
    one = params.process(model([1, 2, 1])[None], [Prefix([1, 2, 1], 3)]).softmax(-1)[0]
    expected = [0.0] * V**2
    for a, b in itertools.product(range(V), repeat=2):
        law = params.process(table[a : a + 1], [Prefix([1, 2, 1, a], 3)]).softmax(-1)[0]
        expected[V * a + b] = count * float(one[a] * law[b])
    assert all(seen == 0 for seen, e in zip(observed, expected, strict=True) if e == 0)
    large = [n for n, e in enumerate(expected) if e >= 5]
    assert sum(expected[n] for n in large) > 0.95 * count
    statistic = chi_square([observed[n] for n in large], [expected[n] for n in large])
    assert statistic < critical(len(large) - 1)

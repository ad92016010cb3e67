from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from hf_accel.verify import Certificate, Cost, Verdict

DIFFERENCE: dict[str, Any] = {
    "identical": False,
    "tokens": 3,
    "position": 3,
    "reference_token": 123456,
    "model_token": 65432,
    "reference_logits": (-12.34567, 10.0),
    "model_logits": (9.5, -10.54321),
    "margin": 0.123456,
    "distance": 0.0123456,
    "rounding": 0.2,
    "arbiter": "float32",
}
COST = Cost(
    reference="the unpatched model",
    text="the text given",
    tokens=2048,
    reference_loss=math.log(12.31),
    loss=math.log(12.33),
    error=0.0012,
    kl=0.0009,
    same_top=0.989,
)


@pytest.mark.parametrize(
    ("margin", "distance", "explained"),
    [
        (0.0, 0.0, True),
        (0.1, 0.1, True),
        (0.11, 0.1, False),
        (0.0, 0.11, False),  # a near-tie is not enough where the model's logits are wrong
        (math.nan, 0.0, False),
        (0.0, math.nan, False),
        (None, None, False),
    ],
)
def test_explained(margin: float | None, distance: float | None, explained: bool) -> None:
    verdict = Verdict(identical=False, tokens=3, position=3, margin=margin, distance=distance, rounding=0.1)
    assert verdict.explained is explained


def test_words() -> None:
    verdicts = (
        Verdict(identical=True, tokens=32),
        Verdict(**DIFFERENCE),
        Verdict(**DIFFERENCE | {"margin": 0.3}),
        Verdict(identical=False, tokens=7),
    )
    certificate = Certificate("the quantized reference", verdicts, COST)
    assert str(certificate) == (
        "certificate: 1 of 4 prompts identical to the quantized reference, greedy\n"
        "  prompt 0: identical, 32 tokens\n"
        "  prompt 1: token 3 is 65432 instead of 123456, inside rounding\n"
        "    float32 logits -12.346 and 10, the model's 9.5 and -10.543\n"
        "    0.123 apart, the model's off by up to 0.0123; rounding accounts for 0.2\n"
        "  prompt 2: token 3 is 65432 instead of 123456, beyond rounding\n"
        "    float32 logits -12.346 and 10, the model's 9.5 and -10.543\n"
        "    0.3 apart, the model's off by up to 0.0123; rounding accounts for 0.2\n"
        "  prompt 3: identical for 7 tokens, where one of the two ends\n"
        "against float: perplexity 12.31 -> 12.33 (+0.16 %), KL 0.0009 nats a token, same top token 98.9 %\n"
        "  standard error 0.12 %, on 2,048 tokens: the text given\n"
        "  float: the unpatched model"
    )
    assert (certificate.exact, certificate.explained) == (False, False)


def test_no_cost_is_said() -> None:
    certificate = Certificate("the quantized reference", (Verdict(identical=True, tokens=1),), None, "there is none")
    assert str(certificate).splitlines()[-1] == "against float: not measured, there is none"


def test_lines_are_short() -> None:
    path = "/a/folder/whose/name/goes/on/and/on" * 5
    cost = dataclasses.replace(COST, reference=path)
    certificate = Certificate(path, (Verdict(**DIFFERENCE | {"margin": 1234567.0}),), cost, None)
    lines = str(certificate).splitlines()
    assert max(map(len, lines)) <= 100
    assert path in "".join(line.strip() for line in lines)


def test_to_dict_is_json() -> None:
    certificate = Certificate("r", (Verdict(**DIFFERENCE), Verdict(identical=True, tokens=2)), COST)
    read = json.loads(json.dumps(certificate.to_dict()))
    assert (read["reference"], read["exact"], read["explained"], read["no_cost"]) == ("r", False, True, None)
    assert read["verdicts"][0]["reference_logits"] == [-12.34567, 10.0]
    assert [v["explained"] for v in read["verdicts"]] == [True, True]
    assert read["cost"]["perplexity"] == pytest.approx(12.33)
    assert read["cost"]["reference_perplexity"] == pytest.approx(12.31)
    assert read["cost"]["change"] == pytest.approx(12.33 / 12.31 - 1)
    assert read["cost"]["kl"] == 0.0009


def test_a_hopeless_model_has_a_perplexity() -> None:
    assert math.isfinite(dataclasses.replace(COST, loss=1e6).perplexity)


@pytest.mark.parametrize("value", [Verdict(identical=True, tokens=1), COST, Certificate("r", ())])
def test_frozen(value: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.reference = "another"

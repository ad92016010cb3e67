"""What Prometheus reads: times of requests, and the Engine's own counts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .running import Running, serving, until

PROMPT = "x = 1\n" * 12


def read(running: Running) -> dict[str, float]:
    """All samples that have no labels but that of the model."""
    page = httpx.get(f"{running.root}/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=")
    samples = [sample for family in text_string_to_metric_families(page.text) for sample in family.samples]
    return {sample.name: sample.value for sample in samples if sample.labels == {"model": "tiny"}}


DRAFTS = {"drafter": "ngram", "num_draft": 3}


@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
def test_counts(speculative: dict[str, Any] | None) -> None:
    with serving(speculative=speculative) as running, running.client() as client:
        before = read(running)
        assert before["hf_accel_generated_tokens_total"] == before["hf_accel_request_seconds_count"] == 0
        for stream in (False, True):
            answer = client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=32, n=2, temperature=0, stream=stream
            )
            if stream:
                list(answer)
        until(running.is_idle)
        found, stats = read(running), running.stats
        assert found["hf_accel_generated_tokens_total"] == 4 * 32
        assert found["hf_accel_prompt_tokens_total"] == 2 * len(running.service.tokenizer(PROMPT)["input_ids"])
        assert found["hf_accel_time_to_first_token_seconds_count"] == 4
        assert found["hf_accel_time_between_tokens_seconds_count"] == 4 * 31
        assert found["hf_accel_request_seconds_count"] == 2
        assert found["hf_accel_time_between_tokens_seconds_sum"] <= 2 * found["hf_accel_request_seconds_sum"]
        assert found["hf_accel_choices_finished_total"] == 4
        assert found["hf_accel_prefix_hits_total"] == stats["prefix_hits"] > 0
        for gauge in ("choices_running", "choices_waiting", "blocks_used"):
            assert found[f"hf_accel_{gauge}"] == 0
        for name in ("drafted", "accepted"):
            expected = stats["speculation"].get(name, 0)
            assert found[f"hf_accel_{name}_tokens_total"] == expected and (expected > 0) == (speculative is not None)


def test_what_runs() -> None:
    with serving() as running, running.client() as client:
        stream = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=1500, n=3, temperature=0, stream=True
        )
        next(iter(stream))
        found = read(running)
        assert found["hf_accel_choices_running"] == 3 and found["hf_accel_blocks_used"] > 0
        stream.close()
        until(running.is_idle)
        found = read(running)
        assert found["hf_accel_choices_running"] == found["hf_accel_blocks_used"] == 0
        assert found["hf_accel_choices_cancelled_total"] == 3

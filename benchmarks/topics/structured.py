"""Structured output: schemas that are taken, answers that match them, what masks cost, and what forced tokens save.

The model is the one in examples/, at temperature 1: nearly all that it would say breaks a schema.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from typing import Any

import torch
from transformers import AutoTokenizer

import hf_accel
from hf_accel import UnsupportedError
from hf_accel.generation.hf.grammars import grammars_of
from hf_accel.generation.sampling.constraint import only_allowed

from ..harness.bench import Bench
from ..harness.schemas import keywords_of, schemas
from ..harness.tables import Table
from .small_model import SHIPPED

COUNT, MOST_TOKENS, AT_ONCE = 500, 400, 16
# An answer of which most is forced, as those of services are.
FIXED = {
    "type": "object",
    "properties": {
        "temperature in degrees Celsius": {"type": "integer", "minimum": -30, "maximum": 45},
        "the wind comes from": {"enum": ["north", "east", "south", "west"]},
        "probability of precipitation": {"type": "integer", "minimum": 0, "maximum": 100},
        "is there a warning in force": {"type": "boolean"},
    },
    "additionalProperties": False,
}
FIXED["required"] = list(FIXED["properties"])  # type: ignore[call-overload]


def asked(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def measure(bench: Bench) -> list[Table]:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = hf_accel.load(str(SHIPPED), weights=None, dtype=torch.float32)
    try:
        return [coverage(model, tokenizer), mask_costs(tokenizer), forced(model, tokenizer)]
    finally:
        hf_accel.unpatch(model)


def coverage(model: Any, tokenizer: Any, count: int = COUNT, seed: int = 0) -> Table:
    """Answer every schema once. Raises AssertionError for a finished answer that does not match."""
    import jsonschema  # what developers install; other topics run without it

    made = list(schemas(count, seed))
    refused: dict[int, str] = {}
    requests, times = {}, []
    with hf_accel.Engine(model, tokenizer=tokenizer, max_running=AT_ONCE) as engine:
        for number, schema in enumerate(made):
            begun = time.process_time()
            try:
                engine.constraint(**asked(schema))
            except UnsupportedError as error:
                refused[number] = str(error)
                continue
            times.append(time.process_time() - begun)
            requests[number] = engine.submit(
                "import re\n", max_new_tokens=MOST_TOKENS, temperature=1, top_k=0, seed=number, **asked(schema)
            )
        answers = {number: request.result() for number, request in requests.items()}
    finished = {number: answer for number, answer in answers.items() if answer.finish_reason == "stop"}
    for number, answer in finished.items():
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(made[number], format_checker=checker).validate(json.loads(answer.text or ""))
    counts = Counter(name for schema in made for name in keywords_of(schema))
    row = {
        "schemas": len(made), "refused": len(refused), "answers": len(answers), "finished": len(finished),
        "valid": len(finished), "tokens": sum(len(answer.tokens) for answer in answers.values()),
        "compile_ms": 1e3 * statistics.median(times), "compile_ms_most": 1e3 * max(times),
        "schemas_of_the_rarest_keyword": min(counts.values()),
    }  # fmt: skip
    reasons = "; ".join(f"{count} of them: {why}" for why, count in Counter(refused.values()).most_common())
    note = f"Keywords: {', '.join(sorted(counts))}. Refused: {reasons or 'none'}."
    return Table("Schemas of draft 2020-12, one answer each by a small model at temperature 1", [row], note)


def mask_costs(tokenizer: Any, vocabulary: int = 2**17) -> Table:
    """Time the masks of a step of 16 sequences: finding them, and applying them to scores of a large vocabulary."""
    grammars = grammars_of(tokenizer, [tokenizer.eos_token_id])
    constraints = [grammars.constraint("json", json.dumps(schema)) for schema in [FIXED] * AT_ONCE]
    text = json.dumps(dict.fromkeys(FIXED["properties"], 7))[:40]  # type: ignore[call-overload]
    tokens = tokenizer(text)["input_ids"]
    finding, scores = [], torch.randn(AT_ONCE, vocabulary)
    masks: list[bytes | None] = []
    for length in range(len(tokens)):
        begun = time.process_time()
        masks = [constraint.mask(tokens[:length]) for constraint in constraints]
        finding.append(time.process_time() - begun)
    applying, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # the time of a second one would be that of waiting, too
    for _ in range(20):
        begun = time.process_time()
        only_allowed(scores, masks)
        applying.append(time.process_time() - begun)
    torch.set_num_threads(threads)
    row = {
        "sequences": AT_ONCE, "finding_ms": 1e3 * statistics.median(finding),
        "applying_ms": 1e3 * statistics.median(applying),
    }  # fmt: skip
    note = f"CPU time of one thread; masks are found for {len(tokenizer)} tokens and applied to {vocabulary} scores."
    return Table("Masks of one step", [row], note)


def forced(model: Any, tokenizer: Any) -> Table:
    """Time one answer with a schema, and text of as many tokens without one."""
    rows = []
    for name, more, drafts in (("schema, forced tokens drafted", asked(FIXED), True), ("schema", asked(FIXED), False)):
        rows.append({"text": name, **_timed(model, tokenizer, more, drafts=drafts)})
    rows.append({"text": "any text", **_timed(model, tokenizer, {"max_new_tokens": rows[0]["tokens"]}, drafts=False)})
    return Table("One answer of fixed names and free values", rows, "CPU time of all threads, the best of five.")


def _timed(model: Any, tokenizer: Any, more: dict[str, Any], *, drafts: bool) -> dict[str, Any]:
    best, tokens, passes = float("inf"), 0, 0
    with hf_accel.Engine(model, tokenizer=tokenizer, speculative=None) as engine:
        given = {"max_new_tokens": 200, "temperature": 0, **more}
        for number in range(6):  # the first one makes what drafts, and is not timed
            if not drafts and engine.session.speculation is not None:
                engine.session.speculation.controller.num_draft = 0
            before, begun = engine.stats["passes"], time.process_time()
            tokens = len(engine.submit("import re\n", **given).result().tokens)
            if number:
                passes, best = engine.stats["passes"] - before, min(best, time.process_time() - begun)
    return {"tokens": tokens, "passes": passes, "cpu_ms": 1e3 * best}

"""python -m tests.serving.soak [SECONDS]: many clients for minutes; fails if an answer is wrong or anything leaks.

They ask two models of one server: for texts, for texts of two adapters, for what matches a schema, a regular
expression or some choices, and for vectors.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertModel

from .adapters import save_adapter
from .encoders import WORDS, save_encoder
from .encoders import tokenizer as encoder_tokenizer
from .load import LENGTHS, PROMPTS, Load, Question, census, left_behind
from .running import SHIPPED, Running, serving, until
from .test_load import MANY

WARM_SECONDS = 20.0  # after which memory may no longer grow
GROWTH = 32 * 2**20  # bytes; less than one leaked request in ten would take in ten minutes
POOLS = ("uvloop", "hf_accel grammar")  # whose threads, bounded in number, are made when they are first needed
ADAPTERS = ("one", "two")
TEXTS = [" ".join(f"w{(7 * n + k) % WORDS}" for k in range(1 + 5 * n)) for n in range(7)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["class", "function", "module"]},
        "lines": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 4},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}
PATTERN = r"[a-z_]{1,8}\((self|cls)(, [a-z]{1,5}=[0-9]{1,3}){0,3}\)"
CHOICES = ["return None", "raise ValueError", "pass"]


class MixedLoad(Load):
    """Clients who also ask for adapters, for what matches something, and for vectors."""

    def __init__(self, running: Running, folder: Path, *, seed: int) -> None:
        super().__init__(running, seed=seed)
        self.kinds += [self.of_adapter, self.matching, self.matching, self.vectors]
        self.by_adapter = {name: _texts_of(folder / name, running) for name in ADAPTERS}
        encoder = BertModel.from_pretrained(folder / "embed").eval()
        with torch.no_grad():
            self.vector = {
                text: encoder(**encoder_tokenizer()(text, return_tensors="pt")).last_hidden_state[0].mean(0)
                for text in TEXTS
            }

    def of_adapter(self) -> Question:
        choose = self.random
        name, prompt, length = choose.choice(ADAPTERS), choose.choice(PROMPTS), choose.choice(LENGTHS)
        wanted = self.by_adapter[name][prompt, length]
        body = {"model": name, "prompt": prompt, "max_tokens": length, "temperature": 0}
        body["stream"] = choose.random() < 0.6
        return Question(body, lambda answer: answer["choices"][0]["text"] == wanted)

    def matching(self) -> Question:
        choose = self.random
        given, check = choose.choice([
            ({"structured_outputs": {"json": SCHEMA}}, _is_valid),
            ({"structured_outputs": {"regex": PATTERN}}, lambda text: re.fullmatch(PATTERN, text) is not None),
            ({"structured_outputs": {"choice": CHOICES}}, lambda text: text in CHOICES),
        ])  # fmt: skip
        model = choose.choice([self.running.service.name, *ADAPTERS])
        body = {"model": model, "prompt": choose.choice(PROMPTS), "max_tokens": 200, **given}
        body |= {"temperature": choose.choice([0, 0.9]), "stream": choose.random() < 0.6}

        def matches(answer: dict[str, Any]) -> bool:
            (choice,) = answer["choices"]
            return choice["finish_reason"] == "stop" and check(choice["text"])

        return Question(body, matches)

    def vectors(self) -> Question:
        texts = self.random.sample(TEXTS, self.random.randint(1, 4))

        def equal(answer: dict[str, Any]) -> bool:
            found = torch.tensor([one["embedding"] for one in answer["data"]])
            return torch.allclose(found, torch.stack([self.vector[text] for text in texts]), atol=1e-4)

        return Question({"model": "embed", "input": texts}, equal, "/v1/embeddings")


def _is_valid(text: str) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text)))


@torch.no_grad()
def _texts_of(adapter: Path, running: Running) -> dict[tuple[str, int], str]:
    """The greedy texts of a model into whose weights an adapter was added."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32), running.service.tokenizer
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in {name.partition(".lora_")[0] for name in tensors}:
        matrices = (tensors[f"{name}.lora_{matrix}.weight"] for matrix in "BA")
        model.get_submodule(name.removeprefix("base_model.model.")).weight += 2.0 * torch.matmul(*matrices)
    found = {}
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        mask = torch.ones_like(ids)
        made = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max(LENGTHS))
        for length in LENGTHS:
            new = made[0, ids.shape[1] :][:length]
            found[prompt, length] = tokenizer.decode(new, skip_special_tokens=True)
    return found


def resident_bytes() -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def main(seconds: float) -> int:
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        save_encoder(folder / "embed")
        for index, name in enumerate(ADAPTERS):
            save_adapter(folder / name, SHIPPED, seed=index)
        models: dict[str, Path] = {"tiny": SHIPPED, "embed": folder / "embed"}
        with serving(models, limits=MANY, engine={"max_tokens": 320}, speculative="ngram") as running:
            for name in ADAPTERS:
                running.models.load_adapter(name, folder / name, model="tiny")
            return soak(running, MixedLoad(running, folder, seed=2), seconds)


def soak(running: Running, load: Load, seconds: float) -> int:
    asyncio.run(load.run(min(WARM_SECONDS, seconds)))
    until(running.is_idle)
    failed, before = False, census()
    warm, spent = resident_bytes(), min(WARM_SECONDS, seconds)
    while spent < seconds:
        asyncio.run(load.run(min(60.0, seconds - spent)))
        spent += min(60.0, seconds - spent)
        grown, left = resident_bytes() - warm, left_behind(running, before)
        for name in POOLS:
            del left[name]
        errors = sum(service.engine.stats["failed"] for service in running.models.services)
        failed |= bool(left or load.outcome.wrong or errors)
        counts = {**load.outcome.counts, "wrong": len(load.outcome.wrong), "failed": errors}
        counts["preempted"] = running.stats["preemptions"]
        print(f"{spent:.0f} s: {counts}, {grown / 2**20:+.1f} MB, left: {left or 'nothing'}", flush=True)
    failed |= resident_bytes() - warm > GROWTH
    for body, answer in load.outcome.wrong[:3]:
        print(f"wrong: {body} got {answer}")
    print("failed" if failed else "passed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0))

"""Several answers to one prompt: it is computed once, and stored once until the answers part.

python examples/samples.py
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = hf_accel.patch(AutoModelForCausalLM.from_pretrained(SHIPPED))
    prompt = (SHIPPED / "heldout.txt").read_text(encoding="utf-8")[:2000] + "\n\ndef "
    with hf_accel.Engine(model, tokenizer=tokenizer) as engine:
        request = engine.submit(prompt, n=4, max_new_tokens=24, temperature=0.8, top_p=0.95, seed=1, logprobs=0)
        answers = request.results()
        computed = engine.stats["computed_tokens"]
    likelihood = [sum(one.logprob for one in answer.logprobs) / len(answer.tokens) for answer in answers]
    best = max(range(len(answers)), key=likelihood.__getitem__)
    for number, answer in enumerate(answers):
        mark = "best" if number == best else "    "
        print(f"{mark} {likelihood[number]:6.2f} nats a token: {answer.text!r}")
    alone = len(answers) * (len(tokenizer(prompt)["input_ids"]) + 24)
    print(f"{computed} tokens computed, {alone} if each answer had its own prompt")


if __name__ == "__main__":
    main()

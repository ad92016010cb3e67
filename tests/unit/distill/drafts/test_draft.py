"""distill_draft end to end: a draft that is better than it was, and works where drafts are used."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import hf_accel
from hf_accel import SpeculativeConfig, UnsupportedError
from hf_accel.distill.drafts.decoding import Decoder, as_patched
from hf_accel.distill.drafts.draft import _examples, _pupil, distill_draft
from hf_accel.distill.drafts.student import init_student
from hf_accel.distill.trainer.on_policy import collated

from .families import V, llama
from .test_measuring import pair
from .test_student import IDS, assert_same, snapshot

SHIPPED = Path(__file__).parents[4] / "examples" / "stdlib-tiny"
QUICK: dict[str, Any] = {
    "max_steps": 40, "batch_size": 8, "learning_rate": 3e-3, "max_length": 24, "prompt_tokens": 4,
    "progress_bar": False, "measure": False,
}  # fmt: skip


def accepted(target: Any, draft: Any) -> float:
    """sum(min(p, q)), averaged over what the target itself writes after new prompts."""
    torch.manual_seed(9)
    prompts = torch.randint(1, V, (16, 4))
    text = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=20
    )
    p, q = (model(text).logits[:, 3:-1].softmax(-1) for model in (target, draft))
    return torch.minimum(p, q).sum(-1).mean().item()


def test_a_draft_learns_what_its_target_writes() -> None:
    target, untrained, _ = pair()
    rows = torch.randint(1, V, (400, 24)).tolist()
    result = distill_draft(target, rows, num_layers=1, **{**QUICK, "max_steps": 60, "batch_size": 6})
    before, after = accepted(target, untrained), accepted(target, result.draft)
    assert after > before + 0.01


@pytest.mark.parametrize(("patched", "share"), [(None, True), ("int8", False)])
def test_the_target_stays_as_it_was(patched: str | None, share: bool) -> None:
    target, _, rows = pair()
    if patched:
        hf_accel.patch(target, weights=patched)
    target.train()
    before, python = snapshot(target), random.getstate()
    measured = {"max_draft": 1, "max_tokens": 60}
    result = distill_draft(
        target, rows, share_embeddings=share, **{**QUICK, "max_steps": 2, "measure": measured if share else False}
    )
    assert_same(before, snapshot(target))
    assert random.getstate() == python
    assert hf_accel.is_patched(target) == bool(patched)
    draft: Any = result.draft
    shared = draft.model.embed_tokens.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    assert shared == share and draft.config.num_hidden_layers == 1 and draft.config.use_cache
    assert (result.before is not None) == (result.after is not None) == share


def test_a_draft_speculates_and_is_saved(tmp_path: Path) -> None:
    target, _, rows = pair()
    draft = distill_draft(target, rows, **{**QUICK, "max_steps": 1}).draft
    expected = target.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=10, do_sample=False)
    draft.save_pretrained(tmp_path)
    loaded: Any = type(target).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, draft(IDS).logits)
    hf_accel.patch(target, weights=None)
    for drafter in (draft, loaded):
        for speculative in (drafter, SpeculativeConfig(drafter=drafter, num_draft=2)):
            found = target.generate(
                IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=10, do_sample=False, speculative=speculative
            )
            assert torch.equal(found, expected)
    assert hf_accel.stats(target)["drafted"] > 0


@pytest.mark.parametrize("share", [True, False])
def test_what_is_shared_is_not_trained(share: bool) -> None:
    draft = init_student(llama().bfloat16(), num_layers=1, share_embeddings=share)
    pupil = _pupil(draft)
    assert {parameter.dtype for parameter in pupil.parameters()} == {torch.float32}
    frozen = {name for name, parameter in pupil.named_parameters() if not parameter.requires_grad}
    assert frozen == ({"model.embed_tokens.weight", "lm_head.weight"} if share else set())
    assert not {p.data_ptr() for p in pupil.parameters()} & {p.data_ptr() for p in draft.parameters()}


def test_same_seed_same_draft() -> None:
    target, _, rows = pair()
    drafts = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        drafts.append(distill_draft(target, rows, **{**QUICK, "max_steps": 2}).draft)
    torch.testing.assert_close(drafts[0].state_dict(), drafts[1].state_dict(), rtol=0, atol=0)


def test_rewritten_rows_are_the_targets_own_words() -> None:
    """Greedily, so that they can be compared with generate's."""
    target, _, rows = pair()
    decoder = Decoder(as_patched(target), temperature=0, seed=0)
    examples = _examples(decoder, rows, set(range(0, len(rows), 2)), prompt_tokens=5, max_length=16)
    plain = [one for one in examples if one["labels"][0] != -100]
    written = [one for one in examples if one["labels"][0] == -100]
    assert len(plain) == len(written) == len(rows) // 2
    assert all(one["input_ids"] == one["labels"] and one["input_ids"] in rows for one in plain)
    for one in written:
        prompt = torch.tensor([one["input_ids"][:5]])
        expected = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=11, do_sample=False)
        assert one["input_ids"] == expected[0].tolist()
        assert one["labels"] == [-100] * 5 + one["input_ids"][5:]
        assert one["input_ids"][:5] in [row[:5] for row in rows if row not in [p["input_ids"] for p in plain]]


def test_sampled_rows_follow_the_targets_law() -> None:
    """A prompt of 2 tokens many times: the next token's frequencies, by chi-square at 1e-3."""
    target = llama(vocab_size=5)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.3)
    decoder = Decoder(as_patched(target), temperature=0.7, seed=3)
    made = decoder.run([[1, 2]] * 2000, [1] * 2000)
    counts = torch.bincount(torch.tensor(made).flatten(), minlength=5).double()
    law = (target(torch.tensor([[1, 2]])).logits[0, -1].double() / 0.7).softmax(-1).detach()
    assert float(((counts - 2000 * law) ** 2 / (2000 * law)).sum()) < 18.47  # 4 degrees of freedom
    assert 0.05 < float(law.max()) < 0.95


def test_batches_are_padded_on_the_right() -> None:
    batch = collated([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]


def test_the_users_own_arguments_rule(tmp_path: Path) -> None:
    target, _, rows = pair()
    args = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
        save_strategy="steps", save_steps=3, eval_strategy="epoch", use_cpu=True,
    )  # fmt: skip
    own = {"max_length": 24, "measure": False, "progress_bar": False}
    distill_draft(target, rows, args=args, **own)
    assert (tmp_path / "checkpoint-6" / "model.safetensors").is_file()
    with pytest.raises(UnsupportedError, match="max_steps"):
        distill_draft(target, rows, args=args, max_steps=3, **own)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"regenerate": 1.5}, "regenerate=1.5"),
        ({"loss": "mse"}, "fkl"),
        ({"num_layers": 9}, "4 layers"),
        ({"max_steps": 0}, "max_steps"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
    ],
)
def test_nonsense_is_refused(settings: dict[str, Any], says: str) -> None:
    target, _, rows = pair()
    with pytest.raises(UnsupportedError, match=says):
        distill_draft(target, rows, **{**QUICK, **settings})


def test_one_row_is_too_few() -> None:
    with pytest.raises(UnsupportedError, match="give more"):
        distill_draft(pair()[0], [list(range(1, 20))], **QUICK)


@pytest.mark.long
def test_a_draft_for_a_real_model() -> None:
    """stdlib-tiny, which is bfloat16 and patched to INT8 here; its own tokenizer, and texts."""
    target = AutoModelForCausalLM.from_pretrained(SHIPPED)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    text = (SHIPPED / "heldout.txt").read_text(encoding="utf-8")
    hf_accel.patch(target, weights="int8")
    texts = [text[start : start + 800] for start in range(0, len(text), 800)]
    result = distill_draft(
        target, texts, tokenizer=tokenizer, num_layers=1, max_steps=60, max_length=128, progress_bar=False
    )
    assert result.before is not None and result.after is not None
    assert result.after.text_acceptance > 1.2 * result.before.text_acceptance
    assert result.after.acceptances[0] > result.before.acceptances[0]
    assert result.draft.dtype == torch.bfloat16
    assert V != result.draft.config.vocab_size == 2048

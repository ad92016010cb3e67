"""Constraints alone: tokenizers, tokens that write no text, wide heads, and matchers that go on and back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.topics.structured import coverage
from hf_accel.generation.hf.grammars import Grammars
from hf_accel.generation.sampling.constraint import Constraint, only_allowed
from tests.serving.running import SHIPPED

pytest.importorskip("llguidance")


def byte_level() -> Any:
    made = AutoTokenizer.from_pretrained(SHIPPED)
    made.add_tokens(["calls", "<call>", "  "])
    made.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    return made


def sentence_piece() -> Any:
    """Words begin with a mark for a space, and bytes that no piece has are tokens of their own, as in Llama."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcxyz{}:,0123456789"]
    pieces += ['"', "\u2581a", "\u2581b", "ab", "abc", "\u2581abc"]
    model = models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


KINDS = {"byte-level": byte_level, "sentencepiece": sentence_piece}


def allowed(mask: bytes | None) -> set[int]:
    assert mask is not None
    bits = only_allowed(torch.zeros(1, 8 * len(mask)), [mask])[0]
    return set((bits == 0).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens_that_are_allowed_make_the_text(kind: str) -> None:
    """Of both kinds of tokenizers; tokens that end or mark a text come at its end alone."""
    tokenizer, random_ = KINDS[kind](), random.Random(0)
    end = tokenizer.eos_token_id
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.content.strip()} - {end}
    grammars = Grammars(tokenizer, [end])
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"enum": ["abc", 12]}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    for _ in range(20):
        constraint, tokens = grammars.constraint("json", json.dumps(schema)), list[int]()
        while not constraint.is_complete(tokens):
            found = allowed(constraint.mask(tokens))
            assert found and end not in found and not found & added
            forced = constraint.forced(tokens)
            assert not forced or found == {forced[0]}
            tokens.append(random_.choice(sorted(found)))
        assert allowed(constraint.mask(tokens)) == {end}
        text = json.loads(tokenizer.decode(tokens))
        assert len(text["a"]) <= 6 and text["b"] in ("abc", 12)


def test_a_constraint_goes_where_it_is_asked() -> None:
    """Forwards, back, to other texts, and next to copies: the masks are those of a new one."""
    tokenizer, random_ = byte_level(), random.Random(1)
    grammars = Grammars(tokenizer, [tokenizer.eos_token_id])
    texts = [tokenizer(text)["input_ids"] for text in ("12-ab", "12-bbbb", "345-a", "9")]
    kept: list[Constraint] = [grammars.constraint("regex", "[0-9]{1,4}-[ab]{1,9}")]
    for _ in range(200):
        tokens = random_.choice(texts)
        tokens = tokens[: random_.randint(0, len(tokens))]
        one = random_.choice(kept)
        if random_.random() < 0.05:
            kept.append(one.fork())
        assert one.mask(tokens) == grammars.constraint("regex", "[0-9]{1,4}-[ab]{1,9}").mask(tokens)
    wrong = texts[0] + texts[2]
    assert kept[0].mask(wrong) is None and kept[0].follow(wrong) == len(texts[0])
    assert kept[0].mask(texts[1]) is not None, "it is not broken by that"


def test_heads_that_are_wider_or_narrower_than_the_tokenizer() -> None:
    tokenizer = byte_level()
    constraint = Grammars(tokenizer, [tokenizer.eos_token_id]).constraint("choice", '["yes", "no"]')
    mask, size = constraint.mask([]), len(tokenizer)
    kept = {tokenizer.convert_tokens_to_ids(piece) for piece in ("y", "ye", "yes", "n", "no")} - {None}
    for width in (size, size + 1, size + 517, 100):
        scores = torch.randn(2, width)
        found = only_allowed(scores, [mask, None])
        assert torch.equal(found[1], scores[1]) and found.shape == scores.shape
        finite = set((found[0] > -torch.inf).nonzero()[:, 0].tolist())
        assert finite <= kept and len(finite) == sum(one < width for one in finite) and finite
        assert torch.equal(found[0][list(finite)], scores[0][list(finite)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_that_are_allowed_keep_their_bits(dtype: torch.dtype) -> None:
    """Also those that are none, or not finite; what is not allowed is -inf whatever it was."""
    random_, special = random.Random(1), [torch.nan, torch.inf, -torch.inf, -0.0, 0.0]
    scores = torch.randn(3, 77).to(dtype)
    for place in range(0, 77, 3):
        scores[:, place] = special[place % len(special)]
    masks = [random_.randbytes(10), None, random_.randbytes(9)]
    found = only_allowed(scores, masks)
    for row, mask in enumerate(masks):
        bits = [mask is None or (at // 8 < len(mask) and mask[at // 8] >> at % 8 & 1 == 1) for at in range(77)]
        wanted = torch.where(torch.tensor(bits), scores[row], torch.tensor(-torch.inf, dtype=dtype))
        assert found[row].view(torch.uint8).equal(wanted.view(torch.uint8))


def test_answers_match_random_schemas() -> None:
    """A part of `python -m benchmarks.run structured`, which answers 500."""
    import hf_accel

    model = hf_accel.load(str(SHIPPED), weights=None, dtype=torch.float32)
    (row,) = coverage(model, AutoTokenizer.from_pretrained(SHIPPED), count=24, seed=7).rows
    hf_accel.unpatch(model)
    assert row["refused"] == 0 and row["finished"] >= 18

"""A tokenizer of as many letters as the tiny models have tokens."""

from __future__ import annotations

import functools
import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .families import VOCABULARY

ASCII = string.ascii_letters + string.digits
LETTERS = ASCII + "".join(chr(0x100 + i) for i in range(VOCABULARY - len(ASCII)))


@functools.cache
def letters() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=LETTERS[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def text_of(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)

"""Streamers of one row and of many, on the ragged loop and on stock's."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TextIteratorStreamer, TextStreamer

import hf_accel
from hf_accel import SpeculativeConfig, UnsupportedError

from .families import build, inputs
from .speculating import speculative, target

ENDS = list(range(2, 30))
SETTINGS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14, "eos_token_id": ENDS, "pad_token_id": 7}
WAYS: dict[str, dict[str, Any]] = {
    "ragged": {},
    "drafts": {"speculative": speculative("near model", "llama", 3)},
    "rows together": {"output_scores": True, "return_dict_in_generate": True},
    "stock's loop": {"use_cache": False},
}


class Plain:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu" and value.dtype == torch.int64
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


class ByRow(Plain):
    def put(self, value: Tensor, row: int) -> None:  # type: ignore[override]
        self.got.append((row, value.tolist()))


class Words:
    """A tokenizer as far as TextStreamer is concerned."""

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join(f"{token} " for token in torch.as_tensor(ids).flatten().tolist())


def streamed(layout: str, streamer: Any, *, model: Any = None, **settings: Any) -> list[list[int]]:
    output = (model or target("llama")).generate(**inputs(layout), streamer=streamer, **SETTINGS | settings)
    return (output if isinstance(output, Tensor) else output.sequences).tolist()


def until_end(row: list[int]) -> list[int]:
    """The new tokens of a padded row, up to its end-of-sequence token."""
    new = row[13:]
    return new[: next((i + 1 for i, token in enumerate(new) if token in ENDS), len(new))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["single", "left"])
def test_a_plain_streamer_gets_what_stock_gives_it(layout: str, way: str) -> None:
    ours, theirs = Plain(), Plain()
    rows = streamed(layout, ours, **WAYS[way])
    assert rows == streamed(layout, theirs, model=build("llama"))
    assert ours.got == theirs.got
    assert layout == "single" or len({len(until_end(row)) for row in rows}) > 1  # rows end at different times


@pytest.mark.parametrize("way", WAYS)
def test_a_streamer_for_each_row_gets_its_tokens_and_its_end(way: str) -> None:
    streamers = [Plain() for _ in range(3)]
    rows = streamed("left", streamers, **WAYS[way])
    for row, streamer in zip(rows, streamers, strict=True):
        assert streamer.got == [row[:13], *([token] for token in until_end(row)), "end"]


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_end_by_their_length_end_too(way: str) -> None:
    streamers = [Plain() for _ in range(3)]
    streamed("left", streamers, **WAYS[way], eos_token_id=None)
    assert all(len(streamer.got) == 16 and streamer.got[-1] == "end" for streamer in streamers)


@pytest.mark.parametrize("way", WAYS)
def test_a_streamer_that_takes_rows(way: str) -> None:
    streamer = ByRow()
    rows = streamed("left", streamer, **WAYS[way])
    assert streamer.got[-1] == "end" and streamer.got.count("end") == 1
    for number, row in enumerate(rows):
        own = [value for got in streamer.got[:-1] for at, value in [got] if at == number]
        assert own == [row[:13], *([token] for token in until_end(row))]


@pytest.mark.parametrize("way", WAYS)
def test_text_streamers(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer: Any = Words()
    row = streamed("single", TextStreamer(tokenizer, skip_prompt=True), **WAYS[way])[0]
    assert capsys.readouterr().out.split() == [str(token) for token in row[13:]]
    streamers = [TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10) for _ in range(3)]
    found: queue.Queue[Any] = queue.Queue()
    thread = threading.Thread(target=lambda: found.put(streamed("left", streamers, **WAYS[way])))
    thread.start()
    texts = ["".join(streamer).split() for streamer in streamers]  # ends only if each of them is told so
    thread.join()
    assert texts == [[str(token) for token in until_end(row)] for row in found.get()]


def test_samples_of_one_prompt_stream_too() -> None:
    streamers = [Plain() for _ in range(4)]
    settings = {"do_sample": True, "num_return_sequences": 4, **WAYS["drafts"]}
    rows = streamed("single", streamers, **settings)
    for row, streamer in zip(rows, streamers, strict=True):
        assert streamer.got == [row[:13], *([token] for token in until_end(row)), "end"]


def test_as_many_streamers_as_rows() -> None:
    with pytest.raises(UnsupportedError, match="2 streamers for 3 rows; give one for each"):
        streamed("left", [Plain(), Plain()])


def test_tokens_come_as_they_are_accepted() -> None:
    """Not all at the end: when the first token is put, the last one is not known."""
    seen = []

    class Watching(Plain):
        def put(self, value: Tensor) -> None:
            seen.append(hf_accel.stats(model).get("new_tokens"))

    model = hf_accel.patch(build("llama"), weights=None)
    config = SpeculativeConfig(drafter="self-int4", num_draft=2)
    streamed("single", Watching(), model=model, speculative=config, eos_token_id=None)
    assert len(seen) == 15 and set(seen) == {None}

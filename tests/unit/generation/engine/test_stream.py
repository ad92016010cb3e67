from __future__ import annotations

import asyncio
import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable

import pytest

from hf_accel.errors import OutOfBlocksError, UnsupportedError
from hf_accel.generation.engine.stream import Generated, Request, Sample

PATIENCE = 20.0  # seconds after which a test that waits has failed


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def produce(request: Request | Sample, count: int, pause: float = 0.0) -> None:
    for token in range(count):
        request.samples[0].put([token])
        if pause:
            time.sleep(pause)
    request.samples[0].finish("length")


def broken() -> OutOfBlocksError:
    """An error as an engine has it: raised, with a cause."""

    def in_the_engine() -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise OutOfBlocksError("no blocks") from error

    try:
        in_the_engine()
    except OutOfBlocksError as error:
        return error
    raise AssertionError


def test_tokens_come_in_order_while_they_are_made() -> None:
    request = Request()
    thread = in_thread(lambda: produce(request, 50, 0.001))
    assert list(request) == list(range(50))
    assert request.done and request.finish_reason == "length"
    assert list(request) == list(range(50))  # every iteration begins at the beginning
    thread.join(PATIENCE)


def test_a_reader_gets_the_first_token_before_the_second_is_there() -> None:
    request = Request()
    tokens = iter(request)
    request.samples[0].put([1])
    assert next(tokens) == 1 and not request.done
    request.samples[0].put([2, 3])
    assert [next(tokens), next(tokens)] == [2, 3]
    request.samples[0].finish("stop")
    assert next(tokens, None) is None


def test_many_threads_and_coroutines_read_one_request() -> None:
    request = Request()
    found: list[list[int]] = []
    threads = [in_thread(lambda: found.append(list(request))) for _ in range(4)]

    async def read() -> list[int]:
        return [token async for token in request]

    async def read_all() -> list[list[int]]:
        producer = in_thread(lambda: produce(request, 200))
        lists = await asyncio.wait_for(asyncio.gather(*(read() for _ in range(4))), PATIENCE)
        producer.join(PATIENCE)
        return lists

    found += asyncio.run(read_all())
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [list(range(200))] * 8


def test_a_coroutine_sleeps_until_the_token_comes() -> None:
    request = Request()

    async def main() -> list[int]:
        task = asyncio.ensure_future(collect())
        await asyncio.sleep(0.01)
        assert not task.done()
        in_thread(lambda: produce(request, 5, 0.002))
        return await asyncio.wait_for(task, PATIENCE)

    async def collect() -> list[int]:
        return [token async for token in request]

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_result_holds_everything() -> None:
    request = Request(decode=lambda tokens: "-".join(map(str, tokens)))
    request.samples[0].put([1, 2], [-0.5, -0.25])
    request.samples[0].put([3], [-1.0])
    with pytest.raises(TimeoutError, match=r"not finished after 0\.01 seconds, with 3 tokens so far"):
        request.result(0.01)
    request.samples[0].finish("stop")
    expected = Generated([1, 2, 3], "stop", [-0.5, -0.25, -1.0], "1-2-3")
    assert request.result() == expected == asyncio.run(request.aresult())


def test_result_waits_in_threads_and_in_coroutines() -> None:
    request = Request()

    async def main() -> Generated:
        in_thread(lambda: produce(request, 5, 0.002))
        return await asyncio.wait_for(request.aresult(), PATIENCE)

    assert asyncio.run(main()) == request.result(PATIENCE) == Generated([0, 1, 2, 3, 4], "length")


def test_the_first_end_counts() -> None:
    request = Request()
    assert request.samples[0].put([1])
    request.samples[0].finish("stop")
    request.samples[0].finish("length")
    request.samples[0].fail(ValueError())
    request.cancel()
    assert not request.samples[0].put([2])
    assert request.result() == Generated([1], "stop")


def test_cancel_ends_it_at_once_and_tells_the_producer_once() -> None:
    told: list[Sample] = []
    request = Request(on_cancel=told.append)
    request.samples[0].put([1])
    waiting = iter(request)
    next(waiting)
    in_thread(request.cancel)
    assert list(waiting) == []
    request.cancel()
    assert told == [request.samples[0]]
    assert not request.samples[0].put([2]) and request.result() == Generated([1], "cancelled")


def test_errors_reach_every_reader_with_where_they_came_from() -> None:
    request = Request()
    request.samples[0].put([1])
    request.samples[0].fail(broken())
    seen = []

    def read() -> None:
        for token in request:
            seen.append(token)

    async def read_async() -> None:
        async for token in request:
            seen.append(token)

    ways: list[Callable[[], object]] = [
        read,
        request.result,
        request.results,
        lambda: asyncio.run(request.aresult()),
        lambda: asyncio.run(read_async()),
    ]
    lengths = set()
    for way in [*ways, *ways]:
        with pytest.raises(OutOfBlocksError, match="no blocks") as caught:
            way()
        lines = "".join(traceback.format_exception(caught.value))
        assert "in_the_engine" in lines and "KeyError: 'inner'" in lines
        lengths.add((way, len(traceback.extract_tb(caught.value.__traceback__))))
    assert seen == [1] * 4 and request.finish_reason == "failed"
    assert len(lengths) == len(ways), "the traceback grew with each reader"


def test_a_waiting_reader_is_woken_by_an_error() -> None:
    request = Request()
    timer = threading.Timer(0.02, request.samples[0].fail, [broken()])
    timer.start()
    with pytest.raises(OutOfBlocksError):
        list(request)
    timer.join(PATIENCE)


def test_readers_that_leave_do_not_disturb_the_producer() -> None:
    request = Request()
    closed = iter(request)
    request.samples[0].put([0])
    next(closed)
    closed.close()  # type: ignore[attr-defined]

    async def leave() -> None:
        async for _ in request:
            break
        for wait in (request.aresult(), anext(aiter_from(request, 1))):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wait, 0.01)

    asyncio.run(leave())
    assert request.samples[0]._waiters == []
    loop = asyncio.new_event_loop()
    task = loop.create_task(request.aresult())
    loop.run_until_complete(asyncio.sleep(0.01))
    abandoned = list(request.samples[0]._waiters)
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    request.samples[0]._waiters += abandoned  # as if the loop had been closed over it
    produce(request, 3)
    assert request.result().tokens == [0, 0, 1, 2]


async def aiter_from(request: Request, skip: int):  # type: ignore[no-untyped-def]
    async for token in request:
        if skip == 0:
            yield token
        skip -= 1


def test_a_dropped_handle_is_freed() -> None:
    request = Request(num_samples=2)
    tokens = iter(request)
    request.samples[0].put([1])
    next(tokens)
    gone = weakref.ref(request.samples[0])
    gc.disable()
    try:
        del request, tokens
        assert gone() is None, "something else holds it, or it holds itself"
    finally:
        gc.enable()


def test_samples_are_handles_of_their_own() -> None:
    told: list[int] = []
    request = Request(num_samples=3, id="abc", on_cancel=lambda sample: told.append(sample.index))
    for number, sample in enumerate(request.samples):
        sample.put([number, 10 + number])
    request.samples[1].cancel()
    assert not request.done
    request.samples[0].finish("stop")
    assert list(request) == [0, 10] and request.result() == Generated([0, 10], "stop") and not request.done
    request.samples[2].finish("length")
    assert request.done and told == [1] and request.id == "abc"
    expected = [Generated([0, 10], "stop"), Generated([1, 11], "cancelled"), Generated([2, 12], "length")]
    assert request.results(1.0) == expected == asyncio.run(request.aresults())
    assert repr(request) == "Request(abc: stop, cancelled, length)"


def test_a_request_is_cancelled_and_fails_as_a_whole() -> None:
    told: list[int] = []
    request = Request(num_samples=2, on_cancel=lambda sample: told.append(sample.index))
    request.samples[0].finish("stop")
    request.cancel()
    assert told == [1] and request.done
    request = Request(num_samples=2)
    request.samples[1].finish("stop")
    for sample in request.samples:
        sample.fail(broken())
    assert request.samples[1].result() == Generated([], "stop")
    with pytest.raises(OutOfBlocksError):
        request.results()


def test_results_wait_no_longer_than_asked() -> None:
    request = Request(num_samples=2)
    request.samples[0].finish("stop")
    with pytest.raises(TimeoutError):
        request.results(0.01)


def test_requests_are_numbered_and_have_a_sample() -> None:
    assert Request().id != Request().id
    with pytest.raises(UnsupportedError, match="num_samples=0"):
        Request(num_samples=0)

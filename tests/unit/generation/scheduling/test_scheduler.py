from __future__ import annotations

from typing import Any

import pytest

from hf_accel.cache.pages import Pages
from hf_accel.errors import OutOfBlocksError, UnsupportedError
from hf_accel.generation.scheduling.scheduler import Scheduler
from hf_accel.generation.sequence import Chunk, Sequence, Status

from ..programme import Pass, Programme, check_blocks, pages_of, sequence_of


def numbered(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def commit(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    """A pass without drafts; the next token is always 7."""
    for chunk in chunks:
        sequence = chunk.sequence
        reaches_end = chunk.reaches_end
        sequence.num_computed += chunk.count
        if reaches_end:
            for each in (sequence, *scheduler.fork(sequence)):
                each.tokens.append(7)
                if not each.num_left:
                    scheduler.remove(each, "length")


def step(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    chunks = scheduler.schedule()
    Pass(scheduler.pages).run(chunks, {}, {})
    commit(scheduler, chunks)
    check_blocks(scheduler.pages, scheduler.running)
    return [(chunk.sequence, chunk.count) for chunk in chunks]


def scheduler_of(*sequences: Sequence, num_blocks: int = 100, budget: int | None = None, **options: Any) -> Scheduler:
    scheduler = Scheduler(pages_of(num_blocks), token_budget=budget, **options)
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler


# -- a pass -----------------------------------------------------------------------------------------------


def test_a_pass_decodes_then_goes_on_with_prompts_then_admits() -> None:
    first, long, late = sequence_of([1, 2]), sequence_of(numbered(0, 20)), sequence_of([3, 4, 5])
    scheduler = scheduler_of(first, long, late, budget=8)
    assert step(scheduler) == [(first, 2), (long, 6)]
    assert step(scheduler) == [(first, 1), (long, 7)]
    assert step(scheduler) == [(first, 1), (long, 7)]
    assert step(scheduler) == [(first, 1), (long, 1), (late, 3)]  # the last of the long prompt: it decodes already
    assert step(scheduler) == [(first, 1), (long, 1), (late, 1)]


def test_without_a_budget_all_prompts_are_computed_at_once() -> None:
    sequences = [sequence_of(numbered(10 * i, 9)) for i in range(5)]
    assert step(scheduler_of(*sequences)) == [(sequence, 9) for sequence in sequences]


def test_equal_prompts_of_one_pass_are_computed_once() -> None:
    prompt = numbered(0, 12)
    first, second, third = (sequence_of(list(prompt)) for _ in range(3))
    scheduler = scheduler_of(first, second)
    assert step(scheduler) == [(first, 12), (second, 4)]  # whole blocks, and at least the last token
    scheduler.add(third)
    assert (third, 4) in step(scheduler)


def test_a_beginning_that_is_known_only_in_part_is_adopted_in_part() -> None:
    first, second = sequence_of(numbered(0, 12)), sequence_of([*numbered(0, 9), 99, 98])
    assert step(scheduler_of(first, second)) == [(first, 12), (second, 3)]


def test_priority_goes_first_then_arrival() -> None:
    sequences = [sequence_of([10 * i, 2], priority=p) for i, p in enumerate((0, 2, 1, 2))]
    scheduler = scheduler_of(*sequences)
    assert scheduler.waiting == [sequences[i] for i in (1, 3, 2, 0)]
    assert [s for s, _ in step(scheduler)] == [sequences[i] for i in (1, 3, 2, 0)]


def test_no_more_run_than_allowed() -> None:
    sequences = [sequence_of([10 * i, 2], 3) for i in range(5)]
    scheduler = scheduler_of(*sequences, max_running=2)
    assert [s for s, _ in step(scheduler)] == sequences[:2]
    while scheduler.has_work:
        assert len(step(scheduler)) <= 2
    assert all(s.finish_reason == "length" for s in sequences)


@pytest.mark.parametrize("option", ["token_budget", "max_running", "patience"])
def test_bounds_of_nothing_are_refused(option: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{option}=0; give at least 1"):
        Scheduler(pages_of(4), **{"token_budget": None, option: 0})


# -- families ---------------------------------------------------------------------------------------------


def family_of(prompt: list[int], samples: int, max_new_tokens: int = 8) -> Sequence:
    leader = sequence_of(list(prompt), max_new_tokens)
    leader.followers = [sequence_of(list(prompt), max_new_tokens) for _ in range(samples - 1)]
    return leader


def test_followers_share_the_leaders_blocks_until_they_write() -> None:
    leader = family_of(numbered(0, 10), 3)
    followers = list(leader.followers)
    scheduler = scheduler_of(leader)
    assert scheduler.waiting == [leader]
    assert step(scheduler) == [(leader, 10)]
    assert scheduler.running == [leader, *followers] and not leader.followers
    assert scheduler.pages.groups[0].pool.num_used == 3
    assert step(scheduler) == [(s, 1) for s in (leader, *followers)]
    assert scheduler.pages.groups[0].pool.num_used == 5  # the partly filled last block was copied twice


def test_the_first_follower_leads_when_the_leader_is_gone() -> None:
    leader = family_of(numbered(0, 10), 4)
    first, second, third = leader.followers
    scheduler = scheduler_of(leader, budget=4)
    step(scheduler)
    scheduler.remove(second, "cancelled")
    scheduler.remove(leader, "cancelled")
    assert scheduler.waiting == [first] and first.followers == [third]
    while scheduler.has_work:
        step(scheduler)
    assert [s.finish_reason for s in (leader, first, second, third)] == ["cancelled", "length", "cancelled", "length"]
    assert first.tokens == third.tokens


def test_a_fork_before_the_prompt_is_computed_is_refused() -> None:
    leader = family_of(numbered(0, 10), 2)
    scheduler = scheduler_of(leader, budget=4)
    step(scheduler)
    with pytest.raises(ValueError, match="not computed: 4 of 10"):
        scheduler.fork(leader)


def test_a_late_fork_begins_where_the_prompt_ends() -> None:
    leader = family_of(numbered(0, 10), 2)
    (follower,) = leader.followers
    scheduler = scheduler_of(leader)
    for _ in range(2):
        for chunk in scheduler.schedule():
            leader.num_computed += chunk.count
        leader.tokens.append(7)
    scheduler.fork(leader)
    assert leader.num_computed == 11 and follower.num_computed == 10
    check_blocks(scheduler.pages, scheduler.running)


def test_more_decoding_sequences_than_the_budget_take_turns() -> None:
    leader = family_of([1, 2, 3], 5, max_new_tokens=11)
    family = [leader, *leader.followers]
    scheduler = scheduler_of(leader, budget=2)
    while leader.followers:
        step(scheduler)
    for _ in range(20):
        assert len(step(scheduler)) == 2
    assert {s.num_new for s in family} == {9}


# -- room -------------------------------------------------------------------------------------------------


def test_a_sequence_that_cannot_fit_alone_is_refused_at_once() -> None:
    scheduler = scheduler_of(num_blocks=5)
    too_long = sequence_of(numbered(0, 13), 8)
    with pytest.raises(OutOfBlocksError, match=r"13 tokens and max_new_tokens=8 make 21 tokens, the cache holds 20"):
        scheduler.add(too_long)
    assert not scheduler.has_work and too_long.arrival == -1
    with pytest.raises(UnsupportedError, match="no tokens"):
        scheduler.add(sequence_of([]))


def test_a_sequence_of_exactly_the_capacity_runs_to_its_end() -> None:
    for length in range(1, 20):
        for _ in range(2):  # the second time its beginning is known
            sequence = sequence_of(numbered(0, length), 20 - length)
            scheduler = scheduler_of(sequence, num_blocks=5)
            while scheduler.has_work:
                step(scheduler)
            assert sequence.finish_reason == "length" and not scheduler.num_preempted


def test_blocks_held_by_others_fail_a_sequence_instead_of_hanging() -> None:
    pages = pages_of(5)
    other = pages.begin_with_prefix([])
    pages.append(other, 9)
    scheduler = Scheduler(pages, token_budget=None)
    starts, grows = sequence_of(numbered(0, 12)), sequence_of([1, 2, 3], 12)
    scheduler.add(starts)
    scheduler.add(grows)
    ended = []
    while scheduler.has_work:
        commit(scheduler, scheduler.schedule())
        ended += scheduler.take_failed()
    assert ended == [starts, grows] and grows.num_new == 6
    assert all(s.finish_reason == "failed" and s.cached is None for s in ended)
    with pytest.raises(OutOfBlocksError, match="12 tokens has room for 8 although nothing else runs"):
        raise starts.error or AssertionError
    other.release()
    assert pages.groups[0].pool.num_used == 0


def test_windows_that_roll_have_no_capacity() -> None:
    assert pages_of(8, windows=(6,)).capacity is None
    assert pages_of(3, windows=(6,)).capacity is None  # 2 blocks of 4 hold any 5 tokens before a new one; 3 always
    assert pages_of(2, windows=(6,)).capacity == 8
    assert pages_of(9, 3, windows=(None, 6)).capacity == 36
    assert pages_of(1, windows=(None,), growable=True).capacity is None
    sequence = sequence_of(numbered(0, 30), 50)
    scheduler = Scheduler(pages_of(3, windows=(6,)), token_budget=None)
    scheduler.add(sequence)
    while scheduler.has_work:
        step(scheduler)
    assert sequence.num_new == 50


def test_drafts_behind_a_reserved_slot_keep_what_the_window_still_sees() -> None:
    pages = pages_of(6, windows=(5,))
    cached = pages.begin_with_prefix([])
    pages.append(cached, 8)
    pages.append(cached, 1)  # the pass computes token 8, which sees tokens 4..8
    pages.append(cached, 7, start=8)
    assert cached.tables[0].slots(4, 16)
    cached.truncate(9)


def test_admission_leaves_room_for_those_that_run() -> None:
    """A newcomer waits rather than being let in and preempting, or being preempted, right away."""
    first, second = sequence_of(numbered(0, 8), 12), sequence_of(numbered(50, 8), 4)
    scheduler = scheduler_of(first, num_blocks=5)
    step(scheduler)
    scheduler.add(second)
    while not second.num_new:
        step(scheduler)
    assert first.is_finished and scheduler.num_preempted == 0


def test_a_refused_prompt_is_not_digested_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    original = Pages.begin_with_prefix
    monkeypatch.setattr(
        Pages, "begin_with_prefix", lambda self, ids, source: opened.append(len(ids)) or original(self, ids, source)
    )
    first, second = sequence_of(numbered(0, 8), 60), sequence_of(numbered(100, 70), 4)
    scheduler = scheduler_of(first, second, num_blocks=20)
    for _ in range(40):
        step(scheduler)
    assert first.num_new == 40 and 1 <= opened.count(70) <= 4


# -- preemption -------------------------------------------------------------------------------------------


def test_the_victim_is_of_the_lowest_priority_then_the_latest() -> None:
    sequences = [sequence_of(numbered(10 * i, 5), 42, priority=p) for i, p in enumerate((1, 0, 0, 1))]
    scheduler = scheduler_of(*sequences, num_blocks=12)  # 2 blocks each and 4 that are left as a margin
    order: list[int] = []
    while len(order) < 3:
        before = [s.num_preemptions for s in sequences]
        step(scheduler)
        order += [i for i, s in enumerate(sequences) if s.num_preemptions > before[i]]
    assert order == [2, 1, 3]
    assert scheduler.waiting == [sequences[i] for i in (3, 1, 2)]
    assert all(s.num_computed == 0 and s.cached is None and s.num_new > 0 for s in scheduler.waiting)


def test_what_was_preempted_goes_on_where_it_was() -> None:
    sequences = [sequence_of(numbered(10 * i, 7), 13) for i in range(3)]
    scheduler = scheduler_of(*sequences, num_blocks=9)
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.num_preempted == sum(s.num_preemptions for s in sequences) > 0
    assert [s.tokens for s in sequences] == [numbered(10 * i, 7) + [7] * 13 for i in range(3)]


def test_two_large_sequences_do_not_preempt_each_other_for_ever() -> None:
    sequences = [sequence_of(numbered(100 * i, 4), 36) for i in range(2)]
    scheduler = scheduler_of(*sequences, num_blocks=10)
    passes = 0
    while scheduler.has_work:
        step(scheduler)
        passes += 1
    assert passes <= 2 * 37 and 1 <= scheduler.num_preempted <= 2


def test_prompts_under_way_that_block_each_other_are_resolved() -> None:
    """Two prompts that were let in with what others then took: the first in order goes on."""
    sequences = [sequence_of(numbered(100 * i, 30), 5) for i in range(2)]
    scheduler = scheduler_of(*sequences, num_blocks=9, budget=20)
    pages = scheduler.pages
    step(scheduler)
    cached = pages.begin_with_prefix([])
    scheduler._run(sequences[1], cached)  # as if it had been admitted
    scheduler._waiting.remove(sequences[1])
    pages.append(cached, 16)
    sequences[1].num_computed = 16
    while scheduler.has_work:
        chunks = scheduler.schedule()
        assert chunks
        commit(scheduler, chunks)
    assert all(s.finish_reason == "length" for s in sequences) and sequences[1].num_preemptions


def test_after_a_failed_pass_everything_is_computed_anew() -> None:
    first, second = sequence_of(numbered(0, 9)), sequence_of(numbered(0, 9))
    scheduler = scheduler_of(first)
    step(scheduler)
    scheduler.add(second)
    scheduler.schedule()
    scheduler.restart()
    assert scheduler.waiting == [first, second] and not scheduler.num_preempted
    assert step(scheduler)[0] == (first, 10)  # nothing is adopted from the pass that failed


# -- nobody starves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [6, 40])
def test_a_stream_of_urgent_sequences_does_not_stop_the_others(num_blocks: int) -> None:
    """Not even when there are so few blocks that the others would always be the victims."""
    patient = [sequence_of(numbered(0, 9), 12, priority=-1), sequence_of(numbered(20, 3), 9, priority=-2)]
    scheduler = scheduler_of(*patient, num_blocks=num_blocks, max_running=2, patience=4)
    passes = 0
    while not all(s.is_finished for s in patient):
        while len(scheduler.waiting) < 4:
            scheduler.add(sequence_of(numbered(1000 * passes, 5), 6))
        step(scheduler)
        passes += 1
        assert passes < 400
    assert passes > 12


def test_an_urgent_sequence_meets_only_a_share_of_an_old_backlog() -> None:
    backlog = [sequence_of(numbered(1000 * i, 3), 2) for i in range(100)]
    scheduler = scheduler_of(*backlog, max_running=1, patience=3)
    for _ in range(40):
        step(scheduler)
    urgent = [sequence_of([5000 + i], 2, priority=1) for i in range(6)]
    for sequence in urgent:
        scheduler.add(sequence)
    waiting = len(scheduler.waiting)
    while not all(s.is_finished for s in urgent):
        step(scheduler)
    assert waiting - len(scheduler.waiting) - 6 <= 3


def test_a_large_prompt_is_not_overtaken_by_small_ones() -> None:
    running, large = sequence_of(numbered(0, 20), 10), sequence_of(numbered(100, 60), 4)
    scheduler = scheduler_of(running, large, num_blocks=17)
    step(scheduler)
    small = [sequence_of([200 + i], 2) for i in range(5)]
    for sequence in small:
        scheduler.add(sequence)
    while not large.num_new:
        step(scheduler)
        assert not any(s.num_new for s in small) or large.num_new


# -- removal ----------------------------------------------------------------------------------------------


def test_sequences_can_be_removed_wherever_they_stand() -> None:
    running, waiting, never = sequence_of([1, 2]), sequence_of([3, 4]), sequence_of([5])
    scheduler = scheduler_of(running, waiting, max_running=1)
    step(scheduler)
    error = RuntimeError("why")
    scheduler.remove(running, "failed", error)
    scheduler.remove(waiting, "cancelled")
    scheduler.remove(never, "cancelled")
    scheduler.remove(running, "stop")
    assert not scheduler.has_work and scheduler.pages.groups[0].pool.num_used == 0
    assert (running.finish_reason, running.error) == ("failed", error)
    assert all(s.status is Status.FINISHED for s in (running, waiting, never))


# -- random programmes ------------------------------------------------------------------------------------

PAGES: dict[str, dict[str, Any]] = {
    "one group": {"num_blocks": (14,), "windows": (None,)},
    "tight": {"num_blocks": (9,), "windows": (None,), "block_size": 3},
    "full and sliding": {"num_blocks": (14, 14), "windows": (None, 6)},
    "sliding pool smaller": {"num_blocks": (16, 8), "windows": (None, 7)},
    "sliding alone": {"num_blocks": (5,), "windows": (9,)},
    "blocks of one": {"num_blocks": (42,), "windows": (None,), "block_size": 1},
    "growing": {"num_blocks": (1, 1), "windows": (None, 6), "growable": True},
}
OPTIONS: list[dict[str, int | None]] = [
    {"token_budget": None},
    {"token_budget": 16},
    {"token_budget": 5, "max_running": 3},
    {"token_budget": 2, "patience": 1},
]


def run(seed: int, steps: int, kind: str, options: dict[str, int | None]) -> Programme:
    setting = dict(PAGES[kind])
    programme = Programme(seed, pages_of(*setting.pop("num_blocks"), **setting), **options)
    for _ in range(steps):
        programme.step()
    programme.drain()
    return programme


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", PAGES)
def test_random_programmes(kind: str, options: dict[str, int | None]) -> None:
    run(1, 150, kind, options)


def test_random_programmes_meet_what_they_are_for() -> None:
    programmes = [
        run(seed, 150, kind, {"token_budget": 16}) for seed, kind in enumerate(["tight", "blocks of one"] * 2)
    ]
    for name in ("ended", "refused", "forked", "restarted", "shared"):
        assert sum(getattr(p, name) for p in programmes) > 0, name
    assert sum(p.scheduler.num_preempted for p in programmes) > 10
    assert sum(len(p.promoted) for p in programmes) > 0


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", PAGES)
def test_long_random_programmes(kind: str, options: dict[str, int | None]) -> None:
    run(2, 10_000, kind, options)

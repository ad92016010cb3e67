"""A relay of items from the first rank to the others. It also notices a lost rank while nothing is computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from ..errors import HfAccelError
from .rank_agreement import RankAgreement

BEAT_SECONDS = 5.0  # the longest that the first rank is silent; a quarter of the timeout if that is less
END = None  # the last item


class Relay:
    """Takes items from the first rank to all others, in their order, over a gloo group of its own.

    All ranks make one, at the same place of the program. The first rank sends a message every few seconds, even
    without items, so that all ranks notice a lost one: a process that died is noticed within BEAT_SECONDS, one that
    hangs after the timeout.
    """

    def __init__(self, *, timeout: float) -> None:
        """timeout: seconds that a rank may be silent."""
        group = distributed.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
        self.ranks = RankAgreement(group, torch.device("cpu"))
        self.leads = self.ranks.leads
        self._beat = min(BEAT_SECONDS, timeout / 4)
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # -- the first rank --------------------------------------------------------------------------------

    def start(self, on_lost: Callable[[HfAccelError], object]) -> None:
        """Start to send, in a thread.

        on_lost: is called in that thread, once, if another rank is lost; then the thread ends.
        """
        self._thread = threading.Thread(target=self._lead, args=(on_lost,), name="hf_accel relay", daemon=True)
        self._thread.start()

    def send(self, item: Any) -> None:
        """Hand an item to all other ranks, without waiting for them."""
        self._items.put(item)

    def close(self) -> None:
        """Tell the other ranks that no more items follow, and wait until they have received that."""
        if self._thread is not None:
            self._items.put(END)
            self._thread.join()

    def _lead(self, on_lost: Callable[[HfAccelError], object]) -> None:
        items: list[Any] = []
        try:
            while END not in items:
                items = self._collected()
                self.ranks.agree(items)
        except HfAccelError as error:
            on_lost(error)

    def _collected(self) -> list[Any]:
        """Collect the items of one beat."""
        items = []
        try:
            items.append(self._items.get(timeout=self._beat))
            while not self._items.empty():
                items.append(self._items.get())
        except queue.Empty:
            pass
        return items

    # -- the others ------------------------------------------------------------------------------------

    def received(self) -> Iterator[list[Any]]:
        """Iterate over what the first rank sends, a list of items at a time; it is empty every few seconds.

        Ends when the first rank closes its relay. Raises LostRankError if it is lost.
        """
        nothing: list[Any] = []
        while True:
            items = self.ranks.agree(nothing)
            yield [item for item in items if item is not END]
            if END in items:
                return

"""Waiting for a collective of torch, which may end at the moment when a wait for it runs out."""

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dist_checkpointing.comm.channel import Channel, ContactLostError


class Work:
    """A collective that ends between the end of the first wait and the look at it."""

    def __init__(self, failure: str | None) -> None:
        self.failure, self.is_ended = failure, False

    def wait(self, timeout: timedelta) -> None:
        if not self.is_ended:
            raise RuntimeError(f"timed out after {timeout}")
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def is_completed(self) -> bool:
        self.is_ended = True
        return True


def end(work: Work) -> None:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    channel = Channel(group, group, lambda: False)
    channel._end(lambda: work, time.monotonic() + 60, 1)


def test_a_collective_that_ends_when_a_wait_runs_out_has_not_failed() -> None:
    end(Work(None))


def test_a_collective_that_fails_when_a_wait_runs_out_says_why() -> None:
    with pytest.raises(ContactLostError, match="the other rank is gone"):
        end(Work("the other rank is gone"))

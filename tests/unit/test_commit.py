"""What the commit costs, whatever the number of files."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dist_checkpointing import InvalidShardingError
from dist_checkpointing.format.commit import Attempt, check_distinct


def test_claiming_a_folder_takes_no_more_memory_than_its_record(tmp_path: Path) -> None:
    """An attempt that an earlier one has left is read at the size that it has."""
    Attempt.begin(tmp_path, ["a"]).release()
    tracemalloc.start()
    Attempt.begin(tmp_path, ["a"]).release()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


class Name(str):
    """A name that counts how often it is compared with another."""

    comparisons: ClassVar[int] = 0
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> Any:
        Name.comparisons += 1
        return super().__eq__(other)


def test_names_that_clash_are_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Name, "comparisons", 0)
    names = [Name(f"n{i // 2}") for i in range(4000)]
    with pytest.raises(InvalidShardingError) as raised:
        check_distinct(names)
    assert len(raised.value.findings) == 2000
    assert Name.comparisons < 10 * len(names)

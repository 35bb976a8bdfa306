"""What the commit costs, whatever the number of files."""

import tracemalloc
from pathlib import Path

from dist_checkpointing.format import Attempt


def test_claiming_a_folder_takes_no_more_memory_than_its_record(tmp_path: Path) -> None:
    """An attempt that an earlier one has left is read at the size that it has."""
    Attempt.begin(tmp_path, ["a"]).release()
    tracemalloc.start()
    Attempt.begin(tmp_path, ["a"]).release()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20

"""What streams keeps no more than a batch: nothing that was read outlives its turn."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import Checkpoint, save
from dist_checkpointing.checkpoint.partial_reads import PartialReads
from dist_checkpointing.tools.diff import compare_checkpoints
from dist_checkpointing.tools.values import Statistics, statistics_of_part, stream_statistics
from states import shard

ROWS, COLUMNS = 64, 100
BUDGET = 4 * COLUMNS * 4  # four rows of float32


VALUES = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7))


def compare(checkpoint: Checkpoint) -> None:
    assert compare_checkpoints(checkpoint, checkpoint, memory_bytes=2 * BUDGET).is_same


def assert_of(found: Statistics, values: torch.Tensor) -> None:
    least, most = values.min().item(), values.max().item()
    assert (found.count, found.minimum, found.maximum) == (values.numel(), least, most)
    assert found.mean == pytest.approx(values.double().mean().item())
    assert found.std == pytest.approx(values.double().std(unbiased=False).item())


def scan(checkpoint: Checkpoint) -> None:
    found = stream_statistics(checkpoint, ["w"], memory_bytes=BUDGET)["w"]
    assert_of(found, VALUES)


def look_at_every_other(checkpoint: Checkpoint) -> None:
    slices = (slice(None, None, 2), slice(None))
    found = statistics_of_part(checkpoint["w"], slices, memory_bytes=BUDGET)
    assert_of(found, VALUES[::2])


def look_at_all(checkpoint: Checkpoint) -> None:
    found = statistics_of_part(checkpoint["w"], memory_bytes=BUDGET)
    assert_of(found, VALUES)


@pytest.mark.parametrize(
    ("stream", "at_once"), [(compare, 2), (scan, 1), (look_at_every_other, 2), (look_at_all, 1)]
)
def test_nothing_outlives_its_batch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stream: Callable[[Checkpoint], None],
    at_once: int,
) -> None:
    rows = VALUES.chunk(16)
    parts = [shard("w", part, (0, i, 16)) for i, part in enumerate(rows)]
    save({"w": parts}, tmp_path / "c", ("zarr", 2))
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    reads = 0
    own = PartialReads.boxes

    def boxes(partial: PartialReads, index: Any, wanted: Any) -> list[torch.Tensor]:
        nonlocal most, reads
        tensors = own(partial, index, wanted)
        for tensor in tensors:
            alive.add(tensor)
        most = max(most, sum(tensor.nbytes for tensor in alive))
        reads += 1
        return tensors

    monkeypatch.setattr(PartialReads, "boxes", boxes)
    stream(Checkpoint.open(tmp_path / "c"))
    assert reads >= 8
    assert most <= at_once * BUDGET

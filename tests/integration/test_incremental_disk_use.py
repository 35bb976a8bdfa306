"""How much of a disk a run of incremental saves takes, whatever changes."""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, strategies as st

from dist_checkpointing import load_plain_tensors, save, verify_checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.storage import Durability, StorageOptions
from dist_checkpointing.strategies import TensorStoreSaveShardedStrategy, Zarr3SaveShardedStrategy
from dist_checkpointing.testing import run_ranks
from states import rows
from tiers import examples

STRATEGIES = (TensorStoreSaveShardedStrategy, Zarr3SaveShardedStrategy)


def is_data(path: Path) -> bool:
    return path.is_file() and (path.parts[-3] == "data" or path.name.startswith("c."))


def data_bytes(folders: Iterable[Path]) -> int:
    """Bytes of the values in some checkpoints; what they share counts once."""
    found = [path.stat() for folder in folders for path in folder.rglob("*") if is_data(path)]
    return sum({status.st_ino: status.st_size for status in found}.values())


@given(
    strategy=st.sampled_from(STRATEGIES),
    sizes=st.lists(st.sampled_from([8, 80, 800, 8000]), min_size=10, max_size=10),
    steps=st.lists(st.tuples(st.sets(st.integers(0, 9)), st.booleans()), min_size=1, max_size=7),
    worlds=st.sampled_from([(1, 1), (2, 2), (2, 1), (1, 2), (2, 4)]),
    file_bytes=st.sampled_from([10_000, 2**30]),
)
@examples(30)
def test_at_most_the_state_and_twice_what_changed(
    strategy: Any,
    sizes: list[int],
    steps: list[tuple[set[int], bool]],
    worlds: tuple[int, int],
    file_bytes: int,
) -> None:
    """Ranks are as many as the first of ``worlds`` says up to the middle, then the second."""
    options = StorageOptions(
        threads=1, durability=Durability.PAGE_CACHE, data_file_bytes=file_bytes
    )
    tensors = {f"w{i}": torch.arange(8 * float(n)).reshape(8, n) for i, n in enumerate(sizes)}
    state_bytes = sum(tensor.nbytes for tensor in tensors.values())
    written = state_bytes
    with tempfile.TemporaryDirectory() as name:
        root, kept = Path(name), dict[Path, dict[str, torch.Tensor]]()
        base: Path | None = None
        for number, (changes, is_deleted) in enumerate([(set[int](), False), *steps]):
            world = worlds[number > len(steps) // 2]
            changed = set(changes)
            if world != worlds[number - 1 > len(steps) // 2] and number:
                # Other chunks: all of them may be written again.
                changed = set(range(len(sizes)))
            written += 2 * sum(tensors[f"w{i}"].nbytes for i in changed) if number else 0
            for i in changes:
                tensors[f"w{i}"] = tensors[f"w{i}"] + 1
            folder = root / str(number)

            def save_it(comm: Comm) -> None:
                state = {key: rows(key, tensor, comm) for key, tensor in tensors.items()}
                save(state, folder, strategy(options=options), comm=comm, base=base)  # noqa: B023

            run_ranks(world, save_it)
            assert data_bytes([folder]) <= 2 * state_bytes
            if is_deleted and base is not None:
                shutil.rmtree(base)
                kept.pop(base)
            kept[folder], base = dict(tensors), folder
            assert data_bytes(kept) <= written
        for folder, expected in kept.items():
            verify_checkpoint(folder)
            found = load_plain_tensors(folder)
            assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())

"""What cannot be read in place is staged within ``buffer_bytes``, whatever its size."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import Checkpoint, ShardedTensor, load, save
from dist_checkpointing.format import Box
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import DefaultLoadPlanner
from dist_checkpointing.storage import ReadMode, StorageOptions
from dist_checkpointing.strategies import (
    PlannedLoadStrategy,
    StrategyAction,
    Zarr3SaveShardedStrategy,
    get_default_strategy,
)
from scripts import run_fresh
from states import flat, shard

BUDGET = 2**20
ROWS, COLUMNS = 500, 4001  # 8 MB of float32
SLACK = 2**19
"""For plans, the index and all else that has nothing to do with the size of a tensor."""


def values() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def loader(
    backend: tuple[str, int], mode: ReadMode, planner: DefaultLoadPlanner | None = None
) -> PlannedLoadStrategy:
    found = get_default_strategy(StrategyAction.LOAD_SHARDED, *backend).for_format(*backend)
    assert isinstance(found, PlannedLoadStrategy)
    options = StorageOptions(buffer_bytes=BUDGET, threads=2, read_mode=mode)
    return type(found)(planner=planner, options=options)


def peak_of_load(template: dict[str, Any], folder: Path, strategy: Any) -> int:
    load(template, folder, strategy, cast="any")  # whatever is imported or cached on first use
    tracemalloc.start()
    load(template, folder, strategy, cast="any")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("what", ["dtype", "device", "flattened range"])
@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        (("tensorstore", 1), ReadMode.MEMMAP),
        (("zarr", 2), ReadMode.PREAD),
        (("zarr", 1), ReadMode.MEMMAP),
        (("torch_dist", 1), ReadMode.PREAD),
    ],
)
def test_what_needs_a_copy(
    tmp_path: Path,
    backend: tuple[str, int],
    mode: ReadMode,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values for another dtype, or as if for a GPU: no array of numpy's reaches their memory."""
    full = values()
    save({"w": shard("w", full)}, tmp_path, backend)
    if what == "dtype":
        leaf, expected = shard("w", torch.zeros(ROWS, COLUMNS).bfloat16()), full.bfloat16()
    elif what == "device":
        # Some columns: they do not lie together in the file either.
        box = Box((3, 2000), (490, 2001))
        leaf = ShardedTensor.from_offset("w", torch.zeros(box.shape), (ROWS, COLUMNS), box.offset)
        expected = full[box.slices()]
    else:
        start, stop = 12_345, ROWS * COLUMNS - 6_789
        leaf = flat("w", torch.zeros(ROWS, COLUMNS), start, stop)
        expected = full.reshape(-1)[start:stop]
    if what != "dtype":
        monkeypatch.setattr(tensor_memory, "fillable", lambda *_: None)
    assert peak_of_load({"w": leaf}, tmp_path, loader(backend, mode)) < BUDGET + SLACK
    assert leaf.data is not None
    assert torch.equal(leaf.data, expected)


def test_a_compressed_chunk_is_not_copied_as_a_whole(tmp_path: Path) -> None:
    full = values()
    save({"w": shard("w", full)}, tmp_path, Zarr3SaveShardedStrategy(codec="zstd"))
    wanted: dict[str, Any] = {"w": shard("w", torch.zeros(ROWS, COLUMNS).half())}
    # The file and the decoded chunk are there as a whole; 4 MiB of it are copied at a time.
    peak = peak_of_load(wanted, tmp_path, loader(("zarr", 2), ReadMode.PREAD))
    assert peak < 2 * full.nbytes + 2**22 + SLACK
    assert torch.equal(wanted["w"].data, full.half())


# What a save of many small tensors takes beyond them, in a process of its own.


COUNT = 12_000
PROGRAM = """
import gc, json, re, sys
from pathlib import Path
import torch
from dist_checkpointing import ShardedTensor, save

def status(name):
    text = Path("/proc/self/status").read_text()
    return int(re.search(name + r":\\s+(\\d+)", text)[1]) * 1024

def state(count):
    names = [f"layers.{i // 20}.mlp.weight.{i % 20}" for i in range(count)]
    tensor = ShardedTensor.from_rank_offsets
    return {name: tensor(name, torch.full((256,), float(i))) for i, name in enumerate(names)}

save(state(10), sys.argv[1] + "/warm")
many = state(int(sys.argv[2]))
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
save(many, sys.argv[1] + "/c")
gc.collect()
print(json.dumps({"peak": status("VmHWM") - before, "left": status("VmRSS") - before}))
"""


def test_a_save_takes_a_known_amount_for_each_tensor(tmp_path: Path) -> None:
    done = run_fresh("-c", PROGRAM, tmp_path, COUNT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # What docs/how_it_works.md promises, and some room for the allocator.
    assert found["peak"] < 16 * 2**20 + COUNT * 2 * 2**10
    assert found["left"] < 16 * 2**20 + COUNT * 2 * 2**10


LARGE = """
import json, sys
import torch
from dist_checkpointing import Recipe, ShardedTensor, save
from dist_checkpointing.planning import CastTo
from dist_checkpointing.storage import StorageOptions
from dist_checkpointing.strategies import SafetensorsSaveShardedStrategy

def peak(name, tensor, recipe=None, **options):
    strategy = SafetensorsSaveShardedStrategy(options=StorageOptions(threads=4), **options)
    state = {"w": ShardedTensor.from_rank_offsets("w", tensor)}
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    save(state, f"{sys.argv[1]}/{name}", strategy, recipe=recipe)
    return status("VmHWM") - before

recipe = Recipe(CastTo("w", torch.float16))
large = torch.ones(2**13, 2**13)
turns = {
    "warm": lambda: peak("warm", torch.ones(2**8, 2**8), dtype=torch.float16),
    "cast": lambda: peak("cast", large, dtype=torch.float16),
    "wider": lambda: peak("wider", large, dtype=torch.float64),
    "strided": lambda: peak("strided", large.t()),
    "recipe": lambda: peak("recipe", large, recipe),
    "strided recipe": lambda: peak("strided recipe", large.t(), recipe),
}
print(json.dumps({name: turn() for name, turn in turns.items()}))
"""


def test_a_save_as_safetensors_converts_in_small_blocks(tmp_path: Path) -> None:
    """A tensor of 256 MiB, cast or strided, takes at most 64 MiB more, with any threads."""
    preface, _, _ = PROGRAM.partition("def state")
    done = run_fresh("-c", preface + LARGE, tmp_path)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert max(peaks.values()) < 2**26, peaks
    for name, dtype in (("recipe", torch.float16), ("wider", torch.float64)):
        found = Checkpoint.open(tmp_path / name)["w"][1000:1002]
        assert torch.equal(found, torch.ones(2, 2**13, dtype=dtype))

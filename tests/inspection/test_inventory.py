from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing import Checkpoint
from dist_checkpointing.format.file_names import is_of_optimizer, optimizer_prefixes
from dist_checkpointing.strategies.tensorstore.database import DATA_GROUPS, group_of
from dist_checkpointing.tools.stats import count_contents


def test_it_adds_up(any_sample: Any) -> None:
    checkpoint = Checkpoint.open(any_sample.folder)
    found = count_contents(checkpoint, most_listed=3)
    tensors = any_sample.tensors
    files = [path for path in any_sample.folder.rglob("*") if path.is_file()]
    assert (found.files.num_files, found.files.num_bytes) == (
        len(files),
        sum(path.stat().st_size for path in files),
    )
    assert found.tensors.num_tensors == len(tensors)
    assert found.tensors.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert found.num_elements == sum(tensor.numel() for tensor in tensors.values())
    for name, share in found.by_dtype.items():
        own = [t for t in tensors.values() if str(t.dtype) == f"torch.{name}"]
        assert (share.num_tensors, share.num_bytes) == (len(own), sum(t.nbytes for t in own))
    optimizer = [t for key, t in tensors.items() if key.startswith("optim")]
    assert found.optimizer.num_tensors == len(optimizer) > 0
    assert found.optimizer.num_bytes == sum(t.nbytes for t in optimizer)
    assert found.model.num_tensors + found.optimizer.num_tensors == len(tensors)
    sizes = sorted((tensor.nbytes for tensor in tensors.values()), reverse=True)
    assert [size for _, size in found.largest] == sizes[:3]
    assert len(found.largest_files) == min(3, len(files))
    assert found.num_chunks == sum(len(handle.chunks) for handle in checkpoint.values())
    largest = max(c.num_bytes for handle in checkpoint.values() for c in handle.chunks)
    assert found.largest_chunk_bytes == largest


@pytest.mark.parametrize(
    ("key", "is_optimizer"),
    [
        ("optimizer.state.exp_avg.w", True),
        ("optim.w", True),
        ("chained_0.optimizer.w", True),
        ("chained_12.optim", True),
        ("model.optimizer.w", False),
        ("decoder.w", False),
        ("chained_x.optimizer.w", False),
        ("optim", True),
        ("optim/w", True),
        ("optims_0", True),
        ("optimizers.1.w", True),
        ("optimizer_state", True),
        ("optimal_transport.w", False),
        ("optimism", False),
        ("optimizern.w", False),
    ],
)
def test_who_is_of_the_optimizer(key: str, *, is_optimizer: bool) -> None:
    assert is_of_optimizer(key) is is_optimizer
    assert (DATA_GROUPS[group_of(key)] == "optimizer") is is_optimizer


@given(st.sets(st.from_regex(r"\A(chained_[0-3]\.)?(optim|optimizer|optimal|w)?[./s]?[a-c]?\Z")))
def test_prefixes_drop_what_is_of_the_optimizer_and_nothing_else(keys: set[str]) -> None:
    prefixes = optimizer_prefixes(keys)
    dropped = {key for key in keys if key.startswith(tuple(prefixes))}
    assert all(map(is_of_optimizer, dropped))
    # "optim" alone stays where "optimal" would go with it.
    left = filter(is_of_optimizer, keys - dropped)
    assert all(re.search(r"optim(izer)?s?\Z", key) for key in left)

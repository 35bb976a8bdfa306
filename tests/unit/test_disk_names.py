"""Keys as names of folders, and keys of optimizers."""

import re

import pytest
from hypothesis import example, given, strategies as st

from dist_checkpointing.format.file_names import (
    disk_name,
    disk_names,
    is_of_optimizer,
    optimizer_prefixes,
)

KEYS = st.one_of(
    st.text(min_size=1, max_size=5),
    st.from_regex(r"[A-Za-z0-9._-]{1,6}", fullmatch=True),
    st.sampled_from(
        ["zarr.json", "metadata.json", "a" * 200, "a" * 201, ".a", "a\n", "\n", "a\n.b"]
    ),
)


@given(st.lists(KEYS, max_size=4))
@example([""])
@example(["a", ""])
@example(["a\nb"])
def test_many_names_are_the_names_of_each(keys: list[str]) -> None:
    assert disk_names(keys) == list(map(disk_name, keys))


@pytest.mark.parametrize(
    ("key", "is_optimizer"),
    [
        ("optimizer.state.exp_avg.w", True),
        ("chained_12.optim", True),
        ("model.optimizer.w", False),
        ("chained_x.optimizer.w", False),
        ("optim", True),
        ("optimizers.1.w", True),
        ("optimal_transport.w", False),
    ],
)
def test_who_is_of_the_optimizer(key: str, *, is_optimizer: bool) -> None:
    assert is_of_optimizer(key) is is_optimizer


@given(st.sets(st.from_regex(r"\A(chained_[0-3]\.)?(optim|optimizer|optimal|w)?[./s]?[a-c]?\Z")))
def test_prefixes_drop_what_is_of_the_optimizer_and_nothing_else(keys: set[str]) -> None:
    prefixes = optimizer_prefixes(keys)
    dropped = {key for key in keys if key.startswith(tuple(prefixes))}
    assert all(map(is_of_optimizer, dropped))
    # "optim" alone stays where "optimal" would go with it.
    left = filter(is_of_optimizer, keys - dropped)
    assert all(re.search(r"optim(izer)?s?\Z", key) for key in left)

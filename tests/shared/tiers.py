"""The two tiers of the tests: everything, or a quick look (``--once-each``).

The quick look runs each function on one of its parameter sets, one slow test of each file, and no
exhaustive test.
"""

from __future__ import annotations

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--once-each",
        action="store_true",
        help="run each function on one parameter set, one slow test a file, nothing exhaustive",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("once_each"):
        return
    chosen: dict[tuple[object, ...], pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            function = getattr(item, "originalname", item.name)
            place = (item.path, getattr(item, "cls", None), function)
            if item.get_closest_marker("slow") is not None:
                place = (item.path, None, "slow")  # of tests that start processes one a file
            known = chosen.get(place)
            # By a hash of the name: other functions then take other backends, dtypes and ranks.
            if known is None or _rank(item) < _rank(known):
                chosen[place] = item
    kept = set(chosen.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _rank(item: pytest.Item) -> tuple[int, str]:
    name = f"{item.path.name}::{item.name}"
    return zlib.crc32(name.encode()), name

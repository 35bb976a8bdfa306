"""A backend whose shards are cut and joined as another's are takes each test with most ranks alone.

``tensorstore`` and raw zarr v3 take the conformance suite with all numbers of ranks.
"""

from pathlib import Path
from typing import Any

import pytest

from few_worlds import FewWorlds

_WORLDS = ("world_size", "save_world", "load_world")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most: dict[Any, pytest.Item] = {}
    for item in items:
        if _is_alike(item):
            known = most.setdefault(_test(item), item)
            if _num_ranks(item) > _num_ranks(known):
                most[_test(item)] = item
    kept = set(most.values())
    dropped = {item for item in items if _is_alike(item)} - kept
    config.hook.pytest_deselected(items=[*dropped])
    items[:] = [item for item in items if item not in dropped]


def _is_alike(item: pytest.Item) -> bool:
    cls: Any = getattr(item, "cls", None) or object
    return item.path.parent == Path(__file__).parent and issubclass(cls, FewWorlds)


def _parameters(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _test(item: Any) -> Any:
    others = {name: value for name, value in _parameters(item).items() if name not in _WORLDS}
    return item.cls, item.originalname, repr(others)


def _num_ranks(item: pytest.Item) -> int:
    return sum(_parameters(item).get(name, 0) for name in _WORLDS)

"""The two tiers of the tests: everything, or each function once (``--once-each``).

The quick tier leaves out what is marked ``exhaustive``, gives each other function one of its
parameter sets, and draws a tenth of the examples for properties.
"""

import os
import zlib

import pytest
from hypothesis import HealthCheck, settings

_EXAMPLES = 100


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--once-each",
        action="store_true",
        help="run each function on one parameter set and few examples, nothing exhaustive",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Tests share the cores, also with the processes that they start; torch reads it on import.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What a program prints is as wide as a test says; workers of xdist have a width of their own.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    # For a checkout that is not installed.
    paths = [str(config.rootpath), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    settings.register_profile(
        "everything",
        deadline=None,
        derandomize=True,
        max_examples=_EXAMPLES,
        suppress_health_check=slow,
    )
    settings.register_profile("quick", settings.get_profile("everything"), max_examples=10)
    settings.load_profile("quick" if config.getoption("once_each") else "everything")


def share(count: int) -> int:
    """How many of so many rounds or examples belong to this tier: all, or a tenth."""
    return -(-count * settings().max_examples // _EXAMPLES)


def examples(count: int) -> settings:
    """Decorator of a property: so many examples in the full tier, a tenth in the quick one."""
    return settings(max_examples=max(share(count), 5))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("once_each"):
        return
    chosen: dict[tuple[object, ...], pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            place = (item.path, _home(item), getattr(item, "originalname", item.name))
            known = chosen.get(place)
            # By a hash of the name: other functions then take other backends, dtypes and ranks.
            if known is None or _rank(item) < _rank(known):
                chosen[place] = item
    kept = set(chosen.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _home(item: pytest.Item) -> object:
    """Class of a method; of one that several classes of a file inherit, where it is written."""
    module = getattr(getattr(item, "function", None), "__module__", None)
    own = getattr(getattr(item, "module", None), "__name__", None)
    return getattr(item, "cls", None) if module == own else module


def _rank(item: pytest.Item) -> tuple[int, str]:
    name = f"{item.path.name}::{item.name}"
    return zlib.crc32(name.encode()), name

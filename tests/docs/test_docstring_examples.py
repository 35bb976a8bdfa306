"""The examples in docstrings run, and every public name that a user calls has one."""

import doctest
import importlib
import inspect
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dist_checkpointing

PACKAGE = Path(dist_checkpointing.__file__).parent
NAMES: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "public_names.json").read_text(encoding="utf-8")
)

WITHOUT = {
    # What the library makes for a user.
    "ChunkPlace",
    "Finding",
    "LoadPlan",
    "MetadataIndex",
    "Progress",
    "ReadItem",
    "SavePlan",
    "SavedStep",
    "StoredChunk",
    "StoredState",
    "TensorWriteData",
    "WriteItem",
    "WriteResult",
    # Of a third party's class: docs/backend.md is an example of all.
    "SaveStrategyBase",
    "ShardedStateful",
    "done",
    # They need processes, or torch.distributed.
    "TorchComm",
    "group_comm",
}
"""Public names that need no example; nor do values, enums, and what a third party completes."""


def _modules_with_examples() -> list[str]:
    paths = (path for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text())
    return [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    ]


def _examples(module: ModuleType) -> Iterator[doctest.DocTest]:
    """Every docstring of a module with an example; the names in it are those that users import."""
    public = {name: getattr(dist_checkpointing, name) for name in dist_checkpointing.__all__}
    names = {"torch": torch, **vars(module), **public}
    finder = doctest.DocTestFinder(exclude_empty=True)
    yield from (test for test in finder.find(module, globs=names) if test.examples)


# torch says this of single processes.
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("module", _modules_with_examples())
def test_the_examples_of_a_module_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    found = list(_examples(importlib.import_module(module)))
    assert found, "none of its examples is in a docstring"
    said: list[str] = []
    failed = 0
    for number, example in enumerate(found):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        failed += runner.run(example, out=said.append).failed
    assert not failed, "".join(said)


def _has_example(value: Any) -> bool:
    own = inspect.getdoc(value) or ""
    methods = [m for m in vars(value).values() if callable(m)] if inspect.isclass(value) else []
    docs = [own, *(inspect.getdoc(getattr(m, "__func__", m)) or "" for m in methods)]
    return any("Example:\n" in doc and ">>> " in doc for doc in docs)


def _is_called(value: Any) -> bool:
    """Of errors their root has an example for all."""
    if not inspect.isclass(value):
        return inspect.isfunction(value)
    is_error = (
        issubclass(value, Exception) and value is not dist_checkpointing.CheckpointingException
    )
    return not (is_error or issubclass(value, Enum) or inspect.isabstract(value))


def test_every_public_name_that_is_called_has_an_example() -> None:
    values = {
        name: getattr(importlib.import_module(module), name)
        for module, names in NAMES.items()
        for name in names
    }
    assert values.keys() >= WITHOUT
    called = {name for name, value in values.items() if _is_called(value)}
    without = {name for name in called if not _has_example(values[name])}
    assert without == WITHOUT, "give it an example, or take it off WITHOUT"

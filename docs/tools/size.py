"""Measures how much code there is, and how much of it one tensor passes through: ``make size``."""

from __future__ import annotations

import ast
import inspect
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType

import grimp
import torch

from dist_checkpointing import ShardedTensor, load, save
from house import PACKAGE, ROOT, sizes

TESTS = ROOT / "tests"


def nodes(paths: Iterable[Path]) -> int:
    """Nodes of the syntax trees. Long lines, comments and docstrings do not change their number."""
    count = 0
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            # Load, Store and Del repeat what the node above them says.
            count += not isinstance(node, ast.expr_context)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                count -= 2 * (ast.get_docstring(node) is not None)  # an Expr and its Constant
    return count


def calls(action: Callable[[], object]) -> tuple[int, int, int]:
    """Calls, functions and files of the package that an action enters, without lambdas."""
    entered: list[CodeType] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        inside = code.co_filename.startswith(f"{PACKAGE}/") and not code.co_name.startswith("<")
        if event == "call" and inside:
            entered.append(code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(entered), len(set(entered)), len({code.co_filename for code in entered})


def one_tensor() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """What ``save`` and ``load`` of one tensor enter, after a first round that imports modules."""
    states = [
        {"w": ShardedTensor.from_rank_offsets("w", torch.arange(12.0).reshape(4, 3)), "step": 1}
        for _ in range(4)
    ]
    with tempfile.TemporaryDirectory() as folder:
        save(states[0], f"{folder}/first")
        load(states[1], f"{folder}/first")
        saved = calls(lambda: save(states[2], f"{folder}/second"))
        loaded = calls(lambda: load(states[3], f"{folder}/first"))
    return saved, loaded


def cycles() -> list[list[str]]:
    """The strongly connected components of the imports that are more than one module.

    Imports in functions and under ``TYPE_CHECKING`` count: without them no cycle is left, which
    only says that the package can be imported.
    """
    graph = grimp.build_graph("dist_checkpointing", cache_dir=None)
    groups = {
        frozenset(graph.find_upstream_modules(name) & graph.find_downstream_modules(name) | {name})
        for name in graph.modules
    }
    return sorted(sorted(group) for group in groups if len(group) > 1)


def imports_internals(path: Path) -> bool:
    """Whether a file imports what is not public.

    That is a module two or more dots deep (``dist_checkpointing.planning.resharding``), public
    names in it included, or a name with an underscore in front.
    """
    imported: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            imported += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            imported += [(alias.name, "") for alias in node.names]
    return any(
        module.partition(".")[0] == PACKAGE.name and (module.count(".") > 1 or name.startswith("_"))
        for module, name in imported
    )


def table() -> list[tuple[str, str, str]]:
    """Rows: a measure, now, the goal."""
    count = sizes()
    lines, files = count["dist_checkpointing"]
    saved, loaded = one_tensor()
    groups = cycles()
    tests = sorted(TESTS.rglob("*.py"))
    return [
        ("measure", "now", "goal"),
        ("lines of the library", f"{lines:,}", "43,000"),
        ("files of the library", f"{files:,}", "175"),
        ("nodes of its syntax trees", f"{nodes(PACKAGE.rglob('*.py')):,}", "190,000"),
        (
            "save of a tensor: calls / functions / files",
            "{} / {} / {}".format(*saved),
            "400 / 180 / 30",
        ),
        (
            "load of a tensor: calls / functions / files",
            "{} / {} / {}".format(*loaded),
            "350 / 160 / 28",
        ),
        ("import cycles", f"{len(groups)}", "0"),
        *(
            (f"  {', '.join(name.removeprefix(f'{PACKAGE.name}.') for name in group)}", "", "")
            for group in groups
        ),
        ("parameters of save", f"{len(inspect.signature(save).parameters)}", "17"),
        ("lines of the tests", f"{count['tests'][0]:,}", "45,000"),
        (
            f"test files that import internals, of {len(tests)}",
            f"{sum(map(imports_internals, tests))}",
            "70",
        ),
    ]


if __name__ == "__main__":
    for measure, now, goal in table():
        print(f"{measure:48} {now:>16} {goal:>16}".rstrip())  # noqa: T201 - that is what it is for

"""What importing the package takes with it, and what it offers."""

import ast
import importlib
import importlib.util
import json
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

import dist_checkpointing
from scripts import run_fresh

PACKAGE = Path(dist_checkpointing.__file__).parent


STAGES = """
import json, sys, threading
sys.modules["pytest"] = None
told = {}

def tell(stage):
    names = {name.partition(".")[0] for name in sys.modules}
    heavy = names & {"zarr", "numcodecs", "tensorstore", "xarray"}
    ours = [name for name in sys.modules if name.startswith("dist_checkpointing.strategies.zarr")]
    told[stage] = sorted(heavy) + ours

import dist_checkpointing.interop
told["torch"] = "torch" in sys.modules
tell("dist_checkpointing")
import dist_checkpointing.serialization
tell("dist_checkpointing.serialization")
import torch.distributed
told["is initialized"] = torch.distributed.is_initialized()
told["threads"] = threading.active_count()
import dist_checkpointing.testing
tell("dist_checkpointing.testing")
told["ranks"] = dist_checkpointing.testing.run_ranks(3, lambda comm: comm.rank)
told["is checkpoint"] = dist_checkpointing.check_is_distributed_checkpoint(sys.argv[1])
tell("common state")
told["interop"] = dist_checkpointing.interop.shard_state_dict.__name__
told["position"] = dist_checkpointing.interop.DataPosition.__name__
told["dcp"] = "torch.distributed.checkpoint" in sys.modules
print(json.dumps(told))
"""


def test_what_an_import_takes_with_it(tmp_path: Path) -> None:
    dist_checkpointing.save({"step": 5}, tmp_path, ("zarr", 2))
    finished = run_fresh("-c", STAGES, tmp_path)
    assert finished.stderr == ""
    assert json.loads(finished.stdout) == {
        # No zarr and no TensorStore, not even where common state is read.
        "torch": False,
        "dist_checkpointing": [],
        "dist_checkpointing.serialization": [],
        "dist_checkpointing.testing": [],
        "common state": [],
        "is initialized": False,
        "threads": 1,
        "ranks": [0, 1, 2],
        "is checkpoint": True,
        "interop": "shard_state_dict",
        "position": "DataPosition",
        "dcp": False,
    }


def test_all_names_are_there_sorted_and_nothing_else_is_public() -> None:
    names = dist_checkpointing.__all__
    assert sorted(set(names)) == names
    namespace: dict[str, object] = {}
    exec("from dist_checkpointing import *", namespace)
    assert {*namespace} - {"__builtins__"} == {*names}
    assert set(names) <= set(dir(dist_checkpointing))
    # ``import dist_checkpointing.x`` sets the attribute ``x``, which must hide no public name.
    modules = {module.name for module in pkgutil.iter_modules(dist_checkpointing.__path__)}
    assert modules & set(names) == set()


def test_what_is_imported_on_first_use_is_what_a_type_checker_sees() -> None:
    tree = ast.parse(Path(dist_checkpointing.__file__).read_text())
    seen = {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {
        (f"dist_checkpointing.{module}", name)
        for module, names in dist_checkpointing._NAMES_BY_MODULE.items()
        for name in names.split()
    }
    assert seen == lazy | {("dist_checkpointing", "interop")}
    assert {name for _, name in lazy} == set(dist_checkpointing.__all__)
    for module, names in dist_checkpointing._NAMES_BY_MODULE.items():
        home = importlib.import_module(f"dist_checkpointing.{module}")
        for name in names.split():
            assert getattr(dist_checkpointing, name) is getattr(home, name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = dist_checkpointing.nothing  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        exec("from dist_checkpointing import nothing")


def test_the_version_is_written_down_once_and_the_licence_in_full() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", dist_checkpointing.__version__)
    assert (PACKAGE / "py.typed").is_file()
    root = PACKAGE.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("not a checkout")
    described = tomllib.loads((root / "pyproject.toml").read_text())
    project = described["project"]
    assert project["dynamic"] == ["version"]
    assert described["tool"]["hatch"]["version"]["path"] == "dist_checkpointing/__init__.py"
    assert project["license"] == "Apache-2.0"
    (name,) = project["license-files"]
    text = (root / name).read_text()
    assert "END OF TERMS AND CONDITIONS" in text
    assert "The dist_checkpointing authors" in text


def test_the_link_at_the_top_of_the_repository_refuses_to_be_imported() -> None:
    root = PACKAGE.parent
    if not (root / "strategies").is_symlink():
        pytest.skip("not a checkout, or one without links")
    assert (root / "strategies").resolve() == PACKAGE / "strategies"
    code = """
for way in ("import strategies", "import strategies.base", "from strategies import zarr"):
    try:
        exec(way)
    except ImportError as error:
        print(error)
import dist_checkpointing.strategies
"""
    finished = run_fresh("-c", code, cwd=root)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("import dist_checkpointing.strategies, not 'strategies'") == 3


def test_the_help_of_the_program_imports_no_command_and_no_torch() -> None:
    code = """
import sys
from dist_checkpointing.tools.app import COMMANDS, main
sys.argv = ["dckpt", "--help"]
try:
    main()
finally:
    homes = [place.partition(":")[0] for place, _ in COMMANDS.values()]
    names = [f"dist_checkpointing.tools.{home}" for home in homes]
    print([name for name in ("torch", "numpy", *names) if name in sys.modules])
"""
    finished = run_fresh("-c", code)
    assert finished.returncode == 0, finished.stderr
    assert "Remove tensors for good." in finished.stdout
    assert finished.stdout.endswith("\n[]\n")

"""The set-up of a checkout: what a target installs, what a person sees of it, what is packaged."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dist_checkpointing
from scripts import run_fresh

ROOT = Path(dist_checkpointing.__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="not a checkout")

PYTHON = """#!/bin/bash
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  -c*) exec {real} "$@" ;;
  *"pip install"*) echo "Collecting torch"; echo "WARNING: noise"; echo "$*" >> installed; {end} ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/set-up"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(checkout: Path, *command: str, end: str = "true") -> subprocess.CompletedProcess[str]:
    python = checkout / "python"
    python.write_text(PYTHON.replace("{end}", end).replace("{real}", sys.executable))
    python.chmod(0o755)
    surroundings = {**os.environ, "PYTHON": str(python)}
    return subprocess.run(
        command, cwd=checkout, env=surroundings, text=True, capture_output=True, check=False
    )


def test_the_demo_installs_only_what_it_needs(checkout: Path) -> None:
    assert run(checkout, "make", ".venv/demo-ready").returncode == 0
    assert (checkout / "installed").read_text().split()[-1] == ".[demo]"
    assert run(checkout, "make", ".venv/ready").returncode == 0
    assert (checkout / "installed").read_text().split()[-1] == ".[dev]"
    # With all of it there, nothing more is installed for the demo.
    (checkout / ".venv" / "demo-ready").unlink()
    (checkout / "installed").unlink()
    assert run(checkout, "make", ".venv/demo-ready").returncode == 0
    assert not (checkout / "installed").exists()
    # For the site the package, which programs that run may be importing, is not installed again.
    assert run(checkout, "make", ".venv/docs-ready").returncode == 0
    added = (checkout / "installed").read_text().split()
    assert "mkdocs>=1.6,<2" in added
    assert not {"-e", ".", ".[docs]"} & {*added}


def test_the_set_up_says_how_long_and_no_more(checkout: Path) -> None:
    ended = run(checkout, ".ci/set-up", "demo")
    first, last = ended.stderr.splitlines()
    assert "2 to 10 minutes" in first
    assert "GB" in first
    assert last.startswith("Ready after")
    assert not ended.stdout


def test_a_set_up_that_fails_shows_why(checkout: Path) -> None:
    ended = run(checkout, ".ci/set-up", "dev", end="echo no space left; exit 1")
    assert ended.returncode != 0
    assert "no space left" in ended.stderr
    assert not (checkout / ".venv" / "ready").exists()


def built(root: Path, to: Path) -> dict[str, bytes]:
    """Content of the wheel and of the sdist of a source folder, by name."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(to)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in to.iterdir()}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return built(ROOT, tmp_path_factory.mktemp("packages"))


def test_builds_are_the_same_bytes_also_without_git_and_links(
    tmp_path: Path, packages: dict[str, bytes]
) -> None:
    wheel, sdist = sorted(packages, key=lambda name: name.endswith(".tar.gz"))
    assert wheel.endswith("-py3-none-any.whl")
    with tarfile.open(fileobj=io.BytesIO(packages[sdist])) as archive:
        assert all(member.isfile() for member in archive)
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.removesuffix(".tar.gz")
    # What a zip of the repository has in the place of the link.
    (unpacked / "strategies").write_text("dist_checkpointing/strategies")
    for path in unpacked.rglob("*"):
        os.utime(path, (10**9, 10**9))
    assert built(unpacked, tmp_path / "again") == packages


def dependencies() -> list[str]:
    """What pyproject.toml says that the package needs."""
    named: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    return named


def required(requirements: list[str]) -> set[str]:
    """Names of the distributions that an empty environment has after an installation."""
    found, waiting = set[str](), [*map(Requirement, requirements)]
    while waiting:
        asked = waiting.pop()
        extras = asked.extras or {""}
        new = {f"{canonicalize_name(asked.name)}[{extra}]" for extra in extras} - found
        found |= new
        needs = map(Requirement, (metadata.requires(asked.name) or []) if new else [])
        waiting += [
            need
            for need in needs
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras)
        ]
    return {name.partition("[")[0] for name in found}


def test_the_wheel_needs_nothing_but_what_it_requires(
    tmp_path: Path, packages: dict[str, bytes]
) -> None:
    (wheel,) = (content for name, content in packages.items() if name.endswith(".whl"))
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        archive.extractall(tmp_path)
    kept = required(dependencies()) | {"dist-checkpointing"}
    homes = metadata.packages_distributions().items()
    hidden = [module for module, names in homes if not {*map(canonicalize_name, names)} & kept]
    assert {"pytest", "obstore", "safetensors"} <= {*hidden}
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({hidden}))\n"
        f"import dist_checkpointing; assert {str(tmp_path)!r} in dist_checkpointing.__file__\n"
        "sys.argv[1:] = ['selftest']; runpy.run_module('dist_checkpointing', run_name='__main__')"
    )
    ended = run_fresh("-c", program, cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 0, ended.stderr
    assert "object stores   not installed" in ended.stdout


def test_the_conda_recipe_is_of_this_version_and_needs_the_same() -> None:
    recipe = (ROOT / "conda" / "meta.yaml").read_text()
    assert f'"{dist_checkpointing.__version__}"' in recipe
    conda_names = {"torch": "pytorch", "xxhash": "python-xxhash"}
    needs = {
        f"{conda_names.get(need.name, need.name)} {need.specifier}"
        for need in map(Requirement, dependencies())
    }
    run = recipe.partition("  run:\n")[2].partition("\ntest:")[0]
    assert {line.strip(" -") for line in run.splitlines()} == {"python >=3.11", *needs}

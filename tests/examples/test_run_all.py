"""``make examples``: it knows every example, and says which fail."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dist_checkpointing
import harness

SCRIPT = Path(dist_checkpointing.__file__).parents[1] / "examples" / "run_all.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not a checkout")


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_all", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_all", module)
    spec.loader.exec_module(module)
    return module


def test_every_program_is_run(run_all: ModuleType) -> None:
    programs = {
        path.stem
        for path in SCRIPT.parent.glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text() and path != SCRIPT
    }
    assert programs == set(run_all.EXAMPLES)


def test_cheap_examples_run_and_one_that_fails_is_named(
    run_all: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all.py", "adapter_run", "read_megatron"])
    run_all.main()
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == ["adapter_run", "read_megatron"]
    examples = {"good": ["-c pass"], "bad": ["-c raise(KeyError(7))"]}
    monkeypatch.setattr(run_all, "EXAMPLES", examples)
    monkeypatch.setattr(sys, "argv", ["run_all.py"])
    with pytest.raises(SystemExit, match=r"^failed: bad$"):
        run_all.main()
    said = capsys.readouterr().out
    assert said.startswith("good ")
    assert "bad                  FAILED: python -c raise(KeyError(7))" in said
    assert "KeyError: 7" in said


def test_the_last_run_of_the_demo_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    for name in ("first", "second"):
        monkeypatch.setattr(harness, "datetime", _Clock(name))
        folder = harness.output_folder(parser, None)
        assert Path("demo-output/latest").resolve() == folder.resolve()
    harness.output_folder(parser, None, "chaos-")
    assert Path("demo-output/latest").resolve().name == "second"


class _Clock:
    def __init__(self, name: str) -> None:
        self.name = name

    def now(self) -> "_Clock":
        return self

    def astimezone(self) -> "_Clock":
        return self

    def __format__(self, pattern: str) -> str:
        return self.name

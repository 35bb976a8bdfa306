"""``make examples``: it knows every example, and says which fail."""

import sys
from pathlib import Path

import pytest

import dist_checkpointing
import run_all

SCRIPT = Path(dist_checkpointing.__file__).parents[1] / "examples" / "run_all.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not a checkout")


def test_every_program_is_run() -> None:
    programs = {
        path.stem
        for path in SCRIPT.parent.glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text() and path != SCRIPT
    }
    assert programs == set(run_all.EXAMPLES)


def test_an_example_runs_and_one_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all.py", "read_megatron"])
    run_all.main()
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == ["read_megatron"]
    examples = {"good": ["-c pass"], "bad": ["-c raise(KeyError(7))"]}
    monkeypatch.setattr(run_all, "EXAMPLES", examples)
    monkeypatch.setattr(sys, "argv", ["run_all.py"])
    with pytest.raises(SystemExit, match=r"^failed: bad$"):
        run_all.main()
    said = capsys.readouterr().out
    assert said.startswith("good ")
    assert "bad                  FAILED: python -c raise(KeyError(7))" in said
    assert "KeyError: 7" in said

"""A process of its own that reads hostile files under limits, and says how each of them ended."""

import contextlib
import io
import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

MOST_MEMORY: Final = 256 << 20
"""What one file may take, in bytes."""

MOST_SECONDS: Final = 60
"""After which a child hangs; a hundred times what a file takes on an idle machine."""

_ROOM = 512 << 20  # of addresses: threads reserve some that they never touch


class LimitedChild:
    """Starts the child when it is needed, and again when it has died.

    Args:
        warm_up: what it reads before the limits hold, so that imports and pools do not count.
    """

    def __init__(self, warm_up: list[dict[str, Any]]) -> None:
        self._warm_up = warm_up
        self._process: subprocess.Popen[str] | None = None

    def outcomes(self, request: dict[str, Any]) -> list[str]:
        """How each step of a request ended: "equal", "different", or an error and its text."""
        if self._process is None:
            self._start()
        answer = self._ask(request)
        if answer is None:
            assert self._process is not None
            code = self._process.wait()
            self._process = None
            return [f"the process ended with {code}"]
        return answer

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        )
        for request in self._warm_up:
            answer = self._ask(request)
            assert answer is not None
            assert set(answer) == {"equal"}, answer
        assert self._ask({"do": "limit"}) == []

    def _ask(self, request: dict[str, Any]) -> list[str] | None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(MOST_SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            timer.cancel()
        answer: list[str] | None = json.loads(line) if line else None
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The child.


def _outcome(step: Callable[[], bool | None]) -> str:
    from dist_checkpointing import CheckpointingException, RankFailedError

    try:
        same = step()
    except RankFailedError as error:
        return f"raw {error}"
    except CheckpointingException as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, the test must hear of it
        return f"raw {type(error).__name__}: {error}"
    return "equal" if same in (True, None) else "different"


def _same(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # A bit that has flipped may be that of a NaN.
        return one.dtype == other.dtype and torch.equal(
            one.contiguous().reshape(-1).view(torch.uint8),
            other.contiguous().reshape(-1).view(torch.uint8),
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _checkpoint(path: Path) -> list[str]:
    """Load it, read all of it piece by piece, and examine it."""
    import hostile_state
    from dist_checkpointing import Checkpoint, load
    from dist_checkpointing.checkpoint import examine_checkpoint

    def loaded() -> bool:
        return _same(load(hostile_state.state(-1.0), path), hostile_state.loaded())

    def read() -> None:
        checkpoint = Checkpoint.open(path)
        _ = checkpoint.common
        for handle in checkpoint.objects.values():
            _ = handle[next(iter(handle))]
        for tensor in checkpoint.values():
            _ = tensor[...]

    def examined() -> None:
        examine_checkpoint(path)

    return [_outcome(loaded), _outcome(read), _outcome(examined)]


def _program(arguments: list[str]) -> list[str]:
    """What a run of ``dckpt`` prints, and its exit code."""
    from dist_checkpointing.tools import app

    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["dckpt", *arguments]
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app.main()
        except SystemExit as error:
            code = error.code
        except Exception as error:  # noqa: BLE001 - a traceback, for the person who typed it
            code = f"raw {type(error).__name__}: {error}"
    return [str(code), out.getvalue() + err.getvalue()]


def _tensor_files(path: Path) -> list[str]:
    from dist_checkpointing import Checkpoint

    return [_outcome(lambda: Checkpoint.open(path).index is not None)]


def _manager(root: Path) -> list[str]:
    from dist_checkpointing import CheckpointManager

    def look() -> None:
        with CheckpointManager(root) as manager:
            manager.latest()
            manager.steps()

    return [_outcome(look)]


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+)", status)
    assert match is not None
    return int(match[1]) << 10


def _answer(request: dict[str, Any]) -> list[str]:
    if request["do"] == "limit":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM, size + _ROOM))
        return []
    if request["do"] == "dckpt":
        return _program(request["arguments"])
    looks = {
        "checkpoint": _checkpoint,
        "safetensors": _tensor_files,
        "torch file": _tensor_files,
        "manager": _manager,
    }
    # Forgets the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    outcomes = looks[request["do"]](Path(request["path"]))
    if _peak() - before > MOST_MEMORY:
        outcomes.append(f"raw memory: it took {_peak() - before} bytes")
    return outcomes


def _main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    # What a library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    _main()

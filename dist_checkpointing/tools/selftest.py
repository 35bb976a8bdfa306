"""``dckpt selftest``: whether the library works on this machine, and what the machine has."""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from typer import Option

from dist_checkpointing import __version__
from dist_checkpointing.checkpoint.verify_checkpoint import verify_checkpoint
from dist_checkpointing.comm import Comm, ThreadComm
from dist_checkpointing.errors import CorruptCheckpointError
from dist_checkpointing.filesystem.local_folder import file_system_type
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.serialization.load import load
from dist_checkpointing.serialization.save import save
from dist_checkpointing.tools.convert.conversion import convert
from dist_checkpointing.tools.report import AsJson, Report

_TIMEOUT_SECONDS = 60.0
_VALUES = torch.arange(97 * 5, dtype=torch.float32).reshape(97, 5)  # which no grid divides evenly


def selftest(
    folder: Annotated[
        Path | None, Option("--in", help="Work below this folder; by default a temporary one.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Save, reshard, verify, damage and convert a small checkpoint here.

    Says what this machine has: torch, process groups, the file system, extras.
    The ranks are threads. Everything that it writes is deleted.

    Exit code: 0 if all is well, 1 if a step failed.

    Example: dckpt selftest --in /mnt/shared
    """
    report, steps = Report(f"dist_checkpointing {__version__}"), []
    with tempfile.TemporaryDirectory(prefix="dckpt-selftest-", dir=folder) as made:
        facts = dict(_facts(Path(made)))
        report.facts(facts.items())
        report.section()
        for title, step in _steps(Path(made)):
            begin, problem = time.perf_counter(), ""
            try:
                step()
            except Exception as error:  # noqa: BLE001 - what is found out is whether it works
                problem = f"{type(error).__name__}: {error}"
            steps.append({"step": title, "problem": problem or None})
            text = problem or f"ok, {time.perf_counter() - begin:.1f} s"
            report.line(f"{title}: {text}", "red" if problem else "green")
    has_failed = any(step["problem"] for step in steps)
    report.finish({"machine": facts, "steps": steps}, as_json=as_json, code=int(has_failed))


def _facts(folder: Path) -> Iterator[tuple[str, str]]:
    yield "machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    yield "python", platform.python_version()
    yield "torch", f"{torch.__version__}, {torch.cuda.device_count()} GPUs"
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    yield "process groups", ", ".join(n for n, is_there in known.items() if is_there()) or "none"
    yield "file system", f"{file_system_type(folder) or 'unknown'}, {_lock_of(folder)}"
    extras = {"object stores": "obstore", "YAML recipes": "yaml", "safetensors": "safetensors"}
    for name, module in extras.items():
        yield name, "installed" if importlib.util.find_spec(module) else "not installed"


def _lock_of(folder: Path) -> str:
    with suppress(ImportError, OSError), (folder / "lock").open("w") as file:
        import fcntl  # noqa: PLC0415 - not everywhere

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "flock works"
    return "no flock: saves lock by a file that they create"


def _steps(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    one, other = folder / "one", folder / "other"

    def saved(comm: Comm) -> None:
        save(_sharded(_VALUES, comm), one, comm=comm)

    def loaded(comm: Comm) -> None:
        state = load(_sharded(torch.full_like(_VALUES, -1), comm), one, comm=comm, verify=True)
        if not torch.equal(state["w"], _VALUES.tensor_split(comm.world_size)[comm.rank]):
            raise CorruptCheckpointError("other values were loaded than saved")

    def damaged() -> None:
        path = max((p for p in one.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with suppress(CorruptCheckpointError):
            verify_checkpoint(one)
            raise RuntimeError("a flipped bit was not found")

    yield "saved by 2 ranks", lambda: _run(2, saved)
    yield "loaded by 3 ranks", lambda: _run(3, loaded)
    yield "verified", lambda: verify_checkpoint(one)
    yield "converted to zarr", lambda: convert(one, other, to=("zarr", 2))
    yield "a flipped bit found", damaged


def _sharded(values: torch.Tensor, comm: Comm) -> dict[str, Any]:
    parts = values.tensor_split(comm.world_size)
    offset = (sum(map(len, parts[: comm.rank])), 0)
    part = parts[comm.rank].clone()
    return {"w": ShardedTensor.from_offset("w", part, tuple(values.shape), offset)}


def _run(world_size: int, work: Callable[[Comm], object]) -> None:
    rendezvous = ThreadComm.Rendezvous(world_size, _TIMEOUT_SECONDS)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, ThreadComm(rendezvous, rank)) for rank in range(world_size)]
    for future in futures:
        future.result()

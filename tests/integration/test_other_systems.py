"""Other systems than Linux: saves, loads and tools in a process from which its calls are hidden.

As on macOS, there is no ``/proc``, no file is allocated ahead, read only if it is cached, or copied
in the kernel, and no rename refuses to replace.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import sys
from pathlib import Path
from typing import Any, Final

_CALLS: Final = (
    *("copy_file_range", "eventfd", "fdatasync", "getrandom", "getxattr", "listxattr", "setxattr"),
    *("removexattr", "memfd_create", "pidfd_open", "pipe2", "posix_fadvise", "posix_fallocate"),
    *("sched_getaffinity", "sched_setaffinity", "splice"),
)
_CONSTANTS: Final = {
    os: ("MFD_", "O_DIRECT", "O_NOATIME", "O_PATH", "O_TMPFILE", "POSIX_FADV_", "RWF_", "SPLICE_"),
    fcntl: ("F_ADD_", "F_GET_", "F_GETPIPE", "F_OFD_", "F_SEAL", "F_SETPIPE"),
    mmap: ("MADV_DO", "MADV_HUGE", "MADV_NOHUGE", "MADV_REMOVE", "MAP_POPULATE", "MAP_STACK"),
}
_FOLDERS: Final = ("/proc", "/dev/shm", "/sys")
_COMMANDS: Final = (
    "ls {c}",
    "show {c} w --slice :4,:8",
    "stats {c}",
    "verify {c}",
    "convert {c} {to}/zarr --to zarr",
    "convert {c} {to}/dcp --to torch_dist",
    "convert {to}/dcp {to}/model --to safetensors",
    "diff {c} {to}/zarr",
    "diff {c} {to}/model",
    "selftest --in {to}",
)


class _Functions(ctypes.CDLL):
    """The C library without the function that only that of Linux has."""

    def __getattr__(self, name: str) -> Any:
        if name == "renameat2":
            raise AttributeError(name)
        return super().__getattr__(name)


def hide() -> None:
    """Take away what only Linux has, before the library is imported."""
    for module, begins in _CONSTANTS.items():
        for name in [name for name in vars(module) if name.startswith(begins)]:
            if name != "O_DIRECTORY":
                delattr(module, name)
    for name in _CALLS:
        delattr(os, name)
    ctypes.CDLL = _Functions  # type: ignore[misc]

    def refuse(path: object) -> None:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(_FOLDERS):
            raise FileNotFoundError(errno.ENOENT, "hidden", os.fspath(path))

    def audit(event: str, given: tuple[Any, ...]) -> None:
        if event in {"open", "os.listdir", "os.scandir"}:
            refuse(given[0])

    sys.addaudithook(audit)
    for function in (os.stat, os.lstat, os.readlink, os.statvfs):

        def without(path: Any, *given: Any, real: Any = function, **named: Any) -> Any:
            refuse(path)
            return real(path, *given, **named)

        setattr(os, function.__name__, without)
        for takers in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if function in takers:
                takers.add(without)


def work(folder: Path) -> None:
    """Save, reshard, verify, inspect, compare and convert, where there are links and where not."""
    import torch

    import dist_checkpointing as dc
    from dist_checkpointing.comm import Comm
    from dist_checkpointing.testing import run_ranks
    from dist_checkpointing.tools.app import main

    # Columns of it are runs that lie far apart: they are read one by one.
    values = torch.arange(16 * 8192.0).reshape(16, 8192)

    def state(comm: Comm, axis: int, factor: int = 1) -> dict[str, Any]:
        def part(key: str, data: torch.Tensor) -> dc.ShardedTensor:
            parts = (data * factor).tensor_split(comm.world_size, axis)
            start = [0, 0]
            start[axis] = sum(part.shape[axis] for part in parts[: comm.rank])
            own = parts[comm.rank].clone()
            return dc.ShardedTensor.from_offset(key, own, tuple(data.shape), tuple(start))

        small = [part(f"small.{number}", values[:4, :5] + number) for number in range(20)]
        return {"w": part("w", values), "small": small, "epoch": 7 * factor}

    def save(comm: Comm, steps: list[int]) -> None:
        with dc.CheckpointManager(folder / "run", incremental=True, comm=comm) as manager:
            for step in steps:
                manager.save(step, state(comm, 0))

    def load(comm: Comm) -> None:
        with dc.CheckpointManager(folder / "run", comm=comm) as manager:
            found = manager.load(state(comm, 1, factor=0), verify=True)
        expected = state(comm, 1)
        assert torch.equal(found["w"], expected["w"].data)
        assert all(map(torch.equal, found["small"], (leaf.data for leaf in expected["small"])))
        assert found["epoch"] == 7

    def no_link(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "this file system has no links")

    run_ranks(4, lambda comm: save(comm, [1, 2]))
    os.link = no_link
    run_ranks(4, lambda comm: save(comm, [3]))
    run_ranks(3, load)
    for command in _COMMANDS:
        sys.argv = ["dckpt", *command.format(c=folder / "run/step-00000003", to=folder).split()]
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise


def test_all_works_without_what_only_linux_has(tmp_path: Path) -> None:
    from scripts import run_fresh

    finished = run_fresh(__file__, tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    # The last line of the last command.
    assert "a flipped bit found: ok" in finished.stdout


if __name__ == "__main__":
    hide()
    work(Path(sys.argv[1]))

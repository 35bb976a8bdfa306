"""Attempts at a checkpoint: what is ours, what it costs, and when a folder is free again."""

import subprocess
import sys
from pathlib import Path

import pytest

import dist_checkpointing as dc
from dist_checkpointing.filesystem import LOCK_NAME
from dist_checkpointing.format import Attempt, CheckpointingConfig


def test_a_process_forked_during_a_save_does_not_keep_the_folder_taken(tmp_path: Path) -> None:
    """Such as a worker of a DataLoader: it shares the open file and with it the lock."""
    attempt = Attempt.begin(tmp_path, ["w"])
    held = tmp_path / LOCK_NAME
    lock_file = next(int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == held)
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=[lock_file],
    )
    try:
        with pytest.raises(dc.CheckpointExistsError, match="being written"):
            Attempt.begin(tmp_path, ["w"])
        attempt.release()
        Attempt.begin(tmp_path, ["w"]).release()
        assert child.poll() is None
    finally:
        child.communicate()


def test_what_is_committed_is_never_given_up(tmp_path: Path) -> None:
    attempt = Attempt.begin(tmp_path, ["w"])
    attempt.commit(CheckpointingConfig("zarr", 2))
    attempt.abandon()
    assert dc.check_is_distributed_checkpoint(tmp_path)


def test_what_a_failed_save_did_not_make_is_not_its_own(tmp_path: Path) -> None:
    """On a disk of this machine: the next save deletes no file that somebody puts there."""
    Attempt.begin(tmp_path, ["w"]).abandon()
    (tmp_path / "w").write_text("theirs")
    with pytest.raises(dc.CheckpointExistsError, match="no unfinished save of ours made it"):
        Attempt.begin(tmp_path, ["w"])
    assert (tmp_path / "w").read_text() == "theirs"

"""Start ``train_gpt.py`` on some number of ranks, and read what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("train_gpt.py")
TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Run:
    """What one training run reported.

    Attributes:
        tensor_parallel: number of ranks.
        losses: step -> loss in nats a byte, exact.
        digests: what -> SHA-256 of the global tensor, at saving or right after loading.
        shards: key -> rank, offset and shape of every rank's part.
        iteration: the step at which digests and shards were taken.
        seconds: wall time of the save or load.
    """

    tensor_parallel: int
    losses: Mapping[int, float]
    digests: Mapping[str, str]
    shards: Mapping[str, list[dict[str, Any]]]
    iteration: int
    seconds: float


class RunFailedError(Exception):
    """A training run did not end well; the text has its output."""


def train(tensor_parallel: int, report: Path, options: Sequence[str]) -> tuple[Run, str]:
    """Train under torchrun, or in one plain process, and return the report and the output.

    Raises:
        RunFailedError: if it fails or does not end.
    """
    launcher: list[str] = []
    if tensor_parallel > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(tensor_parallel)]
    command = [sys.executable, *launcher, str(SCRIPT), *options, "--report", str(report)]
    try:
        done = subprocess.run(  # noqa: S603 - our own script
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=TIMEOUT_SECONDS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailedError(f"no end after {TIMEOUT_SECONDS} s") from error
    if done.returncode != 0:
        raise RunFailedError(f"{done.stdout}\nexit code {done.returncode}")
    content = json.loads(report.read_text())
    content["losses"] = {int(step): float.fromhex(loss) for step, loss in content["losses"].items()}
    return Run(**content), done.stdout

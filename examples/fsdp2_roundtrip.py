"""An FSDP2 x tensor parallel model, saved with 4 ranks, loaded with 2 and in one plain process.

    python examples/fsdp2_roundtrip.py [--folder DIR]

The one command starts all ranks. This fails unless, for both,

* every tensor of model and optimizer is the saved one, bit for bit (also when the checkpoint is
  opened with nothing but TensorStore);
* the next training steps have the losses of the run that was not interrupted, but for the order in
  which float32 numbers are summed.

The lines that matter are in ``_save`` and ``_load``: neither says how many ranks there are or were.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorstore as ts
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dist_checkpointing import load, save
from dist_checkpointing.interop import shard_state_dict, unshard_state_dict
from harness import LaunchError, Tell, Work, run_ranks
from tensor_parallel import Ranks

STEPS = 3
TOLERANCE = 1e-5
"""How far apart losses may be, relatively: other ranks sum in another order."""


class Block(nn.Module):
    """Two layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(18)
        self.up = nn.Linear(18, 32)
        self.down = nn.Linear(32, 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return y


class Run:
    """A model and its optimizer, cut up for as many ranks as there are."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(3)))
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size > 1:
            tp = 2 if world_size == 4 else 1
            mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
            for block in self.model:
                if tp > 1:
                    cuts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                    parallelize_module(block, mesh["tp"], cuts)
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        """The losses of so many more steps; all ranks work on the same data."""
        losses = []
        for _ in range(steps):
            random = torch.Generator().manual_seed(self.step)
            x = torch.randn(16, 18, generator=random)
            loss = (self.model(x) - x.flip(-1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}


def _save(run: Run, path: Path) -> None:
    save(shard_state_dict(run.state()), path)


def _load(run: Run, path: Path) -> None:
    state = run.state()
    loaded = unshard_state_dict(load(shard_state_dict(state), path), state)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    run.step = loaded["step"]


def _digest(tensor: torch.Tensor) -> str:
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(bits).hexdigest()


def _digests(state: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """SHA-256 of every whole tensor, by its name."""
    found: dict[str, str] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= _digests(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{prefix}{key}"] = _digest(whole)
    return found


def _report(run: Run) -> dict[str, Any]:
    digests = _digests(run.state())
    return {"step": run.step, "digests": digests, "losses": run.train(STEPS)}


def _train_and_save(path: Path, ranks: Ranks, tell: Tell) -> None:
    """What each rank does that saves."""
    run = Run()
    run.train(STEPS)
    _save(run, path)
    _tell_once(run, ranks, tell)


def _load_and_train(path: Path, ranks: Ranks, tell: Tell) -> None:
    """What each rank does that loads."""
    run = Run()
    _load(run, path)
    _tell_once(run, ranks, tell)


def _tell_once(run: Run, ranks: Ranks, tell: Tell) -> None:
    report = _report(run)
    if ranks.rank == 0:
        tell("report", report)


def _on_ranks(size: int, work: Work, checkpoint: Path) -> dict[str, Any]:
    try:
        ((_, _, report),) = run_ranks(size, work, checkpoint)
    except LaunchError as error:
        raise SystemExit(f"{size} ranks failed: {error}") from error
    assert isinstance(report, dict)
    return report


def _with_tensorstore_alone(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    """The same digests, of what TensorStore finds without a line of ours."""
    base = {"driver": "file", "path": f"{checkpoint}/"}
    found = {}
    for name in names:
        store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        array = ts.open({"driver": "zarr3", "kvstore": store}, open=True).result()
        found[name] = _digest(torch.from_numpy(array.read().result().copy()))
    return found


def _check(what: str, found: dict[str, Any], saved: dict[str, Any]) -> bool:
    digests, losses = saved["digests"], saved["losses"]
    wrong = [name for name in digests if found["digests"].get(name) != digests[name]]
    pairs = zip(found["losses"], losses, strict=True)
    apart = max(abs(own - expected) / expected for own, expected in pairs)
    same = found["digests"].keys() == digests.keys() and not wrong
    holds = same and found["step"] == saved["step"] and apart <= TOLERANCE
    print(
        f"{'ok    ' if holds else 'FAILED'} {what}: {len(digests) - len(wrong)} of {len(digests)} "
        f"tensors bit for bit, step {found['step']}, next {len(losses)} losses {apart:.1e} apart"
    )
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description="Save on 4 ranks, load on 2 and on one.")
    parser.add_argument("--folder", type=Path, help="where the checkpoint should stay")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = (given.folder or Path(scratch)).absolute() / "checkpoint"
        saved = _on_ranks(4, _train_and_save, checkpoint)
        print(f"saved  2 x 2 ranks (FSDP2 x tensor parallel), step {saved['step']}: {checkpoint}")
        two = _on_ranks(2, _load_and_train, checkpoint)
        plain = Run()
        _load(plain, checkpoint)
        holds = [
            _check("2 ranks, FSDP2", two, saved),
            _check("one plain process", _report(plain), saved),
        ]
        alone = _with_tensorstore_alone(checkpoint, saved["digests"])
        holds.append(alone == saved["digests"])
        verdict = "ok    " if holds[-1] else "FAILED"
        print(f"{verdict} TensorStore alone: {len(alone)} tensors bit for bit")
    if not all(holds):
        raise SystemExit("FAILED: what was loaded is not what was saved")


if __name__ == "__main__":
    main()

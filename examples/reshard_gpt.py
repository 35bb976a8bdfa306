"""Train with tensor parallelism 2, save, and go on with 2, 4 and 1: the curves must meet.

    python examples/reshard_gpt.py [--backend zarr] [--steps 60] [--folder DIR]
    python examples/reshard_gpt.py --checkpoints s3://bucket/demo

One run trains for twice ``--steps`` steps without a stop and saves half-way. Three others start
from that checkpoint. This fails unless

* every global tensor that they load is the saved one, bit for bit;
* the run with the same tensor parallelism has the same losses, bit for bit;
* the others have the same losses but for the order in which float32 numbers are summed;
* what each of them saves again has the fingerprints of that checkpoint, whatever its cut.

Right after resuming, each of the three saves again with the checkpoint as a base: what its ranks
hold cut as before, or in blocks of the chunks that are there, is shared and not written. (Not in an
object store, which ``--checkpoints`` names: objects cannot share bytes.)
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from demo_report import (
    check_table,
    cut_picture,
    draw_losses,
    loss_chart,
    loss_table,
    saved_table,
    shared_table,
)
from harness import LaunchError, Tell, add_folder, output_folder, run_ranks, wide_console
from resume_checks import check_fingerprints, check_resumed
from tensor_parallel import Ranks
from training_runs import BACKEND_HELP, Job, Run, backend_argument, train

SAVED_WITH = 2
RESUMED_WITH = (2, 4, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, save, and resume on other ranks.")
    parser.add_argument("--backend", type=backend_argument, help=BACKEND_HELP)
    parser.add_argument("--steps", type=int, default=60, help="steps before and after the save")
    parser.add_argument("--checkpoints", metavar="URL", help="keep them in an object store")
    add_folder(parser)
    given = parser.parse_args()
    if given.steps < 1:
        parser.error("--steps must be at least 1")
    folder, console, last = output_folder(parser, given.folder), wide_console(), 2 * given.steps
    checkpoint: Path | str = folder / "checkpoint"
    again = {size: folder / f"again-{size}" for size in RESUMED_WITH}
    if given.checkpoints:
        checkpoint, again = f"{given.checkpoints}/{folder.name}/checkpoint", {}
    saving = Job(last, given.steps, checkpoint, backend=given.backend)
    saved = _run(console, SAVED_WITH, "uninterrupted", saving)
    console.print(saved_table(checkpoint, saved))
    resumed = []
    for size in RESUMED_WITH:
        job = Job(last, resume=checkpoint, backend=given.backend, again=again.get(size))
        resumed.append(_run(console, size, f"resumed-{size}", job))

    console.print(cut_picture(saved, resumed))
    if again:
        console.print(shared_table(again))
    console.print(loss_chart(saved, resumed))
    console.print(loss_table(saved, resumed))
    draw_losses(saved, resumed, folder / "losses.png")
    checks = [check for run in resumed for check in check_resumed(saved, run)]
    checks += [
        check_fingerprints(checkpoint, other, (SAVED_WITH, size)) for size, other in again.items()
    ]
    console.print(check_table(checks))
    console.print(f"loss curves  {folder / 'losses.png'}", soft_wrap=True)
    console.print(f"checkpoint   {checkpoint}", soft_wrap=True)
    if not all(check.holds for check in checks):
        raise SystemExit("FAILED: a resumed run is not the saved one, see the checks above")
    console.print("\nNow try:", soft_wrap=True)
    console.print(_commands(checkpoint, folder, last), style="bold", soft_wrap=True, markup=False)


def _run(console: Console, size: int, name: str, job: Job) -> Run:
    how = f"{size} processes" if size > 1 else "one plain process, no process group"
    console.rule(f"{name}: tensor parallelism {size} ({how})", align="left")
    begin = time.perf_counter()
    try:
        messages = run_ranks(size, _rank, job)
    except LaunchError as error:
        raise SystemExit(f"{name} failed: {error}") from error
    console.print(f"{time.perf_counter() - begin:.1f} s")
    (run,) = (value for _, word, value in messages if word == "run")
    assert isinstance(run, Run)
    return run


def _rank(job: Job, ranks: Ranks, tell: Tell) -> None:
    run = train(job, ranks)
    if ranks.rank == 0:
        tell("run", run)


def _commands(checkpoint: Path | str, out: Path, last_step: int) -> str:
    python, script = _short(Path(sys.executable)), _short(Path(__file__).with_name("train_gpt.py"))
    program = _short(Path(sys.executable).with_name("dckpt"))
    dckpt = program if program.exists() else f"{python} -m dist_checkpointing"
    key = "layers.attention.qkv.weight"
    resume = f"--resume {checkpoint} --until {last_step}"
    weights = "--to safetensors --exclude 'optimizer.*'"
    commands = [
        f"{dckpt} ls {checkpoint} --tree --depth 2",
        f"{dckpt} show {checkpoint} {key} --slice '0,:4,:8'",
        f"{dckpt} stats {checkpoint} --scan",
        f"{dckpt} verify {checkpoint}",
        *([f"{dckpt} diff {checkpoint} {again}"] if (again := out / "again-4").exists() else []),
        f"{dckpt} plan {checkpoint} --tp 8",
        f"{dckpt} convert {checkpoint} {out / 'zarr'} --to zarr",
        f"{dckpt} diff {checkpoint} {out / 'zarr'}",
        f"{dckpt} convert {checkpoint} {out / 'huggingface'} {weights}",
        f"{dckpt} rm-prefix {out / 'zarr'} optimizer",
        f"{python} -m torch.distributed.run --standalone --nproc-per-node 8 {script} {resume}",
    ]
    return "\n".join(f"  {command}" for command in commands)


def _short(path: Path) -> Path:
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    main()

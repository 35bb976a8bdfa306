"""Train with tensor parallelism 2, save, and go on with 2, 4 and 1: the curves must meet.

    python examples/reshard_gpt.py [--backend zarr] [--steps 60] [--folder DIR]

One run trains for twice ``--steps`` steps without a stop and saves half-way. Three others start
from that checkpoint. This fails unless

* every global tensor that they load is the saved one, bit for bit;
* the run with the same tensor parallelism has the same losses, bit for bit;
* the others have the same losses but for the order in which float32 numbers are summed.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime
from pathlib import Path

from rich.console import Console

from backend_option import HELP, parse_backend
from checkpoint_contents import read_contents
from cut_picture import cut_picture
from loss_curves import draw_losses, loss_chart, loss_table
from resume_checks import check_resumed
from saved_table import check_table, saved_table
from training_runs import Run, RunFailedError, train

SAVED_WITH = 2
RESUMED_WITH = (2, 4, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, save, and resume on other ranks.")
    parser.add_argument("--backend", type=parse_backend, help=HELP)
    parser.add_argument("--steps", type=int, default=60, help="steps before and after the save")
    parser.add_argument("--folder", type=Path, help="a new or empty folder for all that is written")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    if arguments.folder is None:
        arguments.folder = Path("demo-output") / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    if arguments.folder.exists() and any(arguments.folder.iterdir()):
        parser.error(f"{arguments.folder} is not empty; name a new folder")
    return arguments


def main() -> None:
    arguments = _arguments()
    folder, last_step = arguments.folder, 2 * arguments.steps
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint"
    console = Console(width=None if sys.stdout.isatty() else 116, highlight=False)

    options = ["--until", str(last_step)]
    saving = [*options, "--save-at", str(arguments.steps), "--checkpoint", str(checkpoint)]
    if arguments.backend:
        backend = arguments.backend
        saving += ["--backend", backend if isinstance(backend, str) else "{}:{}".format(*backend)]
    saved = _show_run(console, SAVED_WITH, folder / "uninterrupted.json", saving)
    console.print(saved_table(read_contents(checkpoint), saved, checkpoint))
    resuming = [*options, "--resume", str(checkpoint)]
    resumed = [
        _show_run(console, size, folder / f"resumed-{size}.json", resuming) for size in RESUMED_WITH
    ]

    console.print(cut_picture(saved, resumed))
    console.print(loss_chart(saved, resumed))
    console.print(loss_table(saved, resumed))
    draw_losses(saved, resumed, folder / "losses.png")
    checks = [check for run in resumed for check in check_resumed(saved, run)]
    console.print(check_table(checks))
    console.print(f"loss curves  {folder / 'losses.png'}", soft_wrap=True)
    console.print(f"checkpoint   {checkpoint}", soft_wrap=True)
    if not all(check.holds for check in checks):
        raise SystemExit("FAILED: a resumed run is not the saved one, see the checks above")
    console.print("\nNow try:", soft_wrap=True)
    console.print(_commands(checkpoint, last_step), style="bold", soft_wrap=True, markup=False)


def _show_run(console: Console, tensor_parallel: int, report: Path, options: list[str]) -> Run:
    how = "torchrun" if tensor_parallel > 1 else "one plain process, no process group"
    console.rule(f"{report.stem}: tensor parallelism {tensor_parallel} ({how})", align="left")
    start = time.perf_counter()
    try:
        run, output = train(tensor_parallel, report, options)
    except RunFailedError as error:
        raise SystemExit(f"{report.stem} failed: {error}") from error
    console.print(output.rstrip(), style="dim", markup=False, soft_wrap=True)
    console.print(f"{time.perf_counter() - start:.1f} s")
    return run


def _commands(checkpoint: Path, last_step: int) -> str:
    python, script = _short(Path(sys.executable)), _short(Path(__file__).with_name("train_gpt.py"))
    program = _short(Path(sys.executable).with_name("dckpt"))
    dckpt = program if program.exists() else f"{python} -m dist_checkpointing"
    key, out = "layers.attention.qkv.weight", checkpoint.parent
    resume = f"--resume {checkpoint} --until {last_step}"
    commands = [
        f"{dckpt} ls {checkpoint} --tree --depth 2",
        f"{dckpt} show {checkpoint} {key} --slice '0,:4,:8'",
        f"{dckpt} stats {checkpoint} --scan",
        f"{dckpt} verify {checkpoint}",
        f"{dckpt} plan {checkpoint} --tp 8",
        f"{dckpt} map {checkpoint} -o {out / 'map.html'}",
        f"{dckpt} convert {checkpoint} {out / 'zarr'} --to zarr",
        f"{dckpt} diff {checkpoint} {out / 'zarr'}",
        f"{dckpt} convert {checkpoint} {out / 'huggingface'} --to safetensors --exclude ^optimizer",
        f"{dckpt} rm-prefix {out / 'zarr'} optimizer",
        f"{python} -m torch.distributed.run --standalone --nproc-per-node 8 {script} {resume}",
    ]
    return "\n".join(f"  {command}" for command in commands)


def _short(path: Path) -> Path:
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    main()

"""``dckpt convert`` as a user runs it: what it prints, its exit code, and what it leaves behind."""

import json
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dist_checkpointing import load_plain_tensors, save
from dist_checkpointing.interop import TorchState
from dist_checkpointing.tools import app
from real_ranks import ranks
from samples import Run, Samples
from scripts import TELL_PEAK, run_forked, run_fresh, told_peak
from states import wholes

TENSORS = {f"layer.{i}.w": torch.randn(600, 640) for i in range(6)} | {"norm": torch.randn(4)}
EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "ckpt"
    save({**wholes(TENSORS), "step": 5}, folder)
    return folder


def run(*arguments: object) -> str:
    """What a command that succeeds prints."""
    result = CliRunner().invoke(app.app, ["convert", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


MAIN = "\nfrom dist_checkpointing.tools.app import main; main()"


def child(*arguments: object, before: str = "") -> subprocess.CompletedProcess[str]:
    """A process of its own, in which ``before`` is executed first."""
    return run_forked("-c", textwrap.dedent(before) + MAIN, *arguments)


def test_a_summary(source: Path, tmp_path: Path) -> None:
    text = run(
        source, tmp_path / "out", "--to", "zarr", "--rename", "layer.{x*}=l.{x}", "--exclude", "n.*"
    )
    assert "converted 6 tensors (8.8 MiB)" in text
    assert "tensorstore 1 -> zarr 2" in text
    assert "recipe: tensors: 6 (6 by rules, 0 as stored), 1 left out" in text
    assert all(len(line) > 1 for line in text.splitlines())


def test_the_weights_for_others(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    save(TorchState(model, optimizer, ema=model), tmp_path / "c")
    run(tmp_path / "c", tmp_path / "model", "--to", "safetensors", "--weights")
    found = load_file(tmp_path / "model" / "model-00001-of-00001.safetensors")
    own = model.state_dict()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[key], own[key]) for key in own)
    # Other options speak of the names without the prefix.
    weights = (tmp_path / "c", tmp_path / "some", "--to", "zarr", "--weights")
    run(*weights, "--include", "{i}.weight", "--rename", "0.weight=first")
    assert {*load_plain_tensors(tmp_path / "some")} == {"first", "1.weight"}


def test_something_is_shown_before_torch_is_imported(source: Path, tmp_path: Path) -> None:
    code = """import sys; from dist_checkpointing.tools import convert_command as c
real = c.progress_bar
c.progress_bar = lambda *given: print(given[0], "torch" in sys.modules) or real(*given)"""
    finished = run_fresh("-c", code + MAIN, "convert", source, tmp_path / "c", "--to", "zarr")
    assert finished.stdout.splitlines()[:2] == ["starting False", "planning True"]


def test_json_is_one_document(source: Path, tmp_path: Path) -> None:
    arguments = (source, tmp_path / "out", "--to", "safetensors", "--json")
    planned = json.loads(run(*arguments, "--dry-run"))
    assert not (tmp_path / "out").exists()
    done = json.loads(run(*arguments))
    assert planned["tensors"] == done["tensors"]
    assert {row["key"]: row["shape"] for row in done["tensors"]} == {
        key: list(full.shape) for key, full in TENSORS.items()
    }
    assert "step" in done["left_out"][0]
    assert (planned["dry_run"], done["dry_run"]) == (True, False)


def test_a_dry_run_names_what_would_change(source: Path, tmp_path: Path) -> None:
    text = run(
        source, tmp_path / "out", "--to", "torch_file", "--dry-run", "--rename", "norm=n\x1b[2J",
        "--cast", "bfloat16", "--lossy",
    )  # fmt: skip
    assert "n\\x1b[2J  bfloat16[4] <- norm; rounded from float32" in text
    assert "\x1b" not in text
    assert "cast: 7 tensors float32 -> bfloat16, values rounded" in text
    assert list(tmp_path.iterdir()) == []


FAILING_READ = """
    import os, signal, time
    from dist_checkpointing.tools import values
    values._MOST_BOX_BYTES = 2**21
    from dist_checkpointing import Checkpoint
    read, count = Checkpoint.read, 0
    def failing(self, wanted):
        global count
        count += 1
        if count == 4:
            os.kill(os.getpid(), signal.{name})
            time.sleep(0.5)
        return read(self, wanted)
    Checkpoint.read = failing
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("to", ["tensorstore", "safetensors"])
def test_killed_in_the_middle_and_run_again(source: Path, to: str, tmp_path: Path) -> None:
    arguments = ("convert", source, tmp_path / "out", "--to", to, "--threads", 1)
    result = child(*arguments, before=FAILING_READ.format(name="SIGKILL"))
    assert result.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) != []  # it did begin
    assert not (tmp_path / "out" / "metadata.json").exists()
    # What is named otherwise is no model to Hugging Face.
    assert not [*(tmp_path / "out").glob("*.safetensors")]
    assert not [*(tmp_path / "out").glob("*.json")]
    run(*arguments[1:])
    found = load_plain_tensors(tmp_path / "out")
    assert all(torch.equal(found[key], full) for key, full in TENSORS.items())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("to", ["zarr", "torch_file"])
def test_ctrl_c_in_the_middle(source: Path, to: str, tmp_path: Path) -> None:
    arguments = ("convert", source, tmp_path / "out", "--to", to, "--threads", 1)
    result = child(*arguments, before=FAILING_READ.format(name="SIGINT"))
    assert result.returncode == EXIT_INTERRUPTED, result.stderr
    assert "error: interrupted" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["tensorstore", "safetensors"])
def test_no_room_for_a_file(source: Path, to: str, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))"
    result = child("convert", source, tmp_path / "out", "--to", to, before=limit)
    assert result.returncode == EXIT_BAD_INPUT, result.stderr
    assert result.stderr.startswith("error: cannot write"), result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_peak_memory_stays_within_its_budget(tmp_path: Path) -> None:
    """Of a file that is larger than the budget, and mostly a hole, so that it costs no time."""
    budget, path = 480 * 2**20, tmp_path / "model.pt"
    with torch.serialization.skip_data():
        torch.save({f"w{i}": torch.empty(4096, 4096) for i in range(8)}, path)
    rules = [
        {"transpose": "w[0-3]"},
        {"stack": "w{i}", "into": "all"},
        {"cast": "all", "dtype": "bfloat16"},
    ]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    arguments = ("convert", path, tmp_path / "out", "--to", "tensorstore", "--lossy")
    options = ("--memory", budget, "--recipe", tmp_path / "rules.json")
    result = run_fresh("-c", TELL_PEAK + MAIN, *arguments, *options)
    assert result.returncode == 0, result.stderr
    assert 0 < told_peak(result.stderr) < budget
    assert path.stat().st_size > budget


def test_a_recipe_makes_other_tensors(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [
        {"stack": "layer.{i}.w", "into": "layers"},
        {"transpose": "layers", "axes": [0, 2, 1]},
        {"rename": "nrom", "to": "bias"},
    ]
    recipe = tmp_path / "rules.yaml"
    recipe.write_text(json.dumps(rules))
    wanted = torch.stack([TENSORS[f"layer.{i}.w"].T for i in range(6)])
    output = run(source, tmp_path / "new", "--to", "zarr", "--recipe", recipe, "--dry-run")
    assert "rule 1: stack 'layer.{i}.w', into='layers': 6 matched" in output
    assert "layers  float32[6, 640, 600] <- layer.*.w" in output
    assert "rule 3: rename 'nrom', to='bias': matches nothing" in output
    assert not (tmp_path / "new").exists()
    output = run(source, tmp_path / "new", "--to", "zarr", "--recipe", recipe)
    assert "rules that match nothing: 1 of 3" in output
    assert "nothing matches rule 3 (rename 'nrom', to='bias'): a pattern must" in caplog.text
    assert "verified: 8.8 MiB of tensors by the checksums of the source" in output
    found = load_plain_tensors(tmp_path / "new")
    assert torch.equal(found["layers"], wanted)
    assert torch.equal(found["norm"], TENSORS["norm"])
    told = json.loads(
        run(source, tmp_path / "x", "--to", "zarr", "--recipe", recipe, "--dry-run", "--json")
    )
    assert [row["matched"] for row in told["recipe"]["rules"]] == [6, 1, 0]
    assert told["recipe"]["tensors"] == {"layers": "layer.*.w"}
    lossy = [{"cast": "layer.{i}.w", "dtype": "bfloat16"}, {"resize": "norm", "size": 1}]
    recipe.write_text(json.dumps([*lossy, {"drop": "layer.5.w"}]))
    output = run(source, tmp_path / "lossy", "--to", "zarr", "--recipe", recipe, "--lossy")
    assert "cast: 5 tensors float32 -> bfloat16, values rounded" in output
    assert ", 1 left out, 1 in part; rules that match nothing: 0 of 3" in output


def test_options_are_rules_after_those_of_the_recipe(source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "rules.json"
    recipe.write_text('[{"stack": "layer.{i}.w", "into": "layers"}]')
    # In any order on the command line: include, exclude, rename, cast.
    options = ["--cast", "bfloat16", "--cast", "all=float64", "--rename", "layers=all", "--lossy"]
    options += ["--rename", "norm=bias", "--exclude", "norm", "--include", "layers|norm"]
    target = (tmp_path / "new", "--to", "zarr")
    output = run(source, *target, "--recipe", recipe, *options, "--dry-run")
    assert [line.split(":")[1].split()[0] for line in output.splitlines()[:7]] == [
        "stack", "keep", "drop", "rename", "rename", "cast", "cast",
    ]  # fmt: skip
    assert "rule 5: rename 'norm', to='bias': matches nothing" in output
    assert "cast: 1 tensor float32 -> float64, no value changed" in output
    run(source, *target, "--recipe", recipe, *options)
    found = load_plain_tensors(tmp_path / "new")
    assert [key for key in found if torch.is_tensor(found[key])] == ["all"]
    wanted = torch.stack([TENSORS[f"layer.{i}.w"] for i in range(6)]).double()
    assert torch.equal(found["all"], wanted)


LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def printed_by_ranks(*arguments: object) -> str:
    """What a command that runs on two ranks prints, without the seconds of the launcher."""
    with ranks(2, ["-c", MAIN, *arguments], stderr=subprocess.PIPE) as started:
        return "".join([process.communicate(120)[0] for process in started])


def test_under_torchrun(tmp_path: Path, samples: Samples, dckpt: Run) -> None:
    """Ranks share the work, and the first one talks."""
    source = samples("tensorstore").folder
    command = ("-m", "dist_checkpointing", "convert", source, tmp_path / "out", "--to", "zarr")
    done = run_fresh(*LAUNCHER, *command, timeout=120)
    assert done.stdout.count("converted ") == 1, done.stderr
    assert dckpt("diff", source, tmp_path / "out", "--equal-nan").code == 0
    seen = printed_by_ranks("verify", tmp_path / "out", "--json")
    assert json.loads(seen) == dckpt("verify", tmp_path / "out", "--json").json


@pytest.mark.exhaustive
def test_diff_and_stats_on_ranks(tmp_path: Path, dckpt: Run) -> None:
    values = {f"w{i}": torch.arange(6.0) + i for i in range(5)}
    save(wholes(values), tmp_path / "a")
    values["w1"][2], values["w4"][0], values["w2"][5] = 7, float("nan"), float("inf")
    save(wholes(values), tmp_path / "b")
    for command in (["diff", tmp_path / "a", tmp_path / "b"], ["stats", tmp_path / "b", "--scan"]):
        alone = dckpt(*command, "--json", code=1).json
        assert json.loads(printed_by_ranks(*command, "--json")) == alone
        found = alone["not_finite"] if command[0] == "stats" else alone["tensors"]
        assert len(found) == (2 if command[0] == "stats" else 3)

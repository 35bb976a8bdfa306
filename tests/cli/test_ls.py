"""``dckpt ls`` as a user runs it, on checkpoints of every backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dist_checkpointing
from dist_checkpointing import save
from dist_checkpointing.format import Index, StoredTensor, dtypes, write_index
from samples import Run, Sample, Samples
from scripts import TELL_PEAK, run_fresh, told_peak
from states import shard

ROOT = Path(dist_checkpointing.__file__).parents[1]


def shape_text(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def test_the_table(any_sample: Sample, dckpt: Run) -> None:
    finished = dckpt("ls", any_sample.folder)
    assert (finished.code, finished.err) == (0, "")
    header, *rows = finished.out.partition("\n\n")[0].split("\n")
    assert header.split() == ["KEY", "SHAPE", "DTYPE", "SIZE", "SHARDING"]
    # Nothing in a column has spaces but size and sharding, so that awk can take it apart.
    found = {row.split()[0]: row.split()[1:3] for row in rows}
    assert found == {
        key: [shape_text(tensor), str(tensor.dtype).removeprefix("torch.")]
        for key, tensor in any_sample.tensors.items()
    }
    assert f"{len(any_sample.tensors)} tensors" in finished.out
    assert "\x1b" not in finished.out


def test_json(any_sample: Sample, dckpt: Run) -> None:
    document = dckpt("ls", any_sample.folder, "--json").json
    assert {row["key"]: row["shape"] for row in document["tensors"]} == {
        key: list(tensor.shape) for key, tensor in any_sample.tensors.items()
    }
    assert document["num_bytes"] == sum(t.nbytes for t in any_sample.tensors.values())
    assert document["num_tensors"] == len(any_sample.tensors)
    for row in document["tensors"]:
        assert row["num_bytes"] == any_sample.tensors[row["key"]].nbytes
        assert ("num_pieces" in row) == (row["chunk_shape"] is None)
    assert "objects" not in document


def test_the_sharding(samples: Samples, dckpt: Run) -> None:
    out = dckpt("ls", samples("tensorstore").folder).out
    rows = {line.split()[0]: line for line in out.partition("\n\n")[0].split("\n")}
    assert rows["decoder.weight"].endswith("768 B  2x1 of 8x12")
    assert rows["decoder.half"].endswith("2x1x1 of 4x4x3")
    assert rows["uneven"].endswith("2 pieces")
    assert rows["flat"].endswith("2 pieces")
    assert rows["decoder.bias"].endswith("1 chunk")
    assert rows["empty"].endswith("0 B  empty")


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["decoder"], ["decoder.bias", "decoder.half", "decoder.mask", "decoder.weight"]),
        (["*.step"], ["optimizer.step"]),
        (["*er.[wb]*"], ["decoder.bias", "decoder.weight"]),
        (["--regex", r"^(flat|uneven)$"], ["flat", "uneven"]),
        (["nothing like it"], []),
    ],
)
def test_patterns(samples: Samples, dckpt: Run, arguments: list[str], keys: list[str]) -> None:
    folder = samples("zarr-2").folder
    document = dckpt("ls", folder, *arguments, "--json").json
    assert [row["key"] for row in document["tensors"]] == keys
    finished = dckpt("ls", folder, *arguments)
    assert finished.code == (0 if keys else 1)
    assert f"{len(keys)} tensor" in finished.out
    assert ("no key of" in finished.err) == (not keys)


def test_objects_and_common_state_too(sample: Sample, dckpt: Run) -> None:
    out = dckpt("ls", sample.folder, "--all").out
    for words in ("rng  ", "2 cells", "args.lr", "float", "history.1", "iteration", "1 object"):
        assert words in out
    document = dckpt("ls", sample.folder, "--all", "--json").json
    assert document["objects"] == [{"key": "rng", "shape": [2]}]
    names = {row["key"]: row["type"] for row in document["common"]}
    assert names["args.betas.0"] == "float"
    assert names["content_metadata.made_by"] == "str"
    only = dckpt("ls", sample.folder, "args", "--all", "--json").json
    assert (only["tensors"], only["objects"], len(only["common"])) == ([], [], 4)


def test_the_tree(any_sample: Sample, dckpt: Run) -> None:
    out = dckpt("ls", any_sample.folder, "--tree").out
    for key in any_sample.tensors:
        assert key.rpartition(".")[2] in out
    assert out.count("──") >= len(any_sample.tensors)


def test_subtotals_and_depth(samples: Samples, dckpt: Run) -> None:
    folder, tensors = samples("torch_dist").folder, samples("torch_dist").tensors
    size = sum(t.nbytes for key, t in tensors.items() if key.startswith("decoder"))
    text = f"{size} B"
    assert size < 1024
    out = dckpt("ls", folder).out
    (line,) = [line for line in out.split("\n") if line.startswith("  decoder ")]
    assert line.split() == ["decoder", "4", "tensors", *text.split()]
    tree = dckpt("ls", folder, "--depth", 1).out
    (line,) = [line for line in tree.split("\n") if "decoder" in line]
    assert line.split() == ["├──", "decoder", *text.split(), "(4", "…)"]
    assert "weight" not in tree


STRANGE = {
    "[red]a[/red]": "[red]a[/red]",
    "line\nbreak": r"line\nbreak",
    "tab\tand\x1b[31mcolour": r"tab\tand\x1b[31mcolour",
    "right\u202eto left": r"right\u202eto left",
    "\u732b.\u00fc": "\u732b.\u00fc",
}


@pytest.mark.parametrize("arguments", [[], ["--tree"], ["--all"]])
def test_keys_cannot_draw_on_the_screen(tmp_path: Path, dckpt: Run, arguments: list[str]) -> None:
    state = {k: shard(k, torch.zeros(2)) for k in STRANGE}
    save({**state, "com\x1b[2Jmon": 1}, tmp_path / "c")
    out = dckpt("ls", tmp_path / "c", *arguments).out
    assert all(character.isprintable() for character in out if character != "\n")
    for shown in STRANGE.values():
        assert shown in out or "--tree" in arguments
    document = dckpt("ls", tmp_path / "c", "--json").json
    assert {row["key"] for row in document["tensors"]} == set(STRANGE)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_on_a_terminal_nothing_is_cut_off(tmp_path: Path, width: int) -> None:
    long = "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"
    save({"w": shard(long, torch.zeros(2, 3))}, tmp_path / "c")
    command = ("-m", "dist_checkpointing", "ls", tmp_path / "c")
    terminal = {"COLUMNS": str(width), "FORCE_COLOR": "1", "TERM": "xterm"}
    finished = run_fresh(*command, environment=terminal)
    assert "\x1b[1m" in finished.stdout
    assert long in finished.stdout
    lines = [line for line in finished.stdout.split("\n") if long not in line]
    assert all(len(line.replace("\x1b[1m", "").replace("\x1b[0m", "")) <= width for line in lines)
    plain = run_fresh(*command, environment=terminal | {"NO_COLOR": "1"})
    assert "\x1b" not in plain.stdout


def test_it_needs_no_torch(samples: Samples) -> None:
    code = f"""
import sys
from dist_checkpointing.tools.app import main
sys.argv = ["dckpt", "ls", {str(samples("tensorstore").folder)!r}]
try:
    main()
finally:
    print([name for name in ("torch", "tensorstore", "zarr") if name in sys.modules])
"""
    finished = run_fresh("-c", code)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.endswith("\n[]\n")
    assert "decoder.weight" in finished.stdout


def many(folder: Path, count: int) -> Path:
    dtype = dtypes.from_name("bfloat16")
    folder.mkdir()
    tensors = (
        StoredTensor(f"decoder.layers.{i // 10}.expert.{i % 10}.weight", dtype, (512, 64), (64, 64))
        for i in range(count)
    )
    write_index(Index.of(tensors), folder)
    config = {"sharded_backend": "tensorstore", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))
    return folder


def test_a_hundred_thousand_tensors_take_less_than_half_a_gigabyte(tmp_path: Path) -> None:
    folder = many(tmp_path / "c", 100_000)
    for arguments in ([], ["--tree"], ["--json"]):
        code = f"{TELL_PEAK}\nfrom dist_checkpointing.tools.app import main\nmain()"
        finished = run_fresh("-c", code, "ls", folder, *arguments)
        assert finished.returncode == 0, finished.stderr
        assert told_peak(finished.stderr) < 500e6
        text = finished.stdout
        assert text.count("\n") > 100_000
        if arguments == ["--json"]:
            assert len(json.loads(text)["tensors"]) == 100_000
        else:
            assert "100,000 tensors, 6.1 GiB" in text


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    folder = many(tmp_path / "c", 20_000)
    command = f"{sys.executable} -m dist_checkpointing ls {folder} | head -n 2"
    finished = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert len(finished.stdout.splitlines()) == 2
    assert finished.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{}/nothing"], "does not exist"),
        (["{}"], "is not a distributed checkpoint"),
        (["{}/half"], "is not a distributed checkpoint"),
        (["{}/torn"], "metadata.json cannot be read"),
        (["{}/c", "(", "--regex"], "'(' does not compile"),
        (["{}/c", "--depth", "0"], "--depth"),
        (["{}/c", "--colour"], "No such option"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_one_line_and_two(
    samples: Samples, tmp_path: Path, dckpt: Run, arguments: list[str], words: str
) -> None:
    for name in ("c", "half", "torn"):
        samples("tensorstore").copied(tmp_path / name)
    (tmp_path / "half" / "metadata.json").unlink()
    (tmp_path / "torn" / "metadata.json").write_text("{")
    finished = dckpt("ls", *(word.format(tmp_path) for word in arguments))
    assert finished.code == 2
    assert finished.out == ""
    assert words in finished.err
    assert "Traceback" not in finished.err


def test_debug_shows_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dist_checkpointing import CheckpointNotFoundError
    from dist_checkpointing.tools import app

    monkeypatch.setattr(sys, "argv", ["dckpt", "ls", str(tmp_path), "--debug"])
    with pytest.raises(CheckpointNotFoundError):
        app.main()


@pytest.mark.parametrize("command", ["ls", "show", "stats", "verify", "diff"])
def test_help_has_an_example(dckpt: Run, command: str) -> None:
    finished = dckpt(command, "--help")
    assert finished.code == 0
    assert f"Example: dckpt {command} " in " ".join(finished.out.split())
    assert "--json" in finished.out

"""``dckpt ls`` as a user runs it, on checkpoints of every backend."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dist_checkpointing
from dist_checkpointing import Checkpoint, CorruptCheckpointError, save
from dist_checkpointing.format import Index, StoredTensor, dtypes, write_index
from samples import Run, Sample, Samples
from scripts import TELL_PEAK, run_fresh, told_peak
from states import shard

ROOT = Path(dist_checkpointing.__file__).parents[1]


def shape_text(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def test_the_table(any_sample: Sample, dckpt: Run) -> None:
    finished = dckpt("ls", any_sample.folder, code=0, err="")
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
        (["decoder.{x}"], ["decoder.bias", "decoder.half", "decoder.mask", "decoder.weight"]),
        (["{x*}.{name}p"], ["optimizer.step"]),
        ([".*er.[wb].*"], ["decoder.bias", "decoder.weight"]),
        (["flat|uneven"], ["flat", "uneven"]),
        (["decoder"], []),
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
    only = dckpt("ls", sample.folder, "args.*", "--all", "--json").json
    assert (only["tensors"], only["objects"], len(only["common"])) == ([], [], 4)


def test_the_tree(any_sample: Sample, dckpt: Run) -> None:
    out = dckpt("ls", any_sample.folder, "--tree").out
    for key in any_sample.tensors:
        assert key.rpartition(".")[2] in out
    assert out.count("──") >= len(any_sample.tensors)


def test_depth_sums_up(samples: Samples, dckpt: Run) -> None:
    folder, tensors = samples("torch_dist").folder, samples("torch_dist").tensors
    size = sum(t.nbytes for key, t in tensors.items() if key.startswith("decoder"))
    text = f"{size} B"
    assert size < 1024
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
        (["{}/c", "("], "'(' is not a regular expression"),
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
    finished = dckpt("ls", *(word.format(tmp_path) for word in arguments), code=2)
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
    finished = dckpt(command, "--help", code=0)
    assert f"Example: dckpt {command} " in " ".join(finished.out.split())
    assert "--json" in finished.out


# ``dckpt`` on files of safetensors and torch.save, and right after a conversion.


TO = {"safetensors": "model", "safetensors-file": "model.safetensors", "torch_file": "model.pt"}


@pytest.fixture(params=list(TO))
def converted(request: pytest.FixtureRequest, samples: Samples, tmp_path: Path, dckpt: Run) -> Path:
    place = tmp_path / TO[request.param]
    to = request.param.partition("-")[0]
    assert dckpt("convert", samples("tensorstore").folder, place, "--to", to).code == 0
    return place


@pytest.fixture
def source(samples: Samples) -> Sample:
    return samples("tensorstore")


def test_it_lists_and_counts_what_was_converted(
    converted: Path, source: Sample, dckpt: Run
) -> None:
    rows = {row["key"]: row for row in dckpt("ls", converted, "--json").json["tensors"]}
    assert {key: row["shape"] for key, row in rows.items()} == {
        key: list(tensor.shape) for key, tensor in source.tensors.items()
    }
    document = dckpt("stats", converted, "--json").json
    assert document["backend"] == ["torch_file" if converted.suffix == ".pt" else "safetensors", 1]
    assert document["tensors"]["num_tensors"] == len(source.tensors)
    files = [converted] if converted.is_file() else list(converted.iterdir())
    assert document["files"]["num_bytes"] == sum(path.stat().st_size for path in files)
    assert document["facts"] == {"checksums": "none were kept", "seal": "none was kept"}
    found = dckpt("stats", converted, "--scan", "--json")
    assert (found.code, list(found.json["not_finite"])) == (1, ["optimizer.moment"])


def test_it_shows_values_and_where_they_are(converted: Path, source: Sample, dckpt: Run) -> None:
    key = "decoder.weight"
    document = dckpt("show", converted, key, "--slice", "2:4,:3", "--json").json
    assert torch.tensor(document["values"]).equal(source.tensors[key][2:4, :3])
    location = document["chunks"][0]["location"].partition(",")[0]
    assert Path(location).is_file()
    assert Path(location).is_relative_to(converted)


def test_a_conversion_is_the_same_as_its_source(
    converted: Path, source: Sample, dckpt: Run
) -> None:
    for pair in ((source.folder, converted), (converted, source.folder)):
        finished = dckpt("diff", *pair, "--equal-nan")
        assert finished.code == 0, finished.out
        assert f"the same: {len(source.tensors)} tensors" in finished.out
        # The state holds an argparse.Namespace, which torch.load would refuse.
        assert "not compared: objects and common state" in finished.out
    document = dckpt("diff", source.folder, converted, "--equal-nan", "--json").json
    assert document["is_same"]
    assert "cannot hold" in document["not_compared"]


def test_a_changed_conversion_is_not(converted: Path, source: Sample, dckpt: Run) -> None:
    other = converted.with_name("other" + converted.suffix)
    to = "torch_file" if converted.suffix == ".pt" else "safetensors"
    arguments = ("--to", to, "--cast", "decoder.weight=float16", "--lossy", "--exclude", "uneven")
    assert dckpt("convert", source.folder, other, *arguments).code == 0
    document = dckpt("diff", source.folder, other, "--equal-nan", "--json")
    assert document.code == 1
    assert document.json["only_first"] == ["uneven"]
    assert [row["key"] for row in document.json["tensors"]] == ["decoder.weight"]


def test_objects_and_common_state_of_a_torch_file(
    samples: Samples, tmp_path: Path, dckpt: Run
) -> None:
    dckpt("convert", samples("tensorstore").folder, tmp_path / "m.pt", "--to", "torch_file")
    assert dckpt("show", tmp_path / "m.pt", "history", "--json").json["value"] == [0.5, 0.25]
    cells = dckpt("show", tmp_path / "m.pt", "rng", "--json").json["cells"]
    assert [cell["value"] for cell in cells] == [{"seed": [0, 5]}, {"seed": [1, 5]}]


def test_a_file_of_somebody_else(tmp_path: Path, dckpt: Run) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "a.ckpt")
    rows = dckpt("ls", tmp_path / "a.ckpt", "--json").json["tensors"]
    assert [row["key"] for row in rows] == ["model.bias", "model.weight"]
    assert dckpt("show", tmp_path / "a.ckpt", "epoch", "--json").json["value"] == 3


@pytest.mark.parametrize("command", ["ls", "stats"])
def test_files_that_are_damaged(tmp_path: Path, dckpt: Run, command: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "b.pt").write_bytes(b"PK\x03\x04" + b"x" * 100)
    (tmp_path / "c.txt").write_text("x")
    for name in ("a.safetensors", "b.pt", "c.txt"):
        finished = dckpt(command, tmp_path / name, code=2, out="")
        assert name in finished.err
    assert dckpt(command, tmp_path).code == 2


def test_a_file_that_changes_while_it_is_looked_at(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4.0)}, tmp_path / "a.pt")
    opened = Checkpoint.open(tmp_path / "a.pt")
    assert opened["w"][1:3].tolist() == [1.0, 2.0]
    torch.save({"w": torch.arange(5.0)}, tmp_path / "a.pt")
    with pytest.raises(CorruptCheckpointError, match="changed"):
        _ = opened["w"][1:3]

"""``dckpt ls`` as a user runs it, on checkpoints of every backend."""

from pathlib import Path

import pytest
import torch

from dist_checkpointing import save
from samples import Run, Sample, Samples
from scripts import run_fresh
from states import shard


def shape_text(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def test_the_table_the_tree_and_json(any_sample: Sample, dckpt: Run) -> None:
    finished = dckpt("ls", any_sample.folder, code=0, err="")
    header, *rows = finished.out.partition("\n\n")[0].split("\n")
    assert header.split() == ["KEY", "SHAPE", "DTYPE", "SIZE", "SHARDING"]
    # Nothing in a column has spaces but size and sharding, so that awk can take it apart.
    found = {row.split()[0]: row.split()[1:3] for row in rows}
    tensors = any_sample.tensors
    assert found == {
        key: [shape_text(tensor), str(tensor.dtype).removeprefix("torch.")]
        for key, tensor in tensors.items()
    }
    assert f"{len(tensors)} tensors" in finished.out
    assert "\x1b" not in finished.out
    document = dckpt("ls", any_sample.folder, "--json").json
    assert {row["key"]: (row["shape"], row["num_bytes"]) for row in document["tensors"]} == {
        key: (list(tensor.shape), tensor.nbytes) for key, tensor in tensors.items()
    }
    assert document["num_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert document["num_tensors"] == len(tensors)
    assert all(("num_pieces" in row) == (row["chunk_shape"] is None) for row in document["tensors"])
    assert "objects" not in document
    tree = dckpt("ls", any_sample.folder, "--tree").out
    assert all(key.rpartition(".")[2] in tree for key in tensors)
    assert tree.count("──") >= len(tensors)


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
    ("pattern", "keys"), [("flat|{x*}.{name}p", ["flat", "optimizer.step"]), ("decoder", [])]
)
def test_patterns(samples: Samples, dckpt: Run, pattern: str, keys: list[str]) -> None:
    folder = samples("zarr-2").folder
    document = dckpt("ls", folder, pattern, "--json").json
    assert [row["key"] for row in document["tensors"]] == keys
    finished = dckpt("ls", folder, pattern)
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


def test_depth_sums_up(samples: Samples, dckpt: Run) -> None:
    folder, tensors = samples("torch_dist").folder, samples("torch_dist").tensors
    size = sum(t.nbytes for key, t in tensors.items() if key.startswith("decoder"))
    text = f"{size} B"
    assert size < 1024
    tree = dckpt("ls", folder, "--depth", 1).out
    (line,) = [line for line in tree.split("\n") if "decoder" in line]
    assert line.split() == ["├──", "decoder", *text.split(), "(4", "…)"]
    assert "weight" not in tree


def test_on_a_terminal_nothing_is_cut_off(tmp_path: Path) -> None:
    long = "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"
    save({"w": shard(long, torch.zeros(2, 3))}, tmp_path / "c")
    command = ("-m", "dist_checkpointing", "ls", tmp_path / "c")
    terminal = {"COLUMNS": "60", "FORCE_COLOR": "1", "TERM": "xterm"}
    finished = run_fresh(*command, environment=terminal)
    assert "\x1b[1m" in finished.stdout
    assert long in finished.stdout
    lines = [line for line in finished.stdout.split("\n") if long not in line]
    assert all(len(line.replace("\x1b[1m", "").replace("\x1b[0m", "")) <= 60 for line in lines)
    plain = run_fresh(*command, environment=terminal | {"NO_COLOR": "1"})
    assert "\x1b" not in plain.stdout


def test_a_list_needs_no_torch(samples: Samples) -> None:
    code = f"""
import sys
from dist_checkpointing.tools.app import main
place = {str(samples("tensorstore").folder)!r}
sys.argv = ["dckpt", "ls", place]
try:
    main()
finally:
    print([name for name in ("torch", "tensorstore", "zarr") if name in sys.modules])
"""
    finished = run_fresh("-c", code)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.endswith("\n[]\n")
    assert "decoder.weight" in finished.stdout


# ``dckpt`` on files of safetensors and torch.save, and right after a conversion.


@pytest.mark.parametrize("name", ["model", "model.safetensors", "model.pt"])
def test_a_conversion_is_looked_at_like_its_source(
    samples: Samples, tmp_path: Path, dckpt: Run, name: str
) -> None:
    source, converted = samples("tensorstore"), tmp_path / name
    to = "torch_file" if name.endswith(".pt") else "safetensors"
    assert dckpt("convert", source.folder, converted, "--to", to).code == 0
    rows = {row["key"]: row for row in dckpt("ls", converted, "--json").json["tensors"]}
    assert {key: row["shape"] for key, row in rows.items()} == {
        key: list(tensor.shape) for key, tensor in source.tensors.items()
    }
    document = dckpt("stats", converted, "--json").json
    assert document["backend"] == [to, 1]
    assert document["tensors"]["num_tensors"] == len(source.tensors)
    files = [converted] if converted.is_file() else list(converted.iterdir())
    assert document["files"]["num_bytes"] == sum(path.stat().st_size for path in files)
    assert document["facts"] == {"checksums": "none were kept", "seal": "none was kept"}
    scanned = dckpt("stats", converted, "--scan", "--json", code=1)
    assert list(scanned.json["not_finite"]) == ["optimizer.moment"]

    document = dckpt("show", converted, "decoder.weight", "--slice", "2:4,:3", "--json").json
    expected = source.tensors["decoder.weight"][2:4, :3]
    assert torch.tensor(document["values"]).equal(expected)
    location = Path(document["chunks"][0]["location"].partition(",")[0])
    assert location.is_file()
    assert location.is_relative_to(converted)

    for pair in ((source.folder, converted), (converted, source.folder)):
        finished = dckpt("diff", *pair, "--equal-nan", code=0)
        assert f"the same: {len(source.tensors)} tensors" in finished.out
        # The state holds an argparse.Namespace, which torch.load would refuse.
        assert "not compared: objects and common state" in finished.out
    document = dckpt("diff", source.folder, converted, "--equal-nan", "--json").json
    assert document["is_same"]
    assert "cannot hold" in document["not_compared"]

    if to == "torch_file":
        assert dckpt("show", converted, "history", "--json").json["value"] == [0.5, 0.25]
        cells = dckpt("show", converted, "rng", "--json").json["cells"]
        assert [cell["value"] for cell in cells] == [{"seed": [0, 5]}, {"seed": [1, 5]}]


def test_a_file_of_somebody_else(tmp_path: Path, dckpt: Run) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "a.ckpt")
    rows = dckpt("ls", tmp_path / "a.ckpt", "--json").json["tensors"]
    assert [row["key"] for row in rows] == ["model.bias", "model.weight"]
    assert dckpt("show", tmp_path / "a.ckpt", "epoch", "--json").json["value"] == 3

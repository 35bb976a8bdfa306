import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dist_checkpointing.comm import Comm
from dist_checkpointing.format import ChunkGrid
from dist_checkpointing.tools import app
from dist_checkpointing.tools.map import render_page
from states import BACKEND, between, flat, save_on, shard

RUNNER = CliRunner()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


def saved(folder: Path, backend: Any) -> Path:
    """Rows and columns cut over four ranks, replicas, uneven rows and a flattened range."""
    uneven, flattened = [0, 1, 4, 5, 8], [0, 5, 13, 14, 24]

    def state(comm: Comm) -> dict[str, Any]:
        rank = comm.rank
        return {
            "rows": shard("rows", torch.ones(2, 6), (0, rank, 4)),
            "tiles": shard("tiles", torch.ones(2, 3), (0, rank // 2, 2), (1, rank % 2, 2)),
            "copied": shard("copied", torch.ones(3), replica_id=(rank - 2) % 4),
            "empty": shard("empty", torch.ones(0, 3), replica_id=rank),
            "uneven": between("uneven", torch.ones(8, 2), *uneven[rank : rank + 2]),
            "flat": flat("flat", torch.arange(24.0).reshape(4, 6), *flattened[rank : rank + 2]),
        }

    save_on(4, state, folder, backend)
    return folder


def invoke(*arguments: object, exit_code: int = 0) -> str:
    result = RUNNER.invoke(app.app, ["map", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return result.stdout


def data_in(page: Path) -> Any:
    text = page.read_text()
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def mapped(folder: Path) -> Any:
    page = folder.with_suffix(".html")
    invoke(folder, "-o", page, "--force")
    return data_in(page)


def writers(data: Any, row: Any) -> list[list[int]]:
    """The ranks that wrote each chunk or piece."""
    return [data["writers"][number] for number, count in row["writers"] for _ in range(count)]


@BACKEND
def test_it_knows_which_rank_wrote_what(tmp_path: Path, backend: Any) -> None:
    folder = saved(tmp_path / "c", backend)
    data = mapped(folder)
    found = {row["key"]: row for row in data["tensors"]}
    assert list(found) == ["copied", "empty", "flat", "rows", "tiles", "uneven"]
    assert writers(data, found["rows"]) == [[0], [1], [2], [3]]
    assert (found["rows"]["shape"], found["rows"]["chunk"]) == ([8, 6], [2, 6])
    assert (found["rows"]["bytes"], found["rows"]["itemsize"]) == (192, 4)
    assert writers(data, found["tiles"]) == [[0], [1], [2], [3]]
    assert {*map(tuple, writers(data, found["copied"]))} == {(2,)}
    assert [rank for rank, _ in data["ranks"]] == [0, 1, 2, 3]
    assert [name for name, _ in data["dtypes"]] == ["float32"]
    # Every element, wherever it lies, was written by the rank that held it.
    held = {
        "flat": [{rank} for rank, count in enumerate((5, 8, 1, 10)) for _ in range(count)],
        "uneven": [{rank} for rank, count in enumerate((1, 3, 1, 3)) for _ in range(2 * count)],
    }
    for key, ranks in held.items():
        found_ranks = _writers_of_elements(data, found[key])
        assert all(own >= rank for own, rank in zip(found_ranks, ranks, strict=True))
    if backend[0] != "zarr" or backend[1] == 2:
        assert _writers_of_elements(data, found["flat"]) == held["flat"]
    # The page of one tensor has all ranks.
    invoke(folder, "flat", "-o", tmp_path / "flat.html")
    data = data_in(tmp_path / "flat.html")
    assert [row["key"] for row in data["tensors"]] == ["flat"]
    assert [rank for rank, _ in data["ranks"]] == [0, 1, 2, 3]


def _writers_of_elements(data: Any, row: Any) -> list[set[int]]:
    height, width = row["shape"]
    owners: list[set[int]] = [set() for _ in range(height * width)]
    if "chunk" in row:
        grid = ChunkGrid(tuple(row["shape"]), tuple(row["chunk"]))
        boxes = map(grid.box, itertools.product(*map(range, grid.counts)))
        parts = [[(box.offset, box.shape)] for box in boxes]
    else:
        parts = row["pieces"]
    for part, ranks in zip(parts, writers(data, row), strict=True):
        for (top, left), (rows, columns) in part:
            for place in itertools.product(range(top, top + rows), range(left, left + columns)):
                owners[place[0] * width + place[1]] |= set(ranks)
    return owners


@pytest.mark.parametrize("backend", ["torch_dist", "tensorstore"])
def test_without_a_record_only_file_names_tell_who_wrote(tmp_path: Path, backend: str) -> None:
    folder = saved(tmp_path / "c", backend)
    before = mapped(folder)
    shutil.rmtree(folder / ".dckpt" / "checksums")
    data = mapped(folder)
    if backend == "torch_dist":
        assert data == before
        return
    assert data["writers"] == [[]]
    # Chunks of the same writers are one entry, so that the page of many chunks stays small.
    assert {row["key"]: row["writers"] for row in data["tensors"]}["rows"] == [[0, 4]]


# In a browser.


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", "zarr")
    page = tmp_path / "m.html"
    invoke(folder, "-o", page)
    steps = Path(__file__).with_name("map_steps.js").read_text()
    page.write_text(f"{page.read_text()}<script>{steps}</script>")
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [str(CHROMIUM), *arguments, profile, "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "<title>FAILED" not in done.stdout
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:]
    seen = json.loads(html.unescape(found[1]))
    every = ["copied", "empty", "flat", "rows", "tiles", "uneven"]
    assert sorted(seen["all"]) == seen["sorted"] == every
    assert "6 tensors" in seen["facts"]
    assert "written by 4 ranks" in seen["facts"]
    assert "rank 3" in seen["legend"]
    assert seen["found"] == ["rows", "tiles"]
    assert seen["selected"] == "rows"
    assert seen["clicked"] == "tiles"
    assert seen["chunks"] == [f"rank {rank}" for rank in range(4)]
    assert seen["painted"] >= 5
    assert seen["none"] == [0, "0 of 6"]
    assert seen["bad"] == "not a regular expression"
    assert seen["theme"] in ("dark", "light")


EVIL = "a</script><script>alert(1)</script>&<!--\x00\x1b[31m\n\u2028"


def test_no_key_breaks_out_of_the_page_and_it_loads_nothing() -> None:
    data = {"name": EVIL, "tensors": [{"key": EVIL, "shape": [2]}]}
    text = render_page(data)
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert json.loads(found[1]) == data
    assert not {*"<>&"} & {*found[1]}
    assert re.findall(r"<script\b[^>]*>", text) == [found[0].partition(">")[0] + ">", "<script>"]
    without_code = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"<(link|img|iframe|object|base)\b|\s(src|href|action)\s*=", without_code)
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", text)
    assert "default-src 'none'" in text

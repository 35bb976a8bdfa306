"""``dckpt stats --compare``: which tensors moved most between two checkpoints."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing import save
from dist_checkpointing.checkpoint import Checkpoint
from dist_checkpointing.tools.inspect.movement import Moved, _moved, movement
from samples import Run
from scripts import TELL_PEAK, run_fresh, told_peak
from states import shard, wholes
from tiers import examples

NAN, INF = math.nan, math.inf


def pair(tmp_path: Path, **options: Any) -> tuple[Path, Path]:
    torch.manual_seed(0)
    before = {
        "far": torch.ones(40, 3),
        "near": torch.full((64,), 10.0).bfloat16(),
        "new": torch.zeros(4),
        "odd": torch.tensor([1.0, NAN, INF, NAN]),
        "same": torch.randn(7),
        "whole": torch.arange(5),
        "shape": torch.zeros(2),
        "gone": torch.zeros(2),
    }
    after = {key: tensor.clone() for key, tensor in before.items() if key != "gone"}
    after["far"][:10] = 3
    after["near"][0] = 10.5
    after["new"][1] = 0.25
    after["odd"] = torch.tensor([1.5, NAN, INF, 2.0])
    after["whole"][2] = -2
    after["shape"] = torch.zeros(3)
    save(wholes(before), tmp_path / "1", **options)
    save(wholes(after), tmp_path / "2", ("zarr", 2), **options)
    return tmp_path / "1", tmp_path / "2"


def test_how_far_each_tensor_moved(tmp_path: Path, dckpt: Run) -> None:
    one, two = pair(tmp_path)
    finished = dckpt("stats", "--compare", one, two, "--json")
    assert finished.code == 0
    document = finished.json
    assert (document["earlier"], document["later"]) == (str(one), str(two))
    assert document["num_same"] == 1
    assert document["not_compared"] == ["gone", "shape"]
    rows = {row["key"]: row for row in document["tensors"]}
    assert list(rows) == ["new", "far", "whole", "odd", "near"]
    far = rows["far"]
    assert far["num_changed"] == 30
    assert far["fraction_changed"] == 0.25
    assert far["max_change"] == 2
    assert far["norm_before"] == pytest.approx(math.sqrt(120))
    assert far["norm_after"] == pytest.approx(math.sqrt(90 + 30 * 9))
    assert far["norm_of_change"] == pytest.approx(math.sqrt(30 * 4))
    assert far["relative_change"] == pytest.approx(1)
    assert rows["new"]["relative_change"] == "Infinity"
    assert rows["near"]["num_changed"] == 1
    assert rows["odd"]["num_changed"] == 2
    assert rows["odd"]["num_not_finite"] == 3
    assert rows["odd"]["norm_of_change"] == 0.5
    assert rows["whole"]["max_change"] == 4


def test_the_table(tmp_path: Path, dckpt: Run) -> None:
    one, two = pair(tmp_path)
    out = dckpt("stats", two, "--compare", one).out
    title, header, *rows = out.partition("\n\n")[0].split("\n")
    assert title == f"{one} -> {two}"
    assert header.split()[:3] == ["KEY", "MOVED", "BY"]
    assert [row.split()[0] for row in rows] == ["new", "far", "whole", "odd", "near"]
    assert rows[1].split() == ["far", "100.0%", "2", "25.0%", "10.95", "18.97"]
    assert rows[0].split()[1:3] == ["from", "0"]
    last = out.splitlines()[-1]
    assert last.startswith("5 of 6 tensors moved, together by ")
    assert "3 NaN or infinite elements left out of the norms" in last
    assert "2 not compared" in last
    out = dckpt("stats", two, "--compare", one, "--top", 2).out
    assert "... 3 more" in out
    assert "near" not in out.partition("...")[0]
    assert "0 of 8 tensors moved" in dckpt("stats", one, "--compare", one).out


def test_the_page(tmp_path: Path, dckpt: Run) -> None:
    one, two = pair(tmp_path)
    page = tmp_path / "moved.html"
    finished = dckpt("stats", two, "--compare", one, "-o", page)
    assert finished.code == 0
    assert f"written: {page}" in finished.out
    text = page.read_text()
    assert re.findall(r'<tr data-key="([^"]*)"', text) == ["new", "far", "whole", "odd", "near"]
    assert "5 of 6 tensors moved" in text
    assert not re.search(r"https?://|@import|src=", text)
    assert dckpt("stats", two, "--compare", one, "-o", page).code == 2
    assert dckpt("stats", two, "--compare", one, "-o", page, "--force").code == 0


def test_keys_cannot_write_into_the_page(tmp_path: Path, dckpt: Run) -> None:
    for step in (1, 2):
        state = {"k": shard('<script>"&', torch.full((2,), float(step)))}
        save(state, tmp_path / str(step))
    page = tmp_path / "p.html"
    dckpt("stats", tmp_path / "2", "--compare", tmp_path / "1", "-o", page)
    assert '<script>"&' not in page.read_text()
    assert 'data-key="&lt;script&gt;&quot;&amp;"' in page.read_text()


def test_what_has_the_same_fingerprint_is_not_read(
    tmp_path: Path, dckpt: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair(tmp_path, fingerprints=True)
    read: list[str] = []
    own = Checkpoint.read

    def noting(self: Checkpoint, wanted: Any) -> Any:
        rows = list(wanted)
        read.extend(key for key, _ in rows)
        return own(self, rows)

    monkeypatch.setattr(Checkpoint, "read", noting)
    assert dckpt("stats", two, "--compare", one, "--json").json["num_same"] == 1
    assert "far" in read
    assert "same" not in read


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{1}", "-o", "a.html"], "pass --compare EARLIER"),
        (["{1}", "--compare", "{2}", "--scan"], "pass one of them"),
        (["{1}", "--compare", "{2}", "-o", "a.txt"], "must end in .html"),
        (["{1}", "--compare", "{2}/nope"], "does not exist"),
    ],
)
def test_bad_input(tmp_path: Path, dckpt: Run, arguments: list[str], words: str) -> None:
    one, two = pair(tmp_path)
    finished = dckpt(
        "stats", *(a.replace("{1}", str(one)).replace("{2}", str(two)) for a in arguments)
    )
    assert (finished.code, finished.out) == (2, "")
    assert words in finished.err


VALUES = st.floats(width=32) | st.sampled_from([0.0, -0.0, NAN, INF, -INF])


@given(st.lists(st.tuples(VALUES, VALUES), max_size=20), st.integers(0, 20))
@examples(100)
def test_parts_add_up_to_the_whole(pairs: list[tuple[float, float]], cut: int) -> None:
    a, b = (torch.tensor([row[side] for row in pairs], dtype=torch.float32) for side in (0, 1))
    whole = _moved(a, b)
    parts = _moved(a[:cut], b[:cut]).with_more(_moved(a[cut:], b[cut:]))
    assert whole.squares == pytest.approx(parts.squares)
    assert (whole.num_changed, whole.max_change) == (parts.num_changed, parts.max_change)
    finite = a.isfinite() & b.isfinite()
    assert whole.num_not_finite == int((~finite).sum())
    assert whole.num_changed == int(((a != b) & ~(a.isnan() & b.isnan())).sum())
    change = (b.double() - a.double())[finite]
    assert whole.norms[2] == pytest.approx(float(change.norm()))


def test_an_empty_tensor_has_not_moved() -> None:
    assert _moved(torch.zeros(0), torch.zeros(0)) == Moved()
    assert (Moved().relative, Moved().fraction) == (0.0, 0.0)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Two checkpoints of 128 MiB are compared with blocks of 8 MiB."""
    for step in (1, 2):
        tensors = {f"w{i}": torch.full((2**24,), float(step * i)) for i in range(2)}
        save(wholes(tensors), tmp_path / str(step))
    code = f"""{TELL_PEAK}
import sys
from pathlib import Path
from dist_checkpointing.checkpoint import Checkpoint
from dist_checkpointing.storage.options import ReadMode, StorageOptions
from dist_checkpointing.tools.inspect.movement import movement
pair = [Checkpoint.open(Path(sys.argv[1]) / str(step)) for step in (1, 2)]
for opened in pair:
    opened.reads.options = StorageOptions(read_mode=ReadMode.PREAD)
if len(sys.argv) > 2:
    print(movement(*pair, memory_bytes=2**24).moved["w1"].num_changed)
"""
    idle = run_fresh("-c", code, tmp_path)
    busy = run_fresh("-c", code, tmp_path, "compare")
    assert busy.returncode == 0, busy.stderr
    assert busy.stdout == f"{2**24}\n"
    assert told_peak(busy.stderr) - told_peak(idle.stderr) < 100e6


def test_movement_reports_all_bytes(tmp_path: Path) -> None:
    one, two = pair(tmp_path, fingerprints=True)
    later = Checkpoint.open(two)
    counted: list[int] = []
    movement(Checkpoint.open(one), later, report=counted.append)
    compared = [k for k in later if k not in ("shape", "gone")]
    assert sum(counted) == sum(later[key].num_bytes for key in compared)

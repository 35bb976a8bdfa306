"""What a save of many small tensors takes beyond them, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import run_fresh

COUNT = 12_000
PROGRAM = """
import gc, json, re, sys
from pathlib import Path
import torch
from dist_checkpointing import ShardedTensor, save

def status(name):
    text = Path("/proc/self/status").read_text()
    return int(re.search(name + r":\\s+(\\d+)", text)[1]) * 1024

def state(count):
    names = [f"layers.{i // 20}.mlp.weight.{i % 20}" for i in range(count)]
    tensor = ShardedTensor.from_rank_offsets
    return {name: tensor(name, torch.full((256,), float(i))) for i, name in enumerate(names)}

save(state(10), sys.argv[1] + "/warm")
many = state(int(sys.argv[2]))
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
save(many, sys.argv[1] + "/c")
gc.collect()
print(json.dumps({"peak": status("VmHWM") - before, "left": status("VmRSS") - before}))
"""


def test_a_save_takes_a_known_amount_for_each_tensor(tmp_path: Path) -> None:
    done = run_fresh("-c", PROGRAM, tmp_path, COUNT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # What docs/concepts.md promises, and some room for the allocator.
    assert found["peak"] < 16 * 2**20 + COUNT * 2 * 2**10
    assert found["left"] < 16 * 2**20 + COUNT * 2 * 2**10

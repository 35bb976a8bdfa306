"""One rank of the cases that need as many ranks as there are: REPORTS."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]

from cases import CASES  # noqa: E402
from runner import Settings, Stage, run_case  # noqa: E402
from world import World  # noqa: E402

dist.init_process_group("gloo")
world = World(dist.get_rank(), dist.get_world_size())
reports = {}
for name, case in CASES.items():
    if case.ranks == world.size:
        scratch = Path(sys.argv[-1], name)
        scratch.mkdir(exist_ok=True)
        settings = Settings(tiny=True, loads=5, store="memory://bench/tiny")
        reports[name] = run_case(case, Stage(world, scratch, settings, lambda _: None), 60.0)
        dist.barrier()
        assert [*scratch.iterdir()] == [], "a case has left files"
Path(sys.argv[-1], f"{os.environ['RANK']}.json").write_text(json.dumps(reports))
dist.destroy_process_group()

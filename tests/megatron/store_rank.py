"""One of two ranks that load a downloaded checkpoint with Megatron's own package.

``store_rank.py MEGATRON FOLDER REPORTS``: MEGATRON holds megatron-core.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rank import without_cuda


def main() -> None:
    megatron, folder, reports = sys.argv[1:]
    sys.path.insert(0, megatron)
    warnings.simplefilter("ignore")
    without_cuda()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    from megatron.core import dist_checkpointing as theirs

    assert "megatron" in str(theirs.__file__)

    def part(key: str, data: torch.Tensor) -> Any:
        return theirs.ShardedTensor.from_rank_offsets(key, data, (1, rank, 2))

    template = {
        "weight": part("layer.weight", torch.zeros(8, 3, dtype=torch.bfloat16)),
        "moment": part("optimizer.moment", torch.zeros(8, 3)),
        "extra": theirs.mapping.ShardedObject("extra", None, (2,), (rank,)),
    }
    loaded = theirs.load(template, folder)
    found = {
        "weight": loaded["weight"].view(torch.int16).tolist(),
        "moment": loaded["moment"].view(torch.int32).tolist(),
        "extra": loaded["extra"],
        "step": loaded["step"],
    }
    Path(reports, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

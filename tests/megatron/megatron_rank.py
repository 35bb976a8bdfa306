"""One of two ranks with Megatron's real models and optimizers, on a machine without CUDA.

``megatron_rank.py FOLDER ROLE ACTION PLACE REPORTS``: FOLDER holds megatron-core; ROLE is "ours" if
its package of checkpoints is to be that of this library, or "theirs"; ACTION is "write" or "read";
below PLACE are the checkpoints, of both roles.
"""

import hashlib
import importlib.util
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

WORLD_SIZE = 2
TP_SIZES = (1, 2)
MODELS = ("swiglu", "moe")
FORMATS = ("fully_sharded_model_space", "dp_zero_gather_scatter", "fully_reshardable")
OF_ONE_TP_SIZE = "dp_zero_gather_scatter"  # by Megatron's design


class OnTheCPU(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        return func(*args, **given)


class FusedAdam(torch.optim.Optimizer):
    """Apex's Adam as far as checkpoints see it: it counts the steps of a group, not of a tensor."""

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        del options
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                for name, beta, value in zip(
                    ("exp_avg", "exp_avg_sq"), group["betas"], (param.grad, param.grad**2),
                    strict=True,
                ):  # fmt: skip
                    average = state.setdefault(name, torch.zeros_like(param))
                    average.mul_(beta).add_(value, alpha=1 - beta)
                step = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                param.add_(step, alpha=-group["lr"])


def without_cuda() -> None:
    """Answer what Megatron asks CUDA as if the CPU were a GPU."""
    type_name = torch.Tensor.type

    def named_as_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return type_name(tensor, *args, **kwargs)
        return "torch.cuda." + type_name(tensor).rsplit(".", 1)[-1]

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.type = named_as_cuda  # type: ignore[assignment, method-assign]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda module, *_: module  # type: ignore[method-assign]
    OnTheCPU().__enter__()  # type: ignore[no-untyped-call]
    if not hasattr(np, "product"):  # Megatron 0.15 knows numpy 1
        vars(np)["product"] = np.prod
    if importlib.util.find_spec("triton") is None:  # Megatron 0.18 imports it for its GPU kernels
        importlib.import_module(
            "torch._inductor.compile_fx"
        )  # which would take it for the real one
        triton = MagicMock(__version__="3.4")
        sys.modules.update({"triton": triton, "triton.language": triton.language})
    optimizers = importlib.import_module("megatron.core.optimizer")
    vars(optimizers).update(Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False)
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    vars(distributed).update(Adam=FusedAdam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)


def made(model: str, tp_size: int, seed: int) -> tuple[Any, Any]:
    """A GPTModel and its DistributedOptimizer after one step, with values of the seed."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_size)
    num_experts = 2 if model == "moe" else None
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        tensor_model_parallel_size=tp_size,
        num_moe_experts=num_experts,
        moe_ffn_hidden_size=32 if num_experts else None,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    torch.manual_seed(seed)
    spec = get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False)
    gpt = GPTModel(config, spec, vocab_size=64, max_sequence_length=16).bfloat16()
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt
    )
    options = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, [wrapped])
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for number, param in enumerate(gpt.parameters()):
        # What both ranks have must stay the same on both.
        part = tp_rank if getattr(param, "tensor_model_parallel", False) else 0
        generator = torch.Generator().manual_seed(1000 * seed + 2 * number + part)
        param.main_grad.copy_(torch.randn(param.shape, generator=generator))
    optimizer.step()
    return gpt, optimizer


def state_of(gpt: Any, optimizer: Any, form: str, *, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": form}
    return {
        "model": gpt.sharded_state_dict(),
        "optimizer": optimizer.sharded_state_dict(
            gpt.sharded_state_dict(), is_loading=is_loading, metadata=metadata
        ),
        "step": 7,
    }


def digest(gpt: Any, optimizer: Any) -> str:
    """Of all bits of the model and of the optimizer on this rank."""
    found = hashlib.sha256()
    tensors: list[tuple[str, torch.Tensor]] = list(gpt.named_parameters())
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for part, own in enumerate(parts):
        for group, params in enumerate(own.optimizer.param_groups):
            for number, param in enumerate(params["params"]):
                name = f"{part}.{group}.{number}"
                state = own.optimizer.state[param]
                tensors += [(name, param), (name, state["exp_avg"]), (name, state["exp_avg_sq"])]
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def cases() -> Iterator[tuple[str, str, int]]:
    return itertools.product(MODELS, FORMATS, TP_SIZES)


def save_behind_the_training(state: dict[str, Any], folder: Path) -> None:
    """With the last steps of ``--async-save``: one on rank 0, and two on the last rank."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    called: list[int] = []
    request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
    for number in range(1 + dist.get_rank()):
        request.add_finalize_fn(partial(called.append, number))
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    assert len(called) == 1 + dist.get_rank()


def report(role: str, action: str, place: Path) -> dict[str, str]:
    from megatron.core import dist_checkpointing

    found = {}
    for model, form, tp_size in cases():
        if action == "write":
            folder = place / f"{role}-{model}-{form}-{tp_size}"
            gpt, optimizer = made(model, tp_size, seed=1)
            folder.mkdir(exist_ok=True)
            dist.barrier()
            try:
                state = state_of(gpt, optimizer, form, is_loading=False)
                if role == "ours" and form == FORMATS[-1]:
                    save_behind_the_training(state, folder)
                else:
                    dist_checkpointing.save(state, str(folder))
            except dist_checkpointing.core.CheckpointingException as error:
                # Megatron 0.16 has no flattened tensors any more.
                if "flattened_range is not supported" not in str(error):
                    raise
                continue
            found[folder.name] = digest(gpt, optimizer)
            continue
        for writer, written_tp_size in itertools.product(("ours", "theirs"), TP_SIZES):
            folder = place / f"{writer}-{model}-{form}-{written_tp_size}"
            is_possible = tp_size == written_tp_size or form != OF_ONE_TP_SIZE
            if not is_possible or not (folder / "metadata.json").exists():
                continue
            gpt, optimizer = made(model, tp_size, seed=100)
            try:
                template = state_of(gpt, optimizer, form, is_loading=True)
                loaded = dist_checkpointing.load(template, str(folder))
            except dist_checkpointing.core.CheckpointingException as error:
                if "flattened_range is not supported" not in str(error):
                    raise
                continue
            assert loaded["step"] == 7
            gpt.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            found[f"{folder.name} {tp_size}"] = digest(gpt, optimizer)
    return found


def main() -> None:
    megatron, role, action, place, reports = sys.argv[1:]
    sys.path.insert(0, megatron)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if role == "ours":
        from dist_checkpointing.interop import megatron as layer

        layer.install()
    without_cuda()
    dist.init_process_group("gloo")
    found = report(role, action, Path(place))
    Path(reports, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

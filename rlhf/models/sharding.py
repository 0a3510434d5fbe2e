"""A part of the model in every process: FSDP2's `fully_shard` (Zhao et al., 2023), for models that fit no device whole.

A layer's weights are whole only while it computes. They are put together by all ranks at once, so that all ranks must
pass through the same layers equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.distributed import Ranks

T = TypeVar("T")


def shard(module: nn.Module, device: torch.device, methods: Sequence[str] = ()) -> None:
    """Leaves every rank a part of each parameter, on `device`: each decoder layer's by itself, the rest together.

    `methods` are those through which `module` is used beside its forward.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in module.modules():
        if isinstance(part, GradientCheckpointingLayer):  # what transformers makes its decoder layers of
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for method in methods:
        register_fsdp_forward_method(module, method)


def is_sharded(module: nn.Module) -> bool:
    """Whether this process holds only a part of the module's parameters."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or where it is a rank's part, all of it, on the CPU: then for all ranks to call."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def part_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of a whole `tensor` of the parameter's shape, where that is sharded; else the tensor."""
    if not isinstance(parameter, DTensor) or isinstance(tensor, DTensor) or tensor.shape != parameter.shape:
        return tensor
    return distribute_tensor(
        tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def in_lock_step(model: PreTrainedModel, work: Callable[[], T]) -> T:
    """What `work` returns, which may pass through the model's trunk another number of times on each rank.

    A rank that is done goes on with a token that nobody looks at, until all are.
    """
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    trunk = model.base_model
    hook = trunk.register_forward_pre_hook(lambda *_: ranks.sum([1.0]) and None)
    try:
        result = work()
    finally:
        hook.remove()
    nothing = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    while any(ranks.sum([0.0])):
        trunk(input_ids=nothing, use_cache=False)
    return result

"""The whole model in every process, with one gradient: DistributedDataParallel (Li et al., 2020)."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicated(module: nn.Module) -> nn.Module:
    """`module` whose backward pass averages the gradients over all ranks; all start with the weights of the first.

    Parameters may go unused (in the critic's warm-up those of the policy do) and then keep no gradient. Looking for
    them also keeps torch from regrouping the gradients after the first step, so that a resumed run sums them in the
    same order as one that was never killed.
    """
    return DistributedDataParallel(module, forward_sync_buffers=False, find_unused_parameters=True)

"""Parts of a model: what is whole again, and how ranks keep step that have not the same to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf.distributed import Ranks
from rlhf.models.actor_critic import ActorCritic
from rlhf.models.sharding import is_sharded, part_like, shard, whole
from tests.ranks import in_ranks
from tests.tiny_models import ARCHITECTURES, tiny_model

CPU = torch.device("cpu")


def test_what_is_not_sharded_is_whole_and_its_own_part() -> None:
    tensor = torch.ones(3)
    assert whole(tensor) is tensor and part_like(torch.zeros(3), tensor) is tensor
    assert not is_sharded(tiny_model())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_rank_holds_a_part_that_gives_back_the_whole(tmp_path: Path, architecture: str) -> None:
    before = {name: p.detach().clone() for name, p in tiny_model(architecture).named_parameters()}

    def sharded(ranks: Ranks) -> bool:
        model = tiny_model(architecture)
        shard(model, CPU)
        assert is_sharded(model)
        for name, parameter in model.named_parameters():
            part = part_like(parameter, before[name])
            assert part.to_local().numel() < parameter.numel()  # type: ignore[operator]
            assert part.to_local().equal(parameter.to_local())  # type: ignore[operator]
            assert whole(parameter).equal(before[name])
        return True

    assert in_ranks(tmp_path, sharded) == [True, True]


@pytest.mark.parametrize("passes", [(1, 4), (3, 0), (0, 0)])
def test_a_rank_that_is_done_waits_for_the_other(tmp_path: Path, passes: tuple[int, int]) -> None:
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = tiny_model().base_model(input_ids=tokens).last_hidden_state

    def sampled(ranks: Ranks) -> int:
        actor_critic = ActorCritic(tiny_model(), None, torch.float32)
        shard(actor_critic, CPU, ["sampling"])

        def work(model):  # type: ignore[no-untyped-def]
            for _ in range(passes[ranks.rank]):
                torch.testing.assert_close(model.base_model(input_ids=tokens).last_hidden_state, expected)
            return passes[ranks.rank]

        assert actor_critic.sampling(work) == passes[ranks.rank]  # and a second time, as before
        return actor_critic.sampling(work)

    assert in_ranks(tmp_path, sampled) == [*passes]

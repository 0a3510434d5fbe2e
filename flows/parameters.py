"""What a person chooses in the deployments' forms: types, bounds and the words beside each field."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Override = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*=", max_length=1000)]


class Choices(BaseModel):
    """The pipeline's choices: the words of `make run`."""

    model_config = ConfigDict(extra="forbid")

    scale: Literal["smoke", "tiny", "smollm2-words", "smollm2-135m", "qwen2.5-0.5b"] = Field(
        default="tiny",
        description="Model, data and length of training; smoke takes a minute, tiny five on two CPU cores",
    )
    data: Literal["of_scale", "generator", "gsm8k", "files"] = Field(
        default="of_scale",
        description="The problems: of_scale takes the scale's own; generator makes them, gsm8k comes from the hub, "
        "files come from the worker's directory that overrides name: data.reads=/absolute/path",
    )
    reward: Literal["verifier", "reward_model", "mixture"] = Field(
        default="verifier", description="What scores an answer: the right final number, the reward model, or both"
    )
    critic: Literal["shared", "separate"] = Field(
        default="shared", description="The critic: a head on the policy, or a model of its own"
    )
    kl: Literal["fixed", "adaptive", "loss"] = Field(
        default="fixed",
        description="KL to the reference: in the reward with a fixed or an adaptive coefficient, or in the loss",
    )
    overrides: list[Override] = Field(
        default_factory=list,
        max_length=100,
        description="More params, one key=value each, as on the command line: ppo.kl.coef=0.02. They win over the rest",
    )
    seed: Literal["fixed", "from_date"] = Field(
        default="fixed",
        description="fixed: the params' seed (0, or seed=N in overrides), so nothing is computed twice; from_date: the "
        "scheduled day as a number (20261202), so each night trains another policy on the same problems",
    )
    revision: str = Field(
        default="HEAD",
        pattern=r"^[A-Za-z0-9]\S*$",
        max_length=200,
        description="Commit, branch or tag of this repository to run; HEAD is what its checkout has now",
    )
    allow_dirty: bool = Field(
        default=False,
        description="Run with the checkout's uncommitted changes: they are logged, and no champion comes from them",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Choices:
        if self.allow_dirty and self.revision != "HEAD":
            raise ValueError(
                "allow_dirty puts uncommitted changes on HEAD: leave the revision at HEAD, or leave it out"
            )
        if self.seed == "from_date" and any(override.startswith("seed=") for override in self.overrides):
            raise ValueError("seed is from_date, and the overrides name another: take one of them")
        if self.data == "files" and not any(re.match(r"data\.reads=['\"]?/", each) for each in self.overrides):
            raise ValueError(
                "data is files, and a run's own workspace has none: name their directory on the worker's host by its "
                "absolute path in overrides: data.reads=/absolute/path"
            )
        return self

    def hydra(self, scheduled: datetime) -> list[str]:
        """The overrides of `rlhf.config.compose` that these choices come to, in a run scheduled for that time (UTC).

        The problems keep their seed: gate and test must stay the same for policies to be compared.
        """
        words = [f"{group}={getattr(self, group)}" for group in ("scale", "reward", "critic", "kl")]
        words += [f"data={self.data}"] if self.data != "of_scale" else []
        dated = [f"seed={scheduled:%Y%m%d}"] if self.seed == "from_date" else []
        return [*words, *dated, *self.overrides]

"""The params of the model registry and of the gate in front of its champion."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf.params.section import NonNegative, Section, Share

Level = Annotated[float, Field(gt=0, le=1)]


class Registry(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
    """Registered model's name."""


class Gate(Section):
    """What a candidate has to show on the gate split to become champion."""

    min_gain: Share
    """Least gain in accuracy over the SFT start."""
    alpha: Level
    """Level of the one-sided paired test against the SFT start; 1 asks for no test."""
    champion_alpha: Level
    """Level of the same test against the champion; 1 asks only for more right answers than the champion's."""
    max_kl: NonNegative | None
    """Largest KL to the SFT start, in nats a sampled sequence; null allows any."""
    max_cut_off: Share
    """Largest share of answers that the length limit may cut off."""
    max_parse_failures: Share
    """Largest share of answers without a final number."""

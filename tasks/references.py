"""Names in the params that point to something else tomorrow: a branch on the hub, an alias of a registered model.

DVC compares the params' text, so a run that is made of `hf://org/name@main` would count as unchanged when main moves.
Written with the commit, it says what it is made of, and runs again only if that has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf import hub
from rlhf.errors import UserError
from rlhf.hub import OutOfReachError
from rlhf.models.sources import pinned
from rlhf.params import REGISTERED, on_hub
from rlhf.registry import lookup


def pin(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The composed params with every moving reference pinned, and what was pinned, in words.

    Raises UserError where the hub refuses or does not answer.
    """
    fixed = copy.deepcopy(raw)
    data, sft, preferences = fixed["data"], fixed["sft"], fixed["preferences"]
    pins = []
    if data["source"] == "hub":
        repo, revision = data["hub"]["repo"], data["hub"]["revision"]
        with _named("data.hub", f"{repo}@{revision}"):
            data["hub"]["revision"] = hub.commit("dataset", repo, revision)
        pins.append((f"data.hub {repo}@{revision}", revision, data["hub"]["revision"]))
    if judged := on_hub(preferences["source"]):
        with _named("preferences.source", preferences["source"]):
            preferences["source"] = f"hf://{judged[0]}@{hub.commit('dataset', *judged)}"
        before = raw["preferences"]["source"]
        pins.append((f"preferences.source {before}", before, preferences["source"]))
    with _named("sft.source", sft["source"]):
        is_registered = sft["source"].startswith(REGISTERED)
        sft["source"] = lookup.pinned(sft["source"]) if is_registered else pinned(sft["source"])
    pins.append(("sft.source " + raw["sft"]["source"], raw["sft"]["source"], sft["source"]))
    return fixed, [f"{what} is {now}" for what, before, now in pins if before != now]


@contextmanager
def _named(key: str, value: str) -> Iterator[None]:
    """Puts the key at fault before what is wrong with it."""
    try:
        yield
    except OutOfReachError as error:
        raise OutOfReachError(f"{key}={value}: the hub is out of reach ({error}): name the commit itself") from None
    except UserError as error:
        raise UserError(f"{key}={value}: {error}") from None

"""The history of a registered version, gathered from its tags, its records and the runs that made it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf import machine
from rlhf.errors import UsageError
from rlhf.registry import records
from rlhf.registry.champion import COMPARED_WITH, GATE, REASONS, WITHDRAWN
from rlhf.registry.lookup import URI, find_model, find_of
from rlhf.registry.server import server
from rlhf.tracking.server import search_by_outs

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


@dataclass(frozen=True)
class StageRun:
    """What one stage made, and the MLflow run that made it."""

    stage: str
    run_id: str | None
    """None where no run with these outputs is found."""
    outs: Mapping[str, str]
    """md5 of each output by its path, as in `dvc.lock`."""
    machine: Mapping[str, str]


@dataclass(frozen=True)
class History:
    """All that the registry and the tracking server know of how a version was made."""

    name: str
    version: str
    aliases: tuple[str, ...]
    policy_hash: str
    gate: Mapping[str, str]
    """The gate's `verdict`, its `reasons`, the champion `compared_with`; `withdrawn` where a person took it back."""
    commit: str
    """Empty where the code was in no git repository."""
    dirty: bool
    diff: str
    """What the code had beyond the commit."""
    is_masked: bool
    """Whether the diff held a secret, in whose place there is a mask."""
    params: Mapping[str, Any]
    data: Mapping[str, str]
    """md5 of each data file and directory that a stage read."""
    sft: Mapping[str, Any]
    """The manifest of the checkpoint that PPO started from; empty where it was not kept."""
    stages: tuple[StageRun, ...]
    """In the order of `dvc.lock`; empty where no lock was kept."""
    machine: Mapping[str, str]
    """What the policy was trained on."""
    evaluation: Mapping[str, Any]


def read(uri: str) -> tuple[History, dict[str, bytes]]:
    """The history of the version `models:/NAME@ALIAS` or `models:/NAME/NUMBER`, and its records by name.

    Raises UsageError for another form, UserError where there is no such version or the server cannot be reached.
    """
    wanted = URI.fullmatch(uri)
    if not wanted:
        raise UsageError(f"{uri}: no version of a model: write models:/gsm8k-policy@champion or models:/gsm8k-policy/3")
    with server() as registry:
        model = find_model(registry, wanted["name"])
        version = find_of(registry, model, wanted["number"] or wanted["alias"])
        found = records.read(version)
        aliases = tuple(sorted(a for a, number in model.aliases.items() if str(number) == str(version.version)))
        return history_of(version, aliases, found, _stages(registry, version, found)), found


def history_of(
    version: ModelVersion, aliases: tuple[str, ...], found: Mapping[str, bytes], stages: tuple[StageRun, ...]
) -> History:
    """The history that a version's tags and records tell, with the runs of its `stages`."""
    import yaml

    tags = version.tags
    gate = {"verdict": GATE, "reasons": REASONS, "compared_with": COMPARED_WITH, "withdrawn": WITHDRAWN}
    return History(
        name=version.name,
        version=str(version.version),
        aliases=aliases,
        policy_hash=tags.get("policy_hash", ""),
        gate={key: tags[tag] for key, tag in gate.items() if tag in tags},
        commit=tags.get(records.COMMIT_TAG, ""),
        dirty=tags.get("git.dirty") == "true",
        diff=found.get(records.DIFF, b"").decode(errors="replace"),
        is_masked=records.is_masked(found, tags),
        params=yaml.safe_load(found.get(records.PARAMS, b"{}")),
        data=records.data_read(found),
        sft=json.loads(found.get(records.SFT, b"{}")),
        stages=stages,
        machine=machine.of_tags(tags),
        evaluation=json.loads(found.get(records.EVALUATION, b"{}")),
    )


def _stages(registry: MlflowClient, version: ModelVersion, found: Mapping[str, bytes]) -> tuple[StageRun, ...]:
    """Each stage with the run that registering noted, or else the latest that made the same outputs."""
    runs = []
    for stage, entry in records.lock_stages(found).items():
        outs = records.hashes(entry.get("outs", []))
        run_id = version.tags.get(f"{stage}_run_id") or (outs and search_by_outs(registry, stage, outs)) or None
        tags = registry.get_run(run_id).data.tags if run_id else {}
        runs.append(StageRun(stage, run_id, outs, machine.of_tags(tags)))
    return tuple(runs)

"""Registers the policy in MLflow as the candidate, and lets the gate decide whether it becomes champion.

    python -m stages.register [key=value ...]          for example registry.name=mine

Writes nothing that DVC hashes. A policy that is registered already stays as it is; a refusal is a result, no error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf import tracking
from rlhf.anchors import UNCOMMITTED
from rlhf.evaluation.right_answers import read_right_answers
from rlhf.hashes import dvc_md5
from rlhf.models.checkpoints import Manifest, read_manifest
from rlhf.registry import champion, model_card, records, versions
from rlhf.registry.champion import Papers
from rlhf.registry.gate import Candidate, kl_of_selected
from rlhf.registry.records import Records
from rlhf.stage import Stage, run_stage

SPLITS = ("gate", "test")
PPO = ("best_iteration", "iterations")
MAKERS = {"models/policy": "train_ppo", "metrics/evaluation.json": "evaluate"}
"""The outputs by whose hash the runs that made this version are found, and their stages."""


def main(stage: Stage) -> None:
    params, policy = stage.params, stage.input("models/policy")
    name, limit = params.registry.name, params.ppo.sampling.max_new_tokens
    ppo, validation = stage.read_json(
        "metrics/ppo.json",
        lambda found: ({key: int(found[key]) for key in PPO}, float(found["best"]["validation_accuracy"])),
    )
    kl = stage.read_text("plots/ppo.csv", lambda curve: kl_of_selected(curve, ppo["best_iteration"]))
    evaluation, metrics = stage.read_json("metrics/evaluation.json", lambda found: (found, scores(found)))
    method = evaluation["gate"]["method"]
    answers, right = stage.read_text(
        "reports/evaluation/gate.csv", lambda text: (text, read_right_answers(text, method))
    )
    candidate = Candidate.of(evaluation["gate"], right, kl)
    manifest = read_manifest(policy)
    found = records.collect(stage.workspace, manifest, code_tags())

    version = versions.find_version(name, policy)
    again = ", registered already" if version else ""
    version = version or versions.register_policy(
        policy,
        name=name,
        metrics=metrics | {"validation.accuracy": validation, "ppo.best_iteration": ppo["best_iteration"], "kl": kl},
        lineage=lineage(stage, manifest, found),
        max_new_tokens=limit,
        run=stage.log,
    )
    records.file(version, found)
    card = model_card.render(
        name,
        manifest=manifest,
        evaluation=evaluation,
        ppo=ppo,
        kl=kl,
        data=params.data,
        lineage=version.tags,
        max_new_tokens=limit,
    )
    uncommitted = (stage.workspace / UNCOMMITTED).is_file()
    standing = champion.decide(version, candidate, Papers(answers, card), params.gate, method, uncommitted)
    print(f"register: {name} version {version.number}, policy {version.policy_hash[:12]}{again}: {standing}")


def scores(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """What decides about a version: accuracies and paired gain on gate and test."""
    flat: dict[str, float] = {}
    for split in SPLITS:
        result = evaluation[split]
        flat |= {f"{split}.{model}_accuracy": float(result[model]["accuracy"]) for model in ("sft", "policy")}
        flat |= {f"{split}.{key}": float(result[key]) for key in ("gain", "gain_low", "p_value")}
    return flat


def code_tags() -> dict[str, str]:
    """The commit of the running code, and whether the checkout differs from it."""
    return {key.removeprefix("mlflow.source."): value for key, value in tracking.git_tags().items()}


def lineage(stage: Stage, manifest: Manifest, found: Records) -> dict[str, object]:
    """Code, data, checkpoints, params, seed, machine and runs that made the policy."""
    tags: dict[str, object] = {"seed": manifest.seed, "source": manifest.source, **found.code}
    tags |= {f"{kind}_hash": parent for kind, parent in manifest.parents.items()}
    tags |= {f"params.{key}": json.dumps(value, sort_keys=True) for key, value in manifest.params.items()}
    tags |= {f"dvc.{path}": md5 for path, md5 in trained_on(stage.workspace).items()}
    for path, maker in MAKERS.items():
        run_id = tracking.find_run_by_outs(maker, {path: dvc_md5(stage.input(path))})
        tags |= {f"{maker}_run_id": run_id} if run_id else {}
        tags |= records.machine_of(run_id) if run_id and maker == "train_ppo" else {}
    return tags


def trained_on(workspace: Path) -> dict[str, str]:
    """Hashes of the data and checkpoints that `train_ppo` read, if `dvc.lock` tells of this very policy."""
    deps = records.hashes(records.locked(workspace).get("train_ppo", {}).get("deps", []))
    return {path: md5 for path, md5 in deps.items() if path.startswith(("data/", "models/"))}


if __name__ == "__main__":
    run_stage("register", main)

"""The files that lead from a version back to what made it, in its folder `lineage/`.

    dvc.lock            hashes of every stage's code, data and outputs
    params.yaml         all params
    changes.diff        what the code had beyond its commit, where it had anything
    sft_manifest.json   the manifest of the checkpoint that PPO started from
    evaluation.json     accuracies with their intervals

`python -m rlhf.lineage` shows them and reproduces the policy from them. Secrets in them are masked; the diff's hash is
that of what it was before, so that a version whose code held a secret can be told from one that can be made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlhf import anchors, machine
from rlhf.hashes import dvc_md5
from rlhf.models.checkpoints import MANIFEST, Manifest, checkpoint_hash
from rlhf.patches import changes
from rlhf.redaction import redact_bytes
from rlhf.registry.server import download, files, server, upload
from rlhf.registry.versions import Version

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

FOLDER = "lineage"
LOCK, PARAMS, DIFF, SFT, EVALUATION = (
    "dvc.lock",
    "params.yaml",
    "changes.diff",
    "sft_manifest.json",
    "evaluation.json",
)
COMMIT_TAG, DIFF_TAG = "git.commit", "git.diff"
NEW_CODE = ("rlhf", "stages")
"""Where files that git does not know yet are the pipeline's code."""


@dataclass(frozen=True)
class Records:
    """The files of `lineage/` by name, and the tags that say what code they belong to."""

    files: Mapping[str, bytes]
    code: Mapping[str, str]


def collect(workspace: Path, manifest: Manifest, code: Mapping[str, str]) -> Records:
    """The records of the policy of `manifest` in `workspace`; `code` are the tags of the commit.

    A lock file, or an SFT checkpoint, that tells of another policy is left out.
    """
    sft = workspace / "models/sft"
    places = {PARAMS: workspace / "params.yaml", EVALUATION: workspace / "metrics/evaluation.json"}
    if locked(workspace):
        places[LOCK] = workspace / "dvc.lock"
    if (sft / MANIFEST).is_file() and checkpoint_hash(sft) == manifest.parents.get("sft"):
        places[SFT] = sft / MANIFEST
    found = {name: redact_bytes(path.read_bytes()) for name, path in places.items()}
    if diff := changes(anchors.CHECKOUT, NEW_CODE):
        found[DIFF] = redact_bytes(diff)
        code = {**code, DIFF_TAG: sha256(diff).hexdigest()}
    return Records(found, code)


def locked(workspace: Path) -> dict[str, Any]:
    """The stages in the workspace's `dvc.lock`; empty where there is none, or where it tells of another policy."""
    stages = read_lock(workspace / LOCK)
    made = hashes(stages.get("train_ppo", {}).get("outs", []))
    return stages if made.get("models/policy") == dvc_md5(workspace / "models/policy") else {}


def read_lock(lock: Path) -> dict[str, Any]:
    """The stages in a lock file; empty where there is none."""
    return _stages(lock.read_bytes()) if lock.is_file() else {}


def _stages(content: bytes) -> dict[str, Any]:
    import yaml

    stages: dict[str, Any] = (yaml.safe_load(content) or {}).get("stages", {})
    return stages


def hashes(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """md5 by path of `deps` or `outs` in a lock file."""
    return {entry["path"]: entry["md5"] for entry in entries}


def file(version: Version, records: Records) -> None:
    """Puts those records into the version that it does not have yet.

    A version that other code registered keeps what it has: its tags tell of that code.
    """
    code = (records.code.get(COMMIT_TAG), records.code.get(DIFF_TAG))
    if code != (version.tags.get(COMMIT_TAG), version.tags.get(DIFF_TAG)):
        return
    with server() as registry:
        recorded = registry.get_model_version(version.name, version.number)
        there = files(recorded, FOLDER)
        for name in sorted(records.files.keys() - there.keys()):
            upload(registry, recorded, f"{FOLDER}/{name}", records.files[name])


def read(version: ModelVersion) -> dict[str, bytes]:
    """The files of a version's `lineage/` by name; empty where it has none."""
    if not files(version, FOLDER):
        return {}
    with TemporaryDirectory() as place:
        return {path.name: path.read_bytes() for path in download(version, FOLDER, Path(place)).iterdir()}


def lock_stages(found: Mapping[str, bytes]) -> dict[str, Any]:
    """The stages of the `dvc.lock` among the records that made the policy and its evaluation; `register` is none."""
    return {name: entry for name, entry in _stages(found.get(LOCK, b"")).items() if name != "register"}


def data_read(found: Mapping[str, bytes]) -> dict[str, str]:
    """md5 of all data that the stages read, by its path."""
    deps = {path: md5 for entry in lock_stages(found).values() for path, md5 in hashes(entry.get("deps", [])).items()}
    return {path: md5 for path, md5 in sorted(deps.items()) if path.startswith("data/")}


def is_masked(found: Mapping[str, bytes], tags: Mapping[str, str]) -> bool:
    """Whether the diff among the records is not, by the hash in the version's tags, the one that the code had."""
    return DIFF in found and sha256(found[DIFF]).hexdigest() != tags.get(DIFF_TAG)


def machine_of(run_id: str) -> dict[str, str]:
    """The tags that say what a run ran on."""
    with server() as registry:
        tags = registry.get_run(run_id).data.tags
    return {key: value for key, value in tags.items() if key.startswith(machine.PREFIX)}

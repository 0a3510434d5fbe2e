from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest

from rlhf import anchors, tracking
from rlhf.config import compose, validate
from rlhf.errors import UserError
from rlhf.models import checkpoints
from rlhf.models.checkpoints import checkpoint_hash, load_policy, load_tokenizer, read_manifest
from rlhf.models.tiny import make_tiny
from rlhf.registry import versions
from rlhf.registry.lookup import SOURCE_VARIABLE, pinned
from rlhf.stage import Stage
from stages import fetch_sft
from tests.policies import save_policy


class Log:
    """What the stage sends to tracking."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.params: dict[str, object] = {}

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        assert step is None
        self.metrics.update(values)

    def log_params(self, values: Mapping[str, object]) -> None:
        self.params.update(values)


def run(workspace: Path, *overrides: str) -> tuple[Path, Log]:
    """Runs the stage's main at smoke scale; returns what would become models/fetched, and the log."""
    params, log, staging = validate(compose(["scale=smoke", *overrides])), Log(), workspace / ".partial"
    staging.mkdir()
    with ExitStack() as held:
        fetch_sft.main(Stage("fetch_sft", params, log, workspace, workspace, held, staging))  # type: ignore[arg-type]
    return staging / "models" / "fetched", log


def test_the_fresh_model_of_the_params_is_fetched_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, log = run(tmp_path, "seed=5")
    model = load_policy(directory)
    assert model.config.max_position_embeddings == 256
    assert len(load_tokenizer(directory)) == model.config.vocab_size <= 400
    assert log.metrics == {"parameters": model.num_parameters()}
    assert log.params == {"fetched": {"revision": "", "license": "Apache-2.0"}}
    assert read_manifest(directory).seed == 5
    assert capsys.readouterr().out == "fetching tiny:\n0.03M parameters, license Apache-2.0\n"


def test_a_directory_goes_the_same_way(tmp_path: Path) -> None:
    tiny = validate(compose(["scale=smoke"])).sft.tiny
    mine = tmp_path / "mine"
    mine.mkdir()
    checkpoints.write_model(mine, *make_tiny(tiny, seed=1))
    directory, log = run(tmp_path, f"sft.source={mine}", f"sft.reads={mine}")
    assert (directory / "model.safetensors").read_bytes() == (mine / "model.safetensors").read_bytes()
    assert log.params == {"fetched": {"revision": read_manifest(directory).revision, "license": "not stated"}}


def test_a_registered_policy_is_what_the_next_one_starts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"model-{uuid4().hex}"
    policy = save_policy(tmp_path / "policy")
    with tracking.stage_run("register", {}) as log:
        versions.register_policy(policy, name=name, metrics={}, lineage={}, max_new_tokens=12, run=log)
    digest = checkpoint_hash(policy)
    assert pinned(f"models:/{name}@candidate") == pinned(f"models:/{name}/1") == f"models:/{name}/1#sha256={digest}"

    source = f"models:/{name}/1#sha256={digest}"
    directory, _ = run(tmp_path, f"sft.source='{source}'")
    assert (directory / "model.safetensors").read_bytes() == (policy / "model.safetensors").read_bytes()
    manifest = read_manifest(directory)
    assert (manifest.kind, manifest.source, manifest.revision) == ("fetched", source, f"sha256:{digest}")
    assert manifest.parents == {"policy": digest}
    assert sorted(path.name for path in directory.parent.iterdir()) == ["fetched"]
    for wrong, fault in (
        (f"models:/{name}/1#sha256={'0' * 64}", f"its manifest has SHA-256 {digest}"),
        (f"models:/{name}@champion", f"{name} has no version 'champion': take one of candidate, 1"),
    ):
        (tmp_path / wrong[-3:]).mkdir()
        with pytest.raises(UserError, match=f"^sft.source={wrong}: {fault}"):
            run(tmp_path / wrong[-3:], f"sft.source='{wrong}'")

    monkeypatch.setenv(SOURCE_VARIABLE, anchors.tracking_uri())  # as when a version is made again in a clone
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    (tmp_path / "clone").mkdir()
    assert read_manifest(run(tmp_path / "clone", f"sft.source='{source}'")[0]) == manifest


def test_what_a_run_has_logged_is_fetched(tmp_path: Path) -> None:
    import mlflow

    mine = tmp_path / "mine"
    mine.mkdir()
    checkpoints.write_model(mine, *make_tiny(validate(compose(["scale=smoke"])).sft.tiny, seed=1))
    mlflow.set_tracking_uri(anchors.tracking_uri())
    with mlflow.start_run() as logged:
        mlflow.log_artifacts(str(mine), "models/mine")
    directory, _ = run(tmp_path, f"sft.source='runs:/{logged.info.run_id}/models/mine'")
    assert (directory / "model.safetensors").read_bytes() == (mine / "model.safetensors").read_bytes()
    assert read_manifest(directory).source == f"runs:/{logged.info.run_id}/models/mine"
    for wrong, fault in (
        (f"{logged.info.run_id}/other", "has no artifact other"),
        ("0123/mine", "Run .*0123.* not found"),
    ):
        (tmp_path / fault[:3]).mkdir()
        with pytest.raises(UserError, match=fault):
            run(tmp_path / fault[:3], f"sft.source='runs:/{wrong}'")


def test_a_checkpoint_without_chat_template_stops_the_stage(tmp_path: Path) -> None:
    tiny = validate(compose(["scale=smoke"])).sft.tiny
    mine = tmp_path / "mine"
    mine.mkdir()
    checkpoints.write_model(mine, *make_tiny(tiny, seed=1))
    (mine / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=f"sft.source={mine}: its tokenizer has no chat template"):
        run(tmp_path, f"sft.source={mine}", f"sft.reads={mine}")

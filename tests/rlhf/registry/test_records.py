"""The files that lead from a version back to what made it: what is kept."""

from __future__ import annotations

from hashlib import sha256
from uuid import uuid4

import pytest

from rlhf.models.checkpoints import Manifest
from rlhf.registry import records
from rlhf.registry.records import Records
from rlhf.registry.versions import Version
from tests.registered import add_version, store


@pytest.fixture
def version() -> Version:
    made = add_version(f"model-{uuid4().hex}", "a")
    return Version(made.name, made.number, made.policy_hash, {"git.commit": "c1"})


def kept(version: Version) -> dict[str, bytes]:
    return records.read(store().get_model_version(version.name, version.number))


def test_records_are_put_into_the_version_once(version):
    assert kept(version) == {}
    first = Records({"dvc.lock": b"lock", "params.yaml": b"seed: 0\r\n"}, {"git.commit": "c1"})
    records.file(version, first)
    assert kept(version) == first.files
    records.file(version, Records({"dvc.lock": b"another", "sft_manifest.json": b"{}"}, {"git.commit": "c1"}))
    assert kept(version) == {**first.files, "sft_manifest.json": b"{}"}


def test_no_secret_is_kept_and_the_diffs_hash_is_that_of_what_the_code_had(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    for name in ("params.yaml", "metrics/evaluation.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}: hf_planted")
    diff = b"+token = 'hf_planted'\n+name = '\xe9'\n"
    monkeypatch.setattr(records, "changes", lambda *_: diff)
    monkeypatch.setattr(records, "locked", lambda _: {})
    manifest = Manifest(kind="policy", source="tiny:", seed=0, stop_token="<e>")
    found = records.collect(tmp_path, manifest, {"git.commit": "c1"})
    clean = b"+token = '***'\n+name = '\xe9'\n"
    assert found.files == {
        "params.yaml": b"params.yaml: ***",
        "evaluation.json": b"metrics/evaluation.json: ***",
        "changes.diff": clean,
    }
    assert found.code == {"git.commit": "c1", "git.diff": sha256(diff).hexdigest()}
    assert records.is_masked(found.files, found.code)
    assert not records.is_masked({"changes.diff": diff}, found.code)
    assert not records.is_masked({}, {"git.commit": "c1"})


@pytest.mark.parametrize("code", [{"git.commit": "c2"}, {"git.commit": "c1", "git.diff": "5f7"}, {}])
def test_a_version_that_other_code_registered_keeps_what_it_has(version, code):
    records.file(version, Records({"dvc.lock": b"lock"}, code))
    assert kept(version) == {}

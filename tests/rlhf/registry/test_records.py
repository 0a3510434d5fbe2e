"""The files that lead from a version back to what made it: what is kept."""

from __future__ import annotations

from uuid import uuid4

import pytest

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


@pytest.mark.parametrize("code", [{"git.commit": "c2"}, {"git.commit": "c1", "git.diff": "5f7"}, {}])
def test_a_version_that_other_code_registered_keeps_what_it_has(version, code):
    records.file(version, Records({"dvc.lock": b"lock"}, code))
    assert kept(version) == {}

"""Checkpoints from web servers and stores: a server on loopback, and fsspec's store in memory."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from rlhf.errors import UserError
from rlhf.models import buckets, checkpoints, downloads
from rlhf.models.checkpoints import Manifest, load_policy
from rlhf.models.sources import fetch
from rlhf.models.tiny import make_tiny
from rlhf.params import Tiny
from tests.web import Web, served

CARD = b"---\nlicense: mit\n---\n"

Take = Callable[[str], tuple[Manifest, Path]]


@pytest.fixture(autouse=True)
def _no_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_DOWNLOADS_DIR", str(tmp_path / "downloads"))
    for function in (downloads._go_on, downloads._whole, buckets.names_below, buckets.stored_file):
        monkeypatch.setattr(function.retry, "sleep", lambda _: None)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plain(shape: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in the Hugging Face layout, without a manifest."""
    place = tmp_path_factory.mktemp("plain")
    checkpoints.write_model(place, *make_tiny(shape, seed=4))
    return place


@pytest.fixture
def take(shape: Tiny, tmp_path: Path) -> Take:
    def take(source: str) -> tuple[Manifest, Path]:
        target = tmp_path / f"fetched-{uuid4().hex}"
        return fetch(source, target, tiny=shape, seed=0), target

    return take


@pytest.fixture
def web(plain: Path) -> Iterator[Web]:
    with served(contents(plain) | {"README.md": CARD}) as server:
        yield server


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


def source_of(web: Web, name: str) -> str:
    return f"{web.address(name)}#sha256={hashlib.sha256(web.files[name]).hexdigest()}"


def assert_same(directory: Path, plain: Path) -> None:
    assert {name: content for name, content in contents(directory).items() if name != "manifest.json"} == contents(
        plain
    )


def test_weights_bring_what_lies_beside_them(take: Take, web: Web, plain: Path) -> None:
    source = source_of(web, "model.safetensors")
    web.faults = [503, 0, 503, -5]
    manifest, directory = take(source)
    assert (manifest.source, manifest.license) == (source, "mit")
    assert_same(directory, plain)
    web.asked.clear()
    assert take(source)[0] == manifest
    assert "model.safetensors" not in dict(web.asked)


def test_a_manifest_names_every_file_and_its_hash(take: Take, web: Web, plain: Path, tmp_path: Path) -> None:
    ours = take(str(plain))[1]
    web.files = contents(ours)
    source = source_of(web, "manifest.json")
    digest = source[-64:]
    manifest, directory = take(source)
    assert (manifest.revision, manifest.parents) == (f"sha256:{digest}", {"fetched": digest})
    assert_same(directory, plain)
    web.asked.clear()
    assert take(source)[0] == manifest
    assert web.asked == []
    shutil.rmtree(tmp_path / "downloads")
    web.files["tokenizer.json"] += b" "
    with pytest.raises(UserError, match="it is not the file that the digest stands for"):
        take(source)


@pytest.mark.parametrize("kind", ["gztar", "zip"])
def test_an_archive(take: Take, web: Web, plain: Path, tmp_path: Path, kind: str) -> None:
    packed = Path(shutil.make_archive(str(tmp_path / "model"), kind, plain.parent, plain.name))
    web.files = {packed.name: packed.read_bytes()}
    manifest, directory = take(source_of(web, packed.name))
    assert manifest.revision == f"sha256:{hashlib.sha256(packed.read_bytes()).hexdigest()}"
    assert_same(directory, plain)
    assert not list(tmp_path.glob(".*"))


def test_a_gguf_file(take: Take, web: Web, gguf_file: Path, shape: Tiny) -> None:
    web.files = {"model.gguf": gguf_file.read_bytes()}
    _, directory = take(source_of(web, "model.gguf"))
    original = make_tiny(shape, seed=0)[0].state_dict()
    for name, weights in load_policy(directory).state_dict().items():
        torch.testing.assert_close(weights, original[name], atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_pickles_under_another_name_are_refused(take: Take, web: Web, tmp_path: Path, name: str) -> None:
    torch.save({}, tmp_path / "weights")
    web.files[name] = (tmp_path / "weights").read_bytes()
    with pytest.raises(UserError, match="pickled weights are never loaded"):
        take(source_of(web, name))


def test_an_archive_of_something_else_or_of_two(take: Take, web: Web, plain: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(plain, tmp_path / "two-of-them" / name)
    (tmp_path / "pickles").mkdir()
    torch.save({}, tmp_path / "pickles" / "pytorch_model.bin")
    for place, fault in (
        ("two-of-them", "several checkpoints, in one and two"),
        ("pickles", "pickled weights are never"),
    ):
        packed = Path(shutil.make_archive(str(tmp_path / place), "zip", tmp_path / place))
        web.files[packed.name] = packed.read_bytes()
        with pytest.raises(UserError, match=fault):
            take(source_of(web, packed.name))


# --- stores


class Store(MemoryFileSystem):
    """A store with faults to order, as a client of one over a network has them."""

    store: dict[str, Any] = {}  # noqa: RUF012  # apart from the one that every MemoryFileSystem shares
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    cachable = False
    faults: list[Exception] = []  # noqa: RUF012

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        if self.faults:
            raise self.faults.pop(0)
        return super().info(path, **kwargs)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store()
    monkeypatch.setattr(buckets, "file_system", lambda _: made)
    yield made
    Store.store.clear()
    Store.faults.clear()


def put(store: Store, place: Path, prefix: str) -> None:
    for name, content in contents(place).items():
        store.pipe_file(f"{prefix}/{name}", content)


def test_a_prefix_of_a_store_is_a_directory(take: Take, store: Store, plain: Path) -> None:
    put(store, plain, "bucket/models/mine")
    store.pipe_file("bucket/models/mine/README.md", CARD)
    store.pipe_file("bucket/models/mine/training/state.bin", b"not ours")
    Store.faults += [ConnectionError("reset"), OSError("busy")]
    manifest, directory = take("s3://bucket/models/mine/")
    assert manifest.license == "mit"
    assert_same(directory, plain)
    digest = str(manifest.revision).removeprefix("sha256:")
    assert take(f"s3://bucket/models/mine#sha256={digest}")[0].revision == manifest.revision
    with pytest.raises(UserError, match=f"its revision is sha256:{digest}: it is not the directory"):
        take(f"s3://bucket/models/mine#sha256={'0' * 64}")


def test_a_changed_object_is_another_file_in_the_cache(take: Take, store: Store, plain: Path) -> None:
    put(store, plain, "bucket/mine")
    first = take("s3://bucket/mine")[0]
    store.pipe_file("bucket/mine/chat_template.jinja", store.cat("bucket/mine/chat_template.jinja") + b"\n")
    assert take("s3://bucket/mine")[0].revision != first.revision


def test_a_checkpoint_of_ours_in_a_store_must_hold(take: Take, store: Store, plain: Path, tmp_path: Path) -> None:
    put(store, take(str(plain))[1], "bucket/ours")
    assert set(take("gs://bucket/ours")[0].parents) == {"fetched"}
    shutil.rmtree(tmp_path / "downloads")
    store.pipe_file("bucket/ours/config.json", b"{}")
    with pytest.raises(UserError, match="it is not the file that the digest stands for"):
        take("gs://bucket/ours")


def test_an_archive_in_a_store(take: Take, store: Store, plain: Path, tmp_path: Path) -> None:
    packed = Path(shutil.make_archive(str(tmp_path / "model"), "gztar", plain))
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    store.put_file(str(packed), "bucket/model.tar.gz")
    for source in ("s3://bucket/model.tar.gz", f"s3://bucket/model.tar.gz#sha256={digest}"):
        manifest, directory = take(source)
        assert manifest.revision == f"sha256:{digest}"
        assert_same(directory, plain)
    with pytest.raises(UserError, match=f"the file's SHA-256 is {digest}"):
        take(f"s3://bucket/model.tar.gz#sha256={'0' * 64}")


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([], "nothing is at s3://bucket/none: check bucket and prefix"),
        ([PermissionError("Forbidden")], r"the store refuses it \(Forbidden\): check the credentials"),
        ([ConnectionError("refused")] * 99, r"does not answer as it should \(refused\): try again later"),
    ],
)
def test_a_store_that_gives_nothing_is_one_line(
    take: Take, store: Store, faults: list[Exception], message: str
) -> None:
    Store.faults += faults
    with pytest.raises(UserError, match=message):
        take("s3://bucket/none")


def test_pickles_in_a_store_are_refused_before_they_are_fetched(take: Take, store: Store, tmp_path: Path) -> None:
    store.pipe_file("bucket/old/pytorch_model.bin", b"pickle")
    store.pipe_file("bucket/old/config.json", b"{}")
    with pytest.raises(UserError, match="pytorch_model.bin: pickled weights are never loaded"):
        take("s3://bucket/old")
    assert not (tmp_path / "downloads").exists()

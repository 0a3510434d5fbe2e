"""The cache of downloads against a server on loopback that cuts, refuses, lies and comes back."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf import anchors
from rlhf.errors import UserError
from rlhf.models import downloads
from rlhf.models.downloads import ATTEMPTS, Remote, Stream, fetched, small_web_file, web_file
from tests.web import Web, served

CONTENT = os.urandom(300_000)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own; waits between tries take no time."""
    monkeypatch.setenv("RLHF_DOWNLOADS_DIR", str(tmp_path / "downloads"))
    for function in (downloads._go_on, downloads._whole):
        monkeypatch.setattr(function.retry, "sleep", lambda _: None)  # type: ignore[attr-defined]
    return tmp_path / "downloads"


@pytest.fixture
def web() -> Iterator[Web]:
    with served({"model.gguf": CONTENT}) as server:
        yield server


def remote(web: Web, digest: str = DIGEST) -> Remote:
    return web_file(web.address("model.gguf"), digest)


def test_a_file_is_fetched_once(web: Web, place: Path) -> None:
    file = fetched(remote(web))
    assert file.read_bytes() == CONTENT
    assert fetched(remote(web)) == file
    assert web.asked == [("model.gguf", 0)]
    assert sorted(path.name for path in place.iterdir()) == [file.name, f"{file.name}.lock"]


def test_a_cut_connection_is_gone_on_with_where_it_broke(web: Web) -> None:
    web.faults = [-100_000, -50_000]
    assert fetched(remote(web)).read_bytes() == CONTENT
    assert web.asked == [("model.gguf", 0), ("model.gguf", 100_000), ("model.gguf", 150_000)]


def test_what_a_killed_process_had_is_gone_on_with(web: Web, place: Path) -> None:
    place.mkdir()
    (place / f"sha256-{DIGEST}.part").write_bytes(CONTENT[:1234])
    assert fetched(remote(web)).read_bytes() == CONTENT
    assert web.asked == [("model.gguf", 1234)]


def test_a_server_without_ranges_starts_anew(web: Web) -> None:
    web.ranges, web.faults = False, [-100_000]
    assert fetched(remote(web)).read_bytes() == CONTENT


def test_a_server_without_ranges_that_always_breaks_off_is_given_up(web: Web) -> None:
    web.ranges, web.faults = False, [-100_000] * 50
    with pytest.raises(UserError, match=r"does not answer as it should \(.*\): try again later"):
        fetched(remote(web))
    assert len(web.asked) == 1 + ATTEMPTS


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_busy_server_is_asked_again(web: Web, status: int) -> None:
    web.faults = [status] * (ATTEMPTS - 1)
    assert fetched(remote(web)).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("faults", "message", "asked"),
    [
        ([503] * 99, r"model.gguf does not answer as it should \(HTTP 503\): try again later", ATTEMPTS),
        ([404], r"nothing is at http://.*model.gguf \(HTTP 404\)", 1),
        ([403], r"model.gguf is refused \(HTTP 403\)", 1),
    ],
)
def test_what_is_not_to_be_had_is_one_line(web: Web, faults: list[int], message: str, asked: int) -> None:
    web.faults = faults
    with pytest.raises(UserError, match=message):
        fetched(remote(web))
    assert len(web.asked) == asked


def test_nobody_listens(place: Path) -> None:
    with served({}) as gone:
        address = gone.address("model.gguf")
    with pytest.raises(UserError, match=r"does not answer as it should \(.*Connection refused\)"):
        fetched(web_file(address, DIGEST))


def test_another_content_than_the_hash_says_is_refused_and_not_kept(web: Web, place: Path) -> None:
    with pytest.raises(UserError, match=f"the file's SHA-256 is {DIGEST}: it is not"):
        fetched(remote(web, "0" * 64))
    assert [path.suffix for path in place.iterdir()] == [".lock"]


def test_a_part_of_another_file_is_fetched_anew(web: Web, place: Path) -> None:
    place.mkdir()
    for wrong in (b"x" * 1234, b"x" * len(CONTENT), b"x" * 400_000):
        (place / f"sha256-{DIGEST}.part").write_bytes(wrong)
        assert fetched(remote(web)).read_bytes() == CONTENT
        (place / f"sha256-{DIGEST}").unlink()


def test_a_damaged_file_in_the_cache_is_fetched_anew(web: Web) -> None:
    file = fetched(remote(web))
    file.write_bytes(CONTENT[:-1])
    assert fetched(remote(web)).read_bytes() == CONTENT


def test_two_at_once_fetch_it_once(web: Web) -> None:
    threads = [threading.Thread(target=fetched, args=(remote(web),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert web.asked == [("model.gguf", 0)]


def test_a_full_disk_is_no_lost_connection(place: Path) -> None:
    """The error passes through unchanged, for whoever tells of disks, and the part stays to be gone on with."""

    def failing() -> Iterator[bytes]:
        yield b"begun"
        raise OSError(28, "No space left on device")

    @contextmanager
    def read(offset: int) -> Iterator[Stream]:
        yield Stream(offset, 10, failing())

    with pytest.raises(OSError, match="No space left"):
        fetched(Remote("s3://b/file", "key", None, read))
    assert (place / "key.part").read_bytes() == b"begun"


def test_progress_is_shown_in_megabytes(web: Web, capsys: pytest.CaptureFixture[str]) -> None:
    web.files["model.gguf"] = bytes(3_500_000)
    web.faults = [-2_000_000]
    fetched(remote(web, hashlib.sha256(bytes(3_500_000)).hexdigest()))
    assert capsys.readouterr().out.splitlines()[-1].startswith("model.gguf, MB ████████████████████ 3/3 ")


def test_a_small_file_is_what_is_there_now(web: Web, place: Path) -> None:
    web.files["config.json"] = b"{}"
    assert small_web_file(web.address("config.json")) == b"{}"
    assert small_web_file(web.address("absent.json")) is None
    assert not place.exists()


def test_workspaces_share_the_cache_of_the_main_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_DOWNLOADS_DIR")
    assert anchors.downloads_dir() == anchors.main_checkout() / ".cache" / "downloads"
    assert anchors.environment()["RLHF_DOWNLOADS_DIR"] == str(anchors.downloads_dir())

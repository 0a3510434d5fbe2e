"""Files from elsewhere, fetched once for all workspaces: resumed after a cut, tried again, checked, put in place whole.

The cache (`anchors.downloads_dir`) holds one file a key. What a process that was killed had of a file stays beside it
and is gone on with; a file gets its name only when all of it is there and has the SHA-256 that was asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256 as sha256_of
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, ParamSpec, TypeVar
from urllib.parse import urlsplit

from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

from rlhf import anchors, locks
from rlhf.errors import UserError, first_line
from rlhf.hashes import sha256_file
from rlhf.runtime import progress

P = ParamSpec("P")
T = TypeVar("T")

ATTEMPTS = 5
"""Connections in a row that may bring nothing."""
TIMEOUT_SECONDS = 30.0
CHUNK = 1 << 20
MB = 1_000_000


class MissingError(UserError):
    """Nothing is at the address."""


class LostError(UserError):
    """A connection that could not be made, or broke: worth another."""

    def __init__(self, uri: str, reason: str) -> None:
        super().__init__(f"{uri} does not answer as it should ({reason}): try again later")


def retried(function: Callable[P, T]) -> Callable[P, T]:
    """The function, called again after a while where it raises LostError, a few times at most."""
    return retry(
        retry=retry_if_exception_type(LostError),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential(max=8),
        reraise=True,
    )(function)


class Stream(NamedTuple):
    """What one connection brings: from which byte on, of how many (None: not told), and the bytes."""

    start: int
    size: int | None
    chunks: Iterator[bytes]


@dataclass(frozen=True)
class Remote:
    """A file elsewhere.

    Attributes:
        uri: how messages call it.
        key: its name in the cache, the same for the same content alone.
        sha256: what its content must have; None where `key` is all that is known.
        read: connects, to read from the given byte on; raises LostError where another try may help.
    """

    uri: str
    key: str
    sha256: str | None
    read: Callable[[int], AbstractContextManager[Stream]]


def fetched(remote: Remote) -> Path:
    """The file in the cache, fetched first if need be; only one process at a time fetches a file.

    Raises UserError where the file is not there, refused, out of reach, or not what its hash says.
    """
    place = anchors.downloads_dir()
    file, partial = place / remote.key, place / f"{remote.key}.part"
    with locks.in_turn(place / f"{remote.key}.lock", f"fetches {remote.uri}"):
        if file.exists() and _fault(file, remote) is None:
            return file
        was_begun = partial.exists()
        _complete(remote, partial)
        if was_begun and _fault(partial, remote):  # perhaps of another version than the rest
            partial.unlink()
            _complete(remote, partial)
        if fault := _fault(partial, remote):
            partial.unlink()
            raise UserError(fault)
        partial.replace(file)
    return file


def web_file(address: str, sha256: str) -> Remote:
    """The file at an http(s) address whose content has that SHA-256."""
    return Remote(address, f"sha256-{sha256}", sha256, lambda offset: _get(address, offset))


def small_web_file(address: str) -> bytes | None:
    """What is at an http(s) address now, past the cache; None where nothing is there."""
    try:
        return _whole(address)
    except MissingError:
        return None


def _fault(file: Path, remote: Remote) -> str | None:
    """What is wrong with the content of a file that was fetched, if anything."""
    if remote.sha256 is None or (found := sha256_file(file)) == remote.sha256.lower():
        return None
    return f"the file's SHA-256 is {found}: it is not the file that the digest stands for"


def _complete(remote: Remote, partial: Path) -> None:
    partial.touch()
    while not _go_on(remote, partial):
        pass
    with partial.open("rb") as file:
        os.fsync(file.fileno())


@retried
def _go_on(remote: Remote, partial: Path) -> bool:
    """Adds what one more connection brings; whether that was the rest.

    Raises LostError where the file is no longer than before: a server that always starts anew, and always breaks off
    at the same place, is not asked for ever.
    """
    before = partial.stat().st_size
    try:
        with remote.read(before) as stream, partial.open("r+b") as file:
            file.truncate(stream.start)
            file.seek(stream.start)
            with _bar(remote, stream) as advance:
                for chunk in stream.chunks:
                    file.write(chunk)
                    advance(len(chunk))
        if stream.size is not None and partial.stat().st_size < stream.size:
            raise LostError(remote.uri, "the connection was cut")
    except LostError:
        if partial.stat().st_size <= before:
            raise
        return False
    return True


@contextmanager
def _bar(remote: Remote, stream: Stream) -> Iterator[Callable[[int], None]]:
    """Progress in megabytes, where the size is known and worth a bar."""
    done, total = stream.start, (stream.size or 0) // MB
    name = PurePosixPath(urlsplit(remote.uri).path).name
    with progress(f"{name}, MB", total) if total else nullcontext() as bar:

        def advance(count: int) -> None:
            nonlocal done
            before, done = done // MB, done + count
            if bar and done // MB > before:
                bar.advance(done // MB - before)

        if bar and stream.start >= MB:
            bar.advance(stream.start // MB)
        yield advance


@retried
def _whole(address: str) -> bytes:
    with _get(address, 0) as stream:
        return b"".join(stream.chunks)


@contextmanager
def _get(address: str, offset: int) -> Iterator[Stream]:
    """A GET of the rest of a file. Servers that know no ranges send all of it."""
    import httpx

    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    try:
        with httpx.stream("GET", address, headers=headers, follow_redirects=True, timeout=TIMEOUT_SECONDS) as response:
            _refuse(response.status_code, address)
            yield _stream(response, address, offset)
    except httpx.RequestError as error:
        raise LostError(address, first_line(error)) from None
    except httpx.InvalidURL as error:
        raise UserError(f"{address} is no address: {first_line(error)}: write https://host/path") from None


def _refuse(status: int, address: str) -> None:
    if status in (404, 410):
        raise MissingError(f"nothing is at {address} (HTTP {status}): check the address")
    if status in (408, 425, 429) or status >= 500:
        raise LostError(address, f"HTTP {status}")
    if status not in (200, 206, 416):
        raise UserError(f"{address} is refused (HTTP {status}): make it readable from here, or take another source")


def _stream(response: Any, address: str, offset: int) -> Stream:
    if response.status_code == 416:  # nothing lies behind the offset: all of it is here already, which its hash tells
        return Stream(offset, None, iter(()))
    length = response.headers.get("Content-Length")
    told = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", "")) if response.status_code == 206 else None
    start = int(told[1]) if told else 0
    if start not in (0, offset):
        raise LostError(address, f"it starts at byte {start}, not at {offset}")
    return Stream(start, start + int(length) if length else None, response.iter_raw())


def key_of(*parts: str) -> str:
    """A name in the cache for what these parts identify."""
    return sha256_of("\0".join(parts).encode()).hexdigest()

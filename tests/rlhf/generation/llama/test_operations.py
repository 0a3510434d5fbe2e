"""The operations in C++ against those in PyTorch, and these against plain formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlhf.generation.llama import kernels, weights
from rlhf.generation.llama.operations import Cache, Operations, TorchOperations, heads
from rlhf.generation.llama.weights import Weights

CAPACITY = 150
LENGTHS = [0, 1, 62, 63, 64, 65, 127, 128, 140]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}  # bfloat16 keeps 8 bits
SHAPES = [(4, 1, 8), (9, 3, 64), (2, 2, 20), (5, 1, 16)]  # heads, kv heads, head size


def model(shape: tuple[int, int, int], dtype: torch.dtype, family: str = "llama") -> Weights:
    torch.manual_seed(0)
    config, made = (LlamaConfig, LlamaForCausalLM) if family == "llama" else (Qwen3Config, Qwen3ForCausalLM)
    settings = config(
        vocab_size=32,
        hidden_size=180,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=shape[0],
        num_key_value_heads=shape[1],
        head_dim=shape[2],
    )
    whole = made(settings).eval()
    for name, parameter in whole.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1, 0.3)
    return weights.read(whole.to(dtype), CAPACITY)


def filled(w: Weights) -> Cache:
    generator = torch.Generator().manual_seed(1)
    cache = Cache(1, w.shape, len(LENGTHS) + 2, CAPACITY, w.dtype)
    for row, length in enumerate(LENGTHS):
        keys, values = torch.randn(2, length, w.shape.kv_heads, w.shape.size, generator=generator).to(w.dtype)
        cache.put(row, 0, keys, values)
        cache.lengths[row] = length
    return cache


def random_qkv(w: Weights) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    width = (w.shape.heads + 2 * w.shape.kv_heads) * w.shape.size
    return torch.randn(len(LENGTHS), width, generator=generator).to(w.dtype)


def compiled(w: Weights) -> Operations:
    made = kernels.operations(w.shape, w.dtype)
    if not isinstance(made, kernels.CompiledOperations):
        pytest.skip("no C++ compiler")
    return made


def by_rows(w: Weights, cache: Cache, qkv: Tensor) -> Tensor:
    """Attention row by row and head by head, in float64, over keys and values taken out of the cache."""
    queries, _, _ = heads(qkv, w.layers[0], cache.lengths[: len(qkv)], w)
    out = []
    for row, length in enumerate(cache.lengths[: len(qkv)].tolist()):
        for head in range(w.shape.heads):
            shared = head // w.shape.group
            blocks = cache.keys[0][row, shared].double()
            keys = torch.cat(list(blocks), dim=1)[:, : length + 1]
            shares = torch.softmax(queries[row, head].double() @ keys * w.scale, dim=0)
            out.append(shares @ cache.values[0][row, shared, : length + 1].double())
    return torch.stack(out).view(len(qkv), -1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_reads_each_rows_own_places(shape: tuple[int, int, int], dtype: torch.dtype, family: str) -> None:
    w = model(shape, dtype, family)
    qkv = random_qkv(w)
    results = []
    for operations in (TorchOperations(), compiled(w)):
        cache = filled(w)
        read = operations.attend(qkv, 0, cache, w)
        assert read.dtype == dtype and cache.lengths[: len(LENGTHS)].tolist() == LENGTHS
        torch.testing.assert_close(read.double(), by_rows(w, cache, qkv), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        results.append(cache)
    for ours, theirs in zip(results[0].keys + results[0].values, results[1].keys + results[1].values, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("operations", ["PyTorch", "C++"])
def test_a_rows_result_depends_on_no_other_row(operations: str) -> None:
    w = model((9, 3, 64), torch.float32)
    qkv = random_qkv(w)
    made = TorchOperations() if operations == "PyTorch" else compiled(w)
    together = made.attend(qkv, 0, filled(w), w)
    cache = filled(w)
    cache.move(4, 0)
    alone = made.attend(qkv[4:5], 0, cache, w)
    exact = {"rtol": 0, "atol": 0} if operations == "C++" else {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(alone, together[4:5], **exact)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("added", [True, False])
def test_the_stream_grows_and_is_normalised(dtype: torch.dtype, added: bool) -> None:
    w = model((4, 1, 8), dtype)
    stream, more = torch.randn(5, 180), torch.randn(5, 180).to(dtype) if added else None
    expected = stream.double() + (0 if more is None else more.double())
    normal = expected / (expected.square().mean(dim=-1, keepdim=True) + w.epsilon).sqrt() * w.norm.double()
    for operations in (TorchOperations(), compiled(w)):
        grown = stream.clone()
        normalised = operations.normalise(grown, more, w.norm, w)
        torch.testing.assert_close(grown.double(), expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(normalised.double(), normal, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 16, 37])
def test_swiglu_over_the_whole_range(dtype: torch.dtype, size: int) -> None:
    w = model((4, 1, 8), dtype)
    gate = torch.tensor([0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 86.0, -86.0, -200.0, 200.0, 1e-20]).repeat(size)
    gate_up = torch.cat([gate[: 7 * size].view(7, size), torch.randn(7, size)], dim=1).to(dtype)
    x, up = gate_up.double().chunk(2, dim=1)
    expected = x / (1 + torch.exp(-x)) * up
    for operations in (TorchOperations(), compiled(w)):
        torch.testing.assert_close(
            operations.swiglu(gate_up).double(), expected, atol=1e-30, rtol=max(TOLERANCE[dtype], 5e-6)
        )


def test_a_number_that_is_none_stays_none() -> None:
    """A guard looks for it further on: no operation may hide it."""
    w = model((9, 3, 64), torch.float32)
    for operations in (TorchOperations(), compiled(w)):
        qkv = random_qkv(w)
        qkv[3] = torch.nan
        read = operations.attend(qkv, 0, filled(w), w)
        assert read[3].isnan().all() and read[[2, 4]].isfinite().all()
        assert operations.swiglu(torch.full((1, 64), torch.nan)).isnan().all()
        assert operations.normalise(torch.full((1, 180), torch.nan), None, w.norm, w).isnan().all()
        for place in (0, 1, 299):
            logits = torch.zeros(1, 300)
            logits[0, place] = torch.nan
            tokens, logprobs = operations.pick(logits, 1.0, torch.tensor([0.5], dtype=torch.float64))
            assert logprobs.isnan().all() and 0 <= int(tokens) < 300


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("vocabulary", [2, 37, 256, 300, 5000])
def test_tokens_are_picked_by_inverting_the_distribution(vocabulary: int, temperature: float) -> None:
    w, rows = model((4, 1, 8), torch.float32), 200
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(rows, vocabulary, generator=generator)
    logits[::3, vocabulary // 2] = -torch.inf
    log_probs = torch.log_softmax(logits.double() / temperature, dim=-1)
    bounds = log_probs.exp().cumsum(dim=-1)
    meant = (torch.rand(rows, vocabulary, generator=generator) * torch.isfinite(logits)).argmax(dim=-1, keepdim=True)
    below, above = torch.nn.functional.pad(bounds, (1, 0)).gather(1, meant), bounds.gather(1, meant)
    wide = (above - below > 2e-6).squeeze(1)
    assert wide.sum() > 50
    for operations in (TorchOperations(), compiled(w)):
        tokens, logprobs = operations.pick(logits, temperature, ((below + above) / 2).squeeze(1))
        assert torch.equal(tokens[wide], meant.squeeze(1)[wide])
        expected = log_probs.gather(1, tokens[:, None]).squeeze(1)
        torch.testing.assert_close(logprobs.double(), expected, atol=2e-6, rtol=2e-6)


def test_the_ends_of_the_distribution_are_tokens_with_mass() -> None:
    w = model((4, 1, 8), torch.float32)
    logits = torch.full((4, 600), -torch.inf)
    logits[:, 17], logits[:, 530] = 0.0, 1.0
    for operations in (TorchOperations(), compiled(w)):
        tokens, _ = operations.pick(logits, 1.0, torch.tensor([0.0, 0.26, 0.27, 1 - 2**-53], dtype=torch.float64))
        assert tokens.tolist() == [17, 17, 530, 530]


def test_greedy_takes_the_first_of_the_largest_logits() -> None:
    w = model((4, 1, 8), torch.float32)
    logits = torch.zeros(2, 700)
    logits[0, [3, 600]], logits[1, 699] = 2.0, 1.0
    expected = torch.log_softmax(logits.double(), dim=-1)[[0, 1], [3, 699]]
    for operations in (TorchOperations(), compiled(w)):
        tokens, logprobs = operations.pick(logits, 0.0, None)
        assert tokens.tolist() == [3, 699]
        torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=1e-6)
        with pytest.raises(ValueError, match="uniforms"):
            operations.pick(logits, 1.0, None)


@pytest.mark.parametrize(
    ("dtype", "results"),  # results are never rougher than the weights
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(6, 5), (64, 48), (40, 113)])
def test_products_of_fused_layers(sizes: tuple[int, int], bias: bool, dtype: torch.dtype, results: torch.dtype) -> None:
    """Every number of rows, and a row's result the same to the bit whatever shares its product."""
    torch.manual_seed(0)
    inputs, outputs = sizes
    layers = [torch.nn.Linear(inputs, width, bias=bias, dtype=dtype) for width in (outputs, 3)]
    x = torch.randn(19, inputs).to(dtype)
    expected = torch.cat([x.double() @ layer.weight.double().T for layer in layers], dim=1)
    expected += torch.cat([layer.bias for layer in layers]).double() if bias else 0
    for operations in (TorchOperations(), compiled(model((4, 1, 8), dtype))):
        product = operations.linear(*layers, dtype=results)
        together = product(x)
        assert together.dtype == results
        torch.testing.assert_close(together.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        if isinstance(product, kernels.CompiledLinear):
            for rows in range(1, 19):
                assert torch.equal(product(x[:rows]), together[:rows])

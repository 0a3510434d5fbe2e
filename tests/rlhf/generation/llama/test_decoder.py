"""The native decoder against transformers: the same samples, whoever shares the batch and whoever joins it later."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel

from rlhf.errors import UserError
from rlhf.generation import decoders
from rlhf.generation.engine import Sample, generate
from rlhf.generation.llama import decoder, library
from rlhf.generation.llama.decoder import LlamaDecoder
from rlhf.generation.llama.operations import TorchOperations
from rlhf.models.lora import add_adapter
from rlhf.params import Lora
from rlhf.streams import Purpose, token_uniforms
from tests.family_models import FAMILY, SHAPE, family_model
from tests.tiny_models import EOS, PAD, random_tokens, tiny_model

LENGTHS = [3, 9, 5, 12, 1, 9, 30, 2, 7]
NEW = 40  # rows cross the kernels' blocks of 64


def sampled(model: PreTrainedModel, prompts: list[list[int]], **more: object) -> list[Sample]:
    rows = np.arange(len(prompts))
    settings = {
        "stop_ids": [EOS],
        "pad_id": PAD,
        "max_new_tokens": NEW,
        "batch_size": 100,
        "temperature": 0.8,
        "uniforms": token_uniforms(0, Purpose.ROLLOUT, 0, rows, 0 * rows, NEW),
        "sampler": "native",
    }
    return generate(model, prompts, **settings | more)  # type: ignore[arg-type]


def assert_same(ours: list[Sample], theirs: list[Sample], atol: float = 2e-5) -> None:
    assert [sample.tokens for sample in ours] == [sample.tokens for sample in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=atol)
        assert one.finished == other.finished
        assert one.kept_mass == pytest.approx(other.kept_mass, abs=atol)


@pytest.mark.parametrize("operations", ["C++", "PyTorch"])
@pytest.mark.parametrize("name", FAMILY)
def test_the_samples_are_those_of_transformers(name: str, operations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if operations == "PyTorch":
        monkeypatch.setattr(decoder, "operations", lambda *_: TorchOperations())
    elif library.description() == "PyTorch":
        pytest.skip("no C++ compiler")
    model, prompts = family_model(name), random_tokens(LENGTHS)
    expected = sampled(model, prompts, sampler="transformers")
    assert len({tuple(sample.tokens) for sample in expected}) == len(prompts)
    for batch_size in (1, 4, 100):  # with 4, prompts join rows that are under way
        assert_same(sampled(model, prompts, batch_size=batch_size), expected)


def test_only_the_native_sampler_asks_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiled")

    cpu, expected = torch.device("cpu"), library.description()
    assert expected.startswith(("C++ ", "PyTorch"))
    assert decoders.kernels("native", cpu) == decoders.kernels("auto", cpu) == expected
    monkeypatch.setattr(library, "library", refuse)
    assert decoders.kernels("transformers", cpu) == decoders.kernels("auto", torch.device("cuda")) == ""


@pytest.mark.parametrize("truncation", [{"top_k": 5, "top_p": 0.9, "exact": True}, {"temperature": 0.0}])
def test_the_engine_treats_both_decoders_alike(truncation: dict[str, object]) -> None:
    model, prompts = family_model("llama"), random_tokens(LENGTHS)
    settings = truncation | {"stop_ids": [7], "stop": lambda tokens: sum(tokens) > 1000}
    expected = sampled(model, prompts, sampler="transformers", **settings)
    assert any(sample.finished and len(sample.tokens) > 3 for sample in expected)
    ours = sampled(model, prompts, batch_size=4, **settings)
    assert_same(ours, expected)
    assert [sample.kept for sample in ours] == [sample.kept for sample in expected]


def test_the_beginning_that_all_prompts_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, start = family_model("qwen3"), random_tokens([20], seed=1)[0]
    prompts = [start + tokens for tokens in random_tokens(LENGTHS)]
    read: list[int] = []
    forward = LlamaDecoder._forward

    def counted(self: LlamaDecoder, tokens: torch.Tensor, *more: object) -> torch.Tensor:
        read.append(len(tokens))
        return forward(self, tokens, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(LlamaDecoder, "_forward", counted)
    assert_same(sampled(model, prompts), sampled(model, prompts, sampler="transformers"))
    assert read[:2] == [20, sum(LENGTHS)]


@pytest.mark.parametrize("prompts", [[[5, 6, 7]] * 3, [[5, 6, 7], [5, 6, 7, 8], [5]], [[5]]])
def test_a_shared_beginning_leaves_every_prompt_a_token(prompts: list[list[int]]) -> None:
    model = family_model("llama")
    assert_same(sampled(model, prompts), sampled(model, prompts, sampler="transformers"))


def test_rows_that_end_make_room_and_the_last_ones_move_up() -> None:
    made = LlamaDecoder(family_model("llama"), [[2], [3], [4], [5], [6]], rows=5, new_tokens=4)
    made.admit([[2], [3], [4], [5], [6]])
    made.step(torch.tensor([7, 8, 9, 10, 11]))
    keys = [made._cache.keys[1][row].clone() for row in (3, 1, 4)]
    assert made.keep([1, 3, 4]) == [3, 1, 4]
    for row, expected in enumerate(keys):
        assert torch.equal(made._cache.keys[1][row], expected)


def test_a_model_in_bfloat16_keeps_close_to_float32() -> None:
    model, prompts = family_model("llama"), random_tokens(LENGTHS)
    precise = sampled(model, prompts)
    rough = sampled(model.to(torch.bfloat16), prompts)
    differences = [
        abs(one - other)
        for ours, theirs in zip(rough, precise, strict=True)
        for mine, its, one, other in zip(ours.tokens, theirs.tokens, ours.logprobs, theirs.logprobs, strict=False)
        if ours.tokens[:1] == theirs.tokens[:1] and mine == its
    ]
    assert len(differences) > 50 and float(np.median(differences)) < 0.1


def test_a_run_repeats_to_the_bit_and_reads_the_weights_of_now() -> None:
    model, prompts = family_model("llama"), random_tokens(LENGTHS)
    first = sampled(model, prompts, batch_size=4)
    assert sampled(model, prompts, batch_size=4) == first
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(0.5)
    assert sampled(model, prompts, batch_size=4) != first
    assert_same(sampled(model, prompts), sampled(model, prompts, sampler="transformers"))


def with_adapter() -> PreTrainedModel:
    model = family_model("llama")
    add_adapter(model, Lora(rank=2, alpha=4), seed=0)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gpt2", "its architecture is gpt2, not one of llama, mistral, qwen2, qwen3"),
        ("gelu", "its activation is gelu, not silu"),
        ("dynamic", "its rotary embedding is dynamic"),
        ("window", "its attention has a sliding window"),
        ("adapter", "its layers are wrapped"),
    ],
)
def test_other_models_are_refused_in_one_line(model: str, reason: str) -> None:
    made = {
        "gpt2": lambda: tiny_model("gpt2"),
        "gelu": lambda: AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, hidden_act="gelu")),
        "dynamic": lambda: AutoModelForCausalLM.from_config(
            LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        ),
        "window": lambda: AutoModelForCausalLM.from_config(MistralConfig(**SHAPE, sliding_window=8)),
        "adapter": with_adapter,
    }[model]()
    with pytest.raises(UserError) as refused:
        sampled(made, [[5, 6]])
    text = f"generation.sampler=native cannot run this model: {reason}: set generation.sampler=transformers"
    assert str(refused.value) == text


def test_auto_takes_our_decoder_where_it_can_and_says_so_once_where_not(capsys: pytest.CaptureFixture[str]) -> None:
    model = family_model("llama")
    assert isinstance(decoders.make_decoder("auto", model, [[5]], 1, 1, PAD), LlamaDecoder)
    assert capsys.readouterr().out == ""
    decoders._say_once.cache_clear()
    other = tiny_model("gpt2")
    for _ in range(2):
        assert isinstance(decoders.make_decoder("auto", other, [[5]], 1, 1, PAD), decoders.TransformersDecoder)
    assert capsys.readouterr().out == (
        "generation: transformers samples, not the faster native sampler: "
        "its architecture is gpt2, not one of llama, mistral, qwen2, qwen3\n"
    )

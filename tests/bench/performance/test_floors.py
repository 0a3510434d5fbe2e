"""Floors by hand, on a model small enough to count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.performance import floors
from bench.performance.floors import Peaks, Shape, fitted_exponent, read_shape

SHAPE = Shape(layers=2, hidden=4, intermediate=6, heads=2, kv_heads=1, head_size=2, vocabulary=10)
# A layer: queries 4x4, keys and values 4x2 each, output 4x4, three matrices 4x6.
BODY, HEAD = 2 * (16 + 8 + 8 + 16 + 72), 40
SLOW_COPY = Peaks(float32=1e30, bfloat16=1e30, step_float32=1e30, step_bfloat16=1e30, copy=1.0)
SLOW_PRODUCTS = Peaks(float32=1.0, bfloat16=2.0, step_float32=0.5, step_bfloat16=1.0, copy=1e30)


def test_the_weights_of_a_layer_are_counted() -> None:
    assert (SHAPE.body, SHAPE.head) == (BODY, HEAD)


def test_attention_sees_what_came_before_and_itself() -> None:
    # Positions 0, 1, 2 see 1, 2, 3 tokens: 2 layers x 2 heads x 2 channels x 4 operations each.
    assert SHAPE.attention(0, 3) == 32 * 6
    assert SHAPE.attention(2, 3) == 32 * 3


def test_only_new_tokens_pass_the_output_layer() -> None:
    assert floors.forward(SHAPE, [3], 1) == 4 * 2 * BODY + 32 * 10 + 2 * HEAD
    assert floors.forward(SHAPE, [3], 1, head=False) == 4 * 2 * BODY + 32 * 10
    assert floors.prefill(SHAPE, [3, 1]) == 4 * 2 * BODY + 32 * (6 + 1) + 2 * 2 * HEAD


def test_decoding_computes_each_token_once() -> None:
    # The first new token comes from the prompt; the second one's input stands at position 3 and sees 4 tokens.
    work = 2 * (BODY + HEAD) + 32 * 4
    assert floors.decode_seconds(SHAPE, [3], 2, "float32", SLOW_PRODUCTS) == pytest.approx(2 * work)
    assert floors.decode_seconds(SHAPE, [3], 2, "bfloat16", SLOW_PRODUCTS) == pytest.approx(work)
    assert floors.decode_seconds(SHAPE, [3], 1, "float32", SLOW_PRODUCTS) == 0


def test_decoding_reads_weights_once_and_every_row_s_cache() -> None:
    # 2 layers x 1 key head x 2 channels, keys and values: 8 numbers a token.
    read = BODY + HEAD + 8 * (4 + 6)
    assert floors.decode_seconds(SHAPE, [3, 5], 2, "float32", SLOW_COPY) == pytest.approx(4 * read)
    assert floors.decode_seconds(SHAPE, [3, 5], 2, "bfloat16", SLOW_COPY) == pytest.approx(2 * read)


def test_a_rollout_is_prefill_and_decoding() -> None:
    work = SHAPE, [3, 5], 4, "float32", SLOW_PRODUCTS
    assert floors.rollout_seconds(*work) == pytest.approx(floors.prefill(SHAPE, [3, 5]) + floors.decode_seconds(*work))


def test_an_update_is_three_passes() -> None:
    assert floors.update_seconds(SHAPE, [3], 1, "float32", SLOW_PRODUCTS) == 3 * floors.forward(SHAPE, [3], 1)


def test_an_iteration_passes_every_model_over_the_rollout() -> None:
    work = SHAPE, [3], 2, "float32", SLOW_PRODUCTS
    language, scalar = floors.forward(SHAPE, [3], 2), floors.forward(SHAPE, [3], 2, head=False)
    rollout = floors.rollout_seconds(*work)
    two = floors.iteration_seconds(*work, epochs=1, models=2)
    assert two == pytest.approx(rollout + language * (2 + 3))
    four = floors.iteration_seconds(*work, epochs=4, models=4)
    assert four == pytest.approx(rollout + (language + scalar) * (2 + 12))


def test_the_shape_is_the_configuration_s(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "vocab_size": 10}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert read_shape(file) == SHAPE
    file.write_text(json.dumps(config | {"head_dim": 8, "num_key_value_heads": None}))
    assert read_shape(file).head_size == 8
    assert read_shape(file).kv_heads == 2


def test_the_exponent_of_a_power_is_found() -> None:
    sizes = [8, 16, 32, 64]
    assert fitted_exponent(sizes, [3 * size**1.25 for size in sizes]) == pytest.approx(1.25)
    assert fitted_exponent([1, 10], [5, 5]) == pytest.approx(0)

"""Hand-made files for the tests of GGUF and wheel sources."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.models.tiny import make_tiny
from rlhf.params import Tiny

METADATA = "Metadata-Version: 2.1\nName: p\nVersion: 1.0\nLicense: MIT\n"
# GGUF's name of each tensor of a Llama layer.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="session")
def shape() -> Tiny:
    return Tiny(hidden_size=32, layers=2, heads=2, intermediate_size=64, context=64, vocabulary=300)


@pytest.fixture(scope="session")
def gguf_file(shape: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make_tiny(shape, 0)` as a GGUF file: matrices in Q8_0, norms in float32, the tokenizer with all its settings."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    model, tokenizer = make_tiny(shape, seed=0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokenizer))
    _add_tokenizer(writer, tokenizer)
    _add_tensors(writer, model.state_dict(), shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    # transformers adds <|endoftext|> beyond the vocabulary where a file does not have it: here it is the pad token
    writer.add_token_list(["<|endoftext|>", *tokenizer.convert_ids_to_tokens(range(1, len(tokenizer)))])
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(tokenizer) - 4))
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def _add_tensors(writer: gguf.GGUFWriter, weights: Mapping[str, Tensor], shape: Tiny) -> None:
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for layer in range(shape.layers):
        names |= {
            f"model.layers.{layer}.{ours}.weight": f"blk.{layer}.{theirs}.weight" for ours, theirs in LAYER.items()
        }
    for ours, theirs in names.items():
        array = weights[ours].numpy()
        if "attn_q." in theirs or "attn_k." in theirs:  # GGUF pairs rotary dimensions side by side
            array = array.reshape(shape.heads, 2, -1, shape.hidden_size).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 1:
            writer.add_tensor(theirs, array)
        else:
            quantised = gguf.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(theirs, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[..., Path]:
    """Writes the wheel `p` 1.0 with the members given and returns its path."""

    def make(members: Mapping[str, bytes], metadata: str = METADATA) -> Path:
        path = tmp_path / "p-1.0-py3-none-any.whl"
        info = {"METADATA": metadata, "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n", "RECORD": ""}
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
            for name, text in info.items():
                archive.writestr(f"p-1.0.dist-info/{name}", text)
        return path

    return make

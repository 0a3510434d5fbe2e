"""Random models of every kind in the Llama family, as small as they can be: biases, head sizes, positions, norms."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.tiny_models import VOCABULARY

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILY: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama with biases, its own head size and llama3 positions": LlamaConfig(
        **SHAPE, attention_bias=True, mlp_bias=True, head_dim=16, rope_parameters=LLAMA3_ROPE
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=24),
}


def family_model(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILY[name], dtype=torch.float32)
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.normal_(1, 0.3)
            elif parameter.dim() > 1:
                parameter.mul_(6)
            else:
                parameter.normal_(0, 0.5)
    return model.eval()

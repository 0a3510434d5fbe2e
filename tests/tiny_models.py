"""Random models of four architectures, as small as they can be, for tests that must hold for every architecture.

They cover what differs between them: grouped heads and tied weights (Llama), biases (Qwen2), learned positions
(GPT-2), softcapping, an embedding scale and a sliding window shorter than the test's sequences (Gemma 2). The weights
are wide enough that distributions are far from uniform.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

VOCABULARY = 48
PAD, EOS = 0, 1
WINDOW = 6


def _llama() -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


def _qwen2() -> PreTrainedConfig:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )


def _gpt2() -> PreTrainedConfig:
    return GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=64)


def _gemma2() -> PreTrainedConfig:
    return Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        query_pre_attn_scalar=4,
        max_position_embeddings=64,
        sliding_window=WINDOW,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=5.0,
    )


_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "gpt2": _gpt2,
    "gemma2": _gemma2,
}
ARCHITECTURES = tuple(_CONFIGS)


def tiny_model(architecture: str = "llama", seed: int = 0, spread: float = 4.0) -> PreTrainedModel:
    """A random causal language model (float32, evaluation mode); matrices are `spread` times as wide as by default."""
    config = _CONFIGS[architecture]()
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, EOS, PAD
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
    return model.eval()


def random_tokens(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Rows of these lengths, without padding and end-of-sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One word a token: token 7 is `w7`."""
    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=f"w{PAD}", eos_token=f"w{EOS}")

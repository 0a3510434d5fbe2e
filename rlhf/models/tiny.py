"""The fresh model of `sft.source=tiny:`: a small Llama, and a tokenizer trained on the built-in word problems.

The tokenizer is byte-level, so that any text survives it, and splits numbers into single digits. Its training text has
a seed of its own: the vocabulary is the same for all seeds and data of the pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.data import word_problems
from rlhf.params import Tiny

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n' }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% else %}{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CORPUS_PROBLEMS, CORPUS_SEED, CORPUS_CARELESS = 2000, "tokenizer", 0.5


def make_tiny(tiny: Tiny, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A fresh Llama (float32, tied embeddings, evaluation mode) of the shape `tiny`, and its tokenizer.

    The seed decides every weight and leaves torch's global generator as it was.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(tiny.vocabulary, tiny.context)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        max_position_embeddings=tiny.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.eval()
    return model, tokenizer


def make_tokenizer(vocabulary: int, context: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with single digits, at most `vocabulary` tokens, and a chat template.

    Special tokens come first: pad, end of sequence, and one to open a turn of the user and of the assistant.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _corpus() -> list[str]:
    """Questions and answers as prompts and responses hold them: each is a text of its own between special tokens."""
    problems = word_problems.generate(
        CORPUS_PROBLEMS, CORPUS_SEED, careless_low=CORPUS_CARELESS, careless_high=CORPUS_CARELESS
    )
    return [text for problem in problems for text in (problem.question, problem.demonstration)]

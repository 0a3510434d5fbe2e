"""What a checkpoint must have before hours are spent on it; everything that is wrong with it is told at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf import machine
from rlhf.data.prompts import decode_response, encode_response, render_prompt
from rlhf.errors import Problems, UserError, first_line
from rlhf.models import checkpoints
from rlhf.params import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")

QUESTION = "Tom has 3 apples and buys 14 more. How many apples does he have now?"
RESPONSE = "He has 3+14=<<3+14=17>>17 apples.\n#### 17"
PLAIN_TOKENS = 8
LOADED, TRAINED = 4, 20
"""Bytes a weight: in float32; with gradient, two moments and the reference beside it."""
TOLERANCE = 1e-3
"""Of the largest logit: far above rounding, far below what attention to a later token does."""


@dataclass(frozen=True)
class Wanted:
    """What the pipeline asks of the checkpoint: its prompts, and the longest responses by the param that says so."""

    prompt: Prompt
    responses: Mapping[str, int]


@dataclass(frozen=True)
class Passed:
    """What is known of a checkpoint that can be trained; `notes` are lines for a person."""

    parameters: int
    stop_token: str
    notes: list[str] = field(default_factory=list)


def check(directory: Path, wanted: Wanted | None) -> Passed:
    """Loads the checkpoint once, as later stages will, and looks at all of it; prompts only where they are `wanted`.

    Raises UserError for what those stages could not use, Problems where that is more than one thing.
    """
    problems: list[str] = []
    needed, there = LOADED * weights(directory), machine.memory()
    config = _config(directory)
    tokenizer = _tried(problems, lambda: checkpoints.read_tokenizer(directory))
    if config.get("quantization_config") is not None:
        problems.append("its weights are quantised: take the checkpoint that has them in full")
        model = None
    elif needed > there:
        problems.append(f"its weights take {_gb(needed)} in float32 and this machine has {_gb(there)}: take fewer")
        model = None
    else:
        model = _tried(problems, lambda: checkpoints.read_model(directory, "AutoModelForCausalLM"))
    ids: list[int] = []
    if tokenizer is not None:
        problems += _lacking(tokenizer)
        if wanted and tokenizer.chat_template and tokenizer.eos_token is not None:
            ids = _tried(problems, lambda: _rendered(tokenizer, wanted.prompt)) or []
            problems += _lost(tokenizer, ids)
    if model is not None:
        problems += [*_too_small(model, tokenizer, wanted), *_unsound(model, ids)]
    if model is None and (code := _own_code(config)):
        problems.append(f"it comes with code of its own ({code}), which is never run: take one without")
    if problems or model is None or tokenizer is None:
        raise Problems(problems)
    return Passed(model.num_parameters(), str(tokenizer.eos_token), list(_notes(model, config, there)))


def weights(directory: Path) -> int:
    """How many numbers the weights' files say that they hold; none where they cannot be read."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for path in directory.glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (SafetensorError, OSError):  # loading says so
            continue
    return total


def _tried(problems: list[str], function: Callable[[], T]) -> T | None:
    try:
        return function()
    except UserError as error:
        problems.append(str(error))
        return None


def _lacking(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    if tokenizer.eos_token is None:
        yield "its tokenizer has no end-of-sequence token: take a chat model, or name a token in sft.eos_token"
    if not tokenizer.chat_template:
        yield "its tokenizer has no chat template: take a chat model, or write one in sft.chat_template"


def _rendered(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    try:
        return render_prompt(tokenizer, QUESTION, prompt)
    except Exception as error:  # a template raises what it likes
        reason = first_line(error)
        remedy = "correct sft.chat_template, or leave prompt.system empty" if prompt.system else "set sft.chat_template"
        raise UserError(f"its chat template does not render a prompt ({reason}): {remedy}") from None


def _lost(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Iterator[str]:
    """What a question or an answer loses on its way to tokens and back."""
    if ids and QUESTION not in str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)):
        yield "a prompt's tokens do not read as the question: its chat template or its tokenizer loses words"
    back = decode_response(tokenizer, encode_response(tokenizer, RESPONSE))
    if back.strip() != RESPONSE:
        yield f"an answer's tokens read as {back!r}, not as {RESPONSE!r}: its tokenizer loses characters"


def _too_small(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, wanted: Wanted | None
) -> Iterator[str]:
    config = model.config.get_text_config()
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        count = f"{len(tokenizer)} tokens and the model {config.vocab_size}"
        yield f"its tokenizer has {count}: they do not belong together"
    context: int | None = getattr(config, "max_position_embeddings", None)
    if wanted is None or context is None:
        return
    for key, longest in wanted.responses.items():
        if wanted.prompt.max_tokens + longest > context:
            sizes = f"prompt.max_tokens={wanted.prompt.max_tokens} and {key}={longest}"
            yield f"its context holds {context} tokens, fewer than {sizes} together: lower one"


def _unsound(model: PreTrainedModel, ids: list[int]) -> Iterator[str]:
    """Weights or logits that are no numbers, and a model that looks at later tokens."""
    import torch

    for name, values in model.named_parameters():
        if not torch.isfinite(values).all():
            yield f"its weight {name} holds values that are not finite: take a sound copy"
            return
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or PLAIN_TOKENS
    row = [token for token in ids if token < config.vocab_size][:longest]
    row = row if len(row) > 1 else [*range(PLAIN_TOKENS)]  # one token has none before it to compare
    tokens = torch.tensor([row, [*row[:-1], (row[-1] + 1) % config.vocab_size]]).to(model.device)
    with torch.inference_mode():
        logits = model(input_ids=tokens).logits.float()
    if not torch.isfinite(logits).all():
        yield "its logits are not finite in float32: take a sound copy"
    elif (logits[0, :-1] - logits[1, :-1]).abs().max() > TOLERANCE * logits.abs().max():
        yield "it looks at later tokens: take a causal language model"


def _notes(model: PreTrainedModel, config: Mapping[str, Any], there: int) -> Iterator[str]:
    if code := _own_code(config):
        yield f"it comes with code of its own ({code}), which is never run: transformers' own class is used"
    needed = TRAINED * model.num_parameters()
    if needed > there:
        remedy = "ppo.lora.rank=8 takes less, distributed.strategy=fsdp shares it"
        yield f"training all weights takes about {_gb(needed)}, and this machine has {_gb(there)}: {remedy}"


def _own_code(config: Mapping[str, Any]) -> str:
    """The modules that a configuration's auto_map names."""
    auto_map = config.get("auto_map")
    return ", ".join(sorted(map(str, auto_map.values()))) if isinstance(auto_map, dict) else ""


def _config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):  # loading says so
        return {}
    return config if isinstance(config, dict) else {}


def _gb(amount: int) -> str:
    return f"{amount / 1e9:.1f} GB"

"""Checkpoint directories: the Hugging Face layout with a manifest that says what is in it and where it came from.

    model.safetensors, config.json, generation_config.json, tokenizer files, chat template, manifest.json

The manifest is written last and holds the SHA-256 of every other file; loading compares them. Pickles and remote code
are never loaded, and nothing is looked up on a network. The same weights and manifest give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf.errors import UserError
from rlhf.files import appearing
from rlhf.hashes import sha256_file

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MANIFEST = "manifest.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
ModelClass = Literal["AutoModelForCausalLM", "AutoModelForSequenceClassification"]


class Manifest(BaseModel):
    """What a checkpoint is, which files it has and what it was made from; no time, no absolute path, no run id."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["fetched", "sft", "reward", "policy"]
    source: str
    """`sft.source` as the params have it; `directory` for a local one, which `revision` then identifies."""
    revision: str | None = None
    """Resolved commit, content hash or file hash of the source."""
    files: dict[str, str] = {}
    """SHA-256 of each file; `write_manifest` fills it in."""
    parents: dict[str, str] = {}
    """Kind of each checkpoint this one was made from, and its `checkpoint_hash`."""
    params: dict[str, Any] = {}
    seed: int | None = None
    prompt: dict[str, Any] = {}
    stop_token: str
    license: str | None = None
    extra: dict[str, Any] = {}


def save_checkpoint(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    manifest: Manifest,
    extra_tensors: Mapping[str, Mapping[str, Tensor]] = {},
) -> Manifest:
    """Writes a checkpoint to the new or empty `directory`, the manifest last; returns the manifest as written.

    `extra_tensors` maps the name of a further safetensors file to its tensors. Raises UserError for a full disk.
    """
    directory.mkdir(exist_ok=True)
    write_model(directory, model, tokenizer, extra_tensors)
    return write_manifest(directory, manifest)


def write_model(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    extra_tensors: Mapping[str, Mapping[str, Tensor]] = {},
) -> None:
    """Writes all of a checkpoint but its manifest to `directory`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    silence_transformers()
    try:
        model.save_pretrained(directory)
        for name, tensors in extra_tensors.items():
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, directory / name)
    except SafetensorError as error:
        raise UserError(
            f"{directory} cannot be written: {_first_line(error)}: free space or take another disk"
        ) from None
    if model.can_generate():
        _greedy_generation(tokenizer).save_pretrained(directory)
    write_tokenizer(directory, tokenizer)
    for path in directory.glob("*.safetensors"):  # safetensors lets nobody but the owner read them
        path.chmod((directory / "config.json").stat().st_mode)


def write_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the tokenizer's files to `directory`."""
    for key in ("is_local", "local_files_only"):  # how it was loaded is no property of the tokenizer
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(directory)


def write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """Hashes every file in `directory` and writes `manifest.json` atomically; returns the manifest as written."""
    files = {name: sha256_file(directory / name) for name in _file_names(directory)}
    complete = manifest.model_copy(update={"files": files})
    text = json.dumps(complete.model_dump(), sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with appearing(directory / MANIFEST) as written:
        written.write_text(text, encoding="utf-8")
    return complete


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint; raises UserError where it is missing or not one."""
    path = directory / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is missing: {directory} is no complete checkpoint: run its stage again") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{path}: {where}: {first['msg']}: run the stage that wrote it again") from None


def checkpoint_hash(directory: Path) -> str:
    """SHA-256 of the manifest, which holds the hashes of all files: the checkpoint's identity in `parents`."""
    read_manifest(directory)
    return sha256_file(directory / MANIFEST)


def verify_files(directory: Path) -> None:
    """Compares every file with the manifest; raises UserError that names the first missing, changed or extra one."""
    manifest = read_manifest(directory)
    refuse_pickles(directory.iterdir())
    extra = sorted(set(_file_names(directory)) - set(manifest.files))
    if extra:
        raise UserError(f"{directory / extra[0]} is not in {MANIFEST}: move it elsewhere")
    _verify(directory, manifest, manifest.files)


def refuse_pickles(paths: Iterable[Path | str]) -> None:
    """Raises UserError where one of these names is that of pickled weights, which run code when they are loaded."""
    for path in sorted(map(Path, paths)):
        if path.suffix in PICKLES:
            raise _pickled(path)


def refuse_disguised_pickle(path: Path) -> None:
    """Raises UserError where a file with the weights' name holds what pickle or torch.save wrote."""
    with path.open("rb") as file:
        head = file.read(9)
    is_safetensors = head[8:9] == b"{"  # after the header's length, which may begin with any byte
    is_pickle = head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")
    if not is_safetensors and (is_pickle or head.startswith(b"PK\3\4")):
        raise _pickled(path)


def _pickled(path: Path) -> UserError:
    return UserError(
        f"{path}: pickled weights are never loaded: where you trust the file, load it with transformers, "
        "write it with model.save_pretrained(...) as safetensors, and remove it"
    )


def load_policy(directory: Path) -> PreTrainedModel:
    """The causal language model in `directory`: float32, in evaluation mode, every file checked."""
    verify_files(directory)
    return read_model(directory, "AutoModelForCausalLM")


def load_reward_model(directory: Path) -> PreTrainedModel:
    """The reward model in `directory`: one scalar a sequence, float32, in evaluation mode, every file checked.

    It scores the rightmost token that is not the pad token, which therefore must not be the end-of-sequence token.
    """
    verify_files(directory)
    model = read_model(directory, "AutoModelForSequenceClassification")
    if model.config.num_labels != 1:
        raise UserError(f"{directory / 'config.json'}: {model.config.num_labels} labels: a reward model has one")
    if model.config.pad_token_id in (None, model.config.eos_token_id):
        raise UserError(
            f"{directory / 'config.json'}: pad_token_id is {model.config.pad_token_id}: a reward model needs a pad "
            "token that is not its end-of-sequence token, or it scores one token too early"
        )
    return model


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `directory`, its files checked; without a pad token of its own it pads with end-of-sequence."""
    manifest = read_manifest(directory)
    _verify(directory, manifest, (name for name in manifest.files if not name.endswith(".safetensors")))
    return read_tokenizer(directory)


def context_length(directory: Path) -> int:
    """The longest sequence, in tokens, that the model in `directory` is made for."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return int(config.get_text_config().max_position_embeddings)


def read_model(directory: Path, model_class: ModelClass) -> PreTrainedModel:
    """The model in `directory` without a look at its manifest: float32, in evaluation mode.

    Raises UserError where the configuration is not of that class or the weights do not fit it exactly: transformers
    alone would fill the gaps with fresh random weights.
    """
    import torch
    import transformers

    silence_transformers()
    model: PreTrainedModel
    try:
        model, info = getattr(transformers, model_class).from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # malformed directories raise many types, bare Exception among them
        raise UserError(f"{directory} does not load as {model_class}: {_first_line(error)}") from None
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[fault]:
            name, count = min(map(str, info[fault])), len(info[fault])
            kind = fault.removesuffix("_keys")
            raise UserError(f"{directory}: {count} {kind} weights, first {name}: they do not fit config.json")
    model.eval()
    return model


def read_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `directory` without a look at its manifest; raises UserError where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise UserError(f"{directory} has no tokenizer that loads: {_first_line(error)}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def reward_pad_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """A special token of the tokenizer that a reward model can pad with: any but end-of-sequence.

    Sequence classifiers of transformers score the rightmost token that is not the pad token; padding with
    end-of-sequence would make that the last token but one. Raises UserError where there is no other special token.
    """
    named: tuple[str | None, ...] = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token)
    added = (str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special)
    for token in (*named, *added):
        if token is not None and token != tokenizer.eos_token:
            return token
    raise UserError(
        f"the tokenizer has no special token but its end-of-sequence token {tokenizer.eos_token!r}: a reward model "
        "needs another one to pad with: add one to sft.source"
    )


def _verify(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    for name in names:
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path} is missing: {MANIFEST} lists it: run the {manifest.kind} checkpoint's stage again")
        if sha256_file(path) != manifest.files[name]:
            raise UserError(f"{path} is not what {MANIFEST} says: run the {manifest.kind} checkpoint's stage again")


def _file_names(directory: Path) -> list[str]:
    files = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in files if path.as_posix() not in (MANIFEST, f".{MANIFEST}"))


def _greedy_generation(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Defaults for transformers' `generate` that answer as the pipeline's evaluation does."""
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def silence_transformers() -> None:
    """No bars, for reading and writing weights takes seconds, and no report of a load that failed or was interrupted.

    Whoever loads says in one line what does not fit.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    # The second because of the first: at that level transformers reports on a tensor parallelism that nobody uses.
    for name in ("modeling_utils", "distributed.tensor_parallel"):
        logging.get_logger(f"transformers.{name}").setLevel(logging.ERROR)


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)

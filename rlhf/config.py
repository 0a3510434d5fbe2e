"""Composing, reading and validating `params.yaml`.

    python -m rlhf.config compose [group=choice ...] [key=value ...]    write params.yaml
    python -m rlhf.config check [key=value ...]                         read and validate it
    python -m rlhf.config help                                          every key with its help

`compose` writes what `dvc exp run -S group=choice -S key=value` would write: the groups are in `conf/`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rlhf.errors import UsageError, UserError
from rlhf.params import NOTHING, REWARD_MODEL_PATH, Params

PARAMS_FILE = Path("params.yaml")
CONF_DIR = Path(__file__).resolve().parents[1] / "conf"


def validate(raw: object, origin: str = str(PARAMS_FILE)) -> Params:
    """`raw` as typed params; raises UsageError that names every key at fault."""
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        faults = "; ".join(_fault(e["loc"], e["msg"]) for e in error.errors())
        raise UsageError(f"{origin}: {faults} (python -m rlhf.config help lists every key)") from None


def _fault(location: Sequence[int | str], message: str) -> str:
    text = message.removeprefix("Value error, ")
    text = "unknown key" if text == "Extra inputs are not permitted" else text
    return f"{'.'.join(map(str, location)) or 'params'}: {text}"


def load(overrides: Sequence[str] = (), path: Path = PARAMS_FILE) -> Params:
    """The params in `path`, with `key=value` overrides laid on top.

    Raises UsageError for an unreadable file, an unknown key or a value out of bounds.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.is_file():
        raise UsageError(f"{path} is missing: write it with python -m rlhf.config compose")
    malformed = [item for item in overrides if "=" not in item or item.startswith("=")]
    if malformed:
        raise UsageError(f"override {malformed[0]!r}: write key=value, for example ppo.kl.coef=0.02")
    try:
        merged = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
        raw = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid YAML: {_first_line(error)}") from None
    _follow_sources(raw, {item.split("=", 1)[0] for item in overrides})
    return validate(raw, str(path) if not overrides else f"{path} with {' '.join(overrides)}")


def _follow_sources(raw: Any, overridden: set[str]) -> None:
    """Sets `reads` after an overridden `source`, so that one override is enough on a stage's command line."""
    if "ppo.reward.source" in overridden and "ppo.reward.reads" not in overridden:
        reward = raw["ppo"]["reward"]
        reward["reads"] = NOTHING if reward["source"] == "verifier" else REWARD_MODEL_PATH
    if "sft.source" in overridden and "sft.reads" not in overridden:
        source = str(raw["sft"]["source"])
        raw["sft"]["reads"] = NOTHING if "://" in source or source == "tiny:" else source


def compose(overrides: Sequence[str] = (), conf: Path = CONF_DIR) -> dict[str, Any]:
    """The composition of `conf/` with Hydra overrides (`group=choice` and `key=value`), validated.

    Raises UsageError for an unknown group, choice or key and for a value out of bounds.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(conf), version_base=None):
            raw: Any = OmegaConf.to_container(hydra_compose("config", overrides=list(overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"{' '.join(overrides)}: {_first_line(error)}") from None
    validate(raw, "composed params")
    return raw


def write(raw: dict[str, Any], path: Path = PARAMS_FILE) -> None:
    """Writes `raw` as DVC writes params, atomically; leaves an equal file alone."""
    from dvc.utils.serialize import dump_yaml

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        dump_yaml(temporary, raw)
        if path.is_file() and path.read_bytes() == temporary.read_bytes():
            return
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def describe(section: type[BaseModel] = Params, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of the schema with its one line of help, in the schema's order."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from describe(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description or ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    match list(arguments):
        case ["compose", *overrides]:
            write(compose(overrides))
            print(f"{PARAMS_FILE} written: {' '.join(overrides) or 'the defaults'}")
        case ["check", *overrides]:
            load(overrides)
            print(f"{PARAMS_FILE} is valid")
        case ["help"]:
            for key, text in describe():
                print(f"{key:36} {text}")
        case _:
            print((__doc__ or "").strip(), file=sys.stderr)
            return UsageError.exit_code
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"config: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

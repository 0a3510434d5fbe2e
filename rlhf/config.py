"""Composing, reading and validating `params.yaml`.

    python -m rlhf.config compose [group=choice ...] [key=value ...]    write params.yaml
    python -m rlhf.config check [key=value ...]                         read and validate it
    python -m rlhf.config help                                          every key with its help

`compose` writes what `dvc exp run -S group=choice -S key=value` would write: the groups are in `conf/`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rlhf.errors import UsageError, UserError, first_line, run_command
from rlhf.files import appearing
from rlhf.params import NOTHING, REWARD_MODEL_PATH, Params, is_directory, is_file
from rlhf.redaction import secret_in

PARAMS_FILE = Path("params.yaml")
CONF_DIR = Path(__file__).resolve().parents[1] / "conf"


def validate(raw: object, origin: str = str(PARAMS_FILE)) -> Params:
    """`raw` as typed params; raises UsageError that names every key at fault, and for a secret among the values."""
    _refuse_secrets(raw, origin)
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        faults = "; ".join(_fault(e["loc"], e["msg"]) for e in error.errors())
        raise UsageError(f"{origin}: {faults} (python -m rlhf.config help lists every key)") from None


def _refuse_secrets(values: object, origin: str, key: str = "") -> None:
    """Raises UsageError where a text holds a secret: params are hashed, tracked and shown."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            _refuse_secrets(value, origin, f"{key}.{name}" if key else str(name))
    elif isinstance(values, str | list | tuple) and (secret := secret_in(str(values))):
        advice = "keep secrets in environment variables, which the libraries read by themselves"
        raise UsageError(f"{origin}: {key}: holds {secret}, and params are written down everywhere: {advice}")


def _fault(location: Sequence[int | str], message: str) -> str:
    text = message.removeprefix("Value error, ")
    text = {"Extra inputs are not permitted": "unknown key", "Field required": "missing"}.get(text, text)
    return f"{'.'.join(map(str, location)) or 'params'}: {text}"


def load(overrides: Sequence[str] = (), path: Path = PARAMS_FILE) -> Params:
    """The params in `path`, with `key=value` overrides laid on top.

    Raises UsageError for an unreadable file, an unknown key or a value out of bounds.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.is_file():
        raise UsageError(f"{path} is missing: write it with python -m rlhf.config compose")
    try:
        config = OmegaConf.load(path)
    except (OSError, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid YAML: {first_line(error)}") from None
    if not isinstance(config, DictConfig):
        raise UsageError(f"{path}: holds a list instead of keys: write it with python -m rlhf.config compose")
    _refuse_options(overrides)
    origin = " with ".join([str(path), *([" ".join(overrides)] if overrides else [])])
    try:
        overridden = dict(map(_parse, overrides))
        for key, value in overridden.items():
            OmegaConf.update(config, key, value)
        for key, value in _paths_read(config, overridden).items():
            OmegaConf.update(config, key, value)
        raw = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UsageError(f"{origin}: {first_line(error)}") from None
    return validate(raw, origin)


def _refuse_options(overrides: Sequence[str]) -> None:
    """Raises UsageError for an override that is an option, which Hydra would tell of in words of its own grammar."""
    if option := next((override for override in overrides if override.startswith("-")), None):
        raise UsageError(f"{option}: no such option: write key=value, as limits.disk_gb=20 (--help alone says more)")


def _parse(override: str) -> tuple[str, Any]:
    """Key and value of one `key=value` in Hydra's grammar, the same that `compose` takes."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        hint = """write key=value, with quotes around a value that holds = , { or }: key='"value"'"""
        raise UsageError(f"override {override!r}: {first_line(error)}: {hint}") from None
    if parsed.key_or_group in _groups() and isinstance(parsed.value(), str):
        remedy = f"compose params.yaml with it: python -m rlhf.config compose {override}, or make run {override}"
        raise UsageError(f"override {override!r}: {parsed.key_or_group} is a group of conf/, and no key: {remedy}")
    if parsed.type is not OverrideType.CHANGE or parsed.is_sweep_override() or not parsed.key_or_group:
        raise UsageError(f"override {override!r}: write key=value with one value, for example ppo.kl.coef=0.02")
    return parsed.key_or_group, parsed.value()


def _groups() -> set[str]:
    """The names of the groups in `conf/`."""
    return {path.name for path in CONF_DIR.iterdir() if path.is_dir()}


def _paths_read(config: Any, overridden: Mapping[str, Any]) -> dict[str, str]:
    """The `reads` keys that follow from overridden keys, so that one override is enough on a stage's command line."""
    from omegaconf import OmegaConf

    reads = {}
    users = {"ppo.reward.source": "verifier", "ppo.critic.start": "sft", "ppo.selection": "verifier"}
    if users.keys() & overridden.keys():
        idle = all(OmegaConf.select(config, key) == without for key, without in users.items())
        reads["ppo.reward.reads"] = NOTHING if idle else REWARD_MODEL_PATH
    if "sft.source" in overridden:
        source = str(overridden["sft.source"])
        reads["sft.reads"] = source if is_directory(source) else NOTHING
    if "preferences.source" in overridden:
        source = str(overridden["preferences.source"])
        reads["preferences.reads"] = source if is_file(source) else NOTHING
    return {key: path for key, path in reads.items() if key not in overridden}


def compose(overrides: Sequence[str] = (), conf: Path = CONF_DIR) -> dict[str, Any]:
    """The composition of `conf/` with Hydra overrides (`group=choice` and `key=value`), validated.

    Raises UsageError for an unknown group, choice or key and for a value out of bounds.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _refuse_options(overrides)
    for override in overrides:
        if re.match(r"[+~]*hydra\b", override):
            raise UsageError(f"{override}: Hydra only composes here, its own settings do nothing: leave it out")
    try:
        with initialize_config_dir(str(conf), version_base=None):
            raw: Any = OmegaConf.to_container(hydra_compose("config", overrides=list(overrides)), resolve=True)
    except MissingConfigException as error:
        choices = ", ".join(error.options or ())
        raise UsageError(f"{' '.join(overrides)}: {first_line(error)}: take one of {choices}") from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: for `=1`
        hint = "conf/ has the groups, python -m rlhf.config help lists the keys"
        raise UsageError(f"{' '.join(overrides)}: {first_line(error)}: {hint}") from None
    validate(raw, "composed params")
    return raw


def check_sources(raw: dict[str, Any], workspace: Path) -> None:
    """Raises UserError where something that the params read from is missing; DVC would not name the key."""
    contents = {
        "data": "the directory with train.jsonl and test.jsonl",
        "sft": "the directory with a checkpoint",
        "preferences": "the file with judged pairs",
    }
    for key, content in contents.items():
        reads = raw[key]["reads"]
        if not (workspace / reads).exists():
            raise UserError(f"{key}.reads={reads} is missing: name {content}")


def write(raw: dict[str, Any], path: Path = PARAMS_FILE) -> None:
    """Writes `raw` as `dvc exp run -S` does, byte for byte, atomically; leaves an equal file alone."""
    text = _as_yaml(raw)
    try:
        if path.is_file() and path.read_bytes() == text:
            return
        with appearing(path) as written:
            written.write_bytes(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}: make room or access there") from None


def require_unchanged(raw: dict[str, Any], path: Path = PARAMS_FILE) -> None:
    """Raises UserError where `path` is no longer what `write` made of `raw`."""
    if not path.is_file() or path.read_bytes() != _as_yaml(raw):
        raise UserError(f"{path.name} was changed while the pipeline ran: run it again with the choices that you want")


def _as_yaml(raw: dict[str, Any]) -> bytes:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(raw)).encode()


def describe(section: type[BaseModel] = Params, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of the schema with its one line of help, in the schema's order."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from describe(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description or ""


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    match list(arguments):
        case ["compose", *overrides]:
            write(compose(overrides))
            print(f"{PARAMS_FILE} written: {' '.join(overrides) or 'the defaults'}")
        case ["check", *overrides]:
            load(overrides)
            print(f"{PARAMS_FILE} is valid")
        case ["-h" | "--help"]:
            print((__doc__ or "").strip())
        case ["help"]:
            for key, text in describe():
                print(f"{key:36} {text}")
        case [] | [_, *_]:
            said = " ".join(arguments)
            fault = f"{said}: no command" if said else "no command is given"
            raise UsageError(f"{fault}: write compose, check or help (python -m rlhf.config --help)")
    return 0


if __name__ == "__main__":
    sys.exit(run_command("config", lambda: main(sys.argv[1:])))

"""The champion: the version that serves. The gate moves it, or a person with a reason; each move is recorded.

    champion     serves
    previous     the champion before it, to which `rollback` returns
    candidate    the version that was registered last, see `versions`

Whoever moves an alias holds a lock from reading the champion to setting it: of two candidates that knock at the same
time, the second is compared with the first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rlhf.errors import UserError
from rlhf.evaluation.right_answers import RightAnswers, read_right_answers
from rlhf.params import Gate
from rlhf.redaction import redact
from rlhf.registry import gate as gates
from rlhf.registry.gate import Candidate, Champion, Verdict
from rlhf.registry.lookup import find, find_model, holder, require_files
from rlhf.registry.server import download, files, lock, server, upload
from rlhf.registry.versions import Version

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

CHAMPION = "champion"
PREVIOUS = "previous"

GATE, REASONS, COMPARED_WITH = "gate", "gate.reasons", "gate.champion"
"""Tags of a version: passed or refused, why, and the champion that it was compared with."""
JUDGED = "gate.judged"
"""Tag: the fingerprint of what the gate saw. The same evidence is not judged twice."""
ANSWERS = "gate.answers"
"""Tag: the file of the version that says which gate problems it got right."""
WITHDRAWN = "withdrawn"
"""Tag: the reason that a person gave to roll the version back."""
MOVE = "move."
"""Start of the registered model's tags that record every move, in order."""
LONGEST_REASON = 500
UNCOMMITTED = "made from uncommitted changes: commit them and run again"


@dataclass(frozen=True)
class Papers:
    """What a version carries beside its model: its right answers on the gate split as CSV, and its model card."""

    answers: str
    card: str


def decide(
    version: Version, candidate: Candidate, papers: Papers, gate: Gate, method: str, uncommitted: bool = False
) -> str:
    """Lets the gate decide whether `version` becomes champion; returns where the version stands now, in words.

    A refusal is a result, no error. The same evidence under the same `gate` is judged once, so that a version which a
    person rolled back or replaced does not come back by itself; nor is the reigning champion judged. `method` is the
    verifier's by which answers count as right. A policy made from `uncommitted` changes is refused until a run of the
    committed code comes to the same one. Raises UserError where the server cannot be reached.
    """
    with lock("move", version.name), server() as registry:
        recorded = registry.get_model_version(version.name, version.number)
        _file(registry, recorded, papers)
        fingerprint = candidate.fingerprint(gate)
        if uncommitted:
            if JUDGED not in recorded.tags:
                _note(registry, recorded, Verdict((UNCOMMITTED,), ""), None)
        elif recorded.tags.get(JUDGED) != fingerprint:
            champion = holder(registry, version.name, CHAMPION)
            if champion is None or champion.version != recorded.version:
                _judge(registry, recorded, champion, candidate, gate, method)
            registry.set_model_version_tag(version.name, version.number, JUDGED, fingerprint)
        return _standing(registry, version.name, version.number)


def promote(name: str, number: str, reason: str) -> str:
    """Makes the version with that number (or alias) champion by hand; returns what was done.

    Raises UserError where there is no such version, where its files are gone, or for an empty reason.
    """
    said = _said(reason)
    with lock("move", name), server() as registry:
        chosen = find(registry, name, number)
        champion = holder(registry, name, CHAMPION)
        if champion and champion.version == chosen.version:
            return f"{name} version {chosen.version} is the champion already"
        require_files(chosen)
        if WITHDRAWN in chosen.tags:
            registry.delete_model_version_tag(name, chosen.version, WITHDRAWN)
        _crown(registry, chosen, champion, f"promoted by hand: {said}")
    return f"{name} version {chosen.version} is champion" + (f"; previous: {champion.version}" if champion else "")


def rollback(name: str, reason: str) -> str:
    """Makes the previous champion champion again, and the champion previous; returns what was done.

    The version that goes is marked as withdrawn: the gate refuses it from now on. Raises UserError where there is no
    champion before the present one, where its files are gone, or for an empty reason.
    """
    said = _said(reason)
    with lock("move", name), server() as registry:
        champion, previous = holder(registry, name, CHAMPION), holder(registry, name, PREVIOUS)
        if champion is None or previous is None or champion.version == previous.version:
            raise UserError(
                f"{name} has no champion to go back to: make promote version=N reason=... takes any version"
            )
        require_files(previous)
        registry.set_model_version_tag(name, champion.version, WITHDRAWN, said)
        if WITHDRAWN in previous.tags:
            registry.delete_model_version_tag(name, previous.version, WITHDRAWN)
        _record(registry, previous, champion, f"rolled back by hand: {said}")
        registry.set_registered_model_alias(name, CHAMPION, previous.version)  # first what serves
        registry.set_registered_model_alias(name, PREVIOUS, champion.version)
    return f"{name} version {previous.version} is champion; previous: {champion.version}, withdrawn"


def _judge(
    registry: MlflowClient,
    recorded: ModelVersion,
    champion: ModelVersion | None,
    candidate: Candidate,
    gate: Gate,
    method: str,
) -> None:
    """Records the verdict and crowns who passes."""
    # Where the champion's files were lost, the same policy is registered anew: it need not beat itself.
    rival = champion if champion and not _is_same_policy(champion, recorded) else None
    if withdrawn := recorded.tags.get(WITHDRAWN):
        verdict = Verdict((f"withdrawn by hand ({withdrawn}): only make promote brings it back",), "")
    else:
        rival_answers = Champion(str(rival.version), _right_answers(rival, method)) if rival else None
        verdict = gates.judge(candidate, rival_answers, gate)
    _note(registry, recorded, verdict, rival)
    if verdict.passed:
        _crown(registry, recorded, champion, f"passed the gate: {verdict.merits}")


def _note(registry: MlflowClient, recorded: ModelVersion, verdict: Verdict, rival: ModelVersion | None) -> None:
    """Records the verdict in the version's tags."""
    tags = {
        GATE: "passed" if verdict.passed else "refused",
        REASONS: verdict.merits if verdict.passed else "; ".join(verdict.reasons),
        COMPARED_WITH: str(rival.version) if rival else "none",
    }
    for key, value in tags.items():
        registry.set_model_version_tag(recorded.name, recorded.version, key, value)


def _crown(registry: MlflowClient, new: ModelVersion, old: ModelVersion | None, why: str) -> None:
    """Sets the aliases; `previous` first, because setting both again after a kill comes to the same."""
    _record(registry, new, old, why)
    if old and not _is_same_policy(old, new):
        registry.set_registered_model_alias(new.name, PREVIOUS, old.version)
    registry.set_registered_model_alias(new.name, CHAMPION, new.version)


def _record(registry: MlflowClient, new: ModelVersion, old: ModelVersion | None, why: str) -> None:
    """Writes the move down before it is made, so that none goes unrecorded."""
    number = 1 + len(moves(find_model(registry, new.name)))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    text = f"{now} champion {old.version if old else 'none'} -> {new.version}: {why}"
    registry.set_registered_model_tag(new.name, f"{MOVE}{number:06d}", text)


def moves(model: RegisteredModel) -> list[str]:
    """Every move of the champion, the first one first."""
    return [text for key, text in sorted(model.tags.items()) if key.startswith(MOVE)]


def _file(registry: MlflowClient, version: ModelVersion, papers: Papers) -> None:
    """Puts the papers into the version, those that it does not have yet; the answers under the hash of their bytes."""
    path = PurePosixPath("gate", f"{sha256(papers.answers.encode()).hexdigest()}.csv")
    if path.name not in files(version, str(path.parent)):
        upload(registry, version, str(path), papers.answers.encode())
    if version.tags.get(ANSWERS) != str(path):
        registry.set_model_version_tag(version.name, version.version, ANSWERS, str(path))
    card = redact(papers.card)
    if version.description != card:
        upload(registry, version, "README.md", card.encode())
        registry.update_model_version(version.name, version.version, card)


def _right_answers(version: ModelVersion, method: str) -> RightAnswers | None:
    """The version's right answers; None where the file is gone or is not what was registered."""
    path = PurePosixPath(version.tags.get(ANSWERS, ""))
    if not path.name or path.name not in files(version, str(path.parent)):
        return None
    with TemporaryDirectory() as place:
        content = download(version, str(path), Path(place)).read_bytes()
    return read_right_answers(content.decode(), method) if sha256(content).hexdigest() == path.stem else None


def _standing(registry: MlflowClient, name: str, number: str) -> str:
    """Where a version stands, in words, with the reasons."""
    version, model = registry.get_model_version(name, number), find_model(registry, name)
    champion = model.aliases.get(CHAMPION)
    if str(champion) == number:
        why = [text.split(": ", 1)[1] for text in moves(model) if f" -> {number}: " in text]
        return f"champion, {why[-1]}" if why else "champion"
    if WITHDRAWN in version.tags:
        return f"withdrawn by hand: {version.tags[WITHDRAWN]}"
    if version.tags.get(GATE) == "refused":
        return f"refused by the gate: {version.tags[REASONS]}"
    return f"no longer champion: that is {f'version {champion}' if champion else 'none'}"


def _is_same_policy(one: ModelVersion, other: ModelVersion) -> bool:
    return bool(one.tags["policy_hash"] == other.tags["policy_hash"])


def _said(reason: str) -> str:
    """The reason in one line, without secrets: the registry shows it to everybody."""
    said = re.sub(r"\s+", " ", redact(reason)).strip()
    if not said or len(said) > LONGEST_REASON:
        raise UserError(f"the reason has {len(said)} characters: give one of 1 to {LONGEST_REASON}: reason=...")
    return said

"""The model card of a registered policy: what it is, what made it, what it is worth, and what it is not for.

A pure function of the policy's manifest, the metrics and the lineage. MLflow shows it as the version's description,
which holds 5,000 characters; with the model it is README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.evaluation.wording import accuracy, gain, p_value, percent
from rlhf.models.checkpoints import Manifest
from rlhf.params import Data

LONGEST, CUT = 5000, " ...\n"
SIGNIFICANT = 0.05
SCORES = {
    "verifier": "a verifier that compares the final number with the right one",
    "reward_model": "a Bradley-Terry reward model, trained on preferences between the start's own answers",
    "mixture": "a weighted mixture of a verifier and a Bradley-Terry reward model",
}


def render(
    name: str,
    *,
    manifest: Manifest,
    evaluation: Mapping[str, Any],
    ppo: Mapping[str, int],
    kl: float,
    data: Data,
    lineage: Mapping[str, object],
    max_new_tokens: int,
) -> str:
    """The card as Markdown.

    `evaluation` is `metrics/evaluation.json`, `ppo` has `best_iteration` and `iterations`, `kl` is the policy's to its
    start in nats a sampled sequence, `lineage` are the version's tags.
    """
    sections = [
        f"# {name}",
        "Answers word problems in the style of GSM8K step by step and ends with `#### number`. Trained with PPO from "
        "an SFT checkpoint, as in InstructGPT; meant to be decoded greedily.",
        "## What it was made from",
        _origins(manifest, data, lineage),
        "## Recipe",
        _recipe(manifest, ppo),
        "## Results",
        _results(evaluation, kl),
        "## Limits",
        _limits(manifest, evaluation["test"], data, max_new_tokens),
    ]
    card = "\n\n".join(sections) + "\n"
    return card if len(card) <= LONGEST else card[: LONGEST - len(CUT)] + CUT


def _origins(manifest: Manifest, data: Data, lineage: Mapping[str, object]) -> str:
    revision = f", revision `{manifest.revision}`" if manifest.revision else ""
    changed = ", with uncommitted changes" if lineage.get("git.dirty") == "true" else ""
    rows = {
        "start": f"`{manifest.source}`{revision}",
        "checkpoints": ", ".join(f"{kind} `{parent}`" for kind, parent in sorted(manifest.parents.items())),
        "license of the start": manifest.license or "not stated by its source",
        "data": _data(data),
        "data files (md5)": ", ".join(
            f"{key.removeprefix('dvc.')} `{md5}`" for key, md5 in sorted(lineage.items()) if key.startswith("dvc.data/")
        ),
        "code": f"commit `{lineage['git.commit']}`{changed}" if "git.commit" in lineage else "",
        "seed": str(manifest.seed),
    }
    return "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {text} |" for key, text in rows.items() if text)])


def _data(data: Data) -> str:
    if data.source == "hub":
        return f"{data.hub.repo} ({data.hub.config}, {data.hub.revision}) of the hub, under its own license"
    if data.source == "files":
        return "local files in GSM8K's format, under their own license"
    return "made by the built-in generator of word problems, Apache-2.0"


def _recipe(manifest: Manifest, ppo: Mapping[str, int]) -> str:
    """The main choices; the checkpoint's manifest.json has all params."""
    settings = manifest.params["ppo"]
    kl, rank = settings["kl"], settings["lora"]["rank"]
    trained = f"low-rank adapters of rank {rank}" if rank else "all weights"
    sentences = [
        f"{ppo['iterations']} PPO iterations of {settings['prompts_per_iteration']} prompts with "
        f"{settings['samples_per_prompt']} responses each, {settings['epochs']} epochs, learning rate "
        f"{settings['lr']:g}, {trained}; {settings['critic']['kind']} critic.",
        f"Score: {SCORES[settings['reward']['source']]}.",
        f"KL to the start: {kl['kind']} coefficient {kl['coef']:g} in the {kl['place']}.",
        f"Kept: iteration {ppo['best_iteration']}, the best on validation.",
        "All params: `manifest.json` beside the weights.",
    ]
    return " ".join(sentences)


def _results(evaluation: Mapping[str, Any], kl: float) -> str:
    test = evaluation["test"]
    lines = ["| split | problems | start | policy | gain in points | p |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for split in ("gate", "test"):
        row = evaluation[split]
        models = accuracy(row["sft"]), accuracy(row["policy"])
        cells = [split, str(row["n"]), *models, gain(row), p_value(row["p_value"])]
        lines.append(f"| {' | '.join(cells)} |")
    shares = {"Cut off by the length limit": test["cut_off"], "without a number": test["parse_failures"]}
    lines += [
        "",
        f"Greedy accuracy by the {test['method']} verifier, {test['confidence']:.0%} intervals (Wilson; gain: paired, "
        "Newcombe); p of McNemar's exact one-sided test. Gate decides on promotion, test on nothing.",
        "",
        "; ".join(f"{what} on test: {percent(share['policy'])}" for what, share in shares.items())
        + f"; KL to the start on sampled training prompts: {kl:.2f} nats a sequence.",
    ]
    return "\n".join(lines)


def _limits(manifest: Manifest, test: Mapping[str, Any], data: Data, max_new_tokens: int) -> str:
    limits = [
        f"It reads questions of at most {manifest.prompt['max_tokens']} tokens; it was evaluated with answers of at "
        f"most {max_new_tokens}.",
        "Other tasks, languages and ways of asking were neither trained nor measured.",
        "A right final number is no right derivation: the steps were not checked.",
        "Nothing was done about safety, bias or refusal; it has those of its start.",
    ]
    if data.source == "generator":
        limits.insert(1, "The built-in problems come from a few templates: their accuracy says nothing about GSM8K.")
    if test["p_value"] > SIGNIFICANT:
        limits.insert(0, "No significant gain over its start was found on test.")
    return "\n".join(f"- {limit}" for limit in limits)

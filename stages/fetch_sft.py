"""Fetches the checkpoint to start from: `sft.source` becomes models/fetched/."""

from __future__ import annotations

from rlhf.models.preflight import Wanted
from rlhf.models.sources import fetch
from rlhf.registry.lookup import fetch_run, fetch_source
from rlhf.stage import Stage, run_stage


def main(stage: Stage) -> None:
    params = stage.params
    print(f"fetching {params.sft.source}", flush=True)
    directory = stage.output("models/fetched")
    manifest = fetch(
        params.sft.source,
        directory,
        tiny=params.sft.tiny,
        seed=params.seed,
        registry=fetch_source,
        runs=fetch_run,
        chat_template=params.sft.chat_template,
        eos_token=params.sft.eos_token,
        wanted=Wanted(
            params.prompt,
            {
                "ppo.sampling.max_new_tokens": params.ppo.sampling.max_new_tokens,
                "preferences.max_new_tokens": params.preferences.max_new_tokens,
            },
        ),
    )
    parameters, license_name = manifest.extra["parameters"], manifest.license or "not stated"
    stage.log.log_params({"fetched": {"revision": manifest.revision or "", "license": license_name}})
    stage.log.log_metrics({"parameters": parameters})
    print(f"{parameters / 1e6:.2f}M parameters, license {license_name}", flush=True)


if __name__ == "__main__":
    run_stage("fetch_sft", main)

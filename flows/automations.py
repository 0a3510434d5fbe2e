"""Tells a webhook of flow runs that failed, are late, are stuck, or whose policy the gate refused.

    python -m flows.automations URL

creates the automations on the Prefect server in PREFECT_API_URL, or renews them; they act on the server, so they tell
of a flow that was killed as well. Each message is a JSON object: what happened, the flow run, its state, its page.
A stuck run is one whose flow sends no heartbeat any more, for its process or its machine is gone: it becomes Crashed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from flows import servers
from rlhf.errors import UsageError, run_command

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.automations import Automation
    from prefect.events.schemas.automations import EventTrigger

WEBHOOK = "gsm8k-rlhf"
"""The block on the server that holds the webhook's address."""
STUCK = "stuck"
FLOWS = ("pipeline", "evaluate_registered", "promote", "rollback")
SILENCE_SECONDS = 3.5 * servers.HEARTBEAT_SECONDS
"""So long a running flow may send no heartbeat; below three periods, healthy runs are taken for dead."""
PAYLOAD = """{
  "what": "WHAT",
  "flow_run": {{ flow_run.name | tojson }},
  "state": {{ flow_run.state.name | tojson }},
  "message": {{ (event.payload.registered or flow_run.state.message or "") | tojson }},
  "page": {{ flow_run | ui_url | tojson }}
}"""


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    match list(arguments):
        case ["-h" | "--help"]:
            print((__doc__ or "").strip())
            return 0
        case [url]:
            return run_command("automations", lambda: _install(url))
        case _:
            print("automations: name the address to call: python -m flows.automations URL", file=sys.stderr)
            return UsageError.exit_code


def _install(url: str) -> None:
    if urlsplit(url).scheme not in ("http", "https"):
        raise UsageError(f"{url}: no address of a webhook: write http://... or https://...")
    servers.set_prefect_environment()
    from prefect.settings import PREFECT_API_URL

    if not (api := PREFECT_API_URL.value()):
        raise UsageError("PREFECT_API_URL is not set: name the server that runs are watched on, such as make ui's")
    servers.require_answer(api)
    for name in install(url):
        print(f"automations: {name}")


def install(url: str, flows: Collection[str] = FLOWS, silence_seconds: float = SILENCE_SECONDS) -> list[str]:
    """Creates the webhook and the automations, or brings them up to date, and returns the automations' names."""
    from prefect.automations import Automation
    from prefect.blocks.webhook import Webhook
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import CallWebhook, ChangeFlowRunState
    from pydantic import SecretStr

    block = Webhook.model_validate({"url": SecretStr(url), "headers": {"Content-Type": "application/json"}})
    identity = cast("UUID", block.save(WEBHOOK, overwrite=True))
    gone = f"no heartbeat for {silence_seconds:.0f} s: the flow's process or machine is gone"
    crash = ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=gone, force=False)
    names = []
    for what, trigger in _triggers(flows, silence_seconds).items():
        call = CallWebhook(block_document_id=identity, payload=PAYLOAD.replace("WHAT", what))
        name = f"gsm8k-rlhf: {what}"
        _put(Automation(name=name, trigger=trigger, actions=[crash, call] if what == STUCK else [call]))
        names.append(name)
    return names


def _triggers(flows: Collection[str], silence_seconds: float) -> dict[str, EventTrigger]:
    """When each automation acts, once for each run of `flows`."""
    from prefect.events.schemas.automations import EventTrigger, Posture

    from tasks.events import GATE_REFUSED

    def states(*names: str) -> set[str]:
        return {f"prefect.flow-run.{name}" for name in names}

    def trigger(expect: set[str], **options: object) -> EventTrigger:
        settings = {
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": list(flows)},
            "for_each": {"prefect.resource.id"},
            "expect": expect,
            "posture": Posture.Reactive,
            "threshold": 1,
        }
        return EventTrigger.model_validate(settings | options)

    heartbeat = states("heartbeat")
    lasting = states("Completed", "Failed", "TimedOut", "Crashed", "Cancelled", "Paused", "Suspended")
    silence = {"posture": Posture.Proactive, "after": heartbeat, "within": timedelta(seconds=silence_seconds)}
    return {
        "failed": trigger(states("Failed", "TimedOut", "Crashed")),
        "late": trigger(states("Late")),
        STUCK: trigger(heartbeat | lasting, **silence),
        "refused by the gate": trigger({GATE_REFUSED}),
    }


def _put(automation: Automation) -> None:
    """Creates the automation, or replaces the one of its name."""
    try:
        automation.id = cast("Automation", type(automation).read(name=automation.name)).id
    except ValueError:
        automation.create()
    else:
        automation.update()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

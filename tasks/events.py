"""What the pipeline tells Prefect beyond the states of its runs, for automations to act on."""

from __future__ import annotations

from prefect.events import emit_event
from prefect.runtime import flow_run

GATE_REFUSED = "gsm8k-rlhf.gate.refused"
"""The registry's gate refused a new policy: its flow run completes, and the champion stays."""
REFUSED, KNOWN = "refused by the gate", "registered already"
"""What register's last line says of a policy."""


def announce_refusal(last_line: str) -> bool:
    """Emits GATE_REFUSED where register's last line tells of it; only once for each policy. Whether it did."""
    if REFUSED not in last_line or KNOWN in last_line or not flow_run.id:
        return False
    resource = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.resource.name": flow_run.name or ""}
    emit_event(GATE_REFUSED, resource, payload={"registered": last_line.removeprefix("register: ")})
    return True

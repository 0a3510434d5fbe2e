"""Prefect flows: what runs, in which order, and what a person sees of it."""

from rlhf.redaction import redact_logs

redact_logs()  # here, so that no way to start a flow misses it

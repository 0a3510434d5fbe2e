"""Prefect tasks: one DVC stage each, run under a supervisor, and the summary at the end."""

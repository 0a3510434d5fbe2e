"""Prefect flows: what runs, in which order, and what a person sees of it."""

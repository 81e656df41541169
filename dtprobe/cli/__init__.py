"""The verbs: parse, call, print. No logic."""

from dtprobe.cli import scenarios, jobs, nightly, matrix, history, serve, doctor  # in the order of `--help`  # isort: skip
from dtprobe.cli.base import app

__all__ = ["app", "doctor", "history", "jobs", "matrix", "nightly", "scenarios", "serve"]

"""The verbs: parse, call, print. No logic."""

from dtprobe.cli import scenarios, jobs, nightly, serve, doctor  # in the order of `--help`  # isort: skip
from dtprobe.cli.base import app

__all__ = ["app", "doctor", "jobs", "nightly", "scenarios", "serve"]

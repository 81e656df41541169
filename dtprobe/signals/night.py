"""The signals of one night, as `dtprobe nightly` asks for them: checked before it, served during it, sent after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtprobe.clock import Clock
from dtprobe.errors import DtprobeError, UsageError
from dtprobe.signals import metrics, webhook
from dtprobe.signals.serve import Exporter

if TYPE_CHECKING:
    from dtprobe.suite import Follower

MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Signals:
    """What is asked for; None is not asked for. `secret` signs the webhook's messages."""

    file: Path | None = None
    port: int | None = None
    webhook: str | None = None
    secret: str = ""
    budget_s: float | None = None

    def check(self) -> None:
        """Raises UsageError, before anything runs, for what could only fail in the morning."""
        if self.file is not None:
            metrics.check(self.file)
        if self.port is not None and not 0 <= self.port <= MOST_PORT:
            raise UsageError(f"--metrics-port {self.port}: no port", f"give one from 1 to {MOST_PORT}, or 0 for any")
        if self.webhook is not None:
            webhook.check(self.webhook)

    @contextmanager
    def following(self, then: Follower) -> Iterator[tuple[Follower, str]]:
        """The follower to give to the suite, and where it is served ("" where it is not)."""
        if self.port is None:
            yield then, ""
            return
        with Exporter(self.port, then, budget_s=self.budget_s) as exporter:
            yield exporter, exporter.url

    def after(self, data: Mapping[str, Any], folder: Path, *, out: Path, clock: Clock | None = None) -> list[str]:
        """Write the file and tell the receiver: lines to say. A signal that fails says so and changes nothing of the night.

        `folder` is the night's own, `<out>/suites/<id>`.
        """
        said = []
        if self.file is not None:
            try:
                metrics.write(self.file, data, night=folder.name, last_good_ns=metrics.last_good_ns(folder.parent))
            except DtprobeError as error:
                said.append(f"metrics were not written: {error}")
        if self.webhook is not None:
            told = webhook.announce(out, data, url=self.webhook, night=folder.name, secret=self.secret, clock=clock)
            if told.delivered:
                said.append(f"webhook: {told.delivered} new regression(s) told to {webhook.shown(self.webhook)}")
            if told.problem:
                said.append(f"webhook: {told.problem}")
        return said

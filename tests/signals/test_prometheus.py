"""A real Prometheus and a real node_exporter read what a night says of itself."""

from __future__ import annotations


class Heard:
    """A follower that keeps what it is told."""

    def __init__(self):
        self.heard = []

    def begin(self, total):
        self.heard.append(total)

    def started(self, scenario):
        self.heard.append(scenario)

    def ended(self, row):
        self.heard.append(row.status)

    def end(self):
        self.heard.append("end")

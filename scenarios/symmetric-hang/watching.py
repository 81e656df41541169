"""dtprobe's own hang judgement (`dtprobe watch`) as a recorder of a scenario: what it confirms is a suspicion of the run.

Shared with `honest-jitter`. `dtprobe.probes.hang` is imported when a recorder is made, so that listing scenarios stays light.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dtprobe import Unavailable

if TYPE_CHECKING:
    from dtprobe.probes import Recorder, Where


@dataclass(frozen=True, kw_only=True)
class Watching:
    """A collective open for `suspect_s`, or half of its own timeout where that is shorter, is suspected; `confirm_s` later confirmed."""

    name: ClassVar[str] = "watch"
    heavy: ClassVar[bool] = False

    suspect_s: float
    confirm_s: float = 0.5
    interval_s: float = 0.25

    def probe(self) -> Unavailable | None:
        from dtprobe import doctor

        return doctor.capability("torch>=2.9")

    def recorder(self, where: Where) -> Recorder:
        from dtprobe.probes.hang import HangWatch, Watched

        watched = Watched(told=_nothing, resumed=_nothing, bundled=_nothing)
        watch = HangWatch(watched=watched, suspect_s=self.suspect_s, confirm_s=self.confirm_s, interval_s=self.interval_s)
        return watch.recorder(where)


def _nothing(*_: object) -> None:
    """What is confirmed goes into the run as a suspicion; nobody else is told."""

"""What the history says has become worse: verdicts, metrics, what recorders cost, scenarios that are gone; since when, and beside what else.

from dtprobe.store import history
from dtprobe.trends import regressions, rows, series

regressions(history(Path("runs")))
"""

from dtprobe.trends.found import Regression
from dtprobe.trends.search import regressions, suspects
from dtprobe.trends.series import Series, change_points, rows, series

__all__ = ["Regression", "Series", "change_points", "regressions", "rows", "series", "suspects"]

"""The stated confidence is monotone and the one that the recorded first sights ask for."""

from __future__ import annotations

import csv
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from dtprobe.diagnose.calibration import calibrated, fitted

ROOT = Path(__file__).resolve().parents[2]
SIGHT = ROOT / "tests" / "corpus" / "logs" / "first-sight.csv"


def seen() -> list[tuple[float, bool]]:
    with SIGHT.open(newline="") as stream:
        return [(float(row["likelihood"]), row["mode_right"] == "1") for row in csv.DictReader(stream)]


def test_a_likelier_answer_is_never_stated_with_less_confidence():
    stated = [calibrated(step / 100) for step in range(101)]
    assert stated == sorted(stated)
    assert stated[0] > 0
    assert stated[-1] < 1


def test_the_map_in_use_is_the_one_that_the_benchmark_fits():
    spec = spec_from_file_location("postmortem_calibration", ROOT / "benchmarks" / "postmortem_calibration.py")
    benchmark = module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    assert benchmark.fit(seen()) == pytest.approx(fitted(), abs=0.051)


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.75), (0.75, 0.9), (0.9, 1.0)])
def test_answers_are_right_about_as_often_as_stated(low, high):
    inside = [(calibrated(likelihood), right) for likelihood, right in seen() if low <= calibrated(likelihood) < high]
    stated = sum(sure for sure, _ in inside) / len(inside)
    assert sum(right for _, right in inside) / len(inside) == pytest.approx(stated, abs=0.12)

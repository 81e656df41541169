"""The metrics of a night that ended: names, values and bounds, and what a real Prometheus reads of them."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.signals import metrics

END_S = 1_796_000_600.0


def series(data, **more):
    """(name, labels) -> value of all that is exported."""
    text = metrics.exposition(metrics.families(data, **more)).decode()
    return {(one.name, frozenset(one.labels.items())): one.value for family in parsed(text) for one in family.samples}


def value(found, name, **labels):
    return found[name, frozenset(labels.items())]


def test_a_summary_becomes_counts_moments_and_the_state_of_each_scenario(kit):
    rows = (
        kit.row("a"),
        kit.row("b", "flaky", runs=[{}] * 6),
        kit.row("c", "not-as-expected", "refuted", mitigation="failed"),
        kit.row("d", "unsupported", "", expected=None),
    )
    found = series(
        kit.summary(*rows, regressions=[kit.regression("c"), kit.regression("c", kind="verdict")], well=False, budget_s=900),
        night="20261130T020000Z-7",
        last_good_ns=int(1.7e18),
    )
    counts = {dict(labels)["status"]: n for (name, labels), n in found.items() if name == "dtprobe_night_scenarios"}
    assert counts == dict.fromkeys(metrics.STATUSES, 0) | {"as-expected": 1, "flaky": 1, "not-as-expected": 1, "unsupported": 1}
    assert value(found, "dtprobe_night_success") == 0
    assert value(found, "dtprobe_night_end_timestamp_seconds") == END_S
    assert value(found, "dtprobe_night_last_success_timestamp_seconds") == 1.7e9
    assert value(found, "dtprobe_night_budget_seconds") == 900
    assert (
        value(found, "dtprobe_night_regressions", kind="verdict") == 1
        and value(found, "dtprobe_night_regressions", kind="gone") == 0
    )
    assert value(found, "dtprobe_night_scenario_runs", scenario="b") == 6
    hot = {
        dict(labels)["status"]
        for (name, labels), n in found.items()
        if name.endswith("scenario_status") and n and ("scenario", "c") in labels
    }
    assert hot == {"not-as-expected"}
    verdict = {"scenario": "c", "verdict": "refuted", "expected": "reproduced", "mitigation": "failed"}
    assert value(found, "dtprobe_night_scenario_verdict_info", **verdict) == 1
    info = {"night": "20261130T020000Z-7", "dtprobe": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7", "host": "node-a"}
    assert value(found, "dtprobe_night_info", **info) == 1


def test_a_night_without_budget_or_good_night_exports_neither(kit):
    names = {name for name, _ in series(kit.summary(well=False))}
    assert not names & {"dtprobe_night_budget_seconds", "dtprobe_night_last_success_timestamp_seconds"}
    assert value(series(kit.summary()), "dtprobe_night_last_success_timestamp_seconds") == END_S


def test_the_number_of_series_is_bounded_and_what_is_left_out_is_counted(kit):
    many = 3 * metrics.MOST_SCENARIOS
    found = series(
        kit.summary(
            *(kit.row(f"s{n}" + "x" * 4000) for n in range(many)), regressions=[kit.regression(f"s{n}") for n in range(many)]
        )
    )
    each = [key for key in found if key[0] == "dtprobe_night_scenario_duration_seconds"]
    assert len(each) == metrics.MOST_SCENARIOS and max(len(text) for _, labels in found for _, text in labels) <= 120
    assert value(found, "dtprobe_night_scenarios", status="as-expected") == many
    assert value(found, "dtprobe_night_regressions", kind="metric") == many
    assert value(found, "dtprobe_night_series_left_out") == 2 * many - metrics.MOST_SCENARIOS - metrics.MOST_REGRESSIONS


def test_hostile_names_are_values_of_labels_and_nothing_else(kit):
    name = 'a"} 7\ndtprobe_night_success 1 # \\'
    found = series(kit.summary(kit.row(name), well=False))
    assert value(found, "dtprobe_night_scenario_duration_seconds", scenario=name) == 2.5
    assert value(found, "dtprobe_night_success") == 0


_HOLLOW = {
    "scenarios": [],
    "versions": {},
    "machine": {"host": "", "python": ""},
    "began_ns": 0,
    "took_s": 0.0,
    "well": False,
    "interrupted": False,
}
_UNSURE = {"scenario": "a", "metric": "m", "arm": "fault", "kind": "metric", "confidence": None}


@pytest.mark.parametrize(
    "data", [{}, {"scenarios": 7}, {"scenarios": [{}], "versions": {}}, {**_HOLLOW, "regressions": [_UNSURE]}]
)
def test_what_is_no_summary_is_refused_in_one_line(data):
    with pytest.raises(UsageError, match=r"give the summary\.json"):
        metrics.families(data)


def test_the_file_is_replaced_whole_or_stays(kit, tmp_path):
    file = tmp_path / "dtprobe.prom"
    metrics.write(file, kit.summary())
    first = file.read_text()
    with pytest.raises(UsageError):
        metrics.write(file, {})
    assert file.read_text() == first and "dtprobe_night_success 1.0" in first
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    with pytest.raises(DtprobeError, match="cannot be written"):
        metrics.write(tmp_path / "gone" / "dtprobe.prom", kit.summary())


@pytest.mark.parametrize(
    ("name", "says"), [("night.txt", "end in .prom"), ("no/such.prom", "no folder"), ("dir.prom", "is a folder")]
)
def test_a_place_for_no_file_is_said_before_the_night(tmp_path, name, says):
    (tmp_path / "dir.prom").mkdir()
    with pytest.raises(UsageError, match=says):
        metrics.check(tmp_path / name)


def test_the_last_good_night_is_found_among_bad_and_broken_ones(kit, tmp_path):
    assert metrics.last_good_ns(tmp_path) is None
    for name, text in {
        "20261128T020000Z-1": json.dumps(kit.summary(began_ns=1)),
        "20261129T020000Z-1": json.dumps(kit.summary(began_ns=5 * 10**9, took_s=2)),
        "20261130T020000Z-1": json.dumps(kit.summary(well=False)),
        "20261130T030000Z-1": "{",
        "20261130T040000Z-1": "[]",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(text)
    assert metrics.last_good_ns(tmp_path) == 7 * 10**9


@pytest.mark.needs("prometheus", "command:prometheus-node-exporter")
def test_a_real_prometheus_reads_the_file_through_a_real_node_exporter(kit, tmp_path):
    folder = tmp_path / "textfiles"
    folder.mkdir()
    file = folder / "dtprobe.prom"
    metrics.write(file, kit.summary(kit.row("a"), kit.row("b", "flaky"), regressions=[kit.regression("a")], budget_s=500))
    (port,) = kit.free_ports(1)
    node = (
        "prometheus-node-exporter",
        "--collector.disable-defaults",
        "--collector.textfile",
        f"--collector.textfile.directory={folder}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    with kit.process(tmp_path, *node), kit.prometheus(tmp_path, {"node": port}) as server:
        kit.until(lambda: server.value("dtprobe_night_success") == 1, "the file was not scraped")
        assert server.value("node_textfile_scrape_error") == 0
        assert server.query('dtprobe_night_scenario_status{status="flaky"} == 1') == [
            ({"scenario": "b", "status": "flaky"}, 1.0)
        ]
        assert server.value("sum(dtprobe_night_regressions)") == 1
        assert server.value("dtprobe_night_duration_seconds > dtprobe_night_budget_seconds") == 600
        metrics.write(file, kit.summary(kit.row("a"), well=False))
        kit.until(lambda: server.value("dtprobe_night_success") == 0, "the next night was not scraped")
        kit.until(
            lambda: not server.query('dtprobe_night_scenario_duration_seconds{scenario="b"}'), "a scenario that is gone froze"
        )
        file.unlink()
        kit.until(lambda: server.query("absent(dtprobe_night_success)"), "a file that is gone froze")

"""The report as files: cluster.json for programs, cluster.html for people, one file that needs nothing else."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dtprobe.doctor.cluster.heat import STEPS, grids
from dtprobe.doctor.cluster.verdict import ClusterReport
from dtprobe.errors import UsageError
from dtprobe.report import engine, words


def write(report: ClusterReport, folder: Path) -> Path:
    """Write cluster.json and cluster.html into `folder`, which is made; the page's path. UsageError where it cannot be written."""
    page = folder / "cluster.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cluster.json").write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
        page.write_text(render(report), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror or error}", "name a folder that can be written") from None
    return page


def render(report: ClusterReport) -> str:
    """The page."""
    began = f"{datetime.fromtimestamp(report.started_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return (
        engine.for_html()
        .get_template("cluster.html.j2")
        .render(
            report=report,
            began=began,
            grids=grids(report),
            steps=STEPS,
            comparisons=_comparisons(report),
            per_rank=_per_rank(report),
            number=words.number,
        )
    )


def _comparisons(report: ClusterReport) -> list[tuple[str, list[tuple[str, str]]]]:
    """Versions and variables -> (value, the ranks that have it), those in which ranks differ first."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    names = list(report.ranks[0].versions) if report.ranks else []
    variables = sorted({name for each in report.ranks for name in each.environment})
    for name, values in [
        *((name, {each.rank: each.versions.get(name) for each in report.ranks}) for name in names),
        *((name, {each.rank: each.environment.get(name) for each in report.ranks}) for name in variables),
    ]:
        kinds = dict.fromkeys(values.values())
        if list(kinds) == [None]:
            continue
        rows = [
            (
                kind or "none",
                words.ranks(rank for rank, one in values.items() if one == kind) if len(kinds) > 1 else "all ranks",
            )
            for kind in kinds
        ]
        found.append((name, rows))
    return sorted(found, key=lambda each: len(each[1]) == 1)


def _per_rank(report: ClusterReport) -> list[dict[str, Any]]:
    offsets = {each.rank: each for each in report.offsets}
    rows = []
    for each in report.ranks:
        offset = offsets.get(each.rank)
        soft = {name: limit.soft for name, limit in each.limits.items()}
        rows.append(
            {
                "rank": each.rank,
                "host": each.host,
                "pid": each.pid,
                "cells": [
                    ("gloo", f"{each.network.gloo_interface or 'none'} {each.network.gloo_address or ''}".strip()),
                    (
                        "clock",
                        f"{words.number(offset.offset_s, 's')} +- {words.number(offset.uncertainty_s, 's')}" if offset else "-",
                    ),
                    ("/dev/shm free", words.number(each.shm.free, "B") if each.shm else "none"),
                    ("nofile", words.number(soft["nofile"]) if soft["nofile"] is not None else "unlimited"),
                    ("nproc", words.number(soft["nproc"]) if soft["nproc"] is not None else "unlimited"),
                    ("memlock", words.number(soft["memlock"], "B") if soft["memlock"] is not None else "unlimited"),
                    ("memory free", words.number(each.memory.available, "B")),
                    ("GPU", each.gpu.name if each.gpu else "none"),
                ],
            }
        )
    return rows

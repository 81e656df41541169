"""Jobs of two gloo ranks in which each fault aims at a group of its own: many faults, few processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

WORK = """
import datetime, json
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch
import torch.distributed as dist
torch.set_num_threads(1)
facts = {}

def limit(seconds):
    return datetime.timedelta(seconds=seconds)

def group(name, seconds=60):
    return dist.new_group(group_desc=name, timeout=limit(seconds))

def caught(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

store = f"file://{shared}/store-{os.environ.get('DTPROBE_RUN_ID')}"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit(60))
"""

END = """
say(json.dumps(facts))
os._exit(0)
"""

Facts = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def facts(job: Any) -> Facts:
    """Runs two ranks of that code under the faults; what each has put into `facts`."""

    def run(texts: Sequence[str] | str, code: str) -> list[dict[str, Any]]:
        job.run(texts, job.command(WORK + code + END), timeout_s=200)
        said = [job.said(rank) for rank in (0, 1)]
        assert all(said), job.log()
        return [json.loads(lines[-1]) for lines in said]

    return run

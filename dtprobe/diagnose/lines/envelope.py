"""What launchers, containers and loggers put before a line: whose it is and when, layer by layer, and the text inside.

The rank taken here is the one that printed the line. Whom a line is about is what signatures say.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from dtprobe.diagnose.lines import stamps
from dtprobe.diagnose.lines.habits import NO_HABITS, Habits

_LAYERS = 8


@dataclass(slots=True)
class Envelope:
    """What was read so far. `text` is what remains; `bare` whether `t_ns` came from a stamp without a zone."""

    text: str
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    t_ns: int | None = None
    bare: bool = True
    labelled: bool = False


# torch.distributed ([rank3]:), Lightning ([rank: 3]), TensorRT-LLM ([RANK 3]), hand-made ones (rank 3: / rank0 | / (rank 3))
_RANK = re.compile(
    r" ?(?:[\[(<](?i:rank)(?: ?[=:] ?| |_)?(?P<in>\d{1,6})[\])>]:? ?(?:\|\|? )?|(?i:rank)(?: ?= ?| |_)?(?P<out>\d{1,6})(?::(?= |\[|$)| ?\|) ?)"
)
_ROLE = re.compile(r"\[(?!rank)[A-Za-z]\w*?(?P<local>\d{1,4})\]:")
_MPI = re.compile(r"\[(?:(?:[\w.-]+@)?\d+,)?(?P<rank>\d{1,7})\]<(?:stdout|stderr|stddiag)>: ?")
_POD = re.compile(r"\[(?:pod/)?(?P<host>[a-z0-9][a-z0-9.-]*)/[a-z0-9][a-z0-9.-]*\] ")
_CRI = re.compile(r"std(?:out|err) [FP] |[0-9a-f]{6,64} (?=\[rank)")
_ACTOR = re.compile(
    r"\((?P<name>[\w.:<>\[\]/ =-]{1,80}?)(?:,? ?pid=(?P<pid>\d{1,10}))?(?:,? ?(?:ip|node_ip|host)=(?P<host>[\w.:-]+))?\)(?: \[repeated [^\]]*\])? ?"
)
_ACTOR_RANK = re.compile(r"\b(?:world_)?rank=(\d{1,6})|^(?:Vllm)?Worker_TP(\d{1,4})(?:_EP\d+)?$")
_NCCL = re.compile(r"(?P<host>[A-Za-z0-9][\w.-]*):(?P<pid>\d{1,10}):\d{1,10} \[-?\d{1,3}\] (?:[\w./-]+:\d+ )?NCCL ")
_KERNEL = re.compile(r"(?P<host>[A-Za-z0-9][\w.-]*) kernel: (?:\[ *\d+\.\d+\] ?)?")
# a daemon's name has its process id, or is one of those that print none: any other word before a colon is a program's own
_DAEMON = re.compile(
    r"(?P<host>[A-Za-z0-9][\w.-]*) "
    r"(?=(?:[a-zA-Z][\w./@-]*\[\d+\]|systemd[\w-]*|kubelet|containerd|dockerd|slurm\w*|nvidia-[\w-]+|nv-[\w-]+|sshd|sudo|cron|chronyd|ntpd|audit\w*): )"
)
_SLURMD = re.compile(r"slurmstepd-(?P<host>[\w.-]+): |slurmd\[(?P<other>[\w.-]+)\]: ")
# c10d's own prefix is the rank within a group: it names the process only for the default group, or where no group is named
_OWN = re.compile(
    r"(?:\[[IWEF][^\]]*\] |  what\(\):\s+)?\[(?:PG (?:ID )?0 (?:PG GUID 0)?(?:\([^)]*\))? ?)?Rank (?P<rank>\d{1,6})\]"
)
_TENSOR_PARALLEL = re.compile(r":\d\d(?:[.,]\d+)? TP(\d{1,4})\] ?$")  # beside a DP or PP number it is no rank
_GRAVE = re.compile(r"WARN(?:ING)?|ERROR|CRITICAL")
_OF_TRACEBACK = re.compile(
    r"\s|$|Traceback \(|[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Iteration|Warning)\b|During handling|The above exc"
)
_TIMES = ("time", "timestamp", "@timestamp", "ts", "asctime", "datetime")
_TEXTS = ("log", "message", "msg", "text", "event")


def opened(text: str, habits: Habits, calendar: stamps.Calendar) -> Envelope:
    """The line, its envelope taken off."""
    found = Envelope(text)
    for _ in range(_LAYERS):
        if _layer(found, calendar):
            continue
        if not _label(found, habits):
            break
        habits = habits.then or NO_HABITS
    if found.t_ns is None and (stamp := stamps.in_text(found.text)) is not None:
        found.t_ns, found.bare = calendar.place(stamp), stamp.bare
    _own(found)
    return found


def _layer(found: Envelope, calendar: stamps.Calendar) -> bool:
    text = found.text
    first = text[:1]
    if first == "{" and text.rstrip().endswith("}"):
        return _structured(found, calendar)
    if first and first in "[(< rR" and (match := _RANK.match(text)):
        found.rank = int(match["in"] or match["out"])
        found.text = text[match.end() :]
        return True
    if first == "[":
        if match := _MPI.match(text):
            found.rank = int(match["rank"])
        elif match := _POD.match(text):
            found.host = match["host"]
        elif match := _ROLE.match(text):
            found.local_rank = int(match["local"])
        if match:
            found.text = text[match.end() :]
            return True
    if (
        first == "("
        and (match := _ACTOR.match(text))
        and (match["pid"] or match["host"] or match["name"] in ("raylet", "gcs_server"))
    ):
        _actor(found, match)
        return True
    stamp = stamps.at_start(text)
    if stamp is not None:
        if found.t_ns is None or (found.bare and not stamp.bare):
            found.t_ns, found.bare = calendar.place(stamp), stamp.bare
        else:
            calendar.place(stamp)
        if tensor := _TENSOR_PARALLEL.search(text, 0, stamp.end):
            found.rank = int(tensor[1]) if found.rank is None else found.rank
        found.text = text[stamp.end :]
        if match := _CRI.match(found.text):
            found.text = found.text[match.end() :]
        elif match := _KERNEL.match(found.text) or _DAEMON.match(found.text):
            found.host = match["host"]
            found.text = found.text[match.end() :]
        return True
    if match := _NCCL.match(text):
        found.host, found.pid = found.host or match["host"], int(match["pid"])
    elif match := _SLURMD.match(text):
        found.host = found.host or match["host"] or match["other"]
    return False


def _label(found: Envelope, habits: Habits) -> bool:
    match = habits.label.match(found.text) if habits.label is not None else None
    if match is None:
        return False
    part = match.groupdict()
    host = part.get("host") or (part.get("own", part["label"]) if habits.means == "host" else None)
    if host:
        found.host = found.host or host
    if habits.means == "rank" and found.rank is None:
        found.rank = int(part["label"])
    elif habits.means == "local" and found.local_rank is None:
        found.local_rank = int(part["label"])
    text = found.text[match.end() :]
    if (level := _GRAVE.search(part.get("head") or "")) and not _OF_TRACEBACK.match(text):
        text = f"{level[0]}: {text}"
    found.text, found.labelled = text, True
    return True


def _actor(found: Envelope, match: re.Match[str]) -> None:
    if match["pid"]:
        found.pid = int(match["pid"])
    found.host = match["host"] or found.host
    if rank := _ACTOR_RANK.search(match["name"]):
        found.rank = int(rank[1] or rank[2])
    found.text = found.text[match.end() :]


def _own(found: Envelope) -> None:
    """The rank that the text says it was printed by, where no launcher said it."""
    if found.rank is None and (match := _OWN.match(found.text)):
        found.rank = int(match["rank"])


def _structured(found: Envelope, calendar: stamps.Calendar) -> bool:
    """A line of a log driver or a JSON logger: its message, time and rank."""
    try:
        record = json.loads(found.text)
    except (ValueError, RecursionError):
        return False
    message = next((record[name] for name in _TEXTS if isinstance(record.get(name), str)), None)
    if message is None or not any(name in record for name in _TIMES):
        return False
    for name in _TIMES:
        value = record.get(name)
        if isinstance(value, str) and (stamp := stamps.at_start(value + " ")) is not None:
            found.t_ns, found.bare = calendar.place(stamp), stamp.bare
        elif isinstance(value, float) and 1e9 < value < 1e10:
            found.t_ns, found.bare = int(value * 1e9), False
        else:
            continue
        break
    found.rank = _number(record, "rank", "global_rank", found.rank)
    found.local_rank = _number(record, "local_rank", "local_rank", found.local_rank)
    found.pid = _number(record, "pid", "process", found.pid)
    host = record.get("host") or record.get("hostname")
    found.host = host if isinstance(host, str) else found.host
    found.text = message.rstrip("\n")
    return True


def _number(record: dict[str, Any], name: str, other: str, default: int | None) -> int | None:
    value = record.get(name, record.get(other))
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9 else default

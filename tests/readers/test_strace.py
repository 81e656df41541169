"""strace's forms, recorded and made up."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprobe.errors import UsageError
from dtprobe.readers import strace_lines
from dtprobe.readers.artifact import Problem, ReaderError
from dtprobe.readers.strace import SCHEMA, read_strace

CORPUS = Path(__file__).parents[1] / "corpus" / "strace"
FORMS = sorted(path.name for path in CORPUS.glob("*.txt"))
FOLLOWING = [name for name in FORMS if name != "none.txt"]


def read(tmp_path: Path, text: str | bytes, name: str = "strace.txt", **options: object) -> tuple[pd.DataFrame, list[Problem]]:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    problems: list[Problem] = []
    return SCHEMA.check(read_strace(path, problems=problems, **options)), problems  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_calls(name: str) -> None:
    problems: list[Problem] = []
    frame = SCHEMA.check(read_strace(CORPUS / name, problems=problems))
    assert {one.kind for one in problems} <= {"clock"}
    failed = frame[frame["errno"] == "ENOENT"]
    assert failed["path"].tolist()[-2:] == ['/nope/a,b(c) = "d"', "/nope/caf\u00e9"]
    assert (failed["result"] == "-1").all()
    received = frame[frame["name"] == "recvfrom"].iloc[0]
    assert received["args"].endswith('"hi, \\"there", 10, 0, NULL, NULL')
    assert received["result"] == "10"
    sleeps = frame[frame["name"] == "clock_nanosleep"]
    assert sleeps["errno"].dropna().tolist() == ["ERESTARTNOHAND"]
    assert sleeps[sleeps["errno"].notna()]["result"].isna().all()
    assert "SIGALRM" in frame[frame["kind"] == "signal"]["name"].tolist()
    assert not frame["args"].str.contains("unfinished|resumed", regex=True).any()
    assert frame[~frame["complete"]]["name"].tolist() == ["exit_group"]
    assert frame["line"].is_monotonic_increasing


@pytest.mark.parametrize("name", FOLLOWING)
def test_followed_tasks_have_their_thread_and_process(name: str) -> None:
    frame = read_strace(CORPUS / name)
    sent = frame[frame["name"] == "sendto"].iloc[0]
    main = frame[frame["name"] == "recvfrom"].iloc[0]
    child = frame[(frame["name"] == "execve") & (frame["path"] == "/bin/sh")].iloc[0]
    assert sent["tid"] != main["tid"] == main["pid"] == sent["pid"]
    assert child["tid"] == child["pid"] != main["pid"]
    assert frame["tid"].notna().all()
    exits = frame[frame["kind"] == "exit"]
    assert sorted(exits["name"]) == ["SIGTERM", "exited", "exited"]


@pytest.mark.parametrize("name", FORMS)
def test_times_are_those_that_the_form_has(name: str) -> None:
    frame = read_strace(CORPUS / name)
    assert frame["t_ns"].notna().all() == ("ttt" in name)
    assert frame["since_first_s"].notna().all() == (name not in ("f.txt", "f-stderr.txt", "none.txt"))
    assert frame["duration_s"].notna().any() == ("-T" in name)
    if "ttt" in name:
        between = (frame["t_ns"] - frame["t_ns"].iloc[0]) / 1e9
        assert (between - frame["since_first_s"]).abs().max() < 1e-6
    if name in ("f-tt.txt", "f-ttt.txt", "f-r.txt"):
        assert 0.1 < frame["since_first_s"].max() < 60


def test_the_name_of_a_separate_file_gives_the_pid() -> None:
    for path in CORPUS.glob("ff-*"):
        frame = read_strace(path)
        assert set(frame["tid"]) == {int(path.suffix[1:])}
        assert frame["t_ns"].notna().all()


def test_descriptor_paths_are_found() -> None:
    frame = read_strace(CORPUS / "f-tt-T-yy.txt")
    connected = frame[frame["name"] == "accept4"].iloc[0]
    assert connected["path"].startswith("TCP:[127.0.0.1:")
    assert connected["result"].isdigit()


def test_a_call_broken_by_the_remark_of_an_attached_process_is_whole() -> None:
    frame = read_strace(CORPUS / "f-stderr.txt")
    clone = frame[frame["name"] == "clone"].iloc[0]
    assert "SIGCHLD, child_tidptr=" in clone["args"]
    assert clone["result"].isdigit()
    lines = (CORPUS / "f-stderr.txt").read_text().split("\n")
    for row in frame.itertuples():
        assert row.name in lines[row.line - 1], "line numbers are those of the file"


def test_a_day_gives_times_of_day_a_date_and_midnights_are_counted(tmp_path: Path) -> None:
    text = "7 23:59:59.500000 close(3) = 0\n7 00:00:00.250000 close(4) = 0\n7 23:59:00.000000 close(4) = 0\n7 00:00:01.000000 close(5) = 0\n"
    zone = dt.timezone(dt.timedelta(hours=2))
    frame, problems = read(tmp_path, text, day=dt.datetime(2026, 3, 1, tzinfo=zone))
    expected = [
        dt.datetime(2026, 3, 1, 23, 59, 59, 500_000, zone),
        dt.datetime(2026, 3, 2, 0, 0, 0, 250_000, zone),
        dt.datetime(2026, 3, 2, 23, 59, 0, 0, zone),
        dt.datetime(2026, 3, 3, 0, 0, 1, 0, zone),
    ]
    assert frame["t_ns"].tolist() == [int(one.timestamp() * 1000) * 1_000_000 for one in expected]
    assert problems == []
    unknown, problems = read(tmp_path, text)
    assert unknown["t_ns"].isna().all()
    assert [one.kind for one in problems] == ["clock"]
    assert unknown["since_first_s"].tolist() == frame["since_first_s"].tolist() == [0, 0.75, 86340.5, 86401.5]


def test_a_day_without_zone_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="time zone"):
        read(tmp_path, "7 23:59:59 close(3) = 0\n", day=dt.datetime(2026, 3, 1))


@pytest.mark.parametrize(
    ("line", "name", "args", "result", "errno", "duration"),
    [
        (
            "futex(0x7f, FUTEX_WAIT, 0, NULL) = ? ERESTARTSYS (To be restarted if SA_RESTART is set) <1.5>",
            "futex",
            "0x7f, FUTEX_WAIT, 0, NULL",
            None,
            "ERESTARTSYS",
            1.5,
        ),
        ('write(1, "f(x) = 3\\n", 9)               = 9', "write", '1, "f(x) = 3\\n", 9', "9", None, None),
        ('read(3, ") = -1 EPERM (no", 12) = 12 <0.000010>', "read", '3, ") = -1 EPERM (no", 12', "12", None, 0.00001),
        (
            "mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, 3</lib/a b>, 0) = 0x7ffff7fbd000",
            "mmap",
            "NULL, 4096, PROT_READ, MAP_PRIVATE, 3</lib/a b>, 0",
            "0x7ffff7fbd000",
            None,
            None,
        ),
        ('openat(AT_FDCWD, "x", O_RDONLY) = 3</tmp/a b) = 4>', "openat", 'AT_FDCWD, "x", O_RDONLY', "3", None, None),
        (
            "poll([{fd=3, events=POLLIN}], 1, 100) = 1 ([{fd=3, revents=POLLIN}]) <0.1>",
            "poll",
            "[{fd=3, events=POLLIN}], 1, 100",
            "1",
            None,
            0.1,
        ),
        ("fcntl(3, F_GETFL) = 0x8002 (flags O_RDWR|O_LARGEFILE)", "fcntl", "3, F_GETFL", "0x8002", None, None),
        (
            "connect(3, {sa_family=AF_INET}, 16) = -1 EINPROGRESS (Operation now in progress) (INJECTED) <0.2>",
            "connect",
            "3, {sa_family=AF_INET}, 16",
            "-1",
            "EINPROGRESS",
            0.2,
        ),
        (
            "restart_syscall(<... resuming interrupted poll ...>) = 0",
            "restart_syscall",
            "<... resuming interrupted poll ...>",
            "0",
            None,
            None,
        ),
        ("exit_group(0) = ?", "exit_group", "0", None, None, None),
        ("futex(0x1, FUTEX_WAIT, 0, NULL <unfinished ...>) = ?", "futex", "0x1, FUTEX_WAIT, 0, NULL", None, None, None),
        ("syscall_0x1bb(0x1, 0x2) = -1 ENOSYS (Function not implemented)", "syscall_0x1bb", "0x1, 0x2", "-1", "ENOSYS", None),
        ("getpid() = 7\r", "getpid", "", "7", None, None),
    ],
)
def test_the_parts_of_a_call(tmp_path: Path, line: str, name: str, args: str, result: str | None, errno: str | None, duration: float | None) -> None:  # fmt: skip
    frame, problems = read(tmp_path, line + "\n")
    row = frame.astype(object).where(frame.notna(), None).iloc[0]
    assert (row["name"], row["args"], row["result"], row["errno"], row["duration_s"]) == (name, args, result, errno, duration)
    assert problems == []


def test_halves_are_joined_by_task_and_lone_ones_are_incomplete(tmp_path: Path) -> None:
    text = (
        "5 <... poll resumed>[{fd=3}], 1) = 1\n"
        "6 read(3,  <unfinished ...>\n"
        "7 read(4,  <unfinished ...>\n"
        "6 --- SIGUSR1 {si_signo=SIGUSR1} ---\n"
        '7 <... read resumed>"b", 1) = 1 <0.5>\n'
        "8 futex(0x1, FUTEX_WAIT, 0, NULL <unfinished ...>\n"
        '6 <... read resumed> "a", 1)       = 1\n'
        "9 +++ killed by SIGKILL (core dumped) +++\n"
        "9 +++ superseded by execve in pid 6 +++\n"
    )
    frame, problems = read(tmp_path, text)
    rows = frame[["line", "tid", "kind", "name", "args", "complete"]].values.tolist()
    assert rows == [
        [1, 5, "syscall", "poll", "[{fd=3}], 1", False],
        [2, 6, "syscall", "read", '3, "a", 1', True],
        [3, 7, "syscall", "read", '4, "b", 1', True],
        [4, 6, "signal", "SIGUSR1", "SIGUSR1 {si_signo=SIGUSR1}", True],
        [6, 8, "syscall", "futex", "0x1, FUTEX_WAIT, 0, NULL", False],
        [8, 9, "exit", "SIGKILL", "killed by SIGKILL (core dumped)", True],
        [9, 9, "exit", "superseded", "superseded by execve in pid 6", True],
    ]
    assert frame["duration_s"].tolist()[2] == 0.5
    assert problems == []


def test_halves_are_joined_over_the_pieces_that_a_file_is_read_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(
        f"{tid} {at}.{tid:06d} read({at},  <unfinished ...>\n"
        if at % 2
        else f'{tid} {at}.{tid:06d} <... read resumed>"x", 1) = {at - 1}\n'
        for at in range(1_700_000_001, 1_700_000_201)
        for tid in (11, 12, 13)
    )
    text = "99 1700000000.000000 futex(0x1, FUTEX_WAIT, 0, NULL <unfinished ...>\n" + text
    text += "99 1700000999.000000 <... futex resumed>) = 0\n"
    whole, _ = read(tmp_path, text)
    monkeypatch.setattr(strace_lines, "PART_BYTES", 1000)
    pieces, _ = read(tmp_path, text)
    pd.testing.assert_frame_equal(whole, pieces)
    assert whole["complete"].all() and len(whole) == 301
    assert whole["line"].is_monotonic_increasing and whole["name"][0] == "futex"
    assert (whole["args"].str.extract(r"^(\d+)", expand=False) == whole["result"])[1:].all()


def test_noise_is_counted_and_said_and_remarks_are_not_noise(tmp_path: Path) -> None:
    text = "strace: Process 7 attached\n7 close(3) = 0\nTraceback (most recent call last):\nlearning_rate(0.1\n\n7 close(4) = 0\n > /lib/libc.so.6(read+0x10) [0x10]\n"
    frame, problems = read(tmp_path, text)
    assert frame["line"].tolist() == [2, 6]
    assert [(one.kind, one.text) for one in problems] == [
        ("noise", "2 of 7 lines are not strace's; first, line 3: Traceback (most recent call last):")
    ]


def test_a_cut_last_line_is_an_incomplete_call_and_said(tmp_path: Path) -> None:
    frame, problems = read(tmp_path, '7 close(3) = 0\n7 openat(AT_FDCWD, "/etc/pas')
    assert frame["complete"].tolist() == [True, False]
    assert frame["name"].tolist() == ["close", "openat"]
    assert [one.kind for one in problems] == ["cut"]


def test_what_holds_nothing_of_strace_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ReaderError, match="is not strace output: none of its 2 lines is; first, line 1: hello"):
        read(tmp_path, "hello\nworld\n")
    with pytest.raises(ReaderError, match=r"cannot read .*: No such file"):
        read_strace(tmp_path / "absent")
    with pytest.raises(ReaderError, match="not a regular file"):
        read_strace(tmp_path)
    frame, problems = read(tmp_path, "")
    assert len(frame) == 0 and [one.kind for one in problems] == ["incomplete"]


def test_the_rank_is_the_callers_or_the_names(tmp_path: Path) -> None:
    (tmp_path / "rank3").mkdir()
    assert read(tmp_path, "close(3) = 0\n", "rank3/strace.txt")[0]["rank"].tolist() == [3]
    assert read(tmp_path, "close(3) = 0\n", "strace-rank5.txt")[0]["rank"].tolist() == [5]
    assert read(tmp_path, "close(3) = 0\n", rank=2)[0]["rank"].tolist() == [2]
    assert read(tmp_path, "close(3) = 0\n")[0]["rank"].isna().all()


def test_the_established_parser_finds_the_same_calls_where_it_can() -> None:
    """stracetools reads `-f -tt` only, and takes the first ")" with "=" after it for the end: lines with two are left out."""
    stracetools = pytest.importorskip("stracetools")
    path = CORPUS / "f-tt-T.txt"
    ours = read_strace(path)
    ours = ours[(ours["kind"] == "syscall") & ours["result"].notna() & ~ours["args"].str.contains(r"\)\s*=")]
    theirs = [event for event in stracetools.StraceParser().parse_file(str(path)) if event.event_type.value == "syscall"]
    theirs = [
        event for event in theirs if not event.return_value.startswith("?") and len(re.findall(r"\)\s*=", event.raw_line)) < 2
    ]
    mine = sorted((row.name, row.tid, row.args.replace(" ", ""), row.result, row.duration_s) for row in ours.itertuples())
    other = sorted(
        (event.name, event.pid, ",".join(event.args).replace(" ", ""), event.return_value.split()[0], event.duration)
        for event in theirs
    )
    assert mine == other
    assert len(mine) > 50


NAMES = st.sampled_from(["read", "openat", "futex", "mmap", "writev", "ioctl", "recvmsg"])
STRINGS = st.text(st.characters(codec="ascii", exclude_characters='"\\\n\r'), max_size=20).map(lambda text: f'"{text}"')
QUOTED = STRINGS | st.just(r'"a\"b\\"') | st.just(r'") = 1"...')
SCALARS = (
    st.integers(-5, 1 << 40).map(str)
    | st.integers(0, 1 << 40).map(hex)
    | st.sampled_from(["NULL", "O_RDONLY|O_CLOEXEC", "0x5 /* 2 vars */"])
)
ARGUMENT = QUOTED | SCALARS | st.lists(SCALARS, max_size=3).map(lambda some: "{a=[" + ", ".join(some) + "], n=htons(5)}")
CALLS = st.tuples(
    NAMES,
    st.lists(ARGUMENT, max_size=4).map(", ".join),
    st.integers(-1, 1 << 40),
    st.sampled_from([None, "EAGAIN", "ENOENT"]),
    st.none() | st.integers(0, 10**7).map(lambda us: us / 1e6),
    st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(CALLS, min_size=1, max_size=8), st.sampled_from(["", "epoch", "clock"]), st.booleans())
def test_what_is_written_in_straces_form_is_read_back(tmp_path_factory: pytest.TempPathFactory, calls: list, times: str, bracket: bool) -> None:  # fmt: skip
    lines, held = [], []
    for at, (name, args, result, errno, took, split) in enumerate(calls):
        tid = 4_000_000 + at
        who = f"[pid {tid:>5}] " if bracket else f"{tid:<5} "
        stamp = {"": "", "epoch": f"{1_700_000_000 + at}.{at:06d} ", "clock": f"10:00:{at:02d}.{at:06d} "}[times]
        tail = f") = {'-1 ' + errno + ' (Some (reason) text)' if errno else result}" + (
            f" <{took:.6f}>" if took is not None else ""
        )
        if split:
            lines.append(f"{who}{stamp}{name}({args} <unfinished ...>")
            held.append(f"{who}{stamp}<... {name} resumed>{tail}")
        else:
            lines.append(f"{who}{stamp}{name}({args}{tail}")
    path = tmp_path_factory.mktemp("made") / "strace.txt"
    path.write_text("\n".join(lines + held) + "\n")
    frame = read_strace(path)
    assert len(frame) == len(calls)
    for row, (name, args, result, errno, took, _) in zip(frame.itertuples(), calls, strict=True):
        assert (row.name, row.args.rstrip(", "), row.complete) == (name, args.rstrip(", "), True)
        assert row.result == ("-1" if errno else str(result))
        assert (None if pd.isna(row.errno) else row.errno) == errno
        assert (None if pd.isna(row.duration_s) else row.duration_s) == took
    assert frame["t_ns"].notna().all() == (times == "epoch")

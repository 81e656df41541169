"""The exchange among real ranks: what plain point-to-point loses, swaps or hangs on arrives, or ends with the stage named."""

from __future__ import annotations

import pytest

from dtprobe.framework.pipeline.messages import SLOTS, Channel, Message

EXCHANGE = """
import contextlib, random
from dtprobe.framework.groups import Groups
from dtprobe.framework.pipeline import Exchange, Transfer
plain(20)
NEXT, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE

def failed(call):
    begun = time.monotonic()
    try:
        call()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "took_s": time.monotonic() - begun,
                **{name: getattr(error, name, None) for name in ("stage", "ranks", "microbatch", "kind", "direction", "completed")}}
    return {"error": None, "took_s": time.monotonic() - begun}

def send(peer, microbatch, tensor, kind="forward", **more):
    return Transfer("send", peer, microbatch, kind, tensor, **more)

def receive(peer, microbatch, tensor, kind="forward", **more):
    return Transfer("receive", peer, microbatch, kind, tensor, **more)

@contextlib.contextmanager
def opened(timeout_s=10, **options):
    with Groups(timeout_s=20) as groups, Exchange(groups.create("pipeline"), timeout_s=timeout_s, **options) as exchange:
        yield exchange
"""

RANDOM = """
def schedule(seed):
    # every rank draws the same messages, each its own order of them
    common, own = random.Random(seed), random.Random(seed * 1000 + RANK)
    names = [(a, b, m, kind, slot) for a in range(SIZE) for b in range(SIZE) if a != b for m in range(3)
             for kind in ("forward", "backward") for slot in range(2)]
    names = common.sample(names, common.randint(2, 16))
    mine = [name for name in names if RANK in name[:2]]
    own.shuffle(mine)
    return mine, own

def value(name):
    return float(hash(name[:2]) % 97 + 10 * name[2] + 100 * (name[3] == "forward") + 1000 * name[4])

def buffer(name):
    return torch.full((3,), value(name) if name[0] == RANK else -1.0)
"""


def test_random_orders_neither_deadlock_nor_swap_while_untagged_messages_do(job):
    swapped = random_orders(job, schedules=50)
    assert swapped > 5


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_same_for_a_thousand_schedules(job):
    assert random_orders(job, schedules=1000, timeout_s=800) > 100


def random_orders(job, *, schedules: int, timeout_s: float = 60) -> int:
    """Run that many random schedules; in how many of them plain messages in the same order were swapped. A seed replays its schedule."""
    ranks = job(
        EXCHANGE
        + RANDOM
        + f"""
wrong = swapped = 0
with opened() as exchange:
    for seed in range({schedules}):
        mine, own = schedule(seed)
        handles, at = [], 0
        while at < len(mine):
            size = own.randint(1, 4)
            batch = [(send if a == RANK else receive)(b if a == RANK else a, m, buffer(n), kind, slot=slot)
                     for n in mine[at:at + size] for a, b, m, kind, slot in [n]]
            handles += zip(mine[at:at + size], exchange.post(batch))
            at += size
        tensors = {{name: handle.tensor for name, handle in handles}}
        own.shuffle(handles)
        for _, handle in handles:
            handle.wait()
        wrong += sum(tensors[name].tolist() != [value(name)] * 3 for name in mine if name[1] == RANK)
    dist.barrier()
    for seed in range({schedules // 2}):
        mine, own = schedule(seed)
        tensors = {{name: buffer(name) for name in mine}}
        works = [dist.isend(tensors[n], n[1]) if n[0] == RANK else dist.irecv(tensors[n], n[0]) for n in mine]
        for work in works:
            work.wait()
        swapped += any(tensors[name].tolist() != [value(name)] * 3 for name in mine)
        dist.barrier()
say(wrong=wrong, swapped=swapped, completed=exchange.completed)
""",
        world_size=3,
        environ=lambda rank: {"PYTHONHASHSEED": "0"},
        timeout_s=timeout_s,
    )
    for rank in ranks:
        assert rank.only["wrong"] == 0 and rank.only["completed"] > schedules
    return max(rank.only["swapped"] for rank in ranks)


def test_both_ends_may_send_first_where_blocking_sends_deadlock(job):
    ranks = job(
        EXCHANGE
        + """
mine, theirs = torch.full((1000,), float(RANK)), torch.empty(1000)
with opened() as exchange:
    first = exchange.post([send(NEXT, 0, mine)])
    exchange.wait(first + exchange.post([receive(BEFORE, 0, theirs)]))
    say(got=theirs[0].item())
dist.barrier()
group = dist.new_group(timeout=seconds(1))
say(**caught(lambda: dist.send(mine, NEXT, group=group)))
"""
    )
    for rank in ranks:
        assert rank.said[0]["got"] == 1 - rank.rank
        assert rank.said[1]["error"] == "RuntimeError"


def test_what_does_not_fit_raises_on_both_ends_before_anything_moves(job):
    """Each case: what stage 0 sends, then what stage 1 expects."""
    ranks = job(
        EXCHANGE
        + """
cases = [
    (torch.ones(8), torch.zeros(4)), (torch.ones(2), torch.zeros(4)), (torch.ones(4), torch.zeros(4, dtype=torch.int32)),
    (torch.ones(2, 2), torch.zeros(4)),
]
for sent, expected in cases:
    def attempt():
        with opened() as exchange:
            exchange.wait(exchange.post([receive(0, 3, expected) if RANK else send(1, 3, sent)]))
    say(**failed(attempt), untouched=expected.tolist() == torch.zeros_like(expected).tolist())
for odd in (0, 1):
    def later():
        with opened() as exchange:
            for k in range(3):
                wrong = k == 2 and odd == RANK
                tensor = torch.ones(5 if wrong else 4)
                exchange.wait(exchange.post([receive(0, k, tensor) if RANK else send(1, k, tensor)]))
    say(**failed(later))
"""
    )
    for rank in ranks:
        assert len(rank.said) == 6, rank.output
        for said in rank.said:
            assert (said["error"], said["stage"], said["ranks"]) == ("MessageMismatch", 0, [0]), said
            assert "stage 0 sends" in said["text"] and "stage 1 expects" in said["text"]
            assert said.get("untouched", True)
        assert "float32 [8]" in rank.said[0]["text"] and "int32 [4]" in rank.said[2]["text"]
        assert "micro-batch 2" in rank.said[4]["text"] and rank.said[4]["completed"] == 2


def test_plain_messages_that_do_not_fit_abort_or_arrive_as_garbage(job):
    ranks = job(
        """
plain(10)
for sent, expected in [(torch.ones(2), torch.zeros(4)), (torch.ones(4), torch.zeros(4, dtype=torch.int32)), (torch.ones(8), torch.zeros(4))]:
    dist.recv(expected, 0) if RANK else dist.send(sent, 1)
    say(got=expected.tolist())
    dist.barrier()
"""
    )
    assert ranks[1].code == -6
    assert [said["got"] for said in ranks[1].said] == [[1, 1, 0, 0], [1065353216] * 4]


def test_handles_and_buffers_live_until_the_message_is_through(job):
    ranks = job(
        EXCHANGE
        + """
other = torch.zeros(100000)
with opened() as exchange:
    if RANK == 0:
        exchange.post([send(1, 0, torch.full((100000,), 7.0))])
        gc.collect()
        dist.barrier()
        exchange.wait_all()
        a = torch.ones(100000)
        [handle] = exchange.post([send(1, 1, a)])
        a.fill_(9)
        written = failed(handle.wait)
        b = torch.zeros(8)
        exchange.post([receive(1, 2, b)])
        twice = failed(lambda: exchange.post([receive(1, 3, b[4:])]))
        sending = failed(lambda: exchange.post([send(1, 3, b[:2])]))
        again = failed(lambda: exchange.post([receive(1, 2, torch.zeros(8))]))
        exchange.post([receive(1, 4, b[:0], slot=1)])
        say(written=written, twice=twice, sending=sending, again=again)
    else:
        dist.barrier()
        exchange.wait(exchange.post([receive(0, 0, other)]))
        got = other.unique().tolist()
        exchange.wait(exchange.post([receive(0, 1, other)]))
        exchange.post([send(0, 2, torch.ones(8)), send(0, 4, torch.ones(0), slot=1)])
        say(got=got)
dist.barrier()
group = dist.new_group(timeout=seconds(1))
if RANK == 0:
    dist.isend(torch.ones(4), 1, group=group)
    gc.collect()
    dist.barrier()
    dist.barrier()
else:
    dist.barrier()
    say(**caught(lambda: dist.recv(torch.zeros(4), 0, group=group)))
    dist.barrier()
"""
    )
    said = ranks[0].only
    assert [said[name]["error"] for name in ("written", "twice", "sending", "again")] == [
        "BufferBusy",
        "BufferBusy",
        "BufferBusy",
        "UsageError",
    ]
    assert "written between post and wait" in said["written"]["text"]
    assert ranks[1].said[0]["got"] == [7.0]
    assert ranks[1].said[1]["error"] == "RuntimeError", (
        "a plain isend whose handle is dropped has become safe: say so in exchange.py"
    )


def test_what_is_sent_may_be_of_any_layout_dtype_and_with_dynamic_shapes_of_any_size(job):
    ranks = job(
        EXCHANGE
        + """
whole = torch.arange(12.0).reshape(3, 4)
kinds = [whole.t(), torch.tensor(5.0), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64) * 1j,
         torch.zeros(0, 3), torch.tensor([True, False])]
same = []
with opened() as exchange:
    for slot, tensor in enumerate(kinds):
        into = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        exchange.wait(exchange.post([receive(0, 0, into, slot=slot) if RANK else send(1, 0, tensor, slot=slot)]))
        same.append(bool(RANK == 0 or torch.equal(into, tensor)))
with opened(dynamic=True) as exchange:
    order = list(range(6))
    random.Random(RANK).shuffle(order)
    for step in range(2):
        tensors = [torch.full((k + 1, 2), float(k + 10 * step)) for k in range(6)]
        handles = exchange.post([receive(0, k, None) if RANK else send(1, k, tensors[k]) for k in order])
        exchange.wait(handles)
        same += [RANK == 0 or torch.equal(handle.tensor, tensors[k]) for handle, k in zip(handles, order)]
say(same=same)
"""
    )
    for rank in ranks:
        assert rank.only["same"] == [True] * 18


NAMED = """
pids = [None] * SIZE
dist.all_gather_object(pids, os.getpid())
def attempt(odd, fault, timeout_s):
    with opened(timeout_s) as exchange:
        # a ring of waits with one open end: each stage waits for the next, the last for the first
        exchange.wait(exchange.post([send(NEXT, 0, torch.ones(4)), receive(BEFORE, 0, torch.zeros(4))]))
        if RANK == odd:
            fault()
        exchange.wait(exchange.post([send(BEFORE, 1, torch.ones(4), "backward"), receive(NEXT, 1, torch.zeros(4), "backward")]))
        exchange.wait(exchange.post([send(BEFORE, 2, torch.ones(4), "backward"), receive(NEXT, 2, torch.zeros(4), "backward")]))
def raises():
    raise ValueError("bad batch")
def over(odd):
    # the stopped rank cannot end by itself
    if RANK == (1 if odd == 0 else 0):
        time.sleep(0.5)
        os.kill(pids[odd], signal.SIGKILL)
"""


@pytest.mark.parametrize("odd", [0, 2], ids=["the-store's-host", "another"])
def test_a_stopped_stage_is_named_by_all_others_also_by_those_that_do_not_wait_for_it(job, odd):
    ranks = job(
        EXCHANGE
        + NAMED
        + f"say(**failed(lambda: attempt({odd}, lambda: os.kill(os.getpid(), signal.SIGSTOP), 2.0)))\nover({odd})\n",
        world_size=4,
    )
    for rank in ranks:
        if rank.rank != odd:
            said = rank.only
            assert (said["error"], said["stage"], said["ranks"]) == ("StageTimeout", odd, [odd]), rank.output
            assert said["direction"] in ("send", "receive") and said["kind"] in said["text"] and "messages done" in said["text"]
            assert f"stage {odd}" in said["text"] and "look at that stage first" in said["text"] and said["took_s"] < 10
    assert ranks[odd].code == -9


def test_plain_messages_to_a_stopped_rank_time_out_naming_nobody(job):
    ranks = job(
        """
plain(1)
pids = [None] * SIZE
dist.all_gather_object(pids, os.getpid())
if RANK == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
say(**caught(lambda: dist.recv(torch.zeros(4), RANK + 1)))
if RANK == 0:
    os.kill(pids[2], signal.SIGKILL)
""",
        world_size=3,
    )
    for rank in ranks[:2]:
        assert rank.only["error"] == "RuntimeError"
        assert "rank" not in rank.only["text"] and "stage" not in rank.only["text"]


@pytest.mark.parametrize("odd", [0, 2], ids=["the-store's-host", "another"])
def test_a_killed_stage_is_named_by_all_at_once_not_at_the_deadline(job, odd):
    ranks = job(
        EXCHANGE + NAMED + f"say(**failed(lambda: attempt({odd}, lambda: os.kill(os.getpid(), signal.SIGKILL), 60)))\n",
        world_size=4,
    )
    for rank in ranks:
        if rank.rank != odd:
            assert (rank.only["error"], rank.only["stage"]) == ("StageLost", odd), rank.output
            assert rank.only["took_s"] < 30


def test_a_stage_that_raises_tells_the_others_why_and_all_give_back_what_they_held(job):
    ranks = job(
        EXCHANGE.replace("plain(20)", "plain(60)")  # the barriers outlast what the slowest rank may take
        + NAMED
        + """
with opened() as exchange:
    exchange.wait(exchange.post([send(NEXT, 0, torch.ones(4)), receive(BEFORE, 0, torch.zeros(4))]))
del exchange
dist.barrier()
before = held()
for _ in range(2):
    said = failed(lambda: attempt(2, raises, 60))
    dist.barrier()
gc.collect()
dist.barrier()
say(**said, grown=[a - b for a, b in zip(held(), before)])
dist.barrier()
""",
        world_size=4,
    )
    assert [rank.code for rank in ranks] == [0] * 4, "\n".join(rank.output for rank in ranks)
    for rank in ranks:
        said = rank.only
        assert said["grown"][0] == 0 and said["grown"][1] <= 1, rank.output
        if rank.rank == 2:
            assert (said["error"], said["text"]) == ("ValueError", "bad batch")
        else:
            assert (said["error"], said["stage"], said["ranks"]) == ("StageLost", 2, [2]), rank.output
            assert "stage 2 left with ValueError: bad batch" in said["text"] and said["took_s"] < 30


def test_what_cannot_be_is_refused_with_the_values(job):
    ranks = job(
        EXCHANGE
        + """
x = torch.ones(4)
with opened(stages=4) as exchange:
    attempts = {
        "whose": lambda: exchange.post([send(1, 0, x)]),
        "not here": lambda: exchange.post([send(1, 0, x, stage=1 - RANK)]),
        "no such": lambda: exchange.post([send(7, 0, x, stage=RANK)]),
        "no tensor": lambda: exchange.post([receive(1, 0, None, stage=RANK)]),
        "slot": lambda: exchange.post([send(1, 0, x, stage=RANK, slot=16)]),
        "kind": lambda: exchange.post([send(1, 0, x, "sideways", stage=RANK)]),
        "layout": lambda: exchange.post([receive(1, 0, torch.ones(3, 4).t(), stage=RANK)]),
        "group": lambda: Exchange(dist.group.WORLD),
        "in use": lambda: Exchange(exchange.group.inner),
    }
    say(**{name: failed(attempt) for name, attempt in attempts.items()})
say(**failed(lambda: opened(stages=2 + RANK).__enter__()))
"""
    )
    for rank in ranks:
        assert {name: said["error"] for name, said in rank.said[0].items()} == dict.fromkeys(rank.said[0], "UsageError")
        assert len(rank.said[0]) == 9
        assert rank.said[1]["error"] == "GroupMismatch" and "stages" in rank.said[1]["text"]


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_tags_of_different_messages_differ_and_fit(stages):
    messages = [
        Message(microbatch, Channel(kind, a, b, slot))
        for kind in ("forward", "backward")
        for a in range(stages)
        for b in range(stages)
        for slot in (0, SLOTS - 1)
        for microbatch in (0, 1, 1000)
    ]
    tags = {message.tag(stages) for message in messages}
    assert len(tags) == len(messages) and min(tags) > 0 and max(tags) < 2**31


def test_a_message_that_the_back_end_forgets_holds_nobody_up_once_the_exchange_has_failed(job):
    ranks = job(
        EXCHANGE
        + """
from dtprobe.framework.forwarding import ForwardedWork

def forgets(self, timeout=None):  # as gloo does with a message that it writes while the connection ends
    time.sleep(30)

def meet():
    with opened(timeout_s=60) as exchange:
        dist.barrier()
        if RANK == 1:
            raise ValueError("bad batch")
        ForwardedWork.wait = forgets
        exchange.wait(exchange.post([send(1, 0, torch.ones(4))]))

say(**failed(meet))
os._exit(0)  # a thread still waits for that message
""",
    )
    said = ranks[0].only
    assert (said["error"], said["stage"]) == ("StageLost", 1) and said["took_s"] < 20, ranks[0].output

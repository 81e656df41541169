"""Serialising over real remote procedure calls: what torch loses or runs, and what the registry keeps and refuses."""

from __future__ import annotations

import pytest

from dtprobe.errors import UsageError
from dtprobe.framework.transport.serialise import Registry

CLASSES = """
import contextlib, pickle, threading
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.rpc import api, internal
from dtprobe.framework.transport.serialise import Registry

class Tagged(torch.Tensor):
    pass

class Pair(torch.Tensor):
    # a wrapper subclass: the values are a sum of two tensors that it holds
    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, requires_grad=False)
    def __init__(self, a, b):
        self.a, self.b = a, b
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*[each.a + each.b if isinstance(each, Pair) else each for each in args], **(kwargs or {}))

class Box:
    def __init__(self, weight, note):
        self.weight, self.note, self.lock = weight, note, threading.Lock()

class Hostile:
    def __reduce__(self):
        return os.mkdir, (os.path.abspath("pwned"),)

class Unknown:
    pass

class Own(Exception):
    pass

class Service:
    def __init__(self, by):
        self.by = by
    def add(self, x):
        return x + self.by

def same(x):
    return x

def double_sum(x):
    return (x * 2).sum()

def boxed(box):
    return Box(box.weight * 3, box.note + "!")

def about(x):
    return [type(x).__name__, getattr(x, "tag", None), type(x) is Box and x.note, x.a.tolist() if isinstance(x, Pair) else None]

def gives_unknown():
    return Unknown()

def fails(kind):
    raise kind("no")

def of_reference(reference):
    return reference.to_here() + 1

def gradient(call, leaf):
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [call(leaf)])
        found = dist_autograd.get_gradients(context).get(leaf)
    return None if found is None else found.tolist()

def on(worker, function, *args):
    return rpc.rpc_sync(worker, function, args)

def start():
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rpc_timeout=20)
    rpc.init_rpc(f"w{RANK}", rank=RANK, world_size=SIZE, rpc_backend_options=options)

def stop():
    # rank 0 serves the store, which the others still read in the last steps of their shutdown
    rpc.shutdown()
    open(f"stopped{RANK}", "w").close()
    deadline = time.monotonic() + 30
    while RANK == 0 and not os.path.exists("stopped1") and time.monotonic() < deadline:
        time.sleep(0.01)

def registry():
    found = Registry()
    found.register(Box, lambda box: (box.weight, box.note), Box)
    found.register(Pair, lambda pair: (pair.a, pair.b), Pair)
    found.register_tensor(Tagged, ("tag",))
    found.allow(same, double_sum, boxed, about, gives_unknown, fails, of_reference, Service)
    return found

tagged = torch.arange(3.0).as_subclass(Tagged)
tagged.tag = "hello"
one = lambda: torch.ones(3, requires_grad=True)
"""

LOOPBACK = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def run(job, source: str, **options):
    ranks = job(CLASSES + source, environ=lambda rank: LOOPBACK, **options)
    assert all(rank.code == 0 for rank in ranks), "\n".join(
        f"rank {rank.rank} ended with {rank.code}\n{rank.output}" for rank in ranks
    )
    return ranks


WHAT = """
found = {}
if RANK == 0:
    found["subclass gradient"] = gradient(lambda x: on("w1", double_sum, (x * 1.5).as_subclass(Tagged)), one())
    found["parameter gradient"] = gradient(lambda x: on("w1", double_sum, x), torch.nn.Parameter(torch.ones(3)))
    found["class with a lock"] = caught(lambda: on("w1", boxed, Box(torch.ones(1), "n")))["error"]
    found["hostile"] = caught(lambda: on("w1", same, Hostile()))["error"]
    rpc.rpc_sync("w1", torch.add, (torch.ones(1), 1))  # one more, so that all before has run
"""


def test_without_the_part_gradients_are_lost_silently_classes_fail_and_a_message_runs_what_it_likes(job, tmp_path):
    ranks = run(job, "start()\n" + WHAT + "say(**found)\nstop()\n")
    assert ranks[0].only["subclass gradient"] is None and ranks[0].only["parameter gradient"] is None
    assert ranks[0].only["class with a lock"] == "TypeError"
    assert (tmp_path / "pwned").is_dir()


def test_with_it_gradients_equal_the_local_ones_and_what_is_not_registered_is_refused(job, tmp_path):
    ranks = run(
        job,
        "with registry().installed():\n    start()\n"
        + "".join(f"    {line}\n" for line in WHAT.splitlines())
        + """
    if RANK == 0:
        found["plain gradient"] = gradient(lambda x: on("w1", double_sum, x * 1.5), one())
        found["box gradient"] = gradient(lambda x: on("w1", boxed, Box(x * 2, "n")).weight.sum(), one())
        found["both ways"] = gradient(lambda x: on("w1", same, (x * 1.5).as_subclass(Tagged)).sum() * 2, one())
        local = one()
        ((local * 1.5) * 2).sum().backward()
        found["local"] = local.grad.tolist()
        found["about"] = [on("w1", about, x) for x in (tagged, Box(torch.ones(1), "n"), Pair(torch.ones(2), torch.ones(2)))]
        back = on("w1", same, [tagged, tagged, {"k": (Box(torch.ones(2), "deep"), torch.float16, torch.Size([1]), {1}, 1j, None)}])
        found["back"] = [back[0] is back[1], back[0].tag, back[2]["k"][0].note, str(back[2]["k"][1:])]
        found["twice"] = caught(lambda: on("w1", fails, ValueError))["error"]
        found["own"] = caught(lambda: on("w1", fails, Own))["text"][:5]
        found["service"] = rpc.remote("w1", Service, (5,)).rpc_sync().add(torch.ones(1)).tolist()
        found["reference"] = on("w1", of_reference, rpc.RRef(torch.ones(1))).tolist()
        found["async"] = [future.wait().tolist() for future in [rpc.rpc_async("w1", same, (torch.ones(1) * k,)) for k in range(3)]]
        found["then"] = rpc.rpc_async("w1", same, (torch.ones(1),)).then(lambda done: done.wait() + 1).wait().tolist()
        found["many"] = [on("w1", same, torch.arange(100_000)).sum().item()]
        found["size"] = len(api._default_pickler.serialize(torch.ones(100_000))[0])
    say(**found)
    stop()
""",
    )
    found = ranks[0].only
    assert found["local"] == found["subclass gradient"] == found["plain gradient"] == found["both ways"] == [3.0] * 3
    assert found["parameter gradient"] == [2.0] * 3 and found["box gradient"] == [6.0] * 3
    assert found["class with a lock"] is None and found["hostile"] == "Unregistered"
    assert found["about"] == [["Tagged", "hello", False, None], ["Box", None, "n", None], ["Pair", None, False, [1.0, 1.0]]]
    assert found["back"] == [True, "hello", "deep", "(torch.float16, torch.Size([1]), {1}, 1j, None)"]
    assert (found["twice"], found["own"]) == ("ValueError", "Own: ")
    assert (found["service"], found["reference"], found["async"], found["then"]) == ([6.0], [2.0], [[0.0], [1.0], [2.0]], [2.0])
    assert found["many"] == [4_999_950_000] and found["size"] < 200, "the values of a tensor went into the pickle"
    assert not (tmp_path / "pwned").exists()


REFUSALS = """
def writes(data):
    # a peer that sends what it likes
    class Pickler(internal._InternalRPCPickler):
        def serialize(self, obj):
            return data, []
    return Pickler()

mine = registry()
if RANK == 0:
    mine.register(Unknown, lambda unknown: (), Unknown)
    mine.allow(os.mkdir)
else:
    mine.register(Own, lambda own: (), Own, name="own", version=2)
if RANK == 0:
    mine.register(Own, lambda own: (), Own, name="own", version=1)
HEAD = b"dtprobe.serialise/1\\ncall\\n[]\\n"
hostile = internal.PythonUDF(os.mkdir, (os.path.abspath("pwned"),), {})
with mine.installed():
    start()
    if RANK == 0:
        found = {
            "class": caught(lambda: on("w1", same, Unknown())),
            "version": caught(lambda: on("w1", same, Own())),
            "function": caught(lambda: on("w1", os.mkdir, os.path.abspath("pwned"))),
            "answer": caught(lambda: on("w1", gives_unknown)),
            "remote": caught(lambda: rpc.remote("w1", same, (Unknown(),)).to_here()),
            "future": caught(rpc.rpc_async("w1", same, (Unknown(),)).wait),
            "lambda": caught(lambda: on("w1", lambda: 1)),
        }
        kept = api._default_pickler
        for name, data in {
            "plain pickle": pickle.dumps(hostile),
            "our head": HEAD + pickle.dumps(hostile),
            "reduce": HEAD + pickle.dumps(internal.PythonUDF(same, (Hostile(),), {})),
            "dotted": HEAD + b"\\x80\\x04\\x8c\\x13torch.distributed.rpc.api\\x8c\\x0ainspect.os\\x93.",
            "rubbish": HEAD + b"\\x80\\x04rubbish",
            "empty": HEAD,
            "references": b"dtprobe.serialise/1\\ncall\\n[[1]]\\n" + pickle.dumps(1),
            "no call": HEAD + pickle.dumps([1]),
            "far tensor": HEAD + b"\\x80\\x04\\x8c\\x06tensorK\\x63\\x86Q.",
        }.items():
            api._default_pickler = writes(data)
            found[name] = caught(lambda: on("w1", same, 1))
            api._default_pickler = kept
        say(found=found, still=on("w1", same, 1))
    stop()
"""


def test_whatever_a_peer_sends_nothing_unregistered_is_made_and_the_caller_learns_what_and_where(job, tmp_path):
    ranks = run(job, REFUSALS)
    found = ranks[0].said[0]["found"]
    for name in ("class", "function", "remote", "future", "plain pickle", "our head", "reduce", "rubbish", "empty", "no call"):
        assert found[name]["error"] == "Refused" and "rank 1" in found[name]["text"], (name, found[name])
    for name in ("references", "dotted", "far tensor"):
        assert found[name]["error"] == "Refused", (name, found[name])
    assert "__main__.Unknown" in found["class"]["text"] and found["class"]["ranks"] == [1]
    assert "posix.mkdir" in found["function"]["text"] and "posix.mkdir" in found["reduce"]["text"]
    assert found["version"]["error"] == "WrongVersion" and "version 1" in found["version"]["text"]
    assert (found["answer"]["error"], found["answer"]["ranks"]) == ("Unregistered", [1])
    assert (found["lambda"]["error"], found["lambda"]["ranks"]) == ("Unregistered", [0])
    assert ranks[0].said[0]["still"] == 1
    assert not (tmp_path / "pwned").exists()


def test_leaving_the_block_gives_torch_its_own_pickler_back():
    from torch.distributed.rpc import api, internal

    before = (internal._internal_rpc_pickler, api._default_pickler, api._invoke_rpc)
    with pytest.raises(ZeroDivisionError), Registry().installed():
        assert internal._internal_rpc_pickler is not before[0] and api._default_pickler is not before[1]
        raise ZeroDivisionError
    assert (internal._internal_rpc_pickler, api._default_pickler, api._invoke_rpc) == before


def test_a_class_or_a_name_is_registered_once():
    registry = Registry()
    registry.register(Registry, lambda each: (), Registry, name="one")
    with pytest.raises(UsageError, match="'one'"):
        registry.register(Registry, lambda each: (), Registry, name="two")
    with pytest.raises(UsageError, match="'one'"):
        registry.register(UsageError, lambda each: (), UsageError, name="one")

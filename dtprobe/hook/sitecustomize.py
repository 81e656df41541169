"""Runs in every Python process of a rank, since this folder is on its PYTHONPATH: loads the plug-ins of recorders and faults.

It acts only where DTPROBE_HOOKS names plug-ins (paths of Python files, joined as in PATH) and the process is a rank's first:
DTPROBE_RANK_FOLDER is set, or DTPROBE_FOLDER and a rank. Children of a rank (data loaders, compilers) inherit the variables
and are left alone. The plug-ins that DTPROBE_HOOKS_EVERYWHERE names act in every process, in children and launchers' agents too.
Another `sitecustomize` that this one hides runs as it would have without it.

A plug-in is a file with `install(hook)`. What goes wrong in one is said in `<rank folder>/hook.log` and never reaches
the rank's own program. Only modules that the interpreter has loaded anyway are imported here: it costs well under a millisecond.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing is not loaded at this time
if TYPE_CHECKING:
    from typing import Any

HOOKS = "DTPROBE_HOOKS"
EVERYWHERE = "DTPROBE_HOOKS_EVERYWHERE"
CLAIMED = "DTPROBE_HOOKED_PID"
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class Hook:
    """What a plug-in sees: the process's `environ`, the rank's `folder` (None where it is no rank), and ways to act on imports."""

    def __init__(self, environ, folder: str | None) -> None:
        self.environ = environ
        self.folder = folder
        self._actions: dict[str, list] = {}
        self._around: dict[str, Any] = {}

    def around_import(self, name: str, manager) -> None:
        """Enter the context manager `manager` while module `name` is being imported; for one that has been, do nothing."""
        if name in sys.modules:
            return
        self._find()
        self._around[name] = manager

    def after_import(self, name: str, action) -> None:
        """Call `action(module)` when module `name` has been imported, or now where it has been."""
        if name in sys.modules:
            self.run(action, sys.modules[name])
            return
        self._find()
        self._actions.setdefault(name, []).append(action)

    def _find(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def run(self, action, *arguments) -> None:
        """Call something of a plug-in; what it raises is said in the log."""
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001  the rank's program must not notice
            self.say(f"{getattr(action, '__module__', action)}: {type(error).__name__}: {error}")

    def say(self, text: str) -> None:
        """Append a line to the rank's `hook.log`; where this is no rank, or that cannot be written, to standard error."""
        if self.folder is None or not _appended(self.folder, " ".join(text.split()) + "\n"):
            sys.stderr.write(f"dtprobe hook: {text}\n")

    def find_spec(self, name, path=None, target=None):
        """The protocol of `sys.meta_path`: finds what the others find, and acts behind the module's own code."""
        if name not in self._actions and name not in self._around:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self or not hasattr(finder, "find_spec") else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            self.say(f"{name} has no Python code: cannot act on its import")
            return spec

        def exec_module(module) -> None:
            # taken only now: importlib.util.find_spec asks for a spec too, just to see whether the module is there
            with self._around.pop(name, _Nothing()):
                execute(module)
            for action in self._actions.pop(name, ()):
                self.run(action, module)
            if not self._actions and not self._around and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module
        return spec


def _appended(folder: str, line: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103  pathlib is not loaded at this time
        with open(f"{folder}/hook.log", "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(line)
    except OSError:
        return False
    return True


class _Nothing:
    """contextlib, which has this as `nullcontext`, is not loaded at this time."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_) -> None:
        pass


def _rank_folder(environ) -> str | None:
    """Where this rank's artifacts go; None in a process that is no rank."""
    folder = environ.get("DTPROBE_RANK_FOLDER")
    if folder or "DTPROBE_FOLDER" not in environ:
        return folder or None
    if _is_agent(sys.orig_argv):  # under srun or mpirun it has a rank of its own, which is none of the job's
        return None
    rank = next((environ[name] for name in RANKS if environ.get(name, "").isdigit()), None)
    return None if rank is None else f"{environ['DTPROBE_FOLDER']}/rank{rank}"


def _is_agent(argv: list[str]) -> bool:
    """Whether a command line is torchrun's: an agent that starts ranks."""
    return any(word == "torch.distributed.run" or word.rpartition("/")[2] == "torchrun" for word in argv[:5])


def _load(environ) -> None:
    folder = _rank_folder(environ)
    hook = Hook(environ, folder)
    paths = environ.get(EVERYWHERE, "").split(os.pathsep)
    me = str(os.getpid())
    if folder is not None and environ.get(CLAIMED, me) == me:
        environ[CLAIMED] = me
        paths += environ.get(HOOKS, "").split(os.pathsep)
    for path in filter(None, paths):
        hook.run(_install, hook, path)


def _install(hook: Hook, path: str) -> None:
    from importlib.machinery import ModuleSpec, SourceFileLoader

    name = "_dtprobe_" + path.rpartition("/")[2].removesuffix(".py")
    loader = SourceFileLoader(name, path)
    module = type(sys)(name)
    module.__file__ = path
    module.__spec__ = ModuleSpec(name, loader, origin=path)
    sys.modules[name] = module
    loader.exec_module(module)
    module.install(hook)


def _run_the_hidden_one() -> None:
    """Run the `sitecustomize` that would have run; what it raises comes out where it would have."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120  pathlib is not loaded at this time
    spec = PathFinder.find_spec(__name__, [entry for entry in sys.path if os.path.realpath(entry) != here])
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


# Another tool may chain in the same way and come back here.
if not hasattr(sys, "_dtprobe_hooked"):
    sys._dtprobe_hooked = True  # type: ignore[attr-defined]
    if HOOKS in os.environ or EVERYWHERE in os.environ:
        _load(os.environ)
    _run_the_hidden_one()

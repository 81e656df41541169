"""In a rank of somebody's command: starts its program once more, as faults want it, with other variables or a command in front.

`execve` keeps the pid, the standard streams and the place in the process tree, and nothing of the program has run yet. A
part of the plan has `set`, `unset` and `ahead` (variables; `ahead` are put before what a list of paths holds) and `front` (a command that ends by executing what follows it); `{folder}`
in it is the rank's folder.
"""

from __future__ import annotations

import os
import sys

from _dtprobe_faults import parts, placed, rank_of, say, world_size_of

ENTERED = "DTPROBE_ENTERED_PID"
"""Environment variable: the process that has been started once more."""


def install(hook) -> None:
    found = list(parts(hook, "enter"))
    if not found:
        return
    if hook.environ.get(ENTERED) == str(os.getpid()):
        for part in found:
            say(hook, "fired", part["index"], detail=part["detail"])
        return
    rank, size = rank_of(hook) or 0, world_size_of(hook)
    environ = {**hook.environ, ENTERED: str(os.getpid()), "DTPROBE_RANK_FOLDER": hook.folder}
    argv = [sys.executable, *sys.orig_argv[1:]]
    for part in found:
        for name in part["unset"]:
            environ.pop(name, None)
        environ.update({name: placed(value, rank, size) for name, value in part["set"].items()})
        for name, value in part["ahead"].items():
            environ[name] = ":".join(filter(None, [value, environ.get(name)]))
        argv = [word.replace("{folder}", hook.folder) for word in part["front"]] + argv
    try:
        os.execvpe(argv[0], argv, environ)
    except OSError as error:
        for part in found:
            say(hook, "refused", part["index"], detail=f"cannot execute {argv[0]}: {error.strerror}")

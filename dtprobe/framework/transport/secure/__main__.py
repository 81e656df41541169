"""Run an unmodified script with its gloo groups encrypted, or make a secret.

    python -m dtprobe.framework.transport.secure new FILE
    torchrun --nproc-per-node=2 -m dtprobe.framework.transport.secure run [--secret-file FILE] SCRIPT [ARGUMENT...]

Without --secret-file the file is what DTPROBE_SECRET_FILE names.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.framework.transport import secure
from dtprobe.framework.transport.secure.secret import MasterSecret


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    new = verbs.add_parser("new", help="write a new master secret, mode 0600")
    new.add_argument("file", type=Path)
    run = verbs.add_parser("run", help="run a script under this interpreter, encrypted")
    run.add_argument("--secret-file", type=Path)
    run.add_argument("--timeout-s", type=float, default=60.0, help="of each round of the handshake")
    run.add_argument("script", type=Path)
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.verb == "new":
        MasterSecret.create(options.file)
        return
    if not options.script.is_file():
        raise UsageError(f"there is no script {options.script}", "give its path")
    named = options.secret_file
    secret = MasterSecret.from_file(named) if named else MasterSecret.from_environment(os.environ)
    if unavailable := secure.probe():
        raise UsageError(unavailable.reason, unavailable.remedy)
    from dtprobe.framework.transport.secure.cover import secured

    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.parent)
    with secured(secret, timeout_s=options.timeout_s):
        runpy.run_path(str(options.script), run_name="__main__")


if __name__ == "__main__":
    try:
        main()
    except DtprobeError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)

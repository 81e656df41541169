"""Entry point: the exit codes and the promise that no traceback reaches a user."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

INTERRUPTED = 130
ENDED = "interrupted: every process that was started has been ended, and a run that had begun says so in its folder"
HARNESS_FAILED = 3


def main() -> None:
    """Run the command line and exit: 0 as expected, 1 not as expected or a fault found, 2 usage, 3 the harness failed, 130 interrupted."""
    from dtprobe.cli import app
    from dtprobe.errors import DtprobeError

    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    try:
        # What stands behind -- is a command of the user's, not ours to parse.
        code = app(words[:cut], standalone_mode=False, prog_name="dtprobe", obj=words[cut + 1 :])
        if code == INTERRUPTED:  # typer turns KeyboardInterrupt into this code, without a word
            _say(ENDED, INTERRUPTED)
    except DtprobeError as error:
        code = _say(str(error), error.exit_code)
    except KeyboardInterrupt:  # while the verbs were still being imported
        code = _say(ENDED, INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing more can be said to it
        code = 0
    except Exception as error:  # noqa: BLE001  the last seam: the details go to a file, one line to the user
        code = (
            _say(ENDED, INTERRUPTED) if type(error).__name__ == "Abort" else _crashed(error)
        )  # older typer's KeyboardInterrupt
    sys.exit(code if isinstance(code, int) else 0)


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"dtprobe: {text}\n")
    return code


def _crashed(error: Exception) -> int:
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a usage error of the option parser
        if not error.format_message():  # the help was asked for by saying nothing, and has been printed
            return int(error.exit_code)
        return _say(f"{error.format_message().rstrip('.')}; `dtprobe --help` shows the usage", error.exit_code)
    import tempfile

    with tempfile.NamedTemporaryFile("w", prefix="dtprobe-crash-", suffix=".txt", delete=False, encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    one_line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return _say(
        f"the harness itself failed: {one_line}; the details are in {Path(file.name)}, please report them", HARNESS_FAILED
    )


if __name__ == "__main__":
    main()

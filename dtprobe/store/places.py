"""Where files of a history lie: a local folder, or any URL that fsspec knows (`s3://bucket/nights`, `gs://`, `abfs://`, `sftp://`, `memory://`).

The history asks little of a place, because object stores have neither a rename nor a lock: a file appears whole or not at all, is never
changed, and may be written again with the same bytes. Whoever writes names a file by its content, so writers never meet.
"""

from __future__ import annotations

import fcntl
import io
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dtprobe.errors import DtprobeError, UsageError
from dtprobe.scratch import scratch
from dtprobe.store.files import TEMPORARY_SUFFIX, write_parquet, writing

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIX = ".parquet"
ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"})
"""Protocols of which a PUT makes the object whole or not at all; in others a file is written aside and renamed."""
_S3 = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}
"""botocore's options, unless fsspec's configuration has others: s3fs tries five times itself, so an address that is silent is told within a minute."""
_STALE_NS = 3600 * 10**9
_CREDENTIALS = re.compile(r"(?<=//)[^/@]+(?=@)")
_WORDS = 300


class Place(Protocol):
    """Files by name. Every method raises DtprobeError, in one line, where the place cannot be reached or refuses."""

    where: str
    """How the place is called, without credentials."""

    def names(self) -> list[str]:
        """Parquet files that are there now; none where the place does not exist yet."""

    def write(self, name: str, table: pa.Table) -> None:
        """The table as that file, whole or not at all."""

    @contextmanager
    def copies(self, names: Sequence[str]) -> Iterator[list[Path]]:
        """The files as local ones, in the same order, as long as the context lasts. Raises FileNotFoundError when one has vanished."""

    def remove(self, names: Sequence[str]) -> None:
        """Removes them; one that is gone already is no error."""

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether nobody else is within; a place without locks says so to everybody."""

    def sweep(self, now_ns: int) -> None:
        """Removes what writers killed an hour ago or earlier left."""

    def address(self, name: str) -> str:
        """How the file is called for a reader of a message."""


def place(where: Path | str) -> Place:
    """The place of a path or URL. Raises UsageError for a URL that fsspec cannot open, and what to install where that is the reason."""
    text = str(where)
    if "://" not in text:
        return Folder(Path(where))
    if text.startswith(("file://", "local://")):
        return Folder(Path(text.partition("://")[2]))
    import fsspec

    options: dict[str, object] = {}
    if text.startswith(("s3://", "s3a://")):
        options["config_kwargs"] = {**_S3, **fsspec.config.conf.get("s3", {}).get("config_kwargs", {})}
    try:
        system, root = fsspec.core.url_to_fs(text, **options)
    except ImportError as error:
        raise UsageError(f"{_shown(text)}: {_one_line(error, text)}", "install what it names, beside dtprobe") from error
    except Exception as error:
        raise UsageError(
            f"{_shown(text)}: not a URL that fsspec opens: {_one_line(error, text)}", "s3://bucket/folder, say"
        ) from error
    return Remote(system, root.rstrip("/"), text.rstrip("/"))


class Folder:
    """A folder of this machine. It need not exist before the first `write`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.glob(f"[!.]*{SUFFIX}"))

    def write(self, name: str, table: pa.Table) -> None:
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_parquet(self.path / name, table)

    @contextmanager
    def copies(self, names: Sequence[str]) -> Iterator[list[Path]]:
        yield [self.path / name for name in names]

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:  # a network file system without locks: nothing depends on them but double work
                pass
            yield True

    def sweep(self, now_ns: int) -> None:
        for path in self.path.glob(f".*{TEMPORARY_SUFFIX}"):
            try:
                stale = now_ns - path.stat().st_mtime_ns > _STALE_NS
            except FileNotFoundError:
                continue  # its writer lives
            if stale:
                path.unlink(missing_ok=True)

    def address(self, name: str) -> str:
        return str(self.path / name)


class Remote:
    """A folder of an fsspec file system."""

    def __init__(self, system: object, root: str, url: str) -> None:
        from fsspec import AbstractFileSystem

        assert isinstance(system, AbstractFileSystem)
        self._system = system
        self._root = root
        protocols = (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)
        self._atomic = not ATOMIC.isdisjoint(protocols)
        self._url = url
        self.where = _shown(url)

    def names(self) -> list[str]:
        with self._reaching("be listed"):
            self._system.invalidate_cache()  # another machine may have written since
            try:
                found = self._system.ls(self._root, detail=False)
            except FileNotFoundError as absent:
                if absent.__cause__ is not None:  # the server's own words: no such bucket, or it is no S3 server
                    raise
                return []
        names = (str(path).rpartition("/")[2] for path in found)
        return sorted(name for name in names if name.endswith(SUFFIX) and not name.startswith("."))

    def write(self, name: str, table: pa.Table) -> None:
        import pyarrow.parquet as pq

        data = io.BytesIO()
        pq.write_table(table, data, compression="zstd")
        with self._reaching("be written"):
            if self._atomic:
                self._system.pipe_file(self._path(name), data.getvalue())
                return
            aside = self._path(f".{name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(aside, data.getvalue())
            self._system.mv(aside, self._path(name))

    @contextmanager
    def copies(self, names: Sequence[str]) -> Iterator[list[Path]]:
        with scratch(Path(tempfile.gettempdir()), "dtprobe-history-") as folder:
            paths = [folder / f"{number}{SUFFIX}" for number in range(len(names))]
            with self._reaching("be read", vanishing=True):
                if names:
                    self._system.get([self._path(name) for name in names], [str(path) for path in paths])
            yield paths

    def remove(self, names: Sequence[str]) -> None:
        with self._reaching("be removed from"):
            for name in names:
                try:
                    self._system.rm_file(self._path(name))
                except FileNotFoundError:
                    continue  # whoever folds too was quicker

    @contextmanager
    def alone(self) -> Iterator[bool]:
        yield True

    def sweep(self, now_ns: int) -> None:
        """Nothing: a PUT that was killed leaves no object, and of other systems few tell the age of a file."""

    def address(self, name: str) -> str:
        return f"{self.where}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _reaching(self, what: str, *, vanishing: bool = False) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if vanishing and isinstance(error, FileNotFoundError):
                raise
            raise DtprobeError(
                f"the history {self.where} cannot {what}: {_one_line(error, self._url)}",
                "check address, credentials and network; run folders are whole, `dtprobe history merge` enters them later",
            ) from error


def _shown(url: str) -> str:
    return _CREDENTIALS.sub("...", url)


def _one_line(error: BaseException, url: str) -> str:
    """What a backend says, without the URL's credentials, which some repeat."""
    text = " ".join(str(error).split()) or type(error).__name__
    for credentials in _CREDENTIALS.findall(url):
        text = text.replace(credentials, "...")
    return text[:_WORDS]

"""A folder that is being written: `OUT.partial`, locked against other runs, with a journal, renamed when it is whole.

A run that was killed leaves a folder that is recognised, never mistaken for a finished one, and taken up again by a
run of the same inputs: a cell counts as finished only if the bytes in the files have the hash that its journal line
says, so nothing has to be flushed before the end.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import LayoutError

LOCK = ".regauge-partial"  # held by the first rank; its presence marks the folder as ours
_RANKS = ".regauge-ranks"  # shared by the other ranks
_RUN = ".regauge-run.json"
_JOURNAL = ".regauge-journal-"

_log = logging.getLogger(__name__)


class Partial:
    """The partial folder of `output_dir`, open and locked by this process until `finish` or `close`.

    Args:
      output_dir: the folder that `finish` makes. It must not exist, unless `overwrite` and this library wrote it.
      key: a hash of everything that determines the output. What a killed run of the same key left is kept, that of
        another is removed; None never resumes.
      rank: 0 makes the folder, others join it when it is there.

    Raises `LayoutError` when another run is at work in the folder, or when it is not ours.
    """

    def __init__(self, output_dir: str | Path, key: str | None, *, overwrite: bool = False, rank: int = 0):
        self.target = Path(output_dir)
        self.folder = self.target.with_name(self.target.name + ".partial")
        self.rank = rank
        self._journal: int | None = None
        if rank:
            self._lock = _locked(self.folder / _RANKS, fcntl.LOCK_SH)
            return
        check_target(self.target, overwrite)
        self._lock = _own(self.folder)
        try:
            os.close(_locked(self.folder / _RANKS, fcntl.LOCK_EX))  # no rank of a killed run is still writing
            self._take_up(key or uuid.uuid4().hex)
        except BaseException:
            os.close(self._lock)
            raise

    def _take_up(self, key: str) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads((self.folder / _RUN).read_text())["key"] == key:
                _clear(self.folder, keep=(".safetensors", ".jsonl", _RUN, _RANKS, LOCK))
                return
        if any(self.folder.glob("*.safetensors")):
            _log.info("%s: left by a run of other inputs, made anew", self.folder)
        _clear(self.folder, keep=(_RANKS, LOCK))
        write_json(self.folder / _RUN, {"key": key})

    def finished(self) -> dict[int, dict[str, Any]]:
        """Cell -> its last journal record, of all ranks. What they say must be compared with the files."""
        records: dict[int, dict[str, Any]] = {}
        for path in sorted(self.folder.glob(f"{_JOURNAL}*.jsonl")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError):  # the last line may be cut short
                    record = json.loads(line)
                    records[int(record["cell"])] = record
        return records

    def note(self, cell: int, sha256: str, **facts: Any) -> None:
        """Journal that a cell is written."""
        if self._journal is None:
            path = self.folder / f"{_JOURNAL}{self.rank}.jsonl"
            self._journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(self._journal, b"\n")  # ends a line that was cut short
        line = json.dumps({"cell": cell, "sha256": sha256, **facts}, separators=(",", ":"))
        try:
            os.write(self._journal, line.encode() + b"\n")
        except OSError as error:
            raise LayoutError(f"{self.folder}: the journal cannot be written: {error.strerror}") from error

    def finish(self) -> None:
        """Give the folder its name, durably. An old folder of that name is kept until the new one is in place."""
        for path in self.folder.iterdir():
            if path.suffix != ".safetensors":  # which the writer has flushed
                _flush(path)
        _flush(self.folder)
        old = self.target.with_name(f".{self.target.name}.regauge-old")
        if self.target.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(self.target, old)
        os.rename(self.folder, self.target)
        _flush(self.target.parent)
        tidy(self.target)
        shutil.rmtree(old, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let go of the folder as it is."""
        for handle in (self._journal, self._lock):
            if handle is not None:
                with contextlib.suppress(OSError):
                    os.close(handle)
        self._journal = self._lock = None  # type: ignore[assignment]


def digest_of(params: Mapping[str, Tensor]) -> str:
    """sha256 over the bytes of tensors, in order."""
    digest = hashlib.sha256()
    for p in params.values():
        if p.numel():
            digest.update(p.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_target(target: Path, overwrite: bool) -> None:
    """Raise `LayoutError` unless the output folder can be made: it is not there, or may be replaced and is ours."""
    if not target.exists():
        return
    if not overwrite:
        raise LayoutError(f"output_dir: {target} exists; choose another folder or pass overwrite_output_dir=true")
    if not (target.is_dir() and ((target / "regauge.json").is_file() or not any(target.iterdir()))):
        raise LayoutError(f"output_dir: {target} is not a folder that this program wrote; it is not overwritten")


def tidy(folder: Path) -> None:
    """Remove the marks of a partial folder from a finished one, where a kill may have left them."""
    for path in folder.glob(".regauge-*"):
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one."""
    scratch = path.with_name(path.name + ".tmp")
    with open(scratch, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def _own(folder: Path) -> int:
    """Make the folder or take over one that is ours, and lock it."""
    while True:
        if folder.exists() and not (folder / LOCK).exists() and any(folder.iterdir()):
            raise LayoutError(f"output_dir: {folder} exists and is not ours; move it away")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = _locked(folder / LOCK, fcntl.LOCK_EX)
            if os.fstat(handle).st_ino == os.stat(folder / LOCK).st_ino:
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return handle
            os.close(handle)
        except FileNotFoundError:
            continue  # another run has just finished and renamed it


def _locked(path: Path, how: int) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError as error:
        who = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(handle)
        raise LayoutError(
            f"output_dir: another run is writing {path.parent} ({who}); wait for it, or choose another folder"
        ) from error
    except OSError as error:  # a file system without locks
        _log.warning("%s: cannot be locked (%s); do not start two runs on it", path.parent, error.strerror)
    return handle


def _clear(folder: Path, keep: Iterable[str]) -> None:
    """Remove all but the files whose names end in one of `keep`."""
    for path in folder.iterdir():
        if not path.name.endswith(tuple(keep)):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""A folder of safetensors files: checked, read tensor by tensor, and written at known offsets.

The header of every output file follows from the planned shapes alone, so a file is laid out before any tensor is
computed, and tensors are written in any order at their final place: memory stays at one cell, and the bytes do not
depend on the order of the work.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .._errors import LayoutError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # the limit of the safetensors library

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one tensor lies: byte `start` to `stop` of a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Shards:
    """A Hugging Face checkpoint folder as a source.

    Opening it reads headers only and checks them: every file that the index names is there, inside the folder, whole
    (its length is what the header says), and holds the tensors that the index says. Raises `LayoutError` naming the
    file, what was expected, and what was found.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._entries: dict[str, _Entry] = {}
        for file, names in _files_of(self.folder).items():
            entries = read_header(file)
            absent = sorted(set(names or ()) - set(entries))
            if absent:
                raise LayoutError(f"{file}: the index says it holds {absent[0]}, but it does not")
            clash = sorted(set(entries) & set(self._entries))
            if clash:
                raise LayoutError(f"{file}: {clash[0]} is also in {self._entries[clash[0]].file.name}")
            self._entries.update(entries)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(entry.file for entry in self._entries.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.stop - entry.start for entry in self._entries.values())

    def specs(self) -> dict[str, Tensor]:
        return {name: torch.empty(e.shape, dtype=e.dtype, device="meta") for name, e in self._entries.items()}

    @contextmanager
    def read(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        yield {name: self._load(name) for name in names}

    def _load(self, name: str) -> Tensor:
        if name not in self._entries:
            raise LayoutError(f"{self.folder}: no tensor {name}")
        return _load(self._entries[name], name)


class ShardWriter:
    """Sink for a folder of safetensors files whose tensors are known beforehand.

    Args:
      folder: an existing folder.
      specs: the tensors to come, in the order in which they are laid out.
      max_shard_size: bytes of tensors in one file, unless a single tensor is larger.
      join: write into files that another process has laid out from the same specs, which is checked.
      resume: keep files of the same layout that are there already, with what they hold; make the others.

    `close` writes the index (when there is more than one file) and raises `LayoutError` if a tensor was never written.
    A full disk is a `LayoutError`, too: before any work where the file system can reserve room.
    """

    def __init__(
        self,
        folder: str | Path,
        specs: Mapping[str, Tensor],
        max_shard_size: int = 5_000_000_000,
        *,
        join: bool = False,
        resume: bool = False,
    ):
        self.folder = Path(folder)
        self.joined = join
        self._resume = resume
        groups = _group(specs, max_shard_size)
        many = len(groups) > 1
        self._entries: dict[str, _Entry] = {}
        self._pending = set(specs)
        self._files: dict[Path, int] = {}
        for index, names in enumerate(groups):
            label = f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors" if many else SINGLE
            self._lay_out(self.folder / label, {name: specs[name] for name in names})

    def _lay_out(self, path: Path, specs: Mapping[str, Tensor]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        # the library stores the widest dtypes first, so that every tensor is aligned
        order = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
        spans = {}
        for name in order:
            size = specs[name].numel() * specs[name].dtype.itemsize
            spans[name] = (offset, offset + size)
            code = _CODES[specs[name].dtype]
            header[name] = {"dtype": code, "shape": list(specs[name].shape), "data_offsets": list(spans[name])}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        base = len(head)
        if self.joined or (self._resume and _is_laid_out(path, head, base + offset)):
            self._join(path, head, base + offset)
        else:
            self._create(path, head, base + offset)
        for name, (start, stop) in spans.items():
            entry = _Entry(path, specs[name].dtype, tuple(specs[name].shape), base + start, base + stop)
            self._entries[name] = entry

    def _create(self, path: Path, head: bytes, size: int) -> None:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            self.abort()
            raise LayoutError(f"{path}: cannot be written: {error.strerror}") from error
        self._files[path] = handle
        try:
            os.posix_fallocate(handle, 0, size)  # a full disk is found before the work, not after it
            os.pwrite(handle, head, 0)
        except OSError as error:
            self.abort()
            path.unlink()  # gives back what was reserved
            raise LayoutError(f"{path}: no room for {size:,} bytes: {error.strerror}") from error

    def _join(self, path: Path, head: bytes, size: int) -> None:
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError as error:
            self.abort()
            raise LayoutError(f"{path}: cannot be joined: {error.strerror}; all processes need one folder") from error
        self._files[path] = handle
        if os.fstat(handle).st_size != size or os.pread(handle, len(head), 0) != head:
            self.abort()
            raise LayoutError(f"{path}: laid out for other tensors than this process planned")

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """What the files hold at the places of these tensors, written or not."""
        return {name: _load(self._entries[name], name) for name in names}

    def write(self, params: Mapping[str, Tensor]) -> None:
        for name, p in params.items():
            entry = self._entries[name]
            if tuple(p.shape) != entry.shape or p.dtype != entry.dtype:
                raise LayoutError(f"{name}: laid out as {entry.dtype} {entry.shape}, got {p.dtype} {tuple(p.shape)}")
            if p.numel():
                data = p.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
                try:
                    _write_from(self._files[entry.file], data, entry.start)
                except OSError as error:
                    raise LayoutError(f"{entry.file}: {name} cannot be written: {error.strerror}") from error
            self._pending.discard(name)

    def close(self, mine: Iterable[str] | None = None) -> None:
        """Make the files durable and write the index. `mine`: what this process was to write; None means all."""
        pending = self._pending if mine is None else self._pending & set(mine)
        if pending:
            raise LayoutError(f"{self.folder}: {len(pending)} tensors were never written: {min(pending)}")
        for handle in self._files.values():
            os.fsync(handle)
        self.abort()
        if not self.joined and len({entry.file for entry in self._entries.values()}) > 1:
            weight_map = {name: entry.file.name for name, entry in sorted(self._entries.items())}
            total = sum(entry.stop - entry.start for entry in self._entries.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            scratch = self.folder / (INDEX + ".tmp")
            scratch.write_text(json.dumps(index, indent=2) + "\n")
            os.replace(scratch, self.folder / INDEX)

    def abort(self) -> None:
        """Close the files without any claim that they are complete."""
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()


def read_header(path: Path) -> dict[str, _Entry]:
    """The entries of a safetensors file, after checking the header against the length of the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _MAX_HEADER or 8 + length > size:
            raise LayoutError(f"{path}: not a whole safetensors file ({size:,} bytes); download it again")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise LayoutError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise LayoutError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    base, entries = 8 + length, {}
    for name, record in header.items():
        entries[name] = _entry(path, name, record, base, size)
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise LayoutError(f"{path}: {name} starts at byte {entry.start:,}, the tensor before it ends at {end:,}")
        end = entry.stop
    if end != size:
        raise LayoutError(f"{path}: the header describes {end:,} bytes, the file has {size:,}")
    return entries


def _unique(pairs):
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name is given twice")
    return dict(pairs)


def _entry(path: Path, name: str, record: object, base: int, size: int) -> _Entry:
    try:
        code, shape, (start, stop) = record["dtype"], record["shape"], record["data_offsets"]  # type: ignore[index]
        valid = isinstance(code, str) and all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, stop))
        valid = valid and math.prod(max(n, 1) for n in shape) < 2**63
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise LayoutError(f"{path}: {name}: malformed header entry {record!r}")
    if code not in _DTYPES:
        raise LayoutError(f"{path}: {name}: dtype {code!r} is not supported; known are {', '.join(_DTYPES)}")
    dtype = _DTYPES[code]
    count = dtype.itemsize
    for n in shape:
        count *= n
    if stop - start != count:
        raise LayoutError(f"{path}: {name}: shape {tuple(shape)} of {code} takes {count} bytes, not {stop - start}")
    if base + stop > size:
        raise LayoutError(
            f"{path}: truncated: {name} ends at byte {base + stop:,}, the file has {size:,}; download it again"
        )
    return _Entry(path, dtype, tuple(shape), base + start, base + stop)


def _files_of(folder: Path) -> dict[Path, list[str] | None]:
    """The safetensors files of a checkpoint, each with the tensors that the index says it holds."""
    if not folder.is_dir():
        raise LayoutError(f"{folder}: no such folder")
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    others = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
    hint = f"; convert {others[0]} to safetensors first" if others else ""
    raise LayoutError(f"{folder}: neither {SINGLE} nor {INDEX}{hint}")


def _indexed(folder: Path, index: Path) -> dict[Path, list[str] | None]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(f"{index}: expected a JSON object with a 'weight_map': {error!r}") from error
    files: dict[Path, list[str] | None] = {}
    for name, file in pairs:
        if Path(file).name != file or file in ("", ".", ".."):
            raise LayoutError(f"{index}: {name}: {file!r} is not a file name inside the folder")
        path = folder / file
        if not path.is_file():
            raise LayoutError(f"{index}: {file} is missing (it should hold {name}); download it again")
        held = files.setdefault(path, [])
        assert held is not None
        held.append(name)
    return files


def _group(specs: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Names in order, cut into runs of at most `limit` bytes."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, p in specs.items():
        size = p.numel() * p.dtype.itemsize
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _is_laid_out(path: Path, head: bytes, size: int) -> bool:
    """True for a file of this header and length."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size == size and file.read(len(head)) == head
    except OSError:
        return False


def _load(entry: _Entry, name: str) -> Tensor:
    # plain reads rather than a memory map: mapped pages would count as resident for the whole run
    buffer = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
    if buffer.numel():
        with open(entry.file, "rb", buffering=0) as file:
            file.seek(entry.start)
            _read_into(file, buffer.numpy().data, entry.file, name)
    return buffer.view(entry.dtype).reshape(entry.shape)


def _read_into(file, view: memoryview, path: Path, name: str) -> None:
    done = 0
    while done < len(view):
        got = file.readinto(view[done : done + (1 << 30)])
        if not got:
            raise LayoutError(f"{path}: {name}: the file ends early; it changed while it was read")
        done += got


def _write_from(handle: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done : done + (1 << 30)], offset + done)

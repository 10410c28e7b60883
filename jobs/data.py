"""Text for calibration and evaluation: read, format, tokenize, batch."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..graph import LayoutError
from ..graph.observe import Batch

_log = logging.getLogger(__name__)

HUB_NAMES = {
    "open_platypus": "garage-bAInd/Open-Platypus",
    "ultrachat": "HuggingFaceH4/ultrachat_200k",
}
_TEXT, _JSON = {".txt", ".md", ".rst"}, {".jsonl", ".json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Where text comes from and how it is cut into sequences.

    Args:
      name: "pydoc" (English prose that every CPython carries), a file (.txt, .md, .jsonl, .json, .parquet), a folder of
        such files, or the name of a Hugging Face dataset (extra `data`).
      split: for "pydoc", "train" (first half) or "test" (second half); for hub datasets, their split.
      num_samples: number of sequences.
      max_seq_length: tokens of a sequence, at most.
      concatenate: join all documents and cut the stream into sequences of exactly `max_seq_length`; otherwise each
        document is a sequence, truncated. None: join for plain text, not for rows.
    """

    name: str = "pydoc"
    split: str = "train"
    num_samples: int = 64
    max_seq_length: int = 512
    concatenate: bool | None = None

    def __post_init__(self):
        for field in ("num_samples", "max_seq_length"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"data.{field}: expected a positive integer, got {value!r}")


def sequences(data: Data, tokenizer: Any) -> list[list[int]]:
    """Token ids of `data.num_samples` sequences. Raises `LayoutError` when the dataset holds fewer."""
    documents, plain = read_documents(data)
    join = plain if data.concatenate is None else data.concatenate
    if join:
        text = "\n\n".join(_format(document, tokenizer, data) for document in documents)
        ids = tokenizer(text, verbose=False)["input_ids"] if text else []
        starts = range(0, len(ids) - data.max_seq_length + 1, data.max_seq_length)
        found = [ids[start : start + data.max_seq_length] for start in starts][: data.num_samples]
        held = f"{len(ids):,} tokens, which make {len(ids) // data.max_seq_length} sequences"
    else:
        found = []
        for document in documents:
            ids = tokenizer(_format(document, tokenizer, data), truncation=True, max_length=data.max_seq_length)
            if len(ids["input_ids"]) > 1:
                found.append(list(ids["input_ids"]))
            if len(found) == data.num_samples:
                break
        held = f"{len(found)} usable documents"
    if len(found) < data.num_samples:
        raise LayoutError(
            f"data {data.name!r}, split {data.split!r}: {data.num_samples} sequences of {data.max_seq_length} tokens "
            f"are asked for, it has {held}; lower num_samples or max_seq_length, or give more text"
        )
    return found


def batches(sequences: Sequence[Sequence[int]], size: int, pad: int = 0) -> Iterator[Batch]:
    """Right-padded batches of `size` sequences, longest first so that little is padded. Padding is masked."""
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    for start in range(0, len(order), size):
        index = order[start : start + size]
        length = len(sequences[index[0]])
        ids = torch.full((len(index), length), pad, dtype=torch.long)
        mask = torch.zeros(len(index), length, dtype=torch.long)
        for row, i in enumerate(index):
            ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
            mask[row, : len(sequences[i])] = 1
        yield Batch(input_ids=ids, attention_mask=mask, index=torch.tensor(index))


def read_documents(data: Data) -> tuple[Iterable[Any], bool]:
    """The documents (strings or rows) and whether they are plain text."""
    path = Path(data.name)
    if data.name == "pydoc":
        return [_pydoc(data.split)], True
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in _TEXT | _JSON | {".parquet"})
        if not files:
            raise LayoutError(f"data {data.name!r}: no .txt, .md, .rst, .json, .jsonl or .parquet file in the folder")
        return (row for file in files for row in _read_file(file)), all(file.suffix in _TEXT for file in files)
    if path.is_file():
        return _read_file(path), path.suffix in _TEXT
    if path.suffix or data.name.startswith((".", "/", "~")):
        raise LayoutError(f"data {data.name!r}: no such file or folder")
    return _hub(data), False


def _pydoc(split: str) -> str:
    import pydoc_data.topics

    if split not in ("train", "test"):
        raise LayoutError(f"data 'pydoc': expected split 'train' or 'test', got {split!r}")
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    half = len(text) // 2
    return text[:half] if split == "train" else text[half:]


def _read_file(path: Path) -> Iterator[Any]:
    if path.suffix in _JSON:
        yield from _json_rows(path)
    elif path.suffix == ".parquet":
        yield from _load_dataset("parquet", data_files=str(path), split="train")
    elif path.suffix in _TEXT:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise LayoutError(f"data {str(path)!r}: the file is empty")
        yield text
    else:
        raise LayoutError(f"data {str(path)!r}: expected .txt, .md, .rst, .json, .jsonl or .parquet")


def _json_rows(path: Path) -> Iterator[Any]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise LayoutError(f"{path}: not JSON: {error}") from error
        if not isinstance(rows, list):
            raise LayoutError(f"{path}: expected a JSON list of rows, got {type(rows).__name__}")
        yield from rows
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise LayoutError(f"{path}:{number}: not JSON: {error}") from error


def _hub(data: Data) -> Iterable[Any]:
    return _load_dataset(HUB_NAMES.get(data.name, data.name), split=data.split)


def _load_dataset(name: str, **kwargs: Any) -> Iterable[Any]:
    try:
        import datasets
    except ImportError:
        raise LayoutError(f"data {name!r}: needs the package datasets: pip install 'regauge[data]'") from None
    try:
        return datasets.load_dataset(name, **kwargs)
    except (OSError, ValueError, ConnectionError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LayoutError(
            f"data {name!r}: could not be loaded: {first}\n"
            "Known without a network are 'pydoc' and files: data.name=FILE.jsonl with the dataset's columns"
        ) from error


def _format(row: Any, tokenizer: Any, data: Data) -> str:
    """A document as text: as it is, its `text`, or its conversation or instruction in the tokenizer's template."""
    if isinstance(row, str):
        return row
    if not isinstance(row, Mapping):
        raise LayoutError(f"data {data.name!r}: expected rows with columns, got {type(row).__name__}")
    if isinstance(row.get("text"), str):
        return row["text"]
    messages = row.get("messages") or _turns(row.get("conversations")) or _instruction(row)
    if messages is None:
        raise LayoutError(
            f"data {data.name!r}: no usable column among {', '.join(row)}; expected text, messages, conversations, or "
            "instruction with output"
        )
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(messages, tokenize=False)
    return "\n\n".join(message["content"] for message in messages)


def _turns(turns: Any) -> list[dict[str, str]] | None:
    """ShareGPT's from/value pairs as role/content."""
    if not turns:
        return None
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    return [{"role": roles.get(t["from"], t["from"]), "content": t["value"]} if "from" in t else t for t in turns]


def _instruction(row: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """Alpaca's columns as a conversation of two turns."""
    answer = row.get("output", row.get("response"))
    question = row.get("instruction", row.get("prompt", row.get("question")))
    if question is None or answer is None:
        return None
    extra = f"\n\n{row['input']}" if row.get("input") else ""
    return [{"role": "user", "content": f"{question}{extra}"}, {"role": "assistant", "content": answer}]

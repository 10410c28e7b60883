"""Measure a model: perplexity, and how far its predictions are from another model's."""

import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..graph import LayoutError
from ..graph.adapters import everyones, rank, world
from ..graph.skeleton import model_class, read_config
from .data import Data, batches, sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures over all predicted tokens (each sequence's first token is not predicted).

    `perplexity` is exp of the mean negative log-likelihood in nats. `kl` is the mean of KL(reference || model) in nats,
    and `top1` the share of tokens at which both predict the same token; None without a reference.
    """

    perplexity: float
    tokens: int
    kl: float | None = None
    top1: float | None = None


def evaluate(
    model: str | Path | nn.Module,
    dataset: str | Data = "pydoc",
    *,
    reference: str | Path | nn.Module | None = None,
    tokenizer: Any = None,
    num_samples: int = 20,
    max_seq_length: int = 512,
    split: str = "test",
    batch_size: int = 4,
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """Perplexity of `model` on text, and its distance from `reference` when one is given.

    `model` and `reference` are folders that transformers loads, or modules; a module needs a `tokenizer`. Losses are
    computed in float32 from the model's logits. Both models are held in memory at once.
    """
    data = _data(dataset, num_samples, max_seq_length, split)
    if tokenizer is None:
        if isinstance(model, nn.Module):
            raise LayoutError("evaluate: a tokenizer is needed beside a module")
        tokenizer = load_tokenizer(model)
    ids = sequences(data, tokenizer)
    net = load_model(model)
    other = None if reference is None else load_model(reference)
    return compare(net, ids, reference=other, batch_size=batch_size, progress=progress)


def compare(
    model: nn.Module,
    ids: Sequence[Sequence[int]],
    *,
    reference: nn.Module | None = None,
    batch_size: int = 4,
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """`evaluate` on token ids. Collective: each rank runs its share of the batches."""
    totals = torch.zeros(3, dtype=torch.float64)
    tokens = 0
    with torch.inference_mode():
        for batch in list(batches(ids, batch_size))[rank() :: world()]:
            mask = batch.attention_mask
            given = None if bool(mask.all()) else mask
            logits = _logits(model, batch.input_ids, given)
            other = None if reference is None else _logits(reference, batch.input_ids, given)
            for row in range(len(batch.index)):  # float32 logits of one sequence at a time
                n = int(mask[row].sum())
                target = batch.input_ids[row, 1:n]
                ref = None if other is None else other[row, : n - 1]
                totals += _sums(logits[row, : n - 1], target, ref)
                tokens += n - 1
            if progress is not None:
                progress(len(batch.index))
    shares = everyones((totals.tolist(), tokens), "measuring")
    totals = torch.tensor([share for share, _ in shares], dtype=torch.float64).sum(0)
    tokens = sum(count for _, count in shares)
    if not tokens:
        raise LayoutError("evaluate: no token to predict; sequences need at least two tokens")
    nll, kl, same = (totals / tokens).tolist()
    compared = reference is not None
    return Evaluation(
        perplexity=math.exp(nll) if nll < 700 else math.inf,
        tokens=tokens,
        kl=kl if compared else None,
        top1=same if compared else None,
    )


def _sums(logits_TV: Tensor, target_T: Tensor, reference_TV: Tensor | None) -> Tensor:
    """Sums over tokens of the loss, KL(reference || model), and agreement."""
    log_p = F.log_softmax(logits_TV.float(), -1)
    loss = F.nll_loss(log_p, target_T, reduction="sum").double()
    if reference_TV is None:
        return torch.stack((loss, loss.new_zeros(()), loss.new_zeros(())))
    log_q = F.log_softmax(reference_TV.float(), -1)
    kl = F.kl_div(log_p, log_q, log_target=True, reduction="sum").double()
    return torch.stack((loss, kl, (log_p.argmax(-1) == log_q.argmax(-1)).sum().double()))


def _logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    out = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    if getattr(out, "logits", None) is None:
        name = type(model).__name__
        raise LayoutError(
            f"{name} has no language model head, so there is no perplexity to measure; evaluate a model with one "
            f"(architectures in config.json: {name.removesuffix('Model')}ForCausalLM), or run without evaluation"
        )
    logits: Tensor = out.logits
    return logits


def load_model(model: str | Path | nn.Module) -> nn.Module:
    """The module itself, or what transformers loads from the folder, in the checkpoint's dtype."""
    if isinstance(model, nn.Module):
        return model.eval()
    try:
        cls: Any = model_class(read_config(model))
        with _by_itself():
            return cls.from_pretrained(str(model), dtype="auto").eval()
    except ImportError as error:
        raise LayoutError(f"{model}: transformers needs another package to load it: {error}") from error


@contextlib.contextmanager
def _by_itself() -> Iterator[None]:
    """Within the context transformers loads all of a model: in accelerate's environment of FSDP all processes but the
    first would get zeros, to be filled from the first one when the model is wrapped, which it is not here."""
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before


def load_quietly(folder: Path, warm: bool = False) -> nn.Module:
    """Load without the loaders' own progress bars, which would break ours; what they say of a failure is shown.

    `warm` sends one token through the model, at which compressed-tensors decodes weights, with a bar.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            model = load_model(folder)
            if warm:
                with torch.inference_mode():
                    model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
        return model
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a checkpoint folder. Raises `LayoutError` when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise LayoutError(f"{folder}: no usable tokenizer: {str(error).splitlines()[0]}") from error


def _data(dataset: str | Data, num_samples: int, max_seq_length: int, split: str) -> Data:
    if isinstance(dataset, Data):
        return dataset
    return Data(name=dataset, split=split, num_samples=num_samples, max_seq_length=max_seq_length)

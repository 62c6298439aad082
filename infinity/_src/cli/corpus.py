"""The text of `infinity train`: reads it, splits it into a training and a held-out part, and cuts
both into windows of tokens.

    lines of text -> [ training part | held-out part (the last --holdout share of the characters) ]
                  -> tokens -> windows [seq], consecutive and disjoint -> shuffled by --seed, batch
                  after batch

The run never trains on the held-out part. That part is the end of the text rather than a random
choice, so training sees no neighbours of held-out sentences except at the cut. The whole training
part is tokenized, so a run of any length draws from all of it; of the held-out part, only the
measured windows are tokenized. A token takes 4 bytes of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sqlite3
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity._src.cli.chat import (
    IGNORED,
    Encoded,
    encode,
    has_labels,
    read_conversations,
    to_windows,
)

Tokenize = Callable[[list[str]], list[list[int]]]
"""A function from lines to token ids, without special tokens."""

_LINES_AT_ONCE = 1024
"""Lines in one call of the tokenizer. After each call `windows` checks whether there are enough
tokens.
"""

EVAL_BATCHES = 8
"""Default number of micro-batches of a held-out measurement; with --eval, all are measured."""
HOLDOUT = 0.05
"""Default share of the text that is held out."""
KINDS = ("text", "jsonl", "sqlite", "chat")
"""Options that name the text."""

_ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that some editors write first."""
_DTYPE = torch.int32
"""Dtype of windows in memory. Batches are int64, which torch requires."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Windows of tokens, integers. Shapes: train [windows, seq], held_out [windows, seq]; for
    conversations [windows, 3, seq]: ids, labels, positions. notes: remarks for the user.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    notes: tuple[str, ...] = ()

    def batches(
        self, batch: int, seed: int, *, rank: int = 0, ranks: int = 1, start: int = 0
    ) -> Iterator[torch.Tensor]:
        """Return endless training batches, int64, of `batch` windows. A pass contains every window
        once; each pass has a different order. start: number of batches to skip.

        On several ranks each rank gets its rows of a batch of `ranks * batch` windows, so all ranks
        together get the batch that a single rank would get with that batch size.
        """
        every = self._every(ranks * batch, seed, start)
        return (found[rank * batch : (rank + 1) * batch] for found in every)

    def _every(self, batch: int, seed: int, start: int) -> Iterator[torch.Tensor]:
        passes, taken = divmod(start * batch, len(self.train))
        order = self._order(seed + passes)
        del order[len(order) - taken :]
        while True:
            chosen: list[int] = []
            # A batch may have windows of two passes, so that each pass uses every window.
            while len(chosen) < batch:
                if not order:
                    passes += 1
                    order = self._order(seed + passes)
                chosen.append(order.pop())
            yield self.train[chosen].long()

    def _order(self, seed: int) -> list[int]:
        """Return the indices of a pass, the last window first. Equal seeds give equal orders."""
        generator = torch.Generator().manual_seed(seed)
        found: list[int] = torch.randperm(len(self.train), generator=generator).tolist()
        return found

    def held_out_batches(self, batch: int) -> Iterator[torch.Tensor]:
        """Yield the held-out windows in order, in batches of at most `batch`."""
        yield from (found.long() for found in self.held_out.split(batch))

    def held_out_rows(
        self, batch: int, *, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[torch.Tensor, bool]]:
        """Yield (rows of one rank, whether the rows count) for each batch of the held-out windows.
        A rank without rows of the last batch gets the batch's first row, which does not count.
        """
        for found in self.held_out_batches(ranks * batch):
            rows = found[rank * batch : (rank + 1) * batch]
            # All ranks must compute: if one rank skipped the batch, other ranks would wait for it
            # in a collective.
            yield (rows, True) if len(rows) else (found[:1], False)


def ids_of(windows: torch.Tensor) -> torch.Tensor:
    """Return the tokens of windows, [windows, seq]."""
    return windows[:, 0] if windows.dim() == 3 else windows


def arguments_of(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of a transformers model for a batch of windows."""
    if batch.dim() == 2:
        return {"input_ids": batch, "labels": batch}
    ids, labels, positions = batch.unbind(1)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def weight_of(batch: torch.Tensor) -> float:
    """Return the weight of a batch's mean loss in a mean over all tokens: the number of the batch's
    tokens with labels, divided by that of a window without masked tokens.
    """
    if batch.dim() == 2:
        return float(len(batch))
    labels = batch[:, 1, 1:]
    return float((labels != IGNORED).sum()) / labels.shape[-1]


def steps_of(epochs: float, windows: int, per_step: int) -> int:
    """Return the number of steps of `per_step` windows that use each of `windows` windows `epochs`
    times; the last step may begin a further pass.
    """
    return max(math.ceil(epochs * windows / per_step), 1)


def build_corpus(
    options: argparse.Namespace, tokenize: Tokenize, *, tokenizer: Any = None, ranks: int = 1
) -> Corpus:
    """Read the text that `options` name. Tokenize the whole training part, and the windows of the
    held-out part that `ranks` ranks measure. tokenizer: tokenizer with a chat template, for
    conversations.

    Raises: ValueError if the text is missing, unreadable or too short for one held-out and one
    training window.
    """
    batches = options.eval_batches
    if batches is None and options.eval is None:
        batches = EVAL_BATCHES
    measured = None if batches is None else ranks * batches * options.batch
    if options.chat is not None:
        return _build_chats(options, tokenizer, measured)
    lines = read_lines(options)
    if options.eval is None:
        train_lines, held_lines = split_held_out(lines, _share(options))
    else:
        train_lines, held_lines = lines, read_lines(_of_eval(options))
    train = windows(train_lines, tokenize, options.seq)
    held_out = windows(held_lines, tokenize, options.seq, measured)
    for label, found in (("training", train), ("held-out", held_out)):
        if not len(found):
            raise ValueError(
                f"the {label} part of the text has fewer than --seq {options.seq} tokens; "
                "use more text, a smaller --seq, or another --holdout"
                if options.eval is None
                else f"the {label} text has fewer than --seq {options.seq} tokens; use more text, "
                "or a smaller --seq"
            )
    return Corpus(train, held_out)


def _share(options: argparse.Namespace) -> float:
    share = HOLDOUT if options.holdout is None else float(options.holdout)
    if not 0 < share < 1:
        raise ValueError(f"--holdout {share:g} must be between 0 and 1")
    return share


def _of_eval(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with --eval in place of the training text, as a text of the same kind."""
    kind = next(kind for kind in KINDS if getattr(options, kind) is not None)
    return argparse.Namespace(**{**vars(options), kind: options.eval})


def _build_chats(options: argparse.Namespace, tokenizer: Any, measured: int | None) -> Corpus:
    """Build the windows of conversations. measured: number of held-out windows; None: all."""
    if not tokenizer.chat_template:
        raise ValueError(
            "--chat needs a chat template, and the tokenizer of this model has none: add "
            "chat_template.jinja to its directory, or give the text as --jsonl"
        )
    found = _encoded(options, tokenizer)
    if options.eval is not None:
        train, held_out = found, _encoded(_of_eval(options), tokenizer)
    else:
        share = _share(options)
        held = max(math.ceil(share * len(found)), 1)
        train, held_out = found[:-held], found[-held:]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    parts = [
        to_windows(part, options.seq, pad or 0, packing=options.packing)
        for part in (train, held_out)
    ]
    for label, part in zip(("training", "held-out"), parts, strict=True):
        if not len(part):
            raise ValueError(
                f"no {label} conversation has an answer within --seq {options.seq} tokens; use "
                "more conversations or a larger --seq"
            )
    every = [*train, *held_out]
    longer = sum(len(each.ids) > options.seq for each in every)
    without = sum(not has_labels(each, options.seq) for each in every)
    notes = [
        f"{count} of {len(every)} conversations {what}"
        for count, what in (
            (longer, f"are longer than --seq {options.seq}, and cut"),
            (without, f"have no answer in their first {options.seq} tokens, and are left out"),
        )
        if count
    ]
    return Corpus(parts[0], parts[1][:measured], tuple(notes))


def _encoded(options: argparse.Namespace, tokenizer: Any) -> list[Encoded]:
    conversations = read_conversations(options.chat, options.column or "messages")
    return [encode(tokenizer, each) for each in conversations]


def read_lines(options: argparse.Namespace) -> list[str]:
    """Return the text's lines without blank ones. Raises: ValueError naming file and cause."""
    try:
        if options.sqlite is not None:
            if options.query is None:
                raise ValueError(
                    '--sqlite needs --query, for example --query "SELECT text FROM pages"'
                )
            lines = _read_sqlite(options.sqlite, options.query)
        elif options.jsonl is not None:
            lines = _read_jsonl(options.jsonl, options.column or "text")
        else:
            lines = options.text.read_text(encoding=_ENCODING).splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{options.text or options.jsonl} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read the text: {error}") from None
    kept = [line for line in lines if line.strip()]
    if not kept:
        raise ValueError(f"{options.text or options.jsonl or options.sqlite}: the text is empty")
    return kept


def _read_sqlite(path: Path, query: str) -> list[str]:
    if not path.is_file():
        raise ValueError(f"--sqlite {path}: there is no such file")
    # Read-only: a query that writes fails instead of changing the user's data.
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        rows = connection.execute(query)
        return [_joined(row) for row in rows]
    except sqlite3.Error as error:
        raise ValueError(f"--sqlite {path} --query {query!r}: {error}") from None
    finally:
        connection.close()


def _joined(row: tuple[Any, ...]) -> str:
    if any(isinstance(value, bytes) for value in row):
        raise ValueError(
            "--query yields a value of bytes instead of text: leave the column out, or write "
            "CAST(... AS TEXT)"
        )
    return " ".join(str(value) for value in row if value not in (None, ""))


def _read_jsonl(path: Path, column: str) -> list[str]:
    lines: list[str] = []
    with path.open(encoding=_ENCODING) as file:
        for number, row in enumerate(file, 1):
            if not row.strip():
                continue
            try:
                record = json.loads(row)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number} is not JSON: {error}") from None
            if not isinstance(record, dict) or not isinstance(record.get(column), str):
                raise ValueError(
                    f"{path}:{number} has no text in {column!r}; name the field with --column"
                )
            lines.extend(record[column].splitlines())
    return lines


def split_held_out(lines: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Return (training lines, held-out lines). The held-out lines are the fewest last lines with at
    least `share` of the characters. If no line remains for training, the text is cut inside a line.
    """
    wanted = share * sum(len(line) for line in lines)
    held = 0
    at = len(lines)
    while at > 0 and (held < wanted or at == len(lines)):
        at -= 1
        held += len(lines[at])
    if at == 0:
        # No line remains for training, as in a text of one long line: cut the joined text.
        text = "\n".join(lines)
        cut = int(len(text) * (1 - share))
        return [text[:cut]], [text[cut:]]
    return list(lines[:at]), list(lines[at:])


def windows(
    lines: Sequence[str], tokenize: Tokenize, seq: int, count_max: int | None = None
) -> torch.Tensor:
    """Return the windows of the lines' tokens, int32 [count, seq]: the first `count_max`, or all.
    An incomplete window at the end of the text is left out.
    """
    # An array, since tokens of a list would take 36 bytes each.
    tokens = array("i")
    for start in range(0, len(lines), _LINES_AT_ONCE):
        if count_max is not None and len(tokens) >= count_max * seq:
            break
        # `splitlines` has removed the line ends, which the model should read.
        for ids in tokenize([f"{line}\n" for line in lines[start : start + _LINES_AT_ONCE]]):
            tokens.extend(ids)
    count = len(tokens) // seq
    if count_max is not None:
        count = min(count, count_max)
    if not count:
        return torch.empty(0, seq, dtype=_DTYPE)
    return torch.frombuffer(tokens, dtype=_DTYPE, count=count * seq).reshape(count, seq)

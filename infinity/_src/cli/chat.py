"""Conversations as training windows: rendered by the tokenizer's chat template, with masked
prompts, one or several in a window.

    JSON lines -> messages -> tokens and labels -> windows [3, seq]: ids, labels, positions

Only the assistant's tokens have labels. If the template marks them ({% generation %}), transformers
returns the marks; else they are the tokens that an assistant's message adds to the conversation.

With packing a window holds several conversations. Each conversation's positions begin at 0, by
which transformers' attention separates conversations. Windows are filled by best fit, the longest
conversation first.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

IGNORED = -100
"""Label of a token that the losses of transformers and torch ignore."""

Messages = list[dict[str, Any]]


class Conversation(NamedTuple):
    """Messages, and the place (file and line) that has them."""

    messages: Messages
    place: str


class Encoded(NamedTuple):
    """Tokens of a conversation, and their labels; tokens of prompts have the label IGNORED."""

    ids: list[int]
    labels: list[int]


def read_conversations(path: Path, column: str) -> list[Conversation]:
    """Return the conversations of a file of JSON lines. Raises: ValueError naming file and line."""
    found: list[Conversation] = []
    try:
        # "-sig": editors may write a byte order mark first.
        with path.open(encoding="utf-8-sig") as file:
            for number, row in enumerate(file, 1):
                if row.strip():
                    place = f"{path}:{number}"
                    found.append(Conversation(_messages(row, column, place), place))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read the conversations: {error}") from None
    if not found:
        raise ValueError(f"{path} has no conversation")
    return found


def _messages(row: str, column: str, place: str) -> Messages:
    try:
        record = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    messages = record.get(column) if isinstance(record, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages
    ):
        raise ValueError(
            f"{place} has no list of messages, each with a role, in {column!r}; name the field "
            "with --column"
        )
    if not any(each["role"] == "assistant" for each in messages):
        raise ValueError(f"{place} has no message of the assistant to learn; leave the line out")
    for each in messages:
        # Templates would render other types by `str`. Messages that call tools have no text.
        if not isinstance(each.get("content"), str) and not each.get("tool_calls"):
            raise ValueError(
                f"{place}: the message of the {each['role']} has no text in 'content' "
                f"({type(each.get('content')).__name__}); write it as one string"
            )
    return messages


def encode(tokenizer: Any, conversation: Conversation) -> Encoded:
    """Render a conversation. Raises: ValueError for a template that fails, or that changes the text
    of earlier messages when messages are added.
    """
    try:
        return _encode(tokenizer, conversation.messages)
    except ValueError as error:
        raise ValueError(f"{conversation.place}: {error}") from error


def _encode(tokenizer: Any, messages: Messages) -> Encoded:
    # `get_chat_template` chooses among several named templates.
    template = tokenizer.get_chat_template()
    if re.search(r"\{%-?\s*generation\b", template):
        found = _rendered(tokenizer, messages, return_assistant_tokens_mask=True)
        ids, marks = list(found["input_ids"]), found["assistant_masks"]
    else:
        ids = list(_rendered(tokenizer, messages)["input_ids"])
        marks = _marks(tokenizer, messages, ids)
    labels = [token if mark else IGNORED for token, mark in zip(ids, marks, strict=True)]
    return Encoded(ids, labels)


def _marks(tokenizer: Any, messages: Messages, ids: list[int]) -> list[int]:
    """Return 1 for each token that a message of the assistant adds, 0 for all other tokens."""
    marks = [0] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not index:
            raise ValueError(
                "the conversation begins with the assistant, so its text cannot be separated from "
                "the message's header; begin with the user, or mark the assistant's part in the "
                "chat template by {% generation %} and {% endgeneration %}"
            )
        before = _rendered(tokenizer, messages[:index], add_generation_prompt=True)["input_ids"]
        after = _rendered(tokenizer, messages[: index + 1])["input_ids"]
        if ids[: len(before)] != list(before) or ids[: len(after)] != list(after):
            raise ValueError(
                "the chat template changes the text of a message when further messages follow, so "
                "prompts cannot be separated from answers; mark the assistant's part in the "
                "template by {% generation %} and {% endgeneration %}"
            )
        marks[len(before) : len(after)] = [1] * (len(after) - len(before))
    return marks


def _rendered(tokenizer: Any, messages: Messages, **more: Any) -> Any:
    # Templates may raise Jinja's errors, and any other error.
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **more)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"the chat template cannot render a conversation: {text}") from error


def has_labels(conversation: Encoded, seq: int) -> bool:
    """Return whether the first `seq` tokens have a label. The first token is never predicted."""
    return any(label != IGNORED for label in conversation.labels[1:seq])


def to_windows(
    conversations: Sequence[Encoded], seq: int, pad: int, *, packing: bool
) -> torch.Tensor:
    """Return windows of conversations, int32 [windows, 3, seq]: ids, labels, positions. The rest of
    a window is `pad`, without labels. Conversations longer than `seq` are cut at the end;
    conversations without a label in their first `seq` tokens are left out. packing: put several
    conversations into a window, if they fit.
    """
    kept = [
        Encoded(each.ids[:seq], each.labels[:seq])
        for each in conversations
        if has_labels(each, seq)
    ]
    windows = [[each] for each in kept] if not packing else _best_fit(kept, seq)
    found = torch.zeros(len(windows), 3, seq, dtype=torch.int32)
    found[:, 0], found[:, 1] = pad, IGNORED
    for row, window in zip(found, windows, strict=True):
        at = 0
        for ids, labels in window:
            end = at + len(ids)
            row[0, at:end] = torch.tensor(ids, dtype=torch.int32)
            # No label: the conversation before does not predict a conversation's first token.
            row[1, at:end] = torch.tensor([IGNORED, *labels[1:]], dtype=torch.int32)
            row[2, at:end] = torch.arange(len(ids), dtype=torch.int32)
            at = end
        # Without packing positions continue, so that attention needs the causal mask only.
        first = 0 if packing else at
        row[2, at:] = torch.arange(first, first + seq - at, dtype=torch.int32)
    return found


def _best_fit(conversations: Sequence[Encoded], seq: int) -> list[list[Encoded]]:
    """Distribute conversations over windows, the longest first, each into the window with the least
    free space that suffices. Windows are in the order of their first conversations.
    """
    lengths = [len(each.ids) for each in conversations]
    windows: list[list[int]] = []
    # (free tokens, window), sorted.
    spaces: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        at = bisect.bisect_left(spaces, (lengths[index], 0))
        if at == len(spaces):
            windows.append([])
            free, window = seq, len(windows) - 1
        else:
            free, window = spaces.pop(at)
        windows[window].append(index)
        bisect.insort(spaces, (free - lengths[index], window))
    # Restore the order: a measurement uses the first windows, which must not be the longest ones.
    found = sorted(sorted(window) for window in windows)
    return [[conversations[index] for index in window] for window in found]

"""Conversations as training windows: rendered by the tokenizer's chat template, with the prompts
masked, one in a window or several.

    JSON lines -> messages -> tokens and labels -> windows [3, seq]: ids, labels, positions

Only what the assistant says has labels. transformers marks these tokens where the template says
where it begins and ends ({% generation %}); else they are the tokens by which a conversation grows
when the assistant's message is added.

With packing a window holds several conversations. Positions begin anew for each, and by that
transformers' attention keeps them apart. Windows are filled by best fit, the longest conversation
first.
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
"""Label of a token that has no part in the loss: transformers' and torch's."""

Messages = list[dict[str, Any]]


class Conversation(NamedTuple):
    """Messages, and the file and line that they come from."""

    messages: Messages
    place: str


class Encoded(NamedTuple):
    """Tokens of a conversation, and their labels, IGNORED where it is a prompt."""

    ids: list[int]
    labels: list[int]


def read_conversations(path: Path, column: str) -> list[Conversation]:
    """Return the conversations of a file of JSON lines. Raises: ValueError naming file and line."""
    found: list[Conversation] = []
    try:
        # "-sig": editors may write a mark of the encoding first.
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
        raise ValueError(f"{place} has no message of the assistant, so nothing to learn")
    for each in messages:
        # Templates write other values as Python shows them. Calls of tools have no text.
        if not isinstance(each.get("content"), str) and not each.get("tool_calls"):
            raise ValueError(
                f"{place}: the message of the {each['role']} has no text in 'content' "
                f"({type(each.get('content')).__name__}); write it as one string"
            )
    return messages


def encode(tokenizer: Any, conversation: Conversation) -> Encoded:
    """Render a conversation. Raises: ValueError for a template that fails, or that renders earlier
    messages in another way once later ones follow.
    """
    try:
        return _encode(tokenizer, conversation.messages)
    except ValueError as error:
        raise ValueError(f"{conversation.place}: {error}") from error


def _encode(tokenizer: Any, messages: Messages) -> Encoded:
    # A tokenizer may have several templates by name.
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
    """Return 1 for each token that a message of the assistant adds, 0 for all others."""
    marks = [0] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not index:
            raise ValueError(
                "the conversation begins with the assistant, so that its words cannot be told from "
                "their header; begin it with the user, or mark the assistant's part in the chat "
                "template by {% generation %} and {% endgeneration %}"
            )
        before = _rendered(tokenizer, messages[:index], add_generation_prompt=True)["input_ids"]
        after = _rendered(tokenizer, messages[: index + 1])["input_ids"]
        if ids[: len(before)] != list(before) or ids[: len(after)] != list(after):
            raise ValueError(
                "the chat template renders a message in another way when others follow, so the "
                "prompts cannot be told apart; mark the assistant's part in it by {% generation %} "
                "and {% endgeneration %}"
            )
        marks[len(before) : len(after)] = [1] * (len(after) - len(before))
    return marks


def _rendered(tokenizer: Any, messages: Messages, **more: Any) -> Any:
    # Templates may raise an error of Jinja, and of any other kind.
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **more)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"the chat template cannot render a conversation: {text}") from error


def has_labels(conversation: Encoded, seq: int) -> bool:
    """Return whether the first `seq` tokens have a label; the first token has no prediction."""
    return any(label != IGNORED for label in conversation.labels[1:seq])


def to_windows(
    conversations: Sequence[Encoded], seq: int, pad: int, *, packing: bool
) -> torch.Tensor:
    """Return windows of conversations, int32 [windows, 3, seq]: ids, labels, positions. The rest of
    a window is `pad`, without labels. Conversations longer than `seq` are cut at the end; without a
    label in `seq` tokens they are left out. packing: several in a window, if they fit.
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
            # The first token of a conversation follows from none of the one before.
            row[1, at:end] = torch.tensor([IGNORED, *labels[1:]], dtype=torch.int32)
            row[2, at:end] = torch.arange(len(ids), dtype=torch.int32)
            at = end
        # Without packing positions go on, so that attention needs no mask but the causal one.
        first = 0 if packing else at
        row[2, at:] = torch.arange(first, first + seq - at, dtype=torch.int32)
    return found


def _best_fit(conversations: Sequence[Encoded], seq: int) -> list[list[Encoded]]:
    """Distribute conversations over windows: each, the longest first, into the window with the
    least room that still holds it. Windows are in the order of their first conversations.
    """
    lengths = [len(each.ids) for each in conversations]
    windows: list[list[int]] = []
    # (room, window), sorted.
    rooms: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        at = bisect.bisect_left(rooms, (lengths[index], 0))
        if at == len(rooms):
            windows.append([])
            room, window = seq, len(windows) - 1
        else:
            room, window = rooms.pop(at)
        windows[window].append(index)
        bisect.insort(rooms, (room - lengths[index], window))
    # The longest first would make the first windows, which a measurement takes, a choice by length.
    found = sorted(sorted(window) for window in windows)
    return [[conversations[index] for index in window] for window in found]

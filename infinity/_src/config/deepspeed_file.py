"""Names and values of a DeepSpeed configuration: read from a file, compared with the table.

file, base64 or mapping -> `load` -> an object -> `collected` -> one entry for each key, whose
name is in `deepspeed_keys.py` -> `Given`: "auto" filled, values checked, notes on what they mean
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infinity._src.base.wording import listed
from infinity._src.config.deepspeed_keys import (
    AUTO,
    KEYS,
    LEFT_OUT,
    MAPPED,
    NO_MEANING,
    REFUSED,
    SECTIONS,
    SPELLINGS,
    TORCH_SCHEDULES,
    ConfigKey,
    shown,
)


@dataclasses.dataclass(frozen=True)
class KeyMeaning:
    """One key of a configuration as it was written, its value, its fate, and what became of it.

    fate: "mapped", "no meaning", "refused" (its value asks for nothing), or "left out": its default
    is another one here.
    """

    key: str
    value: Any
    fate: str
    became: str


def load(config: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a configuration for messages, and its object."""
    if isinstance(config, Mapping):
        return "DeepSpeed configuration", config
    if not isinstance(config, (str, os.PathLike)):
        raise ValueError(
            f"DeepSpeed configuration {shown(config)}: give a mapping or the path of a JSON file"
        )
    where, text = _text_of(config)
    try:
        found = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: line {error.lineno}, column {error.colno}: {error.msg}. It must be plain "
            "JSON: comments and commas at the end, which DeepSpeed takes, have to go"
        ) from None
    except RecursionError:
        raise ValueError(f"{where}: objects lie in each other too deep; it has no such key") from (
            None
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}: {shown(found)} is no configuration; write a JSON object")
    return where, found


def _text_of(config: str | os.PathLike[str]) -> tuple[str, str]:
    path = Path(config)
    try:
        return str(path), path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: it is no text in UTF-8; write it as JSON") from None
    except (OSError, ValueError) as error:
        # Launchers hand configurations over as base64.
        if (text := _decoded(os.fspath(config))) is not None:
            return "DeepSpeed configuration", text
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"{shown(os.fspath(config))}: {reason}; give a mapping or the path of a JSON file"
        ) from None


def _decoded(text: str) -> str | None:
    """Decode an object in base64; None for any other text."""
    try:
        found = base64.b64decode(text.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None
    return found if found.lstrip().startswith("{") else None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{listed(map(shown, twice))} twice in one object: keep one of them")
    return found


@dataclasses.dataclass
class _Entry:
    """One key that was given: its row, its name as written, its value."""

    key: ConfigKey
    written: str
    value: Any


def collected(config: Mapping[str, Any]) -> Given:
    """Collect the keys of a configuration with their rows. null counts as left out."""
    entries: dict[str, _Entry] = {}
    config = _moved(config)
    torch_section = _torch_schedule(config)
    for key, written, value in _walk(config, "", torch_section):
        if key.name in entries:
            raise ValueError(
                f"{entries[key.name].written} and {written} are two names of one key: keep "
                f"{key.name}"
            )
        entries[key.name] = _Entry(key, written, value)
    return Given(entries, config["scheduler"].get("params") or {} if torch_section else {})


def _moved(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with what old versions and Hugging Face's pages write elsewhere in its
    place, and without comments."""
    # DeepSpeed does not look at them either.
    found = {
        name: value
        for name, value in config.items()
        if not (isinstance(name, str) and name.startswith("_"))
    }
    old = found.pop("bfloat16", None)
    if old is not None and found.get("bf16") is None:
        found["bf16"] = old
    zero = found.get("zero_optimization")
    if isinstance(zero, bool):
        found["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping) and "aio" in zero:
        if found.get("aio") is not None:
            raise ValueError(
                "aio and zero_optimization.aio: keep aio, at the top, where DeepSpeed reads it"
            )
        found["zero_optimization"] = {name: value for name, value in zero.items() if name != "aio"}
        found["aio"] = zero["aio"]
    return found


def _torch_schedule(config: Mapping[str, Any]) -> str | None:
    """Return the section that is taken as it is, the arguments of a schedule of torch; None without
    one."""
    scheduler = config.get("scheduler")
    if not isinstance(scheduler, Mapping):
        return None
    kind, arguments = scheduler.get("type"), scheduler.get("params")
    if not isinstance(kind, str) or kind not in TORCH_SCHEDULES:
        return None
    if not isinstance(arguments, (Mapping, type(None))) or not all(
        isinstance(name, str) for name in arguments or ()
    ):
        raise ValueError(f"scheduler.params={shown(arguments)}: give an object")
    return "scheduler.params"


def _walk(
    values: Mapping[Any, Any], section: str, untouched: str | None
) -> Iterator[tuple[ConfigKey, str, Any]]:
    for name, value in values.items():
        if not isinstance(name, str):
            raise ValueError(f"{section}{shown(name)}: names of keys are texts")
        written = section + name
        if value is None or written == untouched:
            # Checked all the same: null under an unknown name is a mistake, too.
            if written not in SPELLINGS and written not in SECTIONS:
                raise ValueError(_unknown(written, value))
        elif written in SPELLINGS:
            yield SPELLINGS[written], written, value
        elif written not in SECTIONS:
            raise ValueError(_unknown(written, value))
        elif isinstance(value, Mapping):
            yield from _walk(value, written + ".", untouched)
        else:
            raise ValueError(f"{written}={shown(value)}: give an object")


def _unknown(written: str, value: Any) -> str:
    """Say that a key is not known, with the nearest that is: in another section under the same
    name, in its section, anywhere."""
    known = sorted({*SPELLINGS, *SECTIONS})
    section, _, last = written[:200].rpartition(".")
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    beside = [name for name in known if name.startswith(section)]
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    near = (
        (elsewhere if len(elsewhere) == 1 else [])
        or difflib.get_close_matches(written[:200], beside, 1, 0.75)
        or [by_last[one] for one in difflib.get_close_matches(last, by_last, 1, 0.75)]
        or difflib.get_close_matches(written[:200], known, 1, 0.5)
    )
    fix = f'write "{near[0]}", the nearest that is' if near else "leave it out"
    name = written if len(written) <= 80 and written.isprintable() else shown(written)
    return f"{name}={shown(value)}: there is no such key; {fix} (docs/deepspeed-config.md)"


class Given:
    """Values of a configuration by the names of their rows, and notes on what they mean here.

    untouched: the arguments of a schedule of torch.
    """

    def __init__(self, entries: dict[str, _Entry], untouched: Mapping[str, Any]) -> None:
        self.untouched = untouched
        self._entries = entries
        self._open: set[str] = set()
        self._became: dict[str, str] = {}
        self._differs: dict[str, str] = {}

    def fill(self, auto: Mapping[str, Any], *, keep_auto: bool) -> None:
        """Put the values of `auto` in place of "auto". Others are left out where nothing depends
        on them, or with keep_auto; else they are an error."""
        for name in auto:
            if name not in SPELLINGS:
                raise ValueError(f"auto: {_unknown(str(name), auto[name])}")
        values = {SPELLINGS[name].name: value for name, value in auto.items()}
        lacking = []
        for name, entry in list(self._entries.items()):
            if (
                entry.value != AUTO
                or not isinstance(entry.value, str)
                or entry.key.check.takes_auto
            ):
                continue
            if name in values:
                entry.value = values[name]
            elif entry.key.fate == NO_MEANING or (keep_auto and not entry.key.policy):
                self._open.add(name)
                known = entry.key.fate == NO_MEANING
                self._became[name] = entry.key.to if known else "as the trainer fills it"
            else:
                lacking.append(entry.written)
        if lacking:
            raise ValueError(
                f'{listed(lacking)}: "auto" is for the trainer to fill, before it is read; write '
                f"the value, or give it as auto={{{lacking[0]!r}: ...}}"
            )

    def check(self) -> None:
        """Check all values, and read them as the engine takes them."""
        for name, entry in self._entries.items():
            key = entry.key
            if self._is_auto(name):
                continue
            if key.off is not None:
                if not key.off.tells(entry.value):
                    raise ValueError(f"{self.show(name)} is refused: {key.to}")
                continue
            try:
                entry.value = key.check.read(entry.value)
            except (ValueError, TypeError):
                raise ValueError(f"{self.show(name)}: give {key.check.text}") from None

    def _is_auto(self, name: str) -> bool:
        return name in self._open

    def has(self, name: str) -> bool:
        """Tell whether a key was given a value."""
        return name in self._entries and not self._is_auto(name)

    def was_written(self, name: str) -> bool:
        """Tell whether a key is there, be it "auto"."""
        return name in self._entries

    def __getitem__(self, name: str) -> Any:
        return self._entries[name].value if self.has(name) else KEYS[name].default

    def below(self, section: str) -> dict[str, Any]:
        """Return the mapped values that were given in a section, by the last parts of their
        names."""
        return {
            name.removeprefix(section): entry.value
            for name, entry in self._entries.items()
            if name.startswith(section) and entry.key.fate == MAPPED and self.has(name)
        }

    def show(self, name: str) -> str:
        """Write a key as it was given, with its value; its default where it was not."""
        if name not in self._entries:
            return f"{name}={shown(KEYS[name].default)} (left out)"
        entry = self._entries[name]
        return f"{entry.written}={shown(entry.value)}"

    def became(self, name: str, text: str) -> None:
        """Note what a key became, unless its value is still open."""
        if name in self._entries and not self._is_auto(name):
            self._became[name] = text

    def differs(self, name: str, text: str) -> None:
        """Note that a key, or its default, means something else here."""
        self._differs[name] = text

    def meanings(self) -> tuple[KeyMeaning, ...]:
        """Return all keys in the order of the configuration, then those that were left out and
        whose default is not the same here."""
        given = [
            KeyMeaning(entry.written, entry.value, entry.key.fate, self._text(entry))
            for entry in self._entries.values()
        ]
        absent = [
            KeyMeaning(name, KEYS[name].default, LEFT_OUT, text)
            for name, text in self._differs.items()
            if name not in self._entries
        ]
        return (*given, *absent)

    def _text(self, entry: _Entry) -> str:
        name = entry.key.name
        if name in self._differs:
            return self._differs[name]
        if entry.key.fate == REFUSED:
            return "asks for nothing"
        return self._became.get(name, entry.key.to)

    def notes(self) -> tuple[str, ...]:
        """Return a line for each key that means nothing here, or something else."""
        return tuple(
            f"{self.show(SPELLINGS[found.key].name)}: {found.became}"
            for found in self.meanings()
            if self._is_noted(SPELLINGS[found.key].name, found.fate)
        )

    def _is_noted(self, name: str, fate: str) -> bool:
        return fate in (NO_MEANING, LEFT_OUT) or name in self._differs or self._is_auto(name)

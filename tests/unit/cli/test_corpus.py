"""Reading text, holding some of it out, cutting it into windows."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity._src.cli.corpus import (
    Corpus,
    build_corpus,
    read_lines,
    split_held_out,
    steps_of,
    windows,
)


def options(**given: Any) -> argparse.Namespace:
    defaults = {
        "text": None, "jsonl": None, "sqlite": None, "query": None, "column": "text",
        "holdout": 0.2, "steps": 2, "batch": 2, "seq": 4, "accumulate": 1, "eval_batches": 2,
        "chat": None, "eval": None, "packing": False,
    }  # fmt: skip
    return argparse.Namespace(**{**defaults, **given})


def bytes_of(lines: list[str]) -> list[list[int]]:
    return [list(line.encode()) for line in lines]


def test_plain_text_jsonl_and_sqlite_give_the_same_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffone two\n\nthree four\n")
    (tmp_path / "a.jsonl").write_text('\ufeff{"body": "one two"}\n\n{"body": "three four"}\n')
    database = sqlite3.connect(tmp_path / "a.db")
    database.execute("CREATE TABLE t (x TEXT, y TEXT)")
    database.executemany(
        "INSERT INTO t VALUES (?, ?)", [("one", "two"), ("three", "four"), (None, "")]
    )
    database.commit()
    database.close()
    wanted = ["one two", "three four"]
    assert read_lines(options(text=tmp_path / "a.txt")) == wanted
    assert read_lines(options(jsonl=tmp_path / "a.jsonl", column="body")) == wanted
    assert read_lines(options(sqlite=tmp_path / "a.db", query="SELECT x, y FROM t")) == wanted


def test_a_query_cannot_change_the_database(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "a.db")
    database.execute("CREATE TABLE t (x TEXT)")
    database.commit()
    database.close()
    with pytest.raises(ValueError, match="readonly"):
        read_lines(options(sqlite=tmp_path / "a.db", query="INSERT INTO t VALUES ('x')"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": "gone.txt"}, "gone.txt"),
        ({"text": "empty.txt"}, "empty"),
        ({"text": "binary.txt"}, "not UTF-8"),
        ({"jsonl": "other.jsonl"}, "--column"),
        ({"jsonl": "text.txt"}, "is not JSON"),
        ({"sqlite": "gone.db", "query": "SELECT 1"}, "no such file"),
        ({"sqlite": "text.txt", "query": "SELECT x FROM t"}, "not a database"),
        ({"sqlite": "text.txt"}, "--query"),
        ({"sqlite": "bytes.db", "query": "SELECT x FROM t"}, "a value of bytes"),
        ({"jsonl": "deep.jsonl"}, "deep.jsonl:1 is not JSON"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, given: dict[str, str], message: str) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with contextlib.closing(sqlite3.connect(tmp_path / "bytes.db")) as database:
        database.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (x'ff')")
    (tmp_path / "deep.jsonl").write_text("[" * 9999)
    (tmp_path / "other.jsonl").write_text('{"body": "one"}\n')
    (tmp_path / "text.txt").write_text("text " * 400)
    paths: dict[str, Any] = {
        key: value if key == "query" else tmp_path / value for key, value in given.items()
    }
    with pytest.raises(ValueError, match=message):
        read_lines(options(**paths))


@given(
    st.lists(st.text(st.characters(codec="ascii"), min_size=1), min_size=2), st.floats(0.01, 0.99)
)
def test_held_out_is_the_end_and_nothing_is_in_both(lines: list[str], share: float) -> None:
    train, held = split_held_out(lines, share)
    assert held
    assert train
    between_lines = train + held == lines and sum(map(len, held)) >= share * sum(map(len, lines))
    # When the held-out lines would be all lines, the text is cut inside.
    assert between_lines or train[0] + held[0] == "\n".join(lines)


def test_windows_are_consecutive_and_only_as_many_as_wanted() -> None:
    calls: list[int] = []

    def tokenize(lines: list[str]) -> list[list[int]]:
        calls.append(len(lines))
        return bytes_of(lines)

    found = windows(["abcdefg"] * 5000, tokenize, seq=16, count_max=3)
    assert found.shape == (3, 16)
    assert bytes(found.flatten().tolist()) == (b"abcdefg\n" * 6)
    assert calls == [1024], "only what is needed is tokenised"


def test_training_draws_from_all_of_the_text_however_short_the_run_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{number:07}\n" for number in range(5000)))
    found = build_corpus(options(text=tmp_path / "a.txt", steps=1, seq=8), bytes_of)
    wanted = [list(f"{number:07}\n".encode()) for number in range(4000)]
    assert found.train.tolist() == wanted
    # Only the measured portion of the held-out part.
    assert bytes(found.held_out.flatten().tolist()) == b"0004000\n0004001\n0004002\n0004003\n"
    assert next(found.batches(2, 0)).dtype == torch.int64


@given(st.floats(0.01, 5), st.integers(1, 50), st.integers(1, 9))
def test_epochs_take_each_window_that_often(epochs: float, count: int, per_step: int) -> None:
    steps = steps_of(epochs, count, per_step)
    assert steps * per_step >= epochs * count > (steps - 1) * per_step


def test_every_window_comes_once_per_pass_in_an_order_of_the_seed() -> None:
    corpus = Corpus(torch.arange(10).reshape(10, 1), torch.zeros(1, 1))
    drawn = [
        torch.cat(list(itertools.islice(corpus.batches(2, seed), 10))).flatten().tolist()
        for seed in (1, 1, 2)
    ]
    assert sorted(drawn[0][:10]) == sorted(drawn[0][10:]) == list(range(10))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_text_too_short_says_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a few words\n" * 3)
    with pytest.raises(ValueError, match="--seq 64"):
        build_corpus(options(text=tmp_path / "a.txt", seq=64), bytes_of)


@given(
    st.integers(1, 30), st.integers(1, 30), st.integers(1, 4), st.integers(1, 5), st.integers(0, 9)
)
def test_the_rows_of_all_ranks_are_the_batches_of_one(
    train: int, held: int, batch: int, ranks: int, seed: int
) -> None:
    corpus = Corpus(torch.arange(train)[:, None], torch.arange(held)[:, None])
    of_one = corpus.batches(ranks * batch, seed)
    of_each = [corpus.batches(batch, seed, rank=rank, ranks=ranks) for rank in range(ranks)]
    for _ in range(3):
        assert torch.equal(torch.cat([next(rows) for rows in of_each]), next(of_one))
    rows = [list(corpus.held_out_rows(batch, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert len({len(found) for found in rows}) == 1  # as many forwards on each
    assert all(len(ids) for found in rows for ids, _ in found)
    counted = torch.cat([ids for turn in zip(*rows, strict=True) for ids, counts in turn if counts])
    assert torch.equal(counted, corpus.held_out)

"""Conversations: rendered, masked, packed; and `infinity train --chat`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from infinity._src.cli import hf_model  # noqa: E402
from infinity._src.cli.chat import (  # noqa: E402
    IGNORED,
    Conversation,
    Encoded,
    encode,
    read_conversations,
    to_windows,
)
from infinity._src.cli.corpus import arguments_of, build_corpus, weight_of  # noqa: E402
from infinity._src.cli.main import build_parser  # noqa: E402
from infinity._src.cli.train import run_train  # noqa: E402
from tests.tiny_llama import TEXT, write_model  # noqa: E402
from tests.unit.cli.commands import run  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_pictures")

PLAIN = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</>{% endgeneration %}{% else %}{{ m.content }}</>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
# The last message is rendered in another way.
CHANGING = "{% for m in messages %}{{ '!' if loop.last else '' }}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_model(tmp_path_factory.mktemp("model"))
    (found / "chat_template.jinja").write_text(PLAIN)
    return found


@pytest.fixture(scope="module")
def tokenizer(model_directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model_directory)


def says(*texts: str) -> list[dict[str, Any]]:
    """Messages of a user and an assistant, in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


def talk(*texts: str) -> Conversation:
    return Conversation(says(*texts), "a.jsonl:3")


@pytest.mark.parametrize("template", [PLAIN, MARKED, MARKED.replace("{% gen", "{%-gen")])
def test_the_words_of_the_assistant_are_learnt_alone(
    tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    ids, labels = encode(tokenizer, talk("Who?", "Me.", "Why?", "So."))
    assert tokenizer.decode(ids) == "<u>Who?</><a>Me.</><u>Why?</><a>So.</>"
    learnt = [token for token in labels if token != IGNORED]
    assert tokenizer.decode(learnt) == "Me.</>So.</>"
    assert all(label in (token, IGNORED) for token, label in zip(ids, labels, strict=True))
    begun = Conversation(says("Who?", "Me.")[1:], "a.jsonl:3")
    if template == PLAIN:
        with pytest.raises(ValueError, match="the conversation begins with the assist"):
            encode(tokenizer, begun)
    else:
        assert tokenizer.decode(encode(tokenizer, begun).ids) == "<a>Me.</>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHANGING, "a.jsonl:3: the chat template changes the text of a message when"),
        ("{{ raise_exception('no system') }}", "cannot render a conversation: no system"),
    ],
)
def test_a_template_that_hides_the_prompts_is_refused(
    tokenizer: Any, template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=message):
        encode(tokenizer, talk("Who?", "Me.", "Why?", "So."))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:2 is not JSON"),
        ('{"text": "a"}', "a.jsonl:2 has no list of messages"),
        ('{"messages": [1]}', "a.jsonl:2 has no list of messages"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant"),
        ("[" * 9999, "a.jsonl:2 is not JSON"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "assistant has no text .*None"),
        ('{"messages": [{"role": "assistant", "content": ["a"]}]}', r"\(list\); write it"),
    ],
)
def test_a_line_without_a_conversation_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    mark, calls = "\ufeff", {"role": "assistant", "content": None, "tool_calls": [{}]}
    path.write_text(mark + json.dumps({"messages": [*says("a", "b"), calls]}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_conversations(path, "messages")


CONVERSATIONS = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=12).map(
        lambda learnt: Encoded(
            list(range(1, len(learnt) + 1)),
            [at + 1 if learns else IGNORED for at, learns in enumerate(learnt)],
        )
    ),
    max_size=12,
)


@given(CONVERSATIONS, st.booleans())
def test_windows_hold_every_conversation_once(found: list[Encoded], packing: bool) -> None:
    seq = 8
    windows = to_windows(found, seq, 0, packing=packing)
    assert windows.shape[1:] == (3, seq)
    kept = [each for each in found if any(label != IGNORED for label in each.labels[1:seq])]
    rows, starts = [], 0
    for ids, labels, positions in windows:
        assert (labels != IGNORED).any()
        rows += [int(label) for label in labels if label != IGNORED]
        # A conversation's tokens are its positions and one.
        assert torch.equal(positions[ids > 0], ids[ids > 0] - 1)
        starts += int((ids == 1).sum())
    assert starts == len(kept)
    wanted = [label for each in kept for label in each.labels[1:seq] if label != IGNORED]
    assert sorted(rows) == sorted(wanted)
    assert len(windows) <= len(kept) if packing else len(windows) == len(kept)


def test_packed_conversations_do_not_see_each_other(model_directory: Path, tokenizer: Any) -> None:
    """The loss of a window is the mean over its conversations' tokens, each computed alone."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(model_directory, dtype=torch.float32)
    found = [encode(tokenizer, talk("Who?", "Me.")), encode(tokenizer, talk("Why is it?", "So."))]
    packed = to_windows(found, 64, 256, packing=True).long()
    alone = to_windows(found, 64, 256, packing=False).long()
    assert (len(packed), len(alone)) == (1, 2)

    def loss_of(window: torch.Tensor) -> float:
        with torch.no_grad():
            # As the command calls a model.
            return float(model(**arguments_of(window), use_cache=False).loss)

    together, each = loss_of(packed), [loss_of(row[None]) for row in alone]
    weights = [weight_of(row[None]) for row in alone]
    mean = sum(w * loss for w, loss in zip(weights, each, strict=True)) / sum(weights)
    assert together == pytest.approx(mean, abs=1e-5)
    # Conversations that do not fit together keep the order of the file.
    apart = to_windows(found, 24, 256, packing=True)[:, 0]
    assert torch.equal(apart, alone[:, 0, :24])


GIVEN = "--steps 3 --batch 2 --seq 64 --lr 3e-3 --dtype bfloat16 --no-trace --no-save"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    talks = [says(f"What is {n}?", f"It is {n}." * (1 + n % 3)) for n in range(30)]
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in talks))
    return path


def train(model: Path, out: Path, *more: object) -> tuple[int, str, list[dict[str, Any]]]:
    status, shown = run(run_train, "train", model, "--out", out, *GIVEN.split(), *more)
    lines = (out / "metrics.jsonl").read_text().splitlines() if status == 0 else []
    return status, shown, [json.loads(line) for line in lines]


def test_conversations_train_and_an_eval_file_is_measured(
    model_directory: Path, chats: Path, tmp_path: Path
) -> None:
    other = tmp_path / "eval.jsonl"
    other.write_text("\n".join(chats.read_text().splitlines()[:5]))
    chosen = ("--chat", chats, "--eval", other, "--accumulate", "2")
    counts = []
    for packing in ((), ("--packing",)):
        status, shown, rows = train(model_directory, tmp_path / "out", *chosen, *packing)
        assert status == 0, shown
        held_out = [row for row in rows if row["kind"] == "held_out"]
        assert held_out[-1]["loss"] < held_out[0]["loss"] - 0.1
        counts.append(held_out[0]["windows"])
        assert "longer" not in shown
    # All of the file; several in a window.
    assert counts[0] == 5 > counts[1]


def test_conversations_that_are_cut_are_told_of(tokenizer: Any, chats: Path) -> None:
    options = build_parser().parse_args(
        ["train", "model", "--out", "out", "--chat", str(chats), "--seq", "40"]
    )
    found = build_corpus(options, tokenizer, tokenizer=tokenizer)
    conversations = read_conversations(chats, "messages")
    longer = sum(len(encode(tokenizer, each).ids) > 40 for each in conversations)
    assert 0 < longer < 30
    assert found.notes == (f"{longer} of 30 conversations are longer than --seq 40, and cut",)
    options.seq, options.eval = 20, chats
    longer, without = build_corpus(options, tokenizer, tokenizer=tokenizer).notes
    assert longer == "60 of 60 conversations are longer than --seq 20, and cut"
    assert without.startswith("40 of 60 conversations have no answer in their first 20 tokens, and")
    # One in twenty is held out, or more.
    assert (len(found.train), len(found.held_out)) == (28, 2)


def test_an_eval_file_of_text_is_measured_whole(model_directory: Path, tmp_path: Path) -> None:
    text, other = tmp_path / "text.txt", tmp_path / "eval.txt"
    text.write_text(TEXT)
    other.write_text(TEXT[:700])
    given = ("--text", text, "--eval", other, "--seq", "32")
    status, shown, rows = train(model_directory, tmp_path / "out", *given)
    assert status == 0, shown
    (held_out, _) = [row for row in rows if row["kind"] == "held_out"]
    assert held_out["windows"] == 700 // 32
    assert f"{len(TEXT) // 32} training and {700 // 32} held-out windows" in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--eval", "gone.txt"], "cannot read the text"),
        (["--eval", "text.txt", "--holdout", "0.1"], "give one of them"),
        (["--packing"], "--packing puts several conversations of --chat into a window"),
        (["--query", "SELECT 1"], "--query goes with --sqlite"),
        (["--column", "text"], "--column text names a field of the lines of --jsonl or --chat"),
        (["--chat", "one.jsonl", "--holdout", "2"], "--holdout 2 must be between 0 and 1"),
        (["--holdout", "nan"], "--holdout nan must be between 0 and 1"),
        (["--chat", "gone.jsonl"], "cannot read the conversations"),
        (["--chat", "text.txt"], "text.txt:1 is not JSON"),
        (["--chat", "one.jsonl", "--seq", "2"], "no training conversation has an answer within"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    model_directory: Path, tmp_path: Path, more: list[str], message: str, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("one.jsonl").write_text(json.dumps({"messages": says("a", "b")}) + "\n")
    text = [] if "--chat" in more else ["--text", "text.txt"]
    status, shown, _ = train(model_directory, Path("out"), *text, *more)
    assert status == 2
    assert message in shown
    assert sum("error:" in line for line in shown.splitlines()) == 1
    assert not Path("out").exists()


def test_packing_is_refused_for_models_that_do_not_keep_conversations_apart(
    model_directory: Path, chats: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(model_directory, tmp_path / "model")
    sizes = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.OPTConfig(
        **sizes, vocab_size=257, word_embed_proj_dim=32, max_position_embeddings=99, pad_token_id=0
    )
    transformers.OPTForCausalLM(config).save_pretrained(directory)
    for more, message in (
        (("--packing",), "OPTForCausalLM would attend from one conversation"),
        (("--seq", "100"), "--seq has 100 tokens and the model has 99 positions; give 99 or less"),
        (("--prompt", "a" * 80), "--prompt, continued, has 104 tokens and the model has 99"),
    ):
        status, shown, _ = train(directory, tmp_path / "out", "--chat", chats, *more)
        assert (status, (tmp_path / "out").exists()) == (2, False)
        assert message in shown
    llama = hf_model.model_on_meta(hf_model.find_pretrained(model_directory), torch.bfloat16)
    assert hf_model.check_length(llama, 256) == ""
    assert "longer than the 256 positions" in hf_model.check_length(llama, 257)


def test_a_tokenizer_without_a_template_says_so(chats: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    bare = write_model(tmp_path / "model")
    status, shown, _ = train(bare, tmp_path / "out", "--chat", chats)
    assert status == 2
    assert "--chat needs a chat template" in shown

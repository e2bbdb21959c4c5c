"""The target's own text: shards on disk, prompts, and that a killed run gives the same data when it goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizer_tools import smollm
from transformers import PreTrainedTokenizerFast

from headstart import InvalidParameter, ModelNotFound, ModelRefused
from headstart.cli.distill import _prompts as read_prompts
from headstart.distill.data import DataSettings, make_data
from headstart.distill.openers import OPENERS
from headstart.distill.selfplay import SelfPlay, chat_marks
from headstart.distill.shards import Corpus, Story, finished_shards, read_shard, write_shard
from headstart.machine.load.loading import Loaded, load
from headstart.testing import tiny_model

SMALL = DataSettings(sequences=14, shard=4, temperatures=(0.0, 1.0), prompt_tokens=24, answer_tokens=10, rows=3, seed=5)


@pytest.fixture(scope="module")
def target() -> Loaded:
    return load(tiny_model("llama"))


class Killed(Exception):
    pass


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_killed_run_goes_on_and_gives_the_same_data(target: Loaded, tmp_path: Path) -> None:
    make_data(target, tmp_path / "whole", SMALL)
    assert finished_shards(tmp_path / "whole") == 4

    def kill(done: int, total: int) -> None:
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        make_data(target, tmp_path / "cut", SMALL, progress=kill)
    (tmp_path / "cut" / ".shard-00002.safetensors.123").write_bytes(b"half a shard")
    assert finished_shards(tmp_path / "cut") == 2
    made: list[int] = []
    make_data(target, tmp_path / "cut", SMALL, progress=lambda done, total: made.append(done))
    assert made == [3, 4], "finished shards are kept"
    (tmp_path / "cut" / ".shard-00002.safetensors.123").unlink()
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_what_a_shard_holds(target: Loaded, tmp_path: Path) -> None:
    make_data(target, tmp_path, SMALL)
    stories = [story for number in range(4) for story in read_shard(tmp_path, number)]
    assert len(stories) == SMALL.sequences
    questions = set()
    for i, story in enumerate(stories):
        start = int(story.answer.argmax())
        questions.add(tuple(story.tokens[:start]))
        assert story.tokens[0] == 1, "a base model starts from its beginning of text"
        assert story.answer[start:].all()
        assert 1 <= story.answer.sum() <= SMALL.answer_tokens
        assert story.temperature == (0.0, 1.0)[i % 4 % 2]
    assert len(questions) == len(stories), "nothing is asked twice"
    greedy = next(story for story in stories if story.temperature == 0)
    start = int(greedy.answer.argmax())
    with torch.no_grad():
        best = target.model(torch.tensor([greedy.tokens.tolist()])).logits[0].argmax(-1)
    assert best[start - 1 : -1].tolist() == greedy.tokens[start:].tolist(), "greedy answers are the target's argmaxes"


def test_another_plan_in_the_same_folder_is_refused(target: Loaded, tmp_path: Path) -> None:
    small = DataSettings(sequences=2, shard=2, prompt_tokens=12, answer_tokens=4, rows=2)
    make_data(target, tmp_path, small)
    with pytest.raises(InvalidParameter, match=r"another seed"):
        make_data(target, tmp_path, DataSettings(**{**vars(small), "seed": 1}))


def test_prompts_from_a_file(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("One?\n\nTwo?\nOne?\n")
    assert read_prompts(str(lines)) == ["One?", "Two?"]
    records = tmp_path / "prompts.jsonl"
    records.write_text('{"prompt": "Hi", "task": "x"}\n')
    assert read_prompts(str(records)) == ["Hi"]
    records.write_text('{"text": "Hi"}\n')
    with pytest.raises(InvalidParameter, match="line 1"):
        read_prompts(str(records))
    records.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    with pytest.raises(InvalidParameter, match="not conversations"):
        read_prompts(str(records))
    with pytest.raises(InvalidParameter, match="cannot be read"):
        read_prompts(str(tmp_path / "none"))
    lines.write_text("\n")
    with pytest.raises(InvalidParameter, match="nothing"):
        read_prompts(str(lines))
    tokenizer = smollm()
    chatty = load(tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1), tokenizer=tokenizer)
    settings = DataSettings(sequences=3, shard=3, answer_tokens=4, rows=2)
    make_data(chatty, tmp_path / "data", settings, ["One?", "Two?"])
    stories = read_shard(tmp_path / "data", 0)
    asked = [tokenizer.decode(story.tokens[: int(story.answer.argmax())]) for story in stories]
    assert ["One?" in asked[0], "Two?" in asked[1], "One?" in asked[2]] == [True] * 3
    assert all(text.endswith("<|im_start|>assistant\n") for text in asked)


def test_a_model_without_a_tokenizer_cannot_read_prompts(target: Loaded, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="tokenizer"):
        make_data(target, tmp_path, SMALL, ["Hello"])


def test_batches_visit_every_sequence_once_an_epoch(tmp_path: Path) -> None:
    stories = [Story(np.full(5 + i % 3, i, np.int32), np.arange(5 + i % 3) > 2, 0.5) for i in range(16)]
    write_shard(tmp_path, 0, stories[:7])
    write_shard(tmp_path, 1, stories[7:])
    corpus = Corpus(tmp_path, length=6)
    cpu = torch.device("cpu")
    assert sorted([*corpus.held, *corpus.training]) == list(range(16))
    assert len(corpus.training) == 12
    epochs = [
        [int(t[0]) for step in range(3) for t in corpus.training_batch(e * 3 + step, 4, 9, cpu).tokens] for e in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(corpus.training)
    assert epochs[0] != epochs[1]
    again = Corpus(tmp_path, length=6)
    assert [int(t[0]) for t in again.training_batch(4, 4, 9, cpu).tokens] == epochs[1][4:8]
    batch = corpus.batch([2, 3], cpu)
    assert batch.tokens.shape == (2, 6), "cut at the length"
    assert batch.tokens[1].tolist() == [3, 3, 3, 3, 3, 0]
    assert batch.answer[1].tolist() == [False, False, False, True, True, False]
    assert int(corpus.counts(20)[4]) == 3
    assert corpus.stories[4].question == [4, 4, 4]
    with pytest.raises(ModelNotFound):
        Corpus(tmp_path / "none", 6)


def test_self_play_keeps_to_the_template() -> None:
    """Marks where they belong and nowhere else, turns that end in time, and only answers marked as such."""
    tokenizer = smollm()
    marks = chat_marks(tokenizer)
    assert tokenizer.decode(marks.to_answer) == "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(marks.to_user) == "<|im_end|>\n<|im_start|>user\n"
    model = tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    opener = tokenizer.encode(OPENERS[0])
    player = SelfPlay(model, marks, rows=5, length=80, openers=[opener], temperatures=[0.0, 1.0], longest_turns=(6, 9))
    stories = player.play(3)
    assert [s.tokens.tolist() for s in player.play(3)] == [s.tokens.tolist() for s in stories]
    assert [s.tokens.tolist() for s in player.play(4)] != [s.tokens.tolist() for s in stories]
    head = [*marks.opening, *opener]
    for story in stories:
        ids = story.tokens.tolist()
        assert ids[: len(head)] == head
        assert not story.answer[: len(head)].any()
        text, at, role, turns = ids[len(head) :], 0, 0, 0
        spoken = story.answer[len(head) :].tolist()
        while at < len(text):
            bridge = list((marks.to_answer, marks.to_user)[role])
            end = text.index(bridge[0], at) if bridge[0] in text[at:] else len(text)
            assert end - at < (6, 9)[role]
            assert spoken[at : min(end + 1, len(text))] == [role == 1] * (min(end + 1, len(text)) - at)
            assert text[end : end + len(bridge)] == bridge[: len(text) - end]
            assert not any(spoken[end + 1 : end + len(bridge)])
            at, role, turns = end + len(bridge), 1 - role, turns + 1
        assert turns > 3
        if story.temperature == 0:
            with torch.no_grad():
                best = model(torch.tensor([ids])).logits[0].argmax(-1)
            free = [j for j in range(len(head), 79) if story.answer[j + 1] and ids[j + 1] != marks.to_user[0]]
            assert free
            assert all(int(best[j]) == ids[j + 1] for j in free)


def test_templates_that_cannot_be_played_are_refused() -> None:
    import copy

    tokenizer = copy.deepcopy(smollm())
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.chat_template = None
    with pytest.raises(ModelRefused, match="no chat template"):
        chat_marks(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(ModelRefused, match="changes what is said"):
        chat_marks(tokenizer)

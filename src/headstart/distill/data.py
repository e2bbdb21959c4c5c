"""The target's own text, made by our own engine: prompts, and the answers it gives to them.

Knows: how prompts come about and how a shard of answers is made. Does not know: the files (``shards``), or training.

Prompts are the user's, or the target writes them itself: an instruct model continues its chat template's opened user
turn (sometimes from the first words of a request, so that all kinds occur), a base model starts from its beginning of
text.
What a shard holds follows from the settings and the shard's number alone, and from the prompts of the shards before it
(nothing is asked twice). So a run that was killed gives the same data when it goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..config import EngineConfig
from ..control.controller import FixedController
from ..engine.engine import Engine
from ..errors import GenerationFailed, InvalidParameter
from ..machine import gpu
from ..machine.load.loading import Loaded, eos_ids
from ..machine.runner import EagerRunner
from ..machine.text import TextCodec
from ..maths.noise import derive
from ..types import Request, SamplingParams
from ..values import at_least_one
from .openers import OPENERS
from .selfplay import Marks, SelfPlay, chat_marks
from .shards import Story, check_plan, finished_shards, read_shard, write_shard

__all__ = ["DataSettings", "make_data"]

Progress = Callable[[int, int], None]  # shards done, shards in all


@dataclass(frozen=True)
class DataSettings:
    """How much text, and of what kind."""

    sequences: int = 2000
    shard: int = 200  # sequences a shard: what is lost at most when a run is killed
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # that will be served, taken in turn
    prompt_tokens: int = 160  # the most of a prompt the target writes itself
    answer_tokens: int = 192
    prompt_temperature: float = 0.8
    rows: int = 16  # sequences decoded together
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one(self, "sequences", "shard", "prompt_tokens", "answer_tokens", "rows")
        if not self.temperatures or min(self.temperatures) < 0:
            raise InvalidParameter("temperatures", f"must be numbers of at least 0, not {self.temperatures}")

    @property
    def longest(self) -> int:
        """Tokens a sequence may have, without the template's."""
        return self.prompt_tokens + self.answer_tokens


def make_data(
    loaded: Loaded,
    folder: Path,
    settings: DataSettings,
    prompts: Sequence[str] | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Fill ``folder`` with shards, going on behind those that are there."""
    source = "own" if prompts is None else hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16]
    maker = _Maker(loaded, settings, prompts)
    plan = asdict(settings) | {"prompts": source, "model": loaded.report.architecture, "way": maker.way}
    check_plan(folder, plan | {"weights": loaded.report.parameters})
    done, shards = finished_shards(folder), -(-settings.sequences // settings.shard)
    for number in range(done):
        maker.remember(read_shard(folder, number))
    for number in range(done, shards):
        write_shard(folder, number, maker.shard(number))
        progress(number + 1, shards)


class _Maker:
    """Makes the stories of a shard."""

    def __init__(self, loaded: Loaded, settings: DataSettings, prompts: Sequence[str] | None) -> None:
        self.loaded, self.settings = loaded, settings
        self._prompts: list[list[int]] | None = None
        self._marks: Marks | None = None
        self._openers: list[list[int]] = [[]]
        self._player: SelfPlay | None = None
        self._seen: set[tuple[int, ...]] = set()
        self._ends = set(eos_ids(loaded))
        model, tokenizer = loaded.model, loaded.tokenizer
        bos = getattr(tokenizer, "bos_token_id", None) or getattr(model.config, "bos_token_id", None) or 0
        self._opening: tuple[int, ...] = (int(bos),)  # before a prompt that the target writes, and behind it
        self._to_answer: tuple[int, ...] = ()
        chat = bool(getattr(tokenizer, "chat_template", None))
        if prompts is not None:
            self._prompts = [self._encoded(text, chat) for text in prompts]
        elif chat:
            assert tokenizer is not None
            self._marks = chat_marks(tokenizer)
            self._opening, self._to_answer = self._marks.opening, self._marks.to_answer
            self._ends |= set(self._marks.ends)
            self._openers = [list(tokenizer.encode(words, add_special_tokens=False)) for words in OPENERS]
        self.way = "self-play" if self._marks is not None and gpu.reason_against(model) is None else "engine"

    def remember(self, stories: Iterable[Story]) -> None:
        """These prompts were used before."""
        self._seen.update(tuple(story.question) for story in stories)

    def shard(self, number: int) -> list[Story]:
        settings = self.settings
        count = min(settings.shard, settings.sequences - number * settings.shard)
        seed = derive(settings.seed, number + 1)
        if self.way == "self-play":
            stories = self._play(count, seed)
        else:
            stories = self._answer(self._questions(number, count, seed), seed)
        self.remember(stories)
        return stories

    # -- on a GPU, in bulk

    def _play(self, count: int, seed: int) -> list[Story]:
        s = self.settings
        if self._player is None:
            assert self._marks is not None
            self._player = SelfPlay(
                self.loaded.model,
                self._marks,
                rows=s.shard,
                length=len(self._marks.opening) + s.longest,
                openers=self._openers + [[]] * len(self._openers),
                temperatures=s.temperatures,
                user_temperature=s.prompt_temperature,
                longest_turns=(s.prompt_tokens, s.answer_tokens),
                vocab_size=self.loaded.report.tokenizer_size,
            )
        return self._player.play(seed)[:count]

    # -- by the engine

    def _engine(self) -> Engine:
        """A fresh one for each shard: what is warm in a slab must not depend on what ran before."""
        loaded, s = self.loaded, self.settings
        longest = len(self._opening) + len(self._to_answer) + s.longest
        if self._prompts is not None:
            longest = max(map(len, self._prompts)) + s.answer_tokens
        runner = EagerRunner(loaded.model, rows=s.rows, max_len=longest + 2, probe=False)
        size = loaded.report.tokenizer_size or runner.vocab_size
        config = EngineConfig(max_rows=s.rows, max_waiting=4 * s.shard + s.rows)
        return Engine(runner, None, FixedController(1), config, vocab_size=size, eos=sorted(self._ends))

    def _questions(self, number: int, count: int, seed: int) -> list[list[int]]:
        """Prompts that were not used before, up to where the answer begins."""
        if self._prompts is not None:
            first = number * self.settings.shard
            return [self._prompts[(first + i) % len(self._prompts)] for i in range(count)]
        found: list[list[int]] = []
        seen = set(self._seen)
        for attempt in range(1, 9):
            wanted = count - len(found)
            if not wanted:
                break
            for question in self._written(wanted, derive(seed, 1000 + attempt)):
                if tuple(question) not in seen and len(found) < count:
                    seen.add(tuple(question))
                    found.append(question)
        if not found:
            raise GenerationFailed("the target wrote no usable prompt of its own: give it some with --prompts")
        return found

    def _written(self, count: int, seed: int) -> list[list[int]]:
        """Prompts in the target's own words, bad ones left out."""
        s, choose = self.settings, np.random.default_rng(seed % 2**63)
        chat = self._marks is not None
        limit = s.prompt_tokens if chat else max(2, s.prompt_tokens // 4)
        starts = [
            [*self._opening, *(self._openers[choose.integers(len(self._openers))] if i % 2 else [])]
            for i in range(count)
        ]
        params = [
            SamplingParams(temperature=s.prompt_temperature, max_tokens=limit, seed=derive(seed, i + 1))
            for i in range(count)
        ]
        found = []
        for start, answer in zip(starts, self._run(starts, params), strict=True):
            ended = bool(answer) and answer[-1] in self._ends
            written = [*start, *(answer[:-1] if ended else answer)]
            # In a chat a question that has no end is no question; elsewhere a text that has ended leaves no answer.
            if ended == chat and _sensible(written[len(self._opening) :]):
                found.append([*written, *self._to_answer])
        return found

    def _answer(self, questions: list[list[int]], seed: int) -> list[Story]:
        heats = [self.settings.temperatures[i % len(self.settings.temperatures)] for i in range(len(questions))]
        params = [
            SamplingParams(temperature=temperature, max_tokens=self.settings.answer_tokens, seed=derive(seed, i + 1))
            for i, temperature in enumerate(heats)
        ]
        stories = []
        for question, answer, temperature in zip(questions, self._run(questions, params), heats, strict=True):
            mark = np.zeros(len(question) + len(answer), dtype=np.bool_)
            mark[len(question) :] = True
            stories.append(Story(np.array([*question, *answer], dtype=np.int32), mark, temperature))
        return stories

    def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        engine = self._engine()
        handles = [
            engine.submit(Request(f"{i}", tuple(prompt), param))
            for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))
        ]
        while not engine.idle:
            engine.step()
        for handle in handles:
            handle.raise_failure()
        return [list(handle.completion().token_ids) for handle in handles]

    def _encoded(self, text: str, chat: bool) -> list[int]:
        if self.loaded.tokenizer is None:
            raise InvalidParameter("prompts", "are text, but this model was given without a tokenizer")
        codec = TextCodec(self.loaded.tokenizer)
        ids = codec.encode_chat([{"role": "user", "content": text}]) if chat else codec.encode(text)
        limit = self.loaded.report.max_context
        if limit and len(ids) + self.settings.answer_tokens > limit:
            ids = ids[: limit - self.settings.answer_tokens]
        return ids


def _sensible(body: Sequence[int]) -> bool:
    """Long enough to ask something, and not one word over and over."""
    return len(body) >= 3 and len(set(body)) > len(body) // 4

"""Whole conversations in bulk: the target plays the user and the assistant, many rows in step.

Knows: the chat template's marks, and how to run hundreds of rows a step without ever looking at one of them.
Does not know: files, training.

Every row starts with the template's opened user turn (and perhaps the first words of a request, so that all kinds of
tasks occur). The model writes the question, the template's bridge to the assistant is put in, the model writes the
answer, then the next question, until the row is full. All rows have the same length at every moment, so there is no
padding, no raggedness and nothing to schedule: on a GPU a step is one captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ModelRefused
from ..machine import gpu
from ..machine.runner import EagerRunner
from .shards import Story

__all__ = ["Marks", "SelfPlay", "chat_marks"]

_USER, _ANSWER = 0, 1


@dataclass(frozen=True)
class Marks:
    """What a chat template puts around the turns, as token ids."""

    opening: tuple[int, ...]  # everything before the first user turn
    to_answer: tuple[int, ...]  # from a user turn's end mark to the assistant's first word, the mark included
    to_user: tuple[int, ...]  # from an answer's end mark to the next user turn, the mark included

    @property
    def ends(self) -> tuple[int, int]:
        """The tokens that end a user turn and an answer."""
        return self.to_answer[0], self.to_user[0]


def chat_marks(tokenizer: PreTrainedTokenizerBase) -> Marks:
    """Read the marks off a template by rendering a conversation with known words."""
    if not getattr(tokenizer, "chat_template", None):
        raise ModelRefused("this model has no chat template, so it cannot play both sides of a chat: give it prompts")
    words = ["qqaxq", "qqbxq", "qqcxq"]
    roles = ("user", "assistant", "user")
    turns = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    parts = []
    for word in words:
        if text.count(word) != 1:
            raise ModelRefused(
                "this model's chat template changes what is said, so it cannot play both sides: give it prompts"
            )
        before, _, text = text.partition(word)
        parts.append(tuple(tokenizer.encode(before, add_special_tokens=False)))
    opening, to_answer, to_user = parts
    if not (opening and to_answer and to_user):
        raise ModelRefused("this model's chat template has no marks between turns: give it prompts")
    return Marks(opening, to_answer, to_user)


class SelfPlay:
    """Plays ``rows`` conversations of ``length`` tokens at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        marks: Marks,
        *,
        rows: int,
        length: int,
        openers: Sequence[Sequence[int]] = ((),),
        temperatures: Sequence[float] = (0.0, 1.0),
        user_temperature: float = 0.8,
        longest_turns: tuple[int, int] = (160, 200),
        vocab_size: int | None = None,
        lowered: bool = True,
    ) -> None:
        """``openers``: first tokens of the first user turn, chosen at random row by row. ``longest_turns``: the most
        tokens of a user turn and of an answer. ``vocab_size``: ids from here on are never drawn.
        ``lowered``: use the fused kernels where they can run."""
        self.model, self.marks = model, marks
        self.rows, self.length = rows, length
        self.openers = [list(opener) for opener in openers]
        self.temperatures = list(temperatures)
        self.user_temperature = user_temperature
        self.device = next(model.parameters()).device
        self._vocab_size = vocab_size
        self._longest = torch.tensor(longest_turns, device=self.device)
        bridges = [marks.to_answer, marks.to_user]
        widest = max(map(len, bridges))
        self._bridge = torch.tensor([[*b, *[-1] * (widest + 1 - len(b))] for b in bridges], device=self.device)
        self._ends = torch.tensor(marks.ends, device=self.device)
        self._forward = self._make_forward(lowered)
        self._state = self._make_state()
        self._graph: Any = None

    # -- one step of all rows, on the device

    def _make_forward(self, lowered_too: bool) -> Callable[[Tensor, int], Tensor]:
        """(tokens [R, 1], how many came before) -> logits [R, V] float32; keys are kept inside.

        The lowered model reads the second from the device instead, so that a step can be captured.
        """
        if lowered_too and gpu.reason_against(self.model) is None:
            lowered = gpu.fuse(self.model, rows=self.rows, capacity=self.length + 16)
            lengths = torch.zeros(self.rows, dtype=torch.int32, device=self.device)

            def quick(tokens: Tensor, before: int) -> Tensor:
                lengths.copy_(self._state["position"].expand(self.rows))
                return lowered.forward(tokens, lengths)[:, 0]

            self.captures = True
            return quick
        runner = EagerRunner(self.model, rows=self.rows, max_len=self.length, probe=False)
        self.captures = False

        def plain(tokens: Tensor, before: int) -> Tensor:
            return runner.forward(slice(0, self.rows), tokens, [before] * self.rows)[:, 0].float()

        return plain

    def _make_state(self) -> dict[str, Tensor]:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        return {
            "tokens": zeros(self.rows, self.length),
            "answer": zeros(self.rows, self.length, dtype=torch.bool),
            "forced": zeros(self.rows, self.length),  # the opening and opener of each row; -1 where the model is free
            "temperature": zeros(
                self.rows, 2, dtype=torch.float32
            ),  # temperatures of the user's turns and of the answers
            "position": zeros(1),
            "role": zeros(self.rows),
            "said": zeros(self.rows),  # tokens of the running turn
            "bridge": zeros(self.rows),  # place in the bridge; 0 while the model is free
        }

    def _step(self, before: int = 0) -> None:
        """Feed the token at ``position`` and decide the next one. Nothing here waits for the device."""
        s = self._state
        now = s["tokens"].index_select(1, s["position"])  # [R, 1]
        logits = self._forward(now, before)
        if self._vocab_size is not None:
            logits = logits[:, : self._vocab_size]
        following = s["position"] + 1
        temperature = s["temperature"].gather(1, s["role"][:, None])  # [R, 1]
        # The exponential race: argmax of logits / T - log(noise), without noise for greedy rows
        noise = torch.empty_like(logits).exponential_().log_()
        drawn = (logits - noise * temperature).argmax(1)
        end = self._ends[s["role"]]
        drawn = torch.where(s["said"] + 1 >= self._longest[s["role"]], end, drawn)
        # A turn that ended goes on with the rest of its bridge.
        bridging = s["bridge"] > 0
        drawn = torch.where(bridging, self._bridge[s["role"], s["bridge"]], drawn)
        forced = s["forced"].index_select(1, following)[:, 0]
        opening = forced >= 0
        token = torch.where(opening, forced, drawn)
        s["tokens"].index_copy_(1, following, token[:, None])
        spoken = ~opening & ~bridging & (s["role"] == _ANSWER)
        s["answer"].index_copy_(1, following, spoken[:, None])
        ended = ~opening & ~bridging & (token == end)
        place = torch.where(ended | bridging, s["bridge"] + 1, 0)
        over = (place > 0) & (self._bridge[s["role"], place] < 0)  # the bridge is crossed: the other one speaks
        s["said"].copy_(torch.where(opening | bridging | ended, 0, s["said"] + 1))
        s["role"].copy_(torch.where(over, 1 - s["role"], s["role"]))
        s["bridge"].copy_(torch.where(over, 0, place))
        s["position"].copy_(following)

    def _capture(self) -> None:
        """Record a step as a CUDA graph, after a few on a side stream, as the allocator wants it."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.inference_mode():
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._state["position"].zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph), torch.inference_mode():
            self._step()

    # -- a batch of conversations

    @torch.inference_mode()
    def play(self, seed: int) -> list[Story]:
        """One conversation for each row, the same for the same seed on the same machine."""
        if self.captures and self._graph is None:
            self._capture()
        choose = np.random.default_rng(seed % 2**63)
        s = self._state
        for name in ("position", "role", "said", "bridge", "answer"):
            s[name].zero_()
        forced = np.full((self.rows, self.length), -1, dtype=np.int64)
        temperature = np.zeros((self.rows, 2), dtype=np.float32)
        for row in range(self.rows):
            line = [*self.marks.opening, *self.openers[choose.integers(len(self.openers))]][: self.length]
            forced[row, : len(line)] = line
            temperature[row] = self.user_temperature, self.temperatures[choose.integers(len(self.temperatures))]
        s["forced"].copy_(torch.from_numpy(forced))
        s["temperature"].copy_(torch.from_numpy(temperature))
        s["tokens"][:, 0] = s["forced"][:, 0]
        torch.manual_seed(seed)
        for before in range(self.length - 1):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step(before)
        tokens = s["tokens"].to("cpu", torch.int32).numpy()
        answer = s["answer"].cpu().numpy()
        return [Story(tokens[row], answer[row], float(temperature[row, 1])) for row in range(self.rows)]

"""``headstart chat``: talk to a model in the terminal.

Knows: turns and the prompt line. Does not know: how an answer is made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import PromptTooLong
from ..types import SamplingParams
from . import common

__all__ = ["chat"]

_LEAST_ROOM = 16  # tokens; a shorter answer is none


def chat(
    model: common.ModelName = None,
    draft: common.Draft = "auto",
    gamma: common.Gamma = "auto",
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: common.MaxTokens = 512,
    temperature: common.Temperature = 0.7,
    top_p: common.TopP = 0.95,
    top_k: common.TopK = 0,
    min_p: common.MinP = 0.0,
    seed: common.Seed = None,
    verification: common.Rule = "block",
    speculate: common.Speculate = True,
    dtype: common.Dtype = "auto",
    quantization: common.Quantization = "auto",
    draft_quantization: common.DraftQuantization = "auto",
    device: common.Device = None,
    context: common.Context = None,
) -> None:
    """Chat. '/reset' starts anew, '/quit' or Ctrl-D ends."""
    params = common.sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=None,
        verification=verification,
        speculate=speculate,
    )
    llm = common.open_llm(
        model,
        draft,
        gamma,
        dtype=dtype,
        quantization=quantization,
        draft_quantization=draft_quantization,
        device=device,
        context=context,
    )
    console, notes = Console(highlight=False, soft_wrap=True), common.errors_console()
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if console.is_terminal:
        notes.print(common.legend())
    while True:
        try:
            said = console.input("[bold]you>[/] ").strip()
        except EOFError:
            console.print()
            return
        if said in ("/quit", "/exit"):
            return
        if said == "/reset":
            messages = list(opening)
            notes.print("started anew")
            continue
        if not said:
            continue
        messages.append({"role": "user", "content": said})
        try:
            running = _answer(llm, messages, params)
        except PromptTooLong as error:
            notes.print(f"the conversation has grown too long ({error}); /reset starts anew")
            messages.pop()
            continue
        for piece in running:
            console.print(Text(piece.text, style=common.ORIGIN_STYLES[piece.origin]), end="")
        console.print()
        completion = running.completion()
        notes.print(common.closing_line(completion.stats, llm.engine.inactive_reason))
        messages.append({"role": "assistant", "content": completion.text})


def _answer(llm: Any, messages: list[dict[str, str]], params: SamplingParams) -> Any:
    """The answer, cut short where the context ends."""
    try:
        return llm.stream(messages, params)
    except PromptTooLong as error:
        if error.room < _LEAST_ROOM:
            raise
        return llm.stream(messages, replace(params, max_tokens=error.room))

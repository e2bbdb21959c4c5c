"""``headstart generate``: complete a prompt and stream the answer.

Knows: how one completion is shown. Does not know: how it is made.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import InvalidParameter
from ..types import Choice
from . import common

__all__ = ["generate"]


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")] = None,
    model: common.ModelName = None,
    draft: common.Draft = "auto",
    gamma: common.Gamma = "auto",
    max_tokens: common.MaxTokens = 128,
    temperature: common.Temperature = 0.0,
    top_p: common.TopP = 1.0,
    top_k: common.TopK = 0,
    min_p: common.MinP = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="Against tokens already written, -2 to 2.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, by how often they were.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: against prompt and answer tokens.")] = 1.0,
    seed: common.Seed = None,
    stop: common.Stop = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities of the k likeliest.")] = None,
    verification: common.Rule = "block",
    speculate: common.Speculate = True,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    prediction: Annotated[
        str | None, typer.Option(help="Text you expect in the answer; lookup drafts from it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
    dtype: common.Dtype = "auto",
    quantization: common.Quantization = "auto",
    draft_quantization: common.DraftQuantization = "auto",
    device: common.Device = None,
    context: common.Context = None,
) -> None:
    """Complete a prompt. Tokens are coloured by where they came from when the output is a terminal."""
    text = _read(prompt)
    if logprobs is not None and not as_json:
        raise InvalidParameter("logprobs", "are printed with --json only")
    params = common.sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        verification=verification,
        speculate=speculate,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logprobs=logprobs,
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
    asked: Any = text
    if not raw and llm.has_chat_template:
        asked = [{"role": "user", "content": text}]
    handle = llm.stream(asked, params, prediction=prediction)
    if as_json:
        for _ in handle:
            pass
        choice = handle.completion().choices[0]
        print(json.dumps(_as_json(choice, llm.engine.inactive_reason), ensure_ascii=False))
        return
    console = Console(highlight=False, soft_wrap=True)
    for piece in handle:
        console.print(Text(piece.text, style=common.ORIGIN_STYLES[piece.origin]), end="")
    console.print()
    notes = common.errors_console()
    if console.is_terminal:
        notes.print(common.legend())
    notes.print(common.closing_line(handle.completion().stats, llm.engine.inactive_reason))


def _read(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise InvalidParameter("prompt", "is missing: give it as an argument or on standard input")
    text = sys.stdin.read().removesuffix("\n") if prompt is None or prompt == "-" else prompt
    if not text.strip():
        raise InvalidParameter("prompt", "is empty")
    return text


def _as_json(choice: Choice, inactive: str | None) -> dict[str, Any]:
    stats = choice.stats
    found: dict[str, Any] = {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "origins": list(choice.origins),
        "finish_reason": choice.finish_reason,
        "stats": {
            "acceptance_rate": round(stats.acceptance_rate, 4),
            "acceptance_length": round(stats.acceptance_length, 4),
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "rounds": stats.rounds,
            "tokens": stats.tokens,
            "prompt_tokens": stats.prompt_tokens,
            "tokens_per_second": round(stats.tokens_per_second, 2),
        },
        "speculation_inactive": inactive,
    }
    if choice.logprobs is not None:
        found["logprobs"] = [{"id": p.token_id, "logprob": p.logprob, "top": dict(p.top)} for p in choice.logprobs]
    return found

"""What the commands share: options, opening the models, and how tokens and figures look on a terminal.

Knows: terminals. Does not know: engines; it sees only ``LLM`` and ``Piece``.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import InvalidParameter
from ..machine.progress import telling
from ..types import Origin, SamplingParams, Stats, Verification

__all__ = [
    "ORIGIN_STYLES",
    "Context",
    "Device",
    "Draft",
    "DraftQuantization",
    "Dtype",
    "Gamma",
    "MaxTokens",
    "MinP",
    "ModelName",
    "Quantization",
    "Rule",
    "Seed",
    "Speculate",
    "Stop",
    "Temperature",
    "TopK",
    "TopP",
    "closing_line",
    "describe",
    "errors_console",
    "legend",
    "open_llm",
    "sampling",
]

ORIGIN_STYLES: dict[Origin, str] = {"accepted": "green", "correction": "yellow", "bonus": "cyan", "plain": ""}

ModelName = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder, .gguf file or hub id. Without it: the embedded SmolLM2-135M-Instruct."),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft", "-d", help="Who guesses: 'auto', 'lookup', 'none', or a smaller model or head (folder, hub id)."
    ),
]
Gamma = Annotated[str, typer.Option(help="Tokens to draft a round: a number, or 'auto' to measure and choose.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="The most tokens to write.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Draw from the smallest set of tokens with this much probability.")]
TopK = Annotated[int, typer.Option(help="Draw from the k most likely tokens; 0 for all.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest.")]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Repeatable sampling; with --gamma auto only under --verification coupled (see docs/reference.md)."
    ),
]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this text. May be given several times.")]
Rule = Annotated[str, typer.Option("--verification", help="block, token or coupled.")]
Speculate = Annotated[bool, typer.Option("--speculate/--plain", help="--plain decodes without drafting.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Quantization = Annotated[
    str,
    typer.Option(
        help="Weights: int8, int4, none, or auto (on a CPU the embedded model's own 4-bit weights; others as they are)."
    ),
]
DraftQuantization = Annotated[
    str,
    typer.Option(help="The same for a draft model, which cannot change the text: int8, int4, none, or auto."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... Without it: a GPU if there is one.")]
Context = Annotated[int | None, typer.Option("--max-model-len", help="Longest prompt and answer together, in tokens.")]


def errors_console() -> Console:
    """Where everything but the text goes."""
    return Console(stderr=True)


def open_llm(
    model: str | None,
    draft: str,
    gamma: str,
    *,
    dtype: str,
    quantization: str,
    draft_quantization: str,
    device: str | None,
    context: int | None,
    rows: int = 1,
) -> Any:
    """Load with a line on a terminal that says how far it is. The import is here because it takes seconds, too."""
    amount: int | str = gamma
    if gamma != "auto":
        if not gamma.isdigit():
            raise InvalidParameter("gamma", f"must be 0 or more, or 'auto', not {gamma!r}")
        amount = int(gamma)
    with telling(None) as tell:
        tell(f"loading {model or 'SmolLM2-135M-Instruct (embedded)'}")
        from ..api import LLM

        return LLM(
            model,
            None if draft == "none" else draft,
            gamma=amount,  # type: ignore[arg-type]  # checked by DraftConfig
            dtype=dtype,
            quantization=None if quantization == "none" else quantization,  # type: ignore[arg-type]  # checked there
            draft_quantization=None if draft_quantization == "none" else draft_quantization,  # type: ignore[arg-type]
            device=device,
            max_model_len=context,
            max_rows=rows,
            progress=tell,
        )


def describe(report: Any) -> str:
    """A model in one line, from its capability report."""
    return f"{report.architecture}, {report.parameters / 1e6:.0f}M parameters, {report.dtype} on {report.device}"


def sampling(
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int | None,
    stop: list[str] | None,
    verification: str,
    speculate: bool,
    **more: Any,
) -> SamplingParams:
    rule: Verification = verification  # type: ignore[assignment]  # SamplingParams checks it
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop or (),
        verification=rule,
        speculate=speculate,
        **more,
    )


def legend() -> Text:
    """What the colours mean."""
    text = Text("  tokens: ", style="dim")
    for origin, meaning in (("accepted", "accepted draft"), ("correction", "correction"), ("bonus", "bonus")):
        text.append(meaning, style=ORIGIN_STYLES[origin])  # type: ignore[index]
        text.append("  ")
    return text.append("plain", style="dim")


def closing_line(stats: Stats, inactive: str | None) -> Text:
    """What speculation did, in one line."""
    text = Text("  ", style="dim")
    if stats.drafted:
        text.append(
            f"alpha {stats.acceptance_rate:.2f} ({stats.accepted} of {stats.drafted} drafted tokens accepted)   "
        )
    elif inactive:
        text.append(f"speculation inactive: {inactive}   ")
    text.append(f"tau {stats.acceptance_length:.2f}   ")
    text.append(f"{stats.tokens} tokens in {stats.rounds} rounds   {stats.tokens_per_second:.1f} tok/s")
    return text

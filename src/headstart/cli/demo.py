"""``headstart demo``: three prompts, plain and speculative side by side.

Knows: which prompts show what speculation does, and the table. Does not know: how it is done.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..types import Completion, SamplingParams
from . import common

__all__ = ["demo"]

_CODE = """def average(values):
    total = 0
    count = 0
    for value in values:
        total = total + value
        count = count + 1
    if count == 0:
        return None
    return total / count


def spread(values):
    lowest = min(values)
    highest = max(values)
    return highest - lowest
"""

_TEXT = (
    "The lighthouse on Gull Point was built in 1871, after three ships were lost on the reef in a single winter. "
    "Its lamp first burned colza oil, then paraffin, and from 1934 on it was electric. The last keeper, Marta Lind, "
    "left in 1988, when the light was automated. Since then the tower has stood empty, but a group of volunteers "
    "from the village has repaired the stairs and the lamp room, and opens it to visitors on the first Sunday of "
    "every month from May to September. The money from the tickets pays for paint, glass and a new roof."
)

PROMPTS = {
    "question": "Why is the sky blue? Answer in a short paragraph.",
    "code edit": f"Rename the function average to mean and repeat the whole file:\n\n```python\n{_CODE}```",
    "summary": f"Summarize this text in two sentences, using its own words:\n\n{_TEXT}",
}


def demo(
    model: common.ModelName = None,
    draft: common.Draft = "auto",
    gamma: common.Gamma = "auto",
    max_tokens: common.MaxTokens = 96,
    dtype: common.Dtype = "auto",
    quantization: common.Quantization = "auto",
    draft_quantization: common.DraftQuantization = "auto",
    device: common.Device = None,
    context: common.Context = None,
) -> None:
    """Run three prompts plain and speculative, and compare."""
    console = Console()
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
    if console.is_terminal:
        console.print(common.legend())
    console.print(
        f"\n[bold]Target[/] {common.describe(llm.report)}\n[bold]Draft[/]  {llm.drafter_name}, gamma {gamma}\n"
    )
    table = Table(title="Plain and speculative decoding, greedy: tokens a second", title_justify="left")
    for name in ("prompt", "tokens", "plain", "drafted", "speed-up", "alpha", "tau", "same"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    _run(llm, "Hello", 4, speculate=False)  # warm up
    for name, prompt in PROMPTS.items():
        console.print(f"[bold]{name}[/]: {prompt.splitlines()[0]}")
        fast = _run(llm, prompt, max_tokens, speculate=True, console=console)
        console.print("\n")
        with console.status("the same by plain decoding ..."):
            plain = _run(llm, prompt, max_tokens, speculate=False)
        speed = fast.stats.tokens_per_second, plain.stats.tokens_per_second
        table.add_row(
            name,
            str(fast.stats.tokens),
            f"{speed[1]:.1f}",
            f"{speed[0]:.1f}",
            f"{speed[0] / speed[1]:.2f}x" if speed[1] else "-",
            f"{fast.stats.acceptance_rate:.2f}" if fast.stats.drafted else "-",
            f"{fast.stats.acceptance_length:.2f}",
            "yes" if fast.token_ids == plain.token_ids else "NO",
        )
    console.print(table)
    console.print(
        "alpha: share of drafted tokens accepted; tau: tokens per forward of the target (1 is plain decoding).\n"
        "Speeds are of this machine, now, without the reading of the prompt."
    )


def _run(llm: Any, prompt: str, max_tokens: int, *, speculate: bool, console: Console | None = None) -> Completion:
    """Answer one prompt; with a console, shown as it comes."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, speculate=speculate)
    asked: Any = [{"role": "user", "content": prompt}] if llm.has_chat_template else prompt
    running = llm.stream(asked, params)
    for piece in running:
        if console is not None:
            console.print(Text(piece.text, style=common.ORIGIN_STYLES[piece.origin]), end="", soft_wrap=True)
    completion: Completion = running.completion()
    return completion

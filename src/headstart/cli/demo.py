"""``headstart demo``: three prompts, plain and speculative side by side.

Knows: which prompts show what speculation does, and the table. Does not know: how it is done.
"""

from __future__ import annotations

from typing import Any

from ..types import Completion, SamplingParams
from .answers import ask
from .options import MaxTokens, ModelOptions
from .prompts import Question
from .screen import Answer, describe, draft_of, legend, output, show_table

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


def demo(*, model: ModelOptions, max_tokens: MaxTokens = 96) -> None:
    """Run three prompts plain and speculative, and compare."""
    SamplingParams(max_tokens=max_tokens)  # refused before anything is loaded
    llm = model.open()
    console, answer = output(), Answer()
    if answer.coloured:
        console.print(legend())
    console.print(f"\n[bold]Target[/] {describe(llm.report)}")
    console.print(f"[bold]Draft[/]  {draft_of(llm)}, gamma {model.gamma}\n")
    rows = []
    _run(llm, "Hello", 4, speculate=False)  # warm up
    for name, prompt in PROMPTS.items():
        console.print(f"[bold]{name}[/]: {prompt.splitlines()[0]}")
        fast = _run(llm, prompt, max_tokens, speculate=True, answer=answer)
        console.print()
        with console.status("the same by plain decoding ..."):
            plain = _run(llm, prompt, max_tokens, speculate=False)
        rows.append(_row(name, fast, plain))
    columns = ("prompt", "tokens", "plain", "drafted", "speed-up", "alpha", "tau", "same")
    show_table(console, "Plain and speculative decoding, greedy: tokens a second", columns, rows)
    console.print(
        "alpha: share of drafted tokens accepted; tau: tokens per forward of the target (1 is plain decoding).\n"
        "Speeds are of this machine, now, without the reading of the prompt."
    )
    if llm.engine.inactive_reason:
        console.print(f"speculation inactive: {llm.engine.inactive_reason}", markup=False)


def _row(name: str, fast: Completion, plain: Completion) -> tuple[str, ...]:
    speed = fast.stats.tokens_per_second, plain.stats.tokens_per_second
    return (
        name,
        str(fast.stats.tokens),
        f"{speed[1]:.1f}",
        f"{speed[0]:.1f}",
        f"{speed[0] / speed[1]:.2f}x" if speed[1] else "-",
        f"{fast.stats.acceptance_rate:.2f}" if fast.stats.drafted else "-",
        f"{fast.stats.acceptance_length:.2f}",
        "yes" if fast.token_ids == plain.token_ids else "NO",
    )


def _run(llm: Any, prompt: str, max_tokens: int, *, speculate: bool, answer: Answer | None = None) -> Completion:
    """Answer one prompt; with ``answer``, shown as it comes."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, speculate=speculate)
    running = ask(llm, Question(prompt), params, raw=False)
    for piece in running:
        if answer is not None:
            answer.write(piece)
    if answer is not None:
        answer.end()
    completion: Completion = running.completion()
    return completion

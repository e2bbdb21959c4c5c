"""``headstart generate``: complete prompts.

Knows: how answers are shown, one as it comes, many in order. Does not know: how they are made.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Annotated, Any

import typer

from ..config import EngineConfig
from ..errors import GenerationFailed, InvalidParameter
from ..progress import silent, telling
from ..types import Completion, SamplingParams
from .answers import answered, as_json, ask, in_order
from .options import FullSamplingOptions, ModelOptions, section
from .prompts import Question, one_question, questions_in
from .screen import Answer, closing_line, facts, legend, note, summary, what_runs
from .structured import StructuredOptions

__all__ = ["generate"]

_input, _output = section("Input"), section("Output")

Prompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; - or nothing: standard input.")]
Prompts = Annotated[
    str | None,
    _input(
        of="FILE",
        help="Many prompts: one a line, or a .jsonl file with 'prompt' or 'messages' (and 'prediction') on each line. "
        "Answers come in order.",
    ),
]
Raw = Annotated[bool, _input("--raw", help="Continue the prompt as it is, without the model's chat template.")]
Prediction = Annotated[str | None, _input(of="TEXT", help="Text that you expect in the answer: it is drafted.")]
Json = Annotated[bool, _output("--json", help="One JSON object a prompt, each on a line, instead of text.")]
Logprobs = Annotated[int | None, _output(of="K", help="With --json: log-probabilities of the K likeliest tokens.")]
MaxRows = Annotated[
    int | None,
    section("Model")(
        of="N",
        help=f"Answers written together. Without it: as many as are asked for, at most {EngineConfig.max_rows}.",
    ),
]


def generate(
    prompt: Prompt = None,
    *,
    prompts: Prompts = None,
    raw: Raw = False,
    prediction: Prediction = None,
    json_lines: Json = False,
    logprobs: Logprobs = None,
    model: ModelOptions,
    max_rows: MaxRows = None,
    sampling: FullSamplingOptions,
    shape: StructuredOptions,
) -> None:
    """Complete a prompt, or many from a file.

    The text goes to standard output, everything else to standard error. On a terminal a single answer comes token by
    token, coloured by where each token came from.
    """
    if logprobs is not None and not json_lines:
        raise InvalidParameter("logprobs", "are printed with --json only")
    if prompts is not None and prompt is not None:
        raise InvalidParameter("prompt", "and --prompts are both given; which of them?")
    questions = [one_question(prompt, prediction)] if prompts is None else questions_in(prompts, prediction)
    params = sampling.params(logprobs=logprobs, structured=shape.structured())
    wanted = len(questions) * params.n
    llm = model.open(rows=min(wanted, EngineConfig.max_rows) if max_rows is None else max_rows)
    begun = perf_counter()
    show = _Json(llm, numbered=prompts is not None) if json_lines else _Texts(len(questions), params.n)
    if prompts is not None:
        _many(llm, questions, params, raw=raw, show=show)
    elif json_lines or params.n > 1:
        show(0, answered(ask(llm, questions[0], params, raw=raw)))
    else:
        _stream(llm, questions[0], params, raw=raw)
    if not json_lines and wanted > 1:
        note(summary(llm.stats, perf_counter() - begun))
    if not json_lines:
        note(what_runs(llm))


def _stream(llm: Any, question: Question, params: SamplingParams, *, raw: bool) -> None:
    """One answer as it comes, and what speculation did for it."""
    answer = Answer()
    with ask(llm, question, params, raw=raw) as stream:
        try:
            for piece in stream:
                answer.write(piece)
        except BaseException:
            answer.end_line()
            raise
    answer.end()
    if answer.coloured:
        note(legend())
    model = llm.draft_report is not None
    note(closing_line(stream.completion().stats, llm.engine.inactive_reason, model=model))


def _many(llm: Any, questions: list[Question], params: SamplingParams, *, raw: bool, show: _Json | _Texts) -> None:
    """All answers, in order. Those that failed are shown as such, and the command ends with an error."""
    failed, total = 0, len(questions)
    visible = sys.stdout.isatty()  # then the answers themselves show how far it is
    with telling(silent if visible else None) as tell:
        tell(f"0 of {total} answered")
        for index, answer in enumerate(in_order(llm, questions, params, raw=raw)):
            failed += isinstance(answer, str)
            show(index, answer)
            tell(f"{index + 1} of {total} answered")
    if failed:
        raise GenerationFailed(f"{failed} of {total} prompts have no answer")


class _Json:
    """A line of JSON for each answer."""

    def __init__(self, llm: Any, *, numbered: bool) -> None:
        self._llm, self._numbered = llm, numbered
        self._facts = facts(llm)

    def __call__(self, index: int, answer: Completion | str) -> None:
        found: dict[str, Any] = {"index": index} if self._numbered else {}
        if isinstance(answer, str):
            found["error"] = answer
        else:
            found |= as_json(answer, self._llm.engine.inactive_reason, self._facts)
        print(json.dumps(found, ensure_ascii=False), flush=True)


class _Texts:
    """The texts, each under a line that says which it is."""

    def __init__(self, questions: int, choices: int) -> None:
        self._questions, self._choices = questions, choices
        self._out = Answer(plain=True)

    def __call__(self, index: int, answer: Completion | str) -> None:
        if isinstance(answer, str):
            self._heading(index, None)
            note(f"error: {answer}")
            return
        for choice in answer.choices:
            self._heading(index, choice.index)
            self._out.text(choice.text)
            self._out.end()

    def _heading(self, index: int, choice: int | None) -> None:
        parts = [f"{index + 1} of {self._questions}"] if self._questions > 1 else []
        if self._choices > 1 and choice is not None:
            parts.append(f"answer {choice + 1} of {self._choices}")
        if parts:
            self._out.text(f"=== {', '.join(parts)} ===\n")

"""``headstart batch``: OpenAI's batch files, without a server.

Knows: the options, progress and exit codes of a job. Does not know: the format (``server/batches``), or how a job goes
on where it was stopped (``batch_files``).
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from ..errors import MissingExtra
from ..progress import Tell, telling
from .batch_files import Line, Questions, Records, check_apart, fingerprint
from .exits import NOT_WELL
from .options import ModelOptions, section
from .screen import note, what_runs
from .serve import FORMAT_HELP, check_tool_format, served_name

__all__ = ["batch"]

_AHEAD = 2  # times the rows: so many are worked on, so that there is always one for a row that gets free
_job = section("Batch")


def batch(
    input: Annotated[
        str, typer.Argument(metavar="INPUT", help="Requests in OpenAI's batch format, one a line; - is standard input.")
    ],
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT",
            help="A line is added for each answer; what is there already is not computed again. - is standard output.",
        ),
    ],
    *,
    model: ModelOptions,
    served_model_name: Annotated[
        str | None,
        _job("--served-model-name", of="NAME", help="What requests call the model. Without it: as headstart serve."),
    ] = None,
    max_rows: Annotated[int, _job("--max-rows", of="N", help="Requests that are computed together.")] = 8,
    statistics: Annotated[bool, _job("--statistics", help="What speculation did, in every answer.")] = False,
    tool_format: Annotated[str, _job("--tool-format", of="FORMAT", help=FORMAT_HELP)] = "auto",
    retry_failed: Annotated[
        bool, _job("--retry-failed", help="Take out of OUTPUT what failed, and try it again.")
    ] = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Chat and text completions, as headstart serve would answer them. A job that was stopped, however it was, goes on
    where it was when the same command is given again. Ends with 0 if all requests succeeded, with 3 if some failed.
    """
    for package in ("fastapi", "pydantic"):
        if find_spec(package) is None:
            raise MissingExtra(package, "serve")
    check_tool_format(tool_format)
    answering = {"statistics": statistics, "tools": tool_format}
    known = fingerprint(model.model, model.revision, model.dtype, model.quantization)
    with closing(Questions(input, known)) as questions:
        check_apart(input, output)
        with closing(Records(output, questions.lines, retry=retry_failed)) as records:
            left = [line for line in questions.lines if line.id not in records.done]
            if left:
                llm = model.open(rows=max_rows)
                _answer(llm, questions, left, records, served_name(served_model_name, model), answering)
    total, failed = len(questions.lines), records.failed
    note(f"  {total - failed} of {total} requests succeeded" + (f", {failed} failed: see {output}" if failed else ""))
    if failed:
        if not left:
            note("  those that failed are not tried again without --retry-failed")
        raise typer.Exit(NOT_WELL)


def _answer(
    llm: Any, questions: Questions, left: list[Line], records: Records, name: str, answering: dict[str, Any]
) -> None:
    """``answering``: how, as ``Batches`` takes it."""
    total, begun = len(questions.lines), llm.stats.tokens
    try:
        with telling(None) as tell:
            asyncio.run(_run(llm, questions, left, records, name, tell, answering))
    except BaseException:
        note(f"  {len(records.done)} of {total} requests are answered; the same command goes on from here")
        raise
    if llm.stats.tokens > begun:
        note(what_runs(llm))


async def _run(
    llm: Any, questions: Questions, left: list[Line], records: Records, name: str, tell: Tell, answering: dict[str, Any]
) -> None:
    from ..async_api import AsyncLLM
    from ..server.batches import Batches

    def told() -> None:
        failed = f", {records.failed} failed" if records.failed else ""
        tell(f"{len(records.done)} of {len(questions.lines)} answered{failed}")

    async with AsyncLLM(llm) as served:
        found = Batches(served, name, **answering).answers(
            left, questions.read, together=_AHEAD * llm.config.engine.max_rows
        )
        told()
        async with aclosing(found) as answers:
            async for line, record in answers:
                records.add(line, record)
                told()

"""The options that commands share, as records: which models, and how tokens are drawn.

Knows: names, defaults and help texts, and how to open an ``LLM`` from them. Does not know: any command.

A command takes such a record as a parameter, and ``spread`` lets Typer see its fields as options of their own.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from time import perf_counter
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from ..config import MAX_GAMMA, SETTINGS, Config
from ..errors import InvalidParameter
from ..progress import Tell, telling
from ..sampling import BIAS, PENALTY
from ..types import SamplingParams
from .screen import facts, note, show_log
from .stopping import StopAtOnce

__all__ = [
    "FullSamplingOptions",
    "MaxTokens",
    "ModelOptions",
    "SamplingOptions",
    "TargetOptions",
    "Temperature",
    "TopP",
    "Verbose",
    "section",
    "spread",
]


def section(name: str) -> Callable[..., Any]:
    """Makes options under one heading of the help."""

    def option(*names: str, of: str = "", help: str) -> Any:
        """``of`` stands for its value in the help; without it the option is a flag."""
        return typer.Option(*names, metavar=of or None, rich_help_panel=name, help=help)

    return option


_PENALTY = "{:g} to {:g}".format(*PENALTY)
_HOT = 2.0  # a temperature that few ask for: elsewhere -t is the number of threads
_model, _drafting, _sampling, _length = map(section, ("Model", "Drafting", "Sampling", "Length and stopping"))

Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Tell on standard error what runs and what is going on inside.")
]
# Their defaults differ from command to command.
MaxTokens = Annotated[int, _length("--max-tokens", "-n", of="N", help="The most tokens to write.")]
Temperature = Annotated[
    float, _sampling("--temperature", "-t", of="T", help="0 always takes the likeliest token (greedy).")
]
TopP = Annotated[float, _sampling(of="P", help="Draw from the fewest tokens that have this probability together.")]


@dataclass(frozen=True)
class TargetOptions:
    """Which model, and where it runs."""

    model: Annotated[
        str | None,
        _model(
            "--model",
            "-m",
            of="MODEL",
            help="A folder, a .gguf file or a Hugging Face hub id. Without it: the embedded SmolLM2-135M-Instruct.",
        ),
    ] = None
    revision: Annotated[str | None, _model(of="NAME", help="Branch, tag or commit of a model from the hub.")] = None
    dtype: Annotated[
        str, _model(of="TYPE", help="auto, float32, bfloat16 or float16: floats in the place of a file's own bits.")
    ] = "auto"
    device: Annotated[
        str | None, _model(of="DEVICE", help="cpu, cuda, cuda:1 ... Without it: a GPU if there is one.")
    ] = None
    trust_remote_code: Annotated[
        bool,
        _model(
            "--trust-remote-code", help="Let Python code from the model's folder or repository run on this machine."
        ),
    ] = False
    verbose: Verbose = False

    @contextmanager
    def loading(self) -> Iterator[Tell]:
        """Around imports and loading: tells on standard error what takes long, and warns of code that is trusted."""
        if self.verbose:
            show_log(verbose=True)
        if self.trust_remote_code:
            note("warning: --trust-remote-code: Python code that comes with the model runs on this machine")
        with telling(None) as tell, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="trust_remote_code is on")  # said above
            tell("importing torch and transformers")
            with StopAtOnce():
                import_module("..api", __package__)
            yield tell


@dataclass(frozen=True)
class ModelOptions(TargetOptions):
    """The same, and who drafts for it."""

    quantization: Annotated[
        str,
        _model(
            of="KIND",
            help="Weights of the model: auto (on a CPU the own bits of a GGUF file and of the embedded model; others "
            "as they are), int8 or int4 (rounded anew), or none (floats: a GGUF file is spelt out, and slow).",
        ),
    ] = "auto"
    max_model_len: Annotated[int | None, _model(of="N", help="The most tokens of prompt and answer together.")] = None
    invariant: Annotated[
        bool,
        _model(
            "--invariant",
            help="The same bits in any company: a text does not depend on what else is served. Always so on a CPU "
            "with Headstart's own kernels; slower on a GPU.",
        ),
    ] = False
    threads: Annotated[
        int | None,
        _model(of="N", help="Threads on a CPU, for target and draft. Without it: as many as measure fastest."),
    ] = None
    draft: Annotated[
        str,
        _drafting(
            "--draft",
            "-d",
            of="DRAFT",
            help="Who drafts: lookup (copies from the text so far), a smaller model (folder, .gguf file or hub id) "
            "or a head (folder), embedded (SmolLM2-135M-Instruct), none, or auto (the embedded model's own head; "
            "lookup for any other model).",
        ),
    ] = "auto"
    gamma: Annotated[
        str,
        _drafting(
            of="N", help=f"Tokens to draft a round: 1 to {MAX_GAMMA}, 0 for none, or auto to measure and choose."
        ),
    ] = "auto"
    draft_quantization: Annotated[
        str,
        _drafting(of="KIND", help="Weights of a draft model, which cannot change the text: int8, int4, none or auto."),
    ] = "auto"

    def open(self, rows: int = 1, **settings: Any) -> Any:
        """The ``LLM``; ``settings``: more of them. It is imported only here, because that takes seconds."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "verbose"}
        given |= {name: None for name in ("draft", "quantization", "draft_quantization") if given[name] == "none"}
        given |= {"gamma": _gamma(self.gamma), "max_rows": rows} | settings
        Config.of({name: given[name] for name in SETTINGS if name in given})  # refuses before anything is imported
        with self.loading() as tell:
            from ..api import LLM

            begun = perf_counter()
            llm = LLM(**given, progress=tell)
        log = logging.getLogger("headstart")
        log.info("%s", ", ".join(f"{name} {value}" for name, value in facts(llm).items()))
        for said in llm.report.notes:
            log.info("%s", said)
        log.info("loaded in %.1f s", perf_counter() - begun)
        return llm


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn: what every command that writes text takes."""

    max_tokens: MaxTokens = 128
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: Annotated[int, _sampling(of="K", help="Draw from the K likeliest tokens; 0: from all.")] = 0
    min_p: Annotated[float, _sampling(of="P", help="Leave out tokens less likely than P times the likeliest.")] = 0.0
    seed: Annotated[int | None, _sampling(of="N", help="Repeatable sampling: the same seed gives the same text.")] = (
        None
    )
    verification: Annotated[
        str | None,
        _drafting(
            of="RULE",
            help="How drafted tokens are checked when sampling. Each rule keeps the model's own distribution: block "
            "accepts the most, token is the classical one, coupled gives a seed's text whatever drafts. Without it: "
            "coupled with --seed, else block.",
        ),
    ] = None
    speculate: Annotated[bool, _drafting("--speculate/--plain", help="--plain decodes without drafting.")] = True

    def params(self, **more: Any) -> SamplingParams:
        """As the engine takes them; whatever was not given is the engine's to choose."""
        given = {f.name: getattr(self, f.name) for f in fields(self)} | more
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class FullSamplingOptions(SamplingOptions):
    """The rest of it, for a single command and for programs that call it."""

    presence_penalty: Annotated[
        float, _sampling(of="X", help=f"{_PENALTY}; above 0: against tokens that the answer has.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling(of="X", help=f"{_PENALTY}; the same, for each time that it has them.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, _sampling(of="X", help="Above 1: against tokens that prompt or answer have.")
    ] = 1.0
    logit_bias: Annotated[
        list[str] | None,
        _sampling(
            "--logit-bias",
            of="ID=VALUE",
            help=f"Add VALUE ({BIAS[0]:g} to {BIAS[1]:g}) to the logit of the token with this ID. May be repeated.",
        ),
    ] = None
    n: Annotated[
        int, _sampling("--n", of="N", help="Answers to each prompt. Not to be confused with -n, which is --max-tokens.")
    ] = 1
    min_tokens: Annotated[int, _length(of="N", help="Do not stop before this many tokens.")] = 0
    stop: Annotated[list[str] | None, _length("--stop", of="TEXT", help="Stop before this text. May be repeated.")] = (
        None
    )
    stop_token_ids: Annotated[
        list[int] | None, _length("--stop-token-id", of="ID", help="Stop at the token with this ID. May be repeated.")
    ] = None
    ignore_eos: Annotated[bool, _length("--ignore-eos", help="Go on when the model says that it has finished.")] = False

    def params(self, **more: Any) -> SamplingParams:
        return super().params(**more, logit_bias=_biases(self.logit_bias))


def spread(function: Callable[..., None], *, env: str = "") -> Callable[..., None]:
    """For Typer: the command with the fields of its records as parameters of its own.

    ``env``: each of them may also be given by the environment variable of that beginning and its name; on the command
    line it counts more. An empty variable is one that is not set; of those that may be repeated, spaces part them.
    """
    hints = get_type_hints(function, include_extras=True)
    records: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in records:
            hint = _spelt(hints[name], name)
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        inner = {n: _spelt(hint, n) for n, hint in get_type_hints(records[name], include_extras=True).items()}
        parameters += [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=f.default,
                annotation=_from_environment(inner[f.name], f"{env}{f.name.upper()}") if env else inner[f.name],
            )
            for f in fields(records[name])
        ]
    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    def command(*, context: typer.Context, **given: Any) -> None:
        found = {name: f"{env}{name.upper()}" for name in given if env and _set_outside(context, name)}
        hot = _hot(given.get("temperature")) if "threads" in given else []
        built = {
            name: record(**{f.name: given.pop(f.name) for f in fields(record)}) for name, record in records.items()
        }
        if found:
            note(f"  from the environment: {', '.join(found.values())}")
        if hot:
            note(f"warning: -t is --temperature, and {max(hot):g} makes nonsense of most texts; --threads sets threads")
        try:
            function(**given, **built)
        except InvalidParameter as error:
            if error.field in found:
                error.args = (f"{found[error.field]}: {error}",)
            raise

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    return command


def _spelt(annotation: Any, name: str) -> Any:
    """The same option with its name spelt out where its value is called the same: Typer 0.27 takes ``--KIND`` of it."""
    for option in getattr(annotation, "__metadata__", ()):
        if not isinstance(option, OptionInfo) or option.param_decls or not option.metavar:
            continue
        if option.metavar.lower() == name:
            option = copy(option)
            option.param_decls = (f"--{name.replace('_', '-')}",)
            return Annotated[get_args(annotation)[0], option]
    return annotation


def _from_environment(annotation: Any, variable: str) -> Any:
    """The same option, of this command alone, with an environment variable."""
    kind, option = get_args(annotation)
    option = copy(option)
    option.envvar, option.show_envvar = variable, False  # errors name it where it is what is wrong
    return Annotated[kind, option]


def _set_outside(context: typer.Context, name: str) -> bool:
    """Does its value come from the environment?"""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


def _hot(given: float | list[float] | None) -> list[float]:
    """The temperatures that may have been meant as numbers of threads."""
    return [each for each in (given if isinstance(given, list) else [given or 0.0]) if each >= _HOT]


def _gamma(text: str) -> int | str:
    """A number, or the text as it is: which of them will do is the engine's to say."""
    try:
        return int(text)
    except ValueError:
        return text


def _biases(given: list[str] | None) -> dict[int, float] | None:
    """ "ID=VALUE", each."""
    found = {}
    for text in given or ():
        token, _, value = text.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise InvalidParameter(
                "logit_bias", f"must be a token id and a number, as in --logit-bias 123=-5, not {text!r}"
            ) from None
    return found or None

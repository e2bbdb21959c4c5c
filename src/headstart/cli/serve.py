"""``headstart serve``: an OpenAI-compatible server.

Knows: the options of a server, and where its key may come from. Does not know: routes.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from ..errors import InvalidParameter, MissingExtra
from .options import ModelOptions, section
from .screen import note, what_runs

__all__ = ["FORMAT_HELP", "bound", "check_tool_format", "serve", "served_name"]

_serving = section("Serving")
KEY = "HEADSTART_API_KEY"
_EVERYWHERE = ("0.0.0.0", "::")  # every address of the machine: not what anybody calls it


_FORMATS = ("auto", "hermes", "llama3", "mistral")
FORMAT_HELP = f"How the model writes tool calls: {', '.join(_FORMATS[1:])}, or auto (found in its chat template)."


@dataclass(frozen=True)
class ServerOptions:
    """Where it listens, and who may ask."""

    host: Annotated[
        str,
        _serving(
            "--host",
            of="ADDRESS",
            help="The address to listen on. Others than 127.0.0.1 are reached from other machines: set an API key.",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, _serving("--port", "-p", of="N", help="The port; 0 takes one that is free.")] = 8000
    served_model_name: Annotated[
        str | None,
        _serving(
            "--served-model-name", of="NAME", help="What clients call the model. Without it: its file or folder name."
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        _serving(
            "--api-key-file",
            of="FILE",
            help=f"A file whose first line is the API key. Or set {KEY}: an argument could be seen by everybody here.",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _serving(
            "--allowed-host",
            of="NAME",
            help="A Host header to accept besides this machine's own names; *.example.com for all below, * for any. "
            "May be repeated.",
        ),
    ] = None
    allowed_origin: Annotated[
        list[str] | None, _serving("--allowed-origin", of="URL", help="Web pages from here may ask. May be repeated.")
    ] = None
    max_rows: Annotated[int, _serving("--max-rows", of="N", help="Requests that are computed together.")] = 8
    max_waiting: Annotated[
        int,
        _serving("--max-waiting", of="N", help="Requests that may wait in the queue; others are told to come back."),
    ] = 1024
    max_body: Annotated[int, _serving("--max-body", of="MIB", help="The largest request, in MiB.")] = 16
    drain: Annotated[
        float, _serving("--drain", of="SECONDS", help="Time that requests have to end when the server is stopped.")
    ] = 30.0
    statistics: Annotated[bool, _serving("--statistics", help="What speculation did, in every answer.")] = False
    tool_format: Annotated[str, _serving("--tool-format", of="FORMAT", help=FORMAT_HELP)] = "auto"


def serve(*, model: ModelOptions, server: ServerOptions) -> None:
    """Serve a model by OpenAI's API.

    Without arguments: the embedded model on http://127.0.0.1:8000. Ctrl-C or SIGTERM ends it, when what runs has ended.
    Every option may also be given by the environment variable that stands in brackets behind it.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise MissingExtra(package, "serve")
    if server.max_body < 1:
        raise InvalidParameter("max_body", f"must be at least 1, not {server.max_body}")
    if not 0 <= server.drain < 1e6:
        raise InvalidParameter("drain", f"must be seconds, 0 or more, not {server.drain:g}")
    check_tool_format(server.tool_format)
    key, listener = _key(server.api_key_file), bound(server.host, server.port)
    llm = model.open(rows=server.max_rows, max_waiting=server.max_waiting)
    with suppress(MissingExtra, InvalidParameter):  # those who ask for it are told
        llm.prepare_structured()  # now, and not while others are served
    from ..async_api import AsyncLLM
    from ..server.app import Settings, create_app
    from ..server.process import run

    name = served_name(server.served_model_name, model)
    hosts = [*Settings.allowed_hosts, server.host, *(server.allowed_host or ())]
    settings = Settings(
        model=name,
        api_key=key,
        allowed_hosts=hosts,
        allowed_origins=[origin.rstrip("/").lower() for origin in server.allowed_origin or ()],
        max_body=server.max_body * 2**20,
        statistics=server.statistics,
        drain=server.drain,
        tool_format=server.tool_format,
    )
    note(what_runs(llm))
    host = f"[{server.host}]" if ":" in server.host else server.host
    note(f"serving {name} on http://{host}:{listener.getsockname()[1]}/v1 {'with' if key else 'without'} an API key")
    if server.host in _EVERYWHERE and not server.allowed_host:
        # Whoever lets it listen on every address asks by a name of the machine's, and would be refused.
        names = ", ".join(Settings.allowed_hosts)
        note(f"  answers only to the names {names}: add this machine's by --allowed-host NAME")
    run(create_app(AsyncLLM(llm), settings), listener, drain=server.drain)


def check_tool_format(given: str) -> None:
    if given not in _FORMATS:
        raise InvalidParameter("tool_format", f"must be one of {', '.join(_FORMATS)}, not {given!r}")


def served_name(given: str | None, model: ModelOptions) -> str:
    """What clients call the model."""
    return given or Path(model.model or "smollm2-135m-instruct").name


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there. Before a model is loaded, which takes longer."""
    if not 0 <= port < 2**16:
        raise InvalidParameter("port", f"must be 0 to 65535, not {port}")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while ")[0]  # the address, which is said already
        raise InvalidParameter("port", f"{port} of {host} cannot be listened on: {why}") from None


def _key(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(KEY, "").strip() or None  # shells and secret stores like to add a line's end
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidParameter("api_key_file", f"cannot be read: {error.strerror} ({file})") from None
    except UnicodeDecodeError:
        raise InvalidParameter("api_key_file", f"is not UTF-8: {file}") from None
    if not lines or not lines[0].strip():
        raise InvalidParameter("api_key_file", f"has an empty first line: {file}")
    return lines[0].strip()

"""The Hugging Face hub: what calls to transformers say about it, where its files lie here, and whether it answers.

Knows: revisions, tokens, trust, the local cache of the hub, and how to find out quickly that there is no network.
Does not know: what a model is.

Without a network the hub's client retries for half a minute. So one connection is tried first, for a second or so; if
nobody answers, the client is not asked, and a model is one whose files are here already.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, is_offline_mode, try_to_load_from_cache
from transformers.utils import cached_file

__all__ = ["Remote", "architecture", "found_at", "out_of_reach", "snapshot"]

PATIENCE = 1.5  # seconds for an address and a connection, unless HF_HUB_ETAG_TIMEOUT says how slow the network is
_REMEMBERED = 10.0  # seconds: one model asks several times while it is loaded


@dataclass(frozen=True)
class Remote:
    """How a model's files may be had, and whether its own code may run."""

    revision: str | None = None
    token: str | bool | None = None
    local_files_only: bool = False
    trust_remote_code: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """For every ``from_pretrained``. Trust is always said: where it is left out, transformers asks on standard
        input, and whatever is piped into a program would answer."""
        return {**self.files, "trust_remote_code": self.trust_remote_code}

    @property
    def files(self) -> dict[str, Any]:
        """For calls that only look for files."""
        return {"revision": self.revision, "token": self.token, "local_files_only": self.local_files_only}

    @property
    def offline(self) -> bool:
        """Is only what lies on this disk to be had?"""
        return self.local_files_only or out_of_reach() is not None


def found_at(name: str | Path, remote: Remote | None = None) -> Path:
    """The folder or file that a model is named by; of one on the hub the snapshot, of which the configuration is
    fetched if it is not here. Raises OSError or ValueError."""
    path, remote = Path(name).expanduser(), remote or Remote()
    if path.exists():
        return path
    config = _cached(str(name), remote) if remote.offline else cached_file(str(name), "config.json", **remote.files)
    if config is None:
        raise FileNotFoundError(f"{name} has no config.json")
    return Path(config).parent


def _cached(name: str, remote: Remote) -> str | None:
    """Not by the hub's client, which asks the network a question or two even when it is told to stay here."""
    found = try_to_load_from_cache(name, "config.json", revision=remote.revision)
    return found if isinstance(found, str) else None


def snapshot(name: str, remote: Remote) -> Path | None:
    """The folder of a model on the hub with its weights in safetensors, fetched if they are not here; None if they
    cannot be had, or not in this way."""
    try:
        folder = found_at(name, remote)
        if remote.offline:
            return folder
        index = _fetched(name, "model.safetensors.index.json", remote)
        parts = [] if index is None else json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        for file in {*parts} or {"model.safetensors"}:
            if _fetched(name, str(file), remote) is None:
                return None
        _fetched(name, "generation_config.json", remote)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return folder


def _fetched(name: str, file: str, remote: Remote) -> Path | None:
    """One file of a model on the hub; None if it has no such file."""
    found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **remote.files)
    return None if found is None else Path(found)


def architecture(name: str | Path, revision: str | None = None) -> str | None:
    """The class that a model's own files name. None if that is not known without fetching them."""
    try:
        place = found_at(name, Remote(revision, local_files_only=True))
        named = json.loads((place / "config.json").read_text(encoding="utf-8"))["architectures"]
        return str(named[0])
    except (OSError, ValueError, LookupError, TypeError):
        return None


# -- does it answer? ----------------------------------------------------------------------------------------------


class _Memory:
    """The last answer, for as long as it is worth. Threads may load models at the same time, so it has a lock."""

    lock = Lock()
    asked: tuple[str, int] | None = None
    reason: str | None = None
    until = 0.0


def out_of_reach() -> str | None:
    """Why the hub cannot be asked, in a few words. None: it answers, or only a proxy can tell."""
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        endpoint = urlsplit(constants.ENDPOINT)
        port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    except ValueError:
        return None  # no address at all: the hub's client says so
    host, proxies = endpoint.hostname, getproxies()
    if not host or ((endpoint.scheme in proxies or "all" in proxies) and not proxy_bypass(host)):
        return None
    place = (host, port)
    with _Memory.lock:
        if _Memory.asked != place or monotonic() > _Memory.until:
            patience = constants.HF_HUB_ETAG_TIMEOUT if os.environ.get("HF_HUB_ETAG_TIMEOUT") else PATIENCE
            _Memory.reason = _no_connection(*place, patience)
            _Memory.asked, _Memory.until = place, monotonic() + _REMEMBERED
        return _Memory.reason


def _no_connection(host: str, port: int, seconds: float) -> str | None:
    """Why no connection can be made within so many seconds; None if one was made."""
    deadline = monotonic() + seconds
    silence = TimeoutError(f"no answer within {seconds:g} s; HF_HUB_ETAG_TIMEOUT=10 waits longer")
    lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    places = next(_side_by_side([lookup], deadline), silence)
    if isinstance(places, OSError):
        return f"{host}: {places.strerror or places}"
    # All its addresses at once: where IPv6 leads nowhere, IPv4 is not kept waiting.
    addresses = sorted({place[4][:2] for place in places})
    reason: OSError | None = None
    for outcome in _side_by_side([partial(_connect, address, seconds) for address in addresses], deadline):
        if not isinstance(outcome, OSError):
            return None
        reason = outcome
    reason = reason or silence
    return f"{host}:{port}: {reason.strerror or reason}"


def _connect(address: tuple[str, int], seconds: float) -> None:
    socket.create_connection(address, timeout=seconds).close()


def _side_by_side(calls: Sequence[Callable[[], Any]], deadline: float) -> Iterator[Any]:
    """What the calls give back, or the OSErrors they raise, as they come; until the deadline, whatever they still do.

    In threads that hold nothing up: looking an address up can take a minute, and cannot be called off.
    """
    outcomes: SimpleQueue[Any] = SimpleQueue()

    def run(call: Callable[[], Any]) -> None:
        try:
            outcomes.put(call())
        except OSError as error:
            outcomes.put(error)
        except UnicodeError as error:  # a host that cannot be written as one
            outcomes.put(OSError(str(error)))

    for call in calls:
        Thread(target=run, args=(call,), daemon=True).start()
    for _ in calls:
        try:
            yield outcomes.get(timeout=max(0.0, deadline - monotonic()))
        except Empty:
            return

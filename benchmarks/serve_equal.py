"""Do a server's answers change with speculation, with company, or when they are streamed? Random requests, compared.

    python benchmarks/serve_equal.py                    # 200 requests to the embedded default, 16 clients
    python benchmarks/serve_equal.py --dtype float32    # the same model in float32, on the same kernels: token ids
    python benchmarks/serve_equal.py --quick            # a tiny model

Every request is greedy or has a seed; all other options are drawn at random. Each is sent in every way that ``WAYS``
lists, over a real socket. What must be the same are the bytes of ``choices``, log-probabilities included, and the
events of a stream joined; with ``--dtype float32`` the token ids, since a float's last bits depend on a forward's
shape there.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, as_json, log, machine, prompts

from headstart import LLM, AsyncLLM
from headstart.machine.load.embedded import embedded_draft, embedded_folder
from headstart.testing import tiny_model, tiny_tokenizer

CLIENTS = 16
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Way:
    """How the requests are sent."""

    clients: int
    speculate: bool
    stream: bool


#: the first is what the others are compared with
WAYS: dict[str, Way] = {
    "plain, alone, whole": Way(1, False, False),
    "drafted, alone, whole": Way(1, True, False),
    "drafted, in company, whole": Way(CLIENTS, True, False),
    "drafted, in company, streamed": Way(CLIENTS, True, True),
    "plain, in company, streamed": Way(CLIENTS, False, True),
}
IN_FLOAT32 = ("plain, alone, whole", "drafted, in company, whole", "plain, in company, streamed")


@dataclass(frozen=True)
class Asked:
    """One request: its route and its body."""

    path: str
    body: dict[str, Any]

    def sent(self, way: Way) -> dict[str, Any]:
        """The body, sent in this way. What cannot be streamed is not."""
        stream = way.stream and "prompt_logprobs" not in self.body and "best_of" not in self.body
        return self.body | {"speculate": way.speculate} | ({"stream": True} if stream else {})


class Draw:
    """Random requests, the same for the same seed."""

    def __init__(self, seed: int, texts: Sequence[str], encode: Callable[[str], list[int]], longest: int) -> None:
        """``texts``: what prompts are cut from; ``longest``: tokens of an answer."""
        self._random = random.Random(seed)
        self._texts, self._encode, self._longest = texts, encode, longest

    def requests(self, count: int) -> list[Asked]:
        return [self._chat() if self._random.random() < 0.4 else self._completion() for _ in range(count)]

    def _maybe(self, chance: float, **fields: Callable[[], Any]) -> dict[str, Any]:
        """All of these, or none."""
        return {name: value() for name, value in fields.items()} if self._random.random() < chance else {}

    def _text(self, least: int = 1) -> str:
        """Few beginnings, many lengths: prompts find each other's rows warm."""
        text = self._random.choice(self._texts)
        return text[: self._random.randint(least, len(text))]

    def _chat(self) -> Asked:
        draw = self._random
        words = [{"role": "user", "content": self._text()}]
        for _ in range(draw.choice((0, 0, 1, 2))):
            words += [{"role": "assistant", "content": self._text()}, {"role": "user", "content": self._text()}]
        if draw.random() < 0.3:
            words.insert(0, {"role": "system", "content": self._text()})
        body = {"messages": words, "max_tokens": draw.randint(1, self._longest)} | self._sampled()
        body |= self._maybe(0.5, logprobs=lambda: True, top_logprobs=lambda: draw.randint(0, 4))
        return Asked(CHAT, body)

    def _completion(self) -> Asked:
        draw = self._random
        one: Callable[[], Any] = lambda: self._text() if draw.random() < 0.6 else self._encode(self._text(8))  # noqa: E731
        prompt = one() if draw.random() < 0.7 else [one() for _ in range(draw.randint(1, 3))]
        if isinstance(prompt, list) and isinstance(prompt[0], str) and not all(isinstance(p, str) for p in prompt):
            prompt = prompt[0]
        body = {"prompt": prompt, "max_tokens": draw.randint(1, self._longest)} | self._sampled()
        body |= self._maybe(0.5, logprobs=lambda: draw.randint(0, 4))
        body |= self._maybe(0.3, echo=lambda: True)
        body |= self._maybe(0.1, best_of=lambda: body.get("n", 1) + draw.randint(0, 2))
        if draw.random() < 0.15:
            body |= {"max_tokens": 0}
            body.pop("min_tokens", None)
        return Asked(TEXT, body)

    def _sampled(self) -> dict[str, Any]:
        """What both kinds share: greedy, or with a seed."""
        draw = self._random
        body: dict[str, Any] = {"temperature": 0}
        if draw.random() < 0.6:
            body = {"temperature": round(draw.uniform(0.2, 1.5), 2), "seed": draw.randint(0, 10**6)}
            body |= self._maybe(0.4, top_p=lambda: round(draw.uniform(0.3, 1.0), 2))
            body |= self._maybe(0.3, top_k=lambda: draw.randint(1, 40))
            body |= self._maybe(0.2, min_p=lambda: round(draw.uniform(0.0, 0.3), 2))
        body |= self._maybe(0.3, n=lambda: draw.randint(1, 3))
        body |= self._maybe(0.2, presence_penalty=lambda: round(draw.uniform(-1, 2), 2))
        body |= self._maybe(0.2, frequency_penalty=lambda: round(draw.uniform(-1, 2), 2))
        body |= self._maybe(0.2, repetition_penalty=lambda: round(draw.uniform(0.8, 1.5), 2))
        body |= self._maybe(0.2, logit_bias=lambda: {str(draw.randint(3, 90)): draw.randint(-5, 5) for _ in range(3)})
        body |= self._maybe(0.3, stop=lambda: [self._stop() for _ in range(draw.randint(1, 3))])
        body |= self._maybe(0.1, stop_token_ids=lambda: [draw.randint(3, 90) for _ in range(3)])
        body |= self._maybe(0.3, ignore_eos=lambda: True)
        body |= self._maybe(0.1, min_tokens=lambda: 1)
        body |= self._maybe(0.3, prediction=lambda: {"type": "content", "content": self._text()})
        body |= self._maybe(0.1, prompt_logprobs=lambda: draw.randint(0, 3))
        return body | self._maybe(0.1, user=lambda: "somebody", metadata=lambda: {"a": "b"})

    def _stop(self) -> str:
        text = self._random.choice(self._texts)
        at = self._random.randrange(len(text) - 3)
        return text[at : at + self._random.randint(1, 3)]


class Server:
    """A server over an LLM, in a thread of this process; the token ids of what it answered."""

    def __init__(self, llm: LLM) -> None:
        self.ids: dict[str, list[tuple[int, ...]]] = {}  # by the request's id
        self._listening = llm.listen(ended=lambda a: self.ids.update({a.id: [c.token_ids for c in a.choices]}))
        import uvicorn  # of the extra "serve": not on every machine that runs benchmarks

        from headstart.server.app import Settings, create_app

        config = uvicorn.Config(create_app(AsyncLLM(llm), Settings(model="m")), port=0, log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @contextmanager
    def running(self) -> Iterator[Server]:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self._port = self._server.servers[0].sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self._server.should_exit = True
            self._thread.join()
            self._listening.close()

    def answers(self, asked: Sequence[Asked], way: Way) -> list[tuple[str, Any]]:
        """The id and the ``choices`` of each answer."""
        own, opened = threading.local(), list[http.client.HTTPConnection]()

        def answer(one: Asked) -> tuple[str, Any]:
            if not hasattr(own, "connection"):
                own.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
                opened.append(own.connection)
            body = json.dumps(one.sent(way))
            own.connection.request("POST", one.path, body, {"Content-Type": "application/json"})
            found = own.connection.getresponse()
            text = found.read().decode()
            if found.status != 200:
                raise RuntimeError(f"{one.path} {body}: {found.status} {text}")
            if text.startswith("data: "):
                return joined(text)
            whole = json.loads(text)
            return whole["id"], whole["choices"]

        try:
            with ThreadPoolExecutor(way.clients) as clients:
                return list(clients.map(answer, asked))
        finally:
            for connection in opened:
                connection.close()


def joined(events: str) -> tuple[str, list[dict[str, Any]]]:
    """A stream's id and its choices, as a whole answer has them."""
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: ")]
    if lines[-1] != "[DONE]":
        raise RuntimeError(f"a stream ended with {lines[-1]}")
    choices: dict[int, dict[str, Any]] = {}
    for line in map(json.loads, lines[:-1]):
        for part in line["choices"]:
            part = {"message" if name == "delta" else name: value for name, value in part.items()}
            choices[part["index"]] = _added(choices.get(part["index"]), part)
    return json.loads(lines[0])["id"], [choices[index] for index in sorted(choices)]


def _added(known: Any, more: Any) -> Any:
    """Records grow field by field, lists and texts at their ends; a number or a role stays what it was."""
    if known is None or more is None:
        return more if known is None else known
    if isinstance(known, dict):
        names = dict.fromkeys((*known, *more))
        return {name: more[name] if name not in known else _added(known[name], more.get(name)) for name in names}
    return known + more if isinstance(known, (list, str)) else known


def compared(llm: LLM, asked: Sequence[Asked], ways: Sequence[str], *, ids: bool) -> dict[str, Any]:
    """For each way, how many answers were the same as in the first, and what was not. ``ids``: by token ids alone."""
    found: dict[str, Any] = {}
    with Server(llm).running() as server:
        expected: list[Any] = []
        for name in ways:
            drafted, begun = llm.stats.drafted, time.perf_counter()
            answers = server.answers(asked, WAYS[name])
            said = [
                [server.ids[f"{id}-{i}"] for i in range(_prompts(one))] if ids else json.dumps(choices, sort_keys=True)
                for one, (id, choices) in zip(asked, answers, strict=True)
            ]
            expected = expected or said
            wrong = [i for i, (a, b) in enumerate(zip(expected, said, strict=True)) if a != b]
            found[name] = {
                "requests": len(asked),
                "same": len(asked) - len(wrong),
                "drafted_tokens": llm.stats.drafted - drafted,
                "seconds": round(time.perf_counter() - begun, 1),
                "different": [{"request": asked[i].body, "path": asked[i].path} for i in wrong[:5]],
            }
            log(f"{name}: {found[name]['same']} of {len(asked)} the same, {found[name]['drafted_tokens']} drafted")
            for i in wrong[:3]:
                log(f"  {asked[i]}\n    {str(expected[i])[:2000]}\n    {str(said[i])[:2000]}")
    return found


def _prompts(asked: Asked) -> int:
    prompt = asked.body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def small(seed: int = 0) -> Any:
    """A tiny model that the CPU's own kernels run."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_model("llama", seed=seed, max_position_embeddings=1024, head_dim=32, **sizes)


def tiny(**options: Any) -> LLM:
    given = {"draft": "lookup", "quantization": "int8", "max_rows": 6, "max_model_len": 1024, "check": False}
    return LLM(small(), tokenizer=tiny_tokenizer(), **given | options)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16, help="the most tokens of an answer")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--dtype", choices=("auto", "float32"), default="auto")
    parser.add_argument("--gamma", default="auto", help="tokens to draft a round")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--out", type=Path, default=RESULTS / "serve-equal.json")
    given = parser.parse_args(arguments)
    texts = ["one two three four five six one two three seven", "The quick brown fox. The quick red fox."]
    gamma: Any = given.gamma if given.gamma == "auto" else int(given.gamma)
    sizes = {"gamma": gamma, "max_rows": given.rows, "max_model_len": 2048}
    if given.quick:
        llm = tiny(gamma=gamma)
    elif given.dtype == "float32":
        llm = LLM(embedded_folder(), embedded_draft(), dtype="float32", quantization=None, **sizes)
    else:
        llm = LLM(**sizes)
    if not given.quick:
        texts = [text[:400] for each in prompts(3).values() for text in each]
    asked = Draw(given.seed, texts, llm.codec.encode, given.tokens).requests(given.requests)
    exact = given.dtype == "auto"
    result = compared(llm, asked, tuple(WAYS) if exact else IN_FLOAT32, ids=not exact)
    stored = json.loads(given.out.read_text()) if given.out.exists() else {}
    name = ("the same bytes of choices" if exact else "the same ids in float32") + f", gamma {gamma}"
    settings = {"requests": given.requests, "tokens": given.tokens, "seed": given.seed, "clients": CLIENTS}
    stored[name] = {"machine": machine(), "model": repr(llm), "settings": settings, "ways": result}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(as_json(stored))
    if any(way["same"] < way["requests"] for way in result.values()):
        raise SystemExit("some answers differ")


if __name__ == "__main__":
    main()

"""Fields of a request that evaluation harnesses, editors and load tools send, over a real socket."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from server_tools import SIZES, WORDS, Server, joined

from headstart import LLM, SamplingParams
from headstart.testing import tiny_model, tiny_tokenizer

TEXT = "one two three one two"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server(llm={"gamma": 3})  # drafts in any case
    yield found
    assert found.llm.engine.idle
    found.close()


def asked(server: Server, path: str = "/v1/completions", **body: Any) -> Any:
    status, said = server.post(path, body)
    assert status == 200, said
    return said


def streamed(server: Server, **body: Any) -> dict[int, dict[str, Any]]:
    """The choices of a stream, joined."""
    status, text = server.post("/v1/completions", body | {"stream": True})
    assert status == 200, text
    return joined(text)


@pytest.mark.parametrize("prompt", [TEXT, [1, 9, 20, 9, 20]])
def test_a_harness_scores_a_prompt(server: Server, prompt: Any) -> None:
    """As lm-eval's local-completions asks, and reads the answer."""
    ids = prompt if isinstance(prompt, list) else server.llm.codec.encode(prompt)
    own = server.llm.generate(ids, SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1))
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    (choice,) = asked(server, **body)["choices"]
    said = choice["logprobs"]
    assert said["token_logprobs"][0] is said["top_logprobs"][0] is None
    assert said["token_logprobs"][1:-1] == [each.logprob for each in own.prompt_logprobs[1:]]
    assert said["token_logprobs"][-1] == own.logprobs[0].logprob
    assert len(said["tokens"]) == len(said["text_offset"]) == len(ids) + 1
    assert choice["text"] == server.llm.codec.decode(ids) + own.text
    for value, top, each in zip(
        said["token_logprobs"][1:-1], said["top_logprobs"][1:-1], own.prompt_logprobs[1:], strict=True
    ):
        assert (value == max(top.values())) == (each.token_id in each.top), "is_greedy"
        assert value in top.values(), "a token's own is among them"
    for offset, token in zip(said["text_offset"], said["tokens"], strict=True):
        if not token.startswith("<"):  # a special token is no part of the text
            assert choice["text"][offset : offset + len(token)] == token
    (nothing,) = asked(server, **body | {"max_tokens": 0})["choices"]
    assert nothing["logprobs"] == {name: values[:-1] for name, values in said.items()}
    assert (nothing["text"], nothing["finish_reason"]) == (server.llm.codec.decode(ids), "length")


def test_an_echo_in_every_way_is_one(server: Server) -> None:
    body = {"prompt": [TEXT, [1, 9, 20]], "max_tokens": 12, "logprobs": 2, "echo": True, "n": 2, "ignore_eos": True}
    body |= {"temperature": 0.9, "seed": 3}
    whole = asked(server, **body)["choices"]
    assert asked(server, **body)["choices"] == whole, "warm"
    assert asked(server, **body | {"speculate": False})["choices"] == whole
    assert streamed(server, **body) == {choice["index"]: choice for choice in whole}
    plain = asked(server, **body | {"echo": False})["choices"]
    assert [c["text"] for c in whole] == [
        e + c["text"] for e, c in zip([TEXT] * 2 + [server.llm.codec.decode([1, 9, 20])] * 2, plain, strict=True)
    ]
    assert asked(server, prompt=TEXT, echo=True, max_tokens=0)["choices"][0]["text"] == TEXT
    short = {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 0}
    assert streamed(server, **short) == {0: asked(server, **short)["choices"][0]}


def test_vllms_prompt_logprobs(server: Server) -> None:
    own = server.llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)).prompt_logprobs
    found = asked(server, prompt=TEXT, max_tokens=2, prompt_logprobs=2, echo=True, logprobs=4)["choices"][0]
    assert found["prompt_logprobs"][0] is None
    for each, told in zip(own[1:], found["prompt_logprobs"][1:], strict=True):
        assert told[str(each.token_id)]["logprob"] == each.logprob
        assert told[str(each.token_id)]["decoded_token"] == server.llm.codec.spell(each.token_id)
        assert {int(token): one["logprob"] for token, one in told.items()} == {**each.top, each.token_id: each.logprob}
        assert [told[str(token)]["rank"] for token in each.top] == [1, 2]
    chat = asked(server, "/v1/chat/completions", messages=WORDS, max_tokens=2, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    status, said = server.post("/v1/completions", {"prompt": TEXT, "prompt_logprobs": 1, "stream": True})
    assert (status, said["error"]["param"]) == (400, "prompt_logprobs")


def test_the_best_of_several(server: Server) -> None:
    body = {"prompt": [TEXT, "four"], "max_tokens": 6, "temperature": 1.5, "seed": 4, "ignore_eos": True}
    whole = asked(server, **body, n=6, logprobs=1)
    means = [sum(c["logprobs"]["token_logprobs"]) / 6 for c in whole["choices"]]
    expected = []
    for first in (0, 6):
        order = sorted(range(first, first + 6), key=lambda i: -means[i])
        expected += [whole["choices"][i]["text"] for i in order[:2]]
    found = asked(server, **body, best_of=6, n=2)
    assert [c["text"] for c in found["choices"]] == expected
    assert [c["index"] for c in found["choices"]] == [0, 1, 2, 3]
    assert all(c["logprobs"] is None for c in found["choices"])
    assert found["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 72, "all were written"
    for more in ({"best_of": 2, "n": 3}, {"best_of": 3, "stream": True}, {"best_of": 65}):
        status, said = server.post("/v1/completions", body | more)
        assert (status, said["error"]["param"]) == (400, "best_of"), said
    assert streamed(server, **body, best_of=2, n=2)[3]["text"] == asked(server, **body, n=2)["choices"][3]["text"]


def test_statistics_in_vllms_shape(server: Server) -> None:
    rounds: list[Any] = []
    with server.llm.listen(rounds.extend):
        body = {"prompt": "ab" * 20, "max_tokens": 40, "temperature": 0, "n": 2, "ignore_eos": True, "statistics": True}
        said = asked(server, **body)["metrics"]["speculative_decoding"]
    drafted = [r for r in rounds if r.drafted]
    assert drafted, "lookup finds something in such a prompt"
    assert said["num_spec_steps"] == len(drafted)
    assert said["num_draft_tokens"] == sum(r.drafted for r in drafted)
    assert said["num_accepted_draft_tokens"] == sum(r.accepted for r in drafted)
    assert said["mean_acceptance_length"] == 1 + said["num_accepted_draft_tokens"] / len(drafted)
    assert said["draft_acceptance_rate"] == said["num_accepted_draft_tokens"] / said["num_draft_tokens"]
    assert sum(said["acceptance_histogram"]) == len(drafted)
    for count, times in enumerate(said["acceptance_histogram"]):
        assert times == sum(r.accepted == count for r in drafted)
    assert said["num_rounds"] == len(rounds)
    assert said["acceptance_length"] == 80 / len(rounds)
    plain = asked(server, **body | {"speculate": False})["metrics"]["speculative_decoding"]
    assert (plain["num_spec_steps"], plain["acceptance_histogram"]) == (0, [])
    assert plain["mean_acceptance_length"] is plain["draft_acceptance_rate"] is None
    assert "metrics" not in asked(server, prompt="a", max_tokens=1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_statistics_in_a_stream_need_no_chunk_of_their_own(server: Server, path: str) -> None:
    """Every chunk has choices, unless usage was asked for: clients read ``chunk.choices[0]``."""
    asks: Any = {"prompt": ["ab" * 20, "a"]} if path == "/v1/completions" else {"messages": WORDS}
    body = asks | {"max_tokens": 12, "temperature": 0, "n": 2, "ignore_eos": True, "statistics": True}
    _, whole = server.post(path, body)
    _, said = server.post(path, body | {"stream": True})
    *chunks, done = [line.removeprefix("data: ") for line in said.splitlines() if line]
    found = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]"
    assert all(chunk["choices"] for chunk in found)
    assert [("metrics" in chunk, "usage" in chunk) for chunk in found[-2:]] == [(False, False), (True, False)]
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    names = found[-1]["metrics"]["speculative_decoding"].keys()
    assert names == whole["metrics"]["speculative_decoding"].keys()
    _, said = server.post(path, body | {"stream": True, "stream_options": {"include_usage": True}})
    *chunks, done = [line.removeprefix("data: ") for line in said.splitlines() if line]
    found = [json.loads(chunk) for chunk in chunks]
    assert [bool(chunk["choices"]) for chunk in found[-2:]] == [True, False]
    assert {"metrics", "usage"} <= found[-1].keys()
    assert "metrics" not in found[-2]


def test_a_prediction_is_counted(server: Server) -> None:
    body = {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    plain = asked(server, **body, speculate=False)
    text = plain["choices"][0]["text"]
    assert plain["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
        "reasoning_tokens": 0,
    }
    rounds: list[Any] = []
    for more in ({}, {"n": 2, "logprobs": 2}, {"presence_penalty": 1.5}, {"temperature": 0.8, "seed": 1}):
        for expected in (text, text[:9] + "??" + text[11:]):
            given = body | more | {"prediction": {"type": "content", "content": expected}}
            rounds.clear()
            with server.llm.listen(rounds.extend):
                found = asked(server, **given)
            copied = [r for r in rounds if r.predicted]
            assert found["usage"]["completion_tokens_details"] == {
                "accepted_prediction_tokens": sum(r.accepted for r in copied),
                "rejected_prediction_tokens": sum(r.drafted - r.accepted for r in copied),
                "reasoning_tokens": 0,
            }
            assert found["choices"] == asked(server, **body | more | {"speculate": False})["choices"]
            if not more:
                assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 8
            whole = streamed(server, **given)
            assert [whole[i] for i in range(len(whole))] == found["choices"]


def test_origins_in_a_stream(server: Server) -> None:
    """One for each token of each choice, in the chunk that has its log-probability, also while text is held back."""
    body = {"prompt": "ab" * 12, "max_tokens": 30, "n": 3, "logprobs": 1, "ignore_eos": True, "temperature": 0.6}
    body |= {"seed": 5, "origins": True, "stream": True}
    for stop in (None, ["zzzz", "qq~"]):
        ends: queue.Queue[Any] = queue.Queue()
        status, text = server.post("/v1/completions", body | {"stop": stop})
        assert status == 200, text
        for line in text.splitlines():
            for part in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                assert len(part["origins"]) == len(part["logprobs"]["tokens"] if part["logprobs"] else ())
        with server.llm.listen(ended=ends.put):
            found = streamed(server, **body | {"stop": stop})
            own = ends.get(timeout=30)  # readers are told before
        assert [found[i]["origins"] for i in range(3)] == [list(choice.origins) for choice in own.choices]
        assert "accepted" in found[0]["origins"] + found[1]["origins"] + found[2]["origins"]
        assert [len(found[i]["logprobs"]["tokens"]) for i in range(3)] == [30] * 3
    status, said = server.post("/v1/completions", body | {"stream": False})
    assert (status, said["error"]["param"]) == (400, "origins")


FAMILIES = {
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"),
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"),
    "deepseek": ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>", None),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_suffix_becomes_a_prompt(family: str) -> None:
    tokenizer = tiny_tokenizer()
    names = [name for name in FAMILIES[family] if name is not None]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    llm = LLM(tiny_model("llama", vocab_size=120), None, tokenizer=tokenizer, check=False, quantization=None)
    first, second, third = (tokenizer.convert_tokens_to_ids(name) for name in names[:3])
    infill = llm.codec.infill
    before, behind = llm.codec.encode_prediction("def f("), llm.codec.encode_prediction("): pass")
    assert infill.encode("def f(", "): pass") == [first, *before, second, *behind, third]
    assert infill.encode(before, "): pass") == [first, *before, second, *behind, third]
    assert infill.ends == tuple(tokenizer.convert_tokens_to_ids(name) for name in names[3:])


def test_a_suffix_over_http(server: Server) -> None:
    status, said = server.post("/v1/completions", {"prompt": "def f(", "suffix": "): pass"})
    assert (status, said["error"]["param"]) == (400, "suffix"), said
    assert "fills in the middle" in said["error"]["message"]
    assert asked(server, prompt="a", suffix="", max_tokens=1)["choices"][0]["text"] is not None
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(FAMILIES["starcoder"])})
    model = tiny_model("llama", vocab_size=120, max_position_embeddings=512, **SIZES)
    other = Server(llm={"tokenizer": tokenizer, "model": model})
    try:
        codec, end = other.llm.codec, tokenizer.convert_tokens_to_ids("<|endoftext|>")
        ids = codec.infill.encode("def f(", "): pass")
        own = other.llm.generate(ids, SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[end]))
        body = {"prompt": "def f(", "suffix": "): pass", "max_tokens": 8, "temperature": 0}
        found = asked(other, **body)
        assert found["choices"][0]["text"] == own.text
        assert found["usage"]["prompt_tokens"] == len(ids)
        forced = asked(other, **body, logit_bias={str(end): 100})["choices"][0]
        assert (forced["text"], forced["finish_reason"]) == ("", "stop"), "the middle's own end token ends it"
        status, said = other.post("/v1/completions", body | {"echo": True})
        assert (status, said["error"]["param"]) == (400, "echo")
    finally:
        other.close()

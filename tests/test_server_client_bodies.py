"""What other people's clients send, as they sent it (tests/data/client_bodies.jsonl: openai 3.3, langchain-openai 1.7,
instructor 1.17, pydantic-ai 2.38), and what openai's own client makes of the answers. The clients themselves:
benchmarks/structured_clients.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from pydantic import BaseModel, Field
from scripted_model import ScriptedServer
from tool_templates import TEMPLATES, tokenizer_with

openai = pytest.importorskip("openai")
SENT = {
    line["client"]: line["body"]
    for line in map(json.loads, (Path(__file__).parent / "data" / "client_bodies.jsonl").read_text().splitlines())
}
WEATHER = '{"city": "Oslo", "degrees": -3, "sky": "rainy", "wind": 1.5}'
ARGUMENTS = {"weather": '{"city": "Oslo", "degrees": -3}', "roll": '{"sides": 6}'}


class Weather(BaseModel):
    """The weather of a place."""

    city: str = Field(description="Where", max_length=20)
    degrees: int = Field(ge=-50, le=60)
    sky: Literal["sunny", "cloudy", "rainy"]
    wind: float | None = Field(default=None, ge=0, le=300)


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    found = ScriptedServer(tokenizer_with(TEMPLATES["hermes"], added=["<tool_call>", "</tool_call>"]))
    yield found
    found.settle()
    found.close()


@pytest.fixture(scope="module")
def client(server: ScriptedServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def call_of(name: str) -> str:
    """As the model writes it."""
    arguments = ARGUMENTS.get(name, WEATHER)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("name", SENT)
def test_what_clients_send_is_answered_as_they_expect(server: ScriptedServer, client: Any, name: str) -> None:
    body = SENT[name] | {"model": "tiny", "temperature": 0, "max_completion_tokens": 200}
    # Every letter is a token here: what is long is cut.
    body["messages"] = [m | {"content": m["content"] and m["content"][:200]} for m in body["messages"]]
    tools = [tool["function"]["name"] for tool in body.get("tools", ())]
    calls = bool(tools) and body.get("tool_choice") not in (None, "auto", "none")
    server.writes(call_of(tools[0]) if calls else WEATHER if "response_format" in body else "Rain.")
    if body.get("stream"):
        message = _put_together(client.chat.completions.create(**body))
    else:
        message = client.chat.completions.create(**body).choices[0].message.model_dump()
    if calls:
        [call] = message["tool_calls"]
        assert call["function"]["name"] == tools[0]
        assert call["function"]["arguments"] == ARGUMENTS.get(tools[0], WEATHER)
        assert call["id"]
        assert not message["content"]
    else:
        assert message["content"] == (WEATHER if "response_format" in body else "Rain.")
        assert not message["tool_calls"]


def _put_together(stream: Any) -> dict[str, Any]:
    """A stream's one choice, as clients join its chunks."""
    found: dict[str, Any] = {"content": "", "tool_calls": []}
    for chunk in stream:
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                if part.index == len(found["tool_calls"]):
                    first = {"name": part.function.name, "arguments": ""}
                    found["tool_calls"].append({"id": part.id, "function": first})
                found["tool_calls"][part.index]["function"]["arguments"] += part.function.arguments or ""
    return found


def test_openai_parses_in_an_event_loop_too(server: ScriptedServer) -> None:
    """Several at once, whole and streamed, answers and calls."""
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "q"}], "temperature": 0}
    tools = [openai.pydantic_function_tool(Weather)]

    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            parse = client.chat.completions.parse
            server.writes(WEATHER)
            found = await asyncio.gather(*(parse(response_format=Weather, **asked) for _ in range(4)))
            assert [each.choices[0].message.parsed for each in found] == [Weather.model_validate_json(WEATHER)] * 4
            server.writes(call_of("Weather"))
            said = await parse(tools=tools, tool_choice="required", **asked)
            assert said.choices[0].message.tool_calls[0].function.parsed_arguments == found[0].choices[0].message.parsed
            async with client.chat.completions.stream(tools=tools, **asked) as stream:
                kinds = [event.type async for event in stream]
                last = await stream.get_final_completion()
            assert kinds.count("tool_calls.function.arguments.done") == 1
            assert last.choices[0].message.tool_calls[0].function.parsed_arguments.city == "Oslo"

    asyncio.run(go())


def test_a_conversation_goes_on_behind_a_call(server: ScriptedServer, client: Any) -> None:
    """The message that came back is sent again as it is, with what the tool said."""
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "q"}], "temperature": 0}
    tools = [openai.pydantic_function_tool(Weather)]
    server.writes(call_of("Weather"))
    said = client.chat.completions.create(tools=tools, **asked).choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "noted"}
    server.writes("It rains.")
    more = asked | {"messages": [*asked["messages"], said, result]}
    assert client.chat.completions.create(tools=tools, **more).choices[0].message.content == "It rains."

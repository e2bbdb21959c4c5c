"""Other people's clients against a real server, unchanged: openai, langchain-openai, instructor, pydantic-ai.

    python benchmarks/structured_clients.py --clients VENV/bin/python    # a Python that has the clients

The model is the embedded one with a chat template that has tools in Hermes' way. It is small: what is asked is whether
every answer is what the client's own parser takes, not whether it is wise. The grammar makes it so. Clients that are
not installed are left out and named.

Knows: the clients. Does not know: how an answer is held to anything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

HERMES = (
    "{%- if tools %}<|im_start|>system\nYou may call these tools, by <tool_call>\n"
    '{"name": ..., "arguments": ...}\n</tool_call>:\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n'
    "{% endif -%}{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = "It is 21 degrees and sunny in Paris today. Say so."
TOLD: dict[str, Any] = {"max_tokens": 300, "temperature": 0}


def records() -> tuple[Any, Any]:
    """What answers are read into. Made where the clients are: this project's own machines may lack pydantic."""
    from pydantic import BaseModel, Field

    class Weather(BaseModel):
        """The weather of a place."""

        city: str = Field(description="Where", max_length=20)
        degrees: int = Field(ge=-50, le=60)
        sky: Literal["sunny", "cloudy", "rainy"]
        wind: float | None = Field(default=None, ge=0, le=300, multiple_of=0.5)

    class Report(BaseModel):
        """Several of them."""

        today: Weather
        days: list[Weather] = Field(max_length=2)

    Report.model_rebuild(_types_namespace={"Weather": Weather})
    return Weather, Report


Weather: Any = None  # set by ``main``
Report: Any = None


# -- openai


def openai_parse(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    ask: Any = {"model": "served", "messages": [{"role": "user", "content": QUESTION}], **TOLD}
    found = client.chat.completions.parse(response_format=Report, **ask)
    assert isinstance(found.choices[0].message.parsed, Report)
    tools = [openai.pydantic_function_tool(Weather)]
    found = client.chat.completions.parse(tools=tools, tool_choice="required", **ask)
    calls = found.choices[0].message.tool_calls
    assert isinstance(calls[0].function.parsed_arguments, Weather)
    with client.chat.completions.stream(response_format=Weather, **ask) as stream:
        kinds = [event.type for event in stream]
        assert "content.done" in kinds
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    one: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**one, **ask) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert isinstance(last.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    _go_on(client, ask, tools)


def _go_on(client: Any, ask: Any, tools: Any) -> None:
    """What a tool said goes back, and the answer comes in words."""
    named = {"type": "function", "function": {"name": "Weather"}}
    said = client.chat.completions.create(tools=tools, tool_choice=named, **ask).choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "done"}
    more = ask | {"messages": [*ask["messages"], said, result]}
    found = client.chat.completions.create(tools=tools, tool_choice="none", **more).choices[0].message
    assert found.content is not None
    assert not found.tool_calls


def openai_async(url: str) -> None:
    import openai

    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            ask: Any = {"model": "served", "messages": [{"role": "user", "content": QUESTION}], **TOLD}
            tools = [openai.pydantic_function_tool(Weather)]
            asked = [client.chat.completions.parse(response_format=Report, **ask) for _ in range(8)]
            found = await asyncio.gather(*asked)
            assert all(isinstance(each.choices[0].message.parsed, Report) for each in found)
            assert len({each.choices[0].message.content for each in found}) == 1
            async with client.chat.completions.stream(tools=tools, tool_choice="required", **ask) as stream:
                async for _ in stream:
                    pass
                last = await stream.get_final_completion()
            assert isinstance(last.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)

    asyncio.run(go())


# -- langchain


def _langchain(url: str, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key="none", model="served", max_retries=0, **TOLD | more)


def langchain_structured(url: str) -> None:
    import openai

    for method in ("json_schema", "function_calling", "json_mode"):
        for strict in (None, True, False) if method != "json_mode" else (None,):
            chain = _langchain(url).with_structured_output(Weather, method=method, strict=strict, include_raw=True)
            if method == "json_mode":  # there only JSON is promised, not this one, nor that a small model ends it
                with contextlib.suppress(openai.LengthFinishReasonError):
                    json.loads(chain.invoke(QUESTION + " Answer in JSON.")["raw"].content)
                continue
            found = chain.invoke(QUESTION + " Answer in JSON.")
            assert found["parsing_error"] is None, (method, strict, found["parsing_error"])
            assert isinstance(found["parsed"], Weather)
    chain = _langchain(url).with_structured_output(Report.model_json_schema(), method="json_schema")
    assert Report.model_validate(chain.invoke(QUESTION))
    assert isinstance(asyncio.run(_langchain(url).with_structured_output(Weather).ainvoke(QUESTION)), Weather)
    parts = list(_langchain(url).with_structured_output(Weather, method="function_calling").stream(QUESTION))
    assert isinstance(parts[-1], Weather)


def langchain_tools(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    def weather(city: Literal["Paris", "Rome"], sunny: bool) -> str:
        """The weather of a city. Its arguments are short: a small model would go on with a text of any length."""
        return f"{city}: {sunny}"

    for choice in ("any", "weather", "required"):
        bound = _langchain(url).bind_tools([weather, Weather], tool_choice=choice, parallel_tool_calls=False)
        said = bound.invoke(QUESTION)
        assert said.tool_calls, choice
        whole: Any = None
        for chunk in bound.stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        assert [call["args"] for call in whole.tool_calls] == [call["args"] for call in said.tool_calls]
        assert not whole.invalid_tool_calls
    free = _langchain(url).bind_tools([weather, Weather])
    free.invoke(QUESTION)  # it may call something or not
    results = [ToolMessage("fine", tool_call_id=call["id"]) for call in said.tool_calls]
    again = _langchain(url).bind_tools([weather], tool_choice="none", parallel_tool_calls=False)
    assert not again.invoke([HumanMessage(QUESTION), said, *results]).tool_calls
    batch = bound.batch([QUESTION] * 8)
    assert {json.dumps(each.tool_calls[0]["args"]) for each in batch} == {json.dumps(said.tool_calls[0]["args"])}


# -- instructor, pydantic-ai


def instructor_modes(url: str) -> None:
    import instructor
    import openai

    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode[mode])
        messages = [{"role": "user", "content": QUESTION}]
        found = client.chat.completions.create(
            model="served", response_model=Weather, messages=messages, max_retries=0, **TOLD
        )
        assert isinstance(found, Weather), mode
        parts = client.chat.completions.create_partial(
            model="served", response_model=Weather, messages=messages, max_retries=0, **TOLD
        )
        assert Weather.model_validate(list(parts)[-1].model_dump()), mode


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("served", provider=OpenAIProvider(base_url=url, api_key="none"))
    for output in (ToolOutput(Weather), NativeOutput(Weather)):
        agent = Agent(model, output_type=output, model_settings=TOLD)
        assert isinstance(agent.run_sync(QUESTION).output, Weather)


CLIENTS: dict[str, tuple[str, Callable[[str], None]]] = {
    "openai parse, stream, a tool's result": ("openai", openai_parse),
    "openai async, eight together": ("openai", openai_async),
    "langchain with_structured_output": ("langchain-openai", langchain_structured),
    "langchain bind_tools": ("langchain-openai", langchain_tools),
    "instructor": ("instructor", instructor_modes),
    "pydantic-ai": ("pydantic-ai-slim", pydantic_ai),
}


def ask(url: str) -> None:
    for name, (package, run) in CLIENTS.items():
        found: dict[str, Any] = {"package": package}
        try:
            found["version"] = version(package)
            run(url)
            found["works"] = True
        except (ModuleNotFoundError, PackageNotFoundError) as error:
            found |= {"works": None, "missing": str(error)}
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)
            line = next(each.line for each in reversed(where) if each.filename == __file__)
            found |= {"works": False, "error": f"{type(error).__name__}: {str(error)[:800]}", "line": line}
        print(json.dumps({name: found}), flush=True)


def serve(port: int) -> None:
    from headstart import LLM, AsyncLLM
    from headstart.cli.serve import bound
    from headstart.server.app import Settings, create_app
    from headstart.server.process import run

    llm = LLM()
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = HERMES
    run(create_app(AsyncLLM(llm), Settings(model="served")), bound("127.0.0.1", port), drain=5)


def whole(python: str, port: int, out: str) -> None:
    """A server, the clients, and what came of it, stored."""
    from common import machine, save

    server = subprocess.Popen([sys.executable, __file__, "serve", "--port", str(port)])
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").close()
                break
            except OSError:
                if server.poll() is not None:
                    raise
                time.sleep(0.5)
        asked = [python, __file__, "ask", "--url", f"http://127.0.0.1:{port}/v1"]
        said = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout
    finally:
        server.terminate()
        server.wait(60)
    found: dict[str, Any] = {}
    for line in said.splitlines():
        print(line)
        found |= json.loads(line)
    save(out, {"machine": machine(), "clients": found})


def main() -> None:
    global Weather, Report
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", nargs="?", choices=["serve", "ask"], help="one half of it; else both")
    options.add_argument("--clients", default=sys.executable, help="the Python that has the clients")
    options.add_argument("--port", type=int, default=8131)
    options.add_argument("--url", default="http://127.0.0.1:8131/v1")
    options.add_argument("--out", default="structured-clients.json")
    given = options.parse_args()
    if given.what == "serve":
        serve(given.port)
    elif given.what == "ask":
        Weather, Report = records()
        ask(given.url)
    else:
        whole(given.clients, given.port, given.out)


if __name__ == "__main__":
    main()

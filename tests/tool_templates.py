"""Chat templates as models have them that call tools, each in its way, in a few lines; and tokenizers with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken

from headstart.testing import tiny_tokenizer

_TURNS = (
    "{%- for m in messages %}{{ '[' + m.role + '] ' }}{{ m.content }}"
    "{% if m.tool_calls %}CALLS{% endif %}{{ '\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
_TOLD = "{%- if tools %}{{ 'Tools: ' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '\n' }}{% endif %}"
HERMES = _TOLD + _TURNS.replace(
    "CALLS",
    "{% for c in m.tool_calls %}{{ '<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{% endfor %}",
)
LLAMA3 = _TOLD + _TURNS.replace(
    "CALLS",
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{{ '{\"name\": \"' + m.tool_calls[0].function.name + '\", ' }}"
    "{{ '\"parameters\": ' }}{{ m.tool_calls[0].function.arguments | tojson }}{{ '}' }}",
)
MISTRAL = _TOLD + _TURNS.replace(
    "CALLS",
    "{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "{{ c.function | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}",
)
WITHOUT = _TURNS.replace("{% if m.tool_calls %}CALLS{% endif %}", "")
TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}
#: of models that may think before they answer, and of those whose thinking the template opens
MAY_THINK = HERMES.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}",
)
THINKING = MAY_THINK.replace("'[assistant] '", "'[assistant] <think>\n'")


def tokenizer_with(template: str, *special: str, added: Sequence[str] = ()) -> Any:
    """A tiny tokenizer; ``special``: more special tokens; ``added``: others that are tokens of their own."""
    found = tiny_tokenizer()
    found.add_tokens(list(added))
    if special:
        found.add_special_tokens({"additional_special_tokens": [AddedToken(each, special=True) for each in special]})
    found.chat_template = template
    return found


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "<tool_call>"]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "function", "function": {"name": "do_nothing"}}
TOOLS = [ADD, NOTHING]

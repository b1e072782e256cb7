"""Writes channels.json: conversations, and what transformers makes of them with channels.jinja.

Needs transformers 5 and jinja2 3.1: python write.py
"""

import json
from datetime import datetime
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent
TODAY = datetime.now().strftime("%Y-%m-%d")

SYSTEM = {"role": "system", "content": "Answer in verse."}
USER = {"role": "user", "content": "Where is it warm? <\u00fc> 'a' \"b\" \U0001f600"}


def call(name, arguments, said=None, calls=1):
    one = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": said, "tool_calls": [one] * calls}


def tool(name, parameters=None):
    function = {"name": name, "description": f"What {name} does"}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def obj(properties, required=()):
    return {"type": "object", "properties": properties, "required": list(required)}


TOOLS = [
    tool("now"),
    tool("empty", {"type": "object", "properties": {}}),
    tool("weather", obj({
        "place": {"type": "string", "description": "A place", "enum": ["here", "there"], "default": "here"},
        "days": {"type": "integer", "default": 3},
        "exact": {"type": "boolean", "default": False},
        "note": {"type": "string", "nullable": True},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "names": {"type": "array", "items": {"type": "string"}, "default": ["\u00fc", 1.5, None]},
        "any": {"type": "array"},
        "lists": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "either": {"type": ["string", "null"]},
        "one": {"type": ["number"]},
        "of": {"oneOf": [{"type": "string", "description": "text"}, {"type": "number"}], "default": "text"},
        "mixed": {"oneOf": [{"type": "string"}, {"type": "object"}]},
        "free": {"description": "Anything"},
        "nested": obj({"a": {"type": "number"}, "b": obj({"c": {"type": "string"}}, ["c"])}, ["b"]),
        "open": {"type": "object"},
    }, ["place", "names"])),
]
ARGUMENTS = {"place": "here", "names": ["\u00fc", "<b>"], "nested": {"b": {"c": "x\ny"}}, "days": 2, "one": 1.5}
RESULT = {"role": "tool", "content": "{\"warm\": true, \"\u00fc\": \"<\"}", "tool_call_id": "1"}

CASES = [
    ("a question", [USER], None, {}),
    ("with instructions", [SYSTEM, USER], None, {"reasoning_effort": "high", "model_identity": "You are nobody."}),
    ("tools that come with the model", [USER], None, {"builtin_tools": ["python", "other"]}),
    ("tools", [USER], TOOLS, {}),
    ("a call and its result", [SYSTEM, USER, call("weather", ARGUMENTS, "I look."), RESULT], TOOLS, {}),
    ("two calls, and what was said", [
        USER, call("now", {}, calls=2), RESULT, RESULT,
        {"role": "assistant", "content": "I think</think>\n It is warm."}, USER,
    ], TOOLS, {}),
    ("channels in a message", [USER, {"role": "assistant", "content": "<|channel|>final<|message|>a"}, USER], None, {}),
    ("a result without a call", [USER, RESULT], None, {}),
    ("a role of its own", [USER, {"role": "wizard", "content": "a"}], None, {}),
]


def stored(messages):
    """Messages with arguments as texts, which keep the order of members."""
    def one(call):
        return {**call, "function": {**call["function"], "arguments": text(call["function"]["arguments"])}}
    return [{**m, "tool_calls": [one(call) for call in m["tool_calls"]]} if "tool_calls" in m else m for m in messages]


def text(value):
    return json.dumps(value, ensure_ascii=False)


def main():
    template = (HERE / "channels.jinja").read_text(encoding="utf-8")
    cases = []
    for name, messages, tools, variables in CASES:
        for opens in (True, False):
            case = {"name": name, "messages": stored(messages), "variables": variables, "opens": opens}
            if tools:
                case["tools"] = text(tools)
            try:
                texts, _ = render_jinja_template(
                    [messages], tools=tools, chat_template=template, add_generation_prompt=opens, **variables)
                case["text"] = texts[0].replace(TODAY, "TODAY")
            except TemplateError as error:
                case["error"] = str(error)
            cases.append(case)
    cases = json.dumps(cases, indent=1, ensure_ascii=False) + "\n"
    (HERE / "channels.json").write_text(cases, encoding="utf-8")


main()

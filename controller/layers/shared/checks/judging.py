"""What is right in an answer. Each judge gives "" when it is, and what is wrong with it when it is not."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from typing import Any

from .asking import Reply

MARKUP = re.compile(r"</?(?:think|tool_call|function|parameter)\b|<\|[a-z_]+\|>")
"""What a parser should have taken out of an answer."""


def names_one_of(reply: Reply, good: list[str]) -> str:
    """The answer names one of the good ones, as a word."""
    if not reply.content.strip():
        return "the answer is empty"
    said = _plain(reply.content)
    if any(re.search(rf"(?<!\w){re.escape(_plain(each))}(?!\w)", said) for each in good):
        return unlike_text(reply.content)
    return f"the answer does not say {' or '.join(good)}"


def comes_to(reply: Reply, result: int) -> str:
    """The last number in the answer is the result."""
    if not reply.content.strip():
        return "the answer is empty"
    numbers = re.findall(r"-?\d+", reply.content.replace(",", "").replace("\u2212", "-"))
    if numbers and int(numbers[-1]) == result:
        return unlike_text(reply.content)
    return f"the answer does not come to {result}"


def calls(reply: Reply, tool: str, wanted: dict[str, str]) -> str:
    """The tool is called once, with arguments that parse and say what was asked."""
    if not reply.tool_calls:
        if MARKUP.search(reply.content):
            return "the tool call came as text: the engine did not parse it"
        return "no tool was called"
    function: dict[str, Any] = reply.tool_calls[0].get("function") or {}
    if function.get("name") != tool:
        return f"called {function.get('name')!r} and not {tool}"
    given = function.get("arguments")
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return f"the arguments of {tool} are no JSON: {str(given)[:100]!r}"
    if not isinstance(arguments, dict):
        return f"the arguments of {tool} are no object: {str(given)[:100]!r}"
    for name, value in wanted.items():
        if value.casefold() not in str(arguments.get(name, "")).casefold():
            return f"called {tool} with {name}={arguments.get(name)!r} and not {value!r}"
    if MARKUP.search(reply.content):
        return "markup of the call is left in the answer"
    return ""


def thinks_apart(reply: Reply, result: int) -> str:
    """There is reasoning, it is not in the answer, and the answer is right."""
    if MARKUP.search(reply.content):
        return "markup of reasoning is left in the answer"
    if not reply.reasoning.strip():
        return "no reasoning came apart from the answer"
    if not reply.content.strip():
        return "there is reasoning, and the answer is empty"
    return comes_to(reply, result)


def is_object(reply: Reply, types: dict[str, type], wanted: dict[str, Any]) -> str:
    """The answer is a JSON object of the schema, with the values that were given."""
    try:
        said = json.loads(reply.content)
    except ValueError:
        return "the answer is no JSON, though it was asked to keep to a schema"
    if not isinstance(said, dict) or set(said) != set(types):
        return f"the answer does not have exactly the fields {', '.join(types)}"
    for name, kind in types.items():
        if not isinstance(said[name], kind) or isinstance(said[name], bool):
            return f"{name} is {said[name]!r}, not of the type in the schema"
    for name, value in wanted.items():
        if said[name] != value:
            return f"{name} is {said[name]!r}, and was given as {value!r}"
    return ""


def says_the_same(streamed: Reply, whole: Reply) -> str:
    """What came in pieces is what comes at once."""
    if " ".join(streamed.content.split()) == " ".join(whole.content.split()):
        return "" if whole.content.strip() else "both answers are empty"
    return f"streamed it says {streamed.content[:120]!r}, at once {whole.content[:120]!r}"


def repeats(text: str) -> str:
    """Whether a text ends in a loop, or goes round in one: the same piece over and over."""
    body = text.strip()
    for length in range(1, min(120, len(body) // 4) + 1):
        piece, times = body[-length:], 1
        while body.endswith(piece, 0, len(body) - times * length):
            times += 1
        # Ruled lines and dots are text; a long piece is no accident three times over.
        if times * length >= 40 and times >= (24 if length <= 2 else 8 if length <= 12 else 4):
            return f"the answer repeats {piece[:40]!r} {times} times at its end"
    words = re.findall(r"\w+", body.casefold())
    if len(words) >= 40:
        threes = Counter(zip(words, words[1:], words[2:], strict=False))
        most, times = threes.most_common(1)[0]
        if times > 4 and times * 3 > len(words) / 3:
            return f"the answer says {' '.join(most)!r} {times} times in {len(words)} words"
    return ""


def unlike_text(text: str) -> str:
    """Whether a text has what no answer in plain English has: bytes that are no text, runs of a mark, many scripts."""
    # An answer that was cut at its length may end within a character.
    text = text.rstrip("\ufffd")
    broken = sum(
        1 for c in text if c == "\ufffd" or (unicodedata.category(c) in ("Cc", "Cn", "Co", "Cs") and c not in "\n\t\r")
    )
    if broken:
        return f"{broken} of {len(text)} characters are no text"
    if run := re.search(r"([^\w\s])\1{19,}|(\w)\2{19,}", text):
        return f"the answer has {run[0][0]!r} {len(run[0])} times in a row"
    scripts = Counter(_script(c) for c in text if c.isalpha())
    latin = scripts.pop("LATIN", 0)
    if (strange := sum(scripts.values())) > max(3, (latin + strange) / 5):
        return f"{strange} of {latin + strange} letters are of other scripts: {', '.join(sorted(scripts))}"
    return ""


def is_prose(reply: Reply) -> str:
    """A few sentences in plain English: words as long as words are, with spaces between them."""
    text = reply.content.strip()
    if not text:
        return "the answer is empty"
    if wrong := unlike_text(text):
        return wrong
    words = text.split()
    longest = max(len(word) for word in words)
    if longest > 60:
        return f"a word of the answer has {longest} characters"
    letters = sum(1 for c in text if c.isalpha() or c.isspace())
    if letters < len(text) * 0.7:
        return f"only {letters} of {len(text)} characters are letters or spaces"
    return ""


def _script(character: str) -> str:
    return unicodedata.name(character, "NONE").split(" ")[0]


def _plain(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in decomposed if not unicodedata.combining(c))

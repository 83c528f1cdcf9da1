"""Questions with known answers, asked at temperature 0: whether a server makes sense, and how fast it is.

Each check has a control: the same judge on something that must not pass. A check whose control passes judges nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from . import judging
from .asking import NoAnswer, Refused, Reply, Server
from .place import Metrics

CAPITALS = [
    ("France", ["Paris"]),
    ("Germany", ["Berlin"]),
    ("Italy", ["Rome", "Roma"]),
    ("Spain", ["Madrid"]),
    ("Japan", ["Tokyo"]),
    ("Egypt", ["Cairo"]),
    ("Austria", ["Vienna", "Wien"]),
    ("Portugal", ["Lisbon", "Lisboa"]),
]
SUMS = [("What is 2 + 3?", 5), ("What is 17 + 25?", 42), ("What is 6 * 7?", 42), ("What is 20 - 8?", 12)]
SHORT = " Answer with one word."
NUMBER = " Answer with the number only."
PROSE = "Explain in about eight sentences how a lighthouse works."
PUZZLE = "Ann has 3 apples and buys 4 more. How many apples does she have? Answer with the number."
PERSON = "Give me a JSON object about a person with the name Ann and the age 31."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = "What is the weather in Paris?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SECRET = 7481
HAY = "The keeper cleaned the lamp, wrote the weather into his book and looked at the sea. "
NEEDLE = f"The number on the door of the lighthouse is {SECRET}. "
ASK_NEEDLE = "What is the number on the door of the lighthouse? If it is not in the text, say: unknown."

TRIES = 2
"""A wrong answer is asked for again; when that is wrong, too, the check has failed."""


THOUGHTS = 4096
"""Tokens for an answer of a model that has used up the first ones on thinking."""
SLOW_RUNS = 3
"""One after the other, far slower than usual, after which a server is slower than before."""


class Busy(Exception):  # noqa: N818 - it is no error
    """The server has had work of others all the time that was to be waited for."""


@dataclass
class Asker:
    """Asks a server, and steps back while others wait in it.

    ``plainly`` are what a request says so that a model that can think does not; it is left out for a server that does
    not take it. ``patience`` in seconds is for all of its waiting; ``timeout`` for one answer. ``context`` is the
    longest that the server takes in tokens, question and answer, where it tells.
    """

    server: Server
    metrics: Callable[[], Metrics | None]
    plainly: dict[str, Any] = field(default_factory=dict)
    patience: float = 300.0
    timeout: float = 120.0
    context: int | None = None

    def ask(self, question: str, max_tokens: int = 64, thinking: bool = False, **more: Any) -> Reply:
        """One answer. A model that thought all the time is given more tokens once. Raises NoAnswer, Refused, Busy."""
        self.wait_for_room()
        if self.context is not None:
            max_tokens = min(max_tokens, self.context // 2)
        messages = [{"role": "user", "content": question}]
        plainly = {} if thinking else self.plainly
        try:
            reply = self.server.chat(messages, max_tokens, self.timeout, **plainly, **more)
        except Refused as refusal:
            if not plainly or refusal.status not in (400, 422):
                raise
            self.plainly = {}
            return self.ask(question, max_tokens, thinking, **more)
        thought_on = reply.finish == "length" and not reply.content.strip() and reply.reasoning
        if thought_on and max_tokens < min(THOUGHTS, (self.context or THOUGHTS * 2) // 2):
            return self.ask(question, THOUGHTS, thinking, **more)
        return reply

    def wait_for_room(self) -> None:
        """Return when nothing waits in the server. Raises Busy."""
        while self.waiting():
            if self.patience <= 0:
                raise Busy("requests of others wait in it")
            time.sleep(2.0)
            self.patience -= 2.0

    def waiting(self) -> int:
        """How many requests wait in the server, as far as it tells."""
        readings = self.metrics()
        return int(readings.get("waiting") or 0) if readings else 0


@dataclass(frozen=True)
class Canary:
    """One check: what it asks, what is wrong with the answers ("" when nothing is), and its control.

    The control gives what the judge finds wrong where something is, so "" means that the judge is blind.
    """

    name: str
    ask: Callable[[Asker], list[Reply]]
    judge: Callable[[list[Reply]], str]
    control: Callable[[Asker, list[Reply]], str]


def _one(question: str, max_tokens: int = 64, **more: Any) -> Callable[[Asker], list[Reply]]:
    return lambda asker: [asker.ask(question, max_tokens, **more)]


def _capital() -> Canary:
    good = CAPITALS[0][1]
    return Canary(
        "capital",
        _one(_which(0)),
        lambda replies: judging.names_one_of(replies[0], good),
        lambda asker, replies: judging.names_one_of(asker.ask(_which(1)), good),
    )


def _which(place: int) -> str:
    return f"What is the capital of {CAPITALS[place][0]}?{SHORT}"


def _arithmetic() -> Canary:
    def judge(replies: list[Reply], add: int = 0) -> str:
        wrong = (judging.comes_to(reply, result + add) for reply, (_, result) in zip(replies, SUMS, strict=True))
        return next((each for each in wrong if each), "")

    return Canary(
        "arithmetic",
        lambda asker: [asker.ask(question + NUMBER) for question, _ in SUMS],
        judge,
        lambda asker, replies: judge(replies, add=1),
    )


def _prose() -> Canary:
    return Canary(
        "garbage",
        _one(PROSE, 256),
        lambda replies: judging.is_prose(replies[0]),
        lambda asker, replies: judging.is_prose(Reply(content=replies[0].content[:40] + "v\ufffd" * 40)),
    )


def _repetition() -> Canary:
    return Canary(
        "repetition",
        _one(PROSE, 256),
        lambda replies: judging.repeats(replies[0].content) if replies[0].content.strip() else "the answer is empty",
        lambda asker, replies: judging.repeats(replies[0].content + " and the lamp" * 20),
    )


def _streaming() -> Canary:
    question = _which(2)
    return Canary(
        "streaming",
        lambda asker: [asker.ask(question, stream=True), asker.ask(question)],
        lambda replies: judging.says_the_same(replies[0], replies[1]),
        lambda asker, replies: judging.says_the_same(asker.ask(SUMS[0][0] + NUMBER, stream=True), replies[1]),
    )


def _concurrency() -> Canary:
    def judge(replies: list[Reply], turn: int = 0) -> str:
        for place, reply in enumerate(replies):
            country, good = CAPITALS[(place + turn) % len(CAPITALS)]
            if wrong := judging.names_one_of(reply, good):
                return f"asked eight things at once, for {country}: {wrong}"
        return ""

    def ask(asker: Asker) -> list[Reply]:
        with ThreadPoolExecutor(len(CAPITALS)) as pool:
            return list(pool.map(asker.ask, map(_which, range(len(CAPITALS)))))

    return Canary("concurrency", ask, judge, lambda asker, replies: judge(replies, turn=1))


def _tool_call() -> Canary:
    def judge(replies: list[Reply]) -> str:
        return judging.calls(replies[0], "get_weather", {"city": "Paris"})

    return Canary(
        "tool-call",
        _one(WEATHER, 256, tools=[TOOL]),
        judge,
        lambda asker, replies: judge([asker.ask(_which(0))]),
    )


def _reasoning() -> Canary:
    def judge(replies: list[Reply]) -> str:
        return judging.thinks_apart(replies[0], 7)

    def glued(asker: Asker, replies: list[Reply]) -> str:
        thought = replies[0]
        return judge([Reply(content=f"<think>{thought.reasoning}</think>{thought.content}")])

    return Canary("reasoning", _one(PUZZLE, 2048, thinking=True), judge, glued)


def _structured() -> Canary:
    def judge(replies: list[Reply]) -> str:
        return judging.is_object(replies[0], {"name": str, "age": int}, {"name": "Ann", "age": 31})

    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    return Canary(
        "structured",
        _one(PERSON, 128, response_format=form),
        judge,
        lambda asker, replies: judge([asker.ask(_which(0))]),
    )


def long_text(tokens: int, needle: str) -> str:
    """Some text with the needle in its midst, and the question. Four characters a token keep it under the length."""
    times = max(4, tokens * 4 // len(HAY))
    half = times // 2
    return f"{HAY * half}{needle}{HAY * (times - half)}\n\n{ASK_NEEDLE}"


def short_text() -> str:
    """The question with no needle to be found."""
    return f"{HAY * 4}\n\n{ASK_NEEDLE}"


def _needle(tokens: int) -> Canary:
    def judge(replies: list[Reply]) -> str:
        wrong = judging.names_one_of(replies[0], [str(SECRET)])
        return wrong and f"in some {tokens} tokens of text: {wrong}"

    def patiently(asker: Asker) -> list[Reply]:
        # Reading takes time: at 500 tokens a second in the worst of cases that are still of use.
        before, asker.timeout = asker.timeout, max(asker.timeout, tokens / 500 + 120)
        try:
            return [asker.ask(long_text(tokens, NEEDLE))]
        finally:
            asker.timeout = before

    return Canary("needle", patiently, judge, lambda asker, replies: judge([asker.ask(short_text())]))


def chosen(settings: dict[str, Any]) -> list[Canary]:
    """The checks that the settings ask for; those that every server has to pass come first."""
    asked = settings["checks"]
    more: list[tuple[bool, Callable[[], Canary]]] = [
        (True, _capital),
        ("arithmetic" in asked, _arithmetic),
        (True, _prose),
        (True, _repetition),
        (True, _streaming),
        (True, _concurrency),
        ("tool-call" in asked, _tool_call),
        ("reasoning" in asked, _reasoning),
        ("structured" in asked, _structured),
        (settings["needle"] > 0, lambda: _needle(settings["needle"])),
    ]
    return [make() for wanted, make in more if wanted]


@dataclass
class Found:
    """How a check ended, with the answers or figures that it was judged by. ``reason`` is one of server.output's."""

    name: str
    result: str
    evidence: str = ""
    reason: str = ""
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        """As the result's file holds it."""
        return {
            "name": self.name, "result": self.result, "evidence": self.evidence,
            "reason": self.reason, "seconds": round(self.seconds, 3),
        }  # fmt: skip


def check(canary: Canary, asker: Asker) -> Found:
    """Ask, judge, ask again where it is wrong, and see whether the control fails as it must."""
    begun = time.monotonic()
    found = _judged(canary, asker)
    found.seconds = time.monotonic() - begun
    return found


def _judged(canary: Canary, asker: Asker) -> Found:
    wrongs: list[str] = []
    for _ in range(TRIES):
        try:
            replies = canary.ask(asker)
            wrong = canary.judge(replies)
            if not wrong:
                return _controlled(canary, asker, replies)
            wrongs.append(f"{wrong}; {' | '.join(reply.shown() for reply in replies)}")
        except Busy as busy:
            return Found(canary.name, "inconclusive", str(busy), "inconclusive")
        except Refused as refusal:
            if refusal.status in (401, 403, 429, 503):
                return Found(canary.name, "inconclusive", str(refusal), "inconclusive")
            wrongs.append(str(refusal))
        except NoAnswer as none:
            if not none.timed_out or asker.waiting():
                return Found(canary.name, "inconclusive", str(none), "inconclusive")
            wrongs.append(str(none))
    return Found(canary.name, "failed", wrongs[-1], "wrong-output")


def _controlled(canary: Canary, asker: Asker, replies: list[Reply]) -> Found:
    try:
        if canary.control(asker, replies):
            return Found(canary.name, "passed", replies[0].shown())
        return Found(canary.name, "inconclusive", "its control did not fail: it lets anything pass", "inconclusive")
    except (Busy, NoAnswer, Refused) as none:
        return Found(canary.name, "inconclusive", f"its control could not be run: {none}", "inconclusive")


@dataclass
class Figures:
    """What was measured; None where it could not be."""

    tokens_per_second: float | None = None
    first_token_seconds: float | None = None
    draft_acceptance: float | None = None
    accepted_length: float | None = None
    why_not: str = ""


def measure(asker: Asker, runs: int = 2, figures: Figures | None = None) -> Figures:
    """How fast one stream is, while nobody else is served; the best of a few runs, since others only ever slow it.

    ``figures`` are those of earlier runs, which this one is to better.
    """
    figures = figures or Figures()
    for _ in range(runs):
        if (why := _busy(asker)) or (why := _one_run(asker, figures)):
            figures.why_not = why
    return figures


def _busy(asker: Asker) -> str:
    """Why speed cannot be judged now, "" when it can. Gauges may be old, so work is told by counters that move."""
    first = asker.metrics()
    if first is None:
        return ""
    if not first.get("running") and not first.get("waiting"):
        return ""
    time.sleep(2.0)
    second = asker.metrics()
    if second is None or second.moved != first.moved or second.get("waiting"):
        return "it serves others"
    return ""


def _one_run(asker: Asker, figures: Figures) -> str:
    before = asker.metrics()
    try:
        reply = asker.ask(PROSE, 256, stream=True, stream_options={"include_usage": True})
    except (NoAnswer, Refused, Busy) as none:
        return str(none)
    after = _settled(asker, before, reply)
    if reply.tokens is None or reply.first is None or reply.tokens < 16 or reply.last <= reply.first:
        return f"the answer is too short to measure: {reply.shown()}"
    if before is not None and after is not None:
        generated = (after.get("generation_tokens") or 0) - (before.get("generation_tokens") or 0)
        if generated > reply.tokens + 8:
            return "it serves others"
        _take_drafts(figures, before, after)
    speed = (reply.tokens - 1) / (reply.last - reply.first)
    if figures.tokens_per_second is None or speed > figures.tokens_per_second:
        figures.tokens_per_second, figures.first_token_seconds = round(speed, 3), round(reply.first, 4)
    return ""


def _settled(asker: Asker, before: Metrics | None, reply: Reply) -> Metrics | None:
    """The readings after a request; engines count it a moment after its last token."""
    readings = asker.metrics()
    for _ in range(10):
        if before is None or readings is None or reply.tokens is None:
            break
        if (readings.get("generation_tokens") or 0) - (before.get("generation_tokens") or 0) >= reply.tokens:
            break
        time.sleep(0.5)
        readings = asker.metrics()
    return readings


def _take_drafts(figures: Figures, before: Metrics, after: Metrics) -> None:
    """The accepted part of drafted tokens: of our request where they are counted, else the engine's last reading."""
    drafted = (after.get("drafted") or 0) - (before.get("drafted") or 0)
    accepted = (after.get("accepted") or 0) - (before.get("accepted") or 0)
    drafts = (after.get("drafts") or 0) - (before.get("drafts") or 0)
    if drafted > 0:
        figures.draft_acceptance = round(accepted / drafted, 4)
        figures.accepted_length = round(1 + accepted / drafts, 3) if drafts > 0 else None
        return
    # Zero is what a gauge says without speculative decoding, too; with it each pass gives one token at least.
    length, rate = after.get("accept_length"), after.get("accept_rate")
    if length and rate is not None:
        figures.draft_acceptance, figures.accepted_length = round(rate, 4), round(length, 3)


def usual(earlier: list[float]) -> float | None:
    """The speed that a server usually has, None when it was measured too seldom to say."""
    return statistics.median(earlier) if len(earlier) >= 5 else None


def judge_figures(figures: Figures, settings: dict[str, Any], earlier: list[float], slow: int = 0) -> list[Found]:
    """What the figures say against the spec's bounds and the server's own past.

    ``earlier`` are the usual speeds of earlier runs, ``slow`` is how many runs before this one were far below those.
    """
    found: list[Found] = []
    speed = figures.tokens_per_second
    least, most = settings["tokens_per_second"]
    before = usual(earlier)
    if speed is None:
        if least is not None or most is not None:
            found.append(Found("speed", "inconclusive", figures.why_not or "not measured", "inconclusive"))
    elif least is not None and speed < least:
        found.append(Found("speed", "failed", f"{speed:.1f} tokens/s, at least {least:g} asked for", "too-slow"))
    elif most is not None and speed > most:
        found.append(Found("speed", "failed", f"{speed:.1f} tokens/s, at most {most:g} believed", "too-fast"))
    elif before is not None and speed < min(before / 2, *earlier):
        # Whatever else the machine did just then may be why: it takes some runs to be said.
        said = f"{speed:.1f} tokens/s, {before:.1f} were usual with the same files"
        result = "failed" if slow + 1 >= SLOW_RUNS else "inconclusive"
        found.append(Found("speed", result, said, "slower-than-before"))
    else:
        found.append(Found("speed", "passed", f"{speed:.1f} tokens/s"))
    found += _judge_drafts(figures, settings)
    return found


def _judge_drafts(figures: Figures, settings: dict[str, Any]) -> list[Found]:
    least, most = settings["draft_acceptance"]
    if least is None and most is None:
        return []
    accepted = figures.draft_acceptance
    if accepted is None:
        if figures.tokens_per_second is None:
            return [Found("drafts", "inconclusive", figures.why_not or "not measured", "inconclusive")]
        return [Found("drafts", "failed", "the engine counts no drafted tokens", "no-drafts")]
    length = f", {figures.accepted_length:.2f} tokens a pass" if figures.accepted_length else ""
    said = f"{accepted:.1%} of drafted tokens accepted{length}"
    if least is not None and accepted < least:
        return [Found("drafts", "failed", f"{said}, at least {least:.1%} asked for", "drafts-refused")]
    if most is not None and accepted > most:
        return [Found("drafts", "failed", f"{said}, at most {most:.1%} believed", "drafts-too-good")]
    return [Found("drafts", "passed", said)]

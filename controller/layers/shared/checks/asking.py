"""How a server is asked over HTTP, and what its answers are. Standard library only: it runs where the server runs."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from dataclasses import dataclass, field
from typing import Any


class NoAnswer(Exception):  # noqa: N818 - it is no error of ours
    """Nothing came, or not in time, or the connection broke. ``timed_out``: something listens and is silent."""

    def __init__(self, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Refused(Exception):  # noqa: N818
    """The server answered that it does not: an HTTP status, and what it says."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"HTTP {status}: {said[:300]}")
        self.status = status
        self.said = said


@dataclass
class Reply:
    """What came of one request for a chat completion.

    ``first`` are the seconds until the first piece of text came (of a streamed one), ``last`` until the last.
    ``tokens`` are the generated tokens as the server counts them, None when it does not say.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str = ""
    tokens: int | None = None
    first: float | None = None
    last: float = 0.0

    def shown(self) -> str:
        """The answer for people, shortened."""
        parts = [f"answered {_short(self.content)}"]
        if self.reasoning:
            parts.append(f"reasoning {_short(self.reasoning)}")
        if self.tool_calls:
            parts.append(f"tool calls {_short(json.dumps(self.tool_calls))}")
        if self.finish:
            parts.append(f"finish {self.finish}")
        if self.tokens is not None:
            parts.append(f"{self.tokens} tokens")
        return ", ".join(parts)


def _short(text: str, length: int = 160) -> str:
    shown = ascii(text) if any(not c.isprintable() or c == "\ufffd" for c in text) else repr(text)
    return shown if len(shown) <= length else f"{shown[: length - 40]}... ({len(text)} characters)"


@dataclass
class Server:
    """A server that speaks OpenAI's HTTP interface, at an address of this machine."""

    host: str
    port: int
    model: str
    key: str = field(default="", repr=False)

    def get(self, path: str, timeout: float) -> tuple[int, bytes]:
        """The status and body at a path. Raises NoAnswer."""
        return self._request("GET", path, None, timeout)

    def chat(self, messages: list[dict[str, Any]], max_tokens: int, timeout: float, **more: Any) -> Reply:
        """One chat completion at temperature 0. ``timeout`` bounds all of it. Raises NoAnswer, Refused."""
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}
        begun = time.monotonic()
        if body.get("stream"):
            return self._streamed(body, begun, timeout)
        status, said = self._request("POST", "/v1/chat/completions", body, timeout)
        if status != 200:
            raise Refused(status, said.decode("utf-8", "replace"))
        reply = _whole(said)
        reply.last = time.monotonic() - begun
        return reply

    def _streamed(self, body: dict[str, Any], begun: float, timeout: float) -> Reply:
        reply = Reply()
        connection = self._connection(timeout)
        try:
            response = self._send(connection, "POST", "/v1/chat/completions", body)
            if response.status != 200:
                raise Refused(response.status, response.read(65536).decode("utf-8", "replace"))
            for raw in response:
                if time.monotonic() - begun > timeout:
                    raise NoAnswer(f"has not ended within {timeout:.0f} s", timed_out=True)
                line = raw.strip()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    break
                if _add(reply, data):
                    reply.last = time.monotonic() - begun
                    reply.first = reply.last if reply.first is None else reply.first
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _no_answer(error, timeout) from None
        finally:
            connection.close()
        return reply

    def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, bytes]:
        connection = self._connection(timeout)
        try:
            response = self._send(connection, method, path, body)
            return response.status, response.read(8 * 1024 * 1024)
        except (OSError, http.client.HTTPException) as error:
            raise _no_answer(error, timeout) from None
        finally:
            connection.close()

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        return connection.getresponse()


def _no_answer(error: Exception, timeout: float) -> NoAnswer:
    if isinstance(error, TimeoutError | socket.timeout):
        return NoAnswer(f"no answer within {timeout:.0f} s", timed_out=True)
    if isinstance(error, ConnectionRefusedError):
        return NoAnswer("nothing listens on its port")
    return NoAnswer(f"the answer broke off: {error or type(error).__name__}")


def _whole(said: bytes) -> Reply:
    try:
        body = json.loads(said)
        choice = body["choices"][0]
        message = choice["message"]
        return Reply(
            content=message.get("content") or "",
            reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
            tool_calls=list(message.get("tool_calls") or ()),
            finish=choice.get("finish_reason") or "",
            tokens=(body.get("usage") or {}).get("completion_tokens"),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise NoAnswer(f"what came is no chat completion: {said[:200]!r}") from None


def _add(reply: Reply, data: bytes) -> bool:
    """Take one piece of a stream into the reply; whether there was any text in it."""
    piece = json.loads(data)
    if piece.get("error"):
        raise ValueError(f"error in the stream: {str(piece['error'])[:200]}")
    usage = piece.get("usage")
    if usage and usage.get("completion_tokens") is not None:
        reply.tokens = usage["completion_tokens"]
    had_text = False
    for choice in (piece.get("choices") or [])[:1]:
        delta = choice.get("delta") or {}
        text, thought = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
        reply.content += text
        reply.reasoning += thought
        had_text = bool(text or thought or delta.get("tool_calls"))
        reply.finish = choice.get("finish_reason") or reply.finish
    return had_text


_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(\S+)")


def samples(text: str) -> dict[str, float]:
    """The metrics in a Prometheus text, by name, each added up over its labels. What cannot be read is left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        found[match[1]] = found.get(match[1], 0.0) + value
    return found


def others(port: int, ours: int = 0) -> int:
    """How many connections of others a port of this machine has, as far as /proc tells; ``ours`` are not counted."""
    count = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                next(lines, None)
                for line in lines:
                    fields = line.split()
                    count += fields[3] == "01" and int(fields[1].rpartition(":")[2], 16) == port
        except (OSError, ValueError, IndexError):
            continue
    return max(0, count - ours)

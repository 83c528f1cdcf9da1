"""The page over real connections: what it answers, and what nobody can do to it."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator

import jsonschema
import pytest

from controller.report import serve
from controller.report.model import ControllerReport
from controller.report.serve import CannotListen, Listen, Server
from controller.run.picture import Board, Picture
from tests.report.pictures import SECRET, board, picture

PATIENCE = 60.0


@pytest.fixture(scope="module")
def shown() -> Picture:
    return picture()


@pytest.fixture(scope="module")
def page(shown: Picture) -> Iterator[Server]:
    with Server(Listen("127.0.0.1", 0), board(shown)) as server:
        yield server


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(server.listen.host, server.listen.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def raw(server: Server, request: bytes) -> bytes:
    with socket.create_connection((server.listen.host, server.listen.port), timeout=PATIENCE) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while more := connection.recv(65536):
            answer += more
        return answer


def test_every_path_answers(page: Server) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/metrics", "text/plain"),
        ("/status", "application/json"),
        ("/healthz", "text/plain"),
        ("/readyz", "text/plain"),
        ("/metrics?name[]=x", "text/plain"),
    ):
        status, headers, body = ask(page, path)
        assert (status, headers["Content-Type"].partition(";")[0]) == (200, kind)
        assert int(headers["Content-Length"]) == len(body) > 0
        assert headers["Cache-Control"] == "no-store"
        assert "Python" not in headers["Server"]


def test_the_page_links_what_there_is(page: Server) -> None:
    _, _, body = ask(page, "/")
    links = [part.split('"')[0] for part in body.decode().split('href="')[1:]]
    assert links
    assert all(ask(page, link)[0] == 200 for link in links)


def test_openmetrics_for_those_who_ask_for_it(page: Server) -> None:
    _, headers, body = ask(page, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_head_is_get_without_the_body(page: Server) -> None:
    _, get, body = ask(page, "/status")
    status, head, nothing = ask(page, "/status", "HEAD")
    assert (status, nothing) == (200, b"")
    assert head["Content-Length"] == get["Content-Length"] == str(len(body))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"])
def test_it_can_only_be_read(page: Server, method: str) -> None:
    status, headers, body = ask(page, "/status", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert b"can only be read" in body


def test_a_body_is_not_wanted_and_the_answer_comes_all_the_same(page: Server) -> None:
    answer = raw(page, b"POST /status HTTP/1.1\r\nContent-Length: 50000\r\n\r\n" + b"x" * 50000)
    assert answer.startswith(b"HTTP/1.0 405 ")


def test_another_path_is_not_there(page: Server) -> None:
    for path in ("/nothing", "/metrics/", "/../etc/passwd", "/%2e%2e/status"):
        status, _, body = ask(page, path)
        assert status == 404
        assert path.encode() not in body


def test_nothing_that_a_client_sends_comes_back(page: Server) -> None:
    for request in (
        b"GET /x%0d%0aSet-Cookie:%20a=1 HTTP/1.1\r\n\r\n",
        b"GET /x\rSet-Cookie:a=1 HTTP/1.1\r\n\r\n",
        b"GET /<script>Set-Cookie HTTP/1.1\r\nSet-Cookie: a=1\r\n\r\n",
        b"Set-Cookie:a=1 / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/Set-Cookie:a=1\r\n\r\n",
        b"\xff\xfe\x00Set-Cookie\r\n\r\n",
        b"GET / HTTP/1.1\r\nSet-Cookie\x00: \xff\r\n : :\r\n\r\n",
    ):
        answer = raw(page, request)
        assert b"Set-Cookie" not in answer
        assert b"script" not in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 70000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 500 + b"\r\n", 431),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"nonsense\r\n\r\n", 400),
    ],
)
def test_a_huge_or_a_broken_request_is_refused(page: Server, request_: bytes, status: int) -> None:
    answer = raw(page, request_)  # without a status line to one that does not speak of HTTP/1
    assert answer.removeprefix(b"HTTP/1.0 ").startswith(b"%d " % status)
    assert ask(page, "/healthz")[0] == 200


def come_again(server: Server) -> None:
    """Until there is an answer: who finds all places taken is refused, and comes again, as Prometheus does."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            assert ask(server, "/healthz")[0] == 200
            return
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < until, "others hold it up"
            time.sleep(0.05)


def test_slow_clients_cannot_hold_it_up(page: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many connections as there may be, each of which sends a byte now and then: they go when their time is up."""
    monkeypatch.setattr(serve, "CONNECTION", 2.0)
    address = (page.listen.host, page.listen.port)
    with contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(address, timeout=PATIENCE)) for _ in range(serve.CONNECTIONS)
        ]
        answered = threading.Event()

        def drip() -> None:
            while not answered.wait(0.2):
                for connection in slow:
                    with contextlib.suppress(OSError):
                        connection.send(b"G")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            come_again(page)
        finally:
            answered.set()
            dripping.join()


def test_a_client_that_does_not_read_goes_when_its_time_is_up(shown: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "CONNECTION", 1.0)
    monkeypatch.setattr(serve, "CONNECTIONS", 1)
    much = dataclasses.replace(shown, notes=("x" * 20_000_000,))  # more than the kernel keeps for a connection
    with (
        Server(Listen("127.0.0.1", 0), board(much)) as server,
        socket.create_connection((server.listen.host, server.listen.port), timeout=PATIENCE) as deaf,
    ):
        deaf.sendall(b"GET /status HTTP/1.1\r\n\r\n")
        come_again(server)


def test_healthy_while_the_loop_moves(shown: Picture) -> None:
    now = 0.0
    still = Board(shown, clock=lambda: now)
    with Server(Listen("127.0.0.1", 0), still) as server:
        now = 59.0
        assert ask(server, "/healthz")[0] == 200
        now = 61.0
        status, _, body = ask(server, "/healthz")
        assert (status, json.loads(ask(server, "/status")[2])["healthy"]) == (503, False)
        assert b"not moved for 61 seconds" in body
        still.moved(0.0)
        assert ask(server, "/healthz")[0] == 200


def test_ready_when_specs_are_loaded_and_every_host_was_looked_at(shown: Picture) -> None:
    starting = Board()
    with Server(Listen("127.0.0.1", 0), starting) as server:
        status, _, body = ask(server, "/readyz")
        assert (status, body.count(b"\n")) == (503, 2)
        starting.pin(Picture(loaded=1.0))
        status, _, body = ask(server, "/readyz")
        assert (status, body) == (503, b"the first look at every host has not ended\n")
        starting.pin(shown)
        assert ask(server, "/readyz")[0] == 200


def test_status_is_as_its_schema_says(page: Server) -> None:
    status = json.loads(ask(page, "/status")[2])
    jsonschema.validate(status, ControllerReport.model_json_schema())
    assert ControllerReport.model_validate(status).ready
    container = next(row for row in status["objects"] if row["object"] == "Container/ct129")
    assert container["drift"][0]["layer"] == "container.devices"
    assert container["drift"][0]["cause"] == "corrective"
    assert {row["waiting_for"] for row in container["pending"]} == {
        "permission", "window", "backoff", "budget", "job", "blocked"
    }  # fmt: skip
    host = next(row for row in status["objects"] if row["object"] == "Host/kpro5")
    assert host["suspended"]["reason"] == "a fan is replaced"
    gone = next(row for row in status["objects"] if row["object"] == "Host/kpro4")
    assert gone["unknown"]
    assert status["specs"]["errors"][0]["line"] == 3


def test_what_a_host_said_in_no_encoding_is_told_all_the_same(shown: Picture) -> None:
    odd = dataclasses.replace(shown, notes=("a name \udcff of bytes",))
    with Server(Listen("127.0.0.1", 0), board(odd)) as server:
        assert json.loads(ask(server, "/status")[2])["notes"] == ["a name \udcff of bytes"]


def test_a_defect_is_answered_and_logged_without_its_text(
    shown: Picture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(_: Board) -> ControllerReport:
        raise RuntimeError("no word of this to clients")

    monkeypatch.setattr(serve, "controller_report", stumble)
    with Server(Listen("127.0.0.1", 0), board(shown)) as server:
        status, _, body = ask(server, "/status")
        assert status == 500
        assert b"no word of this" not in body
        assert "cannot answer /status" in caplog.text
        assert ask(server, "/healthz")[0] == 200


def test_what_clients_send_is_in_no_log(page: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ask(page, f"/{SECRET}")
    raw(page, b"GET / HTTP/1.1\r\nAuthorization: Bearer " + SECRET.encode() + b"\r\n\r\n")
    assert SECRET not in caplog.text


def test_ipv6(shown: Picture) -> None:
    try:
        server = Server(Listen.parse("[::1]:0"), board(shown))
    except CannotListen as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with server:
        assert str(server.listen).startswith("[::1]:")
        assert ask(server, "/healthz")[0] == 200


def test_a_port_that_is_taken_is_said_and_what_to_do(page: Server) -> None:
    with pytest.raises(CannotListen, match=r"cannot listen on 127\.0\.0\.1:\d+: another program .* --listen"):
        Server(page.listen, Board())


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        (Listen("192.0.2.1", 9797), "does not have that address"),
        (Listen("no-such-host.invalid", 9797), "no such host name"),
    ],
)
def test_an_address_that_cannot_be_had(listen: Listen, words: str) -> None:
    with pytest.raises(CannotListen, match=words):
        Server(listen, Board())


def test_the_address_is_given_back(shown: Picture) -> None:
    with Server(Listen("127.0.0.1", 0), board(shown)) as server:
        listen = server.listen
        ask(server, "/")
    with Server(listen, board(shown)) as again:
        assert ask(again, "/healthz")[0] == 200


@pytest.mark.parametrize(
    ("given", "listen"),
    [
        ("127.0.0.1:9797", Listen("127.0.0.1", 9797)),
        ("[::1]:9797", Listen("::1", 9797)),
        ("0.0.0.0:80", Listen("0.0.0.0", 80)),
        ("localhost:0", Listen("localhost", 0)),
        ("9797", Listen("127.0.0.1", 9797)),
        (serve.DEFAULT, Listen("127.0.0.1", 9797)),
    ],
)
def test_where_to_listen(given: str, listen: Listen) -> None:
    assert Listen.parse(given) == listen
    assert Listen.parse(str(listen)) == listen


@pytest.mark.parametrize(
    "given", ["", "x", ":9797", "host:", "host:x", "host:65536", "::1:9797", "[::1]", "[::1]9797", "[host]:1", "a:²"]
)
def test_where_nobody_can_listen(given: str) -> None:
    with pytest.raises(ValueError, match="write HOST:PORT"):
        Listen.parse(given)

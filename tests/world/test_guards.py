"""What looking costs: these fail when the speed is lost, whatever else still works."""

from __future__ import annotations

import resource
import time

import pytest

from controller.core import observe, probe
from controller.world.port import Look
from tests.world.servers import Proxy

pytestmark = pytest.mark.alone

ROUND_TRIP = 0.4  # seconds; long beside what a busy machine adds


def seconds(what) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def test_a_command_on_an_open_connection_takes_less_than_10_ms(sshd, worlds):
    """Without TCP_NODELAY each is 48 ms (a delayed acknowledgement). The quickest of 20 tells on a busy machine too."""
    transport = worlds()._links["one"].connected()
    transport.run("true")
    assert min(seconds(lambda: transport.run("true")) for _ in range(20)) < 0.010


def test_a_look_on_an_open_connection_takes_less_than_10_ms(sshd, worlds):
    world = worlds(fragments={"host.test": "read -r line </proc/uptime"})
    world.observe([Look("one")])
    assert min(seconds(lambda: world.observe([Look("one")])) for _ in range(20)) < 0.010


def test_a_look_is_one_round_trip_and_reads_nothing_that_is_unchanged(sshd, worlds):
    """The counters say one; a proxy that delays each way says whether that is true."""
    proxy = Proxy(sshd.port, delay=ROUND_TRIP / 2)
    try:
        # more than a packet, so that a window or a buffer that makes it wait would show
        world = worlds(
            {"one": {"port": proxy.port}},
            {"host.test": "i=0; while [ $i -lt 8000 ]; do echo 0123456789; i=$((i+1)); done"},
        )
        world.observe([Look("one")])
        for _ in range(3):
            before = world.counts
            took = seconds(lambda: world.observe([Look("one")]))
            assert ROUND_TRIP <= took < 1.7 * ROUND_TRIP
            assert world.counts.rounds - before.rounds == 1
            assert world.counts.reads == before.reads
            assert world.counts.logins == before.logins
    finally:
        proxy.close()


def test_hosts_are_asked_at_once(sshd, worlds):
    """Ten hosts, each a round trip away, are one round trip away together."""
    proxy = Proxy(sshd.port, delay=ROUND_TRIP / 2)
    try:
        names = [f"h{n}" for n in range(10)]
        world = worlds({name: {"port": proxy.port} for name in names})
        looks = [Look(name) for name in names]
        world.observe(looks)
        assert seconds(lambda: world.observe(looks)) < 2 * ROUND_TRIP
    finally:
        proxy.close()


def test_the_first_look_costs_one_round_trip_beyond_login_and_channel(sshd, worlds):
    proxy = Proxy(sshd.port, delay=ROUND_TRIP / 2)
    try:
        world = worlds({"one": {"port": proxy.port}}, {f"host.test{n}": ": " + "x" * 1000 for n in range(40)})
        transport = world._links["one"].connected()
        open_and_exec = min(seconds(lambda: transport.run("true")) for _ in range(3))
        assert seconds(lambda: world.observe([Look("one")])) < open_and_exec + 1.8 * ROUND_TRIP
        assert world.counts.rounds == 1
    finally:
        proxy.close()


def test_unchanged_answers_reach_no_frame_reader_and_no_parser(sshd, worlds, monkeypatch):
    world = worlds()
    parsers = {name: lambda section: section.out for name in ("world", "host.test")}
    facts = observe.read(parsers, world.observe([Look("one")])["one"])
    monkeypatch.setattr(probe, "read", None)
    parsers = dict.fromkeys(parsers)
    again = observe.read(parsers, world.observe([Look("one")])["one"], facts)
    assert again == facts
    assert all(again.sections[name] is facts.sections[name] for name in facts.sections)


def test_idle_connections_do_nothing(sshd, worlds):
    """paramiko's threads wake ten times a second each, unless told otherwise: 20 of them 200 times."""
    names = [f"h{n}" for n in range(20)]
    world = worlds({name: {"address": f"127.0.1.{n + 1}"} for n, name in enumerate(names)})
    world.observe([Look(name) for name in names])
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(1.0)  # what is measured is one second of nothing
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_nvcsw - before.ru_nvcsw < 40

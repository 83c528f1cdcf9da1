"""Orders for hosts of a lab, past the SSH world: over connections that break when a test says so."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from controller.core import probe
from controller.core.words import Script, Step
from controller.facts import units as facts
from controller.facts.units import UnitFacts
from controller.spec.ref import Ref
from controller.world import units
from controller.world.port import Order, Outcome
from controller.world.transport import ConnectionLost, Exit, Reason
from controller.world.units import Controller
from tests.lab.lab import Lab

ALICE = Controller("alice", "alice (desk:1)")
BOB = Controller("bob", "bob (rack:2)")


def step(body: str, *args: str, **more: Any) -> Step:
    """A step whose script does this in its main."""
    return Step(
        action="try",
        object=Ref("Container", "ct129"),
        layer="container.devices",
        reason="test",
        summary="tries",
        hosts=("box1",),
        script=Script("test.sh", f'main() {{\n{body}\n}}\n\nmain "$@"\n'),
        args=args,
        **{"timeout": 30.0, **more},
    )


@dataclass
class Host:
    """One host of a lab as a transport, and what tests want of it."""

    lab: Lab
    name: str
    cut_after: float | None = None  # seconds until every connection breaks
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, command: str, stdin: bytes = b"", timeout: float = 60.0, limit: int = 64 * 1024) -> Exit:
        """The part of a transport that units are started through."""
        attach = ["lxc-attach", "-P", str(self.lab.state / "hosts"), "-n", self.name, "--clear-env", "--"]
        with subprocess.Popen(
            [*attach, "/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                out, err = process.communicate(stdin, timeout=self.cut_after or timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise ConnectionLost(Reason.CONNECTION_LOST, "the connection ended") from None
        assert max(len(out), len(err)) <= limit
        return Exit(process.returncode, out, err)

    def sh(self, command: str) -> str:
        """What a command in the host prints; it has to end well."""
        done = self.run(command)
        assert done.rc == 0, done
        return done.out.decode()

    def raw(self) -> bytes:
        """The section ``world``, as the host prints it."""
        answer = self.run(probe.script({"world": units.PROBE}) + probe.look("t-1", 0, ()))
        return probe.read(answer.out, "t-1")["world"].out.encode()

    def look(self) -> UnitFacts:
        """The section ``world``, read."""
        answer = self.run(probe.script({"world": units.PROBE}) + probe.look("t-1", 0, ()))
        return facts.parse(probe.read(answer.out, "t-1")["world"])

    def order(self, wanted: Step, seen: UnitFacts | None = None) -> Order:
        """An order that rests on what was seen, or on a fresh look."""
        seen = seen or self.look()
        return Order(wanted, seen.generation, seen.boot_id)

    def perform(self, wanted: Step, who: Controller = ALICE, seen: UnitFacts | None = None, lease: int = 60) -> Outcome:
        """Give such an order."""
        return units.perform(self, self.order(wanted, seen), who, lease)  # type: ignore[arg-type]

    def wait(self, until: Callable[[UnitFacts], bool], seconds: float = 30) -> UnitFacts:
        """Look until it is so."""
        enough = threading.Event()
        timer = threading.Timer(seconds, enough.set)
        timer.start()
        try:
            while not until(seen := self.look()):
                assert not enough.is_set(), f"it never came about: {seen}"
            return seen
        finally:
            timer.cancel()

    def forget(self) -> None:
        """Take away everything that steps have left, as on a host that never saw one."""
        self.sh(
            "systemctl stop 'reconcile-*.service'; rm -rf /var/lib/reconcile /run/reconcile/* /root/effect /root/tree"
        )

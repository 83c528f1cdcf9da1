"""A real sshd for the tests of the SSH world, and a world that looks at it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from controller.core.words import InSync, Layer
from controller.spec.model import Host, Specs
from controller.world.fleet import SshWorld
from controller.world.keys import KnownHosts
from tests.world.servers import SSHD, Sshd


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads the keys, agent and configuration of the person who runs it."""
    home = tmp_path / "home-of-user"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


@pytest.fixture
def stopped_sshd() -> Iterator[Sshd]:
    """A server that a test sets up and starts itself."""
    if SSHD is None:
        pytest.fail("these tests need OpenSSH's sshd: apt-get install openssh-server")
    # not under tmp_path, where other users, whose authorized keys are read here too, may not look
    with tempfile.TemporaryDirectory(prefix="sshd-") as folder:
        os.chmod(folder, 0o755)
        server = Sshd(Path(folder))
        yield server
        server.stop()


@pytest.fixture
def sshd(stopped_sshd: Sshd) -> Sshd:
    """A running server."""
    stopped_sshd.start()
    return stopped_sshd


@dataclass(frozen=True)
class Someone:
    """Who takes leases in tests."""

    id: str = "tests"
    name: str = "tests:1"


class _Reason(StrEnum):
    NONE = "none"


def layer(name: str, probe: str) -> Layer:
    """A layer that asks something and finds everything right."""
    return Layer(name, "Host", _Reason, lambda *_: InSync(), probe=probe)


@dataclass
class Worlds:
    """Makes worlds of hosts that are one sshd, at several addresses, and closes them."""

    sshd: Sshd
    state: Path
    made: list[SshWorld]

    def __call__(
        self,
        hosts: Mapping[str, Mapping[str, Any]] | None = None,
        fragments: Mapping[str, str] | None = None,
        *,
        trust: bool = True,
        **options: Any,
    ) -> SshWorld:
        """Hosts by name, each with what differs from the usual in its ``ssh`` (and its ``address``)."""
        specs = self.specs(hosts or {"one": {}})
        layers = [layer(name, probe) for name, probe in (fragments or {"host.test": "printf 'hello\\n'"}).items()]
        world = SshWorld(specs, self.state, Someone(), layers, **options)
        self.made.append(world)
        if trust:
            for name in specs.hosts:
                self.trust(world, name)
        return world

    def specs(self, hosts: Mapping[str, Mapping[str, Any]]) -> Specs:
        return Specs(hosts={name: self.host(name, **dict(given)) for name, given in hosts.items()})

    def host(self, name: str, address: str = "127.0.0.1", **ssh: Any) -> Host:
        usual = {"user": self.sshd.user, "port": self.sshd.port, "identity_file": str(self.sshd.identity)}
        ssh = {key: value for key, value in {**usual, **ssh}.items() if value is not None}
        return Host.model_validate({"name": name, "address": address, "platform": "linux", "ssh": ssh})

    @staticmethod
    def trust(world: SshWorld, host: str) -> None:
        for shown in world.host_keys(host):
            world.pin(shown)

    @property
    def known(self) -> KnownHosts:
        return KnownHosts(self.state)


@pytest.fixture
def worlds(stopped_sshd: Sshd, tmp_path: Path) -> Iterator[Callable[..., SshWorld]]:
    made: list[SshWorld] = []
    yield Worlds(stopped_sshd, tmp_path / "state", made)
    for world in made:
        world.close()

"""Logging in: which host keys are taken, which keys of ours, and the way through other hosts."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from controller.world.keys import NotPinned
from controller.world.port import Look
from tests.world.servers import ROOT, Proxy, agent, fingerprint, keygen

pytestmark = pytest.mark.alone


def failure(world, host="one"):
    return world.observe([Look(host)])[host].failure


def logs_in(world, host="one"):
    assert failure(world, host) is None
    return True


class TestHostKeys:
    def test_unknown(self, sshd, worlds):
        world = worlds(trust=False)
        why = failure(world)
        assert why.reason == "host-key-unknown"
        assert fingerprint(sshd.host_key) in why.message
        assert "reconcile trust one" in why.message
        assert "Accepted publickey" not in sshd.log.read_text()

    def test_trusted(self, sshd, worlds):
        world = worlds(trust=False)
        (shown,) = world.host_keys("one")
        assert shown.key.fingerprint == fingerprint(sshd.host_key)
        assert not shown.trusted
        assert not shown.changed
        world.pin(shown)
        assert logs_in(world)
        (again,) = world.host_keys("one")
        assert again.trusted

    def test_openssh_reads_what_was_pinned(self, sshd, worlds):
        worlds()
        ssh = ["ssh", "-F", "none", "-o", f"UserKnownHostsFile={worlds.known.path}", "-o", "StrictHostKeyChecking=yes"]
        where = ["-i", str(sshd.identity), "-p", str(sshd.port), f"{sshd.user}@127.0.0.1", "echo yes"]
        assert subprocess.run([*ssh, *where], capture_output=True, text=True, check=True).stdout.endswith("yes\n")

    def test_changed(self, sshd, worlds):
        old = fingerprint(sshd.host_key)
        world = worlds()
        assert logs_in(world)
        self.another_host_key(sshd)
        world = worlds(trust=False)
        why = failure(world)
        assert why.reason == "host-key-changed"
        assert old in why.message
        assert fingerprint(sshd.host_key) in why.message
        assert "reconcile trust one --replace" in why.message

    def test_a_changed_key_is_replaced_only_on_demand(self, sshd, worlds):
        worlds()
        self.another_host_key(sshd)
        world = worlds(trust=False)
        (shown,) = world.host_keys("one")
        assert shown.changed
        with pytest.raises(NotPinned, match="--replace"):
            world.pin(shown)
        assert failure(world).reason == "host-key-changed"
        world.pin(shown, replace=True)
        assert logs_in(worlds(trust=False))
        assert Path(worlds.known.path).read_text().count("\n") == 1

    def test_the_specs_fingerprint_is_enough(self, sshd, worlds):
        assert logs_in(worlds({"one": {"host_key": fingerprint(sshd.host_key)}}, trust=False))

    def test_the_specs_fingerprint_decides_alone(self, sshd, worlds, tmp_path):
        other = fingerprint(keygen(tmp_path / "other"))
        world = worlds()
        assert logs_in(world)
        world.use(worlds.specs({"one": {"host_key": other}}))
        why = failure(world)
        assert why.reason == "host-key-changed"
        assert other in why.message
        assert "correct the spec" in why.message
        (shown,) = world.host_keys("one")
        with pytest.raises(NotPinned, match="host_key"):
            world.pin(shown, replace=True)

    @pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
    def test_the_specs_fingerprint_may_be_that_of_any_key_of_the_host(self, stopped_sshd, worlds, kind):
        second = keygen(stopped_sshd.folder / "second", kind)
        stopped_sshd.options = [f"HostKey {second}"]
        stopped_sshd.start()
        assert logs_in(worlds({"one": {"host_key": fingerprint(second)}}, trust=False))

    def test_the_key_that_is_known_is_the_one_asked_for(self, stopped_sshd, worlds, own_home):
        second = keygen(stopped_sshd.folder / "second", "rsa")
        stopped_sshd.options = [f"HostKey {second}"]
        stopped_sshd.start()
        self.known_to_user(own_home, stopped_sshd, second)
        assert logs_in(worlds(trust=False))

    def test_the_users_known_hosts_count_and_are_not_written(self, sshd, worlds, own_home):
        file = self.known_to_user(own_home, sshd, sshd.host_key)
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
        hashed = file.read_text()
        assert hashed.startswith("|1|")
        world = worlds(trust=False)
        assert logs_in(world)
        (shown,) = world.host_keys("one")
        assert shown.where == str(file)
        world.pin(shown)
        assert file.read_text() == hashed
        assert logs_in(worlds(trust=False, user_config=None))

    def test_a_key_that_the_user_knows_otherwise_has_changed(self, sshd, worlds, own_home, tmp_path):
        file = self.known_to_user(own_home, sshd, keygen(tmp_path / "other"))
        why = failure(worlds(trust=False))
        assert why.reason == "host-key-changed"
        assert str(file) in why.message

    def test_a_revoked_key(self, sshd, worlds, own_home):
        worlds()
        public = Path(f"{sshd.host_key}.pub").read_text()
        (own_home / ".ssh" / "known_hosts").write_text(f"@revoked * {public}")
        world = worlds(trust=False)
        assert failure(world).reason == "host-key-changed"
        (shown,) = world.host_keys("one")
        with pytest.raises(NotPinned, match="revoked"):
            world.pin(shown, replace=True)

    @staticmethod
    def another_host_key(sshd):
        sshd.stop()
        for file in (sshd.host_key, Path(f"{sshd.host_key}.pub")):
            file.unlink()
        keygen(sshd.host_key)
        sshd.start()

    @staticmethod
    def known_to_user(home, sshd, key):
        file = home / ".ssh" / "known_hosts"
        file.write_text(f"[127.0.0.1]:{sshd.port} {Path(f'{key}.pub').read_text()}")
        return file


class TestOurKeys:
    def test_one_that_the_host_does_not_know(self, sshd, worlds, tmp_path):
        other = keygen(tmp_path / "other")
        why = failure(worlds({"one": {"identity_file": str(other)}}))
        assert why.reason == "auth-failed"
        assert str(other) in why.message

    @pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
    def test_kinds(self, sshd, worlds, tmp_path, kind):
        key = keygen(tmp_path / kind, kind)
        sshd.authorize(key)
        assert logs_in(worlds({"one": {"identity_file": str(key)}}))

    def test_none_at_all(self, sshd, worlds):
        why = failure(worlds({"one": {"identity_file": None}}))
        assert why.reason == "key-unusable"

    def test_a_file_that_is_not_there(self, sshd, worlds, tmp_path):
        why = failure(worlds({"one": {"identity_file": str(tmp_path / "gone")}}))
        assert why.reason == "key-unusable"
        assert "gone: No such file" in why.message

    def test_a_file_that_is_no_key(self, sshd, worlds, tmp_path):
        (tmp_path / "text").write_text("-----BEGIN NONSENSE-----\n")
        assert failure(worlds({"one": {"identity_file": str(tmp_path / "text")}})).reason == "key-unusable"

    def test_those_that_ssh_tries_by_itself(self, sshd, worlds, own_home):
        sshd.authorize(keygen(own_home / ".ssh" / "id_ed25519"))
        assert logs_in(worlds({"one": {"identity_file": None}}))

    def test_an_encrypted_one_without_agent(self, sshd, worlds, tmp_path):
        key = keygen(tmp_path / "locked", passphrase="secret")
        sshd.authorize(key)
        why = failure(worlds({"one": {"identity_file": str(key)}}))
        assert why.reason == "key-unusable"
        assert f"ssh-add {key}" in why.message

    def test_an_encrypted_one_that_an_agent_has(self, sshd, worlds, tmp_path, monkeypatch):
        key = keygen(tmp_path / "locked")
        sshd.authorize(key)
        with agent(tmp_path) as sock:
            monkeypatch.setenv("SSH_AUTH_SOCK", sock)
            subprocess.run(["ssh-add", "-q", key], check=True)
            subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", key], check=True, capture_output=True)
            assert logs_in(worlds({"one": {"identity_file": str(key)}}))

    @pytest.mark.parametrize("kind", ["rsa", "ed25519"])
    def test_an_agents(self, sshd, worlds, tmp_path, monkeypatch, kind):
        key = keygen(tmp_path / "key", kind)
        sshd.authorize(key)
        with agent(tmp_path) as sock:
            monkeypatch.setenv("SSH_AUTH_SOCK", sock)
            subprocess.run(["ssh-add", "-q", key], check=True)
            key.unlink()
            assert logs_in(worlds({"one": {"identity_file": None}}))

    def test_an_agent_that_is_gone_is_no_agent(self, sshd, worlds, tmp_path, monkeypatch):
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "gone"))
        assert logs_in(worlds())

    def test_an_agent_with_many_keys_does_not_use_up_the_tries(self, sshd, worlds, tmp_path, monkeypatch):
        with agent(tmp_path) as sock:
            monkeypatch.setenv("SSH_AUTH_SOCK", sock)
            for number in range(8):  # MaxAuthTries is 6
                subprocess.run(["ssh-add", "-q", keygen(tmp_path / f"key{number}")], check=True)
            assert logs_in(worlds())
            why = failure(worlds({"one": {"identity_file": None}}))
            assert why.reason == "auth-failed"
            assert "key0" in why.message

    @pytest.fixture
    def certified(self, stopped_sshd, tmp_path):
        """A key that the host knows only by its certificate."""
        authority = keygen(tmp_path / "ca")
        key = keygen(tmp_path / "certified")
        subprocess.run(
            ["ssh-keygen", "-q", "-s", authority, "-I", "test", "-n", stopped_sshd.user, f"{key}.pub"], check=True
        )
        stopped_sshd.options = [f"TrustedUserCAKeys {authority}.pub"]
        stopped_sshd.start()
        return key

    def test_a_certificate_beside_the_file(self, certified, worlds):
        assert logs_in(worlds({"one": {"identity_file": str(certified)}}))

    def test_a_certificate_beside_a_file_whose_key_an_agent_has(self, certified, worlds, tmp_path, monkeypatch):
        with agent(tmp_path) as sock:
            monkeypatch.setenv("SSH_AUTH_SOCK", sock)
            certificate = Path(f"{certified}-cert.pub")
            aside = certificate.rename(tmp_path / "aside")
            subprocess.run(["ssh-add", "-q", certified], check=True)
            aside.rename(certificate)
            subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", certified], check=True, capture_output=True)
            assert logs_in(worlds({"one": {"identity_file": str(certified)}}))

    def test_an_agents_certificate(self, certified, worlds, tmp_path, monkeypatch):
        with agent(tmp_path) as sock:
            monkeypatch.setenv("SSH_AUTH_SOCK", sock)
            subprocess.run(["ssh-add", "-q", certified], check=True)
            Path(f"{certified}-cert.pub").unlink()
            assert logs_in(worlds({"one": {"identity_file": None}}))

    @pytest.mark.skipif(not ROOT, reason="needs root: sshd runs only what nobody else can change")
    def test_a_host_that_does_not_say_in_time_has_not_refused(self, stopped_sshd, worlds):
        stopped_sshd.mounts = ["printf '#!/bin/sh\\nexec sleep 4\\n' >/run/hangs; chmod 755 /run/hangs"]
        stopped_sshd.options = [
            "AuthorizedKeysFile none",
            "AuthorizedKeysCommand /run/hangs",
            "AuthorizedKeysCommandUser root",
        ]
        stopped_sshd.start()
        assert failure(worlds(connect_timeout=2.0)).reason == "timed-out"

    def test_a_user_that_may_not_log_in(self, stopped_sshd, worlds):
        stopped_sshd.options = ["DenyUsers *"]
        stopped_sshd.start()
        assert failure(worlds()).reason == "auth-failed"

    def test_a_host_that_takes_no_keys(self, stopped_sshd, worlds):
        stopped_sshd.options = ["PubkeyAuthentication no", "PasswordAuthentication yes"]
        stopped_sshd.start()
        why = failure(worlds())
        assert why.reason == "auth-failed"
        assert "only password" in why.message

    def test_a_host_that_wants_more_than_a_key(self, stopped_sshd, worlds):
        stopped_sshd.options = ["AuthenticationMethods publickey,password", "PasswordAuthentication yes"]
        stopped_sshd.start()
        why = failure(worlds())
        assert why.reason == "auth-failed"
        assert "wants more: password" in why.message


class TestJumpHosts:
    """One sshd plays all of them: it is reached through itself."""

    @pytest.fixture(autouse=True)
    def default_key(self, sshd, own_home):
        """A jump host is logged in to as `ssh -J` does: not with the identity file of the host behind it."""
        sshd.authorize(keygen(own_home / ".ssh" / "id_ed25519"))

    @staticmethod
    def hop(sshd, address):
        return f"{sshd.user}@{address}:{sshd.port}"

    @staticmethod
    def tunnels(sshd):
        return sshd.log.read_text().count("direct-tcpip")

    def test_through_one(self, sshd, worlds):
        world = worlds({"one": {"address": "127.0.1.1", "proxy_jump": self.hop(sshd, "127.0.2.1")}})
        assert logs_in(world)
        known = Path(worlds.known.path).read_text()
        assert "127.0.1.1" in known
        assert "127.0.2.1" in known

    def test_through_two_in_order(self, sshd, worlds):
        jumps = f"{self.hop(sshd, '127.0.2.1')},{self.hop(sshd, '127.0.2.2')}"
        world = worlds({"one": {"address": "127.0.1.1", "proxy_jump": jumps}}, trust=False)
        shown = []
        for key in world.host_keys("one"):
            shown.append(key.endpoint.address)
            world.pin(key)
        assert shown == ["127.0.2.1", "127.0.2.2", "127.0.1.1"]
        assert logs_in(world)

    def test_hosts_behind_one_jump_host_share_the_connection_to_it(self, sshd, worlds):
        proxy = Proxy(sshd.port)
        try:
            jump = f"{sshd.user}@127.0.0.1:{proxy.port}"
            world = worlds({f"h{n}": {"address": f"127.0.1.{n}", "proxy_jump": jump} for n in range(1, 5)}, trust=False)
            for name in ("h1", "h2", "h3", "h4"):
                for shown in world.host_keys(name):
                    world.pin(shown)
            before = len(proxy.connections)
            seen = world.observe([Look(f"h{n}") for n in range(1, 5)])
            assert [one.failure for one in seen.values()] == [None] * 4
            assert len(proxy.connections) - before <= 2  # a connection has two sockets
            proxy.cut()
            seen = world.observe([Look(f"h{n}") for n in range(1, 5)])
            assert [one.failure for one in seen.values()] == [None] * 4
        finally:
            proxy.close()

    def test_the_jump_hosts_key_is_checked(self, sshd, worlds):
        world = worlds({"one": {"address": "127.0.1.1", "proxy_jump": self.hop(sshd, "127.0.2.1")}}, trust=False)
        why = failure(world)
        assert why.reason == "host-key-unknown"
        assert "127.0.2.1" in why.message
        assert "reconcile trust one" in why.message

    def test_the_key_behind_it_is_checked_too(self, sshd, worlds):
        world = worlds({"one": {"address": "127.0.1.1", "proxy_jump": self.hop(sshd, "127.0.2.1")}}, trust=False)
        world.pin(next(world.host_keys("one")))
        why = failure(world)
        assert why.reason == "host-key-unknown"
        assert "127.0.1.1" in why.message

    def test_what_the_jump_host_cannot_reach(self, sshd, worlds, tmp_path):
        world = worlds(
            {"one": {"address": "127.0.1.1", "port": 1, "proxy_jump": self.hop(sshd, "127.0.2.1")}}, trust=False
        )
        world.pin(next(world.host_keys("one")))
        why = failure(world)
        assert why.reason == "unreachable"
        assert "cannot reach 127.0.1.1:1: Connect failed" in why.message

    def test_another_host_of_the_specs(self, sshd, worlds):
        world = worlds({"gate": {"address": "127.0.2.1"}, "one": {"address": "127.0.1.1", "proxy_jump": "gate"}})
        assert logs_in(world)

    def test_the_users_configuration(self, sshd, worlds, own_home):
        (own_home / ".ssh" / "config").write_text(
            f"Host *\n  ProxyJump jump\nHost jump\n  HostName 127.0.2.1\n  Port {sshd.port}\n  User {sshd.user}\n"
        )
        world = worlds({"one": {"address": "127.0.1.1"}})
        assert logs_in(world)
        assert "127.0.2.1" in Path(worlds.known.path).read_text()

    def test_one_that_does_not_answer_is_waited_for_once(self, sshd, worlds):
        """And not by each host behind it, one after the other."""
        silent = Proxy(sshd.port, silent=True)
        try:
            jump = f"{sshd.user}@127.0.0.1:{silent.port}"
            names = [f"h{n}" for n in range(1, 7)]
            hosts = {name: {"address": f"127.0.1.{n}", "proxy_jump": jump} for n, name in enumerate(names, 1)}
            world = worlds(hosts, trust=False, connect_timeout=1.0)
            began = time.monotonic()
            seen = world.observe([Look(name) for name in names])
            assert [one.failure.reason for one in seen.values()] == ["timed-out"] * 6
            assert time.monotonic() - began < 3.0
        finally:
            silent.close()

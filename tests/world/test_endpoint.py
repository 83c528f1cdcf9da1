"""Where to log in: the spec first, then the user's OpenSSH configuration."""

from __future__ import annotations

from typing import Any

import pytest

from controller.spec.model import Host
from controller.world.endpoint import UserConfig, endpoint
from controller.world.transport import Unreachable


def host(name: str = "one", address: str = "10.0.0.1", **ssh: Any) -> Host:
    return Host.model_validate({"name": name, "address": address, "platform": "linux", "ssh": ssh})


@pytest.fixture
def config(own_home):
    def write(text: str) -> UserConfig:
        (own_home / ".ssh" / "config").write_text(text)
        return UserConfig()

    return write


def resolve(config: UserConfig, one: Host, *others: Host):
    return endpoint(one, config, {h.name: h for h in (one, *others)})


def test_without_configuration(own_home):
    found = resolve(UserConfig(), host())
    assert (found.user, found.address, found.port, found.known_as) == ("root", "10.0.0.1", 22, "10.0.0.1")
    assert found.via is None
    assert found.known_hosts[0] == str(own_home / ".ssh" / "known_hosts")


def test_another_port_is_part_of_the_name(own_home):
    assert resolve(UserConfig(), host(port=2222)).known_as == "[10.0.0.1]:2222"


def test_the_configuration_fills_what_the_spec_leaves_open(config, own_home):
    found = resolve(
        config(
            "Host box\n  HostName 10.9.9.9\n  User carol\n  Port 2022\n  IdentityFile ~/.ssh/box\n"
            "  UserKnownHostsFile ~/hosts /b\n  HostKeyAlias box\n"
        ),
        host(address="box"),
    )
    assert (found.user, found.address, found.port, found.known_as) == ("carol", "10.9.9.9", 2022, "box")
    assert found.identities == (str(own_home / ".ssh" / "box"),)
    assert found.known_hosts == (str(own_home / "hosts"), "/b", "/etc/ssh/ssh_known_hosts")


def test_the_spec_wins(config):
    text = "Host *\n  User carol\n  Port 2022\n  IdentityFile /theirs\n  ProxyJump gate\n"
    found = resolve(config(text), host(user="root", port=22, identity_file="/mine", proxy_jump="other"))
    assert (found.user, found.port, found.identities) == ("root", 22, ("/mine",))
    assert found.via is not None
    assert found.via.address == "other"


def test_includes_and_the_block_that_they_stand_in(config, own_home):
    (own_home / ".ssh" / "conf.d").mkdir()
    (own_home / ".ssh" / "conf.d" / "a.conf").write_text("Host box\n  User alice\n")
    (own_home / ".ssh" / "conf.d" / "b.conf").write_text("Host other\n  User bob\n")
    text = "Include conf.d/*.conf\nPort 2022\nHost late\n  Include none/*\n  Port 23\n"
    assert resolve(config(text), host(address="box")).user == "alice"
    assert resolve(config(text), host(address="box")).port == 2022
    assert resolve(config(text), host(address="other")).user == "bob"


def test_jumps_are_read_as_openssh_writes_them(config):
    found = resolve(config("Host b\n  User bob\n"), host(proxy_jump="alice@a:2022,b,carol@[fe80::1]:22"))
    chain = []
    while found.via:
        found = found.via
        chain.append(str(found))
    assert chain == ["carol@fe80::1:22", "bob@b:22", "alice@a:2022"]


def test_a_first_hop_has_its_own_jump(config):
    found = resolve(config("Host gate\n  ProxyJump outer\n"), host(proxy_jump="gate"))
    assert found.via
    assert found.via.via
    assert found.via.via.address == "outer"


def test_a_jump_for_all_hosts_is_not_its_own(config):
    found = resolve(config("Host *\n  ProxyJump gate\n"), host())
    assert found.via
    assert found.via.address == "gate"
    assert found.via.via is None


def test_no_jump(config):
    assert resolve(config("Host box\n  ProxyJump none\nHost *\n  ProxyJump gate\n"), host(address="box")).via is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Host *\n  ProxyCommand nc %h %p\n", "ProxyCommand"),
        ("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\nHost *\n  ProxyJump a\n", "circle"),
        ("Host *\n  ProxyJump a b c@@\n", "jump host"),
        ("just nonsense\0\n  =\n", "config"),
    ],
)
def test_what_cannot_be_followed_is_said(config, text, says):
    with pytest.raises(Unreachable, match=says) as caught:
        resolve(config(text), host())
    assert caught.value.reason == "ssh-config"


def test_specs_that_jump_in_a_circle(own_home):
    with pytest.raises(Unreachable, match="circle"):
        resolve(UserConfig(), host("one", proxy_jump="two"), host("two", "10.0.0.2", proxy_jump="one"))

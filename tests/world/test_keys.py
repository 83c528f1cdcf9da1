"""Known hosts files, as OpenSSH understands them."""

from __future__ import annotations

import base64
import threading

import pytest

from controller.world.endpoint import Endpoint
from controller.world.keys import HostKey, KnownHosts, NotPinned
from controller.world.transport import Unreachable

KEY = HostKey("ssh-ed25519", b"\0\0\0\x0bssh-ed25519 one")
OTHER = HostKey("ssh-ed25519", b"\0\0\0\x0bssh-ed25519 two")


def line(names: str, key: HostKey = KEY, marker: str = "") -> str:
    return f"{marker} {names} {key.type} {base64.b64encode(key.blob).decode()} a comment\n".lstrip()


def server(known_as: str = "10.0.0.1", **more: object) -> Endpoint:
    return Endpoint("kpro5", "10.0.0.1", 22, "root", known_as, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "known_as", "means"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.11", False),
        ("a,10.0.0.1,b", "10.0.0.1", True),
        ("[10.0.0.1]:2222", "[10.0.0.1]:2222", True),
        ("[10.0.0.1]:2222", "10.0.0.1", False),
        ("10.0.0.1", "[10.0.0.1]:2222", False),
        ("*.example.com", "a.example.com", True),
        ("*.example.com,!b.example.com", "b.example.com", False),
        ("!b.example.com,*.example.com", "b.example.com", False),
        ("*.example.com,!b.example.com", "a.example.com", True),
        ("10.0.0.?", "10.0.0.1", True),
        ("Example.COM", "example.com", True),
        ("|1|broken", "10.0.0.1", False),
    ],
)
def test_whose_line_it_is(tmp_path, names, known_as, means):
    known = KnownHosts(tmp_path)
    (tmp_path / "known_hosts").write_text(line(names))
    assert known.judge(server(known_as), KEY).trusted is means


@pytest.mark.parametrize(
    "text",
    ["", "\n\n# only comments\n", "10.0.0.1\n", "10.0.0.1 ssh-ed25519 !!!\n", "10.0.0.1 ssh-ed25519\n", "\0\xff\n"],
)
def test_lines_that_say_nothing(tmp_path, text):
    known = KnownHosts(tmp_path)
    (tmp_path / "known_hosts").write_text(text, encoding="latin-1")
    shown = known.judge(server(), KEY)
    assert not shown.trusted
    assert not shown.changed
    known.pin(shown)
    assert known.judge(server(), KEY).trusted
    assert (tmp_path / "known_hosts").read_bytes().startswith(text.encode("latin-1"))


def test_a_certificate_authority_is_not_the_hosts_key(tmp_path):
    known = KnownHosts(tmp_path)
    (tmp_path / "known_hosts").write_text(line("*", marker="@cert-authority"))
    assert not known.judge(server(), KEY).trusted


def test_what_is_pinned_goes_before_what_the_user_knows(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text(line("10.0.0.1", OTHER))
    known = KnownHosts(tmp_path / "state")
    endpoint = server(known_hosts=(str(theirs),))
    shown = known.judge(endpoint, KEY)
    assert shown.changed
    assert shown.where == str(theirs)
    known.pin(shown, replace=True)
    assert known.judge(endpoint, KEY).trusted
    assert not known.judge(endpoint, OTHER).trusted
    assert theirs.read_text() == line("10.0.0.1", OTHER)


def test_pinning_one_leaves_the_others(tmp_path):
    known = KnownHosts(tmp_path)
    (tmp_path / "known_hosts").write_text("# mine\n" + line("10.0.0.1", OTHER) + line("10.0.0.2", OTHER))
    known.pin(known.judge(server(), KEY), replace=True)
    assert known.judge(server(), KEY).trusted
    assert known.judge(server("10.0.0.2"), OTHER).trusted
    assert (tmp_path / "known_hosts").read_text().startswith("# mine\n")


def test_a_key_pinned_by_another_process_is_seen(tmp_path):
    mine, other = KnownHosts(tmp_path), KnownHosts(tmp_path)
    with pytest.raises(Unreachable):
        mine.check(server(), KEY)
    other.pin(other.judge(server(), KEY))
    mine.check(server(), KEY)


def test_pinning_many_at_once_loses_none(tmp_path):
    state = tmp_path / "state"

    def pin(number: int) -> None:
        known = KnownHosts(state)
        known.pin(known.judge(server(f"10.0.1.{number}"), KEY))

    threads = [threading.Thread(target=pin, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = KnownHosts(state)
    assert all(known.judge(server(f"10.0.1.{number}"), KEY).trusted for number in range(16))
    assert sorted(file.name for file in state.iterdir()) == ["known_hosts", "known_hosts.lock"]


def test_two_processes_that_pin_different_keys(tmp_path):
    """The second one was shown a key when none was pinned; by now another one is."""
    first, second = KnownHosts(tmp_path), KnownHosts(tmp_path)
    shown = second.judge(server(), OTHER)
    first.pin(first.judge(server(), KEY))
    with pytest.raises(NotPinned):
        second.pin(shown)
    assert first.judge(server(), KEY).trusted


def test_a_file_that_cannot_be_read_is_no_empty_file(tmp_path):
    (tmp_path / "known_hosts").mkdir()
    with pytest.raises(Unreachable, match="cannot read the host keys") as caught:
        KnownHosts(tmp_path).check(server(), KEY)
    assert caught.value.reason == "ssh-config"

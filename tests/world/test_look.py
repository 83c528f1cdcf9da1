"""Looks at real hosts: what they answer, what they cannot, and that none holds up another."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from controller.core import probe
from controller.world.port import Look
from tests.world.servers import ROOT, Proxy, fingerprint, free_port, wait_for

pytestmark = pytest.mark.alone

needs_root = pytest.mark.skipif(not ROOT, reason="needs root: a user or a greeting of its own")


def look(world, host="one", **options):
    return world.observe([Look(host, **options)])[host]


def sections(world, host="one", **options):
    seen = look(world, host, **options)
    assert seen.failure is None
    return seen.sections


def reason(world, host="one"):
    failure = look(world, host).failure
    assert failure is not None
    return failure.reason


def test_sections_come_from_the_host_the_worlds_own_among_them(sshd, worlds):
    world = worlds(fragments={"host.test": 'printf "%s/%s" "$max_age" "$guests"'}, clock=lambda: 1234.5)
    seen = look(world, max_age=30, guests=(129, 130))
    assert seen.failure is None
    assert seen.at == 1234.5
    assert seen.sections["host.test"].out == "30/129 130"
    assert set(seen.sections) == {"world", "host.test"}


def test_what_did_not_change_is_the_same_object_and_is_not_read_again(sshd, worlds, tmp_path):
    file = tmp_path / "file"
    file.write_text("one")
    world = worlds(fragments={"host.still": "printf still", "host.moves": f"cat '{file}'"})
    first = sections(world)
    again = sections(world)
    assert again is first
    assert world.counts.reads == 1
    file.write_text("two")
    changed = sections(world)
    assert changed is not first
    assert changed["host.moves"].out == "two"
    assert changed["host.still"] is first["host.still"]
    assert world.counts.reads == 2


def test_a_new_connection_to_a_host_that_did_not_change_reads_nothing_either(sshd, worlds):
    world = worlds()
    first = sections(world)
    sshd.stop()
    sshd.start()
    assert sections(world) is first
    assert world.counts.logins == 2


def test_many_hosts_at_once(sshd, worlds):
    names = [f"h{n}" for n in range(12)]
    world = worlds({name: {"address": f"127.0.1.{n + 1}"} for n, name in enumerate(names)})
    for _ in range(2):
        seen = world.observe([Look(name) for name in names])
        assert list(seen) == names
        assert all(one.failure is None and one.host == name for name, one in seen.items())
    assert world.counts.rounds == 24
    assert world.counts.logins == 12


@needs_root
@pytest.mark.parametrize("greeting", ["echo Welcome to the machine", "printf 'no newline'", "echo oops >&2"])
def test_a_login_that_greets(sshd, worlds, greeting):
    (sshd.home / ".bashrc").write_text(f"{greeting}\n")
    world = worlds()
    assert sections(world)["host.test"].out == "hello\n"
    assert sections(world)["host.test"].out == "hello\n"


@needs_root
@pytest.mark.parametrize("shell", ["fish", "tcsh", "zsh", "ksh93"])
def test_login_shells_of_any_kind(stopped_sshd, worlds, shell):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    stopped_sshd.users = [("operator", 12345, path)]
    stopped_sshd.start()
    world = worlds({"one": {"user": "operator"}}, {"host.test": 'id -u; printf "it\'s\\n"'})
    assert sections(world)["host.test"].out == "12345\nit's\n"


@needs_root
def test_a_user_without_a_shell(stopped_sshd, worlds):
    stopped_sshd.users = [("operator", 12345, "/usr/sbin/nologin")]
    stopped_sshd.start()
    failure = look(worlds({"one": {"user": "operator"}})).failure
    assert failure.reason == "no-shell"
    assert "not available" in failure.message


def test_a_host_in_another_language(stopped_sshd, worlds):
    stopped_sshd.options = ["SetEnv LC_ALL=de_DE.UTF-8 LANG=de_DE.UTF-8"]
    stopped_sshd.start()
    world = worlds(fragments={"host.test": "printf 'größer\\n'; ls /does-not-exist", "host.after": "printf ok"})
    seen = sections(world)
    assert seen["host.test"].out == "größer\n"
    assert "No such file or directory" in seen["host.test"].err
    assert seen["host.after"].out == "ok"


def test_a_forced_command_that_runs_what_is_asked(sshd, worlds):
    sshd.authorized.write_text("")
    sshd.authorize(sshd.identity, 'command="/bin/sh -c \\"$SSH_ORIGINAL_COMMAND\\""')
    assert sections(worlds())["host.test"].out == "hello\n"


def test_a_forced_command_that_reads_all_its_input_first_is_asked_in_one_go(sshd, worlds, tmp_path):
    sshd.authorized.write_text("")
    sshd.authorize(sshd.identity, f'command="cat >{tmp_path}/script; sh {tmp_path}/script"')
    world = worlds(look_timeout=2.0)
    assert reason(world) == "timed-out"
    assert sections(world)["host.test"].out == "hello\n"
    assert sections(world)["host.test"].out == "hello\n"
    assert world.counts.logins == 1


def test_a_forced_command_that_is_no_shell(sshd, worlds):
    sshd.authorized.write_text("")
    sshd.authorize(sshd.identity, 'command="echo go away"')
    failure = look(worlds()).failure
    assert failure.reason == "no-shell"
    assert "go away" in failure.message


def test_garbage_without_end(sshd, worlds):
    sshd.authorized.write_text("")
    sshd.authorize(sshd.identity, 'command="yes garbage"')
    failure = look(worlds()).failure
    assert failure.reason == "garbage"
    assert "garbage" in failure.message


def test_garbage_that_stops_talking(sshd, worlds, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    sshd.authorized.write_text("")
    sshd.authorize(sshd.identity, f'command="echo wrong begin; cat {tmp_path}/fifo"')
    assert reason(worlds(look_timeout=1.0)) == "garbage"
    (tmp_path / "fifo").write_text("")  # lets the command end


def test_ten_megabytes_are_too_long_and_the_next_look_is_asked_on_the_same_connection(sshd, worlds, tmp_path):
    big = tmp_path / "big"
    big.write_bytes(b"x" * 10_000_000)
    world = worlds(fragments={"host.test": f"cat '{big}'", "host.after": "printf ok"})
    failure = look(world).failure
    assert failure.reason == "too-long"
    assert str(probe.LIMIT) in failure.message
    big.write_bytes(b"x")
    seen = look(world)
    assert seen.sections["host.test"].out == "x"
    assert world.counts.logins == 1


def test_an_answer_just_within_the_limit(sshd, worlds, tmp_path):
    big = tmp_path / "big"
    big.write_bytes(b"0123456789abcde\n" * (200 * 1024))
    world = worlds(fragments={"host.test": f"cat '{big}'"})
    assert sections(world)["host.test"].out == big.read_text()
    assert look(world).failure is None


def test_half_an_answer(sshd, worlds, tmp_path):
    file = tmp_path / "die"
    file.touch()
    world = worlds(fragments={"host.a": "printf a", "host.b": f"if [ -e '{file}' ]; then kill -9 $$; fi; printf b"})
    assert reason(world) == "cut-off"
    file.unlink()
    assert sections(world)["host.b"].out == "b"
    assert world.counts.logins == 1


def test_a_connection_cut_in_the_middle_of_an_answer(sshd, worlds):
    proxy = Proxy(sshd.port, cut_after=40_000)
    try:
        counted = "i=0; while [ $i -lt 9000 ]; do echo 0123456789; i=$((i+1)); done"
        world = worlds({"one": {"port": proxy.port}}, {"host.test": counted})
        assert reason(world) == "cut-off"
        proxy.cut_after = None
        assert len(sections(world)["host.test"].out) == 99_000
    finally:
        proxy.close()


def test_a_kept_connection_that_died_unnoticed_is_made_anew_within_the_same_look(sshd, worlds):
    proxy = Proxy(sshd.port)
    try:
        world = worlds({"one": {"port": proxy.port}})
        first = look(world)
        proxy.cut()
        second = look(world)
        assert second.failure is None
        assert second.sections is first.sections
        assert world.counts.logins == 2
    finally:
        proxy.close()


def test_a_look_that_hangs_leaves_one_process_and_is_found_until_it_ends(sshd, worlds, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    world = worlds(
        fragments={"host.test": f"if [ -p '{fifo}' ]; then read -r _ <'{fifo}'; fi; printf ok"}, look_timeout=2.5
    )
    failure = look(world).failure
    assert failure.reason == "timed-out"
    for _ in range(4):
        began = time.monotonic()
        failure = look(world).failure
        assert failure.reason == "probe-stuck"
        assert "process" in failure.message
        assert time.monotonic() - began < 0.9
    # the shell of the look that hangs with the subshell that hangs in it, and the one that is asked now
    assert len(shells(sshd.port)) == 3
    os.close(os.open(fifo, os.O_WRONLY))
    fifo.unlink()
    wait_for(lambda: look(world).failure is None)
    assert world.counts.logins == 1
    world.close()
    wait_for(lambda: not shells(sshd.port))


def shells(port: int) -> list[int]:
    """The shells on this machine that were started by logins to a server."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                folder.name.isdigit()
                and (folder / "cmdline").read_bytes().split(b"\0")[0] == b"/bin/sh"
                and re.search(rb"\0SSH_CONNECTION=\S+ \d+ \S+ %d\0" % port, (folder / "environ").read_bytes())
            ):
                found.append(int(folder.name))
    return found


def test_hosts_that_are_slow_or_silent_hold_up_no_other(sshd, worlds, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    silent = Proxy(sshd.port, silent=True)
    quick = [f"quick{n}" for n in range(5)]
    try:
        world = worlds(
            {
                "hangs": {"address": "127.0.9.1"},
                "silent": {"port": silent.port},
                **{name: {"address": f"127.0.1.{n + 1}"} for n, name in enumerate(quick)},
            },
            # one machine plays all hosts: which of them it is shows in the address that was connected to
            {"host.test": f"case $SSH_CONNECTION in *' 127.0.9.1 '*) read -r _ <'{fifo}';; esac; printf ok"},
            trust=False,
            clock=time.monotonic,
            connect_timeout=3.0,
            look_timeout=3.0,
        )
        for name in ("hangs", *quick):
            worlds.trust(world, name)
        for _ in range(2):  # with and without connections
            began = time.monotonic()
            seen = world.observe([Look(name) for name in ("hangs", "silent", *quick)])
            assert seen["hangs"].failure.reason in {"timed-out", "probe-stuck"}
            assert seen["silent"].failure.reason == "timed-out"
            for name in quick:
                assert seen[name].failure is None
                assert seen[name].at - began < 1.5
        began = time.monotonic()
        world.ask([Look("hangs"), Look("silent"), *map(Look, quick)])
        seen = heard(world, quick)
        assert all(seen[name].failure is None and seen[name].at - began < 1.5 for name in quick)
        world.ask([Look("quick0")])  # whatever the others are doing
        assert heard(world, ["quick0"])["quick0"].failure is None
    finally:
        silent.close()
        os.close(os.open(fifo, os.O_WRONLY))


def heard(world, hosts):
    """The answers of these hosts, and of those that answer before."""
    seen = {}
    wait_for(lambda: seen.update((one.host, one) for one in world.hear(0.5)) or set(hosts) <= seen.keys(), 30)
    return seen


def test_nothing_listens(worlds, stopped_sshd):
    world = worlds(trust=False)
    failure = look(world).failure
    assert failure.reason == "refused"
    assert f":{stopped_sshd.port}" in failure.message


def test_a_name_that_is_none(worlds):
    assert reason(worlds({"one": {"address": "no-such-host.invalid"}}, trust=False)) == "unreachable"


def test_what_listens_is_no_ssh_server(worlds):
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.0 400 Bad Request\r\n" * 200))
        answer.start()
        world = worlds({"one": {"port": server.getsockname()[1]}}, trust=False, connect_timeout=5.0)
        assert reason(world) == "not-ssh"
        answer.join()


def test_a_server_that_hangs_up_is_tried_again(sshd, worlds):
    """sshd does so when too many log in at once (MaxStartups)."""
    proxy = Proxy(sshd.port)
    try:
        world = worlds({"one": {"port": proxy.port}})
        proxy.hang_up = 2
        assert sections(world)["host.test"].out == "hello\n"
        assert proxy.hang_up == 0
        world.use(worlds.specs({"one": {"port": proxy.port, "host_key": fingerprint(sshd.host_key)}}))
        proxy.hang_up = 3
        failure = look(world).failure
        assert failure.reason == "connection-lost", failure
    finally:
        proxy.close()


def test_a_host_that_comes_back_is_seen_again(sshd, worlds):
    world = worlds()
    assert look(world).failure is None
    sshd.stop()
    assert reason(world) == "refused"
    sshd.start()
    wait_for(lambda: look(world).failure is None)
    assert world.counts.logins == 2


def test_a_login_that_failed_is_not_tried_at_every_look(worlds):
    with socket.create_server(("127.0.0.1", free_port())) as server:
        port = server.getsockname()[1]
    world = worlds({"one": {"port": port}}, trust=False)
    first = look(world).failure
    began = time.monotonic()
    assert look(world).failure == first
    assert time.monotonic() - began < 0.05


def test_the_controllers_own_machine(worlds, tmp_path):
    local = {"connection": "local", "user": None, "port": None, "identity_file": None}
    world = worlds({"one": local}, {"host.test": "echo $$"})
    first = look(world)
    assert first.failure is None
    assert sections(world) is first.sections  # the same shell: its process is the same
    assert list(world.host_keys("one")) == []


@needs_root
@pytest.mark.skipif(shutil.which("sudo") is None, reason="sudo is not installed")
class TestSudo:
    @staticmethod
    def world(sshd, worlds, rule):
        sshd.users = [("operator", 12345, "/bin/sh")]
        sshd.sudoers = f"root ALL=(ALL) ALL\n{rule}\n"
        sshd.start()
        return worlds({"one": {"user": "operator", "sudo": True}}, {"host.test": "id -u"})

    def test_with_the_right(self, stopped_sshd, worlds):
        world = self.world(stopped_sshd, worlds, "operator ALL=(ALL) NOPASSWD: ALL")
        assert sections(world)["host.test"].out == "0\n"
        assert sections(world)["host.test"].out == "0\n"

    def test_with_a_terminal_of_its_own(self, stopped_sshd, worlds):
        world = self.world(stopped_sshd, worlds, "Defaults use_pty\noperator ALL=(ALL) NOPASSWD: ALL")
        assert sections(world)["host.test"].out == "0\n"

    def test_with_a_password(self, stopped_sshd, worlds):
        failure = look(self.world(stopped_sshd, worlds, "operator ALL=(ALL) ALL")).failure
        assert failure.reason == "sudo-refused"
        assert "password" in failure.message

    def test_without_the_right(self, stopped_sshd, worlds):
        assert reason(self.world(stopped_sshd, worlds, "")) == "sudo-refused"


def test_other_specs_keep_the_connections_that_are_still_wanted(sshd, worlds):
    world = worlds({"one": {}, "two": {"address": "127.0.1.2"}})
    world.observe([Look("one"), Look("two")])
    world.ask([Look("two")])
    world.use(worlds.specs({"one": {}, "three": {"address": "127.0.1.3"}}))
    assert [one.failure.reason for one in world.hear(5.0)] == ["ssh-config"]  # whoever waits for it is told
    worlds.trust(world, "three")
    seen = world.observe([Look("one"), Look("three")])
    assert all(one.failure is None for one in seen.values())
    assert world.counts.logins == 2

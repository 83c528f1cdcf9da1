"""Commands on a host: over SSH and on the controller's own machine they are the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from controller.world.local import LocalTransport
from controller.world.shell import command_line
from controller.world.transport import ConnectionLost, Exit, Unreachable
from tests.world.servers import Proxy, wait_for

pytestmark = pytest.mark.alone


@pytest.fixture(params=["ssh", "local"])
def transport(request):
    if request.param == "local":
        yield LocalTransport("here")
        return
    sshd, worlds = request.getfixturevalue("sshd"), request.getfixturevalue("worlds")
    assert sshd
    yield connected(worlds())


def connected(world, host="one"):
    return world._links[host].connected()


def test_output_errors_and_exit_code(transport):
    assert transport.run("echo out; echo err >&2; exit 3") == Exit(3, b"out\n", b"err\n")


def test_errors_that_come_after_the_output_has_ended(transport):
    done = transport.run("exec >&-; (sleep 0.3; echo late >&2) & exit 3")
    assert done == Exit(3, b"", b"late\n")


def test_standard_input(transport):
    assert transport.run("cat", b"a\0b\xff\n") == Exit(0, b"a\0b\xff\n", b"")
    assert transport.run("cat") == Exit(0, b"", b"")


def test_megabytes_both_ways(transport):
    data = os.urandom(1 << 20) * 5
    assert transport.run("cat", data, limit=len(data)).out == data
    assert transport.run("sha256sum | wc -c", data).out.split() == [b"68"]


def test_input_that_is_not_wanted(transport):
    assert transport.run("exit 4", b"x" * 4_000_000).rc == 4


def test_output_beyond_the_limit_is_dropped(transport):
    done = transport.run("head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2; echo end >&2; exit 5", limit=1000)
    assert (done.rc, len(done.out), len(done.err), done.cut) == (5, 1000, 1000, True)


def test_output_of_just_the_limit_is_whole(transport):
    assert transport.run("printf 12345", limit=5) == Exit(0, b"12345", b"", cut=False)


@pytest.mark.parametrize(
    "text",
    [
        "it's",
        '"quoted" $HOME `x`',
        "back\\slash \\n \\\\ \\'",
        "two\nlines\n\n# and a comment",
        "50% !! ! größer\t*",
        "%s%b\\041",
    ],
)
def test_text_arrives_as_it_is(transport, text):
    program = f"cat <<'END-OF-TEXT'\n{text}\nEND-OF-TEXT\n"
    assert transport.run(program).out.decode() == f"{text}\n"


def test_its_time_is_up(transport):
    began = time.monotonic()
    with pytest.raises(ConnectionLost) as caught:
        transport.run("echo begun; exec sleep 20", timeout=0.5)
    assert caught.value.reason == "timed-out"
    assert time.monotonic() - began < 2.0


def test_a_child_that_is_left_behind_does_not_hold_up_the_end(transport, tmp_path):
    began = time.monotonic()
    assert transport.run(f"sleep 20 & echo $! >'{tmp_path}/pid'; echo done") == Exit(0, b"done\n", b"")
    assert time.monotonic() - began < 5.0
    os.kill(int((tmp_path / "pid").read_text()), 15)


def test_a_command_that_is_killed(transport):
    assert transport.run("kill -9 $$").rc == -1
    assert transport.run("sh -c 'kill -9 $$'; exit $?").rc == 137


def test_many_at_once_on_one_connection(transport):
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda n: transport.run(f"sleep 0.2; echo {n}").out, range(8)))
    assert done == [b"%d\n" % n for n in range(8)]


def test_a_connection_that_is_cut(sshd, worlds):
    proxy = Proxy(sshd.port)
    try:
        transport = connected(worlds({"one": {"port": proxy.port}}))
        with pytest.raises(ConnectionLost) as caught:
            transport.run("echo begun; kill -9 $PPID; sleep 20", timeout=10.0)
        assert caught.value.reason == "connection-lost"
        wait_for(lambda: not transport.alive())
        with pytest.raises(Unreachable) as refused:
            transport.run("true")
        assert refused.value.reason == "connection-lost"
    finally:
        proxy.close()


def test_a_host_that_opens_no_more_sessions(stopped_sshd, worlds):
    stopped_sshd.options = ["MaxSessions 1"]
    stopped_sshd.start()
    transport = connected(worlds())
    stream = transport.open("", lambda: None, 5.0)
    with pytest.raises(Unreachable) as refused:
        transport.run("true")
    assert refused.value.reason == "no-shell"
    stream.close()


@pytest.mark.parametrize("shell", ["sh", "bash", "fish", "tcsh", "ksh93", "zsh"])
@pytest.mark.parametrize("command", ["echo plain", "printf '%s' 'a'\\''b \\\\ \"c\"'\necho $((2+3)) !x", ""])
def test_every_login_shell_hands_on_the_same_command(shell, command):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    line = command_line(command, sudo=False)
    done = subprocess.run([path, "-c", line], input=b"echo from stdin\n", capture_output=True, timeout=20)
    if command:
        straight = subprocess.run(["/bin/sh", "-c", command], capture_output=True, timeout=20)
        assert done.stdout == straight.stdout
        assert done.stderr == b""
    else:
        assert done.stdout == b"from stdin\n"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("sudo") is None, reason="needs root and sudo")
def test_a_command_that_sudo_refuses_was_not_started(stopped_sshd, worlds):
    stopped_sshd.users = [("operator", 12345, "/bin/sh")]
    stopped_sshd.sudoers = "root ALL=(ALL) ALL\noperator ALL=(ALL) ALL\n"
    stopped_sshd.start()
    transport = connected(worlds({"one": {"user": "operator", "sudo": True}}))
    with pytest.raises(Unreachable) as refused:
        transport.run("id -u")
    assert refused.value.reason == "sudo-refused"

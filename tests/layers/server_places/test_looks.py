"""The fragments that look into places, run for real against a tree that stands for a host and its container."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from controller.core.package import text
from controller.facts.words import ParseError, Section
from controller.layers.server_placement.facts import Found
from controller.layers.server_placement.facts import parse as parse_placement
from controller.layers.server_process.facts import End, Listener, Process
from controller.layers.server_process.facts import parse as parse_process
from controller.layers.server_unit.facts import Arguments, Marker, as_plain
from controller.layers.server_unit.facts import parse as parse_unit
from controller.layers.shared import inside
from tests.layers.places import PID, Hosted

PLACEMENT = inside.probe("controller.layers.server_placement", "probe.sh")
UNIT = inside.probe("controller.layers.server_unit", "probe.sh")
PROCESS = inside.probe("controller.layers.server_process", "probe.sh")
ARGUMENTS = Arguments(("/opt/reconcile/env/e1/bin/python", "-m", "engine", '{"a": "b c"}', ""), port=30000)
SHELLS = ("dash", "bash")


@pytest.fixture
def hosted(tmp_path: Path) -> Hosted:
    return Hosted(tmp_path)


def server(hosted: Hosted, name: str, root: str = "") -> None:
    """A server of ours with its unit, below a place's root."""
    here = f"{root}/opt/reconcile/server/{name}"
    marker = {"schema": 1, "object": f"ModelServer/{name}", "digest": "d" * 64, "unit": "u" * 64}
    hosted.write(
        {
            f"{here}/marker.json": json.dumps(marker),
            f"{here}/args.json": json.dumps(as_plain(ARGUMENTS)),
            f"{here}/salt": "salt\n",
            f"{here}/secrets.env": 'KEY="s3cret"\n',
            f"{here}/note.sh": "exit 0\n",
            f"{root}/etc/systemd/system/reconcile-{name}.service": "[Service]\n",
        }
    )


@pytest.mark.parametrize("shell", SHELLS)
def test_servers_of_the_host_and_of_its_container(hosted: Hosted, shell: str) -> None:
    server(hosted, "one", hosted.inside())
    server(hosted, "two")
    wants = hosted.path(hosted.inside("/etc/systemd/system/multi-user.target.wants"))
    wants.mkdir()
    (wants / "reconcile-one.service").symlink_to("../reconcile-one.service")
    (wants / "reconcile-one-watch.service").symlink_to("../reconcile-one-watch.service")
    hosted.write(
        {
            "/sys/fs/cgroup/lxc/129/ns/system.slice/reconcile-one.service/cgroup.events": "populated 1\nfrozen 0\n",
            hosted.inside("/etc/systemd/system/reconcile-hand.service"): "[Service]\n",
        }
    )
    facts = parse_placement(hosted.ask(PLACEMENT, shell=shell))
    assert facts.of(129) == (
        Found("hand", unit=True),
        Found("one", "ModelServer/one", unit=True, enabled=True, active=True),
    )
    assert facts.of(None) == (Found("two", "ModelServer/two", unit=True),)
    assert facts.between == frozenset()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_unit_with_its_files_and_the_digest_of_its_secrets(hosted: Hosted, shell: str) -> None:
    server(hosted, "one", hosted.inside())
    hosted.write({hosted.inside("/etc/systemd/system/reconcile-one.service.d/more.conf"): "[Service]\n"})
    section = hosted.ask(UNIT, shell=shell)
    assert "s3cret" not in section.out
    here = parse_unit(section).of(129)
    assert here is not None
    one = here.of("one")
    assert one is not None
    assert one.marker == Marker("ModelServer/one", "d" * 64, "u" * 64)
    assert one.arguments == ARGUMENTS
    assert one.text is not None
    assert one.text.text == "[Service]\n"
    assert one.secret_digest == hashlib.sha256(b'salt\nKEY="s3cret"\n').hexdigest()
    assert (one.salt, one.note, one.dropins) == ("salt", True, ("more.conf",))
    nothing = parse_unit(section).of(None)
    assert nothing is not None
    assert nothing.units == ()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_link_in_a_container_leads_nowhere(hosted: Hosted, shell: str) -> None:
    """What the host keeps at the target of a container's link is never read, wherever on the way the link is."""
    server(hosted, "one")
    for where in ("/opt", "/opt/reconcile", "/opt/reconcile/server", "/opt/reconcile/server/one"):
        tree = Hosted(hosted.root / where.replace("/", "_"))
        server(tree, "one")
        link = tree.path(tree.inside(where))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(tree.path(where))
        assert parse_placement(tree.ask(PLACEMENT, shell=shell)).of(129) == (), where
    server(hosted, "two", hosted.inside())
    marker = hosted.path(hosted.inside("/opt/reconcile/server/two/marker.json"))
    marker.unlink()
    marker.symlink_to(hosted.path("/opt/reconcile/server/one/marker.json"))
    assert parse_placement(hosted.ask(PLACEMENT, shell=shell)).of(129) == (Found("two", unit=True),)


def test_what_a_container_makes_too_large_or_no_file_is_not_read(hosted: Hosted) -> None:
    server(hosted, "one", hosted.inside())
    hosted.write({hosted.inside("/opt/reconcile/server/one/marker.json"): "x" * 300_000})
    os.unlink(hosted.path(hosted.inside("/opt/reconcile/server/one/args.json")))
    os.mkfifo(hosted.path(hosted.inside("/opt/reconcile/server/one/args.json")))
    here = parse_unit(hosted.ask(UNIT)).of(129)
    assert here is not None
    one = here.of("one")
    assert one is not None
    assert (one.marker, one.arguments) == (None, None)


def test_a_container_in_between_is_no_place(hosted: Hosted) -> None:
    hosted.write({"/bin/lxc-info": "#!/bin/sh\nexit 1\n"})
    facts = parse_placement(hosted.ask(PLACEMENT))
    assert (facts.of(129), facts.between) == (None, frozenset({129}))


def running(hosted: Hosted) -> None:
    """A server that runs as three processes and listens, and somebody else's that listens too."""
    group = "/sys/fs/cgroup/lxc/129/ns/system.slice/reconcile-one.service"
    hosted.write({f"{group}/cgroup.procs": "502\n501\n503\n", f"{group}/cgroup.events": "populated 1\n"})
    argv = b"\0".join(argument.encode() for argument in (*ARGUMENTS.argv, "two\nlines")) + b"\0"
    hosted.process(501, 2000, PID, cmdline=argv, environ=b"KEY=s3cret\0CUDA_VISIBLE_DEVICES=GPU-1,GPU-2\0")
    hosted.process(502, 2100, 501)
    hosted.process(503, 2200, 502)
    hosted.process(700, 900, 1)
    hosted.write(
        {
            "/proc/501/cgroup": "0::/lxc/129/ns/system.slice/reconcile-one.service\n",
            "/proc/501/comm": "python3\n",
            "/proc/700/cgroup": "0::/lxc/129/ns/system.slice/other.service\n",
            "/proc/700/comm": "node\n",
            hosted.inside("/run/reconcile-server/one.started"): f"{'d' * 64} 1767600000 {'e' * 64}\n",
            hosted.inside(
                "/run/reconcile-server/one.ends"
            ): "1767500000 signal killed KILL\n1767590000 success exited 0\n",
            f"/proc/{PID}/net/tcp": (
                "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
                "   0: 00000000:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 9001 1 0\n"
                "   1: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 9002 1 0\n"
                "   2: 0100007F:7530 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 9003 1 0\n"
            ),
        }
    )
    for pid, inode in ((501, 9001), (700, 9002)):
        hosted.path(f"/proc/{pid}/fd").mkdir()
        hosted.path(f"/proc/{pid}/fd/3").symlink_to(f"socket:[{inode}]")


@pytest.mark.parametrize("shell", SHELLS)
def test_what_runs_and_who_listens(hosted: Hosted, shell: str) -> None:
    running(hosted)
    section = hosted.ask(PROCESS, shell=shell)
    assert "s3cret" not in section.out
    here = parse_process(section).of(129)
    assert here is not None
    one = here.of("one")
    assert one is not None
    assert one.main == Process(501, 2000, (*ARGUMENTS.argv, "two\nlines"), ("GPU-1", "GPU-2"))
    assert (one.others, one.digest, one.secrets) == (2, "d" * 64, "e" * 64)
    assert (one.since, one.down) == (1767600000, False)
    assert one.ends == (
        End(1767500000, "signal", "killed", "KILL"),
        End(1767590000, "success", "exited", "0"),
    )
    assert here.listeners == (
        Listener(30000, 501, "reconcile-one.service", "python3"),
        Listener(8080, 700, "other.service", "node"),
    )
    assert hosted.ask(PROCESS, shell=shell) == section  # from memory this time


def test_an_owner_is_looked_for_again_when_it_is_gone(hosted: Hosted) -> None:
    running(hosted)
    hosted.ask(PROCESS)
    for name in ("stat", "cgroup", "comm", "fd/3"):
        hosted.path(f"/proc/700/{name}").unlink()
    hosted.process(701, 950, 1)
    hosted.write({"/proc/701/cgroup": "0::/lxc/129/ns/init.scope\n", "/proc/701/comm": "with space\n"})
    hosted.path("/proc/701/fd").mkdir()
    hosted.path("/proc/701/fd/9").symlink_to("socket:[9002]")
    here = parse_process(hosted.ask(PROCESS)).of(129)
    assert here is not None
    assert here.on(8080) == Listener(8080, 701, "init.scope", "-")


def test_a_server_that_ended_long_ago_is_down_and_one_that_just_did_is_not(hosted: Hosted) -> None:
    now = int(time.time())
    hosted.write(
        {
            hosted.inside("/run/reconcile-server/old.ends"): f"{now - 3600} exit-code exited 1\n",
            hosted.inside("/run/reconcile-server/new.ends"): f"{now} exit-code exited 1\n",
            hosted.inside("/run/reconcile-server/odd.ends"): "$(reboot) exit-code exited 1\nnonsense\n",
        }
    )
    here = parse_process(hosted.ask(PROCESS)).of(129)
    assert here is not None
    assert {one.name: one.down for one in here.servers} == {"old": True, "new": False, "odd": True}


@pytest.mark.parametrize("parse", [parse_placement, parse_unit, parse_process])
def test_garbage_is_no_fact(parse: object) -> None:
    for out in ("", "server x\n==files\n", "place -\nnonsense of somebody\n==files\n"):
        with pytest.raises(ParseError):
            parse(Section(0, out))  # type: ignore[operator]


def test_the_fragments_are_what_a_look_is_made_of() -> None:
    assert text("controller.layers.server_unit", "probe.sh") in UNIT

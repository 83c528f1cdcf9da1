"""The cluster file system keeps pmxcfs's rules, on the mounts of real hosts."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.lab.cluster import Guest, Tree, guest_of
from tests.lab.lab import Lab, LabError, wait_until

CONF = "nodes/kpro5/lxc/129.conf"
FILES = {CONF: b"hostname: llm-gpu\n", "nodes/kpro6/lxc/130.conf": b"hostname: other\n"}


@pytest.fixture
def cluster(lab: Lab) -> Lab:
    """The session's lab with two guests in its cluster, and a whole network."""
    lab.heal()
    lab.pve_release()
    for host in lab.proxmox:
        lab.power_on(host)
    lab.pve_reset(FILES)
    return lab


def said(lab: Lab, host: str, command: str) -> tuple[int, str]:
    done = lab.run(host, command)
    return done.returncode, done.stdout + done.stderr


def members(lab: Lab, host: str) -> dict[str, Any]:
    return json.loads(lab.pve_read(".members", host))  # type: ignore[no-any-return]


def test_nodes_share_one_tree_and_each_has_its_own_links(cluster: Lab) -> None:
    assert cluster.run("kpro5", "cat /etc/pve/lxc/129.conf").stdout == "hostname: llm-gpu\n"
    assert cluster.run("kpro6", "cat /etc/pve/nodes/kpro5/lxc/129.conf").stdout == "hostname: llm-gpu\n"
    assert cluster.run("kpro6", "ls /etc/pve/lxc /etc/pve/local/lxc").stdout.split("\n")[1] == "130.conf"
    assert cluster.run("kpro4", "readlink /etc/pve/local /etc/pve/qemu-server").stdout == (
        "nodes/kpro4\nnodes/kpro4/qemu-server\n"
    )
    cluster.run("kpro4", "printf 'x: 1\\n' > /etc/pve/ha/resources.cfg", check=True)
    assert cluster.run("kpro6", "cat /etc/pve/ha/resources.cfg").stdout == "x: 1\n"


def test_owners_and_modes(cluster: Lab) -> None:
    cluster.run("kpro5", "echo secret > /etc/pve/priv/token.cfg", check=True)
    command = "stat -c '%A %U %G %n' lxc/129.conf nodes/kpro5/lxc priv priv/token.cfg local .members"
    assert cluster.run("kpro5", f"cd /etc/pve && {command}").stdout.splitlines() == [
        "-rw-r----- root www-data lxc/129.conf",
        "drwxr-xr-x root www-data nodes/kpro5/lxc",
        "drwx------ root www-data priv",
        "-rw------- root www-data priv/token.cfg",
        "lrwxr-xr-x root www-data local",
        "-r--r----- root www-data .members",
    ]
    refused = cluster.run("kpro5", ["setpriv", "--reuid=ops", "--clear-groups", "cat", "/etc/pve/lxc/129.conf"])
    assert "Permission denied" in refused.stderr


@pytest.mark.parametrize(
    ("command", "code", "answer"),
    [
        ("ln -s a b", 1, "failed to create symbolic link 'b': Function not implemented"),
        (f"chmod 0644 {CONF}", 1, f"changing permissions of '{CONF}': Operation not permitted"),
        (f"chmod 0640 {CONF}", 0, ""),
        (f"chown root:root {CONF}", 1, "Operation not permitted"),
        ("echo x > nodes/kpro6/lxc/129.conf", 2, "cannot create nodes/kpro6/lxc/129.conf: File exists"),
        ("touch nodes/kpro6/lxc/129.conf", 1, "cannot touch 'nodes/kpro6/lxc/129.conf': File exists"),
        (f"cp {CONF} nodes/kpro5/qemu-server/129.conf", 1, "cannot create regular file"),
        ("head -c 1048577 /dev/zero > status.cfg", 1, "File too large"),
        ("head -c 1048576 /dev/zero > status.cfg", 0, ""),
        ("mv nodes/kpro6/lxc/130.conf nodes/kpro4/lxc/129.conf", 1, "File exists"),
        ("rmdir nodes/kpro5/lxc", 1, "Directory not empty"),
        ("rm lxc", 1, "Permission denied"),
    ],
)
def test_what_a_shell_is_told(cluster: Lab, command: str, code: int, answer: str) -> None:
    got_code, text = said(cluster, "kpro5", f"cd /etc/pve && {command}")
    assert (got_code, answer in text) == (code, True), text
    assert not answer or cluster.pve_read(CONF) == FILES[CONF]


def test_a_rename_replaces_another_guest(cluster: Lab) -> None:
    assert said(cluster, "kpro5", "mv /etc/pve/nodes/kpro6/lxc/130.conf /etc/pve/lxc/129.conf") == (0, "")
    assert cluster.pve_read(CONF) == b"hostname: other\n"
    assert cluster.run("kpro6", "ls /etc/pve/lxc").stdout == ""
    assert list(json.loads(cluster.pve_read(".vmlist"))["ids"]) == ["129"]


def test_a_rename_of_the_same_guest_moves_it(cluster: Lab) -> None:
    assert said(cluster, "kpro4", f"mv /etc/pve/{CONF} /etc/pve/nodes/kpro6/lxc/129.conf") == (0, "")
    assert cluster.run("kpro6", "cat /etc/pve/lxc/129.conf").stdout == "hostname: llm-gpu\n"
    assert json.loads(cluster.pve_read(".vmlist"))["ids"]["129"]["node"] == "kpro6"


def test_edit_in_place_and_by_a_file_beside(cluster: Lab) -> None:
    assert said(cluster, "kpro5", "sed -i s/llm/big/ /etc/pve/lxc/129.conf") == (0, "")
    assert cluster.pve_read(CONF) == b"hostname: big-gpu\n"
    command = "cd /etc/pve/lxc && echo test > 129.conf.tmp && mv 129.conf.tmp 129.conf && ls"
    assert said(cluster, "kpro5", command) == (0, "129.conf\n")
    assert cluster.pve_read(CONF) == b"test\n"
    cluster.run("kpro5", "echo more >> /etc/pve/lxc/129.conf", check=True)
    assert cluster.pve_read(CONF) == b"test\nmore\n"


def test_the_guest_list_counts_changes(cluster: Lab) -> None:
    before = json.loads(cluster.pve_read(".vmlist"))
    assert {key: entry | {"version": 0} for key, entry in before["ids"].items()} == {
        "129": {"node": "kpro5", "type": "lxc", "version": 0},
        "130": {"node": "kpro6", "type": "lxc", "version": 0},
    }
    cluster.pve_write(CONF, "hostname: new\n")
    after = json.loads(cluster.pve_read(".vmlist"))
    assert after["version"] > before["version"]
    assert after["ids"]["129"]["version"] > before["ids"]["129"]["version"]
    assert after["ids"]["130"] == before["ids"]["130"]
    cluster.pve_write("nodes/kpro5/qemu-server/210.conf", "name: win\n")
    assert json.loads(cluster.pve_read(".vmlist"))["ids"]["210"]["type"] == "qemu"


def test_members_shows_who_is_there(cluster: Lab) -> None:
    seen = members(cluster, "kpro5")
    assert seen["nodename"] == "kpro5"
    assert seen["cluster"] == {"name": cluster.name, "version": 3, "nodes": 3, "quorate": 1}
    assert seen["nodelist"]["kpro6"] == {"id": 3, "online": 1, "ip": cluster.address("kpro6")}
    cluster.power_off("kpro6")
    seen_after = members(cluster, "kpro5")
    assert seen_after["nodelist"]["kpro6"]["online"] == 0
    assert seen_after["cluster"]["quorate"] == 1
    assert seen_after["version"] > seen["version"]


def test_the_minority_is_read_only_and_stale_and_then_takes_the_majority_s_copy(cluster: Lab) -> None:
    cluster.partition([["kpro4", "kpro5"], ["kpro6"]])
    assert members(cluster, "kpro6")["cluster"]["quorate"] == 0
    code, text = said(cluster, "kpro6", "echo x | tee -a /etc/pve/nodes/kpro6/lxc/130.conf")
    assert (code, "Permission denied" in text) == (1, True), text
    code, text = said(cluster, "kpro6", "echo x > /etc/pve/nodes/kpro6/lxc/131.conf")
    assert (code, "Permission denied" in text) == (2, True), text
    assert "Permission denied" in said(cluster, "kpro6", "mv /etc/pve/lxc/130.conf /etc/pve/lxc/131.conf")[1]
    modes = cluster.run("kpro6", "stat -L -c %A /etc/pve/local /etc/pve/lxc/130.conf").stdout.split()
    assert modes == ["dr-xr-xr-x", "-r--r-----"]
    cluster.run("kpro5", "mv /etc/pve/nodes/kpro6/lxc/130.conf /etc/pve/lxc/130.conf", check=True)
    assert cluster.run("kpro6", "ls /etc/pve/lxc").stdout == "130.conf\n"
    cluster.heal()
    assert cluster.run("kpro6", "ls /etc/pve/lxc").stdout == ""
    assert members(cluster, "kpro6")["cluster"]["quorate"] == 1


def test_a_cluster_without_a_majority_takes_no_write(cluster: Lab) -> None:
    cluster.power_off("kpro4")
    cluster.power_off("kpro6")
    assert "Permission denied" in said(cluster, "kpro5", "echo x > /etc/pve/status.cfg")[1]
    with pytest.raises(LabError, match="quorum"):
        cluster.pve_write(CONF, "x")
    cluster.power_on("kpro6")
    assert cluster.pve_read(CONF) == FILES[CONF]
    cluster.pve_write(CONF, "x")


def test_a_read_that_hangs_hangs_alone(cluster: Lab) -> None:
    cluster.pve_hang("kpro5", CONF)
    reader = subprocess.Popen([*cluster.ssh_command("kpro5"), "cat /etc/pve/lxc/129.conf"], stdout=subprocess.PIPE)
    count = "ps -C cat -o stat= | wc -l"
    wait_until(lambda: cluster.run("kpro5", count).stdout.strip() == "1", 10, "cat does not run")
    assert reader.poll() is None
    assert cluster.run("kpro5", "cat /etc/pve/storage.cfg").stdout.startswith("dir: local")
    assert cluster.run("kpro6", f"cat /etc/pve/{CONF}").stdout == "hostname: llm-gpu\n"
    cluster.pve_release()
    assert reader.communicate(timeout=10)[0] == b"hostname: llm-gpu\n"


def test_a_host_that_hangs_can_still_lose_power(cluster: Lab) -> None:
    cluster.pve_hang("kpro5", CONF)
    cluster.run("kpro5", f"cat /etc/pve/{CONF} > /dev/null 2>&1 &", check=True)
    cluster.power_off("kpro5")
    assert not cluster.is_on("kpro5")
    cluster.power_on("kpro5")
    assert cluster.run("kpro5", f"cat /etc/pve/{CONF}", timeout=10).stdout == "hostname: llm-gpu\n"


def test_content_survives_all_hosts_off(cluster: Lab) -> None:
    for host in cluster.proxmox:
        cluster.power_off(host)
    for host in cluster.proxmox:
        cluster.power_on(host)
    assert cluster.pve_read(CONF) == FILES[CONF]


def tree(**files: bytes) -> Tree:
    return Tree.of_files({name.replace("__", "/"): data for name, data in files.items()}, ["a", "b"])


def test_writing_past_the_end_fills_with_zeros() -> None:
    it = tree(x=b"ab")
    it.write("x", b"c", 4)
    assert it.get("x").data == b"ab\0\0c"


def test_a_copy_changes_for_itself() -> None:
    it = tree(nodes__a__lxc__1=b"")
    twin = it.copy()
    twin.create("nodes/a/lxc/100.conf")
    assert "nodes/a/lxc/100.conf" not in it.entries
    assert 100 not in it.guests
    assert twin.version > it.version


@pytest.mark.parametrize(
    ("path", "guest"),
    [
        ("nodes/a/lxc/129.conf", Guest(129, "a", "lxc")),
        ("nodes/a/qemu-server/129.conf", Guest(129, "a", "qemu")),
        ("nodes/a/lxc/0129.conf", None),
        ("nodes/a/lxc/129.conf.tmp", None),
        ("nodes/a/129.conf", None),
        ("lxc/129.conf", None),
    ],
)
def test_what_is_a_guest_s_configuration(path: str, guest: Guest | None) -> None:
    assert guest_of(path) == guest

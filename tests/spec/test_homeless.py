"""What stands on something that no believed file defines is left out, and nothing is done to it."""

from __future__ import annotations

from controller.spec.load import read
from controller.spec.ref import Ref

HOST = b"kind: Host\nname: a\naddress: 192.0.2.1\nplatform: proxmox\n"
CONTAINER = b"kind: Container\nname: ct\nid: 129\nhost: a\n"
SERVER = b"""kind: ModelServer
name: one
container: ct
model: {repo: a/b, revision: 0123456789abcdef0123456789abcdef01234567, directory: /models}
engine: {name: sglang, version: 0.5.11}
serve: {port: 30000}
"""


def test_with_its_host_in_a_broken_file_a_container_and_its_server_are_left_out_and_frozen() -> None:
    reading = read({"hosts.yaml": HOST[:20], "ct.yaml": CONTAINER, "server.yaml": SERVER})
    assert list(reading.specs) == []
    assert {Ref("Container", "ct"), Ref("ModelServer", "one")} <= reading.frozen


def test_a_misspelt_host_leaves_out_who_names_it_and_nobody_else() -> None:
    reading = read({"hosts.yaml": HOST, "ct.yaml": CONTAINER.replace(b"host: a", b"host: aa")})
    assert [obj.ref for obj in reading.specs] == [Ref("Host", "a")]
    assert Ref("Container", "ct") in reading.frozen


def test_what_was_last_good_is_a_home() -> None:
    texts = {"hosts.yaml": HOST, "ct.yaml": CONTAINER}
    reading = read({**texts, "hosts.yaml": HOST[:20]}, last_good=texts)
    assert {obj.ref for obj in reading.specs} == {Ref("Host", "a"), Ref("Container", "ct")}

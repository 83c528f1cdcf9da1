"""What no single document can show."""

from collections.abc import Mapping

import pytest

from controller.spec.errors import Code, SpecError
from controller.spec.load import read
from controller.spec.model import ModelServer
from controller.spec.values import Problem

MODEL = "{repo: Q/a, revision: 0123456789012345678901234567890123456789, directory: /models}"


def host(name: str, gpus: str = "", more: str = "", platform: str = "proxmox") -> str:
    listed = f"nvidia: {{gpus: [{gpus}]}}\n" if gpus else ""
    return f"kind: Host\nname: {name}\naddress: {name}.example.net\nplatform: {platform}\n{listed}{more}"


def gpu(pci: str, owner: str = "containers", model: str = "RTX A6000") -> str:
    return f"{{pci: '{pci}', model: {model}, owner: {owner}}}"


def container(number: int, on: str, more: str = "") -> str:
    return f"kind: Container\nname: ct{number}\nid: {number}\nhost: {on}\n{more}"


def server(name: str, place: str, serve: str = "port: 80", more: str = "") -> str:
    return (
        f"kind: ModelServer\nname: {name}\n{place}\nmodel: {MODEL}\nengine: {{name: vllm, version: 0.11.2}}\n"
        f"serve: {{{serve}}}\n{more}"
    )


def errors(*documents: str, clusters: Mapping[str, str] | None = None) -> list[SpecError]:
    return list(read({"a.yaml": "---\n".join(documents).encode()}, clusters=clusters).errors)


def said(*documents: str) -> list[str]:
    return [error.says for error in errors(*documents)]


TWO = gpu("4f:00.0") + ", " + gpu("ce:00.0")
MIXED = TWO + ", " + gpu("17:00.0", model="RTX 3090") + ", " + gpu("31:00.0", "vms")


# Clusters


@pytest.mark.parametrize(
    ("clusters", "wrong"),
    [
        ({}, True),
        ({"kpro5": "a"}, True),
        ({"kpro6": "a"}, True),
        ({"kpro5": "a", "kpro6": "a"}, True),
        ({"kpro5": "a", "kpro6": "b"}, False),
    ],
)
def test_a_ct_id_twice_is_right_only_in_clusters_known_to_differ(clusters: dict[str, str], wrong: bool) -> None:
    twin = container(129, "kpro6").replace("ct129", "twin")
    found = errors(host("kpro5"), host("kpro6"), container(129, "kpro5"), twin, clusters=clusters)
    assert [(str(e.object), e.field) for e in found] == [("Container/twin", "id")] * wrong


def test_a_ct_id_twice_on_one_host_is_never_right() -> None:
    twin = container(129, "kpro5").replace("ct129", "twin")
    assert errors(host("kpro5"), container(129, "kpro5"), twin, clusters={"kpro5": "a"})


# GPUs


@pytest.mark.parametrize(
    ("demands", "fits"),
    [
        (["{count: 2}"], True),
        (["{count: 3}"], True),
        (["{count: 4}"], False),  # the fourth belongs to virtual machines
        (["{count: 2}", "{count: 1}"], True),
        (["{count: 2}", "{count: 2}"], False),
        (["{count: 2, model: RTX A6000}", "{count: 1}"], True),
        (["{count: 3, model: NVIDIA RTX A6000}"], False),
        (["{count: 1, model: NVIDIA GeForce RTX 3090}"], True),
        (["{count: 2, model: RTX 3090}"], False),
        (["{count: 1, model: RTX 5090}"], False),
        (["['4f:00.0']", "{count: 2, model: RTX A6000}"], False),
        (["['17:00.0']", "{count: 2, model: RTX A6000}"], True),
        (["['4f:00.0']", "{count: 3}"], False),
        (["['4f:00.0']", "['0000:4F:00.0']"], False),
        (["['4f:00.0']", "{devices: ['4f:00.0'], shared: true}"], False),
        (["{devices: ['4f:00.0'], shared: true}", "{devices: ['4f:00.0'], shared: true}"], True),
        (["{count: 3, shared: true}", "{count: 3, shared: true}"], True),
        (["{count: 3, shared: true}", "{count: 1}"], False),
        (["{count: 2, shared: true}", "{count: 2, shared: true}", "{count: 1}"], True),
        (["['31:00.0']"], False),
        (["['99:00.0']"], False),
        (["[GPU-8a05f1c2-6d3e-4f7b-9a10-2c54e8b7d901]", "{count: 2}"], True),
        (["[GPU-8a05f1c2-6d3e-4f7b-9a10-2c54e8b7d901]", "{count: 3}"], False),
        (["{count: 0}", "[]"], True),
    ],
)
def test_gpus(demands: list[str], fits: bool) -> None:
    containers = [container(100 + n, "kpro5", f"gpus: {demand}\n") for n, demand in enumerate(demands)]
    found = errors(host("kpro5", MIXED), *containers)
    assert all(error.code is Code.CONFLICT for error in found)
    assert bool(found) is not fits


def test_a_host_without_gpus_has_none_to_give() -> None:
    assert said(host("kpro5"), container(100, "kpro5", "gpus: {count: 1}\n")) == [
        "cannot give 1 GPUs of kpro5 to containers: it lists 0 with owner: containers"
    ]


def test_a_decommissioned_host_gives_none_and_nobody_minds() -> None:
    gone = host("kpro6", more="lifecycle: decommissioned\n")
    assert (
        said(gone, container(100, "kpro6", "gpus: {count: 4}\n"), container(101, "kpro6", "gpus: ['4f:00.0']\n")) == []
    )


def test_the_same_address_on_two_hosts_is_two_gpus() -> None:
    documents = [host("a", TWO), host("b", TWO), container(100, "a", "gpus: ['4f:00.0']\n")]
    assert said(*documents, container(101, "b", "gpus: ['4f:00.0']\n")) == []


def test_everybody_who_wants_too_much_is_left_alone() -> None:
    first, second = (container(n, "a", "gpus: {count: 2}\n") for n in (100, 101))
    (error,) = errors(host("a", TWO), first, second)
    assert {str(ref) for ref in error.concerns} == {"Container/ct100", "Container/ct101"}


# Servers

BOX = host("box", "{pci: '01:00.0', model: GB10}, {pci: '02:00.0', model: GB10}", platform="linux")
KPRO = host("kpro5", TWO)
CT = container(129, "kpro5", "gpus: {count: 2}\n")


@pytest.mark.parametrize(
    ("place", "more", "serve", "wrong"),
    [
        ("container: ct129", "", "", []),
        ("container: ct129", "gpus: [0, 1]\n", "tensor_parallel: 2", []),
        ("container: ct129", "gpus: [2]\n", "", ["gpus[0]"]),
        ("container: ct129", "gpus: [1]\n", "tensor_parallel: 2", ["serve.tensor_parallel"]),
        ("container: ct129", "", "tensor_parallel: 4", ["serve.tensor_parallel"]),
        ("container: ct129", "", "tensor_parallel: 4, flags: {nnodes: 2}", []),
        ("container: ct129", "", "tensor_parallel: 8, flags: {nnodes: 2}", ["serve.tensor_parallel"]),
        ("container: ct192", "", "", ["container"]),
        ("host: box", "", "tensor_parallel: 2", []),
        ("host: box", "gpus: ['01:00.0']\n", "", []),
        ("host: box", "gpus: ['03:00.0']\n", "", ["gpus[0]"]),
        ("host: box", "", "tensor_parallel: 3", ["serve.tensor_parallel"]),
        ("host: kpro5", "", "", ["host"]),
        ("host: bxo", "", "", ["host"]),
    ],
)
def test_place_and_gpus(place: str, more: str, serve: str, wrong: list[str]) -> None:
    found = errors(KPRO, BOX, CT, server("s", place, "port: 80" + f", {serve}" * bool(serve), more))
    assert [error.field for error in found] == wrong


def test_a_container_whose_gpus_nobody_looks_after_may_have_any_number() -> None:
    assert said(KPRO, container(129, "kpro5"), server("s", "container: ct129", "port: 80, tensor_parallel: 8")) == []


@pytest.mark.parametrize(
    ("second", "wrong"),
    [
        (server("b", "container: ct129"), True),
        (server("b", "container: ct129", "port: 80, address: 10.0.0.1"), True),
        (server("b", "container: ct129", "port: 81"), False),
        (server("b", "container: ct130"), False),
        (server("b", "host: box"), False),
        (server("b", "container: ct129", more="state: stopped\n"), False),
        (server("b", "container: ct129", more="state: absent\n"), False),
    ],
)
def test_a_port_twice(second: str, wrong: bool) -> None:
    found = errors(KPRO, BOX, CT, container(130, "kpro5"), server("a", "container: ct129"), second)
    assert [error.field for error in found] == ["serve.port"] * wrong


def test_secrets_are_defined_in_the_fleet() -> None:
    use = server("s", "host: box", "port: 80, api_key: {secret: qwne}, env: {A: {secret: hf}, B: plain}")
    (error,) = errors("kind: Fleet\nsecrets: {qwen: {from_env: Q}, hf: {from_env: H}}\n", BOX, use)
    assert (error.field, error.nearest, error.code) == ("serve.api_key.secret", "qwen", Code.NOT_FOUND)


def test_what_an_engine_has_against_a_server_stands_where_it_is_written() -> None:
    def refuse(server: ModelServer, gpus: int | None) -> list[Problem]:
        seen.append((server.name, gpus))
        field = ("serve", "flags", "tool-call-praser")
        return [Problem("cannot pass this", nearest="tool-call-parser", field=field)]

    seen: list[tuple[str, int | None]] = []
    use = server("s", "host: box", "port: 80, flags: {max-model-len: 5, tool-call-praser: x}")
    text = "---\n".join((BOX, use)).encode()
    (error,) = read({"a.yaml": text}, check_server=refuse).errors
    assert (error.field, error.nearest) == ("serve.flags.tool-call-praser", "tool-call-parser")
    assert set(seen) == {("s", 2)}


# Names


def test_renames() -> None:
    assert said(host("b", more="renamed_from: a\n")) == []
    assert said(host("b", more="renamed_from: b\n")) == ["cannot rename an object from its own name"]
    assert said(host("a"), host("b", more="renamed_from: a\n")) == [
        "cannot take over what Host/a has: there still is an object of this name"
    ]
    assert said(host("b", more="renamed_from: a\n"), host("c", more="renamed_from: a\n")) == [
        "cannot take over what Host/a had: Host/b does"
    ]
    assert said(host("ct1"), container(100, "ct1", "renamed_from: ct1\n")) == []


def test_one_machine_is_one_host() -> None:
    twin = host("b").replace("b.example", "A.example")
    assert said(host("a"), twin) == ["cannot reach b where a is: one machine is one host"]
    assert said(host("a"), twin + "ssh: {port: 2222}\n") == []
    assert said(host("a", more="lifecycle: decommissioned\n"), twin) == []
    here = "ssh: {connection: local}\n"
    assert said(host("a", more=here), host("b", more=here)) == ["cannot reach b where a is: one machine is one host"]


def test_hosts_kept_apart_exist() -> None:
    (error,) = errors("kind: Fleet\nlimits: {never_together: [[spark1, sprak2]]}\n", host("spark1"), host("spark2"))
    assert (error.field, error.nearest) == ("limits.never_together[0][1]", "spark2")
    assert [str(ref) for ref in error.concerns] == ["Host/spark1"]


def test_a_long_list_of_names_is_cut() -> None:
    (error,) = errors(*(host(f"h{n}") for n in range(200)), container(100, "kpro"))
    assert error.allowed.endswith("h11, … (200 in all)")


@pytest.mark.parametrize(("name", "wrong"), [("gpus", True), ("qwen-watch", True), ("watch", False), ("gpus2", False)])
def test_a_server_is_not_called_as_a_unit_of_ours(name: str, wrong: bool) -> None:
    """``reconcile-gpus.service`` binds cards at boot, ``reconcile-NAME-watch.service`` watches a server."""
    found = said(host("box", platform="linux"), server(name, "host: box"))
    assert any("cannot call a server" in each for each in found) == wrong, found

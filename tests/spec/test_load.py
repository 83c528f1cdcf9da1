"""From text to objects: merging, positions, and what becomes of broken files."""

from time import process_time

import pytest

from controller.spec.documents import MAX_BYTES, MAX_DEPTH, MAX_ERRORS
from controller.spec.errors import Code, SpecError
from controller.spec.literals import looks_like_secret
from controller.spec.load import Reading, SpecErrors, is_spec_file, load, read
from controller.spec.model import Container, GpuOwner, Host, Lifecycle, Mode, Permission, Specs
from controller.spec.ref import Ref

HOST = "kind: Host\nname: {name}\naddress: {name}.example.net\nplatform: proxmox\n"
CT = "kind: Container\nname: ct{id}\nid: {id}\nhost: {host}\n"


def host(name: str = "kpro5", more: str = "") -> str:
    return HOST.format(name=name) + more


def container(number: int = 129, on: str = "kpro5", more: str = "") -> str:
    return CT.format(id=number, host=on) + more


def documents(*texts: str) -> bytes:
    return "---\n".join(texts).encode()


def specs(*texts: str) -> Specs:
    return load({"a.yaml": documents(*texts)})


def errors(*texts: str | bytes) -> tuple[SpecError, ...]:
    files = {f"{n}.yaml": text if isinstance(text, bytes) else text.encode() for n, text in enumerate(texts)}
    with pytest.raises(SpecErrors) as caught:
        load(files)
    return caught.value.errors


# What is read


def test_no_files_is_an_empty_fleet() -> None:
    assert list(load({})) == []
    assert load({}).fleet.policy.mode is Mode.REPORT


def test_several_documents_in_several_files() -> None:
    found = load({"x/a.yaml": documents(host(), host("kpro6")), "b.yaml": documents(container())})
    assert [str(one.ref) for one in found] == ["Host/kpro5", "Host/kpro6", "Container/ct129"]
    assert str(found.places[Ref("Host", "kpro6")]) == "x/a.yaml:6"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("a.yaml", True), ("x/y.yaml", True), ("fleet.sim.yaml", False), ("a.yml", False), ("a.yaml~", False)],
)
def test_which_files_are_specs(name: str, is_one: bool) -> None:
    assert is_spec_file(name) is is_one
    assert len(list(load({name: documents(host())}))) == is_one


def test_a_comment_alone_defines_nothing() -> None:
    assert list(load({"a.yaml": b"# nothing here any more\n", "b.yaml": b"---\n---\n"})) == []


@pytest.mark.parametrize("newline", ["\r\n", "\r", "\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_and_byte_order_mark(newline: str, mark: bytes) -> None:
    text = documents(host(), "# a comment\n\n" + host("kpro6"))
    found = load({"a.yaml": mark + text.replace(b"\n", newline.encode())})
    assert found.places[Ref("Host", "kpro6")].line == 8
    assert found.hosts["kpro5"].address == "kpro5.example.net"


def test_an_odd_gpu_list_stands_for_devices() -> None:
    found = specs(
        host(more='nvidia: {gpus: [{pci: "10:00.0", model: X, owner: containers}]}\n'),
        container(more="gpus: [10:00.0]\n"),
    )
    gpus = found.containers["ct129"].gpus
    assert gpus is not None
    assert gpus.devices == ("0000:10:00.0",)
    assert gpus.number == 1


def test_no_gpus_is_not_left_alone() -> None:
    found = specs(host(), container(more="gpus: []\n"), container(130))
    none = found.containers["ct129"].gpus
    assert none is not None
    assert none.number == 0
    assert found.containers["ct130"].gpus is None


def test_a_plain_linux_hosts_gpus_are_its_own() -> None:
    found = specs(
        "kind: Host\nname: box\naddress: 10.0.0.9\nplatform: linux\nnvidia: {gpus: [{pci: '01:00.0', model: GB10}]}\n"
    )
    assert found.hosts["box"].gpus[0].owner is GpuOwner.HOST


def test_this_machine_needs_no_address() -> None:
    found = specs("kind: Host\nname: here\nplatform: linux\nssh: {connection: local}\n")
    assert found.hosts["here"].address == "localhost"


def test_a_decommissioned_host_may_still_be_referred_to() -> None:
    found = specs(host(more="lifecycle: decommissioned\n"), container(more="gpus: {count: 4}\n"))
    assert found.hosts["kpro5"].lifecycle is Lifecycle.DECOMMISSIONED


# Defaults

FLEET = """\
kind: Fleet
policy: {mode: enforce, allow: [adopt]}
defaults:
  Container:
    passthrough: dev
    mounts: [{target: /a}]
    policy: {allow: [restart-container], rollback: true}
"""


def test_maps_merge_and_lists_replace() -> None:
    found = specs(
        FLEET,
        host(),
        container(),
        container(130, more="passthrough: lxc\nmounts: [{target: /b}]\npolicy: {mode: report, allow: []}\n"),
    )
    first, second = found.containers["ct129"], found.containers["ct130"]
    assert (first.passthrough, [m.target for m in first.mounts]) == ("dev", ["/a"])
    assert (second.passthrough, [m.target for m in second.mounts]) == ("lxc", ["/b"])
    assert (first.policy.mode, first.policy.allow) == (Mode.ENFORCE, (Permission.RESTART_CONTAINER,))
    assert (second.policy.mode, second.policy.allow, second.policy.rollback) == (Mode.REPORT, (), True)
    assert found.hosts["kpro5"].policy.allow == (Permission.ADOPT,)


def test_nothing_takes_a_default_away() -> None:
    found = specs(FLEET, host(), container(more="passthrough:\nmounts: ~\npolicy: {allow: null}\n"))
    one = found.containers["ct129"]
    assert (one.passthrough, one.mounts, one.policy.allow) == ("keep", (), ())
    assert one.policy.mode is Mode.ENFORCE


def test_a_required_field_may_come_from_the_defaults() -> None:
    found = specs("kind: Fleet\ndefaults: {Host: {platform: proxmox}}\n", "kind: Host\nname: a\naddress: b\n")
    assert found.hosts["a"].platform == "proxmox"


def test_a_wrong_default_is_shown_once_and_where_it_stands() -> None:
    text = documents("kind: Fleet\ndefaults: {Container: {passthrough: dve}}\n", host(), container(), container(130))
    (error,) = errors(text)
    assert (str(error.place), error.field, error.nearest) == ("0.yaml:2", "defaults.Container.passthrough", "dev")


# What is wrong


@pytest.mark.parametrize(
    ("data", "code", "line", "column"),
    [
        (b"", Code.UNREADABLE, 1, 1),
        (b" \n\t\n", Code.UNREADABLE, 1, 1),
        (b"\xff\xfek\0i\0", Code.UNREADABLE, 1, 1),
        (b"kind: Host\nname: \xc3\xa4\xff\n", Code.UNREADABLE, 2, 8),
        (b"kind: Host\nname: a\x00b\n", Code.UNREADABLE, 2, 8),
        (b"kind: Host\nname: a\x1b[31m\n", Code.UNREADABLE, 2, 8),
        (b'kind: Host\nname: "a\\0b"\n', Code.UNREADABLE, 2, 7),
        (b'kind: Host\nname: "\\ud800"\n', Code.UNREADABLE, 2, 7),
        ("kind: Host\nname: a\u202eb\n".encode(), Code.UNREADABLE, 2, 7),
        (b"#" * (MAX_BYTES + 1), Code.UNREADABLE, 1, 1),
        (b"a: " + b"[" * 100_000, Code.UNREADABLE, 1, MAX_DEPTH + 3),
        (b"a: " + b"{a: " * 100_000, Code.UNREADABLE, 1, 4 * MAX_DEPTH),
        (b'a: "\\UFFFFFFFF"\n', Code.SYNTAX, 1, 1),
        (b"%YAML 9.1\n---\na: b\n", Code.SYNTAX, 1, 1),
        (b"kind: Host\n  name: a\n", Code.SYNTAX, 2, 7),
    ],
)
def test_what_cannot_be_read(data: bytes, code: Code, line: int, column: int) -> None:
    assert (code, line, column) in [(e.code, e.place.line, e.place.column) for e in errors(data)]


def test_endless_errors_end() -> None:
    found = errors("a:\n" * 100_000)
    assert len(found) == MAX_ERRORS + 1
    assert any("200 errors" in error.says for error in found)


@pytest.mark.parametrize("text", ["x", "a.", "eyJ-", "sk-", "://a:", "-----BEGIN A"])
def test_no_text_makes_the_search_for_secrets_slow(text: str) -> None:
    began = process_time()
    assert not looks_like_secret(text * (500_000 // len(text)))
    assert process_time() - began < 10  # what was quadratic took hours


def test_a_bomb_of_aliases_is_refused_at_once() -> None:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 20)]
    found = errors("kind: Host\nl0: &l0 [x]\n" + "\n".join(levels) + "\n")
    assert {error.says for error in found} >= {"cannot use an alias (*)", "cannot use an anchor (&)"}


def test_all_errors_come_at_once_and_in_order() -> None:
    found = errors(
        documents("kind: Host\nname: a\nadress: x\nplatform: promox\n", container(on="b", more="stat: on\n")),
        "kind: Host\nname: b\n\tbad: tab\n",
        documents("kind: Nothing\n"),
    )
    assert [(str(error.place), error.code) for error in found] == [
        ("0.yaml:3", Code.UNKNOWN_FIELD),
        ("0.yaml:4", Code.VALUE),
        ("0.yaml:10", Code.UNKNOWN_FIELD),
        ("1.yaml:3", Code.SYNTAX),
        ("2.yaml:1", Code.UNKNOWN_KIND),
    ]


def test_a_slip_is_not_also_called_missing() -> None:
    (error,) = errors("kind: Host\nname: a\nadress: x\nplatform: linux\n")
    assert (error.field, error.nearest) == ("adress", "address")


def test_a_key_twice_is_an_error_and_the_rest_is_checked() -> None:
    found = errors("kind: Host\nname: a\naddress: x\naddress: y\nplatform: promox\n")
    assert [(error.code, error.place.line) for error in found] == [(Code.TWICE, 4), (Code.VALUE, 5)]
    assert found[0].also[0].line == 3


def test_a_name_twice_names_both_places() -> None:
    found = errors(host(), host())
    assert [(str(e.place), [str(p) for p in e.also]) for e in found] == [("1.yaml:2", ["0.yaml:2"])]


def test_nobody_complains_about_what_a_broken_file_may_define() -> None:
    found = errors("kind: Host\nname: kpro5\n\tbad: tab\n", container(on="kpro5"))
    assert [error.code for error in found] == [Code.SYNTAX]
    found = errors("kind: Host\nname: kpro5\n", container(on="kpro5"), container(130, on="kpro6"))
    assert [(error.code, error.says) for error in found if error.code is not Code.MISSING] == [
        (Code.NOT_FOUND, "cannot find a host called kpro6")
    ]


def test_json_has_every_key_and_no_secret() -> None:
    with pytest.raises(SpecErrors) as caught:
        load({"a.yaml": b"kind: Host\nname: a\naddress: hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ\nplatform: linux\n"})
    assert caught.value.as_json() == {
        "errors": [
            {
                "file": "a.yaml",
                "line": 3,
                "column": 10,
                "object": "Host/a",
                "field": "address",
                "code": "secret",
                "message": "cannot have a secret written out in a spec",
                "found": None,
                "allowed": "{secret: NAME}, with NAME under Fleet.secrets",
                "nearest": None,
                "next": "put it in a file on the controller's machine and name that file under Fleet.secrets; "
                "as it was written here, replace the secret itself, too",
                "see_also": [],
            }
        ]
    }


# Broken files


def frozen(reading: Reading) -> set[str]:
    return {str(ref) for ref in reading.frozen}


def test_a_broken_file_is_read_as_it_was_and_frozen() -> None:
    good = {"h.yaml": documents(host()), "c.yaml": documents(container(), container(130))}
    broken = {**good, "c.yaml": b"kind: Container\nname: ct131\nid: [\n"}
    reading = read(broken, last_good=good)
    assert {str(one.ref) for one in reading.specs} == {"Host/kpro5", "Container/ct129", "Container/ct130"}
    assert (reading.failed, reading.unparsed) == ({"c.yaml"}, {"c.yaml"})
    assert frozen(reading) == {"Container/ct129", "Container/ct130"}
    assert not reading.all_frozen


def test_a_file_that_cannot_be_read_is_frozen_too() -> None:
    good = {"h.yaml": documents(host()), "c.yaml": documents(container())}
    reading = read({**good, "c.yaml": PermissionError(13, "Permission denied")}, last_good=good)
    assert [(str(e.place), e.found) for e in reading.errors] == [("c.yaml:1", "permission denied")]
    assert (frozen(reading), reading.unparsed) == ({"Container/ct129"}, {"c.yaml"})
    assert "ct129" in reading.specs.containers


def test_without_a_memory_its_objects_are_not_taken_for_orphans() -> None:
    reading = read({"h.yaml": documents(host()), "c.yaml": documents(container(more="stat: x\n"))})
    assert [str(one.ref) for one in reading.specs] == ["Host/kpro5"]
    assert frozen(reading) == {"Container/ct129"}
    assert reading.unparsed == frozenset()


def test_an_object_deleted_from_a_good_file_is_forgotten() -> None:
    good = {"c.yaml": documents(container(), container(130)), "h.yaml": documents(host())}
    reading = read({**good, "c.yaml": documents(container())}, last_good=good)
    assert (reading.errors, frozen(reading)) == ((), set())
    assert "ct130" not in reading.specs.containers


def test_a_broken_fleet_keeps_its_defaults() -> None:
    fleet = b"kind: Fleet\ndefaults: {Container: {passthrough: dev}}\n"
    good = {"c.yaml": documents(container()), "f.yaml": fleet, "h.yaml": documents(host())}
    reading = read({**good, "f.yaml": b"kind: Fleet\ndefault: {}\n"}, last_good=good)
    assert reading.specs.containers["ct129"].passthrough == "dev"
    assert (frozen(reading), reading.all_frozen) == (set(), False)


@pytest.mark.parametrize("fleet", [b"kind: Fleet\ndefault: {}\n", b"kind: [\n", b"", b"kind: Flet\n"])
def test_without_the_fleet_nobody_knows_what_an_object_means(fleet: bytes) -> None:
    reading = read({"f.yaml": fleet, "h.yaml": documents(host())})
    assert (frozen(reading), reading.all_frozen) == ({"Host/kpro5"}, True)


def test_a_broken_file_beside_the_fleet_is_no_danger_to_it() -> None:
    reading = read({"f.yaml": b"kind: Fleet\n", "h.yaml": documents(host()), "x.yaml": b"kind: [\n"})
    assert (frozen(reading), reading.all_frozen) == (set(), False)


def test_a_wrong_default_freezes_what_it_goes_into() -> None:
    reading = read(
        {"f.yaml": b"kind: Fleet\ndefaults: {Host: {platform: promox}}\n", "h.yaml": b"kind: Host\nname: a\n"}
    )
    assert frozen(reading) == {"Host/a"}
    assert reading.failed == {"f.yaml", "h.yaml"}


def test_a_second_definition_elsewhere_leaves_the_first_as_it_was() -> None:
    good = {"a.yaml": documents(host()), "b.yaml": documents(container())}
    reading = read({**good, "c.yaml": documents(container(more="state: stopped\n"))}, last_good=good)
    assert reading.specs.containers["ct129"].state == "running"
    assert frozen(reading) == {"Container/ct129"}


def test_a_second_fleet_leaves_the_first_as_it_was() -> None:
    good = {"b.yaml": b"kind: Fleet\npolicy: {mode: enforce}\n", "h.yaml": documents(host())}
    reading = read({**good, "a.yaml": b"kind: Fleet\n"}, last_good=good)
    assert reading.specs.hosts["kpro5"].policy.mode is Mode.ENFORCE
    assert not reading.all_frozen


def test_objects_that_contradict_each_other_are_frozen() -> None:
    reading = read(
        {"a.yaml": documents(host(), container(), container(130).replace("id: 130", "id: 129"), container(131))}
    )
    assert frozen(reading) == {"Container/ct129", "Container/ct130"}
    assert "ct131" in reading.specs.containers


# Digests


def digest(text: str) -> str:
    return specs(host(), text).digest_of(Ref("Container", "ct129"))


def test_a_digest_is_of_the_meaning() -> None:
    plain = digest(container())
    assert plain == digest("# how it is laid out\nkind: Container\nid: '129'\nhost: kpro5\n\nname: ct129\n")
    assert plain == digest(container(more="state: running\npassthrough: keep\npolicy: {}\nmounts: []\n"))
    assert plain == digest(container(more="renamed_from: ct100\n"))
    assert plain != digest(container(more="state: stopped\n"))
    assert plain != digest(container(more="gpus: []\n"))


def test_a_digest_does_not_change_from_release_to_release() -> None:
    # Whoever changes this value makes a release that finds every object changed.
    assert digest(container(more="state: stopped\nmounts: [{target: /shared, when_missing: drop}]\n")) == (
        "c6a27a7d679275add53adcc2770f5ea5d279cc09b13d492fa20e8f5002dbb7e0"
    )


def test_a_digest_of_nothing() -> None:
    with pytest.raises(KeyError):
        load({}).digest_of(Ref("Container", "ct129"))


def test_objects_can_be_made_without_a_file() -> None:
    made = Specs(
        hosts={"a": Host(name="a", address="10.0.0.1", platform="proxmox")},  # type: ignore[arg-type]
        containers={"c": Container(name="c", id=100, host="a")},
    )
    assert Ref("Container", "c") in made
    assert made.get(Ref("Container", "x")) is None
    assert made.get(Ref("Nothing", "c")) is None


@pytest.mark.parametrize("text", ["", "Container", "/", "Container/", "/ct129"])
def test_no_ref(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        Ref.parse(text)


def test_ref() -> None:
    assert str(Ref.parse("Container/ct129")) == "Container/ct129"

"""What holds for every input."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.spec import model
from controller.spec.load import Reading, load, read
from controller.spec.policy import Permission
from controller.spec.values import Capability

EXAMPLE = [path.read_bytes() for path in sorted((Path(__file__).parent / "golden").glob("*.yaml"))]
EXAMPLE += [p.read_bytes() for p in sorted((Path(__file__).parents[2] / "specs" / "example").rglob("*.yaml"))]
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def is_sound(reading: Reading, texts: dict[str, bytes]) -> None:
    """Errors point into their files, and what failed is not in the specs."""
    for error in reading.errors:
        lines = texts[error.place.file].count(b"\n") + texts[error.place.file].count(b"\r") + 1
        assert error.place.line >= 1
        assert error.place.column >= 1
        # NEL and the Unicode separators end lines for YAML, too
        breaks = sum(texts[error.place.file].count(mark.encode()) for mark in ("\x85", "\u2028", "\u2029"))
        assert error.place.line <= lines + breaks
        assert error.says.startswith("cannot")
        assert error.text()
        json.dumps(error.as_json(), allow_nan=False).encode()
    assert reading.failed <= texts.keys()
    assert not {place.file for place in reading.specs.places.values()} & reading.failed
    for one in reading.specs:
        assert reading.specs.digest_of(one.ref)


@unhurried
@given(st.binary(max_size=400))
def test_no_bytes_crash_it(data: bytes) -> None:
    texts = {"a.yaml": data}
    is_sound(read(texts), texts)


@unhurried
@given(st.text(alphabet="kind: HostaFle\n-[]{},:&*!|>'\"%@`#?~0\t\\u<=. ", max_size=200))
def test_no_yaml_crashes_it(text: str) -> None:
    texts = {"a.yaml": text.encode()}
    is_sound(read(texts), texts)


@unhurried
@given(st.sampled_from(EXAMPLE), st.data())
def test_no_edit_crashes_it(text: bytes, data: st.DataObject) -> None:
    """Cut, double and overwrite pieces of real files, as people and disks do."""
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 60)))
        piece = data.draw(
            st.sampled_from([b"", text[start:end] * 2, b"\t", b"\n", b": ", b"[", b"~", b"\xff", b"*a", b"- "])
        )
        text = text[:start] + piece + text[end:]
    texts = {"a.yaml": text}
    is_sound(read(texts), texts)


words = st.sampled_from(["null", "true", "no", "1e7", "0", "", "a", "4f:00.0", "20m", "auto", "all", ">=1GiB", "{}"])
fields = sorted({name for one in vars(model).values() for name in getattr(one, "model_fields", ())})
tree = st.recursive(
    words,
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.sampled_from([*fields, "Host", "Container", "x"]), below, max_size=5)
    ),
    max_leaves=25,
)


@unhurried
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Fleet", "Host", "Container", "ModelServer"]),
            st.dictionaries(st.sampled_from(fields), tree),
        ),
        max_size=4,
    )
)
def test_no_shape_of_the_right_words_crashes_it(documents: list[tuple[str, dict[str, Any]]]) -> None:
    text = "\n---\n".join(json.dumps({**fields, "kind": kind}) for kind, fields in documents)
    texts = {"a.yaml": text.encode() or b"#"}
    is_sound(read(texts), texts)


# Round trips

names = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
commits = st.from_regex(r"[0-9a-f]{40}", fullmatch=True)
paths = st.from_regex(r"/[a-z]{1,8}(/[a-z]{1,8})?", fullmatch=True)
versions = st.sampled_from(["0.5.11", "0.10", "1.0", "2.0rc1"])
texts_of_flags = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), max_size=12)
gpu_ids = st.from_regex(r"0000:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", fullmatch=True)
jsons: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts_of_flags,
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(texts_of_flags.filter(lambda k: k != "<<"), below, max_size=3)
    ),
    max_leaves=6,
)
windows = st.builds(
    model.Window,
    cron=st.sampled_from(["0 2 * * SUN", "*/5 * * * *", "0 0 1 1 *"]),
    duration=st.integers(1, 10**8).map(lambda n: timedelta(seconds=n)),
    timezone=st.sampled_from(["Europe/Berlin", "UTC"]),
)
policies = st.builds(
    model.Policy,
    mode=st.sampled_from(model.Mode),
    allow=st.lists(st.sampled_from(Permission), unique=True).map(tuple),
    windows=st.lists(windows, max_size=2).map(tuple),
    strategy=st.sampled_from(model.Strategy),
    rollback=st.booleans(),
)
selectors = st.builds(
    model.GpuSelector,
    count=st.integers(0, 64),
    memory=st.none() | st.integers(1, 2**45),
    model=st.none() | names,
    compute_capability=st.none() | st.builds(Capability, st.integers(1, 20), st.integers(0, 9), st.booleans()),
    shared=st.booleans(),
) | st.builds(model.GpuSelector, devices=st.lists(gpu_ids, unique=True, max_size=4).map(tuple), shared=st.booleans())
containers = st.builds(
    model.Container,
    name=names,
    id=st.integers(100, 999_999_999),
    host=names,
    state=st.sampled_from(model.State),
    gpus=st.none() | selectors,
    passthrough=st.sampled_from(model.Passthrough),
    mounts=st.lists(st.builds(model.Mount, target=paths), unique_by=lambda m: m.target, max_size=3).map(tuple),
    policy=policies,
)
servers = st.builds(
    model.ModelServer,
    name=names,
    container=names,
    state=st.sampled_from(model.ServerState),
    gpus=st.just("all") | st.lists(st.integers(0, 15) | gpu_ids, unique=True, max_size=4).map(tuple),
    model=st.builds(model.Weights, repo=st.just("Q/a"), revision=commits, directory=paths),
    engine=st.builds(model.Engine, name=names, version=versions, requirements=st.just(("numpy==2.2.1",))),
    serve=st.builds(
        model.Serve,
        port=st.integers(1, 65535),
        tensor_parallel=st.just("auto") | st.integers(1, 8),
        flags=st.dictionaries(
            names,
            st.just(True)
            | texts_of_flags
            | st.lists(texts_of_flags, min_size=1, max_size=3).map(tuple)
            | st.dictionaries(texts_of_flags.filter(lambda k: k not in ("<<", "secret")), jsons, max_size=3),
            max_size=3,
        ),
        env=st.dictionaries(names, texts_of_flags | st.builds(model.SecretRef, secret=names), max_size=3),
    ),
    checks=st.builds(
        model.Checks,
        startup_budget=st.integers(1, 10**8).map(lambda n: timedelta(seconds=n)),
        min_context=st.none() | st.integers(1, 10**7),
        tokens_per_second=st.none() | st.builds(model.Range, at_least=st.floats(0, 1e6)),
    ),
    policy=policies,
)


def there_and_back(one: Any, get: Callable[[model.Specs], Any]) -> None:
    """Write an object as JSON, which is YAML, and read it again, beside what it stands on."""
    text = json.dumps(one.model_dump(mode="json"), ensure_ascii=False)
    on = getattr(one, "container", None)
    host = one.host if on is None else "h"
    below = [{"kind": "Host", "name": host, "address": "192.0.2.1", "platform": "proxmox"}]
    below += [{"kind": "Container", "name": on, "id": 100, "host": host}] if on is not None else []
    reading = read({"a.yaml": text.encode(), "b.yaml": "\n---\n".join(map(json.dumps, below)).encode()})
    # It may refer to more that is not there, or not fit those two; nothing may be wrong with itself.
    assert {error.code.value for error in reading.errors} <= {"not-found", "conflict"}
    assert get(reading.specs) == one
    assert reading.specs.digest_of(one.ref) == model.Specs(**{_FIELD[one.KIND]: {one.name: one}}).digest_of(one.ref)


_FIELD = {model.Kind.CONTAINER: "containers", model.Kind.MODEL_SERVER: "servers"}


@unhurried
@given(containers)
def test_a_container_reads_back_as_it_was(one: model.Container) -> None:
    there_and_back(one, lambda specs: specs.containers[one.name])


@unhurried
@given(servers)
def test_a_server_reads_back_as_it_was(one: model.ModelServer) -> None:
    there_and_back(one, lambda specs: specs.servers[one.name])


@settings(unhurried, max_examples=10)
@given(st.permutations(range(len(EXAMPLE))))
def test_the_order_of_files_does_not_matter_to_what_fails(order: list[int]) -> None:
    texts = {f"{n}.yaml": EXAMPLE[n] for n in range(len(EXAMPLE))}
    again = {name: texts[name] for name in (f"{n}.yaml" for n in order)}
    assert read(texts) == read(again)


def test_load_and_read_agree() -> None:
    good = {"a.yaml": b"kind: Host\nname: a\naddress: b\nplatform: linux\n"}
    assert load(good) == read(good).specs

"""Spec files to the objects that they want, and everything that is wrong with them at once.

Pure: texts come in, nothing is read. A file with an error anywhere in it is not believed: ``Reading`` says which
objects it was last known to define, so that they can be left alone until it is put right.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from controller.spec.across import Known, Unseen, check_together
from controller.spec.base import Model
from controller.spec.documents import Entries, Hole, Items, Node, Scalar, read_documents, unread, walk
from controller.spec.errors import Code, SpecError, in_order, render, shortened, written
from controller.spec.literals import is_literal, is_literal_name, looks_like_secret, names_secret
from controller.spec.model import Container, Fleet, Host, Kind, ModelServer, Object, Place, Specs
from controller.spec.ref import Ref
from controller.spec.values import Problem, Text, is_name, nearest

MODELS: Mapping[str, type[Host] | type[Container] | type[ModelServer]] = {
    Kind.HOST.value: Host,
    Kind.CONTAINER.value: Container,
    Kind.MODEL_SERVER.value: ModelServer,
}
KINDS = ("Fleet", *MODELS)

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Reading:
    """What could be made of spec files of which some may be broken."""

    specs: Specs
    """What the good files define, and what the failed ones did when they were last good."""
    errors: tuple[SpecError, ...] = ()
    failed: frozenset[str] = frozenset()
    """The files that are not believed."""
    unparsed: frozenset[str] = frozenset()
    """Of these, the ones that could not be read to their end, so that nobody knows what else they define."""
    frozen: frozenset[Ref] = frozenset()
    """The objects that nothing may be done to: those of failed files, and those that contradict each other.

    Some may be in no spec at all: they are named in a failed file that was never good. They are not orphans.
    """
    all_frozen: bool = False
    """True when nobody can say what the Fleet's defaults are, so that no object's meaning is certain."""


CheckServer = Callable[[ModelServer, int | None], Iterable[Problem]]


def _nothing_against(server: ModelServer, gpus: int | None) -> Iterable[Problem]:
    """Stand for engines that nobody knows."""
    del server, gpus
    return ()


class SpecErrors(Exception):  # noqa: N818 - it carries many
    """Spec files have errors; its text lists them all."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(render(reading.errors))
        self.errors = reading.errors
        self.partial = reading

    def as_json(self) -> dict[str, Any]:
        """Give all errors as JSON."""
        return {"errors": [error.as_json() for error in self.errors]}


def is_spec_file(name: str) -> bool:
    """Say whether a file of the spec directory holds specs; ``*.sim.yaml`` are simulated fleets."""
    return name.endswith(".yaml") and not name.endswith(".sim.yaml")


def load(
    texts: Mapping[str, bytes | OSError],
    *,
    clusters: Mapping[str, str] | None = None,
    check_server: CheckServer = _nothing_against,
) -> Specs:
    """Read all spec files, by name.

    Args:
        texts: what is in each file, or why it could not be read; files that hold no specs are left out.
        clusters: of Proxmox hosts, the names of their clusters as far as they are known. Two hosts are taken for one
            cluster's unless both are known and differ.
        check_server: what its engine has against a server that has so many GPUs (None: the specs do not say).

    Raises:
        SpecErrors: something is wrong, with all errors and with what can be said all the same.
    """
    reading = read(texts, clusters=clusters, check_server=check_server)
    if reading.errors:
        raise SpecErrors(reading)
    return reading.specs


def read(
    texts: Mapping[str, bytes | OSError],
    *,
    last_good: Mapping[str, bytes] | None = None,
    clusters: Mapping[str, str] | None = None,
    check_server: CheckServer = _nothing_against,
) -> Reading:
    """Read all spec files as ``load`` does, and make the best of broken ones.

    For a file that fails, its text in *last_good* is read instead, and what either of the two names is frozen.
    """
    texts = {name: text for name, text in texts.items() if is_spec_file(name)}
    first = attempt = _Attempt(texts)
    known = Known(clusters or {}, check_server)
    errors = in_order([*first.errors, *check_together(first.specs, first.locate, known, first.unseen)])
    frozen, set_aside, had_fleet = set(first.frozen), set(first.failed), set(first.may_hold_fleet)
    now, good = dict(texts), last_good or {}
    while attempt.failed:
        # A file that is as it was when it was good may only have got into a contradiction with a changed one.
        changed = {name for name in attempt.failed if now[name] != good.get(name)}
        for name in changed or attempt.failed:
            if name in changed and name in good:
                now[name] = good[name]
            else:
                del now[name]
        attempt = _Attempt(now)
        set_aside |= attempt.failed
        frozen |= attempt.frozen
    fleet_lost = not attempt.has_fleet and bool(had_fleet - now.keys())
    contradictions = check_together(attempt.specs, attempt.locate, known, attempt.unseen)
    frozen.update(ref for error in (*errors, *contradictions) for ref in error.concerns)
    frozen.update(r for r, place in attempt.specs.places.items() if fleet_lost or place.file in set_aside)
    specs, homeless = _without_homeless(attempt.specs)
    frozen |= homeless
    return Reading(
        specs,
        errors,
        failed=frozenset(first.failed),
        unparsed=frozenset(first.unparsed),
        frozen=frozenset(frozen),
        all_frozen=fleet_lost,
    )


def _without_homeless(specs: Specs) -> tuple[Specs, set[Ref]]:
    """Leave out what stands on something that no believed file defines: nobody can judge it. Also who that is."""
    containers = {name: each for name, each in specs.containers.items() if each.host in specs.hosts}
    servers = {
        name: each
        for name, each in specs.servers.items()
        if (each.container in containers if each.container is not None else each.host in specs.hosts)
    }
    kept = dataclasses.replace(specs, containers=containers, servers=servers)
    return kept, {obj.ref for obj in specs if obj.ref not in kept}


@dataclass(frozen=True)
class _Document:
    """One document, before anybody has looked at its fields."""

    file: str
    node: Entries
    kind: str
    name: str

    @property
    def ref(self) -> Ref | None:
        """Its kind and name, if it has a name that can be one."""
        usable = self.kind in MODELS and is_name(self.name) and not looks_like_secret(self.name)
        return Ref(self.kind, self.name) if usable else None


class _Attempt:
    """One look at all files: the objects without errors, and the errors."""

    def __init__(self, texts: Mapping[str, bytes | OSError]) -> None:
        self.errors: list[SpecError] = []
        self.failed: set[str] = set()
        self.nodes: dict[Ref, Entries] = {}
        self.unparsed: set[str] = set()
        self._unread: set[str] = set()  # these, and files with objects that cannot be told
        documents = [document for name in sorted(texts) for document in self._documents(name, texts[name])]
        fleet, defaults = self._fleet([d for d in documents if d.kind == "Fleet"])
        named = [d for d in documents if d.kind != "Fleet"]
        self._each_name_once(named)
        objects = [(d.file, found) for d in named if (found := self._object(d, defaults))]
        self.failed |= {place.file for error in self.errors for place in (error.place, *error.also)}
        self.frozen = {d.ref for d in named if d.ref and d.file in self.failed}
        fleets = {d.file for d in documents if d.kind == "Fleet"}
        self.has_fleet = bool(fleets)
        self.may_hold_fleet = fleets & self.failed if fleets else self._unread
        self.unseen = Unseen(
            objects=None if self._unread else frozenset(self.frozen),
            fleet=bool(self.may_hold_fleet),
        )
        good = {one.ref: one for file, one in objects if file not in self.failed}
        places = {d.ref: d.node.place for d in named if d.ref in good and d.ref}
        self.specs = Specs(
            fleet=fleet,
            hosts={o.name: o for o in good.values() if isinstance(o, Host)},
            containers={o.name: o for o in good.values() if isinstance(o, Container)},
            servers={o.name: o for o in good.values() if isinstance(o, ModelServer)},
            places=places,
        )
        self._fleet_node = next((d.node for d in documents if d.kind == "Fleet"), None)

    def locate(self, ref: Ref | None, path: Path) -> Place:
        """Say where a field of an object stands, or of the Fleet for None; the nearest thing above it if nowhere."""
        node = self._fleet_node if ref is None else self.nodes[ref]
        return _find(node, path)[1] if node else Place("", 1)

    def _documents(self, file: str, data: bytes | OSError) -> Iterator[_Document]:
        text = unread(file, data) if isinstance(data, OSError) else read_documents(file, data)
        self.errors += text.errors
        if not text.whole:
            self.unparsed.add(file)
            self._unread.add(file)
        for node in text.documents:
            match node:
                case Scalar(value=None) | Hole():
                    continue
                case Entries():
                    document = _Document(file, node, _scalar(node, "kind"), _scalar(node, "name"))
                    self._look_for_literals(document)
                    if self._kind_is_known(document):
                        if document.kind != "Fleet" and not document.ref:
                            self._unread.add(file)
                        yield document
                case _:
                    self.errors.append(
                        SpecError(
                            node.place,
                            Code.SYNTAX,
                            "cannot take this document for an object",
                            found=_what(node),
                            allowed="a mapping that begins with kind:",
                            todo="begin each object with kind: and put --- between two",
                        )
                    )

    def _kind_is_known(self, document: _Document) -> bool:
        node = document.node
        if document.kind in KINDS:
            return True
        given = node.values.get("kind")
        guess = nearest(document.kind, KINDS) if document.kind else _likely_kind(node)
        self.errors.append(
            SpecError(
                given.place if given else node.place,
                Code.UNKNOWN_KIND,
                "cannot tell the kind of this object" if not document.kind else "cannot use this kind",
                field="kind",
                found=_shown(given, ("kind",)) if given else "",
                allowed=", ".join(KINDS),
                nearest=guess,
                todo=f"write kind: {guess}" if guess else "write one of these as kind:",
            )
        )
        self._unread.add(document.file)  # what it is meant to define cannot be said
        return False

    def _look_for_literals(self, document: _Document) -> None:
        for path, scalar in walk(document.node):
            key = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
            text = scalar.value or ""
            named = path[-1:] in (("secret",), ("from_file",), ("from_env",))  # where a secret's name belongs
            if is_literal_name(text) if named else is_literal(key, text):
                self.errors.append(_literal(document, path, scalar.place))
        for path, place in _keys(document.node):
            if looks_like_secret(str(path[-1])):
                self.errors.append(_literal(document, path, place))

    def _fleet(self, documents: list[_Document]) -> tuple[Fleet, Mapping[str, Entries]]:
        if len(documents) > 1:
            first, *others = (d.node.place for d in documents)
            self.errors.append(
                SpecError(
                    others[-1],
                    Code.TWICE,
                    "cannot have more than one Fleet",
                    also=(first, *others[:-1]),
                    todo="put everything into one of them",
                )
            )
        if not documents:
            return Fleet(), {}
        document = documents[0]
        node = document.node
        found, errors = _validate(Fleet, node, None)
        self.errors += errors
        for another in documents[1:]:
            self.errors += _validate(Fleet, another.node, None)[1]
        policy = node.values.get("policy")
        given = node.values.get("defaults")
        defaults: dict[str, Entries] = {}
        for kind, model in MODELS.items():
            default = given.values.get(kind) if isinstance(given, Entries) else None
            common = Entries(node.place, {"policy": policy}, {"policy": node.keys["policy"]}) if policy else None
            if isinstance(default, Entries):
                self.errors += _check_defaults(model, default, kind)
            usable = [part for part in (common, default) if isinstance(part, Entries)]
            if usable:
                defaults[kind] = usable[0] if len(usable) == 1 else _merge(*usable)
        return found or Fleet(), defaults

    def _each_name_once(self, documents: Iterable[_Document]) -> None:
        seen: dict[Ref, Place] = {}
        for document in documents:
            if not document.ref:
                continue
            place = _find(document.node, ("name",))[1]
            if document.ref in seen:
                self.errors.append(
                    SpecError(
                        place,
                        Code.TWICE,
                        f"cannot have two objects called {document.ref}",
                        document.ref,
                        "name",
                        also=(seen[document.ref],),
                        todo="rename one of them, or remove it",
                    )
                )
            seen.setdefault(document.ref, place)

    def _object(self, document: _Document, defaults: Mapping[str, Entries]) -> Object | None:
        node = document.node
        if default := defaults.get(document.kind):
            node = _merge(default, node)
        found, errors = _validate(MODELS[document.kind], node, document.ref)
        self.errors += errors
        if errors:
            self.failed.add(document.file)  # the errors may be in the Fleet's defaults, in another file
        if found is None or document.ref is None:
            return None
        self.nodes.setdefault(found.ref, node)
        return found


# Nodes


def _scalar(node: Entries, key: str) -> str:
    value = node.values.get(key)
    return str(value.value) if isinstance(value, Scalar) and value.value is not None else ""


def _likely_kind(node: Entries) -> str:
    """Guess the kind of a document that does not say it, from the fields that only one kind has."""
    guesses = [kind for kind, model in MODELS.items() if set(node.values) <= set(model.model_fields)]
    return guesses[0] if len(guesses) == 1 else ""


def _merge(base: Entries, over: Entries) -> Entries:
    """Lay *over* on *base*: mappings merge, the rest replaces, and nothing (null) takes away what *base* gave."""
    values, keys = dict(base.values), dict(base.keys)
    for key, node in over.values.items():
        below = values.pop(key, None)
        keys[key] = over.keys[key]
        if isinstance(below, Entries) and isinstance(node, Entries):
            values[key] = _merge(below, node)
        elif below is None or not (isinstance(node, Scalar) and node.value is None):
            values[key] = node
    return Entries(over.place, values, keys)


def _plain(node: Node) -> Any:
    """Give a node as what pydantic takes; what was refused already becomes None."""
    match node:
        case Scalar():
            return node.value
        case Items():
            return [_plain(item) for item in node.items]
        case Entries():
            return {key: _plain(value) for key, value in node.values.items()}
        case Hole():
            return None


def _keys(node: Node, path: Path = ()) -> Iterator[tuple[Path, Place]]:
    if isinstance(node, Entries):
        for key, value in node.values.items():
            yield (*path, key), node.keys[key]
            yield from _keys(value, (*path, key))
    if isinstance(node, Items):
        for number, item in enumerate(node.items):
            yield from _keys(item, (*path, number))


def _find(node: Node, path: Path) -> tuple[Node, Place, Path]:
    """Follow a path as far as it goes; parts that are no part of the file (pydantic's tags) are passed over.

    Returns:
        The node, its place, and the path that leads there.
    """
    place, taken = node.place, list[str | int]()
    for part in path:
        if isinstance(node, Entries) and isinstance(part, str) and part in node.values:
            node = node.values[part]
        elif isinstance(node, Items) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
        else:
            continue
        place = node.place
        taken.append(part)
    return node, place, tuple(taken)


# Words


def _what(node: Node) -> str:
    match node:
        case Scalar(value=None):
            return "nothing"
        case Items():
            return "a list"
        case Entries():
            return "a mapping"
        case _:
            return "text"


def _shown(node: Node, path: Path) -> str:
    """Say what stands somewhere, unless it may be a secret."""
    if not isinstance(node, Scalar) or node.value is None:
        return _what(node)
    text = str(node.value)
    private = any(isinstance(part, str) and (names_secret(part) or part == "env") for part in path)
    if private or looks_like_secret(text):
        return "a value that is not shown here"
    return f'"{shortened(text)}"'


def _literal(document: _Document, path: Path, place: Place) -> SpecError:
    return SpecError(
        place,
        Code.SECRET,
        "cannot have a secret written out in a spec",
        document.ref,
        written(path),
        allowed="{secret: NAME}, with NAME under Fleet.secrets",
        todo="put it in a file on the controller's machine and name that file under Fleet.secrets; "
        "as it was written here, replace the secret itself, too",
    )


# Validation

_M = TypeVar("_M", bound=Model)


def _validate(model: type[_M], node: Entries, ref: Ref | None) -> tuple[_M | None, list[SpecError]]:
    """Make an object out of a document, or errors with their places."""
    try:
        found = model.model_validate(_plain(node))
    except ValidationError as invalid:
        return None, list(_explain(model, node, ref, invalid.errors(include_url=False)))
    return (None if _has_hole(node) else found), []


def _check_defaults(model: type[Model], node: Entries, kind: str) -> Iterator[SpecError]:
    """Check what Fleet.defaults gives to a kind, which need not be a whole object."""
    own = {name: f"each {kind} has its own" for name in ("kind", "name", "renamed_from") if name in node.values}
    for name, says in own.items():
        field = f"defaults.{kind}.{name}"
        yield SpecError(node.keys[name], Code.VALUE, f"cannot give a default for {name}", None, field, allowed=says)
    try:
        model.model_validate({**{k: v for k, v in _plain(node).items() if k not in own}, "name": "any"})
    except ValidationError as invalid:
        # What is missing, and what fields have to agree on, is for the whole object to show.
        partial = [
            error
            for error in invalid.errors(include_url=False)
            if error["type"] != "missing"
            and not (error["type"] == "spec" and isinstance(_find(node, error["loc"])[0], Entries))
        ]
        yield from _explain(model, node, None, partial, above=f"defaults.{kind}.")


def _has_hole(node: Node) -> bool:
    match node:
        case Items():
            return any(_has_hole(item) for item in node.items)
        case Entries():
            return any(_has_hole(value) for value in node.values.values())
        case _:
            return isinstance(node, Hole)


def _explain(
    model: type[Model], node: Entries, ref: Ref | None, errors: Iterable[ErrorDetails], above: str = ""
) -> Iterator[SpecError]:
    """Put pydantic's errors in words, with their places."""
    errors = list(errors)
    slips = {
        (*error["loc"][:-1], nearest(str(error["loc"][-1]), _fields_at(model, error["loc"][:-1])))
        for error in errors
        if error["type"] == "extra_forbidden"
    }
    for error in errors:
        found, place, path = _find(node, error["loc"])
        if isinstance(found, Hole) or (error["type"] == "missing" and error["loc"] in slips):
            continue  # it has been said
        match error["type"]:
            case "missing":
                name = str(error["loc"][-1])
                yield SpecError(
                    place,
                    Code.MISSING,
                    f"cannot do without {name}",
                    ref,
                    above + written((*path, name)),
                    todo=f"add {name}: here, or under Fleet.defaults" if name != "name" else "add name:",
                )
            case "extra_forbidden":
                yield _unknown_field(model, node, ref, error["loc"], above)
            case "spec":
                for problem in error["ctx"]["problems"]:
                    yield _problem(node, ref, error["loc"], problem, above)
            case _:
                yield _wrong_value(found, place, ref, path, error, above)


def _unknown_field(model: type[Model], node: Entries, ref: Ref | None, loc: Path, above: str) -> SpecError:
    holder, _, path = _find(node, loc[:-1])
    key = str(loc[-1])
    fields = _fields_at(model, loc[:-1])
    guess = nearest(key, fields)
    return SpecError(
        holder.keys[key] if isinstance(holder, Entries) else holder.place,
        Code.UNKNOWN_FIELD,
        "cannot use this field: there is none of this name here",
        ref,
        above + written((*path, key)),
        allowed=", ".join(fields),
        nearest=guess,
        todo=f"write {guess}" if guess else "remove it",
    )


def _problem(node: Entries, ref: Ref | None, loc: Path, problem: Problem, above: str) -> SpecError:
    found, place, path = _find(node, (*loc, *problem.field))
    if loc and loc[-1] == "[key]":  # the name of an entry, not what stands under it
        found, place = Scalar(place, Text(str(loc[-2]))), _key_place(node, loc[:-1]) or place
    return SpecError(
        place,
        Code.VALUE,
        problem.says,
        ref,
        above + written(path),
        found=_shown(found, path) if isinstance(found, Scalar) else "",
        allowed=problem.allowed,
        nearest=problem.nearest,
        todo=problem.todo or (f"write {problem.nearest}" if problem.nearest else ""),
    )


def _wrong_value(found: Node, place: Place, ref: Ref | None, path: Path, error: ErrorDetails, above: str) -> SpecError:
    kind, context = error["type"], error.get("ctx", {})
    allowed, guess, todo = "", "", ""
    if kind in ("enum", "literal_error"):
        words = re.findall("'([^']*)'", context["expected"])
        allowed = ", ".join(words)
        if isinstance(found, Scalar) and found.value:
            guess = nearest(found.value, words)
        if kind == "literal_error" and error["loc"][-1] == "<all>":
            allowed = "all, or a list of places in the assignment (from 0), addresses or UUIDs"
    elif kind == "greater_than_equal":
        allowed = f"{context['ge']} or more"
    elif kind == "less_than_equal":
        allowed = f"{context['le']} or less"
    elif kind in _SHAPES:
        allowed = _SHAPES[kind]
        if kind == "tuple_type" and isinstance(found, Scalar) and found.value is not None:
            todo = "put it in a list: [" + _shown(found, path).strip('"') + "]"
    return SpecError(
        place,
        Code.VALUE,
        f"cannot use this as {next((part for part in reversed(path) if isinstance(part, str)), 'a document')}",
        ref,
        above + written(path),
        found=_shown(found, path),
        allowed=allowed,
        nearest=guess,
        todo=todo or (f"write {guess}" if guess else ""),
    )


_SHAPES = {
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "time_delta_type": "a length of time: 20m",
}


def _key_place(node: Entries, path: Path) -> Place | None:
    holder = _find(node, path[:-1])[0]
    return holder.keys.get(str(path[-1])) if isinstance(holder, Entries) else None


def _fields_at(model: type[Model], path: Path) -> tuple[str, ...]:
    """List the fields that the part of a model at *path* has, in the order they are declared in."""
    parts: list[type[BaseModel]] = [model]
    for name in path:
        below = [_models_in(part.model_fields[name].annotation) for part in parts if name in part.model_fields]
        parts = [found for models in below for found in models] or parts
    return tuple(dict.fromkeys(name for part in parts for name in part.model_fields))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]

"""server.environment: the server's Python environment has the pinned engine, imports, and its kernels fit the GPUs.

An environment is told by what is in it and the GPUs that it is for (``shared/environments.py``). It is built beside
those that are there and never changed afterwards: what is wanted anew is another one.
"""

from __future__ import annotations

import dataclasses
import json
import re

from controller.core.package import text
from controller.core.view import View
from controller.core.words import Block, Disruption, Drift, Effect, InSync, Layer, NotKnown, Skipped, Step, Verdict
from controller.engines import registry
from controller.facts.units import UnitFacts
from controller.facts.words import FleetFacts
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.server_environment import uv
from controller.layers.server_environment.facts import (
    SCHEMA,
    Environment,
    Environments,
    EnvironmentsHere,
    Proof,
    Proven,
    Torch,
    parse,
)
from controller.layers.server_environment.reasons import Reason
from controller.layers.server_output.facts import OutputFacts
from controller.layers.server_unit.facts import ServerUnits
from controller.layers.shared import environments, inside, jobs
from controller.layers.shared.assignment import Unassigned
from controller.layers.shared.inside import Place, Seen
from controller.layers.shared.programs import with_programs
from controller.layers.shared.server_gpus import Card, cards_of
from controller.spec.model import ModelServer, ServerState
from controller.spec.policy import Permission
from controller.spec.ref import Ref

NAME = "server.environment"
_PACKAGE = "controller.layers.server_environment"
_BUILD = with_programs(
    inside.script(_PACKAGE, "build.sh"),
    {
        "build": text(_PACKAGE, "programs/build.sh"),
        "look.py": text(_PACKAGE, "programs/look.py"),
        "read_flags.py": text("controller.engines", "programs/read_flags.py"),
    },
)
_PROVE = with_programs(inside.script(_PACKAGE, "prove.sh"), {"prove.py": text(_PACKAGE, "programs/prove.py")})
_REMOVE = inside.script(_PACKAGE, "remove.sh")


def check(view: View, server: ModelServer) -> Verdict:
    """Whether the environment is there, whole, and proven on each of the server's GPUs."""
    try:
        engine = registry.engine(server.engine.name)
    except registry.NoEngine as error:
        return _blocked(Reason.UNKNOWN_ENGINE, str(error), "correct engine.name, or install a plug-in for it")
    if not engine.manages:
        return Skipped("it is only watched")
    if server.state is ServerState.ABSENT:
        return Skipped("it is to be absent")
    if why := inside.why_not(view.specs, server):
        return Skipped(why)
    cards = cards_of(view, server)
    if isinstance(cards, Unassigned):
        return _blocked(Reason.NO_GPU, cards.message, cards.needs)
    place, ahead = inside.working_place(view, server)
    seen = inside.look(view, place, NAME, Environments)
    wanted = environments.wanted(view, server)
    if wanted.found is None or not wanted.found.whole:
        return inside.made_ahead(_missing(view, server, place, seen, wanted), ahead=ahead)
    if wanted.found.schema > SCHEMA:
        message = f"the environment of {server.name} was made by a newer release (schema {wanted.found.schema})"
        return _blocked(Reason.NEWER_SCHEMA, message, f"use that release, or remove {wanted.directory} there")
    if ahead:
        return InSync("it is proven on its cards when its container has come to them")
    return (
        _proven(view, server, place, wanted.found, cards)
        or _old(view, server, place, seen)
        or _as_wanted(view, place, seen)
    )


def _blocked(reason: Reason, message: str, needs: str) -> Drift:
    return Drift(reason, message, Block(reason, message, needs))


# What is there


def _missing(
    view: View, server: ModelServer, place: Place, seen: Seen[EnvironmentsHere], wanted: environments.Wanted
) -> Drift:
    what = f"{wanted.engine} {wanted.requirements.version}"
    here = seen.value
    other = _for_other_gpus(here, wanted) if here is not None else None
    evidence: dict[str, str] = {}
    if here is None:
        reason, message = Reason.NOT_KNOWN_YET, f"{server.name} has to have an environment with {what}"
    elif wanted.found is not None:
        reason, message = Reason.NOT_WHOLE, f"the environment of {server.name} has lost its interpreter"
    elif other is not None:
        was, now = ", ".join(other.capabilities) or "no GPU", ", ".join(wanted.capabilities) or "no GPU"
        reason = Reason.OTHER_GPUS
        message = f"the environment with {what} in {place} was built for {was}, and {server.name} has {now}"
        evidence = {"environment": other.directory, "size": _amount(other.size)}
    else:
        reason, message = Reason.NOT_BUILT, f"{server.name} has no environment with {what} in {place}"
    wheel = uv.WHEELS.get(wanted.arch)
    if wheel is None:
        return _blocked(Reason.NO_UV, f"there is no uv for {wanted.arch}", f"use a machine of {' or '.join(uv.WHEELS)}")
    step = _build(server, place, wanted, wheel, reason, certain=seen.certain)
    return jobs.drift(view, reason, message, step, evidence)


def _for_other_gpus(here: EnvironmentsHere, wanted: environments.Wanted) -> Environment | None:
    """One of the same engine and version that is for other GPUs."""
    return next(
        (
            each
            for each in here.environments
            if (each.engine, each.version) == (wanted.engine, wanted.requirements.version)
            and each.capabilities != wanted.capabilities
        ),
        None,
    )


def _proven(view: View, server: ModelServer, place: Place, found: Environment, cards: tuple[Card, ...]) -> Drift | None:
    """A drift while it is not known that the kernels run on every GPU, or is known that they do not."""
    if not cards:
        return None
    module = view.fact(place.host, "host.gpu-health", GpuFacts).module
    driver = module.version if module is not None else ""
    boot = view.fact(place.host, "world", UnitFacts).boot_id
    proofs = {card.pci: found.proof(card.uuid, driver, boot) for card in cards if card.uuid}
    for card in cards:
        said = _does_not_fit(found, card, proofs.get(card.pci))
        if said:
            message = (
                f"the kernels of {found.engine} {found.version} do not fit the {card.model} {card.pci} of {server.name}"
            )
            needs = "pin another engine.version, or another torch under engine.requirements, that has kernels for it"
            block = Block(Reason.KERNELS_DO_NOT_FIT, f"{message}: {said}", needs)
            return Drift(Reason.KERNELS_DO_NOT_FIT, message, block, {card.pci: said})
    if found.torch is None:
        return None
    # A card whose UUID nobody knows yet has no driver: it is proven when it has one.
    unproven = tuple(card for card in cards if card.uuid and proofs[card.pci] is None)
    if not unproven:
        return None
    names = ", ".join(f"{card.model} {card.pci}" for card in unproven)
    message = f"the kernels of {found.engine} {found.version} have not run yet on {names}"
    return Drift(Reason.NOT_PROVEN, message, _prove(server, place, found, unproven, driver, boot))


def _does_not_fit(found: Environment, card: Card, proof: Proven | None) -> str:
    """What says that the kernels do not run on a card; "" when nothing does."""
    if proof is not None and proof.result is not Proof.BUSY:
        return proof.said if proof.result is Proof.FAILED else ""
    if found.torch is None or card.capability is None:
        return ""
    if not found.torch.cuda:
        return f"torch {found.torch.version} is a build without CUDA"
    if found.torch.archs and not any(_runs(arch, card.capability) for arch in found.torch.archs):
        major, minor = card.capability
        return (
            f"torch {found.torch.version} has kernels for {', '.join(found.torch.archs)}, and this is sm_{major}{minor}"
        )
    return ""


_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether what was compiled for this runs there (CUDA C++ Programming Guide, binary and PTX compatibility).

    Binaries run on the same major version with a minor one as high or higher, those with an ``a`` on exactly this one;
    PTX runs on everything newer.
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        return True  # a name that we do not know proves nothing
    built = int(match[2]), int(match[3])
    if match[4] == "a":
        return built == capability
    if match[1] == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def _as_wanted(view: View, place: Place, seen: Seen[EnvironmentsHere]) -> InSync:
    """It is; a note tells of what lies there that no spec knows."""
    here = seen.value
    orphans = [each for each in here.environments if not _is_known(view, each)] if here is not None else []
    told = [f"{each.directory} in {place} is of no spec: {_amount(each.size)}" for each in orphans]
    return InSync("; ".join(told))


def _is_known(view: View, environment: Environment) -> bool:
    kind, _, name = environment.object.partition("/")
    renamed = {server.renamed_from for server in view.specs.servers.values()}
    return Ref(kind, name) in view.specs or name in renamed


# Old ones


def _old(view: View, server: ModelServer, place: Place, seen: Seen[EnvironmentsHere]) -> Drift | None:
    """A drift while the server has an environment that nothing needs any more, where its spec lets us remove it.

    What is wanted, what a unit was written for and what passed its checks last is kept.
    """
    if seen.value is None or not seen.certain or Permission.DELETE_ENVIRONMENT not in server.policy.allow:
        return None
    try:
        kept = _kept(view, place)
    except (NotKnown, registry.NoEngine):
        return None  # what others need is not known: nothing is removed, and nothing else is held up by that
    building = view.fact(place.host, "world", UnitFacts).jobs
    at_work = {job.name for job in building if job.running}
    for each in seen.value.environments:
        if each.object == str(server.ref) and each.digest not in kept and each.schema <= SCHEMA:
            message = f"{each.engine} {each.version} in {each.directory} is not needed any more: {_amount(each.size)}"
            return Drift(Reason.OLD_ENVIRONMENT, message, _remove(server, place, each.digest, each))
    for digest in seen.value.unfinished:
        if digest not in kept and _job(place, digest) not in at_work:
            message = f"a build of an environment in {place} was left, and is not needed any more"
            return Drift(Reason.OLD_ENVIRONMENT, message, _remove(server, place, digest, None))
    return None


def _kept(view: View, place: Place) -> set[str]:
    """The environments in a place that must stay. Raises NotKnown, NoEngine: it is not known of every server there."""
    kept = {
        environments.wanted(view, other).digest
        for other in view.specs.servers.values()
        if inside.place_of(view.specs, other) == place and _has_environment(other)
    }
    units = view.fact(place.host, "server.unit", ServerUnits).of(place.vmid)
    judged = view.fact(place.host, "server.output", OutputFacts).of(place.vmid)
    for unit in units.units if units is not None else ():
        if unit.arguments is not None:
            kept.add(unit.arguments.env_digest)
    for each in judged or ():
        if each.good is not None:
            kept.add(each.good.environment)
        if each.output is not None:
            kept.add(each.output.environment)
    return kept


def _has_environment(server: ModelServer) -> bool:
    return server.state is not ServerState.ABSENT and registry.engine(server.engine.name).manages


# What is done


def _job(place: Place, digest: str) -> str:
    return f"environment-{digest}-{place.argument}" if place.vmid is not None else f"environment-{digest}"


def _build(
    server: ModelServer, place: Place, wanted: environments.Wanted, wheel: uv.Wheel, reason: Reason, *, certain: bool
) -> Step:
    needs = wanted.requirements
    order = {
        "schema": SCHEMA,
        "object": str(server.ref),
        "engine": wanted.engine,
        "version": needs.version,
        "distribution": needs.distribution,
        "module": needs.module,
        "capabilities": list(wanted.capabilities),
        "requirements": list(needs.lines),
    }
    made = Environment(
        digest=wanted.digest,
        object=str(server.ref),
        engine=wanted.engine,
        version=needs.version,
        python=needs.python,
        arch=wanted.arch,
        capabilities=wanted.capabilities,
        requirements=needs.lines,
        torch=Torch("", "?") if needs.uses_torch else None,
        flags=wanted.flags,
    )
    engine = server.engine
    gpus = f" for {', '.join(wanted.capabilities)}" if wanted.capabilities else ""
    return Step(
        action="build-environment",
        object=server.ref,
        layer=NAME,
        reason=reason,
        summary=f"build an environment with {wanted.engine} {needs.version}{gpus} in {place}"
        + ("" if certain else ", unless it is there"),
        hosts=(place.host,),
        script=_BUILD,
        args=(
            place.argument,
            wanted.digest,
            uv.VERSION,
            wheel.name,
            wheel.sha256,
            needs.python,
            "yes" if needs.uses_torch else "no",
            engine.index_url or "",
            engine.prerelease.value if engine.prerelease is not None else "",
            "\n".join(engine.wheels),
            "\n".join(needs.lines),
            "\n".join(wanted.overrides),
        ),
        stdin=json.dumps(order).encode(),
        timeout=4 * 3600.0,
        job=_job(place, wanted.digest),
        provisional=not certain,
        effect=_effect(place, made),
    )


def _prove(
    server: ModelServer, place: Place, found: Environment, cards: tuple[Card, ...], driver: str, boot: str
) -> Step:
    proofs = (*found.proofs, *(Proven(card.uuid, Proof.PASSED, "", driver, boot) for card in cards))
    return Step(
        action="prove-environment",
        object=server.ref,
        layer=NAME,
        reason=Reason.NOT_PROVEN,
        summary=f"run kernels of {found.engine} {found.version} on {', '.join(card.pci for card in cards)} in {place}",
        hosts=(place.host,),
        script=_PROVE,
        args=(place.argument, found.digest, driver, boot, *(card.uuid for card in cards)),
        timeout=1800.0,
        effect=_effect(place, dataclasses.replace(found, proofs=proofs)),
    )


def _remove(server: ModelServer, place: Place, digest: str, found: Environment | None) -> Step:
    def without(here: EnvironmentsHere | None) -> EnvironmentsHere:
        here = here or EnvironmentsHere()
        return dataclasses.replace(
            here,
            environments=tuple(each for each in here.environments if each.digest != digest),
            unfinished=tuple(each for each in here.unfinished if each != digest),
        )

    size = f" ({_amount(found.size)})" if found is not None else ""
    return Step(
        action="remove-environment",
        object=server.ref,
        layer=NAME,
        reason=Reason.OLD_ENVIRONMENT,
        summary=f"remove environment {digest} in {place}{size}",
        hosts=(place.host,),
        script=_REMOVE,
        args=(place.argument, digest, found.object if found is not None else ""),
        disrupts=(Disruption(server.ref, Permission.DELETE_ENVIRONMENT),),
        timeout=1900.0,
        effect=lambda facts: inside.after(facts, place, NAME, Environments, without),
    )


def _effect(place: Place, made: Environment) -> Effect:
    def having(here: EnvironmentsHere | None) -> EnvironmentsHere:
        here = here or EnvironmentsHere()
        others = tuple(each for each in here.environments if each.digest != made.digest)
        return dataclasses.replace(
            here,
            environments=tuple(sorted((*others, made), key=lambda each: each.digest)),
            unfinished=tuple(each for each in here.unfinished if each != made.digest),
        )

    def effect(facts: FleetFacts) -> FleetFacts:
        return inside.after(facts, place, NAME, Environments, having)

    return effect


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


LAYER = Layer(
    name=NAME,
    kind="ModelServer",
    reasons=Reason,
    check=check,
    probe=inside.probe(_PACKAGE, "probe.sh"),
    parse=parse,
)

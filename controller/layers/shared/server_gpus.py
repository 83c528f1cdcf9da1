"""Which cards a server uses: those of its container's assignment, or a plain host's own, or some of them."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.view import View
from controller.facts.words import Later
from controller.layers.devices.facts import GuestFacts
from controller.layers.gpu_health.facts import GpuFacts
from controller.layers.shared.assignment import (
    Assigned,
    NoGpu,
    Unassigned,
    assign,
    capability_of,
    memory_of,
    model_of,
)
from controller.layers.shared.place import place_of
from controller.spec.model import GpuOwner, Host, ModelServer


@dataclass(frozen=True, slots=True)
class Card:
    """A card of a server. What is not known of it yet (no driver has it) is empty or None. ``memory`` is in bytes."""

    pci: str
    uuid: str = ""
    model: str = ""
    capability: tuple[int, int] | None = None
    memory: int | None = None
    numa_node: int | None = None
    later: bool = False  # its driver will have it, and will tell its UUID: it is being brought there


def cards_of(view: View, server: ModelServer) -> tuple[Card, ...] | Unassigned:
    """The server's cards in the order in which it counts them; none for a server without. Raises NotKnown.

    The answer is for the place that the spec wants, whether or not its container is there already.
    """
    place = place_of(view.specs, server)
    host = view.host(place.host)
    if server.container is not None and view.specs.containers[server.container].gpus is None:
        return ()
    gpus = view.fact(host.name, "host.gpu-health", GpuFacts)
    if server.container is None:
        pcis = _own(host, gpus)
    else:
        guests = view.fact(host.name, "container.devices", GuestFacts)
        assignment = assign(view.specs, host, gpus, guests)[server.container]
        if not isinstance(assignment, Assigned):
            return assignment
        pcis = assignment.pcis
    wish = host.nvidia is not None and host.nvidia.driver is not None
    cards = tuple(_card(gpus, pci, will_have_driver=wish) for pci in pcis)
    if server.gpus == "all":
        return cards
    return _some(server, cards)


def _own(host: Host, gpus: GpuFacts) -> tuple[str, ...]:
    """The cards of a plain host: those its spec gives to itself, or all there are when it lists none."""
    listed = tuple(gpu.pci for gpu in host.gpus if gpu.owner is GpuOwner.HOST)
    return tuple(sorted(listed)) if host.gpus else tuple(sorted(gpu.pci for gpu in gpus.gpus))


def _card(gpus: GpuFacts, pci: str, *, will_have_driver: bool) -> Card:
    known, function, row = gpus.gpu(pci), gpus.function(pci), gpus.row(pci)
    uuid = (known.uuid if known is not None else "") or (row.uuid if row is not None else "")
    return Card(
        pci,
        uuid if uuid.startswith("GPU-") and "?" not in uuid else "",
        model_of(gpus, pci),
        capability_of(gpus, pci),
        memory_of(gpus, pci),
        function.numa_node if function is not None else None,
        isinstance(known.minor, Later) if known is not None else will_have_driver,
    )


def _some(server: ModelServer, cards: tuple[Card, ...]) -> tuple[Card, ...] | Unassigned:
    """The cards that the server names, by place in the assignment, address or UUID."""
    found: list[Card] = []
    for wish in server.gpus:
        if isinstance(wish, int):
            card = cards[wish] if wish < len(cards) else None
        else:
            card = next((each for each in cards if wish in (each.pci, each.uuid)), None)
        if card is None:
            has = ", ".join(each.pci for each in cards) or "none"
            return Unassigned(
                NoGpu.MISSING,
                f"{server.name} is to use the GPU {wish} of {server.place}, which has {has}",
                "name one that it has under `gpus`, or write `gpus: all`",
            )
        if card in found:
            return Unassigned(
                NoGpu.IN_USE,
                f"{server.name} names the GPU {card.pci} of {server.place} twice",
                "name each once under `gpus`",
            )
        found.append(card)
    return tuple(found)

"""Where a server runs. Apart from what looks in there (``inside``), which reads facts of layers that need this."""

from __future__ import annotations

from dataclasses import dataclass

from controller.spec.model import ModelServer, Specs


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server runs: a container by its id, or the host itself (None)."""

    host: str
    vmid: int | None

    @property
    def argument(self) -> str:
        """The place as an argument of a script, for ``enter_place``."""
        return "-" if self.vmid is None else str(self.vmid)

    def __str__(self) -> str:
        return self.host if self.vmid is None else f"CT {self.vmid} on {self.host}"


def place_of(specs: Specs, server: ModelServer) -> Place:
    """Where the spec wants the server. Specs are cross-checked when loaded, so its container is there."""
    if server.container is None:
        return Place(str(server.host), None)
    container = specs.containers[server.container]
    return Place(container.host, container.id)

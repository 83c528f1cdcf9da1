"""The step that brings a driver's installer to a host: for the host's own driver, and for its containers' libraries."""

from __future__ import annotations

import dataclasses

from controller.core.package import script
from controller.core.words import Step
from controller.facts.words import FleetFacts, Known
from controller.layers.driver.facts import DriverFacts, Runfile
from controller.spec.model import Driver, Host
from controller.spec.ref import Ref

_LAYER = "host.driver"
_ARCH = {"x86_64": "Linux-x86_64", "aarch64": "Linux-aarch64"}


def fetch(host: Host, wish: Driver, arch: str, reason: str) -> Step:
    """A job of the host, into our own directory: it takes nothing from anybody. ``arch`` is that of ``uname -m``."""
    platform = _ARCH.get(arch, f"Linux-{arch}")
    name = f"NVIDIA-{platform}-{wish.version}.run"
    url = wish.url or f"https://us.download.nvidia.com/XFree86/{platform}/{wish.version}/{name}"

    def effect(facts: FleetFacts) -> FleetFacts:
        found = facts[host.name].section(_LAYER)
        if not isinstance(found, Known) or not isinstance(found.value, DriverFacts):
            return facts
        runfiles = (*found.value.runfiles, Runfile(name, wish.sha256 or ""))
        after = dataclasses.replace(found.value, runfiles=runfiles)
        return {**facts, host.name: facts[host.name].with_section(_LAYER, after)}

    return Step(
        action="fetch-driver",
        object=Ref("Host", host.name),
        layer=_LAYER,
        reason=reason,
        summary=f"fetch the installer of driver {wish.version} to {host.name}",
        hosts=(host.name,),
        script=script("controller.layers.driver", "fetch.sh"),
        args=(name, url, wish.sha256 or ""),
        timeout=6 * 3600.0,
        job="driver-fetch",
        effect=effect,
    )

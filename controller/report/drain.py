"""What ``reconcile drain`` prints."""

from __future__ import annotations

from typing import Any

from controller.report import text
from controller.run.drain import Drain
from controller.spec.model import Specs
from controller.spec.ref import Ref


def as_json(found: Drain) -> dict[str, Any]:
    """The same for programs."""
    return {
        "host": found.host,
        "containers": [
            {
                "object": str(leaving.container.ref),
                "runs": leaving.runs,
                "servers": [f"ModelServer/{name}" for name in leaving.servers],
                "candidates": [
                    {"host": c.host, "can": c.can, "reason": c.reason, "message": c.message, "needs": c.needs}
                    for c in leaving.candidates
                ],
            }
            for leaving in found.containers
        ],
        "guests_in_no_spec": [f"{vmid}@{found.host}" for _, vmid in found.foreign],
        "servers": [f"ModelServer/{name}" for name in found.servers],
    }


def as_text(found: Drain, specs: Specs) -> str:
    """What lies on the host, who could take it, and the line to edit."""
    if found.empty:
        return f"Nothing lies on {found.host} any more."
    lines = [f"On {found.host} lies:"]
    for leaving in found.containers:
        ref = leaving.container.ref
        servers = f", with {', '.join(leaving.servers)}" if leaving.servers else ""
        lines.append(f"{ref} (CT {leaving.container.id}, {'runs' if leaving.runs else 'stopped'}{servers})")
        able = [c.host for c in leaving.candidates if c.can]
        if able and leaving.container.host not in able:
            lines.append(f"  to do: write `host: {able[0]}` at {_place(specs, ref)}, then reconcile --once")
        elif able:
            lines.append(f"  to do: reconcile --once moves it to {leaving.container.host}, as its spec says")
        else:
            lines.append("  nobody can take it as things are")
        for candidate in leaving.candidates:
            if candidate.can:
                lines.append(f"  {candidate.host}: can take it")
            else:
                lines.append(f"  {candidate.host}: cannot: {candidate.reason}")
                lines.append(text.wrapped(f"{candidate.message}. To do: {candidate.needs}", "    "))
    for name in found.servers:
        ref = Ref("ModelServer", name)
        lines += [f"{ref}, on the host itself", f"  to do: write another `host` at {_place(specs, ref)}"]
    if found.foreign:
        guests = ", ".join(f"{'CT' if kind == 'lxc' else 'VM'} {vmid}" for kind, vmid in found.foreign)
        lines.append(f"In no spec, and left alone: {guests}")
    return "\n".join(text.clean(line) for line in lines)


def _place(specs: Specs, ref: Ref) -> str:
    return str(specs.places.get(ref, "its spec"))

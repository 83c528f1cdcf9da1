"""What several layers know alike: Proxmox configs, boards, device rules, who has which GPU. Pure."""

from __future__ import annotations

from controller.core.package import text
from controller.core.words import Script


def guest_script(package: str, name: str) -> Script:
    """An action's script about one container, with what such scripts have at hand before it."""
    return Script(
        f"{package.replace('.', '/')}/{name}", text("controller.layers.shared", "guest.sh") + text(package, name)
    )

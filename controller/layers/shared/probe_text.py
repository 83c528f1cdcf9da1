"""What the helpers of core/probe.sh print, for the simulated fleet."""

from __future__ import annotations

from collections.abc import Mapping

from controller.layers.shared.truth import File


def files(of: Mapping[str, File]) -> str:
    """Files as the probe's helper ``files`` carries them: sizes and times, then each line after its path."""
    if not of:
        return ""
    sizes = "".join(
        f"{len(file.text.encode('utf-8', 'surrogateescape'))} {file.mtime} {path}\n" for path, file in of.items()
    )
    lines = [
        f"{path}:{line}\n"
        for path, file in of.items()
        for line in (file.text.removesuffix("\n").split("\n") if file.text else ())
    ]
    return f"{sizes}--\n{''.join(lines)}"

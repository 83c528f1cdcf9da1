"""Secrets, where the controller's machine keeps them. They are read anew for each pass, and never written anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from controller.spec.model import SecretSource, Unreadable


def read(sources: Mapping[str, SecretSource]) -> dict[str, str | Unreadable]:
    """Every secret by its name; one that cannot be read is Unreadable, not empty."""
    return {name: _read(name, source) for name, source in sources.items()}


def _read(name: str, source: SecretSource) -> str | Unreadable:
    if source.from_env is not None:
        value = os.environ.get(source.from_env)
        where = f"the variable {source.from_env}"
        if value is None:
            return Unreadable(f"cannot read the secret {name}: {where} is not set for the controller")
    else:
        where = str(source.from_file)
        if Path(where).exists() and not Path(where).is_file():  # reading a pipe or a device may never end
            return Unreadable(f"cannot read the secret {name}: {where} is not a file")
        try:
            value = Path(where).read_bytes().decode("utf-8").removesuffix("\n")
        except OSError as error:
            return Unreadable(f"cannot read the secret {name} from {where}: {error.strerror}")
        except UnicodeDecodeError:
            return Unreadable(f"cannot read the secret {name}: {where} is no UTF-8 text")
    if not value or "\n" in value or "\0" in value:
        return Unreadable(f"cannot use the secret {name}: what is in {where} is not one line of text")
    return value

"""The name of one object, as people write it: ``Container/ct129``."""

from typing import NamedTuple, Self


class Ref(NamedTuple):
    """One object of the fleet: its kind and its name."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``Kind/name``.

        Raises:
            ValueError: there is no slash, or nothing before or after it.
        """
        kind, slash, name = text.partition("/")
        if not (kind and slash and name):
            raise ValueError(f"cannot read {text!r} as an object: write its kind and name, for example Container/ct129")
        return cls(kind, name)

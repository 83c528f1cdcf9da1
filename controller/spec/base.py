"""What every part of a spec has in common."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Model(BaseModel):
    """A part of a spec: frozen, with exactly the fields it declares.

    A field that is given as nothing (an empty value, ``null``) is as if it were not given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_not_given(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {key: value for key, value in data.items() if not (value is None and key in cls.model_fields)}
        return data

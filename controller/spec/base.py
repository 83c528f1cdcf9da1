"""What every part of a spec has in common."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from controller.spec.values import Problem, wrong


class Model(BaseModel):
    """A part of a spec: frozen, with exactly the fields it declares.

    A field that is given as nothing (an empty value, ``null``) is as if it were not given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def together(cls, given: frozenset[str]) -> list[Problem]:
        """Say what is wrong with giving these fields together, whatever is in them."""
        return []

    @model_validator(mode="wrap")
    @classmethod
    def _all_errors_at_once(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return handler(data)
        given = {key: value for key, value in data.items() if not (value is None and key in cls.model_fields)}
        problems = cls.together(frozenset(given))
        try:
            made = handler(given)
        except ValidationError as invalid:
            if problems:
                raise ValidationError.from_exception_data(
                    cls.__name__,
                    [
                        *(_as_it_was(error) for error in invalid.errors(include_url=False)),
                        InitErrorDetails(type=wrong(*problems), input=data),
                    ],
                ) from None
            raise
        if problems:
            raise wrong(*problems)
        return made


def _as_it_was(error: Any) -> InitErrorDetails:
    """Turn what pydantic says of an error into what it takes for one."""
    kind, context = error["type"], error.get("ctx", {})
    kind = wrong(*context["problems"]) if kind == "spec" else kind
    return InitErrorDetails(type=kind, loc=error["loc"], input=error["input"], ctx=context)

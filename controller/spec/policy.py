"""What may be done to an object, and when."""

from enum import StrEnum
from typing import Self

from pydantic import model_validator

from controller.spec.base import Model
from controller.spec.values import Bool, Cron, Duration, Problem, TimeZone, wrong


class Mode(StrEnum):
    """Whether an object is put right or only looked at."""

    REPORT = "report"
    """Look and tell, touch nothing."""
    ENFORCE = "enforce"
    """Put right what is permitted."""


class Permission(StrEnum):
    """A class of disruption that an object can agree to. The list is closed."""

    RESTART_SERVER = "restart-server"
    """Stop, start or restart a server's unit. Of the ModelServer."""
    RESTART_CONTAINER = "restart-container"
    """Stop, start or restart a CT. Of the Container, and its ModelServers' restart-server."""
    EDIT_CONTAINER_CONFIG = "edit-container-config"
    """Write the CT's config file. Of the Container."""
    MOVE_CONTAINER = "move-container"
    """Move a CT to another node. Of the Container, and its ModelServers' restart-server."""
    TAKE_OVER_CONTAINER = "take-over-container"
    """Take a CT from a dead node. Of the Container, and its ModelServers' restart-server."""
    REBIND_GPU = "rebind-gpu"
    """Take a GPU from one driver to another. Of the Host."""
    CHANGE_DRIVER = "change-driver"
    """Install, upgrade or reload the NVIDIA driver. Of the Host and all that uses a GPU on it."""
    REBOOT_HOST = "reboot-host"
    """Reboot a host. Of the Host and every guest on it."""
    DELETE_ENVIRONMENT = "delete-environment"
    """Delete a Python environment. Of the object that made it."""
    DELETE_WEIGHTS = "delete-weights"
    """Delete a model's files. Of the object that made them."""
    PRUNE = "prune"
    """Remove what is marked as ours and in no spec. Of the object that made it."""
    ADOPT = "adopt"
    """Take over a unit, process, environment or weights made by hand. Of the object that wants it."""


class Strategy(StrEnum):
    """How a server goes from one place to another."""

    STOP_FIRST = "stop-first"
    """Stop the old one, then start the new one."""
    START_FIRST = "start-first"
    """Start the new one beside the old one; only from one container to another."""


class Window(Model):
    """A stretch of time, again and again, in which steps that disrupt may start."""

    cron: Cron
    """When it opens: minute, hour, day, month, day of week, in quotes."""
    duration: Duration
    """How long it stays open."""
    timezone: TimeZone
    """The time zone that the cron expression is meant in, for example Europe/Berlin."""


class Policy(Model):
    """What may be done to an object without asking again."""

    mode: Mode = Mode.REPORT
    """report: look and tell, touch nothing. enforce: put right what is permitted."""
    allow: tuple[Permission, ...] = ()
    """The classes of disruption that this object agrees to for good."""
    windows: tuple[Window, ...] = ()
    """When what disrupts may start; none means always."""
    strategy: Strategy = Strategy.STOP_FIRST
    """How a server goes from one place to another."""
    rollback: Bool = False
    """Back to the last good engine and flags when the new ones fail their checks."""

    @model_validator(mode="after")
    def _each_class_once(self) -> Self:
        if twice := [
            Problem(f"cannot allow {permission} twice", todo="leave one of them out", field=("allow", place))
            for place, permission in enumerate(self.allow)
            if permission in self.allow[:place]
        ]:
            raise wrong(*twice)
        return self

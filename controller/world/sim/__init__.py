"""The simulated fleet: a world with physics of its own, for demonstrations, rehearsals and tests."""

from controller.world.sim.file import SimFileError
from controller.world.sim.world import SimClock, SimWorld

__all__ = ["SimClock", "SimFileError", "SimWorld"]

"""The layers, in dependency order. A new layer is one folder beside this file and one line in it."""

from __future__ import annotations

from controller.core.words import Layer
from controller.layers import (
    access,
    binding,
    boot,
    devices,
    driver,
    gpu_health,
    kernel,
    mounts,
    placement,
    power,
    server_environment,
    server_fit,
    server_health,
    server_output,
    server_placement,
    server_process,
    server_unit,
    server_weights,
    userland,
)

ORDER: tuple[Layer, ...] = (
    access.LAYER,
    gpu_health.LAYER,
    kernel.LAYER,
    binding.LAYER,
    driver.LAYER,
    boot.LAYER,
    placement.LAYER,
    mounts.LAYER,
    devices.LAYER,
    power.LAYER,
    userland.LAYER,
    server_placement.LAYER,
    server_fit.LAYER,
    server_environment.LAYER,
    server_weights.LAYER,
    server_unit.LAYER,
    server_process.LAYER,
    server_health.LAYER,
    server_output.LAYER,
)

"""The layers, in dependency order. A new layer is one folder beside this file and one line in it."""

from __future__ import annotations

from controller.core.words import Layer
from controller.layers import access, binding, devices, gpu_health, power

ORDER: tuple[Layer, ...] = (access.LAYER, gpu_health.LAYER, binding.LAYER, devices.LAYER, power.LAYER)

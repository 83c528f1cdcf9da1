"""The layers, in order. A new layer is one folder beside these and one line in ``ORDER``."""

from __future__ import annotations

from controller.core.words import Layer
from controller.layers import access, devices, gpu_health, power

ORDER: tuple[Layer, ...] = (access.LAYER, gpu_health.LAYER, devices.LAYER, power.LAYER)

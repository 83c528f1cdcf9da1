"""The layers: each one folder, with its probe, facts, check, actions and physics. `order.py` lists them."""

# All layers before anything of theirs: what they share reads their facts, and would find one of them half imported.
from controller.layers import order as order

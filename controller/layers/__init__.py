"""The layers: each one folder, with its probe, facts, check, actions and physics. `order.py` lists them."""

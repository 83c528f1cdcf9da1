"""A lab: Proxmox-like hosts and plain Linux hosts as real system containers on one machine.

It knows nothing of the controller that is tested in it. ``README.md`` says what is real and what stands in.
"""

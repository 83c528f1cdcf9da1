"""Proxmox VE 8.4 as its command line shows it: what the stand-ins ``pct``, ``qm``, ``pvesh`` … of the lab share.

It runs inside the hosts of the lab with Debian's own Python and knows nothing of the controller. Behaviour,
messages and exit codes follow transcripts of the real programs; where Proxmox's Perl code decided, the module says
which file of which package was read.
"""

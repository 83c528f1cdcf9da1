"""Steps as units on a host: one way to run anything there (the scripts are in ``host/``).

One exec carries an order: the receiver, the script with its library and its arguments, and its standard input in one
file, whose digest is compared before anything of it is run. The receiver checks lease, boot and generation under one
lock, lays the script down under ``/var/lib/reconcile``, starts it as a transient unit of systemd and waits for its
end. The unit outlives the connection; what became of it is read from its files by the section ``world``.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import shlex
from dataclasses import dataclass
from importlib.resources import files

from controller.core.words import Step
from controller.world.port import Done, Lost, Order, Outcome, Refused
from controller.world.transport import ConnectionLost, Exit, Reason, Transport, Unreachable


def _host_script(name: str) -> str:
    return files("controller.world").joinpath("host", name).read_text(encoding="utf-8")


PROBE = _host_script("world.sh")
"""The fragment behind the section ``world``; ``controller.facts.units.parse`` reads its answer."""

RECEIVER = _host_script("receiver.sh")
LIBRARY = _host_script("lib.sh")
UNIT = _host_script("unit.sh")
RELEASE = _host_script("release.sh")

KEPT = 64 * 1024
"""How much of a step's stdout, and of its stderr, comes back: their last bytes."""

_STARTING = 90.0  # seconds that the transfer, the checks and the start may take, beside the step's own time

# Reads an order into a file and runs it if it has wholly come. What it is told beside the text itself is its digest
# and a word to answer with. `order.$$` can only be left over from a dead process of that number.
_BOOTSTRAP = """\
umask 077
LC_ALL=C PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export LC_ALL PATH
order=/run/reconcile/order.$$
rm -rf "$order" && mkdir -p "$order" && cat >"$order/order" || {{
	reason=unable
	[ "$(id -u)" = 0 ] || reason=rights
	rm -rf "$order"
	echo "{nonce} refused $reason cannot write to /run/reconcile as $(id -un)"
	exit
}}
[ "$(sha256sum <"$order/order")" = "{digest}  -" ] && exec sh "$order/order" "$order"
rm -rf "$order"
echo "{nonce} refused unable the order did not wholly arrive"
"""


@dataclass(frozen=True, slots=True)
class Controller:
    """Who gives orders: an id that a restarted controller has again, and a name for people, ``name (host:pid)``."""

    id: str
    name: str

    def __post_init__(self) -> None:
        if re.fullmatch(r"[A-Za-z0-9._:@-]{1,128}", self.id) is None:
            raise ValueError(f"cannot use {self.id!r} as a controller's id: letters, digits and ._:@- only")
        if re.search(r"[\x00-\x1f\x7f]", self.name):
            raise ValueError(f"cannot use {self.name!r} as a controller's name: it holds control characters")


def perform(transport: Transport, order: Order, controller: Controller, lease_seconds: int) -> Outcome:
    """Lay the step down on the host, start it, wait for its end; a job is only started.

    Takes or renews the lease, which then runs for ``lease_seconds`` from the step's end. ``Refused``: nothing was
    begun. ``Lost``: look again. Raises ValueError for a step that cannot be ordered (see ``order_text``).
    """
    nonce = secrets.token_hex(8)
    text = order_text(order, controller, lease_seconds, nonce)
    command = _BOOTSTRAP.format(nonce=nonce, digest=hashlib.sha256(text).hexdigest())
    time = _STARTING if order.step.job else _STARTING + order.step.timeout
    try:
        done = transport.run(command, text, timeout=time, limit=2 * KEPT + 4096)
    except Unreachable as error:
        reason = "rights" if error.reason is Reason.SUDO_REFUSED else "unreachable"
        return Refused(reason, error.message)
    except ConnectionLost as error:
        return Lost(error.message)
    return _outcome(done, nonce)


def release(transport: Transport, controller: Controller) -> None:
    """Give the host's lease back, if this controller has it.

    Raises Unreachable or ConnectionLost; the lease then runs out by itself.
    """
    transport.run(f"set -- {shlex.quote(controller.id)}\n{RELEASE}", timeout=30.0)


def script_text(step: Step, generation: int, controller: Controller, lease_seconds: int) -> bytes:
    """All that the unit's shell runs: variables, library, a unit's begin and end, arguments, the action's script."""
    directory = f"jobs/{step.job}" if step.job else f"steps/{generation}"
    variables = {
        "LC_ALL": "C",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "RECONCILE_STATE": "/var/lib/reconcile",
        "RECONCILE_STEP_DIR": f"/var/lib/reconcile/{directory}",
        "RECONCILE_STEP": step.id,
        "RECONCILE_OBJECT": str(step.object),
        "RECONCILE_GENERATION": str(generation),
        "RECONCILE_UNIT": _unit(step),
        "RECONCILE_LEASE": controller.id,
        "RECONCILE_LEASE_SECONDS": str(lease_seconds),
    }
    parts = [
        f"# {step.script.name}: {step.id}",
        *(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
        "export " + " ".join(variables),
        "set -u",
        LIBRARY,
        UNIT,
        "set -e",
        shlex.join(["set", "--", *step.args]),
        step.script.text,
        "exit",
    ]
    return "\n".join(parts).encode("utf-8", "surrogateescape") + b"\n"


def order_text(order: Order, controller: Controller, lease_seconds: int, nonce: str) -> bytes:
    """The whole order as one file: the receiver with its arguments, the unit's script, its standard input.

    Raises ValueError: a NUL byte in an argument, white space in an id, a job's name that systemd would not take.
    """
    step = order.step
    for text in (*step.args, step.script.text):
        if "\0" in text:
            raise ValueError(f"cannot order {step.id}: an argument or the script holds a NUL byte")
    for word in (step.id, str(step.object)):
        if re.fullmatch(r"\S+", word) is None:
            raise ValueError(f"cannot order {word!r}: the host's files want it without white space")
    script = script_text(step, order.generation + 1, controller, lease_seconds)
    arguments = [
        str(len(script)),
        str(len(step.stdin)),
        nonce,
        _unit(step),
        step.job or "",
        step.id,
        str(step.object),
        str(max(1, math.ceil(step.timeout))),
        str(order.generation),
        order.boot_id,
        controller.id,
        controller.name,
        str(lease_seconds),
    ]
    receiver = f'set -- "$1" {shlex.join(arguments)}\n{RECEIVER}exit\n'
    return receiver.encode() + script + step.stdin


def _unit(step: Step) -> str:
    """The unit's name, fixed by what it is: systemd has it at most once."""
    if step.job is None:
        return "reconcile-step"
    if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,99}", step.job) is None:
        raise ValueError(f"cannot name a job {step.job!r}: lower case letters, digits and ._- only")
    return f"reconcile-job-{step.job}"


_NO_SUDO = re.compile(r"^sudo: .*(password is required|not found)|not in the sudoers file|is not allowed to", re.M)
"""What sudo says when it did not run the command; in another language it is ``Lost``, which is as safe."""


def _outcome(exit_: Exit, nonce: str) -> Outcome:
    """What the receiver answered. It answers on a line with the nonce; a login's greeting may stand before it."""
    found = re.search(rb"(?:^|\n)" + nonce.encode() + rb" (\S+) (.*)\n", exit_.out)
    errors = exit_.err[-1000:].decode("utf-8", "replace").strip()
    if found is None and _NO_SUDO.search(errors):
        return Refused("rights", errors)
    if found is None:
        return Lost(f"the host answered nothing that can be understood (rc {exit_.rc}): {errors or 'no output'}")
    kind, rest = found[1], found[2].decode("utf-8", "replace")
    if kind == b"done":
        rc, how, out_size, err_size = rest.split(" ")
        out, err = exit_.out[found.end() :][: int(out_size)], exit_.out[found.end() + int(out_size) :]
        if len(out) + len(err) != int(out_size) + int(err_size):
            return Lost("the answer was cut off")
        said = err.decode("utf-8", "replace")
        if how == "timeout":
            said += "\nits time was up: it was killed"
        return Done(int(rc), out.decode("utf-8", "replace"), said)
    if kind == b"refused":
        reason, _, message = rest.partition(" ")
        return Refused(reason, f"{message}: {errors}" if reason == "unable" and errors else message)
    return Lost(rest)

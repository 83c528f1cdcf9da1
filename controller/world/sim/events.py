"""What happens to a simulated fleet that no controller does: power, networks, people, time."""

from __future__ import annotations

from controller.layers.shared import kernel_physics, pve_physics
from controller.layers.shared.truth import Fleet, Host, Lease
from controller.world.sim.faults import Fault, Name


def happen(fleet: Fleet, fault: Fault) -> None:
    """Let an event happen. Raises ValueError when it cannot: a test that asks for it is wrong."""
    host = fleet.hosts[fault.host]
    match fault.name:
        case Name.UNREACHABLE:
            fleet.unreachable.append(host.name)
        case Name.REACHABLE:
            fleet.unreachable.remove(host.name)
        case Name.HOST_KEY_CHANGED:
            fleet.changed_keys.append(host.name)
        case Name.POWER_OFF:
            pve_physics.power_off(fleet, host)
        case Name.POWER_ON:
            pve_physics.power_on(fleet, host)
        case Name.REBOOT:
            pve_physics.power_off(fleet, host)
            host.powers_on = fleet.now + fault.seconds
        case Name.OTHER_CONTROLLER:
            host.lease = Lease("another", fault.text or "elsewhere:1", int(fleet.uptime(host) + fault.seconds))
        case Name.SMI_HANG | Name.SMI_BACK:
            host.smi_hangs, host.smi_hung_since = fault.name is Name.SMI_HANG, None
        case Name.CARD_LOST:
            kernel_physics.lose_card(fleet, host, fault.card)
        case Name.DISK_FULL | Name.DISK_FREED:
            host.disk_full = fault.name is Name.DISK_FULL
        case Name.PARTITION | Name.HEAL:
            cluster = fleet.cluster_of(host)
            if cluster is None:
                raise ValueError(f"{host.name} is in no cluster")
            pve_physics.part(fleet, cluster, [list(side) for side in fault.sides])
        case Name.EDIT | Name.APPEND | Name.REMOVE:
            _edit(fleet, host, fault)
        case Name.VM_START | Name.VM_STOP | Name.CT_START | Name.CT_STOP:
            _guest(fleet, host, fault)
        case Name.START_FAILS:
            host.start_failure = fault.text or f"startup for container '{fault.guest}' failed"
        case _:
            raise ValueError(f"{fault.name} is nothing that happens by itself")
    fleet.touch(host)


def _edit(fleet: Fleet, host: Host, fault: Fault) -> None:
    before = pve_physics.read(fleet, host, fault.path)
    if fault.name is Name.REMOVE:
        failed = pve_physics.remove(fleet, host, fault.path)
    elif fault.name is Name.EDIT:
        failed = pve_physics.write(fleet, host, fault.path, fault.text)
    else:
        failed = pve_physics.write(fleet, host, fault.path, (before.text if before else "") + fault.text)
    if failed:
        raise ValueError(f"nobody can edit {fault.path} on {host.name}: {failed}")


def _guest(fleet: Fleet, host: Host, fault: Fault) -> None:
    commands = {
        Name.VM_START: pve_physics.qm_start,
        Name.VM_STOP: pve_physics.qm_stop,
        Name.CT_START: pve_physics.pct_start,
        Name.CT_STOP: pve_physics.pct_stop,
    }
    said = commands[fault.name](fleet, host, fault.guest)
    if said.rc != 0:
        raise ValueError(f"{fault.name} of {fault.guest} on {host.name}: {said.err.strip()}")

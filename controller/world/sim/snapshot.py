"""From what was observed of a fleet to a simulated one that answers the same, to rehearse on.

What the facts do not tell is made up (a running VM's memory, an idle driver's next major), what could be a secret is
withheld: the text of comments and descriptions, which people put passwords into, the values of environment variables
and of what is named like a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from controller.core import observe
from controller.facts import hub, units
from controller.facts.words import FleetFacts, HostFacts, Known
from controller.layers.access.facts import AccessFacts, Cluster
from controller.layers.binding.facts import BindingFacts
from controller.layers.boot.facts import DATA, SCRIPT, UNIT, UNIT_ENABLED, BootFacts
from controller.layers.devices.facts import GuestFacts
from controller.layers.driver.facts import DriverFacts
from controller.layers.gpu_health import facts as gpu
from controller.layers.kernel.facts import KernelFacts
from controller.layers.mounts.facts import MountFacts
from controller.layers.placement.facts import PlacementFacts, Storage
from controller.layers.power.facts import PowerFacts, Running
from controller.layers.shared import truth
from controller.layers.shared.boards import BOARDS
from controller.layers.shared.hub_truth import as_truth
from controller.layers.shared.pve_conf import parse as parse_conf
from controller.layers.userland.facts import UserlandFacts
from controller.spec.model import Specs
from controller.world.sim import file as simfile
from controller.world.sim import snapshot_servers

T = TypeVar("T")

WITHHELD = "withheld"
_MIB = 1024 * 1024
_HEAD = """\
# A snapshot of a real fleet, to rehearse on: reconcile plan --fleet sim:THIS-FILE
# Withheld, as they may be secrets: comments and descriptions of guests' configs, values of environment variables, and
# what is named like a secret.
"""
_NAMED_SECRET = re.compile(
    r"((?:pass(?:word|wd|phrase)?|secret|token|api_?key|sshkeys)\w*\s*[=:]\s*)[^\s,;]+", re.IGNORECASE
)


def snapshot(facts: FleetFacts, specs: Specs) -> str:
    """The text of a simulated fleet's file. A host that was not observed is out of reach, or off, in it too.

    Raises Impossible when the facts contradict each other: something changed while the fleet was looked at.
    """
    fleet = truth.Fleet(now=float(int(max((seen.at for seen in facts.values()), default=0.0))))
    for name, seen in facts.items():
        spec = specs.hosts.get(name)
        host = truth.Host(name, address=spec.address if spec else "", platform=str(spec.platform) if spec else "linux")
        fleet.hosts[name] = host
        if seen.failure is not None:
            fleet.unreachable.append(name)
        else:
            _host(fleet, host, seen)
    for cluster in {c.name or c.node: c for seen in facts.values() if (c := _cluster(seen))}:
        _join(fleet, cluster, facts)
    fleet.hub = _hub(facts)
    for host in fleet.hosts.values():
        if host.name in fleet.unreachable and host.cluster is None and not host.boot_id:
            host.powered = False
    truth.refuse_impossible(fleet)
    return _HEAD + simfile.dump(fleet)


def _hub(facts: FleetFacts) -> dict[str, truth.Model]:
    """What the Hub said of models; one that it did not tell of is not on the simulated one."""
    known = [seen.section(hub.SECTION) for seen in facts.values()]
    told = (each.value for each in known if isinstance(each, Known) and isinstance(each.value, hub.HubFacts))
    return {
        f"{model.repo}@{model.revision}": as_truth(model)
        for one in told
        for model in one.models.values()
        if isinstance(model, hub.Description)
    }


def withhold(text: str) -> str:
    """A guest's config, or a generated one, without what may be a secret. Lines stay lines."""
    return "\n".join(_withheld_line(line) for line in text.split("\n"))


def _withheld_line(line: str) -> str:
    if line.startswith("#") and line != "#":
        return f"# {WITHHELD}"
    key = re.match(r"(description|cipassword|sshkeys):\s*", line)
    if key is not None:
        return f"{key[1]}: {WITHHELD}"
    variable = re.match(r"(lxc\.environment\S*\s*[:=]\s*\w+=)", line)
    if variable is not None and not line.endswith("TERM=linux"):
        return f"{variable[1]}{WITHHELD}"
    return _NAMED_SECRET.sub(rf"\g<1>{WITHHELD}", line)


def _value(seen: HostFacts, section: str, kind: type[T]) -> T | None:
    found = seen.section(section)
    return found.value if isinstance(found, Known) and isinstance(found.value, kind) else None


def _cluster(seen: HostFacts) -> Cluster | None:
    access = _value(seen, "host.access", AccessFacts)
    return access.cluster if access is not None else None


def _host(fleet: truth.Fleet, host: truth.Host, seen: HostFacts) -> None:
    at_work = observe.units(seen)
    power = _value(seen, "container.power", PowerFacts)
    uptime = _uptime(at_work, power)
    host.booted = fleet.now - uptime
    host.boot_id = at_work.boot_id if at_work is not None else fleet.draw_id(host)
    access = _value(seen, "host.access", AccessFacts)
    if access is not None:
        host.uid, host.kernel, host.arch = access.uid, access.kernel, access.arch
        host.missing_tools = list(access.missing_tools)
    cards = _value(seen, "host.gpu-health", gpu.GpuFacts)
    if cards is not None:
        _cards(host, cards, seen)
    guests = _value(seen, "container.devices", GuestFacts)
    if guests is not None:
        host.cgroup2 = guests.cgroup2
        host.character_devices = [f"{major} {name}" for major, name in guests.drivers if not name.startswith("nvidia")]
        _machines(host, guests, _value(seen, "host.gpu-binding", BindingFacts))
    for running in power.running if power is not None else ():
        _container(host, running)
    _guests(host, seen, power)
    if at_work is not None:
        _units(fleet, host, at_work)
    kernel, driver = _value(seen, "host.kernel", KernelFacts), _value(seen, "host.driver", DriverFacts)
    if kernel is not None:
        _kernel(host, kernel)
    if driver is not None:
        _driver(host, driver)
    _userlands(fleet, host, seen)
    snapshot_servers.add(fleet, host, seen)
    boot = _value(seen, "host.boot", BootFacts)
    if boot is not None:
        _boot(host, boot)


def _uptime(at_work: units.UnitFacts | None, power: PowerFacts | None) -> float:
    """A time since boot after all that has happened in this boot, and while a lease that is seen still holds."""
    times = [3600.0]
    if power is not None:
        times += [int(str(running.started)) / 100 + 1 for running in power.running]
    if at_work is not None:
        each = [unit for unit in (at_work.step, *at_work.jobs) if unit is not None]
        times += [time + 1 for unit in each for time in (unit.began, unit.ended) if time is not None]
        if at_work.lease is not None:
            return float(max(max(times[1:], default=0.0), at_work.lease.until - 30))
    return float(int(max(times)) + 1)


# --- cards -----------------------------------------------------------------------------------------------------------


def _cards(host: truth.Host, cards: gpu.GpuFacts, seen: HostFacts) -> None:
    for function in cards.functions:
        vendor, device = function.device.split(":")
        host.functions[function.pci] = truth.Function(
            vendor,
            device,
            function.pci_class,
            function.driver or None,
            function.override or None,
            int(function.group) if function.group else None,
            numa_node=function.numa_node if function.numa_node is not None else -1,
            link_width=function.link_width,
            link_width_max=function.link_width_max,
            gpu=_gpu(host, cards, function) if function.is_gpu else None,
        )
    for function in cards.functions:
        for mate in function.mates:
            # of another maker: nothing but its group is known
            unknown = truth.Function("ffff", "ffff", "ffffff", iommu_group=int(function.group))
            host.functions.setdefault(mate, unknown)
    host.loaded = {f.driver: truth.Module() for f in host.functions.values() if f.driver is not None}
    if cards.module is not None:
        host.loaded["nvidia"] = truth.Module(cards.module.version, cards.module.flavour)
    host.majors = {name: int(str(major)) for name, major in cards.majors}
    for name in ("nvidia-uvm", "nvidia-modeset"):
        if name in host.majors:
            host.loaded[name] = host.loaded["nvidia"]
    host.modules = {host.kernel: {n: m for n, m in host.loaded.items() if n.startswith("nvidia")}}
    host.dev = {n.path: _node(n.is_device, n.major, n.minor, n.mode) for n in cards.nodes if n.kind != "directory"}
    if cards.module is not None:
        _smi(host, cards, seen)


def _gpu(host: truth.Host, cards: gpu.GpuFacts, function: gpu.Function) -> truth.Gpu:
    """A card as its driver tells of it; what is on another driver is known by its id, or not at all."""
    module, row, board = cards.gpu(function.pci), cards.row(function.pci), BOARDS.get(function.device)
    uuid = (row.uuid if row else "") or (module.uuid if module else "") or _uuid(host, function.pci)
    made = truth.Gpu(
        model=(module.model if module else "") or (row.name if row else "") or (board.name if board else "unknown"),
        uuid=uuid,
        memory_mib=row.memory_total // _MIB if row else board.memory_gib * 1024 if board else 0,
        compute_capability=row.compute_capability if row else board.compute_capability if board else "",
        memory_used_mib=row.memory_used // _MIB if row else 0,
        lost=not function.answers,
    )
    if module is not None:
        made.minor, made.initialised = int(str(module.minor)), bool(module.uuid)
    return made


def _uuid(host: truth.Host, pci: str) -> str:
    number = int(pci.replace(":", "").replace(".", ""), 16)
    return f"GPU-{sum(host.name.encode()):08x}-0000-4000-8000-{number:012x}"


def _node(is_device: bool, major: object, minor: object, mode: str = "666") -> truth.Node:
    if not is_device:
        return truth.Node(plain=True, mode=int(mode, 8))
    return truth.Node(int(str(major)), int(str(minor)), int(mode, 8))


def _smi(host: truth.Host, cards: gpu.GpuFacts, seen: HostFacts) -> None:
    failure = cards.smi_failure
    host.userspace = cards.smi[0].driver_version if cards.smi else ""
    if failure is not None and failure.reason == "nvidia-smi-hangs":
        host.smi_hangs, host.userspace = True, host.loaded["nvidia"].version
    elif failure is not None and failure.reason != "no-nvidia-smi":
        host.userspace = host.loaded["nvidia"].version
        raw = seen.raw.get("host.gpu-health")
        host.smi_says = raw.out.partition("smi|")[2] if raw is not None else ""


# --- kernels and drivers ---------------------------------------------------------------------------------------------


def _kernel(host: truth.Host, seen: KernelFacts) -> None:
    host.kernels, host.headers = list(seen.installed), list(seen.headers)
    host.secure_boot, host.enrolled_keys = bool(seen.secure_boot), list(seen.enrolled_keys)
    if seen.dkms_key_enrolled and seen.enrolled_keys:
        host.dkms_key = seen.enrolled_keys[0]
    host.dkms = {} if seen.dkms else None
    host.repository, host.lists_fresh = list(seen.packages or ()), seen.lists_fresh
    if seen.nouveau_loaded:
        host.loaded.setdefault("nouveau", truth.Module())
    files = dict(seen.modprobe)
    files |= {"/etc/kernel/next-boot-pin": f"{seen.next_boot_pin}\n"} if seen.next_boot_pin else {}
    files |= {"/etc/kernel/proxmox-boot-pin": f"{seen.pin}\n"} if seen.pin else {}
    files |= {"/etc/kernel/proxmox-boot-uuids": ""} if seen.boot_tool else {}
    host.files.update({path: truth.File(text, mtime=int(host.booted)) for path, text in files.items()})
    for image in seen.initramfs:
        if image.unread is None:
            names = [path.rsplit("/", 1)[-1].split(".ko")[0] for path in image.modules]
            host.initramfs[image.kernel] = truth.Initramfs(names, dict(image.files))


def _driver(host: truth.Host, seen: DriverFacts) -> None:
    host.userspace = seen.libraries[0] if seen.libraries else ""
    host.modules = {}
    for each in seen.modules:
        module = truth.Module(each.version, each.flavour, each.signer)
        host.modules[each.kernel] = {"nvidia": module, "nvidia-uvm": module}
    flavours = {each.version: each.flavour for each in seen.modules}
    if host.dkms is not None:
        host.dkms = {version: flavours.get(version, "proprietary") for version in seen.dkms}
    for runfile in seen.runfiles:
        path = f"/var/lib/reconcile/drivers/{runfile.name}"
        host.files[path] = truth.File("an installer that nobody copied\n", mtime=int(host.booted))
        host.files[f"{path}.sha256"] = truth.File(f"{runfile.sha256}\n", mtime=int(host.booted))
    if (said := seen.refusal) is not None:
        line = f"{said.version} {said.flavour} {said.kernel} {said.said}\n"
        host.files["/var/lib/reconcile/driver-refused"] = truth.File(line, mtime=int(host.booted))
    if seen.stopped:
        text = "".join(f"{line}\n" for line in seen.stopped)
        host.files["/run/reconcile/driver-stopped"] = truth.File(text, mtime=int(host.booted))


def _boot(host: truth.Host, seen: BootFacts) -> None:
    files = {UNIT: seen.unit, SCRIPT: seen.script, DATA: seen.data}
    texts = {path: file.text for path, file in files.items() if file is not None}
    texts |= {UNIT_ENABLED: ""} if seen.enabled else {}
    texts |= {"/etc/modules": "".join(f"{name}\n" for name in seen.modules)} if seen.modules else {}
    host.files.update({path: truth.File(text, mtime=int(host.booted)) for path, text in texts.items()})


def _userlands(fleet: truth.Fleet, host: truth.Host, seen: HostFacts) -> None:
    """What containers have inside, by the volume that it lies in."""
    userlands, guests = _value(seen, "container.userland", UserlandFacts), _value(seen, "container.devices", GuestFacts)
    for each in userlands.containers if userlands is not None else ():
        guest = guests.container(each.id) if guests is not None else None
        volume = parse_conf(guest.text).main.text("rootfs").split(",")[0] if guest is not None else ""
        container = host.containers.get(each.id)
        if container is not None and not volume.startswith("/"):
            container.image = volume
        if each.libraries:
            fleet.userlands[volume or f"{host.name}:{each.id}"] = each.libraries[0]


# --- guests ----------------------------------------------------------------------------------------------------------


def _machines(host: truth.Host, guests: GuestFacts, binding: BindingFacts | None) -> None:
    pids = {user.group: user.pid for user in binding.users} if binding is not None else {}
    for address, vmid in guests.reservations:
        function = host.functions.get(address)
        if function is not None and function.driver == "vfio-pci":
            pid = pids.get(f"/qemu.slice/{vmid}.scope", 10_000 + vmid)
            machine = host.machines.setdefault(vmid, truth.RunningMachine(pid, host.booted))
            machine.functions.append(address)


def _guests(host: truth.Host, seen: HostFacts, power: PowerFacts | None) -> None:
    """What else runs, and what containers mount of their host."""
    placement, mounts = (
        _value(seen, "container.placement", PlacementFacts),
        _value(seen, "container.mounts", MountFacts),
    )
    for kind, vmid in sorted(placement.running) if placement is not None else ():
        if kind == "qemu":
            host.machines.setdefault(vmid, truth.RunningMachine(10_000 + vmid, host.booted))
        elif power is None or vmid not in power.between:
            host.containers.setdefault(vmid, truth.RunningContainer(10_000 + vmid, host.booted))
    for mount in (m for _, each in mounts.guests for m in each) if mounts is not None else ():
        if mount.there == "dir":
            host.directories.append(mount.bind.source)
        elif mount.there == "file":
            host.files.setdefault(mount.bind.source, truth.File(mtime=int(host.booted)))


def _container(host: truth.Host, running: Running) -> None:
    ticks = int(str(running.started))
    container = truth.RunningContainer(running.pid, host.booted + ticks / 100)
    container.dev = {
        f"/dev/{n.name}": _node(n.is_device, n.major, n.minor, "666" if n.is_device else "0")
        for n in running.nodes
        if n.kind != "directory"
    }
    host.containers[running.id] = container
    if running.generated is not None:
        text = withhold(running.generated)
        host.files[f"/var/lib/lxc/{running.id}/config"] = truth.File(text, mtime=int(host.booted))
        container.rules = list(_rules(host, text.split("\n"), " = "))
    if isinstance(running.edited, tuple):
        lines = "".join(f"{line}\n" for line in (str(ticks), *running.edited))
        host.files[f"/run/reconcile/edited/{running.id}"] = truth.File(lines, 0o600)
        container.rules = container.rules or list(_rules(host, running.edited, ": "))
    if running.restarted_for:
        why = f"{ticks} {running.restarted_for}\n"
        host.files[f"/run/reconcile/restarted/{running.id}"] = truth.File(why, 0o600)


def _rules(host: truth.Host, lines: Sequence[str], between: str) -> Iterator[str]:
    """Device rules as they were resolved at the start, as far as the host's nodes tell it now."""
    for line in lines:
        key, found, value = line.partition(between)
        if found and key in ("lxc.cgroup2.devices.allow", "lxc.cgroup2.devices.deny"):
            path, _, access = value.partition(" ")
            node = host.dev.get(path)
            value = f"c {node.major}:{node.minor} {access or 'rwm'}" if node is not None else value
            yield f"{key.rsplit('.', 1)[1]} {value}"


# --- what is at work -------------------------------------------------------------------------------------------------


def _units(fleet: truth.Fleet, host: truth.Host, at_work: units.UnitFacts) -> None:
    host.generation = at_work.generation
    if at_work.lease is not None:
        host.lease = truth.Lease(at_work.lease.id, at_work.lease.name, at_work.lease.until)
    if at_work.step is not None:
        host.step = _unit(fleet, host, at_work.step, at_work.step_number)
    for job in at_work.jobs:
        unit = _unit(fleet, host, job, at_work.generation)
        unit.output = "\n".join(_NAMED_SECRET.sub(rf"\g<1>{WITHHELD}", line) for line in job.log)
        if job.progress is not None:
            unit.reached, unit.total = job.progress.done, job.progress.total
            unit.progressed = job.progress.since or 0.0
        host.jobs[job.name] = unit


def _unit(fleet: truth.Fleet, host: truth.Host, seen: units.Unit, number: int) -> truth.Unit:
    """A unit by what is seen of it. One at work ends a minute later and has done nothing: what it does is not seen."""
    this_boot = seen.began is not None
    unit = truth.Unit(
        truth.Work(seen.id, "", "", seen.object),
        number,
        host.boot_id if this_boot else "",
        seen.began or 0.0,
        rc=seen.rc,
        ended=seen.ended,
        how="running" if seen.running else seen.how.value,
    )
    if seen.running:
        unit.ends = fleet.now + 60.0
    return unit


# --- clusters --------------------------------------------------------------------------------------------------------


def _join(fleet: truth.Fleet, name: str, facts: FleetFacts) -> None:
    """A cluster, in the parts in which its members see each other, each with the files that its members see."""
    views = {host: c for host, seen in facts.items() if (c := _cluster(seen)) and (c.name or c.node) == name}
    cluster = fleet.clusters[name] = truth.Cluster(name, trees=[])
    nodes = {member.name: member for view in views.values() for member in view.members}
    cluster.nodes = sorted(nodes) or list(views)
    for node in cluster.nodes:
        host = fleet.hosts.get(node)
        if host is None:  # in no spec: nobody looked at it
            host = fleet.hosts[node] = truth.Host(node)
            fleet.unreachable.append(node)
        host.cluster, host.platform = name, "proxmox"
        if node in nodes:
            host.address = nodes[node].ip
        if nodes and host.name not in views:
            host.powered = any(m.online for view in views.values() for m in view.members if m.name == node)
            host.boot_id = fleet.draw_id(host) if host.powered else ""
    sides: dict[frozenset[str], int] = {}
    for host_name, view in views.items():
        online = frozenset(m.name for m in view.members if m.online) or frozenset({host_name})
        if online not in sides:
            sides[online] = len(cluster.trees)
            cluster.trees.append(_tree(fleet, [v for h, v in views.items() if h in online], facts))
        for node in online:
            cluster.tree_of[node] = cluster.sides[node] = sides[online]
    away = len(sides)
    for node in cluster.nodes:
        cluster.sides.setdefault(node, away)
    if len(set(cluster.sides.values())) == 1:
        cluster.sides = {}


def _tree(fleet: truth.Fleet, views: Sequence[Cluster], facts: FleetFacts) -> truth.Tree:
    """The files that members who see each other share. A guest whose config nobody could read has an empty one."""
    tree = truth.Tree()
    now = int(fleet.now)
    kinds: Mapping[str, str] = {"lxc": "lxc", "qemu": "qemu-server"}
    for view in views:
        for vmid, node, kind in view.guests:
            tree.files.setdefault(f"nodes/{node}/{kinds[kind]}/{vmid}.conf", truth.File("", 0o640, now))
        if view.ha:
            of = {vmid: "ct" if kind == "lxc" else "vm" for vmid, _, kind in view.guests}
            resources = "".join(f"{of.get(vmid, 'ct')}: {vmid}\n\n" for vmid in sorted(view.ha))
            tree.files["ha/resources.cfg"] = truth.File(resources, 0o640, now)
        seen = _value(facts[view.node], "container.devices", GuestFacts) if view.node in facts else None
        for guest in seen.guests if seen is not None else ():
            path = f"nodes/{guest.node}/{kinds[guest.kind]}/{guest.id}.conf"
            tree.files[path] = truth.File(withhold(guest.text), 0o640, now)
        if seen is not None and seen.mappings:
            tree.files["mapping/pci.cfg"] = truth.File(seen.mappings, 0o640, now)
        placement = _value(facts[view.node], "container.placement", PlacementFacts) if view.node in facts else None
        if placement is not None:
            tree.files["storage.cfg"] = truth.File("".join(map(_storage, placement.storages)), 0o640, now)
    return tree


def _storage(seen: Storage) -> str:
    """A section of storage.cfg, as far as it was understood."""
    options = {
        "content": ",".join(seen.content),
        "nodes": ",".join(seen.nodes),
        "disable": "1" if seen.disabled else "",
        "shared": "1" if seen.shared else "",
    }
    return (
        f"{seen.kind}: {seen.name}\n" + "".join(f"\t{key} {value}\n" for key, value in options.items() if value) + "\n"
    )

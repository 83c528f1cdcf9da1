"""Guards, broken one at a time: some test has to notice each. ``python -m tests.proof.mutants`` (make mutants)."""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
L = "controller/layers/"
LAST = "tests/proof/test_guards.py"  # what is asked when a guard's own tests notice nothing


@dataclass(frozen=True)
class Mutant:
    """One guard: where it is, its exact text, what stands there without it, and the tests that should notice."""

    guard: str
    file: str
    old: str
    new: str
    tests: str


def _of(tests: str, file: str, *mutants: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(guard, file, old, new, tests) for guard, old, new in mutants]


MUTANTS: list[Mutant] = [
    # --- the core
    *_of(
        "tests/core/test_next_steps.py tests/core/test_conditions.py tests/core/test_unknown.py",
        "controller/core/next_steps.py",
        (
            "a later layer waits for an earlier one",
            "if not held and not _is_right(verdict) and not _goes_on(verdict):",
            "if False:",
        ),
        ("what is unseen on a host holds what lives on it", "or isinstance(judged.verdict, Unseen):", "or False:"),
        (
            "a check that stumbles is Unknown, not right",
            "return Unseen(DEFECT, f",
            "return InSync(f",
        ),
        ("a fact that is not known is no drift", "return Unseen(unknown.reason, unknown.message)", "return InSync()"),
        (
            "nothing is done on a host whose first layer is not right",
            "if host in closed and closed[host] is not judged",
            "if False",
        ),
        (
            "a mate that cannot be seen holds what disrupts",
            'return _unseen_mate(view, step) or ("" if step.independent else judged.held)',
            'return "" if step.independent else judged.held',
        ),
        (
            "a server waits for its container",
            'held = _held_by_container(judged[Ref("Container", server.container)])',
            'held = ""',
        ),
        (
            "in sync is all, not some",
            "return all(_is_right(j.verdict) for j in self.judged)",
            "return any(_is_right(j.verdict) for j in self.judged)",
        ),
    ),
    *_of(
        "tests/core/test_unknown.py tests/core/test_observe.py",
        "controller/core/observe.py",
        ("a host that did not answer has no facts", "if seen.failure is not None:", "if False:"),
        ("a section that failed is Unknown", "if section.rc != 0:", "if False:"),
    ),
    *_of(
        "tests/core/test_conditions.py",
        "controller/core/view.py",
        ("Unknown is not absent", "raise NotKnown(found.reason, found.message)", "return kind()"),
    ),
    *_of(
        "tests/core/test_permissions.py tests/core/test_unknown.py",
        "controller/core/permissions.py",
        (
            "a permission is asked of every object",
            "return tuple(d for d in step.disrupts if not",
            "return tuple(d for d in step.disrupts[:1] if not",
        ),
        (
            "an object in report mode allows nothing",
            "obj is not None and obj.policy.mode is Mode.ENFORCE and",
            "obj is not None and",
        ),
        ("an object in no spec has given nothing", "else Mode.REPORT", "else Mode.ENFORCE"),
        (
            "an approval is for the step that was shown",
            'return same and self.summary in ("", step.summary)',
            "return True",
        ),
        ("report mode does nothing", "if self.mode_of(step.object) is Mode.ENFORCE or", "if True or"),
    ),
    *_of(
        "tests/core/test_permissions.py tests/run/test_once.py",
        "controller/core/batch.py",
        ("two steps on one host never run together", "hosts |= set(step.hosts)", "pass"),
        (
            "hosts of a group are never worked on together",
            "if hosts & kept_apart(step.hosts, limits.never_together):",
            "if hosts & set(step.hosts):",
        ),
        ("so many disrupt at once and no more", ">= limits.disruptive_at_once:", ">= 99:"),
    ),
    *_of(
        "tests/core/test_windows.py",
        "controller/core/windows.py",
        ("windows are kept", "if windows and not any(is_open(window, at) for window in windows):", "if False:"),
        ("a window closes", "return last is not None and at < last + window.duration", "return last is not None"),
    ),
    *_of(
        "tests/core/test_suspension.py",
        "controller/core/suspension.py",
        (
            "what is suspended is left alone",
            "return next((suspensions[ref] for ref in _touched(step, specs) if ref in suspensions), None)",
            "return None",
        ),
    ),
    *_of(
        "tests/core/test_plan.py",
        "controller/core/plan.py",
        ("a plan that comes back is a loop", "if came_back is not None:", "if False:"),
    ),
    *_of(
        "tests/core/test_unknown.py",
        "controller/core/probe.py",
        ("an answer belongs to its question", "if not data.startswith(begin):", "if False:"),
        ("a section is as long as it says", 'if data[stop : stop + 1] != b"\\n":', "if False:"),
    ),
    # --- who drives
    *_of(
        "tests/run/test_once.py tests/sim/test_world.py",
        "controller/run/once.py",
        ("a pass keeps windows", "if self.ignore_windows:", "if True:"),
        (
            "a step that failed is not begun again",
            "if step.id not in report.failed and self.narrowed",
            "if self.narrowed",
        ),
        (
            "facts are fresh when a step is begun",
            "if steps and min(self._looked.values()) < self.clock.now() - FRESH:",
            "if False:",
        ),
        ("what is lost counts as at work", "frozenset({*busy, *self._in_doubt(report)})", "frozenset(busy)"),
        ("a fight ends", "if step.id not in report.failed and (same[step.id] >= TRIES or times >= most):", "if False:"),
        (
            "nothing is ordered on a host whose units are not known",
            'return Refused("unable", why)',
            "return self.world.perform(Order(step, 0, ''))",
        ),
    ),
    *_of(
        "tests/run/test_once.py tests/sim/test_world.py",
        "controller/run/ended.py",
        (
            "a step has worked when its layer says so",
            "isinstance(now.remedy, Step) and now.remedy.id == step.id",
            "False",
        ),
        (
            "what made an earlier layer worse has failed",
            "isinstance(was, InSync | Skipped)\n            and",
            "False\n            and",
        ),
        ("exit 75 is stale", "case Done(rc, _, err) if rc == STALE:", "case Done(rc, _, err) if rc == -1:"),
    ),
    *_of(
        "tests/run/test_loop.py tests/proof/test_guards.py",
        "controller/run/loop.py",
        (
            "the loop does nothing for a broken spec file",
            "if why := self._broken(step):\n            return self._pend",
            "if False:\n            return self._pend",
        ),
        ("the loop keeps windows", "if why := windows.closed(step, self._specs, moment.date):", "if False:"),
        (
            "the loop asks for permission",
            "if missing := grants.missing(step):\n            return",
            "if False:\n            return",
        ),
        (
            "the loop leaves suspended objects alone",
            "if (held := suspension.held_by(step, self._suspensions, self._specs)) is not None:",
            "if False:",
        ),
        ("the breaker opens", "if len(useless) < TRIES_OF_BREAKER:", "if True:"),
        (
            "the loop waits after a failure",
            "if backoff is not None and moment.unix < backoff.until <= moment.unix + BACKOFF[1]:",
            "if False:",
        ),
        ("the loop begins on fresh facts", "if old or units is None:", "if units is None:"),
        (
            "a slow host is Unknown",
            "if eye.asked is not None and moment.now >= eye.asked + SLOW and not",
            "if False and not",
        ),
    ),
    # --- specs
    *_of(
        "tests/spec",
        "controller/spec/load.py",
        (
            "a broken file freezes what it defines",
            "frozen, set_aside, had_fleet = set(first.frozen),",
            "frozen, set_aside, had_fleet = set(),",
        ),
        ("lost defaults freeze all", "all_frozen=fleet_lost,", "all_frozen=False,"),
        (
            "what has no home is left out",
            "specs, homeless = _without_homeless(attempt.specs)",
            "specs, homeless = attempt.specs, set()",
        ),
    ),
    # --- layers: host
    *_of(
        "tests/layers/access",
        f"{L}access/__init__.py",
        ("no quorum, nothing is done", "if not facts.cluster.quorate:", "if False:"),
        ("the machine is the one that is meant", "if facts.cluster.node != host.name:", "if False:"),
        ("rights suffice", "if facts.uid != 0:", "if False:"),
        ("all waits for access", "gates=Gate.ALL,", "gates=Gate.GPUS,"),
    ),
    *_of(
        "tests/layers/gpu_health tests/sim/test_world.py",
        f"{L}gpu_health/__init__.py",
        (
            "a nvidia-smi that hangs is Unknown",
            'if facts.smi_failure is not None and facts.smi_failure.reason == "nvidia-smi-hangs":',
            "if False:",
        ),
        ("another model is not touched", "if gpu.model and found and not same_model(gpu.model, found):", "if False:"),
        ("another card is noticed by its UUID", "if uuid and now and now != uuid:", "if False:"),
        ("a card off the bus is noticed", "if not function.answers:", "if False:"),
    ),
    *_of(
        "tests/layers/binding",
        f"{L}binding/__init__.py",
        (
            "a card that a VM claims is not taken",
            "if by := seen.claimant(seen.functions_of(function.pci)):",
            "if by := '':",
        ),
        ("a VM's card that is on another driver is left there", "if by and function.driver:", "if False:"),
        (
            "a group shared with a VM is refused",
            "if (shared := _shared_with(seen, function)) is not None:",
            "if False:",
        ),
        (
            "a card in use is not unbound",
            "    if not users:\n        return None\n    return _blocked(",
            "    return None\n    return _blocked(",
        ),
        ("who uses a card has to be known", "if seen.binding.unknown is not None:", "if False:"),
        (
            "the claims are looked at again by the script",
            "function.driver, digest(seen.guests)),",
            'function.driver, ""),',
        ),
    ),
    *_of(
        "tests/layers/driver tests/layers/kernel",
        f"{L}shared/driver_wanted.py",
        ("an unlisted card keeps the module out", "or _unlisted(host, want, gpus)", "or None"),
        ("a flavour that a card cannot have is refused", "_flavour(host, want, gpus)\n        or", "None\n        or"),
        ("a kernel that is too new is refused", "or _kernels(host, want, kernel)", "or None"),
        ("secure boot is looked at", "or _secure_boot(host, wish, want, kernel, driver)", "or None"),
        ("a driver that did not load is not loaded again", "or _refused(host, want, kernel, driver)", "or None"),
    ),
    *_of(
        "tests/layers/driver",
        f"{L}driver/__init__.py",
        (
            "only known users of the driver are stopped",
            "foreign = [user for user in users if not _may_stop(user, host, ours)]",
            "foreign = []",
        ),
        (
            "only named services are stopped",
            "return service is not None and service[1] in _holders(host)",
            "return service is not None",
        ),
        (
            "containers that use the driver are asked",
            'yield Disruption(Ref("Container", container.name), Permission.CHANGE_DRIVER)',
            "pass",
        ),
        ("foreign containers are asked", "if guest.id not in ours and _passes_cards(guest):", "if False:"),
        ("what was stopped is started again", "if driver.stopped:", "if False:"),
    ),
    *_of(
        "tests/layers/boot",
        f"{L}boot/__init__.py",
        ("a file of others is not overwritten", "if strange or boot.masked:", "if False:"),
        ("a minor that has changed is recorded anew", "if before.minor != card.minor:", "if False:"),
    ),
    *_of(
        "tests/run/test_reboot.py tests/layers",
        f"{L}shared/reboot.py",
        ("a reboot that costs quorum is refused", "if 2 * left <= len(cluster.members):", "if False:"),
        (
            "a reboot that did not help is not repeated",
            "if last is not None and last.id == step.id and last.began is None and last.rc == 0:",
            "if False:",
        ),
        (
            "every guest is asked for a reboot",
            "for kind, vmid in sorted(guests, key=lambda guest: guest[1])",
            "for kind, vmid in ()",
        ),
    ),
    # --- layers: containers
    *_of(
        "tests/layers/placement tests/scenarios/test_move.py",
        f"{L}placement/__init__.py",
        (
            "a target without quorum is blocked",
            "    if not cluster.quorate:\n        if node",
            "    if False:\n        if node",
        ),
        ("a source without quorum is blocked", "*([] if here.quorate else [_no_quorum(source.name)]),", ""),
        (
            "only a decommissioned node is taken over from",
            "if source.lifecycle is not Lifecycle.DECOMMISSIONED:",
            "if False:",
        ),
        ("only one that does not answer at all", 'if failure.reason != "unreachable":', "if False:"),
        ("not one that its cluster sees", "if member is not None and member.online:", "if False:"),
        ("not while somebody has the disk", "            if watchers:\n", "            if False:\n"),
        ("not while it is not known who has the disk", "if isinstance(watchers, Unknown):", "if False:"),
        ("not without fencing on other storage", "elif not source.fenced:", "elif False:"),
        (
            "HA is left its containers",
            "    if container.id in cluster.ha:\n        yield",
            "    if False:\n        yield",
        ),
        ("a lock is respected", "    elif lock:\n        yield", "    elif False:\n        yield"),
        ("a local disk is not left behind", "elif not storage.shared:", "elif False:"),
        ("a container that runs elsewhere is not right", "    if runs_on:\n", "    if False:\n"),
        (
            "what the target lacks keeps it from moving",
            "if isinstance(assignment, Unassigned):\n        yield",
            "if False:\n        yield",
        ),
        ("maintenance is respected", "if source.lifecycle is Lifecycle.MAINTENANCE:", "if False:"),
        (
            "a virtual machine is no container",
            '    if (container.id, node, "lxc") not in cluster.guests:',
            "    if False:",
        ),
    ),
    *_of(
        "tests/layers/mounts",
        f"{L}mounts/__init__.py",
        (
            "a mount is dropped only where the spec says so",
            "needed = [bind for bind in missing if not is_dropped(container, bind)]",
            "needed = []",
        ),
        (
            "a source that nobody tells of is Unknown",
            'if mount.there == "unknown" and not mount.bind.optional:',
            "if False:",
        ),
        ("a locked config is not edited (mounts)", 'if lock := conf.main.text("lock"):', "if lock := '':"),
    ),
    *_of(
        "tests/layers/devices",
        f"{L}devices/__init__.py",
        ("a card that is not on nvidia is not passed", "        if card is None:\n", "        if False:\n"),
        (
            "a node of another device is not passed",
            "if wanted is not None and (here.major, here.minor) != wanted:",
            "if False:",
        ),
        ("cgroup v1 is blocked", "if not guests.cgroup2:", "if False:"),
        (
            "an edit is kept off by a lock (devices)",
            "stop = _editing_problem(container, conf, cluster) or _remaining_problem(done.remaining)",
            "stop = None",
        ),
    ),
    *_of(
        "tests/layers/shared/test_assignment.py",
        f"{L}shared/assignment.py",
        (
            "a card that is not listed is given to nobody",
            "        if gpu is None:\n            return Unassigned(",
            "        if False:\n            return Unassigned(",
        ),
        ("a VM's card is given to nobody", "if gpu.owner is not GpuOwner.CONTAINERS:", "if False:"),
        ("a claimed card is given to nobody", "if by := claimant((pci,), self.claims):", "if by := '':"),
        (
            "a card beside a claimed one is given to nobody",
            "if by := claimant(function.mates, self.claims):",
            "if by := '':",
        ),
        (
            "a card that is gone is not replaced",
            "gone = [gpu for gpu in self.listed.values() if self._is_gone(gpu)]",
            "gone = []",
        ),
        (
            "a card that a hand-made container has is not given away",
            "and pci not in self.others and self._is_free",
            "and self._is_free",
        ),
        ("a container keeps what it has", "for pci in sorted(self.has.get(container.id, ()))", "for pci in ()"),
    ),
    *_of(
        "tests/layers/shared/test_claims.py",
        f"{L}shared/claims.py",
        ("pending claims count", 'counts = line.strip().upper() == "[PENDING]"', "counts = False"),
        (
            "a whole device claims all functions",
            'return pci == self.address or pci.startswith(self.address + ".")',
            "return pci == self.address",
        ),
        ("mappings count", 'elif name == "mapping":', "elif False:"),
        ("a running VM's reservation counts", 'found += [Claim(f"VM {vmid} (running)", a)', "[Claim('', a)"),
    ),
    *_of(
        "tests/layers/power",
        f"{L}power/__init__.py",
        ("HA is left to start and stop", "if cluster is not None and container.id in cluster.ha:", "if False:"),
        ("a locked container is not started or stopped", 'if lock := conf.main.text("lock"):', "if lock := '':"),
        (
            "a restart that did not help is not repeated",
            "if running is not None and why and running.restarted_for == why:",
            "if False:",
        ),
        (
            "a card that another still runs with is waited for",
            "block = _problem(container, conf, cluster, running, why) or _taken(view, container)",
            "block = _problem(container, conf, cluster, running, why)",
        ),
        (
            "a container in between is Unknown",
            "    if container.id in power.between:\n        raise",
            "    if False:\n        raise",
        ),
    ),
    *_of(
        "tests/layers/userland",
        f"{L}userland/__init__.py",
        ("packages are not overwritten by an installer", "    if here.packages:\n", "    if False:\n"),
        ("other cards than assigned are noticed", "if seen != set(assignment.pcis):", "if False:"),
    ),
    # --- scripts
    *_of(
        "tests/layers/devices/test_edit.py",
        f"{L}shared/edit-config.sh",
        ("the script compares the digest", '[ "$(digest "$conf")" = "$seen" ] || stale', "true || stale"),
    ),
    *_of(
        "tests/world/test_guards.py tests/layers/devices/test_edit.py tests/world/test_run.py",
        "controller/world/host/lib.sh",
        (
            "a replaced file is still the one that was read",
            '[ "$_was" = "$2" ] || stale "$1 has changed since it was read"',
            "true",
        ),
        ("it is looked at again before the rename", 'if [ "$_was" != "$2" ]; then', "if false; then"),
        ("what is replaced is kept", '\t\tkeep "$_target"\n', ""),
    ),
    *_of(
        "tests/layers/power/test_power_sh.py",
        f"{L}power/power.sh",
        ("power: the config is as it was seen", '[ "$(digest "$conf")" = "$seen" ] || stale', "true || stale"),
        ("power: HA is asked", "! ha_manages || stale", "true || stale"),
        ("power: it is the run that was seen", '[ "$(started)" = "$since" ] || stale', "true || stale"),
        ("power: it does not run already", 'start) ! runs || stale "CT $id runs already" ;;', "start) ;;"),
    ),
    *_of(
        "tests/layers/placement/test_scripts.py",
        f"{L}placement/take-over.sh",
        ("take over: the node is not back", '! online "$source" || stale "$source is back"', "true"),
        ("take over: quorum", 'quorate || stale "this node', 'true || stale "this node'),
        ("take over: nobody has the disk", "*'\"watchers\"'*) stale", "*'\"watchers\"'*) true"),
        ("take over: nothing is replaced", '[ ! -e "$conf" ] || stale "$conf is there now"', "true"),
        ("take over: digest", '[ "$(digest "$from")" = "$seen" ] || stale', "true || stale"),
    ),
    *_of(
        "tests/layers/placement/test_scripts.py",
        f"{L}placement/move.sh",
        ("move: quorum", 'quorate || stale "this node', 'true || stale "this node'),
        ("move: the target is there", 'online "$target" || stale', "true || stale"),
        ("move: digest", '[ "$(digest "$conf")" = "$seen" ] || stale', "true || stale"),
        ("move: what could not be moved runs on", "\t\tbring_back\n", ""),
    ),
    *_of(
        "tests/world/test_run.py tests/world/test_units.py",
        "controller/world/units.py",
        (
            "a job's name is one that systemd takes",
            'if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,99}", step.job) is None:',
            "if False:",
        ),
        ("a NUL byte is refused", 'if "\\0" in text:', "if False:"),
        ("white space in an id is refused", r'if re.fullmatch(r"\S+", word) is None:', "if False:"),
    ),
]


def wrong_texts() -> list[str]:
    """Mutants whose text is not exactly once in its file: the guard was rewritten, and its mutant has to be."""
    found = []
    for mutant in MUTANTS:
        times = (ROOT / mutant.file).read_text().count(mutant.old)
        if times != 1:
            found.append(f"{mutant.file}: {mutant.guard}: {mutant.old!r} is there {times} times")
    return found


def _copy(to: Path) -> Path:
    copy = to / "copy"
    for name in ("controller", "tests", "specs", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", copy)
    samples = ROOT.parent / "shared"
    if samples.is_dir():
        (to / "shared").symlink_to(samples)
    return copy


def _run(copy: Path, tests: str) -> tuple[bool, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not lab and not vm",
        *tests.split(),
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=900, check=False)
    failed = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    return done.returncode == 0, failed or done.stdout[-200:]


class Copies:
    """Copies of the tree, one for each worker at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        self.free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(count):
            self.free.put(_copy(folder / str(number)))

    def unsound(self, mutants: list[Mutant]) -> str:
        """Which tests fail without any mutant, so that they notice nothing; "" when none does."""
        copy = self.free.get()
        try:
            for tests in dict.fromkeys((*(mutant.tests for mutant in mutants), LAST)):
                passes, said = _run(copy, tests)
                if not passes:
                    return f"{tests} fails without any mutant: {said}"
        finally:
            self.free.put(copy)
        return ""

    def caught(self, mutant: Mutant) -> str:
        """The test that notices, "" when none does."""
        copy = self.free.get()
        file = copy / mutant.file
        text = file.read_text()
        try:
            _write(file, text.replace(mutant.old, mutant.new))
            for tests in (mutant.tests, LAST):
                passes, said = _run(copy, tests)
                if not passes:
                    return said
        finally:
            _write(file, text)
            self.free.put(copy)
        return ""


def _write(file: Path, text: str) -> None:
    """Change a file so that Python sees it: what it has compiled may have the same size and second."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def main() -> int:
    """Try every mutant, or those whose guard holds a word."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.mutants", description=__doc__)
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    if wrong := wrong_texts():
        print(*wrong, sep="\n")
        return 1
    chosen = [mutant for mutant in MUTANTS if given.word in f"{mutant.file} {mutant.guard}"]
    began, missed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = Copies(Path(folder), given.workers)
        if not given.word and (said := copies.unsound(chosen)):
            print(said)
            return 1
        with ThreadPoolExecutor(given.workers) as pool:
            for mutant, by in zip(chosen, pool.map(copies.caught, chosen), strict=True):
                missed += not by
                print(f"{'caught' if by else 'MISSED'}  {mutant.file}: {mutant.guard}  {by[:110]}", flush=True)
    print(f"{time.monotonic() - began:.0f} s")
    print(f"{len(chosen)} guards mutated, {len(chosen) - missed} caught, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The tools that are compared, each set up as its own documentation advises for speed."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.hosts import NUMBER, Hosts, address
from bench.measure import Meter, Took

HERE = Path(__file__).resolve().parent.parent
TOOLS = HERE / ".venv-bench" / "bin"
FORKS = 50
_CURVE25519 = "KexAlgorithms=curve25519-sha256"


class Contender(Protocol):
    """A tool that asks hosts one thing. ``cold``: nothing is connected; ``warm``: again, nothing has changed."""

    name: str

    def cold(self, count: int) -> Took:
        """Ask so many hosts for the first time."""
        ...

    def warm(self, count: int, times: int) -> list[Took]:
        """Ask the same hosts again, so many times."""
        ...

    def end(self) -> None:
        """Leave no connection behind."""
        ...


class Ours:
    """The ssh world of this project, with all facts parsed."""

    def __init__(self, hosts: Hosts, meter: Meter, folder: Path, work: str) -> None:
        self.name = "reconcile"
        self.passes: list[dict[str, float]] = []
        self._hosts, self._meter, self._folder, self._work = hosts, meter, folder, work

    def cold(self, count: int) -> Took:
        """Start a process, log in, look, parse: from the start of the interpreter to its end."""
        return self._process(count, 1)[0]

    def warm(self, count: int, times: int) -> list[Took]:
        """Look again in a process that has looked once."""
        self.passes = self._process(count, times + 1)[1]["passes"][1:]
        return [Took(one["wall"], one["cpu"]) for one in self.passes]

    def idle(self, count: int, seconds: int) -> dict[str, float]:
        """Be connected to so many hosts and do nothing."""
        told = self._process(count, 1, seconds)[1]
        return {
            "connections": count,
            "seconds": seconds,
            "cpu_share_of_a_core": told["idle_cpu"] / seconds,
            "switches_per_second": told["idle_switches"] / seconds,
            "kib_each": told["resident"] / count / 1024,
        }

    def end(self) -> None:
        """Nothing outlives the process."""

    def record(self, answers: Path) -> None:
        """Write down what a host says."""
        self._process(1, 1, record=str(answers))

    def _process(self, count: int, passes: int, idle: int = 0, record: str = "") -> tuple[Took, dict[str, Any]]:
        state = Path(tempfile.mkdtemp(dir=self._folder))
        shutil.copy(self._hosts.known_hosts, state / "known_hosts")
        asked = {
            "count": count,
            "passes": passes,
            "port": self._hosts.sshd.port,
            "identity": str(self._hosts.sshd.identity),
            "state": str(state),
            "work": self._work,
            "idle": idle,
            "record": record,
        }
        command = [str(HERE / ".venv" / "bin" / "python"), "-m", "bench.ours", json.dumps(asked)]
        took, said = self._meter.run(command, _environment(self._folder))
        return took, json.loads(said)


class Ansible:
    """ansible-playbook with one task: 50 forks, pipelining, ControlPersist, no facts gathered."""

    def __init__(
        self, hosts: Hosts, meter: Meter, folder: Path, module: str, command: str, ssh_options: Sequence[str] = ()
    ) -> None:
        self.name = f"ansible {module}" + (" (curve25519)" if ssh_options else "")
        self._meter = meter
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._sockets = _Sockets(folder)
        inventory = "".join(
            f"h{n} ansible_host={address(n)} ansible_port={hosts.sshd.port} ansible_user=root "
            f"ansible_ssh_private_key_file={hosts.sshd.identity}\n"
            for n in range(NUMBER)
        )
        (self._folder / "inventory").write_text(inventory)
        (self._folder / "play.yml").write_text(
            f"- hosts: all\n  gather_facts: false\n  tasks:\n    - {module}: {command}\n      changed_when: false\n"
        )
        self._options = [f"UserKnownHostsFile={hosts.known_hosts}", "StrictHostKeyChecking=yes", *ssh_options]

    def cold(self, count: int) -> Took:
        """Run the playbook with no master connection there."""
        self.end()
        return self._play(count)

    def warm(self, count: int, times: int) -> list[Took]:
        """Run it again; the master connections are alive."""
        return [self._play(count) for _ in range(times)]

    def end(self) -> None:
        """End the master connections."""
        self._sockets.end()

    def _play(self, count: int) -> Took:
        options = " ".join(f"-o {option}" for option in self._options)
        (self._folder / "ansible.cfg").write_text(
            f"[defaults]\nforks = {FORKS}\ngathering = explicit\ninterpreter_python = /usr/bin/python3\n"
            f"inventory = inventory\n[ssh_connection]\npipelining = true\ncontrol_path_dir = {self._sockets.folder}\n"
            f"ssh_args = -F none -o ControlMaster=auto -o ControlPersist=300s {options}\n"
        )
        limit = ",".join(f"h{n}" for n in range(count))
        env = {**_environment(self._folder), "ANSIBLE_CONFIG": str(self._folder / "ansible.cfg")}
        command = [str(TOOLS / "ansible-playbook"), "-l", limit, str(self._folder / "play.yml")]
        took, said = self._meter.run(command, env)
        if said.count("ok=1 ") != count:
            raise SystemExit(f"bench: ansible did not reach {count} hosts:\n{said[-2000:]}")
        return took


class Pyinfra:
    """The pyinfra command with one command to run on each host. It connects anew each time."""

    def __init__(self, hosts: Hosts, meter: Meter, folder: Path, command: str) -> None:
        self.name = "pyinfra"
        self._meter, self._command = meter, command
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._data = {
            "ssh_port": hosts.sshd.port,
            "ssh_user": "root",
            "ssh_key": str(hosts.sshd.identity),
            "ssh_known_hosts_file": str(hosts.known_hosts),
            "ssh_strict_host_key_checking": "yes",
        }

    def cold(self, count: int) -> Took:
        """Run it."""
        inventory = self._folder / f"inventory{count}.py"
        inventory.write_text(f"hosts = {[(address(n), self._data) for n in range(count)]!r}\n")
        command = [str(TOOLS / "pyinfra"), "-y", "--parallel", str(FORKS), str(inventory), "exec", "--"]
        took, _ = self._meter.run([*command, *self._command.split()], _environment(self._folder))
        return took

    def warm(self, count: int, times: int) -> list[Took]:
        """Run it again: it has no warm state."""
        return [self.cold(count) for _ in range(times)]

    def end(self) -> None:
        """Nothing outlives the process."""


class OpenSsh:
    """The ssh command for each host, 50 at once, with ControlMaster."""

    def __init__(self, hosts: Hosts, meter: Meter, folder: Path, command: str) -> None:
        self.name = "OpenSSH ControlMaster"
        self._hosts, self._meter, self._command = hosts, meter, command
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._sockets = _Sockets(folder)

    def cold(self, count: int) -> Took:
        """Connect to each host and run the command."""
        self.end()
        return self._all(count)

    def warm(self, count: int, times: int) -> list[Took]:
        """Run it again over the master connections."""
        return [self._all(count) for _ in range(times)]

    def end(self) -> None:
        """End the master connections."""
        self._sockets.end()

    def _all(self, count: int) -> Took:
        options = [
            f"UserKnownHostsFile={self._hosts.known_hosts}",
            "StrictHostKeyChecking=yes",
            "ControlMaster=auto",
            "ControlPersist=300s",
            f"ControlPath={self._sockets.folder}/%h",
        ]
        ssh = [
            "ssh",
            "-F",
            "none",
            "-i",
            str(self._hosts.sshd.identity),
            "-p",
            str(self._hosts.sshd.port),
            "-l",
            "root",
        ]
        ssh += [word for option in options for word in ("-o", option)]
        command = ["xargs", "-P", str(FORKS), "-I{}", *ssh, "{}", self._command]
        took, said = self._meter.run(
            command, _environment(self._folder), "".join(f"{address(n)}\n" for n in range(count))
        )
        assert said
        return took


class _Sockets:
    """A short folder for control sockets (their paths have 108 bytes at most), another one after each end."""

    def __init__(self, folder: Path) -> None:
        self._within = folder
        self.folder = Path(tempfile.mkdtemp(prefix="cm-", dir=folder))

    def end(self) -> None:
        sockets = "\n".join(str(path) for path in self.folder.iterdir())
        leave = ["xargs", "-r", "-P", "8", "-I{}", "ssh", "-F", "none", "-O", "exit", "-S", "{}", "x"]
        subprocess.run(leave, input=sockets, text=True, capture_output=True, check=True)
        shutil.rmtree(self.folder)
        self.folder = Path(tempfile.mkdtemp(prefix="cm-", dir=self._within))


def _environment(home: Path) -> dict[str, str]:
    """Return an environment in which nobody's own configuration counts."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LC_ALL": "C.UTF-8", "PYTHONPATH": str(HERE)}


def all_of(
    hosts: Hosts, meter: Meter, folder: Path, answers: Path, answer: Path, text: Path
) -> dict[str, list[Contender]]:
    """Return the contenders for each work.

    ``look``: the real probe, all of it. ``answer``: what the probe said, without the hosts' work to find it out (a
    hundred hosts do that on a hundred machines); the other tools print the same text. ``text``: a file of 4 KB.
    """
    look, print_answer, print_text = hosts.look_command, f"cat {answer}", f"cat {text}"
    return {
        "look": [
            Ours(hosts, meter, folder, "look"),
            Ansible(hosts, meter, folder, "raw", look),
            Ansible(hosts, meter, folder, "raw", look, [_CURVE25519]),
            Ansible(hosts, meter, folder, "command", look),
            Pyinfra(hosts, meter, folder, look),
            OpenSsh(hosts, meter, folder, look),
        ],
        "answer": [
            Ours(hosts, meter, folder, str(answers)),
            Ansible(hosts, meter, folder, "raw", print_answer),
            Pyinfra(hosts, meter, folder, print_answer),
            OpenSsh(hosts, meter, folder, print_answer),
        ],
        "text": [
            Ours(hosts, meter, folder, print_text),
            Ansible(hosts, meter, folder, "raw", print_text),
            Pyinfra(hosts, meter, folder, print_text),
            OpenSsh(hosts, meter, folder, print_text),
        ],
    }

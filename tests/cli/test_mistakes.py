"""What people get wrong, and what breaks under them: a message that says what to do, and the right exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from controller.run import state
from tests.cli.conftest import Shell

COULD_NOT, BAD_SPECS = 1, 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--dry-run"], "--dry-run is for --once"),
        (["run", "--host", "kpro5"], "the loop looks after all objects"),
        (["run", "--listen", "nowhere"], "write HOST:PORT"),
        (["run", "--specs", "nowhere"], "there is no nowhere"),
        (["bogus"], "No such command 'bogus'"),
        (["plan", "--bogus"], "No such option"),
        (["why"], "Missing argument 'OBJECT'"),
        (["--once", "plan"], "--once does not go before plan"),
        (["--yes", "plan"], "--yes does not go before plan"),
        (["--once", "--timeout", "-1"], "-1"),
        (["schema", "nothing"], "nothing"),
        (["why", "ct12"], "cannot find ct12 in the specs; did you mean ct129?"),
        (["why", "container/ct129"], "did you mean Container/ct129?"),
        (["status", "zzz"], "there are kpro5, kpro4, ct129"),
        (["plan", "--host", "kprox"], "did you mean kpro"),
        (["plan", "--object", "Container/nope"], "cannot find Container/nope"),
        (["plan", "--layer", "container.device"], "did you mean container.devices?"),
        (["plan", "--allow", "restart:ct129"], "there is no class restart"),
        (["plan", "--allow", "restart-container"], "CLASS:KIND/NAME"),
        (["--once", "--allow", "restart-container:ct1299"], "did you mean ct129?"),
        (["plan", "--fleet", "simulated"], "it is `ssh`, or `sim:FILE`"),
        (["plan", "--fleet", "sim:nothing.yaml"], "nothing.yaml: No such file or directory"),
        (["trust", "kprox"], "did you mean kpro"),
        (["trust", "kpro5"], "only real hosts have keys"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_lines(shell: Shell, args: list[str], says: str) -> None:
    ran = shell.run(*args)
    assert ran.code == COULD_NOT  # 2 says "not as wanted", which nobody has found out
    assert says in ran.err
    assert ran.out == ""


def test_an_object_of_no_spec_can_be_given_a_permission_and_a_slip_is_said(shell: Shell) -> None:
    ran = shell.run("plan", "--allow", "restart-container:Container/ct128")
    assert ran.code == 0
    assert "no spec has Container/ct128; did you mean Container/ct129?" in ran.err
    assert shell.run("plan", "--allow", "reboot-host:Guest/210@kpro5").code == 0


@pytest.mark.parametrize("args", [["plan"], ["status"], ["validate"], ["why", "ct129"], ["snapshot"], ["--once"]])
def test_errors_in_json_are_json(shell: Shell, args: list[str]) -> None:
    missing = shell.run(*args, "-o", "json", "--specs", "nowhere")
    assert missing.code == (COULD_NOT if "--once" in args else BAD_SPECS)
    assert "there is no folder nowhere" in missing.json("errors")["errors"][0]["message"]
    (shell.place / "specs/ct129.yaml").write_text("kind: Container\nname: ct129\nid: 129\nhost: kpro55\ngpu: 2\n")
    broken = shell.run(*args, "-o", "json")
    assert broken.code == missing.code
    errors = broken.json("errors")["errors"]
    assert ("gpu", 5, "gpus") in [(e["field"], e["line"], e["nearest"]) for e in errors]
    assert "gpus" in broken.err  # for the person who looks at a log


def test_errors_of_all_else_in_json(shell: Shell) -> None:
    ran = shell.run("-o", "json", "why", "ct12")
    assert ran.code == COULD_NOT
    assert ran.json("errors")["errors"][0]["message"] == ran.err.rstrip("\n")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tab.yaml", b"kind: Host\n\tname: x\n", "cannot use a tab here"),
        ("noise.yaml", b"kind: \xff\n", "cannot read this as UTF-8"),
        ("text.yaml", b"hello\n", "cannot take this document for an object"),
        ("empty.yaml", b"", "cannot tell what an empty file means"),
        (
            "twice.yaml",
            b"kind: Host\nname: kpro5\naddress: 10.1.2.9\nplatform: linux\n",
            "two objects called Host/kpro5",
        ),
        ("\u65e5\u672c.yaml", b"kind: Hots\n", "Host"),
    ],
)
def test_broken_specs(shell: Shell, name: str, content: bytes, says: str) -> None:
    (shell.place / "specs" / name).write_bytes(content)
    for args in (["validate"], ["plan"]):
        ran = shell.run(*args)
        assert ran.code == BAD_SPECS
        assert says in ran.err
        assert name in ran.err
        assert ran.out == ""
    once = shell.run("--once")
    assert (once.code, once.out) == (COULD_NOT, "")


def test_no_specs(shell: Shell) -> None:
    (shell.place / "empty").mkdir()
    assert "holds no *.yaml file" in shell.run("validate", "--specs", "empty").err
    (shell.place / "empty/x.yml").write_text("kind: Host\n")
    assert "*.yml files are not read" in shell.run("validate", "--specs", "empty").err
    assert "ends in .yaml" in shell.run("validate", "--specs", "specs/fleet.sim.yaml").err
    assert shell.run("validate", "--specs", "specs/hosts.yaml").code == 0


def test_a_file_that_is_not_read_for_its_name_is_said(shell: Shell) -> None:
    (shell.place / "specs/more.yml").write_text("kind: Host\n")
    ran = shell.run("validate")
    assert ran.code == 0
    assert "specs/more.yml is not read" in ran.err


def test_a_link_to_nowhere_is_a_file_that_cannot_be_read(shell: Shell) -> None:
    (shell.place / "specs/gone.yaml").symlink_to("nowhere.yaml")
    ran = shell.run("validate")
    assert ran.code == BAD_SPECS
    assert "specs/gone.yaml" in ran.err


def test_a_pipe_is_not_waited_for(shell: Shell) -> None:
    os.mkfifo(shell.place / "specs/pipe.yaml")
    assert shell.run("validate").code == BAD_SPECS


def test_folders_are_followed_through_links_once(shell: Shell) -> None:
    (shell.place / "linked").mkdir()
    (shell.place / "linked/loop").symlink_to(shell.place / "linked")
    (shell.place / "linked/specs").symlink_to(shell.place / "specs")
    assert "2 hosts, 1 container" in shell.run("validate", "--specs", "linked").out


def _without_rights(command: list[str]) -> list[str]:
    """The command as somebody who is not root, or is root without its right to read everything."""
    if os.geteuid() != 0:
        return command
    drop = "-dac_override,-dac_read_search"
    return ["setpriv", "--bounding-set", drop, "--inh-caps", drop, *command]


def _refused(shell: Shell, *args: str) -> subprocess.CompletedProcess[str]:
    command = _without_rights(shell.command(*args))
    ran = subprocess.run(command, cwd=shell.place, env=shell.process_env, capture_output=True, text=True, check=False)
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran


def test_what_may_not_be_read_is_an_error_and_not_absent(shell: Shell) -> None:
    file, folder = shell.place / "specs/ct129.yaml", shell.place / "specs/closed"
    file.chmod(0)
    ran = _refused(shell, "validate")
    assert ran.returncode == BAD_SPECS
    assert "specs/ct129.yaml" in ran.stderr
    file.chmod(0o644)
    folder.mkdir(mode=0)
    ran = _refused(shell, "validate")
    assert ran.returncode == BAD_SPECS
    assert "specs/closed: Permission denied" in ran.stderr
    folder.chmod(0o755)


@pytest.mark.parametrize("command", ["plan", "status", "--once"])
def test_a_state_directory_that_cannot_be_written(shell: Shell, command: str) -> None:
    shell.run("status")
    kept = shell.place / "state"
    kept.chmod(0o500)
    ran = _refused(shell, command)
    kept.chmod(0o700)
    assert ran.returncode == COULD_NOT
    assert "cannot remember anything in" in ran.stderr
    assert "--state DIR" in ran.stderr


@pytest.mark.parametrize("where", ["specs/hosts.yaml", "specs/hosts.yaml/state", "/proc/state"])
def test_a_state_directory_that_cannot_be(shell: Shell, where: str) -> None:
    for sim in (True, False):
        ran = shell.run("plan", "--state", where, sim=sim)
        assert ran.code == COULD_NOT
        assert "cannot remember anything in" in ran.err


def test_a_damaged_identity_is_never_taken_for_one(shell: Shell) -> None:
    shell.run("status")
    (shell.place / "state/controller-id").write_text("")
    ran = shell.run("status")
    assert ran.code == COULD_NOT
    assert "delete it" in ran.err


def test_a_changed_and_a_broken_fleet_file(shell: Shell) -> None:
    fleet = shell.place / "specs/fleet.sim.yaml"
    shell.run("--once")
    good = fleet.read_text()
    fleet.write_text(good.replace("uvm_major: 236", "uvm_major: 237"))
    ran = shell.run("status", "-o", "json")
    assert ran.code == 2
    assert "the simulated fleet starts anew" in ran.err
    ran.json("status")
    fleet.write_text(good.replace("uvm_major", "uvm_mojor"))
    assert "did you mean uvm_major?" in shell.run("status").err
    for content in (b"{", b"", b"\xff\xfe\xfd", b"[]"):
        fleet.write_bytes(content)
        ran = shell.run("status")
        assert ran.code == COULD_NOT
        assert "cannot load the simulated fleet: specs/fleet.sim.yaml" in ran.err


def test_nobody_reads_on(shell: Shell) -> None:
    command = " ".join(f"'{part}'" for part in shell.command("plan"))
    ran = subprocess.run(
        ["bash", "-c", f"{command} | head -1"],
        cwd=shell.place,
        env=shell.process_env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "What differs from the specs\n"
    assert ran.stderr == ""


def test_a_full_disk(shell: Shell) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            shell.command("plan"),
            cwd=shell.place,
            env=shell.process_env,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert ran.returncode == COULD_NOT
    assert ran.stderr.decode() == "cannot go on: No space left on device\n"


def test_a_second_run_with_the_same_state_is_refused(shell: Shell) -> None:
    shell.run("status")
    with state.Lock(shell.place / "state"):
        ran = shell.run("--once", "-o", "json")
        assert ran.code == COULD_NOT
        assert f"process {os.getpid()} works with" in ran.json("errors")["errors"][0]["message"]
        assert shell.run("plan").code == 0  # looking is free
    assert shell.run("--once").code == 0


def test_real_hosts_that_are_not_there(shell: Shell) -> None:
    for name in os.listdir(shell.place / "specs"):
        (shell.place / "specs" / name).unlink()
    host = "kind: Host\nname: {0}\naddress: {1}\nplatform: linux\nssh: {{port: 9}}\n"
    (shell.place / "specs/a.yaml").write_text(
        "---\n".join((host.format("a", "127.0.0.1"), host.format("b", "b.invalid")))
    )
    unknown = shell.run("plan", "-o", "json", sim=False)
    assert unknown.code == COULD_NOT
    assert {row["reason"] for row in unknown.json("plan")["unknown"]} == {"refused", "unreachable"}
    assert shell.run("status", sim=False).code == COULD_NOT
    assert shell.run("--once", sim=False).code == COULD_NOT
    trust = shell.run("trust", "a", "-o", "json", sim=False)
    assert trust.code == COULD_NOT
    assert "nothing listens there" in trust.json("errors")["errors"][0]["message"]


@pytest.mark.parametrize("plain", [["--no-color"], []])
def test_colours_are_for_terminals_that_want_them(shell: Shell, plain: list[str]) -> None:
    env = {**shell.process_env, "TERM": "xterm"}
    assert "\x1b[" in _on_a_terminal(shell.command("status"), shell.place, env)
    if not plain:
        env["NO_COLOR"] = "1"
    for args in (["status"], ["--once"], ["plan"]):
        said = _on_a_terminal(shell.command(*args, *plain), shell.place, env)
        assert not any(f"\x1b[{colour}m" in said for colour in range(30, 38)), said


def test_a_terminal_shows_what_runs(shell: Shell) -> None:
    said = _on_a_terminal(shell.command("--once"), shell.place, {**shell.process_env, "TERM": "xterm"})
    assert "looking at 2 hosts" in said
    assert "begin:  restart Container/ct129: restart CT 129 on kpro5" in said
    assert "\x1b[?25h" in said  # the cursor is back


def _on_a_terminal(command: list[str], place: Path, env: dict[str, str]) -> str:
    """What a command prints on a terminal."""
    ours, its = os.openpty()
    with subprocess.Popen(command, cwd=place, env=env, stdin=its, stdout=its, stderr=its) as running:
        os.close(its)
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # EIO: the last one who had it open is gone
                break
            if not part:
                break
            said += part
        running.wait(60)
    os.close(ours)
    assert b"Traceback" not in said
    return said.decode()


def test_an_interrupt_ends_with_a_sentence(shell: Shell) -> None:
    (shell.place / "specs/fleet.sim.yaml").unlink()
    os.mkfifo(shell.place / "specs/fleet.sim.yaml")  # opening it waits for a writer: here the command can be met
    command = shell.command("plan")
    with (
        subprocess.Popen(command, cwd=shell.place, env=shell.process_env, stdout=-1, stderr=-1, text=True) as running,
        (shell.place / "specs/fleet.sim.yaml").open("w"),  # opened when the other end is: it is at work
    ):
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == COULD_NOT
    assert out == ""
    assert err.lstrip("\n").startswith("stopped. What was begun on a host ends there by itself")


def test_the_module_is_the_command(shell: Shell) -> None:
    assert json.loads(shell.run("schema", "plan", sim=False).out)["title"] == "PlanReport"

"""What a host says of its units, read; the fragment that says it, over a tree; the scripts of the package."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.facts.units import How, Job, Lease, Progress, Unit, UnitFacts, last_lines, parse
from controller.facts.words import ParseError, Section
from controller.world import units

BOOT = "11111111-2222-3333-4444-555555555555"
OTHER_BOOT = "99999999-2222-3333-4444-555555555555"

EVERYTHING = f"""\
schema 1
generation 12
boot {BOOT}
lease abc 1320 alice (desk:1)
step 11 exit 75 1200.10 1201.20 edit-config-ct129-0a0b0c0d Container/ct129
job weights-a stalled - 100.00 - fetch-x Server/x
progress 33 52 400.50
log 20
 10 %\r 11 %\r 12 %\nhé\x1b[0m
job weights-b exit 0 90.00 95.00 fetch-y Server/y
end
"""


def section(text: str, rc: int = 0, err: str = "") -> Section:
    return Section(rc, text, err)


def test_everything_a_host_can_say() -> None:
    text = EVERYTHING.encode().decode("utf-8", "surrogateescape")
    size = len(" 10 %\r 11 %\r 12 %\nhé\x1b[0m".encode())
    facts = parse(section(text.replace("log 20", f"log {size}")))
    assert facts == UnitFacts(
        12,
        BOOT,
        Lease("abc", "alice (desk:1)", 1320),
        Unit("edit-config-ct129-0a0b0c0d", "Container/ct129", How.EXIT, 75, 1200.1, 1201.2),
        11,
        (
            Job(
                "fetch-x",
                "Server/x",
                How.STALLED,
                None,
                100.0,
                None,
                "weights-a",
                Progress(33, 52, 400.5),
                (" 12 %", "hé"),
            ),
            Job("fetch-y", "Server/y", How.EXIT, 0, 90.0, 95.0, "weights-b"),
        ),
    )
    assert [job.state for job in facts.jobs] == ["stalled", "done"]
    assert facts.running is None


def test_a_host_that_never_ran_a_step() -> None:
    assert parse(section(f"schema 1\ngeneration 0\nboot {BOOT}\nend\n")) == UnitFacts(0, BOOT)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "garbled"),
        ("schema 1\n", "garbled"),
        (f"schema 1\ngeneration 1\nboot {BOOT}\n", "garbled"),
        (f"schema 1\ngeneration 1\nboot {BOOT}\nend", "garbled"),
        ("schema 1\ngeneration x\nboot b\nend\n", "garbled"),
        ("schema 1\ngeneration 1\nboot not-one\nend\n", "garbled"),
        (f"schema 1\ngeneration 1\nboot {BOOT}\nlease a\nend\n", "garbled"),
        (f"schema 1\ngeneration 1\nboot {BOOT}\nstep 1 exploded 0 1 1 a b\nend\n", "garbled"),
        (f"schema 1\ngeneration 1\nboot {BOOT}\njob j exit 1 1 1 a b\nlog 100\nshort\nend\n", "garbled"),
        ("schema 2\ngeneration 1 of another kind\n", "newer-schema"),
    ],
)
def test_what_is_no_answer_is_unknown_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(ParseError) as error:
        parse(section(text))
    assert error.value.reason == reason


def test_a_host_that_may_not_be_read_says_so() -> None:
    with pytest.raises(ParseError, match="cannot read /var/lib/reconcile") as error:
        parse(section("", 1, "cannot read /var/lib/reconcile\n"))
    assert error.value.reason == "unreadable"


@given(st.text())
def test_any_text_is_facts_or_unknown(text: str) -> None:
    with contextlib.suppress(ParseError):
        parse(section(text))


@given(st.binary())
def test_lines_of_a_log_hold_nothing_that_a_terminal_would_obey(log: bytes) -> None:
    for line in last_lines(log):
        assert line.isprintable()


# The fragment, over a tree


class Tree:
    """A host's files, and the fragment run over them by a shell."""

    def __init__(self, root: Path, shell: str) -> None:
        self.root = root
        self.shell = shell
        self.write("proc/sys/kernel/random/boot_id", f"{BOOT}\n")
        self.write("proc/uptime", "1000.50 2000.00\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def unit(self, place: str, boot: str = BOOT, **more: str) -> None:
        self.write(f"var/lib/reconcile/{place}/meta", f"id-{place.replace('/', '-')} Container/ct129 {boot}\n")
        for name, text in more.items():
            self.write(f"var/lib/reconcile/{place}/{name}", text)

    def raw(self) -> Section:
        text = f"LC_ALL=C\nexport LC_ALL\nset -u\nroot=$1\nfragment() {{\n{units.PROBE}\n}}\nfragment"
        done = subprocess.run([self.shell, "-c", text, "sh", self.root], capture_output=True, check=False)
        return Section(done.returncode, done.stdout.decode("utf-8", "surrogateescape"), done.stderr.decode())

    def look(self) -> UnitFacts:
        answer = self.raw()
        assert answer.err == ""
        return parse(answer)


@pytest.fixture(params=["dash", "bash", "busybox"])
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Tree:
    shell = shutil.which(request.param)
    if shell is None:
        pytest.skip(f"there is no {request.param} on this machine")
    if request.param == "busybox":
        applet = tmp_path / "bin" / "sh"
        applet.parent.mkdir()
        applet.symlink_to(shell)
        shell = str(applet)
    return Tree(tmp_path / "root", shell)


def test_nothing_there_is_generation_zero(tree: Tree) -> None:
    assert tree.look() == UnitFacts(0, BOOT)


def test_a_lease_counts_until_its_second(tree: Tree) -> None:
    tree.write("run/reconcile/lease", "abc 1001\nalice (desk:1)\n")
    assert tree.look().lease == Lease("abc", "alice (desk:1)", 1001)
    tree.write("run/reconcile/lease", "abc 1000\nalice (desk:1)\n")
    assert tree.look().lease is None


@pytest.mark.parametrize(
    ("boot", "loaded", "files_", "expected"),
    [
        (BOOT, True, {}, Unit("id-steps-7", "Container/ct129", How.RUNNING)),
        (BOOT, True, {"began": "900.10\n"}, Unit("id-steps-7", "Container/ct129", How.RUNNING, None, 900.1)),
        (
            BOOT,
            True,
            {"began": "900.10\n", "rc": "0 exit 950.00\n"},
            Unit("id-steps-7", "Container/ct129", How.EXIT, 0, 900.1, 950.0),
        ),
        (
            BOOT,
            False,
            {"began": "900.10\n", "rc": "124 timeout 950.00\n"},
            Unit("id-steps-7", "Container/ct129", How.TIMEOUT, 124, 900.1, 950.0),
        ),
        (BOOT, False, {"began": "900.10\n"}, Unit("id-steps-7", "Container/ct129", How.VANISHED, None, 900.1)),
        (
            BOOT,
            False,
            {"began": "900.10\n", "rc": ""},
            Unit("id-steps-7", "Container/ct129", How.VANISHED, None, 900.1),
        ),
        (BOOT, False, {}, Unit("id-steps-7", "Container/ct129", How.NEVER_BEGUN)),
        (OTHER_BOOT, False, {"began": "900.10\n"}, Unit("id-steps-7", "Container/ct129", How.INTERRUPTED)),
        (
            OTHER_BOOT,
            False,
            {"began": "900.10\n", "rc": "0 exit 950.00\n"},
            Unit("id-steps-7", "Container/ct129", How.EXIT, 0),
        ),
    ],
    ids=str,
)
def test_how_the_last_step_is(tree: Tree, boot: str, loaded: bool, files_: dict[str, str], expected: Unit) -> None:
    tree.write("var/lib/reconcile/generation", "9 7\n")
    tree.unit("steps/5", rc="1 exit 1.0\n")
    tree.unit("steps/7", boot, **files_)
    if loaded:
        tree.write("run/systemd/transient/reconcile-step.service", "")
    seen = tree.look()
    assert (seen.generation, seen.step_number, seen.step) == (9, 7, expected)
    assert (seen.running is None) == (expected.how is not How.RUNNING)


def test_a_step_whose_directory_was_never_moved_into_place_is_none(tree: Tree) -> None:
    tree.write("var/lib/reconcile/generation", "9 9\n")
    tree.unit("steps/5", rc="1 exit 1.0\n")
    assert tree.look() == UnitFacts(9, BOOT)


def test_jobs_and_what_they_say(tree: Tree) -> None:
    tree.write("var/lib/reconcile/generation", "3 0\n")
    tree.unit("jobs/done", began="1.0\n", rc="0 exit 2.0\n", out="fine\n", progress="5 5 1.5\n")
    tree.unit("jobs/failed", began="1.0\n", rc="4 exit 2.0\n", out="first\n" + "x" * 5000 + "\nno space ä\n\n")
    tree.unit("jobs/moving", began="1.0\n", out="", progress="5 10 900.00\n")
    tree.unit("jobs/stalled", began="1.0\n", out="at it\n", progress="5 10 820.00\n")
    for name in ("moving", "stalled"):
        tree.write(f"run/systemd/transient/reconcile-job-{name}.service", "")
    done, failed, moving, stalled = tree.look().jobs
    assert (done.name, done.state, done.log, done.progress) == ("done", "done", (), Progress(5, 5, 1.5))
    assert (failed.name, failed.state, failed.rc, failed.log[-1]) == ("failed", "failed", 4, "no space ä")
    assert len("".join(failed.log)) < 4096
    assert (moving.state, moving.progress, moving.log) == ("running", Progress(5, 10, 900.0), ())
    assert (stalled.state, stalled.log) == ("stalled", ("at it",))


@pytest.mark.skipif(Path("/proc/self").stat().st_uid == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_read_is_not_an_empty_one(tree: Tree) -> None:
    tree.write("var/lib/reconcile/generation", "9 7\n")
    (tree.root / "var/lib/reconcile").chmod(0)
    assert tree.raw().rc == 1


# All scripts of the package that run on hosts

PACKAGE = Path(str(files("controller")))
FRAGMENTS = {"probe.sh", "world.sh", "unit.sh"}  # bodies of functions, and what stands before a script
SCRIPTS = sorted(path for path in PACKAGE.rglob("*.sh") if path.name not in FRAGMENTS)
HARMLESS = re.compile(r"\+ (set -\w+|\w+=.*)")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_script_does_nothing_before_its_last_line(script: Path, tmp_path: Path) -> None:
    lines = script.read_text().split("\n")
    if "main() {" in lines:  # an action; else a library
        assert lines[-2:] == ['main "$@"', ""]
        del lines[-2:]
    text = "\n".join([*lines, ""])
    # What a shell does with it, said by the shell: assignments and options, and no command.
    ran = subprocess.run(["dash", "-x"], input=text.encode(), capture_output=True, cwd=tmp_path, env={}, check=True)
    assert [line for line in ran.stderr.decode().splitlines() if not HARMLESS.fullmatch(line)] == []

"""Steps as units, on a real systemd."""

from __future__ import annotations

import hashlib
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.facts.units import How, Progress, UnitFacts, parse
from controller.spec.model import Host as SpecHost
from controller.spec.model import Specs
from controller.world import units
from controller.world.fleet import SshWorld
from controller.world.port import Done, Look, Lost, Order, Outcome, Refused
from controller.world.units import Controller
from tests.lab import hosts
from tests.lab.fixtures import need_lab
from tests.lab.lab import Lab
from tests.world.steps import ALICE, BOB, Host, step

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def units_lab() -> Iterator[Lab]:
    """A plain host to work on, and one with /etc/pve."""
    need_lab()
    with Lab(hosts={name: hosts.default()[name] for name in ("box1", "kpro4")}) as lab:
        yield lab


@pytest.fixture
def host(units_lab: Lab) -> Host:
    host = Host(units_lab, "box1")
    host.forget()
    return host


def effects(host: Host) -> list[str]:
    return host.sh("cat /root/effect 2>/dev/null || :").splitlines()


LEAVES_A_MARK = 'echo "$1" >>/root/effect'


# What a step gets, and what comes back


def test_arguments_stdin_output_and_exit_code_arrive_as_they_are(host: Host) -> None:
    args = ("", " a  'b' \"c\"\n$HOME `id` \\ % %n $$", "*", "-n", "ä\udcff")
    done = host.perform(step("printf '<%s>' \"$@\"; cat; echo no >&2; exit 7", *args, stdin=b"\x00\xff\n\nend"))
    expected = b"".join(b"<" + a.encode("utf-8", "surrogateescape") + b">" for a in args) + b"\x00\xff\n\nend"
    assert done == Done(7, expected.decode("utf-8", "replace"), "no\n")


def test_a_script_knows_its_step_and_where_to_keep_things(host: Host) -> None:
    wanted = step('echo "$RECONCILE_STATE $RECONCILE_STEP_DIR $RECONCILE_STEP $RECONCILE_OBJECT"; umask; id -u; pwd')
    done = host.perform(wanted)
    assert done == Done(
        0, f"/var/lib/reconcile /var/lib/reconcile/steps/1 {wanted.id} Container/ct129\n0022\n0\n/\n", ""
    )


def test_of_much_output_the_last_64_kib_come_back(host: Host) -> None:
    done = host.perform(
        step("head -c 200000 /dev/zero | tr '\\0' o; echo END; head -c 90000 /dev/zero >&2; echo END >&2")
    )
    assert isinstance(done, Done)
    assert (len(done.out), len(done.err)) == (65536, 65536)
    assert done.out.endswith("oEND\n")
    assert done.err.endswith("END\n")


def test_a_large_script_and_input_arrive_whole(host: Host) -> None:
    stdin = bytes(range(256)) * 16384
    done = host.perform(step("#" + "x" * 300_000 + "\nsha256sum", stdin=stdin))
    assert done == Done(0, f"{hashlib.sha256(stdin).hexdigest()}  -\n", "")


def test_each_step_counts_the_generation_up_and_is_told(host: Host) -> None:
    assert host.look().generation == 0
    host.perform(step("exit 3"))
    seen = host.look()
    assert (seen.generation, seen.step_number) == (1, 1)
    assert seen.step is not None
    assert (seen.step.id, seen.step.object, seen.step.how, seen.step.rc) == (
        step("exit 3").id,
        "Container/ct129",
        How.EXIT,
        3,
    )
    assert seen.step.began is not None
    assert seen.step.ended is not None
    assert seen.step.began <= seen.step.ended
    assert seen.running is None


def test_a_quiet_host_answers_byte_for_byte_the_same_and_starts_nothing_for_it(host: Host) -> None:
    host.perform(step("echo x"))
    host.perform(step("echo x", job="good"))
    host.wait(lambda seen: seen.jobs[0].state == "done")
    first = host.raw()
    traced = host.run(
        f"strace -c true 2>/dev/null; PATH=/nonexistent; section() {{\n{units.PROBE}\n}}; section; section"
    )
    assert (traced.rc, traced.err) == (0, b"")  # no program at all was to be found
    assert traced.out == first + first
    assert host.raw() == first


def test_steps_follow_each_other_without_a_pause(host: Host) -> None:
    seen = host.look()
    for n in range(40):
        order = Order(step(LEAVES_A_MARK, str(n)), seen.generation + n, seen.boot_id)
        assert units.perform(host, order, ALICE, 60) == Done(0, "", "")  # type: ignore[arg-type]
    assert effects(host) == [str(n) for n in range(40)]
    kept = host.sh("ls /var/lib/reconcile/steps").split()
    assert sorted(map(int, kept)) == list(range(21, 41))


# Refusals


def test_an_order_that_rests_on_old_facts_is_refused(host: Host) -> None:
    before = host.look()
    assert isinstance(host.perform(step(LEAVES_A_MARK, "1"), seen=before), Done)
    again = host.perform(step(LEAVES_A_MARK, "1"), seen=before)
    assert again == Refused("stale", "the host is at generation 1, and was at 0 when it was looked at")
    other_boot = Order(step(LEAVES_A_MARK, "2"), 1, "00000000-0000-0000-0000-000000000000")
    refused = units.perform(host, other_boot, ALICE, 60)  # type: ignore[arg-type]
    assert refused == Refused("stale", "the host has booted since it was looked at")
    assert effects(host) == ["1"]


def test_another_controllers_lease_is_kept_until_it_ends_or_is_given_back(host: Host) -> None:
    assert isinstance(host.perform(step(":"), ALICE, lease=2), Done)
    refused = host.perform(step(LEAVES_A_MARK, "bob"), BOB)
    assert isinstance(refused, Refused)
    assert refused.reason == "lease"
    assert re.fullmatch(r"held by alice \(desk:1\) for [12] s more", refused.message)
    restarted = Controller(ALICE.id, "alice (desk:77)")
    assert isinstance(host.perform(step(":"), restarted, lease=2), Done)
    seen = host.look()
    assert seen.lease is not None
    assert seen.lease.name == "alice (desk:77)"
    host.wait(lambda seen: seen.lease is None)
    assert isinstance(host.perform(step(LEAVES_A_MARK, "bob"), BOB), Done)
    units.release(host, ALICE)  # type: ignore[arg-type]
    assert host.perform(step(":"), ALICE).reason == "lease"  # type: ignore[union-attr]
    units.release(host, BOB)  # type: ignore[arg-type]
    assert isinstance(host.perform(step(":"), ALICE), Done)
    assert effects(host) == ["bob"]


def test_the_lease_runs_from_the_end_of_a_long_step(host: Host) -> None:
    assert isinstance(host.perform(step("sleep 3"), ALICE, lease=2), Done)
    assert host.perform(step(":"), BOB).reason == "lease"  # type: ignore[union-attr]


def test_of_two_receivers_at_once_one_wins(host: Host) -> None:
    for round_ in range(5):
        seen = host.look()
        who = [Controller(f"c{n}", f"c{n}") for n in range(4)]
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(
                pool.map(lambda c, r=round_, s=seen: host.perform(step(LEAVES_A_MARK, str(r)), c, s, lease=1), who)
            )
        assert [type(o) for o in outcomes].count(Done) == 1
        assert {o.reason for o in outcomes if isinstance(o, Refused)} <= {"lease", "stale"}
        assert effects(host)[round_:] == [str(round_)]
        host.wait(lambda seen: seen.lease is None)


def test_while_a_step_runs_no_other_is_begun(host: Host) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(host.perform, step("while [ ! -e /run/go ]; do sleep 0.1; done; rm /run/go"), lease=1)
        host.wait(lambda seen: seen.running is not None)
        host.wait(lambda seen: seen.lease is None)
        for who in (ALICE, BOB):
            refused = host.perform(step(LEAVES_A_MARK, "x"), who)
            assert isinstance(refused, Refused)
            assert refused.reason == "busy"
            assert "of Container/ct129 is running" in refused.message
        host.sh("touch /run/go")
        assert first.result() == Done(0, "", "")
    assert effects(host) == []


def test_state_of_a_newer_release_is_left_alone(host: Host) -> None:
    host.sh("mkdir -p /var/lib/reconcile; echo 2 >/var/lib/reconcile/schema")
    seen = host.lab.run("box1", "cat /proc/sys/kernel/random/boot_id").stdout.strip()
    refused = units.perform(host, Order(step(LEAVES_A_MARK, "x"), 0, seen), ALICE, 60)  # type: ignore[arg-type]
    assert refused == Refused("unable", "/var/lib/reconcile was written by a newer release (schema 2)")
    assert effects(host) == []


def test_a_cut_or_damaged_transfer_runs_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    order = host.order(step(LEAVES_A_MARK, "x", stdin=b"some more bytes"))
    whole = units.order_text(order, ALICE, 60, "abc")
    sent: list[bytes] = []
    run = Host.run
    monkeypatch.setattr(Host, "run", lambda self, command, stdin=b"", **more: run(self, command, sent.pop(), **more))
    for size in [*range(0, len(whole), 977), len(whole) - 1]:
        sent.append(whole[:size])
        assert units.perform(host, order, ALICE, 60) == Refused("unable", "the order did not wholly arrive")  # type: ignore[arg-type]
    monkeypatch.undo()
    assert host.look().generation == 0
    assert host.sh("ls -A /run/reconcile /var/lib/reconcile 2>/dev/null || :").split() == ["/run/reconcile:"]


def test_a_full_disk_is_a_refusal_and_a_result_all_the_same(host: Host) -> None:
    try:
        host.sh("mkdir -p /var/lib/reconcile; mount -t tmpfs -o size=64k tmpfs /var/lib/reconcile")
        done = host.perform(step("head -c 1M /dev/zero >/var/lib/reconcile/full || exit 3"))
        assert isinstance(done, Done)
        assert done.rc == 3
        assert host.look().step.how in (How.VANISHED, How.EXIT)  # type: ignore[union-attr]
        refused = host.perform(step(LEAVES_A_MARK, "x"))
        assert isinstance(refused, Refused)
        assert refused.reason == "unable"
        assert "No space left" in refused.message
        assert effects(host) == []
        host.sh("rm /var/lib/reconcile/full")
        assert isinstance(host.perform(step(LEAVES_A_MARK, "x")), Done)
    finally:
        host.sh("umount /var/lib/reconcile")


# Ends


def test_a_step_whose_time_is_up_is_killed_with_all_its_children(host: Host) -> None:
    done = host.perform(step("(setsid sleep 1234 &) ; echo begun; sleep 1234", timeout=1.0))
    assert isinstance(done, Done)
    assert (done.rc, done.out) == (124, "begun\n")
    assert "its time was up" in done.err
    assert host.look().step.how is How.TIMEOUT  # type: ignore[union-attr]
    assert host.run("pgrep -f '[s]leep 1234'").rc == 1


def test_children_left_behind_do_not_outlive_a_step(host: Host) -> None:
    assert host.perform(step("setsid sleep 1234 </dev/null >/dev/null 2>&1 & echo ok")) == Done(0, "ok\n", "")
    assert host.run("pgrep -f '[s]leep 1234'").rc == 1


def test_a_killed_step_is_seen_as_that(host: Host) -> None:
    done = host.perform(step("kill -9 $$"))
    assert isinstance(done, Done)
    assert done.rc == 137
    assert host.look().step.how is How.KILLED  # type: ignore[union-attr]


def test_a_script_that_sh_cannot_read_fails(host: Host) -> None:
    done = host.perform(step(f"{LEAVES_A_MARK} x; if"))
    assert isinstance(done, Done)
    assert done.rc == 2
    assert "yntax error" in done.err
    assert effects(host) == []


# Secrets


def test_stdin_is_nowhere_but_with_the_script(host: Host) -> None:
    secret = b"hf_" + b"NeverSeen" * 3
    body = """
        ls -l /run/reconcile /proc/self/fd/0
        systemctl show reconcile-step.service; cat /run/systemd/transient/*
        cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' ' '
        journalctl --no-pager -u reconcile-step.service 2>/dev/null
        grep -rl 'Never[S]een' /run /var/lib /tmp /var/log 2>/dev/null || :
        read -r secret; [ "${#secret}" = 30 ] && echo had it
        """
    done = host.perform(step(body, stdin=secret + b"\n"))
    assert isinstance(done, Done)
    assert done.out.endswith("\nhad it\n")
    assert secret.decode() not in done.out + done.err
    assert "stdin.reconcile-step" not in re.sub(r".*deleted.*", "", done.out)
    for end in ("kill -9 $$", "sleep 100"):
        host.perform(step(end, stdin=secret, timeout=1.0))
    assert host.run("grep -rl NeverSeen /run /var/lib /tmp /var/log; journalctl | grep -c NeverSeen").out in (
        b"",
        b"0\n",
    )


def test_input_of_a_receiver_that_was_killed_goes_with_the_next_order(host: Host) -> None:
    order = host.order(step(":", stdin=b"hf_NeverSeen"))
    text = units.order_text(order, ALICE, 60, "abc")
    command = units._BOOTSTRAP.format(nonce="abc", digest="").replace("[ ", "kill -9 $$; [ ")
    assert host.run(command, text).rc != 0
    assert host.run("grep -rl NeverSeen /run/reconcile").rc == 0
    assert isinstance(host.perform(step(":")), Done)
    assert host.run("grep -rl NeverSeen /run/reconcile").rc == 1


def test_output_does_not_go_to_the_journal(host: Host) -> None:
    host.perform(step("echo OnlyInFiles; echo OnlyInFiles >&2"))
    assert host.run("journalctl --sync; journalctl | grep -c OnlyInFiles").out in (b"", b"0\n")


# Connections and controllers that are lost


def test_a_lost_connection_loses_nothing(host: Host) -> None:
    before = host.look()
    host.cut_after = 1.0
    wanted = step(f"sleep 3; {LEAVES_A_MARK}; exit 5", "1")
    assert host.perform(wanted, seen=before) == Lost("the connection ended")
    host.cut_after = None
    seen = host.look()
    assert seen.running is not None
    assert (seen.running.id, seen.generation) == (wanted.id, 1)
    assert host.perform(wanted).reason == "busy"  # type: ignore[union-attr]
    assert host.perform(wanted, seen=before).reason == "stale"  # type: ignore[union-attr]
    seen = host.wait(lambda seen: seen.running is None)
    assert seen.step is not None
    assert (seen.step.rc, effects(host)) == (5, ["1"])
    assert host.sh("ls /run/reconcile").split() == ["lease", "lock"]


def test_a_host_that_goes_down_under_a_step_says_so_and_goes_on(host: Host) -> None:
    host.perform(step(LEAVES_A_MARK, "1"))
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(host.perform, step("sleep 1000", stdin=b"hf_NeverSeen"))
        before = host.wait(lambda seen: seen.running is not None)
        host.lab.power_off("box1")
        assert isinstance(outcome.result(), Lost)
    host.lab.power_on("box1")
    seen = host.look()
    assert seen.boot_id != before.boot_id
    assert (seen.generation, seen.lease, seen.running) == (2, None, None)
    assert seen.step is not None
    assert (seen.step.how, seen.step.rc, seen.step.began) == (How.INTERRUPTED, None, None)
    assert host.perform(step(":"), BOB, before).reason == "stale"  # type: ignore[union-attr]
    assert isinstance(host.perform(step(":"), BOB), Done)


# kill -9 at every line


def crash_points(text: str) -> Iterator[tuple[int, str]]:
    """The text with a kill -9 behind each of its lines where one can stand, with the line's number."""
    lines = text.splitlines(keepends=True)
    for number in range(1, len(lines)):
        line = lines[number - 1].strip()
        if not line or line.startswith("#") or line.endswith(("||", "&&", "|", "\\")):
            continue
        killed = "".join([*lines[:number], "kill -9 $$\n", *lines[number:]])
        if subprocess.run(["sh", "-n"], input=killed, text=True, capture_output=True, check=False).returncode == 0:
            yield number, killed


RECEIVER_POINTS = list(crash_points(units.RECEIVER))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(8))
def test_a_receiver_killed_anywhere_leaves_an_order_that_ran_once_or_can_still_be_given(
    host: Host, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    reached = 0
    for number, killed in RECEIVER_POINTS[part::8]:
        mark = f"line-{number}"
        wanted = step(LEAVES_A_MARK, mark, stdin=b"hf_NeverSeen")
        before = host.look()
        with monkeypatch.context() as patched:
            patched.setattr(units, "RECEIVER", killed)
            outcome = host.perform(wanted, seen=before)
        if not isinstance(outcome, Lost):
            assert isinstance(outcome, Done), (number, outcome)  # not a line that a good order passes
            continue
        reached += 1
        after = host.wait(lambda seen: seen.running is None)
        ran = effects(host).count(mark)
        told = (after.step.id, after.step.rc) if after.step is not None else None
        assert (ran, told == (wanted.id, 0)) in ((0, False), (1, True)), number
        if after.generation == before.generation:
            assert ran == 0, number
        else:
            assert host.perform(wanted, seen=before).reason == "stale", number  # type: ignore[union-attr]
        assert host.perform(step(":") if ran else wanted, seen=after) == Done(0, "", ""), number
        assert effects(host).count(mark) == 1, number
        assert host.sh("ls -A /run/reconcile; ls /var/lib/reconcile").split() == [
            *("lease", "lock"),
            *("generation", "jobs", "schema", "steps"),
        ], number
    assert reached


@pytest.mark.timeout(900)
def test_a_unit_killed_anywhere_in_its_begin_or_end_is_told_and_in_nobodys_way(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = 0
    lines = units.UNIT.splitlines()
    for number, killed in crash_points(units.UNIT):
        if re.search(r"printf|mv|rm|exec|flock|umask", lines[number - 1]) is None:
            continue  # nothing has changed since the line before
        mark = f"line-{number}"
        wanted = step(f"{LEAVES_A_MARK}; exit 3", mark, stdin=b"hf_NeverSeen", timeout=5.0)
        with monkeypatch.context() as patched:
            patched.setattr(units, "UNIT", killed)
            patched.setattr(host, "cut_after", 3.0)
            outcome: Outcome = host.perform(wanted)
        if outcome == Done(3, "", ""):
            continue
        reached += 1
        seen = host.wait(lambda seen: seen.running is None)
        how = (seen.step.how, seen.step.rc) if seen.step is not None else None
        ran = effects(host).count(mark)
        match outcome:
            case Refused("unable"):  # so early in its begin that to systemd it was never started
                assert (how, ran) == (None, 0), number
            case Done():  # in its begin
                assert (outcome.rc, how, ran) == (137, (How.KILLED, 137), 0), number
            case Lost() if how == (How.NEVER_BEGUN, None):  # both, before they knew which they were
                assert ran == 0, number
            case Lost():  # in its end: nobody was told
                assert how in ((How.VANISHED, None), (How.EXIT, 3)), number
                assert ran == 1, number
            case _:
                pytest.fail(f"{number}: {outcome}")
        assert isinstance(host.perform(step(":")), Done), number
        assert host.run("grep -rl NeverSeen /run/reconcile").rc == 1, number
    assert reached


# Jobs


def test_a_job_goes_on_beside_steps_and_tells_how_far_it_is(host: Host) -> None:
    body = """
        progress 10 100; echo fetching; printf 'a 1%%\\ra 2%%\\n'
        until [ -e /run/go ]; do sleep 0.1; done; rm /run/go
        progress 100 100; echo done >&2
        """
    assert host.perform(step(body, job="weights-a", timeout=60.0)) == Done(0, "", "")
    seen = host.wait(lambda seen: seen.jobs[0].progress is not None and len(seen.jobs[0].log) == 2)
    job = seen.job("weights-a")
    assert job is not None
    assert job.progress is not None
    assert (job.state, job.progress.done, job.progress.total, job.log) == ("running", 10, 100, ("fetching", "a 2%"))
    refused = host.perform(step(body, job="weights-a"))
    assert isinstance(refused, Refused)
    assert refused.reason == "busy"
    assert isinstance(host.perform(step(LEAVES_A_MARK, "beside")), Done)
    assert host.look().job("weights-a") == job
    host.sh("touch /run/go")
    seen = host.wait(lambda seen: seen.jobs[0].state == "done")
    assert seen.jobs[0].rc == 0
    assert seen.jobs[0].progress == Progress(100, 100, seen.jobs[0].progress.since)  # type: ignore[union-attr]
    assert effects(host) == ["beside"]


def test_a_failed_job_shows_its_last_lines_until_it_is_started_again(host: Host) -> None:
    body = "i=0; while [ $i -lt 5000 ]; do echo line $i; i=$((i + 1)); done; printf '\\033[31mdisk full\\033[0m\\n'"
    host.perform(step(f"{body}; exit 9", job="weights"))
    job = host.wait(lambda seen: seen.jobs[0].state == "failed").jobs[0]
    assert (job.rc, job.how) == (9, How.EXIT)
    assert job.log == (*(f"line {n}" for n in range(4981, 5000)), "disk full")
    host.perform(step("echo better", job="weights"))
    assert host.wait(lambda seen: not seen.jobs[0].running).jobs[0].state == "done"


def test_a_job_that_reports_no_progress_any_more_is_stalled(host: Host) -> None:
    host.perform(step("progress 5 10; sleep 1000", job="weights"))
    host.wait(lambda seen: seen.jobs[0].progress is not None)
    file = "/var/lib/reconcile/jobs/weights/progress"
    host.sh(f"read -r now rest </proc/uptime; echo 5 10 $((${{now%.*}} - 200)).00 >{file}")
    assert host.look().jobs[0].state == "stalled"
    host.sh("systemctl stop reconcile-job-weights.service")
    job = host.look().jobs[0]
    assert (job.state, job.how, job.rc) == ("failed", How.KILLED, 143)


def test_a_job_is_killed_when_its_time_is_up(host: Host) -> None:
    host.perform(step("sleep 1000", job="slow", timeout=1.0))
    job = host.wait(lambda seen: not seen.jobs[0].running).jobs[0]
    assert (job.state, job.how, job.rc) == ("failed", How.TIMEOUT, 124)


def test_a_job_is_interrupted_by_a_reboot_and_can_be_started_again(host: Host) -> None:
    host.perform(step("progress 1 2; echo half; sleep 1000", job="weights"))
    host.wait(lambda seen: seen.jobs[0].progress is not None and bool(seen.jobs[0].log))
    host.lab.power_off("box1")
    host.lab.power_on("box1")
    job = host.look().jobs[0]
    assert (job.state, job.how, job.rc, job.log) == ("failed", How.INTERRUPTED, None, ("half",))
    assert job.progress == Progress(1, 2, None)
    assert isinstance(host.perform(step("echo whole", job="weights")), Done)
    host.wait(lambda seen: seen.jobs[0].state == "done")


def test_only_the_last_jobs_that_ended_are_kept(host: Host) -> None:
    seen = host.look()
    for n in range(23):
        order = Order(step(":", job=f"job-{n:02}"), seen.generation + n, seen.boot_id)
        assert isinstance(units.perform(host, order, ALICE, 60), Done)  # type: ignore[arg-type]
        host.wait(lambda seen, name=f"job-{n:02}": not seen.job(name).running)  # type: ignore[union-attr]
    names = [job.name for job in host.look().jobs]
    assert len(names) in (20, 21)
    assert names[-1] == "job-22"


@pytest.mark.parametrize("name", ["", "a b", "../x", "A", "-x", "x" * 101, "a\n"])
def test_a_job_has_a_name_that_systemd_and_files_take(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a job"):
        units.order_text(Order(step(":", job=name), 0, "b"), ALICE, 60, "n")


# What scripts have at hand


def test_replace_keeps_a_copy_and_everything_but_the_content(host: Host) -> None:
    host.sh("mkdir -p /root/tree; cd /root/tree; echo old >f; chmod 640 f; chown 1:2 f; ln -s f link")
    digest = host.sh("sha256sum </root/tree/f").split()[0]
    assert host.perform(step('echo new | replace "$1" "$2"', "/root/tree/link", digest)) == Done(0, "", "")
    assert host.sh("cd /root/tree; cat f; stat -c '%a %u %g' f; readlink link; ls -A") == "new\n640 1 2\nf\nf\nlink\n"
    kept = "/var/lib/reconcile/kept/root/tree/f@0000000001-00"
    assert host.sh(f"cat {kept}; stat -c %a {kept} {kept}.marker") == "old\n600\n600\n"
    marker = dict(line.split(" ", 1) for line in host.sh(f"cat {kept}.marker").splitlines())
    assert (marker["schema"], marker["object"], marker["file"], marker["sha256"]) == (
        "1",
        "Container/ct129",
        "/root/tree/f",
        digest,
    )
    stale = host.perform(step('echo newer | replace "$1" "$2"; echo unreached', "/root/tree/f", digest))
    assert stale == Done(75, "", "/root/tree/f has changed since it was read\n")
    assert host.sh("cat /root/tree/f; ls -A /root/tree") == "new\nf\nlink\n"


def test_replace_makes_a_file_only_where_there_is_none(host: Host) -> None:
    host.sh("mkdir -p /root/tree")
    assert host.perform(step("echo 1 | replace /root/tree/f absent")) == Done(0, "", "")
    assert host.perform(step("echo 2 | replace /root/tree/f absent")).rc == 75  # type: ignore[union-attr]
    assert host.perform(step("echo 2 | replace /root/none/f absent")).rc == 1  # type: ignore[union-attr]
    assert host.sh("cat /root/tree/f; stat -c %a /root/tree/f; ls -A /root/tree") == "1\n644\nf\n"


def test_an_edit_between_digest_and_rename_survives(host: Host) -> None:
    host.sh("mkdir -p /root/tree; echo old >/root/tree/f")
    digest = host.sh("sha256sum </root/tree/f").split()[0]
    slow = "{ echo new; echo theirs >/root/tree/f; } | replace /root/tree/f $1"
    assert host.perform(step(slow, digest)).rc == 75  # type: ignore[union-attr]
    assert host.sh("cat /root/tree/f; ls -A /root/tree") == "theirs\nf\n"


def test_the_newest_ten_copies_of_a_file_are_kept(host: Host) -> None:
    host.sh("mkdir -p /root/tree; echo 0 >/root/tree/f; echo other >/root/tree/f@2")
    host.perform(
        step("keep /root/tree/f@2; for n in 1 2 3; do echo $n | replace /root/tree/f $(digest /root/tree/f); done")
    )
    for n in range(4, 14):
        host.perform(step(f"echo {n} | replace /root/tree/f $(digest /root/tree/f)"))
    kept = host.sh("cd /var/lib/reconcile/kept/root/tree; ls | grep -v 'f@2@'").split()
    copies = [name for name in kept if not name.endswith(".marker")]
    assert len(copies) == 10
    assert sorted(kept) == sorted([*copies, *(f"{name}.marker" for name in copies)])
    assert host.sh("cd /var/lib/reconcile/kept/root/tree; cat $(ls f@0* | grep -v marker)").split() == [
        str(n) for n in range(3, 13)
    ]


def test_files_of_the_cluster_are_replaced_under_pves_lock(units_lab: Lab) -> None:
    host = Host(units_lab, "kpro4")
    host.forget()
    units_lab.pve_write("nodes/kpro4/lxc/777.conf", "arch: amd64\n", "kpro4")
    path, lock = "/etc/pve/lxc/777.conf", "/run/lock/lxc/pve-config-777.lock"
    digest = host.sh(f"sha256sum <{path}").split()[0]
    body = 'edit() { printf "arch: i386\\n" | replace "$1" "$2"; }\nwith_pve_lock 777 edit "$1" "$2"'
    assert host.perform(step(body, path, digest)) == Done(0, "", "")
    assert units_lab.pve_read("nodes/kpro4/lxc/777.conf", "kpro4") == b"arch: i386\n"
    assert host.sh("ls /etc/pve/lxc/") == "777.conf\n"
    digest = host.sh(f"sha256sum <{path}").split()[0]
    with subprocess.Popen(
        ["lxc-attach", "-P", str(units_lab.state / "hosts"), "-n", "kpro4", "--", "flock", lock, "cat"],
        stdin=subprocess.PIPE,
    ) as other:
        host.sh(f"until ! flock -n {lock} true; do sleep 0.1; done")
        began = time.monotonic()
        stale = host.perform(step(body, path, digest))
        assert time.monotonic() - began >= 10
        other.communicate(b"")
    assert stale == Done(75, "", "the configuration of 777 has been locked by another for 10 s\n")
    assert host.perform(step("with_pve_lock 777 false; echo unreached")) == Done(1, "", "")
    units_lab.pve_remove("nodes/kpro4/lxc/777.conf", "kpro4")


# Over SSH


@dataclass(frozen=True)
class Someone:
    id: str = "carol"
    name: str = "carol (sofa:3)"


def ssh_world(host: Host, state: Path, **ssh: Any) -> closing[SshWorld]:
    """The host over SSH, as one of its users."""
    document = host.lab.host_spec("box1")
    del document["kind"]
    document["ssh"] |= ssh
    return closing(SshWorld(Specs(hosts={"box1": SpecHost.model_validate(document)}), state, Someone(), ()))


def seen_by(world: SshWorld) -> UnitFacts:
    return parse(world.observe([Look("box1")])["box1"].sections["world"])


@pytest.mark.parametrize("ssh", [{"user": "root"}, {"user": "ops", "sudo": True}], ids=["root", "sudo"])
def test_steps_over_ssh(host: Host, tmp_path: Path, ssh: dict[str, Any]) -> None:
    wanted = step("id -u; cat; exit 4", stdin=b"\x00\xffhf_NeverSeen")
    with ssh_world(host, tmp_path, **ssh) as world:
        before = seen_by(world)
        done = world.perform(Order(wanted, before.generation, before.boot_id))
        assert done == Done(4, "0\n\x00\ufffdhf_NeverSeen", "")
        after = seen_by(world)
    assert (after.generation, after.lease.name if after.lease else "") == (1, "carol (sofa:3)")
    assert after.step is not None
    assert (after.step.id, after.step.rc) == (wanted.id, 4)
    assert host.run("journalctl | grep NeverSeen; grep -r NeverSeen /var/log").out == b""
    assert host.look().lease is None


def test_without_rights_nothing_is_begun(host: Host, tmp_path: Path) -> None:
    seen = host.look()
    order = Order(step(":"), seen.generation, seen.boot_id)
    with ssh_world(host, tmp_path, user="ops") as world:
        assert world.perform(order) == Refused("rights", "cannot write to /run/reconcile as ops")
    host.sh("mv /etc/sudoers.d/ops /root/")
    try:
        with ssh_world(host, tmp_path, user="ops", sudo=True) as world:
            refused = world.perform(order)
    finally:
        host.sh("mv /root/ops /etc/sudoers.d/")
    assert isinstance(refused, Refused)
    assert refused.reason == "rights"
    assert host.look() == seen


def test_a_step_outlives_the_ssh_connection(host: Host, tmp_path: Path) -> None:
    with ssh_world(host, tmp_path) as world, ThreadPoolExecutor(1) as pool:
        before = seen_by(world)
        order = Order(step(f"sleep 2; {LEAVES_A_MARK}", "1"), before.generation, before.boot_id)
        outcome = pool.submit(world.perform, order)
        host.wait(lambda seen: seen.running is not None)
        host.sh("pkill -f 'sshd: root@[n]otty'")
        assert isinstance(outcome.result(), Lost)
        assert seen_by(world).running is not None
        host.wait(lambda seen: seen.running is None)
        assert (seen_by(world).step.rc, effects(host)) == (0, ["1"])  # type: ignore[union-attr]

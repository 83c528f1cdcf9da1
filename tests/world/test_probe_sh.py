"""The script behind a look, run by real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from controller.core import probe
from tests.world.servers import wait_for

SHELLS = {
    "dash": ["dash"],
    "bash": ["bash", "--posix"],
    "busybox": ["busybox", "sh"],
}


@pytest.fixture(params=SHELLS)
def shell(request):
    command = SHELLS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return command


def script(fragments: dict[str, str], run_dir: Path) -> bytes:
    """The script as it is sent, with its scratch directory elsewhere."""
    text = probe.script(fragments)
    assert "\nrun_dir=/run/reconcile\n" in text
    return text.replace("\nrun_dir=/run/reconcile\n", f"\nrun_dir='{run_dir}'\n").encode()


def ask(
    shell: list[str], fragments: dict[str, str], run_dir: Path, *nonces: str, max_age: float = 30
) -> list[dict[str, probe.Section]]:
    looks = "".join(probe.look(nonce, max_age, [129, 130]) for nonce in nonces).encode()
    done = subprocess.run(shell, input=script(fragments, run_dir) + looks, capture_output=True, timeout=30)
    answers = []
    rest = done.stdout
    for nonce in nonces:
        end = f"\n{nonce} end\n".encode()
        whole, found, rest = rest.partition(end)
        assert found, done.stderr
        assert probe.complete(whole + found, nonce)
        answers.append(probe.read(whole + found, nonce))
    assert rest == b""
    return answers


@pytest.mark.parametrize(("max_age", "times"), [(0, 3), (30, 1)])
def test_a_slow_tool_answers_from_memory_only_as_far_as_it_may(shell, tmp_path, max_age, times):
    """Also within one second: what a step has just changed is seen by the look after it."""
    calls = tmp_path / "calls"
    fragments = {"tool": f"detached counter 10 sh -c 'echo call >>{calls}; wc -l <{calls}'"}
    seen = ask(shell, fragments, tmp_path / "run", "t-1", "t-2", "t-3", max_age=max_age)
    assert [s["tool"].out.split()[-1] for s in seen] == [str(n if max_age == 0 else 1) for n in (1, 2, 3)]
    assert len(calls.read_text().splitlines()) == times


def test_sections_keep_output_stderr_and_exit_code_apart(shell, tmp_path):
    fragments = {
        "first": "printf 'out\\n'; printf 'err\\n' >&2; return 3",
        "second": "printf 'no newline at the end'",
        "third": ":",
    }
    (seen,) = ask(shell, fragments, tmp_path / "run", "t-1")
    assert seen["first"] == probe.Section(3, "out\n", "err")
    assert seen["second"] == probe.Section(0, "no newline at the end", "")
    assert seen["third"] == probe.Section(0, "", "")


def test_bytes_that_are_no_utf8_come_through(shell, tmp_path):
    source = tmp_path / "latin"
    source.write_bytes(b"B\xf6se \xff\xfe \xe2\x82 \xe2\x82\xac end\n\n\n")
    (seen,) = ask(shell, {"a": f"cat '{source}'", "b": "printf ok"}, tmp_path / "run", "t-1")
    assert seen["a"].out.encode("utf-8", "surrogateescape") == source.read_bytes()
    assert seen["b"].out == "ok"


def test_nul_bytes_do_not_break_the_frame(shell, tmp_path):
    source = tmp_path / "nul"
    source.write_bytes(b"a\0b\0\0c\n")
    (seen,) = ask(shell, {"a": f"cat '{source}'", "b": "printf ok"}, tmp_path / "run", "t-1")
    assert seen["a"].out.startswith("a")
    assert "\0" not in seen["a"].out
    assert seen["b"].out == "ok"


def test_huge_stderr_is_cut_and_huge_output_is_whole(shell, tmp_path):
    big = tmp_path / "big"
    big.write_text("0123456789abcde\n" * 50_000)
    (seen,) = ask(shell, {"a": f"cat '{big}' >&2", "b": f"cat '{big}'"}, tmp_path / "run", "t-1")
    assert len(seen["a"].err) <= 4096
    assert seen["a"].err.startswith("0123")
    assert seen["b"].out == big.read_text()


def test_text_that_looks_like_a_frame_stays_text(shell, tmp_path):
    text = "t-0 begin\\nt-0 section x 0 1 1\\nt-0 stuck 1 1\\nt-0 end\\n"
    (seen,) = ask(shell, {"a": f"printf '{text}'", "b": "printf b"}, tmp_path / "run", "t-1")
    assert seen["a"].out == text.replace("\\n", "\n")
    assert seen["b"].out == "b"


def test_a_fragment_cannot_eat_the_next_look_nor_end_the_shell(shell, tmp_path):
    first, second = ask(shell, {"a": "cat; exit 7", "b": "printf b"}, tmp_path / "run", "t-1", "t-2")
    assert first == second == {"a": probe.Section(7, "", ""), "b": probe.Section(0, "b", "")}


def test_a_fragment_sees_what_it_is_told(shell, tmp_path):
    (seen,) = ask(shell, {"a": 'printf "%s|%s|%s" "$max_age" "$guests" "$run_dir"'}, tmp_path / "run", "t-1")
    assert seen["a"].out == f"30|129 130|{tmp_path}/run"


def test_nothing_is_left_behind(shell, tmp_path):
    ask(shell, {"a": "echo oops >&2"}, tmp_path / "run", "t-1", "t-2")
    assert list((tmp_path / "run").iterdir()) == []


def test_without_a_scratch_directory_the_answer_comes_all_the_same(shell, tmp_path):
    (tmp_path / "file").touch()
    (seen,) = ask(shell, {"a": "echo out; echo err >&2"}, tmp_path / "file" / "run", "t-1")
    assert seen["a"] == probe.Section(0, "out\n", "")


class Hung:
    """A shell at work on a look whose fragment waits for somebody to open a FIFO."""

    def __init__(self, shell: list[str], tmp_path: Path, nonce: str) -> None:
        self.fifo, self.run_dir = tmp_path / "fifo", tmp_path / "run"
        os.mkfifo(self.fifo)
        self.fragments = {"a": f"if [ -e '{self.fifo}' ]; then read -r _ <'{self.fifo}'; fi; printf ok"}
        self.process = subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin
        self.process.stdin.write(script(self.fragments, self.run_dir) + probe.look(nonce, 0, []).encode())
        self.process.stdin.close()
        self.mark = self.run_dir / f"look.{self.process.pid}"
        wait_for(lambda: self.mark.exists() and self.mark.read_text())

    def let_go(self) -> None:
        os.close(os.open(self.fifo, os.O_WRONLY))
        os.unlink(self.fifo)
        assert self.process.stdout
        self.process.stdout.read()
        assert self.process.wait(10) == 0


def test_a_look_that_hangs_is_found_by_the_next_shell_of_the_same_asker(shell, tmp_path):
    hung = Hung(shell, tmp_path, "asker-1")
    with pytest.raises(probe.Stuck, match=rf"process {hung.process.pid}"):
        ask(shell, hung.fragments, hung.run_dir, "asker-2")
    hung.let_go()
    (seen,) = ask(shell, hung.fragments, hung.run_dir, "asker-3")
    assert seen["a"].out == "ok"
    assert list(hung.run_dir.iterdir()) == []


def test_a_look_of_another_asker_is_in_nobodys_way_until_it_is_old(shell, tmp_path):
    hung = Hung(shell, tmp_path, "asker-1")
    fragments = {"a": "printf ok"}
    (seen,) = ask(shell, fragments, hung.run_dir, "other-1")
    assert seen["a"].out == "ok"
    started, begun, token = hung.mark.read_text().split()
    hung.mark.write_text(f"{started} {int(begun) - 60} {token}\n")
    with pytest.raises(probe.Stuck, match=r"since 6\d s"):
        ask(shell, fragments, hung.run_dir, "other-2")
    hung.let_go()


@pytest.mark.parametrize("half", ["", "\n", "12345", "12345 6"])
def test_half_a_mark_is_none(shell, tmp_path, half):
    """It was read while its shell wrote it."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / f"look.{os.getpid()}").write_text(half)
    (seen,) = ask(shell, {"a": "printf ok"}, run_dir, "asker-1")
    assert seen["a"].out == "ok"


def test_the_mark_of_a_process_that_is_gone_is_swept_up(shell, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    (run_dir / f"look.{gone.pid}").write_text("1 1 asker\n")
    # a process that lives, and was started at another time: its number was used again
    (run_dir / f"look.{os.getpid()}").write_text("1 1 asker\n")
    (seen,) = ask(shell, {"a": "printf ok"}, run_dir, "asker-1")
    assert seen["a"].out == "ok"
    assert [file.name for file in run_dir.iterdir()] == [f"look.{os.getpid()}"]


def test_a_tool_that_never_stops_talking_is_stopped(shell, tmp_path):
    fragments = {"tool": "detached talker 10 yes 'a line that comes again and again'"}
    (seen,) = ask(shell, fragments, tmp_path / "run", "t-1")
    first, said = seen["tool"].out.split("\n", 1)
    assert first.startswith("exit ")
    assert first != "exit 0"
    assert said.startswith("a line that comes again and again\n")
    assert sum(file.stat().st_size for file in (tmp_path / "run").iterdir()) < 1024 * 1024

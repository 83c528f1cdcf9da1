"""Options: full names of the version, or an error that names the nearest one."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from controller.engines import shipped
from controller.engines.checking import problems, warnings
from controller.engines.flags import Flag, FlagList, Grammar, Rename, Takes, read_list, resolve
from controller.engines.registry import engine
from tests.plugins.servers import STORY, server, written

SAMPLES = Path(__file__).parents[3] / "shared" / "samples" / "engines"

FLAGS = FlagList(
    "toy",
    "1.0",
    (
        Flag("max-len", ("max-length",)),
        Flag("max-batch"),
        Flag("tp-size", ("tensor-parallel-size",)),
        Flag("fast", takes=Takes.NOTHING),
        Flag("stops", takes=Takes.VALUES),
        Flag("lora", takes=Takes.EACH),
        Flag("level", choices=("low", "high")),
        Flag("new-name"),
        Flag("config-json"),
        Flag("tool-call-parser"),
        Flag("trace", takes=Takes.MAYBE),
    ),
    tool_parsers=("hermes", "qwen3_coder"),
)
GRAMMAR = Grammar(
    "toy",
    reserved={"tp-size": "serve.tensor_parallel"},
    renames=(Rename("old-name", "new-name", "the changelog"),),
)


@pytest.mark.parametrize(
    ("given", "argv"),
    [
        ({"max-len": "5"}, ("--max-len", "5")),
        ({"max-length": "5"}, ("--max-len", "5")),  # under its first name, so that an alias changes nothing
        ({"fast": True}, ("--fast",)),
        ({"trace": True}, ("--trace",)),
        ({"trace": "x"}, ("--trace", "x")),
        ({"stops": ("a", "b c")}, ("--stops", "a", "b c")),
        ({"lora": ("a", "b")}, ("--lora", "a", "--lora", "b")),
        ({"config-json": {"b": [1, 2], "a": "it's"}}, ("--config-json", '{"a": "it\'s", "b": [1, 2]}')),
        ({"max-len": "-1"}, ("--max-len=-1",)),  # argparse takes -1 for an option where it has ones like it
        ({"level": "low", "fast": True}, ("--fast", "--level", "low")),  # the order of a spec changes nothing
    ],
)
def test_what_is_passed(given: dict, argv: tuple[str, ...]) -> None:
    resolved = resolve(GRAMMAR, FLAGS, given)
    assert resolved.argv == argv
    assert (resolved.notes, resolved.faults) == ((), ())


@pytest.mark.parametrize(
    ("given", "argv", "todo"),
    [
        ({"lev": "low"}, ("--level", "low"), "write level"),
        ({"old-name": "x"}, ("--new-name", "x"), "write new-name"),
    ],
)
def test_what_a_later_version_refuses_is_told(given: dict, argv: tuple[str, ...], todo: str) -> None:
    resolved = resolve(GRAMMAR, FLAGS, given)
    assert resolved.argv == argv
    assert [note.todo for note in resolved.notes] == [todo]
    assert not resolved.faults


@pytest.mark.parametrize(
    ("given", "says", "guess"),
    [
        ({"max": "5"}, "short for: max-batch, max-len", ""),
        ({"max_len": "5"}, "has no such flag", "max-len"),
        ({"maxlen": "5"}, "has no such flag", "max-len"),
        ({"zzz": "5"}, "has no such flag", ""),
        ({"tp-size": "2"}, "serve.tensor_parallel gives it", ""),
        ({"tensor-parallel-size": "2"}, "serve.tensor_parallel gives it", ""),
        ({"tensor": "2"}, "serve.tensor_parallel gives it", ""),
        ({"fast": "yes"}, "it is a switch", ""),
        ({"max-len": True}, "without a value", ""),
        ({"max-len": ("1", "2")}, "several values", ""),
        ({"level": "hihg"}, "cannot use hihg as --level", "high"),
        ({"tool-call-parser": "qwen3-coder"}, "cannot use qwen3-coder", "qwen3_coder"),
        ({"max-len": "5", "max-length": "6"}, "twice", ""),
    ],
)
def test_what_cannot_be_passed(given: dict, says: str, guess: str) -> None:
    faults = resolve(GRAMMAR, FLAGS, given).faults
    assert len(faults) == 1
    assert says in faults[0].message
    assert faults[0].message.startswith("cannot")
    assert faults[0].nearest == guess
    assert faults[0].todo


def test_underscores_and_dots_where_the_engine_takes_them() -> None:
    grammar = Grammar("toy", reserved={}, underscores=True, dotted=True)
    assert resolve(grammar, FLAGS, {"max_len": "5"}).argv == ("--max-len", "5")
    assert resolve(grammar, FLAGS, {"config-json.a.b": "5"}).argv == ("--config-json.a.b", "5")
    assert resolve(grammar, FLAGS, {"nothing.a": "5"}).faults


def test_without_a_list_all_is_taken_as_it_is() -> None:
    resolved = resolve(GRAMMAR, None, {"whatever": True, "tp-size": "2"})
    assert resolved.argv == ("--whatever",)
    assert len(resolved.faults) == 1


def test_a_list_survives_json() -> None:
    assert read_list(json.loads(json.dumps(FLAGS.as_json()))) == FLAGS
    for bad in ({}, [], {**FLAGS.as_json(), "schema": 99}, {**FLAGS.as_json(), "flags": [1]}):
        with pytest.raises(ValueError):
            read_list(bad)


# The engines' own


def test_sglang_is_told_by_its_full_names() -> None:
    sglang = engine("sglang")
    use = written("sglang", "0.5.23", "speculative-algo: NEXTN, context-len: 5, cuda-graph-max-bs: 8")
    resolved = sglang.resolve(use, sglang.shipped_flags("0.5.23"), 1)
    assert not resolved.faults
    assert [option.name for option in resolved.options] == [
        "context-length",
        "cuda-graph-max-bs-decode",
        "speculative-algorithm",
    ]
    assert len(resolved.notes) == 3


def test_an_ambiguous_prefix_is_an_error_and_in_an_older_version_it_was_a_flag() -> None:
    sglang = engine("sglang")
    use = written("sglang", "0.5.23", "speculative-draft: x")
    assert "short for" in sglang.resolve(use, sglang.shipped_flags("0.5.23"), 1).faults[0].message
    use = written("sglang", "0.5.11", "cuda-graph-max-bs: 8")
    resolved = sglang.resolve(use, sglang.shipped_flags("0.5.11"), 1)
    assert resolved.argv == ("--cuda-graph-max-bs", "8")
    assert not resolved.notes


def test_a_parser_that_a_version_does_not_have() -> None:
    for name, version, parser, guess in (
        ("sglang", "0.5.9", "nemotron_3", ""),
        ("sglang", "0.5.11", "qwen3-coder", "qwen3_coder"),
        ("vllm", "0.33.0", "qwen4", ""),
    ):
        use = server(name, version, {"tool-call-parser" if guess or name == "vllm" else "reasoning-parser": parser})
        (fault,) = engine(name).resolve(use, engine(name).shipped_flags(version), 1).faults
        assert parser in fault.message
        assert not guess or fault.nearest == guess


def test_the_contracts_flags_are_right() -> None:
    use = server(flags={key: str(value) for key, value in STORY.items()}, serve={"tensor_parallel": "auto"})
    assert list(problems(use, 2)) == []
    assert list(warnings(use, 2)) == []


def test_validate_says_where_and_what_else() -> None:
    (problem,) = problems(written("sglang", "0.5.11", "context-lenght: 5"), 2)
    assert problem.field == ("serve", "flags", "context-lenght")
    assert problem.nearest == "context-length"
    (problem,) = problems(server("sglnag", "0.5.11"), 2)
    assert (problem.field, problem.nearest) == (("engine", "name"), "sglang")
    (warning,) = warnings(written("sglang", "0.5.23", "speculative-algo: NEXTN"), 2)
    assert warning.todo == "write speculative-algorithm"


def test_vllm_takes_json_and_switches_tools_on() -> None:
    use = written(
        "vllm",
        "0.33.0",
        "max_model_len: 32k, tool-call-parser: hermes, no-enable-prefix-caching: true, "
        "speculative-config: {method: mtp, num_speculative_tokens: 3}",
    )
    flags = engine("vllm").shipped_flags("0.33.0")
    resolved = engine("vllm").resolve(use, flags, 1)
    assert resolved.faults == ()
    assert ("--disable-prefix-caching",) in [option.argv for option in resolved.options]
    assert resolved.has("enable-auto-tool-choice")
    assert resolved.text("shutdown-timeout") == "60"
    assert ("--max-model-len", "32k") in [option.argv for option in resolved.options]


def test_every_shipped_list_can_be_read_and_has_what_the_engine_needs() -> None:
    lists = shipped.names()
    assert {("sglang", "0.5.9"), ("sglang", "0.5.11"), ("sglang", "0.5.23"), ("vllm", "0.33.0")} <= set(lists)
    needed = {
        "sglang": {"model-path", "host", "port", "served-model-name", "tp-size", "config", "enable-metrics"},
        "vllm": {"host", "port", "served-model-name", "tensor-parallel-size", "speculative-config"},
        "transformers": {"host", "port", "device"},
    }
    for (name, version), listed in lists.items():
        assert all(listed.find(each) for each in needed[name]), (name, version)
        assert name == "transformers" or (listed.tool_parsers and listed.reasoning_parsers), (name, version)


@pytest.mark.skipif(not SAMPLES.exists(), reason="no samples beside the checkout")
def test_the_shipped_lists_are_those_of_the_live_parsers() -> None:
    live = json.loads((SAMPLES / "sg_flags_by_version.json").read_text())
    for (name, version), listed in shipped.names().items():
        if name == "sglang":
            assert set(listed.names) == {option[2:] for option in live[version] if option.startswith("--")}, version
    options = json.loads((SAMPLES / "vllm-0.33.0-flags.json").read_text())
    said = {option[2:] for flag in options for option in flag["opts"] if option.startswith("--")}
    listed = shipped.flags("vllm", "0.33.0")
    assert listed is not None
    # It also takes the opposites as earlier versions named them, which its help hides
    assert set(listed.names) >= said - {"help"}
    assert all(name.startswith(("no-enable-", "no-disable-")) for name in set(listed.names) - said)


def test_the_reader_runs_alone_and_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (tmp_path / "sglang-9.9.dist-info").mkdir()
    (package / "server_args.py").write_text("class ServerArgs:\n    pass\n")
    done = _read("sglang", tmp_path)
    assert done.returncode == 1
    assert "declared in another way" in done.stderr
    (package / "server_args.py").write_text(
        "LEVELS = ['low', 'high']\n"
        "class ServerArgs:\n"
        "    @staticmethod\n"
        "    def add_cli_args(parser):\n"
        "        parser.add_argument('--model-path', '--model', type=str)\n"
        "        parser.add_argument('--fast', action='store_true')\n"
        "        parser.add_argument('--stops', nargs='+')\n"
        "        parser.add_argument('--level', choices=LEVELS)\n"
    )
    for folder, name, what in (
        ("function_call", "function_call_parser.py", "ToolCallParserEnum = {'hermes': 1}"),
        ("parser", "reasoning_parser.py", "class P:\n    DetectorMap: dict = {'qwen3': 1}"),
    ):
        (package / folder).mkdir()
        (package / folder / name).write_text(what)
    done = _read("sglang", tmp_path)
    assert done.returncode == 0, done.stderr
    listed = read_list(json.loads(done.stdout))
    assert listed.version == "9.9"
    assert listed.find("model") == Flag("model-path", ("model",))
    assert listed.find("fast") == Flag("fast", takes=Takes.NOTHING)
    assert listed.find("stops") == Flag("stops", takes=Takes.VALUES)
    assert listed.find("level") == Flag("level", choices=("low", "high"))
    assert (listed.tool_parsers, listed.reasoning_parsers) == (("hermes",), ("qwen3",))


def _read(name: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["python3", "-I", "-", name, str(directory)],
        input=shipped.READER,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_names_for_shells_are_none_of_our_business() -> None:
    use = written("vllm", "0.33.0", 'override-generation-config: {stop: "a\'b $(c)"}')
    argv = engine("vllm").resolve(use, engine("vllm").shipped_flags("0.33.0"), 1).argv
    assert shlex.split(shlex.join(argv)) == list(argv)
    assert json.loads(argv[argv.index("--override-generation-config") + 1]) == {"stop": "a'b $(c)"}

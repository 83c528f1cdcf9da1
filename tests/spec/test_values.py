"""What a scalar means is said by the field it stands in."""

from datetime import timedelta
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from controller.spec import values
from controller.spec.values import Capability, Text

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("field", "text", "means"),
    [
        (values.PciAddress, "10:00.0", "0000:10:00.0"),  # sixty times ten to a YAML 1.1 parser
        (values.PciAddress, "4F:00.0", "0000:4f:00.0"),
        (values.PciAddress, "0000:4f:00.0", "0000:4f:00.0"),
        (values.PciAddress, "00000000:4F:00.0", "0000:4f:00.0"),
        (values.PciAddress, "000f:01:00.0", "000f:01:00.0"),
        (
            values.GpuId,
            "GPU-8A05F1C2-6D3E-4F7B-9A10-2C54E8B7D901",
            "GPU-8a05f1c2-6d3e-4f7b-9a10-2c54e8b7d901",
        ),
        (values.PackageVersion, "0.10", "0.10"),
        (values.PackageVersion, "0.5.11rc1", "0.5.11rc1"),
        (values.PythonVersion, "3.10", "3.10"),
        (values.Name, "no", "no"),
        (values.Name, "1e7", "1e7"),
        (values.Name, "qwen3.6-27b", "qwen3.6-27b"),
        (values.Revision, COMMIT, COMMIT),
        (values.Sha256, "AB" * 32, "ab" * 32),
        (values.AtLeastOne, "131072", 131072),
        (values.AtLeastOne, "1e7", 10_000_000),
        (values.Amount, "0.3", 0.3),
        (values.Amount, "50", 50.0),
        (values.Duration, "20m", timedelta(minutes=20)),
        (values.Duration, "1d2h3m4s", timedelta(days=1, hours=2, minutes=3, seconds=4)),
        (values.MemoryAtLeast, ">=44GiB", 44 * 2**30),
        (values.MemoryAtLeast, ">= 1.5GB", 1_500_000_000),
        (values.ComputeCapability, "8.6", Capability(8, 6)),
        (values.ComputeCapability, ">=12.0", Capability(12, 0, at_least=True)),
        (values.ServerGpus, "all", "all"),
        (values.ServerGpus, ["0", "1", "4f:00.0"], (0, 1, "0000:4f:00.0")),
        (values.TensorParallel, "auto", "auto"),
        (values.TensorParallel, "2", 2),
        (values.Cron, "0 2 * * SUN", "0 2 * * SUN"),
        (values.TimeZone, "Europe/Berlin", "Europe/Berlin"),
        (values.DriverVersion, "580.126.09", "580.126.09"),
        (values.DriverVersion, "550.54", "550.54"),
        *((values.Bool, word, True) for word in ("true", "True", "TRUE", "yes", "Yes", "on")),
        *((values.Bool, word, False) for word in ("false", "False", "no", "NO", "off")),
    ],
)
def test_means(field: Any, text: Any, means: Any) -> None:
    given = [Text(item) for item in text] if isinstance(text, list) else Text(text)
    assert TypeAdapter(field).validate_python(given) == means


@pytest.mark.parametrize(
    ("field", "texts"),
    [
        (values.PciAddress, ["4f:00", "4f:00.8", "4f:20.0", "g0:00.0", "00010000:4f:00.0", "", "\u0664f:00.0"]),
        (values.GpuId, ["0", "GPU-8a05f1c2", "MIG-8a05f1c2-6d3e-4f7b-9a10-2c54e8b7d901"]),
        (values.AtLeastOne, ["0", "-1", "010", "0x10", "1_000", "1.5", "1e400", "9" * 30, "\u0661", "many", ""]),
        (values.Amount, ["nan", "inf", ".inf", "-1", "1e999", "half", ""]),
        (values.Duration, ["", "0s", "3", "m", "5m1h", "1.5h", "-1h", "1w"]),
        (values.MemoryAtLeast, ["44GiB", "<=44GiB", ">=44", ">=GiB", ">44GiB"]),
        (values.ComputeCapability, ["8", "8.66", "<=8.0"]),
        (values.Bool, ["y", "n", "1", "0", "maybe", ""]),
        (values.TensorParallel, ["0", "-2", "all", "1.5", ""]),
        (values.ServerGpus, ["al", "", "0"]),
        (values.Cron, ["0 2 * *", "0 2 * * * *", "60 2 * * *", "@daily", "a b c d e", "0 0 30 2 *", ""]),
        (values.TimeZone, ["Europe/Berln", "CEST+1", "../etc/passwd", "", "Europe", "a\0b"]),
        (values.Fingerprint, ["SHA256:abc", "MD5:0a:0b", "a" * 43]),
        (values.Sha256, ["ab" * 31, "zz" * 32]),
        (values.PackageVersion, [">=0.5", "latest", "0.5.x", ""]),
        (values.RequirementLine, ["numpy=1", "-r other.txt", ""]),
        (values.Repo, ["Qwen", "a/b/c", "../x", "https://huggingface.co/a/b"]),
        (values.Name, ["", "-a", "a b", "a/b", "a" * 64, "ä"]),
        (values.FlagName, ["--port", "a b", ""]),
        (values.AbsolutePath, ["models", "", "/a\nb"]),
    ],
)
def test_means_nothing(field: Any, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(ValidationError):
            TypeAdapter(field).validate_python(Text(text))


@pytest.mark.parametrize(
    ("given", "means"),
    [
        (Text("true"), True),
        (Text("true", plain=False), "true"),
        (Text("no"), "no"),
        (Text("1e7"), "1e7"),
        (Text("0.10"), "0.10"),
        ([Text("1"), Text("true")], ("1", "true")),
        ({"n": Text("5"), "s": Text("5", plain=False)}, {"n": 5, "s": "5"}),
        ({"a": [Text("true"), None, Text("1e2"), Text("no")]}, {"a": [True, None, 100.0, "no"]}),
        ({"big": Text("123456789012345678901234567890")}, {"big": 123456789012345678901234567890}),
        ({"endless": Text("1e999")}, {"endless": "1e999"}),
    ],
)
def test_flag(given: Any, means: Any) -> None:
    read = values.read_flag(given)
    assert read == means
    assert type(read) is type(means)


@pytest.mark.parametrize("given", [Text("false"), None, [], [None], [["a"]], {"secret": Text("hf")}, False])
def test_no_flag(given: Any) -> None:
    with pytest.raises(Exception, match="cannot"):
        values.read_flag(given)


@pytest.mark.parametrize(
    ("capability", "admits", "refuses"),
    [("8.6", [(8, 6)], [(8, 9), (8, 0), (9, 0)]), (">=8.6", [(8, 6), (8, 9), (12, 0)], [(8, 0), (7, 5)])],
)
def test_capability(capability: str, admits: list[tuple[int, int]], refuses: list[tuple[int, int]]) -> None:
    wanted = values.read_capability(capability)
    assert str(wanted) == capability
    assert all(wanted.admits(*have) for have in admits)
    assert not any(wanted.admits(*have) for have in refuses)


@pytest.mark.parametrize(
    ("spec", "card", "same"),
    [
        ("RTX A6000", "NVIDIA RTX A6000", True),
        ("RTX 3090", "NVIDIA GeForce RTX 3090", True),
        ("rtx  3090", "NVIDIA GeForce RTX 3090", True),
        ("RTX 3090", "NVIDIA GeForce RTX 3090 Ti", False),
        ("RTX A6000", "NVIDIA RTX 6000 Ada Generation", False),
    ],
)
def test_one_gpu_model_has_several_names(spec: str, card: str, same: bool) -> None:
    assert (values.gpu_model_key(spec) == values.gpu_model_key(card)) is same

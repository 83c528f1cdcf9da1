"""Typed properties and property strings ("k=v,k=v"), as ``PVE::JSONSchema`` of pve-common checks them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pvelab.base import path, split_list


class FormatError(Exception):
    """What is wrong with a value, in Proxmox's own words, newline included."""


@dataclass(frozen=True)
class Field:
    """One property: its type and what limits it."""

    kind: str = "string"  # string | integer | number | boolean
    optional: bool = True
    default_key: bool = False  # the key of a value without a key
    pattern: str | None = None
    format: str | Mapping[str, Field] | None = None  # a named format, or the fields of a property string
    enum: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    max_length: int | None = None


Value = str | int


def parse_boolean(value: str) -> Value:
    """1 or 0 for what Perl takes for a boolean, else the text as it is."""
    if re.fullmatch(r"1|on|yes|true", value, re.IGNORECASE):
        return 1
    if re.fullmatch(r"0|off|no|false", value, re.IGNORECASE):
        return 0
    return value


def parse_property_string(fields: Mapping[str, Field], text: str, where: str = "") -> dict[str, Value]:
    """Parse "v,k=v,…"; raise FormatError with all that does not fit. ``where`` goes before the names in errors."""
    found: dict[str, Value] = {}
    default = next((name for name, field in fields.items() if field.default_key), None)
    for part in text.split(","):
        if not part.strip():
            continue
        key, equals, value = part.partition("=")
        if not equals:
            if default is None:
                raise FormatError("value without key, but schema does not define a default key\n")
            key, value = default, part
        elif not key or not value:
            raise FormatError("missing key in comma-separated list property\n")
        if key in found:
            raise FormatError(f"duplicate key in comma-separated list property: {key}\n")
        boolean = key in fields and fields[key].kind == "boolean"
        found[key] = parse_boolean(value) if boolean else value
    errors: dict[str, str] = {}
    prefix = f"{where}." if where else ""
    for name in sorted(fields.keys() | found.keys()):
        if name not in fields:
            errors[prefix + name] = (
                "property is not defined in schema and the schema does not allow additional properties"
            )
        elif name not in found:
            if not fields[name].optional:
                errors[prefix + name] = "property is missing and it is not optional"
        elif message := check(fields[name], found[name], prefix + name):
            errors[prefix + name] = message
    if errors:
        raise FormatError("format error\n" + "".join(f"{name}: {text}\n" for name, text in sorted(errors.items())))
    return found


def check(field: Field, value: Value, where: str = "") -> str:
    """What is wrong with one value, or an empty text."""
    text = str(value)
    if field.kind == "boolean" and parse_boolean(text) not in (0, 1):
        return f"type check ('boolean') failed - got '{text}'"
    if field.kind == "integer" and not re.fullmatch(r"[+-]?\d+", text, re.ASCII):
        return f"type check ('integer') failed - got '{text}'"
    if field.kind == "number" and not re.fullmatch(r"[+-]?\d+(\.\d+)?", text, re.ASCII):
        return f"type check ('number') failed - got '{text}'"
    if field.enum and text not in field.enum:
        return f"value '{text}' does not have a value in the enumeration '{', '.join(field.enum)}'"
    if field.max_length is not None and len(text) > field.max_length:
        return f"value may only be {field.max_length} characters long"
    if field.format is not None:
        try:
            check_format(field.format, text, where)
        except FormatError as error:
            return f"invalid format - {error}"
    if field.pattern is not None and not re.fullmatch(field.pattern, text, re.ASCII):
        return "value does not match the regex pattern"
    if field.minimum is not None and float(text) < field.minimum:
        return f"value must have a minimum value of {field.minimum}"
    if field.maximum is not None and float(text) > field.maximum:
        return f"value must have a maximum value of {field.maximum}"
    return ""


def check_format(format_: str | Mapping[str, Field], text: str, where: str = "") -> None:
    """Raise FormatError when a text is not of a format."""
    if isinstance(format_, str):
        FORMATS[format_](text)
    else:
        parse_property_string(format_, text, where)


def _matches(pattern: str, message: str) -> Callable[[str], None]:
    def verify(text: str) -> None:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise FormatError(message.replace("%s", text) + "\n")

    return verify


def _mount_point(text: str) -> None:
    if re.search(r"/\.\.?/|/\.\.?$|^\.\./", text):
        raise FormatError(f"{text} contains illegal character sequences\n")


def _device_path(text: str) -> None:
    if re.search(r"/\.\.?(?:/|$)", text) or not text.startswith("/dev/"):
        raise FormatError(f"{text} is not a valid device path\n")


def _ip_configuration(version: int, words: tuple[str, ...]) -> Callable[[str], None]:
    def verify(text: str) -> None:
        if text in words:
            return
        try:
            network = ipaddress.ip_interface(text)
        except ValueError:
            network = None
        if network is None or network.version != version or "/" not in text:
            raise FormatError(f"value does not look like a valid ipv{version} network configuration\n")

    return verify


def _address(version: int) -> Callable[[str], None]:
    def verify(text: str) -> None:
        try:
            right = ipaddress.ip_address(text).version == version
        except ValueError:
            right = False
        if not right:
            raise FormatError(f"value does not look like a valid IPv{version} address\n")

    return verify


def _time_zone(text: str) -> None:
    if text == "host":
        return
    try:
        zones = path("/usr/share/zoneinfo/zone.tab").read_text()
    except OSError:
        zones = ""
    if text != "UTC" and not re.search(rf"^[^#\s]+\s+\S+\s+{re.escape(text)}(\s|$)", zones, re.MULTILINE):
        raise FormatError(f"invalid time zone '{text}'\n")


def _each(verify: Callable[[str], None]) -> Callable[[str], None]:
    def verify_all(text: str) -> None:
        for part in split_list(text):
            verify(part)

    return verify_all


_DNS_NAME = r"(?:(?:[a-zA-Z0-9](?:[a-zA-Z0-9\-]*[a-zA-Z0-9])?)\.)*(?:[a-zA-Z0-9](?:[a-zA-Z0-9\-]*[a-zA-Z0-9])?)"
_dns_name = _matches(_DNS_NAME, "value does not look like a valid DNS name")

FORMATS: dict[str, Callable[[str], None]] = {
    "disk-size": _matches(r"\d+(\.\d+)?[KMGT]?", "value does not look like a valid disk size: %s"),
    "dns-name": _dns_name,
    "dns-name-list": _each(_dns_name),
    "address-list": lambda text: None,
    "ipv4": _address(4),
    "ipv6": _address(6),
    "mac-addr": _matches(
        r"[a-fA-F0-9][02468aceACE](?::[a-fA-F0-9]{2}){5}", "value does not look like a valid unicast MAC address"
    ),
    "pve-configid": _matches(r"[a-zA-Z][a-zA-Z0-9_-]+", "invalid configuration ID '%s'"),
    "pve-configid-list": _each(_matches(r"[a-zA-Z][a-zA-Z0-9_-]+", "invalid configuration ID '%s'")),
    "pve-ct-timezone": _time_zone,
    "pve-ipv4-config": _ip_configuration(4, ("dhcp", "manual")),
    "pve-ipv6-config": _ip_configuration(6, ("auto", "dhcp", "manual")),
    "pve-lxc-dev-string": _device_path,
    "pve-lxc-mp-string": _mount_point,
    "pve-node": _dns_name,
    "pve-startup-order": _matches(
        r"(?:(?:order=)?\d+|up=\d+|down=\d+)(?:,(?:(?:order=)?\d+|up=\d+|down=\d+))*", "unable to parse startup options"
    ),
    "pve-tag-list": _each(_matches(r"[a-zA-Z0-9_][a-zA-Z0-9_\-+.]*", "invalid characters in tag")),
    "pve-volume-id": _matches(r"[a-zA-Z][a-zA-Z0-9\-_.]*[a-zA-Z0-9]:\S+", "unable to parse volume ID '%s'"),
}

"""Print the options and parser names of an installed engine as JSON, without importing it.

    python read_flags.py ENGINE DIRECTORY     DIRECTORY is a site-packages, or an unpacked wheel

Standard library only, any Python from 3.10 on: it also runs on the machines that serve, with an environment's own
Python. Engines declare their options in three ways, and all of them can be read from the source: calls of
add_argument (SGLang up to 0.5.12, vLLM), annotated fields (SGLang from 0.5.14 on; vLLM's configs, which give each
call its type), and parameters of a function (transformers). What it prints was compared with the live parsers.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

Flags = list[dict[str, Any]]


def main() -> None:
    """Read the command line, print the list."""
    engine, directory = sys.argv[1:3]
    readers = {"sglang": sglang, "vllm": vllm, "transformers": transformers}
    if engine not in readers:
        sys.exit("cannot read the options of " + engine + ": it is none of " + ", ".join(readers))
    flags, tools, reasonings = readers[engine](os.path.join(directory, engine))
    found = {
        "schema": 1,
        "engine": engine,
        "version": version(directory, engine),
        "flags": sorted(merged(flags), key=lambda flag: flag["name"]),
        "tool_parsers": sorted(tools),
        "reasoning_parsers": sorted(reasonings),
    }
    print(json.dumps(found, indent=1))


def version(directory: str, package: str) -> str:
    """The version in the package's metadata."""
    for name in sorted(os.listdir(directory)):
        match = re.match(re.escape(package) + r"-(.+)\.dist-info$", name)
        if match:
            return match[1]
    sys.exit("cannot find the metadata of " + package + " in " + directory)


def merged(flags: Flags) -> Flags:
    """One entry an option: what is declared later counts, as a later declaration takes the name from an earlier."""
    by_name: dict[str, dict[str, Any]] = {}
    for flag in flags:
        by_name.pop(flag["name"], None)
        by_name[flag["name"]] = {key: value for key, value in flag.items() if value}
    return list(by_name.values())


def parse(path: str) -> ast.Module:
    """The syntax tree of a file."""
    with open(path, encoding="utf-8") as file:
        return ast.parse(file.read())


def files(directory: str) -> Iterator[str]:
    """The Python files in a directory and below, in order."""
    for where, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                yield os.path.join(where, name)


# Values in a syntax tree


class Values:
    """Names that modules give to lists of text; ``paired``: switches are turned off by --disable-x too (vLLM)."""

    def __init__(self, *trees: ast.Module) -> None:
        self.paired = False
        self.names: dict[str, list[str]] = {}
        for tree in trees:
            for node in tree.body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                value = getattr(node, "value", None)
                if len(targets) == 1 and isinstance(targets[0], ast.Name) and value is not None:
                    found = self.texts(value)
                    if found:
                        self.names[targets[0].id] = found

    def texts(self, node: ast.AST | None) -> list[str]:
        """The texts that an expression lists, [] when it cannot be told without running it."""
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            parts = [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
            return parts if len(parts) == len(node.elts) else []
        if isinstance(node, ast.Name):
            return self.names.get(node.id, [])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.texts(node.left), self.texts(node.right)
            return left + right if left and right else []
        if isinstance(node, ast.Call) and name_of(node.func) in ("list", "sorted", "set") and len(node.args) == 1:
            return self.texts(node.args[0])
        return []


def name_of(node: ast.AST | None) -> str:
    """The last part of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def text_of(node: ast.AST | None) -> str:
    """A constant text."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def keywords(call: ast.Call) -> dict[str, ast.AST]:
    """The named arguments of a call."""
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def flag(options: list[str], takes: str, choices: list[str]) -> dict[str, Any]:
    """One option; short ones with a single dash are left out."""
    names = [option[2:] for option in options if option.startswith("--")]
    return {
        "name": names[0],
        "aliases": names[1:],
        "takes": "" if takes == "value" else takes,
        "choices": choices,
    }


def taken(action: str, nargs: str) -> str:
    """What an option takes, by argparse's words."""
    if action in ("store_true", "store_false", "store_const", "version", "help", "BooleanOptionalAction"):
        return "nothing"
    if action.startswith("Deprecated") and "Const" in action:
        return "nothing"
    if action == "append":
        return "each"
    return {"?": "maybe", "*": "values", "+": "values"}.get(nargs, "value")


# SGLang


def sglang(package: str) -> tuple[Flags, set[str], set[str]]:
    """SGLang 0.5.3 and later."""
    srt = os.path.join(package, "srt")
    main_tree = parse(os.path.join(srt, "server_args.py"))
    fields_directory = os.path.join(srt, "arg_groups", "fields")
    trees = [main_tree]
    if os.path.isdir(fields_directory):
        trees = [parse(path) for path in files(fields_directory)] + trees
    choices = os.path.join(srt, "arg_groups", "choices.py")
    values = Values(*trees, *([parse(choices)] if os.path.isfile(choices) else []))
    flags: Flags = []
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (tree is not main_tree or node.name == "ServerArgs"):
                flags += annotated(node, values)
    for node in ast.walk(main_tree):
        if isinstance(node, ast.FunctionDef) and node.name == "add_cli_args":
            flags += added(node, values)
    if not any(item["name"] == "model-path" for item in flags):
        sys.exit("cannot read the options of this SGLang: they are declared in another way")
    flags.append({"name": "config", "aliases": [], "takes": "", "choices": []})
    return flags, sglang_parsers(srt, "function_call"), sglang_parsers(srt, "parser")


def annotated(node: ast.ClassDef, values: Values) -> Flags:
    """Fields like ``port: A[int, Arg(help=…, aliases=[…])] = 1`` (sglang/srt/arg_groups/arg_utils.py)."""
    found = []
    for field in node.body:
        annotation = getattr(field, "annotation", None)
        if not isinstance(field, ast.AnnAssign) or not isinstance(annotation, ast.Subscript):
            continue
        if name_of(annotation.value) not in ("A", "Annotated") or not isinstance(annotation.slice, ast.Tuple):
            continue
        kind, *notes = annotation.slice.elts
        described = [n for n in notes if not (isinstance(n, ast.Call) and name_of(n.func) == "NS")]
        if not described:
            continue
        meta = next((n for n in described if isinstance(n, ast.Call) and name_of(n.func) == "Arg"), None)
        given = keywords(meta) if meta is not None else {}
        if isinstance(given.get("no_cli"), ast.Constant) and given["no_cli"].value:  # type: ignore[attr-defined]
            continue
        name = text_of(given.get("cli_name")) or "--" + name_of(field.target).replace("_", "-")
        literal = ast.unparse(kind) if hasattr(ast, "unparse") else ""
        action = text_of(given.get("action")) or name_of(given.get("action"))
        if not action and re.match(r"^(Optional\[)?bool\]?$|^bool \| None$", literal):
            action = "store_true"
        listed = re.search(r"\b(List|list)\b", literal) is not None
        nargs = text_of(given.get("nargs")) or ("+" if listed and "type_parser" not in given else "")
        if "type_parser" in given and literal.startswith(("bool", "Optional[bool")):
            action = ""
        chosen = values.texts(given.get("choices")) or literals(kind)
        found.append(flag([name, *values.texts(given.get("aliases"))], taken(action, nargs), chosen))
        if action == "BooleanOptionalAction":
            found.append(flag(["--no-" + name[2:]], "nothing", []))
    return found


def literals(kind: ast.AST) -> list[str]:
    """The texts in a ``Literal[…]``."""
    for node in ast.walk(kind):
        if isinstance(node, ast.Subscript) and name_of(node.value) == "Literal":
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return [text_of(part) for part in parts if text_of(part)]
    return []


def added(function: ast.AST, values: Values) -> Flags:
    """Calls like ``parser.add_argument("--port", type=int)``."""
    found = []
    for call in ast.walk(function):
        if not isinstance(call, ast.Call) or name_of(call.func) != "add_argument":
            continue
        options = [text_of(argument) for argument in call.args]
        if not any(option.startswith("--") for option in options):
            continue
        given = keywords(call)
        action = text_of(given.get("action")) or name_of(given.get("action"))
        if not action and isinstance(given.get("action"), ast.Call):
            action = name_of(given["action"].func)  # type: ignore[attr-defined]
        found.append(flag(options, taken(action, text_of(given.get("nargs"))), values.texts(given.get("choices"))))
    return found


def sglang_parsers(srt: str, folder: str) -> set[str]:
    """Names of parsers: a module of their own (0.5.20 and later), else the map of the detectors."""
    tool = folder == "function_call"
    own = os.path.join(srt, folder, "parser_names.py" if tool else "reasoning_parser_names.py")
    if os.path.isfile(own):
        names: set[str] = set()
        for listed in Values(parse(own)).names.values():
            names.update(listed)
        for node in ast.walk(parse(own)):
            if isinstance(node, ast.Dict):
                names.update(text_of(key) for key in node.keys if text_of(key))
        return names | {"auto"}
    path = os.path.join(srt, folder, "function_call_parser.py" if tool else "reasoning_parser.py")
    wanted = "ToolCallParserEnum" if tool else "DetectorMap"
    for node in ast.walk(parse(path)):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and name_of(target) == wanted and isinstance(value, ast.Dict):
            return {text_of(key) for key in value.keys if text_of(key)}
    return set()


# vLLM


def vllm(package: str) -> tuple[Flags, set[str], set[str]]:
    """VLLM 0.33: calls whose types are those of fields of configs, and fields that become options by themselves."""
    classes: dict[str, ast.ClassDef] = {}
    engine_args = os.path.join(package, "engine", "arg_utils.py")
    front = declaring(os.path.join(package, "entrypoints"), "FrontendArgs")
    trees = [parse(path) for path in files(os.path.join(package, "config"))] + [parse(engine_args), parse(front)]
    for tree in trees:
        classes.update({node.name: node for node in tree.body if isinstance(node, ast.ClassDef)})
    values = Values(*trees)
    with open(os.path.join(package, "utils", "argparse_utils.py"), encoding="utf-8") as file:
        values.paired = "EnableDisableAction" in file.read()  # 0.33 and later
    flags: Flags = []
    for path in (engine_args, front):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef):
                flags += vllm_calls(node, classes, values)
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        flags += [
            item
            for field in fields(classes.get(name))
            for item in vllm_flag(["--" + name_of(field.target).replace("_", "-")], field.annotation, classes, values)
        ]
    serve = os.path.join(package, "entrypoints", "cli", "serve.py")
    for path in (serve, os.path.join(package, "entrypoints", "launchers", "utils", "cli_args.py")):
        if os.path.isfile(path):
            flags += added(parse(path), values)
    tools = registered(os.path.join(package, "tool_parsers", "__init__.py"))
    return flags, tools, registered(os.path.join(package, "reasoning", "__init__.py"))


def declaring(directory: str, name: str) -> str:
    """The file that declares a class; it moves from version to version."""
    for path in files(directory):
        with open(path, encoding="utf-8") as file:
            if re.search(rf"^class {name}\b", file.read(), re.MULTILINE):
                return path
    sys.exit("cannot read the options of this vLLM: nothing declares " + name)


def fields(node: ast.ClassDef | None) -> list[ast.AnnAssign]:
    """The annotated fields of a class."""
    return [f for f in (node.body if node else []) if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]


def vllm_calls(function: ast.FunctionDef, classes: dict[str, ast.ClassDef], values: Values) -> Flags:
    """Calls like ``group.add_argument("--model", **model_kwargs["model"])`` and ``model_kwargs = get_kwargs(X)``."""
    configs: dict[str, str] = {}
    for node in ast.walk(function):
        made = node.value if isinstance(node, ast.Assign) else None
        if isinstance(made, ast.Call) and name_of(made.func) == "get_kwargs" and made.args:
            configs[name_of(node.targets[0])] = name_of(made.args[0])  # type: ignore[attr-defined]
    found: Flags = []
    for call in ast.walk(function):
        if not isinstance(call, ast.Call) or name_of(call.func) != "add_argument":
            continue
        options = [text_of(argument) for argument in call.args if text_of(argument).startswith("-")]
        if not any(option.startswith("--") for option in options):
            continue
        spread = next((k.value for k in call.keywords if k.arg is None), None)
        if isinstance(spread, ast.Dict):  # {**model_kwargs["x"], "default": …}
            spread = next((v for k, v in zip(spread.keys, spread.values, strict=True) if k is None), None)
        annotation = None
        if isinstance(spread, ast.Subscript):
            owner = classes.get(configs.get(name_of(spread.value), ""))
            wanted = text_of(spread.slice)
            annotation = next((f.annotation for f in fields(owner) if name_of(f.target) == wanted), None)
        given = keywords(call)
        action = text_of(given.get("action")) or name_of(given.get("action"))
        if annotation is not None and not action:
            found += vllm_flag(options, annotation, classes, values)
        elif action == "BooleanOptionalAction":
            found += both(options, values.paired)
        else:
            found.append(flag(options, taken(action, text_of(given.get("nargs"))), values.texts(given.get("choices"))))
    return found


def vllm_flag(options: list[str], kind: ast.AST, classes: dict[str, ast.ClassDef], values: Values) -> Flags:
    """An option by the annotation of its field (``_compute_kwargs`` in vllm/engine/arg_utils.py)."""
    words = {name_of(node) for node in ast.walk(kind)} | {text_of(node) for node in ast.walk(kind)}
    if any(word in classes for word in words):
        return [flag(options, "value", [])]
    if "bool" in words and "str" in words:
        return [flag(options, "maybe", [])]
    if "bool" in words:
        return both(options, values.paired)
    if words & {"list", "tuple", "set", "List", "Tuple", "Set", "Sequence"}:
        return [flag(options, "values", [])]
    chosen = literals(kind) or next((values.names[w] for w in words if w in values.names), [])
    return [flag(options, "value", chosen if "None" not in chosen else [])]


def both(options: list[str], paired: bool) -> Flags:
    """A switch and its opposite: --no-x; where they are ``paired``, --disable-x for --enable-x too, and back."""
    name = next(option for option in options if option.startswith("--"))
    opposites = ["--no-" + name[2:]]
    for one, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if paired and name.startswith(one):
            opposites.insert(0, other + name[len(one) :])
    return [flag(options, "nothing", []), flag(opposites, "nothing", [])]


def registered(path: str) -> set[str]:
    """The keys of the maps that a module of vLLM registers its parsers with."""
    if not os.path.isfile(path):
        return set()
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Dict) and node.values and all(isinstance(v, ast.Tuple) for v in node.values):
            found.update(text_of(key) for key in node.keys if text_of(key))
    return found


# transformers


def transformers(package: str) -> tuple[Flags, set[str], set[str]]:
    """Transformers 5: parameters of ``Serve.__init__``, which typer makes into options."""
    path = os.path.join(package, "cli", "serve.py")
    if not os.path.isfile(path):
        sys.exit("cannot read the options of this transformers: it has no cli/serve.py")
    flags: Flags = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef) and node.name == "Serve":
            function = next(f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
            for argument in function.args.args:
                kind = argument.annotation
                if not isinstance(kind, ast.Subscript) or not isinstance(kind.slice, ast.Tuple):
                    continue
                typed, note = kind.slice.elts[0], kind.slice.elts[1]
                if not isinstance(note, ast.Call) or name_of(note.func) != "Option":
                    continue
                option = "--" + argument.arg.replace("_", "-")
                words = {name_of(part) for part in ast.walk(typed)}
                switches = [option, "--no-" + option[2:]] if "bool" in words else []
                flags += [flag([name], "nothing", []) for name in switches] or [flag([option], "value", [])]
    return flags, set(), set()


if __name__ == "__main__":
    main()

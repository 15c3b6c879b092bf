"""mkdocs hooks: pages that live elsewhere in the repository, references from the source, and links that the site can
follow.

The Markdown is written to be read in the repository; here it is only moved and its links are turned round.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import MISSING
from inspect import signature
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from stream_balancer.config import BalancerConfig
from stream_balancer.config.values import Knobs, in_words, kinds_of, knob_at

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/grpo/README.md": "grpo.md",
    "examples/grpo": "grpo.md",
}
"""Path in the repository -> page of the site."""
_OPTIONS = {"BalancerConfig": ["    options: {inherited_members: true, show_bases: false}"]}
"""What the API page shows otherwise than usual: a config's knobs are its base's."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Ask for the list of versions only where mike has put one."""
    if "MIKE_DOCS_VERSION" not in os.environ:
        config.extra.pop("version", None)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in ELSEWHERE.items():
        if source.endswith(".md"):
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "knobs.md", content=knobs()))
    files.append(File.generated(config, "api.md", content=api()))
    files.append(File.generated(config, "modules.md", content=modules()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links of the repository into links of the site; a link to a file that has no page becomes its path."""
    origin = next((src for src, to in ELSEWHERE.items() if to == page.file.src_uri), f"docs/{page.file.src_uri}")
    folder = PurePosixPath(origin).parent
    if origin == "README.md":
        page.meta["hide"] = ["toc"]  # its diagram is as wide as that column and the text together

    def turn(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if "://" in target:
            return match[0]
        there = normpath(str(folder / target))
        if there in ELSEWHERE:
            return f"{image}[{text}]({ELSEWHERE[there]}{anchor})"
        if there.startswith("docs/"):
            return f"{image}[{text}]({there.removeprefix('docs/')}{anchor})"
        return text if text.strip("`") == there else f"{text} (`{there}`)"

    return _LINK.sub(turn, markdown)


def knobs() -> str:
    """The knobs of BalancerConfig, and of its groups: name, what each may be, default, what it does."""
    lines = [
        "# Knobs",
        "",
        "Every field of `sb.BalancerConfig`. All are keyword arguments; a dotted one is that of a group: `groups.size` "
        'is `groups=sb.Groups(size=...)`, or `groups={"size": ...}`. A value or a combination '
        "that cannot work is refused with a `ConfigError` (a ValueError) that says what to do. "
        "`balancer.reconfigure(...)` changes them live; another `dp_size` holds "
        "[from the next batch on](elastic.md#more-ranks-or-fewer).",
        "",
    ]
    for knob in signature(BalancerConfig).parameters.values():
        group = kinds_of(type(knob.default)) if isinstance(knob.default, Knobs) else ()
        for path in [f"{knob.name}.{name}" for name in group] or [knob.name]:
            kind, text, default = knob_at(BalancerConfig, path)
            words = "a cost model, or its name" if kind is Any else in_words(kind)
            lines += [f"## {path}", "", f"{words[0].upper()}{words[1:]}; {_default(default)}.", "", _plain(text), ""]
    return "\n".join(lines)


def _default(value: object) -> str:
    if value is MISSING:
        return "required"
    return "default None, or what follows from other knobs" if value is None else f"default `{value!r}`"


def _plain(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)).strip()


def api() -> str:
    """One page with all public names, by module."""
    package = ROOT / "stream_balancer"
    names_of = {
        "cost": _literal(package / "cost" / "__init__.py", "__all__"),
        "errors": _literal(package / "errors.py", "__all__"),
        "rollouts": _literal(package / "rollouts" / "__init__.py", "__all__"),
    }
    for table in ("_NAMES_OF", "_MORE_NAMES_OF"):
        for module, names in _literal(package / "__init__.py", table).items():
            names_of[module] = list(dict.fromkeys([*names_of.get(module, ()), *names.split()]))
    lines = ["# API", "", "What `import stream_balancer as sb` offers, by module.", ""]
    for module, its in sorted(names_of.items()):
        lines += [f"## {module.rpartition('.')[2].lstrip('_')}", ""]
        own, borrowed = _split(module, its)
        for name in own:
            lines += [f"::: stream_balancer.{module}.{name}", *_OPTIONS.get(name, ()), ""]
        if borrowed:
            lines += [f"Raised as they are in anyio: {', '.join(f'`{name}`' for name in borrowed)}.", ""]
    lines += ["## planning", "", "::: stream_balancer.planning", "    options: {show_root_heading: false}", ""]
    return "\n".join(lines)


def modules() -> str:
    """Every module and the first sentence of its docstring, by folder."""
    package = ROOT / "stream_balancer"
    folders: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        first = _plain(re.split(r"(?<=[\w`)][.?])\s|\n\n|::\n", text, maxsplit=1)[0]).replace("``", "`")
        folder = path.parent.relative_to(package.parent).as_posix()
        name = "the folder" if path.stem == "__init__" else f"`{path.stem}`"
        folders.setdefault(folder, []).append(f"| {name} | {first} |")
    lines = ["# Modules", "", "Every module, and the first sentence of its docstring, by folder."]
    for folder, rows in folders.items():
        lines += ["", f"## `{folder}`", "", "| module | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _literal(path: Path, name: str) -> Any:
    """The value that a module gives a name; nothing is imported, since torch need not be there."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} gives {name} no value")


def _split(module: str, names: list[str]) -> tuple[list[str], list[str]]:
    """Names that are the project's own, and names that a module passes on from elsewhere."""
    path = ROOT / "stream_balancer" / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    elsewhere = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("stream_balancer")
        for alias in node.names
    }
    return [name for name in names if name not in elsewhere], [name for name in names if name in elsewhere]

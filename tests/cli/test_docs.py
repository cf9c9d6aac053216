"""What README and docs/ name is there: links, records, commands, flags, targets of make, files, variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from typer.main import get_command

from octavo.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RECORDS = ROOT / "docs" / "decisions"
FOLDERS = "src|tests|docs|benchmarks|native|deploy|core|backends|models|tokenizers|weights|decoding|engine|serve|cli"
FOREIGN = {"--no-deps", "--unix-socket", "--allow-requantize", "--read-only", "--tmpfs"}  # pip's, curl's, Docker's ...

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as the hub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip()).lower().replace(" ", "-") for heading in headings}


def code_of(page: Path) -> Iterator[str]:
    """Every span and block of code of a page."""
    fences = r"^```[^\n]*\n(.*?)^```"
    yield from re.findall(fences, text_of(page), re.MULTILINE | re.DOTALL)
    yield from re.findall(r"(?m)^ {4,}(\S.*)$", text_of(page))
    yield from re.findall(r"`([^`\n]+)`", re.sub(fences, "", text_of(page), flags=re.MULTILINE | re.DOTALL))


def commands(group: object, name: str = "octavo") -> Iterator[tuple[str, set[str]]]:
    """Each command of the command line by its whole name, and its flags."""
    yield name, {"--help"}.union(*(parameter.opts for parameter in group.params))  # type: ignore[attr-defined]
    for word, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{name} {word}")


COMMANDS = dict(commands(get_command(app)))


@lru_cache
def in_sources(pattern: str) -> set[str]:
    """What the pattern finds in scripts and sources."""
    folders = [ROOT / name for name in ("src", "benchmarks", "scripts", "tests", "native")]
    kinds = (".py", ".sh", ".cpp", ".h")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds]
    return {word for path in files for word in re.findall(pattern, text_of(path))}


def words(page: Path, pattern: str) -> set[str]:
    """What the pattern finds in the page's code."""
    return {word for code in code_of(page) for word in re.findall(pattern, code)}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pages
def test_commands_and_their_flags_are_there(page: Path) -> None:
    for line in (line for code in code_of(page) for line in code.splitlines()):
        line = line.partition("#")[0]
        for name in re.findall(r"^(?:[A-Z_]+=\S+ )*(?:\S*/)?(octavo [a-z]+(?: ops| offline)?)", line):
            assert name in COMMANDS, line
            used = set(re.findall(r"(?<!\S)(--[a-z][a-z0-9-]*)", line.partition(name)[2]))
            assert used <= COMMANDS[name], (line, used - COMMANDS[name])


@pages
def test_flags_and_variables_belong_to_something(page: Path) -> None:
    flags = in_sources(r"[\"'](--[a-z][a-z0-9-]*)[\"'=]").union(FOREIGN, *COMMANDS.values())
    assert (used := words(page, r"(?<![\w-])--[a-z][a-z0-9-]+[a-z0-9](?![\w-])")) <= flags, used - flags
    settings = {f"OCTAVO_{flag[2:].replace('-', '_').upper()}" for flag in COMMANDS["octavo serve"]}
    known = settings | in_sources(r"\bOCTAVO_[A-Z_]+\b")
    assert (used := words(page, r"\bOCTAVO_[A-Z_]+\b")) <= known, used - known


@pages
def test_targets_of_make_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    assert (used := words(page, r"(?m)^(?:\w+=\w+ )?make ([a-z-]+)")) <= targets, used - targets


@pages
def test_files_are_there(page: Path) -> None:
    roots = (ROOT, ROOT / "src" / "octavo", ROOT / "native")  # the last: pages about the library begin there
    for path in words(page, rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*\w/?(?![\w*</-])"):
        assert any((root / path).exists() or (root / f"{path}.py").exists() for root in roots), path


def test_every_decision_is_listed_by_its_title() -> None:
    listed = dict(re.findall(r"^\| \[\d{4}\]\(([^)]+)\) \| (.*) \|$", text_of(RECORDS / "README.md"), re.MULTILINE))
    titles = {path.name: re.search(r"^# (.*)$", text_of(path), re.M) for path in RECORDS.glob("0*.md")}
    assert listed == {name: title and title.group(1) for name, title in sorted(titles.items())}

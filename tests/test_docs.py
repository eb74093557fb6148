"""The documentation is complete: settings, reasons, links; and its code and commands run."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_fixtures import WORKERS, check_nothing_left
from distributed import Client, LocalCluster
from snippets import (
    ALL,
    DIRECTIVES,
    DOCS,
    LANGUAGES,
    NEEDS,
    PACKAGE,
    PAGES,
    ROOT,
    SCHEDULER,
    Block,
    complaint,
    environment,
    outside,
    typed,
    unknown_settings,
)

from dask_gpuipc import GPUIPCPlugin
from dask_gpuipc.errors import Failure, Refusal
from dask_gpuipc.explain import FAILURES, REFUSALS


def read_yaml(name: str) -> Any:
    return yaml.safe_load((PACKAGE / name).read_text())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(**{**WORKERS, "n_workers": 2}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=60)
        yield client


DEFAULTS = read_yaml("gpuipc.yaml")
SCHEMA = read_yaml("gpuipc-schema.yaml")


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def in_schema(key: tuple[str, ...], schema: dict[str, Any]) -> bool:
    if not key:
        return True
    ways = [schema, *schema.get("oneOf", ())]
    return any(
        key[0] in way.get("properties", ()) and in_schema(key[1:], way["properties"][key[0]])
        for way in ways
    )


def schema_leaves(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    ways = [way["properties"] for way in (schema, *schema.get("oneOf", ())) if "properties" in way]
    for properties in ways:
        for name, below in properties.items():
            yield from schema_leaves(below, (*path, name))
    if not ways:
        yield path


def first_cells(text: str, heading: str) -> list[str]:
    """What stands in the first column, as code, of the table below a heading."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)


# -- settings ------------------------------------------------------------------------------------


def test_defaults_are_what_the_schema_allows():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(DEFAULTS, SCHEMA, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "wrong",
    [
        {"transfer": "fast"},
        {"min-byte": 1},
        {"min-bytes": {"disk": 1}},
        {"pinned-limit": []},
        {"host": {"enabled": "perhaps"}},
        {"cuda": {"idle-mappings": "many"}},
    ],
    ids=lambda wrong: ".".join(wrong),
)
def test_schema_refuses_what_is_wrong(wrong):
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"gpuipc": wrong}, SCHEMA, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("key", list(leaves(DEFAULTS)), ids=".".join)
def test_every_setting_is_in_the_schema_and_explained(key):
    assert in_schema(key, SCHEMA)
    documented = re.findall(
        r"^\| `(gpuipc\.[^`]+)` \|", (DOCS / "configuration.md").read_text(), flags=re.MULTILINE
    )
    assert documented.count(".".join(key)) == 1


def test_no_setting_is_explained_that_does_not_exist():
    allowed = {".".join(key) for key in schema_leaves(SCHEMA)} | {"gpuipc.min-bytes"}
    text = (DOCS / "configuration.md").read_text()
    assert set(re.findall(r"`(gpuipc\.[a-z.-]+)`", text)) <= allowed
    assert {".".join(key) for key in leaves(DEFAULTS)} <= allowed


def test_documented_defaults_are_the_defaults():
    text = (DOCS / "configuration.md").read_text()
    told = dict(re.findall(r"^\| `gpuipc\.([^`]+)` \| `([^`]+)` \|", text, flags=re.MULTILINE))
    values = {}
    for key in leaves(DEFAULTS):
        value: Any = DEFAULTS
        for name in key:
            value = value[name]
        values[".".join(key[1:])] = value
    assert {name: yaml.safe_load(value) for name, value in told.items()} == values


# -- reasons -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heading", "reasons"), [("refused", Refusal), ("failed", Failure)])
def test_every_reason_has_one_row_of_troubleshooting(heading: str, reasons: type[StrEnum]):
    rows = first_cells((DOCS / "troubleshooting.md").read_text(), heading)
    assert sorted(rows) == sorted(reason.value for reason in reasons)


def test_every_reason_is_explained_once_and_in_a_form_that_goes_everywhere():
    assert set(REFUSALS) == set(Refusal)
    assert set(FAILURES) == set(Failure)
    for explanation in (*REFUSALS.values(), *FAILURES.values()):
        for text in (explanation.meaning, explanation.remedy):
            assert text
            assert not set(text) & set("|\n<>")
            assert text.count("`") % 2 == 0
            assert not text.endswith(".")


# -- what is written from the code ---------------------------------------------------------------


def test_tables_and_diagrams_are_as_the_code_has_them():
    """If not: python docs/generate.py"""
    outdated = runpy.run_path(str(DOCS / "generate.py"))["outdated"]()
    assert not outdated, [str(path.relative_to(ROOT)) for path in outdated]


# -- links ----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    wrong = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        path = page.parent / target if target else page
        if "://" in target:
            continue
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(f"{target}#{anchor}")
    assert not wrong


def test_every_page_is_reached_from_the_map():
    maps = [DOCS / "index.md", DOCS / "decisions.md"]
    linked = {
        (DOCS / target).resolve()
        for page in maps
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    }
    assert {page.resolve() for page in PAGES if DOCS in page.parents} <= linked | {maps[0]}


# -- code -----------------------------------------------------------------------------------------


def of(language: str, **more: bool) -> list[Block]:
    return [
        b
        for b in ALL
        if b.language == language
        and more.items() <= {"runs": b.runs, "is_script": b.is_script}.items()
    ]


def test_every_block_says_what_it_is_and_what_it_needs():
    for block in ALL:
        assert block.language in LANGUAGES | DIRECTIVES, block
        assert block.needs is None or block.needs in NEEDS, block
    assert {block.needs for block in ALL} - {None} == set(NEEDS), "a need that nobody has"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_fenced(page):
    """Indented blocks say neither what they are nor what they need, and nobody would look."""
    text = outside(page)
    assert not re.findall(r"^(?![-*:\d ]).*\n\n {4}(\S.*)", "\n" + text, flags=re.MULTILINE)


@pytest.mark.parametrize("block", [b for b in ALL if not b.runs], ids=str)
def test_what_needs_more_is_checked_and_not_run(block):
    """One skip for each, so that pytest's summary counts them by what they need."""
    pytest.skip(f"{block.needs}: {NEEDS[block.needs]}")


def test_most_code_runs():
    code = [block for block in ALL if block.language in {"bash", "python", "yaml"}]
    assert sum(block.runs for block in code) > len(code) / 2


@pytest.mark.parametrize("block", of("text"), ids=str)
def test_text_is_no_code(block):
    assert not re.search(
        r"^(>>>|dask |make |pip |python |import |from \w+ import )", block.text, re.M
    )


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_compiles(block):
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", of("python", runs=True, is_script=True), ids=str)
def test_programs_run(block, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(block.text)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**environment(), "PYTHONWARNINGS": "ignore"},  # such as that port 8787 is in use
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if "LocalCluster" in block.text:
        # On a busy machine its servers log so, and one worker may steal all of the work.
        assert done.stdout.count("enabled") == 2, done.stdout
    else:
        assert done.stdout
        assert not done.stderr


PARTS = {
    page: [b for b in of("python", runs=True, is_script=False) if b.page == page] for page in PAGES
}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if PARTS[p]], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_parts_of_a_page_run_one_after_the_other(page: Path, client: Client) -> None:
    names: dict[str, Any] = {"__name__": "page", "client": client}
    for block in PARTS[page]:
        exec(compile(block.text, str(block), "exec"), names)
    names.clear()
    check_nothing_left(client)


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_as_the_schema_has_it(block):
    jsonschema = pytest.importorskip("jsonschema")
    found = yaml.safe_load(block.text)
    assert isinstance(found, dict)
    jsonschema.validate(found, SCHEMA, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_such_as_can_be_typed(page):
    found = [(place, complaint(words)) for place, words in typed(page)]
    assert not [(place, wrong) for place, wrong in found if wrong]
    assert not unknown_settings(page.read_text())


@pytest.mark.parametrize("block", of("bash"), ids=str)
def test_shell_is_whole(block):
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


RUN = sorted(
    {
        tuple(words)
        for page in PAGES
        for place, words in typed(page)
        if words[:3] in (["dask", "gpuipc", "doctor"], ["dask", "gpuipc", "report"])
        and (SCHEDULER in words or "--size" in words)
    }
)


@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_commands_run(words: tuple[str, ...], client: Client) -> None:
    client.register_worker_plugin(GPUIPCPlugin())
    address = client.scheduler.address
    done = subprocess.run(
        [address if word == SCHEDULER else word for word in words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    check_nothing_left(client)

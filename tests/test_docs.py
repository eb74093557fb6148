"""The documentation is complete: settings, reasons, links; and the README's code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import yaml

import dask_gpuipc
from dask_gpuipc.errors import Failure, Refusal
from dask_gpuipc.explain import FAILURES, REFUSALS, with_tables

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(dask_gpuipc.__file__).parent
PAGES = sorted(
    page for page in DOCS.rglob("*.md") if "checkout" not in page.parts[len(DOCS.parts) :]
)


def read_yaml(name: str) -> Any:
    return yaml.safe_load((PACKAGE / name).read_text())


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


def paragraphs_of_code(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


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


def test_tables_of_troubleshooting_are_written_from_the_code():
    """If not: python -m dask_gpuipc.explain docs/troubleshooting.md"""
    page = (DOCS / "troubleshooting.md").read_text()
    assert with_tables(page) == page


def test_every_reason_is_explained_once_and_in_a_form_that_goes_everywhere():
    assert set(REFUSALS) == set(Refusal)
    assert set(FAILURES) == set(Failure)
    for explanation in (*REFUSALS.values(), *FAILURES.values()):
        for text in (explanation.meaning, explanation.remedy):
            assert text
            assert not set(text) & set("|\n<>")
            assert text.count("`") % 2 == 0
            assert not text.endswith(".")


# -- links and code ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES,
            *(ROOT / "benchmarks").rglob("*.md")]),
    ids=lambda page: str(page.relative_to(ROOT)),
)  # fmt: skip
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_every_page_is_reached_from_the_map():
    maps = [DOCS / "index.md", DOCS / "decisions.md"]
    linked = {
        (DOCS / target).resolve()
        for page in maps
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    }
    assert {page.resolve() for page in PAGES} <= linked | {maps[0]}


@pytest.mark.parametrize("page", sorted(DOCS.glob("sharing*.md")), ids=lambda page: page.name)
def test_code_of_the_pages_on_sharing_runs(page, tmp_path):
    for number, code in enumerate(paragraphs_of_code(f"docs/{page.name}")):
        compile(code, page.name, "exec")
        if "cupy" in code:
            continue  # needs a GPU; compiled only
        script = tmp_path / f"snippet{number}.py"
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("number", range(len(paragraphs_of_code("README.md"))))
def test_code_of_the_readme_compiles_and_runs_where_it_needs_no_gpu(number, tmp_path):
    code = paragraphs_of_code("README.md")[number]
    compile(code, "README.md", "exec")
    if "cupy" in code or "LocalCUDACluster" in code:
        pytest.skip("needs a GPU; compiled only")
    script = tmp_path / "snippet.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("enabled") == 2, done.stdout
    assert "'share'" in done.stdout

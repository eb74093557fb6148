"""Write what the pages take from the code: settings, reasons, diagrams.

    python docs/generate.py            # write
    python docs/generate.py --check    # change nothing; end with 1 if something is out of date

`tests/test_docs.py` checks it too. `FILES` lists what is written, and by what.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

import dask_gpuipc
from dask_gpuipc.explain import with_tables

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from diagrams import DIAGRAMS  # noqa: E402 -- beside this file

PACKAGE = Path(dask_gpuipc.__file__).parent

Tree = dict[str, Any]


def settings() -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of each setting, in the order of the file with the defaults."""
    schema = yaml.safe_load((PACKAGE / "gpuipc-schema.yaml").read_text())
    defaults = yaml.safe_load((PACKAGE / "gpuipc.yaml").read_text())
    yield from _settings("gpuipc", schema["properties"]["gpuipc"], defaults["gpuipc"])


def _settings(key: str, schema: Tree, default: Any) -> Iterator[tuple[str, str, str]]:
    if "description" in schema:
        meaning = " ".join(schema["description"].split())
        yield key, "below" if isinstance(default, dict) else f"`{_text(default)}`", meaning
    if isinstance(default, dict):
        ways = [schema, *schema.get("oneOf", ())]
        properties = next(way["properties"] for way in ways if "properties" in way)
        for name, value in default.items():
            yield from _settings(f"{key}.{name}", properties[name], value)


def _text(value: Any) -> str:
    return yaml.safe_dump(value).removesuffix("...\n").strip()


def with_settings(page: str) -> str:
    """The configuration page with its table as the schema and the defaults have it."""
    rows = [f"| `{key}` | {default} | {meaning} |" for key, default, meaning in settings()]
    table = "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])
    return between("settings", table, page)


def between(name: str, text: str, page: str) -> str:
    """A page with the text between two of its comments replaced."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"no place for {name}: the page lacks {begin.strip()} or {end}")
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}{text}\n{end}", page, flags=re.DOTALL)


FILES: dict[str, Callable[[str], str]] = {
    "configuration.md": with_settings,
    "troubleshooting.md": with_tables,
    **{f"images/{name}.svg": lambda _, draw=draw: draw() for name, draw in DIAGRAMS.items()},
}
"""By file, what gives its new text of its old one."""


def outdated() -> dict[Path, str]:
    """Files that are not what they would be if they were written now, and what that is."""
    found = {}
    for name, new in FILES.items():
        path = DOCS / name
        old = path.read_text() if path.exists() else ""
        text = new(old)
        if text != old:
            found[path] = text
    return found


def main(check: bool) -> int:
    """Write them, or only tell of them."""
    found = outdated()
    for path, text in found.items():
        print(f"{path.relative_to(DOCS.parent)} {'is out of date' if check else 'written'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))

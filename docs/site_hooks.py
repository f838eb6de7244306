"""What mkdocs is told beside its settings: the index of all names, and a look at every link."""

import ast
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jax_ddp_weighting"
PLACE = "<!-- every public name -->"


# --- the index of all names -----------------------------------------------------------------------


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called for every page: the index is put where a page asks for it."""
    return markdown.replace(PLACE, make_index()) if PLACE in markdown else markdown


def make_index() -> str:
    """A table of all public names, with their rooms and what is said of them first."""
    rows = ["| name | room | what it is |", "|---|---|---|"]
    public = {room: names for room, names in read_rooms().items() if room != "_version"}
    homes = {name: room for room, names in public.items() for name in names}
    for name in sorted(homes, key=lambda name: (name.lower(), name)):
        room = homes[name].lstrip("_")
        said = find_summary(name, homes[name]).replace("|", "\\|")
        link = f"reference/{room}.md"
        rows.append(f"| [`{name}`]({link}#jax_ddp_weighting.{name}) | [{room}]({link}) | {said} |")
    return "\n".join(rows)


def read_rooms() -> dict[str, tuple[str, ...]]:
    """The public names by room, read without importing the package, and so JAX."""
    names: dict[str, Any] = {}
    exec((PACKAGE / "_rooms.py").read_text(), names)
    return names["PUBLIC"]


def find_summary(name: str, room: str) -> str:
    """The first sentence that the source says of a public name."""
    files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").is_file() else []
    for path in files or sorted((PACKAGE / room).glob("*.py")):
        body = _parse(path)
        for place, node in enumerate(body):
            named = isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
            if named and (said := ast.get_docstring(node)):  # an overload says nothing
                return _first_line(said)
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                after = body[place + 1] if place + 1 < len(body) else None
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    return _first_line(str(after.value.value))
    return ""


@cache
def _parse(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


def _first_line(docstring: str) -> str:
    paragraph = docstring.strip().split("\n\n")[0]
    return " ".join(paragraph.split())


# --- links ----------------------------------------------------------------------------------------


def on_post_build(config: Any, **_: Any) -> None:
    """Called when the site is built: a link that leads nowhere ends the build."""
    from mkdocs.exceptions import PluginError

    site = Path(config["site_dir"])
    faults = find_broken_links(site)
    if faults:
        raise PluginError("Links that lead nowhere:\n" + "\n".join(faults[:20]))
    loaded = find_loaded(site)
    if loaded:
        raise PluginError("Pages load from elsewhere:\n" + "\n".join(loaded[:20]))
    print(f"{site}/index.html: open it as a file, or run: python -m http.server -d {site}")


class _Links(HTMLParser):
    """The links of a page, and the places in it that links lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for every tag."""
        found = dict(attrs)
        self.places |= {value for key in ("id", "name") if (value := found.get(key))}
        self.links |= {value for key in ("href", "src") if (value := found.get(key))}


def find_broken_links(site: Path) -> list[str]:
    """What is wrong with the links of a site, as it lies in the file system and on a server.

    The rule: a link inside the site is relative, names a file (a folder shows no page when it is
    opened as a file), and its anchor is in that file; nothing is loaded from elsewhere.
    """
    pages = {}
    for path in site.rglob("*.html"):
        pages[path] = parser = _Links()
        parser.feed(path.read_text())
    faults = []
    for path, page in sorted(pages.items()):
        for link in sorted(page.links):
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            where = f"{path.relative_to(site)}: {link}"
            if parts.scheme or parts.netloc:
                continue  # of the world outside, and not looked up
            if path.name == "404.html":
                continue  # which a server shows at any address, so that its links are absolute
            if parts.path.startswith("/") or not target.is_file():
                faults.append(where)
            elif parts.fragment and target in pages:
                places = pages[target].places
                if unquote(parts.fragment) not in places and not parts.fragment.startswith("__"):
                    faults.append(where)
    return faults


def find_loaded(site: Path) -> list[str]:
    """What pages load from other places: scripts, styles and pictures; none, if all is well."""
    pattern = re.compile(r"<(?:script|img|link)[^>]+(?:src|href)=\"?(https?://[^\" >]+)")
    return sorted(
        {found for path in site.rglob("*.html") for found in pattern.findall(path.read_text())}
    )

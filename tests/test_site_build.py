"""What the built site is made with: the index of names, sections of docstrings, a look at links.

The site itself is built by `make docs`, which needs mkdocs; what it calls of ours needs nothing.
"""

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import jax_ddp_weighting
from jax_ddp_weighting import CONVENTIONS, ENGINES, JOIN_CONVENTIONS

DOCS = Path(__file__).parent.parent / "docs"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load("site_hooks")


def test_the_index_has_every_public_name_with_what_it_is():
    rows = re.findall(r"^\| \[`(\w+)`\]\((\S+)\) \| \S+ \| (.*) \|$", hooks.make_index(), re.M)
    assert sorted(name for name, *_ in rows) == sorted(jax_ddp_weighting.__all__)
    for name, link, said in rows:
        page, anchor = link.split("#")
        assert f"::: {anchor}\n" in (DOCS / page).read_text(), name
        assert said.endswith((".", "!", ":")), (name, said)


def test_the_index_is_put_where_a_page_asks_for_it():
    page = (DOCS / "names.md").read_text()
    assert page.count(hooks.PLACE) == 1
    assert "[`evaluate`]" in hooks.on_page_markdown(page)
    assert hooks.on_page_markdown("nothing") == "nothing"


@pytest.fixture
def mend(monkeypatch):
    # griffe is no dependency of the suite: what it is given is text
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=0, Alias=0))
    return load("griffe_sections").mend_sections


@pytest.mark.parametrize(
    ("docstring", "mended"),
    [
        ("Returns:\n    A mapping: name to mean.", "Returns:\n    : A mapping: name to mean."),
        ("Yields:\n    A b: c.\n    d", "Yields:\n    : A b: c.\n    d"),
        ("Returns:\n    No colon,\n    or later: here.", None),
        ("Args:\n    x: a thing.", None),
        ("Example:\n    >>> 1", "Examples:\n    >>> 1"),
    ],
)
def test_what_is_returned_is_not_cut_at_a_colon(mend, docstring, mended):
    assert mend(docstring) == (docstring if mended is None else mended)


SITE = {
    "index.html": '<a href="a.html#here">a</a> <a href="https://example.org/">out</a>',
    "a.html": '<h1 id="here">A</h1> <a href="index.html">up</a> <a href="#here">here</a>',
}


def make_site(folder: Path, **pages: str) -> Path:
    for name, text in {**SITE, **{f"{k}.html": v for k, v in pages.items()}}.items():
        (folder / name).write_text(text)
    (folder / "sub").mkdir(exist_ok=True)
    return folder


def test_links_that_lead_somewhere_are_let_be(tmp_path):
    assert hooks.find_broken_links(make_site(tmp_path)) == []
    assert hooks.find_loaded(tmp_path) == []


@pytest.mark.parametrize(
    "link", ["b.html", "a.html#there", "/a.html", "sub/", "sub", "#nowhere", "%61%62.html"]
)
def test_a_link_that_leads_nowhere_is_found(tmp_path, link):
    # a folder shows no page where the site is opened as files
    site = make_site(tmp_path, b2=f'<a href="{link}">x</a>')
    assert hooks.find_broken_links(site) == [f"b2.html: {link}"]


def test_what_is_loaded_from_elsewhere_is_found(tmp_path):
    site = make_site(tmp_path, c='<script src="https://example.org/x.js"></script>')
    assert hooks.find_loaded(site) == ["https://example.org/x.js"]


@pytest.mark.parametrize(
    ("room", "names"),
    [("testing", CONVENTIONS), ("distributed", ENGINES)],
)
def test_a_room_of_choices_says_what_each_of_them_is(room, names):
    page = (DOCS / "reference" / f"{room}.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .{10,} \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted(names)


def test_the_join_says_what_each_convention_is():
    said = re.findall(r'^ *- "(\w+)": ', jax_ddp_weighting.join_batches.__doc__, re.MULTILINE)
    assert said == list(JOIN_CONVENTIONS)


def test_words_of_the_glossary_are_in_order():
    words = re.findall(r"^\| \*\*(.+)\*\* \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert words == sorted(words)
    assert {"rank", "slot", "accepted", "regime", "weight"} <= set(words)

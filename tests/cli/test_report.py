"""The report: what it finds is what was read and counted, and its page needs nothing else."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from jax_ddp_weighting import EpochPlan
from jax_ddp_weighting.cli import app as cli
from jax_ddp_weighting.cli.report.figures import as_png, draw
from jax_ddp_weighting.cli.report.findings import CHOICES, OURS, count_by, find, measure
from jax_ddp_weighting.cli.report.page import page
from jax_ddp_weighting.testing.conventions import probes

PNG = b"\x89PNG\r\n\x1a\n"
PLAN = ["-n", "47", "-w", "3", "-b", "8"]


def naive_maps(plan):
    """Accepted rows and copies of each rank and step of epoch 0, counted slot by slot."""
    accepted = np.zeros((plan.num_replicas, plan.steps_per_epoch), int)
    copies, met = np.zeros_like(accepted), set()
    for step in range(plan.steps_per_epoch):
        slots = plan.batch(0, step)
        for row in range(plan.batch_size):
            for rank in range(plan.num_replicas):
                if slots.weights[rank, row]:
                    accepted[rank, step] += 1
                    copies[rank, step] += slots.ids[rank, row] in met
                    met.add(slots.ids[rank, row])
    return accepted, copies


@pytest.mark.parametrize("tail", ["mask", "repeat", "drop"])
@pytest.mark.parametrize("n", [3, 47, 48])
def test_maps_and_counts_are_those_of_every_slot(n, tail):
    plan = EpochPlan(n, 3, 4, tail=tail)
    if not plan.steps_per_epoch:
        return
    findings = find(plan, 3, "mean_of_means")
    accepted, copies = naive_maps(plan)
    np.testing.assert_array_equal(findings.accepted, accepted)
    np.testing.assert_array_equal(findings.copies, copies)
    seen = np.zeros(n, int)
    for epoch in range(3):
        for rank in range(3):
            slots = plan.slots(epoch, rank)
            np.add.at(seen, slots.ids[slots.weights > 0], 1)
    np.testing.assert_array_equal(findings.seen, seen)
    assert findings.exactly_once == (tail == "mask" or n % (3 if tail == "repeat" else 12) == 0)


def test_copies_of_an_order_that_repeats_ids_are_found():
    plan = EpochPlan.from_order([4, 4, 1, 4, 2, 1], 2, 2, num_examples=5, repeats=True)
    findings = find(plan, 1, "mean_of_means")
    np.testing.assert_array_equal(findings.copies, naive_maps(plan)[1])
    assert findings.copies.sum() == 3


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_ours_counts_every_slot_as_its_weight_once(microbatches):
    for weights in probes(2, microbatches).values():
        right = weights / weights.sum()
        np.testing.assert_allclose(measure(weights), right, rtol=1e-6)
        assert np.abs(count_by("mean_of_means", weights) - right).max() > 0.01 * right.max()


def test_every_choice_counts_something():
    weights = probes(2, 2)["weights are fractions"]
    for convention in CHOICES:
        assert count_by(convention, weights).shape == weights.shape


def test_errors_of_naive_conventions_grow_and_ours_stay_at_rounding():
    lengths = np.random.default_rng(0).integers(1, 100, 64).astype(float)
    findings = find(EpochPlan(64, 4, 16), 1, "mean_of_means", example_weights=lengths)
    assert findings.microbatches == [1, 2, 4, 8, 16]
    assert max(findings.errors[OURS]) < 1e-6
    naive = findings.errors["mean_of_means"]
    assert naive[-1] > naive[0] > 0.05
    assert findings.errors["step_token_mean"][0] < 1e-12
    assert findings.errors["step_token_mean"][-1] > 0.05


def test_each_slot_counts_its_examples_weight():
    lengths = np.arange(1.0, 11.0)
    plan = EpochPlan(10, 2, 8)
    looked_at = find(plan, 1, "rank_token_mean", example_weights=lengths).looked_at
    slots = plan.batch(0, 0)
    np.testing.assert_array_equal(looked_at.weights[:, 0], slots.weights * lengths[slots.ids])
    np.testing.assert_allclose(looked_at.ours, looked_at.weights, rtol=1e-6)
    by_rank = looked_at.weights.sum((1, 2), keepdims=True)
    wanted = looked_at.weights / by_rank / 2 * by_rank.sum()
    np.testing.assert_allclose(looked_at.counted, wanted, rtol=1e-6)


# --- the page -------------------------------------------------------------------------------------


class Seen(HTMLParser):
    """What stands in a page: its tags, their attributes, and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loaded, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.loaded += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def findings():
    return find(EpochPlan(1003, 20, 4, tail="repeat"), 3, "mean_of_means", microbatches=2)


def test_the_page_holds_every_picture_and_table_and_loads_nothing(findings):
    pictures = {name: as_png(figure) for name, figure in draw(findings).items()}
    assert all(picture.startswith(PNG) for picture in pictures.values())
    text = page(findings, pictures, "report <script>alert(1)</script>")
    seen = Seen(text)
    assert seen.open == []
    assert [a["id"] for tag, a in seen.tags if tag == "figure"] == list(pictures)
    assert all(a["alt"] for tag, a in seen.tags if tag == "img")
    assert sum(tag == "table" for tag, _ in seen.tags) == 4
    assert all(source.startswith("data:image/png;base64,") for source in seen.loaded)
    assert len(seen.loaded) == 4
    assert "url(" not in text
    assert "@import" not in text
    assert "<script" not in text
    assert "17 came more than once" in text


def cells(text):
    """The text of every cell, by table and row."""
    tables = re.findall(r"<table>(.*?)</table>", text, re.DOTALL)
    rows = [re.findall(r"<tr>(.*?)</tr>", table) for table in tables]
    return [[re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table] for table in rows]


def text_of(findings):
    return page(findings, dict.fromkeys(draw(findings), PNG), "report")


def test_one_of_a_kind_is_called_one():
    text = text_of(find(EpochPlan(1, 1, 1), 1, "mean_of_means"))
    assert "<h1>1 example over 1 rank</h1>" in text
    assert "1 row per rank and step, 1 step an epoch" in text
    assert "in each of 1 epoch." in text
    assert "step 0 of epoch 0, 1 rank, 1 microbatch)" in text
    words = re.sub("<[^>]*>", " ", text)
    assert not re.search(r"\b1 (\w+s)\b(?<!is)", words)


def test_many_ranks_leave_a_picture_and_a_table_that_can_be_read():
    findings = find(EpochPlan(3000, 256, 8), 1, "mean_of_nonempty_means")
    (axes,) = draw(findings)["effective-weights"].axes
    assert len(axes.lines) == 3  # what is counted, what is right, and ours: no line for each rank
    text = text_of(findings)
    errors = cells(text)[-1]
    assert errors[0][1:] == ["1", "2", "4", "8"]
    assert {len(row) for row in errors} == {5}
    for row in errors[1:]:
        assert max(map(len, row[1:])) <= 5  # what fits a telephone's width
        assert [float(cell) for cell in row[1:]] == pytest.approx(
            findings.errors[row[0]], rel=0.5, abs=0.005
        )


def test_a_few_ranks_are_told_apart_by_lines():
    (axes,) = draw(find(EpochPlan(30, 4, 8), 1, "mean_of_means"))["effective-weights"].axes
    assert len(axes.lines) == 3 + 3


def test_the_command_writes_a_page_and_pictures(tmp_path, capsys):
    path, folder = tmp_path / "page.html", tmp_path / "pictures"
    assert cli.run(["report", str(path), *PLAN, "--png", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["exactly_once"]
    assert said["times_seen"] == {"4": 47}
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert f"<code>jax-ddp-weighting report {path} -n 47 -w 3 -b 8" in path.read_text()
    names = ["effective-weights.png", "gradient-error.png", "times-seen.png", "who-read-what.png"]
    assert sorted(each.name for each in folder.iterdir()) == names
    assert all(each.read_bytes().startswith(PNG) for each in folder.iterdir())


def test_the_pages_name_need_not_be_utf_8(tmp_path, capsys):
    path = tmp_path / "\udcff.html"  # what Python makes of the byte 0xff
    assert cli.run(["report", str(path), *PLAN, "--epochs", "1"]) == 0
    assert r"\udcff.html" in capsys.readouterr().out
    assert rf"<code>jax-ddp-weighting report &#x27;{tmp_path}/\udcff.html&#x27;" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("page.html -n 47 -w 3 -b 8 --convention mean", r"convention must be one of global_mean"),
        ("page.html -n 47 -w 3 -b 8 -k 9", r"microbatches must be an integer in \[1, 8\], got 9"),
        ("page.html -n 47 -w 3 -b 8 --epochs 0", r"epochs must be an integer in"),
        ("page.html -n 5 -w 3 -b 8 --tail drop", r"must have a step, got 5 examples for 24 rows"),
        ("page.html -n 0 -w 3 -b 8", r"must have a step"),
        ("page.html -n 1e9 -w 3 -b 8", r"slots of all epochs must be at most 20,000,000"),
        ("page.html -n 1e6 -w 1000 -b 1000 --epochs 1", r"report: slots of a step must be at most"),
        ("page.html -n 10 -w 200000 -b 1", r"ranks times slots .* at most 200,000,000 .* got 40,0"),
        ("page.html -n 9e5 -w 1e4 -b 1 --epochs 201", r"^report: .* at most 20,000,000"),
        ("page.html -n 9e3 -w 9e3 -b 1 --epochs 2222", r"^report: .* at most 2,000,000"),
        ("page.html -n 4 -w 1 -b 2 --example-weights zero.txt", r"one for each of the 4 examples"),
        ("page.html -n 3 -w 1 -b 2 --example-weights w.txt", r"at least 0, got -1"),
        (
            "page.html -n 3 -w 1 -b 2 --example-weights huge.txt",
            r"1e\+30\], got 1e\+308 at row 1\.",
        ),
        (
            "page.html -n 3 -w 1 -b 2 --example-weights tiny.txt",
            r"got 1e-308 at row 2\. Scale them",
        ),
        ("page.html -n 3 -w 1 -b 2 --example-weights w.jsonl", r"Give a .txt or .npy file"),
        ("/proc/page.html -n 3 -w 1 -b 2", r"/proc/page.html\b(?!.partial)"),
        ("page.html -n 3 -w 1 -b 2 --example-weights zero.txt", r"must weigh something"),
        ("nowhere/page.html -n 4 -w 1 -b 2", r"must be a file in a folder that is there"),
        (". -n 4 -w 1 -b 2", r"must be a file in a folder that is there, got '\.'"),
        ("page.html -n 4 -w 1 -b 2 --png w.txt", r"w.txt: File exists"),
        ("page.html -n 4 -w 1", r"Missing option '--batch-size'"),
    ],
)
def test_bad_input_gets_one_line_and_no_page(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.txt").write_text("1 -1 2")
    (tmp_path / "zero.txt").write_text("0 0 0")
    (tmp_path / "huge.txt").write_text("1 1e308 1e308")
    (tmp_path / "tiny.txt").write_text("1 0 1e-308")
    (tmp_path / "w.jsonl").write_text('{"w": 1}')
    assert cli.run(["report", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(said, err)
    assert not list(tmp_path.rglob("*.html"))


def test_missing_matplotlib_is_one_line():
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv[1:] = sys.argv[1:]\n"
        "from jax_ddp_weighting.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "report", "page.html", *PLAN]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "pip install 'jax-ddp-weighting[cli,plot]'" in ran.stderr

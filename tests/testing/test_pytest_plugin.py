"""The fixtures for users' own tests: asked for by name, and for nobody else."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jax_ddp_weighting import ENGINES

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
ASKED = 'pytest_plugins = ["jax_ddp_weighting.testing.pytest_plugin"]'


@pytest.fixture
def suite(pytester):
    """A user's tests; in this process, whose eight devices are what they ask for."""
    pytester.makeconftest(ASKED)
    return pytester


def test_the_fixtures_give_meshes_regimes_and_weights(suite):
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.ranks(1, 3)
        def test_marked(ranks_mesh, request):
            assert f"[{ranks_mesh.shape['data']} ranks]" in request.node.name

        def test_unmarked(ranks_mesh):
            assert ranks_mesh.shape["data"] == 8

        def test_engine(engine):
            assert isinstance(engine, str)

        def test_weights(uneven_weights):
            by_rank = uneven_weights(8).reshape(4, 2).sum(axis=1)
            assert sorted(by_rank) == [0, 0.5, 1.25, 2]
            with pytest.raises(ValueError, match="rows must be at least 4, got 3"):
                uneven_weights(3)
        """
    )
    ran = suite.runpytest_inprocess("-p", "no:cacheprovider")
    ran.assert_outcomes(passed=2 + 1 + len(ENGINES) + 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jdw-devices=-1"], "*--jdw-devices must be at least 0, got -1*"),
        (["-o", "jdw_devices=many"], "*jdw_devices must be a number of devices, got 'many'*"),
        (["--jdw-devices=5"], "*must be set before the first JAX operation, got 5*"),
    ],
)
def test_devices_that_cannot_be_made_are_said(suite, arguments, said):
    suite.makepyfile("def test_nothing(): pass")
    ran = suite.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    assert ran.ret != 0
    (ran.stderr if ran.errlines else ran.stdout).fnmatch_lines([said])


def test_jax_can_be_left_alone(suite):
    suite.makepyfile("def test_nothing(): pass")
    ran = suite.runpytest_inprocess("-p", "no:cacheprovider", "--jdw-devices=0")
    ran.assert_outcomes(passed=1)


def test_a_mark_without_the_mesh_is_said(suite):
    suite.makepyfile("import pytest\n@pytest.mark.ranks(1)\ndef test_it(tmp_path): pass")
    ran = suite.runpytest_inprocess("-p", "no:cacheprovider")
    ran.stdout.fnmatch_lines(["*a test marked with ranks must take ranks_mesh, got *tmp_path*"])


@pytest.mark.parametrize(
    ("given", "got"),
    [("", "none"), ("[1, 2]", "[[]1, 2[]]"), ("1, True", "1, True"), ("0", "0"), ("n=2", "n=2")],
)
def test_a_mark_without_numbers_is_said(suite, given, got):
    suite.makepyfile(f"import pytest\n@pytest.mark.ranks({given})\ndef test_it(ranks_mesh): pass")
    ran = suite.runpytest_inprocess("-p", "no:cacheprovider")
    assert ran.ret != 0
    said = f"*::test_it: the mark ranks must be given integers of at least 1, got {got}. For inst*"
    ran.stdout.fnmatch_lines([said])


def test_no_two_ranks_hold_the_same_weight(suite):
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("rows", [4, 8, 12, 20, 32])
        @pytest.mark.parametrize("ranks", [2, 4])
        def test_it(uneven_weights, rows, ranks):
            by_rank = uneven_weights(rows).reshape(ranks, -1).sum(axis=1)
            assert len(set(by_rank.tolist())) == ranks
            assert ranks == 2 or 0 in by_rank
        """
    )
    suite.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=10)


def test_a_settings_file_says_how_many(pytester):
    """In a process of its own, which can still choose its devices."""
    pytester.makeconftest(ASKED)
    pytester.makeini("[pytest]\njdw_devices = 3\n")
    pytester.makepyfile("import jax\ndef test_it(): assert len(jax.devices()) == 3")
    ran = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    ran.assert_outcomes(passed=1)


def test_whoever_does_not_ask_pays_nothing():
    # no entry point: pytest never learns of the module by itself, and nothing imports it
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "entry-points" not in project
    program = "import sys, pytest, jax_ddp_weighting; print(any('jax.' in m for m in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.strip() == "False", ran.stderr


def test_weights_are_unkind_to_a_mean_of_means(suite):
    suite.makepyfile(
        """
        import numpy as np

        def test_it(uneven_weights):
            weights, x = uneven_weights(8).reshape(2, 4), np.arange(8.0).reshape(2, 4)
            right = np.average(x, weights=weights)
            votes = np.mean([np.average(a, weights=w) for a, w in zip(x, weights)])
            assert abs(votes - right) > 0.5
        """
    )
    suite.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)

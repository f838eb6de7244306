"""Mutations of the core, each of which the tests must notice.

    make mutate                  all of them, and the score
    make mutate ONLY=vary        those whose names hold a word

Each is one exact piece of text of one file, and what is put in its place, in a copy of the package
and its tests. Then the tests that should notice are run on the copy: one that fails has noticed. A
text that is not there exactly once is an error: whoever changes that line changes its mutation too.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "jax_ddp_weighting"
LEAST = 0.95  # of the mutations that are not explained
LIMIT_S = 600  # one that hangs has been noticed


@dataclass(frozen=True)
class Mutation:
    """One change that a careless hand might make.

    Attributes:
        name: what goes wrong.
        file: the file, under the package.
        text: a piece of it, there exactly once.
        put: what is put in its place.
        tests: the tests that should notice, as pytest is given them, under `tests`.
        survives: why no test can notice it, if none can.
    """

    name: str
    file: str
    text: str
    put: str
    tests: tuple[str, ...]
    survives: str = ""


CORNERS = "weighting/test_gradient_corners.py"
PIECES = "weighting/test_gradient_pieces.py"
SUMS = "weighting/test_sums.py"
STEP = "train/test_step_corners.py"
NORM = "train/test_norm_corners.py"
RANKS = "distributed/test_over_ranks.py"
PARITY = "weighting/test_regimes_parity.py"
GRADIENT = "weighting/test_gradient.py"
SPELLINGS = "weighting/test_spellings.py"
SKIPS = "train/test_skips.py"
WINDOWS = "train/test_accumulation.py"
BATCH_NORM = "train/test_batch_norm.py"


def of(file: str, tests: tuple[str, ...], *changes: tuple[str, ...]) -> list[Mutation]:
    return [Mutation(name, file, text, put, tests, *why) for name, text, put, *why in changes]


MUTATIONS = [
    *of(
        "weighting/sums.py",
        (SUMS, CORNERS, GRADIENT),
        (
            "an unsafe division under the gradient",
            "safe = jnp.where(empty, jnp.ones_like(weight), weight).astype(dtype)",
            "safe = weight.astype(dtype)",
        ),
        (
            "a mean without weight is its total",
            "return jnp.where(empty, jnp.zeros((), dtype), total.astype(dtype) / safe)",
            "return total.astype(dtype) / safe",
        ),
        (
            "a gradient into a weight made by hand",
            "total, weight = jnp.asarray(total), lax.stop_gradient(jnp.asarray(weight))",
            "total, weight = jnp.asarray(total), jnp.asarray(weight)",
        ),
        (
            "a gradient into the weights of a sum",
            "weights = lax.stop_gradient(jnp.asarray(weights))",
            "weights = jnp.asarray(weights)",
        ),
        (
            "a loss of weight 0 poisons its sum",
            "kept = jnp.where(weights != 0, losses, jnp.zeros_like(losses)).astype(dtype)",
            "kept = losses.astype(dtype)",
        ),
        (
            "weights that are not multiplied in",
            "jnp.sum(kept * weights.astype(dtype))",
            "jnp.sum(kept)",
        ),
        (
            "weight clamped to 1",
            "empty = weight == 0",
            "weight = jnp.maximum(weight, 1)\n    empty = weight == 0",
        ),
        (
            "a term counted once where there is no weight",
            "present = jnp.asarray(self.weight) > 0",
            "present = jnp.asarray(self.weight) >= 0",
        ),
        (
            "sums that subtract their weights",
            "self.total + other.total, self.weight + other.weight",
            "self.total + other.total, self.weight",
        ),
    ),
    *of(
        "weighting/gradient.py",
        (CORNERS, PIECES, GRADIENT, PARITY),
        (
            "vary left out of value_and_grad's parameters",
            "        params = mesh.vary(params, axis_name)",
            "        pass",
        ),
        (
            "vary left out of what a loss function returns",
            "totals, weights = mesh.vary((totals, weights), options.axis_name)",
            "pass",
        ),
        (
            "vary left out of rank_share",
            "local = mesh.vary(jax.tree.map(jnp.asarray, local), axis_name)",
            "local = jax.tree.map(jnp.asarray, local)",
        ),
        (
            "rank_share scaled by the ranks in every regime",
            "    if mesh.is_checked(axis_name):\n",
            "    if False:\n",
        ),
        (
            "rank_share's gradient scaled by the ranks under the check",
            "share + lax.stop_gradient(share * (ranks - 1))",
            "share * ranks",
        ),
        (
            "gradients averaged over the ranks",
            "gradients = lax.psum(gradients, axis_name)",
            "gradients = lax.pmean(gradients, axis_name)",
        ),
        (
            "totals that stay on their rank",
            "totals, gradients = _psum_scalars(found.totals, axis_name), found.gradients",
            "totals, gradients = found.totals, found.gradients",
        ),
        (
            "weights that stay on their rank",
            "    weights = _psum_scalars(weights, options.axis_name)\n",
            "",
        ),
        (
            "a metric in the value",
            "pulling = [name for name in terms if has_gradient(factors[name])]",
            "pulling = list(terms)",
        ),
        (
            "coefficients left out of the value",
            "sum((factors[name] * terms[name].mean() for name in pulling)",
            "sum((terms[name].mean() for name in pulling)",
        ),
        (
            "one key for all microbatches",
            "jax.random.fold_in(rows.rng, k)",
            "rows.rng",
        ),
        (
            "gradients of microbatches that are not added up",
            "lambda a, b: a + b.astype(a.dtype), gradients, found.gradients",
            "lambda a, b: b.astype(a.dtype), gradients, found.gradients",
        ),
        (
            "a sum of gradients in bfloat16",
            "jnp.promote_types(jnp.float32, leaf.dtype)",
            "leaf.dtype",
        ),
        (
            "microbatches of neighbouring rows",
            "(shape[0] // microbatches, microbatches, *shape[1:])",
            "(microbatches, shape[0] // microbatches, *shape[1:])",
        ),
    ),
    *of(
        "weighting/loss_terms.py",
        (CORNERS, PIECES, SPELLINGS, "data/test_join.py", SKIPS),
        (
            "a metric that pulls",
            "return not (isinstance(factor, int | float) and factor == 0)",
            "return True",
        ),
        (
            "missing ranks that are not counted",
            "stretch = 1 + divide(weights.missing, weights.present)",
            "stretch = 1",
        ),
        (
            "a state that differs from rank to rank",
            "if axis_name is not None and mesh.varies(after, axis_name):",
            "if False:",
        ),
    ),
    *of(
        "distributed/mesh.py",
        (RANKS, CORNERS, "distributed/test_mesh.py", PARITY),
        (
            "pmap on other devices",
            "out_axes=None, devices=list(mesh.devices.flat)",
            "out_axes=None",
        ),
        (
            "the order of vmap's axes",
            "for name in reversed(names):",
            "for name in names:",
        ),
        (
            "shard_map without its check",
            'check_vma=engine == "shard_map",',
            "check_vma=False,",
        ),
        (
            "shard_map that is always checked",
            'check_vma=engine == "shard_map",',
            "check_vma=True,",
        ),
        (
            "vary that varies nothing",
            'return jax.lax.pcast(value, missing, to="varying") if missing else value',
            "return value",
        ),
        (
            "a state that is placed without a copy",
            "own = jnp.copy(leaf) if isinstance(leaf, jax.Array) else np.array(leaf)",
            "own = leaf",
        ),
    ),
    *of(
        "train/step.py",
        (STEP, SKIPS, "train/test_step_rng.py", "weighting/test_kept_state.py"),
        (
            "a skip unless all terms have weight",
            "jnp.any(jnp.stack(pulling))",
            "jnp.all(jnp.stack(pulling))",
        ),
        (
            "a skip that ignores the batch's weight",
            "(found.accepted != 0) & ",
            "",
        ),
        (
            "a skip that ignores the terms' weights",
            " & jnp.any(jnp.stack(pulling))",
            "",
        ),
        (
            "a state that an empty step changes",
            "lambda old, new: jnp.where(skipped, old, new), state, found.state",
            "lambda old, new: new, state, found.state",
        ),
        (
            "one key for all ranks",
            "rng = jax.random.fold_in(rng, jax.lax.axis_index(options.mapped_axis))",
            "pass",
        ),
    ),
    *of(
        "train/accumulation.py",
        (STEP, WINDOWS, "train/test_windows.py"),
        (
            "a window of several terms that weighs the first",
            "if len(pulling) != 1:",
            "if False:",
        ),
        (
            "an empty microbatch's NaN in the window",
            "return total + jnp.where(weight > 0, share, 0)",
            "return total + share",
        ),
        (
            "every microbatch has one vote",
            "share = gradient * weight.astype(total.dtype) if gradients_of",
            "share = gradient if gradients_of",
        ),
        (
            "a window without weight that steps",
            "steps = closes & (weight > 0)",
            "steps = closes",
        ),
        (
            "a flush that is not heard",
            "closes = (state.mini_step + 1 >= k) | jnp.asarray(flush)",
            "closes = state.mini_step + 1 >= k",
        ),
        (
            "a window that is one too long",
            "(state.mini_step + 1 >= k)",
            "(state.mini_step >= k)",
        ),
        (
            "gradients that stay in the window",
            "acc_grads=jax.tree.map(lambda total: jnp.where(closes, 0, total), totals)",
            "acc_grads=totals",
        ),
        (
            "weight that stays in the window",
            "weight=jnp.where(closes, 0, weight)",
            "weight=weight",
        ),
        (
            "a window in bfloat16",
            "jnp.promote_types(jnp.float32, jnp.result_type(parameter))",
            "jnp.result_type(parameter)",
        ),
    ),
    *of(
        "train/batch_norm.py",
        (NORM, BATCH_NORM),
        (
            "an empty step normalised by its batch",
            "mean, var = choose(present, batch, running)",
            "mean, var = batch",
        ),
        (
            "running averages that an empty step changes",
            "    return choose(present, new, running)",
            "    return new",
        ),
        (
            "a variance below 0",
            "var = jnp.maximum(square.real - _square(mean), 0)",
            "var = square.real - _square(mean)",
        ),
        (
            "a gradient into what is kept",
            "momentum * old + (1 - momentum) * lax.stop_gradient(each)",
            "momentum * old + (1 - momentum) * each",
        ),
        (
            "a gradient into the weights of rows",
            "weights = lax.stop_gradient(jnp.asarray(weights))",
            "weights = jnp.asarray(weights)",
        ),
        (
            "padding in the statistics",
            "kept = jnp.where(weights != 0, x, jnp.zeros_like(x))",
            "kept = x",
        ),
        (
            "statistics of the rank alone",
            "sums = lax.psum(sums, axis_name, axis_index_groups=options.axis_index_groups)",
            "pass",
        ),
        (
            "momentum on the wrong side",
            "momentum * old + (1 - momentum) *",
            "(1 - momentum) * old + momentum *",
        ),
    ),
]


def copy_of(folder: Path) -> Path:
    """The package and its tests in a folder of their own, and what the tests read beside them."""
    for name in (PACKAGE, "tests", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit status in a copy, and the last line of what it says."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    try:
        ran = subprocess.run(
            [*command, *(str(Path("tests", each)) for each in tests)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return 1, "it hung"
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ran.returncode, (failed or ran.stdout.strip().splitlines() or [ran.stderr[-200:]])[-1]


def try_out(mutation: Mutation, stock: Path) -> tuple[bool, str]:
    """Whether the tests notice it, and which of them did."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(stock, Path(folder, "copy"))
        path = copy / PACKAGE / mutation.file
        path.write_text(path.read_text().replace(mutation.text, mutation.put))
        status, said = run_tests(copy, mutation.tests)
    if status not in (0, 1, 2):  # 1: tests failed; 2: not even imported
        raise RuntimeError(f"{mutation.name}: pytest could not be run, {said}")
    return status != 0, said


def check_texts() -> list[str]:
    """What is wrong with the list: texts that are not in their files exactly once."""
    wrong = []
    for each in MUTATIONS:
        count = (ROOT / PACKAGE / each.file).read_text().count(each.text)
        if count != 1:
            wrong.append(f"{each.name}: {count} times in {each.file}: {each.text!r}")
    return wrong


def main() -> int:
    """Runs them and prints the score; 1 if it is too low, 2 if it could not be found out."""
    word = " ".join(sys.argv[1:])
    chosen = [each for each in MUTATIONS if word in each.name]
    wrong = check_texts()
    if wrong or not chosen:
        print(*(wrong or [f"no mutation is named {word!r}"]), sep="\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        stock = copy_of(Path(folder))
        tests = tuple(dict.fromkeys(test for each in chosen for test in each.tests))
        status, said = run_tests(stock, tests)
        if status:
            print(f"the tests fail without any mutation: {said}")
            return 2
        start = time.monotonic()
        killed = 0
        expected = [each for each in chosen if not each.survives]
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(lambda each: try_out(each, stock), chosen)
            for mutation, (noticed, test) in zip(chosen, found, strict=True):
                killed += noticed and not mutation.survives
                verdict = "noticed" if noticed else "SURVIVED"
                why = test.split(" - ")[0] if noticed else mutation.survives
                print(f"{verdict:9} {mutation.file}: {mutation.name}  {why}", flush=True)
    score = killed / max(len(expected), 1)
    print(
        f"{killed} of {len(expected)} noticed ({score:.0%}), "
        f"{len(chosen) - len(expected)} that cannot be, in {time.monotonic() - start:.0f} s"
    )
    return int(score < LEAST)


if __name__ == "__main__":
    sys.exit(main())

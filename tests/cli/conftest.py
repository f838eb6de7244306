"""JAX as a command finds it, and a user's folder with code to try."""

import sys

import jax
import pytest

USERS = """
import atexit
import os
import signal
import sys
import threading
import time
import jax
import jax.numpy as jnp
import numpy as np
import jax_ddp_weighting as jdw
from jax_ddp_weighting.cli.proof import mean_of_local_means

def loss(params, batch):
    return jdw.weighted_sum((params["w"] * batch.data - 1) ** 2, batch.weights)

def case():
    return loss, {"w": np.float32(2)}, jdw.Batch.of(np.arange(5, dtype=np.float32))

def case_of_terms():
    def terms(params, batch):
        size = jdw.weighted_sum(params["w"] * batch.data, batch.weights)
        return {"fit": loss(params, batch), "size": size}
    batch = jdw.Batch.of(np.arange(5, dtype=np.float32))
    return {"loss_fn": terms, "params": case()[1], "batch": batch,
            "coefficients": {"fit": 1.0, "size": 0.1}}

def case_of_statistics():
    def balanced(params, batch, *, statistics):
        losses = (params["w"] - batch.data / statistics) ** 2
        return jdw.weighted_sum(losses, batch.weights)
    return dict(zip(("loss_fn", "params", "batch"), (balanced, *case()[1:]))) | {
        "statistics": lambda params, batch: jnp.sum(batch.weights * batch.data),
        "divisors": {"loss": lambda weight: jnp.maximum(weight, 7)}}

def naive():
    return dict(zip(("loss_fn", "params", "batch"), case())) | {"gradient": mean_of_local_means}

def without_control():
    def own(loss_fn, **options):
        return lambda params, batch: jax.value_and_grad(loss_fn)(params, batch)
    def mean(params, batch):
        sums = jax.lax.psum(loss(params, batch), "data")
        return sums.total / sums.weight
    return own_options() | {"loss_fn": mean, "gradient": own, "microbatches": 1,
                            "reference": loss, "engines": ["shard_map"]}

def a_mean():
    return (lambda params, batch: jnp.mean(params["w"] * batch.data)), *case()[1:]

def own_options():
    return dict(zip(("loss_fn", "params", "batch"), case())) | {
        "splits": [(3, 2)], "engines": ["vmap"], "rtol": 1e-4, "microbatches": 2}

def many_microbatches():
    return own_options() | {"microbatches": 60}

def loud():
    def loss_fn(params, batch):
        print("loud")
        jax.debug.print("louder")
        return loss(params, batch)
    print("loud")
    return loss_fn, *case()[1:]

def quits(*arguments):
    sys.exit(0)

def quits_later():
    return quits, *case()[1:]

class Odd(BaseException):
    pass

class Unprintable(Exception):
    def __str__(self):
        sys.exit(0)

def odd(*arguments):
    raise Odd("odd")

def odd_later():
    return odd, *case()[1:]

def interrupts(*arguments):
    raise KeyboardInterrupt

def ends_generators(*arguments):
    raise GeneratorExit

def unprintable(*arguments):
    raise Unprintable

def closes(*arguments):
    sys.stdout.close()
    return case()

def closes_the_first(*arguments):
    sys.__stdout__.close()
    return case()

def closes_errors(*arguments):
    sys.stderr.close()
    return case()

def closes_number(*arguments):
    os.close(1)
    return case()

def detaches(*arguments):
    sys.stdout.detach()
    return case()

def writes(*arguments):
    def loss_fn(params, batch):
        os.write(1, b"to the number")
        os.system("echo from a child")
        sys.__stdout__.write("past the redirection")
        return loss(params, batch)
    os.write(1, b"to the number")
    print("to a buffer", file=sys.stdout)
    return loss_fn, *case()[1:]

def writes_at_exit(*arguments):
    atexit.register(print, "at exit")
    atexit.register(os.write, 1, b"at exit, to the number")
    def prints():  # at all times: while the answer is found, while it is written, and after it
        while threading.main_thread().is_alive():
            print("from a thread")
            time.sleep(.001)
        print("from a thread")
    threading.Thread(target=prints).start()
    return case()

def forks(*arguments):
    if not os.fork():
        return case()
    os.wait()
    return case()

def forks_and_fails(*arguments):
    if not os.fork():
        raise ValueError("in the child")
    os.wait()
    return case()

def leaves(*arguments):
    os._exit(0)

def leaves_as_if_wrong(*arguments):
    os._exit(1)

def leaves_later():
    return leaves, *case()[1:]

def crashes(*arguments):
    os.kill(os.getpid(), signal.SIGSEGV)

def terminates(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)

def becomes_another(*arguments):
    os.execv("/bin/true", ["true"])

def leaves_in_a_thread(*arguments):
    thread = threading.Thread(target=leaves)
    thread.start()
    thread.join()

def __getattr__(name):
    if name == "computed":
        raise RuntimeError("computed")
    raise AttributeError(name)

def no_rows():
    return loss, case()[1], jdw.Batch.of(np.zeros(0, np.float32))

def no_weight():
    return loss, case()[1], jdw.Batch.of(np.zeros(5, np.float32), weights=np.zeros(5))

def no_batch():
    return loss, {}, np.arange(5)

def number():
    return 3

def broken():
    return {}["not there"]

def fails_later():
    return (lambda params, batch: 1 // 0), *case()[1:]

def right(token_loss, params, tokens, weights):
    def total(params):
        return (token_loss(params, tokens) * weights).sum() / jnp.maximum(weights.sum(), 1e-30)
    return jax.grad(total)(params)

def loud_and_right(*arguments):
    print("loud")
    return right(*arguments)

def rank_means(token_loss, params, tokens, weights):
    def total(params, rank):
        return (token_loss(params, tokens[rank]) * weights[rank]).sum() / weights[rank].sum()
    return (jax.grad(total)(params, 0) + jax.grad(total)(params, 1)) / 2

def wrong_shape(token_loss, params, tokens, weights):
    return params[:1]
"""


@pytest.fixture(scope="module", autouse=True)
def started():
    """JAX has started: a command leaves it as it is, with the suite's eight devices."""
    assert len(jax.devices()) == 8


@pytest.fixture
def users(tmp_path, monkeypatch):
    """A user's folder, with a module of code to try."""
    (tmp_path / "users.py").write_text(USERS)
    (tmp_path / "torn.py").write_text("def f(:\n")
    (tmp_path / "needy.py").write_text("import not_installed_at_all")
    (tmp_path / "quitter.py").write_text("import sys\nsys.exit(0)")
    (tmp_path / "leaver.py").write_text("import os\nos._exit(0)")
    (tmp_path / "noisy.py").write_text("print('noisy')\nfrom users import *")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("users", "torn", "needy", "quitter", "leaver", "noisy"):
        sys.modules.pop(name, None)

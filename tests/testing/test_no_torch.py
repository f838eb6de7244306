"""Where torch is not installed: one sentence from what needs it, and the rest works."""

import sys

import numpy as np
import pytest

from jax_ddp_weighting import compare_gradients, diagnose_torch, record, torch_names


@pytest.fixture
def no_torch(monkeypatch):
    for name in [each for each in sys.modules if each.split(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.usefixtures("no_torch")
def test_what_needs_torch_says_how_to_install_it(tmp_path):
    said = r"torch must be installed, got no module.*pip install 'jax-ddp-weighting\[torch\]'"
    with pytest.raises(ModuleNotFoundError, match=f"diagnose_torch: {said}"):
        diagnose_torch(lambda *_: None, num_replicas=2)
    refused = pytest.raises(ModuleNotFoundError, match=f"record: {said}")
    with refused, record(tmp_path / "x.npz", None, lambda *_: None):
        pass


@pytest.mark.usefixtures("no_torch")
def test_names_and_comparisons_need_no_torch():
    state_dict = {"fc.weight": np.ones((2, 3), np.float32)}
    names = torch_names(state_dict, {"fc": {"kernel": np.zeros((3, 2))}})
    gradient = names.gradients(state_dict)
    assert compare_gradients(gradient, gradient).wrong == []
    assert isinstance(names.to_torch(names.to_flax(state_dict))["fc.weight"], np.ndarray)

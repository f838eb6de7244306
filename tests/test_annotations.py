"""The run-time check of annotations is on, and can fail."""

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jax_ddp_weighting import Slots
from jax_ddp_weighting.sampling.lengths import digest_lengths
from jax_ddp_weighting.sampling.tally import Tally


def test_ids_and_weights_of_two_shapes_are_no_slots():
    with pytest.raises(TypeCheckError, match="weights"):
        Slots(np.zeros(3, np.int64), np.zeros(4, np.int32))


def test_functions_and_methods_are_checked_too():
    with pytest.raises(TypeCheckError, match="lengths"):
        digest_lengths(np.zeros((2, 2), np.int64))
    with pytest.raises(TypeCheckError, match="ids"):
        Tally(5).have_met(np.zeros(3))

"""The run-time check of annotations is on, and can fail."""

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jax_ddp_weighting import Slots


def test_ids_and_weights_of_two_shapes_are_no_slots():
    with pytest.raises(TypeCheckError, match="weights"):
        Slots(np.zeros(3, np.int64), np.zeros(4, np.int32))

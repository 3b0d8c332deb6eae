"""What tests of the layer share."""

import pytest

from fairseq_tutel import ops


@pytest.fixture
def backend():
    """Sets the operators' backend; undone afterwards."""
    before = ops.get_backend()
    yield ops.set_backend
    ops.set_backend(before)

"""What tests of the launcher share."""

import socket

import pytest


@pytest.fixture
def port():
    """One that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

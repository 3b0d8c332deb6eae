"""Data of all architectures, once for a process; what fairseq asks for to read it is then gone."""

import pytest
from helpers import architectures


@pytest.fixture(scope="session")
def made_data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    architectures.make_data(path)
    return str(path)


@pytest.fixture
def data(made_data):
    """Folder of small data sets for helpers.architectures."""
    architectures.stand_in()
    yield made_data
    architectures.take_back()

"""The page of combinations: every pair of options trains a step on 4 ranks, or is refused."""

import combinations_page
import pytest
from helpers.distributed import run_ranks


@pytest.mark.long
def test_the_page_names_the_pairs_that_are_refused():
    of_ranks = run_ranks(combinations_page.refusals, 4, timeout=280)
    assert all(found.keys() == of_ranks[0].keys() for found in of_ranks)
    assert combinations_page.tables(of_ranks[0]) == combinations_page.on_page()

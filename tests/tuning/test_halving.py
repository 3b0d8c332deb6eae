"""Searches on synthetic times: the optimum, few trials, and choices that are odd."""

import pytest
import tables

from fairseq_tutel.tuning.search.halving import Search, list_choices, neighbours


def searched(choices, sample, start=0):
    """The search at its end; ``sample`` gives the samples of a choice, by number."""
    search = Search(neighbours(choices), start)
    while search.round:
        search.samples = list(sample(search.choice))
        search.end_trial()
    return search


@pytest.mark.parametrize("slices", [1, 2, 8])
def test_the_optimum_without_noise_in_few_trials(slices):
    choices, first = tables.space(slices), []
    for seed in range(80):
        times = tables.table(choices, seed)
        # from any start, as a key whose neighbour has other times
        search = searched(choices, lambda choice: [times[choice]], seed % len(choices))  # noqa: B023
        assert times[search.choice] <= 1.06 * min(times)
        first.append(len(search.trials))
        assert search.found["trials"] <= 2.2 * first[-1] + 3
    assert sum(first) / 80 <= (8 if slices == 1 else 14), sum(first)


def test_choices_are_listed_and_have_neighbours_by_one_step():
    choices = list_choices({"overlap_degree": (1, 2, 4), "algorithm": ("a", "b", "c"), "r": (0, 1)})
    assert [tuple(each.values()) for each in choices[:4]] == [
        (1, "a", 1), (1, "b", 1), (2, "a", 1), (1, "c", 1)]  # fmt: skip
    assert choices[-1] == {"overlap_degree": 1, "algorithm": "a", "r": 0} and len(choices) == 10
    near = [[choices[n] for n in sorted(each)] for each in neighbours(choices)]
    assert [tuple(each.values()) for each in near[0]] == [(1, "b", 1), (2, "a", 1), (1, "c", 1)]
    assert near[-1] == []  # nothing is like r = 0
    many = {"algorithm": ("a", "b", "c"), "overlap_degree": (1, 2, 4, 8), "r": (0, 1, 2, 4, 8)}
    cut = list_choices(many, 40)
    assert len(cut) == 40 and cut[:-1] == list_choices(many)[:39] and cut[-1]["r"] == 0


def test_ties_go_to_the_simpler_choice():
    choices = tables.space(2)
    assert searched(choices, lambda choice: [1000 - choice]).choice == 0
    assert searched(choices, lambda choice: [1000 - 40 * choice]).choice == len(choices) - 1


def test_a_start_that_was_slow_at_first_has_another_chance():
    """As in the first steps of a process."""
    choices, tried = tables.space(), []

    def sample(choice):
        tried.append(choice)
        return [900] if tried == [0] else [500]

    assert searched(choices, sample).choice == 0 and tried.count(0) > 1


def test_r_0_is_left_and_entered_wherever_a_search_begins():
    choices = tables.space(8)
    gathered, inside = len(choices) - 1, choices.index(
        {"algorithm": "linear", "overlap_degree": 2, "r": 2}
    )  # fmt: skip
    for seed in range(50):
        times = tables.table(choices, seed)
        for begin, fast in ((gathered, max(times)), (inside, 1)):
            times[gathered] = fast
            search = searched(choices, lambda choice: [times[choice]], begin)  # noqa: B023
            assert (search.choice == gathered) == (fast == 1)
            assert times[search.choice] <= 1.06 * min(times)


def test_what_cannot_run_is_passed_over():
    choices = tables.space()
    times = tables.table(choices, 4)
    best = searched(choices, lambda choice: [times[choice]]).choice
    assert best != 0
    search = searched(choices, lambda choice: [times[choice]] * (choice != best))
    assert search.choice != best and search.trials[best] == []
    assert searched(choices, lambda choice: [], 3).choice == 3

"""Searches and the tuner on times by a cost model, with noise; no processes, clocks or files."""

import json
import random
from pathlib import Path

import pytest

from fairseq_tutel.tuning.search.halving import Search, list_choices, neighbours
from fairseq_tutel.tuning.search.store import dump, load, read_pinned
from fairseq_tutel.tuning.search.tuner import MISSING, SLOTS, Key, Tuner, nearest


def space(slices=1):
    """2 algorithms, 4 degrees, and the parallelisms of experts that are cut into slices."""
    values = {"algorithm": ("linear", "2dh"), "overlap_degree": (1, 2, 4, 8)}
    if slices > 1:
        values["r"] = (0, *(r for r in range(1, slices + 1) if slices % r == 0))
    return list_choices(values)


def table(choices, seed):
    """Microseconds: T(d) = max(2 Ta, Ta + (Ta + Tf)/d, Tf + 2 Ta/d), an overhead per chunk,
    messages r times as large, weights from S/r ranks; r = 0 gathers all weights, sends no token."""
    rng = random.Random(seed)
    exchange, experts = rng.uniform(200, 20000), rng.uniform(200, 20000)
    hierarchical, overhead = rng.uniform(0.4, 2.5), rng.uniform(0, 400)
    gather, gather_all = rng.uniform(50, 8000), rng.uniform(5000, 40000)
    times = []
    for values in choices:
        d, r = values["overlap_degree"], values.get("r", 1)
        a = exchange * r * (hierarchical if values["algorithm"] == "2dh" else 1)
        time = max(2 * a, a + (a + experts) / d, experts + 2 * a / d) + overhead * (d - 1)
        times.append(round(gather_all + experts if r == 0 else time + gather / r))
    return times


class Noise:
    """10% (delays, half a normal distribution) and 5% outliers of three times the time."""

    def __init__(self, seed):
        self._rng = random.Random(seed)

    def __call__(self, time):
        factor = 1 + abs(self._rng.gauss(0, 0.1))
        return round(time * factor * (3 if self._rng.random() < 0.05 else 1))


def searched(choices, sample, start=0):
    """The search at its end; ``sample`` gives the samples of a choice, by number."""
    search = Search(neighbours(choices), start)
    while search.round:
        search.samples = list(sample(search.choice))
        search.end_trial()
    return search


@pytest.mark.parametrize("slices", [1, 2, 8])
def test_the_optimum_without_noise_in_few_trials(slices):
    choices, first = space(slices), []
    for seed in range(80):
        times = table(choices, seed)
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
    choices = space(2)
    assert searched(choices, lambda choice: [1000 - choice]).choice == 0
    assert searched(choices, lambda choice: [1000 - 40 * choice]).choice == len(choices) - 1


def test_a_start_that_was_slow_at_first_has_another_chance():
    """As in the first steps of a process."""
    choices, tried = space(), []

    def sample(choice):
        tried.append(choice)
        return [900] if tried == [0] else [500]

    assert searched(choices, sample).choice == 0 and tried.count(0) > 1


def test_the_choices_of_a_round_follow_from_the_rounds_before_it():
    """Not from its own samples, which would add choices as outliers come."""
    search, tried = Search([set()] * 4, 3), []
    while search.round < 3:
        search.samples = [100 + search.choice if search.round == 1 else 5000]
        tried.append(search.choice)
        search.end_trial()
    assert tried == [3, 0, 1, 2, 0, 1, 3]


def test_r_0_is_left_and_entered_wherever_a_search_begins():
    choices = space(8)
    gathered, inside = len(choices) - 1, choices.index(
        {"algorithm": "linear", "overlap_degree": 2, "r": 2}
    )  # fmt: skip
    for seed in range(50):
        times = table(choices, seed)
        for begin, fast in ((gathered, max(times)), (inside, 1)):
            times[gathered] = fast
            search = searched(choices, lambda choice: [times[choice]], begin)  # noqa: B023
            assert (search.choice == gathered) == (fast == 1)
            assert times[search.choice] <= 1.06 * min(times)


def test_what_cannot_run_is_passed_over():
    choices = space()
    times = table(choices, 4)
    best = searched(choices, lambda choice: [times[choice]]).choice
    assert best != 0
    search = searched(choices, lambda choice: [times[choice]] * (choice != best))
    assert search.choice != best and search.trials[best] == []
    assert searched(choices, lambda choice: [], 3).choice == 3


KEY = Key("train/float32/M8", 2)
HERE = {"world": 2}
RANKS = 3


def drive(tuners, times, num_steps, key=KEY, lag=0, elapsed=100_000):
    """Choices of steps of all ranks; a rank has its sample ``lag`` and its own number later.

    ``times`` gives microseconds by a choice's number; ``elapsed`` None: those are the whole step.
    """
    measured, used, us = [{} for _ in tuners], [], 0
    for number in range(num_steps):
        table = [
            tuner.payload(elapsed or us, {s: us for s, (us, at) in mine.items() if at <= number})
            for tuner, mine in zip(tuners, measured, strict=True)
        ]
        steps = []
        for tuner in tuners:
            tuner.record(table)
            steps.append(tuner.begin(key))
        assert steps.count(steps[0]) == len(tuners)  # all ranks do the same
        step, choice, wanted = steps[0]
        used.append(tuners[0].choices.index(choice))
        us = times(used[-1])
        if wanted:
            for rank, mine in enumerate(measured):
                mine[step] = us + 7 * rank, number + 1 + lag * rank
    return used


def tuners(number=RANKS, slices=1, **options):
    choices = space(slices)
    return [Tuner(choices, **{"max_loss": 1.0, **options}) for _ in range(number)]


def trials(tuner, number):
    """Numbers of samples of a choice's trials."""
    found = [event for event in tuner.events if event["what"] == "trial"]
    return [len(each["samples"]) for each in found if each["choice"] == tuner.choices[number]]


def over_hindsight(tuner, phases, steps, seed):
    """Time of short runs with noise over that of the best choices, and the same of the choices."""
    noise, cost, best = Noise(seed), 0, 0
    for bucket, times in phases:
        # the smallest time of four ranks
        least = lambda n: min(noise(times[n]) for _ in range(4))  # noqa: B023, E731
        used = drive([tuner], least, steps, KEY._replace(bucket=bucket), elapsed=None)
        cost, best = cost + sum(times[n] for n in used), best + steps * min(times)
    found = [(tuner.searches[KEY._replace(bucket=b)].best, times) for b, times in phases]
    return cost / best, [times[choice] / min(times) for choice, times in found]


@pytest.mark.parametrize("slices, long", [(1, 1.04), (2, 1.08), (8, 1.09)])
def test_synthetic_runs_take_at_most_a_tenth_longer_than_the_best_choices(slices, long):
    costs, choices = [], []
    for seed in range(60):
        (tuner,) = tuners(1, slices)
        phases = [(2, table(tuner.choices, seed))]
        cost, found = over_hindsight(tuner, phases, 200, seed)
        costs.append(cost)
        choices += found
    assert sum(costs) / 60 <= long, sum(costs) / 60
    assert sum(choices) / 60 <= 1.006 and max(choices) <= 1.06, (sum(choices) / 60, max(choices))


@pytest.mark.parametrize("lag", [0, 1])
def test_ranks_decide_alike_and_find_the_optimum(lag):
    for seed in range(5):
        ranks = tuners(slices=8)
        times = table(ranks[0].choices, seed)
        drive(ranks, times.__getitem__, 150 * (1 + lag), lag=lag)
        assert all(rank.events == ranks[0].events for rank in ranks)
        (decision,) = [event for event in ranks[0].events if event["what"] == "decision"]
        search = ranks[0].searches[KEY]
        assert not search.round and times[search.choice] <= 1.06 * min(times)
        assert decision["choice"] == ranks[0].choices[search.choice]
        assert (decision["us"], decision["baseline_us"]) == (times[search.choice], times[0])


def test_the_first_step_of_a_trial_is_not_measured_and_later_rounds_are_longer():
    (tuner,) = tuners(1)
    used = drive([tuner], [1000, 1010, 3000, 1020, 3000, 1030, 3000, 3000].__getitem__, 60)
    lengths = [trials(tuner, choice) for choice in range(8)]
    assert lengths[0] == [1, 4, 8, 16][: len(lengths[0])] and len(lengths[0]) > 2
    assert all(each[:1] in ([], [1]) for each in lengths)
    assert used[:4] == [0, 0, 1, 1]  # a step that is not measured, and one that is


def test_a_choice_that_is_clearly_slower_is_dropped_in_the_middle_of_its_trial():
    (tuner,) = tuners(1)
    seen = []

    def times(choice):  # the second choice was fast once
        seen.append(choice)
        return [1000, 1300 if seen.count(1) > 2 else 900, *[2000] * 6][choice]

    drive([tuner], times, 60)
    assert trials(tuner, 1) == [1, 2] and tuner.searches[KEY].choice == 0


def test_a_sample_that_a_rank_lacks_is_waited_for_until_there_is_no_room():
    mine, other = tuners(2)
    for tuner in (mine, other):
        for _ in range(SLOTS + 2):  # of which the first is not measured
            tuner.record([tuner.payload(1, {})])
            tuner.begin(KEY)
    assert list(mine.awaited) == list(range(2, SLOTS + 2))  # the oldest one was given up
    assert mine.payload(9, {2: 10, 3: 20, 5: 40}) == [0, 9, 10, 20, MISSING, 40]
    mine.record([mine.payload(9, {3: 20, 5: 40}), other.payload(9, {3: 8, 4: 9})])
    # the first sample ends the trial; other steps are no longer of it
    assert mine.searches[KEY].trials == {0: [[8]]} and list(mine.awaited) == [2, 4, 5]


def test_where_nothing_can_be_measured_the_start_is_kept():
    begin = {"algorithm": "2dh", "overlap_degree": 2}
    (tuner,) = tuners(1, start=begin)
    while KEY not in tuner.searches or tuner.searches[KEY].round:
        tuner.record([tuner.payload(1000, {})])
        _, choice, _ = tuner.begin(KEY)
    assert choice == begin
    assert {event["what"] for event in tuner.events} == {"unfit", "decision"}


def test_each_key_has_a_search_which_begins_where_its_neighbour_ended():
    ranks = tuners(slices=4)
    for number, name in enumerate("ab"):
        each, times = Key(name, 0), table(ranks[0].choices, number)
        drive(ranks, times.__getitem__, 120, each)
        best = ranks[0].searches[each].choice
        assert times[best] <= 1.06 * min(times)
        drive(ranks, times.__getitem__, 1, each._replace(bucket=2))
        assert ranks[0].searches[each._replace(bucket=2)].start == best


def test_the_budget_pauses_trials():
    lost = []
    for loss in (0.02, 1.0):
        (tuner,) = tuners(1, max_loss=loss)
        # a step takes 1 ms, of which the region 0.5 ms, or 0.7 ms with any choice but the start
        used = drive([tuner], lambda n: 700 if n else 500, 800, elapsed=1000)
        others = [step for step, choice in enumerate(used) if choice]
        lost.append((len(others), max(others)))
        assert tuner.searches[KEY].round == tuner.searches[KEY].choice == 0
        # no trial begins over the budget, so that it is exceeded by one trial at most
        for number in range(1, 800):
            spent = 200 * sum(choice > 0 for choice in used[:number])
            assert spent <= loss * 1000 * number + 5 * 200 + 400
    assert lost[0][0] == lost[1][0] and lost[0][1] > 2 * lost[1][1]


def test_a_saved_tuner_goes_on_and_repeats_the_trial_under_way():
    (whole,) = tuners(1, slices=8)
    times = table(whole.choices, 2).__getitem__
    drive([whole], times, 300)
    for cut in (0, 3, 17, 33, 60, 250):
        before, again = tuners(2, slices=8)
        drive([before], times, cut)
        text = dump(before, HERE)
        assert load(text, again, HERE) == []
        assert json.loads(dump(again, HERE)) == json.loads(text)
        drive([again], times, 300 - cut)
        assert [*before.events, *again.events] == whole.events


def test_a_state_of_an_earlier_version_goes_on_with_its_samples():
    """Written by 381b71b in mid-trial, with the times of the choices."""
    before = json.loads((Path(__file__).parent / "state_of_381b71b.json").read_text())
    file, (tuner,) = before["state"]["file"], tuners(1, slices=8)
    times = {json.dumps(values): us for values, us in before["times"]}
    written = json.loads(file)
    here = written["signature"]
    others = load(file, tuner, here)
    assert others[0]["signature"]["ranks"] == 4  # of another machine, kept for it
    state = json.loads(dump(tuner, here, others))
    (under_way,) = written["open"].values()
    assert next(iter(state["open"].values()))["history"] == under_way["history"]
    assert {**state, "open": 0} == {**written, "open": 0}
    closed, key = tuner.searches
    choice = tuner.choices[tuner.searches[closed].choice]
    assert read_pinned(file, tuner.choices, here) == {closed: choice}
    by_number = [times[json.dumps(choice)] for choice in tuner.choices]
    used = drive([tuner], by_number.__getitem__, 160, key)
    known = [tuner.choices.index(values) for values, _ in under_way["history"]]
    assert used[0] not in known
    assert by_number[tuner.searches[key].choice] <= 1.03 * min(by_number)


def test_a_run_is_pinned_to_a_file_and_ranks_with_other_states_are_refused():
    (tuner,), (other, fresh) = tuners(1), tuners(2)
    drive([tuner], table(tuner.choices, 2).__getitem__, 200)
    text, choice = dump(tuner, HERE), tuner.choices[tuner.searches[KEY].choice]
    load(text, other, HERE)
    with pytest.raises(ValueError, match="disagree on what the tuner found"):
        fresh.record([other.payload(1, {}), fresh.payload(1, {})])
    pinned = read_pinned(text, tuner.choices, HERE)
    assert pinned == {KEY: choice} and nearest(pinned, KEY._replace(bucket=99)) == KEY
    assert nearest(pinned, KEY._replace(kind="other")) is None
    entry = json.dumps(json.loads(text)["keys"][str(KEY)])
    for bad, words in (
        ("{", "not a file of exchange choices"),
        ("[]", "not a file of exchange choices"),
        ('{"format": 1}', "damaged .*'signature'"),
        ('{"format": 1, "signature": {}, "keys": []}', "damaged"),
        ('{"format": 1, "signature": {}, "keys": {"x/1": {}}}', "damaged .*'choice'"),
        (f'{{"format": 1, "signature": {{}}, "keys": {{"x": {entry}}}}}', "damaged"),
        (text.replace('"trials"', '"tries"'), "damaged .*'trials'"),
        (text.replace('"format": 1', '"format": 2'), "format 2"),
        (dump(tuners(1)[0], HERE), "no decided key"),
        (text.replace("linear", "x").replace("2dh", "x"), "its choice .*'x'.* is none of"),
        # the number of ranks comes first: which choices there are follows from it
        (dump(tuner, {"world": 8}).replace("linear", "x").replace("2dh", "x"), "world = 8, and"),
    ):
        with pytest.raises(ValueError, match=words):
            read_pinned(bad, tuner.choices, HERE)

"""The tuner on tables of several ranks' times: without processes, clocks or files."""

import itertools
import json
from pathlib import Path

import pytest
import tables

from fairseq_tutel.tuning.search.store import dump, load, read_pinned
from fairseq_tutel.tuning.search.tuner import MISSING, SLOTS, Key, Tuner, nearest

KEY = Key("train/float32/M8", 2)
HERE = {"world": 2}
RANKS = 3


def drive(tuners, times, num_steps, key=KEY, lag=0, log=None, elapsed=100_000):
    """Steps of all ranks; a rank has its sample ``lag`` and its own number of steps later."""
    measured = [{} for _ in tuners]
    for number in range(num_steps):
        table = [
            tuner.payload(elapsed, {s: us for s, (us, at) in mine.items() if at <= number})
            for tuner, mine in zip(tuners, measured, strict=True)
        ]
        steps = []
        for tuner in tuners:
            tuner.record(table)
            steps.append(tuner.begin(key))
        step = steps[0]
        assert steps.count(step) == len(tuners)  # all ranks do the same
        if log is not None:
            log.append(step.choice)
        if step.measured:
            us = times(step.choice)
            for rank, mine in enumerate(measured):
                mine[step.step] = us + 7 * rank, number + 1 + lag * rank


def tuners(number=RANKS, slices=1, **options):
    choices = tables.space(slices)
    return [Tuner(choices, **{"max_loss": 1.0, **options}) for _ in range(number)]


def clock(choices, seed):
    times = tables.table(choices, seed)
    return lambda values: times[choices.choice(values)], times


@pytest.mark.parametrize("lag", [0, 1])
def test_ranks_decide_alike_and_find_the_optimum(lag):
    for seed in range(5):
        ranks = tuners(slices=8)
        times, table = clock(ranks[0].space, seed)
        drive(ranks, times, 13 * (5 + 2 * lag) + 2, lag=lag)
        events = [tuner.take_events() for tuner in ranks]
        assert events.count(events[0]) == RANKS
        (decision,) = [event for event in events[0] if event["what"] == "decision"]
        entry = ranks[0].entries[KEY]
        assert entry.search is None and decision["trials"] <= 13
        assert table[entry.choice] <= 1.03 * min(table.values())
        assert decision["choice"] == ranks[0].space.values(entry.choice)
        assert (decision["us"], decision["baseline_us"]) == (table[entry.choice], table[(0, 0, 0)])


def test_the_first_step_of_a_trial_is_not_measured():
    (tuner,) = tuners(1)
    choices, measured, before = [], {}, None
    times = {1: 4000, 2: 2000, 4: 2500, 8: 5000}
    for _ in range(40):
        tuner.record([tuner.payload(1000, measured)])
        step = tuner.begin(KEY)
        if tuner.entries[KEY].search is None:
            break
        assert step.measured == (step.choice == before)
        before = step.choice
        choices.append(json.dumps(step.choice))
        us = times[step.choice["overlap_degree"]] * (1 + (step.choice["algorithm"] == "2dh"))
        measured = {step.step: us} if step.measured else {}
    lengths = [len(list(group)) for _, group in itertools.groupby(choices)]
    # stopped after one sample that is twice the best, after two that are a quarter above it
    assert sorted(set(lengths)) == [2, 3, 5]


def test_a_sample_that_a_rank_lacks_is_waited_for_until_there_is_no_room():
    mine, other = tuners(2)
    for tuner in (mine, other):
        for _ in range(SLOTS + 2):  # of which the first is not measured
            tuner.record([tuner.payload(1, {})])
            tuner.begin(KEY)
    assert mine.awaited == list(range(2, SLOTS + 2))  # the oldest one was given up
    assert mine.payload(9, {2: 10, 3: 20, 5: 40}) == [0, 9, 10, 20, MISSING, 40]
    mine.record([mine.payload(9, {2: 10, 3: 20, 5: 40}), other.payload(9, {2: 8, 5: 50})])
    assert mine.entries[KEY].samples == [8, 40] and mine.last_sample == 40
    assert mine.awaited == [3, 4]


def test_where_nothing_can_be_measured_the_start_is_kept():
    begin = {"algorithm": "2dh", "overlap_degree": 2}
    (tuner,) = tuners(1, start=begin)
    while KEY not in tuner.entries or tuner.entries[KEY].search is not None:
        tuner.record([tuner.payload(1000, {})])
        step = tuner.begin(KEY)
    assert step.choice == begin
    assert {event["what"] for event in tuner.take_events()} == {"unfit", "decision"}


def test_each_key_has_a_search_which_begins_where_its_neighbour_ended():
    ranks = tuners(slices=4)
    choices = ranks[0].space
    for number, name in enumerate("ab"):
        each = Key(name, 0)
        measure, times = clock(choices, number)
        drive(ranks, measure, 80, each)
        best = ranks[0].entries[each].choice
        assert times[best] <= 1.03 * min(times.values())
        drive(ranks, measure, 1, each._replace(bucket=2))
        assert ranks[0].entries[each._replace(bucket=2)].search.start == best


def test_the_budget_pauses_trials():
    choices = tables.space()
    slow = {"algorithm": "linear", "overlap_degree": 1}  # the start is best: all trials cost
    lost = []
    for loss in (0.02, 1.0):
        (tuner,) = tuners(1, max_loss=loss)
        used = []
        # a step takes 1 ms, of which the region 0.5 ms, or 0.7 ms with any other choice
        drive([tuner], lambda v: 500 if v == slow else 700, 1500, log=used, elapsed=1000)
        others = [n for n, choice in enumerate(used) if choice != slow]
        lost.append((len(others), max(others)))
        assert tuner.entries[KEY].search is None  # it gets there in the end
        assert tuner.entries[KEY].choice == choices.simplest
        # no trial begins over the budget, so that it is exceeded by one trial at most
        for number in range(1, 1500):
            spent = 200 * sum(choice != slow for choice in used[:number])
            assert spent <= loss * 1000 * number + 5 * 200 + 400
    assert lost[0][0] == lost[1][0] and lost[0][1] > 3 * lost[1][1]


def test_a_saved_tuner_goes_on_in_the_middle_of_a_trial():
    times, _ = clock(tables.space(8), 2)
    (whole,) = tuners(1, slices=8)
    drive([whole], times, 300)
    want = whole.take_events()
    for cut in (0, 3, 17, 33, 60, 250):
        before, again = tuners(2, slices=8)
        drive([before], times, cut)
        text = dump(before, HERE)
        assert load(text, again, HERE) == []
        assert json.loads(dump(again, HERE)) == json.loads(text)
        drive([again], times, 300 - cut)
        assert [*before.take_events(), *again.take_events()] == want


def test_a_state_of_an_earlier_version_goes_on_as_it_did_there():
    """Written by 381b71b in mid-trial, with the times of the choices and the events that came."""
    before = json.loads((Path(__file__).parent / "state_of_381b71b.json").read_text())
    times = {json.dumps(values): us for values, us in before["times"]}
    file = before["state"]["file"]
    here = json.loads(file)["signature"]
    (tuner,) = tuners(1, slices=8)
    others = load(file, tuner, here)
    assert others[0]["signature"]["ranks"] == 4  # of another machine, kept for it
    written = json.loads(file)
    assert not written["open"]["train/float16/M8 E4 K2 P544/23"].pop("near")  # is gone
    assert json.loads(dump(tuner, here, others)) == written
    closed, under_way = tuner.entries
    choice = tuner.space.values(tuner.entries[closed].choice)
    assert read_pinned(file, tuner.space, here) == {closed: choice}
    measured = {}
    for _ in range(160):
        tuner.record([tuner.payload(100_000, measured)])
        step = tuner.begin(under_way)
        us = times[json.dumps(step.choice)] + step.step % 7
        measured = {step.step: us} if step.measured and step.choice["r"] else {}  # 0 had no room
    events = [[e["what"], e["choice"], e.get("trials", 0)] for e in tuner.take_events()]
    assert events == [[what, choice, number] for what, _, choice, _, number in before["events"]]


def test_a_run_is_pinned_to_a_file_and_ranks_with_other_states_are_refused():
    (tuner,), (other, fresh) = tuners(1), tuners(2)
    drive([tuner], clock(tuner.space, 2)[0], 200)
    text, choice = dump(tuner, HERE), tuner.space.values(tuner.entries[KEY].choice)
    load(text, other, HERE)
    with pytest.raises(ValueError, match="disagree on what the tuner found"):
        fresh.record([other.payload(1, {}), fresh.payload(1, {})])
    pinned = read_pinned(text, tuner.space, HERE)
    assert pinned == {KEY: choice} and nearest(pinned, KEY._replace(bucket=99)) == KEY
    assert nearest(pinned, KEY._replace(kind="other")) is None
    for bad, words in (
        ("{", "not a file of exchange choices"),
        ("[]", "not a file of exchange choices"),
        ('{"format": 1}', "signature or keys are missing"),
        ('{"format": 1, "signature": {}, "keys": []}', "signature or keys are missing"),
        ('{"format": 1, "signature": {}, "keys": {"x/1": {}}}', "damaged .*'x/1'"),
        (text.replace('"trials"', '"tries"'), "damaged"),
        (text.replace('"format": 1', '"format": 2'), "format 2"),
        (dump(tuners(1)[0], HERE), "no decided key"),
        # the number of ranks comes first: which choices there are follows from it
        (dump(tuner, {"world": 8}).replace("linear", "x").replace("2dh", "x"), "world = 8, and"),
    ):
        with pytest.raises(ValueError, match=words):
            read_pinned(bad, tuner.space, HERE)

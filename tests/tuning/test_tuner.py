"""The tuner on tables of several ranks' times: without processes, clocks or files."""

import itertools
import json

import pytest
import tables

from fairseq_tutel.tuning import Key, Pinned, Tuner, dump, load
from fairseq_tutel.tuning.ring import MISSING, SLOTS, Ring

KEY = Key.of("train", "float32", "M8", 300)
HERE = {"world": 2}
RANKS = 3


def drive(tuners, times, num_steps, key=KEY, lag=0, log=None, elapsed=100_000):
    """Steps of all ranks; a rank has its sample ``lag`` and its own number of steps later."""
    measured, orders = [{} for _ in tuners], set()
    for number in range(num_steps):
        words = [
            tuner.words(elapsed, {s: us for s, (us, at) in mine.items() if at <= number})
            for tuner, mine in zip(tuners, measured, strict=True)
        ]
        assert all(len(line) == Tuner.num_words() for line in words)
        orders = set()
        for tuner in tuners:
            tuner.settle(words)
            order = tuner.begin(key(number) if callable(key) else key)
            orders.add((order.step, json.dumps(order.choice), order.measured))
        assert len(orders) == 1  # all ranks do the same
        if log is not None:
            log.append(order.choice)
        if order.measured:
            us = times(order.choice)
            for rank, mine in enumerate(measured):
                mine[order.step] = us + 7 * rank, number + 1 + lag * rank
    return orders


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
        assert [event.what for event in events[0]].count("decision") == 1
        decision = events[0][-1]
        entry = ranks[0].entries[KEY]
        assert entry.search is None and decision.trials <= 13
        assert table[entry.choice] <= 1.03 * min(table.values())
        assert decision.choice == ranks[0].space.values(entry.choice)
        assert decision.time == table[entry.choice] and decision.baseline == table[(0, 0, 0)]


def test_the_first_step_of_a_trial_is_not_measured():
    (tuner,) = tuners(1)
    choices, measured, before = [], {}, None
    for _ in range(60):
        tuner.settle([tuner.words(10**6, measured)])
        order = tuner.begin(KEY)
        if tuner.entries[KEY].search is None:
            break
        assert order.measured == (order.choice == before)
        before = order.choice
        choices.append(json.dumps(order.choice))
        times = {1: 1000, 2: 800, 4: 1000, 8: 4000}
        us = times[order.choice["overlap_degree"]] * (
            2 if order.choice["algorithm"] == "2dh" else 1
        )
        measured = {order.step: us} if order.measured else {}
    lengths = [len(list(group)) for _, group in itertools.groupby(choices)]
    # stopped after one sample that is twice the best, after two that are a quarter above it
    assert sorted(set(lengths)) == [2, 3, 5]


def test_a_sample_that_a_rank_lacks_is_dropped_by_all():
    ring = Ring()
    for step in range(SLOTS + 1):
        ring.expect(step, f"choice {step}")
    assert ring.steps == list(range(1, SLOTS + 1))  # the first one was given up
    mine = ring.words({1: 10, 2: 20, 4: 40})
    assert mine == [10, 20, MISSING, 40]
    assert [s[0::2] for s in ring.settle([mine, [8, MISSING, 5, 50]])] == [(1, 8), (4, 40)]
    assert ring.steps == [2, 3]
    assert ring.settle([ring.words({2: 1, 3: 2}), ring.words({2: 3, 3: 1})])[1] == (
        3,
        "choice 3",
        1,
    )


def test_where_nothing_can_be_measured_the_start_is_kept():
    (tuner,) = tuners(1)
    for _ in range(1500):
        tuner.settle([tuner.words(1000, {})])
        order = tuner.begin(KEY)
        if tuner.entries[KEY].search is None:
            break
    assert order.choice == {"algorithm": "linear", "overlap_degree": 1}
    assert all(e.what in ("unfit", "decision") for e in tuner.take_events())


def test_another_key_begins_where_its_neighbour_ended():
    ranks = tuners(slices=8)
    times, _ = clock(ranks[0].space, 3)
    wide = KEY._replace(bucket=9)  # of which the next one is much alike
    drive(ranks, times, 80, wide)
    best = ranks[0].entries[wide].choice
    keys = [wide._replace(bucket=10), wide._replace(bucket=2), wide._replace(kind="eval/M8")]
    for key in keys:
        drive(ranks, times, 1, key)
    searches = [ranks[0].entries[key].search for key in keys]
    assert [(s.start, s.near) for s in searches] == [
        (best, True),
        (best, False),
        ((0, 0, 0), False),
    ]
    low = tuners()
    drive(low, clock(low[0].space, 3)[0], 80)  # of capacities from 256 on; twice as many:
    drive(low, times, 1, KEY._replace(bucket=KEY.bucket + 1))
    assert not low[0].entries[KEY._replace(bucket=KEY.bucket + 1)].search.near


def test_keys_by_turns_have_searches_of_their_own():
    ranks = tuners(slices=4)
    choices = ranks[0].space
    tables_of = {key: tables.table(choices, number) for number, key in enumerate(["a", "b"])}
    keys = [Key(name, 0) for name in tables_of]
    now = []

    def times(values):
        return tables_of[now[-1]][choices.choice(values)]

    def key(number):
        if len(now) <= number:
            now.append(keys[number % 2].kind)
        return keys[number % 2]

    drive(ranks, times, 2 * 80, key)
    for each in keys:
        found = tables_of[each.kind]
        assert found[ranks[0].entries[each].choice] <= 1.03 * min(found.values())


def test_a_start_that_is_given():
    begin = {"algorithm": "2dh", "overlap_degree": 2}
    (tuner,) = tuners(1, start=lambda key: begin)
    tuner.settle([tuner.words(1, {})])
    assert tuner.begin(KEY).choice == begin


def test_the_budget_pauses_trials():
    choices = tables.space()
    slow = {"algorithm": "linear", "overlap_degree": 1}  # the start is best: all trials cost
    lost = []
    for loss in (0.02, 1.0):
        (tuner,) = tuners(1, max_loss=loss)
        used = []
        # a step takes 1 ms, of which the region 0.5 ms, or 0.7 ms with any other choice
        drive([tuner], lambda v: 500 if v == slow else 700, 1500, log=used, elapsed=1000)
        others = sum(choice != slow for choice in used)
        ends = [n for n, choice in enumerate(used) if choice != slow]
        lost.append((others, max(ends)))
        assert tuner.entries[KEY].search is None  # it gets there in the end
        assert tuner.entries[KEY].choice == choices.simplest
        # no trial begins over the budget, so that it is exceeded by one trial at most
        for number in range(1, 1500):
            spent = 200 * sum(choice != slow for choice in used[:number])
            assert spent <= loss * 1000 * number + 5 * 200 + 400
    assert lost[0][0] == lost[1][0] and lost[0][1] > 3 * lost[1][1]


def test_drift_opens_a_key_again_but_not_often():
    ranks = tuners()
    first, second = (clock(ranks[0].space, seed)[1] for seed in (0, 4))
    space = ranks[0].space
    drive(ranks, lambda v: first[space.choice(v)], 200)
    assert ranks[0].entries[KEY].search is None
    drive(ranks, lambda v: round(1.15 * first[space.choice(v)]), 2000)
    ranks[0].take_events()  # 15% are no drift
    drive(ranks, lambda v: 10 * second[space.choice(v)], 600)
    events = ranks[0].take_events()
    assert [e.what for e in events].count("drift") == 1 and events[0].what == "drift"
    best = ranks[0].entries[KEY].choice
    assert second[best] <= 1.03 * min(second.values())
    drive(ranks, lambda v: first[space.choice(v)], 300)  # within 1000 steps of it
    assert not ranks[0].take_events()
    drive(ranks, lambda v: first[space.choice(v)], 500)
    assert [e.what for e in ranks[0].take_events()].count("drift") == 1


def test_what_does_not_fit_is_never_tried():
    asked = []

    def fits(key, choice):
        asked.append(choice)
        return choice["overlap_degree"] != 4

    ranks = tuners(fits=fits)
    used = []
    drive(ranks, lambda v: 9000 // v["overlap_degree"], 120, log=used)
    assert all(choice["overlap_degree"] != 4 for choice in used)
    assert {"algorithm": "linear", "overlap_degree": 4} in asked
    assert ranks[0].entries[KEY].choice == (0, 1)  # 8 is behind what stops the walk
    assert "unfit" in [event.what for event in ranks[0].take_events()]


def test_a_saved_tuner_goes_on_in_the_middle_of_a_trial():
    times, _ = clock(tables.space(8), 2)
    whole = tuners(1, slices=8)
    drive(whole, times, 300)
    want = [e for e in whole[0].take_events() if e.what == "trial"]
    for cut in (0, 3, 17, 33, 60, 250):
        ranks = tuners(1, slices=8)
        drive(ranks, times, cut)
        before = [e for e in ranks[0].take_events() if e.what == "trial"]
        again = tuners(1, slices=8)
        text = dump(ranks[0], HERE)
        assert json.loads(text)["format"] == 1
        assert load(text, again[0], HERE) == [] and json.loads(dump(again[0], HERE)) == json.loads(
            text
        )
        drive(again, times, 300 - cut)
        trials = [*before, *(e for e in again[0].take_events() if e.what == "trial")]
        assert [(e.choice, e.samples) for e in trials] == [(e.choice, e.samples) for e in want]
        assert again[0].entries[KEY].choice == whole[0].entries[KEY].choice


def test_ranks_with_other_states_are_refused():
    times, _ = clock(tables.space(), 2)
    ranks = tuners(2)
    drive(ranks, times, 30)
    fresh = tuners(1)[0]
    load(dump(ranks[0], HERE), ranks[1], HERE)
    with pytest.raises(ValueError, match="disagree on what the tuner found"):
        fresh.settle([ranks[1].words(1, {}), fresh.words(1, {})])


def test_what_other_machines_found_is_kept_for_them():
    times, _ = clock(tables.space(), 2)
    (tuner,) = tuners(1)
    drive([tuner], times, 200)
    other = tuners(1)[0]
    kept = load(dump(tuner, HERE), other, {"world": 4})
    assert not other.entries and kept[0]["signature"] == HERE
    back = tuners(1)[0]
    assert load(dump(other, {"world": 4}, kept), back, HERE)[0]["signature"] == {"world": 4}
    assert back.entries[KEY].choice == tuner.entries[KEY].choice


def test_a_run_is_pinned_to_a_file():
    times, _ = clock(tables.space(), 2)
    (tuner,) = tuners(1)
    drive([tuner], times, 200)
    text, choice = dump(tuner, HERE), tuner.space.values(tuner.entries[KEY].choice)
    pinned = Pinned(text, tuner.space)
    assert pinned.signature == HERE
    assert pinned.choice(KEY) == pinned.choice(KEY._replace(bucket=99)) == choice
    assert pinned.choice(KEY._replace(kind="other")) is None
    for bad, words in (
        ("{", "not a file of exchange choices"),
        ("[]", "not a file of exchange choices"),
        ('{"format": 1}', "signature or keys are missing"),
        ('{"format": 1, "signature": {}, "keys": []}', "signature or keys are missing"),
        ('{"format": 1, "signature": {}, "keys": {"x/1": {}}}', "damaged .*'x/1'"),
        (text.replace('"trials"', '"tries"'), "damaged"),
        (text.replace('"format": 1', '"format": 2'), "format 2"),
        (dump(tuners(1)[0], HERE), "no decided key"),
    ):
        with pytest.raises(ValueError, match=words):
            Pinned(bad, tuner.space)


def test_keys_as_text():
    assert Key("train/float32/M8", 2) == KEY and Key.parse(str(KEY)) == KEY
    assert Key.of("train", "float32", "M8", 255).bucket == 1

"""A program of one's own makes one set of another with ``read_set`` and ``write_set``."""

import pytest
from checkpoint_helpers import LAYERS, Reference, assert_same, expert_name, names_in, set_names

from fairseq_tutel.checkpoint import CheckpointError, inspect, read_set, select_experts, write_set


def double(source, target, **options):
    """Each expert twice, 2j and 2j + 1: what a growing number of experts needs of the files."""
    reader = read_set(source)

    def experts(wanted):
        copies = ({}, {})
        for number in wanted:
            original = reader.experts(range(number // 2, number // 2 + 1))
            for taken, entries in zip(copies, original, strict=True):
                place = number - wanted.start
                taken.update(select_experts(entries, first=place, wanted=range(place + 1)))
        return copies

    shared = reader.shared_state()
    for layer in LAYERS:
        gate = f"decoder.layers.{layer}.moe_layer.gate.wg.weight"
        shared["model"] = shared["model"] | {
            gate: shared["model"][gate].repeat_interleave(2, dim=0)
        }
    return write_set(
        target, shared, experts, num_experts=2 * reader.num_experts, source=reader, **options
    )


@pytest.mark.parametrize("ranks", [1, 4, None])
def test_twice_as_many_experts(tmp_path, ranks):
    source = str(tmp_path / "m.pt")
    reference = Reference(2)
    reference.save(source, 2)
    written = double(source, str(tmp_path / "grown.pt"), num_ranks=ranks)
    files = {"grown.pt"} if ranks is None else set_names("grown", ranks)
    assert names_in(tmp_path) == set_names("m", 2) | files
    assert inspect(written)["consistent"] and inspect(written)["num_experts"] == 4
    grown = read_set(written)
    for number in range(4):
        assert_same(
            grown.experts(range(number, number + 1)),
            read_set(source).experts(range(number // 2, number // 2 + 1)),
        )
    first, second = (expert_name(3, number, "fc1.bias") for number in (0, 1))
    assert (grown.experts(range(3, 4))[0][first] == reference.model[second]).all()
    assert grown.world_size == 2  # of the run, whose position in the data it has


def test_refusals_leave_nothing(tmp_path):
    source = str(tmp_path / "m.pt")
    Reference(2).save(source, 2)
    for target, ranks, words in (
        (source, 1, "is the source itself"),
        (str(tmp_path / "x.pt"), 3, "4 experts cannot be spread over 3 ranks"),
    ):
        with pytest.raises(CheckpointError, match=words):
            double(source, target, num_ranks=ranks, force=True)

    def fails(wanted):
        raise ValueError("no such expert")

    with pytest.raises(ValueError, match="no such expert"):
        write_set(str(tmp_path / "x.pt"), {"model": {}}, fails, num_experts=2, num_ranks=2)
    assert names_in(tmp_path) == set_names("m", 2)

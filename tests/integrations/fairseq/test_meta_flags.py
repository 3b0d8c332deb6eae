"""Flags of Meta's branches without a meaning: each row of the one table, on a command line."""

import pytest
from fairseq import options, tasks
from fairseq.dataclass.configs import FairseqConfig

from fairseq_tutel.integrations.fairseq.models import ARCHITECTURES
from fairseq_tutel.integrations.fairseq.options.command_line import (
    ACCEPTED,
    ACCEPTED_IN_EVALUATION,
    REFUSED,
    REFUSED_BY_LANGUAGE_MODELS,
)


def parse(*words, rank="0"):
    base = "--task dummy_lm --arch transformer_lm_gpt_moe --criterion moe_cross_entropy"
    parser = options.get_training_parser()
    return options.parse_args_and_arch(
        parser, input_args=[*base.split(), "--distributed-rank", rank, *words]
    )


@pytest.mark.parametrize("entry, reason", (REFUSED | REFUSED_BY_LANGUAGE_MODELS).items())
def test_a_flag_that_would_change_the_result_is_refused_with_its_line(entry, reason, capsys):
    with pytest.raises(SystemExit):
        parse(*entry.split())
    assert f"{entry.split()[0]} of Meta's branches: {reason}" in capsys.readouterr().err


def test_accepted_flags_have_their_lines_on_the_first_rank_and_leave_no_trace(caplog):
    words = [word for entry in ACCEPTED for word in entry.split()]
    with caplog.at_level("WARNING", "fairseq_tutel"):
        parse(*words, rank="1")
        assert not caplog.messages
        args = parse(*words)
    lines = [
        f"{e.split()[0]} of Meta's branches has no effect: {why}" for e, why in ACCEPTED.items()
    ]
    assert sorted(caplog.messages) == sorted(lines)
    assert vars(args) == vars(parse())


def test_evaluation_programs_accept_theirs():
    args = options.get_eval_lm_parser().parse_args(["--path", "x.pt", *ACCEPTED_IN_EVALUATION])
    assert args.is_moe is args.moe_generation is True


def test_no_flag_is_fairseqs_or_ours():
    """It would hide an option that means something."""
    dataclasses = [field.type for field in FairseqConfig.__dataclass_fields__.values()]
    dataclasses += [row.schema for row in ARCHITECTURES.values()]
    dataclasses += tasks.TASK_DATACLASS_REGISTRY.values()
    known = {name for each in dataclasses for name in getattr(each, "__dataclass_fields__", ())}
    names = {_name(entry) for entry in ACCEPTED | ACCEPTED_IN_EVALUATION | REFUSED}
    assert not names & known


@pytest.mark.parametrize("entry", REFUSED_BY_LANGUAGE_MODELS)
def test_the_encoder_decoder_takes_what_language_models_refuse(entry):
    flag, *value = entry.split()
    routing = ["--moe-cmr"] if flag.startswith("--cmr") else []
    given = [flag, *("0.5" if v == "P" else "2" for v in value)]
    args = parse("--arch", "transformer_moe", *routing, *given)
    assert float(getattr(args, _name(entry))) == {"": 1, "N": 2, "P": 0.5}["".join(value)]


def _name(entry):
    return entry.split()[0].lstrip("-").replace("-", "_")

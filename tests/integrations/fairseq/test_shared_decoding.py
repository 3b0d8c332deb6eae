"""Ranks that share the experts of a language model generate what one process does.

Meta's golden model of 4 experts, loaded on 1 and on 2 ranks; prompts of unlike lengths.
"""

import functools

import pytest
import torch
from helpers.commands import ROOT
from helpers.distributed import run_ranks

from fairseq_tutel.distributed import process_world
from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoE

FOLDER, DATA = ROOT / "tests/golden/top2_world2/final", ROOT / "tests/golden/data_world2"
PROMPTS = [[5, 6], [7], [9, 10, 11, 4], [5, 20, 8], [30], [12, 13], [6, 6, 6, 6, 7]]
# prompts of each rank, the number of passes differs
SHARES = [(PROMPTS[:1], PROMPTS[1:]), (PROMPTS, []), ([], PROMPTS)]
BEAMS = (1, 5)


@functools.cache
def _model(helped=False):
    # a capacity that would drop nearly all pairs of a batch, and others of another batch
    tight = {"moe_eval_capacity_token_fraction": 0.01}
    if helped:
        tight |= {"moe_capacity_factor": 0, "moe_balance_ranks": True, "moe_balance_min_rows": 1}
    return TransformerLMGPTMoE.from_pretrained(
        str(FOLDER), "checkpoint_last.pt", str(DATA), **tight
    )


def _generate(shares, helped=False):
    """By share and beam, hypotheses of this rank's prompts: [(tokens, score)]."""
    rank, world_size = process_world()
    lm = _model(helped)
    assert lm.models[0].moe_groups.num_local_experts == 4 // world_size
    found = []
    for share in shares:
        prompts = [torch.tensor(prompt) for prompt in share[rank]]
        for beam in BEAMS:
            # a sentence ends by itself or at its own length
            how = {"beam": beam, "max_len_a": 1.5, "max_len_b": 6}
            hypotheses = lm.generate(prompts, **how)
            assert lm.models[0].decoder.shared_decoding is None
            found.append([[(h["tokens"].tolist(), h["score"].item()) for h in of_prompt]
                          for of_prompt in hypotheses])  # fmt: skip
    return found


def _on_two_ranks():
    """Hypotheses without and with ranks that help, and what a failure says, by name."""
    helped = _generate(SHARES[:1], helped=True)
    return {False: _generate(SHARES), True: helped, "score": _fail("score"),
            "search": _fail("search")}  # fmt: skip


@functools.cache
def _of(ranks):
    function, given = (_on_two_ranks, ()) if ranks == 2 else (_generate, ([(PROMPTS,)],))
    return run_ranks(function, ranks, *given)


@pytest.mark.parametrize("helped", [False, True])
def test_hypotheses_are_those_of_one_process(helped):
    (whole,) = _of(1)
    shares = SHARES[: 1 if helped else None]
    ranks = [found[helped] for found in _of(2)]
    lengths = set()
    for number in range(len(shares)):
        for beam in range(len(BEAMS)):
            got = [one for rank in ranks for one in rank[number * len(BEAMS) + beam]]
            for mine, wanted in zip(got, whole[beam], strict=True):
                assert len(mine) == BEAMS[beam]
                assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in wanted]
                scores = [score for _, score in wanted]
                assert [score for _, score in mine] == pytest.approx(scores, abs=1e-5)
                lengths |= {len(tokens) for tokens, _ in mine}
    assert len(lengths) > 2  # sentences did end at different times


def _fail(where):
    """What each rank says where rank 1 fails in its fourth step, or scores."""
    rank, calls = process_world()[0], []

    def allowed(*_):
        calls.append(None)
        if rank == 1 and len(calls) == 4:
            raise KeyError("of rank 1")
        return list(range(4, 20))

    lm, prompts = _model(), [torch.tensor([5, 6])] * 2
    try:
        if where == "score" and rank == 1:
            lm.generate(prompts, score_reference=True)
        else:
            lm.generate(prompts, beam=1, max_len_b=30, prefix_allowed_tokens_fn=allowed)
    except (KeyError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    "where, message",
    [("search", "KeyError: 'of rank 1'"), ("score", "ValueError: sentences are scored by")],
)
def test_a_rank_that_fails_ends_all(where, message):
    first, second = (found[where] for found in _of(2))
    assert second.startswith(message)
    assert first == "RuntimeError: rank 1 failed in generation; see its error"

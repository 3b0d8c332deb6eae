"""No block of the data is left out without a word."""

import pytest
from helpers.training import make_config, make_trainer

from fairseq_tutel.hosts.fairseq import blocks, evaluation


class Dictionary:
    def pad(self):
        return 1


class Model:
    moe_groups = None


def test_the_perplexity_of_nothing_is_an_error():
    evaluate = evaluation.in_step(lambda *args: {"loss": 0.0, "perplexity": 1.0})
    with pytest.raises(ValueError, match="no token was evaluated: the subset is empty"):
        evaluate([Model()], Dictionary(), [])


def test_training_on_blocks_that_never_fit_is_refused():
    cfg = make_config("--moe-expert-count", "2")
    blocks.refuse_blocks_that_never_fit(cfg.task, 8)
    cfg.model.max_target_positions = 6
    with pytest.raises(ValueError, match="--tokens-per-sample 8: the model has 6 positions"):
        make_trainer(cfg)

"""Limit each token's choice to its best groups of neighbouring experts (``num_expert_groups``).

DeepSeek-V3, arXiv 2412.19437, section 2.1.2; there a group is the experts of a node.
"""

import torch

from ...config import MoEConfig


def limit_to_groups(key_TE: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """Return the keys with -inf for experts outside the ``top_groups`` best groups of a token.

    A group's score is its largest key, or the sum of its two largest. Logits (softmax) are not
    added up: the sum is that of their exponentials. ``key_TE`` has the load bias and no gradient.
    """
    num_tokens, num_groups = len(key_TE), config.num_expert_groups
    group_size = config.num_experts // num_groups
    score_TE = key_TE
    if config.score_function == "softmax":
        score_TE = (key_TE - key_TE.amax(1, keepdim=True)).exp()
    in_groups = score_TE.view(num_tokens, num_groups, group_size)
    count = 2 if config.group_score == "top2" else 1
    score_TG = in_groups.topk(count, dim=-1).values.sum(-1)
    chosen_TG = torch.zeros_like(score_TG, dtype=torch.bool)
    chosen_TG.scatter_(1, score_TG.topk(config.top_groups, dim=-1).indices, True)
    return key_TE.masked_fill(~chosen_TG.repeat_interleave(group_size, dim=1), -torch.inf)

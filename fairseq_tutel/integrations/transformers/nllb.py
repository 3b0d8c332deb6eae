"""Repair of transformers' NllbMoe, which computes something else since transformers 5.0."""

import functools


def repair_nllb_moe() -> None:
    """Make NllbMoe send each token to its own two experts, in this process.

    In transformers 5.0 to 5.24 the experts take the router's mask of zeros and ones for numbers of
    experts, so all tokens go to experts 0 and 1. A class that computes rightly stays as it is.
    """
    from transformers.models.nllb_moe import modeling_nllb_moe as theirs

    if _is_right(theirs):
        return
    original = theirs.NllbMoeExperts.forward

    @functools.wraps(original)
    def forward(self, hidden_states, router_mask, router_probs):
        """Hand on numbers [T, K] and weights [T, K] in place of a mask and weights [T, E]."""
        weights, experts = router_probs.topk(min(2, self.num_experts))
        return original(self, hidden_states, experts, weights)

    theirs.NllbMoeExperts.forward = forward


def _is_right(theirs) -> bool:
    """Return whether experts 0 and 1, of three, leave alone a token that goes to 2 and 0."""
    import torch

    config = theirs.NllbMoeConfig(d_model=1, num_experts=3, moe_token_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        layer = theirs.NllbMoeSparseMLP(config, 1).eval()
    with torch.no_grad():
        for param in layer.parameters():
            param.zero_()
        layer.router.classifier.weight += torch.tensor([[1.0], [0.0], [2.0]])
        for number in range(3):
            layer.experts[f"expert_{number}"].fc2.bias += number
        output = layer(torch.ones(1, 1, 1))
    y = output[0] if isinstance(output, tuple) else output  # transformers 4 has two
    return bool(y.item() > 1)

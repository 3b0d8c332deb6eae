"""What every rank needs: the fork server of helpers.distributed imports it once, not each rank."""

import torch._dynamo  # noqa: F401  torch imports it when the first custom operator runs

import fairseq_tutel

try:
    import fairseq.trainer  # noqa: F401
except ImportError:  # an environment with the layer alone
    pass
else:
    fairseq_tutel.register()  # half a second

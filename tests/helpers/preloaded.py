"""What every rank needs: the fork server of helpers.distributed imports it once, not each rank."""

import gc

import torch._dynamo  # noqa: F401  torch imports it when the first custom operator runs

import fairseq_tutel

from . import fake_gpu

fake_gpu.install()
try:
    import fairseq.trainer  # noqa: F401
except ImportError:  # an environment with the layer alone
    pass
else:
    import fairseq_tutel.plan.planner  # noqa: F401

    from .training import make_config

    # a second: Hydra copies the options of every architecture, and reads them for the first config
    fairseq_tutel.register()
    make_config()
gc.freeze()  # a collection in a rank would copy every page that it touches

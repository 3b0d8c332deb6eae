"""fairseq as a host: train, save and evaluate models with MoE layers."""

from fairseq.criterions import CRITERION_REGISTRY, register_criterion

from ...config import EXCHANGES, EXPERTS, ROUTERS
from . import hooks
from .criterions import CRITERIONS
from .models import ARCHITECTURES, register_all


def register() -> None:
    """Make fairseq know the architectures, the criterions and the replacements (``hooks.TABLE``).

    Idempotent. Routers, exchanges and networks that are registered later become choices too.
    """
    _register_architectures()
    for registry in (ROUTERS, EXCHANGES, EXPERTS):
        registry.on_change(_register_architectures)
    for name, criterion in CRITERIONS.items():
        if name not in CRITERION_REGISTRY:
            register_criterion(name, dataclass=criterion.config)(criterion)
    hooks.install()


def _register_architectures() -> None:
    for row in ARCHITECTURES.values():
        row.register()
    register_all()

"""Operations per token of a run, counted from the options in its checkpoint."""

from pathlib import Path
from typing import Any

from ..checkpoint import find_checkpoint, load_file, read_set
from ..integrations.fairseq import register
from ..integrations.fairseq.models import ARCHITECTURES, name_with_experts
from ..integrations.fairseq.programs.evaluation import with_options_of_today
from .parameters import count_parameters
from .settings import read_settings
from .work import count_traffic, count_work


def operations_per_token(checkpoint: Path) -> float:
    """Return operations per token, forward and backward, as the planner counts them.

    ``checkpoint`` is a set (``NAME.pt``) or one file. Dense language and translation models of
    fairseq count as ours without experts, which they equal.

    Raises:
        ValueError: there is no such checkpoint, or the planner cannot count its model.
    """
    path = str(checkpoint)
    found = find_checkpoint(path)
    if found is None:
        raise ValueError(f"{checkpoint}: there is no such checkpoint")
    register()
    kind, file = found
    state = dict(read_set(path).shared) if kind == "set" else load_file(file)
    state = with_options_of_today(state, path)
    stored: Any = state.get("cfg")
    if stored is None:
        raise ValueError(f"{checkpoint} has no config (cfg)")
    given = {key: stored.model[key] for key in stored.model}
    name = name_with_experts(given["_name"])
    if name not in ARCHITECTURES:
        raise ValueError(f"{checkpoint}: the planner cannot count {given['_name']}")
    dense = {} if name == given["_name"] else {"moe_freq": 0}
    model = {key: v for key, v in {**given, **dense}.items() if v is not None}
    stored.model = {**vars(ARCHITECTURES[name].schema()), **model, "_name": name}
    table = next(v for k, v in state["model"].items() if k.endswith("embed_tokens.weight"))
    settings = read_settings(stored, str(checkpoint), vocabulary=len(table))
    parameters = count_parameters(settings)
    return count_work(settings, parameters, count_traffic(settings, parameters)).model_flops

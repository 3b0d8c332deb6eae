"""Choose the all-to-all algorithm at run time: candidates, timing, search."""

from .exchange_tuner import ExchangeTuner, describe_key, describe_tuning

__all__ = ["ExchangeTuner", "describe_key", "describe_tuning"]

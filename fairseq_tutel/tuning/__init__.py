"""Which exchange is used: candidates, the tuner, and its search."""

from .exchange_tuner import ExchangeTuner, describe_key, describe_tuning

__all__ = ["ExchangeTuner", "describe_key", "describe_tuning"]

"""Where a run's figures go: `metrics.jsonl`, the console and an experiment tracker, behind one interface; FLOPs and MFU.

Names are imported on first use, so that reading a configuration does not import rich or wandb.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.tracking.build import CompositeTracker as CompositeTracker
    from train.tracking.build import build_trackers as build_trackers
    from train.tracking.flops import UtilisationMeter as UtilisationMeter
    from train.tracking.flops import device_peak_flops as device_peak_flops
    from train.tracking.flops import train_flops_per_token as train_flops_per_token
    from train.tracking.protocol import NullTracker as NullTracker
    from train.tracking.protocol import Tracker as Tracker
    from train.tracking.readers import RunMetrics as RunMetrics
    from train.tracking.readers import read_metrics as read_metrics

_HOMES = {
    "CompositeTracker": "build",
    "build_trackers": "build",
    "UtilisationMeter": "flops",
    "device_peak_flops": "flops",
    "train_flops_per_token": "flops",
    "NullTracker": "protocol",
    "Tracker": "protocol",
    "RunMetrics": "readers",
    "read_metrics": "readers",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

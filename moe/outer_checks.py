"""What an outer step refuses: settings without sense, weights that are not given, a state that is not this site's."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def check_settings(lr: float, momentum: float, router_rows: str, fragments: int, site: int, sites: int) -> None:
    """Raise ValueError for the first argument of an `OuterStep` that makes no sense."""
    if lr <= 0:
        raise ValueError(f"lr={lr}: the outer step must move; give more than 0")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum}: must be from 0 to below 1; choose one")
    if router_rows not in ("holders", "all"):
        raise ValueError(f"router_rows={router_rows}: must be holders or all; choose one")
    if fragments < 1:
        raise ValueError(f"fragments={fragments}: names make at least one part; give 1 or more")
    if not 0 <= site < sites:
        raise ValueError(f"site={site}: the plan has {sites}; use a plan for all sites")


def check_state(state: Mapping[str, Any], residency_round: int, anchor: Mapping[str, Tensor], velocity: Mapping[str, Tensor]) -> None:
    """Raise ValueError when names, shapes or residency of a stored `state` are not those at this site."""
    if state["residency_round"] != residency_round:
        was = f"residency of round {state['residency_round']}, here of {residency_round}"
        raise ValueError(f"outer state: is for the {was}; name the parameters of that round")
    for part, mine in (("anchor", anchor), ("velocity", velocity)):
        saved = state[part]
        if saved.keys() != mine.keys():
            odd = sorted(saved.keys() ^ mine.keys())
            raise ValueError(f"outer state: {part} of {', '.join(odd)} is missing or unknown; resume with the run's own plan and optimiser")
        for name, tensor in saved.items():
            if tensor.shape != mine[name].shape:
                raise ValueError(
                    f"outer state: {name} is {tuple(tensor.shape)}, here {tuple(mine[name].shape)}; resume with the run's own model"
                )


def weight_of(weights: Mapping[str, float], name: str) -> float:
    """The weight of a name. Raises ValueError when there is none, or it is negative."""
    if name not in weights:
        raise ValueError(f"weights: none for {name}; give one for every parameter or no weights at all")
    if weights[name] < 0:
        raise ValueError(f"weights: {weights[name]} for {name}; a weight is 0 or more")
    return weights[name]

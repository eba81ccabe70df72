"""What a site's checkpoint keeps of the outer steps, and whether a checkpoint is this run's.

Tensors by name (`outer.anchor.<name>`, `outer.velocity.<name>`, and of a delayed step that waits to be applied `outer.means.<name>` and
the like) lie beside the model's; the rest is JSON in the checkpoint's `progress`, under `federation`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.outer import OuterStep
from moe.outer_names import Named
from moe.residency import ResidencyPlan
from train.checkpoint.directory import list_checkpoints, manifest_of
from train.checkpoint.safety import read_index
from train.config.schema import Config
from train.engine.outer_state import PREFIX
from train.federation.agreement import Saved

_KEYS = {
    "num_experts": "moe.experts",
    "sites": "federation.sites",
    "replication": "federation.replication",
    "policy": "federation.policy",
    "seed": "train.seed",
    "layers": "moe.layers",
    "rotate_every": "federation.rotate_every",
}
_ALWAYS = ("anchor", "velocity")
_IN_FLIGHT = ("means", "starts", "anchors", "velocities")
_LIKE_WEIGHTS = ("anchor", "starts", "anchors")


class OuterKeeper:
    """The outer step of this rank as a checkpoint sees it; `outer` is None on a rank that sends nothing."""

    def __init__(
        self,
        config: Config,
        plan: ResidencyPlan | None,
        outer: OuterStep | None,
        named: Mapping[str, Named],
        coordinate: tuple[int, int] = (0, 0),
    ) -> None:
        self._config, self._plan, self._outer, self._named = config, plan, outer, named
        self.take_residency: Callable[[int], Mapping[str, Named]] = lambda _: self._named
        """Has the site's slots stand for the experts of a round, and answers with the names of this rank's parameters (collective)."""
        # A coordinate divides its names into fragments by itself: slices of one parameter may travel at different times.
        self._suffix = "@{}.{}".format(*coordinate) if config.federation.fragments > 1 else ""
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._json: dict[str, Any] = {}

    def about(self) -> dict[str, Any]:
        """Which run and site a checkpoint belongs to."""
        federation = self._config.federation
        return {
            "site": federation.site,
            "sites": federation.sites,
            "plan": None if self._plan is None else self._plan.to_dict(),
            "fragments": federation.fragments,
            "momentum": federation.outer_momentum > 0,
            "coordinates": [self._config.parallel.tp, self._config.parallel.pp],
        }

    def take(self) -> dict[str, Any]:
        """Hold the state for `tensors`; returns what is not a tensor, for the manifest (rank 0's counts). Nothing may be unsettled."""
        if self._outer is None:
            return {}
        state = self._outer.state_dict()
        self._tensors = {part: state.pop(part) for part in _ALWAYS}
        if state["flight"] is not None:
            for part in _IN_FLIGHT:
                self._tensors[part] = {name + self._suffix: tensor for name, tensor in state["flight"].pop(part).items()}
        return state

    def drop(self) -> None:
        """Let go of what `take` holds."""
        self._tensors = {}

    def expect(self, path: Path, stored: Mapping[str, Any] | None) -> None:
        """Get ready to load the checkpoint `path`, whose manifest has `stored` (collective). Raises ValueError, naming the keys, when it
        is not ours."""
        if stored is None:
            raise ValueError(f"checkpoint {path}: it belongs to a run of one site, not to one of several; start a new run")
        _compare(path, stored, self.about())
        self._named = self.take_residency(int(stored.get("residency_round", 0)))
        if self._outer is None:
            return
        self._json = dict(stored["outer"])
        parts = _ALWAYS if self._json["flight"] is None else (*_ALWAYS, *_IN_FLIGHT)
        index = read_index(path / ".metadata")
        self._tensors = {part: {} for part in parts}
        for part in parts:
            for name, entry in self._named.items():
                stored_as = name if part in _ALWAYS else name + self._suffix
                if part == "anchor" or f"{PREFIX}.{part}.{stored_as}" in index:
                    # Padding of a vocabulary that another layout did not have is loaded from nowhere: it stays as it is in the model.
                    fresh = entry.tensor.clone() if part in _LIKE_WEIGHTS else torch.zeros_like(entry.tensor)
                    self._tensors[part][stored_as] = fresh

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """See `train.engine.outer_state.OuterState`."""
        return self._tensors

    def restore(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """See `train.engine.outer_state.OuterState`."""
        self.drop()
        if self._outer is None:
            return
        flight = self._json["flight"]
        if flight is not None:
            parts = {
                part: {name.removesuffix(self._suffix): tensor for name, tensor in tensors.get(part, {}).items()} for part in _IN_FLIGHT
            }
            flight = {**flight, **parts}
        self._outer.load_state_dict({**self._json, **{part: tensors.get(part, {}) for part in _ALWAYS}, "flight": flight})


def saved_in(directory: Path) -> tuple[Saved, ...]:
    """A site's complete checkpoints."""
    found: list[Saved] = []
    for step, path in list_checkpoints(directory):
        try:
            stored = manifest_of(path)["progress"].get("federation")
        except ValueError:
            continue
        if stored is not None:
            found.append(Saved(step, int(stored["round"]), str(stored["line"])))
    return tuple(found)


def _compare(path: Path, stored: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    then, now = stored["plan"] or {}, here["plan"] or {}
    differences = [
        f"{_KEYS[key]}: {then.get(key)} then, {now.get(key)} now" for key in _KEYS if then.get(key) != now.get(key)
    ]  # fmt: skip
    for key, name in (("site", "federation.site"), ("sites", "federation.sites"), ("fragments", "federation.fragments")):
        if stored[key] != here[key] and not any(text.startswith(name) for text in differences):
            differences.append(f"{name}: {stored[key]} then, {here[key]} now")
    if stored["momentum"] != here["momentum"]:
        then, now = ("over 0" if each["momentum"] else 0 for each in (stored, here))
        differences.append(f"federation.outer_momentum: {then} then, {now} now")
    if differences:
        raise ValueError(f"checkpoint {path}: the run was made with other sites ({'; '.join(differences)}); give back these keys")
    layouts = stored["coordinates"], here["coordinates"]
    if layouts[0] != layouts[1] and stored["outer"]["flight"] is not None and stored["fragments"] > 1:
        (tp, pp), _ = layouts
        raise ValueError(
            f"checkpoint {path}: a fragment's outer step waits in it to be applied, and its parts are those of parallel.tp={tp}, "
            f"parallel.pp={pp}; go on with these, or from another checkpoint"
        )

"""Rules about sites and the experts they hold."""

from train.config.errors import ConfigError
from train.config.schema import Config
from train.federation.config import FederationConfig
from train.federation.residency import residency_plan

_SHIPPED = FederationConfig()
_OF_SEVERAL = ("policy", "weights", "router_rows", "quorum", "overlap_steps", "fragments", "transfer_dtype")
"""Keys that do nothing in a run of one site. The rest of the section may come from an option or a sweep over numbers of sites."""
_SLACK = 30.0
"""Seconds by which the other ranks of a site outwait the first one at a meeting."""
_PLAN_KEYS = {"replication": "federation.replication", "policy": "federation.policy", "rotate_every": "federation.rotate_every"}


def check_federation(config: Config) -> None:
    """Raise ConfigError for the first rule about sites, residency and expert modes that `config` breaks (derived sizes filled in)."""
    _check_modes(config)
    federation = config.federation
    if federation.sites == 1:
        for key in ("site", "endpoint", "rotate_every"):
            if getattr(federation, key) is not None:
                rule = "has no effect in a run of one site"
                raise ConfigError(f"federation.{key}", getattr(federation, key), rule, "leave it out, or set federation.sites=2 or more")
        if federation.share_gpus:
            rule = "lets several sites share a GPU, and federation.sites=1"
            raise ConfigError("federation.share_gpus", True, rule, "leave it out, or set federation.sites=2 or more")
        if federation.replication not in (None, 1):
            rule = "each expert has as many holders as there are sites at most, and federation.sites=1"
            raise ConfigError("federation.replication", federation.replication, rule, "leave it out, or set federation.sites")
        _refuse_idle(config, _OF_SEVERAL, "has no effect in a run of one site", "leave it out, or set federation.sites=2 or more")
        return
    _check_rounds(config)
    _check_place(config)
    _check_residency(config)


def _check_modes(config: Config) -> None:
    moe, federation = config.moe, config.federation
    if not moe.experts:
        return
    if moe.gate == "kept" and moe.mode != "skip":
        raise ConfigError("moe.gate", "kept", f"has no effect with moe.mode={moe.mode}, which drops nothing", "use moe.gate=full")
    if moe.gate == "kept" and moe.top_k == 1:
        raise ConfigError("moe.gate", "kept", "makes the gate of a token's only expert 1, and moe.top_k=1", "use moe.gate=full")
    partial = federation.sites > 1 and federation.replication not in (None, federation.sites)
    if moe.mode == "full" and partial:
        rule = f"federation.replication={federation.replication} leaves experts out at each of {federation.sites} sites"
        raise ConfigError("moe.mode", "full", rule, "use moe.mode=skip (moe=fomoe), or leave federation.replication out")
    if moe.bias_rate and moe.mode == "frozen":
        raise ConfigError("moe.bias_rate", moe.bias_rate, "steers tokens by load and is untried with moe.mode=frozen", "use 0")


def _refuse_idle(config: Config, keys: tuple[str, ...], rule: str, remedy: str) -> None:
    """Raise ConfigError for the first of `keys` that was given a value though it does nothing."""
    for key in keys:
        value = getattr(config.federation, key)
        if value != getattr(_SHIPPED, key):
            raise ConfigError(f"federation.{key}", value, rule, remedy)


def _check_rounds(config: Config) -> None:
    federation, steps = config.federation, config.federation.sync_every
    if steps > config.train.steps:
        rule = f"the run ends after train.steps={config.train.steps}, before the sites meet for the first time"
        raise ConfigError("federation.sync_every", steps, rule, f"use {config.train.steps} or fewer, or a larger train.steps")
    if federation.fragments > config.model.layers:
        rule = f"a fragment holds at least one of the {config.model.layers} blocks"
        raise ConfigError("federation.fragments", federation.fragments, rule, "use fewer")
    if steps % federation.fragments:
        rule = f"fragments take turns every federation.sync_every / fragments steps, and {steps} is no multiple of it"
        raise ConfigError("federation.fragments", federation.fragments, rule, "use a divisor of federation.sync_every")
    between = steps // federation.fragments
    if federation.overlap_steps >= between:
        rule = f"an outer step must end before the next one begins, federation.sync_every / fragments = {between} steps later"
        raise ConfigError("federation.overlap_steps", federation.overlap_steps, rule, f"use {between - 1} or fewer")
    if federation.policy == "rotating":
        for key, plain in (("overlap_steps", 0), ("fragments", 1)):
            if getattr(federation, key) != plain:
                rule = "federation.policy=rotating needs outer steps of all parameters that all sites apply at once"
                raise ConfigError(f"federation.{key}", getattr(federation, key), rule, f"use {plain}, or another federation.policy")
    if federation.quorum is not None and not federation.sites // 2 < federation.quorum <= federation.sites:
        rule = f"must be more than half of federation.sites={federation.sites}, and no more than all"
        least = federation.sites // 2 + 1
        remedy = f"use {least} to {federation.sites}" if least < federation.sites else f"use {least}"
        raise ConfigError("federation.quorum", federation.quorum, rule, remedy)
    if not 0.0 <= federation.outer_momentum < 1.0:
        raise ConfigError("federation.outer_momentum", federation.outer_momentum, "must be from 0 to below 1", "choose one")
    for key in ("timeout", "hang_timeout"):
        limit = getattr(config.train, key)
        if (limit or key == "timeout") and federation.deadline + _SLACK >= limit:
            rule = f"the other ranks of a site wait for a meeting, too, and give up after train.{key}={limit:g} s"
            remedy = f"use less than {limit - _SLACK:g}" if limit > _SLACK else "use less"
            raise ConfigError("federation.deadline", federation.deadline, rule, f"{remedy}, or a longer train.{key}")


def _check_place(config: Config) -> None:
    federation, processes = config.federation, config.parallel.processes
    if federation.site is None:
        if federation.endpoint is not None:
            rule = "names where sites of several hosts meet, and this command starts all sites here"
            raise ConfigError("federation.endpoint", federation.endpoint, rule, "leave it out, or give federation.site")
        if processes is not None and processes % federation.sites:
            rule = f"must be a multiple of federation.sites={federation.sites}: every site has as many processes"
            up = -(-processes // federation.sites) * federation.sites
            raise ConfigError("parallel.processes", processes, rule, f"use {up}")
        return
    if not 0 <= federation.site < federation.sites:
        rule = f"sites are numbered from 0 to {federation.sites - 1}"
        raise ConfigError("federation.site", federation.site, rule, "choose one, or leave it out to start all sites here")
    host, colon, port = (federation.endpoint or "").rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        rule = "a site that is started by itself needs to know where the sites meet, as host:port"
        raise ConfigError("federation.endpoint", federation.endpoint, rule, "write federation.endpoint=<host of site 0>:<free port>")


def _check_residency(config: Config) -> None:
    federation, moe = config.federation, config.moe
    if not moe.experts:
        if federation.replication is not None:
            rule = "says how many sites hold an expert, and moe.experts=0"
            raise ConfigError("federation.replication", federation.replication, rule, "leave it out, or use moe=fomoe")
        keys = ("policy", "rotate_every", "router_rows", "probe")
        _refuse_idle(config, keys, "is about experts, and moe.experts=0", "leave it out, or use moe=fomoe")
        return
    if federation.replication in (None, federation.sites):
        rule = "has no effect where every site holds every expert"
        _refuse_idle(config, ("policy", "router_rows"), rule, "leave it out, or set federation.replication below federation.sites")
    try:
        plan = residency_plan(config)
    except ValueError as error:
        key, _, rest = str(error).partition("=")
        text, _, words = rest.partition(": ")
        value = None if text == "None" else text
        rule, _, remedy = words.partition("; ")
        raise ConfigError(_PLAN_KEYS.get(key, "federation.sites"), value, rule, remedy or "correct it") from error
    assert plan is not None
    if moe.mode == "frozen":
        return
    for layer in plan.layers:
        counts = [len(plan.resident(site, layer)) for site in range(plan.sites)]
        ep = config.parallel.ep
        uneven = next((count for count in counts if count % ep), None)
        if uneven is not None:
            rule = f"must divide the experts that a site holds, and in block {layer} a site holds {uneven} of {moe.experts}"
            raise ConfigError("parallel.ep", ep, rule, "choose a divisor, or another federation.replication")
        if moe.mode == "mask" and min(counts) < moe.top_k:
            rule = f"every token keeps its {moe.top_k} experts in moe.mode=mask, and a site holds {min(counts)} in block {layer}"
            raise ConfigError("moe.top_k", moe.top_k, rule, "use moe.mode=skip, or raise federation.replication")

"""Bad command lines: each is refused in one line with key, value, rule and remedy, in this process, without torch."""

from dataclasses import replace
from pathlib import Path

import pytest

from train.config.check import check
from train.config.check_federation import check_federation
from train.config.compose import CONFIG_DIR, compose
from train.config.errors import ConfigError

S2 = ("attention=s2", "attention.stride=4", "attention.block_size=16")
MOE = ("moe=mixtral", "moe.experts=4")
SITES = (*MOE, "federation.sites=2", "federation.replication=1", "moe.mode=skip", "moe.layers=all")
ROTATING = ("federation.policy=rotating", "federation.rotate_every=2")

COMPOSITION = [
    ("train.stepz=3", "train.stepz=3: there is no such key; did you mean train.steps?"),
    ("+train.stepz=3", "+train.stepz=3: there is no such key; did you mean train.steps?"),
    ("++moe.expert=3", "++moe.expert=3: there is no such key; did you mean moe.experts?"),
    ("lr=1e-3", "lr=1e-3: there is no such key; did you mean optim.lr?"),
    ("nonsense=1", "nonsense=1: there is no such key; `leantron pretrain --help` lists every key"),
    ("+train.steps=3", "+train.steps=3: the key exists already, + is for adding; write train.steps=3"),
    ("train={stepz:3}", "train.stepz=3: there is no such key; did you mean train.steps?"),
    ("attention=s3", "attention=s3: there is no such option of attention; did you mean s2? choose one of dense, s2"),
    ("attention=null", "attention=null: there is no such option of attention; choose one of dense, s2"),
    ("optim={lr:1}", "optim={lr:1}: optim takes the name of an option; set its keys one by one: optim.<key>=<value>"),
    ("train=5", "train=5: expected a mapping, got an integer; set train.<key>=<value>"),
    ("model@x=tiny", "model@x=tiny: groups have fixed places in the configuration; write model=<option>"),
    ("train.steps=???", "train.steps=???: a value is required (an integer); give train.steps=..."),
    ("train.steps=many", "train.steps=many: expected an integer, got text; give an integer"),
    ("train.steps=1e3", "train.steps=1000.0: expected an integer, got a number; write train.steps=1000"),
    ("train.steps=true", "train.steps=true: expected an integer, got true or false; give an integer"),
    ("train.steps=null", "train.steps=null: expected an integer, got null; give an integer"),
    ("optim.lr=fast", "optim.lr=fast: expected a number, got text; give a number"),
    ("optim.lr=nan", "optim.lr=nan: a finite number is expected; give an ordinary number"),
    ("model.kv_heads=two", "model.kv_heads=two: expected an integer or null, got text; give an integer or null"),
    ("optim.betas=0.9", "optim.betas=0.9: expected a list of numbers, got a number; write optim.betas=[0.9]"),
    ("data.paths=[a,2.5]", "data.paths[1]=2.5: expected text, got a number; give text"),
    ("parallel.sp=1", "parallel.sp=1: expected true or false, got an integer; give true or false"),
    ("train.steps", "train.steps=: an override has the form key=value; write train.steps=<value>"),
    ("~moe", "~moe=null: keys and groups cannot be deleted; set moe to another option or value"),
    (
        "optim.lr=1e-3,3e-4",
        "optim.lr=1e-3,3e-4: several values are a sweep; sweep with `leantron pretrain -m ...`, or write a list as optim.lr=[...]",
    ),
    ("hydra.verbose=true", "hydra.verbose=true: hydra's own settings are for sweeps; use it with -m, or leave it out"),
    (
        "hydra.searchpath=[/nowhere]",
        "hydra.searchpath=/nowhere: is not a folder; give a folder that holds groups, as hydra.searchpath=[folder]",
    ),
    (
        "run.name=${nothing}",
        "run.name=${nothing}: the interpolation does not resolve (Interpolation key 'nothing' not found); "
        "name a key that exists",
    ),
    (
        "run.name=${oc.env:WANDB_API_KEY}",
        "run.name=${oc.env:WANDB_API_KEY}: environment variables are not read into a run, whose configuration is written to disk; "
        "give the value itself; secrets stay in the environment of the process that uses them",
    ),
]  # fmt: skip

RULES = [
    (1, ("train.steps=0",), "train.steps=0: must be 1 or more; use a positive number"),
    (1, ("train.eval_steps=-1",), "train.eval_steps=-1: must not be negative; use 0 or more"),
    (1, ("optim.lr=0",), "optim.lr=0.0: must be over 0; use a positive number"),
    (1, ("train.precision=fp16",), "train.precision=fp16: there is no such choice; choose one of bf16, fp32"),
    (1, ("train.recompute=some",), "train.recompute=some: there is no such choice; choose one of none, selective, full"),
    (1, ("optim.schedule=linear",), "optim.schedule=linear: there is no such choice; choose one of cosine, wsd, constant"),
    (1, ("tracking.mode=later",), "tracking.mode=later: there is no such choice; choose one of offline, online"),
    (
        1, ("train.eval_every=5", "train.eval_steps=0"),
        "train.eval_steps=0: train.eval_every=5 asks for validations; "
        "use 1 or more, or eval_every=0",
    ),
    (1, ("model.heads=3",), "model.heads=3: must divide model.width=128; choose a divisor, or set model.head_dim"),
    (
        1,
        ("model.head_dim=31",),
        "model.head_dim=31: rotary positions turn pairs of numbers: the width of a head must be even; set model.head_dim=32",
    ),
    (1, ("model.kv_heads=3",), "model.kv_heads=3: must divide model.heads=4; choose a divisor"),
    (
        1, ("model.vocab_size=100",),
        "model.vocab_size=100: is smaller than the 257 tokens of data.tokenizer=byte; "
        "leave model.vocab_size=null, or use a larger one",
    ),
    (1, ("optim.betas=[0.9]",), "optim.betas=[0.9]: Adam has two decay rates; write optim.betas=[0.9,0.95]"),
    (1, ("optim.betas=[0.9,1.0]",), "optim.betas=[0.9,1.0]: decay rates are at least 0 and under 1; write optim.betas=[0.9,0.95]"),
    (1, ("optim.min_lr=1",), "optim.min_lr=1.0: exceeds optim.lr=0.0003; use a smaller min_lr"),
    (1, ("optim.warmup_steps=101",), "optim.warmup_steps=101: exceeds train.steps=100; use a shorter warm-up"),
    (
        1,
        ("optim=wsd", "optim.warmup_steps=95"),
        "optim.decay_steps=null: optim.warmup_steps=95 and 10 steps of decay exceed train.steps=100; shorten one of them",
    ),
    (1, ("optim.decay_steps=5",), "optim.decay_steps=5: only wsd has a decay of its own, and optim.schedule=cosine; use optim=wsd"),
    (
        1,
        ("attention=s2",),
        "attention.stride=16: residues 1 to 3, 5 to 7, 9 to 11, 13 to 15 modulo 16 are reached by none of the 4 sparse heads (step=4, "
        "rotate=1); use a stride of at most 4, or rotate=4",
    ),
    (1, (*S2, "attention.block_size=48"), "attention.block_size=48: must be a power of two; use 64 or 128"),
    (1, (*S2, "train.seq_len=8"), "attention.block_size=16: exceeds train.seq_len=8; use a smaller block or a longer sequence"),
    (1, (*S2, "attention.dense_layers=[9]"), "attention.dense_layers=[9]: the model has blocks 0 to 3; name these only"),
    (
        1,
        (*S2, "attention.dense_layers=last:2"),
        "attention.dense_layers=last:2: is not a layer specification; write first:N, every:N or a list of 0-based block numbers",
    ),
    (
        1,
        (*S2, "attention.backend=sdpa"),
        "attention.backend=sdpa: it runs dense layers only, and this model has sparse ones; use attention.backend=auto",
    ),
    (1, (*MOE, "moe.top_k=5"), "moe.top_k=5: a token cannot be sent to more than moe.experts=4; use fewer, or more experts"),
    (
        1,
        (*MOE, "moe.layers=[4]"),
        "moe.layers=[4]: block 4 is not there: the model has blocks 0 to 3; write all, every:N or a list of 0-based block numbers",
    ),
    (
        1,
        (*MOE, "moe.layers=some"),
        "moe.layers=some: is not a specification of layers; write all, every:N or a list of 0-based block numbers",
    ),
    (1, (*MOE, "moe.layers=[]"), "moe.layers=[]: names none of the 4 blocks; name one, or use moe=none"),
    (
        1, ("data.demo=false",),
        "data.paths=[]: there is no data; "
        "give data.paths=[prefix,...] (see `leantron data build`), or use data=demo",
    ),
    (1, ("data.weights=[1.0]",), "data.weights=[1.0]: there are 0 data.paths and 1 weights; give one weight a path, or null"),
    (1, ("data.validation=1.5",), "data.validation=1.5: is a share of the documents, at least 0 and under 1; use 0.01"),
    (1, ("data.validation=0",), "data.validation=0.0: validation needs held-out documents; use 0.01, or train.eval_steps=0"),
    (
        1,
        ("data.paths=[nowhere]",),
        "data.paths=nowhere: expected the .idx of an indexed data set at nowhere.idx, found no such file; build it again with "
        "`leantron data build`, or correct the prefix",
    ),
    (
        1,
        ("data.tokenizer=none.json",),
        "data.tokenizer=none.json: no such tokenizer or file; give `byte`, a path to a tokenizer.json, or `tiktoken:<encoding>`",
    ),
    # ---- layouts
    (3, ("parallel.tp=2",), "parallel.tp=2: must divide the 3 processes; use parallel.processes=2 or a multiple, or another parallel.tp"),
    (
        6,
        ("parallel.tp=2", "parallel.pp=6"),
        "parallel.tp=2: tp x pp = 12 must divide the 6 processes; use parallel.processes=12 or a multiple, or another parallel.tp",
    ),
    (3, ("parallel.tp=3",), "parallel.tp=3: must divide model.heads=4; choose another number of heads or of ranks"),
    (
        3,
        ("parallel.tp=3", "model.heads=6", "model.width=192", "model.kv_heads=2"),
        "parallel.tp=3: must divide model.kv_heads=2 or be a multiple of it; choose another model.kv_heads",
    ),
    (2, ("parallel.tp=2", "model.ffn_width=301"), "parallel.tp=2: must divide model.ffn_width=301; set model.ffn_width to a multiple of 2"),
    (
        2,
        ("parallel.tp=2", "parallel.sp=true", "train.seq_len=511"),
        "parallel.sp=true: train.seq_len=511 must be a multiple of parallel.tp=2; choose another sequence length",
    ),
    (
        1, ("parallel.sp=true",),
        "parallel.sp=true: sequence parallelism splits over tensor-parallel ranks, and parallel.tp=1; "
        "use parallel.sp=false",
    ),
    (2, ("parallel.cp=2",), "parallel.cp=2: attention over context-parallel ranks is not there yet; use parallel.cp=1"),
    (2, ("parallel.pp=2", "model.layers=5"), "model.layers=5: must be a multiple of parallel.pp=2; use 6 layers"),
    (
        2,
        ("parallel.pp=2", "parallel.vpp=2", "model.layers=6"),
        "model.layers=6: must be a multiple of parallel.pp=2 x parallel.vpp=2; use 8 layers",
    ),
    (1, ("parallel.vpp=2",), "parallel.vpp=2: interleaving needs pipeline stages, and parallel.pp=1; use parallel.vpp=1 or parallel.pp=2"),
    (
        2,
        ("parallel.pp=2", "parallel.vpp=2", "train.global_batch=7"),
        "train.global_batch=7: interleaving passes micro-batches in groups of parallel.pp=2, and a step has 7 of them; use a multiple of 2",
    ),
    (2, ("parallel.ep=2",), "parallel.ep=2: expert parallelism needs experts, and moe.experts=0; use parallel.ep=1 or moe=mixtral"),
    (
        2, (*SITES, "parallel.ep=2", "moe.experts=6"),
        "parallel.ep=2: must divide the experts that a site holds, and in block 0 a site holds 3 of 6; "
        "choose a divisor, or another federation.replication",
    ),
    (
        1, (*SITES, "moe.gate=kept", "moe.top_k=1"),
        "moe.gate=kept: makes the gate of a token's only expert 1, and moe.top_k=1; use moe.gate=full",
    ),
    (
        1, ("federation.overlap_steps=2",),
        "federation.overlap_steps=2: has no effect in a run of one site; leave it out, or set federation.sites=2 or more",
    ),
    (
        1, ("federation.sites=2", "federation.sync_every=101"),
        "federation.sync_every=101: the run ends after train.steps=100, before the sites meet for the first time; "
        "use 100 or fewer, or a larger train.steps",
    ),
    (
        1, (*SITES, *ROTATING, "federation.overlap_steps=2"),
        "federation.overlap_steps=2: federation.policy=rotating needs outer steps of all parameters that all sites apply at once; "
        "use 0, or another federation.policy",
    ),
    (
        1, (*SITES, *ROTATING, "federation.fragments=2"),
        "federation.fragments=2: federation.policy=rotating needs outer steps of all parameters that all sites apply at once; "
        "use 1, or another federation.policy",
    ),
    (
        1, ("federation.sites=2", "federation.probe=0"),
        "federation.probe=0: is about experts, and moe.experts=0; leave it out, or use moe=fomoe",
    ),
    (
        1, (*MOE, "federation.sites=2", "federation.router_rows=all"),
        "federation.router_rows=all: has no effect where every site holds every expert; "
        "leave it out, or set federation.replication below federation.sites",
    ),
    (
        1, ("federation.sites=2", "train.timeout=90"),
        "federation.deadline=60.0: the other ranks of a site wait for a meeting, too, and give up after train.timeout=90 s; "
        "use less than 60, or a longer train.timeout",
    ),
    (
        1, ("federation.sites=2", "train.hang_timeout=40", "federation.deadline=10.5"),
        "federation.deadline=10.5: the other ranks of a site wait for a meeting, too, and give up after train.hang_timeout=40 s; "
        "use less than 10, or a longer train.hang_timeout",
    ),
    (1, (*MOE, "moe.gate=kept"), "moe.gate=kept: has no effect with moe.mode=full, which drops nothing; use moe.gate=full"),
    (2, (*MOE, "parallel.ep=4"), "parallel.ep=4: must divide the 2 processes of a pipeline stage (tp 1 x dp 2); choose a divisor"),
    (
        2, (*MOE, "parallel.ep=2", "moe.experts=5"),
        "parallel.ep=2: must divide moe.experts=5; "
        "choose a divisor, or another number of experts",
    ),
    (
        2,
        (*MOE, "parallel.tp=2"),
        "parallel.sp=false: experts with parallel.tp=2 need sequence parallelism, or ranks would route the same tokens twice; "
        "use parallel.sp=true",
    ),
    (
        2,
        ("train.global_batch=7",),
        "train.global_batch=7: must be a multiple of train.micro_batch=1 x 2 data-parallel ranks; use 8",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("override", "message"), COMPOSITION, ids=[override for override, _ in COMPOSITION])
def test_composition_is_refused_in_one_line(override: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-key")
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert str(caught.value) == message


@pytest.mark.parametrize(("world", "overrides", "message"), RULES, ids=[" ".join(overrides) for _, overrides, _ in RULES])
def test_rule_is_refused_in_one_line(
    world: int, overrides: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check(compose(overrides), world)
    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


def test_every_remedy_for_a_number_works() -> None:
    """Remedies that name a value are right: following them passes the rule."""
    for world, overrides, remedy in (
        (2, ("train.global_batch=7",), "train.global_batch=8"),
        (2, ("parallel.pp=2", "model.layers=5"), "model.layers=6"),
        (2, ("parallel.pp=2", "parallel.vpp=2", "model.layers=6"), "model.layers=8"),
        (1, ("model.head_dim=31",), "model.head_dim=32"),
        (1, ("attention=s2",), "attention.stride=4"),
    ):
        with pytest.raises(ConfigError):
            check(compose(overrides), world)
        check(compose([*overrides, remedy]), world)


def test_expert_parallel_ranks_share_out_what_a_site_holds() -> None:
    """9 experts do not divide by 2, the 6 of each of three sites do."""
    sites = ("moe=mixtral", "moe.experts=9", "moe.mode=skip", "federation.sites=3", "federation.replication=2", "train.global_batch=48")
    check(compose([*sites, "parallel.ep=2"]), 2)
    with pytest.raises(ConfigError, match=r"must divide moe\.experts=9"):
        check(compose([*sites[:2], "parallel.ep=2"]), 2)


def test_damaged_and_foreign_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.data.build import build_dataset
    from train.data.tokenizer import load_tokenizer

    monkeypatch.chdir(tmp_path)
    texts = []
    for name in ("a.txt", "b.txt"):
        texts.append(tmp_path / name)
        texts[-1].write_text(f"some words of {name}\n" * 20)
    build_dataset(texts, "set", load_tokenizer("byte"), kind="text")
    config = compose(["data=custom", "data.paths=[set]"])
    assert check(config, 1).model.vocab_size == 257
    Path("set.bin").write_bytes(Path("set.bin").read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"^data\.paths=set: expected \d+ bytes .* at set\.bin, found \d+ bytes; .*truncated"):
        check(config, 1)
    Path("one.txt").write_text("only one document")
    build_dataset([Path("one.txt")], "one", load_tokenizer("byte"), kind="text")
    with pytest.raises(ConfigError, match=r"^data\.paths=one: has 1 document, and training and validation need one each; "):
        check(replace(config, data=replace(config.data, paths=["one"])), 1)


IDLE = [
    *(((), each) for each in ("quorum=1", "policy=random", "weights=tokens", "router_rows=all", "fragments=2", "transfer_dtype=bf16")),
    *((("federation.sites=2",), each) for each in ("policy=random", "rotate_every=2", "router_rows=all")),
    ((*MOE, "federation.sites=2"), "policy=random"),
    ((*SITES, "federation.replication=2"), "policy=strided"),
]


@pytest.mark.parametrize(("run", "idle"), IDLE)
def test_a_key_of_the_outer_step_that_does_nothing_is_refused(run: tuple[str, ...], idle: str) -> None:
    check(compose(run), 1)
    with pytest.raises(ConfigError, match=rf"^federation\.{idle}: "):
        check(compose([*run, f"federation.{idle}"]), 1)


def test_a_sweep_over_numbers_of_sites_varies_nothing_else() -> None:
    common = ("federation.sync_every=8", "federation.outer_lr=1.0", "federation.outer_momentum=0.0", "federation.deadline=20")
    for sites in (1, 2, 4):
        check(compose([*common, *MOE, f"federation.sites={sites}"]), 1)
    check(compose(["federation.sites=2", "train.hang_timeout=0", "train.timeout=90.5", "federation.sync_every=100"]), 1)


@pytest.mark.parametrize("option", sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml")))
def test_every_shipped_experiment_keeps_the_rules_about_sites(option: str) -> None:
    check_federation(compose([f"experiment={option}"]))

"""`leantron doctor --bandwidth`: measures the rates that the plan of `offload` stands on, and puts them in place of the assumed ones."""

from train.offload.machine import cores
from train.offload.rates import ASSUMED, keep


def bandwidth() -> int:
    """Measure, show and keep the rates; returns 0. Imports torch, and takes a few seconds and 1 GiB."""
    from train.offload.bandwidth import measure

    threads = cores()
    measured = measure(threads)
    for name, words in (("h2d", "host to GPU, pinned"), ("d2h", "GPU to host, pinned"), ("both_ways", "each way while both are busy")):
        if name in measured:
            print(f"{words}: {measured[name] / 1e9:.1f} GB/s")
    if "h2d" not in measured:
        print("link to a GPU: not measured, there is no CUDA device")
    print(f"copy within the host's memory, {threads} threads: {measured['host_copy'] / 1e9:.1f} GB/s")
    adam, casts = measured["host_adam"] / 1e9, measured["host_adam_with_casts"] / 1e9
    print(f"fused AdamW on the host, {threads} threads: {adam:.2f} G parameters/s; {casts:.2f} with casts from and to bf16 on the host")
    replaced = {"host_adam": measured["host_adam"] / threads}
    if "h2d" in measured:
        replaced |= {"both_ways": measured["both_ways"], "one_way": min(measured["h2d"], measured["d2h"])}
    for name, unit in (("both_ways", "GB/s each way"), ("one_way", "GB/s one way"), ("host_adam", "G parameters/s a core")):
        assumed = f"{getattr(ASSUMED, name) / 1e9:.3g} {unit} of {ASSUMED.source}"
        if name in replaced:
            print(f"plan: {replaced[name] / 1e9:.3g} {unit} now, instead of {assumed}")
        else:
            print(f"plan: still {assumed}")
    print(f"kept in {keep(replaced)}; delete it to plan with the assumed rates again")
    return 0

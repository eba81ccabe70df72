"""Peak arithmetic of known accelerators: the denominator of MFU. A device that is not in the table has none, and gets no MFU."""

import re

_BF16_DENSE: tuple[tuple[str, float], ...] = (
    # The first pattern found in the device's name counts, so the special forms stand before the general ones. Figures are the
    # vendors' data sheets for one device, bf16 (or fp16) matrix units without sparsity, in FLOP/s.
    (r"\bGB200\b", 2.5e15),
    (r"\bB200\b", 2.25e15),
    (r"\bB100\b", 1.75e15),
    (r"\bH200 NVL\b", 835.5e12),
    (r"\bH200\b", 989.5e12),
    (r"\bGH200\b", 989.5e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835.5e12),
    (r"\bH100\b.*\bHBM3\b", 989.5e12),
    (r"\bH100 SXM", 989.5e12),
    (r"\bH800\b", 989.5e12),
    (r"\bA100\b", 312e12),
    (r"\bA800\b", 312e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA30\b", 165e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bL4\b", 121e12),
    (r"\bMI300X\b", 1307.4e12),
    (r"\bMI325X\b", 1307.4e12),
    (r"\bMI250X\b", 191.5e12),  # torch shows each of the two dies as a device
)


def device_peak_flops(name: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device by the name that `torch.cuda.get_device_name` gives; None when it is not known.

    `dtype` is `bf16` or `fp16`; anything else is None: whether fp32 multiplies run on the matrix units is a switch, not a property
    of the device. A MIG slice is None: its name is the whole device's.
    """
    if dtype not in ("bf16", "fp16") or re.search(r"\bMIG\b", name):
        return None
    for pattern, peak in _BF16_DENSE:
        if re.search(pattern, name):
            return peak
    return None
